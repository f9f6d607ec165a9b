"""Tries the kernel of each layer group on this device: its attention to random rows has to be that of the other paths.

Trials have small pools of their own, which are gone afterwards. Owned by the generation thread.
"""

from __future__ import annotations

import copy
import logging
import math
from dataclasses import replace
from itertools import count
from typing import Any

import mlx.core as mx

from ..config import PoolConfig
from ..ranks.group import ALONE, Ranks
from ..spec import BLOCK_TOKENS, FullLayer, ModelCacheSpec, WindowLayer
from .arena import KVArena
from .asked import Asked, asked_of
from .decode_attention import step_of
from .factory import pooled_caches
from .kernel_attention import kernel_form
from .layer_caches import PooledLayer
from .row_attention import rows_of

log = logging.getLogger(__name__)

# Tokens that some members begin with, and those that each goes on with; and tokens of members that share nothing.
SHARED, OWN = 2 * BLOCK_TOKENS + 44, (0, 1, 300)
ALONE_TOKENS = (1, 37, 3 * BLOCK_TOKENS)
# Windows before, at and past their wrap, in tokens more than they hold.
AROUND = (-9, 0, 1, 70)
# Rows of the members, in turns: from few queries to more than one threadgroup takes.
ROWS = ((1,), (2, 1, 5), (17, 9, 16))
# Larger windows are tried as if they had this size.
MOST_WINDOW = 600
# More than all members take; runs end where slabs do.
BLOCKS, SLAB_BLOCKS = 64, 8
# The spread of scores.
SPREAD = 2.0
# How far results may be apart, in parts of the largest. Both sides round 16 bits, and scores of the other paths too.
TOLERANCE = {mx.float32: 5e-3, mx.float16: 1e-2, mx.bfloat16: 4e-2}


def try_kernel(model: Any, arena: KVArena, ranks: Ranks = ALONE) -> None:
    """Set which layer groups of an attached model decode.trusted has, and decode.no_kernel for the others.

    A model or a pool that cannot be tried has no kernel: nothing is raised.
    """
    decode, groups = arena.decode, range(len(arena.spec.groups))
    why = _refusal(arena, ranks)
    if why is None:
        try:
            asked = asked_of(model, arena)
        # The model is served without the kernel, and says what it has to say when it is asked for a reply.
        except Exception as error:
            log.info("the model could not be asked for its queries", exc_info=True)
            why = f"a decode step of the model failed: {type(error).__name__}: {str(error)[:200]}"
    if why is None:
        # Whatever the kernel needs is back before the model decodes.
        found = {group: _trial(arena, group, asked.get(group, [])) for group in groups}
        decode.no_kernel = {group: words for group, words in found.items() if words is not None}
        mx.clear_cache()
    else:
        decode.no_kernel = dict.fromkeys(groups, why)
    decode.trusted = frozenset(groups) - decode.no_kernel.keys()
    if decode.no_kernel and (decode.path == "kernel" or (decode.path == "auto" and decode.launch is not None)):
        words = sorted(set(decode.no_kernel.values()))
        counts = f"{len(decode.no_kernel)} of {len(groups)}"
        log.warning("%s decodes without the kernel in %s layer groups: %s.", arena.spec.model_id, counts, "; ".join(words))


def _refusal(arena: KVArena, ranks: Ranks) -> str | None:
    """Why no layer group has a kernel, in words."""
    if arena.decode.launch is None:
        return "mlx computes on the CPU, which has no kernel"
    if arena.decode.path not in ("auto", "kernel"):
        return f"the decode path is set to {arena.decode.path}"
    if not arena.ragged:
        return "batches of this model are not ragged"
    return "several ranks compute together, whose kernels are not tried" if ranks.size > 1 else None


def _trial(arena: KVArena, group: int, asked: list[Asked]) -> str | None:
    """Why the kernel of a layer group is not trusted, in words; None if it is right."""
    layer = arena.spec.groups[group].layer
    if not asked:
        return "a decode step of the model does not read these layers"
    for each in asked:
        form = kernel_form(arena.spec, layer, each.queries.shape[1])
        if (why := form.refusal()) is not None:
            return why
        if each.queries.dtype != arena.dtype:
            return f"queries are {each.queries.dtype}, keys {arena.dtype}"
        try:
            difference = _Trial(arena, layer, each).difference()
        # A compiler or a driver fails in any way, and the other paths do without both.
        except Exception as error:
            log.info("the kernel failed", exc_info=True)
            return f"it failed: {type(error).__name__}: {str(error)[:200]}"
        if not difference <= TOLERANCE[arena.dtype]:
            return f"its results are off by {difference:.2g} of the largest"
    return None


