"""Pools of quantised blocks give the logits of mlx-lm's own caches with the same quantised keys
and values.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import mlx.core as mx
import pytest
from engine.engines import ROOMY, bits_of, new_model, words
from mlx.utils import tree_map
from mlx_lm.models.cache import QuantizedKVCache, make_prompt_cache
from models import make_model
from thorough import many, only

from mlx_blockpool.config import KVBits
from mlx_blockpool.errors import PoolExhaustedError
from mlx_blockpool.kv.arena import KVArena
from mlx_blockpool.kv.attention import PIECE_BYTES
from mlx_blockpool.kv.build import attach, describe
from mlx_blockpool.kv.capabilities import RAGGED
from mlx_blockpool.kv.prompt_cache import batch_of, pooled_caches
from mlx_blockpool.kv.rounded_caches import rounded
from mlx_blockpool.model_files.calculator import cost_of
from mlx_blockpool.prefix.cache import PrefixCache
from mlx_blockpool.spec import FullLayer, ModelCacheSpec

BITS = ["K8V8", "K4V4", "K8V4", "K16V8"]
MODELS = [
    f"{name} {bits}" for bits in BITS for name in ("llama", "qwen2", "gemma3_text", "gpt_oss")
]
# mlx-lm's own quantised caches serve full layers, whose keys and values have the same bits.
STOCK = [f"{name} {bits}" for bits in BITS[:2] for name in ("llama", "qwen2")]
STEPS = many(16, 64)
# Two chunks of each prompt, and then its STEPS tokens. The first two end beyond every window, with
# the first chunk or later.
PROMPTS = [
    (words(seed, sum(chunks) + STEPS), chunks)
    for seed, chunks in enumerate([(300, 290), (120, 230), (9, 30)])
]


@functools.cache
def model_of(name: str, dtype: mx.Dtype = mx.float32) -> Any:
    """As mlx-lm makes it, with narrow weights: a word of 8 bits that rounds the other way moves
    its logits by 1e-6.
    """
    model = new_model(name)
    model.update(tree_map(lambda p: p * 0.3 if p.ndim > 1 else p, model.parameters()))
    model.set_dtype(dtype)
    return model


@functools.cache
def attached(name: str, dtype: mx.Dtype = mx.float32) -> tuple[Any, ModelCacheSpec]:
    """A copy of it, attached, and its spec."""
    model = copy.deepcopy(model_of(name, dtype))
    arena = KVArena(describe(model).with_bits(bits_of(name)), ROOMY)
    assert attach(model, arena)
    assert arena.spec.bits is not None
    return model, arena.spec


@functools.cache
def expected(name: str, prompt: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    """mlx-lm's logits [2 + STEPS, vocabulary] on rounded caches."""
    model = model_of(name, dtype)
    return logits(model, rounded(make_prompt_cache(model), attached(name)[1]), prompt)


def logits(model: Any, caches: list[Any], prompt: int) -> mx.array:
    return mx.concatenate([prefill(model, caches, prompt), decode(model, caches, [prompt])[0]])


def prefill(model: Any, caches: list[Any], prompt: int) -> mx.array:
    """[2, vocabulary]"""
    tokens, (first, second) = PROMPTS[prompt]
    found = []
    for part in (tokens[:first], tokens[first : first + second]):
        found.append(model(mx.array([part]), cache=caches)[0, -1])
        mx.eval(found)
    return mx.stack(found)


def decode(model: Any, caches: list[Any], prompts: list[int]) -> mx.array:
    """[prompts, STEPS, vocabulary]"""
    steps = mx.array([PROMPTS[prompt][0][-STEPS:] for prompt in prompts])
    found = []
    for step in range(STEPS):
        found.append(model(steps[:, step : step + 1], cache=caches)[:, -1])
        mx.eval(found)
    return mx.stack(found, axis=1)


def distance(found: mx.array, needed: mx.array) -> float:
    """The largest difference in parts of the largest logit."""
    found, needed = (array.astype(mx.float32) for array in (found, needed))
    return float((mx.abs(found - needed).max() / mx.abs(needed).max()).item())


def assert_near(found: mx.array, needed: mx.array, within: float = 1e-5) -> None:
    assert found.dtype == needed.dtype == mx.float32
    assert distance(found, needed) <= within


def summed_otherwise(name: str) -> float:
    """How near logits are that were summed in another order, over several runs: of 4-bit words
    one may round the other way.
    """
    return 1e-3 if "4" in name else 1e-5


def open_arena(name: str) -> tuple[Any, KVArena]:
    model, spec = attached(name)
    arena = KVArena(spec, ROOMY)
    arena.capabilities = RAGGED
    return model, arena


@pytest.mark.parametrize("name", only(STOCK, "qwen2 K8V8"))
def test_rounded_caches_are_mlx_lms_quantised_ones(name: str) -> None:
    """So that they can stand for them where mlx-lm has none: windows, and values in other bits
    than keys.
    """
    size = attached(name)[1].forms(attached(name)[1].groups[0].layer)[0].group_size
    quantised = [QuantizedKVCache(size, bits_of(name).keys) for _ in attached(name)[1].leaves]
    assert_near(expected(name, 0), logits(model_of(name), quantised, 0))


