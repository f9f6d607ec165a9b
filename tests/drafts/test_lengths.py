"""The choice of lengths against all that could be chosen, and the curve that it goes by."""

from __future__ import annotations

import itertools
import json
import math
import operator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from thorough import tried

from mlx_blockpool.drafts.curve import CONTEXT, CostCurve, TokenCosts
from mlx_blockpool.drafts.lengths import (
    LEAST_GAIN,
    choose_lengths,
    choose_padded_lengths,
    least_chance,
)

# Measured on a CPU: seconds of 1 to 16 rows relative to those of one.
BF16 = CostCurve.from_points({1: 1.0, 2: 1.3, 4: 1.9, 8: 3.4, 16: 6.1})
FOUR_BITS = CostCurve.from_points({1: 1.0, 2: 1.9, 4: 3.5, 8: 6.7, 16: 13.0})
FLAT = CostCurve.from_points({1: 1.0, 2: 1.01, 32: 1.05, 64: 1.5})

SECONDS = st.floats(0.5, 4.0)
CURVES = st.builds(
    CostCurve.from_points,
    st.dictionaries(st.sampled_from([2, 3, 4, 8, 12]), SECONDS, max_size=4).map(
        lambda d: {1: 0.5} | d
    ),
)
DRAFTS = st.lists(st.lists(st.floats(0.0, 1.0), max_size=3), min_size=1, max_size=4)


def draft(*acceptance: float) -> list[float]:
    """The chances of a draft's tokens from the acceptance of each."""
    return list(itertools.accumulate(acceptance, operator.mul))


def log_speed(
    drafts: list[list[float]], lengths: tuple[int, ...] | list[int], curve: CostCurve, members: int
) -> float:
    """The logarithm of the product of the members' speeds, in tokens a second."""
    emitted = sum(
        math.log(1 + sum(each[:count])) for each, count in zip(drafts, lengths, strict=True)
    )
    seconds = (
        curve.seconds(members + sum(lengths)) if any(lengths) else curve.plain_seconds(members)
    )
    return emitted - members * math.log(seconds)


@tried(100, 1000)
@given(DRAFTS, CURVES, st.integers(0, 3))
def test_the_choice_is_the_best_of_all(
    acceptance: list[list[float]], curve: CostCurve, others: int
) -> None:
    drafts = [draft(*each) for each in acceptance]
    members = len(drafts) + others
    lengths = choose_lengths(drafts, curve, members)
    assert all(0 <= count <= len(each) for count, each in zip(lengths, drafts, strict=True))
    every = [
        log_speed(drafts, c, curve, members)
        for c in itertools.product(*(range(len(each) + 1) for each in drafts))
        if any(c)
    ]
    plain = log_speed(drafts, [0] * len(drafts), curve, members)
    least = plain + members * math.log(LEAST_GAIN)
    if any(lengths):
        assert log_speed(drafts, lengths, curve, members) == pytest.approx(max(every), abs=1e-9)
        assert log_speed(drafts, lengths, curve, members) > least - 1e-9
    else:
        assert max(every, default=-math.inf) <= least + 1e-9


@tried(60, 600)
@given(DRAFTS, CURVES, st.integers(0, 3))
def test_no_draft_slows_the_others_by_more_than_it_gains(
    acceptance: list[list[float]], curve: CostCurve, others: int
) -> None:
    drafts = [draft(*each) for each in acceptance]
    members = len(drafts) + others
    lengths = choose_lengths(drafts, curve, members)
    for number, count in enumerate(lengths):
        rows = members + sum(lengths)
        gain = math.log(1 + sum(drafts[number][:count]))
        without = (
            curve.plain_seconds(members) if sum(lengths) == count else curve.seconds(rows - count)
        )
        assert gain >= members * math.log(curve.seconds(rows) / without) - 1e-9


def test_certain_drafts_are_as_long_as_the_curve_is_worth() -> None:
    assert choose_lengths([draft(*[1.0] * 15)], BF16, 1) == [15]
    assert choose_lengths([draft(*[0.99] * 16)], FLAT, 1) == [16]


def test_four_bits_on_a_cpu_leave_little_to_gain() -> None:
    assert choose_lengths([draft(*[0.95] * 16)], FOUR_BITS, 1) == [3]
    assert choose_lengths([draft(*[0.9] * 16)], FOUR_BITS, 1) == [0]


