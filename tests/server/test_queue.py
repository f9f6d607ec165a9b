"""Who starts, who is loaded and who goes: the queue and the registry under a fake clock, with
models that are only names.
"""

from __future__ import annotations

import types
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from thorough import tried

from mlx_blockpool.config import ModelsConfig, PoolConfig, ServerConfig
from mlx_blockpool.server.models import registry as registry_module
from mlx_blockpool.server.models.queue import Claim, ModelQueue, ModelUsage, SwapPlan
from mlx_blockpool.server.models.registry import LoadCommand, ModelRegistry
from mlx_blockpool.server.provider import ModelKey
from mlx_blockpool.server.request import PromptRequest
from mlx_blockpool.server.watch.event_log import EventLog, ModelEvents

A, B, C = (ModelKey(name) for name in "abc")
LOAD_TICKS = 3
DRAIN = 10.0


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def use(
    key: ModelKey,
    busy: bool = False,
    ready: float = 0.0,
    used: float = 0.0,
    closed: float | None = None,
) -> ModelUsage:
    return ModelUsage(key, busy, ready, used, closed)


def queue_of(
    *keys: ModelKey, patience: float = 30.0, linger: float = 0.0
) -> tuple[ModelQueue, Clock]:
    """A queue where one request for each key came a second after the other, the last of them
    now.
    """
    clock = Clock()
    queue = ModelQueue(patience, linger, clock, DRAIN)
    for number, key in enumerate(keys):
        clock.now += 1
        queue.add(key, number)
    return queue, clock


def full(key: ModelKey) -> bool:
    return False


def test_choices_go_after_others_with_the_requests_of_their_agent_while_one_is_served() -> None:
    queue, clock = queue_of()
    for item in ("ann 0", "ann 1", "ann 2", "bob", "ann later"):
        clock.now += 1
        queue.add(A, item, agent=item.split()[0])
    served = queue.next([use(A)])
    assert served is not None
    queue.move_to_end(lambda item: item in ("ann 1", "ann 2"))
    queue.remove(served)
    assert [entry.item for entry in queue] == ["bob", "ann 1", "ann 2", "ann later"]


def test_requests_of_the_loaded_model_pass_those_of_another() -> None:
    queue, _ = queue_of(A, B, A, B, A)
    taken = []
    while (entry := queue.next([use(A)])) is not None:
        taken.append(entry.item)
        queue.remove(entry)
    assert taken == [0, 2, 4]
    assert [entry.item for entry in queue] == [1, 3]


def test_a_busy_model_goes_once_the_oldest_of_the_others_has_waited_for_the_patience() -> None:
    queue, clock = queue_of(B, C)
    clock.now += 28.9
    assert queue.plan([use(A, busy=True)], full) == SwapPlan()
    clock.now += 0.1
    assert queue.plan([use(A, busy=True)], full) == SwapPlan(B, A)


def test_a_busy_model_has_so_long_to_end_what_runs_and_no_longer() -> None:
    queue, clock = queue_of(B)
    clock.now += 30 + DRAIN - 0.1
    assert queue.plan([use(A, busy=True)], full) == SwapPlan(B, A)
    assert queue.plan([use(A, busy=True, used=3.0), use(C, used=5.0)], full) == SwapPlan(B, C)
    clock.now += 0.1
    assert queue.plan([use(A, busy=True)], full) == SwapPlan(B, A, must=True)


def test_patience_begins_when_the_model_is_there_however_long_it_took_to_load() -> None:
    queue, clock = queue_of(B)
    clock.now += 100
    assert queue.plan([use(A, busy=True, ready=clock.now - 29)], full) == SwapPlan()
    assert queue.plan([use(A, busy=True, ready=clock.now - 30)], full) == SwapPlan(B, A)


def test_a_model_that_is_to_go_starts_what_it_was_loaded_for_and_nothing_else() -> None:
    queue, _ = queue_of(A, A)
    first, second = queue
    closed = use(A, closed=first.arrived)
    assert queue.next([closed]) is first
    queue.remove(first)
    assert queue.next([closed]) is None
    assert queue.next([use(A)]) is second


