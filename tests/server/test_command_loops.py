"""One client's commands in a loop against a neighbour's requests, under a fake clock: what is
counted is loads, not seconds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from queue import Queue

import pytest

from mlx_blockpool.errors import LoadError
from mlx_blockpool.server.models.queue import Claim, CommandBackoff, SwapPlan
from mlx_blockpool.server.models.registry import LoadCommand
from mlx_blockpool.server.provider import ModelKey
from server.test_queue import LOAD_TICKS, A, B, Clock, World, full, queue_of, use

PATIENCE, LINGER = 30, 2.0
# A swap there, a moment until the other model has been idle for LINGER, and a swap back.
SHORT = 4 * LOAD_TICKS + 2 * LINGER
Act = Callable[[World, int], None]


def load(key: ModelKey, claim: Claim = Claim.UNWAITED) -> LoadCommand:
    return LoadCommand(Queue(), key, False, claim)


def unload(key: ModelKey, claim: Claim = Claim.UNWAITED) -> LoadCommand:
    return LoadCommand(Queue(), key, True, claim)


def no_keep_alive(key: ModelKey, owner: str | None) -> LoadCommand:
    """What Ollama's clients send to unload a model."""
    return LoadCommand(Queue(), key, True, keep_seconds=0.0, owner=owner)


def keeps_nothing(owner: str | None) -> Act:
    """A request for A in each tick, with a prompt and a keep_alive of 0."""

    def act(world: World, tick: int) -> None:
        world.keeps[10_000 + tick] = owner, 0.0
        world.queue.add(A, 10_000 + tick)

    return act


LOOPS: dict[str, Act] = {
    "loads": lambda world, _: world.registry.take(load(B)),
    "waited loads": lambda world, _: world.registry.take(load(B, Claim.COMMAND)),
    "unloads": lambda world, _: world.registry.take(unload(A)),
    "unloads of both": lambda world, tick: world.registry.take(
        (unload, load)[tick % 2]((A, B)[tick % 2])
    ),
    "keep_alive of 0": lambda world, _: world.registry.take(no_keep_alive(A, None)),
    "keep_alive of 0 with a prompt": keeps_nothing(None),
    "bob's keep_alive of 0": lambda world, _: world.registry.take(no_keep_alive(A, "bob")),
    "bob's keep_alive of 0 with a prompt": keeps_nothing("bob"),
}


def neighbour_and(
    act: Act, gap: int, owner: str | None, ticks: int = 600, lasts: float = 1.0, max_models: int = 1
) -> World:
    """A neighbour's requests for A, `gap` ticks apart, and after the first of them an act in
    each tick.
    """
    world = World(max_models, PATIENCE, linger=LINGER)
    lasting = defaultdict(lambda: 1.0, dict.fromkeys(range(ticks), lasts))
    for tick in range(ticks):
        if tick % gap == 0:
            world.keeps[tick] = owner, None
            world.queue.add(A, tick)
        if tick >= 3 * LOAD_TICKS:
            act(world, tick)
        world.tick(lasting)
    tick_until(
        world,
        lambda: sum(number < 10_000 for _, number, _ in world.started) == len(range(0, ticks, gap)),
        lasting,
    )
    assert [number for _, number, _ in world.started if number < 10_000] == list(
        range(0, ticks, gap)
    )
    return world


def tick_until(
    world: World, is_done: Callable[[], bool], lasting: dict[int, float] | None = None
) -> None:
    for _ in range(10 * PATIENCE):
        if is_done():
            return
        world.tick(defaultdict(lambda: 1.0) if lasting is None else lasting)
    raise AssertionError("it is never done")


def longest_wait(world: World) -> float:
    return max(waited for _, number, waited in world.started if number < 10_000)


@pytest.mark.sampled
@pytest.mark.parametrize("gap", [4, 10, 25])
@pytest.mark.parametrize("name", [name for name in LOOPS if not name.startswith("bob's")])
def test_a_loop_of_commands_takes_a_neighbours_model_away_once(name: str, gap: int) -> None:
    world = neighbour_and(LOOPS[name], gap, None)
    assert world.made.count(A) <= 2, "loaded once, and once more after the first command"
    assert longest_wait(world) <= SHORT


