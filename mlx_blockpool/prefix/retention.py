"""What is retained for whom, and how long: pins, prefixes that stay on disk for a day, quotas of
agents.

Knows prefixes, sizes and the time; no arrays. Owned by the generation thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from ..config import PoolConfig
from ..store.prompt_store import PromptStore
from ..store.record import BLOCK, STATE, WINDOW, Key
from .eviction import eviction_order
from .index import ANONYMOUS, KVIndex
from .salts import SHARED
from .trie import Checkpoint, Node, PinnedPrefix

DAY_SECONDS = 86400.0
# Sorts pins by when they end.
_until = attrgetter("until")
# How many of the largest owners report() names.
SHOWN = 50


@dataclass(frozen=True)
class RetentionPolicy:
    """How long what a request computes is retained.

    agent:      the owner of what is computed; None for the common owner of requests without an
                agent.
    retention:  "memory": it is not written to disk. "day": it stays on disk for a day after each
                use.
    salt:       only requests with the same salt find it; SHARED: all do.
    """

    agent: str | None = None
    retention: str | None = None
    salt: bytes = SHARED

    @property
    def owner(self) -> str:
        return self.agent or ANONYMOUS

    @property
    def is_written(self) -> bool:
        return self.retention != "memory"


class Retention:
    """How long the prefixes of `index` are retained.

    `pool_bytes`, `state_bytes`: the budgets of blocks and states.
    """

    def __init__(
        self, index: KVIndex, pool_bytes: int, state_bytes: int, config: PoolConfig
    ) -> None:
        share = config.pinned_share
        self.index = index
        self.pins = Pins(index, int(pool_bytes * share), int(state_bytes * share))
        self.days = TimedPins(index)
        self.quotas = Quotas(index, config.agent_bytes)
        # The number of changes that were passed to the store, and whether it retains any record for
        # them.
        self._passed_on, self._has_passed = 0, False
        self._record_bytes = record_bytes(index)

    def use(self, path: Sequence[Node], hit: int) -> None:
        """The first `hit` tokens of a path are used again."""
        self.pins.use(path, hit)
        self.days.use(path, hit)

    def retain_for_a_day(self, pin: PinnedPrefix) -> None:
        """Retain a prefix on disk for a day after each use, whatever the disk's budget drops."""
        if pin.ref.path:
            self.days.add(pin, DAY_SECONDS)

    def expire(self) -> None:
        """Unpin what has been retained for long enough. Cheap."""
        self.pins.expire()
        self.days.expire()

    def pass_to(self, store: PromptStore) -> None:
        """Pass the store the records that it must not drop: up to half of its budget, those that
        end last first. Cheap.
        """
        changes = self.pins.changes + self.days.changes + self.index.num_merged
        if changes == self._passed_on or not (self.pins or self.days or self._has_passed):
            return
        self._passed_on, self._has_passed = changes, bool(self.pins or self.days)
        left, retained = store.config.store_bytes // 2, set[Key]()
        for pin in sorted([*self.pins, *self.days], key=_until, reverse=True):
            added = self._records_of(pin) - retained
            left -= sum(store.size(key) or self._record_bytes[key.kind] for key in added)
            if left < 0:
                break
            retained |= added
        store.keep(retained)

    def _records_of(self, pin: PinnedPrefix) -> set[Key]:
        """The records that a pinned prefix is resumed from, on disk or not."""
        found = {Key(BLOCK, each.hash) for node in pin.nodes for each in node.with_merged}
        found |= {
            Key(WINDOW, node.hash) for node in pin.nodes if (WINDOW, node.end) in node.records
        }
        last = pin.node and pin.node.latest
        if last is not None and last.start < pin.position <= last.end:
            found |= {Key(kind, last.hash_at(pin.position)) for kind in (WINDOW, STATE)}
        return found

    def clear(self) -> None:
        self.pins.clear()
        self.days.clear()

    def report(self) -> dict[str, Any]:
        """Figures for people; sizes in bytes."""
        return {
            "agents": self.index.accounting.largest(SHOWN),
            "agent_bytes": self.quotas.agent_bytes,
            "forgotten_for_quotas": self.quotas.num_evicted,
            "pinned": self.pins.report(),
            "kept_for_a_day": len(self.days),
        }


