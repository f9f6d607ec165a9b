"""mlx-lm's cache protocol in any order, on its own caches and on pooled ones: equal, or an error
that names the reason.

Tokens are numbered, so that keys say which they are, quantised or not. Of a window the tokens that
the next one attends to are compared.
"""

from __future__ import annotations

import copy
import pickle
import tempfile
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import HealthCheck
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kv.arrays import HEADS, numbered
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    KVCache,
    RotatingKVCache,
    load_prompt_cache,
    save_prompt_cache,
    trim_prompt_cache,
)
from thorough import tried

from mlx_blockpool.config import KVBits
from mlx_blockpool.errors import ReleasedCacheError
from mlx_blockpool.kv.arena import KVArena
from mlx_blockpool.kv.capabilities import Capabilities
from mlx_blockpool.kv.prompt_cache import from_stock, leaves_of, pooled_caches, sequence_of
from mlx_blockpool.kv.quantised import Quantised, dense, each
from mlx_blockpool.spec import (
    CompositeLayer,
    Form,
    FullLayer,
    ModelCacheSpec,
    StateLayer,
    WindowLayer,
)

WINDOW = 40
PICK = st.integers(0, 100)
DIMS = (32, 64)
FULL = FullLayer(HEADS, *DIMS)
RING = WindowLayer(HEADS, *DIMS, WINDOW, 0)
STATE = StateLayer((((1, 3), "float32"), ((1, 2), "float32")))
LAYOUTS = [(FULL, RING), (STATE, FULL), (FULL, STATE, RING), (CompositeLayer((STATE, FULL)), RING)]
BITS = [None, None, KVBits(8, 8, 32), KVBits(4, 8, 32)]


def stock_cache(layer: Any) -> Any:
    """What mlx-lm makes for such a layer."""
    if isinstance(layer, CompositeLayer):
        return CacheList(*(stock_cache(part) for part in layer.parts))
    if isinstance(layer, StateLayer):
        return ArraysCache(len(layer.arrays))
    return RotatingKVCache(layer.max_size) if isinstance(layer, WindowLayer) else KVCache()


def append_tokens(caches: list[Any], start: int, count: int, lengths: list[int]) -> None:
    """Append to each row the next tokens from `start` on, `count` in a row, and of those only its
    length: the rest is padding.

    A state becomes the sum of the last tokens of all calls, and that of this one.
    """
    size = len(lengths)
    padded = min(lengths) < count
    keys, values = numbered(start, count * size, dims=DIMS)
    rows = [
        mx.concatenate([a[:, :, i * count : (i + 1) * count] for i in range(size)])
        for a in (keys, values)
    ]
    last = mx.array([[start + i * count + length - 1.0] for i, length in enumerate(lengths)])
    for leaf in leaves_of(caches):
        if padded:
            leaf.prepare(lengths=lengths, right_padding=[count - length for length in lengths])
        if isinstance(leaf, ArraysCache):
            leaf[0] = mx.broadcast_to(last, (size, 3)) + (0 if leaf[0] is None else leaf[0])
            leaf[1] = mx.broadcast_to(last, (size, 2))
        else:
            leaf.update_and_fetch(*rows)
        if padded:
            leaf.finalize()


def held(cache: Any) -> list[Any]:
    """The tokens that a cache holds, by their keys, a window's in the order in which they came;
    of a state its arrays.
    """
    if isinstance(cache, ArraysCache):
        return [None if array is None else array.tolist() for array in cache.state[0]]
    if not cache.offset:
        return []
    keys, values = cache.keys_and_values()
    if isinstance(cache, RotatingKVCache):
        # mlx-lm's own goes on to hold what came before its window until the next token.
        keys, values = (
            cache._temporal_order(a)[..., -min(cache.offset, WINDOW) :, :]
            for a in (cache.keys, cache.values)
        )
    keys, values = (dense(as_saved(rows, cache)) for rows in (keys, values))
    numbers: list[float] = keys[0, 0, :, 0].tolist()
    assert values[0, 0, :, 0].tolist() == [number + 1000 for number in numbers]
    return numbers


def as_saved(rows: Any, cache: Any) -> Any:
    """The words of one of mlx-lm's quantised caches as rows."""
    own = isinstance(rows, mx.array | Quantised)
    return rows if own else Quantised(*rows, Form(cache.bits, cache.group_size))


def saved_by_stock(stock: list[Any], ours: list[Any]) -> list[Any]:
    """mlx-lm's caches, quantised where those of the pool are saved so."""
    leaves = zip(leaves_of(stock), leaves_of(ours), strict=True)
    return [
        cache.to_quantized(own.group_size, own.bits) if hasattr(own, "bits") else cache
        for cache, own in leaves
    ]


