"""When models are measured: while the server has nothing to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from models import save_endless, save_model
from store.measured import measured_in

from mlx_blockpool.config import EngineConfig, ModelsConfig
from mlx_blockpool.drafts.curve import CostCurve
from mlx_blockpool.engine import measuring
from mlx_blockpool.engine.caches import PooledCaches
from mlx_blockpool.errors import MeasuringStoppedError
from mlx_blockpool.server import model as model_module
from mlx_blockpool.server.model import LoadedModel
from mlx_blockpool.server.models import registry as registry_module
from mlx_blockpool.server.models.queue import ModelQueue
from mlx_blockpool.server.models.registry import ModelSpeeds
from mlx_blockpool.store.measurements import Measurements
from mlx_blockpool.tier.write_behind import DiskTier
from server.serving import Client, blockpool_server, until

FLAT = CostCurve.from_points({1: 0.010, 2: 0.011, 20: 0.012}, {1: 0.010, 2: 0.011})


class World:
    """A server of models "a" and "b" whose measuring takes three readings; `during` is called
    before each of them.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.readings: list[str] = []
        # What is found, and whether something is left to measure.
        self.finds: dict[str, Any] = {"curve": FLAT}
        self.leaves = False
        self.during: Callable[[int], None] = lambda number: None
        self.arrivals = False
        self.queue = ModelQueue(1.0, clock=lambda: self.now)
        self.registry: Any = SimpleNamespace(
            loaded={},
            queue=self.queue,
            swap=None,
            config=ModelsConfig(),
            log=SimpleNamespace(models={}),
        )
        self.speeds = ModelSpeeds(self.registry, EngineConfig(), Measurements(None))
        self.speeds.has_arrivals = lambda: self.arrivals
        monkeypatch.setattr(registry_module, "measured", self.measured)
        monkeypatch.setattr(model_module, "measured", self.measured)

    def measured(
        self,
        model: Any,
        caches: Any,
        config: Any,
        measurements: Any,
        name: str,
        interrupt: Callable[[], None],
    ) -> Any:
        caches.is_unmeasured = self.leaves
        try:
            for number in range(3):
                self.during(number)
                interrupt()
                self.readings.append(name)
            caches.curve = self.finds.get("curve")
        except MeasuringStoppedError:
            caches.is_unmeasured = True
        caches.prefix.arena.decode.costs = self.finds.get("costs", {})
        return caches

    def load(self, name: str) -> Any:
        model = make_model(name, self.now)
        model.caches = LoadedModel._with_costs(model, make_caches())
        self.registry.loaded[name] = model
        return model


def make_caches() -> PooledCaches:
    caches = PooledCaches.__new__(PooledCaches)
    caches.prefix = SimpleNamespace(
        arena=SimpleNamespace(decode=SimpleNamespace(costs={})), stored=DiskTier(), num_lent=0
    )
    return caches


def make_model(name: str, now: float) -> Any:
    engine = SimpleNamespace(steps=SimpleNamespace(decided=0))
    engine.steps.decide = lambda: setattr(engine.steps, "decided", engine.steps.decided + 1)
    provider = SimpleNamespace(name=name, model=None)
    model = SimpleNamespace(
        key=name, provider=provider, caches=None, engine=engine, is_busy=False, used=now, reported=0
    )
    model._config = SimpleNamespace(engine=EngineConfig())
    model._measurements = Measurements(None)
    model.update_report = lambda: setattr(model, "reported", model.reported + 1)
    return model


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_nothing_is_measured_at_a_load(world: World) -> None:
    assert world.load("a").caches.is_unmeasured
    assert world.readings == []


def unmeasured(world: World) -> Any:
    """Model "b" next to "a", which is measured already."""
    world.load("a").caches.is_unmeasured = False
    return world.load("b")


def test_a_model_is_measured_once_the_server_is_quiet(world: World) -> None:
    model = unmeasured(world)
    world.now += 0.9 * ModelsConfig().quiet_seconds
    world.speeds.catch_up()
    assert world.readings == []
    world.now += 0.2 * ModelsConfig().quiet_seconds
    # A request of the other model has just ended.
    world.registry.loaded["a"].used = world.now
    world.speeds.catch_up()
    assert world.readings == []
    world.now += ModelsConfig().quiet_seconds
    world.speeds.catch_up()
    assert world.readings == ["b"] * 3
    assert not model.caches.is_unmeasured
    assert (model.engine.steps.decided, model.reported) == (1, 1)
    world.now += 1000
    world.speeds.catch_up()
    assert world.readings == ["b"] * 3


