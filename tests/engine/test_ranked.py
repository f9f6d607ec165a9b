"""The engines of two ranks, as threads: what only rank 0 knows, what it costs to agree, and what
ends the group.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
from engine.engines import Told, assert_nothing_held, assert_stock, words
from engine.forms import PERSON, STOP, form_of
from engine.ranked_engines import CONFIG, Plan, Rank, make_rank, run_ranked
from engine.test_forms import requests, serve_all
from engine.test_requests import after, no
from mlx_lm.generate import StopSequences
from models import make_model
from ranks.threads import ThreadRanks, joined, on_ranks

from mlx_blockpool.config import EngineConfig, RankConfig
from mlx_blockpool.engine.request import Failed, Request
from mlx_blockpool.errors import GroupLostError, RequestTooLargeError
from mlx_blockpool.ranks.driver import GroupDriver
from mlx_blockpool.ranks.facts import Cancel, Fail, Insert, read, write
from mlx_blockpool.ranks.head import Head

N_BYTES = 4_000_000
# The steps of one rank hang on the time that each takes, unless prompts go first.
BY_COUNT = EngineConfig(prefill_tokens=128, decode_share=0.0)


@functools.cache
def plain_model(rank: int) -> Any:
    return make_model("llama")


class Arrivals(Plan):
    """Requests that are inserted before a turn."""

    def __init__(self, given: dict[int, list[Request]]) -> None:
        self.given = given
        self.uids: list[int] = []

    def come(self, driver: GroupDriver, turn: int) -> bool:
        self.uids += driver.insert_all(self.given.pop(turn, []))
        return bool(self.given)


def run(requests: list[Request]) -> tuple[list[int], Told, list[Rank]]:
    plan = Arrivals({0: requests})
    found = run_ranked(2, plan, lambda ranks: make_rank(ranks, "llama", N_BYTES, BY_COUNT))
    for rank in found:
        assert_nothing_held(rank.prefix)
    return plan.uids, found[0].told, found


def alone() -> Rank:
    """Rank 0 of a group that is not there."""
    return make_rank(joined(2)[0], "llama", N_BYTES, EngineConfig())


@pytest.mark.parametrize("seed", [pytest.param(None, marks=pytest.mark.thorough), 5])
def test_replies_in_forms_jump_on_both_ranks_as_on_one(seed: int | None) -> None:
    one, expected, _ = serve_all("llama", requests(seed), decode_share=0.0)
    uids, told, ranks = run(requests(seed))
    assert [told.tokens[uid] for uid in uids] == expected
    for rank in ranks:
        assert rank.engine.counts == one.counts
    assert one.counts["jumps"] > 0


@pytest.mark.parametrize("who", ["sampler", pytest.param("processor", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("count", [pytest.param(0, marks=pytest.mark.thorough), 3])
def test_what_raises_on_rank_0_fails_its_request_alone_on_all(who: str, count: int) -> None:
    sampler = None if who == "processor" else after(count, no)
    processors = [] if who == "sampler" else [after(count, no)]
    prompts = [words(i, 30 + i) for i in range(3)]
    given = [Request(prompt, 8) for prompt in prompts]
    given[1] = Request(prompts[1], 8, sampler, processors)
    uids, told, ranks = run(given)
    assert list(told.failed) == [uids[1]]
    assert (type(told.failed[uids[1]]), told.failed[uids[1]].__traceback__) == (KeyError, None)
    assert len(told.tokens.get(uids[1], [])) == max(0, count - 1)
    for i in (0, 2):
        assert len(told.tokens[uids[i]]) == 8
        assert_stock("llama", prompts[i], told.tokens[uids[i]])
    assert [rank.engine.sequences for rank in ranks] == [[], []]


def test_a_request_that_ends_before_its_error_is_known_has_failed() -> None:
    (uid,), told, _ = run([Request(words(1, 30), 4, after(3, no))])
    assert list(told.failed) == [uid]
    assert len(told.tokens[uid]) == 2


def test_a_step_costs_one_draw_and_several_share_an_exchange() -> None:
    def count(ranks: ThreadRanks) -> tuple[Rank, dict[str, int]]:
        rank = make_rank(ranks, "llama", N_BYTES, EngineConfig())
        uids = (
            rank.driver.insert_all([Request(words(i, 40), 21) for i in range(3)])
            if ranks.rank == 0
            else []
        )
        while not rank.leases or len(rank.driver):
            take_turn(rank)
        assert all(len(rank.told.tokens[uid]) == 21 for uid in uids)
        return rank, dict(ranks.calls)

    for rank, calls in on_ranks(2, count):
        assert calls["draw"] == rank.engine.counts["decode_steps"] == 22
        assert "least" not in calls
        # Prefill, and then as many steps at a time as a lease has.
        assert calls["exchange"] == 1 + math.ceil(22 / CONFIG.most_turns)


def take_turn(rank: Rank) -> None:
    ranks, driver = rank.ranks, rank.driver
    head = Head(turns=driver.lease_for(0.001, CONFIG))
    sent = ranks.exchange(head, write([("", fact) for fact in driver.outgoing()]))
    driver.apply([fact for each in sent for _, fact in read(each.mail)])
    for step in range(sent[0].head.turns):
        if step == 0 or driver.is_steady:
            rank.told.take(driver.next())
            rank.leases[step] += 1


def test_an_error_on_one_rank_ends_the_group_on_all() -> None:
    errors = []

    def act(ranks: ThreadRanks) -> None:
        rank = make_rank(ranks, "llama", N_BYTES, EngineConfig())
        rank.driver.apply([Insert(1, tuple(words(1, 40)), 8)])
        if ranks.rank == 1:
            rank.engine.model = rank.engine.scheduler.batch.model = lambda *_, **__: no()
        try:
            while True:
                rank.driver.next()
        except GroupLostError as error:
            errors.append(str(error))
        assert ranks.is_lost

    on_ranks(2, act)
    assert len(errors) == 2
    assert any("somebody else's code" in error for error in errors)
    assert all("send the request again" in error for error in errors)


def test_requests_and_hang_ups_take_effect_when_they_are_applied() -> None:
    driver = alone().driver
    kept, left = driver.insert_all([Request(words(i, 40), 8) for i in range(2)])
    driver.cancel(left)
    assert (len(driver), driver.engine.sequences, driver.is_blocked) == (2, [], False)
    facts = driver.outgoing()
    assert [(type(fact), fact.uid) for fact in facts] == [
        (Insert, kept),
        (Insert, left),
        (Cancel, left),
    ]
    assert driver.outgoing() == []
    driver.apply(facts)
    assert (len(driver), [sequence.uid for sequence in driver.engine.sequences]) == (1, [kept])


def test_a_request_is_the_same_on_another_rank_but_for_what_draws_its_tokens() -> None:
    first, second = (
        make_rank(ranks, "llama", N_BYTES, EngineConfig()).driver for ranks in joined(2)
    )
    given = Request(
        words(1, 40),
        8,
        stop=StopSequences([(1, 2, 3), (2, 3), (7,)]),
        breakpoints=[(4, "system")],
        agent="ann",
        noted_as="bob",
        pins=[(4, 60.0)],
        retention="day",
        group="g",
        priority=3,
        salt=bytes(range(32)),
        form=form_of(PERSON),
    )
    first.insert_all([given, given])
    facts = [fact for _, fact in read(write([("", fact) for fact in first.outgoing()]))]
    first.apply(facts)
    second.apply(facts)
    for own, other in zip(first.engine.sequences, second.engine.sequences, strict=True):
        assert other.request.form is None
        assert (own.due, own.breakpoints, own.pins, own.policy) == (
            other.due,
            other.breakpoints,
            other.pins,
            other.policy,
        )
        assert (own.request.name, own.request_key, own.request.priority) == (
            other.request.name,
            other.request_key,
            other.request.priority,
        )
    # Choices share the list of their prompt.
    assert second.engine.sequences[0].request.tokens is second.engine.sequences[1].request.tokens
    matchers = [each.engine.sequences[0].request.stop.matcher() for each in (first, second)]
    for token in (1, 2, 3, 1, 7, 2, 2, 3):
        stops = [matcher.advance(token) for matcher in matchers]
        assert stops[0] == stops[1]


def test_what_a_group_cannot_do_is_refused() -> None:
    driver = alone().driver
    with pytest.raises(RequestTooLargeError):
        driver.insert(Request(words(1, 40), 10**6))
    assert (len(driver), driver.outgoing()) == (0, [])


def test_leases_are_of_one_step_where_facts_are_about_to_come() -> None:
    def act(ranks: ThreadRanks) -> list[int]:
        driver, leases = (
            make_rank(ranks, "llama", N_BYTES, EngineConfig(prefill_tokens=128)).driver,
            [],
        )
        config = RankConfig(lease_seconds=0.02, most_turns=16)
        driver.apply([Insert(1, tuple(words(1, 200)), 30)])
        for _ in range(4):
            leases.append(driver.lease_for(0.001, config))
            driver.next()
        leases += [driver.lease_for(seconds, config) for seconds in (0.0, 0.005, 1.0)]
        if ranks.rank == 0:
            driver.insert(Request(words(2, 30), 8, form=form_of(PERSON), stop=STOP))
            leases.append(driver.lease_for(0.001, config))
            driver.apply(driver.outgoing())
            leases.append(driver.lease_for(0.001, config))
        return leases

    first, second = on_ranks(2, act)
    assert second == [1, 1, 16, 16, 16, 4, 1]
    assert first == [*second, 1, 1]


def test_a_request_that_is_dropped_while_its_model_is_unloaded_is_not_kept() -> None:
    rank = alone()
    uid = rank.driver.insert(Request(words(1, 40), 8))
    rank.driver.apply(rank.driver.outgoing())
    assert [sequence.uid for sequence in rank.swap()] == [uid]
    assert list(rank.suspended) == [uid]
    rank.driver.apply([Cancel(uid)])
    assert rank.suspended == {}


def test_uids_of_suspended_requests_do_not_come_again() -> None:
    rank = alone()
    given = rank.driver.insert_all([Request(words(i, 40), 8) for i in range(3)])
    rank.driver.apply(rank.driver.outgoing())
    first, *others = rank.swap()
    new, resumed = rank.driver.insert(Request(words(4, 40), 8)), rank.driver.resume(first)
    assert not {new, resumed} & set(given)
    rank.driver.apply(rank.driver.outgoing())
    assert {sequence.uid for sequence in rank.engine.sequences} == {resumed, new}
    assert list(rank.suspended) == [sequence.uid for sequence in others]


def test_an_engine_that_is_reset_has_lost_the_requests_that_were_about_to_come_too() -> None:
    driver = alone().driver
    uids = driver.insert_all([Request(words(i, 40), 8) for i in range(2)])
    assert driver.reset() == uids
    assert (len(driver), driver.outgoing()) == (0, [])


def test_a_fact_about_a_request_that_has_ended_changes_nothing() -> None:
    rank = alone()
    before = rank.driver.fingerprint()
    rank.driver.apply([Cancel(7), Fail(7)])
    assert rank.driver.fingerprint() == before


def test_fingerprints_differ_where_ranks_do() -> None:
    drivers = [make_rank(ranks, "llama", N_BYTES, EngineConfig()).driver for ranks in joined(2)]
    for driver in drivers:
        driver.apply([Insert(1, tuple(words(1, 40)), 8)])
    assert drivers[0].fingerprint() == drivers[1].fingerprint()
    drivers[1].apply([Insert(2, tuple(words(1, 40)), 8)])
    assert drivers[0].fingerprint() != drivers[1].fingerprint()


def test_what_facts_have_ended_is_told_by_an_engine_that_takes_no_further_step() -> None:
    driver = alone().driver
    failed, kept = driver.insert_all([Request(words(i, 40), 8) for i in range(2)])
    driver.apply([*driver.outgoing(), Fail(failed)])
    assert [(type(event), event.uid) for event in driver.take_events()] == [(Failed, failed)]
    assert driver.take_events() == []
    assert [sequence.uid for sequence in driver.suspend()] == [kept]