def all_held(caches: list[Any]) -> list[list[Any]]:
    return [held(leaf) for leaf in leaves_of(caches)]


def offsets(caches: list[Any]) -> list[int]:
    return [leaf.offset for leaf in leaves_of(caches) if not isinstance(leaf, ArraysCache)]


def saved_and_loaded(caches: list[Any]) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "cache.safetensors")
        save_prompt_cache(path, caches)
        loaded: list[Any] = load_prompt_cache(path)
        mx.eval([leaf.state for leaf in leaves_of(loaded)])
    return loaded


def reorder(leaf: Any) -> None:
    """Assign a state with all tokens the other way round, those of a ring in their order."""
    if isinstance(leaf, ArraysCache):
        leaf[0] = None if leaf[0] is None else -leaf[0]
    elif isinstance(leaf, RotatingKVCache) and leaf.offset:
        keys, values = leaf._temporal_order(leaf.keys), leaf._temporal_order(leaf.values)
        leaf.state = (keys, values, *leaf.state[2:-1], keys.shape[2])
    elif leaf.offset:
        keys, values = leaf.keys_and_values()
        leaf.state = (
            *(each(lambda a: a[..., ::-1, :], rows) for rows in (keys, values)),
            *leaf.state[2:],
        )


Pair = tuple[list[Any], list[Any]]


