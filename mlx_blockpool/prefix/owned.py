"""What a node of the trie has of the pool and of the disk: its ring blocks, its records, and which of it must stay."""

from __future__ import annotations

from collections.abc import Iterable

from ..store.record import STATE, WINDOW, Key
from .trie import Checkpoint, Node

Owned = tuple[int, int]  # (layer group, block)


def is_pinned(node: Node, checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint of a node must stay."""
    return any(pin.position == checkpoint.position for pin in node.pins)


def keeps(node: Node, owned: Owned, full: bool) -> bool:
    """Whether a pin on this node keeps one of its blocks, which is of a full group or of a window."""
    if full or not node.pins:
        return bool(node.pins)
    return any(owned in rings_of([c]) for c in node.checkpoints.values() if is_pinned(node, c))


def records_at(node: Node, last: int) -> list[Key]:
    """The records of checkpoints that end in this node, behind `last`."""
    windows = [Key(WINDOW, node.hash_at(end)) for end in node.cuts if end > last]
    return windows + [Key(STATE, node.hash_at(end)) for end in node.saved if end > last]


def rings_of(checkpoints: Iterable[Checkpoint]) -> list[Owned]:
    """Every ring block, once for each checkpoint."""
    return [(group, block) for c in checkpoints for group, (ids, _) in c.rings.items() for block in ids]
