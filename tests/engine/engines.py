"""Engines over small pools, driven step by step, and what mlx-lm alone answers.

A name is that of a model of models.py or architectures/, or also of the bits of its keys and
values: "llama", "llama K8V4"; 16: as the model computes them. In fewer bits mlx-lm answers on
its own caches, which are given rounded keys and values. "qwen3_5+head" is a model of heads.py with
its prediction head.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import heads
import mlx.core as mx
from architectures.configs import CONFIGS as ARCHITECTURES
from architectures.configs_common import wide
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from models import CONFIGS as MODELS
from models import make_model

from mlx_blockpool.config import EngineConfig, KVBits, PoolConfig, kv_bits
from mlx_blockpool.drafts.curve import CostCurve
from mlx_blockpool.engine.caches import PooledCaches
from mlx_blockpool.engine.engine import BlockPoolBatchEngine
from mlx_blockpool.engine.request import Failed, Progress, Request, Started, Token
from mlx_blockpool.kv.arena import KVArena
from mlx_blockpool.kv.build import attach, describe
from mlx_blockpool.kv.rounded_caches import rounded
from mlx_blockpool.spec import ModelCacheSpec, blocks_for
from mlx_blockpool.testing import tiny_model
from mlx_blockpool.tier.cache import TieredPrefixCache

ROOMY = 40_000_000
HEAD = "+head"
VOCABULARY = 131
# Two logits of a sum in another order may change places where they are nearer than this.
TIE = 1e-3
# One layer of each kind is enough.
CHANGES: dict[str, dict[str, Any]] = {"gemma3_text": {"num_hidden_layers": 2}}
# With these the rows of keys and values have 64 or 32 numbers, and can be quantised.
WIDER: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 64},
    "gemma3_text": {"head_dim": 32},
    "gpt_oss": {"head_dim": 64},
    "gemma2": {"head_dim": 32},
    "qwen2": {"hidden_size": 128},
    "lfm2": {"hidden_size": 128, "block_dim": 128},
}


@functools.cache
def bits_of(name: str) -> KVBits | None:
    """The bits that a name has."""
    keys, _, values = name.partition(" ")[2].removeprefix("K").partition("V")
    return kv_bits(None, int(keys), int(values), 64) if keys else None


def new_model(name: str) -> Any:
    base = name.partition(" ")[0]
    if base.endswith(HEAD):
        return heads.load(base.removesuffix(HEAD))
    if bits_of(name) and base not in WIDER:
        return tiny_model(wide(ARCHITECTURES[base]))
    if base not in MODELS:
        return tiny_model(ARCHITECTURES[base])
    return make_model(base, **CHANGES.get(base, {}), **(WIDER[base] if bits_of(name) else {}))


@functools.cache
def stock_model(name: str) -> Any:
    """As mlx-lm makes it."""
    base = name.partition(" ")[0]
    return heads.trained(base.removesuffix(HEAD))[0] if base.endswith(HEAD) else new_model(name)


@functools.cache
def stock_spec(name: str) -> ModelCacheSpec:
    return describe(stock_model(name))


@functools.cache
def _attached(name: str, rank: int) -> tuple[Any, KVArena]:
    model = new_model(name)
    arena = KVArena(describe(model).with_bits(bits_of(name)), ROOMY)
    # The states of longcat_flash_ngram grow with the first tokens: its sequences run one at a time.
    assert attach(model, arena) != name.startswith("longcat_flash_ngram")
    return model, arena


def attached(name: str, rank: int = 0) -> tuple[Any, ModelCacheSpec]:
    """The same model, attached, and its spec; another object for each rank."""
    model, arena = _attached(name, rank)
    return model, arena.spec


def stock_caches(name: str) -> list[Any]:
    """mlx-lm's own caches of one sequence."""
    caches: list[Any] = make_prompt_cache(stock_model(name))
    return rounded(caches, stock_spec(name).with_bits(bits_of(name)))


def open_prefix(name: str, n_bytes: int = ROOMY, preallocate: bool = False) -> TieredPrefixCache:
    slabs = KVArena(attached(name)[1], n_bytes, PoolConfig(preallocate=preallocate))
    slabs.capabilities = _attached(name, 0)[1].capabilities
    return TieredPrefixCache(slabs)


def bytes_of(name: str, tokens: int, more_blocks: int = 0) -> int:
    """What one sequence takes, and as many full blocks more."""
    spec = attached(name)[1]
    own = [(spec.bytes_per_block(g), g.layer.max_blocks) for g in spec.groups]
    needed = sum(size * min(blocks_for(tokens), most or blocks_for(tokens)) for size, most in own)
    needed += more_blocks * sum(size for size, most in own if most is None)
    # Up to half of a hybrid model's pool is for states.
    states = spec.fixed_bytes_per_agent()
    return 2 * max(needed, states) if states else needed