@tried(12, 2000, stateful_step_count=20, suppress_health_check=list(HealthCheck))
class CacheMachine(RuleBasedStateMachine):
    """Sequences of full, window and state layers, and batches of them: (mlx-lm's caches, pooled
    ones).
    """

    @initialize(attached=st.booleans(), layers=st.sampled_from(LAYOUTS), bits=st.sampled_from(BITS))
    def start(self, attached: bool, layers: Any, bits: KVBits | None) -> None:
        spec = ModelCacheSpec("test", layers, "float32").with_bits(bits)
        self.arena = KVArena(spec, 300 * sum(spec.bytes_per_block(group) for group in spec.groups))
        # Only attached models read quantised blocks.
        ragged = attached or bits is not None
        self.arena.capabilities = Capabilities(ragged=ragged, pads_states=True)
        self.token = 0
        self.single: list[Pair] = []
        self.batches: list[tuple[list[Any], list[Any], int]] = []
        self.new(20)

    def add(self, stock: list[Any], ours: list[Any]) -> None:
        self.single = [*self.single[-5:], (stock, ours)]

    def one(self, number: int) -> Pair:
        return self.single[number % len(self.single)]

    # -- sequences ---------------------------------------------------------------------------------

    @rule(count=st.sampled_from([0, 1, 35, WINDOW, 300]))
    def new(self, count: int) -> None:
        self.add(
            [stock_cache(layer) for layer in self.arena.spec.layers], pooled_caches(self.arena)
        )
        if count:
            self.append(-1, count)

    @rule(number=PICK, count=st.sampled_from([1, 1, 2, 7, WINDOW, 300]))
    def append(self, number: int, count: int) -> None:
        for caches in self.one(number):
            append_tokens(caches, self.token, count, [count])
        self.token += count

    @rule(number=PICK, count=st.sampled_from([1, 5, 280]))
    def trim(self, number: int, count: int) -> None:
        stock, ours = self.one(number)
        # A window that has wrapped cannot be trimmed, nor can a state, and then nothing is.
        assert trim_prompt_cache(stock, count) == trim_prompt_cache(ours, count)

    @rule(number=PICK)
    def deepcopy(self, number: int) -> None:
        self.add(*(copy.deepcopy(caches) for caches in self.one(number)))

    @rule(number=PICK)
    def copy(self, number: int) -> None:
        stock, ours = self.one(number)
        if sequence_of(ours) is not None:
            # A copy of mlx-lm's has the arrays of the first, which it writes into.
            self.add(copy.deepcopy(stock), [copy.copy(cache) for cache in ours])

    @rule(number=PICK)
    def save_and_load(self, number: int) -> None:
        stock, ours = self.one(number)
        if not max(offsets(stock)):
            return
        loaded = saved_and_loaded(ours)
        assert [type(leaf) for leaf in leaves_of(loaded)] == [
            type(leaf) for leaf in saved_by_stock(stock, ours)
        ]
        assert all_held(loaded) == all_held(stock)
        self.add(saved_and_loaded(stock), from_stock(loaded, self.arena))

    @rule(number=PICK)
    def pickle(self, number: int) -> None:
        stock, ours = self.one(number)
        read = pickle.loads(pickle.dumps(ours))
        assert all_held(read) == all_held(stock)
        assert offsets(read) == offsets(stock)
        self.add(pickle.loads(pickle.dumps(stock)), from_stock(read, self.arena))

    @rule(number=PICK)
    def assign_to_stock(self, number: int) -> None:
        stock, ours = self.one(number)
        taken = saved_by_stock([stock_cache(layer) for layer in self.arena.spec.layers], ours)
        for cache, own in zip(taken, leaves_of(ours), strict=True):
            cache.state = own.state
        assert all_held(taken) == all_held(stock)

    @rule(number=PICK, onto=PICK)
    def assign(self, number: int, onto: int) -> None:
        """The state of mlx-lm's caches, over what pooled ones held."""
        stock, (_, ours) = self.one(number), self.one(onto)
        given, own = copy.deepcopy(stock[0]), copy.deepcopy(stock[0])
        for cache, source in zip(leaves_of(ours), saved_by_stock(given, ours), strict=True):
            cache.state = source.state
        self.single[onto % len(self.single)] = (own, ours)

    @rule(number=PICK)
    def assign_reordered(self, number: int) -> None:
        for caches in self.one(number):
            for leaf in leaves_of(caches):
                reorder(leaf)

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
        leaves = leaves_of(ours)
        for use in (
            lambda: [append_tokens([leaf], 0, 1, [1]) for leaf in leaves],
            lambda: [leaf.state for leaf in leaves],
            lambda: copy.deepcopy(ours),
            lambda: pickle.dumps(ours),
            *(lambda leaf=leaf: leaf.merge([leaf]) for leaf in leaves),
            *(lambda leaf=leaf: copy.copy(leaf) for leaf in leaves),
            *(lambda leaf=leaf: setattr(leaf, "state", leaf.state) for leaf in leaves),
        ):
            with pytest.raises(ReleasedCacheError):
                use()

    # -- batches -----------------------------------------------------------------------------------

    @rule(numbers=st.lists(PICK, min_size=1, max_size=3), twice=st.booleans())
    def merge(self, numbers: list[int], twice: bool) -> None:
        pairs = [self.one(number) for number in (numbers + numbers[:1] if twice else numbers)]
        if any(not min(offsets(stock)) for stock, _ in pairs):
            # Of a batch of nothing mlx-lm extracts nothing.
            return
        made = [
            [type(layer[0]).merge(list(layer)) for layer in zip(*side, strict=True)]
            for side in zip(*pairs, strict=True)
        ]
        self.batches = [*self.batches[-2:], (made[0], made[1], len(pairs))]

    @precondition(lambda self: self.batches)
    @rule(number=PICK, count=st.sampled_from([1, 1, 1, 3]))
    def append_to_batch(self, number: int, count: int) -> None:
        stock, ours, size = self.batches[number % len(self.batches)]
        for caches in (stock, ours):
            append_tokens(caches, self.token, count, [count] * size)
        self.token += count * size

    @precondition(lambda self: self.batches)
    @rule(number=PICK, lengths=st.lists(st.integers(1, 60), min_size=4, max_size=4))
    def append_padded(self, number: int, lengths: list[int]) -> None:
        stock, ours, size = self.batches[number % len(self.batches)]
        lengths = [lengths[row % 4] for row in range(size)]
        for caches in (stock, ours):
            append_tokens(caches, self.token, max(lengths), lengths)
        self.token += max(lengths) * size

    @precondition(lambda self: self.batches)
    @rule(number=PICK)
    def deepcopy_batch(self, number: int) -> None:
        stock, ours, size = self.batches[number % len(self.batches)]
        self.batches = [*self.batches[-2:], (copy.deepcopy(stock), copy.deepcopy(ours), size)]

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

    @precondition(lambda self: self.batches and self.arena.capabilities.ragged)
    @rule(number=PICK, row=PICK)
    def release_in_batch(self, number: int, row: int) -> None:
        _, ours, size = self.batches.pop(number % len(self.batches))
        leaves_of(ours)[0].members[row % size].sequence.release()
        for leaf in leaves_of(ours):
            with pytest.raises(ReleasedCacheError):
                append_tokens([leaf], 0, 1, [1] * size)
            with pytest.raises(ReleasedCacheError):
                leaf.extract(row % size)

    # -- what always holds -------------------------------------------------------------------------

    @invariant()
    def sequences_are_equal(self) -> None:
        for stock, ours in getattr(self, "single", []):
            assert offsets(ours) == offsets(stock)
            assert all_held(ours) == all_held(stock)

    @invariant()
    def batches_are_equal(self) -> None:
        for stock, ours, size in getattr(self, "batches", []):
            for row in range(size):
                found, needed = (
                    all_held([cache.extract(row) for cache in caches]) for caches in (ours, stock)
                )
                assert found == needed

    def teardown(self) -> None:
        if hasattr(self, "arena"):
            self.single, self.batches = [], []
            self.arena.pool.check()
            assert all(count.held == 0 for count in self.arena.pool.settle())


TestCacheMachine = CacheMachine.TestCase
