"""Paths of small records of one size, and a store that is asked about them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from store.records import make_buffers
from store.stores import NAMESPACE

from mlx_blockpool.prefix.trie import naming
from mlx_blockpool.store.paths import name_of
from mlx_blockpool.store.prompt_store import PromptStore
from mlx_blockpool.store.record import BLOCK, Expected, Part, Record, file_size

PARTS = (Part("data", "U8", (1000,)),)
ROOT = hashlib.blake2b(b"root", digest_size=32).digest()


def chain(start: int, count: int, namespace: str = NAMESPACE, kind: str = BLOCK) -> list[Record]:
    """A path of records, each after the one before it."""
    records: list[Record] = []
    for n in range(count):
        parent = records[-1].hash if records else ROOT
        tokens = (start, n)
        records.append(Record(kind, namespace, naming(parent, tokens), parent, 2 * n, tokens, PARTS))
    return records


SIZE = file_size(chain(0, 1)[0])


def put(store: PromptStore, record: Record, *spared: Record, anew: bool = False) -> str | None:
    """Why a record was not taken; None: it was."""
    return store.put(record, lambda: make_buffers(record), {r.key for r in spared}, anew).refusal


def put_all(store: PromptStore, records: Sequence[Record]) -> None:
    """Each of them is taken and written."""
    for record in records:
        assert put(store, record) is None
    settled(store)


def settled(store: PromptStore) -> list[Record]:
    """Everything is written, and all looks are taken. Returns the new records of others."""
    assert store.flush()
    assert store.poll() == []
    assert store.flush()
    assert store.poll() == []
    return store.take_changes().found


def expected_of(record: Record) -> Expected:
    """What was noted at a start does not know its parts."""
    return Expected(record.namespace, record.kind, record.hash, record.parts or None)


def data_of(store: PromptStore, record: Record) -> bytes:
    return b"".join(bytes(view) for view in store.read(expected_of(record)).result(30)[1])


def is_right(store: PromptStore, record: Record) -> bool:
    """Whether what the store has under a name is what was put there."""
    return data_of(store, record) == b"".join(make_buffers(record))


def file_of(folder: Path, record: Record) -> Path:
    return folder / name_of(record.namespace, record.key)
