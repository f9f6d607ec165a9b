"""AcceptanceRates: what one guess tells of others, in its request and in later ones."""

from __future__ import annotations

import pytest

from mlx_blockpool.drafts.acceptance import ASSUMED, LONG_MEMORY, REPLACED, AcceptanceRates
from mlx_blockpool.drafts.index import LONGEST


@pytest.mark.parametrize("is_right", [True, False])
def test_guesses_after_long_matches_count_for_those_after_short_ones(is_right: bool) -> None:
    acceptance = AcceptanceRates()
    for _ in range(4):
        acceptance.learn(LONGEST, is_right)
    *rates, replaced = zip(acceptance.rates, ASSUMED, strict=True)
    assert all((now > before) == is_right for now, before in rates)
    assert replaced[0] == pytest.approx(replaced[1])
    acceptance.learn(REPLACED, not is_right)
    assert (acceptance.chance(REPLACED) > ASSUMED[-1]) == (not is_right)
    assert acceptance.rates[:-1] == [now for now, _ in rates]


def test_a_file_that_is_copied_is_trusted_after_few_tokens_after_the_first_change() -> None:
    acceptance = AcceptanceRates()
    for length in range(12, 24):
        acceptance.learn(length, True)
    acceptance.learn(24, False)
    assert acceptance.chance(1) > 1.3 * ASSUMED[1]
    # Chance hits in a fresh text are not.
    fresh = AcceptanceRates()
    for length, is_right in ((3, True), (4, False), (4, False)) * 4:
        fresh.learn(length, is_right)
    assert fresh.chance(1) < 1.1 * ASSUMED[1]


def test_a_bucket_follows_its_own_guesses_in_the_end() -> None:
    acceptance = AcceptanceRates()
    for _ in range(100):
        acceptance.learn(LONGEST, True)
        acceptance.learn(3, False)
    assert acceptance.chance(LONGEST) > 0.9
    assert acceptance.chance(3) < 0.1


def test_later_requests_start_from_what_all_have_shown() -> None:
    first = AcceptanceRates()
    for _ in range(3):
        first.learn(3, True)
    second = AcceptanceRates(first.prior)
    assert second.chance(3) == pytest.approx(1 - (1 - ASSUMED[3]) * (1 - 1 / LONG_MEMORY) ** 3)
    assert second.chance(4) == ASSUMED[4]


def test_what_was_always_right_can_be_doubted() -> None:
    acceptance = AcceptanceRates([1.0] * len(ASSUMED))
    for _ in range(30):
        acceptance.learn(3, False)
    assert acceptance.chance(3) < 0.2