@pytest.mark.parametrize("name", only(MODELS, "gpt_oss K8V8"))
def test_logits_are_those_of_mlx_lm_alone_and_in_a_ragged_batch(name: str) -> None:
    model, arena = open_arena(name)
    caches = [pooled_caches(arena) for _ in PROMPTS]
    for prompt, own in enumerate(caches):
        assert_near(prefill(model, own, prompt), expected(name, prompt)[:2])
    alone = copy.deepcopy(caches[0])
    together = decode(model, batch_of(caches), [0, 1, 2])
    for prompt, found in enumerate(together):
        assert_near(found, expected(name, prompt)[2:], summed_otherwise(name))
    assert_near(decode(model, alone, [0])[0], expected(name, 0)[2:])
    assert arena.decode.path_counts["ragged"] > 0


@pytest.mark.parametrize("path", only(["ragged", "shared"], "shared"))
@pytest.mark.parametrize("name", only(MODELS, "gemma3_text K8V8"))
def test_forks_of_one_prefix_give_the_logits_of_mlx_lm(name: str, path: str) -> None:
    model, arena = open_arena(name)
    arena.decode.path = path
    caches = pooled_caches(arena)
    prefill(model, caches, 0)
    forks = [copy.deepcopy(caches) for _ in range(3)]
    arena.decode.path_counts.clear()
    for found in decode(model, batch_of(forks), [0, 0, 0]):
        assert_near(found, expected(name, 0)[2:], summed_otherwise(name))
    # Windows that have wrapped share nothing.
    assert arena.decode.path_counts[path] > 0
    # What the forks wrote is their own.
    assert_near(decode(model, caches, [0])[0], expected(name, 0)[2:], summed_otherwise(name))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", [f"{name} {bits}" for name in ("llama", "gemma3_text") for bits in BITS]
)
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=["float16", "bfloat16"])
def test_models_in_16_bits_stay_in_them_and_as_near_to_float32_as_rounded_caches(
    name: str, dtype: mx.Dtype
) -> None:
    """mlx-lm's own quantised products in 16 bits are seven times as far away."""
    model, spec = attached(name, dtype)
    caches = pooled_caches(KVArena(spec, ROOMY))
    found = logits(model, caches, 0)
    assert found.dtype == dtype
    needed = expected(name, 0)
    assert distance(found, needed) <= 1.5 * distance(expected(name, 0, dtype), needed)


# -- bytes -----------------------------------------------------------------------------------------

CONTEXT = 4096
WIDE = ModelCacheSpec("test", (FullLayer(1, 128, 128),), "bfloat16")
POOL = 40 * WIDE.bytes_per_agent(CONTEXT)


def agents_in_pool(spec: ModelCacheSpec) -> int:
    """How many prompts of CONTEXT tokens, all different, hold their blocks at the same time."""
    prefix = PrefixCache(KVArena(spec, POOL))
    held: list[Any] = []
    try:
        while True:
            tokens = [len(held)] * CONTEXT
            held.append(prefix.acquire(tokens, max_tokens=0))
    except PoolExhaustedError:
        assert prefix.arena.nbytes <= POOL
        return len(held)


@pytest.mark.parametrize(("bits", "share", "more"), [(8, 0.54, 1.85), (4, 0.30, 3.3)])
def test_more_agents_fit_by_plan_and_in_the_pool(bits: int, share: float, more: float) -> None:
    spec = WIDE.with_bits(KVBits(bits, bits))
    planned = [cost_of(own, CONTEXT).agents(POOL) for own in (spec, WIDE)]
    assert planned == [agents_in_pool(own) for own in (spec, WIDE)]
    assert planned[0] >= more * planned[1]
    arenas = [KVArena(own, POOL) for own in (spec, WIDE)]
    for arena in arenas:
        pooled_caches(arena)[0].update_and_fetch(*mx.zeros((2, 1, 1, 5, 128), mx.bfloat16))
    sizes = [
        sum(a.nbytes for a in arena.arrays()) / sum(c.total for c in arena.pool.counts())
        for arena in arenas
    ]
    assert sizes[0] <= share * sizes[1]


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=["float32", "bfloat16"])
def test_prefill_takes_a_fixed_amount_more_than_unquantised(dtype: mx.Dtype) -> None:
    """The dequantised keys and values of some heads, whatever the context."""
    model = make_model(
        "llama",
        hidden_size=256,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=128,
        num_hidden_layers=1,
    )
    model.set_dtype(dtype)
    rows = mx.random.normal((2, 1, 8, 4096, 128)).astype(dtype)
    peaks = {}
    for bits in (None, 8, 4):
        spec = describe(model).with_bits(KVBits(bits, bits))
        arena = KVArena(spec, spec.bytes_per_agent(9_000))
        assert attach(model, arena)
        (cache,) = caches = pooled_caches(arena)
        for _ in range(2):
            cache.update_and_fetch(*rows)
        mx.eval(cache.state)
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        mx.eval(model(mx.zeros((1, 64), mx.int32), cache=caches))
        peaks[bits] = mx.get_peak_memory() - before
    assert max(peaks[8], peaks[4]) <= peaks[None] + PIECE_BYTES, peaks
