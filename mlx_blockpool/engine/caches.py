"""Caches: what the engine takes layer caches and blocks from, and where what it computed is cached.

PooledCaches has them in a pool, StockCaches has none. Knows sequences; runs no model. Owned by the
generation thread.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

from ..config import EngineConfig
from ..drafts.curve import CostCurve
from ..errors import PoolExhaustedError
from ..kv.capabilities import Capabilities
from ..kv.prompt_cache import tokens_held
from ..prefix.lookup import Lookup
from ..prefix.salts import SHARED
from ..prefix.trie import PrefixRef
from ..spec import BLOCK_TOKENS
from ..tier.cache import TieredPrefixCache
from ..tier.restore import NoRestores, RestoreJob, RestorePlan
from .request import KIND, Event, RestoreBegun, RestoreEnded, Restoring
from .sequence import Sequence

# How long one step waits for records that are being read while there is nothing to compute.
WAIT_SECONDS = 0.02
REPORT_SECONDS = 1.0


@dataclass(frozen=True)
class Opened:
    """Layer caches that hold the first `cached` tokens of a prompt, and why not more."""

    caches: list[Any]
    cached: int
    lookup: Lookup | None


class Caches:
    """Layer caches of requests, and the prompts that are cached. This base class is for caches
    without pool and disk.

    capabilities:      what the model can do with these caches; without ragged batches one sequence
                       runs at a time.
    needs_checkpoints: a prompt can be resumed only where a checkpoint was cached.
    no_drafts:         why nothing is drafted, whatever the model can do; None: it may be.
    curve:             the seconds of forwards by their rows, where they were measured.
    is_unmeasured:     something of the model's speed is still to be measured.
    unmeasurable:      what of it will not be measured for this load, and why.
    """

    capabilities = Capabilities()
    needs_checkpoints = True
    no_drafts: str | None = None
    curve: CostCurve | None = None
    is_unmeasured = False
    unmeasurable: Mapping[str, str] = MappingProxyType({})

    @property
    def ragged(self) -> bool:
        return self.capabilities.ragged

    @property
    def caches_chunks(self) -> bool:
        """True if caching costs nothing and serves at any token, so that every chunk is cached."""
        return self.ragged and not self.needs_checkpoints

    @property
    def pads_prompts(self) -> bool:
        """True if prompts of several lengths may be computed together; otherwise only those of one
        length, and only in ragged batches.
        """
        return False

    @property
    def num_arrived(self) -> int:
        """Records read from disk so far."""
        return 0

    @property
    def is_restoring(self) -> bool:
        """True if a request waits for records that advance() reads."""
        return False

    @property
    def are_blocks_coming(self) -> bool:
        """True if blocks are held that come back without the engine: of a restore that a client
        has ordered, or lent ones.
        """
        return False

    def capacity(self) -> int | None:
        """The most tokens that one sequence can have; None: no limit."""
        return None

    def is_ready(self, sequence: Sequence) -> bool:
        """Return whether open() need not wait for the disk.

        If it would, advance() reads the missing records from now on.
        """
        return True

    def open(self, sequence: Sequence, others: Collection[Sequence]) -> Opened:
        """Caches for a request in addition to `others`.

        Raises PoolExhaustedError if there are no blocks now.
        """
        raise NotImplementedError

    def ensure_next_blocks(self, batch: Collection[Sequence], tokens: int = 1) -> None:
        """Reserve the blocks of each member's next tokens, after those that were rolled back.

        Raises PoolExhaustedError and reserves nothing.
        """

    def reserve_rows(self, sequence: Sequence, rows: int) -> bool:
        """Reserve the blocks of this many rows of a member in a verification, after those that
        were rolled back.

        Returns whether the pool has them.
        """
        return False

    def insert(self, sequence: Sequence, kind: str, end: int) -> None:
        """Cache the first `end` computed tokens of a sequence that continues, for others to
        share.
        """
        raise NotImplementedError

    def insert_given(self, sequence: Sequence, caches: list[Any]) -> None:
        """Cache the beginning of a prompt from caches that came with the request."""
        raise NotImplementedError

    def release(self, sequence: Sequence, kind: str) -> None:
        """Cache the computed tokens of a sequence and take its caches back."""
        raise NotImplementedError

    def discard(self, sequence: Sequence) -> None:
        """Take a sequence's caches back and cache nothing."""
        sequence.caches = None

    def release_all(self) -> None:
        """After a failure: no caches that were handed out are in use any more."""

    def forward_seconds(self, tokens: int) -> float:
        """How long a forward of this many tokens takes, as measured; proportional to them where
        that was not.
        """
        return float(tokens) if self.curve is None else self.curve.seconds(tokens)

    def advance(self, idle: bool) -> bool:
        """Between two steps: write and read records. Returns whether waiting requests may be ready
        now.

        `idle`: no sequence is running; may block for up to WAIT_SECONDS.
        """
        return False

    def take_restore_events(self) -> list[Event]:
        """Restores that have begun or ended, and the progress of each every REPORT_SECONDS: few
        take that long.
        """
        return []

    def end_restores(self) -> bool:
        """Release the blocks of all restores, for a sequence that can continue now.

        Returns whether there were any.
        """
        return False

    def end_restore(self, sequence: Sequence) -> int:
        """End the restore of a request that has started, or never will.

        Returns the tokens that were read for it.
        """
        return 0

    def note_prefill(self, tokens: int, seconds: float) -> None:
        """Note the speed of prefill, which restoring from disk has to beat."""

    def cached_tokens(self, tokens: list[int], salt: bytes = SHARED) -> int:
        """How many tokens of a prompt open() would find now, once it is ready."""
        raise NotImplementedError

    def following(self, sequence: Sequence, at_most: int) -> list[int]:
        """Up to `at_most` tokens that have followed the emitted ones of a sequence before; empty
        if there are none.
        """
        return []