def test_what_is_found_before_the_measuring_is_stopped_is_used_at_once(world: World) -> None:
    model = unmeasured(world)
    world.finds["costs"] = {0: "costs"}
    world.during = lambda number: setattr(world, "arrivals", number == 2)
    world.now += ModelsConfig().quiet_seconds
    world.speeds.catch_up()
    assert model.caches.is_unmeasured
    assert (model.engine.steps.decided, model.reported) == (1, 1)
    world.arrivals, world.now = False, world.now + 1000
    world.speeds.catch_up()
    assert (model.engine.steps.decided, model.reported) == (1, 1), "nothing more was found"


def test_what_asks_for_no_model_stops_the_measuring_for_a_while_too(world: World) -> None:
    unmeasured(world)
    world.during = lambda number: setattr(world, "arrivals", number == 1)
    world.now += 100
    world.speeds.catch_up()
    assert world.readings == ["b"]
    world.arrivals = False
    world.now += 0.9 * ModelsConfig().quiet_seconds
    world.speeds.catch_up()
    assert world.readings == ["b"]
    world.now += 0.2 * ModelsConfig().quiet_seconds
    world.speeds.catch_up()
    assert world.readings == ["b"] * 2


def test_what_has_no_room_is_tried_again_later(world: World) -> None:
    model = unmeasured(world)
    world.finds, world.leaves = {}, True
    tried = []
    for second in range(35):
        world.now += 1
        world.readings.clear()
        world.speeds.catch_up()
        tried += [second + 1] if world.readings else []
    assert tried == [10, 20, 30]
    assert (model.engine.steps.decided, model.reported) == (0, 0)


@pytest.mark.parametrize("why", ["lent", "restoring", "writing"])
def test_a_server_that_reads_or_writes_records_is_not_quiet(world: World, why: str) -> None:
    unmeasured(world)
    prefix = world.registry.loaded["a"].caches.prefix
    jobs = ["job"] if why == "restoring" else []
    restores = SimpleNamespace(jobs=jobs, is_stuck=False)
    prefix.stored = stored = SimpleNamespace(restores=restores, is_writing=why == "writing")
    prefix.num_lent = int(why == "lent")
    world.now += ModelsConfig().quiet_seconds
    world.speeds.catch_up()
    assert world.readings == []
    prefix.num_lent, stored.is_writing = 0, False
    jobs.clear()
    world.now += ModelsConfig().quiet_seconds
    world.speeds.catch_up()
    assert world.readings == ["b"] * 3


@pytest.mark.parametrize("why", ["live", "waiting", "arrived", "swap"])
def test_work_ends_the_measuring_which_begins_again_when_the_server_is_quiet(
    world: World, why: str
) -> None:
    model = unmeasured(world)
    world.now += ModelsConfig().quiet_seconds

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
    world.now += ModelsConfig().quiet_seconds
    world.speeds.catch_up()
    assert world.readings == ["b"] * 4
    assert not model.caches.is_unmeasured


def test_a_model_without_an_engine_is_measured_too(world: World) -> None:
    model = unmeasured(world)
    model.engine = None
    world.now += ModelsConfig().quiet_seconds
    world.speeds.catch_up()
    assert not model.caches.is_unmeasured


def drafts(client: Client, model: Path) -> dict[str, Any]:
    loaded = {key.model: served for key, served in client.generator.registry.loaded.items()}
    found: dict[str, Any] = loaded[str(model)].report["drafts"]
    return found


def test_a_second_model_is_served_unmeasured_next_to_a_busy_one_and_measured_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = save_model(tmp_path / "one", "qwen2", seed=2), save_endless(tmp_path / "two")
    measured: list[Any] = []

    def measure(model: Any, arena: Any, *, interrupt: Callable[[], None]) -> CostCurve:
        interrupt()
        measured.append(model)
        return FLAT

    monkeypatch.setattr(measuring, "measure_curve", measure)
    monkeypatch.setattr(measuring, "measure_paths", lambda *_, **__: {})
    options = (
        "--pool-bytes",
        "40MB",
        "--drafts",
        "auto",
        "--measure",
        "auto",
        "--store-dir",
        str(tmp_path / "store"),
    )
    question = [{"role": "user", "content": "Once more. " * 12}]
    with blockpool_server(
        one, "--allow-models", f"{one},{two}", "--max-models", "2", *options
    ) as client:
        registry = client.generator.registry
        registry.config = replace(registry.config, quiet_seconds=0.0)
        client.chat(question, max_tokens=1)
        until(lambda: drafts(client, one)["off"] is None)
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
    assert sorted(found.model for found in measured_in(tmp_path / "store")) == [
        "one",
        "two",
    ]
