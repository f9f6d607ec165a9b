"""Random schedules of requests: what arrives when, waits, is swapped out or hangs up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
from engine.engines import (
    Told,
    assert_nothing_held,
    assert_stock,
    bytes_of,
    make_engine,
    stock_reply,
    words,
)
from engine.forms import EOS, FLAGS, PERSON, STOP, assert_stock_form, form_of
from hypothesis import strategies as st

from mlx_blockpool.engine.caches import PooledCaches
from mlx_blockpool.engine.engine import BlockPoolBatchEngine
from mlx_blockpool.engine.request import Request
from mlx_blockpool.spec import BLOCK_TOKENS
from mlx_blockpool.tier.cache import TieredPrefixCache

SYSTEMS = (0, 130, 256, 400)
BRANCHES = (0, 65)
# The last ends 3 tokens before a block does.
TAILS = (1, 20, None)


@dataclass(frozen=True)
class Arrival:
    """A request that comes after `wait` steps more, and hangs up after `patience` of them.

    said:   so many tokens of stock's reply and a second question follow; None: the first turn.
    pinned: its system prompt stays in memory for so many seconds.
    breaks: its sampler raises behind so many tokens.
    seed:   its tokens are drawn with it; None: the likeliest ones.
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
    schema: Any
    pinned: float | None = None
    breaks: int | None = None
    seed: int | None = None

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
        "schema": st.none(),
    }
    return st.lists(st.builds(Arrival, **{**parts, **fixed}), min_size=1, max_size=6)


CONFIG: dict[str, Any] = {
    "prefill_tokens": st.sampled_from([32, 64, 128]),
    "prefill_rows": st.sampled_from([1, 2, 8]),
    "decode_share": st.sampled_from([0.0, 0.5, 0.8]),
    "max_members": st.sampled_from([1, 2, 4, 16]),
}
configs = st.fixed_dictionaries(CONFIG)
# Replies that cross the end of a block in a pool that has not room for all of them.
CROWD: dict[str, Any] = {
    "wait": st.integers(0, 1),
    "system": st.integers(0, 1),
    "branch": st.just(0),
    "tail": st.just(2),
    "twin": st.integers(0, 3),
    "said": st.none(),
    "max_tokens": st.sampled_from([5, 8, 20]),
    "patience": st.sampled_from([None, None, 8, 14]),
}
# Some keep a form, in replies that are long enough for it.
IN_FORMS: dict[str, Any] = {
    "schema": st.sampled_from([None, PERSON, FLAGS]),
    "max_tokens": st.sampled_from([3, 8, 40, 100]),
}


def breaking(count: int) -> Callable[[mx.array], mx.array]:
    """A sampler that raises behind so many tokens."""
    calls = iter(range(1000))

    def draw(logprobs: mx.array) -> mx.array:
        if next(calls) >= count:
            raise KeyError("somebody else's code")
        return mx.argmax(logprobs, axis=-1)

    return draw