class PooledCaches(Caches):
    """Caches in the pool of `prefix`."""

    def __init__(self, prefix: TieredPrefixCache) -> None:
        self.prefix = prefix
        self.capabilities = prefix.arena.capabilities
        self.needs_checkpoints = prefix.arena.spec.needs_checkpoints
        # Where each agent's last turn ended, until the server has noted it.
        self.turns: dict[str, PrefixRef] = {}
        self._restores: dict[int, RestoreJob] = {}
        # When the progress of each was last reported, in seconds of time.monotonic().
        self._reported: dict[int, float] = {}
        self._happened: list[Event] = []
        # As of the last advance(): the restores that had released their blocks, those of others
        # included, and the lent caches.
        self._released = self._lent = 0

    @property
    def num_arrived(self) -> int:
        return self.prefix.stored.restores.num_arrived

    @property
    def is_restoring(self) -> bool:
        return bool(self._restores)

    @property
    def are_blocks_coming(self) -> bool:
        restores = self.prefix.stored.restores
        return (bool(restores.jobs) and not restores.is_stuck) or self.prefix.num_lent > 0

    @property
    def pads_prompts(self) -> bool:
        has_states = bool(self.prefix.arena.state_leaves)
        return self.ragged and (not has_states or self.capabilities.pads_states)

    def capacity(self) -> int | None:
        return self.prefix.pool.sequence_capacity()

    def open(self, sequence: Sequence, others: Collection[Sequence]) -> Opened:
        # The rest is reserved step by step. A sequence that was preempted, or is one of several
        # choices, needs a spare block for each of the others, or it would soon be preempted.
        restored = self.end_restore(sequence)
        reserved = min(sequence.left_to_produce(), BLOCK_TOKENS)
        acquire = partial(
            self.prefix.acquire_resident,
            sequence.tokens,
            reserved,
            salt=sequence.policy.salt,
            start=sequence.prefix,
        )
        try:
            acquired = acquire()
        except PoolExhaustedError:
            if not self.end_restores():
                raise
            acquired = acquire()
        try:
            self.prefix.admission.ensure_spare_blocks(
                len(others) if sequence.preemptions or sequence.request.group is not None else 0
            )
        except PoolExhaustedError:
            self.prefix.discard(acquired.caches)
            raise
        if self.needs_checkpoints:
            self._add_breakpoints(sequence, acquired.lookup)
        sequence.prefix = self.prefix.ref_of(acquired.caches)
        self._pin(sequence, acquired.lookup.hit)
        lookup = replace(acquired.lookup, restored=min(restored, acquired.lookup.hit))
        return Opened(acquired.caches, lookup.hit, lookup)

    def _add_breakpoints(self, sequence: Sequence, lookup: Lookup) -> None:
        """Add to the request's breakpoints: where cached prompts differ from it, and a few
        positions of a long prompt.
        """
        positions = [lookup.matched] if lookup.matched > lookup.hit else []
        position = EngineConfig.checkpoint_tokens
        while position < sequence.prefill_end:
            positions.append(position)
            position *= 2
        for position in positions:
            if lookup.hit < position <= sequence.prefill_end:
                sequence.breakpoints.setdefault(position, KIND)

    def _pin(self, sequence: Sequence, known: int) -> None:
        """Pin the beginnings that the request wants pinned, as far as they are cached now."""
        for pin in [pin for pin in sequence.pins if pin[0] <= known]:
            sequence.pins.remove(pin)
            self.prefix.pin_for(
                sequence.tokens[: pin[0]], pin[1], sequence.policy.salt, sequence.prefix
            )

    def is_ready(self, sequence: Sequence) -> bool:
        restores = self.prefix.stored.restores
        if sequence.uid not in self._restores:
            sequence.prefix = self.prefix.match(
                sequence.tokens, sequence.policy.salt, sequence.prefix
            )
            plan = self._plan(sequence, sequence.prefix, restores)
            if plan is None:
                return True
            if not plan.arriving.isdisjoint(restores.arriving):
                # Another restore reads the same records. If it is stuck, this request computes
                # them.
                return restores.is_stuck
            try:
                self._restores[sequence.uid] = begun = restores.begin(plan)
                self._happened.append(RestoreBegun(sequence.uid, plan.tokens, begun.n_bytes))
                self._reported[sequence.uid] = time.monotonic()
            except PoolExhaustedError:
                # Started restores end first. Without any, the request starts from what is in
                # memory, once there are blocks.
                return not self._restores
        job = self._restores[sequence.uid]
        if job.is_partial:
            # The rest is computed, also where the restore ends before the request starts.
            sequence.agreed = 0
        return job.advance()

    def _plan(
        self, sequence: Sequence, match: PrefixRef, restores: NoRestores
    ) -> RestorePlan | None:
        """What to bring back for a request.

        The ranks of a group vote on it, once before it starts, unless memory has all.
        """
        at_most = (
            sequence.prefill_end
            if sequence.agreed is None
            else min(sequence.prefill_end, sequence.agreed)
        )
        plan = restores.plan(match, at_most)
        is_open = restores.votes and sequence.agreed is None
        if plan is None or not is_open or not plan.arriving.isdisjoint(restores.arriving):
            return plan
        plan = restores.agree(match, at_most)
        sequence.agreed = 0 if plan is None else plan.have + plan.tokens
        return plan

    def advance(self, idle: bool) -> bool:
        self.prefix.keep_up()
        lent, self._lent = self._lent, self.prefix.num_lent
        restores = self.prefix.stored.restores
        self.prefix.stored.write_behind()
        done: list[bool] = []
        if self._restores:
            wait = WAIT_SECONDS / len(self._restores) if idle else 0.0
            done = [
                restore.advance(wait=wait, seconds=EngineConfig.restore_seconds)
                for restore in self._restores.values()
            ]
        released, self._released = self._released, restores.num_released
        is_released = lent > self._lent or released != restores.num_released
        return is_released or True in done or restores.is_stuck

    def take_restore_events(self) -> list[Event]:
        if not (self._restores or self._happened):
            return []
        happened, self._happened = self._happened, []
        now = time.monotonic()
        due = [uid for uid in self._restores if now - self._reported[uid] >= REPORT_SECONDS]
        self._reported.update(dict.fromkeys(due, now))
        found = [(uid, self._restores[uid]) for uid in due]
        return [
            *happened,
            *(
                Restoring(uid, job.plan.have + job.done, job.plan.have + job.plan.tokens)
                for uid, job in found
            ),
        ]

    def note_prefill(self, tokens: int, seconds: float) -> None:
        self.prefix.stored.restores.note_prefill(tokens, seconds)

    def end_restore(self, sequence: Sequence) -> int:
        return self._end_restore(sequence.uid) if sequence.uid in self._restores else 0

    def end_restores(self) -> bool:
        return bool([self._end_restore(uid) for uid in list(self._restores)])

    def _end_restore(self, uid: int) -> int:
        """Returns the tokens that were read, which stay cached."""
        restore = self._restores.pop(uid)
        del self._reported[uid]
        restore.release()
        share = restore.done / max(1, restore.plan.tokens)
        self._happened.append(RestoreEnded(uid, restore.done, int(restore.n_bytes * share)))
        return restore.done

    def cached_tokens(self, tokens: list[int], salt: bytes = SHARED) -> int:
        return self.prefix.within_reach(tokens, salt)

    def following(self, sequence: Sequence, at_most: int) -> list[int]:
        emitted = sequence.tokens[: sequence.emitted]
        return self.prefix.index.trie.following(
            emitted, at_most, sequence.policy.salt, sequence.prefix
        )

    def ensure_next_blocks(self, batch: Collection[Sequence], tokens: int = 1) -> None:
        if self.prefix.arena.spec.state_growth:
            for row in batch:
                self.prefix.admission.ensure_growth(row.caches or [], row.computed + tokens)
        self.prefix.admission.ensure_next_blocks(
            [(sequence.caches or [], sequence.rolled_back + tokens) for sequence in batch]
        )

    def reserve_rows(self, sequence: Sequence, rows: int) -> bool:
        return self.prefix.admission.try_reserve_rows(
            sequence.caches or [], sequence.rolled_back + rows
        )

    def insert(self, sequence: Sequence, kind: str, end: int) -> None:
        caches = sequence.caches or []
        known = self.prefix.insert(sequence.tokens[:end], caches, kind, sequence.policy)
        sequence.prefix = self.prefix.ref_of(caches)
        self._pin(sequence, known)

    def insert_given(self, sequence: Sequence, caches: list[Any]) -> None:
        self.prefix.insert(sequence.tokens[: tokens_held(caches)], caches, KIND, sequence.policy)

    def release(self, sequence: Sequence, kind: str) -> None:
        tokens = sequence.tokens[: sequence.computed]
        caches = sequence.caches or []
        known = self.prefix.release(tokens, caches, kind, sequence.policy)
        sequence.prefix, sequence.caches = self.prefix.ref_of(caches), None
        self._pin(sequence, known)
        self.prefix.retention.quotas.enforce(sequence.policy.owner)
        name = sequence.request.name
        if name is not None and sequence.policy.is_written:
            self.turns[name] = self.prefix.match(
                tokens, sequence.policy.salt, sequence.prefix
            ).detached()

    def discard(self, sequence: Sequence) -> None:
        if sequence.caches is not None:
            self.prefix.discard(sequence.caches)
            sequence.caches = None

    def release_all(self) -> None:
        self.end_restores()
        self.prefix.release_all()