class _Trial:
    """Members on random rows in a pool of their own, which has one layer."""

    def __init__(self, arena: KVArena, layer: FullLayer, asked: Asked) -> None:
        self._layer = replace(layer, max_size=min(layer.max_size, MOST_WINDOW)) if isinstance(layer, WindowLayer) else layer
        self._asked = asked
        self._seeds = count()
        own = ModelCacheSpec(arena.spec.model_id, (self._layer,), arena.spec.dtype, bits=arena.spec.bits)
        config = PoolConfig(slabs=1, slab_blocks=SLAB_BLOCKS)
        self._arena = KVArena(own, BLOCKS * own.bytes_per_block(own.groups[0]), config)
        self._arena.ragged = True
        self._arena.decode.streams, self._arena.decode.launch = 1, arena.decode.launch
        self._arena.decode.trusted = frozenset([0])
        self._members = self._windows() if isinstance(self._layer, WindowLayer) else self._full()

    def difference(self) -> float:
        """The largest difference from the ragged path, in parts of its largest number; infinite where one is not finite."""
        rows = [[counts[i % len(counts)] for i in range(len(self._members))] for counts in ROWS]
        return max(self._of_step(), *map(self._of_rows, rows))

    def _full(self) -> list[PooledLayer]:
        prefix = self._appended(pooled_caches(self._arena), SHARED)
        forks = [self._appended(copy.deepcopy(prefix), tokens) for tokens in OWN]
        alone = [self._appended(pooled_caches(self._arena), tokens) for tokens in ALONE_TOKENS]
        return [caches[0] for caches in forks + alone]

    def _windows(self) -> list[PooledLayer]:
        assert isinstance(self._layer, WindowLayer)
        members = []
        for tokens in AROUND:
            caches = self._appended(pooled_caches(self._arena), max(1, self._layer.max_size + tokens))
            # One by one they go round the ring.
            members.append(self._appended(self._appended(caches, 1), 1)[0])
        return members

    def _appended(self, caches: list[Any], tokens: int) -> list[Any]:
        if tokens:
            caches[0].write(*(rows.swapaxes(0, 2) for rows in self._random_rows(tokens)))
        return caches

    def _of_step(self) -> float:
        rows, queries = self._random_rows(len(self._members)), self._random_queries(len(self._members))
        found = []
        for path in ("ragged", "kernel"):
            self._arena.decode.path = path
            step = step_of(self._members)
            assert step.path == path, f"{step.path} != {path}"
            step.write(0, *rows)
            found.append(step.attend(0, queries, self._asked.scale, self._asked.sinks))
            mx.eval(found)
        return _apart(*found)

    def _of_rows(self, counts: list[int]) -> float:
        rows, queries = self._random_rows(sum(counts)), self._random_queries(sum(counts))
        found = []
        for path in ("ragged", "kernel"):
            self._arena.decode.path = path
            step = rows_of(self._members, counts)
            new = step.write(0, *rows)
            found.append(step.attend(0, queries, new, self._asked.scale, self._asked.sinks))
            mx.eval(found)
        return _apart(*found)

    def _random_rows(self, rows: int) -> tuple[mx.array, mx.array]:
        """Keys and values [rows, kv_heads, 1, dim]."""
        layer = self._layer
        return self._random(rows, layer.kv_heads, 1, layer.key_dim), self._random(rows, layer.kv_heads, 1, layer.value_dim)

    def _random_queries(self, rows: int) -> mx.array:
        """Queries [rows, heads, 1, dim] that weigh a few keys much more than others: one that is missed is noticed."""
        _, heads, _, dim = self._asked.queries.shape
        queries: mx.array = self._random(rows, heads, 1, dim) * (SPREAD / (self._asked.scale * dim**0.5))
        return queries

    def _random(self, *shape: int) -> mx.array:
        return mx.random.normal(shape, self._arena.dtype, key=mx.random.key(next(self._seeds)))


def _apart(needed: mx.array, found: mx.array) -> float:
    needed, found = needed.astype(mx.float32), found.astype(mx.float32)
    if not (mx.isfinite(needed).all() & mx.isfinite(found).all()).item():
        return math.inf
    difference: Any = (mx.abs(found - needed).max() / mx.abs(needed).max()).item()
    return float(difference)
