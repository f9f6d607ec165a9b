"""GET /v1/cache/hour: minutes and agents, for each owner."""

from __future__ import annotations

from mlx_blockpool.config import HistoryConfig
from mlx_blockpool.server.access import noted_name
from mlx_blockpool.server.watch import last_hour
from mlx_blockpool.server.watch.last_hour import LastHour


class Clock:
    now = 6000.0

    def __call__(self) -> float:
        return self.now


def test_requests_are_counted_by_minute_and_agent() -> None:
    found = LastHour(clock := Clock())
    found.record(None, "a", 100, 60, 0.2)
    found.record(None, "a", 100, 100, 0.4)
    clock.now += 60
    found.record(None, None, 10, 0, 0.5)
    answer = found.answer(None)
    first = {
        "time": 6000,
        "requests": 2,
        "prompt_tokens": 200,
        "cached_tokens": 160,
        "ttft": {"median": 0.3, "p95": 0.4},
    }
    second = {
        "time": 6060,
        "requests": 1,
        "prompt_tokens": 10,
        "cached_tokens": 0,
        "ttft": {"median": 0.5, "p95": 0.5},
    }
    assert answer["minutes"] == [first, second]
    assert answer["agents"] == {"a": {name: first[name] for name in first if name != "time"}}


def test_an_hour_is_kept() -> None:
    found = LastHour(clock := Clock())
    for _ in range(70):
        found.record(None, "a", 1, 1, 0.1)
        clock.now += 60
    assert [minute["time"] for minute in found.answer(None)["minutes"]] == [
        60 * n for n in range(111, 170)
    ]
    clock.now += 3600
    assert found.answer(None)["minutes"] == []
    assert found.answer(None)["agents"]["a"]["requests"] == 70


def test_owners_see_their_own() -> None:
    found = LastHour(Clock())
    found.record("ann", noted_name("ann", "x"), 10, 5, 0.1)
    found.record("bob", noted_name("bob", "x"), 20, 0, 0.2)
    assert [found.answer(owner)["minutes"][0]["prompt_tokens"] for owner in ("ann", "bob")] == [
        10,
        20,
    ]
    assert found.answer("ann")["agents"] == {
        "x": {
            "requests": 1,
            "prompt_tokens": 10,
            "cached_tokens": 5,
            "ttft": {"median": 0.1, "p95": 0.1},
        }
    }
    assert found.answer("carl") == {"minutes": [], "agents": {}}


def test_memory_is_bounded() -> None:
    found = LastHour(Clock())
    for number in range(3 * HistoryConfig.agents):
        found.record(None, f"agent {number}", 1, 0, float(number % 2))
    answer = found.answer(None)
    assert len(answer["agents"]) == HistoryConfig.agents
    assert f"agent {3 * HistoryConfig.agents - 1}" in answer["agents"]
    (minute,) = found._minutes[100].values()
    assert len(minute.times) <= last_hour.MOST_TIMES
    assert answer["minutes"][0]["requests"] == 3 * HistoryConfig.agents
