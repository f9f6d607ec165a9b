"""What a trie holds, as changes: for the log once a model is loaded, and for a reader that has lost events.

A reader's snapshot is made in parts, between steps of the generation thread, while the trie keeps changing. The events since
before its first part, applied after it, make it exact: the last change of an edge decides whether the edge is there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice
from typing import Any

from ...prefix.changes import DISK, MEMORY, BlocksStored, Changes, stored
from ...prefix.index import KVIndex
from ...prefix.trie import Node
from ..jobs import run_on_generation_thread

# The most edges of one change.
LONGEST = 256
# Edges that are checked between two steps.
AT_ONCE = 1000


def publish(index: KVIndex, changes: Changes) -> None:
    """Append what an index holds, and from now on what changes in it."""
    for change in changes_of(index.trie):
        changes.append(change)
    index.changes = changes


def held(generator: Any) -> Iterator[tuple[str, BlocksStored]]:
    """What the loaded models of a generator hold, each by its id. For other threads than the generation thread."""
    for served in list(generator.registry.loaded.values()):
        walk = run_on_generation_thread(generator, partial(Walk.of, served))
        while walk is not None and not walk.is_over:
            yield from ((served.events.model, change) for change in run_on_generation_thread(generator, walk.next))


class Walk:
    """The nodes of an index, some at a time."""

    def __init__(self, index: KVIndex) -> None:
        self._stack = [child for root in index.trie.roots() for child in root.children]

    @staticmethod
    def of(served: Any) -> Walk | None:
        """The walk through a loaded model's index; None for one without."""
        return None if served.prefix is None else Walk(served.prefix.index)

    @property
    def is_over(self) -> bool:
        return not self._stack

    def next(self) -> list[BlocksStored]:
        """The next AT_ONCE nodes as changes."""
        return list(changes_of(islice(self._nodes(), AT_ONCE)))

    def _nodes(self) -> Iterator[Node]:
        while self._stack:
            node = self._stack.pop()
            self._stack += node.children
            if not node.removed and node.merged_into is None:
                yield node


def changes_of(nodes: Iterable[Node]) -> Iterator[BlocksStored]:
    """Nodes, each after its parent, as changes of one chain each."""
    for tier, chain in _chains(nodes):
        yield stored(chain, tier)


def _chains(nodes: Iterable[Node]) -> Iterator[tuple[str, list[Node]]]:
    """The longest chains in which the nodes follow each other, for each tier that they are in."""
    open_chains: dict[str, list[Node]] = {MEMORY: [], DISK: []}
    for node in nodes:
        for tier, is_there in ((MEMORY, node.residency.in_memory), (DISK, node.residency.on_disk)):
            if not is_there:
                continue
            chain = open_chains[tier]
            if chain and (chain[-1] is not node.parent or len(chain) == LONGEST):
                yield tier, chain
                open_chains[tier] = chain = []
            chain.append(node)
    yield from ((tier, chain) for tier, chain in open_chains.items() if chain)
