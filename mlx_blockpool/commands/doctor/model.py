"""Checks of one model: whether it fits into memory, how it is served, and whether the pool
samples mlx-lm's tokens.
"""

from __future__ import annotations

from typing import Any

from ...formatting import human_bytes
from ...model_files import modelfile
from ...model_files.device import memory_bytes
from .finding import Finding, State

# Tokens of each prompt, whose first block is full; of each reply; and of the prefix that the
# prompts share.
PROMPTS, REPLY, SHARED = (300, 290), 24, 280
POOL_BYTES = 500_000_000
TEXT = "The pool keeps keys and values in blocks, and agents that begin alike read the same ones. "
# Differences of log-probabilities up to here come from the order of additions, in float32 and in
# shorter types.
EXACT, COARSE = 1e-3, 0.25
# A token and its log-probability.
Drawn = tuple[int, Any]


def files(model: str) -> list[Finding]:
    """Check a model by its config.json and weights."""
    found = modelfile.find(model)
    spec, weights, memory = modelfile.spec_of(found), modelfile.weights_of(found), memory_bytes()
    figures = {
        "model": model,
        "type": found.model_type,
        "weights_bytes": weights.bytes,
        "context": found.longest_context,
    }
    per_agent = spec.bytes_per_agent(8192)
    size = "unknown" if weights.bytes is None else human_bytes(weights.bytes)
    text = (
        f"{model} ({found.model_type}): weights {size}, an agent of 8k tokens "
        f"{human_bytes(per_agent)}."
    )
    state: State = "ok"
    advice = f"mlx-blockpool plan --model {model} says how many agents fit."
    if weights.bytes is not None and weights.bytes + per_agent > memory:
        state = "problem"
        advice = (
            "Take a smaller or more quantised model: this machine gives a model "
            f"{human_bytes(memory)}."
        )
    return [Finding("model", state, text, advice, figures)]


def against_stock(model: str) -> list[Finding]:
    """Compare greedy tokens of two concurrent requests with mlx-lm's own caches one by one."""
    import mlx.core as mx

    from ...engine.engine import BlockPoolBatchEngine
    from ...model_files.loading import load

    loaded: Any = load(str(modelfile.find(model).path.parent))
    network, tokenizer = loaded[0], loaded[1]
    text = list(tokenizer.encode(TEXT * 40))
    prompts = [[*text[:SHARED], *text[i : i + length - SHARED]] for i, length in enumerate(PROMPTS)]
    expected = [_stock(network, prompt) for prompt in prompts]
    engine = BlockPoolBatchEngine.open(network, POOL_BYTES)
    how = "in ragged batches" if engine.caches.ragged else "one by one"
    served = [
        Finding("served", "note", text, "This way of serving is not used; the next one is.")
        for text in engine.caches.capabilities.differs
    ]
    found = _pooled(engine, prompts)
    is_exact = network(mx.zeros((1, 1), mx.int32)).dtype == mx.float32
    engine.close()
    return [*served, _compared(expected, found, how, EXACT if is_exact else COARSE)]


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
                assert event.logprobs is not None, (
                    "a request without a form has a token that was not drawn"
                )
                found[event.uid].append((event.token, event.logprobs[event.token].item()))
    return [found[uid] for uid in uids]


def _compared(
    expected: list[list[Drawn]], found: list[list[Drawn]], how: str, tolerance: float
) -> Finding:
    """Compare tokens up to the first difference, and log-probabilities up to and including it."""
    equal, gap = 0, 0.0
    for ours, stock in zip(found, expected, strict=True):
        for mine, theirs in zip(ours, stock, strict=True):
            gap = max(gap, abs(mine[1] - theirs[1]))
            if mine[0] != theirs[0]:
                break
            equal += 1
    total = sum(map(len, expected))
    figures = {"equal_tokens": equal, "tokens": total, "largest_gap": gap, "served": how}
    text = (
        f"Served {how}; {equal} of {total} greedy tokens are mlx-lm's, and log-probabilities "
        f"differ by at most {gap:.1e}."
    )
    state: State = "ok"
    advice = ""
    if gap > tolerance:
        state = "problem"
        advice = (
            "Report this line with the model's name: the pool must compute what mlx-lm computes."
        )
    elif equal < total:
        state, advice = "note", "A near tie was decided the other way: sums have another order."
    return Finding("against mlx-lm", state, text, advice, figures)
