"""The report against figures worked out by hand, against mlx-lm's own batch caches, and against
the pool itself.
"""

from __future__ import annotations

import copy
import json
from dataclasses import FrozenInstanceError
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kv.arrays import make_slabs
from mlx_lm.models.cache import KVCache, RotatingKVCache

from mlx_blockpool.config import KVBits
from mlx_blockpool.kv.arena import KVArena
from mlx_blockpool.kv.prompt_cache import pooled_caches
from mlx_blockpool.model_files.memory import Allocation, BatchMemory, Comparison, batch_memory
from mlx_blockpool.spec import FullLayer, ModelCacheSpec, StateLayer, WindowLayer

KIB, MIB = 2**10, 2**20

# 1024 bytes a token: 4 layers * 2 heads * (32 + 32) values * 2 bytes.
TINY = ModelCacheSpec("tiny", (FullLayer(2, 32, 32),) * 4)
GEMMA = ModelCacheSpec(
    "gemma-3-12b", ((WindowLayer(8, 256, 256, 1024),) * 5 + (FullLayer(8, 256, 256),)) * 8
)
GPT_OSS = ModelCacheSpec(
    "gpt-oss-20b", (WindowLayer(8, 64, 64, 128), FullLayer(8, 64, 64)) * 12, "bfloat16"
)
STATE = StateLayer((((1, 3, 8), "float32"),))

LAYERS = st.one_of(
    st.builds(FullLayer, st.integers(1, 3), st.integers(1, 4), st.integers(1, 4)),
    st.builds(
        WindowLayer, st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), st.integers(1, 1100)
    ),
)
SPECS = st.builds(ModelCacheSpec, st.just("m"), st.lists(LAYERS, min_size=1, max_size=5).map(tuple))
LENGTHS = st.lists(
    st.one_of(st.integers(1, 3000), st.sampled_from([255, 256, 257, 1024])), min_size=1, max_size=6
)


def figures(comparison: Comparison) -> list[tuple[int, int]]:
    """(allocated, waste) of padded, grown and pool."""
    return [(a.allocated, a.waste) for a in (comparison.padded, comparison.grown, comparison.pool)]


# -- by hand ---------------------------------------------------------------------------------------


def test_three_agents_waste_6300_tokens_padded_and_188_in_blocks() -> None:
    (group,) = batch_memory(TINY, [500, 4000, 1200]).groups
    assert [s.padded.waste for s in group.sequences] == [3500, 0, 2800]
    # 2, 16 and 5 blocks
    assert [s.pool.allocated for s in group.sequences] == [512, 4096, 1280]
    assert [s.pool.waste for s in group.sequences] == [12, 96, 80]
    # 3 * 4000; once grown 3 * 4255; 23 blocks
    assert figures(group.tokens) == [(12_000, 6300), (12_765, 7065), (5888, 188)]
    assert group.tokens.padded.used == 500 + 4000 + 1200


def test_bytes_shares_and_ratio_of_three_agents() -> None:
    report = batch_memory(TINY, [500, 4000, 1200])
    of = report.bytes
    assert of == report.groups[0].bytes == report.groups[0].tokens.times(1024, 1024)
    assert (of.padded.allocated, of.padded.used, of.padded.waste) == (
        12_000 * KIB,
        5700 * KIB,
        6300 * KIB,
    )
    assert (of.pool.allocated, of.pool.used, of.pool.waste) == (5888 * KIB, 5700 * KIB, 188 * KIB)
    assert of.padded.waste_share == 6300 / 12_000 == 0.525
    assert of.padded.utilisation == 0.475
    assert of.pool.utilisation == 5700 / 5888
    assert of.saved == (12_000 - 5888) * KIB
    assert of.ratio == 12_000 / 5888


def test_blocks_are_quantised_and_mlx_lms_batch_is_not() -> None:
    # 4 layers * 2 heads * (32 + 32) values of 1 byte, and a scale and a bias of 2 bytes for each 32
    # of them
    spec, per_token = TINY.with_bits(KVBits(8, 8)), 4 * 2 * 2 * (32 + 4)
    report, before = batch_memory(spec, [500, 4000, 1200]), batch_memory(TINY, [500, 4000, 1200])
    (group,) = report.groups
    assert (group.bytes_per_token, group.padded_bytes_per_token) == (per_token, 1024) == (576, 1024)
    assert (report.bytes.padded, report.bytes.grown) == (before.bytes.padded, before.bytes.grown)
    assert report.bytes.pool == Allocation(5888 * 576, 5700 * 576)
    assert report.bytes.saved == 12_000 * 1024 - 5888 * 576
    # Two whole blocks of the first sequence are shared by the second.
    shared = batch_memory(spec, [600, 700], [4]).bytes
    assert shared.shared == 512 * 1024
    assert shared.pool.used == (600 + 700 - 512) * 576


