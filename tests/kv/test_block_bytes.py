"""Copies of blocks as bytes: bit-equal, on their own, and no slab moves for them."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_blockpool.config import KVBits, PoolConfig
from mlx_blockpool.kv import block_bytes as contents_module
from mlx_blockpool.kv.arena import KVArena
from mlx_blockpool.kv.block_bytes import as_bytes, contents, copy_in, copy_out
from mlx_blockpool.kv.quantised import Quantised, Rows
from mlx_blockpool.spec import BLOCK_TOKENS, Form, FullLayer, ModelCacheSpec, TokenArray

DTYPES = ["float32", "float16", "bfloat16"]
# An array that stays as it is and one that may be quantised, in other types than the model's.
MORE = (
    TokenArray("index", 3, 32, "float16", quantisable=False),
    TokenArray("wide", 2, 64, "float32"),
    TokenArray("flags", 1, 5, "uint8"),
)
# Three groups: different heads, keys that are wider than values, none of both, and others.
LAYERS = (
    FullLayer(2, 64, 64),
    FullLayer(1, 96, 32),
    FullLayer(2, 64, 64),
    FullLayer(1, 64, 0, more=MORE),
    FullLayer(0, 0, 0, more=MORE[:2]),
)
# As the model computes, in one form, and in several: groups of 64 and 32, values of 4 bits.
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}
MLX_UNSIGNED = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32}
KV = [None, KVBits(8, 8), KVBits(8, 4), KVBits(None, 4, 32)]


def make_slabs(
    dtype: str = "float32",
    layers: tuple[FullLayer, ...] = LAYERS,
    blocks: int = 8,
    preallocate: bool = True,
    kv: KVBits | None = None,
) -> KVArena:
    spec = ModelCacheSpec("test", layers, dtype).with_bits(kv)
    size = sum(spec.bytes_per_block(g) for g in spec.groups)
    return KVArena(spec, blocks * size, PoolConfig(preallocate=preallocate))


def take(slabs: KVArena, count: int = 2) -> tuple[list[Any], list[list[tuple[int, int]]]]:
    """Tables of `count` blocks in each group, and their places: [[(group, block), ..], ..]."""
    tables = [slabs.pool.open_table(g) for g in slabs.full_groups]
    for table in tables * count:
        slabs.pool.extend(table, 1)
    return tables, [[(t.group, t.ids[i]) for t in tables] for i in range(count)]


def fill(slabs: KVArena, places: list[tuple[int, int]], seed: int) -> list[np.ndarray[Any, Any]]:
    """Random bits in every value of these blocks: also NaNs, -0.0 and denormals.

    Returns them in the order of contents().
    """
    rng = np.random.default_rng(seed)
    found = []

    def some(heads: int, width: int, dtype: mx.Dtype) -> mx.array:
        unsigned = UNSIGNED[dtype.size]
        bits = rng.integers(
            0, np.iinfo(unsigned).max, (heads, BLOCK_TOKENS, width), dtype=unsigned, endpoint=True
        )
        found.append(bits)
        return mx.array(bits).view(dtype)[None]

    def rows(array: TokenArray, form: Form | None) -> Rows:
        heads, dim, dtype = array.heads, array.dim, getattr(mx, slabs.spec.dtype_of(array))
        if form is None:
            return some(heads, dim, dtype)
        packed = some(heads, dim * form.bits // 32, mx.uint32)
        return Quantised(
            packed, *(some(heads, dim // form.group_size, dtype) for _ in range(2)), form
        )

    for group, block in places:
        layer = slabs.spec.groups[group].layer
        slab, start = slabs.locate(group, block)
        for index in range(len(slab.layers)):
            slab.write(index, start, *map(rows, layer.arrays, slabs.spec.forms(layer)))
        mx.eval(slab.arrays())
    return found


def bits_of(arrays: list[mx.array]) -> list[Any]:
    return [np.array(a.view(MLX_UNSIGNED[a.itemsize])) for a in arrays]


def given(slabs: KVArena, copies: list[mx.array], tokens: int = BLOCK_TOKENS) -> list[Any]:
    """What copy_in() takes, from what copy_out() gave."""
    wanted = contents(slabs, slabs.full_groups, tokens)
    return [c.array(as_bytes(a)) for c, a in zip(wanted, copies, strict=True)]


@pytest.fixture(params=[True, False], ids=["in place", "by the device"])
def writes_in_place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Devices that do not share the processor's memory are written to in another way."""
    monkeypatch.setattr(contents_module, "shares_memory", lambda: request.param)
    found: bool = request.param
    return found


def addresses(slabs: KVArena) -> list[int]:
    # An array without numbers has no address.
    arrays = (array for array in slabs.arrays() if array.size)
    return [np.asarray(memoryview(array.view(mx.uint8))).ctypes.data for array in arrays]


