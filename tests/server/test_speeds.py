"""When models are measured: at their load where nobody else waits for it, and otherwise while the server has nothing to do."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from models import save_endless, save_model

from mlx_blockpool.config import EngineConfig
from mlx_blockpool.drafts.curve import CostCurve
from mlx_blockpool.engine import measuring
from mlx_blockpool.engine.caches import PooledCaches
from mlx_blockpool.errors import MeasuringStoppedError
from mlx_blockpool.server.models import speeds as speeds_module
from mlx_blockpool.server.models.queue import ModelQueue
from mlx_blockpool.server.models.speeds import QUIET_SECONDS, ModelSpeeds
from mlx_blockpool.server.ranked.leader import Solo
from mlx_blockpool.store.measurements import Measurements
from server.serving import Client, blockpool_server

FLAT = CostCurve.of({1: 0.010, 2: 0.011, 20: 0.012}, {1: 0.010, 2: 0.011})


class World:
    """A server of models "a" and "b" whose measuring takes three readings; `during` is called before each of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.readings: list[str] = []
        self.during: Callable[[int], None] = lambda number: None
        self.arrivals = False
        self.queue = ModelQueue(1.0, clock=lambda: self.now)
        self.registry: Any = SimpleNamespace(loaded={}, queue=self.queue, swap=None)
        self.speeds = ModelSpeeds(self.registry, EngineConfig(), Measurements(None))
        self.speeds.has_arrivals = lambda: self.arrivals
        monkeypatch.setattr(speeds_module, "measured", self.measured)

    def measured(self, model: Any, caches: Any, config: Any, measurements: Any, name: str, look: Callable[[], None]) -> Any:
        caches.is_unmeasured = False
        try:
            for number in range(3):
                self.during(number)
                look()
                self.readings.append(name)
        except MeasuringStoppedError:
            caches.is_unmeasured = True
        return caches

    def load(self, name: str) -> Any:
        model = make_model(name, self.now)
        model.caches = self.speeds.at_load(model, PooledCaches.__new__(PooledCaches))
        self.registry.loaded[name] = model
        return model


def make_model(name: str, now: float) -> Any:
    engine = SimpleNamespace(steps=SimpleNamespace(decided=0))
    engine.steps.decide = lambda: setattr(engine.steps, "decided", engine.steps.decided + 1)
    provider = SimpleNamespace(name=name, model=None)
    return SimpleNamespace(
        key=name, provider=provider, caches=None, engine=engine, is_busy=False, used=now, update_report=lambda: None
    )


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_the_first_model_is_measured_at_its_load_whatever_waits_for_it(world: World) -> None:
    world.queue.add("a", "request")
    world.arrivals = True
    assert not world.load("a").caches.is_unmeasured
    assert world.readings == ["a"] * 3


def test_a_model_beside_one_that_rests_is_measured_at_its_load(world: World) -> None:
    world.load("a")
    world.queue.add("b", "request")
    assert not world.load("b").caches.is_unmeasured


@pytest.mark.parametrize("why", ["live", "waiting", "arrived"])
def test_a_model_is_not_measured_while_another_has_requests(world: World, why: str) -> None:
    first = world.load("a")
    first.is_busy = why == "live"
    world.arrivals = why == "arrived"
    if why == "waiting":
        world.queue.add("a", "request")
    world.readings.clear()
    assert world.load("b").caches.is_unmeasured
    assert world.readings == []


def test_a_model_that_takes_the_place_of_one_with_requests_is_not_measured(world: World) -> None:
    world.queue.add("a", "suspended")
    assert world.load("b").caches.is_unmeasured


def test_what_arrives_at_a_load_beside_another_model_ends_its_measuring(world: World) -> None:
    world.load("a")
    world.readings.clear()
    world.during = lambda number: setattr(world, "arrivals", number == 2)
    assert world.load("b").caches.is_unmeasured
    assert world.readings == ["b", "b"]


def unmeasured(world: World) -> Any:
    """Model "b", which is loaded beside a busy "a" that has ended its requests now."""
    first = world.load("a")
    first.is_busy = True
    model = world.load("b")
    first.is_busy = False
    world.readings.clear()
    return model


