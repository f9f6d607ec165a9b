"""Figures against hand arithmetic from the published configs, against mlx-lm's own caches, and
against the spec.
"""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import QuantizedKVCache
from published import (
    DEEPSEEK_V32,
    GEMMA_12B,
    GPT_OSS_20B,
    LLAMA4_SCOUT,
    LLAMA_8B,
    QWEN3_NEXT_80B,
    QWEN_14B,
)

from mlx_blockpool.config import KVBits
from mlx_blockpool.errors import SpecError
from mlx_blockpool.model_files.calculator import AgentCost, Memory, ModelPlan, Weights, cost_of
from mlx_blockpool.plugins import spec_from_config
from mlx_blockpool.spec import (
    ChunkLayer,
    CompositeLayer,
    FullLayer,
    LayerSpec,
    ModelCacheSpec,
    StateLayer,
    TokenArray,
    WindowLayer,
)

TOKENS = 4096


def cost(config: dict[str, Any], tokens: int = TOKENS, bits: int | None = None) -> AgentCost:
    return cost_of(quantised(spec_from_config(copy.deepcopy(config), "m"), bits), tokens)


def quantised(spec: ModelCacheSpec, bits: int | None) -> ModelCacheSpec:
    return spec.with_bits(bits and KVBits(bits, bits))


def figures(of: AgentCost) -> tuple[int, int, int, int]:
    return of.per_token, of.fixed, of.agent, of.checkpoint


# -- by hand ---------------------------------------------------------------------------------------


def test_llama_8b() -> None:
    # 32 layers * 8 heads * (128 + 128) values * 2 bytes
    per_token = 32 * 8 * (128 + 128) * 2
    assert per_token == 131_072
    assert figures(cost(LLAMA_8B)) == (per_token, 0, 4096 * per_token, 0)
    assert 4096 * per_token == 536_870_912
    # 65,536 values of 1 byte, and for each 64 of them a scale and a bias of 2 bytes
    assert cost(LLAMA_8B, bits=8).per_token == 65_536 + 65_536 // 64 * 4 == 69_632
    assert cost(LLAMA_8B, bits=4).per_token == 32_768 + 4096 == 36_864
    (layers,) = cost(LLAMA_8B).layers
    assert (len(layers.indices), layers.per_block, layers.at_most) == (32, 256 * 131_072, None)


def test_gemma_12b() -> None:
    # every sixth of 48 layers is full; 8 heads * (256 + 256) values * 2 bytes = 8,192 bytes a token
    # and layer
    full, windows = 8 * 8192, 40 * 8192
    assert (full, windows) == (65_536, 327_680)
    ring = 1024 * windows
    assert ring == 335_544_320
    assert figures(cost(GEMMA_12B)) == (full, ring, 4096 * full + ring, ring)
    assert 4096 * full + ring == 603_979_776
    # 256 bytes of 8-bit values and 4 * 4 bytes beside them instead of 512 bytes
    assert figures(cost(GEMMA_12B, bits=8)) == tuple(
        n * 272 // 512 for n in figures(cost(GEMMA_12B))
    )
    # 2368 MiB at 32,768 tokens, and with 8 bits little more than half of that.
    agents = [cost(GEMMA_12B, 32_768, bits).agents(12 * 2**30) for bits in (None, 8)]
    assert (
        agents,
        cost(GEMMA_12B, 32_768).agents(2368 * 2**20),
        cost(GEMMA_12B, 32_768).agents(2368 * 2**20 - 1),
    ) == (
        [5, 9],
        1,
        0,
    )
    # A window of 1,024 tokens that has seen 300 takes two blocks.
    assert figures(cost(GEMMA_12B, 300)) == (full, ring, 512 * (full + windows), 512 * windows)


