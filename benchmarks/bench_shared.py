"""Decode of sequences on one shared prefix against mlx-lm's padded batch, in one run: bytes held,
attention alone, whole steps.

The model has the proportions of Qwen3 0.6B at a quarter of its width: hidden 256, 8 heads and 4 kv
heads of 64, a feed-forward of 768. The counter proves which path a figure belongs to.
"""

from __future__ import annotations

import copy
import functools
import importlib
import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx
from measure import interleave, options, report
from mlx_lm.models.base import create_attention_mask, scaled_dot_product_attention
from mlx_lm.models.cache import make_prompt_cache as stock_prompt_cache

from mlx_blockpool.kv.attach import bind
from mlx_blockpool.kv.build import open_pool
from mlx_blockpool.kv.capabilities import Capabilities
from mlx_blockpool.kv.path_measuring import measure_paths
from mlx_blockpool.kv.prompt_cache import make_prompt_cache
from mlx_blockpool.spec import BLOCK_TOKENS

SEQUENCES, OWN, HEADS, KV_HEADS, DIM = 8, 128, 8, 4, 64
NEEDED = {"float32": 1.5, "float16": 2.0, "bfloat16": 1.0}


class System:
    """Eight sequences on one prefix: forks in a pool, or copies in mlx-lm's batch."""

    def __init__(self, pooled: bool, dtype: str, prefix: int, layers: int) -> None:
        self.prefix, self.layers = prefix, layers
        self.dtype = getattr(mx, dtype)
        self.model = small_model(layers, self.dtype)
        size = 2 * KV_HEADS * DIM * self.dtype.size * layers * BLOCK_TOKENS
        blocks = prefix // BLOCK_TOKENS + 2 * SEQUENCES
        self.pool = open_pool(self.model, 4 * blocks * size, attach=False) if pooled else None
        if self.pool is not None:
            self.pool.capabilities = Capabilities(ragged=bool(bind(self.model)))
            self.pool.decode.costs = measure_paths(self.model, self.pool)
        self.batch = [
            type(layer[0]).merge(list(layer)) for layer in zip(*self._sequences(), strict=True)
        ]

    def _sequences(self) -> list[list[Any]]:
        mx.random.seed(1)
        first = (
            stock_prompt_cache(self.model)
            if self.pool is None
            else make_prompt_cache(self.model, self.pool)
        )
        self._append(first, self.prefix)
        sequences = [copy.deepcopy(first) for _ in range(SEQUENCES)]
        for caches in sequences:
            self._append(caches, OWN)
        return sequences

    def _append(self, caches: list[Any], count: int) -> None:
        for cache in caches:
            cache.update_and_fetch(
                *mx.random.normal((2, 1, KV_HEADS, count, DIM)).astype(self.dtype)
            )
        mx.eval([c.state for c in caches])

    def tokens(self) -> int:
        return self.prefix + SEQUENCES * (int(self.batch[0].offset[0].item()) - self.prefix)

    def held_bytes(self) -> int:
        """Bytes of the blocks that are held, or of stock's arrays."""
        if self.pool is None:
            return sum(a.nbytes for c in self.batch for a in (c.keys, c.values))
        return sum(c.held * c.bytes_per_block for c in self.pool.pool.settle())

    def attention(self) -> mx.array:
        """One step of nothing but attention in every layer."""
        x = mx.ones((SEQUENCES, HEADS, 1, DIM), self.dtype)
        for cache in self.batch:
            mask = create_attention_mask(mx.zeros((SEQUENCES, 1, 1)), cache)
            keys, values = cache.update_and_fetch(x[:, :KV_HEADS], x[:, :KV_HEADS])
            if self.pool is None:
                x = x + scaled_dot_product_attention(
                    x, keys, values, cache, scale=DIM**-0.5, mask=mask
                )
            else:
                x = x + cache.attend(x, keys, values, DIM**-0.5, mask, None)
        return x

    def step(self) -> mx.array:
        logits: mx.array = self.model(mx.array([[7]] * SEQUENCES), cache=self.batch)
        return logits

    def seconds(
        self, work: Callable[[System], mx.array], steps: int, path: str = "auto", expected: str = ""
    ) -> float:
        """Seconds of one step on `path`; fails if any layer took another than `expected`."""
        if self.pool is not None:
            self.pool.decode.path = path
            self.pool.decode.path_counts.clear()
        start = time.perf_counter()
        waiting = None
        for _ in range(steps):
            following = work(self)
            # As mlx-lm does: a step is encoded while the one before it runs.
            mx.async_eval(following)
            mx.eval(waiting)
            waiting = following
        mx.eval(waiting)
        taken = (time.perf_counter() - start) / steps
        if self.pool is not None:
            assert self.pool.decode.path_counts == {expected: steps * self.layers}, (
                f"{self.pool.decode.path_counts}, expected {expected}"
            )
        return taken


def small_model(layers: int, dtype: mx.Dtype) -> Any:
    module = importlib.import_module("mlx_lm.models.qwen3")
    mx.random.seed(0)
    config = {
        "model_type": "qwen3",
        "hidden_size": 256,
        "num_hidden_layers": layers,
        "intermediate_size": 768,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": DIM,
        "rms_norm_eps": 1e-6,
        "vocab_size": 2048,
        "max_position_embeddings": 8192,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
    }
    model = module.Model(module.ModelArgs.from_dict(config))
    model.set_dtype(dtype)
    mx.eval(model.parameters())
    return model.eval()


def bench(args: Any, dtype: str, prefix: int, layers: int, steps: int, rounds: int) -> None:
    ours, stock = System(True, dtype, prefix, layers), System(False, dtype, prefix, layers)
    assert ours.pool is not None
    found, needed = (s.step().astype(mx.float32) for s in (ours, stock))
    assert (
        mx.abs(found - needed).max() < (1e-3 if dtype == "float32" else 5e-2) * mx.abs(needed).max()
    ), "other logits"
    (picked,) = ours.pool.decode.path_counts
    content = ours.tokens() * ours.pool.spec.bytes_per_token()
    held = ours.held_bytes() / content
    assert held <= 1.2, f"{held:.2f} of one prefix and the tails held"
    for case, work in (("attention", System.attention), ("whole step", System.step)):
        paths = {"auto": picked, "ragged": "ragged", "shared": "shared"}
        runs = {
            p: functools.partial(ours.seconds, work, steps, p, expected)
            for p, expected in paths.items()
        }
        taken = interleave({**runs, "stock": functools.partial(stock.seconds, work, steps)}, rounds)
        report(
            args,
            "shared",
            f"{case}, {dtype}",
            sequences=SEQUENCES,
            prefix=prefix,
            own=OWN,
            layers=layers,
            path=picked,
            streams=ours.pool.decode.streams,
            counts={picked: steps * layers},
            **{f"{name}_ms": round(seconds * 1e3, 2) for name, seconds in taken.items()},
            ratio=round(taken["stock"] / taken["auto"], 2),
            needed=NEEDED[dtype],
            held=round(held, 2),
            arrays=round(ours.pool.nbytes / content, 2),
            stock_held=round(stock.held_bytes() / content, 2),
        )


if __name__ == "__main__":
    args = options(__doc__ or "")
    prefix, layers, steps, rounds = (4096, 2, 3, 1) if args.quick else (4096, 4, 4, 7)
    for dtype in ("float32", "float16", "bfloat16"):
        bench(args, dtype, prefix, layers, steps, rounds)