class Schedule:
    """The requests that an engine was given, and who took over from it: `swaps` are the steps after
    which another engine does.

    Requests have numbers of their own here, since each engine gives them new uids.
    """

    def __init__(
        self,
        name: str,
        requests: list[Arrival],
        more_blocks: int,
        config: dict[str, Any],
        swaps: frozenset[int] = frozenset(),
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
        self.engine, self.prefix = self.open(config)
        # What requests go through: with several ranks it is not the engine.
        self.driver: Any = self.engine

    def open(self, config: dict[str, Any]) -> tuple[BlockPoolBatchEngine, TieredPrefixCache]:
        return make_engine(self.name, self.n_bytes, **config)

    def run(self) -> tuple[BlockPoolBatchEngine, TieredPrefixCache, Told]:
        told = Told()
        while len(self.numbers) < len(self.requests) or len(self.engine):
            self.come_and_go()
            told.take([replace(event, uid=self.by_uid[event.uid]) for event in self.engine.next()])
            self.step += 1
            if self.step in self.swaps:
                self.swap()
            self.check_step()
            assert self.step < 3000, (
                f"{len(self.engine)} requests do not end; {dict(self.engine.counts)}"
            )
        return self.engine, self.prefix, told

    def come_and_go(self) -> None:
        for i, request in enumerate(self.requests):
            if i not in self.numbers and self.due[i] <= self.step:
                uids = self.driver.insert_all(self.choices(i))
                self.numbers[i] = [1000 * i + choice for choice in range(request.choices)]
                self.by_uid |= dict(zip(uids, self.numbers[i], strict=True))
            if request.patience is not None and self.due[i] + request.patience == self.step:
                for uid in [
                    uid for uid, number in self.by_uid.items() if number in self.numbers[i]
                ]:
                    self.driver.cancel(uid)
                self.cancelled.update(self.numbers[i])

    def choices(self, i: int) -> list[Request]:
        """The requests of an arrival."""
        request = self.requests[i]
        breakpoints = [(SYSTEMS[request.system], "system")] if request.mark else ()
        group = str(i) if request.choices > 1 else None
        pins = [] if request.pinned is None else [(SYSTEMS[request.system], request.pinned)]
        same = Request(
            self.prompts[i],
            request.max_tokens,
            breakpoints=breakpoints,
            agent=request.agent,
            group=group,
            priority=request.priority,
            pins=pins,
        )
        choices = [same] * request.choices
        if request.schema is not None:
            choices = [replace(same, form=form_of(request.schema), stop=STOP) for _ in choices]
        if request.breaks is not None:
            choices = [replace(each, sampler=breaking(request.breaks)) for each in choices]
        return choices

    def swap(self) -> None:
        """As two models of a server take turns: all requests are suspended, and continue in an
        engine that starts anew.
        """
        suspended = self.engine.suspend()
        assert_nothing_held(self.prefix)
        numbers = [self.by_uid[sequence.uid] for sequence in suspended]
        self.driver = self.engine = BlockPoolBatchEngine(
            self.engine.model, PooledCaches(self.prefix), self.engine.config
        )
        self.by_uid = dict(zip(map(self.engine.resume, suspended), numbers, strict=True))

    def check_step(self) -> None:
        """What holds behind every step."""
        assert self.prefix.arena.nbytes <= self.n_bytes
        self.check_turns()

    def check_turns(self) -> None:
        """No more than there are places, and of each agent only the request that arrived first."""
        live = self.engine.live
        assert len(live) <= self.engine.config.max_members
        for sequence in live:
            agent = sequence.request.agent
            earlier = [
                each
                for each in self.engine.sequences
                if each.request.agent == agent and each.uid < sequence.uid
            ]
            assert agent is None or all(each.is_choice_with(sequence) for each in earlier)

    def check(self, told: Told) -> None:
        broken = {
            number
            for i, numbers in self.numbers.items()
            for number in numbers
            if self.requests[i].breaks is not None
        }
        assert told.failed.keys() <= broken
        for i, number in [(i, number) for i, numbers in self.numbers.items() for number in numbers]:
            found = told.tokens.get(number, [])
            schema, most = self.requests[i].schema, self.requests[i].max_tokens
            if number not in self.cancelled and number not in told.failed:
                is_whole = schema is not None and found[-1] == EOS
                assert told.reasons[number] == ("stop" if is_whole else "length")
                assert is_whole or len(found) == most
            if schema is None:
                assert_stock(self.name, self.prompts[i], found)
            else:
                assert_stock_form(self.name, self.prompts[i], schema, found, most)


SCHEDULES: dict[str, Any] = {
    "requests": arrivals(),
    "more_blocks": st.sampled_from([0, 1, 2, 2, 3, 20]),
    "config": configs,
    "promised": st.sampled_from([1, 1, BLOCK_TOKENS]),
    "swaps": st.just(frozenset()) | st.frozensets(st.integers(1, 20), max_size=2),
}
CROWDS: dict[str, Any] = {
    "requests": arrivals(**CROWD),
    "more_blocks": st.integers(0, 3),
    "config": configs,
    "promised": st.just(1),
}
