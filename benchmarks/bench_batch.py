"""Decode of a batch with contexts of mixed length, and joining and leaving it, against mlx-lm's
padded batch, in one run.

Both run in mlx-lm's own BatchGenerator. The counter proves the path: every attend of every step was
the ragged one. On a CPU the attention of a batch is divided between cores, mlx-lm's is not; `one
stream` is ours without that. The cases with a model type are tiny models whose attention is not a
plain call of mlx-lm's; `by member` is ours without an adapter.
"""

from __future__ import annotations

import functools
import time
from typing import Any

import mlx.core as mx
from measure import interleave, llama, options, report
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import make_prompt_cache as stock_prompt_cache
from mlx_lm.utils import _get_classes

from mlx_blockpool.kv.attach import bind
from mlx_blockpool.kv.batch_cache import PooledBatchCache
from mlx_blockpool.kv.build import open_pool
from mlx_blockpool.kv.capabilities import Capabilities
from mlx_blockpool.kv.decode_policy import default_streams
from mlx_blockpool.kv.prompt_cache import batch_of, make_prompt_cache

MIXED = [500, 600, 1024, 1500, 2048, 300, 4000, 800]
TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "head_dim": 16,
    "vocab_size": 131,
}
EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
LATENTS = {
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
MLA = {**TINY, **EXPERTS, **LATENTS, "num_hidden_layers": 3, "num_key_value_heads": 4}
SLIDING, FULL = "sliding_attention", "full_attention"
MODELS: dict[str, dict[str, Any]] = {
    "deepseek_v3": MLA,
    "deepseek_v32": {**MLA, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 256},
    "gemma4_text": {
        **TINY,
        "num_hidden_layers": 5,
        "num_key_value_heads": 2,
        "sliding_window": 512,
        "layer_types": [SLIDING, FULL, SLIDING, SLIDING, FULL],
        "num_kv_shared_layers": 2,
        "global_head_dim": 24,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 131,
    },
}


def filled(caches: list[Any], context: int, heads: int, dim: int) -> list[Any]:
    for cache in caches:
        cache.update_and_fetch(*mx.random.normal((2, 1, heads, context, dim)))
    mx.eval([c.state for c in caches])
    return caches


class System:
    """One way of batching: its model, and how it makes caches."""

    def __init__(self, pooled: bool, contexts: list[int], size: tuple[int, int, int, int]) -> None:
        self.model = llama(*size)
        self.contexts = contexts
        self.layers = size[1]
        self.heads, self.dim = size[3], size[0] // size[2]
        pool_bytes = 3 * sum(contexts) * 2 * size[1] * size[3] * self.dim * 4
        self.pool = open_pool(self.model, pool_bytes, attach=False) if pooled else None
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
) -> None:
    ours, stock = System(True, contexts, size), System(False, contexts, size)
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
        ours_step_ms=round(step["ours"] * 1e3, 1),
        stock_step_ms=round(step["stock"] * 1e3, 1),
        ratio_step=round(step["stock"] / step["ours"], 2),
        ratio_one_stream=round(step["stock"] / step["one"], 2),
        streams=default_streams(),
        path_counts=counts,
        ours_stall_ms=round(stall["ours"] * 1e3, 2),
        stock_stall_ms=round(stall["stock"] * 1e3, 2),
        ratio_stall=round(stall["stock"] / stall["ours"], 1),
    )


class Decoder:
    """Sequences of a model in one batch, in blocks or as mlx-lm pads them."""

    def __init__(self, name: str, contexts: list[int], pooled: bool, by_member: bool) -> None:
        config = {"model_type": name, **MODELS[name]}
        model_class, args_class = _get_classes(dict(config))
        mx.random.seed(0)
        self.model = model_class(args_class.from_dict(dict(config)))
        mx.eval(self.model.parameters())
        self.pool = open_pool(self.model, 10**8, attach=not by_member) if pooled else None
        if self.pool is not None and by_member:
            bind(self.model, by_member=True)
            self.pool.capabilities = Capabilities(ragged=True, by_member=True)
        assert self.pool is None or self.pool.capabilities.ragged, f"{name} is not ragged"
        self.sequences = [self._computed(context) for context in contexts]

    def _computed(self, context: int) -> list[Any]:
        made: list[Any] = (
            stock_prompt_cache(self.model)
            if self.pool is None
            else make_prompt_cache(self.model, self.pool)
        )
        for start in range(0, context, 512):
            tokens = mx.random.randint(1, 120, (1, min(512, context - start)))
            mx.eval(self.model(tokens, cache=made), [c.state for c in made])
        return made

    def step_seconds(self, steps: int) -> float:
        """Seconds of one decode step of the whole batch."""
        layers = zip(*self.sequences, strict=True)
        batch = [type(own[0]).merge(list(own)) for own in layers]
        token = mx.ones((len(self.sequences), 1), mx.int32)
        for step in range(-3, steps):
            if step == 0:
                start = time.perf_counter()
            following = mx.argmax(self.model(token, cache=batch)[:, -1:], axis=-1)
            mx.async_eval(following)  # type: ignore[no-untyped-call]
            mx.eval(token)
            token = following
        mx.eval(token)
        return (time.perf_counter() - start) / steps


def bench_model(args: Any, name: str, contexts: list[int], steps: int, rounds: int) -> None:
    ours, stock = (Decoder(name, contexts, pooled, False) for pooled in (True, False))
    assert ours.pool is not None
    runs = {"ours": ours, "stock": stock}
    if "kv_lora_rank" in MODELS[name]:
        runs["by_member"] = Decoder(name, contexts, True, True)
    step = interleave(
        {key: functools.partial(run.step_seconds, steps) for key, run in runs.items()}, rounds
    )
    report(
        args,
        "batch",
        f"{name}, mixed lengths",
        sequences=len(contexts),
        ratio_step=round(step["stock"] / step["ours"], 2),
        **{f"{key}_step_ms": round(taken * 1e3, 2) for key, taken in step.items()},
        path_counts=dict(ours.pool.decode.path_counts),
    )


if __name__ == "__main__":
    args = options(__doc__ or "")
    size, steps, rounds = ((128, 2, 8, 4), 5, 2) if args.quick else ((256, 6, 8, 4), 20, 7)
    scale = 8 if args.quick else 1
    bench(args, "mixed lengths", [c // scale for c in MIXED], size, steps, rounds)
    bench(args, "equal lengths", [2000 // scale] * 8, size, steps, rounds)
    bench(args, "a batch of one", [4000 // scale], size, steps, rounds)
    for name in MODELS:
        bench_model(args, name, [c // scale for c in MIXED], steps, rounds)
