"""What is kept for whom, and how long: pins, beginnings that the disk spares for a day, quotas of agents.

Knows prefixes, sizes and the time; no arrays. Owned by the generation thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..config import PoolConfig
from ..store.prompt_store import PromptStore
from ..store.record import BLOCK, STATE, WINDOW, Key
from .accounting import ANONYMOUS
from .eviction_order import is_superseded
from .index import KVIndex, Pin
from .residency import Checkpoint
from .salts import SHARED
from .trie import Node

DAY_SECONDS = 86400.0
# How many of the largest owners report() names.
SHOWN = 50


@dataclass(frozen=True)
class RetentionPolicy:
    """How what a request computes is kept.

    agent:      the owner of what is computed; None: the one owner of all that name no agent.
    retention:  "memory": it is not written to disk. "day": the disk's budget spares it for a day after each use.
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
    """How long the prefixes of `index` are kept, and for whom. `pool_bytes`, `state_bytes`: room for blocks and for states."""

    def __init__(self, index: KVIndex, pool_bytes: int, state_bytes: int, config: PoolConfig) -> None:
        share = config.pinned_share
        self.index = index
        self.pins = Pins(index, int(pool_bytes * share), int(state_bytes * share))
        self.days = TimedPins()
        self.quotas = Quotas(index, config.agent_bytes, config.anonymous_bytes)
        # The changes of pins that were passed to the store, and whether it spares any record for them.
        self._passed_on, self._spares = 0, False
        self._record_bytes = record_bytes(index)

    def use(self, path: Sequence[Node], hit: int) -> None:
        """The first `hit` tokens of a path are used again."""
        self.pins.use(path, hit)
        self.days.use(path, hit)

    def spare_for_a_day(self, pin: Pin) -> None:
        """Keep a prefix on disk for a day after each use: the disk's budget does not take it."""
        if pin.ref.path:
            self.days.add(pin, DAY_SECONDS)

    def expire(self) -> None:
        """Unpin what has been kept for long enough. Cheap."""
        self.pins.expire()
        self.days.expire()

    def spare_on(self, store: PromptStore) -> None:
        """Pass the store the records that its budget spares: up to half of it, and of more that which ends last. Cheap."""
        changes = self.pins.changes + self.days.changes + self.index.num_merged
        if changes == self._passed_on or not (self.pins or self.days or self._spares):
            return
        self._passed_on, self._spares = changes, bool(self.pins or self.days)
        left, spared = store.config.own_bytes // 2, set[Key]()
        for pin in sorted([*self.pins, *self.days], key=_end, reverse=True):
            added = self._records_of(pin) - spared
            left -= sum(store.size(key) or self._record_bytes[key.kind] for key in added)
            if left < 0:
                break
            spared |= added
        store.keep(spared)

    def _records_of(self, pin: Pin) -> set[Key]:
        """The records that a pinned prefix is resumed from, on disk or not."""
        found = {Key(BLOCK, each.hash) for node in pin.nodes for each in self.index.with_superseded(node)}
        found |= {Key(WINDOW, node.hash) for node in pin.nodes if node.end in node.residency.window_records}
        last = pin.node and pin.node.latest
        if last is not None and last.start < pin.position <= last.end:
            found |= {Key(kind, last.hash_at(pin.position)) for kind in (WINDOW, STATE)}
        return found

    def clear(self) -> None:
        self.pins.clear()
        self.days.clear()

    def figures(self) -> list[int]:
        """Numbers that are equal on all ranks of a group."""
        counts = [len(self.pins), self.pins.changes, len(self.days), self.days.changes]
        return [*counts, self.pins.num_gave_way, self.pins.num_refused, self.quotas.num_evicted]

    def report(self) -> dict[str, Any]:
        """Figures for people; sizes in bytes."""
        return {
            "agents": self.index.accounting.largest(SHOWN),
            "agent_bytes": self.quotas.agent_bytes,
            "anonymous_bytes": self.quotas.anonymous_bytes,
            "forgotten_for_quotas": self.quotas.num_evicted,
            "pinned": self.pins.report(),
            "kept_for_a_day": len(self.days),
        }


