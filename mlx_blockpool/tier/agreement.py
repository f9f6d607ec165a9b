"""The disk tier of a group of ranks: which records count, what is restored and when it is shared.
All ranks decide it alike.

Each rank has records of its part of the model, and all must count the same ones: a record counts
from the moment in which it is due, which all ranks decide alike, until a rank says that it lacks
it. Every rank calls these functions, or none does. Owned by the generation thread.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import groupby, islice
from typing import NamedTuple

from ..kv.arena import KVArena
from ..prefix.admission import Admission
from ..prefix.index import KVIndex
from ..prefix.retention import record_bytes
from ..prefix.trie import PrefixRef
from ..ranks.facts import Lost
from ..ranks.group import Ranks
from ..ranks.head import Head
from ..store.limits import OVER_BUDGET
from ..store.paths import FOLDERS
from ..store.prompt_store import PromptStore
from ..store.record import HASH_BYTES, Key, Record
from .checkpoints import CUT, Ledger, StoredRecords
from .restore import RestoreJob, RestorePlan, Restores
from .write_behind import DiskTier, StoredPrefixes

_NAME_BYTES = 16
# The ranks vote on this many of the plans that reach furthest.
CANDIDATES = 8


class AgreedLedger(Ledger):
    """The ledger of a rank of a group: it changes only where all ranks change theirs.

    What this rank lacks is sent to all, and every rank forgets it at the next exchange. `sizes`:
    bytes of each kind of record, as all ranks count them.
    """

    follows = False

    def __init__(self, store: PromptStore, ranks: Ranks, sizes: Mapping[str, int]) -> None:
        super().__init__(store)
        self._takes = True
        self._ranks = ranks
        self._sizes = sizes
        self._lost: list[tuple[bool, Key]] = []

    @property
    def takes(self) -> bool:
        return self._takes

    def agree(self, takes: bool) -> None:
        """An exchange has found whether the disks of all ranks take records."""
        self._takes = takes

    def open(self) -> list[Record]:
        self._store.pinned = pinned_on_all(self._ranks, self._store.pinned)
        return common(self._ranks, self._store.open())

    def is_put_off(self, key: Key) -> bool:
        # This rank's opinion: its vote on a restore has it.
        return False

    def size(self, record: Record) -> int:
        return max(1, self._sizes[record.kind])

    def refused(self, record: Record, refusal: str) -> int | None:
        self.lost([record.key], again=refusal != OVER_BUDGET)
        return self.size(record)

    def lost(self, keys: Iterable[Key], again: bool = False) -> Sequence[Key]:
        self._lost += [(again, key) for key in keys]
        return ()

    def take_lost(self) -> list[Lost]:
        """What lost() has noted for all ranks since the last call."""
        lost, self._lost = self._lost, []
        groups = groupby(lost, key=lambda each: each[0])
        return [
            Lost(tuple((key.kind, key.hash) for _, key in group), again) for again, group in groups
        ]


class Restored(NamedTuple):
    """This many records of the restore with this number are read, the first ones; whether the
    next one could not be.
    """

    number: int
    records: int
    has_failed: bool


class AgreedRestores(Restores):
    """The restores of a rank of a group: all ranks plan alike, by what all have on disk, and
    vote on what each disk can read.
    """

    votes = True

    def __init__(self, records: StoredRecords, admission: Admission, ranks: Ranks) -> None:
        super().__init__(records, admission)
        self._ranks = ranks
        # Those that no request waits for.
        self._attended: list[RestoreJob] = []

    def plan(self, match: PrefixRef, at_most: int, at_any_cost: bool = False) -> RestorePlan | None:
        self._cheaper.difference_update(match.path[-1:])
        return next(self.candidates(match, at_most), None)

    def agree(
        self, match: PrefixRef, at_most: int, at_any_cost: bool = False
    ) -> RestorePlan | None:
        plans = list(islice(self.candidates(match, at_most), CANDIDATES))
        least = self._ranks.least([self._vote(plan, at_any_cost) for plan in plans])
        agreed = next(
            filter(None, (plan.cut(tokens) for plan, tokens in zip(plans, least, strict=True))),
            None,
        )
        if agreed is None and plans and not at_any_cost and not self.is_worth_reading(plans[0]):
            self._cheaper.add(match.path[-1])
        return agreed

    def _vote(self, plan: RestorePlan, at_any_cost: bool) -> int:
        """How many tokens of a plan this rank can read and, unless `at_any_cost`, in less time
        than it takes to compute them.
        """
        found = None if self.clock() < self._paused_until else self.readable_part(plan)
        return (
            0
            if found is None or not (at_any_cost or self.is_worth_reading(found))
            else found.tokens
        )

    def is_readable(self, key: Key) -> bool:
        # This rank may have lost a record that the others do not miss yet.
        return super().is_readable(key) and key in self.store

    def finish(self, job: RestoreJob) -> None:
        (records,) = self._ranks.least([job.proven])
        job.commit(records, is_last=True)

    def attend(self, job: RestoreJob) -> None:
        self._attended.append(job)

    def keep_up(self, seconds: float) -> None:
        for job in self._attended:
            job.advance(seconds=seconds)

    def restored(self) -> Restored:
        """How far this rank has come with the restore that all ranks share next, for its head."""
        job = self._unshared
        return (
            Restored(0, 0, False)
            if job is None
            else Restored(job.number, job.proven, job.has_failed)
        )

    def commit(self, heads: Collection[Head]) -> None:
        """Share what was read for it if every rank has read it, or one cannot.

        `heads` are those of all ranks.
        """
        job = self._unshared
        if job is None or any(head.restore != job.number for head in heads):
            return
        records = min([job.total, *(head.restored for head in heads if head.failed)])
        if all(head.restored >= records for head in heads):
            job.commit(records, is_last=True)
            if job in self._attended:
                self._attended.remove(job)
                job.release()

    @property
    def _unshared(self) -> RestoreJob | None:
        """The oldest job that all ranks have to finish: the same on all."""
        return next((job for job in self.jobs if not job.is_shared), None)

    @property
    def is_stuck(self) -> bool:
        # The rank whose disk hangs gives up, and says so.
        return False


class AgreedPrefixes(StoredPrefixes):
    """The prefixes that all ranks of a group have on disk. `agreed`: the ledger."""

    restores: AgreedRestores

    def __init__(
        self, records: StoredRecords, restores: AgreedRestores, agreed: AgreedLedger
    ) -> None:
        super().__init__(records, restores)
        self.agreed = agreed

    def forget(self, lost: Lost) -> None:
        """Forget records that a rank of the group lacks, on every rank: the others remove their
        files.

        `again`: they stay queued, and the files of the others serve.
        """
        keys = [Key(*key) for key in lost.keys]
        if lost.again:
            self.write_again(keys)
            return
        for key in keys:
            self.records.dequeue_source(key)
        self.records.forget(keys)
        self.store.remove(keys)

    def close(self) -> bool:
        # Nothing is agreed with other ranks any more.
        self.ledger = Ledger(self.store)
        for lost in self.agreed.take_lost():
            self.forget(lost)
        return super().close()


def open_tier(
    index: KVIndex, arena: KVArena, admission: Admission, store: PromptStore | None, ranks: Ranks
) -> DiskTier:
    """What `store` has of the prefixes of `index`.

    The ranks of a group all have a store, or none has.
    """
    if store is None:
        return DiskTier()
    if ranks.decides:
        records = StoredRecords(index, arena, store, Ledger(store))
        return StoredPrefixes(records, Restores(records, admission))
    agreed = AgreedLedger(store, ranks, record_bytes(index))
    records = StoredRecords(index, arena, store, agreed)
    return AgreedPrefixes(records, AgreedRestores(records, admission, ranks), agreed)


def pinned_on_all(ranks: Ranks, keys: Iterable[Key]) -> set[Key]:
    """The records of the prefixes, of every kind, that rank 0 must not drop: all ranks retain
    them.
    """
    hashes = _from_first(ranks, {key.hash for key in keys}, HASH_BYTES)
    return {Key(kind, digest) for digest in hashes for kind in FOLDERS}


def common(ranks: Ranks, records: Sequence[Record]) -> list[Record]:
    """Those of this rank's records that all ranks have, in the order in which rank 0 gives them."""
    own = {_name(record): record for record in records}
    names = _from_first(ranks, own, _NAME_BYTES)
    agreed = ranks.least([name in own for name in names])
    return [own[name] for name, all_have_it in zip(names, agreed, strict=True) if all_have_it]


def _from_first(ranks: Ranks, names: Iterable[bytes], size: int) -> list[bytes]:
    """The names of `size` bytes each that rank 0 gives."""
    found = ranks.from_first(b"".join(names))
    return [found[at : at + size] for at in range(0, len(found), size)]


def _name(record: Record) -> bytes:
    """The same for records that the ranks have written for the same tokens.

    Records of windows differ by where they were cut.
    """
    facts = f"{record.kind} {record.extra.get(CUT, '')} ".encode()
    return hashlib.blake2b(facts + record.hash, digest_size=_NAME_BYTES).digest()
