"""Prompts, and what stands in for a model: the keys and states of a token say what they were
computed from.

The key of a token is a number made of its position and of all tokens up to it, its value 1000 more.
So a block of another prompt, of another position or of a neighbour that wrote into a shared block
is found, and can be read in the failure.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_blockpool.kv.layer_caches import PooledKVCache, PooledRotatingKVCache
from mlx_blockpool.kv.other_caches import PooledArraysCache
from mlx_blockpool.kv.prompt_cache import leaves_of
from mlx_blockpool.kv.quantised import dense
from mlx_blockpool.prefix.cache import PrefixCache
from mlx_blockpool.prefix.retention import RetentionPolicy
from mlx_blockpool.prefix.salts import SHARED

# Numbers of different layers are this far apart; all are whole numbers that float32 has.
LAYER_STEP = 2**22


def family(number: int, length: int) -> tuple[int, ...]:
    """Prompts of one family start alike."""
    return tuple(number * 10 + i % 7 for i in range(length))


def text(seed: int, count: int) -> list[int]:
    """Random tokens below 50; the same ones for the same seed."""
    return random.Random(seed).choices(range(50), k=count)


@lru_cache(maxsize=20_000)
def numbers(tokens: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """[tokens] of layer 0: 1024 * (a checksum of all tokens up to here, below 4000) + position."""
    total, out = 0, []
    for position, token in enumerate(tokens):
        total = (total * 31 + token + 1) % 4000
        out.append(total * 1024 + position)
    return np.array(out, np.float32)


def keys_of(tokens: Sequence[int], start: int, layer: int, dim: int = 2) -> mx.array:
    """The keys of tokens[start:]: [1, 1, n, dim], one half the number and one half its negative.

    Quantised in groups of `dim` / 2 they stay what they are: a group of equal numbers is its bias.
    """
    row = numbers(tuple(tokens))[start:] + layer * LAYER_STEP
    return mx.array(np.repeat(np.stack([row, -row], axis=-1), dim // 2, axis=-1)[None, None])


def state_of(tokens: Sequence[int], leaf: int) -> list[mx.array]:
    """The state behind these tokens."""
    last = float(numbers(tuple(tokens))[-1]) + leaf * LAYER_STEP
    return [
        mx.array([[last, -last, float(len(tokens))]]),
        mx.full((1, 2, 2), len(tokens) * 1000 + leaf, mx.int64),
    ]


def compute(caches: list[Any], tokens: Sequence[int], start: int, step: int = 0) -> None:
    """Forward passes over tokens[start:]: one, or passes of `step` tokens."""
    for end in [*(range(start + step, len(tokens), step) if step else ()), len(tokens)]:
        for leaf, cache in enumerate(leaves_of(caches)):
            if isinstance(cache, PooledArraysCache):
                cache.cache = state_of(tokens[:end], leaf)
            else:
                keys = keys_of(tokens[:end], start, leaf, cache.place.layer.key_dim)
                mx.eval(cache.update_and_fetch(keys, keys + 1000))
        start = end


def look(caches: list[Any], tokens: Sequence[int], count: int) -> None:
    """What caches have of the first `count` tokens is right."""
    for leaf, cache in enumerate(leaves_of(caches) if count else ()):
        if isinstance(cache, PooledArraysCache):
            for found, wanted in zip(cache.cache, state_of(tokens[:count], leaf), strict=True):
                assert found.dtype == wanted.dtype
                assert np.array_equal(np.array(found), np.array(wanted)), f"leaf {leaf}"
            continue
        assert isinstance(cache, PooledKVCache | PooledRotatingKVCache)
        wanted = numbers(tuple(tokens))[:count] + leaf * LAYER_STEP
        keys, values = (
            mx.concatenate([dense(rows) for rows in runs], axis=2)
            for runs in zip(*cache.views(), strict=True)
        )
        if isinstance(cache, PooledRotatingKVCache):
            keys, values = (cache._temporal_order(array) for array in (keys, values))
            wanted = wanted[-cache.max_size :]
        assert_right(leaf, wanted, np.array(keys)[0, 0], np.array(values)[0, 0])


def assert_right(
    layer: int,
    wanted: np.ndarray[Any, Any],
    keys: np.ndarray[Any, Any],
    values: np.ndarray[Any, Any],
) -> None:
    """Keys and values [tokens, dim] are those of the numbers `wanted`."""
    assert np.array_equal(wanted, keys[:, 0]), f"layer {layer}: {difference(wanted, keys[:, 0])}"
    assert np.array_equal(-wanted, keys[:, -1])
    assert np.array_equal(wanted + 1000, values[:, 0]), (
        f"layer {layer}: {difference(wanted + 1000, values[:, 0])}"
    )


def difference(expected: Any, actual: Any) -> str:
    if len(expected) != len(actual):
        return f"{len(actual)} tokens, needed {len(expected)}"
    first = int(np.argmax(expected != actual))
    return f"token {first} is {actual[first]:.0f}, needed {expected[first]:.0f}"


def answer(prefix: PrefixCache, prompt: Sequence[int], salt: bytes = SHARED) -> None:
    """A whole request with an empty reply."""
    found = prefix.acquire(prompt, 20, salt=salt)
    compute(found.caches, prompt, found.lookup.hit)
    prefix.release(prompt, found.caches, policy=RetentionPolicy(salt=salt))
