"""Measures what decode steps cost on each path, with the layer shapes and the queries of a loaded
model.

Steps of one layer group are timed without the model, in a scratch pool: the rest of a forward is
the same on all paths. Contexts hold zeros, as no time depends on them. Owned by the generation
thread.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from itertools import chain
from statistics import median
from typing import Any

import mlx.core as mx

from ..errors import PoolExhaustedError
from ..spec import FullLayer, ModelCacheSpec, WindowLayer, blocks_for
from .arena import KVArena
from .cost_model import PathCosts, PathTimes, Shape, fitted
from .decode_policy import device
from .measuring import Stopwatch, no_interrupt, readings
from .prompt_cache import batch_of, begin_rows, commit_rows, pooled_caches
from .scratch import AttentionInputs, append, capture_attention_inputs, pipelined, scratch_arena

# Shared prefixes and members' own tokens, from where operations count to where tokens do.
SHAPES = (
    Shape(0, (16,) * 2),
    Shape(0, (16,) * 8),
    Shape(0, (64,) * 4),
    Shape(0, (200,) * 8),
    Shape(256, (32,) * 2),
    Shape(256, (32,) * 8),
    Shape(512, (16,) * 4),
    Shape(512, (16, 700)),
    Shape(512, (400,) * 4),
    Shape(256, (16, 16, 16, 1500)),
    Shape(1024, (64,) * 2),
    Shape(1024, (64,) * 8),
    Shape(1024, (1000,) * 4),
    Shape(4096, (64,) * 2),
    Shape(3072, (256,) * 8),
)
# For the kernel, which also pays for a single request: contexts of one member, and more of several
# lengths.
KERNEL_SHAPES = (
    Shape(0, (300,)),
    Shape(0, (4000,)),
    Shape(0, (300, 1000, 2500, 4000)),
    Shape(0, (2000,) * 8),
)
# Rows of drafts, which the kernel reads together: members, their tokens, and rows of each.
ROWS = (
    (1, 300, 5),
    (1, 300, 17),
    (1, 3000, 2),
    (1, 3000, 17),
    (4, 300, 2),
    (4, 300, 17),
    (4, 2000, 5),
    (4, 2000, 17),
)
# Windows share nothing: members, and tokens of each, at most those of the window.
WINDOWS = tuple((members, tokens) for members in (1, 2, 8) for tokens in (16, 128, 512, 4096))
# Layers with short contexts, one after the other, as the first of them prepares what the others
# share.
LAYERS = 2
SHORT_TOKENS = 4096
# A GPU computes while the next layers are encoded: there all layers of the group run, up to this
# many and these bytes.
GPU_LAYERS, GPU_BYTES = 8, 256 * 2**20
ROUNDS = 3
# Steps are timed together until they take this long, in seconds.
SHORTEST = 1e-3
MOST_STEPS = 8


def measure_paths(
    model: Any,
    arena: KVArena,
    seconds: float = 1.0,
    *,
    interrupt: Callable[[], None] = no_interrupt,
) -> dict[int, PathCosts]:
    """The costs of each full layer group of an attached model, and of windows that have a kernel,
    for arena.decode.costs.

    Takes about `seconds`, twice that where there are kernels, and longer where timing each shape
    once takes that, as in readings(); a model for which that is too short is not measured. Neither
    are models whose batches are not ragged, and pools that cannot hold a sequence. Other windows
    have one path only, as they share nothing. `interrupt` is called between steps, and what it
    raises ends the measuring.
    """
    if not arena.capabilities.ragged:
        return {}
    try:
        every = capture_attention_inputs(model, arena)
    except PoolExhaustedError:
        return {}
    inputs = {group: each[0] for group, each in every.items() if _has_paths(arena, group)}
    seconds = seconds * (2 if arena.capabilities.kernels else 1) / max(1, len(inputs))
    found: dict[int, PathCosts] = {}
    try:
        for group, own in inputs.items():
            cases = {
                shape: partial(_rounds, arena, group, own, shape) for shape in _shapes(arena, group)
            }
            taken = readings(cases, seconds, at_least=len(cases), interrupt=interrupt)
            if len(taken) == len(cases):
                found[group] = fitted(
                    [_path_times(shape, list(chain(*rounds))) for shape, rounds in taken.items()]
                )
    finally:
        # The memory of the scratch pools.
        mx.clear_cache()
    return found


def _has_paths(arena: KVArena, group: int) -> bool:
    """Whether there is something to choose."""
    return type(arena.spec.groups[group].layer) is FullLayer or group in arena.capabilities.kernels


def _shapes(arena: KVArena, group: int) -> tuple[Shape, ...]:
    """What a layer group is measured with."""
    if group not in arena.capabilities.kernels:
        return SHAPES
    layer, rows = (
        arena.spec.groups[group].layer,
        [Shape(0, (tokens,) * members, rows) for members, tokens, rows in ROWS],
    )
    if not isinstance(layer, WindowLayer):
        return (*SHAPES, *KERNEL_SHAPES, *rows)
    single = [Shape(0, (tokens,) * members) for members, tokens in WINDOWS]
    # No member holds more than the window.
    return tuple(
        {
            each._replace(own=tuple(min(tokens, layer.max_size) for tokens in each.own)): None
            for each in single + rows
        }
    )


def _path_times(shape: Shape, rounds: list[dict[str, float]]) -> PathTimes:
    ratios = {
        path: median(each[path] / each["ragged"] for each in rounds)
        for path in rounds[0]
        if path != "ragged"
    }
    return PathTimes(shape, median(each["ragged"] for each in rounds), ratios)


def _rounds(
    arena: KVArena, group: int, inputs: AttentionInputs, shape: Shape
) -> list[dict[str, float]]:
    """The seconds of one step of one layer on each path, in several rounds, for members of one
    shape in a scratch pool.
    """
    layer, has_kernel = arena.spec.groups[group].layer, group in arena.capabilities.kernels
    # Blocks for what is appended too.
    blocks = blocks_for(shape.shared) + sum(
        blocks_for(tokens + MOST_STEPS + shape.rows) for tokens in shape.own
    )
    layers = _layers(arena.spec, group, shape, blocks)
    own = scratch_arena(arena, layer, layers, blocks, True, has_kernel)
    members, paths = len(shape.own), ["ragged"]
    paths += ["shared"] * bool(shape.shared) + ["kernel"] * has_kernel
    rows = members * shape.rows
    queries = mx.repeat(inputs.queries, rows, axis=0)
    keys, values = (
        mx.zeros((rows, layer.kv_heads, 1, dim), own.dtype)
        for dim in (layer.key_dim, layer.value_dim)
    )
    prefix = append(pooled_caches(own), shape.shared)
    batch = batch_of(append(copy.deepcopy(prefix), tokens) for tokens in shape.own)
    mx.eval(own.arrays(), queries, keys, values)

    def step() -> mx.array:
        """One step of all layers, each of which waits for the one before it."""
        before = mx.zeros((rows, 1, 1, 1), own.dtype)
        for cache in batch:
            cache.update_and_fetch(keys + before, values + before)
            asked = queries + before.astype(queries.dtype)
            out = cache.attend_step(asked, inputs.scale, inputs.sinks, inputs.roles)
            before = out[:, :1, :, :1].astype(own.dtype)
        return before

    def seconds(path: str, steps: int) -> float:
        """Of one step of one layer. The tokens that it appends are taken back."""
        own.decode.path = path
        with Stopwatch() as watch:
            if shape.rows == 1:
                pipelined(step, steps)
            for _ in range(steps if shape.rows > 1 else 0):
                begin_rows(batch, [shape.rows] * members)
                mx.eval(step())
                commit_rows(batch, [0] * members)
        for cache in batch:
            # A window that is full stays so.
            if shape.rows == 1 and cache.is_trimmable():
                cache.trim(steps)
        return watch.seconds / steps / len(batch)

    rounds = [{path: seconds(path, 1) for path in paths}]
    steps = min(MOST_STEPS, 1 + int(SHORTEST / max(rounds[0].values())))
    # Of short steps the first ones are not counted: a device may compile what they need.
    rounds = rounds if steps == 1 else []
    while len(rounds) < ROUNDS:
        paths.reverse()
        rounds.append({path: seconds(path, steps) for path in paths})
    return rounds


def _layers(spec: ModelCacheSpec, group: int, shape: Shape, blocks: int) -> int:
    """Layers of a trial with `blocks` in each.

    The first one prepares what the others share, and they divide its time.
    """
    if device() == "cpu":
        return LAYERS if sum(shape.sizes) < SHORT_TOKENS else 1
    layers = spec.groups[group]
    fitting = GPU_BYTES // (blocks * spec.bytes_per_block_per_layer(layers.layer))
    return max(1, min(len(layers.layers), GPU_LAYERS, fitting))
