"""Recorded coding sessions through the prefix cache and its store, without a model: how much of
each prompt is reused.

Several sessions run at a time, each by its own clock. The pool has 25 to 200 % of the peak working
set. Beside it, with the same
bytes: blocks in plain LRU order, the offline optimum over the same blocks, and mlx-lm's
LRUPromptCache. Every figure is a part of the ideal: the reuse of a cache that forgets nothing.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
from measure import options_parser, report
from mlx_lm.models.cache import LRUPromptCache
from sessions import Blocks, Optimum, PlainLRU, Recorded, recorded

from mlx_blockpool.config import StoreConfig
from mlx_blockpool.engine.caches import PooledCaches
from mlx_blockpool.engine.request import Request
from mlx_blockpool.engine.sequence import Sequence
from mlx_blockpool.errors import PoolExhaustedError
from mlx_blockpool.kv.arena import KVArena
from mlx_blockpool.kv.capabilities import RAGGED
from mlx_blockpool.kv.other_caches import PooledArraysCache
from mlx_blockpool.kv.prompt_cache import leaves_of
from mlx_blockpool.spec import (
    BLOCK_TOKENS,
    FullLayer,
    ModelCacheSpec,
    StateLayer,
    WindowLayer,
    blocks_for,
)
from mlx_blockpool.store.prompt_store import PromptStore
from mlx_blockpool.tier.cache import TieredPrefixCache
from mlx_blockpool.tier.write_behind import StoredPrefixes

WINDOW = 1024
FULL = FullLayer(1, 1, 1)
# A state takes as much as the keys and values of five blocks.
STATE = StateLayer((((5 * BLOCK_TOKENS * 2,), "float16"),))
SPECS = {
    "full": ModelCacheSpec("full", (FULL,)),
    "window": ModelCacheSpec("window", (FULL, WindowLayer(1, 1, 1, max_size=WINDOW))),
    "hybrid": ModelCacheSpec("hybrid", (FULL, STATE)),
}
BUDGETS = (25, 50, 75, 100, 150, 200)
# Where memory is short.
DISK_BUDGETS = (25, 50, 75)
QUICK_SESSIONS = (10, 11)
Sessions = tuple[int, ...] | None
# Where chat templates begin the reply, so many tokens behind the last message.
REPLY_TOKENS = 8
# Its search of a prompt of 100k tokens can take many seconds: it gets shorter ones, and layers of
# the full sizes.
STOCK_DIVISOR = 16
# Prompts whose time to be fetched is measured, and with which pool.
LONG = range(80_000, 120_000)
FETCH_BUDGET = 100
# The speed of the disk is no part of what is measured, and tens of thousands of syncs take minutes.
MEMORY_DISK = Path("/dev/shm")


@dataclass
class Replay:
    """Tokens reused, of them read from disk; requests refused; wall and processor seconds of
    each fetch of a LONG prompt.
    """

    reused: int = 0
    restored: int = 0
    refused: int = 0
    fetches: list[tuple[float, float]] = field(default_factory=list)


@contextmanager
def caches_of(spec: ModelCacheSpec, pool_bytes: int, folder: Path | None) -> Iterator[PooledCaches]:
    """The engine's caches over a pool, and over a store in `folder`."""
    arena = KVArena(spec, pool_bytes)
    arena.capabilities = RAGGED
    # A replay of hours takes a minute: the ends of conversations that rest are written at once.
    config = StoreConfig(folder, min_free_bytes=0, idle_seconds=0)
    store = None if folder is None else PromptStore(config, "sessions", {"model": "sessions"})
    prefix = TieredPrefixCache(arena, store=store)
    yield PooledCaches(prefix)
    assert prefix.close(), "the store could not write everything"


def replay(requests: Iterator[Recorded], caches: PooledCaches) -> Replay:
    """Every request in turn, as the engine runs it."""
    found = Replay()
    for uid, request in enumerate(requests):
        prompt = request.prompt.tolist()
        sequence = Sequence(
            uid, Request(prompt, len(request.output), breakpoints=breakpoints_of(request)), 0.0
        )
        if len(prompt) + len(request.output) > (caches.capacity() or 0):
            found.refused += 1
            continue
        while not caches.is_ready(sequence):
            caches.advance(idle=True)
        wall, cpu = time.perf_counter(), time.thread_time()
        opened = caches.open(sequence, ())
        if len(prompt) in LONG:
            found.fetches.append((time.perf_counter() - wall, time.thread_time() - cpu))
        sequence.caches, sequence.computed = opened.caches, opened.cached
        found.reused += opened.cached
        found.restored += opened.lookup.restored
        run(sequence, request.output.tolist(), caches)
        caches.advance(idle=True)
        if isinstance(caches.prefix.stored, StoredPrefixes):
            # Between two requests of a recorded session the writer has seconds.
            caches.prefix.stored.store.flush(60.0)
    return found


def breakpoints_of(request: Recorded) -> list[tuple[int, str]]:
    """Where system text and messages end, as the server finds it."""
    ends = [(request.head, "system"), (len(request.prompt) - REPLY_TOKENS, "user")]
    return [end for end in ends if 0 < end[0] < len(request.prompt)]


