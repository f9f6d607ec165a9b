"""The sources of plugins: asked where that pays, and never to the harm of a request."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from mlx_blockpool.drafts.acceptance import Acceptance
from mlx_blockpool.drafts.asked import (
    MEAN_OF,
    MOST_SECONDS,
    MOST_SECONDS_TO_BEGIN,
    MOST_SLOW,
    PROBE_EVERY,
    PROBED_TOKENS,
    AskedSource,
)
from mlx_blockpool.drafts.curve import CostCurve
from mlx_blockpool.drafts.draft import NOTHING, DraftSource, Guess
from mlx_blockpool.drafts.drafting import Drafting


class Counting:
    """Guesses that each token is the one before it and 1, and every `wrong`-th of them is not. Keeps what it was asked."""

    name = "counting"

    def __init__(self, wrong: int = 0) -> None:
        self.seen: list[int] = []
        self.asked: list[tuple[int, int]] = []
        self.wrong = wrong

    def observe(self, tokens: Sequence[int]) -> None:
        self.seen += tokens

    def guess(self, next_tokens: Sequence[int], at_most: int) -> Guess | None:
        last = [*self.seen, *next_tokens][-1]
        self.asked.append((last, at_most))
        tokens = range(last + 1, last + 1 + at_most + 5)
        return Guess([-1 if self.wrong and token % self.wrong == 0 else token for token in tokens])


class Slow(Counting):
    """Takes so many seconds to observe a token and, one after the other, to guess; then none."""

    def __init__(self, guesses: Sequence[float] = (), observing: float = 0.0, now: list[float] | None = None) -> None:
        super().__init__()
        self.guesses, self.observing = list(guesses), observing
        self.now = [0.0] if now is None else now

    def clock(self) -> float:
        return self.now[0]

    def observe(self, tokens: Sequence[int]) -> None:
        super().observe(tokens)
        self.now[0] += self.observing

    def guess(self, next_tokens: Sequence[int], at_most: int) -> Guess | None:
        self.now[0] += self.guesses.pop(0) if self.guesses else 0.0
        return super().guess(next_tokens, at_most)


def clock_of(seconds: float) -> Iterator[float]:
    now = 0.0
    while True:
        yield now
        now += seconds


def asked_of(source: DraftSource, seconds: float = 1e-6) -> AskedSource:
    ticks = clock_of(seconds)
    return AskedSource(source, Acceptance(), lambda: next(ticks))


def test_a_source_is_probed_now_and_then_and_learned_from() -> None:
    source = Counting()
    asked = asked_of(source)
    assert asked.chance == 0
    for token in range(1, PROBE_EVERY + 3):
        asked.observe(token)
    assert source.asked == [(1, PROBED_TOKENS), (1 + PROBE_EVERY, PROBED_TOKENS)]
    assert source.seen == list(range(1, PROBE_EVERY + 3))
    assert asked.chance > Acceptance().chance(0)
    assert asked.acceptance.chance(3) > Acceptance().chance(3)


def test_a_guess_is_what_the_source_guesses_and_no_longer_than_it_is_likely() -> None:
    source = Counting()
    asked = asked_of(source)
    for token in range(1, 9):
        asked.observe(token)
    draft = asked.guess(9, 16)
    assert draft.source == "counting"
    assert list(draft.tokens) == list(range(10, 10 + len(draft)))
    assert 1 <= len(draft) < 16
    for start in range(10, 400, 10):
        asked.guess(start - 1, 16)
        for token in range(start - 1, start + 9):
            asked.observe(token)
    assert source.asked[-1][1] > len(draft)


def test_a_guess_is_compared_behind_the_token_that_was_known() -> None:
    asked = asked_of(Counting(wrong=7))
    asked.observe(1)
    before = asked.acceptance.rates[:3]
    asked.guess(2, 16)
    for token in (2, 3, 4):
        asked.observe(token)
    assert asked.acceptance.chance(0) > before[0]


def test_slow_sources_are_not_asked_for_drafts() -> None:
    curve = CostCurve.of({1: 1.0, 2: 1.05, 64: 1.1})
    for seconds, pays in ((0.001, True), (4.0, False)):
        drafting = Drafting(curve=curve, factories=[lambda prompt: Counting()])
        drafter = drafting.drafter([1])
        ticks = clock_of(seconds)
        drafter.asked[0]._clock = lambda ticks=ticks: next(ticks)  # type: ignore[misc]
        for token in range(2, 400):
            drafter.observe([token])
        assert drafting.expects([drafter]) is pays


def test_the_first_guess_may_compute_the_prompt() -> None:
    source = Slow(guesses=[4.0, 0.04, 0.4])
    asked = AskedSource(source, Acceptance(), source.clock)
    found = []
    for token in range(1, 2 + 2 * PROBE_EVERY):
        asked.observe(token)
        found.append(asked.seconds)
    expected = [4.0, 0.04, 0.04 + (0.4 - 0.04) / MEAN_OF]
    assert [found[0], found[PROBE_EVERY], found[-1]] == pytest.approx([seconds / PROBED_TOKENS for seconds in expected])
    assert (found[0], found[PROBE_EVERY]) == (found[PROBE_EVERY - 1], found[2 * PROBE_EVERY - 1])


@pytest.mark.parametrize(
    ("times", "allowed"),
    [
        ({"guesses": [MOST_SECONDS_TO_BEGIN, MOST_SECONDS, MOST_SECONDS]}, True),
        ({"observing": MOST_SECONDS}, True),
        ({"guesses": [1.01 * MOST_SECONDS_TO_BEGIN]}, False),
        ({"guesses": [0.0, 1.01 * MOST_SECONDS]}, False),
        ({"observing": 1.01 * MOST_SECONDS}, False),
    ],
)
def test_a_source_that_takes_too_long_drafts_no_more(
    times: dict[str, Any], allowed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    source, noted = Slow(**times), list[str]()
    asked = AskedSource(source, Acceptance(), source.clock, lambda: noted.append("slow"))
    for token in range(1, 2 * PROBE_EVERY):
        asked.observe(token)
    assert (noted, len(caplog.records)) == (([], 0) if allowed else (["slow"], 1))
    assert (asked.chance > 0) is allowed
    if not allowed:
        assert "Draft source counting took" in caplog.text
        assert (asked.guess(500, 4), len(source.seen)) == (NOTHING, len(source.seen))


def test_the_sources_of_a_factory_that_are_too_slow_again_and_again_are_made_no_more(caplog: pytest.LogCaptureFixture) -> None:
    now, made = [0.0], list[DraftSource]()

    def make(prompt: Sequence[int]) -> DraftSource:
        made.append(Slow(guesses=[9.0], now=now))
        return made[-1]

    drafting = Drafting(2, factories=[make, lambda prompt: Counting()], clock=lambda: now[0])
    for number in range(1, MOST_SLOW + 3):
        drafter = drafting.drafter([1, 2])
        drafter.observe([3, 4])
        assert [source.chance > 0 for source in drafter.asked] == ([False, True] if number <= MOST_SLOW else [True])
    assert len(made) == MOST_SLOW
    assert caplog.text.count("It is made for no more of this model") == 1


def test_a_factory_that_takes_too_long_counts_too() -> None:
    now, made = [0.0], list[int]()

    def make(prompt: Sequence[int]) -> None:
        made.append(1)
        now[0] += 1.01 * MOST_SECONDS_TO_BEGIN

    drafting = Drafting(2, factories=[make], clock=lambda: now[0])
    for _ in range(MOST_SLOW + 2):
        assert drafting.drafter([1]).asked == []
    assert len(made) == MOST_SLOW


class Failing(Counting):
    name = "failing"

    def __init__(self, fails: str) -> None:
        super().__init__()
        self.fails = fails

    def observe(self, tokens: Sequence[int]) -> None:
        if self.fails == "observe":
            raise RuntimeError("no memory")
        super().observe(tokens)

    def guess(self, next_tokens: Sequence[int], at_most: int) -> Guess | None:
        if self.fails == "guess":
            raise RuntimeError("no memory")
        return Guess(["x"]) if self.fails == "nonsense" else None  # type: ignore[list-item]


@pytest.mark.parametrize("fails", ["observe", "guess", "nonsense"])
def test_a_source_that_fails_drafts_no_more(fails: str, caplog: pytest.LogCaptureFixture) -> None:
    asked = asked_of(Failing(fails))
    with caplog.at_level(logging.WARNING):
        for token in range(1, 5):
            asked.observe(token)
    assert len(caplog.records) == 1
    assert "Draft source failing raised" in caplog.text
    assert asked.guess(5, 4) == NOTHING
    assert asked.outlook(4) == []


def test_a_source_without_a_guess_drafts_nothing() -> None:
    asked = asked_of(Failing("never"))
    asked.observe(1)
    assert asked.guess(2, 4) == NOTHING


def test_a_request_does_without_a_source_that_cannot_be_made(caplog: pytest.LogCaptureFixture) -> None:
    def fails(prompt: Sequence[int]) -> DraftSource:
        raise RuntimeError("no memory")

    drafting = Drafting(2, factories=[fails, lambda prompt: object(), lambda prompt: None, lambda prompt: Counting()])  # type: ignore[arg-type, list-item, return-value]
    drafter = drafting.drafter([1, 2])
    assert "A draft source raised RuntimeError: no memory" in caplog.text
    assert "A draft source raised AttributeError: 'object' object has no attribute 'name'" in caplog.text
    assert [source.name for source in drafter.asked] == ["counting"]
    drafter.observe([3])
    assert drafting.expects([drafter])
    (draft,) = drafting.propose([drafter], [4], [9])
    assert (draft.source, draft.tokens[0]) == ("counting", 5)
    assert len(draft) <= 2
