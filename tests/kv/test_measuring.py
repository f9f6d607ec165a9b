"""What steps cost on this device: which steps are measured, that they take turns, and that
nothing of it stays.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import astuple, replace
from statistics import median
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from architectures import pooled
from models import make_model
from thorough import only

from mlx_blockpool.errors import PoolExhaustedError, UnmeasurableError
from mlx_blockpool.kv import measuring
from mlx_blockpool.kv.arena import KVArena
from mlx_blockpool.kv.build import attach, describe, open_pool
from mlx_blockpool.kv.measuring import Scratch, Stopwatch, measure_curve, readings
from mlx_blockpool.kv.prompt_cache import make_prompt_cache


@pytest.fixture
def few_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each case is measured once."""
    for name, value in (("ROUNDS", 1), ("ROWS", (1, 2, 20)), ("MEMBERS", (1, 2))):
        monkeypatch.setattr(measuring, name, value)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time in seconds, which only tests advance."""
    now = [0.0]
    monkeypatch.setattr(measuring.time, "perf_counter", lambda: now[0])
    return now


def taking(seconds: float, clock: list[float], ran: list[Any], name: Any) -> Callable[[], float]:
    def run() -> float:
        clock[0] += seconds
        ran.append(name)
        return seconds + ran.count(name)

    return run


def medians_of(*given: Any, **more: Any) -> dict[Any, float]:
    return {case: median(taken) for case, taken in readings(*given, **more).items()}


def test_cases_take_turns_and_the_first_run_of_each_does_not_count(clock: list[float]) -> None:
    ran: list[Any] = []
    found = medians_of({name: taking(0.01, clock, ran, name) for name in "ab"}, 1.0, rounds=3)
    assert ran == [*"ab"] * 4
    assert found == {"a": 3.01, "b": 3.01}


class StoppedError(Exception):
    """What the thread is needed for."""


def stops_after(times: int) -> Callable[[], None]:
    left = itertools.count(times, -1)

    def interrupt() -> None:
        if next(left) == 0:
            raise StoppedError

    return interrupt


def test_something_else_goes_before_each_run(clock: list[float]) -> None:
    ran: list[Any] = []
    cases = {name: taking(0.01, clock, ran, name) for name in "ab"}
    for times in range(6):
        ran.clear()
        with pytest.raises(StoppedError):
            medians_of(cases, 1.0, rounds=2, interrupt=stops_after(times))
        assert ran == [*"ababab"][:times]
    assert set(medians_of(cases, 1.0, rounds=2, interrupt=stops_after(6))) == {"a", "b"}


def test_what_has_no_time_is_left_out_and_the_rest_is_measured_once_at_least(
    clock: list[float],
) -> None:
    ran: list[Any] = []
    found = medians_of(
        {count: taking(0.2 * count, clock, ran, count) for count in (1, 2, 4, 8)}, 1.0
    )
    # The third one has begun before half of the time was over.
    assert ran == [1, 2, 1, 2]
    assert list(found) == [1, 2]
    assert list(medians_of({count: taking(9.0, clock, ran, count) for count in (1, 2)}, 1.0)) == [1]


@pytest.mark.parametrize(
    ("on", "overlaps", "seconds"),
    [("metal", True, 9.0), ("metal", False, 9.0), ("cpu", True, 3.0), ("cpu", False, 4.0)],
)
def test_on_a_processor_its_own_time_counts(
    on: str, overlaps: bool, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, times in (
        ("perf_counter", [100.0, 109.0]),
        ("process_time", [10.0, 14.0]),
        ("thread_time", [1.0, 2.0]),
    ):
        monkeypatch.setattr(measuring.time, name, iter(times).__next__)
    monkeypatch.setattr(measuring, "device", lambda: on)
    with Stopwatch(overlaps) as watch:
        pass
    assert watch.seconds == seconds


@pytest.mark.usefixtures("few_cases")
@pytest.mark.parametrize("name", only(["llama", "gpt_oss", "lfm2"], "llama", "lfm2"))
def test_the_curve_of_a_model_that_verifies_several_sequences(name: str) -> None:
    model = make_model(name)
    arena = open_pool(model, 40_000_000)
    arena.decode.path_counts["ragged"] = 3
    curve = measure_curve(model, arena, seconds=1e9)
    assert [count for count, _ in curve.rows] == [1, 2, 20]
    assert [count for count, _ in curve.pipelined] == [1, 2]
    assert arena.decode.path_counts == {"ragged": 3}
    assert [(c.held, c.reserved) for c in arena.pool.settle()] == [(0, 0)] * len(arena.spec.groups)


@pytest.mark.sampled
@pytest.mark.usefixtures("few_cases")
@pytest.mark.parametrize("name", only(["llama", "gpt_oss", "lfm2"], "llama", "lfm2"))
@pytest.mark.parametrize("times", only([0, 3, 10], 0, 3))
def test_a_pool_has_its_blocks_back_when_measuring_is_stopped(name: str, times: int) -> None:
    model = pooled.make_model(name)
    arena = open_pool(model, 40_000_000)
    assert arena.capabilities.verifies is not None
    arena.decode.path_counts["ragged"] = 3
    with pytest.raises(StoppedError):
        measure_curve(model, arena, seconds=1e9, interrupt=stops_after(times))
    arena.pool.check()
    assert not any(c.held or c.reserved for c in arena.pool.settle())
    assert (arena.running_bytes, arena.decode.path_counts) == (0, {"ragged": 3})
    assert measure_curve(model, arena, seconds=1e9).is_whole


def test_a_slow_model_has_a_curve_of_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = itertools.count()
    monkeypatch.setattr(measuring.time, "perf_counter", lambda: float(next(seconds)))
    model = make_model("llama")
    # The clock is read three times for each case.
    curve = measure_curve(model, open_pool(model, 40_000_000), seconds=20.0)
    assert [count for count, _ in curve.rows] == [1, 2, 4, 8, 16]
    assert [count for count, _ in curve.pipelined] == [1, 2, 4, 8]


def test_the_least_cases_have_five_times_as_long_and_no_more(clock: list[float]) -> None:
    ran: list[Any] = []
    cases = {count: taking(1.0, clock, ran, count) for count in range(20)}
    assert list(medians_of(cases, 2.0, at_least=12)) == list(range(6))
    assert ran == [*range(6)] * 2
    assert list(medians_of(cases, 2.0, at_least=3)) == [0, 1, 2]


@pytest.mark.parametrize("counts", ["watch", "wall"])
def test_a_model_whose_forwards_take_too_long_is_not_measured(
    counts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, forwards = make_model("llama"), list[Any]()
    arena = open_pool(model, 40_000_000)
    watched, ticks = (0.21, 9.0) if counts == "watch" else (9.0, 0.21)
    monkeypatch.setattr(
        measuring, "Stopwatch", lambda: nullcontext(SimpleNamespace(seconds=watched))
    )
    monkeypatch.setattr(measuring.time, "perf_counter", itertools.count(0.0, ticks).__next__)
    tokens = Scratch._tokens
    monkeypatch.setattr(
        Scratch, "_tokens", lambda *given: forwards.append(given[1:]) or tokens(*given)
    )
    with pytest.raises(
        UnmeasurableError,
        match=r"^a forward of one token takes 0\.21 seconds, too long to measure others$",
    ):
        measure_curve(model, arena, seconds=2.0)
    assert forwards == [(1, 32), (1, 1), (1, 1)]
    assert [(c.held, c.reserved) for c in arena.pool.settle()] == [(0, 0)] * len(arena.spec.groups)


@pytest.mark.usefixtures("few_cases")
@pytest.mark.parametrize("name", only(["lfm2", "llama4"], "lfm2"))
def test_the_curve_of_a_model_that_verifies_one_sequence_alone(name: str) -> None:
    model = pooled.make_model(name)
    arena = open_pool(model, 40_000_000)
    arena.capabilities = replace(arena.capabilities, verifies="alone")
    curve = measure_curve(model, arena, seconds=1e9)
    assert [count for count, _ in curve.rows] == [1, 2]
    assert [count for count, _ in curve.pipelined] == ([1, 2] if arena.capabilities.ragged else [1])
    assert not any(c.held for c in arena.pool.settle())
    assert arena.running_bytes == 0


def test_a_small_pool_has_a_curve_of_fewer_members_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "ROUNDS", 1)
    model = make_model("llama")
    block = describe(model).bytes_per_block(describe(model).groups[0])
    arena = KVArena(describe(model), 3 * block)
    assert attach(model, arena)
    curve = measure_curve(model, arena, seconds=1e9)
    assert [count for count, _ in curve.rows][-1] == 32
    assert [count for count, _ in curve.pipelined] == [1, 2]
    assert not curve.is_whole
    caches = [make_prompt_cache(model, arena) for _ in range(3)]
    held = [model(mx.zeros((1, 1), mx.int32), cache=own) for own in caches]
    mx.eval(held)
    with pytest.raises(PoolExhaustedError):
        measure_curve(model, arena)


@pytest.mark.parametrize(("blocks", "is_whole"), [(8, False), (8 + 4, False), (8 + 5, True)])
def test_a_curve_is_whole_where_all_members_and_a_long_context_have_room(
    blocks: int, is_whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "readings", lambda cases, *_: {key: [1.0] for key in cases})
    model = make_model("llama")
    spec = describe(model)
    arena = KVArena(spec, blocks * spec.bytes_per_block(spec.groups[0]))
    assert attach(model, arena)
    curve = measure_curve(model, arena)
    assert [count for count, _ in curve.pipelined] == [1, 2, 4, 8]
    assert curve.is_whole == is_whole


@pytest.mark.parametrize(("name", "kinds"), [("llama", "rows"), ("lfm2", "padded")])
def test_what_a_longer_context_costs_is_measured_with_one_row_and_with_many(
    name: str, kinds: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = {("members", 1): 1.0, ("rows", 1): 1.2, ("rows", 16): 5.0}
    measured |= {("long members", 1): 3.0, ("long rows", 1): 3.3, ("long rows", 16): 12.0}
    ran: list[tuple[str, int]] = []

    def read(cases: dict[Any, Callable[[], float]], *_: Any) -> dict[Any, list[float]]:
        for case, run in cases.items():
            assert run() > 0
            ran.append(case)
        return {case: [measured[case]] for case in cases}

    for attribute, value in (("ROWS", (1, 16)), ("MEMBERS", (1,)), ("readings", read)):
        monkeypatch.setattr(measuring, attribute, value)
    model = pooled.make_model(name)
    arena = open_pool(model, 40_000_000)
    assert arena.capabilities.verifies == kinds
    curve = measure_curve(model, arena)
    assert sorted(ran) == sorted(measured)
    row = (7.0 - 2.1) / 15
    assert [seconds * measuring.MORE_CONTEXT for seconds in astuple(curve.token)] == pytest.approx(
        [2.1 - row, row, 2.0]
    )
    assert [(c.held, c.reserved) for c in arena.pool.settle()] == [(0, 0)] * len(arena.spec.groups)
