"""Token sequences kept on disk as a server keeps them: full blocks and a tail, through a PromptStore; and agents on them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from store.disks import QuickDisk
from store.records import PARTS, make_buffers
from store.stores import NAMESPACE, open_store

from mlx_blockpool.prefix.trie import Trie, naming
from mlx_blockpool.spec import BLOCK_TOKENS
from mlx_blockpool.store.agent_files import Agent, Agents
from mlx_blockpool.store.fs import write_whole
from mlx_blockpool.store.paths import name_of
from mlx_blockpool.store.record import BLOCK, Key, Record, encode


def path_of(tokens: Sequence[int], namespace: str = NAMESPACE) -> list[Record]:
    """The records of a sequence; their contents are told apart by where they begin."""
    parent, found = Trie(namespace).root.hash, []
    for start in range(0, len(tokens), BLOCK_TOKENS):
        edge = tuple(tokens[start : start + BLOCK_TOKENS])
        found.append(Record(BLOCK, namespace, naming(parent, edge), parent, start, edge, PARTS, {"kind": "assistant"}))
        parent = found[-1].hash
    return found


def hashes_of(tokens: Sequence[int], namespace: str = NAMESPACE) -> list[bytes]:
    return [record.hash for record in path_of(tokens, namespace)]


def file_of(root: Path, record: Record) -> Path:
    return root / name_of(record.namespace, Key(record.kind, record.hash))


def keep(root: Path, *sequences: Sequence[int], namespace: str = NAMESPACE) -> None:
    """Every record of every sequence, written by a store."""
    store = open_store(root, namespace=namespace)
    store.open()
    for tokens in sequences:
        for record in path_of(tokens, namespace):
            buffers = make_buffers(record, record.start)
            assert store.put(record, lambda buffers=buffers: buffers).taken  # type: ignore[misc]
    assert store.close()


def place(root: Path, records: Iterable[Record]) -> None:
    """Records of any kind, without a store."""
    for record in records:
        path = file_of(root, record)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(QuickDisk(), path, encode(record, make_buffers(record, record.start)))


def note(root: Path, name: str, tokens: Sequence[int], namespace: str = NAMESPACE) -> Agent:
    """An agent whose path are the records of these tokens."""
    return Agents(root, QuickDisk()).note(name, namespace, "tiny", hashes_of(tokens, namespace), len(tokens))
