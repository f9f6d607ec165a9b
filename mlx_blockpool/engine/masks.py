"""Masks: the logits of a batch with all tokens closed that the forms of its members do not allow next.

Forms are followed on the host while the device computes the logits. Owned by the generation thread.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ..forms.form import Form
from .sequence import Sequence

# The tokens that must follow those of a sequence.
Forced = dict[Sequence, list[int]]

# How many tokens may be taken back, as drafts that are not accepted, before a form begins again.
MOST_TAKEN_BACK = 32

# The most forced tokens of all members that are computed in one pass, with their padding: the others wait for it.
MOST_TOGETHER = 64

# Of each dtype of logits: the dtype of its bits, and the bits of its infinities.
BITS: dict[mx.Dtype, tuple[Any, int, int]] = {
    mx.float32: (np.uint32, 0x7F800000, 0xFF800000),
    mx.bfloat16: (np.uint16, 0x7F80, 0xFF80),
    mx.float16: (np.uint16, 0x7C00, 0xFC00),
}


def masked(logits: mx.array, words: NDArray[np.int32]) -> mx.array:
    """Logits [members, vocabulary], -inf where the bit of a token is 0 in words [members, vocabulary / 32].

    By minimum: on a CPU mx.where costs six times as much where open and closed tokens alternate.
    """
    # take() is eight times as fast as an index.
    ceilings = _ceilings(logits.dtype).take(words.view(np.uint8), axis=0)
    rows = ceilings.reshape(len(words), -1)[:, : logits.shape[1]]
    return mx.minimum(logits, mx.array(rows).view(logits.dtype))


@functools.cache
def _ceilings(dtype: mx.Dtype) -> NDArray[Any]:
    """The bits of 8 numbers for each byte of a mask: infinity where the bit of a token is 1, else minus infinity."""
    unsigned, highest, lowest = BITS[dtype]
    is_open = (np.arange(256)[:, None] >> np.arange(8)) & 1
    ceilings: NDArray[Any] = np.where(is_open, unsigned(highest), unsigned(lowest))
    return ceilings


def follow(
    members: Collection[Sequence], inputs: Collection[int], vocabulary: int, failed: dict[Sequence, Exception]
) -> tuple[NDArray[np.int32] | None, Forced]:
    """Take the tokens that are being computed into the forms of their members.

    Returns the mask [members, vocabulary / 32] of the next draws, None where all are free, and the tokens of members that need no
    draw: their form leaves no choice, and neither logprobs nor processors are involved. A member whose form raises joins
    `failed`.
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
            # The last token of a reply has none behind it.
            if form.seen < member.request.max_tokens:
                closes |= _fill(form, row)
                if form.jumps and not member.request.processors:
                    forced[member] = form.forced()
        except Exception as error:
            # As with processors, the request fails alone.
            failed[member] = error
    return words if closes else None, forced


def _fill(form: Form, row: NDArray[np.int32]) -> bool:
    """Form.fill() of a row of logits, which may be padded or cut: what is beyond the form's vocabulary is closed."""
    words = np.empty(form.num_words, np.int32)
    if not form.fill(words):
        return False
    count = min(len(row), form.num_words)
    row[:count], row[count:] = words[:count], 0
    return True


class FormProcessor:
    """Holds a reply to its form as a logits processor of mlx-lm, the last of a request that mlx-lm serves by itself.

    A draft model is called with tokens that may be taken back, so that the form behind earlier ones is kept.
    """

    def __init__(self, form: Form) -> None:
        self._form = form
        # The form at the beginning, and behind two of the later tokens: a copy costs more the longer the reply is.
        self._kept = [form.copy()]
        self._followed = np.zeros(0, np.uint32)
        self._prompt: int | None = None

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """`tokens`: a part of the prompt, which is the same each time, and the generated ones behind it."""
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
        """Go back to a form behind tokens that are still generated."""
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
    return longest * (len(runs) + 1) <= MOST_TOGETHER
