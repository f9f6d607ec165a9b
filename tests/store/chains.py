"""Paths of records: chains of small ones of one size, and token sequences as a server keeps them,
full blocks and a tail.

What puts them into a store, asks a store about them, writes them without one, and names agents on
them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

from store.disks import QuickDisk
from store.records import PARTS as BLOCK_PARTS
from store.records import make_buffers, prefix_hash
from store.stores import NAMESPACE, open_store

from mlx_blockpool.prefix.trie import Trie
from mlx_blockpool.spec import BLOCK_TOKENS
from mlx_blockpool.store.agents import Agent, Agents
from mlx_blockpool.store.fs import write_whole
from mlx_blockpool.store.hashing import encode as edge_of
from mlx_blockpool.store.paths import name_of
from mlx_blockpool.store.prompt_store import PromptStore
from mlx_blockpool.store.record import BLOCK, Part, Record, encode, file_size

PARTS = (Part("data", "U8", (1000,)),)
ROOT = hashlib.blake2b(b"root", digest_size=32).digest()


def chain(start: int, count: int, namespace: str = NAMESPACE, kind: str = BLOCK) -> list[Record]:
    """A path of records, each after the one before it."""
    records: list[Record] = []
    for n in range(count):
        parent = records[-1].hash if records else ROOT
        tokens = (start, n)
        records.append(
            Record(
                kind, namespace, prefix_hash(parent, tokens), parent, 2 * n, edge_of(tokens), PARTS
            )
        )
    return records


SIZE = file_size(chain(0, 1)[0])


def put(store: PromptStore, record: Record, *spared: Record, anew: bool = False) -> str | None:
    """Why a record was not taken; None: it was."""
    return store.write(record, lambda: make_buffers(record), {r.key for r in spared}, anew).refusal


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


def data_of(store: PromptStore, record: Record) -> bytes:
    return b"".join(bytes(view) for view in store.read(record.key).result(30)[1])


def is_right(store: PromptStore, record: Record) -> bool:
    """Whether what the store has under a name is what was put there."""
    return data_of(store, record) == b"".join(make_buffers(record))


def file_of(folder: Path, record: Record) -> Path:
    return folder / name_of(record.namespace, record.key)


# -- token sequences -------------------------------------------------------------------------------


def path_of(tokens: Sequence[int], namespace: str = NAMESPACE) -> list[Record]:
    """The records of a sequence; their contents are told apart by where they begin."""
    parent, found = Trie(namespace).root.hash, []
    for start in range(0, len(tokens), BLOCK_TOKENS):
        edge = tuple(tokens[start : start + BLOCK_TOKENS])
        found.append(
            Record(
                BLOCK,
                namespace,
                prefix_hash(parent, edge),
                parent,
                start,
                edge_of(edge),
                BLOCK_PARTS,
                {"kind": "assistant"},
            )
        )
        parent = found[-1].hash
    return found


def hashes_of(tokens: Sequence[int], namespace: str = NAMESPACE) -> list[bytes]:
    return [record.hash for record in path_of(tokens, namespace)]


def keep(root: Path, *sequences: Sequence[int], namespace: str = NAMESPACE) -> None:
    """Every record of every sequence, written by a store."""
    store = open_store(root, namespace=namespace)
    store.open()
    for tokens in sequences:
        for record in path_of(tokens, namespace):
            copy = partial(make_buffers, record, record.start)
            assert store.write(record, copy).refusal is None
    assert store.close()


def place(root: Path, records: Iterable[Record]) -> None:
    """Records of any kind, without a store."""
    for record in records:
        path = file_of(root, record)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(QuickDisk(), path, encode(record, make_buffers(record, record.start)))


def note(root: Path, name: str, tokens: Sequence[int], namespace: str = NAMESPACE) -> Agent:
    """An agent whose path are the records of these tokens."""
    return Agents(root).note(name, namespace, "tiny", hashes_of(tokens, namespace), len(tokens))
