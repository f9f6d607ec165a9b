"""Lives that are ranks of one group, each over a store of its own: what changes one of them
changes all, and it is looked at.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from prefix.lives import Life
from store.stores import NAMESPACE

from mlx_blockpool.prefix.eviction import eviction_order
from mlx_blockpool.prefix.trie import Node
from mlx_blockpool.ranks import facts
from mlx_blockpool.ranks.group import Ranks
from mlx_blockpool.ranks.head import Head, TurnClock
from mlx_blockpool.spec import ModelCacheSpec
from mlx_blockpool.store.fs import Disk


class Member(Life):
    """A Life of one rank, in a folder of its own below `folder`.

    `config` may differ between the ranks in what is of the disk.
    """

    def __init__(
        self,
        ranks: Ranks,
        folder: Path,
        spec: ModelCacheSpec,
        disk: Disk | None = None,
        pool_bytes: int = 30 * 8192,
        **config: Any,
    ) -> None:
        self.ranks = ranks
        own = folder / f"rank {ranks.rank}"
        names = {"namespace": f"{NAMESPACE}-{ranks.rank}", "trie_name": NAMESPACE}
        super().__init__(spec, own, disk, pool_bytes, ranks=ranks, **names, **config)
        self.folder = own
        self.now = 0.0
        self.clock = TurnClock()
        self.prefix.use_clock(self.clock)
        # Records that a rank has missed, and whether they were to be written again.
        self.missed: list[tuple[int, bool]] = []
        self.compare()

    def turn(
        self, seconds: float = 0.0, limit: int | None = 1 << 40, at_once: bool = False
    ) -> None:
        """An exchange, what it brings, and what is written behind it."""
        self.now += seconds
        head = Head(now_us=int(self.now * 1e6), takes=self.store.takes())
        found = self.ranks.exchange(
            head, facts.write(("m", lost) for lost in self.stored.ledger.take_lost())
        )
        self.clock.begin(found[0].head)
        self.stored.ledger.agree(all(each.head.takes for each in found))
        for each in found:
            for _, lost in facts.read(each.mail):
                assert isinstance(lost, facts.Lost)
                self.missed.append((len(lost.keys), lost.again))
                self.stored.forget(lost)
        self.stored.write_behind(limit, at_once)
        assert self.store.flush()
        self.compare()

    def settle(self) -> None:
        """Turns until every rank has noticed what became of its writes, and all have forgotten
        what one lacks.
        """
        for _ in range(4):
            self.turn()

    def ask(self, prompt: Sequence[int], places: Collection[int] = (), reads: bool = False) -> int:
        """A request, from memory alone or from what all ranks can read. Returns its hit."""
        acquire = self.prefix.acquire if reads else self.prefix.acquire_resident
        found = acquire(list(prompt), 20)
        self.compute(found, prompt, places=places)
        self.prefix.release(list(prompt), found.caches)
        self.check()
        return found.lookup.hit

    def compare(self) -> None:
        """All ranks have the same, in memory and on disk, and would evict and write the same
        next.
        """
        own = repr(self.figures()).encode()
        for rank, each in enumerate(self.ranks.exchange(Head(), own)):
            assert each.mail == own, (
                f"rank {rank} has {each.mail.decode()}, rank {self.ranks.rank} {own.decode()}"
            )

    def figures(self) -> list[Any]:
        index, pool = self.prefix.index, self.arena.pool
        nodes = [(node.hash[:4].hex(), node.end, *_kept(node)) for node in index.trie]
        order = [list(eviction_order(pool, group)) for group in range(len(pool.groups))]
        pending = [
            node.hash[:4].hex() for node in [*self.stored.queue.pending, *self.stored.queue.resting]
        ]
        checkpoints = [checkpoint.position for checkpoint in self.stored.records.queue.pending]
        return [nodes, order, pending, checkpoints, *self.prefix.figures()]

    def files(self) -> set[str]:
        """Names of the records in their places, of every kind."""
        return {
            f"{path.parts[-3]}/{path.stem}"
            for path in self.folder.glob("models/*/*/*/*.safetensors")
        }


def _kept(node: Node) -> list[Any]:
    return [
        node.in_memory,
        node.on_disk,
        node.blocks,
        list(node.checkpoints),
        list(node.records.items()),
    ]
