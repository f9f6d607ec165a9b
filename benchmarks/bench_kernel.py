"""Decode steps on the kernel beside the paths that mlx's own operations take, mlx-lm's padded batch
and the device's bandwidth.

A llama type with the heads of Llama 3 8B, in one run and in turns. Attention alone is built before
the clock starts, and what it appends is written then: its time is the device's. A whole step has
the time of Python in it, and is encoded while the one before it runs, as an engine does. `share` is
the part of the bandwidth that reads each key and value once in that time. A CPU has no
kernel: there the other paths are measured, in small sizes.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import mlx.core as mx
from measure import interleave, llama, options, report
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import make_prompt_cache as stock_prompt_cache

from mlx_blockpool.config import KVBits
from mlx_blockpool.kv.arena import KVArena
from mlx_blockpool.kv.attach import scaled_dot_product_attention
from mlx_blockpool.kv.build import describe
from mlx_blockpool.kv.probe import probe
from mlx_blockpool.kv.prompt_cache import batch_of, begin_rows, commit_rows, make_prompt_cache
from mlx_blockpool.spec import WindowLayer, blocks_for

MIXED = (500, 600, 1024, 1500, 2048, 300, 4000, 800)
GROUP_SIZE = 64


@dataclass(frozen=True)
class Size:
    """Of the model, and of a run.

    `divisor`: of all contexts; `array_bytes`: of the array that the bandwidth is measured with.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    dim: int
    divisor: int
    steps: int
    rounds: int
    array_bytes: int


FULL = Size(1024, 8, 32, 8, 128, 1, 8, 9, 1 << 30)
ON_CPU = Size(256, 4, 8, 4, 64, 4, 2, 5, 1 << 28)
QUICK = Size(256, 2, 8, 4, 64, 16, 2, 1, 1 << 24)


@dataclass(frozen=True)
class Case:
    """Members with `own` tokens behind a prefix that they share, whose next `rows` tokens are
    computed together.

    bits: of the pool's keys and values. window: that all layers but the last one have. needed: the
    ratios that are asked for of attention alone.
    """

    name: str
    own: tuple[int, ...]
    prefix: int = 0
    rows: int = 1
    bits: int | None = None
    window: int | None = None
    needed: tuple[tuple[str, float], ...] = ()


CASES = (
    Case("8 of 4,096 tokens", (4096,) * 8, needed=(("kernel_share", 0.7),)),
    Case("8 of 300 to 4,000 tokens", MIXED, needed=(("ratio_ragged", 1.5), ("ratio_stock", 2.0))),
    Case("8 on a prefix of 4,096 tokens", (128,) * 8, prefix=4096),
    Case("8 of 300 to 4,000 tokens, 4 rows each", MIXED, rows=4),
    Case("8 of 300 to 4,000 tokens, 16 rows each", MIXED, rows=16),
    Case("8 of 300 to 4,000 tokens, 8 bits", MIXED, bits=8),
    Case("8 of 300 to 4,000 tokens, 4 bits", MIXED, bits=4),
    Case("8 of 300 to 4,000 tokens, windows of 1,024", MIXED, window=1024),
)


