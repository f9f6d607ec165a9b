"""Ledger: which records count as on disk, for one rank alone and for a rank of a group.

A record that is on disk is in the trie, and so it steers what is evicted and what is written next. The ranks of a group each have
records of their own part of the model, and must count the same ones: a record counts from the moment in which it is due, which
all ranks decide alike, until a rank says that it lacks it. Owned by the generation thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Protocol

from ..ranks.facts import Lost
from ..ranks.group import Ranks
from ..store.limits import OVER_BUDGET
from ..store.prompt_store import PromptStore
from ..store.record import Key, Record
from .agreement import common, spared


class Ledger(Protocol):
    """Decides which records of a store count as on disk.

    follows:  whether records that other processes write are added to the trie.
    """

    follows: bool

    @property
    def takes(self) -> bool:
        """Whether records may be written now."""

    def agree(self, takes: bool) -> None:
        """An exchange has found whether the disks of all ranks take records."""

    def open(self) -> list[Record]:
        """Open the store. Returns the records that count as on disk, in the order of use."""

    def is_put_off(self, key: Key) -> bool:
        """Return whether plans leave out a record on disk because it could not be read lately."""

    def size(self, record: Record) -> int:
        """Bytes that a written record counts, at least 1."""

    def refused(self, record: Record, refusal: str) -> int | None:
        """The store has refused a record. Returns its size() if it counts as written all the same, until lost() is agreed.

        0: it is not written. None: it waits, and so do all others.
        """

    def lost(self, keys: Iterable[Key], again: bool = False) -> Sequence[Key]:
        """Records that counted are not on this disk. Returns those that the trie has to forget now.

        `again`: they are to be written again.
        """

    def take_lost(self) -> list[Lost]:
        """What lost() has noted for all ranks since the last call."""


class OwnLedger:
    """The ledger of one rank alone: its disk is the truth."""

    follows = True

    def __init__(self, store: PromptStore) -> None:
        self._store = store

    @property
    def takes(self) -> bool:
        return self._store.takes()

    def agree(self, takes: bool) -> None:
        pass

    def open(self) -> list[Record]:
        return self._store.open()

    def is_put_off(self, key: Key) -> bool:
        return self._store.is_put_off(key)

    def size(self, record: Record) -> int:
        return max(1, record.nbytes)

    def refused(self, record: Record, refusal: str) -> int | None:
        return 0 if refusal == OVER_BUDGET else None

    def lost(self, keys: Iterable[Key], again: bool = False) -> Sequence[Key]:
        return list(keys)

    def take_lost(self) -> list[Lost]:
        return []


class AgreedLedger:
    """The ledger of a rank of a group: it changes only where all ranks change theirs.

    What this rank lacks is sent to all, and every rank forgets it at the next exchange. `sizes`: bytes of each kind of record, as
    all ranks count them.
    """

    follows = False

    def __init__(self, store: PromptStore, ranks: Ranks, sizes: Mapping[str, int]) -> None:
        self.takes = True
        self._store = store
        self._ranks = ranks
        self._sizes = sizes
        self._lost: list[tuple[bool, Key]] = []

    def agree(self, takes: bool) -> None:
        self.takes = takes

    def open(self) -> list[Record]:
        self._store.pinned = spared(self._ranks, self._store.pinned)
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
        lost, self._lost = self._lost, []
        groups = groupby(lost, key=lambda each: each[0])
        return [Lost(tuple(key for _, key in group), again) for again, group in groups]
