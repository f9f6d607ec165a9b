"""StoredPrefixes: what is written and when, what is brought back, and what becomes of nodes that go meanwhile.

Keys are those of test_prefix_machine: each says which token of which prompt it is.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from prefix.test_prefix_machine import LAYER_STEP, answer, family, keys_of, numbers
from store.stores import BrokenDisk, QuickDisk, WatchedDisk, open_store, record_files

from mlx_blockpool.cache.slabs import Slabs
from mlx_blockpool.errors import PoolExhaustedError
from mlx_blockpool.prefix import stored as stored_module
from mlx_blockpool.prefix.cache import PrefixCache
from mlx_blockpool.prefix.stored import StoredPrefixes
from mlx_blockpool.spec import FullLayer, ModelCacheSpec
from mlx_blockpool.store import store as store_module
from mlx_blockpool.store.disk import Disk
from mlx_blockpool.store.store import PromptStore

# A block is 8192 bytes.
SPEC = ModelCacheSpec("m", (FullLayer(1, 2, 2), FullLayer(1, 2, 2)), "float32")
BLOCK = 256
# Bytes of a file, at most.
FILE = 10_500


class Life:
    """A prefix cache over a store, from a start to its end."""

    def __init__(self, folder: Path, disk: Disk | None = None, pool: int = 100 * 8192, **config: Any) -> None:
        self.slabs = Slabs(SPEC, pool)
        self.slabs.ragged = True
        self.store: PromptStore = open_store(folder, disk, **config)
        self.prefix = PrefixCache(self.slabs, store=self.store)

    @property
    def stored(self) -> StoredPrefixes:
        assert self.prefix.stored is not None
        return self.prefix.stored

    def write(self) -> None:
        self.stored.write_behind(1 << 40)
        assert self.store.flush()
        self.stored.write_behind(0)

    def hashes(self, tokens: Sequence[int]) -> list[bytes]:
        return [node.hash for node in self.prefix.known.trie.match(tokens).path]

    def on_disk(self, tokens: Sequence[int]) -> list[bool]:
        return [node.stored for node in self.prefix.known.trie.match(tokens).path]

    def fetched(self, tokens: Sequence[int]) -> int:
        """A hit whose every key is right."""
        found = self.prefix.fetch(tokens, 20)
        for layer, cache in enumerate(found.caches):
            if found.lookup.hit:
                keys = np.array(cache.keys_and_values()[0])[0, 0, :, 0]
                assert np.array_equal(keys, numbers(tuple(tokens))[: found.lookup.hit] + layer * LAYER_STEP)
        self.prefix.release(found.caches)
        self.prefix.check()
        assert [(c.held, c.reserved) for c in self.slabs.pool.settle()] == [(0, 0)]
        return found.lookup.hit


class GatedDisk(QuickDisk):
    """Files are begun, and read, when the gates are open."""

    def __init__(self) -> None:
        self.writes, self.reads = threading.Event(), threading.Event()
        self.writes.set()
        self.reads.set()

    def create(self, path: Path) -> int:
        assert self.writes.wait(20)
        return super().create(path)

    def read(self, path: Path, start: int = 0, size: int | None = None) -> bytes:
        assert self.reads.wait(20)
        return super().read(path, start, size)


@pytest.fixture
def gated() -> Iterator[GatedDisk]:
    disk = GatedDisk()
    yield disk
    disk.writes.set()
    disk.reads.set()


class Clock:
    now = 1_000_000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(store_module, "time", clock)
    return clock


ONE, TWO, THREE = (list(family(n, 5 * BLOCK + 30)) for n in (1, 2, 3))


# -- written -----------------------------------------------------------------------------------------------------------


def test_full_blocks_are_written_behind_and_tails_when_nothing_is_asked(tmp_path: Path) -> None:
    life = Life(tmp_path)
    answer(life.prefix, ONE)
    assert record_files(tmp_path) == []
    life.write()
    assert life.on_disk(ONE) == [True] * 5 + [False]
    life.stored.write_tails()
    assert life.store.flush()
    assert len(record_files(tmp_path)) == 6


def test_no_more_is_copied_between_two_steps_than_allowed(tmp_path: Path) -> None:
    life = Life(tmp_path, step_bytes=2 * 8192)
    answer(life.prefix, ONE)
    life.stored.write_behind()
    assert life.on_disk(ONE) == [True, True, False, False, False, False]


def test_a_tail_that_went_on_leaves_no_file_behind(tmp_path: Path) -> None:
    life = Life(tmp_path)
    answer(life.prefix, ONE)
    life.stored.write_tails()
    answer(life.prefix, [*ONE, *[9] * 300])
    life.write()
    life.stored.write_tails()
    assert life.store.flush()
    assert len(record_files(tmp_path)) == 7
    assert Life(tmp_path).fetched([*ONE, *[9] * 300, 1]) == len(ONE) + 300


def test_a_shutdown_writes_everything_through_the_smallest_queue(tmp_path: Path) -> None:
    life = Life(tmp_path, queue_bytes=1)
    prompts = [list(family(n, 100 + n * 200)) for n in range(1, 6)]
    answer(life.prefix, prompts[0])
    life.stored.write_tails()
    # The old tail goes while new ones are written.
    prompts[0] = [*prompts[0], 9, 9]
    for prompt in prompts:
        answer(life.prefix, prompt)
    assert life.prefix.close()
    again = Life(tmp_path)
    assert [again.fetched([*prompt, 1]) for prompt in prompts] == [len(prompt) for prompt in prompts]


def test_what_the_store_does_not_take_is_not_copied(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    life = Life(tmp_path, BrokenDisk(create=OSError(errno.ENOSPC, "full")))
    life.store._suspend(OSError(errno.ENOSPC, "full"))
    answer(life.prefix, ONE)

    def copy_out(*_: Any) -> None:
        raise AssertionError("copied in vain")

    monkeypatch.setattr(stored_module, "copy_out", copy_out)
    for _ in range(5):
        life.stored.write_behind()
    assert life.store.counts["disk failed"] == 5
    assert life.stored.report()["pending"] == 5


def test_what_failed_is_written_once_the_disk_is_well(tmp_path: Path, clock: Clock) -> None:
    disk = BrokenDisk()
    life = Life(tmp_path, disk)
    disk.broken["write"] = OSError(errno.ENOSPC, "full")
    answer(life.prefix, ONE)
    life.write()
    life.write()
    assert life.on_disk(ONE) == [False] * 6
    assert life.stored.report()["problem"] is not None
    assert life.fetched([*ONE, 1]) == len(ONE)
    disk.broken.clear()
    clock.now += 31
    life.write()
    life.write()
    assert life.on_disk(ONE) == [True] * 5 + [False]
    assert life.stored.report()["problem"] is None
    assert life.prefix.close()
    assert Life(tmp_path).fetched([*ONE, 1]) == len(ONE)


def test_one_that_is_larger_than_the_budget_does_not_stop_the_others(tmp_path: Path) -> None:
    life = Life(tmp_path, store_bytes=3 * FILE)
    answer(life.prefix, ONE)
    answer(life.prefix, small := list(family(7, BLOCK)))
    life.write()
    assert life.on_disk(small) == [True]
    assert life.on_disk(ONE)[:3] == [True, True, False]
    assert life.store.counts["over budget"] > 0
    assert life.stored.report()["pending"] == 0


def test_what_was_evicted_before_it_could_be_written_is_not_waited_for(tmp_path: Path) -> None:
    life = Life(tmp_path)
    life.store._suspend(OSError(errno.ENOSPC, "full"))
    for n in range(20):
        answer(life.prefix, list(family(n, 2 * BLOCK)))
        life.prefix.trim_to(0)
        life.stored.write_behind()
    assert life.stored.report()["pending"] == 0


# -- whose blocks have gone --------------------------------------------------------------------------------------------


def test_blocks_of_a_prefix_that_was_forgotten_are_not_written_under_its_name(tmp_path: Path) -> None:
    """They are somebody else's by then."""
    life = Life(tmp_path, pool=8 * 8192)
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
    again = Life(tmp_path)
    assert again.fetched([*ONE, 1]) == BLOCK
    assert again.fetched([*TWO, 1]) == len(TWO)


