"""What is stored in a trie and removed from it, in the order in which it happens.

An index appends each change to its `changes`, which keep nothing unless a server reads them, and counts it in a Digest. A change
holds immutable parts of nodes: hashes, tokens, block ids and salts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from .trie import Node

MEMORY, DISK = "memory", "disk"
# Of the hashes in a Digest, which of their four words is added.
CHECKPOINT, PIN = 2, 3
_WORD_OF = {MEMORY: 0, DISK: 1}
_WORD_BYTES = 8
_MASK = (1 << 63) - 1


class BlocksStored(NamedTuple):
    """Edges that follow each other are in a tier now; `parent` is the hash before the first one, None at a root.

    edges: their tokens as bytes. blocks: for each edge the ids of its blocks, one for each full group; empty on disk.
    """

    parent: bytes | None
    hashes: tuple[bytes, ...]
    edges: tuple[bytes, ...]
    blocks: tuple[tuple[int, ...], ...]
    tier: str
    salt: bytes


class BlocksRemoved(NamedTuple):
    """Edges are not in a tier any more. All are under the same salt."""

    hashes: tuple[bytes, ...]
    tier: str
    salt: bytes


class AllCleared(NamedTuple):
    """Nothing of the trie is in any tier any more."""


Change = BlocksStored | BlocksRemoved | AllCleared


class Changes(Protocol):
    """Where an index appends its changes: a deque, or the log of a server."""

    def append(self, change: Change, /) -> None: ...


class Digest:
    """A number that stands for a set of hashes, in whatever order they came: a sum, so that a change of a large set is cheap.

    What differs in one hash differs in the sum, but for one case in 2 ** 63.
    """

    def __init__(self) -> None:
        self.value = 0

    def count(self, hashes: Iterable[bytes], word: int, times: int = 1) -> None:
        """Add one word of each hash; with `times` of -1 take it away."""
        start = word * _WORD_BYTES
        added = sum(int.from_bytes(each[start : start + _WORD_BYTES], "little") for each in hashes)
        self.value = (self.value + times * added) & _MASK

    def note(self, change: Change) -> None:
        """Follow a change. (Before all is cleared, all is removed.)"""
        if not isinstance(change, AllCleared):
            self.count(change.hashes, _WORD_OF[change.tier], 1 if isinstance(change, BlocksStored) else -1)

    def check(self, nodes: Iterable[Node]) -> None:
        """It is that of these nodes and their checkpoints. Raises AssertionError."""
        found = Digest()
        for node in nodes:
            for tier, is_there in ((MEMORY, node.residency.in_memory), (DISK, node.residency.on_disk)):
                found.count([node.hash] if is_there else [], _WORD_OF[tier])
            found.count(map(node.hash_at, node.residency.checkpoints), CHECKPOINT)
        assert found.value == self.value, f"the digest of the trie is {found.value}, not {self.value}"


def stored(chain: Sequence[Node], tier: str) -> BlocksStored:
    """The change that `chain`, nodes of which each is the parent of the next, came into a tier."""
    parent = chain[0].parent
    assert parent is not None, "a root has no blocks"
    blocks = tuple(node.residency.blocks for node in chain) if tier == MEMORY else ()
    before = None if parent.parent is None else parent.hash
    return BlocksStored(before, tuple(n.hash for n in chain), tuple(n.tokens for n in chain), blocks, tier, parent.salt)


def removed(nodes: Iterable[Node]) -> list[BlocksRemoved]:
    """The changes that nodes under one salt leave the trie, with the residency that they had."""
    found = list(nodes)
    in_memory = tuple(node.hash for node in found if node.residency.in_memory)
    on_disk = tuple(node.hash for node in found if node.residency.on_disk)
    tiers = ((in_memory, MEMORY), (on_disk, DISK))
    return [BlocksRemoved(hashes, tier, found[0].salt) for hashes, tier in tiers if hashes]
