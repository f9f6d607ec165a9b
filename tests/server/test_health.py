"""Health says `stalled` whenever requests wait and nothing is computed; then they fail, and the
next ones are served.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from mlx_blockpool.engine.engine import BlockPoolBatchEngine
from mlx_blockpool.server.health import STEPS, Health
from mlx_blockpool.server.model import LoadedModel
from mlx_blockpool.server.models.queue import ModelQueue
from server.serving import Client, at_once, until

pytestmark = pytest.mark.server("--pool-bytes 20MB", model="llama")


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def status(health: Health, waits: bool = True, alive: bool = True) -> str:
    code, body = health.report(alive, waits)
    assert code == (200 if body["status"] == "ok" else 503)
    return body["status"]  # type: ignore[no-any-return]


def test_a_stall_is_told_from_idleness() -> None:
    clock = Clock()
    health = Health(10, clock)
    clock.now += 50
    assert health.report(True, False) == (200, {"status": "ok"})
    health.doing("prefill and decode")
    clock.now += 9
    assert health.report(True, True)[1]["seconds_since_progress"] == 9
    clock.now += 2
    assert status(health) == "stalled"
    assert status(health, waits=False) == "stalled"
    health.mark()
    assert status(health) == "ok"
    assert status(health, alive=False) == "unavailable"


def test_an_idle_server_reports_its_status_alone_as_soon_as_the_last_reply_has_ended() -> None:
    """As mlx-lm's does, whose clients may compare the whole body.

    The thread may still be in the step of that reply.
    """
    health = Health(10, Clock())
    health.doing(STEPS)
    assert health.report(True, True)[1].keys() == {"status", "doing", "seconds_since_progress"}
    assert health.report(True, False) == (200, {"status": "ok"})
    health.doing("loading a model")
    assert health.report(True, False)[1]["doing"] == "loading a model"
    health.idle()
    health.restarts += 1
    assert health.report(False, False) == (503, {"status": "unavailable", "restarts": 1})


def test_to_go_from_one_thing_to_another_is_no_progress() -> None:
    clock = Clock()
    health = Health(10, clock)
    for _ in range(6):
        health.doing("waiting for a model")
        clock.now += 2
        health.doing("loading a model")
    assert status(health) == "stalled"


def test_a_thread_that_hangs_while_it_has_nothing_to_do_is_stalled_once_a_request_waits() -> None:
    clock = Clock()
    health = Health(10, clock)
    health.idle()
    clock.now += 11
    assert status(health, waits=False) == "ok"
    assert status(health, waits=True) == "stalled"


def stalls(server: Client, clock: Clock, body: dict[str, Any]) -> tuple[int, Any]:
    """The answer to a request that nothing is computed for, once the time for that is over."""
    health = server.generator.health
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(server.send("/v1/completions", body)))
    thread.start()
    until(
        lambda: (
            health.report(True, server.generator.has_waiting)[1].get("doing", "nothing")
            != "nothing"
        )
    )
    assert server.send("/health")[1]["status"] == "ok"
    before = health.restarts
    clock.now += health.stall_seconds + 1
    thread.join()
    assert health.restarts == before + 1
    return answers[0]  # type: ignore[no-any-return]


@pytest.fixture
def clock(server: Client, monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    """The time of the server's health."""
    clock = Clock()
    monkeypatch.setattr(server.generator.health, "_clock", clock)
    server.generator.health.mark()
    yield clock
    monkeypatch.undo()
    assert server.send("/v1/completions", {"prompt": "well again", "max_tokens": 2})[0] == 200
    server.settle()


def test_an_engine_that_computes_nothing_stalls_and_its_requests_fail(
    server: Client, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BlockPoolBatchEngine, "next", lambda self: [])
    code, answer = stalls(server, clock, {"prompt": "for ever", "max_tokens": 2})
    assert code == 503
    assert "Nothing was computed for 120 seconds" in answer["error"]["message"]


def test_a_line_that_lets_nobody_start_stalls_and_its_requests_fail(
    server: Client, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelQueue, "next", lambda self, uses, passed=(): None)
    code, answer = stalls(server, clock, {"prompt": "in the line", "max_tokens": 2})
    assert code == 503
    assert "Nothing was computed" in answer["error"]["message"]


def test_a_thread_that_hangs_in_the_background_is_stalled_for_those_who_wait(
    server: Client, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a disk that hangs while there is nothing to do."""
    hangs, goes_on = threading.Event(), threading.Event()

    def hanging(self: Any) -> None:
        hangs.set()
        assert goes_on.wait(60)

    monkeypatch.setattr(LoadedModel, "idle", hanging)
    assert hangs.wait(60)

    def look() -> Any:
        until(lambda: server.generator.has_waiting)
        before = server.send("/health")
        clock.now += server.generator.health.stall_seconds + 1
        after = server.send("/health")
        monkeypatch.setattr(LoadedModel, "idle", lambda self: None)
        goes_on.set()
        return before, after

    answer, (before, after) = at_once(
        [lambda: server.send("/v1/completions", {"prompt": "x", "max_tokens": 2}), look]
    )
    assert (before[0], before[1]["status"]) == (200, "ok")
    assert (after[0], after[1]["status"]) == (503, "stalled")
    assert answer[0] == 200


def test_a_blocked_engine_does_not_spin(server: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread waits on the queue between two looks."""
    waits: list[float] = []
    get = server.generator.requests.get

    def watching(block: bool = True, timeout: float | None = None) -> Any:
        if server.generator._live:
            waits.append(timeout or 0.0)
        return get(block, timeout)

    monkeypatch.setattr(server.generator.requests, "get", watching)
    monkeypatch.setattr(BlockPoolBatchEngine, "is_blocked", True)
    looks = iter(range(30))
    step = BlockPoolBatchEngine.next
    monkeypatch.setattr(
        BlockPoolBatchEngine,
        "next",
        lambda self: [] if next(looks, None) is not None else step(self),
    )
    assert server.send("/v1/completions", {"prompt": "later", "max_tokens": 1})[0] == 200
    assert len(waits) >= 29
    assert min(waits[:29]) > 0
