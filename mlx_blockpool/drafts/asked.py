"""AskedSource: the source of a plugin, which is asked for its guesses. Asking takes time, so that it is asked where that pays."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from itertools import accumulate, takewhile
from operator import mul

from .acceptance import Acceptance
from .draft import NOTHING, Draft, DraftSource
from .index import LONGEST
from .sources import UNLIKELY

log = logging.getLogger(__name__)

# A source that is not drafted from is asked for so many tokens, each time so many have been emitted, to learn whether it pays.
PROBED_TOKENS, PROBE_EVERY = 4, 64
# The longest guess ends where it is more likely wrong than right.
LEAST_CHANCE = 0.5
# The seconds of a guess are a running mean of about so many.
MEAN_OF = 8
# All requests wait for a call, so that a source which takes longer for one drafts no more for its request. It may take longer to
# begin, for a draft model computes the prompt in its first guess.
MOST_SECONDS, MOST_SECONDS_TO_BEGIN = 0.5, 5.0
# Where that has happened to so many requests, the source is made for no more of them.
MOST_SLOW = 3


class AskedSource:
    """Asks `source`, and learns how often the tokens of its guesses come true, and what they cost.

    In place of a match length, acceptance goes by how many tokens of the guess were right already.
    seconds: what it takes to guess a token, by `clock`; None: it was not asked yet. The first guess counts until the second,
    for a draft model computes the prompt in it.
    note_slow: called once where it has taken too long.
    """

    def __init__(
        self,
        source: DraftSource,
        acceptance: Acceptance,
        clock: Callable[[], float] = time.perf_counter,
        note_slow: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = source.name
        self.acceptance = acceptance
        self.seconds: float | None = None
        self._source: DraftSource | None = source
        self._clock, self._note_slow = clock, note_slow
        # The last guess as far as it was not compared yet, behind so many tokens that were known; how much of it was right.
        self._guessed: list[int] = []
        self._num_known = self._num_right = 0
        self._until_probe = 1
        self._num_guesses = 0

    @property
    def chance(self) -> float:
        """The chance of the first token that it would guess; 0: it guesses none."""
        return 0.0 if self.seconds is None or self._source is None else self.acceptance.chance(0)

    def observe(self, token: int) -> None:
        """Take in a token that the request has emitted."""
        if self._source is None:
            return
        if self._num_known:
            self._num_known -= 1
        elif self._guessed:
            is_right = self._guessed.pop(0) == token
            self.acceptance.learn(min(self._num_right, LONGEST), is_right)
            self._num_right += 1
            if not is_right:
                self._guessed = []
        self._until_probe -= 1
        start = self._clock()
        try:
            self._source.observe((token,))
        except Exception as error:
            self._give_up(error)
        self._check(self._clock() - start, MOST_SECONDS)
        if self._until_probe <= 0 and not self._guessed:
            self._ask((), PROBED_TOKENS)

    def outlook(self, at_most: int) -> list[float]:
        """The chances of the tokens of guess(), each that it and all before it are right; unlikely ones are left out."""
        likely = takewhile(lambda chance: chance >= UNLIKELY, accumulate(self.acceptance.chances(0, at_most), mul))
        return list(likely) if self.chance else []

    def guess(self, next_token: int, at_most: int) -> Draft:
        """Up to `at_most` tokens behind `next_token`, which is known and not emitted yet."""
        # One more than seems worth it: what is never guessed is never learned.
        worth = 1 + sum(chance >= LEAST_CHANCE for chance in self.outlook(at_most))
        tokens = self._ask((next_token,), min(worth, at_most)) if self.chance else []
        return Draft(tokens, self.acceptance.chances(0, len(tokens)), self.name) if tokens else NOTHING

    def _ask(self, next_tokens: Sequence[int], at_most: int) -> list[int]:
        if self._source is None:
            return []
        start = self._clock()
        try:
            guess = self._source.guess(next_tokens, at_most)
            tokens = [] if guess is None else list(takewhile(lambda token: token >= 0, map(int, guess.tokens[:at_most])))
        except Exception as error:
            self._give_up(error)
            return []
        taken = self._clock() - start
        self._check(taken, MOST_SECONDS if self._num_guesses else MOST_SECONDS_TO_BEGIN)
        seconds = taken / max(1, len(tokens))
        self._num_guesses += 1
        mean = seconds if self.seconds is None or self._num_guesses == 2 else self.seconds
        self.seconds = mean + (seconds - mean) / MEAN_OF
        self._guessed, self._num_known, self._num_right = list(tokens), len(next_tokens), 0
        self._until_probe = PROBE_EVERY
        return tokens

    def _check(self, taken: float, most: float) -> None:
        """Give a source up that has taken more than `most` seconds. What it has guessed in them counts."""
        if taken > most and self._source is not None:
            log.warning(
                "Draft source %s took %.1f s, and %g at most are allowed. It drafts no more for its request.",
                self.name,
                taken,
                most,
            )
            self._source = None
            self._note_slow()

    def _give_up(self, error: Exception) -> None:
        # Code from anywhere may raise anything, and the reply does not depend on it.
        log.warning("Draft source %s raised %s: %s. It drafts no more for its request.", self.name, type(error).__name__, error)
        self._source, self._guessed = None, []