def test_an_idle_model_goes_at_once_and_not_before_it_has_rested() -> None:
    queue, clock = queue_of(B, linger=2.0)
    assert queue.plan([use(A, used=clock.now - 1)], full) == SwapPlan()
    assert queue.plan([use(A, used=clock.now - 2)], full) == SwapPlan(B, A)


def test_the_idle_model_used_longest_ago_goes_first() -> None:
    queue, _ = queue_of(C)
    assert queue.plan([use(A, used=7), use(B, used=5)], full) == SwapPlan(C, B)
    assert queue.plan([use(A, used=7), use(B, used=5, busy=True)], full) == SwapPlan(C, A)


def test_nothing_goes_where_there_is_room() -> None:
    queue, _ = queue_of(C)
    assert queue.plan([use(A), use(B)], lambda key: True) == SwapPlan(C)


def test_what_waits_for_its_model_alone_lets_other_models_pass() -> None:
    queue, _ = queue_of(A, A, B)
    entry = queue.next([use(A), use(B)], passed={A})
    assert entry is not None
    assert entry.item == 2


# -- the registry with models that are only names --------------------------------------------------


@dataclass(frozen=True)
class Gone:
    """A request that was suspended, and how many ticks it still takes."""

    number: int
    left: float
    request: PromptRequest = field(
        default_factory=lambda: PromptRequest("text", "", [], None, None)
    )


@dataclass
class FakeModel:
    """Takes as many ticks to read as it is told; `live`: the tick in which each request ends."""

    key: ModelKey
    clock: Clock
    live: dict[int, float] = field(default_factory=dict)
    ready: float = 0.0
    used: float = 0.0
    events: ModelEvents = field(default_factory=lambda: EventLog().of_model("m"))
    pool_bytes = array_bytes = weights_bytes = read_bytes = num_forwards = 0
    proof_seconds = 0.0
    closed = False

    @property
    def is_busy(self) -> bool:
        return bool(self.live)

    def save(self) -> Iterator[None]:
        yield from (None, None)

    def prepare(self, own: int | None) -> None:
        pass

    def begin_hashing(self) -> None:
        pass

    def read(self, piece_bytes: int) -> Iterator[None]:
        yield from [None] * LOAD_TICKS

    def open(self, pool_bytes: int) -> None:
        self.ready = self.used = self.clock()

    def suspend(self) -> list[Any]:
        suspended = [Gone(number, end - self.clock()) for number, end in self.live.items()]
        self.live = {}
        return suspended

    def close(self) -> None:
        assert not self.live, "requests ran on it"
        self.closed = True


class World:
    """The generation thread's loop without requests' work: one tick is one turn of it, and one
    second.

    keeps: by request, the owner's name and the keep_alive of those that have one. made: the model
    of each load.
    """

    def __init__(
        self, max_models: int, patience: float, idle: float | None = None, linger: float = 0.0
    ) -> None:
        self.clock = Clock()
        config = ModelsConfig(
            max_models=max_models,
            patience_seconds=patience,
            linger_seconds=linger,
            idle_seconds=idle,
        )
        template: Any = types.SimpleNamespace(
            default_key=lambda: None, cli_args=types.SimpleNamespace(draft_model=None)
        )
        self.registry = ModelRegistry(template, ServerConfig(pool=PoolConfig(10**6), models=config))  # type: ignore[arg-type]
        self.queue = self.registry.queue = ModelQueue(patience, linger, self.clock, DRAIN)
        self.registry.make = self._make  # type: ignore[assignment, method-assign]
        self.made: list[ModelKey] = []
        self.started: list[tuple[ModelKey, int, float]] = []
        self.keeps: dict[int, tuple[str | None, float | None]] = {}

    def _make(self, key: ModelKey) -> FakeModel:
        self.made.append(key)
        return FakeModel(key, self.clock)

    def tick(self, lasting: dict[int, float]) -> None:
        """`lasting`: how long each request takes once it has started."""
        self.clock.now += 1
        # A swap ends within no time of the real clock, by which the registry sets this.
        self.queue.linger = self.registry.config.linger_seconds
        models: Any = self.registry.loaded
        for model in models.values():
            if ended := [number for number, end in model.live.items() if end <= self.clock.now]:
                model.used = self.clock.now
                model.live = {n: end for n, end in model.live.items() if n not in ended}
        self.registry.make_plan()
        while (entry := self.queue.next(self.registry.usages())) is not None:
            model: Any = self.registry.loaded[entry.key]
            if isinstance(entry.item, LoadCommand):
                self.registry.answer_load(entry.item)
                self.queue.remove(entry)
                continue
            number = entry.item.number if isinstance(entry.item, Gone) else entry.item
            self.registry.use(model, *self.keeps.get(number, (None, None)))
            if isinstance(entry.item, Gone):
                model.live[number] = self.clock.now + entry.item.left
            else:
                model.live[entry.item] = self.clock.now + lasting[entry.item]
                self.started.append((entry.key, entry.item, self.clock.now - entry.arrived))
            self.queue.remove(entry)
        self.registry.begin()
        self.registry.advance()
        assert len(self.registry.loaded) <= self.registry.config.max_models