@pytest.mark.sampled
@pytest.mark.parametrize("gap", [4, 10, 25, 200])
@pytest.mark.parametrize("name", [name for name in LOOPS if name.startswith("bob's")])
def test_a_keep_alive_of_one_key_never_takes_a_model_from_another(name: str, gap: int) -> None:
    world = neighbour_and(LOOPS[name], gap, "ann")
    assert world.registry.counts == {"loads": 1, "unloads": 0, "swaps": 0, "failures": 0}


@pytest.mark.parametrize("name", ["loads", "bob's keep_alive of 0", "keep_alive of 0"])
def test_a_model_whose_requests_run_without_a_pause_stays(name: str) -> None:
    """Each request begins before the last one ends."""
    world = neighbour_and(LOOPS[name], 2, None, lasts=5.0)
    assert world.registry.counts == {"loads": 1, "unloads": 0, "swaps": 0, "failures": 0}


def test_the_intervals_between_unloads_grow() -> None:
    """A neighbour with a request every 45 seconds: 30 seconds of rest do not protect its model,
    and 60 do.
    """
    world = neighbour_and(LOOPS["unloads"], 45, None, ticks=2000)
    assert world.registry.counts["loads"] == 3


def test_loads_and_unloads_of_another_model_are_as_rare() -> None:
    """Two models fit.

    The second is loaded and unloaded by turns, and its loads would hold up the first.
    """
    commands = (load(B, Claim.COMMAND), unload(B, Claim.COMMAND))

    def turn(world: World, tick: int) -> None:
        world.registry.take(commands[tick % 2])

    world = neighbour_and(turn, 4, None, max_models=2)
    assert world.registry.counts["loads"] <= 3


def test_without_other_requests_commands_are_carried_out_as_they_come() -> None:
    world = World(1, PATIENCE)
    lasting = defaultdict(lambda: 1.0)
    for command in (
        load(A, Claim.COMMAND),
        unload(A, Claim.COMMAND),
        load(B, Claim.COMMAND),
        no_keep_alive(B, None),
    ):
        world.registry.take(command)
        for _ in range(2 * LOAD_TICKS):
            world.tick(lasting)
        assert command.queue.get_nowait() is None
        assert list(world.registry.loaded) == ([] if command.unload else [command.key])


def test_an_unload_that_has_to_wait_is_carried_out_once_the_model_has_rested() -> None:
    world = neighbour_and(
        lambda world, tick: world.registry.take(unload(A)) if tick == 20 else None,
        4,
        None,
        ticks=60,
    )
    assert world.registry.counts["loads"] == 2
    command = unload(A, Claim.COMMAND)
    world.registry.take(command)
    used = world.registry.loaded[A].used
    tick_until(world, lambda: not world.registry.loaded)
    assert PATIENCE <= world.clock.now - used <= PATIENCE + 1


def test_an_unload_of_a_model_that_never_rests_fails_in_the_end() -> None:
    command = unload(A, Claim.COMMAND)

    def act(world: World, tick: int) -> None:
        if tick in (20, 60):
            world.registry.take(unload(A) if tick == 20 else command)

    world = neighbour_and(act, 4, None, ticks=800)
    assert world.registry.counts["loads"] == 2
    error = command.queue.get_nowait()
    assert isinstance(error, LoadError)
    assert "a was in use, and was not unloaded within 600 seconds. Try again later." in str(error)


def test_a_keep_alive_of_0_is_answered_at_once_where_the_model_stays() -> None:
    world = World(1, PATIENCE)
    lasting = defaultdict(lambda: 1.0)
    world.keeps[0] = "ann", 100.0
    world.queue.add(A, 0)
    for _ in range(2 * LOAD_TICKS):
        world.tick(lasting)
    command = no_keep_alive(A, "bob")
    world.registry.take(command)
    world.tick(lasting)
    assert command.queue.get_nowait() is None
    used = world.registry.loaded[A].used
    tick_until(world, lambda: not world.registry.loaded)
    assert 100 <= world.clock.now - used <= 101, "for as long as ann's request has said"


