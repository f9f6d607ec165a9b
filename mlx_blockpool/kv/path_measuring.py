"""Measures what decode steps cost on each path, with the layer shapes and the queries of a loaded model.

Steps of one layer group are timed alone, in a small pool of its own, which is gone afterwards: the rest of a forward is the same
on all paths. Contexts hold zeros, as no time depends on them. Owned by the generation thread.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import mlx.core as mx

from ..config import PoolConfig
from ..errors import PoolExhaustedError
from ..spec import FullLayer, ModelCacheSpec, WindowLayer, blocks_for
from .arena import KVArena
from .asked import Asked, asked_of
from .decode_policy import device
from .factory import pooled_caches
from .measuring import proceed
from .parts import batch_of, begin_rows, commit_rows
from .path_costs import PathCosts, Reading, Shape, fitted

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
# Of the kernel, which also pays for a request alone: contexts of one member, and more of several lengths.
KERNEL_SHAPES = (Shape(0, (300,)), Shape(0, (4000,)), Shape(0, (300, 1000, 2500, 4000)), Shape(0, (2000,) * 8))
# Rows of drafts, which the kernel reads together: members, their tokens, and rows of each.
ROWS = ((1, 300, 5), (1, 300, 17), (1, 3000, 2), (1, 3000, 17), (4, 300, 2), (4, 300, 17), (4, 2000, 5), (4, 2000, 17))
# Windows share nothing: members, and tokens of each where the window has so many.
WINDOWS = tuple((members, tokens) for members in (1, 2, 8) for tokens in (16, 128, 512, 4096))
# Longer contexts are not gathered here: it takes longest where nobody would.
GATHERED_TOKENS = 600
# Layers of short contexts, one after the other, as the first of them works out what the others share.
LAYERS = 2
SHORT_TOKENS = 4096
# A GPU computes while the next layers are encoded: there it is as many as the group has, up to these, in so many bytes.
GPU_LAYERS, GPU_BYTES = 8, 256 * 2**20
ROUNDS = 3
# A reading takes so many steps that it is no shorter than this, in seconds.
SHORTEST = 1e-3
MOST_STEPS = 8


def measure_paths(
    model: Any, arena: KVArena, seconds: float = 0.5, *, look: Callable[[], None] = proceed
) -> dict[int, PathCosts]:
    """The costs of each full layer group of an attached model, and of windows that have a kernel, for arena.decode.costs.

    Takes about `seconds`, twice that where there are kernels, and up to three times as long where one reading of each shape takes
    that; a model for which that is too short is not measured. Neither are models whose batches are not ragged, and pools without
    room for a sequence. Other windows have one path only, as they share nothing. `look` is called between readings, and what it
    raises ends the measuring.
    """
    if not arena.ragged:
        return {}
    try:
        every = asked_of(model, arena)
    except PoolExhaustedError:
        return {}
    asked = {group: each[0] for group, each in every.items() if _has_paths(arena, group)}
    seconds = seconds * (2 if arena.decode.trusted else 1) / max(1, len(asked))
    try:
        found = {group: _readings(arena, group, each, seconds, look) for group, each in asked.items()}
    finally:
        # What the trials have allocated.
        mx.clear_cache()
    return {group: fitted(readings) for group, readings in found.items() if readings}


def _has_paths(arena: KVArena, group: int) -> bool:
    """Whether there is something to choose."""
    return type(arena.spec.groups[group].layer) is FullLayer or group in arena.decode.trusted


def _shapes(arena: KVArena, group: int) -> tuple[Shape, ...]:
    """What a layer group is measured with."""
    if group not in arena.decode.trusted:
        return SHAPES
    layer, rows = arena.spec.groups[group].layer, [Shape(0, (tokens,) * members, rows) for members, tokens, rows in ROWS]
    if not isinstance(layer, WindowLayer):
        return (*SHAPES, *KERNEL_SHAPES, *rows)
    single = [Shape(0, (tokens,) * members) for members, tokens in WINDOWS]
    # No member holds more than the window.
    return tuple({each._replace(own=tuple(min(tokens, layer.max_size) for tokens in each.own)): None for each in single + rows})


def _readings(arena: KVArena, group: int, asked: Asked, seconds: float, look: Callable[[], None]) -> list[Reading]:
    """A reading of each shape, the median of as many passes over all as there is time for; nothing if there is none for one."""
    times = {shape: _Times() for shape in _shapes(arena, group)}
    if group in arena.decode.trusted:
        for shape in times:
            look()
            _Trial(arena, group, asked, shape).compile()
    begun, on_the_wall = clock(), time.perf_counter()
    taken = 0.0
    while not taken or clock() - begun + taken < seconds:
        first = clock()
        for shape in times:
            if clock() - begun > 3 * seconds or time.perf_counter() - on_the_wall > 10 * seconds:
                return []
            look()
            _Trial(arena, group, asked, shape).run(times[shape])
        taken = clock() - first
    return [each.reading(shape) for shape, each in times.items()]


class _Times:
    """The seconds of one step of one layer, by what was tried, of each round."""

    def __init__(self) -> None:
        self.rounds: list[dict[str, float]] = []

    def reading(self, shape: Shape) -> Reading:
        ratios = {
            name: median(each[name] / each["ragged"] for each in self.rounds) for name in self.rounds[0] if name != "ragged"
        }
        return Reading(shape, median(each["ragged"] for each in self.rounds), ratios)


class _Trial:
    """Members of one shape, in a pool of their own."""

    def __init__(self, arena: KVArena, group: int, asked: Asked, shape: Shape) -> None:
        spec, layer = arena.spec, arena.spec.groups[group].layer
        # Only its own layers, and blocks for what is appended too.
        blocks = blocks_for(shape.shared) + sum(blocks_for(tokens + MOST_STEPS + shape.rows) for tokens in shape.own)
        layers = _layers(spec, group, shape, blocks)
        own = ModelCacheSpec(spec.model_id, (layer,) * layers, spec.dtype, bits=spec.bits)
        size = blocks * own.bytes_per_block(own.groups[0])
        self.arena = KVArena(own, size, PoolConfig(slabs=1, slab_blocks=blocks))
        self.arena.ragged = True
        own_policy, policy = self.arena.decode, arena.decode
        own_policy.synchronous, own_policy.streams, own_policy.launch = policy.synchronous, policy.streams, policy.launch
        own_policy.trusted = frozenset([0]) if group in policy.trusted else frozenset()
        self.asked, self.shape, self.layer = asked, shape, layer
        self._rows = len(shape.own) * shape.rows
        self._queries = mx.repeat(asked.queries, self._rows, axis=0)
        self._keys, self._values = (mx.zeros((self._rows, layer.kv_heads, 1, dim), self.arena.dtype) for dim in self._dims)
        prefix = self._appended(pooled_caches(self.arena), shape.shared)
        self._batch = batch_of(self._appended(copy.deepcopy(prefix), tokens) for tokens in shape.own)

    @property
    def _dims(self) -> tuple[int, int]:
        return self.layer.key_dim, self.layer.value_dim

    def _appended(self, caches: list[Any], tokens: int) -> list[Any]:
        for cache in caches if tokens else []:
            cache.write(*(mx.zeros((1, self.layer.kv_heads, tokens, dim), self.arena.dtype) for dim in self._dims))
        return caches

    def compile(self) -> None:
        """Run the kernel once: a device compiles its text for some kinds of batches, which takes longer than all steps."""
        self._seconds("kernel", 1)

    def run(self, times: _Times) -> None:
        """Time each path in turns."""
        mx.eval(self.arena.arrays(), self._queries, self._keys, self._values)
        names = ["ragged"]
        names += ["shared"] if self.shape.shared else []
        names += ["padded"] if self._is_gathered() else []
        names += ["kernel"] if self.arena.decode.trusted else []
        rounds = [{name: self._seconds(name, 1) for name in names}]
        steps = min(MOST_STEPS, 1 + int(SHORTEST / max(rounds[0].values())))
        # Of short steps the first ones are not counted: a device may compile what they need.
        rounds = rounds if steps == 1 else []
        while len(rounds) < ROUNDS:
            names.reverse()
            rounds.append({name: self._seconds(name, steps) for name in names})
        times.rounds += rounds

    def _is_gathered(self) -> bool:
        many = len(self.shape.own) > 1 and self.shape.rows == 1
        return many and type(self.layer) is FullLayer and max(self.shape.sizes) <= GATHERED_TOKENS

    def _seconds(self, name: str, steps: int) -> float:
        """Seconds of one step of one layer. The tokens that it appends are taken back."""
        self.arena.decode.path = name
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
        start, waiting = clock(), None
        for _ in range(steps):
            following = self._step()
            # As an engine does: a step is encoded while the one before it runs.
            mx.async_eval(following)  # type: ignore[no-untyped-call]
            mx.eval(waiting)
            waiting = following
        mx.eval(waiting)
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
            keys, values = cache.update_and_fetch(self._keys + before, self._values + before)
            queries = self._queries + before.astype(self._queries.dtype)
            out = cache.attend(queries, keys, values, self.asked.scale, None, self.asked.sinks)
            before = out[:, :1, :, :1].astype(self.arena.dtype)
        return before


def _layers(spec: ModelCacheSpec, group: int, shape: Shape, blocks: int) -> int:
    """Layers of a trial with so many blocks in each. The first one works out what the others share, and they divide its time."""
    if device() == "cpu":
        return LAYERS if sum(shape.sizes) < SHORT_TOKENS else 1
    layers = spec.groups[group]
    fitting = GPU_BYTES // (blocks * spec.bytes_per_block_per_layer(layers.layer))
    return max(1, min(len(layers.layers), GPU_LAYERS, fitting))


def clock() -> float:
    """Seconds: of the processor where that computes, so that other processes do not count, else of the clock on the wall."""
    return time.process_time() if device() == "cpu" else time.perf_counter()
