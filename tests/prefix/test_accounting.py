"""Whose account each block is on, and what goes where an agent has brought in more than its
quota.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from prefix.computed import text
from prefix.lives import BLOCK, SPECS, Keeper
from thorough import seeds

from mlx_blockpool.errors import PoolExhaustedError
from mlx_blockpool.prefix.index import ANONYMOUS, Accounting
from mlx_blockpool.prefix.retention import RetentionPolicy

A, B = RetentionPolicy("a"), RetentionPolicy("b")


def test_what_is_charged_stays_where_it_is_until_it_is_dropped() -> None:
    charges = Accounting()
    charges.charge("x", 10, "a")
    charges.charge("x", 10, "b")
    charges.charge("y", 5, "a")
    charges.charge("z", 7, None)
    assert charges.largest(9) == {"a": 15}
    assert (charges.owner_of("x"), charges.owner_of("z"), charges.nbytes("b")) == ("a", None, 0)
    charges.use("x")
    assert list(charges.items_of("a")) == ["y", "x"]
    charges.release("x")
    charges.charge("x", 10, "b")
    assert charges.largest(9) == {"b": 10, "a": 5}
    assert charges.largest(1) == {"b": 10}
    charges.check({"x": 10, "y": 5, "z": 7})
    with pytest.raises(AssertionError):
        charges.check({"x": 10, "y": 5})
    with pytest.raises(AssertionError):
        charges.check({"x": 10, "y": 6, "z": 7})


def test_shared_blocks_are_charged_once_to_whoever_computed_them_first() -> None:
    keeper = Keeper(SPECS["full"], 40)
    system = text(1, 512)
    keeper.ask([*system, *text(2, 256)], policy=A)
    assert keeper.agents == {"a": 3 * BLOCK}
    keeper.ask([*system, *text(3, 512)], policy=B)
    assert keeper.agents == {"a": 3 * BLOCK, "b": 2 * BLOCK}
    keeper.ask([*system, *text(4, 256)])
    assert keeper.agents == {"a": 3 * BLOCK, "b": 2 * BLOCK, ANONYMOUS: BLOCK}


def test_a_block_that_another_agent_fills_stays_on_the_account_of_who_began_it() -> None:
    keeper = Keeper(SPECS["full"], 40)
    prompt = text(1, 100)
    keeper.ask(prompt, policy=A)
    keeper.ask([*prompt, *text(2, 300)], policy=B)
    # In place: there is one block fewer than if it had been copied.
    assert keeper.agents == {"a": BLOCK, "b": BLOCK}
    keeper.prefix.trim_to(0)
    assert keeper.agents == {}


def test_what_comes_from_disk_is_nobodys_unless_it_is_known_whose(tmp_path: Path) -> None:
    first = Keeper(SPECS["full"], 20, tmp_path, idle_seconds=0.0)
    first.ask(prompt := text(1, 768), policy=A)
    first.write(tails=True)
    first.prefix.trim_to(0)
    assert first.agents == {}
    assert first.ask([*prompt, 1], policy=B) == 768
    assert first.agents == {"a": 3 * BLOCK, "b": BLOCK}
    first.prefix.close()
    again = Keeper(SPECS["full"], 20, tmp_path)
    assert again.ask([*prompt, 1, 2], policy=B) == 769
    assert again.agents == {}


def test_who_computes_anew_what_is_on_disk_only_is_charged(tmp_path: Path) -> None:
    keeper = Keeper(SPECS["full"], 20, tmp_path, idle_seconds=0.0)
    keeper.ask(prompt := text(1, 768), policy=A)
    keeper.write(tails=True)
    keeper.prefix.trim_to(0)
    # A disk that does not answer.
    keeper.prefix.stored.restores.is_worth_reading = lambda wanted: False  # type: ignore[method-assign, union-attr]
    assert keeper.ask([*prompt, 1], policy=B) == 0
    assert keeper.agents == {"b": 4 * BLOCK}


# -- quotas ----------------------------------------------------------------------------------------


def test_an_agents_own_oldest_ends_go_and_no_other_agents() -> None:
    keeper = Keeper(SPECS["full"], 60, agent_bytes=6 * BLOCK)
    other = text(50, 1500)
    keeper.ask(other, policy=B)
    prompts = [text(n, 512) for n in range(5)]
    for prompt in prompts:
        keeper.ask(prompt, policy=A)
    assert keeper.agents == {"a": 6 * BLOCK, "b": 6 * BLOCK}
    assert [keeper.hit(prompt) >= 512 for prompt in prompts] == [False, False, True, True, True]
    assert keeper.hit(other) == 1500
    assert keeper.prefix.retention.report()["forgotten_for_quotas"] == 4


def test_requests_without_a_name_are_one_account_without_a_limit() -> None:
    keeper = Keeper(SPECS["full"], 60, agent_bytes=2 * BLOCK)
    keeper.ask(text(1, 1024))
    assert keeper.agents == {ANONYMOUS: 4 * BLOCK}
    keeper.ask(text(2, 1024), policy=A)
    assert keeper.agents == {"a": 2 * BLOCK, ANONYMOUS: 4 * BLOCK}


def test_a_request_that_is_longer_than_the_quota_is_served_and_cut_when_it_ends() -> None:
    keeper = Keeper(SPECS["full"], 60, agent_bytes=3 * BLOCK)
    prompt = text(1, 2000)
    found = keeper.prefix.acquire(prompt, 20)
    keeper.compute(found, prompt, A, places=[512, 1024])
    assert keeper.agents["a"] == 4 * BLOCK, "nothing goes that is in use"
    keeper.end(found, prompt, policy=A)
    assert keeper.agents == {"a": 3 * BLOCK}
    assert keeper.hit(prompt) == 768


def test_what_others_lead_on_from_and_what_is_pinned_or_in_use_stays() -> None:
    keeper = Keeper(SPECS["full"], 60, agent_bytes=BLOCK)
    system = text(1, 512)
    found = keeper.prefix.acquire(system, 20)
    keeper.compute(found, system, A)
    keeper.prefix.insert(system, found.caches, "system", A)
    keeper.ask([*system, *text(2, 256)], policy=B)
    keeper.end(found, system, policy=A)
    assert keeper.agents == {"a": 2 * BLOCK, "b": BLOCK}, "another's end stands on it"
    keeper.ask(marked := text(3, 512), pins=[(512, 300)], policy=A)
    assert keeper.hit(marked) >= 512
    running = keeper.prefix.acquire([*text(4, 512)], 20)
    keeper.compute(running, text(4, 512), A)
    keeper.prefix.insert(text(4, 512), running.caches, "user", A)
    keeper.ask(text(5, 512), policy=A)
    assert keeper.hit(text(4, 512)) >= 512, "it is in use"
    assert keeper.hit(text(5, 512)) < 100
    keeper.end(running, text(4, 512), policy=A)
    assert keeper.agents == {"a": 4 * BLOCK, "b": BLOCK}


def test_what_is_over_the_quota_stays_on_disk(tmp_path: Path) -> None:
    keeper = Keeper(SPECS["full"], 60, tmp_path, agent_bytes=2 * BLOCK, idle_seconds=0.0)
    prompts = [text(n, 512) for n in range(3)]
    for prompt in prompts:
        found = keeper.prefix.acquire(prompt, 20)
        keeper.compute(found, prompt, A)
        keeper.prefix.insert(prompt, found.caches, "user", A)
        keeper.write(tails=True)
        keeper.end(found, prompt, policy=A)
    assert keeper.agents == {"a": 2 * BLOCK}
    assert [keeper.ask([*prompt, 1], policy=B) for prompt in prompts] == [512, 512, 512]


def test_of_states_those_go_first_that_a_conversation_has_left_behind() -> None:
    spec = SPECS["hybrid"]
    state = spec.fixed_bytes_per_agent()
    keeper = Keeper(spec, 60, state_bytes=40 * state, agent_bytes=2 * BLOCK + 3 * state)
    prompt = text(1, 100)
    for n in range(6):
        prompt = [*prompt, *text(2 + n, 60)]
        assert keeper.ask(prompt, policy=A) == (0 if not n else len(prompt) - 60)
    assert keeper.agents == {"a": 2 * BLOCK + 3 * state}
    assert keeper.hit(prompt) == len(prompt)


# -- random schedules ------------------------------------------------------------------------------


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["full", "window", "hybrid", "composite", "states alone"])
@pytest.mark.parametrize("seed", seeds(2, 10))
def test_charges_are_exact_whatever_happens(tmp_path: Path, name: str, seed: int) -> None:
    """PrefixCache.check() compares them with what there is after every step."""
    choose = random.Random(seed)
    folder = tmp_path if seed % 2 else None
    quota = choose.choice([None, 3 * BLOCK, 8 * BLOCK])
    keeper = Keeper(
        SPECS[name],
        choose.choice([14, 30]),
        folder,
        state_bytes=12 * 88,
        agent_bytes=quota,
        idle_seconds=0.0,
    )
    systems = [text(n, choose.choice([90, 256, 300])) for n in range(2)]
    past = [systems[0]]
    for _ in range(50):
        what = choose.random()
        if what < 0.7:
            start = choose.choice([*systems, choose.choice(past)])
            cut = start[: choose.randrange(1, len(start) + 1)] if choose.random() < 0.2 else start
            prompt = [*cut, *text(choose.randrange(10**6), choose.choice([1, 40, 200, 500]))][:2000]
            policy = RetentionPolicy(
                choose.choice(["a", "b", None]), choose.choice([None, None, "memory", "day"])
            )
            others = {who: n for who, n in keeper.agents.items() if who != policy.owner}
            try:
                found = keeper.prefix.acquire(prompt, 20)
            except PoolExhaustedError:
                pytest.fail("nothing is in use, and there was no room")
            keeper.compute(found, prompt, policy, places=[choose.randrange(1, len(prompt) + 1)])
            keeper.prefix.release(prompt, found.caches, policy=policy)
            before = keeper.agents
            keeper.prefix.retention.quotas.enforce(policy.owner)
            after = keeper.agents
            assert {who: n for who, n in after.items() if who != policy.owner} == {
                who: n for who, n in before.items() if who != policy.owner
            }, "a quota took what was another's"
            grown = {who for who, n in after.items() if n > others.get(who, 0)}
            assert grown <= {policy.owner} or folder is not None, (
                "only what comes back from disk goes on another's account"
            )
            past = [*past[-6:], prompt]
        elif what < 0.8:
            keeper.prefix.trim_to(choose.choice([0, 5 * BLOCK]))
        elif folder is not None:
            keeper.write(tails=choose.random() < 0.5)
        keeper.check()
    keeper.prefix.trim_to(0)
    keeper.check()
    assert keeper.agents == {}
