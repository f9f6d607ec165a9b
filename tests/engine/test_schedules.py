"""Random schedules of requests: whatever arrives, waits, is swapped out or hangs up, replies are those of single sequences."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
from engine.engines import (
    Told,
    assert_nothing_held,
    assert_stock,
    bytes_of,
    make_engine,
    stock_reply,
    words,
)
from hypothesis import given
from hypothesis import strategies as st
from thorough import only, tried

from mlx_blockpool.engine import caches as caches_module
from mlx_blockpool.engine.caches import PooledCaches
from mlx_blockpool.engine.engine import BlockPoolBatchEngine
from mlx_blockpool.engine.request import Request
from mlx_blockpool.spec import BLOCK_TOKENS
from mlx_blockpool.tier.cache import TieredPrefixCache

PLAIN = ["llama", "gemma3_text", "gpt_oss", "qwen2"]
QUANTISED = [f"{name} K8V8" for name in (*PLAIN, "lfm2")] + ["gemma3_text K4V4", "gpt_oss K8V4", "llama K16V8"]
SYSTEMS = (0, 130, 256, 400)
BRANCHES = (0, 65)
# The last ends 3 tokens before a block does.
TAILS = (1, 20, None)


@dataclass(frozen=True)
class Arrival:
    """A request that comes after `wait` steps more, and hangs up after `patience` of them.

    said: so many tokens of stock's reply and a second question follow; None: the first turn.
    """

    wait: int
    system: int
    branch: int
    tail: int
    twin: int
    said: int | None
    max_tokens: int
    agent: str | None
    patience: int | None
    mark: bool
    choices: int
    priority: int

    def prompt(self, name: str) -> tuple[int, ...]:
        system = words(1, SYSTEMS[self.system])
        branch = words(10 + self.system, BRANCHES[self.branch])
        tail = TAILS[self.tail]
        count = -(len(system) + len(branch) + 3) % BLOCK_TOKENS if tail is None else tail
        first = (*system, *branch, *words(100 + self.twin, count))
        if self.said is None:
            return first
        return (*first, *stock_reply(name, first).tokens(self.said), *words(200, 30))


def arrivals(**fixed: Any) -> st.SearchStrategy[list[Arrival]]:
    parts: dict[str, Any] = {
        "wait": st.sampled_from([0, 0, 0, 1, 2, 5]),
        "system": st.integers(0, len(SYSTEMS) - 1),
        "branch": st.integers(0, len(BRANCHES) - 1),
        "tail": st.integers(0, len(TAILS) - 1),
        "twin": st.integers(0, 1),
        "said": st.sampled_from([None, None, 6]),
        "max_tokens": st.sampled_from([1, 2, 3, 5, 8, 8, 40]),
        "agent": st.sampled_from([None, None, "a", "b"]),
        "patience": st.none() | st.integers(0, 20),
        "mark": st.booleans(),
        "choices": st.sampled_from([1, 1, 1, 2, 5]),
        "priority": st.sampled_from([0, 0, 0, 1, -5]),
    }
    return st.lists(st.builds(Arrival, **{**parts, **fixed}), min_size=1, max_size=6)


configs = st.fixed_dictionaries(
    {
        "prefill_tokens": st.sampled_from([32, 64, 128]),
        "prefill_rows": st.sampled_from([1, 2, 8]),
        "decode_share": st.sampled_from([0.0, 0.5, 0.8]),
        "max_members": st.sampled_from([1, 2, 4, 16]),
    }
)
# Replies that cross the end of a block in a pool that has not room for all of them.
crowds = arrivals(
    wait=st.integers(0, 1),
    system=st.integers(0, 1),
    branch=st.just(0),
    tail=st.just(2),
    twin=st.integers(0, 3),
    said=st.none(),
    max_tokens=st.sampled_from([5, 8, 20]),
    patience=st.sampled_from([None, None, 8, 14]),
)


class Schedule:
    """The requests that an engine was given, and who took over from it: `swaps` are the steps after which another engine does.

    Requests have numbers of their own here, since each engine gives them new uids.
    """

    def __init__(
        self, name: str, requests: list[Arrival], more_blocks: int, config: dict[str, Any], swaps: frozenset[int] = frozenset()
    ) -> None:
        self.name = name
        self.swaps = swaps
        self.prompts = [a.prompt(name) for a in requests]
        longest = max(len(p) + a.max_tokens for p, a in zip(self.prompts, requests, strict=True))
        self.n_bytes = bytes_of(name, longest, more_blocks)
        self.requests = requests
        self.due = [sum(a.wait for a in requests[: i + 1]) for i in range(len(requests))]
        self.numbers: dict[int, list[int]] = {}
        self.by_uid: dict[int, int] = {}
        self.cancelled: set[int] = set()
        self.step = 0
        self.engine, self.prefix = make_engine(name, self.n_bytes, **config)

    def run(self) -> tuple[BlockPoolBatchEngine, TieredPrefixCache, Told]:
        told = Told()
        while len(self.numbers) < len(self.requests) or len(self.engine):
            self.come_and_go()
            told.take([replace(event, uid=self.by_uid[event.uid]) for event in self.engine.next()])
            self.step += 1
            if self.step in self.swaps:
                self.swap()
            assert self.prefix.arena.nbytes <= self.n_bytes
            self.check_turns()
            assert self.step < 3000, f"{len(self.engine)} requests do not end; {dict(self.engine.counts)}"
        return self.engine, self.prefix, told

    def come_and_go(self) -> None:
        for i, request in enumerate(self.requests):
            if i not in self.numbers and self.due[i] <= self.step:
                breakpoints = [(SYSTEMS[request.system], "system")] if request.mark else ()
                group = str(i) if request.choices > 1 else None
                same = Request(
                    self.prompts[i], request.max_tokens, breakpoints=breakpoints, agent=request.agent, group=group,
                    priority=request.priority,
                )  # fmt: skip
                uids = self.engine.insert_all([same] * request.choices)
                self.numbers[i] = [1000 * i + choice for choice in range(request.choices)]
                self.by_uid |= dict(zip(uids, self.numbers[i], strict=True))
            if request.patience is not None and self.due[i] + request.patience == self.step:
                self.engine.remove([uid for uid, number in self.by_uid.items() if number in self.numbers[i]])
                self.cancelled.update(self.numbers[i])

    def swap(self) -> None:
        """As two models of a server take turns: all requests are suspended, and continue in an engine that starts anew."""
        suspended = self.engine.suspend()
        assert_nothing_held(self.prefix)
        numbers = [self.by_uid[sequence.uid] for sequence in suspended]
        self.engine = BlockPoolBatchEngine(self.engine.model, PooledCaches(self.prefix), self.engine.config)
        self.by_uid = dict(zip(map(self.engine.resume, suspended), numbers, strict=True))

    def check_turns(self) -> None:
        """No more than there are places, and of each agent only the request that arrived first."""
        live = self.engine.live
        assert len(live) <= self.engine.config.max_members
        for sequence in live:
            agent = sequence.request.agent
            earlier = [each for each in self.engine.sequences if each.request.agent == agent and each.uid < sequence.uid]
            assert agent is None or all(each.is_choice_beside(sequence) for each in earlier)

    def check(self, told: Told) -> None:
        assert told.failed == {}
        for i, number in [(i, number) for i, numbers in self.numbers.items() for number in numbers]:
            found = told.tokens.get(number, [])
            if number not in self.cancelled:
                assert told.reasons[number] == "length"
                assert len(found) == self.requests[i].max_tokens
            assert_stock(self.name, self.prompts[i], found)


def run(name: str, *schedule_of: Any, promised: int, **more: Any) -> None:
    schedule = Schedule(name, *schedule_of, **more)
    with pytest.MonkeyPatch.context() as patch:
        # The room that a request finds at its start; with little of it, short replies are swapped out too.
        patch.setattr(caches_module, "BLOCK_TOKENS", promised)
        engine, prefix, told = schedule.run()
    schedule.check(told)
    engine.close()
    assert_nothing_held(prefix)


SCHEDULES: dict[str, Any] = {
    "requests": arrivals(),
    "more_blocks": st.sampled_from([0, 1, 2, 2, 3, 20]),
    "config": configs,
    "promised": st.sampled_from([1, 1, BLOCK_TOKENS]),
    "swaps": st.just(frozenset()) | st.frozensets(st.integers(1, 20), max_size=2),
}
CROWDS: dict[str, Any] = {"requests": crowds, "more_blocks": st.integers(0, 3), "config": configs, "promised": st.just(1)}


@pytest.mark.parametrize("name", only(PLAIN, "gemma3_text", "gpt_oss"))
@tried(3, 300)
@given(**SCHEDULES)
def test_replies_of_a_schedule_are_those_of_single_stock_sequences(name: str, requests: list[Arrival], **more: Any) -> None:
    run(name, requests, **more)


@pytest.mark.parametrize("name", only(QUANTISED, "gemma3_text K8V8"))
@tried(3, 120)
@given(**SCHEDULES)
def test_replies_of_a_schedule_over_quantised_blocks_are_too(name: str, requests: list[Arrival], **more: Any) -> None:
    run(name, requests, **more)


@pytest.mark.parametrize("name", only(PLAIN, "gemma3_text", "gpt_oss"))
@tried(2, 150)
@given(**CROWDS)
def test_replies_of_a_crowd_that_is_swapped_out_are_those_of_single_stock_sequences(
    name: str, requests: list[Arrival], **more: Any
) -> None:
    run(name, requests, **more)


@pytest.mark.parametrize("name", only(QUANTISED, "gemma3_text K8V8"))
@tried(2, 60)
@given(**CROWDS)
def test_replies_of_a_swapped_out_crowd_over_quantised_blocks_are_too(name: str, requests: list[Arrival], **more: Any) -> None:
    run(name, requests, **more)