def test_gpt_oss_20b() -> None:
    # 12 full layers and 12 windows; 8 heads * (64 + 64) values * 2 bytes = 2,048 bytes a token and
    # layer
    half = 12 * 2048
    assert half == 24_576
    # a window of 128 tokens takes a block of 256
    ring = 256 * half
    assert ring == 6_291_456
    assert figures(cost(GPT_OSS_20B)) == (half, ring, 4096 * half + ring, ring)
    assert 4096 * half + ring == 106_954_752
    assert [layers.at_most for layers in cost(GPT_OSS_20B).layers] == [ring, None]


def test_qwen_14b() -> None:
    # 48 layers * 8 heads * (128 + 128) values * 2 bytes
    assert figures(cost(QWEN_14B)) == (196_608, 0, 4096 * 196_608, 0)
    # 10,000 tokens are 40 blocks.
    assert cost(QWEN_14B, 10_000).agent == 40 * 256 * 196_608


def test_qwen3_next_80b() -> None:
    # 12 full layers * 2 heads * (256 + 256) values * 2 bytes
    per_token = 12 * 2 * 512 * 2
    # 36 linear layers: the last 3 inputs of a convolution over 2 * 16 * 128 + 32 * 128 channels in
    # bfloat16, and 32 heads of 128 * 128 sums in float32
    convolution, sums = 3 * (2 * 16 * 128 + 32 * 128) * 2, 32 * 128 * 128 * 4
    state = 36 * (convolution + sums)
    assert (per_token, state) == (24_576, 77_266_944)
    assert figures(cost(QWEN3_NEXT_80B)) == (per_token, state, 4096 * per_token + state, state)
    # State arrays are not quantised.
    assert cost(QWEN3_NEXT_80B, bits=8).fixed == state
    linear, full = cost(QWEN3_NEXT_80B).layers
    assert (len(linear.indices), linear.per_token, linear.at_most) == (36, 0, state)
    assert (len(full.indices), full.indices[0], full.at_most) == (12, 3, None)


def test_llama4_scout() -> None:
    # Three of four layers read a chunk of 8,192 tokens and keep all; 8 heads * (128 + 128) values *
    # 2 bytes a token and layer
    per_token = 48 * 4096
    assert figures(cost(LLAMA4_SCOUT)) == (per_token, 0, 4096 * per_token, 0)


def test_deepseek_v32_has_two_caches_in_each_layer() -> None:
    # 61 layers: a latent of 512 and its 64 rotated keys, and the indexer's keys of 128 with as many
    # zeros as values
    assert figures(cost(DEEPSEEK_V32)) == (61 * (576 + 256) * 2, 0, 4096 * 61 * 832 * 2, 0)
    (layers,) = cost(DEEPSEEK_V32).layers
    assert isinstance(layers.layer, CompositeLayer)


def test_agents_that_fit_are_what_the_weights_leave() -> None:
    plan = ModelPlan(
        spec_from_config(LLAMA_8B, "m"),
        "llama",
        Weights(4_517_404_672, "files"),
        Memory(24 * 10**9, "option"),
        TOKENS,
    )
    assert plan.left == 24_000_000_000 - 4_517_404_672
    # 19,482,595,328 / 536,870,912 = 36.3, and / 285,212,672 = 68.3
    assert (plan.agents, replace(plan, bits=KVBits()).agents) == (36, 68)
    assert replace(plan, weights=Weights()).left == 24 * 10**9
    crowded = replace(plan, memory=Memory(4 * 10**9, "option"))
    assert (crowded.left, crowded.agents) == (-517_404_672, 0)