class Quotas:
    """The most bytes of `index` for each agent, and for all requests together that name none; None: no limit.

    What is over goes from memory, and stays on disk where it is: first checkpoints that a conversation has left behind, then the
    ends of sequences, the least recently used first, then other checkpoints. Nothing of another agent goes, nothing that is
    pinned or in use, and no block that others lead on from.
    """

    def __init__(self, index: KVIndex, agent_bytes: int | None, anonymous_bytes: int | None) -> None:
        self.index = index
        self.agent_bytes = agent_bytes
        self.anonymous_bytes = anonymous_bytes
        self.num_evicted = 0

    def limit(self, owner: str) -> int | None:
        return self.anonymous_bytes if owner == ANONYMOUS else self.agent_bytes

    def enforce(self, owner: str) -> None:
        """Evict what an owner has over its limit, as far as it may be evicted."""
        if self._is_over(owner):
            self._evict_checkpoints(owner, only_left_behind=True)
            self._evict_ends(owner)
            self._evict_checkpoints(owner)

    def _is_over(self, owner: str) -> bool:
        limit = self.limit(owner)
        return limit is not None and self.index.accounting.nbytes(owner) > limit

    def _evict_ends(self, owner: str) -> None:
        went = True
        # Where an end has gone, the node before it may be one.
        while went and self._is_over(owner):
            went = False
            for node in self._ends(owner):
                if self._is_over(owner):
                    self.index.evict(node)
                    self.num_evicted, went = self.num_evicted + 1, True

    def _ends(self, owner: str) -> Iterator[Node]:
        """The owner's nodes with nothing in memory below them, and no other agent's checkpoint in them."""
        index = self.index
        for group in index.full_groups[:1]:
            for block in index.pool.eviction_order(group):
                node = index.node_of((group, block))
                if node is None or index.accounting.owner_of((group, block)) != owner:
                    continue
                others = any(checkpoint.owner not in (owner, None) for checkpoint in node.residency.checkpoints.values())
                if not others and not any(c.residency.in_memory or c.residency.checkpoints for c in node.children):
                    yield node

    def _evict_checkpoints(self, owner: str, only_left_behind: bool = False) -> None:
        if not self._is_over(owner):
            return
        nodes = {checkpoint: node for node in self.index.trie for checkpoint in node.residency.checkpoints.values()}
        for checkpoint in [item for item in self.index.accounting.of(owner) if isinstance(item, Checkpoint)]:
            node = nodes[checkpoint]
            may_go = not self.index.is_pinned(node, checkpoint) and (not only_left_behind or is_superseded(node, checkpoint))
            if self._is_over(owner) and may_go and self._frees(owner, checkpoint):
                self.index.remove_checkpoint(node, checkpoint)
                self.num_evicted += 1

    def _frees(self, owner: str, checkpoint: Checkpoint) -> bool:
        """Return whether anything of the owner's is in it, and nothing of another agent's that only it has."""
        owners = {owned: self.index.accounting.owner_of(owned) for owned in checkpoint.ring_blocks}
        others = [owned for owned, other in owners.items() if other not in (owner, None)]
        if any(self.index.pool.groups[group].blocks[block].cached_refs == 1 for group, block in others):
            return False
        return checkpoint.nbytes > 0 or owner in owners.values()


class TimedPins:
    """Pins that end by `clock`, the one that ends soonest first. `changes` counts those that were added and removed."""

    def __init__(self) -> None:
        self.clock: Callable[[], float] = time.monotonic
        self.changes = 0
        self._all: dict[bytes, Pin] = {}
        self._soonest = 0.0

    def __iter__(self) -> Iterator[Pin]:
        return iter(sorted(self._all.values(), key=_end))

    def __len__(self) -> int:
        return len(self._all)

    def add(self, pin: Pin, seconds: float) -> None:
        """Let a pin last for `seconds` from now, in place of its old self and of shorter ones that end no later."""
        pin.seconds, pin.until = seconds, self.clock() + seconds
        old = self._all.get(pin.name)
        if old is not None and _end(old) > pin.until:
            pin.seconds, pin.until = old.seconds, old.until
        nodes = {node.latest for node in pin.ref.path}
        for other in [other for other in self._all.values() if other is old or _is_covered(other, pin, nodes)]:
            self.remove(other)
        self.put(pin)

    def put(self, pin: Pin) -> None:
        self._all[pin.name] = pin
        self._soonest = min(self._soonest, _end(pin))
        self.changes += 1

    def remove(self, pin: Pin) -> None:
        del self._all[pin.name]
        self.changes += 1

    def use(self, path: Sequence[Node], hit: int) -> None:
        """The first `hit` tokens of a path were used: the longest pin that ends among them stays for its time again."""
        if not self._all:
            return
        nodes = set(path)
        used = [pin for pin in self._all.values() if pin.is_in(nodes, hit)]
        longest = max(used, key=lambda pin: pin.ref.tokens, default=None)
        if longest is not None:
            longest.until = max(_end(longest), self.clock() + longest.seconds)

    def expire(self) -> None:
        """Remove the pins whose time is over. Cheap where there are none."""
        now = self.clock()
        if now < self._soonest or not self._all:
            return
        for pin in [pin for pin in self._all.values() if _end(pin) <= now]:
            self.remove(pin)
        self._soonest = min(map(_end, self._all.values()), default=0.0)

    def clear(self) -> None:
        for pin in list(self._all.values()):
            self.remove(pin)


