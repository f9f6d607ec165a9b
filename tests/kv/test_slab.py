"""What a pool holds in quantised blocks: the words that mlx makes of each row, wherever it is
written and copied.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_blockpool.config import KVBits, PoolConfig
from mlx_blockpool.kv.arena import KVArena
from mlx_blockpool.kv.quantised import View, arrays_of, dense, in_form, joined, tokens
from mlx_blockpool.kv.sequence import SequenceBlocks, join
from mlx_blockpool.spec import (
    BLOCK_TOKENS,
    Form,
    FullLayer,
    ModelCacheSpec,
    TokenArray,
    WindowLayer,
)

# Keys in groups of 64, values of 96 in groups of 32, and arrays of other heads and types, one of
# which must stay as it is.
LAYER = FullLayer(
    2,
    128,
    96,
    more=(
        TokenArray("index", 3, 32, "float32", quantisable=False),
        TokenArray("flags", 1, 5, "uint8"),
        TokenArray("wide", 3, 64, "float32"),
    ),
)
SPEC = ModelCacheSpec("test", (LAYER, LAYER, WindowLayer(2, 64, 80, 300)), "bfloat16")
ALL_BITS = [KVBits(8, 8), KVBits(4, 4), KVBits(8, 4), KVBits(None, 8)]


def make_arena(bits: KVBits | None, blocks: int = 8, **config: Any) -> KVArena:
    spec = SPEC.with_bits(bits)
    return KVArena(
        spec, blocks * sum(spec.bytes_per_block(g) for g in spec.groups), PoolConfig(**config)
    )


def random(arena: KVArena, count: int, seed: int, group: int = 0) -> tuple[mx.array, ...]:
    """Rows of a chunk; heads and tokens swapped, as models write them."""
    return tuple(
        (50 * mx.random.uniform(shape=(1, count, a.heads, a.dim), key=mx.random.key(9 * seed + i)))
        .astype(getattr(mx, arena.spec.dtype_of(a)))
        .swapaxes(1, 2)
        for i, a in enumerate(arena.spec.groups[group].layer.arrays)
    )


def quantised(arena: KVArena, rows: View, group: int = 0) -> View:
    return tuple(map(in_form, rows, arena.spec.forms(arena.spec.groups[group].layer)))


def same(found: View, expected: View) -> bool:
    pairs = [
        pair
        for a, b in zip(found, expected, strict=True)
        for pair in zip(arrays_of(a), arrays_of(b), strict=True)
    ]
    return all(a.dtype == b.dtype and bool(mx.array_equal(a, b).item()) for a, b in pairs)


def in_pieces(arena: KVArena) -> SequenceBlocks:
    """A sequence with three blocks of the first group that are no neighbours."""
    sequences = [SequenceBlocks(arena), SequenceBlocks(arena)]
    for end in (1, 257, 513):
        for sequence in sequences:
            sequence.writable(0, 0, end)
    assert len(sequences[0].tables[0].runs) == 3
    return sequences[0]


def addresses(arena: KVArena) -> list[int]:
    return [np.asarray(memoryview(a.view(mx.uint8))).ctypes.data for a in arena.arrays()]


@pytest.fixture
def count_quantised(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of each call of mx.quantize."""
    calls: list[int] = []
    quantize = mx.quantize

    def counted(rows: mx.array, **options: Any) -> Any:
        calls.append(rows.shape[2])
        return quantize(rows, **options)

    monkeypatch.setattr(mx, "quantize", counted)
    return calls


@pytest.mark.parametrize(
    ("bits", "most"), [(KVBits(8, 8), 0.54), (KVBits(4, 4), 0.30), (KVBits(8, 4), 0.42)], ids=str
)
def test_the_arrays_take_what_the_spec_says(bits: KVBits, most: float) -> None:
    spec = ModelCacheSpec("llama", (FullLayer(2, 128, 128),) * 2, "bfloat16")
    sizes = []
    for used in (spec, spec.with_bits(bits)):
        arena = KVArena(
            used, 64 * used.bytes_per_block(used.groups[0]), PoolConfig(preallocate=True)
        )
        assert (
            arena.nbytes
            == sum(a.nbytes for a in arena.arrays())
            == arena.pool.nbytes
            == arena.pool.pool_bytes
        )
        sizes.append(arena.nbytes)
    assert sizes[1] <= most * sizes[0]


@pytest.mark.parametrize("bits", ALL_BITS, ids=str)
def test_a_chunk_over_several_runs_is_read_back_word_for_word(bits: KVBits) -> None:
    arena = make_arena(bits)
    sequence, place, rows = in_pieces(arena), arena.places[1], random(arena, 700, 1)
    sequence.write(place, 0, *rows)
    views = sequence.read(place, 700)
    assert len(views) == 3
    assert same(join(views), quantised(arena, rows))
    assert same(
        join(sequence.read(place, 300)),
        quantised(arena, tuple(array[:, :, :300] for array in rows)),
    )


def test_rows_are_quantised_once_and_words_never(count_quantised: list[int]) -> None:
    arena = make_arena(KVBits())
    sequence, place = in_pieces(arena), arena.places[0]
    sequence.write(place, 0, *random(arena, 700, 1))
    # Keys, values and the last array.
    assert count_quantised == [700] * 3
    words = join(sequence.read(place, 700))
    sequence.write(place, 256, *(tokens(rows, 0, 400) for rows in words))
    fork = sequence.fork()
    fork.write(place, 699, *random(arena, 1, 2))
    assert count_quantised == [700] * 3 + [1] * 3


