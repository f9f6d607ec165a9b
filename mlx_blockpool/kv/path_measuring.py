"""Measures what decode steps cost on each path, with the layer shapes and the queries of a loaded
model.

Steps of one layer group are timed without the model, in a scratch pool: the rest of a forward is
the same on all paths. Contexts hold zeros, as no time depends on them. Owned by the generation
thread.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import mlx.core as mx

from ..errors import PoolExhaustedError
from ..spec import FullLayer, ModelCacheSpec, WindowLayer, blocks_for
from .arena import KVArena
from .cost_model import PathCosts, PathTimes, Shape, fitted
from .decode_policy import device
from .measuring import no_interrupt
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
    seconds: float = 0.5,
    *,
    interrupt: Callable[[], None] = no_interrupt,
) -> dict[int, PathCosts]:
    """The costs of each full layer group of an attached model, and of windows that have a kernel,
    for arena.decode.costs.

    Takes about `seconds`, twice that where there are kernels, and up to three times as long where
    timing each shape once takes that; a model for which that is too short is not measured. Neither
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
    try:
        found = {
            group: _times(arena, group, each, seconds, interrupt) for group, each in inputs.items()
        }
    finally:
        # The memory of the scratch pools.
        mx.clear_cache()
    return {group: fitted(times) for group, times in found.items() if times}


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


def _times(
    arena: KVArena,
    group: int,
    inputs: AttentionInputs,
    seconds: float,
    interrupt: Callable[[], None],
) -> list[PathTimes]:
    """The times of each shape, medians of all passes that there is time for; empty if there is
    no time for one.
    """
    rounds: dict[Shape, list[dict[str, float]]] = {shape: [] for shape in _shapes(arena, group)}
    if group in arena.capabilities.kernels:
        for shape in rounds:
            interrupt()
            # A device compiles the kernel for some kinds of batches, which takes longer than all
            # steps.
            PathTrial(arena, group, inputs, shape).seconds("kernel", 1)
    begun, on_the_wall = clock(), time.perf_counter()
    taken = 0.0
    while not taken or clock() - begun + taken < seconds:
        first = clock()
        for shape in rounds:
            if clock() - begun > 3 * seconds or time.perf_counter() - on_the_wall > 10 * seconds:
                return []
            interrupt()
            rounds[shape] += PathTrial(arena, group, inputs, shape).rounds()
        taken = clock() - first
    return [_path_times(shape, found) for shape, found in rounds.items()]


def _path_times(shape: Shape, rounds: list[dict[str, float]]) -> PathTimes:
    ratios = {
        path: median(each[path] / each["ragged"] for each in rounds)
        for path in rounds[0]
        if path != "ragged"
    }
    return PathTimes(shape, median(each["ragged"] for each in rounds), ratios)


class PathTrial:
    """Members of one shape in a scratch pool."""

    def __init__(self, arena: KVArena, group: int, inputs: AttentionInputs, shape: Shape) -> None:
        layer, has_kernel = arena.spec.groups[group].layer, group in arena.capabilities.kernels
        # Blocks for what is appended too.
        blocks = blocks_for(shape.shared) + sum(
            blocks_for(tokens + MOST_STEPS + shape.rows) for tokens in shape.own
        )
        self.arena = scratch_arena(
            arena, layer, _layers(arena.spec, group, shape, blocks), blocks, True, has_kernel
        )
        self.inputs, self.shape = inputs, shape
        self._paths = ["ragged"] + ["shared"] * bool(shape.shared) + ["kernel"] * has_kernel
        self._rows = len(shape.own) * shape.rows
        self._queries = mx.repeat(inputs.queries, self._rows, axis=0)
        dims = layer.key_dim, layer.value_dim
        self._keys, self._values = (
            mx.zeros((self._rows, layer.kv_heads, 1, dim), self.arena.dtype) for dim in dims
        )
        prefix = append(pooled_caches(self.arena), shape.shared)
        self._batch = batch_of(append(copy.deepcopy(prefix), tokens) for tokens in shape.own)

    def rounds(self) -> list[dict[str, float]]:
        """The seconds of one step of one layer on each path, in several rounds."""
        mx.eval(self.arena.arrays(), self._queries, self._keys, self._values)
        paths = list(self._paths)
        rounds = [{path: self.seconds(path, 1) for path in paths}]
        steps = min(MOST_STEPS, 1 + int(SHORTEST / max(rounds[0].values())))
        # Of short steps the first ones are not counted: a device may compile what they need.
        rounds = rounds if steps == 1 else []
        while len(rounds) < ROUNDS:
            paths.reverse()
            rounds.append({path: self.seconds(path, steps) for path in paths})
        return rounds

    def seconds(self, path: str, steps: int) -> float:
        """Seconds of one step of one layer. The tokens that it appends are taken back."""
        self.arena.decode.path = path
        run = self._run_steps if self.shape.rows == 1 else self._run_rows
        return run(steps) / steps / len(self._batch)

    def _run_rows(self, steps: int) -> float:
        """Seconds of some forwards of rows, of which none is kept."""
        start, members = clock(), len(self.shape.own)
        for _ in range(steps):
            begin_rows(self._batch, [self.shape.rows] * members)
            mx.eval(self._step())
            commit_rows(self._batch, [0] * members)
        return clock() - start

    def _run_steps(self, steps: int) -> float:
        """Seconds of some decode steps."""
        start = clock()
        pipelined(self._step, steps)
        taken = clock() - start
        for cache in self._batch:
            # A window that is full stays so.
            if cache.is_trimmable():
                cache.trim(steps)
        return taken

    def _step(self) -> mx.array:
        """One step of all layers, each of which waits for the one before it."""
        before = mx.zeros((self._rows, 1, 1, 1), self.arena.dtype)
        for cache in self._batch:
            cache.update_and_fetch(self._keys + before, self._values + before)
            queries, given = self._queries + before.astype(self._queries.dtype), self.inputs
            out = cache.attend_step(queries, given.scale, given.sinks, given.roles)
            before = out[:, :1, :, :1].astype(self.arena.dtype)
        return before


def _layers(spec: ModelCacheSpec, group: int, shape: Shape, blocks: int) -> int:
    """Layers of a trial with `blocks` in each.

    The first one prepares what the others share, and they divide its time.
    """
    if device() == "cpu":
        return LAYERS if sum(shape.sizes) < SHORT_TOKENS else 1
    layers = spec.groups[group]
    fitting = GPU_BYTES // (blocks * spec.bytes_per_block_per_layer(layers.layer))
    return max(1, min(len(layers.layers), GPU_LAYERS, fitting))


def clock() -> float:
    """Seconds: of the processor where that computes, so that other processes do not count, else
    of the clock on the wall.
    """
    return time.process_time() if device() == "cpu" else time.perf_counter()
