"""TieredPrefixCache: a prefix cache that also has what a prompt store holds on disk.

Owned by the generation thread.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Tokens
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from ..config import PoolConfig
from ..errors import PoolExhaustedError
from ..kv.arena import KVArena
from ..prefix.cache import USUAL, PrefixCache, in_memory, resumable
from ..prefix.retention import RetentionPolicy
from ..prefix.salts import SHARED
from ..prefix.trie import Node, PrefixRef
from ..ranks.group import ALONE, Ranks
from ..store.prompt_store import PromptStore
from .agreement import open_tier
from .restore import RestoreJob


@dataclass(frozen=True)
class Size:
    """Bytes that only one path needs, and bytes that others need too."""

    own_bytes: int
    shared_bytes: int


@dataclass(frozen=True)
class Measure:
    """How much of a path is where: tokens without a gap from the first on, and how far a prompt
    would be resumed from there.
    """

    tokens_in_memory: int
    tokens_on_disk: int
    resumes_from_memory: int
    resumes_from_disk: int
    memory: Size
    disk: Size


class TieredPrefixCache(PrefixCache):
    """A PrefixCache over `store`, which names what its keys and values are computed with, or in
    memory alone (None).

    `stored.write_behind()` writes what was inserted. acquire() restores what is on disk and waits
    for it; acquire_resident() does not, for callers that run the plans of `stored.restores`
    themselves. In a group every rank opens one, and either all have a store or none has. They make
    the same calls in the same order.
    """

    def __init__(
        self,
        arena: KVArena,
        namespace: str = "",
        store: PromptStore | None = None,
        config: PoolConfig = USUAL,
        ranks: Ranks = ALONE,
    ) -> None:
        super().__init__(arena, namespace if store is None else store.trie_name, config)
        self.stored = open_tier(self.index, arena, self.admission, store, ranks)

    def _restore(self, match: PrefixRef, at_most: int) -> None:
        """Read what is worth reading of a match, and wait for it; nothing if it does not fit in
        the pool.
        """
        plan = self.stored.restores.agree(match, at_most)
        if plan is not None:
            with suppress(PoolExhaustedError):
                for _ in self.stored.restores.run(plan):
                    pass

    def _resident(self, match: PrefixRef) -> PrefixRef:
        self.stored.restores.use(match.path)
        return super()._resident(match)

    def bring_back(self, path: PrefixRef) -> RestoreJob | None:
        """Begin to read what is on disk of a path, whatever it costs. Returns None if there is
        nothing to read.

        All ranks of a group call it. Raises PoolExhaustedError if the pool is full.
        """
        match, restores = self.index.trie.find(path), self.stored.restores
        plan = restores.agree(match, match.tokens, at_any_cost=True)
        if plan is None:
            return None
        restores.attend(job := restores.begin(plan))
        return job

    def within_reach(self, tokens: Tokens[int], salt: bytes = SHARED) -> int:
        """How many tokens of a prompt are in memory, or on disk and worth reading."""
        plan = self.stored.restores.plan(self.match(tokens, salt), len(tokens) - 1)
        return super().within_reach(tokens, salt) if plan is None else plan.have + plan.tokens

    def remember(
        self,
        tokens: Tokens[int],
        caches: list[Any],
        kind: str,
        policy: RetentionPolicy,
        continues: bool,
    ) -> PrefixRef:
        ref = super().remember(tokens, caches, kind, policy, continues)
        if policy.is_written:
            self.stored.enqueue_path(ref)
        return ref

    def use_clock(self, clock: Callable[[], float]) -> None:
        """Measure pins and rests by this clock: that of a group, which goes alike on all ranks."""
        super().use_clock(clock)
        self.stored.clock = clock

    def keep_up(self) -> None:
        """Between two steps: end pins and retention whose time is over, in memory and on disk.

        Cheap.
        """
        super().keep_up()
        self.stored.keep_up(self.retention)

    def close(self) -> bool:
        """Write everything that is not on disk yet.

        Returns whether all is on disk; True without a store.
        """
        return self.stored.close()

    # -- figures -----------------------------------------------------------------------------------

    def figures(self) -> list[int]:
        return super().figures() + self.stored.figures()

    def measure(
        self, path: PrefixRef, own: int, sizes: dict[Node, tuple[int, int]] | None = None
    ) -> Measure:
        """Figures of a path whose edges from `own` on are its own.

        `sizes` caches those of edges for other paths.
        """
        match, sizes = self.index.trie.find(path), {} if sizes is None else sizes
        nodes = match.path
        for node in nodes:
            if node not in sizes:
                sizes[node] = self._memory_bytes(node), self.stored.size(node)
        memory, disk = [sizes[node][0] for node in nodes], [sizes[node][1] for node in nodes]
        here = sum(node.end - node.start for node in takewhile(lambda node: node.in_memory, nodes))
        on_disk = list(takewhile(lambda node: node.on_disk, nodes))
        return Measure(
            tokens_in_memory=min(match.tokens, here),
            tokens_on_disk=min(match.tokens, sum(node.end - node.start for node in on_disk)),
            resumes_from_memory=resumable(self.arena, in_memory(match), match.tokens)[0],
            resumes_from_disk=self.stored.resumes_at(on_disk, match.tokens),
            memory=Size(sum(memory[own:]), sum(memory[:own])),
            disk=Size(sum(disk[own:]), sum(disk[:own])),
        )

    def _memory_bytes(self, node: Node) -> int:
        sizes = [self.arena.spec.bytes_per_block(group) for group in self.arena.spec.groups]
        blocks = sum(sizes[group] for group, _ in set(node.owned))
        return blocks + sum(checkpoint.nbytes for checkpoint in node.checkpoints.values())
