"""TextDraftSource: guesses that a text continues as it did before: the request's own, or another
one.

Does not know models or arrays. Owned by the generation thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import takewhile

from .acceptance import BUCKET_OF, REPLACED, AcceptanceRates
from .draft import NOTHING, Draft
from .index import LONGEST, SHORTEST, SuffixIndex

# Stands between texts that do not follow each other.
BREAK = -(1 << 62)
# After a miss a source continues after the missed token, or where the next one is found among
# RESYNC_TOKENS; it stops after the same number of misses. Longer runs of tokens are not remembered
# as replaced, nor more than MOST_REPLACED of them.
RESYNC_TOKENS = 8
MOST_REPLACED = 64
# Tokens that were replaced before are guessed as they were replaced, if that is right at least this
# often.
LEAST_REPLACED = 0.5
# Tokens that are accepted less often than this are not worth a row on any device.
UNLIKELY = 0.01

Run = list[int]


class TextDraftSource:
    """Follows one place in a text for as long as the request's tokens agree with it.

    Where the request has other tokens than the text, as a renamed variable, and continues as the
    text does, the source remembers what has replaced what, and guesses that it is replaced again.

    index: the text that is followed. own: the request's tokens, which are the index's where it
    follows itself.
    place: the number of the token of the text that is guessed next; -1 without a guess. `length`
    tokens before it agree.
    """

    def __init__(
        self,
        name: str,
        index: SuffixIndex,
        own: SuffixIndex,
        acceptance: AcceptanceRates,
        place: int = -1,
    ) -> None:
        self.name = name
        self.acceptance = acceptance
        self.index = index
        self._own = own.tokens
        self.place, self.length = place, LONGEST if place >= 0 else 0
        # Where it was, in the text and in the request, when it missed; and how often it has since
        # then.
        self._missed_at, self._own_missed_at, self._misses = -1, -1, 0
        # Runs of the text and what has replaced them, by the first token.
        self._replaced: dict[int, tuple[Run, Run]] = {}
        # What is guessed in place of the text's tokens at `place`, and how much of it has come;
        # what is not guessed, but watched.
        self._instead: Run = []
        self._num_come = 0
        self._watched: int | None = None

    @property
    def chance(self) -> float:
        """The chance that the next token is as it guesses; 0: it guesses none."""
        if not 0 <= self.place < len(self.index.tokens):
            return 0.0
        return self.acceptance.chance(
            REPLACED if self._instead and not self._num_come else self.length
        )

    def observe(self, token: int) -> None:
        """Observe a token that the request has emitted, and that its own text ends with now."""
        if self._instead:
            self._observe_instead(token)
            return
        place, tokens = self.place, self.index.tokens
        if place < 0 or place >= len(tokens):
            self.length, self.place = self.index.match(self._own)
            self._misses = 0
            return
        if self._watched is not None:
            self.acceptance.learn(REPLACED, self._watched == token)
            self._watched = None
        is_right = tokens[place] == token
        self.acceptance.learn(self.length, is_right)
        if not is_right:
            self._miss(token)
            return
        self.place = place + 1
        if self.length < LONGEST:
            self.length += 1
            if self._misses:
                self._settle()
        if self._replaced:
            self._look_up()

    def _observe_instead(self, token: int) -> None:
        """observe() in the midst of what is guessed in place of the text."""
        is_first, is_right = self._num_come == 0, self._instead[self._num_come] == token
        self.acceptance.learn(REPLACED if is_first else self.length, is_right)
        if is_right:
            self._num_come += 1
            self.length = min(self.length + 1, LONGEST)
            if self._num_come == len(self._instead):
                self.place += len(self._replaced[self.index.tokens[self.place]][0])
                self._look_up()
            return
        self._instead = []
        if is_first and self.index.tokens[self.place] == token:
            self.place += 1
        else:
            self._miss(token)

    def _look_up(self) -> None:
        """Guess something else than the text at its place, if that was replaced before."""
        self._instead, self._num_come = [], 0
        replaced = self._replacement(self.place)
        if replaced is not None:
            if self.acceptance.chance(REPLACED) >= LEAST_REPLACED:
                self._instead = replaced[1]
            else:
                self._watched = replaced[1][0]

    def _replacement(self, place: int) -> tuple[Run, Run] | None:
        """The run of the text at a place, and what has replaced it; None: nothing has."""
        tokens = self.index.tokens
        found = self._replaced.get(tokens[place]) if 0 <= place < len(tokens) else None
        return (
            found
            if found is not None and tokens[place : place + len(found[0])] == found[0]
            else None
        )

    def _miss(self, token: int) -> None:
        if self._misses == 0 or self.length:
            self._missed_at, self._own_missed_at = self.place, len(self._own) - 1
        self._misses += 1
        self.length, self.place = self._place_after(
            token, self._own, len(self._own) - 1, self._missed_at
        )
        self._settle()
        if self._replaced:
            self._look_up()

    def _settle(self) -> None:
        """After a miss: where the text is found again, remember what was replaced; where it is
        for certain, forget the miss.
        """
        if self.length == 1:
            run, other = (
                self.index.tokens[self._missed_at : self.place - 1],
                self._own[self._own_missed_at : -1],
            )
            if (
                0 < len(run) <= RESYNC_TOKENS
                and 0 < len(other) <= RESYNC_TOKENS
                and len(self._replaced) < MOST_REPLACED
            ):
                self._replaced[run[0]] = run, other
        elif self.length >= SHORTEST:
            self._misses = 0

    def guess(self, next_token: int, at_most: int) -> Draft:
        """Up to `at_most` tokens after `next_token`, which is known and not emitted yet."""
        tokens, place, length = self.index.tokens, self.place, min(self.length + 1, LONGEST)
        if self._instead and self._instead[self._num_come] == next_token:
            following = place + len(self._replaced[tokens[place]][0])
            return self._copied(following, length, at_most, self._instead[self._num_come + 1 :])
        if 0 <= place < len(tokens) and tokens[place] == next_token and not self._num_come:
            return self._copied(place + 1, length, at_most)
        start = place if self._misses == 0 or self.length else self._missed_at
        length, place = self._place_after(
            next_token, [*self._own[-LONGEST:], next_token], len(self._own), start
        )
        return self._copied(place, length, at_most)

    def _place_after(
        self, token: int, text: Sequence[int], num_own: int, start: int
    ) -> tuple[int, int]:
        """The match length and the place after a missed token, the last of `text`, which `num_own`
        tokens have come before.

        Where the last tokens have come before; or, where that is likelier to be right, near
        `start`, the place of the first miss.
        """
        length, found = self.index.match(text)
        if self.place < 0 or self._misses > RESYNC_TOKENS:
            return length, found
        tokens = self.index.tokens
        end = min(start + RESYNC_TOKENS, num_own if tokens is self._own else len(tokens))
        resumed, place = 0, start + 1
        with suppress(ValueError):
            resumed, place = 1, tokens.index(token, start, end) + 1
        chance = self.acceptance.chance
        return (
            (length, found)
            if found >= 0 and chance(length) >= chance(resumed)
            else (resumed, place)
        )

    def outlook(self, at_most: int) -> list[float]:
        """The chances of the tokens of guess() while the next token is not known, each that it and
        all before it are right.

        They are those of the next token being as guessed, and as if nothing after it was replaced;
        unlikely ones are left out.
        """
        length, rates, chance = self.length, self.acceptance.rates, self.chance
        found: list[float] = []
        for _ in range(min(at_most, len(self.index.tokens) - self.place - 1) if chance else 0):
            if length < LONGEST:
                length += 1
            chance *= rates[BUCKET_OF[length]]
            if chance < UNLIKELY:
                break
            found.append(chance)
        return found

    def _copied(self, place: int, length: int, at_most: int, before: Sequence[int] = ()) -> Draft:
        """A draft of the tokens at a place, after those that come `before`; what was replaced
        before is replaced.
        """
        if place < 0:
            return NOTHING
        copied, kinds = list(before), [0] * len(before)
        if self._replaced and self.acceptance.chance(REPLACED) >= LEAST_REPLACED:
            tokens = self.index.tokens
            while len(copied) < at_most and place < len(tokens):
                replaced = self._replacement(place)
                run, other = ([0], tokens[place : place + 1]) if replaced is None else replaced
                kinds += [0 if replaced is None else REPLACED, *[0] * (len(other) - 1)]
                copied += other
                place += len(run)
        else:
            copied += self.index.tokens[place : place + at_most]
            kinds += [0] * (len(copied) - len(kinds))
        if not copied:
            return NOTHING
        if min(copied) < 0:
            # A BREAK, or patches of an image, which are not tokens of the vocabulary.
            copied = list(takewhile(lambda token: token >= 0, copied))
        count, chance = min(len(copied), at_most), self.acceptance.chance
        chances = [chance(kind or min(length + i, LONGEST)) for i, kind in enumerate(kinds[:count])]
        return Draft(copied[:count], chances, self.name) if count else NOTHING
