"""The guesses of a prediction head as a source of drafts."""

from __future__ import annotations

from typing import Any

import pytest

from mlx_blockpool.drafts.curve import CostCurve
from mlx_blockpool.drafts.drafting import Drafting
from mlx_blockpool.drafts.head_source import HEAD_ASSUMED, HeadSource

FLAT = CostCurve.from_points({1: 1.0, 2: 1.01, 4: 1.02, 8: 1.04, 16: 1.1})
STEEP = CostCurve.from_points({1: 1.0, 2: 2.0, 4: 4.0, 8: 8.0, 16: 16.0})
PROMPT = list(range(20))


def drafting(curve: CostCurve | None = FLAT, drafts: Any = "auto") -> Drafting:
    return Drafting(drafts, curve=curve, has_head=True)


def test_guesses_are_drafted_after_the_token_that_they_follow() -> None:
    source = HeadSource(list(HEAD_ASSUMED))
    source.propose(7, [8, 9, 10])
    assert list(source.guess(7, 2).tokens) == [8, 9]
    assert len(source.guess(6, 2)) == 0


def test_each_guess_is_learned_from_once_until_one_is_wrong() -> None:
    source = HeadSource(list(HEAD_ASSUMED))
    rates = [source.outlook(1)[0]]
    source.propose(7, [8, 9, 10])
    for token in (7, 8, 5, 10):
        source.observe(token)
        rates.append(source.outlook(1)[0])
    unlearned, emitted, right, wrong, after = rates
    assert unlearned == emitted < right
    assert right > wrong == after
    assert len(source.guess(7, 2)) == 0


def test_what_a_request_has_shown_is_forgotten_without_guesses() -> None:
    source = HeadSource(list(HEAD_ASSUMED), memory=30)
    for _ in range(20):
        source.propose(7, [8])
        source.observe(7)
        source.observe(5)
    assert source.outlook(1)[0] < 0.1
    for token in range(30):
        source.observe(token)
    assert source.outlook(1)[0] > 0.5


def test_the_head_guesses_where_that_pays_and_not_where_it_costs_too_much() -> None:
    assert drafting().num_guesses([drafting().drafter(PROMPT)]) > 0
    assert drafting(STEEP).num_guesses([drafting(STEEP).drafter(PROMPT)]) == 0
    slow = drafting()
    slow.note_guesses(1, 4, 8.0)
    assert slow.num_guesses([slow.drafter(PROMPT)]) == 0
    assert not slow.expects([slow.drafter(PROMPT)])


@pytest.mark.parametrize(("drafts", "expected"), [(3, 3), (0, 0)])
def test_a_fixed_number_of_guesses_costs_what_it_costs(drafts: int, expected: int) -> None:
    fixed = drafting(None, drafts)
    assert fixed.num_guesses([fixed.drafter(PROMPT)]) == expected
    assert fixed.expects([fixed.drafter(PROMPT)]) == (expected > 0)


def test_the_head_is_left_alone_where_a_text_promises_more() -> None:
    own = drafting()
    drafter = own.drafter([*range(40), 0])
    drafter.catch_up(100)
    drafter.observe(range(1, 30))
    assert own.num_guesses([drafter]) == 0
    assert own.expects([drafter])


def test_a_model_without_a_head_guesses_nothing() -> None:
    own = Drafting("auto", curve=FLAT)
    assert own.num_guesses([own.drafter(PROMPT)]) == 0
