"""Prompts, and what stands in for a model: the keys and states of a token say what they were
computed from.

The key of a token is a number made of its position and of all tokens up to it, its value 1000 more,
and that of a further array 1000 more for each array. So a block of another prompt, of another
position or of a neighbour that wrote into a shared block is found, and can be read in the failure.
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
from mlx_blockpool.spec import FullLayer

# Numbers of different layers are this far apart; all are whole numbers that float32 has.
LAYER_STEP = 2**22
MODULUS = {"float16": 2039, "uint8": 251}


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


def rows_of(layer: FullLayer, tokens: Sequence[int], start: int, leaf: int) -> list[mx.array]:
    """The rows of tokens[start:] in each array of a layer, [1, heads, n, dim]: keys_of() the last
    dimension, the number of the array, a thousand each, and that of the head.

    An array of another type than float32 has what is left of the numbers when they are divided by
    a number that the type holds.
    """
    found = []
    for i, array in enumerate(layer.arrays):
        keys = keys_of(tokens, start, leaf, array.dim) + 1000 * i
        rows = keys + mx.arange(array.heads, dtype=mx.float32)[None, :, None, None]
        if array.dtype is not None:
            rows = (rows % MODULUS[array.dtype]).astype(getattr(mx, array.dtype))
        found.append(rows)
    return found


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
                mx.eval(
                    cache.update_and_fetch(*rows_of(cache.place.layer, tokens[:end], start, leaf))
                )
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
        runs = zip(*cache.views(), strict=True)
        wanted = rows_of(cache.place.layer, tokens[:count], 0, leaf)
        for array, rows, needed in zip(cache.place.layer.arrays, runs, wanted, strict=True):
            found = mx.concatenate([dense(part) for part in rows], axis=2)
            if isinstance(cache, PooledRotatingKVCache):
                found, needed = cache._temporal_order(found), needed[:, :, -cache.max_size :]
            assert found.dtype == needed.dtype
            assert mx.array_equal(found, needed).item(), (
                f"layer {leaf}, {array.name}: {difference(*map(first_of, (needed, found)))}"
            )


def first_of(rows: mx.array) -> np.ndarray[Any, Any]:
    """The first number of each token."""
    return np.array(rows.astype(mx.float32))[0, 0, :, 0]


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