def test_gemma_windows_are_padded_to_1024_tokens_at_most() -> None:
    window, full = batch_memory(GEMMA, [500, 4000, 1200]).groups
    # The windows hold 500, 1024 and 1024 tokens in 2, 4 and 4 blocks.
    assert [s.padded.allocated for s in window.sequences] == [1024, 1024, 1024]
    assert [s.padded.waste for s in window.sequences] == [524, 0, 0]
    assert figures(window.tokens) == [(3072, 524), (3072, 524), (2560, 12)]
    assert figures(full.tokens) == [(12_000, 6300), (12_765, 7065), (5888, 188)]
    # 40 and 8 layers of 8 heads * 512 values * 2 bytes
    assert (window.bytes_per_token, full.bytes_per_token) == (320 * KIB, 64 * KIB)
    total = batch_memory(GEMMA, [500, 4000, 1200]).bytes
    assert total.padded.allocated == 3072 * 320 * KIB + 12_000 * 64 * KIB
    assert total.pool.allocated == 10 * 80 * MIB + 23 * 16 * MIB
    assert total.pool.waste == 12 * 320 * KIB + 188 * 64 * KIB


def test_gpt_oss_windows_of_128_tokens_take_a_block_of_256() -> None:
    report = batch_memory(GPT_OSS, [100, 2000])
    window, full = report.groups
    # The windows hold 100 and 128 tokens; a block is larger than the window.
    assert [s.padded.allocated for s in window.sequences] == [128, 128]
    assert figures(window.tokens) == [(256, 28), (256, 28), (512, 284)]
    assert window.tokens.saved == -256
    assert figures(full.tokens) == [(4000, 1900), (4510, 2410), (256 + 2048, 204)]
    # 12 layers of 8 heads * 128 values * 2 bytes in both groups
    assert report.bytes.padded.allocated == (256 + 4000) * 24 * KIB
    assert report.bytes.pool.allocated == (512 + 2304) * 24 * KIB


def test_one_sequence_has_no_padding() -> None:
    tokens = batch_memory(TINY, [500]).groups[0].tokens
    assert figures(tokens) == [(500, 0), (755, 255), (512, 12)]
    assert (tokens.padded.waste_share, tokens.padded.utilisation) == (0.0, 1.0)
    assert tokens.saved == -12


@pytest.mark.parametrize(
    ("length", "allocated"), [(1, 256), (255, 256), (256, 256), (257, 512), (512, 512), (513, 768)]
)
def test_lengths_at_the_border_of_a_block(length: int, allocated: int) -> None:
    assert batch_memory(TINY, [length]).groups[0].tokens.pool == Allocation(allocated, length)


@pytest.mark.parametrize(
    ("length", "kept"), [(1023, 1023), (1024, 1024), (1025, 1024), (50_000, 1024)]
)
def test_lengths_at_the_border_of_a_window(length: int, kept: int) -> None:
    window = batch_memory(GEMMA, [length, 1]).groups[0]
    assert [s.padded for s in window.sequences] == [Allocation(kept, kept), Allocation(kept, 1)]
    assert [s.pool for s in window.sequences] == [Allocation(1024, kept), Allocation(256, 1)]


def test_layers_that_do_not_live_in_blocks_are_left_out() -> None:
    report = batch_memory(ModelCacheSpec("hybrid", (STATE, *TINY.layers, STATE)), [500, 4000])
    assert report.groups[0].group.layers == (1, 2, 3, 4)
    assert report.bytes == batch_memory(TINY, [500, 4000]).bytes


def test_reports_are_frozen_and_can_be_compared() -> None:
    report = batch_memory(TINY, [5])
    assert report == batch_memory(TINY, (5,))
    with pytest.raises(FrozenInstanceError):
        report.groups = ()  # type: ignore[misc]


def test_as_dict_has_every_figure() -> None:
    bytes_ = batch_memory(GPT_OSS, [100, 2000]).bytes
    found = bytes_.as_dict()
    assert json.loads(json.dumps(found)) == found
    assert found["padded"] == {
        "allocated": 4256 * 24 * KIB,
        "used": (228 + 2100) * 24 * KIB,
        "waste": 1928 * 24 * KIB,
        "waste_share": 1928 / 4256,
        "utilisation": 2328 / 4256,
    }
    assert found["saved"] == bytes_.saved == (4256 - 2816) * 24 * KIB
    assert found["ratio"] == bytes_.ratio == 4256 / 2816
    assert found["grown"]["allocated"] == (256 + 4510) * 24 * KIB


