"""Groups of ranks with an engine, a pool and a disk each, as threads that take turns together as a
server's ranks do.

Each rank has a whole model. What an exchange compares is not the engine's fingerprint alone but
everything that is cached.
"""

from __future__ import annotations

import gc
import random
import zlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from engine.engines import Told, assert_stock, attached, bytes_of, words
from ranks.threads import ThreadRanks, on_ranks
from store.disks import QuickDisk
from store.stores import NAMESPACE

from mlx_blockpool.config import EngineConfig, RankConfig, StoreConfig
from mlx_blockpool.engine.caches import PooledCaches
from mlx_blockpool.engine.engine import BlockPoolBatchEngine
from mlx_blockpool.engine.request import Event, Request
from mlx_blockpool.kv.arena import KVArena
from mlx_blockpool.kv.capabilities import RAGGED
from mlx_blockpool.prefix.eviction import eviction_order
from mlx_blockpool.prefix.salts import SHARED
from mlx_blockpool.ranks.driver import GroupDriver
from mlx_blockpool.ranks.facts import Lost, read, write
from mlx_blockpool.ranks.head import Act, Head, TurnClock
from mlx_blockpool.store.prompt_store import PromptStore
from mlx_blockpool.tier.agreement import Restored
from mlx_blockpool.tier.cache import TieredPrefixCache
from mlx_blockpool.tier.write_behind import StoredPrefixes

# By the clock of rank 0.
TURN_US = 10_000


class DivergedError(AssertionError):
    """The ranks have different caches."""


@dataclass
class RankLife:
    """A rank, from its start until it is stopped. `seen`: what was cached at its last exchanges."""

    ranks: ThreadRanks
    driver: GroupDriver
    prefix: TieredPrefixCache
    clock: TurnClock
    store: PromptStore
    seen: list[str] = field(default_factory=list)
    turns: int = 0

    @property
    def engine(self) -> BlockPoolBatchEngine:
        return self.driver.engine

    def exchange(self, head: Head) -> Head:
        """One exchange, and what it brings. Returns the head of rank 0."""
        stored = self.prefix.stored
        has_store = isinstance(stored, StoredPrefixes)
        lost = stored.ledger.take_lost() if has_store else []
        restored = stored.restores.restored() if has_store else Restored(0, 0, False)
        self.seen = [*self.seen[-1:], cached(self.driver, self.prefix)]
        head = Head(
            **{
                **vars(head),
                "now_us": self.turns * TURN_US,
                "step_us": TURN_US // 10,
                "fingerprint": zlib.crc32(self.seen[-1].encode()),
                "takes": self.store.takes(),
                "restore": restored.number,
                "restored": restored.records,
                "failed": restored.has_failed,
            }
        )
        facts = [
            ("", fact)
            for fact in [*(self.driver.outgoing() if self.ranks.rank == 0 else []), *lost]
        ]
        sent = self.ranks.exchange(head, write(facts))
        if len({each.head.fingerprint for each in sent}) > 1:
            texts = [
                each.mail.decode()
                for each in self.ranks.exchange(Head(), "\n".join(self.seen).encode())
            ]
            raise DivergedError(
                f"turn {self.turns}, all ranks before it and then:\n" + "\n\n".join(texts)
            )
        self.clock.begin(sent[0].head)
        for each in sent:
            for _, fact in read(each.mail):
                if isinstance(fact, Lost):
                    assert has_store
                    stored.forget(fact)
                else:
                    self.driver.apply([fact])
        if has_store:
            stored.ledger.agree(all(each.head.takes for each in sent))
            stored.restores.commit([each.head for each in sent])
        self.turns += 1
        return sent[0].head

    def steps(self, turns: int) -> list[Event]:
        """The steps of a turn, or the work of an idle one."""
        events: list[Event] = []
        if not len(self.driver):
            self.prefix.keep_up()
            self.prefix.stored.write_behind()
            return events
        for step in range(turns):
            if not step or self.driver.is_steady:
                events += self.driver.next()
        return events

    def stop(self) -> None:
        self.engine.close()
        self.prefix.close()


def cached(driver: GroupDriver, prefix: TieredPrefixCache) -> str:
    """Everything that has to be equal on all ranks, as text."""
    index, pool = prefix.index, prefix.pool
    nodes = []
    for root in sorted(index.trie.roots(), key=lambda root: root.salt):
        # A root that nothing is below goes when cycles are collected.
        for node in root.subtree() if root.children else ():
            kept = node
            found: list[Any] = [
                node.hash.hex()[:6],
                node.start,
                node.end,
                kept.in_memory,
                kept.on_disk,
            ]
            found += [kept.blocks if kept.in_memory else (), sorted(kept.checkpoints)]
            nodes.append([*found, sorted(kept.records)])
    order = [eviction_order(pool, group) for group in range(len(pool.groups))]
    engine = driver.engine
    running = [
        (each.uid, each.computed, len(each.tokens), each.tokens[-1]) for each in engine.sequences
    ]
    return repr((driver.fingerprint(), engine.clock(), running, nodes, order, dict(engine.counts)))