def test_unlikely_drafts_are_left_out() -> None:
    assert choose_lengths([draft(0.3, 0.3, 0.3)], BF16, 1) == [0]
    assert choose_lengths([draft(0.9, 0.9, 0.1, 0.9)], BF16, 1) == [2]


def test_a_member_alone_does_not_slow_many_others() -> None:
    one = draft(*[0.99] * 16)
    assert choose_lengths([one], BF16, 1)[0] > 7
    assert choose_lengths([one], BF16, 8) == [0]


def test_a_step_in_the_curve_is_crossed_where_what_follows_pays() -> None:
    steps = CostCurve.from_points({1: 1.0, 2: 2.5, 16: 2.6})
    assert choose_lengths([draft(*[0.95] * 15)], steps, 1) == [15]
    assert choose_lengths([draft(*[0.95])], steps, 1) == [0]


def test_steps_that_are_faster_without_verification_have_to_be_beaten() -> None:
    likely = draft(0.8, 0.5)
    assert choose_lengths([likely], BF16, 1) == [1]
    assert choose_lengths([likely], CostCurve.from_points(dict(BF16.rows), {1: 0.75}), 1) == [1]
    assert choose_lengths([likely], CostCurve.from_points(dict(BF16.rows), {1: 0.74}), 1) == [0]


def test_more_drafts_than_members_are_refused() -> None:
    with pytest.raises(ValueError, match="2 drafts for 1 members"):
        choose_lengths([[], []], BF16, 1)


# -- the curve -------------------------------------------------------------------------------------


def test_seconds_are_the_measured_ones_and_in_between_a_power_law() -> None:
    curve = CostCurve.from_points({1: 1.0, 4: 2.0, 16: 8.0})
    assert [curve.seconds(rows) for rows in (1, 4, 16)] == [1.0, 2.0, 8.0]
    assert curve.seconds(2) == pytest.approx(math.sqrt(2.0))
    assert curve.seconds(8) == pytest.approx(4.0)


def test_seconds_beyond_the_last_point_lie_on_a_line() -> None:
    assert CostCurve.from_points({1: 1.0, 4: 2.0, 16: 8.0}).seconds(32) == pytest.approx(16.0)
    assert CostCurve.from_points({1: 1.0}).seconds(3) == pytest.approx(3.0)


def test_a_flat_end_does_not_make_all_that_follows_free() -> None:
    assert CostCurve.from_points({1: 1.0, 8: 8.0, 16: 8.0}).seconds(31) == pytest.approx(8.0 + 7.0)


@tried(50, 500)
@given(CURVES)
def test_more_rows_are_never_cheaper(curve: CostCurve) -> None:
    seconds = [curve.seconds(rows) for rows in range(1, 40)]
    assert all(more >= fewer * (1 - 1e-12) for fewer, more in itertools.pairwise(seconds))


def test_a_plain_step_has_its_own_seconds_where_they_were_measured() -> None:
    assert BF16.plain_seconds(2) == BF16.seconds(2)
    curve = CostCurve.from_points({1: 1.0, 2: 1.3}, {1: 0.9, 4: 1.8})
    assert curve.plain_seconds(1) == 0.9
    assert curve.plain_seconds(2) == pytest.approx(0.9 * math.sqrt(2.0))


@tried(50, 500)
@given(CURVES)
def test_a_curve_comes_back_from_json(curve: CostCurve) -> None:
    assert CostCurve.from_json(json.loads(json.dumps(curve.to_json()))) == curve


GOOD = CostCurve.from_points({1: 1.0, 2: 1.5}, {1: 0.9}, TokenCosts(1e-3, 1e-4, 1e-3)).to_json()
BAD = [None, {}, {"rows": 3}, GOOD | {"token": None}]
BAD += [
    GOOD | {"token": {"member": 0.0, "plain": 0.0, "row": seconds}}
    for seconds in (-1.0, math.inf, math.nan, 10**400)
]
BAD += [
    GOOD | {"rows": rows}
    for rows in ([], [[0, 1.0]], [[1, -1.0]], [[1, math.inf]], [[1]], [[1, "x"]])
]
BAD += [GOOD | {"rows": rows} for rows in ([[1, 10**400]], [[1, math.nan]], [[math.inf, 1.0]])]