def test_a_model_is_measured_once_the_server_is_quiet(world: World) -> None:
    model = unmeasured(world)
    world.now += 0.9 * QUIET_SECONDS
    world.speeds.catch_up()
    assert world.readings == []
    world.now += 0.2 * QUIET_SECONDS
    # A request of the other model has just ended.
    world.registry.loaded["a"].used = world.now
    world.speeds.catch_up()
    assert world.readings == []
    world.now += QUIET_SECONDS
    world.speeds.catch_up()
    assert world.readings == ["b"] * 3
    assert not model.caches.is_unmeasured
    assert model.engine.steps.decided == 1
    world.speeds.catch_up()
    assert world.readings == ["b"] * 3


@pytest.mark.parametrize("why", ["live", "waiting", "arrived", "swap"])
def test_work_ends_the_measuring_which_begins_again_when_the_server_is_quiet(world: World, why: str) -> None:
    model = unmeasured(world)
    world.now += QUIET_SECONDS

    def happen(number: int) -> None:
        if number == 1:
            world.registry.loaded["a"].is_busy = why == "live"
            world.registry.swap = "swap" if why == "swap" else None
            world.arrivals = why == "arrived"
            if why == "waiting":
                world.queue.add("a", "request")

    world.during = happen
    world.speeds.catch_up()
    assert world.readings == ["b"]
    assert model.caches.is_unmeasured
    assert model.engine.steps.decided == 0
    world.speeds.catch_up()
    assert world.readings == ["b"], "the work is still there"
    world.during = lambda number: None
    world.registry.loaded["a"].is_busy, world.registry.swap, world.arrivals = False, None, False
    world.queue.clear()
    world.speeds.catch_up()
    assert world.readings == ["b"] * 4
    assert not model.caches.is_unmeasured


def test_a_model_without_an_engine_is_measured_too(world: World) -> None:
    model = unmeasured(world)
    model.engine = None
    world.now += QUIET_SECONDS
    world.speeds.catch_up()
    assert not model.caches.is_unmeasured


def test_the_thread_catches_up_when_it_rests() -> None:
    called: list[str] = []
    turns = Solo(lambda: called.append("caught up"))
    turns.idle([])
    assert called == []
    turns.idle([], rests=True)
    assert called == ["caught up"]


def until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        threading.Event().wait(0.01)


def drafts(client: Client, model: Path) -> dict[str, Any]:
    loaded = {key.model: served for key, served in client.generator.registry.loaded.items()}
    found: dict[str, Any] = loaded[str(model)].report["drafts"]
    return found


def test_a_second_model_is_served_unmeasured_beside_a_busy_one_and_measured_when_the_server_is_quiet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = save_model(tmp_path / "one", "qwen2", seed=2), save_endless(tmp_path / "two")
    measured: list[Any] = []

    def measure(model: Any, arena: Any, *, look: Callable[[], None]) -> CostCurve:
        look()
        measured.append(model)
        return FLAT

    monkeypatch.setattr(measuring, "measure_curve", measure)
    monkeypatch.setattr(measuring, "measure_paths", lambda *_, **__: {})
    monkeypatch.setattr(speeds_module, "QUIET_SECONDS", 0.0)
    options = ("--pool-bytes", "40MB", "--drafts", "auto", "--measure", "auto", "--store-dir", str(tmp_path / "store"))
    question = [{"role": "user", "content": "Once more. " * 12}]
    with blockpool_server(one, "--allow-models", f"{one},{two}", "--max-models", "2", *options) as client:
        client.chat(question, max_tokens=1)
        assert len(measured) == 1
        first = client.generator.model
        # As if it computed embeddings.
        first.num_embedding += 1
        plain = client.chat(question, max_tokens=60, model=str(two))
        assert drafts(client, two)["off"] == "it is measured later what forwards cost"
        assert len(measured) == 1
        first.num_embedding -= 1
        until(lambda: drafts(client, two)["off"] is None)
        assert len(measured) == 2
        assert drafts(client, two)["curve"] == FLAT.to_json()
        again = client.chat(question, max_tokens=60, model=str(two))
        assert again["choices"][0]["message"] == plain["choices"][0]["message"]
        client.settle()
        until(lambda: drafts(client, two)["accepted"] > 0)
    assert sorted(found.model for found in Measurements(tmp_path / "store").load()) == ["one", "two"]
