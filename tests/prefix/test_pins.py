"""What clients mark to be kept for a time: it stays under pressure until then, within its share,
and never in a request's way.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from prefix.computed import text
from prefix.lives import BLOCK, SPECS, Keeper
from thorough import seeds

from mlx_blockpool.errors import PoolExhaustedError
from mlx_blockpool.prefix.retention import RetentionPolicy
from mlx_blockpool.spec import ModelCacheSpec

EVERY = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
# Room for a handful of states.
STATES = 12 * 88
MINUTES = 300
HOUR = 3600


def press(keeper: Keeper, first: int = 100, count: int = 8) -> None:
    """Others ask for more than the pool holds."""
    for n in range(first, first + count):
        keeper.ask(text(n, 700))


@EVERY
def test_a_marked_beginning_stays_for_its_time_and_not_longer(spec: ModelCacheSpec) -> None:
    keeper = Keeper(spec, 20, state_bytes=STATES)
    system = text(1, 300)
    keeper.ask([*system, *text(2, 50)], pins=[(300, MINUTES)])
    press(keeper)
    assert keeper.hit(system) == 300
    keeper.wait(MINUTES - 1)
    press(keeper, 200)
    assert keeper.hit(system) == 300
    # Not used meanwhile: press() asks for other things.
    keeper.wait(2)
    assert len(keeper.pins) == 0
    press(keeper, 300)
    assert keeper.hit(system) < 10


@EVERY
def test_each_use_makes_it_stay_for_its_time_again(spec: ModelCacheSpec) -> None:
    keeper = Keeper(spec, 20, state_bytes=STATES)
    system = text(1, 300)
    keeper.ask([*system, *text(2, 50)], pins=[(300, MINUTES)])
    for n in range(4):
        keeper.wait(MINUTES - 10)
        # Once marked again, once only used.
        assert (
            keeper.ask([*system, *text(10 + n, 20)], pins=[(300, MINUTES)] if n % 2 else ()) == 300
        )
        press(keeper, 100 + 10 * n)
    assert keeper.hit(system) == 300
    assert len(keeper.pins) == 1


@EVERY
def test_a_shorter_mark_takes_no_time_from_a_longer_one(spec: ModelCacheSpec) -> None:
    keeper = Keeper(spec, 20, state_bytes=STATES)
    system = text(1, 300)
    keeper.ask([*system, 1], pins=[(300, HOUR)])
    keeper.ask([*system, 2], pins=[(300, MINUTES)])
    keeper.wait(HOUR - 1)
    press(keeper)
    assert keeper.hit(system) == 300


@EVERY
def test_a_pin_follows_what_grows_beyond_it(spec: ModelCacheSpec) -> None:
    """The block that the mark ends in is filled by later turns, and another node takes its
    place.
    """
    keeper = Keeper(spec, 20, state_bytes=STATES)
    prompt = text(1, 100)
    keeper.ask(prompt, pins=[(100, MINUTES)])
    for n in range(3):
        prompt = [*prompt, *text(2 + n, 60)]
        keeper.ask(prompt)
    press(keeper)
    assert keeper.hit(prompt[:100]) == 100
    keeper.wait(MINUTES)
    press(keeper)
    assert keeper.hit(prompt[:100]) < 10


def test_a_beginning_of_a_longer_mark_costs_nothing_more() -> None:
    keeper = Keeper(SPECS["full"], 20)
    prompt = text(1, 800)
    keeper.ask(prompt, pins=[(300, MINUTES), (600, MINUTES), (800, MINUTES)])
    assert (len(keeper.pins), keeper.pins.report()["pinned_bytes"]) == (1, 4 * BLOCK)
    keeper.ask([*prompt[:300], *text(2, 300)], pins=[(300, HOUR)])
    assert (len(keeper.pins), keeper.pins.report()["pinned_bytes"]) == (2, 4 * BLOCK), (
        "it lasts longer, in the same blocks"
    )
    keeper.wait(MINUTES)
    assert (len(keeper.pins), keeper.pins.report()["pinned_bytes"]) == (1, 2 * BLOCK)


def test_of_more_than_half_of_the_pool_those_that_end_soonest_go() -> None:
    keeper = Keeper(SPECS["full"], 20)
    for n in range(5):
        keeper.ask(text(n, 700), pins=[(700, MINUTES - n if n else HOUR)])
    # Each has three blocks, and ten may be pinned.
    assert keeper.pins.report() == {
        "pins": 3,
        "pinned_bytes": 9 * BLOCK,
        "most_pinned_bytes": 10 * BLOCK,
        "gave_way": 0,
        "refused": 0,
    }
    press(keeper)
    assert [keeper.hit(text(n, 700)) for n in range(5)] == [700, 700, 700, 0, 0]
    keeper.ask(long := text(9, 2700), pins=[(2700, HOUR), (2000, HOUR)])
    assert keeper.pins.num_refused == 1, "by itself it is more than half of the pool"
    assert keeper.pins.report()["pinned_bytes"] == 8 * BLOCK
    press(keeper)
    assert 2000 <= keeper.hit(long) < 2700


def test_a_request_goes_before_pins_and_takes_as_few_as_it_needs() -> None:
    keeper = Keeper(SPECS["full"], 20)
    prompts = [text(n, 300) for n in range(2)]
    for prompt, seconds in zip(prompts, (HOUR, MINUTES), strict=True):
        keeper.ask(prompt, pins=[(300, seconds)])
    keeper.ask(text(5, 16 * 256 - 20))
    assert (len(keeper.pins), keeper.pins.num_gave_way) == (2, 0)
    keeper.ask(text(6, 17 * 256 - 20))
    assert (len(keeper.pins), keeper.pins.num_gave_way) == (1, 1)
    assert keeper.hit(prompts[0]) == 300, "it would have ended later"
    assert keeper.hit(prompts[1]) < 300
    keeper.ask(text(7, 20 * 256 - 20))
    assert (len(keeper.pins), keeper.pins.num_gave_way) == (0, 2)


@EVERY
def test_a_pool_full_of_pins_serves_all_that_an_empty_one_can(spec: ModelCacheSpec) -> None:
    keeper = Keeper(spec, 20, state_bytes=STATES, pinned_share=1.0)
    for n in range(20):
        keeper.ask(text(n, 300), pins=[(300, HOUR + n)])
    assert len(keeper.pins) > 3
    most = min(keeper.arena.pool.sequence_capacity() - 20, 6000)
    keeper.ask(text(50, most))
    assert keeper.hit(text(50, most)) == most


def test_pins_do_not_go_for_a_request_that_could_not_be_served_even_so() -> None:
    keeper = Keeper(SPECS["full"], 20)
    keeper.ask(text(1, 700), pins=[(700, MINUTES)])
    live = keeper.prefix.acquire(other := text(2, 15 * 256 - 20), 20)
    with pytest.raises(PoolExhaustedError):
        keeper.prefix.acquire(text(3, 6 * 256), 20)
    assert (len(keeper.pins), keeper.hit(text(1, 700))) == (1, 700)
    assert keeper.pins.num_gave_way == 0
    found = keeper.prefix.acquire(text(3, 4 * 256), 20)
    assert (len(keeper.pins), keeper.pins.num_gave_way) == (0, 1)
    for acquired, prompt in ((live, other), (found, text(3, 4 * 256))):
        keeper.compute(acquired, prompt)
        keeper.end(acquired, prompt)


def test_running_states_go_before_pinned_ones() -> None:
    spec = SPECS["hybrid"]
    keeper = Keeper(spec, 40, state_bytes=6 * spec.fixed_bytes_per_agent())
    prompts = [text(n, 300) for n in range(3)]
    for n, prompt in enumerate(prompts):
        keeper.ask(prompt, pins=[(300, MINUTES + n)])
    assert len(keeper.pins) == 3
    live = [keeper.prefix.acquire(text(10 + n, 50), 20) for n in range(5)]
    assert keeper.pins.num_gave_way == 2, "those that end soonest"
    assert [keeper.hit(prompt) for prompt in prompts] == [0, 0, 300]
    live.append(keeper.prefix.acquire(text(20, 50), 20))
    with pytest.raises(PoolExhaustedError, match="States have"):
        keeper.prefix.acquire(text(21, 50), 20)
    for found in live:
        keeper.prefix.discard(found.caches)
    keeper.check()


def test_of_states_only_the_marked_one_is_pinned() -> None:
    spec = SPECS["hybrid"]
    keeper = Keeper(spec, 40, state_bytes=8 * spec.fixed_bytes_per_agent())
    prompt = text(1, 600)
    keeper.ask(prompt, pins=[(300, MINUTES)], places=[50, 100, 150, 200, 250])
    assert keeper.pins.report()["pinned_bytes"] == 2 * BLOCK + spec.fixed_bytes_per_agent()
    for n in range(12):
        keeper.ask(text(50 + n, 60))
    assert [keeper.hit(prompt[:n]) for n in (100, 250, 300, 600)] == [0, 0, 300, 300]


def test_pins_are_forgotten_with_everything_else() -> None:
    keeper = Keeper(SPECS["window"], 20)
    keeper.ask(text(1, 300), pins=[(300, HOUR)])
    keeper.prefix.clear()
    keeper.check()
    assert (len(keeper.pins), keeper.prefix.nbytes) == (0, 0)
    assert all(counts.pinned == 0 for counts in keeper.arena.pool.settle())


# -- on disk ---------------------------------------------------------------------------------------


@pytest.mark.sampled
@pytest.mark.parametrize("how", ["mark", "day"])
@pytest.mark.parametrize(
    "spec", [SPECS["full"], SPECS["window"], SPECS["hybrid"]], ids=["full", "window", "hybrid"]
)
def test_the_disks_budget_spares_it_until_then(
    tmp_path: Path, spec: ModelCacheSpec, how: str
) -> None:
    keeper = Keeper(spec, 60, tmp_path, state_bytes=40 * 88, store_bytes=100_000, idle_seconds=0.0)
    system = text(1, 300)
    policy = RetentionPolicy(retention="day") if how == "day" else RetentionPolicy()
    keeper.ask(system, pins=[(300, HOUR)] if how == "mark" else (), policy=policy)
    keeper.write(tails=True)

    def fill(first: int) -> None:
        for n in range(first, first + 16):
            keeper.ask(text(n, 600))
            keeper.wait(0)
            keeper.write(tails=True)

    fill(100)
    assert 50_000 < keeper.prefix.stored.store.report()["bytes"] <= 100_000  # type: ignore[union-attr]
    after = Keeper(spec, 60, tmp_path, state_bytes=40 * 88, store_bytes=100_000)
    assert after.ask([*system, 49]) == 300
    after.prefix.close()
    keeper.wait(HOUR if how == "mark" else 24 * HOUR)
    fill(200)
    keeper.prefix.close()
    assert (
        Keeper(spec, 60, tmp_path, state_bytes=40 * 88, store_bytes=100_000).ask([*system, 49]) == 0
    )


def test_a_day_is_a_day_after_the_last_use(tmp_path: Path) -> None:
    keeper = Keeper(SPECS["full"], 60, tmp_path, idle_seconds=0.0)
    keeper.ask(text(1, 300), policy=RetentionPolicy(retention="day"))
    keeper.wait(23 * HOUR)
    keeper.ask([*text(1, 300), 3])
    keeper.wait(23 * HOUR)
    assert len(keeper.prefix.retention.days) == 1
    keeper.wait(HOUR)
    assert len(keeper.prefix.retention.days) == 0


def test_at_most_half_of_the_disks_budget_is_spared(tmp_path: Path) -> None:
    keeper = Keeper(SPECS["full"], 60, tmp_path, store_bytes=60_000, idle_seconds=0.0)
    for n in range(12):
        keeper.ask(text(n, 512), policy=RetentionPolicy(retention="day"))
        keeper.wait(1)
        keeper.write(tails=True)
    keeper.ask(text(50, 512))
    keeper.write(tails=True)
    store = keeper.prefix.stored.store  # type: ignore[union-attr]
    report = store.report()
    # What is not written yet is counted without the head of its file.
    assert 20_000 < report["pinned_bytes"] < 36_000
    assert store.counts["over budget"] == 0, "what nobody asked for has found room as well"


@EVERY
def test_what_is_for_memory_is_not_written_until_somebody_goes_on_from_it(
    tmp_path: Path, spec: ModelCacheSpec
) -> None:
    keeper = Keeper(spec, 60, tmp_path, state_bytes=40 * 88, idle_seconds=0.0)
    system, turn = text(1, 512), text(2, 250)
    keeper.ask([*system, *turn], policy=RetentionPolicy(retention="memory"), places=[512])
    assert keeper.prefix.close()
    assert not any(path.suffix == ".safetensors" for path in tmp_path.rglob("*")), (
        "not at the end of the server either"
    )
    keeper = Keeper(spec, 60, tmp_path, state_bytes=40 * 88, idle_seconds=0.0)
    keeper.ask([*system, *turn], policy=RetentionPolicy(retention="memory"), places=[512])
    assert keeper.ask([*system, *text(3, 20)]) == 512
    assert keeper.prefix.close()
    again = Keeper(spec, 60, tmp_path, state_bytes=40 * 88)
    assert again.ask([*system, 49]) == 512
    assert again.hit([*system, *turn]) < 520, "nobody went on from there"


# -- random schedules ------------------------------------------------------------------------------


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["full", "window", "hybrid", "states alone"])
@pytest.mark.parametrize("seed", seeds(2, 12))
def test_whatever_happens_limits_hold_and_what_is_pinned_stays(name: str, seed: int) -> None:
    choose = random.Random(seed)
    keeper = Keeper(
        SPECS[name], choose.choice([12, 20, 40]), state_bytes=choose.choice([8, 16]) * 88
    )
    live: list[tuple[object, list[int], list[tuple[int, float]]]] = []
    systems = [text(n, choose.choice([100, 256, 300, 520])) for n in range(3)]
    for _ in range(60):
        if choose.random() < 0.15:
            keeper.wait(choose.choice([1, 200, 400]))
        if live and (len(live) > 2 or choose.random() < 0.4):
            found, prompt, pins = live.pop(choose.randrange(len(live)))
            keeper.compute(found, prompt, places={end for end, _ in pins})  # type: ignore[arg-type]
            keeper.end(found, prompt, pins)  # type: ignore[arg-type]
            for end, _ in pins if len(keeper.pins) else ():
                assert keeper.hit(prompt[:end]) >= 0
        else:
            prompt = [
                *choose.choice(systems),
                *text(choose.randrange(10**6), choose.choice([1, 40, 300, 700])),
            ]
            ends = choose.sample(range(1, len(prompt) + 1), min(2, len(prompt)))
            pins = [(end, choose.choice([MINUTES, HOUR])) for end in sorted(ends)]
            before = {timed.name: (timed, keeper.pins.num_gave_way) for timed in keeper.pins}
            try:
                found = keeper.prefix.acquire(prompt, 20)
            except PoolExhaustedError:
                assert live, "nothing is in use, and pins were in the way"
                assert {timed.name for timed in keeper.pins} == set(before)
                continue
            live.append((found, prompt, pins))
        keeper.check()
        for timed in keeper.pins:
            path = [node.latest for node in timed.ref.path]
            assert all(node.in_memory for node in path), "a block of what is pinned has gone"
    for found, prompt, pins in live:
        keeper.compute(found, prompt)  # type: ignore[arg-type]
        keeper.end(found, prompt, pins)  # type: ignore[arg-type]
    keeper.wait(10 * HOUR)
    keeper.check()
    assert all(counts.pinned == 0 for counts in keeper.arena.pool.settle())
