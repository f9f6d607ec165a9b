"""Engines of several ranks, as threads: rank 0 leads through a plan, all follow its heads and
facts.
"""

from __future__ import annotations

import gc
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from engine.engines import Told, attached, caches_of, open_prefix
from ranks.threads import ThreadRanks, on_ranks

from mlx_blockpool.config import EngineConfig, RankConfig
from mlx_blockpool.engine.caches import PooledCaches
from mlx_blockpool.engine.engine import BlockPoolBatchEngine
from mlx_blockpool.engine.sequence import Sequence
from mlx_blockpool.kv.pool import BlockPool
from mlx_blockpool.kv.prompt_cache import sequence_of
from mlx_blockpool.kv.sequence import SequenceBlocks
from mlx_blockpool.prefix.eviction import eviction_order
from mlx_blockpool.ranks.driver import GroupDriver
from mlx_blockpool.ranks.facts import Unload, read, write
from mlx_blockpool.ranks.group import Ranks
from mlx_blockpool.ranks.head import Act, Head, TurnClock
from mlx_blockpool.tier.cache import TieredPrefixCache

STEP_SECONDS = 0.004
CONFIG = RankConfig(most_turns=4)
# Models are made of random numbers, one after the other.
MAKING = threading.Lock()


@dataclass
class Rank:
    """One rank: its engine, what it told, all that must be alike after each step, and how often
    it met the others.
    """

    ranks: Ranks
    driver: GroupDriver
    prefix: TieredPrefixCache
    clock: TurnClock
    suspended: dict[int, Sequence]
    told: Told = field(default_factory=Told)
    trace: list[str] = field(default_factory=list)
    leases: Counter[int] = field(default_factory=Counter)

    @property
    def engine(self) -> BlockPoolBatchEngine:
        return self.driver.engine

    def note(self) -> None:
        pool, engine = self.prefix.pool, self.engine
        tables = [
            (each.uid, each.computed, each.due, each.tokens[: each.computed], _tables(each))
            for each in engine.sequences
        ]
        order = [eviction_order(pool, group) for group in range(len(pool.groups))]
        pins = [(pin.name, pin.until) for pin in self.prefix.retention.pins]
        self.trace.append(
            repr(
                (tables, order, pins, self.prefix.index.state_bytes, sorted(engine.counts.items()))
            )
        )

    def swap(self) -> list[Sequence]:
        """As when the model is unloaded and loaded again: another engine continues."""
        suspended = self.driver.suspend()
        model, config = self.engine.model, self.engine.config
        self.driver = GroupDriver(
            model, caches_of(self.prefix), config, self.ranks, self.clock, self.suspended
        )
        return suspended


def _tables(sequence: Sequence) -> Any:
    blocks = sequence_of(sequence.caches) if sequence.caches else None
    return None if blocks is None else [table.ids for table in blocks.tables]


def make_rank(ranks: Ranks, name: str, n_bytes: int, config: EngineConfig) -> Rank:
    with MAKING:
        model, prefix = attached(name, ranks.rank)[0], open_prefix(name, n_bytes)
    return rank_of(ranks, model, caches_of(prefix), config)


def rank_of(ranks: Ranks, model: Any, caches: PooledCaches, config: EngineConfig) -> Rank:
    clock, suspended = TurnClock(), dict[int, Sequence]()
    driver = GroupDriver(model, caches, config, ranks, clock, suspended)
    return Rank(ranks, driver, caches.prefix, clock, suspended)


class Plan:
    """What rank 0 does before each turn: come() inserts and cancels, and returns whether more is
    to come.
    """

    swaps: frozenset[int] = frozenset()

    def come(self, driver: GroupDriver, turn: int) -> bool:
        raise NotImplementedError

    def take(self, told: Told, events: list[Any]) -> None:
        told.take(events)

    def resume(self, driver: GroupDriver, suspended: list[Sequence]) -> None:
        for sequence in suspended:
            driver.resume(sequence)


def run_ranked(size: int, plan: Plan, make: Callable[[Ranks], Rank]) -> list[Rank]:
    """All ranks through a plan.

    They are alike after every step, and no block comes back when cycles are collected.
    """

    def act(ranks: ThreadRanks) -> Rank:
        return follow(make(ranks), plan)

    with no_blocks_from_collected_cycles():
        found = on_ranks(size, act)
    for other in found[1:]:
        for step, (own, theirs) in enumerate(zip(found[0].trace, other.trace, strict=True)):
            assert own == theirs, f"rank {other.ranks.rank} differs after step {step}"
    return found


def follow(rank: Rank, plan: Plan, turns: int = 3000) -> Rank:
    """One rank through the plan that rank 0 has."""
    ranks, rng, now = rank.ranks, random.Random(1), 0
    leads = ranks.rank == 0
    for turn in range(turns):
        more = leads and plan.come(rank.driver, turn)
        now += rng.randrange(1_000, 50_000)
        lease = rank.driver.lease_for(STEP_SECONDS, CONFIG) if leads else 0
        is_over = leads and not more and not len(rank.driver) and rank.driver.is_blocked
        act = Act.STOP if is_over else Act.STEP
        head = Head(act, now, int(STEP_SECONDS * 1e6), lease, fingerprint=rank.driver.fingerprint())
        facts = rank.driver.outgoing() + ([Unload()] if leads and turn in plan.swaps else [])
        sent = ranks.exchange(head, write([("", fact) for fact in facts]))
        assert len({each.head.fingerprint for each in sent}) == 1, (
            f"the ranks differ before turn {turn}"
        )
        if sent[0].head.act == Act.STOP:
            return rank
        rank.clock.begin(sent[0].head)
        given = [fact for each in sent for _, fact in read(each.mail)]
        rank.driver.apply(given)
        if Unload() in given:
            happened = rank.driver.take_events()
            suspended = rank.swap()
            if leads:
                plan.take(rank.told, happened)
                plan.resume(rank.driver, suspended)
            continue
        _step(rank, plan, sent[0].head.turns)
    raise AssertionError(f"{len(rank.driver)} requests do not end; {dict(rank.engine.counts)}")


def _step(rank: Rank, plan: Plan, turns: int) -> None:
    for taken in range(1, turns + 1):
        events = rank.driver.next()
        if rank.ranks.rank == 0:
            plan.take(rank.told, events)
        rank.note()
        if taken == turns or not rank.driver.is_steady:
            rank.leases[taken] += 1
            break
    if rank.clock.now % 0.01 < 0.001:
        gc.collect()


@contextmanager
def no_blocks_from_collected_cycles() -> Iterator[None]:
    """The collector runs at other times on each rank: what it gave back would make them differ."""
    collecting: set[int] = set()
    found: list[str] = []
    release, end = BlockPool.release_deferred, SequenceBlocks.__del__

    def watch(phase: str, _: Any) -> None:
        (collecting.add if phase == "start" else collecting.discard)(threading.get_ident())

    def release_deferred(pool: BlockPool, table: Any) -> None:
        found.extend(
            [f"{len(table.ids)} blocks"]
            if threading.get_ident() in collecting and table.ids
            else []
        )
        release(pool, table)

    def end_sequence(blocks: SequenceBlocks) -> None:
        if threading.get_ident() in collecting and blocks.state_bytes:
            found.append(f"{blocks.state_bytes} bytes of states")
        end(blocks)

    # What others have left.
    gc.collect()
    gc.callbacks.append(watch)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(BlockPool, "release_deferred", release_deferred)
            patch.setattr(SequenceBlocks, "__del__", end_sequence)
            yield
    finally:
        gc.callbacks.remove(watch)
    assert not found, f"{found} came back when cycles were collected"
