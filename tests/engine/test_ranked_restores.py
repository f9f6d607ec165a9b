"""Engines of several ranks that bring prefixes back from their disks: what they agree on, and that
replies stay mlx-lm's.

Each rank is a thread with a model, a pool and a folder of its own.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from engine.engines import ROOMY, Told, assert_nothing_held, assert_stock, attached, bytes_of, words
from ranks.threads import ThreadRanks, on_ranks
from store.damages import DAMAGES
from store.disks import Disk, GatedDisk
from store.stores import open_store
from tier.lives import record_files

from mlx_blockpool.config import EngineConfig
from mlx_blockpool.engine import caches as caches_module
from mlx_blockpool.engine.caches import PooledCaches
from mlx_blockpool.engine.engine import BlockPoolBatchEngine
from mlx_blockpool.engine.request import Request
from mlx_blockpool.kv.arena import KVArena
from mlx_blockpool.kv.capabilities import RAGGED
from mlx_blockpool.prefix.eviction import eviction_order
from mlx_blockpool.ranks.driver import GroupDriver
from mlx_blockpool.ranks.facts import Lost, read, write
from mlx_blockpool.ranks.head import Act, Head, TurnClock
from mlx_blockpool.store.record import BLOCK as RECORD_OF_BLOCK
from mlx_blockpool.store.record import Key
from mlx_blockpool.tier.cache import TieredPrefixCache
from mlx_blockpool.tier.write_behind import StoredPrefixes

BLOCK = 256
LONG = words(5, 3 * BLOCK + 40)


@dataclass
class Rank:
    """One rank: what its engine told, and the agreed state after each step."""

    ranks: ThreadRanks
    driver: GroupDriver
    prefix: TieredPrefixCache
    clock: TurnClock
    told: Told = field(default_factory=Told)
    trace: list[str] = field(default_factory=list)
    prompts: list[Sequence[int]] = field(default_factory=list)
    turns: int = 0

    @property
    def engine(self) -> BlockPoolBatchEngine:
        return self.driver.engine

    def __post_init__(self) -> None:
        # The records were agreed on when the store was opened.
        self.votes_before = self.ranks.calls["least"]

    @property
    def stored(self) -> StoredPrefixes:
        assert isinstance(self.prefix.stored, StoredPrefixes)
        return self.prefix.stored

    @property
    def votes(self) -> int:
        return self.ranks.calls["least"] - self.votes_before

    def insert(self, prompt: Sequence[int], max_tokens: int = 4, **more: Any) -> None:
        self.prompts.append(prompt)
        if self.ranks.rank == 0:
            self.driver.insert(Request(prompt, max_tokens, **more))

    def drive(self, until: Callable[[], bool] = lambda: False, most: int = 500) -> None:
        """Turns until all requests have ended, or until what is alike on all ranks is so."""
        for _ in range(most):
            self.turn()
            if until() or not len(self.driver):
                return
        raise AssertionError(f"{len(self.driver)} requests did not end; {dict(self.engine.counts)}")

    def turn(self) -> None:
        driver, restores, ledger = self.driver, self.stored.restores, self.stored.ledger
        self.turns += 1
        number, restored, failed = restores.restored()
        head = Head(
            Act.STEP,
            self.turns * 10_000,
            1000,
            1,
            fingerprint=driver.fingerprint(),
            takes=self.stored.store.takes(),
            restore=number,
            restored=restored,
            failed=failed,
        )
        sent = self.ranks.exchange(
            head, write([("", fact) for fact in [*driver.outgoing(), *ledger.take_lost()]])
        )
        heads = [each.head for each in sent]
        assert len({each.fingerprint for each in heads}) == 1, (
            f"the ranks differ before turn {self.turns}"
        )
        self.clock.begin(heads[0])
        ledger.agree(all(each.takes for each in heads))
        restores.commit(heads)
        for _, fact in (found for each in sent for found in read(each.mail)):
            self.stored.forget(fact) if isinstance(fact, Lost) else driver.apply([fact])
        self.told.take(driver.next())
        index = self.prefix.index
        nodes = [(n.hash.hex()[:8], n.blocks, n.on_disk, [*n.checkpoints]) for n in index.trie]
        self.trace.append(
            repr(
                (
                    nodes,
                    [
                        eviction_order(self.prefix.pool, group)
                        for group in range(len(index.pool.groups))
                    ],
                )
            )
        )

    def check(self, name: str = "llama") -> list[int]:
        """The cached tokens of all requests, whose replies are those of mlx-lm."""
        assert self.told.failed == {}
        for uid, prompt in enumerate(self.prompts, 1):
            assert_stock(name, prompt, self.told.tokens[uid])
        return [self.told.started[uid].cached for uid in range(1, len(self.prompts) + 1)]


def open_rank(
    ranks: ThreadRanks,
    folder: Path,
    name: str = "llama",
    n_bytes: int = ROOMY,
    disk: Disk | None = None,
    **config: Any,
) -> Rank:
    model, spec = attached(name, ranks.rank)
    arena, clock = KVArena(spec, n_bytes), TurnClock()
    arena.capabilities = RAGGED
    prefix = TieredPrefixCache(
        arena, store=open_store(folder / str(ranks.rank), disk, **config), ranks=ranks
    )
    driver = GroupDriver(
        model, PooledCaches(prefix), EngineConfig(prefill_tokens=128), ranks, clock, {}
    )
    return Rank(ranks, driver, prefix, clock)


def on_all(act: Callable[[ThreadRanks], Any], name: str = "llama", size: int = 2) -> list[Any]:
    for rank in range(size):
        attached(name, rank)
    return on_ranks(size, act)


def alike(found: list[Rank]) -> Rank:
    """The first of ranks that were alike after every step."""
    for other in found[1:]:
        for step, (own, theirs) in enumerate(zip(found[0].trace, other.trace, strict=True)):
            assert own == theirs, f"rank {other.ranks.rank} differs after step {step}"
    for rank in found:
        assert_nothing_held(rank.prefix)
    return found[0]


def fill(
    folder: Path, *prompts: Sequence[int], name: str = "llama", size: int = 2, **more: Any
) -> None:
    """Have each rank store these prompts, and end."""

    def act(ranks: ThreadRanks) -> None:
        rank = open_rank(ranks, folder, name)
        for prompt in prompts:
            rank.insert(prompt, 1, **more)
            rank.drive()
        assert rank.prefix.close()

    on_all(act, name, size)


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        *(pytest.param(name, marks=pytest.mark.thorough) for name in ("gemma3_text", "lfm2")),
    ],
)
def test_requests_go_on_where_the_ranks_were_before_a_restart(tmp_path: Path, name: str) -> None:
    kept = len(LONG) if name == "llama" else 3 * BLOCK + 7
    fill(tmp_path, LONG, name=name, breakpoints=[(3 * BLOCK + 7, "user")])

    def act(ranks: ThreadRanks) -> Rank:
        rank = open_rank(ranks, tmp_path, name)
        for i in range(3):
            rank.insert((*LONG, 3 + i))
        rank.drive()
        return rank

    first = alike(on_all(act, name))
    cached = first.check(name)
    assert (cached[0], first.told.started[1].why.restored) == (kept, kept)
    assert min(cached) == kept
    # The first request votes. The others find in memory what it has waited for.
    assert first.votes == 1


@pytest.mark.thorough
def test_a_request_whose_prefix_is_in_memory_needs_no_vote(tmp_path: Path) -> None:
    def act(ranks: ThreadRanks) -> Rank:
        rank = open_rank(ranks, tmp_path)
        for last in (1, 2):
            rank.insert((*LONG, last))
            rank.drive()
        return rank

    first = alike(on_all(act))
    assert first.check() == [0, len(LONG)]
    assert first.votes == 0


def damaged(rank: Rank, folder: Path) -> None:
    """The third block is bad on the second rank."""
    path = rank.prefix.index.trie.match(LONG).path
    file = next(file for file in record_files(folder / "1") if file.stem == path[2].hash.hex())
    DAMAGES["flip"](file, random.Random(3))


def put_off(rank: Rank, folder: Path) -> None:
    """The second rank could not read the third block, and leaves it alone for a while."""
    rank.stored.store.put_off(Key(RECORD_OF_BLOCK, rank.prefix.index.trie.match(LONG).path[2].hash))


@pytest.mark.parametrize("spoil", [damaged, pytest.param(put_off, marks=pytest.mark.thorough)])
def test_what_one_rank_cannot_read_all_compute(
    tmp_path: Path, spoil: Callable[[Rank, Path], None]
) -> None:
    fill(tmp_path, LONG)

    def act(ranks: ThreadRanks) -> Rank:
        rank = open_rank(ranks, tmp_path)
        if ranks.rank == 1:
            spoil(rank, tmp_path)
        for last in (1, 2):
            rank.insert((*LONG, last))
            rank.drive()
        return rank

    first = alike(on_all(act))
    assert first.check() == [2 * BLOCK, len(LONG)]
    assert first.votes == 1
    # What was bad on one rank, all write again.
    assert first.prefix.close()


@pytest.mark.thorough
def test_a_request_that_is_suspended_votes_again(tmp_path: Path) -> None:
    """One rank was against reading what the other rank can read, and the request has not started
    before the model is unloaded.
    """
    fill(tmp_path, LONG)

    def act(ranks: ThreadRanks) -> Rank:
        rank = open_rank(ranks, tmp_path, n_bytes=bytes_of("llama", 5 * BLOCK))
        rank.insert(words(50, 2 * BLOCK), 60)
        rank.drive(lambda: 1 in rank.told.tokens)
        if ranks.rank == 1:
            rank.stored.restores.pause()
        rank.insert((*LONG, 3))
        rank.drive(lambda: rank.votes == 1)
        assert 2 not in rank.told.started
        suspended = rank.driver.suspend()
        rank.stored.restores.clock = lambda: math.inf
        for sequence in reversed(suspended):
            if ranks.rank == 0:
                rank.driver.resume(sequence)
        rank.drive()
        return rank

    first = alike(on_all(act))
    assert first.told.failed == {}
    assert (first.told.started[3].cached, first.votes) == (len(LONG), 2)


@pytest.mark.thorough
def test_a_disk_that_hangs_on_one_rank_holds_up_no_reply(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path, LONG)
    monkeypatch.setattr(caches_module, "WAIT_SECONDS", 0.0)
    disk = GatedDisk()

    def act(ranks: ThreadRanks) -> Rank:
        rank = open_rank(ranks, tmp_path, disk=disk if ranks.rank == 1 else None)
        rank.insert(words(50, 30), 60)
        rank.drive(lambda: 1 in rank.told.tokens)
        if ranks.rank == 1:
            disk.reads.clear()
        rank.insert((*LONG, 3))
        rank.drive(lambda: len(rank.told.tokens[1]) > 20)
        assert 2 not in rank.told.started
        if ranks.rank == 1:
            late = rank.stored.restores.clock() + rank.stored.store.config.answer_seconds + 1
            rank.stored.restores.clock = lambda: late
        rank.drive()
        disk.reads.set()
        return rank

    first = alike(on_all(act))
    assert first.check() == [0, 0]
    assert first.votes == 1


@pytest.mark.thorough
def test_a_restore_gives_way_on_all_ranks_to_the_reply_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One disk is slow: while it is waited for, the reply that decodes needs the blocks.

    The request votes once all the same.
    """
    past, prompt = words(71, 5 * BLOCK), words(50, BLOCK - 10)
    fill(tmp_path, past)
    monkeypatch.setattr(caches_module, "WAIT_SECONDS", 0.0)
    disk = GatedDisk()

    def act(ranks: ThreadRanks) -> Rank:
        rank = open_rank(
            ranks,
            tmp_path,
            n_bytes=bytes_of("llama", 7 * BLOCK),
            disk=disk if ranks.rank == 1 else None,
        )
        rank.insert(prompt, BLOCK + 40)
        rank.drive(lambda: 1 in rank.told.tokens)
        if ranks.rank == 1:
            disk.reads.clear()
        rank.insert((*past, 3))
        rank.drive(lambda: 1 in rank.told.reasons)
        disk.reads.set()
        rank.drive()
        return rank

    first = alike(on_all(act))
    first.check()
    assert first.votes == 1


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "lfm2"])
def test_ranks_stay_alike_whatever_their_disks_do(tmp_path: Path, name: str) -> None:
    """Three ranks, more prompts than the pool holds; records are damaged, vanish, or cannot be
    read for a while, anywhere.
    """
    said = [words(80 + i, 2 * BLOCK + 30 * i) for i in range(5)]
    fill(tmp_path, *said, name=name, size=3)

    def act(ranks: ThreadRanks) -> Rank:
        rank = open_rank(ranks, tmp_path, name, bytes_of(name, 6 * BLOCK))
        plan, own = random.Random(1), random.Random(10 + ranks.rank)
        for _ in range(10):
            for _ in range(plan.randrange(1, 4)):
                rank.insert((*said[plan.randrange(5)], plan.randrange(100)), plan.randrange(1, 12))
            files = record_files(tmp_path / str(ranks.rank))
            if files and own.random() < 0.4:
                with suppress(FileNotFoundError):
                    DAMAGES[own.choice(["flip", "truncate", "delete"])](own.choice(files), own)
            elif own.random() < 0.3:
                node = own.choice(list(rank.prefix.index.trie) or [rank.prefix.index.trie.root])
                rank.stored.store.put_off(Key(RECORD_OF_BLOCK, node.hash))
            rank.drive()
        return rank

    cached = alike(on_all(act, name, 3)).check(name)
    assert sum(cached) > 0
