"""What is stored in a trie and removed from it, in the order in which it happens.

An index appends each change to its `changes`, which discard it unless a server reads them. A change
holds immutable parts of
nodes: hashes, tokens, block ids and salts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from .trie import Node

MEMORY, DISK = "memory", "disk"


class BlocksStored(NamedTuple):
    """Edges that follow each other are in a tier now; `parent` is the hash before the first one,
    None at a root.

    edges: their tokens as bytes. blocks: for each edge the ids of its blocks, one for each full
    group; empty on disk.
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


def stored(chain: Sequence[Node], tier: str) -> BlocksStored:
    """The change that `chain`, nodes of which each is the parent of the next, came into a tier."""
    parent = chain[0].parent
    assert parent is not None, "a root has no blocks"
    blocks = (
        tuple(tuple(block for _, block in node.blocks) for node in chain) if tier == MEMORY else ()
    )
    before = None if parent.parent is None else parent.hash
    return BlocksStored(
        before,
        tuple(n.hash for n in chain),
        tuple(n.tokens for n in chain),
        blocks,
        tier,
        parent.salt,
    )


def removed(nodes: Iterable[Node]) -> list[BlocksRemoved]:
    """The changes that nodes under one salt leave the trie, from the tiers that they were in."""
    found = list(nodes)
    in_memory = tuple(node.hash for node in found if node.in_memory)
    on_disk = tuple(node.hash for node in found if node.on_disk)
    tiers = ((in_memory, MEMORY), (on_disk, DISK))
    return [BlocksRemoved(hashes, tier, found[0].salt) for hashes, tier in tiers if hashes]
