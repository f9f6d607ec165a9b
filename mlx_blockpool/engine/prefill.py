"""Who computes next, prompts or the batch; which prompts, how far, and the chunk that computes them.

Chunks end on an absolute grid, so that cold and warm runs of a prompt are computed in the same shapes, and at the breakpoints of
a prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..config import EngineConfig
from ..kv.parts import batch_of, member_of
from ..prefix.trie import common_prefix
from .sequence import Sequence


@dataclass(frozen=True)
class Chunk:
    """Tokens [computed, end) of each row, which are computed together: (row, end) pairs."""

    rows: list[tuple[Sequence, int]]

    def run(self, model: Any, merges: bool) -> int:
        """Returns the number of tokens. Several rows are padded on the right; caches ignore the padding."""
        assert merges or len(self.rows) == 1, "these caches cannot be merged"
        chunks = [row.tokens[row.computed : end] for row, end in self.rows]
        caches = [row.caches or [] for row, _ in self.rows]
        layers = batch_of(caches) if merges else caches[0]
        lengths = [len(chunk) for chunk in chunks]
        padding = [max(lengths) - length for length in lengths]
        if any(padding):
            for layer in layers:
                layer.prepare(lengths=lengths, right_padding=padding)
        model(mx.array([chunk + [0] * pad for chunk, pad in zip(chunks, padding, strict=True)]), cache=layers)
        if any(padding):
            for layer in layers:
                layer.finalize()
        mx.eval([layer.state for layer in layers])
        for i, (row, end) in enumerate(self.rows):
            row.computed = end
            if merges:
                row.caches = member_of(layers, i)
        return sum(lengths)


class Turns:
    """Turns of prompts and the batch while both wait, and of short prompts and long ones."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self._decode_debt = 0.0
        self._long_first = False

    @property
    def is_for_decode(self) -> bool:
        """True if chunks have had more than their share of the time."""
        return self._decode_debt > 0

    def next_chunk(self, prefilling: Collection[Sequence], pads_prompts: bool) -> Chunk:
        """The chunk of prompts that is due; of several prompts only where these may be padded."""
        tokens = self.config.prefill_tokens
        most = self.config.prefill_rows if pads_prompts else 1
        rows = [(each, chunk_end(each, tokens)) for each in choose(prefilling, tokens, most, self._long_first)]
        self._long_first = len(rows) > 1 or rows[0][1] == rows[0][0].prefill_end
        return Chunk(rows)

    def account(self, is_prefill: bool, seconds: float, both_wait: bool) -> None:
        """While both wait, decode gets `decode_share` of the time: each chunk adds to its debt, each decode step pays it."""
        share = self.config.decode_share
        self._decode_debt += seconds * share / (1 - share) if is_prefill else -seconds
        if not both_wait:
            self._decode_debt = 0.0


def chunk_end(sequence: Sequence, step: int) -> int:
    """Where the next chunk of a prompt ends: on the grid of `step` tokens, at a breakpoint, or where the prompt ends."""
    grid = (sequence.computed // step + 1) * step
    return min(sequence.prefill_end, grid, *(at for at in sequence.breakpoints if at > sequence.computed))


def choose(prefilling: Collection[Sequence], step: int, rows: int, long_first: bool) -> list[Sequence]:
    """The prompts of the next chunk: the long one that is due first, or short ones together.

    A prompt is short if one chunk is left of it. Short ones go first, so that they do not wait for a long prompt; where both
    wait they take turns (`long_first`), so that a stream of short ones does not stop a long one. At most `rows` go together,
    and at most `step` tokens, padding included.
    """
    long = [r for r in prefilling if chunk_end(r, step) < r.prefill_end]
    short = sorted((r for r in prefilling if r not in long), key=lambda r: r.place)
    if long and (long_first or not short):
        return [min(long, key=lambda r: r.place)]
    chosen: list[Sequence] = []
    longest = 0
    for sequence in short:
        longer = max(longest, sequence.prefill_end - sequence.computed)
        if not chosen or (len(chosen) < rows and (len(chosen) + 1) * longer <= step):
            chosen.append(sequence)
            longest = longer
    return chosen


def prefill_ahead(
    sequence: Sequence, prefilling: Collection[Sequence], least: int, cached: Callable[[list[int], bytes], int]
) -> tuple[Sequence, int] | None:
    """A live prefill that is about to compute `least` tokens more of a prompt than are `cached`, and where they end.

    Choices wait for the whole prompt. None: there is no such prefill.
    """
    for other in prefilling:
        shared, enough = _still_shared(sequence, other), 1 if sequence.is_choice_beside(other) else least
        if shared >= enough and (shared in other.breakpoints or shared - cached(sequence.tokens, sequence.policy.salt) >= enough):
            return other, shared
    return None


def _still_shared(sequence: Sequence, other: Sequence) -> int:
    """The tokens that two prompts have in common, if the prefill of `other` has not come to their end; else 0."""
    if sequence.policy.salt != other.policy.salt:
        return 0
    prompt = sequence.request.tokens
    # Choices have one list of tokens, which may be long.
    alike = len(prompt) if prompt is other.request.tokens else common_prefix(sequence.tokens, other.tokens)
    shared = min(alike, sequence.prefill_end, other.prefill_end)
    return shared if shared > other.computed else 0