# -- whatever the batch ----------------------------------------------------------------------------


@given(SPECS, LENGTHS)
def test_blocks_never_take_more_than_padding_and_one_block_a_sequence(
    spec: ModelCacheSpec, lengths: list[int]
) -> None:
    report = batch_memory(spec, lengths)
    blocks = sum(spec.bytes_per_block(g) for g in spec.groups)
    assert report.bytes.pool.allocated <= report.bytes.padded.allocated + len(lengths) * blocks
    assert report.bytes.pool.allocated == sum(spec.bytes_per_agent(n) for n in lengths)


@given(SPECS, LENGTHS)
def test_blocks_waste_at_most_255_tokens_a_sequence(
    spec: ModelCacheSpec, lengths: list[int]
) -> None:
    for group in batch_memory(spec, lengths).groups:
        assert all(0 <= s.pool.waste <= 255 for s in group.sequences)
        assert 0 <= group.tokens.pool.waste <= 255 * len(lengths)


@given(SPECS, LENGTHS)
def test_what_is_used_is_allocated_and_growing_adds_at_most_255_tokens_a_sequence(
    spec: ModelCacheSpec, lengths: list[int]
) -> None:
    for group in batch_memory(spec, lengths).groups:
        for of in (group.tokens, *group.sequences):
            assert of.padded.used == of.grown.used == of.pool.used
            assert 0 < of.padded.used <= of.padded.allocated <= of.grown.allocated
            assert of.pool.used <= of.pool.allocated
            assert of.shared == 0
        assert group.tokens.grown.allocated - group.tokens.padded.allocated <= 255 * len(lengths)


@given(SPECS, LENGTHS, st.data())
def test_sharing_takes_no_more_and_padding_stays(
    spec: ModelCacheSpec, lengths: list[int], data: st.DataObject
) -> None:
    alone = batch_memory(spec, lengths)
    held = [
        data.draw(
            st.integers(
                max(spec.blocks(n, g.group.layer) for n in lengths), g.tokens.pool.allocated // 256
            )
        )
        for g in alone.groups
    ]
    shared = batch_memory(spec, lengths, held)
    assert shared.bytes.padded == alone.bytes.padded
    assert shared.bytes.grown == alone.bytes.grown
    for group, before, count in zip(shared.groups, alone.groups, held, strict=True):
        assert group.tokens.pool.allocated == 256 * count <= before.tokens.pool.allocated
        assert 0 < group.tokens.pool.used <= group.tokens.pool.allocated
        assert 0 <= group.tokens.pool.waste <= 255 * len(lengths)
        assert group.sequences == before.sequences


# -- mlx-lm's own batch ----------------------------------------------------------------------------

STOCK_SPEC = ModelCacheSpec(
    "stock",
    (FullLayer(2, 4, 6), WindowLayer(2, 4, 6, 300), WindowLayer(1, 4, 4, 100), FullLayer(2, 4, 6)),
    "float32",
)
STOCK_LENGTHS = [
    [1],
    [5, 40, 12],
    [100, 300],
    [300, 301, 99],
    [500, 4000, 1200],
    [256, 512],
    [257, 1, 255],
]


def append(caches: list[Any], count: int, batch: int = 1) -> None:
    """`count` tokens more in every layer."""
    for layer, cache in zip(STOCK_SPEC.layers, caches, strict=True):
        assert isinstance(layer, FullLayer)
        shape = (batch, layer.kv_heads, count)
        cache.update_and_fetch(
            mx.zeros((*shape, layer.key_dim)), mx.zeros((*shape, layer.value_dim))
        )


def single(tokens: int) -> list[Any]:
    """mlx-lm's caches of one sequence."""
    caches = [
        RotatingKVCache(x.max_size) if isinstance(x, WindowLayer) else KVCache()
        for x in STOCK_SPEC.layers
    ]
    if tokens:
        append(caches, tokens)
    return caches


def merged(lengths: list[int]) -> list[Any]:
    return [type(layer[0]).merge(list(layer)) for layer in zip(*map(single, lengths), strict=True)]


def nbytes(caches: list[Any]) -> int:
    return sum(c.nbytes for c in caches)


