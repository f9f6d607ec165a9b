"""What is counted of requests and steps."""

from __future__ import annotations

import pytest

from mlx_blockpool.engine.request import RestoreEnded, Swapped
from mlx_blockpool.prefix.lookup import Lookup
from mlx_blockpool.server.request import RequestOptions
from mlx_blockpool.server.watch.counts import LAST_STEPS, Buckets, Drift, ModelCounts
from mlx_blockpool.server.watch.event_log import EventLog
from mlx_blockpool.server.watch.request_watch import RequestWatch


def test_a_value_is_counted_in_the_first_bucket_that_holds_it() -> None:
    buckets = Buckets((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 9.0):
        buckets.observe(value)
    assert (buckets.counts, buckets.sum) == ([2, 2, 1], 14.0)


def test_hits_are_divided_between_the_tiers_and_misses_between_their_causes() -> None:
    events = EventLog().of_model("m")
    differs = Lookup(1000, 700, 700, "differs", restored=512)
    lookups = ((1000, 700, differs), (100, 99, Lookup(100, 99, 99, "all")), (50, 10, None))
    for tokens, cached, lookup in lookups:
        RequestWatch(events, RequestOptions(), tokens).started(cached, lookup)
    counts = events.counts
    assert (counts.prompt_tokens, counts.hits) == (1150, {"memory": 188 + 99 + 10, "disk": 512})
    assert (counts.misses, counts.missed_tokens) == (
        {"differs": 1, "unknown": 1},
        {"differs": 300, "unknown": 40},
    )


def test_requests_wait_run_and_end() -> None:
    events = EventLog().of_model("m")
    counts = events.counts

    def requests() -> tuple[int, int, int]:
        return counts.num_waiting, counts.num_running, counts.num_ended

    first, second = (RequestWatch(events, RequestOptions(), 10) for _ in range(2))
    assert requests() == (2, 0, 0)
    first.started(4, Lookup(10, 4, 4, "new"))
    assert requests() == (1, 1, 0)
    first.follow(Swapped(1, is_in=False))
    assert requests() == (2, 0, 0)
    first.follow(Swapped(1, is_in=True))
    first.suspended()
    first.suspended()
    assert requests() == (2, 0, 0)
    first.follow(Swapped(1, is_in=True))
    for reason in (None, None, "length"):
        first.token(reason, is_forced=True)
    assert requests() == (1, 0, 1)
    second.ended("abort")
    second.ended("error")
    assert requests() == (0, 0, 2)
    assert (counts.ended, counts.swaps) == ({"length": 1, "abort": 1}, {"out": 2, "in": 2})
    assert (
        counts.generated_tokens,
        sum(counts.first_token.counts),
        sum(counts.between_tokens.counts),
    ) == (3, 1, 2)
    assert (sum(counts.whole.counts), sum(counts.queued.counts), counts.prompt_tokens) == (2, 1, 10)


def test_a_request_that_starts_again_is_counted_once() -> None:
    events = EventLog().of_model("m")
    watch = RequestWatch(events, RequestOptions(), 10)
    watch.started(4, None)
    watch.suspended()
    watch.started(9, None)
    assert (events.counts.prompt_tokens, events.counts.num_running) == (10, 1)
    watch.follow(RestoreEnded(1, 256, 1000))
    assert (
        events.counts.num_restores,
        events.counts.restored_tokens,
        events.counts.restored_bytes,
    ) == (1, 256, 1000)


def test_a_model_keeps_its_counts_through_its_loads() -> None:
    log = EventLog()
    assert log.of_model("a") is log.of_model("a")
    assert log.of_model("a").counts is not log.of_model("b").counts


def test_steps_are_told_apart_by_what_the_engine_has_counted() -> None:
    counts = ModelCounts()
    counts.paths = {"ragged": 4, "shared": 2}
    counts.count_step({"chunks": 1, "decode_steps": 0, "tokens": 0}, 3.0)
    counts.count_step({"chunks": 1, "decode_steps": 1, "tokens": 8}, 0.8)
    counts.paths = {"ragged": 8, "shared": 2}
    counts.count_step({"chunks": 1, "decode_steps": 2, "tokens": 12}, 0.8)
    counts.count_step({"chunks": 1, "decode_steps": 2, "tokens": 12}, 9.0)
    assert (counts.steps["prefill"].sum, counts.steps["decode"].sum) == (3.0, 1.6)
    assert set(counts.drifts) == {"ragged", "shared"}
    assert counts.drifts["ragged"].ratio == counts.drifts["shared"].ratio == 1.0


def test_seconds_saved_are_cached_tokens_times_the_measured_seconds_of_a_computed_one() -> None:
    events = EventLog().of_model("m")
    counts = events.counts
    RequestWatch(events, RequestOptions(), 1000).started(700, None)
    assert counts.seconds_saved == 0.0
    engine = {"chunks": 1, "mixed": 0, "tokens": 1, "prompt_tokens": 300}
    counts.count_step(engine, 1.5)
    assert counts.seconds_saved == 700 * 1.5 / 300
    # Of a mixed step, the seconds of the rows of the prompt.
    counts.count_step({"chunks": 2, "mixed": 1, "tokens": 5, "prompt_tokens": 396}, 1.0)
    assert counts.seconds_saved == 700 * (1.5 + 0.96) / (300 + 96)


def test_the_jumps_of_all_engines_are_counted() -> None:
    counts, before = ModelCounts(), {"chunks": 0, "decode_steps": 0, "tokens": 0}
    for jumps in (2, 5, 0, 1):
        counts.count_step({**before, "jumps": jumps}, 0.1)
    assert counts.jumps == 6


def test_the_drafts_of_all_engines_are_counted_by_source() -> None:
    counts, before = ModelCounts(), {"chunks": 0, "decode_steps": 0, "tokens": 0}
    counts.count_step(
        {**before, "verifications": 1, "drafted context": 4, "accepted context": 3}, 0.1
    )
    counts.count_step(
        {
            **before,
            "verifications": 2,
            "drafted context": 4,
            "accepted context": 3,
            "drafted prefix": 8,
        },
        0.1,
    )
    assert (counts.verifications, counts.drafted, counts.accepted) == (
        2,
        {"context": 4, "prefix": 8},
        {"context": 3},
    )
    # A new engine, whose first verification is seen with its first step or later.
    counts.count_step(
        {**before, "verifications": 1, "drafted context": 5, "accepted context": 1}, 0.1
    )
    counts.count_step(before, 0.1)
    counts.count_step(
        {**before, "verifications": 1, "drafted context": 7, "accepted context": 7}, 0.1
    )
    assert (counts.verifications, counts.drafted, counts.accepted) == (
        4,
        {"context": 16, "prefix": 8},
        {"context": 11},
    )


@pytest.mark.parametrize("more", [{"jumps": 3}, {"verifications": 1}])
def test_a_step_of_several_tokens_is_no_measure_of_drift(more: dict[str, int]) -> None:
    counts = ModelCounts()
    # More than are averaged lately.
    for step in range(1, 2 * LAST_STEPS):
        counts.paths = {"ragged": step}
        counts.count_step({"chunks": 0, "decode_steps": step, "tokens": 8 * step, "jumps": 0}, 0.5)
    counts.paths = {"ragged": 2 * LAST_STEPS}
    counts.count_step(
        {"chunks": 0, "decode_steps": 2 * LAST_STEPS, "tokens": 16 * LAST_STEPS + 92, **more}, 20.0
    )
    assert (counts.drifts["ragged"].ratio, counts.steps["decode"].sum) == (
        1.0,
        LAST_STEPS - 0.5 + 20.0,
    )


def test_drift_shows_steps_that_take_longer_than_they_did() -> None:
    drift = Drift()
    assert drift.ratio == 1.0
    for _ in range(1000):
        drift.observe(0.01)
    assert drift.ratio == pytest.approx(1.0)
    for _ in range(4 * LAST_STEPS):
        drift.observe(0.02)
    assert 1.5 < drift.ratio < 2.0
