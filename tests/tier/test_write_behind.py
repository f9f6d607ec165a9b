"""StoredPrefixes: what is written and when, what is brought back, and what becomes of nodes that
go meanwhile.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from prefix.computed import answer, family
from store.disks import GatedDisk
from store.stores import record_files
from tier.lives import BLOCK, FILE, ONE, SPEC, THREE, TWO, WINDOWED, Life, compute, start, wanted

from mlx_blockpool.config import KVBits
from mlx_blockpool.errors import PoolExhaustedError
from mlx_blockpool.prefix.salts import SHARED, salt_of
from mlx_blockpool.spec import FullLayer, ModelCacheSpec
from mlx_blockpool.store.record import Key, header_size
from mlx_blockpool.tier import write_behind

# -- written ---------------------------------------------------------------------------------------


def test_full_blocks_are_written_behind_and_tails_when_nothing_is_asked(tmp_path: Path) -> None:
    life = start(tmp_path)
    answer(life.prefix, ONE)
    assert record_files(tmp_path) == []
    life.write()
    assert life.on_disk(ONE) == [True] * 5 + [False]
    life.stored.write_tails()
    assert life.store.flush()
    assert len(record_files(tmp_path)) == 6


def test_no_more_is_copied_between_two_steps_than_allowed(tmp_path: Path) -> None:
    life = start(tmp_path, step_bytes=2 * 8192)
    answer(life.prefix, ONE)
    life.stored.write_behind()
    assert life.on_disk(ONE) == [True, True, False, False, False, False]


def test_a_long_prefix_is_written_without_a_walk_over_its_beginning_for_each_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each block adds a key to those of the path, and the records of the path count as used once
    they are all written.
    """
    made: list[Key] = []
    touched: list[int] = []
    monkeypatch.setattr(write_behind, "Key", lambda *args: made.append(Key(*args)) or made[-1])
    life = start(tmp_path, step_bytes=1)
    monkeypatch.setattr(life.store, "touch", lambda keys: touched.append(len(list(keys))))
    prompt, blocks = list(range(40 * 256)), 40
    answer(life.prefix, prompt)
    for _ in range(blocks + 1):
        life.stored.write_behind()
    assert life.on_disk(prompt) == [True] * blocks
    assert len(made) <= 3 * blocks
    assert touched == [1, blocks]


def test_the_beginning_of_a_path_outlives_its_end_where_several_are_written_by_turns(
    tmp_path: Path,
) -> None:
    """The store has room for ten blocks, and fifteen are written."""
    life = start(tmp_path, step_bytes=1, store_bytes=10 * FILE)
    prompts = [list(range(n, n + 5 * 256)) for n in (0, 100_000, 200_000)]
    for end in range(256, 1281, 256):
        for prompt in prompts:
            answer(life.prefix, prompt[:end])
            life.write()
    assert life.store.flush()
    found = [life.on_disk(prompt) for prompt in prompts]
    assert 8 <= sum(map(sum, found)) <= 10
    for on_disk in found:
        assert on_disk == sorted(on_disk, reverse=True), "the beginning is on disk where its end is"


def test_a_tail_that_went_on_leaves_no_file_behind(tmp_path: Path) -> None:
    life = start(tmp_path)
    answer(life.prefix, ONE)
    life.stored.write_tails()
    answer(life.prefix, [*ONE, *[9] * 300])
    life.write()
    life.stored.write_tails()
    assert life.store.flush()
    assert len(record_files(tmp_path)) == 7
    assert start(tmp_path).acquired([*ONE, *[9] * 300, 1]) == len(ONE) + 300