def caches_of(prefix: TieredPrefixCache) -> PooledCaches:
    """Caches with which prompts share forwards, as if these cost the same however many tokens they
    have.
    """
    caches = PooledCaches(prefix)
    caches.forward_seconds = lambda tokens: 1.0  # type: ignore[method-assign]
    return caches


def make_engine(
    name: str,
    n_bytes: int = ROOMY,
    curve: CostCurve | None = None,
    preallocate: bool = False,
    **config: Any,
) -> tuple[BlockPoolBatchEngine, TieredPrefixCache]:
    """An engine over a new pool. `curve`: what forwards were measured to cost, for drafts."""
    prefix = open_prefix(name, n_bytes, preallocate)
    caches = caches_of(prefix)
    caches.curve = curve
    return BlockPoolBatchEngine(
        attached(name)[0], caches, EngineConfig(**{"prefill_tokens": 128, **config})
    ), prefix


@functools.cache
def words(seed: int, count: int) -> tuple[int, ...]:
    """Random tokens; the same ones for the same seed."""
    rng = random.Random(seed)
    return tuple(rng.randrange(VOCABULARY) for _ in range(count))


class StockReply:
    """mlx-lm's greedy tokens on its own caches, generated as far as they are asked for."""

    def __init__(
        self,
        model: Any,
        prompt: tuple[int, ...],
        caches: list[Any] | None = None,
        processors: list[Any] | None = None,
    ) -> None:
        given = {"prompt_cache": caches, "logits_processors": processors}
        self._steps = generate_step(mx.array(prompt), model, max_tokens=10_000, **given)
        self._tokens: list[int] = []
        self._tie: int | None = None

    def tokens(self, count: int) -> tuple[int, ...]:
        while len(self._tokens) < count:
            token, logprobs = next(self._steps)
            second, first = mx.sort(logprobs)[-2:].tolist()
            if first - second < TIE and self._tie is None:
                self._tie = len(self._tokens)
            self._tokens.append(int(token))
        return tuple(self._tokens[:count])

    def certain(self, count: int) -> tuple[int, ...]:
        """Those before the first tie: after it both may be right."""
        return self.tokens(count)[: self._tie]


@functools.cache
def stock_reply(name: str, prompt: tuple[int, ...]) -> StockReply:
    return StockReply(stock_model(name), prompt, stock_caches(name))


def assert_stock(name: str, prompt: Sequence[int], found: Sequence[int]) -> None:
    """`found` is what mlx-lm says, as far as it goes."""
    expected = stock_reply(name, tuple(prompt)).certain(len(found))
    assert list(expected) == list(found[: len(expected)])


@dataclass
class Told:
    """What an engine told about each request, by uid, and in which order."""

    started: dict[int, Started] = field(default_factory=dict)
    progress: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[mx.array | None]] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    failed: dict[int, Exception] = field(default_factory=dict)
    order: list[Any] = field(default_factory=list)

    def take(self, events: Sequence[Any]) -> None:
        for event in events:
            self.order.append(event)
            uid = event.uid
            assert uid not in self.reasons, "told something of a request that has ended"
            assert uid not in self.failed, "told something of a request that has failed"
            if isinstance(event, Started):
                assert uid not in self.started, "started twice"
                self.started[uid] = event
            elif isinstance(event, Progress):
                self.progress.setdefault(uid, []).append((event.done, event.total))
            elif isinstance(event, Token):
                self.tokens.setdefault(uid, []).append(event.token)
                self.logprobs.setdefault(uid, []).append(event.logprobs)
                if event.finish_reason is not None:
                    self.reasons[uid] = event.finish_reason
            elif isinstance(event, Failed):
                self.failed[uid] = event.error


def drive(
    engine: BlockPoolBatchEngine,
    told: Told | None = None,
    after: Callable[[Told], bool | None] | None = None,
    steps: int = 5000,
) -> Told:
    """Run until all requests have ended, or until `after` a step says True."""
    told = told or Told()
    for _ in range(steps):
        if not len(engine):
            return told
        told.take(engine.next())
        if after is not None and after(told):
            return told
    raise AssertionError(f"{len(engine)} requests did not end; {dict(engine.counts)}")


def serve(
    engine: BlockPoolBatchEngine, prompts: Sequence[Sequence[int]], max_tokens: int = 8, **more: Any
) -> tuple[list[int], Told]:
    """All prompts at once. Returns their uids and what was told."""
    uids = [engine.insert(Request(prompt, max_tokens, **more)) for prompt in prompts]
    return uids, drive(engine)


def assert_nothing_held(prefix: TieredPrefixCache) -> None:
    prefix.check()
    prefix.pool.check()
    assert [(c.held, c.reserved) for c in prefix.pool.settle()] == [(0, 0)] * len(
        prefix.arena.spec.groups
    )