@pytest.mark.parametrize("lengths", STOCK_LENGTHS)
def test_padded_bytes_are_those_that_mlx_lm_merges(lengths: list[int]) -> None:
    assert batch_memory(STOCK_SPEC, lengths).bytes.padded.allocated == nbytes(merged(lengths))


@pytest.mark.parametrize("lengths", STOCK_LENGTHS)
def test_grown_bytes_are_those_after_mlx_lms_first_decode_step(lengths: list[int]) -> None:
    caches = merged([n - 1 for n in lengths])
    append(caches, 1, len(lengths))
    assert batch_memory(STOCK_SPEC, lengths).bytes.grown.allocated == nbytes(caches)


def test_a_batch_that_decodes_stays_between_padded_and_grown() -> None:
    lengths = [5, 290, 40]
    caches = merged(lengths)
    seen = []
    for _ in range(600):
        append(caches, 1, len(lengths))
        mx.eval([c.state for c in caches])
        lengths = [n + 1 for n in lengths]
        of = batch_memory(STOCK_SPEC, lengths).bytes
        assert of.padded.allocated <= nbytes(caches) <= of.grown.allocated
        seen += (
            [max(lengths)] if nbytes(caches) in (of.padded.allocated, of.grown.allocated) else []
        )
    # It grows at 291 tokens, is full at 546, and so on.
    assert seen == [291, 546, 547, 802, 803]


# -- the pool itself -------------------------------------------------------------------------------


def pooled(slabs: KVArena, tokens: int) -> list[Any]:
    caches = pooled_caches(slabs)
    write(caches, tokens)
    return caches


def write(caches: list[Any], tokens: int) -> None:
    for cache in caches:
        layer = cache.place.layer
        shape = (1, layer.kv_heads, tokens)
        cache.update_and_fetch(
            mx.zeros((*shape, layer.key_dim)), mx.zeros((*shape, layer.value_dim))
        )


def running(slabs: KVArena, sequences: list[list[Any]]) -> BatchMemory:
    """The report of sequences that hold all held blocks of a pool."""
    held = [counts.held for counts in slabs.pool.settle()]
    return batch_memory(slabs.spec, [caches[0].offset for caches in sequences], held)


def test_pool_bytes_are_those_of_the_blocks_that_sequences_hold() -> None:
    slabs = make_slabs((300, 0))
    sequences = [pooled(slabs, n) for n in (500, 256, 1200)]
    report = running(slabs, sequences)
    assert report == batch_memory(slabs.spec, [500, 256, 1200])
    assert report.bytes.pool.allocated == sum(nbytes(caches) for caches in sequences)
    held = [c.held * c.bytes_per_block for c in slabs.pool.counts()]
    assert [g.bytes.pool.allocated for g in report.groups] == held


def test_a_shared_prefix_is_held_once_and_padded_for_each() -> None:
    slabs = make_slabs()
    first = pooled(slabs, 600)
    sequences = [first, copy.deepcopy(first), copy.deepcopy(first)]
    for caches, own in zip(sequences, (100, 200, 300), strict=True):
        write(caches, own)
    tokens = running(slabs, sequences).groups[0].tokens
    # 700, 800 and 900 tokens are 3 + 4 + 4 blocks; two full ones are shared, the third was copied
    # by who went on in it.
    assert tokens.pool.allocated == (11 - 4) * 256
    assert tokens.pool.used == 512 + 188 + 288 + 388
    assert tokens.shared == 2 * 512
    assert tokens.pool.waste == (768 - 700) + (1024 - 800) + (1024 - 900)
    assert tokens.padded == Allocation(2700, 2400)


def test_forks_that_have_not_gone_on_use_what_one_of_them_uses() -> None:
    slabs = make_slabs()
    first = pooled(slabs, 10)
    forks = [copy.deepcopy(first) for _ in range(3)]
    assert running(slabs, [first, *forks]).groups[0].tokens.pool == Allocation(256, 10)


def test_blocks_held_beyond_the_lengths_are_waste() -> None:
    tokens = batch_memory(TINY, [500], [4]).groups[0].tokens
    assert tokens.pool == Allocation(1024, 500)
    assert tokens.shared == 0


def test_fewer_blocks_than_the_longest_sequence_needs_are_our_own_bug() -> None:
    with pytest.raises(
        AssertionError,
        match=r"full x4 .*: 15 blocks held < 16 of the longest sequence, 4000 tokens",
    ):
        batch_memory(TINY, [500, 4000], [15])
    with pytest.raises(ValueError, match="zip"):
        batch_memory(TINY, [500], [2, 2])
