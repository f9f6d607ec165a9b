"""Layers with further arrays next to keys and values: each array is what a cache of mlx-lm's for it
alone holds, after any operations.
"""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernel.emulation import why_not
from kernel.trusted import trust
from mlx_lm.models.cache import ChunkedKVCache, KVCache, RotatingKVCache
from models import make_model
from thorough import tried

from mlx_blockpool.commands import cache_file
from mlx_blockpool.config import KVBits, PoolConfig
from mlx_blockpool.errors import PoolExhaustedError, SpecError, StoreError
from mlx_blockpool.kv.arena import KVArena
from mlx_blockpool.kv.build import describe, open_pool, open_served
from mlx_blockpool.kv.capabilities import RAGGED, Capabilities
from mlx_blockpool.kv.layer_caches import PooledKVCache
from mlx_blockpool.kv.prompt_cache import as_stock, batch_of, pooled_caches
from mlx_blockpool.kv.quantised import dense
from mlx_blockpool.kv.rounded_caches import rounded_cache
from mlx_blockpool.kv.sequence import join
from mlx_blockpool.kv.slab import Slab
from mlx_blockpool.spec import ChunkLayer, FullLayer, ModelCacheSpec, TokenArray, WindowLayer

MORE = (
    TokenArray("index", 3, 32, "float16", quantisable=False),
    TokenArray("wide", 1, 64, "float32"),
    TokenArray("flags", 2, 5, "uint8"),
)
LAYERS = {
    "full": FullLayer(2, 64, 32, more=MORE),
    "no values": FullLayer(2, 64, 0, more=MORE[:1]),
    "others alone": FullLayer(0, 0, 0, more=MORE),
    "window": WindowLayer(2, 64, 32, 300, more=MORE),
    "chunk": ChunkLayer(2, 64, 32, 128, more=MORE),
}
ALL_BITS = [None, KVBits(8, 8, 32), KVBits(8, 4, 32)]
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.sampled_from([1, 1, 2, 5, 255, 256, 257, 300])),
        st.tuples(st.just("decode"), st.integers(1, 20)),
        st.tuples(st.just("trim"), st.integers(0, 300)),
        st.tuples(st.just("fork"), st.just(0)),
        st.tuples(st.just("state"), st.just(0)),
        st.tuples(st.just("prompts"), st.sampled_from([2, 5, 60])),
        st.tuples(st.just("rows"), st.integers(1, 4)),
    ),
    max_size=10,
)


def make_arena(
    *layers: Any, bits: KVBits | None = None, blocks: int = 60, preallocate: bool = False
) -> KVArena:
    spec = ModelCacheSpec("test", layers, "bfloat16").with_bits(bits)
    size = sum(spec.bytes_per_block(g) for g in spec.groups)
    arena = KVArena(spec, blocks * size, PoolConfig(preallocate=preallocate))
    arena.capabilities = RAGGED
    return arena


def rows_of(arena: KVArena, layer: FullLayer, tokens: Sequence[int]) -> list[mx.array]:
    """Rows [1, heads, n, dim] of each array: the number of the token, and 1000 more for each array
    before; in bytes what is left of it.
    """
    found = []
    for i, array in enumerate(layer.arrays):
        numbers = np.array(tokens, np.float32)[None, None, :, None] + 1000 * i
        heads = np.arange(array.heads, dtype=np.float32)[None, :, None, None] / 4
        rows = np.broadcast_to(numbers + heads, (1, array.heads, len(tokens), array.dim))
        dtype = arena.spec.dtype_of(array)
        found.append(mx.array(rows % 251 if dtype == "uint8" else rows).astype(getattr(mx, dtype)))
    return found


def stock_caches(arena: KVArena, layer: FullLayer) -> list[Any]:
    """A cache of mlx-lm's for each array, which has it for keys and for values."""

    def stock() -> Any:
        if isinstance(layer, WindowLayer):
            return RotatingKVCache(layer.max_size)
        return ChunkedKVCache(layer.chunk_size) if isinstance(layer, ChunkLayer) else KVCache()

    return [
        stock() if form is None else rounded_cache(stock(), (form, form))
        for form in arena.spec.forms(layer)
    ]