def test_what_was_forgotten_is_not_brought_back_into_the_trie(tmp_path: Path, gated: GatedDisk) -> None:
    first = Life(tmp_path)
    answer(first.prefix, ONE)
    assert first.prefix.close()
    life = Life(tmp_path, gated)
    gated.reads.clear()
    restore = life.stored.restore(life.prefix.known.trie.match(ONE).path)
    life.prefix.clear()
    gated.reads.set()
    while not restore.advance(wait=True):
        pass
    restore.release()
    life.prefix.check()
    assert life.stored.num_restored == 0
    assert [(c.held, c.evictable) for c in life.slabs.pool.settle()] == [(0, 0)]
    assert life.stored.arriving == set()


def test_what_was_computed_meanwhile_is_not_overwritten(tmp_path: Path, gated: GatedDisk) -> None:
    first = Life(tmp_path)
    answer(first.prefix, ONE)
    assert first.prefix.close()
    life = Life(tmp_path, gated)
    gated.reads.clear()
    restore = life.stored.restore(life.prefix.known.trie.match(ONE).path)
    compute(life, ONE[: 2 * BLOCK])
    gated.reads.set()
    while not restore.advance(wait=True):
        pass
    restore.release()
    assert life.stored.num_restored == len(ONE) - 2 * BLOCK
    assert life.fetched([*ONE, 1]) == len(ONE)


