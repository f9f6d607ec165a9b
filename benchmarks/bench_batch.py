"""Decode of a batch with contexts of mixed length, and joining and leaving it, against mlx-lm's
padded batch, in one run.

Both run in mlx-lm's own BatchGenerator. The counter proves the path: every attend of every step was
the ragged one. On a CPU the attention of a batch is divided between cores, mlx-lm's is not; `one
stream` is ours without that. The cases with a model type are the tests' tiny models whose attention
is not a plain call of mlx-lm's; `by member` is ours without an adapter. Of them it also measures
what joining and leaving copies, and the bytes of agents that share a prefix.
"""

from __future__ import annotations

import functools
import gc
import statistics
import sys
import time
from copy import deepcopy
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from measure import interleave, llama, options, report
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import make_prompt_cache as stock_prompt_cache

from mlx_blockpool.config import PoolConfig
from mlx_blockpool.kv.attach import bind
from mlx_blockpool.kv.batch_cache import PooledBatchCache
from mlx_blockpool.kv.build import open_pool
from mlx_blockpool.kv.capabilities import Capabilities
from mlx_blockpool.kv.decode_policy import default_streams
from mlx_blockpool.kv.prompt_cache import batch_of, make_prompt_cache, sequence_of
from mlx_blockpool.spec import BLOCK_TOKENS
from mlx_blockpool.testing import tiny_model

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from architectures.configs import CONFIGS

