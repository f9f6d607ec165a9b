"""One model: whether it fits into memory, how it is served, and whether the pool draws the tokens that mlx-lm draws."""

from __future__ import annotations

from functools import partial
from typing import Any

from ... import modelfile
from ...formatting import human_bytes
from ...system import memory_bytes
from . import drafts
from .finding import Finding, looked_at

# Of the prompts, whose first block is full; of each reply; and how much of each prompt the two have in common.
PROMPTS, REPLY, SHARED = (300, 290), 24, 280
POOL_BYTES = 500_000_000
TEXT = "The pool keeps keys and values in blocks, and agents that begin alike read the same ones. "
# Differences of log-probabilities up to here come from the order of additions, in float32 and in shorter types.
EXACT, COARSE = 1e-3, 0.25
# A token and its log-probability.
Drawn = tuple[int, Any]


def files(model: str) -> list[Finding]:
    """What config.json and the weights say."""
    found = modelfile.find(model)
    spec, weights, memory = modelfile.spec_of(found), modelfile.weights_of(found), memory_bytes()
    figures = {"model": model, "type": found.model_type, "weights_bytes": weights.bytes, "context": found.longest_context}
    per_agent = spec.bytes_per_agent(8192)
    size = "unknown" if weights.bytes is None else human_bytes(weights.bytes)
    text = f"{model} ({found.model_type}): weights {size}, an agent of 8k tokens {human_bytes(per_agent)}."
    if weights.bytes is not None and weights.bytes + per_agent > memory:
        advice = f"Take a smaller or more quantised model: this machine gives a model {human_bytes(memory)}."
        return [Finding("model", "problem", text, advice, figures)]
    return [Finding("model", "ok", text, f"mlx-blockpool plan --model {model} says how many agents fit.", figures)]


def against_stock(model: str) -> list[Finding]:
    """Greedy tokens of two requests that run together, against mlx-lm's own caches one by one; and what drafts bring."""
    import mlx.core as mx
    from mlx_lm import load

    from ...engine.caches import PooledCaches
    from ...engine.engine import BlockPoolBatchEngine

    loaded: Any = load(str(modelfile.find(model).path.parent))
    network, tokenizer = loaded[0], loaded[1]
    text = list(tokenizer.encode(TEXT * 40))
    prompts = [[*text[:SHARED], *text[i : i + length - SHARED]] for i, length in enumerate(PROMPTS)]
    expected = [_stock(network, prompt) for prompt in prompts]
    engine = BlockPoolBatchEngine.open(network, POOL_BYTES)
    how = "in ragged batches" if engine.caches.ragged else "in padded batches" if engine.caches.merges else "one by one"
    found = _pooled(engine, prompts)
    is_exact = network(mx.zeros((1, 1), mx.int32)).dtype == mx.float32
    findings = [_compared(expected, found, how, EXACT if is_exact else COARSE)]
    if isinstance(engine.caches, PooledCaches):
        findings += looked_at(drafts.ABOUT, partial(drafts.measured, network, engine.caches.prefix.arena))
    engine.close()
    return findings


def _stock(network: Any, prompt: list[int]) -> list[Drawn]:
    """(token, its log-probability) of a greedy reply by mlx-lm alone."""
    import mlx.core as mx
    from mlx_lm.generate import generate_step

    drawn = generate_step(mx.array(prompt), network, max_tokens=REPLY)
    return [(int(token), logprobs[int(token)].item()) for token, logprobs in drawn]


def _pooled(engine: Any, prompts: list[list[int]]) -> list[list[Drawn]]:
    from ...engine.request import Request, Token

    uids = engine.insert_all([Request(prompt, REPLY) for prompt in prompts])
    found: dict[int, list[Drawn]] = {uid: [] for uid in uids}
    while len(engine):
        for event in engine.next():
            if isinstance(event, Token):
                assert event.logprobs is not None, "a request without a form has a token that was not drawn"
                found[event.uid].append((event.token, event.logprobs[event.token].item()))
    return [found[uid] for uid in uids]


def _compared(expected: list[list[Drawn]], found: list[list[Drawn]], how: str, tolerance: float) -> Finding:
    """Tokens until the first difference; their log-probabilities until then, and of the two tokens that differ."""
    equal, gap = 0, 0.0
    for ours, stock in zip(found, expected, strict=True):
        for mine, theirs in zip(ours, stock, strict=True):
            gap = max(gap, abs(mine[1] - theirs[1]))
            if mine[0] != theirs[0]:
                break
            equal += 1
    total = sum(map(len, expected))
    figures = {"equal_tokens": equal, "tokens": total, "largest_gap": gap, "served": how}
    text = f"Served {how}; {equal} of {total} greedy tokens are mlx-lm's, and log-probabilities differ by at most {gap:.1e}."
    if gap > tolerance:
        advice = "Report this line with the model's name: the pool must compute what mlx-lm computes."
        return Finding("against mlx-lm", "problem", text, advice, figures)
    if equal < total:
        return Finding("against mlx-lm", "note", text, "A near tie was drawn the other way: sums have another order.", figures)
    return Finding("against mlx-lm", "ok", text, figures=figures)