def test_as_dict_has_every_figure() -> None:
    plan = ModelPlan(
        spec_from_config(copy.deepcopy(GPT_OSS_20B), "gpt-oss-20b"),
        "gpt_oss",
        Weights(13_761_264_768, "estimate", 20_914_757_184, 4),
        Memory(24 * 10**9, "option"),
        TOKENS,
        KVBits(8, 8),
        131_072,
    )
    found = plan.as_dict()
    assert json.loads(json.dumps(found)) == found
    assert list(found) == [
        *(
            "model",
            "model_type",
            "dtype",
            "block_tokens",
            "context",
            "shared",
            "longest_context",
            "kv_bits",
            "kv_group_size",
        ),
        *("groups", "kv", "weights", "memory", "left_bytes", "agents"),
    ]
    # 12 layers * 8 heads * (64 + 64) values of 1 byte, and 4 bytes for each 64
    per_token = 12 * 8 * 128 * 68 // 64
    assert found["groups"][0] == {
        "kind": "window",
        "kv_heads": 8,
        "key_dim": 64,
        "value_dim": 64,
        "max_size": 128,
        "keep": 0,
        "layers": 12,
        "bytes_per_token": per_token,
        "bytes_per_block": 256 * per_token,
        "bytes_at_most": 256 * per_token,
        "bytes_at_context": 256 * per_token,
    }
    assert found["groups"][1]["bytes_at_most"] is None
    assert list(found["kv"]) == ["as_it_is", "bits_8", "bits_4"]
    assert found["kv"]["as_it_is"] == {
        "bytes_per_token": 24_576,
        "bytes_per_block": 6_291_456,
        "fixed_bytes": 6_291_456,
        "agent_bytes": 106_954_752,
        "checkpoint_bytes": 6_291_456,
        "agents": 95,
    }
    assert found["weights"] == {
        "bytes": 13_761_264_768,
        "source": "estimate",
        "parameters": 20_914_757_184,
        "bits": 4,
    }
    assert found["left_bytes"] == 24_000_000_000 - 13_761_264_768
    assert found["agents"] == found["kv"]["bits_8"]["agents"] == 180
    mixed = replace(plan, bits=KVBits(8, 4, 32)).as_dict()
    assert (found["kv_bits"], mixed["kv_bits"], mixed["kv_group_size"]) == (
        8,
        {"keys": 8, "values": 4},
        32,
    )
    # Keys of 1 byte and values of half a byte, and 4 bytes for each 32
    assert mixed["groups"][0]["bytes_per_token"] == 12 * 8 * (64 + 8 + 32 + 8)
    assert list(mixed["kv"]) == ["as_it_is", "bits_8", "bits_4", "bits_8_4"]
    assert mixed["agents"] == mixed["kv"]["bits_8_4"]["agents"]


def test_parts_of_composite_layers_and_shapes_of_states_are_in_as_dict() -> None:
    state = StateLayer((((1, 3, 8), "float32"),))
    spec = ModelCacheSpec("m", (CompositeLayer((state, FullLayer(1, 64, 64))),))
    (group,) = ModelPlan(spec, "", Weights(), Memory(10**9, "machine"), 1).as_dict()["groups"]
    assert group["parts"] == [
        {"kind": "state", "arrays": [{"shape": [1, 3, 8], "dtype": "float32"}]},
        {"kind": "full", "kv_heads": 1, "key_dim": 64, "value_dim": 64},
    ]


def test_further_arrays_are_in_as_dict_and_in_all_sums() -> None:
    index = TokenArray("index", 2, 128, "float32", quantisable=False)
    spec = ModelCacheSpec("m", (FullLayer(1, 64, 64, more=(index,)),) * 3)
    found = ModelPlan(spec, "", Weights(), Memory(10**9, "machine"), 1, bits=KVBits(8, 8)).as_dict()
    (group,) = json.loads(json.dumps(found["groups"]))
    assert group["more"] == [
        {"name": "index", "heads": 2, "dim": 128, "dtype": "float32", "quantisable": False}
    ]
    # 64 bytes and a pair of 2 for keys and for values; 2 heads of 128 numbers of 4 bytes.
    per_token = 3 * (2 * (64 + 4) + 2 * 128 * 4)
    assert group["bytes_per_token"] == found["kv"]["bits_8"]["bytes_per_token"] == per_token
    assert found["kv"]["as_it_is"]["bytes_per_token"] == 3 * (2 * 128 + 1024)


