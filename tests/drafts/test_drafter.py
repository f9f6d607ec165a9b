"""Drafters: what they guess, when they expect anything, and what they learn."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from thorough import tried

from mlx_blockpool.drafts.draft import NOTHING, Prediction
from mlx_blockpool.drafts.drafter import Drafter
from mlx_blockpool.drafts.index import SuffixIndex

STORY = list(range(100, 140))


def drafter_of(prompt: list[int]) -> Drafter:
    drafter = Drafter(prompt)
    drafter.catch_up(len(prompt))
    return drafter


def test_a_repeated_beginning_is_continued() -> None:
    drafter = drafter_of([*STORY, 7])
    drafter.observe(STORY[:4])
    draft = drafter.propose(STORY[4], 5)
    assert list(draft.tokens) == STORY[5:10]
    assert draft.source == "context"


def test_another_drafter_begins_with_what_all_requests_have_in_common() -> None:
    priors: dict[str, list[float]] = {}
    first = Drafter([*STORY, 7], priors)
    first.catch_up(99)
    first.observe([0, 1, 2, *STORY[:20]])
    other = Drafter([*STORY, 7, 0, 1, 2, *STORY[:20]], priors)
    assert (
        other.sources[0].acceptance.rates
        == priors["context"]
        != Drafter([1]).sources[0].acceptance.rates
    )
    assert (
        other.sources[0].acceptance.prior is first.sources[0].acceptance.prior is priors["context"]
    )


def test_nothing_is_guessed_of_what_has_not_come_before() -> None:
    drafter = drafter_of(STORY)
    drafter.observe([1, 2, 3])
    assert drafter.expects() == 0
    assert drafter.propose(4, 5) == NOTHING


def test_after_a_replaced_token_the_text_continues() -> None:
    drafter = drafter_of([*STORY, 7])
    drafter.observe([*STORY[:6], 9])
    assert list(drafter.propose(STORY[7], 3).tokens) == STORY[8:11]


@pytest.mark.parametrize(
    ("old", "new"),
    [([1], [9]), ([1], [9, 8]), ([1, 2], [9]), ([1, 2], [9, 8, 7])],
    ids=["1 by 1", "1 by 2", "2 by 1", "2 by 3"],
)
def test_what_was_replaced_once_is_guessed_to_be_replaced_again(
    old: list[int], new: list[int]
) -> None:
    parts = [list(range(start, start + 12)) for start in (100, 200, 300, 400)]
    prompt, reply = ([token for part in parts for token in (*part, *run)] for run in (old, new))
    drafter = drafter_of([*prompt, 7])
    # Up to the second part, and of the last of it the next token.
    start = len(parts[0]) + len(new) + len(parts[1]) - 1
    drafter.observe(reply[:start])
    expected = reply[start + 1 : start + 1 + 16]
    draft = drafter.propose(reply[start], 16)
    assert list(draft.tokens) == expected
    # In the midst of what replaces it, too.
    drafter.observe(reply[start : start + 1])
    assert list(drafter.propose(new[0], 4).tokens) == reply[start + 2 : start + 6]
    drafter.observe(new[:1])
    assert list(drafter.propose(reply[start + 2], 4).tokens) == reply[start + 3 : start + 7]


def test_what_is_not_replaced_any_more_is_guessed_as_it_stands() -> None:
    parts = [list(range(start, start + 12)) for start in range(100, 1300, 100)]
    prompt = [token for part in parts for token in (*part, 1)]
    drafter = drafter_of([*prompt, 7])
    drafter.observe([*parts[0], 9, *parts[1]])
    assert drafter.propose(9, 1).tokens == parts[2][:1]
    assert drafter.propose(1, 1).tokens == parts[2][:1]
    drafter.observe([1, *parts[2], 1, *parts[3], 1, *parts[4][:-1]])
    assert list(drafter.propose(parts[4][-1], 3).tokens) == [1, *parts[5][:2]]
    # It is watched, so that it is guessed again once it is replaced again.
    drafter.observe([parts[4][-1], *(token for part in parts[5:11] for token in (9, *part))][:-1])
    assert list(drafter.propose(parts[10][-1], 3).tokens) == [9, *parts[11][:2]]


def test_patches_of_an_image_are_not_drafted() -> None:
    patch = -(2**60) + 12345
    drafter = drafter_of([*STORY[:20], patch, patch, *STORY[20:], 7])
    drafter.observe(STORY[:18])
    assert list(drafter.propose(STORY[18], 16).tokens) == [STORY[19]]
    drafter.observe([STORY[18]])
    assert drafter.propose(STORY[19], 16) == NOTHING


def test_guesses_that_come_true_are_trusted_more() -> None:
    drafter = drafter_of([*STORY, 7])
    drafter.observe(STORY[:4])
    before = drafter.propose(STORY[4], 8).acceptance
    drafter.observe(STORY[4:30])
    after = drafter.propose(STORY[30], 8).acceptance
    assert sum(after) > sum(before)


TOKENS = st.lists(st.integers(1, 4), max_size=60)


@tried(60, 600)
@given(TOKENS, TOKENS, st.integers(1, 4), st.integers(0, 20))
def test_a_draft_is_part_of_the_text_and_its_chances_are_chances(
    prompt: list[int], reply: list[int], next_token: int, at_most: int
) -> None:
    drafter = drafter_of(prompt)
    drafter.observe(reply)
    draft = drafter.propose(next_token, at_most)
    text = [*prompt, *reply]
    assert len(draft) <= at_most
    assert len(draft.acceptance) == len(draft)
    assert all(0 <= chance <= 1 for chance in draft.acceptance)
    assert set(draft.tokens) <= set(text)
    assert 0 <= drafter.expects() <= 1


@tried(50, 500)
@given(TOKENS, TOKENS)
def test_the_outlook_is_that_of_the_next_token_being_as_guessed(
    prompt: list[int], reply: list[int]
) -> None:
    drafter = drafter_of(prompt)
    drafter.observe(reply)
    outlook, chance = drafter.outlook(8), drafter.expects()
    promised = [
        [chance * each for each in drafter.propose(token, 8).chances] for token in range(1, 5)
    ]
    assert all(0 <= later <= earlier for earlier, later in pairwise([chance, *outlook]))
    if outlook and not drafter.sources[0]._replaced:
        assert any(outlook == pytest.approx(each[: len(outlook)]) for each in promised)
    assert drafter.outlook(8, least=chance) == outlook
    assert drafter.outlook(8, least=chance + 0.01) == []


def test_drafted_and_accepted_tokens_are_counted_by_source() -> None:
    drafter = drafter_of([*STORY, 7])
    drafter.observe(STORY[:4])
    draft = drafter.propose(STORY[4], 5)
    drafter.verified(draft, 3)
    drafter.verified(NOTHING, 0)
    assert drafter.counts == {"drafted context": 5, "accepted context": 3}


def test_what_a_client_expects_is_followed_from_its_beginning_and_counted() -> None:
    drafter, prediction = drafter_of([1, 2, 3, *STORY]), Prediction(SuffixIndex(STORY))
    drafter.add_prediction(prediction)
    drafter.catch_up(len(STORY))
    draft = drafter.propose(STORY[0], 4)
    assert (list(draft.tokens), draft.source) == (STORY[1:5], "prediction")
    drafter.verified(draft, 3)
    # The prompt has the same text, and the prediction goes first.
    drafter.observe(STORY[:5])
    assert drafter.propose(STORY[5], 4).source == "prediction"
    drafter.observe([*STORY[5:10], 9, 1, 2])
    other = drafter.propose(3, 2)
    assert (list(other.tokens), other.source) == (STORY[:2], "context")
    drafter.verified(other, 2)
    assert (prediction.accepted, prediction.rejected) == (3, 1)
    assert drafter.counts == {
        "drafted prediction": 4,
        "accepted prediction": 3,
        "drafted context": 2,
        "accepted context": 2,
    }