class FlakyDisk(QuickDisk):
    """Some of its calls fail, by chance: of files that are made, and of files that are read.

    Some files are torn.
    """

    def __init__(self, seed: int, fails: float) -> None:
        self._rng = random.Random(seed)
        self._fails = fails

    def _at(self, call: str) -> None:
        if self._rng.random() < self._fails:
            raise OSError(5, f"{call} has failed")

    def create(self, path: Path) -> int:
        self._at("create")
        return super().create(path)

    def rename(self, old: Path, new: Path) -> None:
        self._at("rename")
        super().rename(old, new)
        if self._rng.random() < self._fails:
            new.write_bytes(new.read_bytes()[:-9] + b"ninebytes")

    def read_into(self, *args: Any) -> Any:
        self._at("read")
        if self._rng.random() < self._fails:
            raise FileNotFoundError("gone")
        return super().read_into(*args)


@dataclass(frozen=True)
class Schedule:
    """What happens to a group, by chance.

    blocks:  room of the pool beside one request. lives: how often the group starts, on the same
             folders.
    fails:   how often a call of a disk fails, by rank. store: of StoreConfig; rank_1: the same of
             that rank alone.
    """

    seed: int
    name: str = "llama"
    size: int = 2
    blocks: int = 3
    lives: int = 1
    requests: int = 8
    fails: tuple[float, ...] = ()
    store: Mapping[str, Any] = field(default_factory=dict)
    rank_1: Mapping[str, Any] = field(default_factory=dict)

    def run(self, folder: Path) -> list[Counter[str]]:
        """Run all lives. Returns what rank 0 has counted in each. Raises DivergedError."""
        for rank in range(self.size):
            attached(self.name, rank)
        found = []
        for life in range(self.lives):
            counts, replies = on_ranks(self.size, partial(self._live, folder, life))[0]
            for prompt, tokens in replies:
                assert_stock(self.name, prompt, tokens)
            found.append(counts)
        return found

    def _start(self, folder: Path, life: int, ranks: ThreadRanks) -> RankLife:
        model, spec = attached(self.name, ranks.rank)
        arena = KVArena(spec, bytes_of(self.name, 900, self.blocks))
        arena.capabilities = RAGGED
        disk = FlakyDisk(
            self.seed * 100 + life * 10 + ranks.rank,
            dict(enumerate(self.fails)).get(ranks.rank, 0.0),
        )
        config = {
            "min_free_bytes": 0,
            "look_bytes": 1 << 60,
            **self.store,
            **(self.rank_1 if ranks.rank == 1 else {}),
        }
        store = PromptStore(
            StoreConfig(folder / str(ranks.rank), **config),
            f"{NAMESPACE} {ranks.rank}",
            {},
            disk,
            trie_name=NAMESPACE,
        )
        prefix = TieredPrefixCache(arena, store=store, ranks=ranks)
        clock = TurnClock()
        driver = GroupDriver(
            model, PooledCaches(prefix), EngineConfig(prefill_tokens=128), ranks, clock
        )
        return RankLife(ranks, driver, prefix, clock, store)

    def _live(
        self, folder: Path, life: int, ranks: ThreadRanks
    ) -> tuple[Counter[str], list[tuple[tuple[int, ...], list[int]]]]:
        own = self._start(folder, life, ranks)
        rng, chance = (
            random.Random(f"{self.seed} {life}"),
            random.Random(f"{self.seed} {life} {ranks.rank}"),
        )
        told, prompts, idle = Told(), dict[int, tuple[int, ...]](), 0
        while True:
            head = self._head(own, rng, prompts, idle) if ranks.rank == 0 else Head()
            head = own.exchange(head)
            if head.act == Act.STOP:
                break
            events = own.steps(head.turns)
            idle = 0 if len(own.driver) else idle + 1
            if ranks.rank == 0:
                told.take(events)
            if chance.random() < 0.1:
                gc.collect()
        stored = own.prefix.stored
        counts = (
            Counter(own.engine.counts) + own.ranks.calls + Counter(hits=own.prefix.num_hit_tokens)
        )
        if isinstance(stored, StoredPrefixes):
            counts += Counter(
                restored=stored.restores.num_restored, unread=stored.restores.num_unread
            )
            counts += Counter(evicted=sum(each.evicted for each in own.prefix.pool.counts()))
        own.stop()
        return counts, [(prompts[uid], tokens) for uid, tokens in told.tokens.items()]

    def _head(
        self, own: RankLife, rng: random.Random, prompts: dict[int, tuple[int, ...]], idle: int
    ) -> Head:
        """Rank 0: what arrives and what leaves before a turn, and how long the turn is."""
        if len(prompts) < self.requests and rng.random() < 0.15:
            system = words(rng.randrange(3), rng.choice([0, 130, 300, 520]))
            prompt = (*system, *words(rng.randrange(10, 14), rng.choice([1, 20, 200])))
            request = Request(
                prompt,
                max_tokens=rng.choice([1, 5, 20]),
                agent=rng.choice([None, None, "a"]),
                priority=rng.choice([0, 0, -5]),
                breakpoints=[(100, "system")] if len(prompt) > 200 and rng.random() < 0.3 else [],
                pins=[(100, 0.2)] if len(prompt) > 200 and rng.random() < 0.2 else [],
                retention=rng.choice([None, None, None, "day", "memory"]),
                salt=rng.choice([SHARED, SHARED, SHARED, b"s" * 32]),
            )
            for uid in own.driver.insert_all([request] * rng.choice([1, 1, 1, 2])):
                prompts[uid] = prompt
        if prompts and rng.random() < 0.03:
            own.driver.cancel(rng.choice(list(prompts)))
        ends = len(prompts) >= self.requests and idle > 3
        return Head(Act.STOP if ends else Act.STEP, turns=own.driver.lease_for(0.004, RankConfig()))
