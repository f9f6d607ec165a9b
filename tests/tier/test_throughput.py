"""Rates: what was measured last counts most, and decides whether a prompt is read or computed."""

from __future__ import annotations

import pytest

from mlx_blockpool.config import StoreConfig
from mlx_blockpool.tier.restore import Busy, Rate, Rates

MB = 10**6


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_rate_is_unknown_until_it_is_measured() -> None:
    rate = Rate()
    assert rate.per_second is None
    rate.add(0, 1.0)
    rate.add(5, 0.0)
    assert rate.per_second is None
    rate.add(100, 0.5)
    assert rate.per_second == 200


def test_the_last_measurements_count_most() -> None:
    rate = Rate()
    rate.add(1000, 1)
    for _ in range(20):
        rate.add(100, 1)
    assert rate.per_second == pytest.approx(100, rel=0.03)


def test_short_measurements_count_little() -> None:
    """A chunk of one token takes as long as one of many."""
    rate = Rate()
    rate.add(2000, 1.0)
    rate.add(1, 0.01)
    assert rate.per_second == pytest.approx(2000, rel=0.02)


def test_what_happens_at_a_time_is_counted_once() -> None:
    busy = Busy()
    busy.between(1, 3)
    busy.between(2, 4, 10)
    busy.between(1.5, 3.5)
    assert (busy.seconds, busy.amount) == (3, 10)
    # Nothing went on until 10.
    busy.between(10, 11, 5)
    assert (busy.seconds, busy.amount) == (4, 15)


def test_unknown_rates_restore(clock: Clock) -> None:
    rates = Rates(clock)
    assert rates.is_worth_reading(10**12, 1)
    rates.computed(10**6, 1)
    assert rates.is_worth_reading(10**12, 1)
    assert Rates(clock).report() == {"prefill_tokens_per_s": None, "restore_bytes_per_s": None}


def test_a_fast_disk_restores(clock: Clock) -> None:
    rates = Rates(clock)
    rates.computed(500, 1)
    rates.restored(2000 * MB, 1)
    assert rates.report() == {"prefill_tokens_per_s": 500.0, "restore_bytes_per_s": 2000 * MB}
    assert rates.is_worth_reading(1000 * MB, 8192)
    assert not rates.is_worth_reading(1000 * MB, 200)


def test_a_slow_disk_beside_a_fast_model_computes(clock: Clock) -> None:
    rates = Rates(clock)
    rates.computed(8000, 1)
    rates.restored(50 * MB, 1)
    assert not rates.is_worth_reading(1000 * MB, 8192)
    rates.computed(100, 30)
    assert rates.is_worth_reading(1000 * MB, 8192)


def test_a_slow_disk_is_tried_again_and_used_once_it_is_fast(clock: Clock) -> None:
    rates = Rates(clock)
    rates.computed(8000, 1)
    rates.restored(50 * MB, 1)
    clock.now += StoreConfig.slow_seconds
    assert not rates.is_worth_reading(1000 * MB, 8192)
    clock.now += 1
    assert rates.is_worth_reading(1000 * MB, 8192)
    # It is as slow as before.
    rates.restored(1000 * MB, 20)
    assert not rates.is_worth_reading(1000 * MB, 8192)
    clock.now += StoreConfig.slow_seconds + 1
    rates.restored(1000 * MB, 0.5)
    assert rates.is_worth_reading(1000 * MB, 8192)
