"""Draws: the next tokens of sequences from their logits, each by its own processors, form and sampler.

What a request brings may raise: its error fails that request alone. Owned by the generation thread.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection
from collections.abc import Sequence as Row
from dataclasses import dataclass

import mlx.core as mx
from mlx_lm.models.cache import TokenBuffer
from mlx_lm.sample_utils import greedy_sampler

from .masks import Forced, follow, masked
from .sequence import Sequence


@dataclass(frozen=True)
class Drawn:
    """What was drawn for each of several members, not evaluated yet.

    tokens:    [members].
    logprobs:  [members, vocabulary], from which they were drawn.
    contexts:  what processors were called with. They are evaluated with the tokens: each is made of the one before it.
    failed:    members whose own code has raised; their tokens are drawn without it.
    forced:    the tokens that must follow the inputs of members in forms.
    """

    tokens: mx.array
    logprobs: mx.array
    contexts: list[mx.array]
    failed: dict[Sequence, Exception]
    forced: Forced


def draws_greedily(member: Sequence) -> bool:
    """Return whether a member's next token is the most likely one, whatever came before."""
    request = member.request
    return request.sampler in (None, greedy_sampler) and not request.processors and request.form is None


def draw(logits: mx.array, inputs: mx.array, members: Row[Sequence], buffers: Row[TokenBuffer | None]) -> Drawn:
    """Draw a token for each member from logits [members, vocabulary], computed from its next token in `inputs` [members].

    `buffers` hold the tokens before those, of members with processors.
    """
    contexts: list[mx.array] = []
    failed: dict[Sequence, Exception] = {}
    logits = _process(logits, inputs, members, buffers, contexts, failed)
    logits, forced = _hold(logits, inputs, members, contexts, failed)
    logprobs = logprobs_of(logits)
    return Drawn(_sample(logprobs, members, failed), logprobs, contexts, failed, forced)


def logprobs_of(logits: mx.array) -> mx.array:
    """Logprobs [rows, vocabulary] of logits."""
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def _process(
    logits: mx.array,
    inputs: mx.array,
    members: Row[Sequence],
    buffers: Row[TokenBuffer | None],
    contexts: list[mx.array],
    failed: dict[Sequence, Exception],
) -> mx.array:
    if all(buffer is None for buffer in buffers):
        return logits
    rows = [logits[i : i + 1] for i in range(len(members))]
    for i, (member, buffer) in enumerate(zip(members, buffers, strict=True)):
        if buffer is None:
            continue
        context = buffer.update_and_fetch(inputs[i : i + 1])
        contexts.append(context)
        try:
            for processor in member.request.processors:
                rows[i] = processor(context, rows[i])
        except Exception as error:
            # A processor is the request's own code: its error fails this request alone.
            failed[member] = error
            rows[i] = logits[i : i + 1]
    return mx.concatenate(rows)


def _hold(
    logits: mx.array,
    inputs: mx.array,
    members: Collection[Sequence],
    contexts: list[mx.array],
    failed: dict[Sequence, Exception],
) -> tuple[mx.array, Forced]:
    """Close the tokens that forms do not allow. Returns the logits, and what forms force behind `inputs`."""
    if all(member.request.form is None for member in members):
        return logits, {}
    # Behind the processors: a bias must not open a token that a form closes.
    mx.async_eval(logits, contexts)  # type: ignore[no-untyped-call]
    words, forced = follow(members, ids(inputs), logits.shape[1], failed)
    return logits if words is None else masked(logits, words), forced


def _sample(logprobs: mx.array, members: Row[Sequence], failed: dict[Sequence, Exception]) -> mx.array:
    """Tokens [members] from logprobs [members, vocabulary], in one call where all draw the same way."""
    samplers = [member.request.sampler or greedy_sampler for member in members]
    rows: list[mx.array] = []
    if all(sampler is greedy_sampler for sampler in samplers):
        return mx.array(greedy_sampler(logprobs), mx.uint32)
    for i, sampler in enumerate(samplers):
        row = logprobs[i : i + 1]
        try:
            drawn = sampler(row)
        except Exception as error:
            # As above. A request fails once, also where both its processor and its sampler do.
            mend_random_state()
            failed.setdefault(members[i], error)
            drawn = greedy_sampler(row)
        rows.append(drawn.astype(mx.uint32))
    return mx.concatenate(rows)


def mend_random_state() -> None:
    """After a sampler has failed: where mlx was compiling it, mlx's random state is left without a value and would stay so."""
    mx.random.seed(secrets.randbits(63))


def ids(tokens: mx.array) -> list[int]:
    """Token ids as Python has them. Waits for the device."""
    found: list[int] = tokens.tolist()  # type: ignore[assignment]
    return found
