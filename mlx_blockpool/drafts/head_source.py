"""HeadSource: the guesses of a model's prediction head for one request.

The engine asks the head, for all requests of a batch at once. Does not know models or arrays. Owned
by the generation thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from .acceptance import BUCKETS, AcceptanceRates
from .draft import NOTHING, Draft

HEAD = "head"
# What is assumed of a head before any of its guesses has been seen, by the guesses before them.
HEAD_ASSUMED = [0.8, 0.7, 0.6, *[0.5] * (len(BUCKETS) - 2)]


class HeadSource:
    """Guesses that cost a forward of the head, which is never run just to gather statistics.

    acceptance: how often a guess is right if those before it are, by how many are before it.
    memory:     after this many tokens without a guess, what the request has shown is forgotten.
    """

    name = HEAD

    def __init__(self, prior: list[float], memory: int = 64) -> None:
        self._prior, self._memory = prior, memory
        self.acceptance = AcceptanceRates(prior)
        # What was guessed after the token that is emitted next, and how much of it has come.
        self._guessed: Sequence[int] = ()
        self._next_token: int | None = None
        self._num_right = self._num_idle = 0

    def outlook(self, at_most: int) -> list[float]:
        """The chances of the next guesses, each that it and all before it are right."""
        return list(accumulate(map(self.acceptance.chance, range(at_most)), mul))

    def propose(self, next_token: int, guessed: Sequence[int]) -> None:
        """Take what the head has guessed after `next_token`, which is not emitted yet."""
        self._next_token, self._guessed = next_token, guessed
        self._num_right = self._num_idle = 0

    def guess(self, next_token: int, at_most: int) -> Draft:
        """Up to `at_most` of the guesses after `next_token`."""
        if next_token != self._next_token or not self._guessed:
            return NOTHING
        tokens = self._guessed[:at_most]
        chances = [self.acceptance.chance(depth) for depth in range(len(tokens))]
        return Draft(tokens, chances, self.name)

    def observe(self, token: int) -> None:
        """Observe a token that the request has emitted."""
        if self._next_token is not None:
            self._guessed = self._guessed if token == self._next_token else ()
            self._next_token = None
            return
        if self._num_right < len(self._guessed):
            is_right = token == self._guessed[self._num_right]
            self.acceptance.learn(self._num_right, is_right)
            self._num_right += 1
            if not is_right:
                self._guessed = ()
            return
        self._num_idle += 1
        if self._num_idle == self._memory:
            self.acceptance = AcceptanceRates(self._prior)
            self._num_idle = 0