def same(ours: Sequence[Any], stock: Sequence[mx.array]) -> bool:
    return len(ours) == len(stock) and all(
        a.dtype == b.dtype and bool(mx.array_equal(dense(a), b).item())
        for a, b in zip(ours, stock, strict=True)
    )


class Followed:
    """A pooled cache, and mlx-lm's of the same tokens. `first`: the number of its first token."""

    def __init__(self, arena: KVArena, layer: FullLayer, first: int) -> None:
        self.arena, self.layer = arena, layer
        self.ours = pooled_caches(arena)[0]
        self.stock = stock_caches(arena, layer)
        self.next = first

    def rows(self, count: int) -> list[mx.array]:
        return rows_of(self.arena, self.layer, range(self.next, self.next + count))

    def append_to_stock(self, count: int) -> list[Any]:
        rows = self.rows(count)
        self.next += count
        return [s.update_and_fetch(r, r)[0] for s, r in zip(self.stock, rows, strict=True)]

    def write(self, count: int) -> None:
        found = self.ours.update_and_fetch(*self.rows(count))
        assert same(found, self.append_to_stock(count))

    def apply(self, name: str, count: int) -> None:
        if name in ("write", "decode"):
            for size in [1] * count if name == "decode" else [count]:
                self.write(size)
        elif name == "trim" and self.ours.is_trimmable():
            assert {s.trim(count) for s in self.stock} == {self.ours.trim(count)}
        elif name == "fork":
            # The fork writes rows of its own, which the original must not see.
            fork = copy.deepcopy(self.ours)
            fork.update_and_fetch(*rows_of(self.arena, self.layer, range(500, 503)))
        elif name == "state" and not isinstance(self.layer, ChunkLayer):
            other = pooled_caches(self.arena)[0]
            other.state = self.ours.held() if count else self.ours.state
            self.ours = other

    def check(self) -> None:
        assert {s.offset for s in self.stock} == {self.ours.offset}
        assert self.ours.size() == min(self.ours.offset, getattr(self.ours, "max_size", 1 << 30))
        if self.ours.empty() or isinstance(self.layer, ChunkLayer):
            return
        rows = join(self.ours.views())
        if isinstance(self.layer, WindowLayer):
            size = self.ours.size()
            ordered = [self.ours._temporal_order(dense(array)) for array in rows]
            assert same(ordered, [s._temporal_order(s.keys)[:, :, -size:] for s in self.stock])
        else:
            assert same(rows, [s.keys[:, :, : s.offset] for s in self.stock])


def decode(members: list[Followed]) -> None:
    (batch,) = batch_of([m.ours] for m in members)
    batch.update_and_fetch(*map(mx.concatenate, zip(*(m.rows(1) for m in members), strict=True)))
    for member in members:
        member.append_to_stock(1)


def write_prompts(members: list[Followed], count: int) -> None:
    """A right-padded prompt: each member has one token less than the one before."""
    (batch,) = batch_of([m.ours] for m in members)
    lengths = [max(1, count - i) for i in range(len(members))]
    batch.prepare(lengths=lengths, right_padding=[count - n for n in lengths])
    batch.update_and_fetch(
        *map(mx.concatenate, zip(*(m.rows(count) for m in members), strict=True))
    )
    batch.finalize()
    for member, length in zip(members, lengths, strict=True):
        member.append_to_stock(length)