class Pins(TimedPins):
    """What is pinned in memory: of each kind of pin at most `most_bytes` of blocks and `most_state_bytes` of states.

    Pins that end give way, the one that ends soonest first: to later ones beyond the limits, and to requests. Pins without an end
    give way to nothing, and are refused beyond the limits. `num_gave_way` counts pins that made room for requests, `num_refused`
    timed ones that are too large by themselves. Iteration and len() are of those that end.
    """

    def __init__(self, index: KVIndex, most_bytes: int, most_state_bytes: int) -> None:
        super().__init__()
        self.index = index
        self.most_bytes = most_bytes
        self.most_state_bytes = most_state_bytes
        self._endless: dict[Pin, None] = {}
        self.num_gave_way = self.num_refused = 0

    def pin(self, pin: Pin, seconds: float) -> None:
        """Keep a prefix in memory for `seconds` after each use. Beyond the limits, those that end soonest go."""
        if not pin.ref.path:
            return
        self.add(pin, seconds)
        if self._is_too_much([pin]):
            self.remove(pin)
            self.num_refused += 1
        self._limit()

    def put(self, pin: Pin) -> None:
        super().put(pin)
        self.index.pin(pin)

    def remove(self, pin: Pin) -> None:
        super().remove(pin)
        self.index.unpin(pin)

    def hold(self, pin: Pin) -> bool:
        """Keep a prefix in memory until unpin(). Returns False, and keeps nothing, where that is beyond the limits."""
        self.index.pin(pin)
        if self._is_too_much([*self._endless, pin]):
            self.index.unpin(pin)
            return False
        self._endless[pin] = None
        return True

    def unpin(self, pin: Pin) -> None:
        """Take back hold()."""
        self._endless.pop(pin, None)
        self.index.unpin(pin)

    def use(self, path: Sequence[Node], hit: int) -> None:
        if self:
            super().use(path, hit)
            # What came back from disk for it counts again.
            self._limit()

    def release_soonest(self) -> Pin | None:
        """Unpin the one that ends soonest, and return it; None: there is none."""
        soonest = next(iter(self), None)
        if soonest is not None:
            self.remove(soonest)
        return soonest

    def report(self) -> dict[str, int]:
        """Figures of those that end; sizes in bytes."""
        return {
            "pins": len(self),
            "pinned_bytes": sum(self.index.pinned_bytes(self)),
            "most_pinned_bytes": self.most_bytes + self.most_state_bytes,
            "gave_way": self.num_gave_way,
            "refused": self.num_refused,
        }

    def check(self) -> None:
        """Pins that end are within the limits. Raises AssertionError."""
        blocks, states = self.index.pinned_bytes(self)
        assert blocks <= self.most_bytes, f"{blocks} bytes of blocks are pinned; {self.most_bytes} may be"
        assert states <= self.most_state_bytes, f"{states} bytes of states are pinned; {self.most_state_bytes} may be"

    def _limit(self) -> None:
        while self._is_too_much(self):
            self.release_soonest()

    def _is_too_much(self, pins: Iterable[Pin]) -> bool:
        blocks, states = self.index.pinned_bytes(pins)
        return blocks > self.most_bytes or states > self.most_state_bytes


def record_bytes(index: KVIndex) -> dict[str, int]:
    """About how large a record of each kind is before it is written."""
    spec = index.pool.spec
    sizes = [spec.bytes_per_block(group) for group in spec.groups]
    full = sum(sizes[group] for group in index.full_groups)
    return {BLOCK: full, WINDOW: sum(sizes) - full, STATE: spec.fixed_bytes_per_agent()}


def _end(pin: Pin) -> float:
    assert pin.until is not None, "a pin without an end"
    return pin.until


def _is_covered(other: Pin, pin: Pin, nodes: set[Node]) -> bool:
    """Return whether `pin`, in these nodes, keeps for as long all that `other` keeps."""
    return other.position == pin.position and _end(other) <= _end(pin) and other.is_in(nodes, pin.ref.tokens)