def assert_equal(expected: list[Any], found: list[Any]) -> None:
    assert len(expected) == len(found)
    assert all(np.array_equal(e, f) for e, f in zip(expected, found, strict=True))


@pytest.mark.usefixtures("writes_in_place")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("preallocate", "kv"), [(True, None), *((False, kv) for kv in KV)])
def test_copies_are_bit_equal_and_come_back_bit_equal(
    dtype: str, preallocate: bool, kv: KVBits | None
) -> None:
    """Words, scales and biases too, whatever numbers they stand for; in one slab or in two."""
    slabs = make_slabs(dtype, preallocate=preallocate, kv=kv)
    _, (first, second) = take(slabs)
    before = fill(slabs, first, 1)
    others = fill(slabs, second, 2)
    copies = copy_out(slabs, first, 0, BLOCK_TOKENS)
    assert_equal(before, bits_of(copies))

    target = make_slabs(dtype, preallocate=preallocate, kv=kv)
    _, (one, two) = take(target)
    kept = fill(target, one, 3)
    wanted = contents(target, target.full_groups, BLOCK_TOKENS)
    assert [(c.dtype, c.shape) for c in wanted] == [(a.dtype, a.shape) for a in copies]
    copy_in(target, two, 0, given(target, copies))
    assert_equal(before, bits_of(copy_out(target, two, 0, BLOCK_TOKENS)))
    assert_equal(kept, bits_of(copy_out(target, one, 0, BLOCK_TOKENS)))
    assert_equal(others, bits_of(copy_out(slabs, second, 0, BLOCK_TOKENS)))