def test_a_request_right_after_a_keep_alive_of_0_finds_the_model() -> None:
    world = World(1, PATIENCE)
    lasting = defaultdict(lambda: 1.0)
    world.queue.add(A, 0)
    for _ in range(2 * LOAD_TICKS):
        world.tick(lasting)
    world.registry.take(no_keep_alive(A, None))
    world.clock.now += 1
    world.queue.add(A, 1)
    tick_until(world, lambda: len(world.started) == 2)
    assert world.registry.counts["loads"] == 1


def test_the_default_model_is_kept_by_the_server_and_not_by_a_key() -> None:
    world = World(1, PATIENCE)
    world.registry.catalog.default = A
    world.registry.take(load(A))
    for _ in range(2 * LOAD_TICKS):
        world.tick(defaultdict(lambda: 1.0))
    world.registry.take(no_keep_alive(A, "bob"))
    for _ in range(2 * LOAD_TICKS):
        world.tick(defaultdict(lambda: 1.0))
    assert list(world.registry.loaded) == [A]
    world.registry.take(no_keep_alive(A, None))
    for _ in range(2 * LOAD_TICKS):
        world.tick(defaultdict(lambda: 1.0))
    assert world.registry.loaded == {}


@pytest.mark.parametrize("claim", [Claim.COMMAND, Claim.UNWAITED])
def test_an_unload_of_a_model_that_is_being_loaded_waits_for_its_requests(claim: Claim) -> None:
    world = World(1, PATIENCE)
    world.queue.add(A, 0)
    world.tick({0: 3.0})
    assert world.registry.swap is not None
    command = unload(A, claim)
    world.registry.take(command)
    tick_until(world, lambda: bool(world.started), {0: 3.0})
    assert command.queue.empty()
    tick_until(world, lambda: not command.queue.empty())
    assert command.queue.get_nowait() is None
    assert (world.registry.loaded, world.registry.counts["unloads"]) == ({}, 1)


def test_unloads_of_clients_that_hang_up_do_not_pile_up() -> None:
    world = World(1, PATIENCE)
    world.queue.add(A, 0)
    for _ in range(2 * LOAD_TICKS):
        world.tick({0: 100.0})
    for _ in range(50):
        command = unload(A, Claim.COMMAND)
        world.registry.take(command)
        command.is_left = True
        world.tick({})
    assert world.registry._unloads == []
    assert list(world.registry.loaded) == [A]


def test_commands_that_no_client_waits_for_do_not_pile_up() -> None:
    world = World(1, PATIENCE)
    world.queue.add(A, 0)
    for _ in range(2 * LOAD_TICKS):
        world.tick(defaultdict(lambda: 100.0))
    for _ in range(50):
        world.registry.take(load(B))
        world.registry.take(unload(A))
    assert len(world.queue) + len(world.registry._unloads) == 2


# -- the rules by themselves -----------------------------------------------------------------------


def test_a_load_that_no_client_waits_for_never_takes_the_place_of_a_busy_model() -> None:
    queue, clock = queue_of()
    queue.add(B, "load", claim=Claim.UNWAITED)
    clock.now += 1000
    assert queue.plan([use(A, busy=True)], full) == SwapPlan()
    queue.add(A, "request")
    assert queue.plan([use(A)], full) == SwapPlan(), "a request waits for it"


def test_a_request_passes_a_command_that_has_to_wait() -> None:
    queue, clock = queue_of()
    queue.add(B, "load", claim=Claim.UNWAITED)
    clock.now += 1
    queue.add(ModelKey("c"), "request")
    clock.now += 30
    assert queue.plan([use(A, busy=True)], full) == SwapPlan(ModelKey("c"), A)


def test_a_model_that_is_loaded_again_soon_has_to_rest_for_twice_as_long() -> None:
    clock = Clock()
    backoff = CommandBackoff(30, 100, clock)
    found = []
    for _ in range(4):
        backoff.note_unload(A)
        backoff.note_load(A)
        found.append(backoff.seconds(A))
    assert found == [30, 60, 100, 100]
    backoff.note_load(A)
    assert backoff.seconds(A) == 100, "a request had unloaded it"
    backoff.note_unload(A)
    clock.now += 101
    backoff.note_load(A)
    assert backoff.seconds(A) == 0
