"""Memory arithmetic against figures worked out by hand from the published configs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace

import pytest

from mlx_blockpool.config import KVBits
from mlx_blockpool.errors import SpecError
from mlx_blockpool.spec import (
    BLOCK_TOKENS,
    ChunkLayer,
    CompositeLayer,
    Form,
    FullLayer,
    LayerGroup,
    ModelCacheSpec,
    StateLayer,
    TokenArray,
    WindowLayer,
    blocks_for,
    figures_of,
    form_of,
)

KIB, MIB, GIB = 2**10, 2**20, 2**30

# Gemma 3 12B: every sixth of 48 layers is full, the others see 1024 tokens; 8 kv heads of 256.
GEMMA_FULL = FullLayer(8, 256, 256)
GEMMA_WINDOW = WindowLayer(8, 256, 256, 1024)
GEMMA = ModelCacheSpec("gemma-3-12b", ((GEMMA_WINDOW,) * 5 + (GEMMA_FULL,)) * 8)
LLAMA = ModelCacheSpec("llama-3.1-8b", (FullLayer(8, 128, 128),) * 32, "bfloat16")
QWEN = ModelCacheSpec("qwen-2.5-14b", (FullLayer(8, 128, 128),) * 48, "bfloat16")
GPT_OSS = ModelCacheSpec(
    "gpt-oss-20b", (WindowLayer(8, 64, 64, 128), FullLayer(8, 64, 64)) * 12, "bfloat16"
)
# Latents and rotary keys of one head, and an indexer's keys next to them, which stay as they are.
INDEXED = FullLayer(
    1,
    512,
    64,
    more=(
        TokenArray("index", 2, 128, quantisable=False),
        TokenArray("scale", 3, 4, "uint8"),
        TokenArray("wide", 2, 32, "float32"),
    ),
)
# Shapes of one Mamba layer in float32: 3 * 8 and 8 * 4 numbers.
STATE = StateLayer((((1, 3, 8), "float32"), ((1, 8, 4), "float32")))


def test_a_block_is_256_tokens() -> None:
    assert BLOCK_TOKENS == 256
    assert [blocks_for(n) for n in (0, 1, 255, 256, 257, 1024, 1025)] == [0, 1, 1, 1, 2, 4, 5]


@pytest.mark.parametrize("layer", [GEMMA_FULL, GEMMA_WINDOW])
def test_gemma_block_of_one_layer_is_2_mib_in_float16_and_a_little_more_than_half_of_it_at_8_bits(
    layer: FullLayer,
) -> None:
    # 256 tokens * 8 heads * (256 + 256) values * 2 bytes
    assert GEMMA.bytes_per_block_per_layer(layer) == 2 * MIB
    # A scale and a bias of 2 bytes for each 64 of the 2**20 values
    assert GEMMA.with_bits(KVBits(8, 8)).bytes_per_block_per_layer(layer) == 1 * MIB + 64 * KIB
    assert GEMMA.with_bits(KVBits(4, 4)).bytes_per_block_per_layer(layer) == 512 * KIB + 64 * KIB
    assert GEMMA.with_dtype("float32").bytes_per_block_per_layer(layer) == 4 * MIB


def test_gemma_window_is_a_ring_of_4_blocks() -> None:
    assert GEMMA_WINDOW.max_blocks == 4
    assert WindowLayer(8, 256, 256, 1025).max_blocks == 5
    assert GEMMA_FULL.max_blocks is None
    assert [GEMMA.blocks(n, GEMMA_WINDOW) for n in (0, 1, 256, 257, 1024, 1025, 100_000)] == [
        0,
        1,
        1,
        2,
        4,
        4,
        4,
    ]
    assert [GEMMA.blocks(n, GEMMA_FULL) for n in (0, 1, 256, 257, 1024, 1025, 100_000)] == [
        0,
        1,
        1,
        2,
        4,
        5,
        391,
    ]


def test_gemma_groups_are_its_40_windows_and_its_8_full_layers() -> None:
    windows = tuple(i for i in range(48) if i % 6 != 5)
    assert GEMMA.groups == (
        LayerGroup(GEMMA_WINDOW, windows),
        LayerGroup(GEMMA_FULL, (5, 11, 17, 23, 29, 35, 41, 47)),
    )
    assert [g.name for g in GEMMA.groups] == [
        "window 1024 x40 (8 heads, dim 256)",
        "full x8 (8 heads, dim 256)",
    ]
    assert [GEMMA.bytes_per_block(g) for g in GEMMA.groups] == [80 * MIB, 16 * MIB]


def test_gemma_agent_pays_for_windows_only_until_they_are_full() -> None:
    assert GEMMA.bytes_per_agent(256) == 96 * MIB
    assert GEMMA.bytes_per_agent(1024) == 4 * 96 * MIB
    assert GEMMA.bytes_per_agent(1025) == 4 * 80 * MIB + 5 * 16 * MIB
    # 32768 tokens: 128 blocks of 16 MiB and the rings.
    assert GEMMA.bytes_per_agent(32_768) == 2048 * MIB + 320 * MIB
    # 8 layers * 8 heads * 512 values * 2 bytes
    assert GEMMA.bytes_per_token() == 64 * KIB


def test_llama_token_is_131072_bytes() -> None:
    assert LLAMA.bytes_per_token() == 131_072
    assert LLAMA.bytes_per_token_per_layer(LLAMA.layers[0]) == 4096
    assert (
        LLAMA.with_bits(KVBits()).bytes_per_token_per_layer(LLAMA.layers[0])
        == 2048 + 2048 // 64 * 4
    )
    assert LLAMA.groups == (LayerGroup(FullLayer(8, 128, 128), tuple(range(32))),)
    assert LLAMA.bytes_per_block(LLAMA.groups[0]) == 32 * MIB
    # In whole blocks: token 8193 costs a block more.
    assert LLAMA.bytes_per_agent(8192) == 1 * GIB
    assert LLAMA.bytes_per_agent(8193) == 1 * GIB + 32 * MIB


def test_gpt_oss_window_is_one_block_and_comes_first() -> None:
    window, full = GPT_OSS.groups
    assert (window.layer, window.layers) == (WindowLayer(8, 64, 64, 128), tuple(range(0, 24, 2)))
    assert (full.layer, full.layers) == (FullLayer(8, 64, 64), tuple(range(1, 24, 2)))
    assert window.layer.max_blocks == 1
    # 12 layers * 256 tokens * 8 heads * 128 values * 2 bytes
    assert [GPT_OSS.bytes_per_block(g) for g in GPT_OSS.groups] == [6 * MIB, 6 * MIB]
    assert GPT_OSS.bytes_per_token() == 24 * KIB
    assert GPT_OSS.bytes_per_agent(10_000) == 6 * MIB + 40 * 6 * MIB


def test_qwen_agent_of_10000_tokens() -> None:
    # 48 layers * 8 heads * 256 values * 2 bytes
    assert QWEN.bytes_per_token() == 196_608
    assert QWEN.bytes_per_agent(10_000) == 40 * 256 * 196_608


def test_keys_and_values_may_differ_in_size() -> None:
    layer = FullLayer(1, 192, 128)
    spec = ModelCacheSpec("mla", (layer,))
    assert layer.values_per_token == 320
    assert spec.bytes_per_token() == 640
    assert spec.groups[0].name == "full x1 (1 heads, dim 192/128)"


def test_all_arrays_of_a_layer_are_counted_in_their_own_heads_and_types() -> None:
    spec = ModelCacheSpec("mla", (INDEXED, FullLayer(1, 512, 64)), "bfloat16")
    assert [array.name for array in INDEXED.arrays] == ["keys", "values", "index", "scale", "wide"]
    assert INDEXED.values_per_token == 512 + 64 + 2 * 128 + 3 * 4 + 2 * 32
    assert spec.bytes_per_token_per_layer(INDEXED) == 2 * (512 + 64 + 256) + 12 + 4 * 64
    assert spec.bytes_per_token() == spec.bytes_per_token_per_layer(INDEXED) + 2 * 576
    assert [group.name for group in spec.groups] == [
        "full x1 (1 heads, dim 512/64, index 2x128, scale 3x4, wide 2x32)",
        "full x1 (1 heads, dim 512/64)",
    ]


def test_arrays_are_quantised_in_the_bits_of_keys_unless_they_must_not_be() -> None:
    spec = ModelCacheSpec("mla", (INDEXED,), "bfloat16").with_bits(KVBits(8, 4))
    assert spec.forms(INDEXED) == (Form(8, 64), Form(4, 64), None, None, Form(8, 32))
    # 512 bytes of words and 8 pairs of 2 bytes; 32 and one pair; then 2 heads of a pair of 4 bytes.
    assert spec.bytes_per_token_per_layer(INDEXED) == (512 + 32) + (32 + 4) + 512 + 12 + 2 * 40
    alone = FullLayer(1, 80, 80, more=(TokenArray("index", 1, 64),))
    assert ModelCacheSpec("m", (alone,)).with_bits(KVBits(8, 8)).bits == KVBits(8, 8)
    fixed = FullLayer(1, 80, 80, more=(TokenArray("index", 1, 64, quantisable=False),))
    assert ModelCacheSpec("m", (fixed,)).with_bits(KVBits(8, 8)).bits is None


def test_a_layer_without_keys_and_values_has_its_other_arrays_alone() -> None:
    latent, rotary = TokenArray("latent", 1, 512), TokenArray("rotary", 1, 64, quantisable=False)
    layer = WindowLayer(0, 0, 0, 300, more=(latent, rotary))
    spec = ModelCacheSpec("m", (layer,), "float16").with_bits(KVBits(4, 8))
    assert layer.arrays == (latent, rotary)
    assert spec.forms(layer) == (Form(4, 64), None)
    assert spec.groups[0].name == "window 300 x1 (latent 1x512, rotary 1x64)"
    # A cache that a model never uses has no arrays at all.
    assert FullLayer(0, 0, 0).values_per_token == 0
    assert ModelCacheSpec("m", (FullLayer(0, 0, 0),)).groups == ()


def test_a_window_in_place_of_a_full_layer_has_its_arrays() -> None:
    (window,) = ModelCacheSpec("m", (INDEXED,)).with_windows(512, 4).layers
    assert window == WindowLayer(1, 512, 64, 512, 4, more=INDEXED.more)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: FullLayer(1, 2, 2, more=(TokenArray("keys", 1, 2),)), "different names"),
        (lambda: FullLayer(1, 2, 2, more=(TokenArray("a", 1, 2),) * 2), "different names"),
        (lambda: FullLayer(1, 0, 0, more=(TokenArray("keys", 1, 0),)), "at least one number"),
        (lambda: TokenArray("a", 1, 0), r"a: .* positive integers \(got 1 and 0\)"),
        (lambda: TokenArray("a", 0, 2), r"a: .* positive integers \(got 0 and 2\)"),
        (lambda: TokenArray(7, 1, 2), r"an identifier \(got 7\)"),  # type: ignore[arg-type]
        (lambda: TokenArray("a", 1, 2, ["float16"]), r"dtype must be .* \(got \['float16'\]\)"),  # type: ignore[arg-type]
        (lambda: WindowLayer(1, 2, 2, 300, more=[TokenArray("a", 1, 2)]), "tuple"),  # type: ignore[arg-type]
        (lambda: ChunkLayer(1, 2, 2, 300, more=("a",)), "tuple"),  # type: ignore[arg-type]
        (lambda: TokenArray("a", 1.5, 2), r"positive integers \(got 1.5 and 2\)"),  # type: ignore[arg-type]
        (lambda: TokenArray("a", 1, -2), r"positive integers \(got 1 and -2\)"),
        (lambda: TokenArray("a.b", 1, 2), "'a.b'"),
        (lambda: TokenArray("a", 1, 2, "complex64"), "'complex64'"),
    ],
)
def test_arrays_that_no_layer_can_have_are_refused(wrong: Callable[[], object], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        wrong()


def test_layers_that_differ_in_any_figure_are_different_groups() -> None:
    full, window = FullLayer(1, 2, 2), WindowLayer(1, 2, 2, 512)
    layers = (full, window, WindowLayer(1, 2, 2, 512, keep=4), FullLayer(2, 2, 2), window, full)
    spec = ModelCacheSpec("m", layers)
    assert [g.layers for g in spec.groups] == [(0, 5), (1, 4), (2,), (3,)]


def test_state_costs_the_same_whatever_the_context() -> None:
    spec = ModelCacheSpec("mamba", (STATE, STATE))
    assert spec.fixed_bytes_per_agent() == 2 * (3 * 8 + 8 * 4) * 4
    assert spec.bytes_per_agent(0) == spec.bytes_per_agent(50_000) == 448
    assert spec.bytes_per_token() == 0
    assert spec.blocks(50_000, STATE) == 0
    assert spec.groups == ()
    assert spec.needs_checkpoints


def test_chunk_layers_keep_all_tokens() -> None:
    chunk = ChunkLayer(1, 2, 2, 8192)
    spec = ModelCacheSpec("llama4", (chunk, FullLayer(1, 2, 2)), "float32")
    assert [spec.blocks(n, chunk) for n in (1, 8192, 8193, 20_000)] == [1, 32, 33, 79]
    assert [g.layers for g in spec.groups] == [(0,), (1,)]
    assert not spec.needs_checkpoints
    assert spec.bytes_per_token() == 2 * 16
    assert spec.bytes_per_agent(20_000) == 2 * 79 * 4096


def test_composite_is_the_sum_of_its_parts() -> None:
    full, window = FullLayer(1, 2, 2), WindowLayer(1, 2, 2, 512)
    layer = CompositeLayer((STATE, full, window))
    spec = ModelCacheSpec("hybrid", (layer,), "float32")
    assert [spec.blocks(1000, leaf) for leaf in spec.leaves] == [0, 4, 2]
    assert [spec.bytes_per_block_per_layer(leaf) for leaf in spec.leaves] == [0, 4096, 4096]
    assert spec.fixed_bytes_per_agent() == 224
    assert spec.bytes_per_agent(1000) == 224 + 6 * 4096
    assert spec.leaves == (STATE, full, window)
    assert [g.layers for g in spec.groups] == [(1,), (2,)]
    assert spec.needs_checkpoints


def test_windows_need_checkpoints_and_full_layers_need_none() -> None:
    assert GEMMA.needs_checkpoints
    assert not LLAMA.needs_checkpoints


def test_fingerprint_ignores_the_name_of_the_model() -> None:
    assert len(GEMMA.fingerprint()) == 32
    assert int(GEMMA.fingerprint(), 16) >= 0
    assert replace(GEMMA, model_id="other").fingerprint() == GEMMA.fingerprint()


def test_fingerprint_changes_with_everything_that_shapes_the_caches() -> None:
    full, window = FullLayer(1, 2, 2), WindowLayer(1, 2, 2, 512)
    spec = ModelCacheSpec("m", (full, window))
    others = [
        spec.with_dtype("bfloat16"),
        replace(spec, layers=(window, full)),
        replace(spec, layers=(full, window, window)),
        replace(spec, layers=(full, full)),
        replace(spec, layers=(full, WindowLayer(1, 2, 2, 512, keep=4))),
        replace(spec, layers=(full, WindowLayer(1, 2, 2, 256))),
        replace(spec, layers=(full, ChunkLayer(1, 2, 2, 512))),
        replace(spec, layers=(FullLayer(1, 2, 4), window)),
        replace(spec, layers=(FullLayer(1, 4, 2), window)),
        replace(spec, layers=(full, CompositeLayer((window,)))),
        replace(spec, layers=(full, STATE)),
        *(
            replace(spec, layers=(FullLayer(1, 2, 2, more=(array,)), window))
            for array in (
                TokenArray("a", 1, 32),
                TokenArray("b", 1, 32),
                TokenArray("a", 2, 32),
                TokenArray("a", 1, 64),
                TokenArray("a", 1, 32, "float32"),
                TokenArray("a", 1, 32, quantisable=False),
            )
        ),
    ]
    fingerprints = [s.fingerprint() for s in (spec, *others)]
    assert len(set(fingerprints)) == len(fingerprints)


def test_fingerprint_without_bits_is_what_it_always_was() -> None:
    # The names of folders that users have on their disks.
    full, window = FullLayer(1, 2, 2), WindowLayer(1, 2, 2, 512)
    hybrid = ModelCacheSpec(
        "hybrid", (CompositeLayer((STATE, full, window)), ChunkLayer(1, 2, 2, 8192)), "float32"
    )
    assert [spec.fingerprint() for spec in (GEMMA, LLAMA, QWEN, GPT_OSS, hybrid)] == [
        "be7b7c2d63f8c07c12d212ac3970466c",
        "781a56c2099aec3f4f5e4db712ae9f9b",
        "3cff5694630219e29487ca79483840a9",
        "dcdd624679b714606f9814f4f51885eb",
        "52b22bd8b40b4b0415166c30225f770a",
    ]
    assert LLAMA.with_bits(KVBits()).with_bits(None).fingerprint() == LLAMA.fingerprint()


def test_a_layer_without_further_arrays_is_written_as_before_there_were_any() -> None:
    # Ranks compare these words.
    layer = WindowLayer(1, 2, 4, 512)
    text = "WindowLayer(kv_heads=1, key_dim=2, value_dim=4, max_size=512, keep=0)"
    assert repr(layer) == text
    assert LayerGroup(layer, (0,)).kind == f"window {text}"
    assert list(figures_of(layer)) == ["kv_heads", "key_dim", "value_dim", "max_size", "keep"]
    with_more = replace(layer, more=(TokenArray("a", 1, 2),))
    assert "more=(TokenArray(name='a', heads=1, dim=2," in LayerGroup(with_more, (0,)).kind


def test_fingerprint_changes_with_the_form_of_keys_or_values() -> None:
    # 96 is no multiple of 64 or 128, so that groups of 32 are taken in their place.
    odd = ModelCacheSpec("phi", (FullLayer(1, 96, 96),))
    all_bits = [
        KVBits(8, 8),
        KVBits(4, 4),
        KVBits(8, 4),
        KVBits(4, 8),
        KVBits(8, None),
        KVBits(None, 8),
    ]
    fingerprints = [odd.fingerprint(), *(odd.with_bits(bits).fingerprint() for bits in all_bits)]
    assert len(set(fingerprints)) == len(fingerprints)
    assert len({odd.with_bits(KVBits(8, 8, group)).fingerprint() for group in (32, 64, 128)}) == 1
    assert len({LLAMA.with_bits(KVBits(8, 8, group)).fingerprint() for group in (32, 64, 128)}) == 3


@pytest.mark.parametrize(
    ("dim", "group_size", "expected"),
    [
        (128, 64, Form(8, 64)),
        (128, 128, Form(8, 128)),
        (64, 128, Form(8, 32)),
        (96, 64, Form(8, 32)),
        (32, 64, Form(8, 32)),
        (80, 64, None),
        (0, 64, None),
    ],
)
def test_rows_are_quantised_in_groups_that_divide_them(
    dim: int, group_size: int, expected: Form | None
) -> None:
    assert form_of(dim, 8, group_size) == expected
    assert form_of(dim, None, group_size) is None


@pytest.mark.parametrize(
    ("layer", "dtype", "bits", "expected"),
    [
        # 128 bytes of keys with 2 * 2 scales and biases of 2 bytes; 64 of values with 1 * 2 of them
        (FullLayer(1, 128, 64), "bfloat16", KVBits(8, 8), 128 + 8 + 64 + 4),
        (FullLayer(1, 128, 64), "bfloat16", KVBits(4, 4), 64 + 8 + 32 + 4),
        (FullLayer(1, 128, 64), "bfloat16", KVBits(8, 4), 128 + 8 + 32 + 4),
        (FullLayer(1, 128, 64), "bfloat16", KVBits(8, None), 128 + 8 + 128),
        (FullLayer(1, 128, 64), "float32", KVBits(8, 8), 128 + 16 + 64 + 8),
        (FullLayer(1, 128, 64), "float32", KVBits(8, 8, 32), 128 + 32 + 64 + 16),
        # 80 stays as it is, 96 has three groups of 32
        (WindowLayer(2, 80, 96, 512), "float16", KVBits(8, 8), 2 * (160 + 96 + 12)),
        (ChunkLayer(2, 64, 64, 8192), "float16", KVBits(4, 8), 2 * (32 + 4 + 64 + 4)),
    ],
)
def test_bytes_of_quantised_rows(layer: FullLayer, dtype: str, bits: KVBits, expected: int) -> None:
    spec = ModelCacheSpec("m", (layer, STATE), dtype).with_bits(bits)
    assert spec.bytes_per_token_per_layer(layer) == expected
    assert spec.bytes_per_block(spec.groups[0]) == 256 * expected
    assert spec.bytes_per_agent(300) == 2 * 256 * expected + STATE.nbytes


@pytest.mark.parametrize(("bits", "share"), [(8, 0.53125), (4, 0.28125)])
def test_blocks_of_a_16_bit_model_shrink_to_half_and_to_28_percent(bits: int, share: float) -> None:
    for spec in (GEMMA, LLAMA, GPT_OSS):
        assert spec.with_bits(KVBits(bits, bits)).bytes_per_agent(
            10_000
        ) == share * spec.bytes_per_agent(10_000)


def test_bits_that_quantise_nothing_are_none() -> None:
    states, odd = ModelCacheSpec("mamba", (STATE,)), ModelCacheSpec("m", (FullLayer(2, 80, 100),))
    assert LLAMA.with_bits(KVBits(None, None)) == LLAMA
    assert states.with_bits(KVBits()).bits is None
    assert odd.with_bits(KVBits()).bits is None
    assert LLAMA.with_bits(KVBits()).forms(LLAMA.groups[0].layer) == (Form(8, 64), Form(8, 64))
    assert LLAMA.forms(LLAMA.groups[0].layer) == (None, None)


def test_windows_and_dtypes_keep_the_bits() -> None:
    spec = LLAMA.with_bits(KVBits(8, 4))
    assert spec.with_windows(512, 4).bits == spec.with_dtype("float32").bits == KVBits(8, 4)


def test_specs_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        LLAMA.dtype = "float32"  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        GEMMA_WINDOW.max_size = 512  # type: ignore[misc]
    assert hash(replace(LLAMA)) == hash(LLAMA)


def test_an_unknown_dtype_is_refused_with_both_figures() -> None:
    with pytest.raises(
        SpecError, match=r"m: dtype must be one of bfloat16, float16, float32 \(got 'int4'\)"
    ):
        ModelCacheSpec("m", (FullLayer(1, 2, 2),), "int4")
    with pytest.raises(SpecError, match="int8"):
        LLAMA.with_dtype("int8")


def test_a_spec_without_layers_is_refused() -> None:
    with pytest.raises(SpecError, match="m: a spec needs at least one layer"):
        ModelCacheSpec("m", ())
