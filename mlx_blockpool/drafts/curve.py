"""CostCurve: the seconds of a forward by its rows and what they read, as measured on one device
with one model.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

Points: TypeAlias = tuple[tuple[int, float], ...]
# Tokens of the contexts with which curves are measured.
CONTEXT = 32


@dataclass(frozen=True)
class TokenCosts:
    """Seconds of one more token of context: of a member and a row of a verification forward, and
    of a member of a plain step.
    """

    member: float = 0.0
    row: float = 0.0
    plain: float = 0.0


NOTHING_MORE = TokenCosts()


@dataclass(frozen=True)
class CostCurve:
    """Measured medians, in seconds, with contexts of `CONTEXT` tokens.

    rows:      numbers of rows and the seconds of a verification forward with each, ascending.
    pipelined: numbers of members and the seconds of a step that decodes one token of each without
               drafts, ascending; empty: as verification forwards with the same number of rows.
    token:     what longer contexts cost.
    is_whole:  False: some measurements did not fit into the pool, so that the curve is used and not
               remembered.

    More rows never count as cheaper than fewer: where that was measured, it was noise.
    """

    rows: Points
    pipelined: Points = ()
    token: TokenCosts = NOTHING_MORE
    is_whole: bool = True

    @staticmethod
    def from_points(
        rows: Mapping[int, float],
        pipelined: Mapping[int, float] | None = None,
        token: TokenCosts = NOTHING_MORE,
        is_whole: bool = True,
    ) -> CostCurve:
        """A curve of measured points, in any order."""
        return CostCurve(
            tuple(sorted(rows.items())), tuple(sorted((pipelined or {}).items())), token, is_whole
        )

    def at_context(self, context: int, members: int) -> CostCurve:
        """The curve of a batch of `members` whose contexts are `context` tokens on average."""
        more = max(0, context - CONTEXT)
        rows = tuple(
            (n, seconds + more * (self.token.member * min(n, members) + self.token.row * n))
            for n, seconds in self.rows
        )
        return CostCurve(
            rows, tuple((n, seconds + more * self.token.plain * n) for n, seconds in self.pipelined)
        )

    def with_second_forward(self, members: int) -> CostCurve:
        """The curve of plain steps of `members` that are followed by a separate forward for all
        further rows.
        """
        plain = self.plain_seconds(members)
        return CostCurve(
            tuple((members + n, plain + seconds) for n, seconds in self._rising),
            ((members, plain),),
        )

    def with_guesses(self, members: int, seconds: float) -> CostCurve:
        """The curve where a guess of one token for each of `members` takes `seconds` before the
        forward that verifies it.
        """
        each = seconds / members
        rows = {n: seconds + each * max(0, n - members) for n, seconds in self._rising}
        rows[members] = self.seconds(members)
        return CostCurve(tuple(sorted(rows.items())), self.pipelined)

    def seconds(self, rows: int) -> float:
        """Seconds of a verification forward with `rows` rows: between measured ones by a power
        law, beyond them on a line.
        """
        return _between(self._rising, rows)

    def plain_seconds(self, members: int) -> float:
        """Seconds of a step that decodes one token of each member without drafts."""
        return (
            _between(self._rising_pipelined, members) if self.pipelined else self.seconds(members)
        )

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

    @staticmethod
    def from_json(figures: Any) -> CostCurve:
        """What to_json() has returned. Raises as remembered_seconds()."""
        token = {name: remembered_seconds(cost) for name, cost in figures["token"].items()}
        rows, pipelined = _remembered_points(figures["rows"]), figures["pipelined"]
        if not rows:
            raise ValueError("a curve without points")
        return CostCurve(rows, _remembered_points(pipelined), TokenCosts(**token))

    def to_json(self) -> dict[str, Any]:
        figures = asdict(self)
        del figures["is_whole"]
        return figures


def remembered_seconds(found: Any, least: float = 0.0) -> float:
    """Remembered seconds. Raises AttributeError, KeyError, TypeError or ValueError for what cannot
    have been measured.
    """
    if type(found) not in (int, float) or not least <= found <= 3600:
        raise ValueError(f"{str(found)[:50]} seconds")
    return float(found)


def _remembered_points(found: Any) -> Points:
    points = tuple((count, remembered_seconds(seconds, 1e-9)) for count, seconds in found)
    counts = [count for count, _ in points]
    if not all(type(count) is int and 1 <= count <= 1_000_000 for count in counts) or any(
        count >= after for count, after in pairwise(counts)
    ):
        raise ValueError(f"counts that do not ascend: {str(counts)[:50]}")
    return points


def _rising(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    highest = accumulate((seconds for _, seconds in points), max)
    return list(zip((count for count, _ in points), highest, strict=True))


def _between(points: list[tuple[int, float]], count: int) -> float:
    """Seconds at `count`: by a power law between two points, before the first as there, and on a
    line after the last.
    """
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
    # As steep as between the last two points, or as all of them: two alone may be as fast by
    # chance.
    before, before_seconds = points[at - 2] if at > 1 else (0, 0.0)
    first, first_seconds = points[0] if at > 1 else (0, 0.0)
    last_slope, whole_slope = (
        (low_seconds - before_seconds) / (low - before),
        (low_seconds - first_seconds) / (low - first),
    )
    return low_seconds + max(last_slope, whole_slope) * (count - low)