# -- mlx-lm's own quantised cache ------------------------------------------------------------------


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_quantised_bytes_are_those_of_mlx_lms_quantised_cache(bits: int, dtype: str) -> None:
    cache = QuantizedKVCache(group_size=64, bits=bits)
    kind = getattr(mx, dtype)
    cache.update_and_fetch(mx.zeros((1, 3, 256, 128), kind), mx.zeros((1, 3, 256, 64), kind))
    found = cost_of(quantised(ModelCacheSpec("m", (FullLayer(3, 128, 64),), dtype), bits), 256)
    assert (
        found.agent
        == found.layers[0].per_block
        == sum(part.nbytes for part in (*cache.keys, *cache.values))
    )


def test_what_mlx_cannot_quantise_stays_as_it_is() -> None:
    spec = ModelCacheSpec("m", (FullLayer(2, 80, 128), WindowLayer(1, 96, 64, 300)))
    with pytest.raises(ValueError, match="divisible"):
        mx.quantize(mx.zeros((1, 80)), group_size=32, bits=8)
    # 80 values of 2 bytes, and 128 of 1 byte with 2 * 4 bytes beside them
    assert cost_of(quantised(spec, 8), 256).per_token == 2 * (160 + 136)


# -- whatever the model ----------------------------------------------------------------------------

DIMS = st.sampled_from([1, 3, 64, 80, 128])
HEADS = st.integers(1, 3)
LEAVES: st.SearchStrategy[LayerSpec] = st.one_of(
    st.builds(FullLayer, HEADS, DIMS, DIMS),
    st.builds(WindowLayer, HEADS, DIMS, DIMS, st.integers(1, 1100)),
    st.builds(ChunkLayer, HEADS, DIMS, DIMS, st.integers(1, 1100)),
    st.builds(StateLayer, st.just((((1, 3, 8), "bfloat16"), ((1, 5), "float32")))),
)
LAYERS = st.one_of(
    LEAVES, st.builds(CompositeLayer, st.lists(LEAVES, min_size=1, max_size=3).map(tuple))
)
SPECS = st.builds(ModelCacheSpec, st.just("m"), st.lists(LAYERS, min_size=1, max_size=6).map(tuple))
CONTEXTS = st.one_of(st.integers(1, 5000), st.sampled_from([255, 256, 257, 1024, 10**9]))


@given(SPECS, CONTEXTS)
def test_an_agent_costs_what_the_spec_says(spec: ModelCacheSpec, tokens: int) -> None:
    found = cost_of(spec, tokens)
    assert found.agent == spec.bytes_per_agent(tokens)
    assert sorted(index for layers in found.layers for index in layers.indices) == list(
        range(len(spec.layers))
    )


@given(SPECS, CONTEXTS)
def test_an_agent_is_its_checkpoint_and_its_growing_blocks(
    spec: ModelCacheSpec, tokens: int
) -> None:
    found = cost_of(spec, tokens)
    assert found.agent == found.checkpoint + -(-tokens // 256) * 256 * found.per_token
    assert found.checkpoint <= found.fixed
    assert cost_of(spec, 10**6).checkpoint == found.fixed


@given(SPECS, CONTEXTS)
def test_fewer_bits_and_fewer_tokens_never_cost_more(spec: ModelCacheSpec, tokens: int) -> None:
    costs = [cost_of(quantised(spec, bits), tokens) for bits in (4, 8, None)]
    for less, more in pairwise(costs):
        assert all(a <= b for a, b in zip(figures(less), figures(more), strict=True))
    assert cost_of(spec, max(1, tokens - 100)).agent <= costs[-1].agent


@given(SPECS, CONTEXTS, st.integers(-(10**9), 10**12))
def test_one_agent_more_would_not_fit(spec: ModelCacheSpec, tokens: int, budget: int) -> None:
    found = cost_of(spec, tokens)
    agents = found.agents(budget)
    assert agents * found.agent <= max(0, budget) < (agents + 1) * found.agent


def test_caches_that_hold_nothing_are_refused() -> None:
    with pytest.raises(SpecError, match="m: its caches take 0 bytes"):
        cost_of(ModelCacheSpec("m", (FullLayer(0, 0, 0),)), 4096)