def verify(members: list[Followed], count: int) -> None:
    """`count` rows of the first member and one of each other; half of them are kept."""
    counts = [count] + [1] * (len(members) - 1)
    (batch,) = batch_of([m.ours] for m in members)
    batch.begin_rows(counts)
    rows = [m.rows(n) for m, n in zip(members, counts, strict=True)]
    batch.update_and_fetch(
        *(
            mx.concatenate([array.swapaxes(0, 2) for array in arrays])
            for arrays in zip(*rows, strict=True)
        )
    )
    mx.eval(members[0].arena.arrays())
    kept = [n - n // 2 for n in counts]
    batch.commit_rows(kept)
    for member, n in zip(members, kept, strict=True):
        # One by one, as windows commit them.
        for _ in range(n):
            member.append_to_stock(1)


@pytest.mark.parametrize("name", LAYERS)
@tried(8, 200)
@given(
    steps=STEPS, bits=st.sampled_from(ALL_BITS), lengths=st.lists(st.integers(1, 320), max_size=2)
)
def test_each_array_follows_a_cache_of_mlx_lms_alone_and_in_batches(
    name: str, steps: list[tuple[str, int]], bits: KVBits | None, lengths: list[int]
) -> None:
    arena = make_arena(LAYERS[name], LAYERS[name], bits=bits)
    follow(arena, LAYERS[name], steps, lengths)
    arena.forget_steps()
    arena.pool.check()
    assert [c.held for c in arena.pool.settle()] == [0]


def follow(
    arena: KVArena, layer: FullLayer, steps: list[tuple[str, int]], lengths: list[int]
) -> None:
    one = Followed(arena, layer, 0)
    others = [Followed(arena, layer, 10 * (i + 1)) for i in range(len(lengths))]
    for other, length in zip(others, lengths, strict=True):
        other.write(length)
    for step, count in steps:
        one.apply(step, count)
        if others and not isinstance(layer, ChunkLayer):
            members = [one, *others]
            if step == "decode":
                decode(members)
            elif step == "prompts":
                write_prompts(members, count)
            elif step == "rows":
                verify(members, count)
        for each in (one, *others):
            each.check()


@pytest.mark.parametrize("bits", ALL_BITS)
def test_the_arrays_take_what_the_spec_says_and_no_more_than_the_pool(bits: KVBits | None) -> None:
    spec = ModelCacheSpec("test", tuple(LAYERS.values()), "bfloat16").with_bits(bits)
    size = sum(spec.bytes_per_block(group) for group in spec.groups)
    arena = KVArena(spec, 8 * size + 100, PoolConfig(preallocate=True))
    assert arena.nbytes == arena.pool.nbytes <= arena.pool.pool_bytes
    cache = pooled_caches(arena)[0]
    with pytest.raises(PoolExhaustedError):
        cache.update_and_fetch(*rows_of(arena, LAYERS["full"], range(30_000)))
    assert cache.offset == 0


def test_a_decode_step_writes_one_scatter_for_each_array(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = make_arena(LAYERS["full"], preallocate=True)
    members = [Followed(arena, LAYERS["full"], 10 * i) for i in range(4)]
    for member, length in zip(members, (3, 50, 9, 300), strict=True):
        member.write(length)
    decode(members)
    (slab,) = {
        id(slab): slab for m in members for slab, _, _ in m.ours.sequence.slab_runs(0, 1)
    }.values()
    calls: list[tuple[int, ...]] = []

    def scatter(index: int, places: tuple[mx.array, ...], *rows: mx.array) -> None:
        calls.append(tuple(array.shape[0] for array in rows))
        type(slab).scatter(slab, index, places, *rows)

    monkeypatch.setattr(slab, "scatter", scatter)
    decode(members)
    assert calls == [(4,) * 5]
    for member in members:
        member.check()


def test_a_decode_step_writes_at_most_twice_into_each_of_few_slabs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arena = make_arena(LAYERS["full"])
    members = [Followed(arena, LAYERS["full"], 10 * i) for i in range(8)]
    for member, length in zip(members, (3, 300, 9, 50, 310, 7, 255, 20), strict=True):
        member.write(length)
    calls: Counter[int] = Counter()
    for method in (Slab.write, Slab.scatter):

        def counted(slab: Slab, *given: Any, method: Callable[..., None] = method) -> None:
            calls[id(slab)] += 1
            method(slab, *given)

        monkeypatch.setattr(Slab, method.__name__, counted)
    mx.eval(arena.arrays())
    before = [np.asarray(memoryview(a.view(mx.uint8))).ctypes.data for a in arena.arrays()]
    decode(members)
    mx.eval(arena.arrays())
    assert before == [np.asarray(memoryview(a.view(mx.uint8))).ctypes.data for a in arena.arrays()]
    assert len(calls) == len(arena.pool.groups[0].slabs) == 3
    assert max(calls.values()) <= 2
    for member in members:
        member.check()


@pytest.mark.parametrize("name", ["full", "others alone", "window"])
def test_no_slab_moves_while_steps_write_all_arrays(name: str) -> None:
    arena = make_arena(LAYERS[name], bits=KVBits(8, 4, 32), preallocate=True)
    members = [Followed(arena, LAYERS[name], 10 * i) for i in range(3)]
    for member, length in zip(members, (3, 50, 310), strict=True):
        member.write(length)
    before = [np.asarray(memoryview(a.view(mx.uint8))).ctypes.data for a in arena.arrays()]
    for _ in range(5):
        decode(members)
        # Rows are computed while no step is in flight.
        mx.eval(arena.arrays())
        verify(members, 3)
        mx.eval(arena.arrays())
    assert before == [np.asarray(memoryview(a.view(mx.uint8))).ctypes.data for a in arena.arrays()]


def test_a_state_has_all_arrays_and_one_of_keys_and_values_alone_is_refused() -> None:
    arena = make_arena(LAYERS["full"])
    one = Followed(arena, LAYERS["full"], 0)
    assert one.ours.state == (None,) * 5 + (0,)
    one.write(20)
    assert len(one.ours.state) == 6
    assert len(one.ours.keys_and_values()) == 2
    with pytest.raises(
        ValueError, match="keys, values, index, wide, flags, and was given 2 arrays"
    ):
        pooled_caches(arena)[0].state = (*one.ours.keys_and_values(), 20)


def test_mlx_lms_own_caches_which_have_no_place_for_further_arrays_are_refused(
    tmp_path: Path,
) -> None:
    arena = make_arena(LAYERS["full"])
    one, two = (Followed(arena, LAYERS["full"], i) for i in range(2))
    one.write(20)
    with pytest.raises(ValueError, match="mlx-lm's KVCache has no place for index, wide, flags"):
        as_stock([one.ours])
    with pytest.raises(StoreError, match="cannot hold this prefix: mlx-lm's KVCache"):
        cache_file._write([one.ours], {}, tmp_path / "file.safetensors")
    assert not list(tmp_path.iterdir())
    arena.capabilities = Capabilities()
    with pytest.raises(ValueError, match=r"padded batch .* nor further arrays"):
        PooledKVCache.merge([one.ours, two.ours])


def test_exports_lose_words_of_layers_with_further_arrays() -> None:
    layer = FullLayer(2, 64, 64, more=(TokenArray("index", 1, 64),))
    spec = ModelCacheSpec("test", (layer,))
    assert not cache_file.loses_words(spec)
    assert cache_file.loses_words(spec.with_bits(KVBits(8, 8)))
    assert not cache_file.loses_words(
        replace(spec, layers=(FullLayer(2, 64, 64),)).with_bits(KVBits(8, 8))
    )


# -- attention -------------------------------------------------------------------------------------

LENGTHS = (700, 40, 300)


def attended(
    layer: FullLayer, path: str, bits: KVBits | None, streams: int
) -> tuple[list[mx.array], str]:
    """What plain attention finds in every kind of forward, and the path of the last step. Members
    have a block in common.
    """
    spec = ModelCacheSpec("test", (layer, layer), "float32").with_bits(bits)
    arena = KVArena(spec, 40 * spec.bytes_per_block(spec.groups[0]))
    arena.capabilities = RAGGED
    if path == "kernel":
        trust(arena)
    arena.decode.path, arena.decode.streams = path, streams
    seeds = itertools.count(1)

    def drawn(rows: int, count: int) -> list[mx.array]:
        """The same keys and values whatever follows them."""
        seed = next(seeds)
        return [
            mx.random.uniform(
                0, 200, (rows, a.heads, count, a.dim), key=mx.random.key(seed + i)
            ).astype(getattr(mx, spec.dtype_of(a)))
            for i, a in enumerate(layer.arrays)
        ]

    def queries(rows: int, count: int) -> mx.array:
        return mx.random.normal((rows, 4, count, 64), key=mx.random.key(next(seeds)))

    found = []

    def forward(cache: Any, rows: int, count: int) -> None:
        mask = cache.make_mask(
            count, return_array=False, window_size=getattr(layer, "max_size", None)
        )
        new = cache.update_and_fetch(*drawn(rows, count))
        found.append(cache.attend(queries(rows, count), *new[:2], 0.01, mask, None))
        mx.eval(found)

    prefix = pooled_caches(arena)
    for cache in prefix:
        forward(cache, 1, 256)
    sequences = [copy.deepcopy(prefix) for _ in LENGTHS]
    for caches, length in zip(sequences, LENGTHS, strict=True):
        for count in (length, 1):
            for cache in caches:
                forward(cache, 1, count)
    batch = batch_of(sequences)
    for cache in batch:
        forward(cache, len(LENGTHS), 1)
    counts = [3, 1, 2]
    for cache in batch:
        cache.begin_rows(counts)
        forward(cache, sum(counts), 1)
    step = arena.steps[0]
    for cache in batch:
        cache.commit_rows([2, 0, 1])
    for cache in batch:
        cache.prepare(lengths=[4, 2, 3], right_padding=[0, 2, 1])
        forward(cache, len(LENGTHS), 4)
        cache.finalize()
    return found, step.path


@pytest.mark.sampled
@pytest.mark.parametrize("bits", [None, KVBits(8, 4, 32)])
@pytest.mark.parametrize(
    ("path", "streams"),
    [("ragged", 1), ("shared", 2), pytest.param("kernel", 1, marks=pytest.mark.thorough)],
)
@pytest.mark.parametrize("name", ["full", "window"])
def test_plain_attention_reads_keys_and_values_alone(
    name: str, path: str, streams: int, bits: KVBits | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if path == "kernel" and why_not() is not None:
        pytest.skip(str(why_not()))
    # Kv heads are divided between streams.
    monkeypatch.setattr("mlx_blockpool.kv.step.PARALLEL_KEYS", 0)
    layer = LAYERS[name]
    found, taken = attended(layer, path, bits, streams)
    needed, _ = attended(replace(layer, more=()), path, bits, streams)
    assert taken == ("kernel_rows" if path == "kernel" else "rows")
    assert all(mx.array_equal(*pair).item() for pair in zip(found, needed, strict=True))


# -- at load ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (FullLayer(2, 16, 16, more=MORE[:1]), r"keys, values, index of .*the model's cache writes"),
        (FullLayer(0, 0, 0, more=MORE[:1]), r"index of .*the model's cache writes"),
        (FullLayer(1, 16, 16), r"\(1, 16, 'float32'\).*writes \[\(2, 16, 'float32'\)"),
        (FullLayer(2, 16, 8), r"\(2, 8, 'float32'\).*writes .*\(2, 16, 'float32'\)\]"),
        (WindowLayer(2, 16, 16, 64, more=MORE[:1]), r"keys, values, index of"),
    ],
    ids=["more", "others alone", "heads", "dim", "window"],
)
def test_a_spec_with_other_arrays_than_a_cache_writes_is_found_when_the_model_is_loaded(
    layer: FullLayer, said: str
) -> None:
    model = make_model("llama")
    spec = describe(model)
    wrong = ModelCacheSpec(spec.model_id, (spec.layers[0], layer), spec.dtype)
    with pytest.raises(SpecError, match=f"layer cache 1: the spec has the arrays .*{said}"):
        open_pool(model, 10_000_000, spec=wrong)
    with pytest.raises(SpecError, match="provide a cache class that writes all of these arrays"):
        open_served(model, wrong, 10_000_000, PoolConfig())


def test_a_further_array_of_another_type_is_not_converted_in_silence() -> None:
    arena = make_arena(LAYERS["full"])
    rows = rows_of(arena, LAYERS["full"], range(3))
    with pytest.raises(SpecError, match=r"\(3, 32, 'float16'\).*writes .*\(3, 32, 'float32'\)"):
        pooled_caches(arena)[0].update_and_fetch(*rows[:2], rows[2].astype(mx.float32), *rows[3:])
