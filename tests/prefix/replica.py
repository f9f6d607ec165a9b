"""A replica of a trie, made of its changes alone."""

from __future__ import annotations

from mlx_blockpool.prefix.changes import DISK, MEMORY, AllCleared, BlocksStored, Change
from mlx_blockpool.prefix.index import KVIndex
from mlx_blockpool.server.watch.event_log import publish

Contents = dict[str, set[bytes]]


class Replica:
    """Applies changes; `contents` are the hashes of the edges in each tier."""

    def __init__(self) -> None:
        self.contents: Contents = {MEMORY: set(), DISK: set()}

    def append(self, change: Change, /) -> None:
        if isinstance(change, AllCleared):
            self.contents = {MEMORY: set(), DISK: set()}
            return
        there = self.contents[change.tier]
        if isinstance(change, BlocksStored):
            parents = [change.parent, *change.hashes[:-1]]
            there.update(change.hashes)
            known = set().union(*self.contents.values())
            assert all(parent is None or parent in known for parent in parents), (
                "an edge came before its parent"
            )
        else:
            there.difference_update(change.hashes)


class Follower(Replica):
    """The replica of one index."""

    def __init__(self, index: KVIndex) -> None:
        super().__init__()
        self.index = index
        publish(index, self)

    def check(self) -> None:
        assert self.contents == contents_of(self.index)


def contents_of(index: KVIndex) -> Contents:
    return {
        MEMORY: {node.hash for node in index.trie if node.in_memory},
        DISK: {node.hash for node in index.trie if node.on_disk},
    }