@dataclass
class Quotas:
    """The most bytes of `index` for each named agent, without a limit if None.

    The excess is evicted from memory, and stays on disk: first superseded checkpoints, then the
    ends of sequences, the least recently used first, then other checkpoints. It does not evict what
    other agents own, what is pinned or in use, or blocks that others continue.
    """

    index: KVIndex
    agent_bytes: int | None
    num_evicted: int = 0

    def limit(self, owner: str) -> int | None:
        return None if owner == ANONYMOUS else self.agent_bytes

    def enforce(self, owner: str) -> None:
        """Evict what an owner has over its limit, as far as it may be evicted."""
        candidates = self._candidates(owner)
        while self._is_over(owner) and (found := next(candidates, None)) is not None:
            if isinstance(found, Checkpoint):
                self.index.remove_checkpoint(found)
            else:
                self.index.evict(found)
            self.num_evicted += 1

    def _is_over(self, owner: str) -> bool:
        limit = self.limit(owner)
        return limit is not None and self.index.accounting.nbytes(owner) > limit

    def _candidates(self, owner: str) -> Iterator[Checkpoint | Node]:
        """What may be evicted of an owner's, in order.

        Each is evicted before the next is looked for.
        """
        yield from self._checkpoints(owner, only_superseded=True)
        went = True
        # Where an end was evicted, the node before it may be one.
        while went:
            went = False
            for node in self._ends(owner):
                went = True
                yield node
        yield from self._checkpoints(owner)

    def _ends(self, owner: str) -> Iterator[Node]:
        """The owner's nodes with nothing in memory below them, and no other agent's checkpoint
        in them.
        """
        index = self.index
        for group in index.full_groups[:1]:
            for block in eviction_order(index.pool, group):
                node = index.node_of((group, block))
                if node is None or index.accounting.owner_of((group, block)) != owner:
                    continue
                others = any(
                    checkpoint.owner not in (owner, None)
                    for checkpoint in node.checkpoints.values()
                )
                if not others and not any(c.in_memory or c.checkpoints for c in node.children):
                    yield node

    def _checkpoints(self, owner: str, only_superseded: bool = False) -> Iterator[Checkpoint]:
        for item in list(self.index.accounting.items_of(owner)):
            if (
                isinstance(item, Checkpoint)
                and (not only_superseded or item.superseded)
                and self._may_go(owner, item)
            ):
                yield item

    def _may_go(self, owner: str, checkpoint: Checkpoint) -> bool:
        """Return whether an unpinned checkpoint has something of the owner's, and nothing of
        another agent's that only it has.
        """
        if self.index.is_pinned(checkpoint):
            return False
        owners = {owned: self.index.accounting.owner_of(owned) for owned in checkpoint.ring_blocks}
        others = [owned for owned, other in owners.items() if other not in (owner, None)]
        if any(
            self.index.pool.groups[group].blocks[block].cached_refs == 1 for group, block in others
        ):
            return False
        return checkpoint.nbytes > 0 or owner in owners.values()


class TimedPins:
    """Pins that end by `clock`, the one that ends soonest first.

    `changes` counts those that were added and removed.
    """

    def __init__(self, index: KVIndex) -> None:
        self.index = index
        self.clock: Callable[[], float] = time.monotonic
        self.changes = 0
        self._all: dict[bytes, PinnedPrefix] = {}

    def __iter__(self) -> Iterator[PinnedPrefix]:
        return iter(sorted(self._all.values(), key=_until))

    def __len__(self) -> int:
        return len(self._all)

    def add(self, pin: PinnedPrefix, seconds: float) -> None:
        """Let a pin last for `seconds` from now, in place of its old self and of shorter ones
        that end no later.
        """
        pin.seconds, pin.until = seconds, self.clock() + seconds
        old = self._all.get(pin.name)
        if old is not None and old.until > pin.until:
            pin.seconds, pin.until = old.seconds, old.until
        nodes = {node.latest for node in pin.ref.path}
        for other in [
            other for other in self._all.values() if other is old or _is_covered(other, pin, nodes)
        ]:
            self.remove(other)
        self.put(pin)

    def put(self, pin: PinnedPrefix) -> None:
        self._all[pin.name] = pin
        self._count_change(pin)

    def remove(self, pin: PinnedPrefix) -> None:
        del self._all[pin.name]
        self._count_change(pin)

    def _count_change(self, pin: PinnedPrefix) -> None:
        self.changes += 1
        self.index.mark("timed pin", pin.name)

    def use(self, path: Sequence[Node], hit: int) -> None:
        """The first `hit` tokens of a path were used: the longest pin that ends among them stays
        for its time again.
        """
        if not self._all:
            return
        nodes = set(path)
        used = [pin for pin in self._all.values() if pin.is_in(nodes, hit)]
        longest = max(used, key=lambda pin: pin.ref.tokens, default=None)
        if longest is not None:
            longest.until = max(longest.until, self.clock() + longest.seconds)

    def expire(self) -> None:
        """Remove the pins whose time is over. Cheap where there are none."""
        if not self._all:
            return
        now = self.clock()
        for pin in [pin for pin in self._all.values() if pin.until <= now]:
            self.remove(pin)

    def clear(self) -> None:
        for pin in list(self._all.values()):
            self.remove(pin)


