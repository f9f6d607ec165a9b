"""Tries the kernel of each layer group on this device: its attention to random rows has to be that
of the other paths.

Trials run in scratch pools. Owned by the generation thread.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import mlx.core as mx

from ..ranks.group import ALONE, Ranks
from ..spec import BLOCK_TOKENS, FullLayer, WindowLayer
from .arena import KVArena
from .kernel_attention import kernel_form
from .layer_caches import PooledLayer
from .prompt_cache import pooled_caches
from .proof import distance
from .quantised import KEYS_AND_VALUES
from .scratch import AttentionInputs, append, capture_attention_inputs, scratch_arena
from .step import step_of

log = logging.getLogger(__name__)

# Tokens that some members begin with, and those that each continues with; and tokens of members
# that share nothing.
SHARED, OWN = 2 * BLOCK_TOKENS + 44, (0, 1, 300)
UNSHARED = (1, 37, 3 * BLOCK_TOKENS)
# Windows before, at and past their wrap, in tokens more than they hold.
AROUND = (-9, 0, 1, 70)
# Rows of the members, in turns: from few queries to more than one threadgroup takes.
ROWS = ((1,), (2, 1, 5), (17, 9, 16))
# Larger windows are tried as if they had this size.
MOST_WINDOW = 600
# More than all members take; runs end where slabs do.
BLOCKS = 64
# The spread of scores.
SPREAD = 2.0
# How far results may be apart, in parts of the largest. Both sides round 16 bits, and scores of the
# other paths too.
TOLERANCE = {mx.float32: 5e-3, mx.float16: 1e-2, mx.bfloat16: 4e-2}


def refused_kernels(model: Any, arena: KVArena, ranks: Ranks = ALONE) -> dict[int, str]:
    """The layer groups whose kernel is not trusted, and why, in words. The kernel of the others is
    right on this device.

    Raises nothing: a model or a pool that cannot be tried has no kernel.
    """
    decode, groups = arena.decode, range(len(arena.spec.groups))
    why = _refusal(arena, ranks)
    if why is None:
        try:
            inputs = capture_attention_inputs(model, arena)
        # The model is served without the kernel; what its forward raises is reported when a request
        # needs it.
        except Exception as error:
            log.info("the queries of the model could not be captured", exc_info=True)
            why = f"a decode step of the model failed: {type(error).__name__}: {str(error)[:200]}"
    if why is None:
        # The memory of the trials is free before the model decodes.
        found = {group: _trial(arena, group, inputs.get(group, [])) for group in groups}
        refused = {group: words for group, words in found.items() if words is not None}
        mx.clear_cache()
    else:
        refused = dict.fromkeys(groups, why)
    if refused and (
        decode.path == "kernel" or (decode.path == "auto" and decode.launch is not None)
    ):
        words = sorted(set(refused.values()))
        counts = f"{len(refused)} of {len(groups)}"
        log.warning(
            "%s decodes without the kernel in %s layer groups: %s.",
            arena.spec.model_id,
            counts,
            "; ".join(words),
        )
    return refused


def _refusal(arena: KVArena, ranks: Ranks) -> str | None:
    """Why no layer group has a kernel, in words."""
    if arena.decode.launch is None:
        return "mlx computes on the CPU, which has no kernel"
    if arena.decode.path not in ("auto", "kernel"):
        return f"the decode path is set to {arena.decode.path}"
    if not arena.capabilities.ragged:
        return "batches of this model are not ragged"
    return (
        "several ranks compute together, whose kernels are not tried" if not ranks.decides else None
    )


def _trial(arena: KVArena, group: int, inputs: list[AttentionInputs]) -> str | None:
    """Why the kernel of a layer group is not trusted, in words; None if it is right."""
    layer = arena.spec.groups[group].layer
    if not inputs:
        return "a decode step of the model does not read these layers"
    for each in inputs:
        if each.roles != KEYS_AND_VALUES:
            return "its attention reads the arrays of these layers in another way"
        form = kernel_form(arena.spec, layer, each.queries.shape[1])
        if (why := form.refusal()) is not None:
            return why
        if each.queries.dtype != arena.dtype:
            return f"queries are {each.queries.dtype}, keys {arena.dtype}"
        try:
            difference = _difference(arena, layer, each)
        # A compiler or a driver fails in any way, and the other paths do without both.
        except Exception as error:
            log.info("the kernel failed", exc_info=True)
            return f"it failed: {type(error).__name__}: {str(error)[:200]}"
        if not difference <= TOLERANCE[arena.dtype]:
            return f"its results are off by {difference:.2g} of the largest"
    return None


Random = Callable[[tuple[int, ...], mx.Dtype], mx.array]


def _difference(arena: KVArena, layer: FullLayer, inputs: AttentionInputs) -> float:
    """The largest difference from the ragged path, in parts of its largest number; infinite
    where one is not finite.
    """
    seeds = count()

    def random(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
        return mx.random.normal(shape, dtype, key=mx.random.key(next(seeds)))

    if isinstance(layer, WindowLayer):
        layer = replace(layer, max_size=min(layer.max_size, MOST_WINDOW))
    own = scratch_arena(arena, layer, 1, BLOCKS, preallocate=False, has_kernel=True)
    own.decode.streams = 1
    members = (
        _windows(own, layer.max_size, random)
        if isinstance(layer, WindowLayer)
        else _full(own, random)
    )
    rows = [[counts[i % len(counts)] for i in range(len(members))] for counts in ROWS]
    return max(_of_step(own, members, counts, inputs, random) for counts in (None, *rows))


def _full(arena: KVArena, random: Random) -> list[PooledLayer]:
    prefix = append(pooled_caches(arena), SHARED, random)
    forks = [append(copy.deepcopy(prefix), tokens, random) for tokens in OWN]
    return [
        caches[0]
        for caches in forks + [append(pooled_caches(arena), tokens, random) for tokens in UNSHARED]
    ]


def _windows(arena: KVArena, max_size: int, random: Random) -> list[PooledLayer]:
    members = [append(pooled_caches(arena), max(1, max_size + tokens), random) for tokens in AROUND]
    # Tokens that are written one by one go around the ring.
    return [append(append(caches, 1, random), 1, random)[0] for caches in members]


def _of_step(
    arena: KVArena,
    members: list[PooledLayer],
    counts: Sequence[int] | None,
    inputs: AttentionInputs,
    random: Random,
) -> float:
    """The difference of a plain step, or of a tentative one with counts[i] rows of each member."""
    layer, (_, heads, _, dim) = members[0].place.layer, inputs.queries.shape
    rows = len(members) if counts is None else sum(counts)
    keys, values = (
        random((rows, layer.kv_heads, 1, width), arena.dtype)
        for width in (layer.key_dim, layer.value_dim)
    )
    # They weigh a few keys much more than others: one that is missed is noticed.
    queries = random((rows, heads, 1, dim), arena.dtype) * (SPREAD / (inputs.scale * dim**0.5))
    found = []
    for path in ("ragged", "kernel"):
        arena.decode.path = path
        step = step_of(members, counts)
        assert step.path.startswith("kernel") == (path == "kernel"), f"{step.path} != {path}"
        new = step.write(0, (keys, values))
        found.append(step.attend(0, queries, new, inputs.scale, inputs.sinks))
        mx.eval(found)
    (off,) = distance(*([out.astype(mx.float32)] for out in found))
    return off
