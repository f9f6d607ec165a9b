"""Numbers of JSON schemas as llguidance keeps them: it reads them as doubles, some of them one unit off.

Whole numbers that are doubles are read as they are, and so are decimal numbers of at most 15 digits, 22 of them behind the point.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal

INTEGERS = 2**63 - 1024  # the largest double that is a 64-bit integer
_DIGITS, _PLACES = 15, 22
_MULTIPLE_PLACES = 9
_MULTIPLE = 10_000  # llguidance keeps a state for each remainder
_WHOLE = 10**_DIGITS


def is_kept(value: int | float) -> bool:
    """Whether llguidance reads exactly this number. True for bools."""
    if isinstance(value, int) or (math.isfinite(value) and value == int(value)):
        return abs(value) <= 2**53
    return math.isfinite(value) and Decimal(repr(value)) == _rounded(Decimal(repr(value)), 1)


def is_small(bound: int | float) -> bool:
    """Whether llguidance tells it from the whole numbers next to it."""
    return bool(abs(bound) < _WHOLE)


def inward(bound: int | float, sign: int) -> int | float:
    """The last number up to a bound (`sign` 1), or the first from it on (-1), that llguidance reads exactly.

    One that is whole has 64 bits. Raises ValueError where they do not suffice.
    """
    if sign * bound < -INTEGERS:
        raise ValueError(f"beyond {-sign * INTEGERS} is not supported")
    if sign * bound > INTEGERS:
        return sign * INTEGERS
    if bound == int(bound):
        nearest = float(bound)
        return int(math.nextafter(nearest, -sign * math.inf) if sign * nearest > sign * int(bound) else nearest)
    return _number(_rounded(Decimal(repr(bound)), sign))


def beyond(bound: int | float, sign: int) -> int | float:
    """The number next to an `inward` bound that is excluded: below it (`sign` 1) or above it (-1)."""
    if not is_small(bound):
        return int(math.nextafter(float(bound), -sign * math.inf))
    value = Decimal(repr(bound))
    return _number(_rounded(value - sign * _unit(value), sign))


def multiple(value: int | float) -> Decimal:
    """The value of multipleOf. Raises ValueError for one that llguidance does not read exactly."""
    found = Decimal(repr(value)).normalize()
    places = max(-int(found.as_tuple().exponent), 0)
    if places > _MULTIPLE_PLACES or found.scaleb(places) > _MULTIPLE:
        raise ValueError(
            f"above {_MULTIPLE} units of its last digit, or with more than {_MULTIPLE_PLACES} places, is not supported"
        )
    return found


def can_be_merged(multiples: Iterable[Decimal]) -> bool:
    """Whether llguidance's least common multiple of values that hold together is right: it computes with 32 bits."""
    found = set(multiples)
    places = max((-int(value.as_tuple().exponent) for value in found), default=0)
    return math.lcm(*(int(value.scaleb(max(places, 0))) for value in found)) < 2**16


def _unit(value: Decimal) -> Decimal:
    """What the last of its digits counts."""
    return Decimal(1).scaleb(max(value.adjusted() - _DIGITS + 1, -_PLACES) if value else -_PLACES)


def _rounded(value: Decimal, sign: int) -> Decimal:
    return value.quantize(_unit(value), ROUND_FLOOR if sign > 0 else ROUND_CEILING)


def _number(value: Decimal) -> int | float:
    return int(value) if value == int(value) else float(value)