class System:
    """One case in a pool, on any of its paths, or in mlx-lm's padded batch."""

    def __init__(self, pooled: bool, case: Case, size: Size) -> None:
        self.case, self.size = case, size
        self.model = model_of(case, size)
        self.arena = self._pool() if pooled else None
        # In a pool each row is one of the batch.
        self.by_rows = pooled and case.rows > 1
        self.rows = (len(case.own) * case.rows, 1) if self.by_rows else (len(case.own), case.rows)
        self.batch = self._batch()

    def _pool(self) -> KVArena:
        case = self.case
        bits = None if case.bits is None else KVBits(case.bits, case.bits, GROUP_SIZE)
        spec = describe(self.model).with_bits(bits)
        blocks = blocks_for(case.prefix) + sum(blocks_for(tokens) + 2 for tokens in case.own)
        arena = KVArena(spec, 2 * blocks * sum(map(spec.bytes_per_block, spec.groups)))
        arena.capabilities = probe(self.model, arena)
        return arena

    def _batch(self) -> list[Any]:
        mx.random.seed(1)
        caches = (
            stock_prompt_cache(self.model)
            if self.arena is None
            else make_prompt_cache(self.model, self.arena)
        )
        first = self._filled(caches, self.case.prefix)
        members = [self._filled(copy.deepcopy(first), tokens) for tokens in self.case.own]
        if self.arena is not None:
            return list(batch_of(members))
        return [type(layer[0]).merge(list(layer)) for layer in zip(*members, strict=True)]

    def _filled(self, caches: list[Any], tokens: int) -> list[Any]:
        """Caches with random keys and values behind what they hold."""
        for cache in caches if tokens else []:
            cache.update_and_fetch(
                *mx.random.normal((2, 1, self.size.kv_heads, tokens, self.size.dim)).astype(
                    mx.bfloat16
                )
            )
            mx.eval(cache.state)
        return caches

    def attention(self) -> mx.array:
        """Attention in every layer, each of which waits for the one before it.

        It is not evaluated; what is appended is.
        """
        batch, length = self.rows
        x = mx.ones((batch, self.size.heads, length, self.size.dim), mx.bfloat16)
        new = x[:, : self.size.kv_heads]
        # As a model does: one mask for all layers with the same window, or with none.
        windows = [getattr(cache, "max_size", None) for cache in self.batch]
        firsts = dict(zip(windows[::-1], self.batch[::-1], strict=True))
        hidden = mx.zeros((batch, length, 1))
        masks = {window: create_attention_mask(hidden, cache) for window, cache in firsts.items()}
        views = [cache.update_and_fetch(new, new) for cache in self.batch]
        mx.eval(x, masks, views, [cache.state for cache in self.batch])
        for cache, window, (keys, values) in zip(self.batch, windows, views, strict=True):
            x = x + scaled_dot_product_attention(
                x, keys, values, cache, self.size.dim**-0.5, masks[window]
            )
        return x

    def step(self) -> mx.array:
        """Logits [members, rows, vocabulary] of a whole step; not evaluated."""
        logits: mx.array = self.model(mx.full(self.rows, 7), cache=self.batch)
        return logits.reshape(len(self.case.own), self.case.rows, -1)

    def logits(self) -> mx.array:
        """Of the next step, which is taken back."""
        self.begin()
        found = self.step().astype(mx.float32)
        mx.eval(found)
        self.take_back(1)
        return found

    def begin(self) -> None:
        if self.by_rows:
            begin_rows(self.batch, [self.case.rows] * len(self.case.own))

    def take_back(self, steps: int) -> None:
        """Remove the rows of so many steps.

        Full windows keep theirs: they stay as long as they are.
        """
        if self.by_rows:
            commit_rows(self.batch, [0] * len(self.case.own))
            return
        for cache in self.batch:
            if cache.is_trimmable():
                cache.trim(steps * self.case.rows)

    def attention_seconds(self) -> float:
        """Seconds of one layer's attention.

        What is built before the clock starts is not in them.
        """
        taken = 0.0
        for _ in range(self.size.steps):
            self.begin()
            taken += evaluation_seconds(self.attention)
            self.take_back(1)
        return taken / self.size.steps / self.size.layers

    def step_seconds(self) -> float:
        """Seconds of a whole step.

        Steps overlap, but for those of several rows: which are kept is read first.
        """
        start, waiting = time.perf_counter(), None
        for _ in range(self.size.steps):
            self.begin()
            following = self.step()
            mx.async_eval(following)
            mx.eval(waiting)
            waiting = following
            if self.case.rows > 1:
                mx.eval(following)
                self.take_back(1)
        mx.eval(waiting)
        taken = (time.perf_counter() - start) / self.size.steps
        if self.case.rows == 1:
            self.take_back(self.size.steps)
        return taken

    def on(self, path: str, run: Callable[[], float]) -> float:
        """What `run` returns on a path of the pool; fails if any layer took another one."""
        assert self.arena is not None, "mlx-lm's batch has no paths"
        decode = self.arena.decode
        decode.path = path
        decode.path_counts.clear()
        found = run()
        needed = {counted_as(path, self.case): self.size.steps * self.size.layers}
        assert decode.path_counts == needed, f"{decode.path_counts} != {needed}: another path ran"
        return found


