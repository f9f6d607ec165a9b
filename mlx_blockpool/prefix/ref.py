"""A path that was noted by its hashes, found again among known prefixes: where it is, and what only it stands on.

Knows hashes and nodes; no names. Owned by the generation thread.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ..spec import BLOCK_TOKENS
from ..store.record import BLOCK, STATE, WINDOW, Key
from .residency import KVIndex
from .trie import Node, PrefixRef

# Token ids, and the salt that they are looked up under.
Prompt: TypeAlias = tuple[Sequence[int], bytes]


@dataclass(frozen=True)
class Freed:
    """What was forgotten: edges of the trie, blocks of the pool and bytes. `kept`: edges of the path that others need."""

    nodes: int
    blocks: int
    bytes: int
    kept: int


# -- what only one path stands on --------------------------------------------------------------------------------------


class SharedPaths:
    """Noted paths, and how far two of them stand on the same edges: made once, and then cheap to ask of each of them."""

    def __init__(self, paths: Iterable[PrefixRef]) -> None:
        self._users: Counter[bytes] = Counter()
        # Ends within a block: by the hash before them, and by their tokens in that block.
        self._ends: dict[bytes, dict[int, set[bytes]]] = {}
        for path in paths:
            self._users.update(path.hashes)
            if path.tokens % BLOCK_TOKENS:
                before = path.hashes[-2] if len(path.hashes) > 1 else b""
                self._ends.setdefault(before, {}).setdefault(path.tokens % BLOCK_TOKENS, set()).add(path.hashes[-1])

    def stood_on(self, nodes: Sequence[Node], path: PrefixRef) -> int:
        """How many of the edges of one of these paths another one stands on."""
        # A hash names all tokens before it: those that others have too come first.
        count = bisect_left(path.hashes, True, key=lambda digest: self._users[digest] < 2)
        if count >= len(nodes):
            return count
        own, node = path.hashes[count], nodes[count]
        ends = self._ends.get(path.hashes[count - 1] if count else b"", {})
        within = ((node.hash_at(node.start + size), digests) for size, digests in ends.items() if size <= node.end - node.start)
        return count + any(digest != own and digest in digests for digest, digests in within)


def own_from(known: KVIndex, path: PrefixRef, shared: SharedPaths, in_use: Iterable[Prompt] = ()) -> int:
    """From which edge of a path on nobody else needs it: no other path of `shared`, which has this one too, no prompt `in_use`,
    and nothing known behind it.
    """
    match = known.trie.find(path)
    nodes = match.path
    first = shared.stood_on(nodes, path)
    for tokens, salt in in_use:
        first = max(first, _common(nodes, known.trie.match(tokens, salt).path))
    own = len(nodes)
    while own > first and nodes[own - 1].end <= path.tokens and not set(nodes[own - 1].children) - set(nodes[own : own + 1]):
        own -= 1
    return own


def _common(one: Sequence[object], other: Sequence[object]) -> int:
    """How many are the same from the first on."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[:middle] == other[:middle] else (low, middle - 1)
    return low


def forget(known: KVIndex, path: PrefixRef, first: int) -> Freed:
    """Take the edges of a path from `first` on out of the trie, and with them their blocks and records."""
    nodes = known.trie.find(path).path
    blocks, n_bytes = _evictable(known), known.nbytes
    if first < len(nodes):
        top, parent = nodes[first], nodes[first].parent
        assert parent is not None
        # What it covers is an earlier end of the same path.
        known.unreachable += [Key(BLOCK, covered.hash) for covered in top.superseded]
        top.superseded = []
        known.drop(top)
        known.prune(parent)
    return Freed(len(nodes) - first, blocks - _evictable(known), n_bytes - known.nbytes, first)


def kept_hashes(known: KVIndex, path: PrefixRef) -> set[bytes]:
    """The names of all records that what is known of a path may stand on."""
    return {key.hash for node in known.trie.find(path).path for key in records_of(node)}


def records_of(node: Node) -> Iterator[Key]:
    """The records of an edge and of its checkpoints, there or not."""
    for each in (node, *node.superseded):
        yield Key(BLOCK, each.hash)
    for kind, ends in ((WINDOW, node.window_records), (STATE, node.state_records)):
        yield from (Key(kind, node.hash_at(end)) for end in ends)


def _evictable(known: KVIndex) -> int:
    return sum(counts.evictable for counts in known.pool.settle())
