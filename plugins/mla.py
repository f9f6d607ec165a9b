"""Attention to latents (MLA), as DeepSeek, Kimi, GLM and others have it: a step of a batch is one
computation that reads blocks in place.

The caches of mlx-lm's modules hold latents as keys and rotary keys as values. For one token such a
module passes mlx-lm's attention the latents as keys and as values, and the scores of the rotary
keys as a mask. Here it gets the identity in place of the rotary keys, so that this mask is the
rotary queries, and its own code computes everything else: one kind of module differs from another
in its projections, scales and gates.

A module with an indexer has a second cache, of what chooses the tokens that a token attends to
where there are more than `index_topk`.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList

from mlx_blockpool.hooks import AttentionAdapter, hookimpl
from mlx_blockpool.kv.batch_cache import MemberMasks, PooledBatchCache
from mlx_blockpool.kv.by_member import attend_by_member
from mlx_blockpool.kv.layer_caches import PooledLayer
from mlx_blockpool.kv.quantised import dense
from mlx_blockpool.mlx_lm_compat import rebind

ATTENTION = "scaled_dot_product_attention"


@hookimpl
def attention_adapters() -> list[AttentionAdapter]:
    return [
        AttentionAdapter("mla", _uses("embed_q", "unembed_out", ATTENTION), _attend),
        AttentionAdapter("mla-indexer", _uses("index_topk", "weights_proj"), _choose),
    ]


def _uses(*names: str) -> Callable[[type], bool]:
    """Whether the __call__ of a class writes into a cache and uses all of these names."""

    def applies(cls: type) -> bool:
        call = cls.__call__
        return isinstance(call, types.FunctionType) and {"update_and_fetch", *names} <= set(
            call.__code__.co_names
        )

    return applies


def _attend(module: Any, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    given = [*args, *kwargs.values()]
    found = next((value for value in given if _is_step(module, value, args[0])), None)
    if found is None:
        # Several tokens have keys and values made of their latents.
        return attend_by_member(module, call, *args, **kwargs)
    parts = found.caches if isinstance(found, CacheList) else (found,)
    steps = [_Step(part) for part in parts]

    def own(value: Any) -> Any:
        if isinstance(value, MemberMasks) and not value.is_special:
            # Attention in place applies it.
            return None
        if value is found:
            return steps if isinstance(found, CacheList) else steps[0]
        return value

    return _with_steps(call)(
        module, *map(own, args), **{name: own(value) for name, value in kwargs.items()}
    )


def _is_step(module: Any, value: Any, x: mx.array) -> bool:
    """Return whether an argument is the cache of a step that reads blocks in place."""
    if isinstance(value, CacheList):
        indexed = value.caches[-1]
        if getattr(indexed, "is_tentative", False) and _is_long(module.indexer, indexed):
            # Each row would have tokens chosen for it.
            return False
        return all(_is_step(module, part, x) for part in value.caches)
    if isinstance(value, PooledBatchCache):
        return value.is_step(x.shape[1])
    # One sequence that is not quantised has mlx-lm's own code.
    return isinstance(value, PooledLayer) and any(value.forms) and x.shape[1] == 1


def _is_long(indexer: Any, batch: PooledBatchCache) -> bool:
    """Return whether a member has more tokens, after the step, than an indexer chooses."""
    counts = zip(batch.members, batch.counts(1), strict=True)
    return bool(max(member.size_after(n) for member, n in counts) > indexer.index_topk)


@functools.cache
def _with_steps(call: Callable[..., Any]) -> Callable[..., Any]:
    """A module's own code with the attention of a _Step, or of that of a pair."""

    def attend(
        queries: mx.array, keys: Any, values: Any, cache: Any, scale: float, mask: mx.array
    ) -> mx.array:
        step, indexed = cache if isinstance(cache, list) else (cache, cache)
        found: mx.array = step.held.attend_parts(
            (queries * scale, mask), scale=1.0, chosen=indexed.chosen
        )
        return found

    return rebind(call, **{ATTENTION: attend})


def _choose(module: Any, call: Callable[..., Any], *args: Any, cache: Any = None) -> Any:
    """Runs an indexer, which returns nothing to a module that computes a step: `chosen` has the
    positions for each member.
    """
    if not isinstance(cache, _Step):
        return attend_by_member(module, call, *args, cache=cache)
    if isinstance(cache.held, PooledBatchCache) and not _is_long(module, cache.held):
        # It chooses nothing, and finds nothing to choose from.
        return call(module, *args, cache=cache)
    if not isinstance(cache.held, PooledBatchCache):
        found = attend_by_member(module, call, *args, cache=cache.held)
        cache.chosen = None if found is None else [found.reshape(-1)]
        return None
    x, compressed, _ = args
    sizes = [member.size_after(1) for member in cache.held.members]
    seen = mx.arange(max(sizes)) < mx.array(sizes)[:, None]
    found = call(module, x, compressed, seen[:, None, None], cache=_Padded(cache.held))
    cache.chosen = [
        places.reshape(-1) if size > module.index_topk else None
        for size, places in zip(sizes, found, strict=True)
    ]
    return None


class _Step:
    """The cache `held` in a step, as a module sees it.

    chosen: for each member the positions of the tokens that it attends to, or None for all.
    """

    def __init__(self, held: Any) -> None:
        self.held = held
        self.offset = held.offset
        self.chosen: Sequence[mx.array | None] | None = None
        # A module orders by them what is evaluated.
        self.keys = self.values = mx.zeros(1)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.held.update_and_fetch(keys, values)
        return keys, mx.eye(values.shape[-1], dtype=values.dtype)[None, None]


class _Padded(_Step):
    """The keys of an indexer for all members at once, zeros after the shorter ones."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.held.update_and_fetch(keys, values)
        own = [dense(member.fetch()[0]) for member in self.held.members]
        longest = max(rows.shape[2] for rows in own)
        zeros = mx.zeros((1, 1, longest, keys.shape[-1]), keys.dtype)
        # One copy of all rows.
        parts = [part for rows in own for part in (rows, zeros[:, :, rows.shape[2] :])]
        return mx.concatenate(parts, axis=2).reshape(len(own), 1, longest, -1), values