def compute(life: Life, tokens: list[int]) -> None:
    """From the first token on, as somebody does who could not wait."""
    caches = life.prefix._caches(life.prefix.known.trie.match([]), 0, None, len(tokens), len(tokens) + 20)
    for layer, cache in enumerate(caches):
        keys = keys_of(tokens, 0, layer)
        mx.eval(cache.update_and_fetch(keys, keys + 1000))
    life.prefix.finish(tokens, caches)


# -- brought back ------------------------------------------------------------------------------------------------------


def test_what_is_still_in_the_queue_comes_back_from_there(tmp_path: Path, gated: GatedDisk) -> None:
    life = Life(tmp_path, gated)
    gated.writes.clear()
    answer(life.prefix, ONE)
    life.stored.write_tails()
    life.prefix.trim_to(0)
    assert life.prefix.nbytes == 0
    assert life.fetched([*ONE, 1]) == len(ONE)
    assert life.stored.num_unread == 0
    gated.writes.set()
    assert life.store.flush()
    assert len(record_files(tmp_path)) == 6


@pytest.mark.parametrize("closes", [True, False])
def test_all_of_a_prefix_comes_back_after_a_restart(tmp_path: Path, closes: bool) -> None:
    life = Life(tmp_path)
    answer(life.prefix, ONE)
    life.write()
    assert not closes or life.prefix.close()
    again = Life(tmp_path)
    assert again.prefix.look(ONE).known == (len(ONE) if closes else 5 * BLOCK)
    assert again.fetched([*ONE, 1]) == (len(ONE) if closes else 5 * BLOCK)
    assert again.fetched([*ONE[:700], 99]) == 700
    assert again.stored.num_restored == (len(ONE) if closes else 5 * BLOCK)


def test_what_is_evicted_in_mid_run_comes_back(tmp_path: Path) -> None:
    life = Life(tmp_path, pool=8 * 8192)
    for prompt in (ONE, TWO, THREE):
        answer(life.prefix, prompt)
        life.stored.write_tails()
    for prompt in (ONE, TWO, THREE, ONE):
        assert life.fetched([*prompt, 1]) == len(prompt)
    assert life.stored.num_restored >= 3 * len(ONE)
    life.write()
    assert life.store.counts["written"] == 18


def test_no_room_is_a_shorter_hit_and_no_error(tmp_path: Path) -> None:
    first = Life(tmp_path)
    answer(first.prefix, ONE)
    assert first.prefix.close()
    life = Life(tmp_path, pool=8 * 8192)
    held = life.prefix.fetch(TWO[:BLOCK], 3 * BLOCK)
    with pytest.raises(PoolExhaustedError):
        life.stored.restore(life.prefix.known.trie.match(ONE).path)
    assert life.stored.arriving == set()
    short = life.prefix.fetch(ONE[: 2 * BLOCK], 20)
    assert short.lookup.hit == 2 * BLOCK - 1
    life.prefix.release(short.caches)
    life.prefix.release(held.caches)
    assert life.fetched([*ONE, 1]) == len(ONE)


def test_a_longer_tail_makes_a_shorter_file_superfluous(tmp_path: Path) -> None:
    for prompt in (ONE[:300], ONE[:400]):
        life = Life(tmp_path / str(len(prompt)))
        answer(life.prefix, prompt)
        assert life.prefix.close()
    for path in record_files(tmp_path / "300"):
        target = tmp_path / "400" / path.relative_to(tmp_path / "300")
        target.parent.mkdir(exist_ok=True)
        os.replace(path, target)
    assert len(record_files(tmp_path / "400")) == 3
    life = Life(tmp_path / "400")
    assert life.store.flush()
    assert len(record_files(tmp_path / "400")) == 2
    assert life.fetched([*ONE[:400], 1]) == 400


# -- budget ------------------------------------------------------------------------------------------------------------


def test_the_end_of_the_path_used_longest_ago_goes_first(tmp_path: Path) -> None:
    disk = WatchedDisk(tmp_path)
    life = Life(tmp_path, disk, store_bytes=11 * FILE)
    answer(life.prefix, ONE)
    life.write()
    answer(life.prefix, TWO)
    life.write()
    ends = [digest.hex() for digest in life.hashes(ONE)[:5]]
    answer(life.prefix, THREE[: 4 * BLOCK])
    life.write()
    assert disk.unlinked == ends[:1:-1]
    assert life.on_disk(ONE) == [True, True, False, False, False, False]
    assert disk.most <= 11 * FILE


