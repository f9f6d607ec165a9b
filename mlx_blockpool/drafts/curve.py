"""CostCurve: the seconds of a forward by its rows and what they read, as measured on one device with one model."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

# Tokens of the contexts behind which curves are measured.
CONTEXT = 32
# More tokens than any forward has, and few enough for floats.
MOST_ROWS = 1 << 30


class TokenCosts(NamedTuple):
    """Seconds of one more token of context: of a member and a row of a verification forward, and of a member of a plain step."""

    member: float = 0.0
    row: float = 0.0
    plain: float = 0.0


NOTHING_MORE = TokenCosts()


@dataclass(frozen=True)
class CostCurve:
    """Measured medians, in seconds, behind contexts of `CONTEXT` tokens.

    rows:      numbers of rows and the seconds of a verification forward with so many, ascending.
    pipelined: numbers of members and the seconds of a step that decodes one token of each without drafts, ascending; empty: as
               verification forwards with as many rows.
    token:     what longer contexts cost.
    is_whole:  False: the pool had no room for some of what is measured, so that the curve is used and not remembered.

    More rows never count as cheaper than fewer: where that was measured, it was noise.
    """

    rows: tuple[tuple[int, float], ...]
    pipelined: tuple[tuple[int, float], ...] = ()
    token: TokenCosts = NOTHING_MORE
    is_whole: bool = True

    def __post_init__(self) -> None:
        for points in (self.rows, self.pipelined):
            counts = [count for count, _ in points]
            is_ascending = counts == sorted(set(counts)) and all(0 < count <= MOST_ROWS for count in counts)
            if not is_ascending or not all(0 < seconds < math.inf for _, seconds in points):
                raise ValueError(f"A cost curve has the points {points}. Give ascending counts from 1, each with its seconds.")
        if not all(0 <= seconds < math.inf for seconds in self.token):
            raise ValueError(f"A cost curve has {self.token}. Give seconds from 0.")
        if not self.rows:
            raise ValueError("A cost curve has no points. Give the seconds of at least one number of rows.")

    @staticmethod
    def of(
        rows: Mapping[int, float],
        pipelined: Mapping[int, float] | None = None,
        token: TokenCosts = NOTHING_MORE,
        is_whole: bool = True,
    ) -> CostCurve:
        """A curve of measured points, in any order."""
        return CostCurve(tuple(sorted(rows.items())), tuple(sorted((pipelined or {}).items())), token, is_whole)

    def behind(self, context: int, members: int) -> CostCurve:
        """The curve of a batch of so many members whose contexts are `context` tokens on average."""
        more = max(0, context - CONTEXT)
        rows = tuple((n, seconds + more * (self.token.member * min(n, members) + self.token.row * n)) for n, seconds in self.rows)
        return CostCurve(rows, tuple((n, seconds + more * self.token.plain * n) for n, seconds in self.pipelined))

    def seconds(self, rows: int) -> float:
        """Seconds of a verification forward with so many rows: between measured ones by a power law, beyond them on a line."""
        return _between(self._rising, rows)

    def plain_seconds(self, members: int) -> float:
        """Seconds of a step that decodes one token of each member without drafts."""
        return _between(self._rising_pipelined, members) if self.pipelined else self.seconds(members)

    def log_seconds(self, rows: int) -> float:
        """The logarithm of seconds(), kept for each number of rows."""
        found = self._logs.get(rows)
        if found is None:
            found = self._logs[rows] = math.log(self.seconds(rows))
        return found

    @cached_property
    def _logs(self) -> dict[int, float]:
        return {}

    @cached_property
    def _rising(self) -> list[tuple[int, float]]:
        return _rising(self.rows)

    @cached_property
    def _rising_pipelined(self) -> list[tuple[int, float]]:
        return _rising(self.pipelined)

    def to_json(self) -> dict[str, Any]:
        points = {name: [list(point) for point in getattr(self, name)] for name in ("rows", "pipelined")}
        return points | {"token": self.token._asdict()}

    @staticmethod
    def from_json(data: Any) -> CostCurve:
        """Raises ValueError for anything else than to_json() returns."""
        try:
            rows, pipelined = (
                tuple((int(count), float(seconds)) for count, seconds in data[name]) for name in ("rows", "pipelined")
            )
            token = TokenCosts(*(float(data["token"][name]) for name in TokenCosts._fields))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"{data!r} is no cost curve: {error!r}.") from error
        return CostCurve(rows, pipelined, token)


def _rising(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    highest = accumulate((seconds for _, seconds in points), max)
    return list(zip((count for count, _ in points), highest, strict=True))


def _between(points: list[tuple[int, float]], count: int) -> float:
    """Seconds at `count`: by a power law between two points, before the first as there, and on a line behind the last."""
    at = bisect_left(points, (count, 0.0))
    if at < len(points) and points[at][0] == count:
        return points[at][1]
    if at == 0:
        return points[0][1]
    low, low_seconds = points[at - 1]
    if at < len(points):
        high, high_seconds = points[at]
        share = math.log(count / low) / math.log(high / low)
        return low_seconds * math.exp(share * math.log(high_seconds / low_seconds))
    # As steep as between the last two points, or as all of them: two alone may be as fast by chance.
    before, before_seconds = points[at - 2] if at > 1 else (0, 0.0)
    first, first_seconds = points[0] if at > 1 else (0, 0.0)
    last_slope, whole_slope = (low_seconds - before_seconds) / (low - before), (low_seconds - first_seconds) / (low - first)
    return low_seconds + max(last_slope, whole_slope) * (count - low)
