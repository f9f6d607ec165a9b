"""mlx-lm's cache protocol in any order, on its own caches and on pooled ones: equal, or an error that names the reason.

Tokens are numbered, so that keys say which they are. A window is compared by what it holds of its last tokens, in any order.
"""

from __future__ import annotations

import copy
import pickle
import tempfile
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from cache.arrays import make_slabs, numbered
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from mlx_lm.models.cache import KVCache, RotatingKVCache, load_prompt_cache, save_prompt_cache, trim_prompt_cache
from thorough import examples, is_thorough

from mlx_blockpool.cache.factory import pooled_caches
from mlx_blockpool.cache.parts import sequence_of
from mlx_blockpool.errors import ReleasedCacheError

WINDOW = 40
PICK = st.integers(0, 100)


def held(cache: Any) -> list[float]:
    """The tokens that a cache holds, by their keys; of a window the last of them, sorted."""
    if not cache.offset:
        return []
    keys, values = cache.keys_and_values()
    numbers: list[float] = keys[0, 0, :, 0].tolist()
    assert values[0, 0, :, 0].tolist() == [number + 1000 for number in numbers]
    return sorted(numbers)[-min(cache.offset, WINDOW) :] if isinstance(cache, RotatingKVCache) else numbers


Pair = tuple[list[Any], list[Any]]