def test_longer_contexts_cost_what_their_members_and_rows_read() -> None:
    curve = CostCurve.from_points(
        {1: 1.0, 4: 2.0, 16: 6.0}, {1: 0.9, 4: 1.5}, TokenCosts(member=1e-3, row=1e-4, plain=2e-3)
    )
    assert curve.at_context(CONTEXT, 2) == CostCurve(curve.rows, curve.pipelined)
    long = curve.at_context(CONTEXT + 1000, 2)
    assert [count for count, _ in long.rows] == [1, 4, 16]
    assert [seconds for _, seconds in long.rows] == pytest.approx([1.0 + 1.1, 2.0 + 2.4, 6.0 + 3.6])
    assert [seconds for _, seconds in long.pipelined] == pytest.approx([0.9 + 2.0, 1.5 + 8.0])


@pytest.mark.parametrize("data", BAD)
def test_what_is_no_curve_is_refused(data: Any) -> None:
    with pytest.raises((AttributeError, KeyError, TypeError, ValueError)):
        CostCurve.from_json(data)


@tried(60, 600)
@given(CURVES, st.integers(1, 4), st.integers(1, 4), st.floats(0.0, 1.0))
def test_drafts_below_the_least_chance_are_not_chosen(
    curve: CostCurve, members: int, drafting: int, chance: float
) -> None:
    lengths = choose_lengths([draft(chance, 1.0, 1.0)] * min(drafting, members), curve, members)
    assert not any(lengths) or chance >= least_chance(curve, members, 3) - 1e-9


# -- padded ----------------------------------------------------------------------------------------


def test_members_draft_up_to_the_longest_where_forwards_are_padded() -> None:
    certain, none = [1.0] * 6, list[float]()
    assert choose_padded_lengths([certain, none], FLAT, [0, 0]) == [6, 0]
    assert choose_padded_lengths([certain, certain[:2]], FLAT, [0, 0]) == [6, 2]
    # Each further token costs one for both members, and one of them gains nothing.
    assert choose_padded_lengths([certain, none], FOUR_BITS, [0, 0]) == [0, 0]
    assert choose_padded_lengths([certain], BF16, [0]) == choose_lengths([certain], BF16, 1) == [6]


def test_tokens_that_are_computed_again_leave_less_to_draft() -> None:
    steep = CostCurve.from_points({1: 1.0, 4: 1.05, 5: 5.0})
    certain = [1.0] * 6
    assert [choose_padded_lengths([certain], steep, [n]) for n in (0, 1, 2, 3)] == [
        [3],
        [2],
        [1],
        [0],
    ]
    # Next to three tokens that are computed again, another member drafts at no cost.
    flat = CostCurve.from_points({1: 1.0, 8: 1.05, 9: 9.0})
    assert choose_padded_lengths([[], certain], flat, [3, 0]) == [0, 3]


def test_what_a_rejected_draft_computes_again_is_counted() -> None:
    rising = CostCurve.from_points({1: 1.0, 2: 1.15, 3: 1.3, 16: 3.0})
    assert choose_lengths([[0.25]], rising, 1) == [1]
    assert choose_padded_lengths([[0.25]], rising, [0]) == [0]
    assert choose_padded_lengths([[0.9]], rising, [0]) == [1]


@tried(100, 1000)
@given(DRAFTS, CURVES)
def test_padded_drafts_pay(acceptance: list[list[float]], curve: CostCurve) -> None:
    drafts = [draft(*each) for each in acceptance]
    members, none = len(drafts), [0] * len(drafts)
    lengths = choose_padded_lengths(drafts, curve, none)
    assert lengths in [
        none,
        *([min(len(each), most) for each in drafts] for most in range(1, 4)),
    ]
    if any(lengths):
        padded = members * (1 + max(lengths))
        gain = sum(math.log(1 + sum(c[:n])) for c, n in zip(drafts, lengths, strict=True))
        slower = curve.seconds(padded) / curve.plain_seconds(members)
        assert gain >= members * math.log(LEAST_GAIN * slower) - 1e-9