class Bandwidth:
    """The bytes that this device reads and writes in a second, by a sum and by a copy of a large
    array.
    """

    def __init__(self, nbytes: int) -> None:
        self.array = mx.zeros((nbytes // 4,), mx.float32)
        mx.eval(self.array)

    def runs(self) -> dict[str, Callable[[], float]]:
        return {
            "sum": lambda: evaluation_seconds(lambda: self.array.sum()),
            "copy": lambda: evaluation_seconds(lambda: self.array + 1),
        }

    def of(self, seconds: dict[str, float]) -> float:
        """The larger of both, from what runs() took."""
        return max(self.array.nbytes / seconds["sum"], 2 * self.array.nbytes / seconds["copy"])


def evaluation_seconds(build: Callable[[], mx.array]) -> float:
    """Seconds from handing a graph to the device to the end of its work."""
    graph = build()
    mx.synchronize()
    start = time.perf_counter()
    mx.eval(graph)
    return time.perf_counter() - start


def counted_as(path: str, case: Case) -> str:
    """The name under which an attend is counted."""
    by_rows = "kernel_rows" if path == "kernel" else "rows"
    return path if case.rows == 1 else by_rows


def model_of(case: Case, size: Size) -> Any:
    windows: dict[str, Any] = {}
    if case.window is not None:
        types = ["sliding_attention"] * (size.layers - 1) + ["full_attention"]
        windows = {"sliding_window": max(8, case.window // size.divisor), "layer_types": types}
    return llama(
        size.hidden,
        size.layers,
        size.heads,
        size.kv_heads,
        mx.bfloat16,
        head_dim=size.dim,
        **windows,
    )


def scaled(case: Case, divisor: int) -> Case:
    """The case with its contexts divided."""
    return replace(
        case, own=tuple(tokens // divisor for tokens in case.own), prefix=case.prefix // divisor
    )


def bytes_read(system: System) -> float:
    """Keys and values of the average layer: those of a prefix once, and of a window no more than
    it holds.
    """
    assert system.arena is not None
    spec, case = system.arena.spec, system.case
    total = 0
    for layer in spec.leaves:
        window = layer.max_size if isinstance(layer, WindowLayer) else None
        tokens = (
            sum(case.own) + case.prefix
            if window is None
            else sum(min(case.prefix + own, window) for own in case.own)
        )
        total += tokens * spec.bytes_per_token_per_layer(layer)
    return total / len(spec.leaves)


def check(ours: System, stock: System, paths: list[str]) -> None:
    """Fails if a step gives other logits than mlx-lm's, on any path.

    Full windows keep the token of each step in both.
    """
    for path in paths:
        ours.arena.decode.path = path
        needed = stock.logits()
        assert mx.abs(ours.logits() - needed).max() < 5e-2 * mx.abs(needed).max(), (
            f"{path}: other logits than mlx-lm's"
        )


def bench(args: Any, case: Case, size: Size) -> str | None:
    """Report attention and whole steps of one case.

    Returns why the kernel is not among the paths, in words, or None.
    """
    ours = System(True, scaled(case, size.divisor), size)
    # mlx-lm has no batch of quantised caches.
    stock = System(False, ours.case, size) if case.bits is None else None
    why = "; ".join(sorted(set(ours.arena.capabilities.no_kernel.values()))) or None
    paths = ["kernel"] * (why is None) + ["ragged"] + ["shared"] * bool(case.prefix)
    if stock is not None:
        check(ours, stock, paths)
    bandwidth = Bandwidth(size.array_bytes)
    for work in ("attention", "step"):
        runs = {path: partial(ours.on, path, getattr(ours, f"{work}_seconds")) for path in paths}
        runs |= {"stock": getattr(stock, f"{work}_seconds")} if stock else {}
        beside = bandwidth.runs() if work == "attention" else {}
        # A device may compile what it runs for the first time.
        interleave({**runs, **beside}, 1)
        taken = interleave({**runs, **beside}, size.rounds)
        figures = {f"{name}_ms": round(taken[name] * 1e3, 4) for name in runs}
        figures |= {
            f"ratio_{name}": round(taken[name] / taken[paths[0]], 3)
            for name in runs
            if name != paths[0]
        }
        if work == "attention":
            speed, read = bandwidth.of(taken), bytes_read(ours)
            figures |= {f"{name}_share": round(read / taken[name] / speed, 3) for name in runs}
            figures |= {"bandwidth_gb_s": round(speed / 1e9, 1), "read_mb": round(read / 1e6, 2)}
            figures |= {"needed": dict(case.needed)} if case.needed and why is None else {}
        name = f"{work}, {case.name}" + (
            "" if size.divisor == 1 else f", divided by {size.divisor}"
        )
        name += "" if why is None else ", without the kernel"
        report(args, "kernel", name, layers=size.layers, rounds=size.rounds, **figures)
    return why


def main() -> int:
    args = options(__doc__ or "")
    is_gpu = mx.default_device() == mx.gpu
    if not is_gpu:
        print("There is no kernel for CPUs: only the other paths are measured.", file=sys.stderr)
    refused = 0
    for case in CASES:
        why = bench(args, case, QUICK if args.quick else FULL if is_gpu else ON_CPU)
        if is_gpu and why is not None:
            print(f"{case.name}: measured without the kernel: {why}.", file=sys.stderr)
            refused += 1
        mx.clear_cache()
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