class Pins(TimedPins):
    """What is pinned in memory: of each kind of pin at most `most_bytes` of blocks and
    `most_state_bytes` of states.

    Timed pins are released for later ones beyond the limits and for requests, the one that ends
    soonest first. Pins without an end are never released, and are refused beyond the limits.
    `num_gave_way` counts pins that were released for requests, `num_refused` timed ones that are
    too large by themselves. Iteration and len() are of timed pins.
    """

    def __init__(self, index: KVIndex, most_bytes: int, most_state_bytes: int) -> None:
        super().__init__(index)
        self.most_bytes = most_bytes
        self.most_state_bytes = most_state_bytes
        self._endless: dict[PinnedPrefix, None] = {}
        # Bytes of timed pins; None if they are to be counted again.
        self._nbytes: int | None = None
        self.num_gave_way = self.num_refused = 0

    def pin(self, pin: PinnedPrefix, seconds: float) -> None:
        """Retain a prefix in memory for `seconds` after each use.

        Beyond the limits, those that end soonest go.
        """
        if not pin.ref.path:
            return
        self.add(pin, seconds)
        if self._is_too_much([pin]):
            self.remove(pin)
            self.num_refused += 1
        self._limit()

    def put(self, pin: PinnedPrefix) -> None:
        super().put(pin)
        self.index.pin(pin)
        self._nbytes = None

    def remove(self, pin: PinnedPrefix) -> None:
        super().remove(pin)
        self.index.unpin(pin)
        self._nbytes = None

    def hold(self, pin: PinnedPrefix) -> bool:
        """Retain a prefix in memory until unpin().

        Returns False, and does nothing, where that is beyond the limits.
        """
        self.index.pin(pin)
        if self._is_too_much([*self._endless, pin]):
            self.index.unpin(pin)
            return False
        self._endless[pin] = None
        return True

    def unpin(self, pin: PinnedPrefix) -> None:
        """Undo hold()."""
        self._endless.pop(pin, None)
        self.index.unpin(pin)

    def use(self, path: Sequence[Node], hit: int) -> None:
        if self:
            super().use(path, hit)
            self._nbytes = None
            # What was restored from disk for it counts again.
            self._limit()

    def release_soonest(self) -> PinnedPrefix | None:
        """Unpin the one that ends soonest, and return it.

        Returns None if there are no timed pins.
        """
        soonest = next(iter(self), None)
        if soonest is not None:
            self.remove(soonest)
        return soonest

    @property
    def nbytes(self) -> int:
        """Bytes of those that end, counted when pins were added, removed or used."""
        if self._nbytes is None:
            self._nbytes = sum(self.index.pinned_bytes(self))
        return self._nbytes

    def report(self) -> dict[str, int]:
        """Figures of those that end; sizes in bytes."""
        return {
            "pins": len(self),
            "pinned_bytes": self.nbytes,
            "most_pinned_bytes": self.most_bytes + self.most_state_bytes,
            "gave_way": self.num_gave_way,
            "refused": self.num_refused,
        }

    def check(self) -> None:
        """Pins that end are within the limits. Raises AssertionError."""
        blocks, states = self.index.pinned_bytes(self)
        assert blocks <= self.most_bytes, (
            f"{blocks} bytes of blocks are pinned; {self.most_bytes} may be"
        )
        assert states <= self.most_state_bytes, (
            f"{states} bytes of states are pinned; {self.most_state_bytes} may be"
        )

    def _limit(self) -> None:
        while self._is_too_much(self):
            self.release_soonest()

    def _is_too_much(self, pins: Iterable[PinnedPrefix]) -> bool:
        blocks, states = self.index.pinned_bytes(pins)
        return blocks > self.most_bytes or states > self.most_state_bytes


def record_bytes(index: KVIndex) -> dict[str, int]:
    """About how large a record of each kind is before it is written."""
    spec = index.pool.spec
    sizes = [spec.bytes_per_block(group) for group in spec.groups]
    full = sum(sizes[group] for group in index.full_groups)
    return {BLOCK: full, WINDOW: sum(sizes) - full, STATE: spec.fixed_bytes_per_agent()}


def _is_covered(other: PinnedPrefix, pin: PinnedPrefix, nodes: set[Node]) -> bool:
    """Return whether `pin`, in these nodes, retains for as long all that `other` retains."""
    return (
        other.position == pin.position
        and other.until <= pin.until
        and other.is_in(nodes, pin.ref.tokens)
    )