def run(sequence: Sequence, output: list[int], caches: PooledCaches) -> None:
    """Compute a prompt up to each of its breakpoints, then the reply."""
    for end in sorted({*sequence.breakpoints, sequence.prefill_end}):
        if end <= sequence.computed:
            continue
        compute(sequence, end, caches)
        if end in sequence.breakpoints:
            caches.insert(sequence, sequence.breakpoints[end], end)
    sequence.tokens += output
    while sequence.in_prefill:
        try:
            caches.ensure_next_blocks([sequence])
        except PoolExhaustedError:
            # Nothing can be evicted any more: as with a reply that ends here.
            break
        compute(
            sequence,
            min(sequence.prefill_end, (sequence.computed // BLOCK_TOKENS + 1) * BLOCK_TOKENS),
            caches,
        )
    caches.release(sequence, "assistant")


def compute(sequence: Sequence, end: int, caches: PooledCaches) -> None:
    """Stands for the model: tokens [computed, end)."""
    count, spec = end - sequence.computed, caches.prefix.arena.spec
    nothing = mx.zeros((1, 1, count, 1), mx.float16)
    for cache in leaves_of(sequence.caches or []):
        if isinstance(cache, PooledArraysCache):
            cache.cache = [
                mx.zeros(shape, mx.float16) for shape, _ in spec.leaves[cache.layer].arrays
            ]
            mx.eval(cache.cache)
        else:
            cache.update_and_fetch(nothing, nothing)
    mx.eval(caches.prefix.arena.arrays())
    sequence.computed = end


class StockLayers:
    """Stands for mlx-lm's caches of `offset` tokens in its LRUPromptCache, which asks only for
    their size.
    """

    def __init__(self, spec: ModelCacheSpec, offset: int) -> None:
        self.spec = spec
        self.offset = offset

    @property
    def nbytes(self) -> int:
        windows = [layer.max_size for layer in self.spec.layers if isinstance(layer, WindowLayer)]
        token = self.spec.bytes_per_block(self.spec.groups[0]) // BLOCK_TOKENS
        held = blocks_for(self.offset) * BLOCK_TOKENS + sum(
            min(self.offset, window) for window in windows
        )
        return held * token + self.spec.fixed_bytes_per_agent()

    def is_trimmable(self) -> bool:
        return not self.spec.fixed_bytes_per_agent() and (
            self.offset < WINDOW or len(self.spec.layers) == 1
        )

    def trim(self, count: int) -> int:
        self.offset -= count * STOCK_DIVISOR
        return count


def replay_stock(spec: ModelCacheSpec, most_bytes: int, sessions: Sessions = None) -> float:
    """The part of the ideal that mlx-lm's LRUPromptCache reuses, in as many sequences as fit."""
    cache, reused, known = LRUPromptCache(1 << 30, most_bytes), 0, 0
    for request in recorded(sessions, STOCK_DIVISOR):
        known += request.known
        prompt = request.prompt.tolist()
        _, rest = cache.fetch_nearest_cache("model", prompt)
        hit = len(prompt) - max(1, len(rest))
        reused += hit
        tokens = prompt + request.output.tolist()[:-1]
        for end, kind in [*breakpoints_of(request), (len(tokens), "assistant")]:
            if end > hit:
                layers = StockLayers(spec, end * STOCK_DIVISOR)
                cache.insert_cache("model", tokens[:end], [layers], cache_type=kind)
    return reused / known


def bench(args: Any, kind: str, blocks: Blocks, percent: int, sessions: Sessions) -> None:
    """One spec with one budget, the same bytes for all."""
    spec, capacity = SPECS[kind], blocks.working_set * percent // 100
    pool_bytes = capacity * spec.bytes_per_block(spec.groups[0])
    with caches_of(spec, pool_bytes, None) as caches:
        memory = replay(recorded(sessions), caches)
    reused = {"ours": memory.reused}
    if kind == "full":
        reused |= {
            "plain_lru": PlainLRU(blocks, capacity).reuse(),
            "optimum": Optimum(blocks, capacity).reuse(),
        }
    if percent in DISK_BUDGETS:
        disk = MEMORY_DISK if MEMORY_DISK.is_dir() else None
        with (
            tempfile.TemporaryDirectory(dir=disk) as folder,
            caches_of(spec, pool_bytes, Path(folder)) as caches,
        ):
            reused["ours_disk"] = replay(recorded(sessions), caches).reused
    figures: dict[str, Any] = {
        name: round(count / blocks.known, 4) for name, count in reused.items()
    }
    figures["stock"] = round(replay_stock(spec, pool_bytes, sessions), 4)
    if "optimum" in reused:
        figures["of_optimum"] = round(reused["ours"] / reused["optimum"], 4)
    if memory.fetches and percent == FETCH_BUDGET:
        wall, cpu = (statistics.median(times) * 1e3 for times in zip(*memory.fetches, strict=True))
        figures |= {
            "fetch_ms": round(wall, 2),
            "fetch_cpu_ms": round(cpu, 2),
            "fetches": len(memory.fetches),
        }
    case = f"{kind}: {percent} % of the working set"
    report(
        args,
        "sessions",
        case,
        **figures,
        blocks=capacity,
        refused=memory.refused,
        ideal=round(blocks.ideal, 4),
    )


if __name__ == "__main__":
    parser = options_parser(__doc__ or "")
    parser.add_argument(
        "--budgets",
        type=int,
        nargs="+",
        default=BUDGETS,
        help="sizes of the pool, in %% of the working set",
    )
    args = parser.parse_args()
    sessions, budgets = (QUICK_SESSIONS, (75,)) if args.quick else (None, args.budgets)
    blocks = Blocks(recorded(sessions))
    for kind in SPECS:
        for percent in budgets:
            bench(args, kind, blocks, percent, sessions)