@pytest.mark.usefixtures("writes_in_place")
@pytest.mark.parametrize("kv", [None, KVBits(8, 4)])
@pytest.mark.parametrize(("start", "end"), [(0, 1), (0, 100), (100, 256), (255, 256)])
def test_a_part_of_a_block_goes_where_it_belongs(start: int, end: int, kv: KVBits | None) -> None:
    slabs = make_slabs("bfloat16", kv=kv)
    _, (first, second) = take(slabs)
    source, target = fill(slabs, first, 1), fill(slabs, second, 2)
    copy_in(slabs, second, start, given(slabs, copy_out(slabs, first, start, end), end - start))
    for s, t, f in zip(
        source, target, bits_of(copy_out(slabs, second, 0, BLOCK_TOKENS)), strict=True
    ):
        assert np.array_equal(f[:, start:end], s[:, start:end])
        assert np.array_equal(f[:, :start], t[:, :start])
        assert np.array_equal(f[:, end:], t[:, end:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("blocks", [1, 8])
@pytest.mark.parametrize("kv", [None, KVBits()])
def test_copies_outlive_the_block_and_its_next_content(
    dtype: str, blocks: int, kv: KVBits | None
) -> None:
    """Also where a block is a whole slab, whose slice could be shared instead of copied."""
    slabs = make_slabs(dtype, blocks=blocks, kv=kv)
    tables, (first,) = take(slabs, 1)
    fill(slabs, first, 1)
    copies = copy_out(slabs, first, 0, BLOCK_TOKENS)
    views = [as_bytes(array) for array in copies]
    before = [bytes(view) for view in views]
    for table in tables:
        slabs.pool.release(table)
    del copies
    _, (again,) = take(slabs, 1)
    fill(slabs, again, 2)
    assert [bytes(view) for view in views] == before


@pytest.mark.usefixtures("writes_in_place")
def test_what_was_copied_in_may_change_at_once() -> None:
    """As memory does that the next record is read into."""
    slabs = make_slabs()
    _, (first, second) = take(slabs)
    mx.random.seed(1)
    wanted = contents(slabs, slabs.full_groups, BLOCK_TOKENS)
    before = [(9 * mx.random.uniform(shape=c.shape)).astype(c.dtype) for c in wanted]
    mx.eval(before)
    copy_in(slabs, first, 0, given(slabs, before))
    arrays = [array.copy() for array in given(slabs, copy_out(slabs, first, 0, BLOCK_TOKENS))]
    copy_in(slabs, second, 0, arrays)
    for array in arrays:
        array[:] = 7
    for expected, found in zip(before, copy_out(slabs, second, 0, BLOCK_TOKENS), strict=True):
        assert mx.array_equal(expected, found).item()


@pytest.mark.usefixtures("writes_in_place")
def test_a_step_in_flight_reads_what_was_there() -> None:
    slabs = make_slabs(blocks=4)
    _, (first, second) = take(slabs)
    fill(slabs, first, 1)
    slab, start = slabs.locate(*first[0])
    keys, _ = slab.layers[0]
    before, expected = addresses(slabs), mx.sum(mx.abs(mx.nan_to_num(keys) > 0)).item()
    big = mx.random.normal((400, 400))
    for _ in range(4):
        big = big @ big / 30
    read = mx.sum(mx.abs(mx.nan_to_num(keys) > 0)) + 0 * big[0, 0].astype(mx.int32)
    mx.async_eval(read)
    del big
    other = [mx.full(c.shape, 7, c.dtype) for c in contents(slabs, slabs.full_groups, BLOCK_TOKENS)]
    copy_in(slabs, second, 0, given(slabs, other))
    assert read.item() == expected
    assert addresses(slabs) == before
    assert slab.layers[0][0][0, 0, start, 0].item() != 7


@pytest.mark.usefixtures("writes_in_place")
@pytest.mark.parametrize("kv", [None, KVBits(8, 4)])
def test_no_slab_moves(kv: KVBits | None) -> None:
    slabs = make_slabs("bfloat16", blocks=4, kv=kv)
    _, places = take(slabs, 4)
    for i, place in enumerate(places):
        fill(slabs, place, i)
    before = addresses(slabs)
    for source, target in ((0, 1), (1, 2), (2, 3)):
        copies = copy_out(slabs, places[source], 0, BLOCK_TOKENS)
        copy_in(slabs, places[target], 0, given(slabs, copies))
        mx.eval(slabs.arrays())
    assert addresses(slabs) == before


def test_names_say_which_layer_it_is() -> None:
    slabs = make_slabs()
    found = contents(slabs, slabs.full_groups, 5)
    more = [["keys", "values", "index", "wide", "flags"], ["index", "wide"]]
    assert [c.name for c in found] == [
        f"layers.{layer}.{name}"
        for layer, names in zip((0, 2, 1, 3, 4), [["keys", "values"]] * 3 + more, strict=True)
        for name in names
    ]
    assert [c.shape for c in found[4:]] == [
        *((1, 5, 96), (1, 5, 32)),
        *((1, 5, 64), (1, 5, 0), (3, 5, 32), (2, 5, 64), (1, 5, 5)),
        *((3, 5, 32), (2, 5, 64)),
    ]


def test_names_and_shapes_of_quantised_blocks_are_those_of_their_arrays() -> None:
    layer = FullLayer(2, 64, 80, more=MORE)
    found = contents(make_slabs("float16", (layer,), kv=KVBits(8, 4)), [0], 5)
    assert [(c.name.removeprefix("layers.0."), c.safetensors_dtype, c.shape) for c in found] == [
        ("keys.packed", "U32", (2, 5, 16)),
        ("keys.scales", "F16", (2, 5, 1)),
        ("keys.biases", "F16", (2, 5, 1)),
        ("values", "F16", (2, 5, 80)),
        ("index", "F16", (3, 5, 32)),
        ("wide.packed", "U32", (2, 5, 16)),
        ("wide.scales", "F32", (2, 5, 1)),
        ("wide.biases", "F32", (2, 5, 1)),
        ("flags", "U8", (1, 5, 5)),
    ]


@pytest.mark.parametrize(
    ("dtype", "name"), [("float32", "F32"), ("float16", "F16"), ("bfloat16", "BF16")]
)
def test_dtypes_have_the_names_of_the_safetensors_format(dtype: str, name: str) -> None:
    slabs = make_slabs(dtype, LAYERS[:2])
    assert {c.safetensors_dtype for c in contents(slabs, slabs.full_groups, 5)} == {name}


def test_a_slab_that_is_filled_at_once_is_copied_out_and_in() -> None:
    """As a model writes: keys whose heads and tokens were swapped, for all of a slab of one
    block.
    """
    slabs = make_slabs(layers=(FullLayer(2, 64, 64),), blocks=1)
    _, ((place,),) = take(slabs, 1)
    slab, start = slabs.locate(*place)
    keys, values = (mx.random.normal((1, BLOCK_TOKENS, 2, 64)).swapaxes(1, 2) for _ in range(2))
    slab.write(0, start, keys, values)
    copies = copy_out(slabs, [place], 0, BLOCK_TOKENS)
    for copy, part in zip(copies, (keys, values), strict=True):
        assert np.array_equal(copy, part[0])
    other = [np.full((2, BLOCK_TOKENS, 64), 3, np.float32) for _ in copies]
    before = [bytes(as_bytes(copy)) for copy in copies]
    copy_in(slabs, [place], 0, other)
    for part, there in zip(slab.arrays(), other, strict=True):
        assert np.array_equal(part[0], there)
    assert [bytes(as_bytes(copy)) for copy in copies] == before
