"""Numbers that llguidance reads exactly: others are refused, and nothing beyond a bound is
written.
"""

from __future__ import annotations

import random
from decimal import Decimal
from typing import Any

import pytest
from forms.schemas import accepts, compiled, errors_of, refusal
from thorough import seeds

from mlx_blockpool.forms.exact import beyond, can_be_merged, exact, is_kept, multiple


def test_the_number_beyond_an_excluded_bound() -> None:
    assert [beyond(0, -1), beyond(0, 1), beyond(1, 1)] == [1e-22, -1e-22, 0.99999999999999]
    assert [beyond(-7, -1), beyond(123456789, -1), beyond(10**15 - 1, 1)] == [
        -6.99999999999999,
        123456789.000001,
        10**15 - 2,
    ]


def test_large_bounds_move_inwards_or_are_refused() -> None:
    assert exact({"maximum": 10**30, "exclusiveMinimum": -1e300}, "") == {
        "maximum": 2**53,
        "exclusiveMinimum": 1 - 10**15,
    }
    assert "minimum: numbers of more than 15 digits" in str(refusal({"minimum": 1e19}))
    assert "maximum: numbers of more than 15 digits" in str(refusal({"maximum": 0.1 + 0.2}))


def test_numbers_that_are_read_exactly() -> None:
    assert all(is_kept(value) for value in (0, -1, 2**53, 0.1, 1e15, 123456789012.345, True))
    assert not any(
        is_kept(value) for value in (2**53 + 1, 0.1 + 0.2, 1e-30, 1e300, float("inf"), float("nan"))
    )


def test_multiples_of_32_bits() -> None:
    assert Decimal("0.01") == multiple(0.01)
    assert can_be_merged([Decimal("0.01"), Decimal(100), Decimal(6)])
    assert can_be_merged([Decimal(10_000)])
    assert not can_be_merged([Decimal("0.01"), Decimal(1_000)])
    for value in (86_400, 1.00001, 1e-10, 1e300):
        with pytest.raises(ValueError, match="is not supported"):
            multiple(value)


def bound(draw: random.Random) -> float:
    return draw.choice(
        (
            draw.randint(-20, 20),
            round(draw.uniform(-3, 3), draw.randint(0, 4)),
            draw.choice(
                (
                    0,
                    -0.0,
                    1,
                    -1,
                    0.5,
                    -0.5,
                    2**53,
                    2**53 + 1,
                    2**63 - 1,
                    -(2**63),
                    10**19,
                    1e17,
                    -1e300,
                )
            ),
            draw.uniform(-1, 1) * 10 ** draw.randint(-12, 12),
            10 ** draw.randint(0, 18) * draw.choice((1, -1)) + draw.randint(-1, 1),
        )
    )


@pytest.mark.parametrize("number", seeds(1, 30))
def test_nothing_beyond_a_bound_is_accepted(number: int) -> None:
    draw, kept, accepted = random.Random(number), 0, 0
    while kept < 20:
        names = draw.sample(
            ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), draw.randint(1, 2)
        )
        schema: dict[str, Any] = {name: bound(draw) for name in names} | {
            "type": draw.choice(("integer", "number"))
        }
        if refusal(schema) is not None:
            continue
        kept += 1
        matcher = compiled(schema)
        for name in names:
            for step in ("0", "1", "-1", "0.5", "-0.001", "1e-20", "-1e-20"):
                text = format(Decimal(repr(schema[name])) + Decimal(step), "f")
                if accepts(matcher, text):
                    accepted += 1
                    assert not errors_of(schema, text), (text, schema)
    assert accepted > kept
