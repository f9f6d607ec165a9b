"""Prefixes come back from disk: after a restart, beside running replies, in pools that are too
small, and from damaged files.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from engine.engines import (
    Told,
    assert_nothing_held,
    assert_stock,
    bytes_of,
    drive,
    serve,
    stock_reply,
    words,
)
from engine.stored_engines import Machine, killed, read_at_once, start, write_all
from store.clock import Clock
from store.damages import DAMAGES
from store.disks import BrokenDisk, GatedDisk, WatchedDisk
from store.stores import quarantined, record_files, temporaries
from thorough import only

from mlx_blockpool.config import EngineConfig
from mlx_blockpool.engine.request import Request, RestoreBegun, RestoreEnded, Started, Token

BLOCK = 256
SYSTEM = words(1, 700)
LONG = words(5, 3 * BLOCK + 40)


def question(agent: int, turn: int) -> tuple[int, ...]:
    return words(100 + 10 * agent + turn, 60 + 50 * agent)


def talk(machine: Machine, agents: int, turns: int, name: str = "llama") -> list[tuple[int, ...]]:
    """Conversations of several agents at once.

    Returns what each has seen and said, its last token included.
    """
    said: list[tuple[int, ...]] = [SYSTEM] * agents
    for turn in range(turns):
        prompts = [(*past, *question(agent, turn)) for agent, past in enumerate(said)]
        uids, told = serve(machine.engine, prompts, 8)
        said = []
        for uid, prompt in zip(uids, prompts, strict=True):
            assert told.failed == {}
            assert_stock(name, prompt, told.tokens[uid])
            said.append((*prompt, *told.tokens[uid]))
    return said


def fill(folder: Path, *prompts: tuple[int, ...], **config: Any) -> None:
    """Store these prompts, and end."""
    machine = start(folder, **config)
    for prompt in prompts:
        serve(machine.engine, [prompt], 1)
    assert machine.prefix.close()


def check(prompts: list[tuple[int, ...]], uids: list[int], told: Told, name: str = "llama") -> None:
    assert told.failed == {}
    for uid, prompt in zip(uids, prompts, strict=True):
        assert told.reasons[uid] == "length"
        assert_stock(name, prompt, told.tokens[uid])


# -- restart ---------------------------------------------------------------------------------------


@pytest.mark.sampled
@pytest.mark.parametrize("name", only(["llama", "llama K8V8"], "llama"))
@pytest.mark.parametrize("pool", only(["roomy", "small"], "small"))
def test_agents_go_on_where_they_were_after_a_shutdown(
    tmp_path: Path, pool: str, name: str
) -> None:
    said = talk(first := start(tmp_path, name=name), 3, 2, name)
    assert first.prefix.close()
    machine = start(tmp_path, *([] if pool == "roomy" else [bytes_of(name, 2 * 2048)]), name=name)
    prompts = [(*past, *question(agent, 9)) for agent, past in enumerate(said)]
    uids, told = serve(machine.engine, prompts, 8)
    check(prompts, uids, told, name)
    assert [told.started[uid].cached for uid in uids] == [len(past) for past in said]
    assert machine.stored.restores.num_unread == 0
    assert_nothing_held(machine.prefix)


@pytest.mark.sampled
@pytest.mark.parametrize("name", only(["llama", "llama K8V8"], "llama"))
@pytest.mark.parametrize("is_written", only([True, False], True))
def test_a_kill_costs_no_more_than_the_last_blocks(
    tmp_path: Path, is_written: bool, name: str
) -> None:
    first = start(tmp_path / "first", name=name)
    said = talk(first, 3, 2, name)
    if is_written:
        write_all(first)
    folder = killed(first, tmp_path / "second")
    first.store.close()
    machine = start(folder, name=name)
    hashes = {bytes.fromhex(path.stem) for path in record_files(folder)}
    finished = []
    for past in said:
        path = first.prefix.index.trie.match(past).path
        reached = next((i for i, node in enumerate(path) if node.hash not in hashes), len(path))
        finished.append(reached * BLOCK)
        assert reached == len(past) // BLOCK or not is_written
    prompts = [(*past, *question(agent, 9)) for agent, past in enumerate(said)]
    uids, told = serve(machine.engine, prompts, 8)
    check(prompts, uids, told, name)
    cached = [told.started[uid].cached for uid in uids]
    assert all(c >= f for c, f in zip(cached, finished, strict=True))
    assert sum(cached) >= 0.98 * sum(finished) > 0
    assert_nothing_held(machine.prefix)


def test_every_moment_of_a_run_can_be_the_last(tmp_path: Path) -> None:
    """The folder is what a kill leaves after each step; a new start finds whole records, and
    what it says is right.
    """
    machine = start(tmp_path / "run", step_bytes=1)
    machine.engine.insert(Request(prompt := words(7, 1100), 8))
    images = []

    def after(_: Told) -> None:
        images.append(killed(machine, tmp_path / f"{len(images)}"))

    drive(machine.engine, after=after)
    machine.store.close()
    found = []
    for folder in images[:: max(1, len(images) // 6)]:
        again = start(folder)
        records = len(record_files(folder))
        uids, told = serve(again.engine, [prompt], 8)
        check([prompt], uids, told)
        assert told.started[uids[0]].cached == records * BLOCK
        assert quarantined(folder) == []
        found.append(records)
        again.store.close()
    assert found == sorted(found)


def test_a_temporary_file_may_vanish_while_a_folder_is_copied(tmp_path: Path) -> None:
    machine = start(tmp_path / "first")
    root = machine.store.root
    # Like a file that is listed and then not there.
    (root / ".writing-1-2").symlink_to(root / "vanished")
    killed(machine, tmp_path / "second")
    (root / "record").symlink_to(root / "vanished")
    with pytest.raises(shutil.Error, match="record"):
        killed(machine, tmp_path / "third")
    machine.store.close()


def test_a_second_run_writes_nothing_twice(tmp_path: Path) -> None:
    said = talk(first := start(tmp_path), 3, 2)
    assert first.prefix.close()
    before = {path: path.stat().st_ino for path in record_files(tmp_path)}
    machine = start(tmp_path)
    for past in said:
        serve(machine.engine, [past], 1)
    assert machine.prefix.close()
    after = {path: path.stat().st_ino for path in record_files(tmp_path)}
    assert {
        path: node for path, node in after.items() if path in before and before[path] != node
    } == {}


def test_a_conversation_is_written_little_more_than_once(tmp_path: Path) -> None:
    """Ten turns and a shutdown: the blocks, their headers, and one tail."""
    disk = WatchedDisk(tmp_path)
    machine = start(tmp_path, disk=disk)
    said: tuple[int, ...] = SYSTEM
    for turn in range(10):
        prompt = (*said, *question(0, turn))
        uids, told = serve(machine.engine, [prompt], 40)
        machine.stored.write_behind()
        said = (*prompt, *told.tokens[uids[0]])
    assert machine.prefix.close()
    kv_bytes = len(said) * bytes_of("llama", BLOCK) // BLOCK
    assert 0.99 * kv_bytes < disk.written <= 1.1 * kv_bytes


@pytest.mark.sampled
@pytest.mark.parametrize("number", only([errno.ENOSPC, errno.EROFS, errno.EIO], errno.ENOSPC))
@pytest.mark.parametrize("call", only(["create", "write", "sync", "rename"], "write", "sync"))
def test_requests_go_on_without_a_disk_and_are_stored_again_with_one(
    tmp_path: Path, clock: Clock, call: str, number: int
) -> None:
    machine = start(tmp_path, disk=(disk := BrokenDisk()))
    talk(machine, 2, 1)
    write_all(machine)
    disk.broken[call] = OSError(number, os.strerror(number))
    said = talk(machine, 3, 2)
    write_all(machine)
    machine.stored.write_behind()
    assert os.strerror(number) in machine.store.report()["problem"]
    assert machine.store.counts["failed"] >= 1
    assert temporaries(tmp_path) == []
    disk.broken.clear()
    clock.now += 31
    write_all(machine)
    write_all(machine)
    assert machine.prefix.close()
    assert machine.store.problem is None
    again = start(tmp_path)
    uids, told = serve(again.engine, [(*past, 3) for past in said])
    assert [told.started[uid].cached for uid in uids] == [len(past) for past in said]
    check([(*past, 3) for past in said], uids, told)


def test_requests_go_on_where_the_folder_vanishes(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    machine = start(folder, bytes_of("llama", 5 * BLOCK))
    prompts = [words(70 + i, 3 * BLOCK) for i in range(3)]
    for prompt in prompts:
        serve(machine.engine, [prompt], 1)
        write_all(machine)
    shutil.rmtree(folder)
    for prompt in prompts:
        uids, told = serve(machine.engine, [(*prompt, 3)], 4)
        check([(*prompt, 3)], uids, told)
        write_all(machine)
    assert machine.stored.restores.num_unread > 0
    assert machine.prefix.close()
    uids, told = serve(start(folder).engine, [(*prompts[-1], 3)], 4)
    assert told.started[uids[0]].cached == len(prompts[-1])


# -- beside running replies ------------------------------------------------------------------------


def decoding(machine: Machine, max_tokens: int = 60) -> tuple[int, tuple[int, ...], Told]:
    """A reply that is under way."""
    prompt = words(50, 30)
    uid = machine.engine.insert(Request(prompt, max_tokens))
    told = drive(machine.engine, after=lambda told: uid in told.tokens)
    return uid, prompt, told


def test_replies_go_on_between_the_copies_of_a_long_prefix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path, LONG)
    monkeypatch.setattr(EngineConfig, "restore_seconds", 0)
    machine = start(tmp_path)
    read_at_once(machine.store)
    uid, prompt, told = decoding(machine)
    late = machine.engine.insert(Request((*LONG, 3), 4))
    restored, tokens = 0, len(told.tokens[uid])
    for steps in range(1, 100):
        told.take(machine.engine.next())
        assert machine.stored.restores.num_restored - restored <= BLOCK, (
            "more than one record between two steps"
        )
        restored = machine.stored.restores.num_restored
        if late in told.started:
            break
        assert len(told.tokens[uid]) - tokens == steps, (
            "a step without a token for the one that decodes"
        )
    assert steps >= machine.store.counts["read"] == 4
    drive(machine.engine, told)
    assert told.started[late].cached == len(LONG)
    check([prompt, (*LONG, 3)], [uid, late], told)
    assert_nothing_held(machine.prefix)


def test_replies_go_on_while_the_disk_does_not_answer(tmp_path: Path) -> None:
    fill(tmp_path, LONG)
    machine = start(tmp_path, disk=(disk := GatedDisk()))
    uid, prompt, told = decoding(machine)
    disk.reads.clear()
    late = machine.engine.insert(Request((*LONG, 3), 4))
    before = len(told.tokens[uid])
    for _ in range(20):
        told.take(machine.engine.next())
    assert len(told.tokens[uid]) == before + 20
    assert late not in told.started
    disk.reads.set()
    drive(machine.engine, told)
    check([prompt, (*LONG, 3)], [uid, late], told)
    assert told.started[late].cached == len(LONG)


def test_requests_with_one_prefix_read_it_once(tmp_path: Path) -> None:
    fill(tmp_path, LONG)
    machine = start(tmp_path)
    prompts = [(*LONG, *words(60 + i, 20)) for i in range(4)]
    uids, told = serve(machine.engine, prompts)
    check(prompts, uids, told)
    assert machine.store.counts["read"] == 4
    assert (
        machine.store.counts["read_bytes"]
        == machine.stored.restores.num_restored * bytes_of("llama", BLOCK) // BLOCK
    )
    assert [told.started[uid].cached for uid in uids] == [len(LONG)] * 4
    assert_nothing_held(machine.prefix)


@pytest.mark.parametrize("how", ["cancel", "reset"])
def test_a_restore_can_be_given_up(tmp_path: Path, how: str) -> None:
    fill(tmp_path, LONG)
    machine = start(tmp_path, disk=(disk := GatedDisk()))
    uid, prompt, told = decoding(machine)
    disk.reads.clear()
    given_up = machine.engine.insert(Request((*LONG, 3), 4))
    waits_for_it = machine.engine.insert(Request((*LONG, 4), 4))
    for _ in range(5):
        told.take(machine.engine.next())
    if how == "cancel":
        machine.engine.cancel(given_up)
        going_on = [uid, waits_for_it]
    else:
        assert machine.engine.reset() == [uid]
        going_on = [given_up, waits_for_it]
    assert machine.stored.restores.arriving == set()
    machine.prefix.check()
    disk.reads.set()
    drive(machine.engine, told)
    prompts = {uid: prompt, given_up: (*LONG, 3), waits_for_it: (*LONG, 4)}
    check([prompts[uid] for uid in going_on], going_on, told)
    assert told.started[waits_for_it].cached == len(LONG)
    assert (given_up in told.started) == (how == "reset")
    assert_nothing_held(machine.prefix)


def test_close_while_restoring_leaves_nothing_held(tmp_path: Path) -> None:
    fill(tmp_path, LONG)
    machine = start(tmp_path, disk=(disk := GatedDisk()))
    decoding(machine)
    disk.reads.clear()
    machine.engine.insert(Request((*LONG, 3), 4))
    machine.engine.next()
    machine.engine.close()
    disk.reads.set()
    assert_nothing_held(machine.prefix)
    assert machine.prefix.close()


# -- too little room -------------------------------------------------------------------------------


def test_conversations_that_do_not_fit_together_come_back_in_turn(tmp_path: Path) -> None:
    said = [words(70 + i, 3 * BLOCK + 30 * i) for i in range(3)]
    fill(tmp_path, *said)
    machine = start(tmp_path, bytes_of("llama", 5 * BLOCK))
    for turn in range(2):
        for past in said:
            prompt = (*past, *words(80 + turn, 10))
            uids, told = serve(machine.engine, [prompt], 6)
            check([prompt], uids, told)
            assert told.started[uids[0]].cached == len(past)
            assert_nothing_held(machine.prefix)
    assert machine.stored.restores.num_unread == 0


def test_all_at_once_in_a_pool_for_one_and_a_half(tmp_path: Path) -> None:
    said = [words(70 + i, 3 * BLOCK + 30 * i) for i in range(5)]
    fill(tmp_path, *said)
    machine = start(tmp_path, bytes_of("llama", 6 * BLOCK))
    prompts = [(*past, *words(80, 10)) for past in said]
    uids, told = serve(machine.engine, prompts, 6)
    check(prompts, uids, told)
    assert_nothing_held(machine.prefix)


def test_a_restore_that_waits_gives_way_to_the_reply_that_runs(tmp_path: Path) -> None:
    """The one that decodes needs its next block while the pool is full of what another waits
    for.
    """
    fill(tmp_path, past := words(71, 5 * BLOCK))
    machine = start(tmp_path, bytes_of("llama", 7 * BLOCK), disk=(disk := GatedDisk()))
    # A start makes room for no more than a block of the reply.
    prompt = words(50, BLOCK - 10)
    uid = machine.engine.insert(Request(prompt, BLOCK + 40))
    told = drive(machine.engine, after=lambda told: uid in told.tokens)
    disk.reads.clear()
    late = machine.engine.insert(Request((*past, 3), 4))
    for _ in range(BLOCK + 40):
        told.take(machine.engine.next())
        if uid in told.reasons or uid in told.failed:
            break
    disk.reads.set()
    drive(machine.engine, told)
    check([prompt, (*past, 3)], [uid, late], told)
    assert_nothing_held(machine.prefix)


# -- damage ----------------------------------------------------------------------------------------


@pytest.mark.sampled
@pytest.mark.parametrize("how", sorted(DAMAGES))
@pytest.mark.parametrize("place", only([0, 2, 3], 0, 2))
def test_a_record_that_was_damaged_after_the_start_is_a_miss(
    tmp_path: Path, how: str, place: int
) -> None:
    fill(tmp_path, LONG)
    machine = start(tmp_path)
    path = machine.prefix.index.trie.match(LONG).path
    file = next(file for file in record_files(tmp_path) if file.stem == path[place].hash.hex())
    DAMAGES[how](file, random.Random(3))
    uids, told = serve(machine.engine, [(*LONG, 3)], 8)
    check([(*LONG, 3)], uids, told)
    assert told.started[uids[0]].cached <= place * BLOCK
    assert machine.stored.restores.num_unread == 1
    assert (
        machine.store.counts["quarantined"]
        == len(quarantined(tmp_path))
        == (1 if how != "delete" else 0) + _twin(how, machine)
    )
    assert machine.prefix.close()

    again = start(tmp_path)
    uids, told = serve(again.engine, [(*LONG, 3)], 8)
    check([(*LONG, 3)], uids, told)
    assert told.started[uids[0]].cached >= len(LONG) - BLOCK
    assert (again.stored.restores.num_unread, again.store.counts["quarantined"]) == (0, 0)


def _twin(how: str, machine: Machine) -> int:
    """The other of two swapped files may be read before the first is known to be bad."""
    return machine.store.counts["quarantined"] - 1 if how == "swap" else 0


def test_started_says_what_was_restored_and_tokens_follow(tmp_path: Path) -> None:
    fill(tmp_path, LONG)
    machine = start(tmp_path)
    machine.engine.insert(Request((*LONG, 3), 2))
    told = drive(machine.engine)
    begun, ended, started = told.order[:3]
    assert isinstance(begun, RestoreBegun)
    assert isinstance(ended, RestoreEnded)
    assert isinstance(started, Started)
    assert (begun.tokens, begun.n_bytes) == (ended.tokens, ended.n_bytes)
    assert begun.tokens == started.cached > 0
    assert begun.n_bytes == sum(file.stat().st_size for file in record_files(tmp_path))
    assert isinstance(told.order[-1], Token)
    assert stock_reply("llama", (*LONG, 3)).tokens(2) == tuple(told.tokens[1])
