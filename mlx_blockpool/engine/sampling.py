"""Sampling: the next tokens of sequences from their logits, each by its own processors, form and
sampler.

Forms are followed on the host while the device computes the logits. What a request brings may
raise: its error fails that request alone. Knows logits; no caches. Owned by the generation thread.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable, Collection
from collections.abc import Sequence as Row
from dataclasses import dataclass
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np
from mlx_lm.sample_utils import greedy_sampler
from numpy.typing import NDArray

from ..config import FormConfig
from ..forms.form import ReplyForm
from .sequence import Sequence

# The tokens that must follow those of a sequence.
Forced = dict[Sequence, list[int]]

# How many tokens may be withdrawn, as drafts that are not accepted, before a form begins again.
MOST_TAKEN_BACK = 32


# Of each dtype of logits: the dtype of its bits, and the bits of its infinities.
BITS: dict[mx.Dtype, tuple[Any, int, int]] = {
    mx.float32: (np.uint32, 0x7F800000, 0xFF800000),
    mx.bfloat16: (np.uint16, 0x7F80, 0xFF80),
    mx.float16: (np.uint16, 0x7C00, 0xFC00),
}


@dataclass(frozen=True)
class Drawn:
    """What was drawn for each of several members, not evaluated yet.

    tokens:    [members].
    logprobs:  [members, vocabulary], from which they were drawn.
    contexts:  what processors were called with. They are evaluated with the tokens: each is made of
               the one before it.
    failed:    members whose own code has raised; their tokens are drawn without it.
    forced:    the tokens that must follow the inputs of members in forms.
    """

    tokens: mx.array
    logprobs: mx.array
    contexts: list[mx.array]
    failed: dict[Sequence, Exception]
    forced: Forced


# draw(), or a group's way to have one process draw for all.
Draw: TypeAlias = Callable[[mx.array, mx.array, list[Sequence]], Drawn]


def draw(logits: mx.array, inputs: mx.array, members: Row[Sequence]) -> Drawn:
    """Draw a token for each member from logits [members, vocabulary], computed from its next token
    in `inputs` [members].
    """
    if not [member for member in members if not member.is_greedy]:
        logprobs = logprobs_of(logits)
        return Drawn(mx.array(greedy_sampler(logprobs), mx.uint32), logprobs, [], {}, {})
    contexts: list[mx.array] = []
    failed: dict[Sequence, Exception] = {}
    logits = _process(logits, inputs, members, contexts, failed)
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
    contexts: list[mx.array],
    failed: dict[Sequence, Exception],
) -> mx.array:
    if all(member.buffer is None for member in members):
        return logits
    rows = [logits[i : i + 1] for i in range(len(members))]
    for i, member in enumerate(members):
        if member.buffer is None:
            continue
        context = member.buffer.update_and_fetch(inputs[i : i + 1])
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
    """Close the tokens that forms do not allow.

    Returns the logits, and what forms force after `inputs`.
    """
    if all(member.request.form is None for member in members):
        return logits, {}
    # After the processors: a bias must not open a token that a form closes.
    mx.async_eval(logits, contexts)  # type: ignore[no-untyped-call]
    words, forced = follow(members, ids(inputs), logits.shape[1], failed)
    return logits if words is None else masked(logits, words), forced


def _sample(
    logprobs: mx.array, members: Row[Sequence], failed: dict[Sequence, Exception]
) -> mx.array:
    """Tokens [members] from logprobs [members, vocabulary], in one call where all draw the same
    way.
    """
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
            reset_random_state()
            failed.setdefault(members[i], error)
            drawn = greedy_sampler(row)
        rows.append(drawn.astype(mx.uint32))
    return mx.concatenate(rows)


def reset_random_state() -> None:
    """After a sampler has failed: where mlx was compiling it, mlx's random state is left without
    a value and would stay so.
    """
    mx.random.seed(secrets.randbits(63))


def ids(tokens: mx.array) -> list[int]:
    """Token ids as Python has them. Waits for the device."""
    found: list[int] = tokens.tolist()  # type: ignore[assignment]
    return found


def masked(logits: mx.array, words: NDArray[np.int32]) -> mx.array:
    """Logits [members, vocabulary], -inf where the bit of a token is 0 in words [members,
    vocabulary / 32].

    By minimum: on a CPU mx.where costs six times as much where open and closed tokens alternate.
    """
    # take() is eight times as fast as an index.
    ceilings = _ceilings(logits.dtype).take(words.view(np.uint8), axis=0)
    rows = ceilings.reshape(len(words), -1)[:, : logits.shape[1]]
    return mx.minimum(logits, mx.array(rows).view(logits.dtype))


@functools.cache
def _ceilings(dtype: mx.Dtype) -> NDArray[Any]:
    """The bits of 8 numbers for each byte of a mask: infinity where the bit of a token is 1,
    else minus infinity.
    """
    unsigned, highest, lowest = BITS[dtype]
    is_open = (np.arange(256)[:, None] >> np.arange(8)) & 1
    ceilings: NDArray[Any] = np.where(is_open, unsigned(highest), unsigned(lowest))
    return ceilings


def follow(
    members: Collection[Sequence],
    inputs: Collection[int],
    vocabulary: int,
    failed: dict[Sequence, Exception],
) -> tuple[NDArray[np.int32] | None, Forced]:
    """Advance the forms of members by the tokens that are being computed.

    Returns the mask [members, vocabulary / 32] of the next draws, None where all are free, and the
    tokens of members that need no
    draw: their form leaves no choice, and neither logprobs nor processors are involved. A member
    whose form raises joins `failed`.
    """
    words = np.full((len(members), -(-vocabulary // 32)), -1, np.int32)
    closes = False
    forced: Forced = {}
    for member, token, row in zip(members, inputs, words, strict=True):
        form = member.request.form
        if form is None or member in failed:
            continue
        # Only what is new: a list of all would cost more with every token of a long reply.
        new = member.generated(form.seen)
        if member.computed == len(member.tokens):
            new.append(token)
        try:
            form.follow(new, form.seen)
            # Nothing follows the last token of a reply.
            if form.seen < member.request.max_tokens:
                closes |= _fill(form, row)
                if form.jumps and not member.request.processors:
                    forced[member] = form.forced()
        except Exception as error:
            # As with processors, the request fails alone.
            failed[member] = error
    return words if closes else None, forced


def _fill(form: ReplyForm, row: NDArray[np.int32]) -> bool:
    """ReplyForm.fill() of a row of logits, which may be padded or cut: what is beyond the form's
    vocabulary is closed.
    """
    words = np.empty(form.num_words, np.int32)
    if not form.fill(words):
        return False
    count = min(len(row), form.num_words)
    row[:count], row[count:] = words[:count], 0
    return True


class FormProcessor:
    """Holds a reply to its form as a logits processor of mlx-lm, the last of a request that mlx-lm
    serves by itself.

    A draft model is called with tokens that may be withdrawn, so that the form after earlier ones
    is retained.
    """

    def __init__(self, form: ReplyForm) -> None:
        self._form = form
        # The form at the beginning, and after two of the later tokens: a copy costs more the longer
        # the reply is.
        self._kept = [form.copy()]
        self._followed = np.zeros(0, np.uint32)
        self._prompt: int | None = None

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """`tokens`: a part of the prompt, which is the same each time, and the generated ones
        after it.
        """
        if self._prompt is None:
            # With the first draw nothing is generated yet.
            self._prompt = len(tokens)
        generated = np.array(tokens[self._prompt :])
        self._take_back(generated)
        form, self._followed = self._form, generated
        form.follow(generated[form.seen :].tolist(), form.seen)
        if form.seen - self._kept[-1].seen >= MOST_TAKEN_BACK:
            self._kept = [self._kept[0], *self._kept[1:][-1:], form.copy()]
        row = np.full((1, -(-logits.shape[-1] // 32)), -1, np.int32)
        return masked(logits, row) if _fill(form, row[0]) else logits

    def _take_back(self, generated: NDArray[Any]) -> None:
        """Return to a form that has followed only tokens that are still generated."""
        count = min(len(generated), self._form.seen)
        others = np.flatnonzero(generated[:count] != self._followed[:count])
        same = int(others[0]) if len(others) else count
        if same == self._form.seen:
            return
        while self._kept[-1].seen > same:
            self._kept.pop()
        self._form = self._kept[-1].copy()


def fits(run: list[int], runs: Forced) -> bool:
    """Return whether a run of forced tokens may be computed in one pass with others."""
    longest = max(len(run), 0, *map(len, runs.values()))
    return longest * (len(runs) + 1) <= FormConfig.most_forced_together