class CacheMachine(RuleBasedStateMachine):
    """Sequences of a full and a window layer, and batches of them: (mlx-lm's caches, pooled ones)."""

    @initialize(attached=st.booleans())
    def start(self, attached: bool) -> None:
        self.slabs = make_slabs((WINDOW, 0), layers=1, blocks=300)
        self.slabs.ragged = attached
        self.token = 0
        self.single: list[Pair] = []
        self.batches: list[tuple[list[Any], list[Any], int]] = []
        self.new()

    def add(self, stock: list[Any], ours: list[Any]) -> None:
        self.single = [*self.single[-5:], (stock, ours)]

    def one(self, number: int) -> Pair:
        return self.single[number % len(self.single)]

    # -- sequences -----------------------------------------------------------------------------------------------------

    @rule()
    def new(self) -> None:
        self.add([KVCache(), RotatingKVCache(WINDOW)], pooled_caches(self.slabs))

    @rule(number=PICK, count=st.sampled_from([1, 1, 2, 7, WINDOW, 300]))
    def append(self, number: int, count: int) -> None:
        for caches in self.one(number):
            for cache in caches:
                cache.update_and_fetch(*numbered(self.token, count))
        self.token += count

    @rule(number=PICK, count=st.sampled_from([1, 5, 280]))
    def trim(self, number: int, count: int) -> None:
        stock, ours = self.one(number)
        # A window that has wrapped cannot be trimmed, and then nothing is.
        assert trim_prompt_cache(stock, count) == trim_prompt_cache(ours, count)

    @rule(number=PICK)
    def deepcopy(self, number: int) -> None:
        self.add(*(copy.deepcopy(caches) for caches in self.one(number)))

    @rule(number=PICK)
    def save_and_load(self, number: int) -> None:
        stock, ours = self.one(number)
        if not stock[0].offset:
            return
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "cache.safetensors")
            save_prompt_cache(path, ours)
            loaded = load_prompt_cache(path)
            mx.eval([cache.state for cache in loaded])
        assert [type(cache) for cache in loaded] == [KVCache, RotatingKVCache]
        assert [held(cache) for cache in loaded] == [held(cache) for cache in stock]

    @rule(number=PICK)
    def pickle(self, number: int) -> None:
        stock, ours = self.one(number)
        read = pickle.loads(pickle.dumps(ours))
        assert [held(cache) for cache in read] == [held(cache) for cache in stock]
        assert [cache.offset for cache in read] == [cache.offset for cache in stock]

    @rule(number=PICK)
    def assign_to_stock(self, number: int) -> None:
        stock, ours = self.one(number)
        taken = [KVCache(), RotatingKVCache(WINDOW)]
        for cache, own in zip(taken, ours, strict=True):
            cache.state = own.state
        assert [held(cache) for cache in taken] == [held(cache) for cache in stock]

    @rule(number=PICK)
    def release(self, number: int) -> None:
        if len(self.single) < 2:
            return
        _, ours = self.single.pop(number % len(self.single))
        sequence = sequence_of(ours)
        if sequence is None:
            # Out of a padded batch, which is mlx-lm's own.
            return
        sequence.release()
        for use in (
            lambda: ours[0].update_and_fetch(*numbered(0, 1)),
            lambda: copy.deepcopy(ours),
            lambda: ours[0].merge(ours[:1]),
        ):
            with pytest.raises(ReleasedCacheError):
                use()

    # -- batches -------------------------------------------------------------------------------------------------------

    @rule(numbers=st.lists(PICK, min_size=1, max_size=3), twice=st.booleans())
    def merge(self, numbers: list[int], twice: bool) -> None:
        pairs = [self.one(number) for number in (numbers + numbers[:1] if twice else numbers)]
        if any(not stock[0].offset for stock, _ in pairs):
            # Of a batch of nothing mlx-lm extracts nothing.
            return
        made = [[type(layer[0]).merge(list(layer)) for layer in zip(*side, strict=True)] for side in zip(*pairs, strict=True)]
        self.batches = [*self.batches[-2:], (made[0], made[1], len(pairs))]

    @precondition(lambda self: self.batches)
    @rule(number=PICK, count=st.sampled_from([1, 1, 1, 3]))
    def append_to_batch(self, number: int, count: int) -> None:
        stock, ours, size = self.batches[number % len(self.batches)]
        keys, values = numbered(self.token, count * size)
        rows = [mx.concatenate([a[:, :, i * count : (i + 1) * count] for i in range(size)]) for a in (keys, values)]
        for cache in (*stock, *ours):
            cache.update_and_fetch(*rows)
        self.token += count * size

    @precondition(lambda self: self.batches)
    @rule(number=PICK, row=PICK)
    def extract(self, number: int, row: int) -> None:
        stock, ours, size = self.batches[number % len(self.batches)]
        self.add(*([cache.extract(row % size) for cache in caches] for caches in (stock, ours)))

    @precondition(lambda self: self.batches)
    @rule(number=PICK, keep=st.lists(PICK, min_size=1, max_size=2))
    def filter(self, number: int, keep: list[int]) -> None:
        at = number % len(self.batches)
        stock, ours, size = self.batches[at]
        rows = sorted({row % size for row in keep})
        for cache in (*stock, *ours):
            cache.filter(rows)
        self.batches[at] = (stock, ours, len(rows))

    @precondition(lambda self: len(self.batches) > 1)
    @rule(number=PICK)
    def extend(self, number: int) -> None:
        first = self.batches.pop(number % len(self.batches))
        second = self.batches.pop()
        for mine, other in zip((*first[0], *first[1]), (*second[0], *second[1]), strict=True):
            mine.extend(other)
        self.batches.append((first[0], first[1], first[2] + second[2]))

    # -- what always holds ---------------------------------------------------------------------------------------------

    @invariant()
    def sequences_are_equal(self) -> None:
        for stock, ours in getattr(self, "single", []):
            assert [cache.offset for cache in ours] == [cache.offset for cache in stock]
            assert [held(cache) for cache in ours] == [held(cache) for cache in stock]

    @invariant()
    def batches_are_equal(self) -> None:
        for stock, ours, size in getattr(self, "batches", []):
            for row in range(size):
                found, needed = ([held(cache.extract(row)) for cache in caches] for caches in (ours, stock))
                assert found == needed

    def teardown(self) -> None:
        if hasattr(self, "slabs"):
            self.single, self.batches = [], []
            self.slabs.pool.check()
            assert all(count.held == 0 for count in self.slabs.pool.settle())


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(
    max_examples=examples(20, 2000),
    stateful_step_count=20,
    derandomize=not is_thorough(),
    deadline=None,
    phases=[phase for phase in Phase if phase not in (Phase.explain, Phase.shrink)],
    suppress_health_check=list(HealthCheck),
)