def test_a_shutdown_writes_everything_through_the_smallest_queue(tmp_path: Path) -> None:
    life = start(tmp_path, queue_bytes=1, flush_seconds=60.0)
    prompts = [list(family(n, 100 + n * 200)) for n in range(1, 6)]
    answer(life.prefix, prompts[0])
    life.stored.write_tails()
    # The old tail goes while new ones are written.
    prompts[0] = [*prompts[0], 9, 9]
    for prompt in prompts:
        answer(life.prefix, prompt)
    assert life.prefix.close()
    again = start(tmp_path)
    assert [again.acquired([*prompt, 1]) for prompt in prompts] == [
        len(prompt) for prompt in prompts
    ]


def test_a_shutdown_waits_for_a_queue_that_is_full(tmp_path: Path, gated: GatedDisk) -> None:
    life = start(tmp_path, gated, queue_bytes=1, flush_seconds=60.0)
    gated.writes.clear()
    answer(life.prefix, ONE)
    life.stored.write_behind()
    threading.Timer(0.3, gated.writes.set).start()
    assert life.prefix.close()
    assert start(tmp_path).acquired([*ONE, 1]) == len(ONE)


def test_a_shutdown_that_runs_out_of_time_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    life, clock = start(tmp_path, queue_bytes=1), [0.0]
    for n in range(1, 4):
        answer(life.prefix, list(family(n, 2 * BLOCK)))
    flush = life.store.flush

    def flush_slowly(seconds: float) -> bool:
        clock[0] += seconds + 1
        return flush()

    monkeypatch.setattr(life.store, "flush", flush_slowly)
    monkeypatch.setattr(write_behind, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    assert not life.prefix.close()
    assert 0 < len(record_files(tmp_path)) < 6


def test_one_that_is_larger_than_the_budget_does_not_stop_the_others(tmp_path: Path) -> None:
    life = start(tmp_path, store_bytes=3 * FILE)
    answer(life.prefix, ONE)
    answer(life.prefix, small := list(family(7, BLOCK)))
    life.write()
    assert life.on_disk(small) == [True]
    assert life.on_disk(ONE)[:3] == [True, True, False]
    assert life.store.counts["over budget"] > 0
    assert life.stored.report()["pending"] == 0


# -- whose blocks have gone ------------------------------------------------------------------------


def test_blocks_of_a_prefix_that_was_forgotten_are_not_written_under_its_name(
    tmp_path: Path,
) -> None:
    """They are somebody else's by then."""
    life = start(tmp_path, pool=8 * 8192)
    answer(life.prefix, ONE)
    life.stored.write_behind(1)
    assert life.on_disk(ONE)[:2] == [True, False]
    life.prefix.clear()
    answer(life.prefix, TWO)
    life.write()
    life.stored.write_tails()
    assert life.store.flush()
    assert len(record_files(tmp_path)) == 6

    answer(life.prefix, ONE[:BLOCK])
    assert life.prefix.close()
    again = start(tmp_path)
    assert again.acquired([*ONE, 1]) == BLOCK
    assert again.acquired([*TWO, 1]) == len(TWO)


def brought_back(folder: Path, gated: GatedDisk, meanwhile: Callable[[Life], None]) -> Life:
    """A life in which ONE was on its way from disk when something happened."""
    first = start(folder)
    answer(first.prefix, ONE)
    assert first.prefix.close()
    life = start(folder, gated)
    gated.reads.clear()
    restore = life.stored.restores.begin(wanted(life, ONE))
    meanwhile(life)
    gated.reads.set()
    while not restore.advance(wait=1.0):
        pass
    restore.release()
    return life


def test_what_was_forgotten_is_not_brought_back_into_the_trie(
    tmp_path: Path, gated: GatedDisk
) -> None:
    life = brought_back(tmp_path, gated, lambda life: life.prefix.clear())
    life.prefix.check()
    assert life.stored.restores.num_restored == 0
    assert [(c.held, c.evictable) for c in life.arena.pool.settle()] == [(0, 0)]
    assert life.stored.restores.arriving == set()


def test_what_was_computed_meanwhile_is_not_overwritten(tmp_path: Path, gated: GatedDisk) -> None:
    life = brought_back(tmp_path, gated, lambda life: compute(life, ONE[: 2 * BLOCK]))
    assert life.stored.restores.num_restored == len(ONE) - 2 * BLOCK
    assert life.acquired([*ONE, 1]) == len(ONE)


# -- brought back ----------------------------------------------------------------------------------


def test_what_is_still_in_the_queue_comes_back_from_there(tmp_path: Path, gated: GatedDisk) -> None:
    life = start(tmp_path, gated)
    gated.writes.clear()
    answer(life.prefix, ONE)
    life.stored.write_tails()
    life.prefix.trim_to(0)
    assert life.prefix.nbytes == 0
    assert life.acquired([*ONE, 1]) == len(ONE)
    assert life.stored.restores.num_unread == 0
    gated.writes.set()
    assert life.store.flush()
    assert len(record_files(tmp_path)) == 6


@pytest.mark.parametrize("closes", [True, False])
def test_all_of_a_prefix_comes_back_after_a_restart(tmp_path: Path, closes: bool) -> None:
    life = start(tmp_path)
    answer(life.prefix, ONE)
    life.write()
    assert not closes or life.prefix.close()
    again = start(tmp_path)
    assert again.prefix.look(ONE).matched == (len(ONE) if closes else 5 * BLOCK)
    assert again.acquired([*ONE, 1]) == (len(ONE) if closes else 5 * BLOCK)
    assert again.acquired([*ONE[:700], 99]) == 700
    assert again.stored.restores.num_restored == (len(ONE) if closes else 5 * BLOCK)


def test_what_is_evicted_in_mid_run_comes_back(tmp_path: Path) -> None:
    life = start(tmp_path, pool=8 * 8192)
    for prompt in (ONE, TWO, THREE):
        answer(life.prefix, prompt)
        life.stored.write_tails()
    for prompt in (ONE, TWO, THREE, ONE):
        assert life.acquired([*prompt, 1]) == len(prompt)
    assert life.stored.restores.num_restored >= 3 * len(ONE)
    life.write()
    assert life.store.counts["written"] == 18


def test_no_room_is_a_shorter_hit_and_no_error(tmp_path: Path) -> None:
    first = start(tmp_path)
    answer(first.prefix, ONE)
    assert first.prefix.close()
    life = start(tmp_path, pool=8 * 8192)
    held = life.prefix.acquire(TWO[:BLOCK], 3 * BLOCK)
    with pytest.raises(PoolExhaustedError):
        life.stored.restores.begin(wanted(life, ONE))
    assert life.stored.restores.arriving == set()
    short = life.prefix.acquire(ONE[: 2 * BLOCK], 20)
    assert short.lookup.hit == 2 * BLOCK - 1
    life.prefix.discard(short.caches)
    life.prefix.discard(held.caches)
    assert life.acquired([*ONE, 1]) == len(ONE)


def test_a_longer_tail_makes_a_shorter_file_superfluous(tmp_path: Path) -> None:
    for prompt in (ONE[:300], ONE[:400]):
        life = start(tmp_path / str(len(prompt)))
        answer(life.prefix, prompt)
        assert life.prefix.close()
    for path in record_files(tmp_path / "300"):
        target = tmp_path / "400" / path.relative_to(tmp_path / "300")
        target.parent.mkdir(exist_ok=True)
        os.replace(path, target)
    assert len(record_files(tmp_path / "400")) == 3
    life = start(tmp_path / "400")
    assert life.store.flush()
    assert len(record_files(tmp_path / "400")) == 2
    assert life.acquired([*ONE[:400], 1]) == 400


def test_32_blocks_are_32_records_and_come_back_bit_by_bit(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, 50_000, 32 * BLOCK).tolist()
    bits = rng.integers(0, 1 << 32, (2, 2, 1, 1, len(tokens), 2), np.uint32).view(np.float32)
    life = start(tmp_path)
    caches = life.prefix.acquire(tokens, 20).caches
    for cache, (keys, values) in zip(caches, bits, strict=True):
        cache.update_and_fetch(mx.array(keys), mx.array(values))
    life.prefix.release(tokens, caches)
    assert life.prefix.close()
    assert len(record_files(tmp_path)) == 32
    again = start(tmp_path)
    found = again.prefix.acquire([*tokens, 1], 20)
    assert found.lookup.hit == len(tokens) == 8192
    for cache, expected in zip(found.caches, bits, strict=True):
        for array, put_in in zip(cache.keys_and_values(), expected, strict=True):
            assert np.array(array).tobytes() == put_in.tobytes()
    assert again.store.counts["read"] == 32
    assert again.stored.restores.num_restored == 8192


@pytest.mark.parametrize("part", ["packed", "scales", "biases"])
def test_a_flipped_bit_of_a_quantised_record_is_a_miss(tmp_path: Path, part: str) -> None:
    spec = ModelCacheSpec("m", (FullLayer(1, 64, 64),), "float32").with_bits(KVBits(8, 4, 32))
    life = start(tmp_path, spec=spec, pool=10_000_000)
    prompt = ONE[: 2 * BLOCK]
    answer(life.prefix, prompt)
    second = life.prefix.match(prompt).path[1]
    assert life.prefix.close()
    (file,) = (path for path in record_files(tmp_path) if path.stem == second.hash.hex())
    data = bytearray(file.read_bytes())
    header = header_size(data)
    entries = json.loads(data[8:header])
    found = [entry["data_offsets"] for name, entry in entries.items() if name.endswith(part)]
    assert len(found) == 2
    data[header + found[1][0] + 5] ^= 1
    file.write_bytes(data)
    again = start(tmp_path, spec=spec, pool=10_000_000)
    assert again.answer([*prompt, 1]) == BLOCK
    assert again.store.counts["quarantined"] == 1


def test_what_was_forgotten_before_the_end_is_gone_from_the_disk(tmp_path: Path) -> None:
    first = start(tmp_path)
    answer(first.prefix, ONE)
    assert first.prefix.close()
    life = start(tmp_path)
    answer(life.prefix, longer := [*ONE, *[9] * 300])
    assert life.prefix.close()
    assert len(record_files(tmp_path)) == 7
    life = start(tmp_path)
    assert life.acquired([*longer, 1]) == len(longer)
    life.prefix.clear()
    assert life.prefix.close()
    assert record_files(tmp_path) == []


# -- under salts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [SPEC, WINDOWED], ids=["full", "windowed"])
def test_what_is_under_a_salt_comes_back_under_it_alone(
    spec: ModelCacheSpec, tmp_path: Path
) -> None:
    life, salt = start(tmp_path, spec=spec), salt_of("two")
    answer(life.prefix, ONE)
    once = len(record_files(tmp_path))
    assert life.prefix.look(ONE, salt).cause == "new"
    answer(life.prefix, ONE, salt)
    life.prefix.check()
    assert life.prefix.close()
    assert len(record_files(tmp_path)) % 2 == once % 2 == 0
    again = start(tmp_path, spec=spec)
    again.prefix.check()
    paths = [
        again.prefix.index.trie.match(ONE, each).detached()
        for each in (SHARED, salt, salt_of("one"))
    ]
    assert [path.tokens for path in paths] == [len(ONE), len(ONE), 0]
    assert not set(paths[0].hashes) & set(paths[1].hashes)
    found = again.prefix.acquire([*ONE, 1], 1, salt=salt)
    assert (found.lookup.hit, again.stored.restores.num_restored) == (len(ONE), len(ONE))
    again.prefix.discard(found.caches)
    # Blocks under another salt are still on disk alone.
    assert not any(node.in_memory for node in again.prefix.index.trie.match(ONE).path)
    again.prefix.clear()
    assert list(again.prefix.index.trie) == []
