"""The index between trie and pool: what a longer edge takes over from the shorter ones, and what
check() finds.
"""

from __future__ import annotations

import sys

import pytest

from mlx_blockpool.kv.pool import BlockPool
from mlx_blockpool.prefix.index import KVIndex
from mlx_blockpool.prefix.trie import Checkpoint, Node
from mlx_blockpool.spec import FullLayer, ModelCacheSpec, WindowLayer
from mlx_blockpool.store.hashing import encode

SPEC = ModelCacheSpec("m", (WindowLayer(1, 2, 2, 300), FullLayer(1, 2, 2)), "float32")
WINDOW, FULL = 0, 1
A = list(range(1000, 1600))


class Indexed:
    """An index over a pool, with a table of each group that holds the blocks."""

    def __init__(self) -> None:
        self.pool = BlockPool(SPEC, 1 << 20)
        self.index = KVIndex(self.pool, [FULL], "namespace")
        self.full, self.ring = self.pool.open_table(FULL), self.pool.open_table(WINDOW)
        self.pool.extend(self.full, 4)
        self.pool.extend(self.ring, 2)

    def add(self, parent: Node, tokens: list[int], block: int, kind: str = "user") -> Node:
        return self.index.add(parent, encode(tokens), ((FULL, self.full.ids[block]),), kind)

    def checkpoint(self, node: Node, position: int) -> Checkpoint:
        found = Checkpoint(position, {WINDOW: (tuple(self.ring.ids), position % 300)})
        self.index.add_checkpoint(node, found)
        return found


def test_a_longer_edge_takes_over_the_checkpoints_of_shorter_ones() -> None:
    indexed = Indexed()
    root = indexed.index.trie.root
    first = indexed.add(root, A[:256], 0)
    short = indexed.add(first, A[256:300], 1)
    checkpoint = indexed.checkpoint(short, 300)
    longer = indexed.add(first, A[256:400], 2)
    assert short.latest is longer
    assert (longer.kind, longer.checkpoints) == ("user", {300: checkpoint})
    indexed.index.check()
    whole = indexed.add(first, A[256:512], 3)
    indexed.add(whole, A[512:], 1)
    indexed.index.check()
    # Block 1 is full now and its checkpoint is in the middle of it.
    assert [n.checkpoints for n in indexed.index.trie.match(A).path] == [
        {},
        {300: checkpoint},
        {},
    ]


def test_check_finds_a_checkpoint_outside_of_its_edge() -> None:
    indexed = Indexed()
    indexed.checkpoint(indexed.add(indexed.index.trie.root, A[:256], 0), 600)
    with pytest.raises(AssertionError, match=r"checkpoints \[600\] outside of \(0, 256\]"):
        indexed.index.check()


def test_figures_of_a_long_prefix_take_no_more_calls_than_those_of_a_short_one() -> None:
    """They are read on the generation thread twice a second."""

    def calls(blocks: int) -> int:
        pool = BlockPool(SPEC, 1 << 22)
        index, table = KVIndex(pool, [FULL], "namespace"), pool.open_table(FULL)
        pool.extend(table, blocks)
        node = index.trie.root
        for number, block in enumerate(table.ids):
            node = index.add(node, encode([number] * 256), ((FULL, block),), "user")
        events: list[str] = []
        sys.setprofile(lambda _frame, event, _argument: events.append(event))
        figures = index.num_ends, index.nbytes
        sys.setprofile(None)
        assert figures == (1, blocks * pool.spec.bytes_per_block(pool.spec.groups[FULL]))
        return len(events)

    assert calls(2) == calls(40)