requests = st.lists(
    st.tuples(st.integers(0, 6), st.sampled_from([A, B, C, ModelKey("d")]), st.integers(0, 12)),
    max_size=40,
)


@tried(50, 2000)
@given(requests, st.integers(1, 3), st.sampled_from([0, 1, 7, 30]), st.booleans())
def test_nobody_starves_and_everyone_is_served(
    asked: list[tuple[int, ModelKey, int]], max_models: int, patience: int, floods: bool
) -> None:
    """`floods`: beside what is asked for, a request for one model comes every second and lasts
    for three.
    """
    world = World(max_models, patience)
    lasting = defaultdict(
        lambda: 3.0, {number: float(lasts) for number, (_, _, lasts) in enumerate(asked)}
    )
    cycle = patience + DRAIN + LOAD_TICKS + 6
    arrivals = [
        (sum(gap for gap, _, _ in asked[: n + 1]), n, key) for n, (_, key, _) in enumerate(asked)
    ]
    for now in range(300 + 5 * int(cycle)):
        for _, number, key in (arrival for arrival in arrivals if arrival[0] == now):
            world.queue.add(key, number)
        if floods and now < 300:
            world.queue.add(A, 1000 + now)
        world.tick(lasting)
    assert sorted(number for _, number, _ in world.started) == [
        *range(len(asked)),
        *(range(1000, 1300) if floods else ()),
    ]
    # Each of the others' models at most once, and its own.
    assert max((waited for _, _, waited in world.started), default=0) <= 4 * cycle


def test_requests_of_one_model_start_in_the_order_in_which_they_came() -> None:
    world = World(1, 5)
    keys = [A, B, A, C, B, A, C, C, B, A]
    for number, key in enumerate(keys):
        world.queue.add(key, number)
        world.tick(defaultdict(lambda: 4.0))
    while len(world.started) < len(keys):
        world.tick(defaultdict(lambda: 4.0))
    for key in (A, B, C):
        own = [number for other, number, _ in world.started if other == key]
        assert own == [number for number, other in enumerate(keys) if other == key]


def test_requests_for_two_models_in_turn_take_two_loads_and_not_six() -> None:
    world = World(1, 30)
    for number, key in enumerate([A, B, A, B, A, B]):
        world.queue.add(key, number)
    while len(world.started) < 6:
        world.tick(dict.fromkeys(range(6), 2.0))
    assert world.registry.counts == {"loads": 2, "unloads": 1, "swaps": 1, "failures": 0}