@pytest.mark.parametrize("how", ["closed", "killed"])
def test_after_a_restart_too(tmp_path: Path, how: str) -> None:
    first = Life(tmp_path)
    for prompt in (ONE, TWO):
        answer(first.prefix, prompt)
        first.write()
    assert how == "killed" or first.prefix.close()
    ends = [digest.hex() for digest in first.hashes(ONE)[: 6 if how == "closed" else 5]]
    for age, name in enumerate([*ends, *(digest.hex() for digest in first.hashes(TWO))]):
        for path in tmp_path.rglob(f"{name}.safetensors"):
            # As they were written: a path's beginning first.
            os.utime(path, (1000 + age, 1000 + age))
    disk = WatchedDisk(tmp_path)
    life = Life(tmp_path, disk, store_bytes=sum(path.stat().st_size for path in record_files(tmp_path)) - 3 * 8192)
    life.store.flush()
    assert len(disk.unlinked) >= 3
    assert disk.unlinked == ends[: -len(disk.unlinked) - 1 : -1]
    for node in life.prefix.known.trie:
        assert node.parent is not None
        assert node.parent.parent is None or node.parent.stored
    assert life.fetched([*TWO, 1]) >= 5 * BLOCK


def test_what_is_being_read_is_spared(tmp_path: Path, gated: GatedDisk) -> None:
    first = Life(tmp_path)
    for prompt in (ONE, TWO):
        answer(first.prefix, prompt[: 3 * BLOCK])
        first.write()
    first.prefix.close()
    life = Life(tmp_path, gated, store_bytes=7 * FILE)
    gated.reads.clear()
    # ONE was used longest ago.
    restore = life.stored.restore(life.prefix.known.trie.match(ONE).path)
    answer_now(life, THREE[: 4 * BLOCK])
    life.stored.write_behind(1 << 40)
    assert all(digest in life.store for digest in life.hashes(ONE[: 3 * BLOCK]))
    gated.reads.set()
    while not restore.advance(wait=True):
        pass
    restore.release()
    assert life.stored.num_unread == 0
    assert life.fetched([*ONE[: 3 * BLOCK], 1]) == 3 * BLOCK


def answer_now(life: Life, tokens: list[int]) -> None:
    """A request that finds nothing and reads nothing."""
    assert life.prefix.look(tokens).known == 0
    answer(life.prefix, tokens)


def test_a_churn_of_ten_times_the_budget_stays_within_it(tmp_path: Path) -> None:
    budget = 8 * FILE
    disk = WatchedDisk(tmp_path)
    life = Life(tmp_path, disk, pool=12 * 8192, store_bytes=budget)
    for n in range(40):
        prompt = list(family(n % 13, 3 * BLOCK + 10 * n))
        life.fetched([*prompt, 1])
        answer(life.prefix, prompt)
        life.stored.write_tails()
        for node in life.prefix.known.trie:
            assert node.parent is not None
            assert not node.stored or node.parent.parent is None or node.parent.stored
    assert life.prefix.close()
    assert disk.written > 10 * budget
    assert budget // 2 < disk.most <= budget
    assert life.store.report()["bytes"] == sum(path.stat().st_size for path in record_files(tmp_path))
    assert life.stored.num_unread == 0


# -- two at once -------------------------------------------------------------------------------------------------------


def test_two_caches_in_one_folder_use_each_others_files_after_a_restart(tmp_path: Path) -> None:
    one, two = Life(tmp_path), Life(tmp_path)
    for life, own in ((one, ONE), (two, TWO)):
        for prompt in (own, THREE):
            answer(life.prefix, prompt)
            life.stored.write_tails()
    assert one.prefix.close()
    assert two.prefix.close()
    again = Life(tmp_path)
    assert [again.fetched([*prompt, 1]) for prompt in (ONE, TWO, THREE)] == [len(ONE), len(TWO), len(THREE)]
    assert again.stored.num_unread == 0


def test_one_that_drops_files_under_the_other_makes_it_miss(tmp_path: Path) -> None:
    one = Life(tmp_path)
    answer(one.prefix, ONE)
    one.stored.write_tails()
    assert one.store.flush()
    two = Life(tmp_path)
    two.prefix.clear()
    two.stored.write_behind()
    assert two.store.flush()
    assert record_files(tmp_path) == []
    one.prefix.trim_to(0)
    assert one.fetched([*ONE, 1]) == 0
    assert one.stored.num_unread == 1
    answer(one.prefix, ONE)
    assert one.prefix.close()
    assert one.store.problem is None
    assert Life(tmp_path).fetched([*ONE, 1]) == len(ONE)
