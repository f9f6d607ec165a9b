"""SuffixIndex: where in a text the last tokens of another text, or its own, have come before.

Knows tokens alone.
"""

from __future__ import annotations

from collections.abc import Sequence

# A match has at least SHORTEST tokens; of longer ones at most LONGEST are counted.
SHORTEST = 3
LONGEST = 64
# Of the places where the last tokens have come before, this many are compared, the latest first.
MOST_PLACES = 8

# Three tokens as one number; where ids have more bits, unlike tokens may share a number, and
# comparing tells them apart.
_TOKEN_BITS = 20
_MASK = (1 << SHORTEST * _TOKEN_BITS) - 1


class SuffixIndex:
    """A text that grows, by the last three tokens before each of its tokens.

    `tokens`: the text. Those after `num_indexed` are found once catch_up() has come to them.
    """

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self.tokens = list(tokens)
        self.num_indexed = 0
        # The latest place of each three tokens: the number of the token after them; and of each
        # place the one before it.
        self._latest: dict[int, int] = {}
        self._earlier: list[int] = []
        # The last three tokens before the place that is indexed next.
        self._key = 0

    def __len__(self) -> int:
        return len(self.tokens)

    def append(self, token: int) -> None:
        """Append a token, which is indexed at once unless others before it are not yet."""
        self.tokens.append(token)
        if self.num_indexed == len(self.tokens) - 1:
            self.catch_up(1)

    def catch_up(self, at_most: int) -> int:
        """Index up to `at_most` tokens. Returns how many."""
        start, end = self.num_indexed, min(len(self.tokens), self.num_indexed + at_most)
        key, latest, earlier = self._key, self._latest, self._earlier
        for number, token in enumerate(self.tokens[start:end], start):
            earlier.append(latest.get(key, -1))
            latest[key] = number
            key = (key << _TOKEN_BITS ^ token) & _MASK
        self._key, self.num_indexed = key, end
        return end - start

    def match(self, text: Sequence[int]) -> tuple[int, int]:
        """The longest end of `text` that the indexed text has, and the number of the token after
        it; (0, -1) without a match.

        Of the MOST_PLACES latest places with its last three tokens; of equally long ones the
        latest.
        """
        size = len(text)
        if size < SHORTEST:
            return 0, -1
        key = ((text[-3] << _TOKEN_BITS ^ text[-2]) << _TOKEN_BITS ^ text[-1]) & _MASK
        place = self._latest.get(key, -1)
        longest, best = SHORTEST - 1, -1
        tokens, last = self.tokens, size - 1
        for _ in range(MOST_PLACES):
            if place < 0:
                break
            # Only a place that agrees one token further than the best can be better.
            if (
                longest < place
                and longest < size
                and tokens[place - 1 - longest] == text[last - longest]
            ):
                count, most = 0, min(place, size, LONGEST)
                while count < most and tokens[place - 1 - count] == text[last - count]:
                    count += 1
                if count > longest:
                    longest, best = count, place
                    if count == LONGEST:
                        break
            place = self._earlier[place]
        return (longest, best) if best >= 0 else (0, -1)
