"""AcceptanceRates: how often the guesses of one source come true, by how many tokens before them it
had recognised.

Does not know models or arrays. Owned by the generation thread.
"""

from __future__ import annotations

import math

from .index import LONGEST

# The first match length of each bucket. Up to 2 tokens are recognised where a source continues
# after a token that it missed.
BUCKETS = (0, 1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, LONGEST)
# In place of a match length: of a token that is guessed to be replaced as before.
REPLACED = LONGEST + 1
# The bucket of each match length, and of REPLACED.
BUCKET_OF = (
    *(
        max(b for b, first in enumerate(BUCKETS) if first <= length)
        for length in range(LONGEST + 1)
    ),
    len(BUCKETS),
)
# What is assumed of a source before any of its guesses has been seen, by bucket.
ASSUMED = (0.2, 0.3, 0.4, 0.3, 0.35, 0.4, 0.45, 0.55, 0.65, 0.7, 0.8, 0.85, 0.9, 0.7)
# By how much a guess that was expected to fail and came true raises the log odds of its bucket, and
# those of all buckets.
BUCKET_STEP, SOURCE_STEP = 0.3, 0.3
# What all requests have in common forgets what is more than about this many guesses old.
LONG_MEMORY = 512
# Log odds start within these, so that what all requests have in common never outweighs what one of
# them shows.
SUREST = 4.0


class AcceptanceRates:
    """Chances by bucket, learned from every guess, whether it was drafted or not.

    A text that is copied is followed after short matches too, and a fresh one by chance: so each
    guess also counts for all other buckets. They move together from the request's start, and each
    by itself; that of REPLACED only by itself, as a text may continue when the replacing has ended.

    `rates`: the chances as they are estimated now. `prior`: those of all requests, which this one
    starts from and adds to.
    """

    def __init__(self, prior: list[float] | None = None) -> None:
        self.prior = list(ASSUMED) if prior is None else prior
        self._odds = [_log_odds(rate) for rate in self.prior]
        self._shift = 0.0
        self.rates = list(self.prior)

    def learn(self, length: int, is_right: bool) -> None:
        """Learn whether the guess of one token, after a match of `length` tokens, was right."""
        bucket = BUCKET_OF[length]
        surprise = is_right - self.rates[bucket]
        if length == REPLACED:
            self._odds[bucket] += (SOURCE_STEP + BUCKET_STEP) * surprise
        else:
            self._shift += SOURCE_STEP * surprise
            self._odds[bucket] += BUCKET_STEP * surprise
        self.prior[bucket] += (is_right - self.prior[bucket]) / LONG_MEMORY
        shift = self._shift
        self.rates = [_rate(odds + shift) for odds in self._odds[:-1]]
        self.rates.append(_rate(self._odds[-1]))

    def chance(self, length: int) -> float:
        """The chance of a guess after a match of `length` tokens."""
        return self.rates[BUCKET_OF[length]]


def _rate(log_odds: float) -> float:
    return 1.0 / (1.0 + math.exp(-log_odds))


def _log_odds(rate: float) -> float:
    surest = _rate(SUREST)
    rate = min(max(rate, 1.0 - surest), surest)
    return math.log(rate / (1.0 - rate))
