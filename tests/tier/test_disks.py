"""StoredPrefixes on disks that fail: nothing is made in vain, and nothing that is still there is
given up.
"""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prefix.computed import answer, family, text
from prefix.lives import SPECS, Keeper
from store.clock import Clock
from store.disks import BrokenDisk, GatedDisk
from store.stores import held, record_files
from tier.lives import BLOCK, ONE, TWO, WINDOWED, start, wanted

from mlx_blockpool.store.fs import Into
from mlx_blockpool.store.record import Record
from mlx_blockpool.tier import checkpoints as records_module
from mlx_blockpool.tier import write_behind as stored_module


def test_what_the_store_does_not_take_is_not_copied(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = start(tmp_path, BrokenDisk(create=OSError(errno.ENOSPC, "full")))
    life.store._limits.suspend(OSError(errno.ENOSPC, "full"))
    answer(life.prefix, ONE)

    def copy_out(*_: Any) -> None:
        raise AssertionError("copied in vain")

    monkeypatch.setattr(stored_module, "copy_out", copy_out)
    for _ in range(5):
        life.stored.write_behind()
    assert life.store.counts["disk failed"] == 5
    assert life.stored.report()["pending"] == 5


@pytest.mark.parametrize("why", ["disk failed", "queue full", "daily limit"])
def test_a_record_that_would_be_refused_is_not_made_at_each_step(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    made = []

    def record(*args: Any) -> Any:
        made.append(args[0])
        return Record(*args)

    monkeypatch.setattr(records_module, "Record", record)
    config: dict[str, Any] = {
        "queue full": {"queue_bytes": 1},
        "daily limit": {"daily_bytes": 1},
    }.get(why, {})
    life = start(tmp_path, spec=WINDOWED, **config)
    if why == "disk failed":
        life.store._limits.suspend(OSError(errno.EIO, "broken"))
    with held(life.store):
        answer(life.prefix, ONE)
        for _ in range(100):
            life.stored.write_behind(at_once=True)
    assert len(made) == {"disk failed": 0, "queue full": 2, "daily limit": 1}[why]
    assert life.store.counts[why] >= 99
    if why == "disk failed":
        clock.now += 31
        for _ in range(20):
            life.stored.write_behind(at_once=True)
            assert life.store.flush()
        assert set(made) == {"block", "window"}
        assert start(tmp_path, spec=WINDOWED).acquired([*ONE, 1]) == len(ONE)


def test_what_failed_is_written_once_the_disk_is_well(tmp_path: Path, clock: Clock) -> None:
    disk = BrokenDisk()
    life = start(tmp_path, disk)
    disk.broken["write"] = OSError(errno.ENOSPC, "full")
    answer(life.prefix, ONE)
    life.write()
    life.write()
    assert life.on_disk(ONE) == [False] * 6
    assert life.stored.report()["problem"] is not None
    assert life.acquired([*ONE, 1]) == len(ONE)
    disk.broken.clear()
    clock.now += 31
    life.write()
    life.write()
    assert life.on_disk(ONE) == [True] * 5 + [False]
    assert life.stored.report()["problem"] is None
    assert life.prefix.close()
    assert start(tmp_path).acquired([*ONE, 1]) == len(ONE)


def test_what_was_evicted_before_it_could_be_written_is_not_waited_for(tmp_path: Path) -> None:
    life = start(tmp_path)
    life.store._limits.suspend(OSError(errno.ENOSPC, "full"))
    for n in range(20):
        answer(life.prefix, list(family(n, 2 * BLOCK)))
        life.prefix.trim_to(0)
        life.stored.write_behind()
    assert life.stored.report()["pending"] == 0


# -- read ------------------------------------------------------------------------------------------


def reads_of(disk: BrokenDisk) -> int:
    """How often it was read, once nothing is read ahead any more."""
    before = -1
    while (reads := disk.calls.count("read")) != before:
        before = reads
        time.sleep(0.2)
    return reads


@pytest.mark.parametrize("spec", ["full", "windowed"])
@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE])
def test_what_cannot_be_read_once_is_a_miss_and_nothing_is_given_up(
    tmp_path: Path, clock: Clock, number: int, spec: str
) -> None:
    specs: dict[str, Any] = {} if spec == "full" else {"spec": WINDOWED}
    first = start(tmp_path, **specs)
    answer(first.prefix, ONE)
    assert first.prefix.close()
    files = len(list(tmp_path.rglob("*.safetensors")))
    disk = BrokenDisk()
    life = start(tmp_path, disk, **specs)
    disk.broken["read"] = OSError(number, os.strerror(number))
    assert life.prefix.acquire([*ONE, 1], 20).lookup.hit == 0
    assert life.stored.restores.num_unread == 1
    disk.broken.clear()
    reads = reads_of(disk)
    assert life.prefix.acquire([*ONE, 2], 20).lookup.hit == 0, "it is let alone for a while"
    assert reads_of(disk) == reads
    life.prefix.release_all()
    life.write()
    assert len(list(tmp_path.rglob("*.safetensors"))) == files
    clock.now += 31
    assert life.acquired([*ONE, 1]) == len(ONE)
    assert life.stored.restores.num_unread == 1
    life.prefix.check()


