"""TieredPrefixCache: a prefix cache that also has what a prompt store holds on disk. Owned by the generation thread."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Tokens
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from typing import Any
from weakref import WeakSet

from ..config import PoolConfig
from ..errors import PoolExhaustedError
from ..kv.arena import KVArena
from ..prefix.cache import USUAL, Acquired, PrefixCache
from ..prefix.resume import in_memory, resumable
from ..prefix.retention import RetentionPolicy
from ..prefix.salts import SHARED
from ..prefix.trie import Node, PrefixRef
from ..prefix.uncache import records_of
from ..ranks.group import ALONE, Ranks
from ..store.prompt_store import PromptStore
from .restore import RestoreJob
from .restore_plan import RestorePlan
from .write_behind import StoredPrefixes

# The longest time between two steps for records that no request waits for.
ATTENDED_SECONDS = 0.005


@dataclass(frozen=True)
class Size:
    """Bytes that only one path needs, and bytes that others need too."""

    own_bytes: int
    shared_bytes: int


@dataclass(frozen=True)
class Measure:
    """How much of a path is where: tokens without a gap from the first on, and how far a prompt would be resumed from there."""

    tokens_in_memory: int
    tokens_on_disk: int
    resumes_from_memory: int
    resumes_from_disk: int
    memory: Size
    disk: Size


class TieredPrefixCache(PrefixCache):
    """A PrefixCache over `store`, which names what its keys and values are computed with. None: memory is all it has.

    What is inserted is written behind by `stored.write_behind()`. acquire() brings back what is on disk and waits for it;
    acquire_resident() does not, for callers that run the restore of plan_restore() themselves.
    In a group every rank opens one, and all of them have a store or none has. They make the same calls in the same order.
    """

    def __init__(
        self,
        arena: KVArena,
        namespace: str = "",
        store: PromptStore | None = None,
        config: PoolConfig = USUAL,
        ranks: Ranks = ALONE,
    ) -> None:
        name = namespace if store is None else store.trie_name
        # The fingerprints of unlike parts of a model differ, and the hashes of its prefixes are the same on all ranks.
        super().__init__(arena, name if name or ranks.size == 1 else arena.spec.kinds(), config)
        self.ranks = ranks
        self.stored = None if store is None else StoredPrefixes(self.index, arena, self.admission, store, ranks)
        # Ends of matches that are faster to compute than to read, as planned last.
        self._cheaper: WeakSet[Node] = WeakSet()

    def acquire(
        self,
        tokens: Tokens[int],
        max_tokens: int = PoolConfig.max_tokens,
        at_most: int | None = None,
        salt: bytes = SHARED,
        start: PrefixRef | None = None,
    ) -> Acquired:
        """PrefixCache.acquire(), after restoring from disk what is worth reading and has room."""
        start = self.match(tokens, salt, start)
        plan = self._plan(start, len(tokens) - 1 if at_most is None else at_most) if len(tokens) else None
        if plan is not None and self.stored is not None:
            with suppress(PoolExhaustedError):
                for _ in self.stored.restores.run(plan):
                    pass
        return self.acquire_resident(tokens, max_tokens, at_most, salt, start)

    def acquire_resident(
        self,
        tokens: Tokens[int],
        max_tokens: int,
        at_most: int | None = None,
        salt: bytes = SHARED,
        start: PrefixRef | None = None,
    ) -> Acquired:
        """acquire() from memory alone: reads nothing from disk."""
        return super().acquire(tokens, max_tokens, at_most, salt, start)

    def resident(self, match: PrefixRef, at_most: int) -> PrefixRef:
        if self.stored is not None and match.path:
            self.stored.num_cheaper += match.path[-1] in self._cheaper
            self._cheaper.discard(match.path[-1])
            self.stored.restores.touch(match.path)
        return super().resident(match, at_most)

    def plan_restore(self, match: PrefixRef, at_most: int) -> RestorePlan | None:
        """The restore that a match is worth waiting for; None if disk adds nothing, or computing it is faster.

        In a group the furthest one, whatever it costs: all ranks plan the same, and agree_on_restore() says what becomes of it.
        """
        if self.stored is None or not match.path:
            return None
        self._cheaper.discard(match.path[-1])
        restores = self.stored.restores
        plan = restores.plan(match, at_most, self._have(match, at_most))
        if plan is None or self.ranks.size > 1 or restores.is_worth_reading(plan):
            return plan
        self._cheaper.add(match.path[-1])
        return None

    def agree_on_restore(self, match: PrefixRef, at_most: int) -> RestorePlan | None:
        """plan_restore() as far as no rank of the group is against it: a vote, and so all ranks call it."""
        if self.stored is None or not match.path:
            return None
        restores, have = self.stored.restores, self._have(match, at_most)
        plan = restores.agree(match, at_most, have, restores.wants_to_read)
        if plan is None and (wanted := restores.plan(match, at_most, have)) is not None and not restores.is_worth_reading(wanted):
            self._cheaper.add(match.path[-1])
        return plan

    def bring_back(self, path: PrefixRef) -> RestoreJob | None:
        """Begin to read what is on disk of a path, whatever it costs; None: there is nothing to read.

        All ranks of a group call it. Raises PoolExhaustedError if the pool has no room.
        """
        match = self.index.trie.find(path)
        if self.stored is None or not match.path:
            return None
        restores, have = self.stored.restores, self._have(match, match.tokens)
        if self.ranks.size == 1:
            plan = restores.plan(match, match.tokens, have)
            return None if plan is None else restores.begin(plan)
        plan = restores.agree(match, match.tokens, have, restores.can_read)
        if plan is None:
            return None
        restores.attend(job := restores.begin(plan))
        return job

    def _plan(self, match: PrefixRef, at_most: int) -> RestorePlan | None:
        return self.plan_restore(match, at_most) if self.ranks.size == 1 else self.agree_on_restore(match, at_most)

    def _have(self, match: PrefixRef, at_most: int) -> int:
        """How many tokens of a match can be resumed from memory."""
        return resumable(self.arena, in_memory(match), at_most)[0]

    def within_reach(self, tokens: Tokens[int], salt: bytes = SHARED) -> int:
        """How many tokens of a prompt are in memory, or on disk and worth reading."""
        plan = self.plan_restore(self.match(tokens, salt), len(tokens) - 1)
        return super().within_reach(tokens, salt) if plan is None else plan.have + plan.tokens

    def remember(self, tokens: Tokens[int], caches: list[Any], kind: str, policy: RetentionPolicy, goes_on: bool) -> PrefixRef:
        ref = super().remember(tokens, caches, kind, policy, goes_on)
        if self.stored is not None and policy.is_written:
            self.stored.note_path(ref.path, ref.tokens)
        return ref

    def use_clock(self, clock: Callable[[], float]) -> None:
        """Measure pins and rests by this clock: that of a group, which goes alike on all ranks."""
        super().use_clock(clock)
        if self.stored is not None:
            self.stored.clock = clock

    def keep_up(self) -> None:
        """Between two steps: end pins and retention whose time is over, in memory and on disk. Cheap."""
        super().keep_up()
        if self.stored is not None:
            self.retention.spare_on(self.stored.store)
            self.stored.restores.keep_up(ATTENDED_SECONDS)

    def close(self) -> bool:
        """Write everything that is not on disk yet. Returns whether all is on disk; True without a store."""
        return self.stored is None or self.stored.close()

    # -- figures -------------------------------------------------------------------------------------------------------

    def figures(self) -> list[int]:
        return super().figures() + ([] if self.stored is None else self.stored.figures())

    def measure(self, path: PrefixRef, own: int, sizes: dict[Node, tuple[int, int]] | None = None) -> Measure:
        """Figures of a path whose edges from `own` on are its own. `sizes` keeps those of edges for other paths."""
        match, sizes = self.index.trie.find(path), {} if sizes is None else sizes
        nodes = match.path
        for node in nodes:
            if node not in sizes:
                sizes[node] = self._memory_bytes(node), self._disk_bytes(node)
        memory, disk = [sizes[node][0] for node in nodes], [sizes[node][1] for node in nodes]
        here = sum(node.end - node.start for node in takewhile(lambda node: node.residency.in_memory, nodes))
        on_disk = list(takewhile(lambda node: node.residency.on_disk, nodes)) if self.stored is not None else []
        return Measure(
            tokens_in_memory=min(match.tokens, here),
            tokens_on_disk=min(match.tokens, sum(node.end - node.start for node in on_disk)),
            resumes_from_memory=resumable(self.arena, in_memory(match), match.tokens)[0],
            resumes_from_disk=self._resumes_from_disk(on_disk, match.tokens),
            memory=Size(sum(memory[own:]), sum(memory[:own])),
            disk=Size(sum(disk[own:]), sum(disk[:own])),
        )

    def _resumes_from_disk(self, path: list[Node], at_most: int) -> int:
        """How many tokens of a path on disk a restart could continue from."""
        tokens = min(at_most, sum(node.end - node.start for node in path))
        if not self.arena.spec.needs_checkpoints or not path or self.stored is None:
            return tokens
        found = self.stored.checkpoints.find(path, tokens)
        return 0 if found is None else found[1]

    def _memory_bytes(self, node: Node) -> int:
        sizes = [self.arena.spec.bytes_per_block(group) for group in self.arena.spec.groups]
        blocks = sum(sizes[group] for group, _ in set(self.index.blocks_of(node)))
        return blocks + sum(checkpoint.nbytes for checkpoint in node.residency.checkpoints.values())

    def _disk_bytes(self, node: Node) -> int:
        return 0 if self.stored is None else sum(map(self.stored.store.size, records_of(self.index, node)))