@pytest.mark.parametrize("bits", ALL_BITS, ids=str)
def test_one_token_of_each_sequence_is_put_in_its_place(bits: KVBits) -> None:
    arena = make_arena(bits)
    slab, _ = arena.locate(0, SequenceBlocks(arena).writable(0, 0, 1) and 0)
    rows = [random(arena, 1, seed) for seed in range(3)]
    before = slab.read(0, 0, 256)
    mx.eval(before)
    expected = [
        joined([tokens(half, 0, 7), *new, tokens(half, 8, 20), *newer, tokens(half, 21)], 2)
        for half, new, newer in zip(
            before, *([[r] for r in quantised(arena, rows[i])] for i in (1, 2)), strict=True
        )
    ]
    mx.eval(expected)
    del before
    stacked = tuple(mx.concatenate(pair) for pair in zip(*rows[1:], strict=True))
    slab.scatter(0, slab.indices([7, 20]), *stacked)
    assert same(slab.read(0, 0, 256), tuple(expected))


@pytest.mark.parametrize("bits", ALL_BITS, ids=str)
def test_a_fork_that_is_written_has_a_copy_with_the_same_words(bits: KVBits) -> None:
    arena = make_arena(bits)
    sequence = SequenceBlocks(arena)
    for layer, place in arena.places.items():
        sequence.write(place, 0, *random(arena, 300, layer, place.group))
    fork = sequence.fork()
    for layer, place in arena.places.items():
        fork.write(place, 299, *random(arena, 1, 100 + layer, place.group))
    assert sequence.tables[0].ids[0] == fork.tables[0].ids[0]
    assert sequence.tables[0].ids[1] != fork.tables[0].ids[1]
    for layer, place in arena.places.items():
        old = quantised(arena, random(arena, 300, layer, place.group), place.group)
        new = quantised(arena, random(arena, 1, 100 + layer, place.group), place.group)
        assert same(join(sequence.read(place, 300)), old)
        changed = tuple(joined([tokens(a, 0, 299), b], 2) for a, b in zip(old, new, strict=True))
        assert same(join(fork.read(place, 300)), changed)


@pytest.mark.parametrize("bits", [None, KVBits()], ids=str)
def test_a_copy_from_a_slab_of_one_block_shares_no_buffer(bits: KVBits | None) -> None:
    arena = make_arena(bits, blocks=3)
    sequences = [SequenceBlocks(arena), SequenceBlocks(arena)]
    (((first, _, _),), ((second, _, _),)) = (s.writable(0, 0, 1) for s in sequences)
    assert first is not second
    assert first.blocks == second.blocks == 1
    arena.copy_block(0, *(s.tables[0].ids[0] for s in sequences))
    mx.eval(arena.arrays())
    assert len(set(addresses(arena))) == len(arena.arrays())


def test_a_slab_of_one_block_that_is_filled_at_once_is_row_contiguous() -> None:
    arena = make_arena(KVBits(), blocks=1)
    rows = random(arena, BLOCK_TOKENS, 1)
    sequence = SequenceBlocks(arena)
    sequence.write(arena.places[0], 0, *rows)
    slab, _ = arena.locate(0, 0)
    assert slab.blocks == 1
    for array in slab.arrays():
        mx.eval(array)
        assert memoryview(array.view(mx.uint8)).c_contiguous
    assert same(slab.read(0, 0, BLOCK_TOKENS), quantised(arena, rows))


def test_no_array_moves_in_a_thousand_mixed_writes() -> None:
    spec = ModelCacheSpec("m", (LAYER, LAYER), "bfloat16").with_bits(KVBits(8, 4))
    arena = KVArena(spec, 16 * spec.bytes_per_block(spec.groups[0]), PoolConfig(preallocate=True))
    rng = np.random.default_rng(1)
    chunks = {n: random(arena, n, n) for n in (1, 3, 40, 200)}
    before = addresses(arena)
    sequences, lengths = [SequenceBlocks(arena) for _ in range(3)], [0, 0, 0]
    for step in range(500):
        i, count = int(rng.integers(3)), int(rng.choice([1, 1, 1, 3, 40, 200]))
        start = min(int(rng.integers(lengths[i] + 1)), 900 - count)
        for place in arena.places.values():
            sequences[i].write(place, start, *chunks[count])
        lengths[i] = max(lengths[i], start + count)
        if step % 50 == 0:
            other = (i + 1) % 3
            sequences[other].release()
            sequences[other], lengths[other] = sequences[i].fork(), lengths[i]
    mx.eval(arena.arrays())
    assert addresses(arena) == before


def test_a_form_is_that_of_its_array() -> None:
    arena = make_arena(KVBits(8, None))
    SequenceBlocks(arena).write(arena.places[0], 0, *random(arena, 1, 1))
    slab, _ = arena.locate(0, 0)
    assert slab.forms == (Form(8, 64), None, None, None, Form(8, 64))
    dtypes = [mx.bfloat16, mx.bfloat16, mx.float32, mx.uint8, mx.float32]
    assert [rows.dtype for rows in slab.read(1, 10, 20)] == dtypes
    keys, values = slab.read_attended(1, 10, 20, 1, 2)
    assert (keys.shape, values.shape) == ((1, 1, 20, 128), (1, 1, 20, 96))
    assert isinstance(values, mx.array)
    assert dense(keys).dtype == values.dtype == mx.bfloat16
