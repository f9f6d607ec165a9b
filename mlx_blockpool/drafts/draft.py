"""Guess and Draft: tokens that may come next; and DraftSource, which guesses them. Knows tokens; no model, no arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Protocol

from .index import SuffixIndex


@dataclass(frozen=True)
class Guess:
    """Tokens that may come next. `match_length`: how many tokens before them the source has recognised, 0 if it does not say."""

    tokens: Sequence[int]
    match_length: int = 0


class DraftSource(Protocol):
    """Guesses the tokens of one request, which it was made for. What it raises ends its guesses and not the request.

    All requests wait for each call. One that takes more than half a second, or five in the first guess, ends its guesses too, but
    only once it returns: a call that never does cannot be ended.
    """

    name: str

    def observe(self, tokens: Sequence[int]) -> None:
        """Take in tokens that the request has emitted, in their order."""
        ...

    def guess(self, next_tokens: Sequence[int], at_most: int) -> Guess | None:
        """Guess up to `at_most` tokens behind those observed and `next_tokens`, which are known and not emitted yet."""
        ...


@dataclass
class Prediction:
    """What a client expects a reply to be.

    text:               its tokens, which the choices of one request share.
    accepted, rejected: how many of its tokens were drafted and then drawn by the request, and how many were drafted for nothing.
    """

    text: SuffixIndex
    accepted: int = 0
    rejected: int = 0


# Makes the source of a request from its prompt; None: it has nothing to guess from.
SourceFactory = Callable[[Sequence[int]], DraftSource | None]


@dataclass(frozen=True)
class Draft:
    """Tokens drafted for one request.

    acceptance: of each token, the chance that it is accepted if those before it are; at least as many as tokens.
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
        return Draft(self.tokens[:count], self.acceptance[:count], self.source) if count > 0 else NOTHING


NOTHING = Draft()