MIXED = [500, 600, 1024, 1500, 2048, 300, 4000, 800]
# The types whose attention is read in place by plugins; their batches were padded before, or run
# one at a time.
MODELS = (
    *("deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "kimi_k25", "kimi_vl"),
    *("longcat_flash", "mistral4", "bailing_hybrid", "bailing_moe_v3", "kimi_k3", "kimi_linear"),
    *("gemma3n", "gemma4", "gemma4_text", "gemma2", "iquestloopcoder", "plamo", "plamo2"),
    *("plamo3", "minimax_m3_vl", "afm7", "gpt_bigcode"),
)
BY_MEMBER = ("deepseek_v3", "deepseek_v32")
# The tokens that agents share, and those that each adds.
PREFIX, OWN, AGENTS = 4096, 64, 5


def filled(caches: list[Any], context: int, heads: int, dim: int) -> list[Any]:
    for cache in caches:
        cache.update_and_fetch(*mx.random.normal((2, 1, heads, context, dim)))
    mx.eval([c.state for c in caches])
    return caches


class System:
    """One way of batching: its model, and how it makes caches."""

    def __init__(
        self,
        pooled: bool,
        contexts: list[int],
        size: tuple[int, int, int, int],
        config: PoolConfig | None = None,
    ) -> None:
        self.model = llama(*size)
        self.contexts = contexts
        self.layers = size[1]
        self.heads, self.dim = size[3], size[0] // size[2]
        tokens = sum(max(context, BLOCK_TOKENS) for context in contexts)
        pool_bytes = 3 * tokens * 2 * size[1] * size[3] * self.dim * 4
        self.pool = open_pool(self.model, pool_bytes, config, attach=False) if pooled else None
        if self.pool is not None:
            self.pool.capabilities = Capabilities(ragged=bool(bind(self.model)))

    def caches(self, context: int) -> list[Any]:
        made = (
            stock_prompt_cache(self.model)
            if self.pool is None
            else make_prompt_cache(self.model, self.pool)
        )
        return filled(made, context, self.heads, self.dim)

    def batch(self, contexts: list[int]) -> BatchGenerator:
        generator = BatchGenerator(
            self.model, max_tokens=10_000, prefill_batch_size=len(contexts) + 1
        )
        generator.insert(
            [[7]] * len(contexts), caches=[self.caches(context) for context in contexts]
        )
        for _ in range(3):
            generator.next_generated()
        return generator

    def step_seconds(self, steps: int, streams: int | None = None) -> float:
        """Seconds of one decode step of the whole batch; its path is checked."""
        if self.pool is not None:
            self.pool.decode.streams = streams or default_streams()
        generator = self.batch(self.contexts)
        found = isinstance(generator._generation_batch.prompt_cache[0], PooledBatchCache)
        assert found == (self.pool is not None), "the other path ran"
        if self.pool is not None:
            self.pool.decode.path_counts.clear()
        start = time.perf_counter()
        for _ in range(steps):
            generator.next_generated()
        taken = (time.perf_counter() - start) / steps
        if self.pool is not None:
            needed = {"ragged": steps * self.layers}
            assert self.pool.decode.path_counts == needed, (
                f"{self.pool.decode.path_counts} != {needed}: another path ran"
            )
        return taken

    def stall_seconds(self) -> float:
        """Seconds that one sequence's joining and leaving adds to a batch of the others, as each
        engine does it.
        """
        batch = self.batch(self.contexts)._generation_batch.prompt_cache
        late = self.caches(self.contexts[0])
        start = time.perf_counter()
        joins = [type(own).merge([own]) for own in late] if self.pool is None else batch_of([late])
        for cache, own in zip(batch, joins, strict=True):
            cache.extend(own)
            cache.filter(list(range(len(self.contexts))))
        mx.eval([c.state for c in batch])
        return time.perf_counter() - start


def bench(
    args: Any,
    case: str,
    contexts: list[int],
    size: tuple[int, int, int, int],
    steps: int,
    rounds: int,
    config: PoolConfig | None = None,
) -> None:
    ours, stock = System(True, contexts, size, config), System(False, contexts, size)
    assert ours.pool is not None
    runs = {
        "ours": ours.step_seconds,
        "one": lambda steps: ours.step_seconds(steps, streams=1),
        "stock": stock.step_seconds,
    }
    step = interleave({name: functools.partial(run, steps) for name, run in runs.items()}, rounds)
    counts = dict(ours.pool.decode.path_counts)
    stall = interleave({"ours": ours.stall_seconds, "stock": stock.stall_seconds}, rounds)
    report(
        args,
        "batch",
        case,
        sequences=len(contexts),
        utilisation=round(sum(contexts) / len(contexts) / max(contexts), 2),
        ours_step_ms=round(step["ours"] * 1e3, 2),
        stock_step_ms=round(step["stock"] * 1e3, 2),
        ratio_step=round(step["stock"] / step["ours"], 2),
        ratio_one_stream=round(step["stock"] / step["one"], 2),
        streams=default_streams(),
        path_counts=counts,
        ours_stall_ms=round(stall["ours"] * 1e3, 2),
        stock_stall_ms=round(stall["stock"] * 1e3, 2),
        ratio_stall=round(stall["stock"] / stall["ours"], 1),
    )


def config_of(name: str) -> dict[str, Any]:
    """The tests' tiny model of a type, with longer windows and indexers that choose more tokens."""
    config = CONFIGS[name]
    text = config.get("text_config", config)
    longer = {"sliding_window": 512, "index_topk": 256}
    wider = {**text, **{key: longer[key] for key in longer if key in text}}
    return {**config, "text_config": wider} if text is not config else wider


class Decoder:
    """Sequences of a model in one batch, in blocks or as mlx-lm pads them. All begin alike.

    agents: the caches of agents on one prefix.
    """

    def __init__(
        self, name: str, contexts: list[int], prefix: int, pooled: bool, by_member: bool = False
    ) -> None:
        self.model = tiny_model(config_of(name))
        self.pool = open_pool(self.model, 10**9, attach=not by_member) if pooled else None
        if self.pool is not None and by_member:
            bind(self.model, by_member=True)
            self.pool.capabilities = Capabilities(ragged=True, by_member=True)
        assert self.pool is None or self.pool.capabilities.ragged, f"{name} is not ragged"
        found = self._computed({*contexts, prefix})
        self.sequences = [found[context] for context in contexts]
        self.agents = [deepcopy(found[prefix]) for _ in range(AGENTS)]

    def _computed(self, contexts: set[int]) -> dict[int, list[Any]]:
        """A copy of the caches of one sequence at each context."""
        made: list[Any] = (
            stock_prompt_cache(self.model)
            if self.pool is None
            else make_prompt_cache(self.model, self.pool)
        )
        found, start = {}, 0
        for end in sorted(contexts):
            for at in range(start, end, 512):
                self._run(made, mx.arange(at, min(at + 512, end))[None] % 113)
            found[end], start = deepcopy(made), end
        return found

    def _run(self, caches: list[Any], tokens: mx.array) -> None:
        mx.eval(self.model(tokens, cache=caches), [c.state for c in caches])

    def _batch(self, sequences: list[list[Any]]) -> list[Any]:
        return [type(own[0]).merge(list(own)) for own in zip(*sequences, strict=True)]

    def step_seconds(self, steps: int) -> tuple[float, float]:
        """Seconds of one decode step of the whole batch, and its processor time."""
        sequences = deepcopy(self.sequences)
        if self.pool is not None:
            # A fork reads what it shares in another piece.
            for own in map(sequence_of, sequences):
                assert own is not None
                for group in range(len(self.pool.spec.groups)):
                    own.make_own_run(group)
        batch = self._batch(sequences)
        token = mx.ones((len(self.sequences), 1), mx.int32)
        for step in range(-3, steps):
            if step == 0:
                start = time.perf_counter(), time.process_time()
            following = mx.argmax(self.model(token, cache=batch)[:, -1:], axis=-1)
            mx.async_eval(following)  # type: ignore[no-untyped-call]
            mx.eval(token)
            token = following
        mx.eval(token)
        taken = time.perf_counter() - start[0], time.process_time() - start[1]
        return taken[0] / steps, taken[1] / steps

    def join_bytes(self) -> int:
        """How far memory rises while a sequence joins the batch of the others and leaves it.

        Blocks stay where they are, and none is copied.
        """
        gc.collect()
        first, *others = deepcopy(self.sequences)
        batch, late = self._batch(others), self._batch([first])
        mx.eval([c.state for c in (*batch, *late)])
        before, active = self._places(), mx.get_active_memory()
        mx.reset_peak_memory()
        for cache, own in zip(batch, late, strict=True):
            cache.extend(own)
        mx.eval([c.state for c in batch])
        for cache in batch:
            cache.filter(list(range(len(others))))
        mx.eval([c.state for c in batch])
        # No peak is counted where nothing is allocated.
        risen = max(0, mx.get_peak_memory() - active)
        assert self._places() == before, "joining and leaving has copied blocks"
        return risen

    def _places(self) -> Any:
        """The addresses of all slabs, and how many blocks were copied."""
        if self.pool is None:
            return None
        slabs = [np.asarray(memoryview(a.view(mx.uint8))).ctypes.data for a in self.pool.arrays()]
        return slabs, [counts.copied for counts in self.pool.pool.settle()]

    def agents_bytes(self) -> int:
        """Bytes of the caches of all agents, each with tokens after the prefix that they share."""
        self.sequences = []
        gc.collect()
        for agent, caches in enumerate(self.agents):
            self._run(caches, mx.arange(OWN)[None] + agent)
        if self.pool is None:
            return sum(cache.nbytes for caches in self.agents for cache in caches)
        states = AGENTS * self.pool.spec.fixed_bytes_per_agent()
        return states + sum(c.held * c.bytes_per_block for c in self.pool.pool.settle())


def bench_model(
    args: Any, name: str, contexts: list[int], prefix: int, steps: int, rounds: int
) -> None:
    """Agents share `prefix` tokens, or twice as many if the model has windows."""
    prefix *= 1 + ("sliding_window" in str(CONFIGS[name]))
    ours, stock = (Decoder(name, contexts, prefix, pooled) for pooled in (True, False))
    assert ours.pool is not None
    runs, figures = {"ours": ours, "stock": stock}, dict[str, Any]()
    if name in BY_MEMBER:
        runs["by_member"] = Decoder(name, contexts, prefix, True, by_member=True)
    try:
        stock.step_seconds(1)
    except ValueError as error:
        del runs["stock"]
        figures["stock_fails"] = str(error)
    ours.pool.decode.path_counts.clear()
    readings: dict[str, list[tuple[float, float]]] = {key: [] for key in runs}
    for turn in range(rounds):
        for key in sorted(runs, reverse=bool(turn % 2)):
            readings[key].append(runs[key].step_seconds(steps))
    step = {
        key: [statistics.median(all_) for all_ in zip(*own, strict=True)]
        for key, own in readings.items()
    }
    figures["path_counts"] = dict(ours.pool.decode.path_counts)
    for key, (wall, cpu) in step.items():
        figures |= {f"{key}_step_ms": round(wall * 1e3, 2), f"{key}_cpu_ms": round(cpu * 1e3, 2)}
    if "stock" in runs:
        for place, unit in enumerate(("step", "cpu")):
            figures[f"ratio_{unit}"] = round(step["stock"][place] / step["ours"][place], 2)
        figures |= {f"{key}_join_bytes": runs[key].join_bytes() for key in ("ours", "stock")}
    held = ours.agents_bytes(), stock.agents_bytes()
    for key, n_bytes in zip(("ours", "stock"), held, strict=True):
        figures[f"{key}_agents_mb"] = round(n_bytes / 1e6, 2)
    figures["ratio_agents"] = round(held[1] / held[0], 2)
    counts = {"sequences": len(contexts), "agents": AGENTS, "prefix": prefix}
    report(args, "batch", f"{name}, mixed lengths", **counts, **figures)


if __name__ == "__main__":
    args = options(__doc__ or "")
    size, steps, rounds = ((128, 2, 8, 4), 5, 2) if args.quick else ((256, 6, 8, 4), 20, 7)
    scale = 8 if args.quick else 1
    bench(args, "mixed lengths", [c // scale for c in MIXED], size, steps, rounds)
    bench(args, "equal lengths", [2000 // scale] * 8, size, steps, rounds)
    bench(args, "a batch of one", [4000 // scale], size, steps, rounds)
    # Steps in which the host is the limit.
    tiny, one_slab = (64, 6, 4, 2), PoolConfig(preallocate=True)
    bench(args, "tiny, equal lengths", [40] * 8, tiny, steps, rounds)
    bench(args, "tiny, equal lengths, one slab", [40] * 8, tiny, steps, rounds, one_slab)
    bench(args, "tiny, mixed lengths, one slab", [*range(40, 96, 7)], tiny, steps, rounds, one_slab)
    bench(args, "tiny, a batch of one", [40], tiny, steps, rounds)
    models = ("deepseek_v3", "kimi_linear", "gemma4_text") if args.quick else MODELS
    for name in models:
        bench_model(args, name, [c // scale for c in MIXED], PREFIX // scale, steps // 2, rounds)
