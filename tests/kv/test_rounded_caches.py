"""Rounded caches: mlx-lm's own classes over the values that quantised blocks stand for."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import (
    CacheList,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)
from models import make_model

from mlx_blockpool.config import KVBits
from mlx_blockpool.kv.rounded_caches import rounded, rounded_cache
from mlx_blockpool.spec import CompositeLayer, Form, FullLayer, ModelCacheSpec, StateLayer

TOKENS = [i * 7 % 131 for i in range(200)]


def logits(model: Any, caches: list[Any], *parts: int) -> mx.array:
    """Behind each of the parts that TOKENS are cut into."""
    found, at = [], 0
    for count in parts:
        found.append(model(mx.array([TOKENS[at : at + count]]), cache=caches)[0, -1])
        mx.eval(found)
        at += count
    return mx.stack(found)


@pytest.mark.parametrize("bits", [8, 4])
def test_rounded_caches_give_the_logits_of_quantised_ones(bits: int) -> None:
    model = make_model("llama", hidden_size=128)
    spec = ModelCacheSpec("llama", (FullLayer(2, 64, 64),) * 2, "float32").with_bits(
        KVBits(bits, bits)
    )
    needed = logits(model, [QuantizedKVCache(64, bits) for _ in range(2)], 80, 70, 1, 1)
    found = logits(model, rounded(make_prompt_cache(model), spec), 80, 70, 1, 1)
    assert mx.abs(found - needed).max() <= 1e-5 * mx.abs(needed).max()


def test_keys_and_values_have_separate_forms() -> None:
    keys, values = mx.random.normal((2, 1, 2, 5, 64))
    cache = rounded_cache(KVCache(), (Form(8, 32), None))
    held = cache.update_and_fetch(keys, values)
    assert mx.array_equal(
        held[0], mx.dequantize(*mx.quantize(keys, group_size=32, bits=8), group_size=32, bits=8)
    )
    assert not mx.array_equal(held[0], keys)
    assert mx.array_equal(held[1], values)


def test_parts_are_rounded_and_states_left_as_they_are() -> None:
    full, window, state = (
        FullLayer(2, 64, 64),
        FullLayer(2, 16, 16),
        StateLayer((((1, 2), "float32"),)),
    )
    spec = ModelCacheSpec(
        "some", (CompositeLayer((full, state)), window, full), "float32"
    ).with_bits(KVBits())
    caches = [CacheList(KVCache(), "state"), KVCache(), KVCache()]
    listed, small, plain = rounded(caches, spec)
    assert type(listed.caches[0]) is not KVCache
    assert listed.caches[1] == "state"
    assert small is caches[1], "16 values a row are in no group"
    assert type(plain) is not KVCache
    assert type(small) is KVCache


def test_other_methods_are_those_of_the_cache() -> None:
    cache = rounded_cache(RotatingKVCache(max_size=8, keep=2), (Form(8, 64), Form(8, 64)))
    cache.update_and_fetch(*mx.random.normal((2, 1, 2, 12, 64)))
    assert (cache.offset, cache.max_size, cache.is_trimmable()) == (12, 8, False)
    keys = cache.keys * 2
    cache.keys = keys
    other = deepcopy(cache)
    other.update_and_fetch(*mx.random.normal((2, 1, 2, 1, 64)))
    assert (cache.offset, other.offset) == (12, 13)
    assert mx.array_equal(cache.state[0], keys)
    assert not hasattr(cache, "bits")