def test_a_stream_of_requests_for_the_loaded_model_does_not_keep_another_out() -> None:
    world = World(1, 10)
    lasting = dict.fromkeys(range(200), 3.0)
    world.queue.add(A, 0)
    world.tick(lasting)
    world.queue.add(B, 1)
    for number in range(2, 60):
        world.queue.add(A, number)
        world.tick(lasting)
    ((waited),) = [waited for key, _, waited in world.started if key == B]
    assert 10 <= waited <= 10 + DRAIN + 4 * LOAD_TICKS
    while any(model.live for model in world.registry.loaded.values()) or len(world.queue):  # type: ignore[attr-defined]
        world.tick(lasting)
    assert len(world.started) == 60


def test_a_model_that_another_waits_for_goes_on_serving_until_it_goes() -> None:
    """A reply of it lasts for ever; what comes for it starts at once, and goes on after the
    swap.
    """
    world = World(1, 10)
    lasting = defaultdict(lambda: 3.0, {0: 10_000.0})
    world.queue.add(A, 0)
    for _ in range(LOAD_TICKS + 2):
        world.tick(lasting)
    world.queue.add(B, 1)
    for number in range(2, 20):
        world.queue.add(A, number)
        world.tick(lasting)
    assert [waited for key, _, waited in world.started if key == A][1:] == [1.0] * 18
    for _ in range(40):
        world.tick(lasting)
    ((waited),) = [waited for key, _, waited in world.started if key == B]
    assert waited <= 10 + DRAIN + 2 * LOAD_TICKS
    assert [(key, list(model.live)) for key, model in world.registry.loaded.items()] == [(A, [0])]  # type: ignore[attr-defined]


def test_two_models_that_both_fit_are_never_swapped() -> None:
    world = World(2, 0)
    for number in range(40):
        world.queue.add((A, B)[number % 2], number)
        world.tick(dict.fromkeys(range(40), 2.0))
    assert world.registry.counts == {"loads": 2, "unloads": 0, "swaps": 0, "failures": 0}


def test_a_model_that_nobody_asked_for_is_unloaded_and_one_that_is_used_stays() -> None:
    world = World(2, 30, idle=10)
    lasting = dict.fromkeys(range(100), 1.0)
    world.queue.add(A, 0)
    for number in range(1, 40):
        world.queue.add(B, number)
        world.tick(lasting)
    assert list(world.registry.loaded) == [B]
    for _ in range(20):
        world.tick(lasting)
    assert world.registry.loaded == {}
    world.queue.add(A, 99)
    for _ in range(LOAD_TICKS + 4):
        world.tick(lasting)
    assert world.started[-1][:2] == (A, 99)


@pytest.mark.parametrize(("size", "loaded"), [(30, [A, B, C]), (50, [B, C]), (90, [C]), (200, [C])])
def test_weights_that_do_not_fit_beside_the_loaded_take_the_place_of_as_many_as_must_go(
    size: int, loaded: list[ModelKey], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 100, the first two take 30 each with pools that they have not filled."""
    world = World(3, 0)
    world.registry.sizes |= {A: 20, B: 20, C: size}
    models = world.registry
    monkeypatch.setattr(registry_module.device, "memory_bytes", lambda: 100)
    monkeypatch.setattr(
        registry_module.mx,
        "get_active_memory",
        lambda: sum(m.weights_bytes for m in models.loaded.values()),
    )
    for number, key in enumerate([A, B, C]):
        world.queue.add(key, number)
        for _ in range(20):
            world.tick(dict.fromkeys(range(3), 1.0))
        if key != C:
            world.registry.loaded[key].weights_bytes, world.registry.loaded[key].pool_bytes = 20, 10
    assert list(world.registry.loaded) == loaded
    assert [key for key, _, _ in world.started] == [A, B, C]


def test_requests_that_may_load_no_model_wait_until_another_request_does() -> None:
    queue = ModelQueue(30.0, clock=Clock())
    queue.add(B, "page's", claim=Claim.GUEST)
    assert queue.plan([use(A)], full) == SwapPlan()
    assert queue.plan([], lambda key: True) == SwapPlan(B), "it takes no other model's place"
    queue.add(B, "agent's")
    assert queue.plan([use(A)], full) == SwapPlan(B, A)
