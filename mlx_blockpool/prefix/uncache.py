"""Uncaching the prefix of one agent: which of its edges nobody else needs, and taking those out.

Knows hashes and nodes; no names. Owned by the generation thread.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ..store.record import BLOCK, STATE, WINDOW, Key
from .index import KVIndex
from .trie import Node, PrefixRef

# Token ids, and the salt that they are looked up under.
Prompt: TypeAlias = tuple[Sequence[int], bytes]


class SharedPaths:
    """The paths of several agents, and how far each shares its edges with another."""

    def __init__(self, paths: Iterable[PrefixRef]) -> None:
        self._users: Counter[bytes] = Counter()
        # Ends within a block: by the hash before them, and by their tokens in that block.
        self._ends: dict[bytes, dict[int, set[bytes]]] = {}
        for path in paths:
            self._users.update(path.hashes)
            if path.partial_tokens:
                before = path.hashes[-2] if len(path.hashes) > 1 else b""
                self._ends.setdefault(before, {}).setdefault(path.partial_tokens, set()).add(path.hashes[-1])

    def num_shared(self, nodes: Sequence[Node], path: PrefixRef) -> int:
        """How many of the first edges of one of these paths another one needs too; `nodes` are its cached edges."""
        # A hash names all tokens before it: those that others have too come first.
        count = bisect_left(path.hashes, True, key=lambda digest: self._users[digest] < 2)
        if count >= len(nodes):
            return count
        own, node = path.hashes[count], nodes[count]
        ends = self._ends.get(path.hashes[count - 1] if count else b"", {})
        within = ((node.hash_at(node.start + size), digests) for size, digests in ends.items() if size <= node.end - node.start)
        return count + any(digest != own and digest in digests for digest, digests in within)


def exclusive_from(index: KVIndex, path: PrefixRef, shared: SharedPaths, in_use: Iterable[Prompt] = ()) -> int:
    """From which edge of a path on no other path of `shared` needs it, no prompt `in_use`, and nothing cached after it."""
    match = index.trie.find(path)
    nodes = match.path
    first = shared.num_shared(nodes, path)
    for tokens, salt in in_use:
        # Two paths that part never meet again.
        others = set(index.trie.match(tokens, salt).path)
        first = max(first, bisect_left(nodes, True, key=lambda node: node not in others))
    own = len(nodes)
    while own > first and nodes[own - 1].end <= path.tokens and not set(nodes[own - 1].children) - set(nodes[own : own + 1]):
        own -= 1
    return own


@dataclass(frozen=True)
class Uncached:
    """What was uncached: edges of the trie, blocks of the pool and bytes. `kept`: edges of the path that others need."""

    nodes: int
    blocks: int
    bytes: int
    kept: int


def uncache(index: KVIndex, path: PrefixRef, first: int) -> Uncached:
    """Take the edges of a path from `first` on out of the trie, and with them their blocks and records."""
    nodes = index.trie.find(path).path
    blocks, n_bytes = _evictable(index), index.nbytes
    if first < len(nodes):
        index.remove_for_good(nodes[first])
    return Uncached(len(nodes) - first, blocks - _evictable(index), n_bytes - index.nbytes, first)


def kept_hashes(index: KVIndex, path: PrefixRef) -> set[bytes]:
    """The names of all records that the cached part of a path may need."""
    return {key.hash for node in index.trie.find(path).path for key in records_of(index, node)}


def records_of(index: KVIndex, node: Node) -> Iterator[Key]:
    """The records of an edge and of its checkpoints, on disk or not."""
    for each in index.with_superseded(node):
        yield Key(BLOCK, each.hash)
    for kind, ends in ((WINDOW, node.residency.window_records), (STATE, node.residency.state_records)):
        yield from (Key(kind, node.hash_at(end)) for end in ends)


def _evictable(index: KVIndex) -> int:
    return sum(counts.evictable for counts in index.pool.settle())
