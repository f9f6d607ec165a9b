"""Draft: tokens that may come next; and what a client expects.

Knows tokens; no model, no arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from .index import SuffixIndex


@dataclass
class Prediction:
    """What a client expects a reply to be.

    text:               its tokens, which the choices of one request share.
    accepted, rejected: how many of its tokens were drafted and then drawn by the request, and how
    many were drafted for nothing.
    """

    text: SuffixIndex
    accepted: int = 0
    rejected: int = 0


@dataclass(frozen=True)
class Draft:
    """Tokens drafted for one request.

    acceptance: of each token, the chance that it is accepted if those before it are; at least one
    for each token.
    source:     the name of the source that guessed them; "" where nothing is drafted.
    """

    tokens: Sequence[int] = ()
    acceptance: Sequence[float] = ()
    source: str = ""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def chances(self) -> list[float]:
        """Of each token, the chance that it and all before it are accepted."""
        return list(accumulate(self.acceptance[: len(self.tokens)], mul))

    def first(self, count: int) -> Draft:
        """Its first `count` tokens."""
        if count >= len(self.tokens):
            return self
        return (
            Draft(self.tokens[:count], self.acceptance[:count], self.source)
            if count > 0
            else NOTHING
        )


NOTHING = Draft()
