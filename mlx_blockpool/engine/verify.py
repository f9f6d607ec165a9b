"""Verification: which drafted tokens each sequence accepts, once one forward has computed them.

The rows of a member have its tokens that were rolled back, its next token, and its drafted ones. A
draw from a row is made as the request would make it without drafts, and none is made twice or for
nothing: the first that differs from the next drafted token ends the rows of its member. Knows
logits; no caches. Owned by the generation thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Row
from dataclasses import dataclass, field

import mlx.core as mx

from .sampling import Drawn, Forced, draw, ids, logprobs_of
from .sequence import Sequence

# A token that a sequence emits, and the logprobs [vocabulary] that it was drawn from; [0] where
# another process has drawn it.
Emitted = tuple[Sequence, int, mx.array]
# The tokens that are drafted after the next one of sequences.
Drafts = Mapping[Sequence, list[int]]


@dataclass
class Rows:
    """The rows of one member of a verification forward.

    tokens:     those that are computed again, its next token, and those that are drafted after it.
    start:      the first of its rows among those of all members.
    kept:       how many of its rows were accepted, and are computed; at least those that were
                rolled back.
    following:  what was drawn from the last of them.
    """

    member: Sequence
    tokens: list[int]
    start: int
    kept: int
    following: int = -1

    @property
    def row(self) -> int:
        """The row that is drawn from next."""
        return self.start + self.kept


@dataclass
class Decoded:
    """What a decode step has found.

    emitted:   the tokens that the step before has drawn, in the order of the members.
    failed:    the members whose processor, form or sampler has raised. No token of theirs is
               emitted.
    forced:    the tokens that forms force after the emitted ones.
    accepted:  how many drafted tokens of each member were accepted.
    """

    emitted: list[Emitted] = field(default_factory=list)
    failed: dict[Sequence, Exception] = field(default_factory=dict)
    forced: Forced = field(default_factory=dict)
    accepted: dict[Sequence, int] = field(default_factory=dict)


def accept(logits: mx.array, members: Row[Rows], least_forced: int) -> Decoded:
    """Draw from the logits [rows, vocabulary] of all members, as long as they draw what was
    drafted.

    After a row on which a form forces `least_forced` tokens no draft is accepted: they are appended
    without a draw. In the end all that was drawn is evaluated, and `kept` and `following` of each
    member, and its logprobs, are those of the next step.
    """
    decoded = Decoded()
    greedy = [rows for rows in members if rows.member.is_greedy]
    if greedy:
        _accept_greedy(logits, greedy, decoded)
    drawing = [rows for rows in members if not rows.member.is_greedy]
    while drawing:
        drawn = _draw_next(logits, drawing)
        decoded.failed |= drawn.failed
        decoded.forced |= drawn.forced
        found = zip(drawing, ids(drawn.tokens), list(drawn.logprobs), strict=True)
        drawing = [
            rows
            for rows, token, logprobs in found
            if _take(rows, token, logprobs, decoded)
            and len(drawn.forced.get(rows.member, ())) < least_forced
        ]
    decoded.accepted = {rows.member: rows.kept - rows.member.rolled_back - 1 for rows in members}
    mx.eval(
        [rows.member.logprobs for rows in members], [logprobs for _, _, logprobs in decoded.emitted]
    )
    return decoded


def _accept_greedy(logits: mx.array, members: Row[Rows], decoded: Decoded) -> None:
    """accept() where every draw is the most likely token: all are made at once."""
    logprobs = logprobs_of(logits)
    best = ids(mx.argmax(logprobs, axis=-1))
    for rows in members:
        while _take(rows, best[rows.row], logprobs[rows.row], decoded):
            pass


def _draw_next(logits: mx.array, members: Row[Rows]) -> Drawn:
    """A draw from the next row of each member, evaluated."""
    inputs = mx.array([rows.tokens[rows.kept] for rows in members], mx.uint32)
    own = logits[mx.array([rows.row for rows in members])]
    drawn = draw(own, inputs, [rows.member for rows in members])
    mx.eval(drawn.tokens, drawn.logprobs, drawn.contexts)
    return drawn


def _take(rows: Rows, following: int, logprobs: mx.array, decoded: Decoded) -> bool:
    """Count the next row as computed, and emit its token.

    Returns whether `following`, drawn from it, is what was drafted.
    """
    member, token = rows.member, rows.tokens[rows.kept]
    member.compute(token)
    if member.logprobs is not None and member not in decoded.failed:
        decoded.emitted.append((member, token, member.logprobs))
    rows.kept += 1
    rows.following, member.logprobs = following, logprobs
    return member not in decoded.failed and rows.tokens[rows.kept : rows.kept + 1] == [following]
