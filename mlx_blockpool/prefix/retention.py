"""What is kept for whom, and how long: pins for a time, beginnings that the disk spares for a day, quotas of agents.

Owned by the generation thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..config import PoolConfig
from ..store.prompt_store import PromptStore
from ..store.record import BLOCK, STATE, WINDOW, Key
from .accounting import ANONYMOUS
from .pins import Pins, TimedPins
from .residency import KVIndex, is_pinned, is_superseded, rings_of
from .salts import SHARED
from .trie import Checkpoint, Node, Pin

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
    """How long the prefixes of `known` are kept, and for whom. `pool_bytes`, `state_bytes`: room for blocks and for states."""

    def __init__(self, known: KVIndex, pool_bytes: int, state_bytes: int, config: PoolConfig) -> None:
        share = config.pinned_share
        self.known = known
        self.pins = Pins(known, int(pool_bytes * share), int(state_bytes * share))
        self.days = TimedPins()
        self.quotas = Quotas(known, config.agent_bytes, config.anonymous_bytes)
        self._told, self._has_told = 0, False
        spec = known.pool.spec
        sizes = [spec.bytes_per_block(group) for group in spec.groups]
        full = sum(sizes[group] for group in known.full_groups)
        # Of records that are not written yet, about.
        self._record_bytes = {BLOCK: full, WINDOW: sum(sizes) - full, STATE: spec.fixed_bytes_per_agent()}

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
        changes = self.pins.timed.changes + self.days.changes + self.known.num_merged
        if changes == self._told or not (self.pins or self.days or self._has_told):
            return
        self._told, self._has_told = changes, bool(self.pins or self.days)
        left, kept = store.config.own_bytes // 2, set[Key]()
        for pin in sorted([*self.pins.timed, *self.days], key=lambda pin: -(pin.until or 0.0)):
            added = set(_records_of(pin)) - kept
            left -= sum(store.size(key) or self._record_bytes[key.kind] for key in added)
            if left < 0:
                break
            kept |= added
        store.keep(kept)

    def end(self, terms: RetentionPolicy) -> None:
        """A request has ended: what is over its agent's quota goes."""
        self.quotas.enforce(terms.owner)

    def clear(self) -> None:
        self.pins.clear()
        self.days.clear()

    def report(self) -> dict[str, Any]:
        """Figures for people; sizes in bytes."""
        quotas = self.quotas
        return {
            "agents": self.known.accounting.largest(SHOWN),
            "agent_bytes": quotas.agent_bytes,
            "anonymous_bytes": quotas.anonymous_bytes,
            "forgotten_for_quotas": quotas.num_forgotten,
            "pinned": self.pins.report(),
            "kept_for_a_day": len(self.days),
        }


def _records_of(pin: Pin) -> list[Key]:
    """The records that a pinned prefix is resumed from, on disk or not."""
    found = [Key(BLOCK, each.hash) for node in pin.nodes for each in (node, *node.superseded)]
    found += [Key(WINDOW, node.hash) for node in pin.nodes if node.end in node.window_records]
    last = pin.node and pin.node.latest
    if last is not None and last.start < pin.position <= last.end:
        found += [Key(kind, last.hash_at(pin.position)) for kind in (WINDOW, STATE)]
    return found


class Quotas:
    """The most bytes of `known` for each agent, and for all together that name none; None: no limit.

    What is over goes from memory, and stays on disk where it is: first checkpoints that a conversation has left behind, then the
    ends of sequences, the one used longest ago first, then other checkpoints. Nothing of another agent goes, nothing that is
    pinned, in use, or what others of its blocks lead on from.
    """

    def __init__(self, known: KVIndex, agent_bytes: int | None, anonymous_bytes: int | None) -> None:
        self.known = known
        self.agent_bytes = agent_bytes
        self.anonymous_bytes = anonymous_bytes
        self.num_forgotten = 0

    def limit(self, account: str) -> int | None:
        return self.anonymous_bytes if account == ANONYMOUS else self.agent_bytes

    def enforce(self, account: str) -> None:
        """Forget what is over the limit of an account, as far as it may go."""
        if not self._is_over(account):
            return
        self._forget_checkpoints(account, only_left_behind=True)
        self._forget_ends(account)
        self._forget_checkpoints(account)

    def _is_over(self, account: str) -> bool:
        limit = self.limit(account)
        return limit is not None and self.known.accounting.nbytes(account) > limit

    def _forget_ends(self, account: str) -> None:
        went = True
        # Where an end has gone, what it stood on may be one.
        while went and self._is_over(account):
            went = False
            for node in self._ends(account):
                if self._is_over(account):
                    self.known.let_go(node)
                    self.num_forgotten, went = self.num_forgotten + 1, True

    def _ends(self, account: str) -> Iterator[Node]:
        """Nodes of this account that nothing in memory stands on."""
        known = self.known
        for group in known.full_groups[:1]:
            for block in known.pool.evictable(group):
                node = known.owner_of((group, block))
                if node is not None and known.accounting.owner_of((group, block)) == account and _is_alone(node, account):
                    yield node

    def _forget_checkpoints(self, account: str, only_left_behind: bool = False) -> None:
        if not self._is_over(account):
            return
        nodes = {checkpoint: node for node in self.known.trie for checkpoint in node.checkpoints.values()}
        for checkpoint in [what for what in self.known.accounting.of(account) if isinstance(what, Checkpoint)]:
            node = nodes[checkpoint]
            may_go = not only_left_behind or is_superseded(node, checkpoint)
            if self._is_over(account) and may_go and not is_pinned(node, checkpoint) and self._frees(account, checkpoint):
                self.known.drop_checkpoint(node, checkpoint)
                self.num_forgotten += 1

    def _frees(self, account: str, checkpoint: Checkpoint) -> bool:
        """Whether anything of the account is in it."""
        charges = self.known.accounting
        return checkpoint.nbytes > 0 or any(charges.owner_of(owned) == account for owned in rings_of([checkpoint]))


def _is_alone(node: Node, account: str) -> bool:
    """Whether no block in memory and no other agent's checkpoint goes with a node."""
    others = any(checkpoint.owner not in (account, None) for checkpoint in node.checkpoints.values())
    return not others and not any(child.resident or child.checkpoints for child in node.children)