def test_what_lies_before_a_record_that_cannot_be_read_comes_back(
    tmp_path: Path, clock: Clock
) -> None:
    first = start(tmp_path)
    answer(first.prefix, ONE)
    assert first.prefix.close()

    class Sector(BrokenDisk):
        bad = ""

        def read_into(self, path: Path, into: Into, most: int) -> memoryview:
            if path.stem == self.bad:
                raise OSError(errno.EIO, "broken sector")
            return super().read_into(path, into, most)

    life = start(tmp_path, disk := Sector())
    disk.bad = life.hashes(ONE)[2].hex()
    assert [life.acquired([*ONE, 1]) for _ in range(2)] == [2 * BLOCK, 2 * BLOCK]
    assert life.stored.restores.num_unread == 1
    answer(life.prefix, ONE)
    assert life.acquired([*ONE, 1]) == len(ONE), "it was computed again"
    assert life.prefix.close()
    assert len(record_files(tmp_path)) == 6
    assert start(tmp_path).acquired([*ONE, 1]) == len(ONE)


def test_what_is_damaged_or_gone_is_given_up_with_all_behind_it(tmp_path: Path) -> None:
    first = start(tmp_path)
    answer(first.prefix, ONE)
    assert first.prefix.close()
    life = start(tmp_path)
    for path in record_files(tmp_path):
        if path.stem == life.hashes(ONE)[2].hex():
            path.unlink()
    assert life.acquired([*ONE, 1]) == 2 * BLOCK
    life.write()
    assert len(record_files(tmp_path)) == 2


# -- away at the start -----------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["full", "windowed"])
def test_a_disk_that_was_away_at_the_start_is_known_once_it_is_back(
    tmp_path: Path, clock: Clock, spec: str
) -> None:
    specs: dict[str, Any] = {} if spec == "full" else {"spec": WINDOWED}
    first = start(tmp_path, **specs)
    for prompt in (ONE, TWO):
        answer(first.prefix, prompt)
    assert first.prefix.close()
    files = len(list(tmp_path.rglob("*.safetensors")))
    disk = BrokenDisk(scan=OSError(errno.EIO, "asleep"))
    life = start(tmp_path, disk, **specs)
    # Computed meanwhile, and in memory.
    answer(life.prefix, TWO)
    life.write()
    assert life.acquired([*ONE, 1]) == 0
    disk.broken.clear()
    clock.now += 31
    for _ in range(3):
        life.write()
    assert life.acquired([*ONE, 1]) == len(ONE)
    assert life.acquired([*TWO, 1]) == len(TWO)
    assert all(life.on_disk(TWO)[:5])
    life.prefix.check()
    assert life.prefix.close()
    assert len(list(tmp_path.rglob("*.safetensors"))) == files
    assert start(tmp_path, **specs).acquired([*TWO, 1]) == len(TWO)


def test_a_restore_that_has_ended_and_waits_does_not_make_the_disk_hang(tmp_path: Path) -> None:
    """Its request may wait for a place for longer than a disk may take to answer."""
    life = start(tmp_path)
    for prompt in (ONE, TWO):
        answer(life.prefix, prompt)
    life.prefix.close()
    disk = GatedDisk()
    again = start(tmp_path, disk)
    ended = again.stored.restores.begin(wanted(again, ONE))
    while not ended.advance(wait=1.0, seconds=1.0):
        pass
    now = again.stored.restores.clock() + again.store.config.answer_seconds + 1
    again.stored.restores.clock = lambda: now
    assert not again.stored.restores.is_stuck
    disk.reads.clear()
    begun = again.stored.restores.begin(wanted(again, TWO))
    assert not begun.advance()
    disk.reads.set()
    while not begun.advance(wait=1.0, seconds=1.0):
        pass
    assert (again.stored.restores.num_restored, again.stored.restores.num_unread) == (
        2 * len(ONE),
        0,
    )
    ended.release()
    begun.release()


def test_a_slow_disk_has_the_time_of_a_shutdown_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each wait gets what the ones before it have left: what comes after it, such as the notes
    of agents, has its time too.
    """
    keeper = Keeper(SPECS["full"], 40, tmp_path)
    keeper.ask(text(1, 300))
    assert isinstance(keeper.prefix.stored, stored_module.StoredPrefixes)
    store, clock, waits = keeper.prefix.stored.store, [0.0], []

    def wait(seconds: float) -> bool:
        waits.append(seconds)
        clock[0] += min(seconds, 2.0)
        return False

    monkeypatch.setattr(stored_module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(store._writer, "flush", wait)
    keeper.prefix.close()
    assert (waits[0], clock[0]) == (store.config.flush_seconds, store.config.flush_seconds)
