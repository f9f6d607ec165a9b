"""What window layers held of one block's tokens, as the parts of a record: cut out of a checkpoint's rings, put back together.

The rings of a checkpoint at position P have the last tokens before P; cut along the blocks of the trie, neighbouring checkpoints
share records. Knows arrays and records; nothing of where they are kept. Owned by the generation thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import mlx.core as mx

from ..kv.arena import KVArena
from ..kv.block_bytes import Content, as_bytes, contents, copy_in, copy_out
from ..kv.rows import concatenated
from ..spec import BLOCK_TOKENS, WindowLayer, blocks_for
from .residency import Checkpoint
from .trie import Node

CUT = "cut"


class WindowSegment(NamedTuple):
    """The tokens [node.start, end) of a node."""

    node: Node
    end: int

    @property
    def is_whole_block(self) -> bool:
        """True if it is a block of 256 tokens: no longer segment will take its place."""
        return self.node.is_full and self.end == self.node.end


class WindowCheckpoint:
    """The window layers of one model. A record that was cut from the rings at `cut` has what they still held then."""

    def __init__(self, arena: KVArena, bits: int | None) -> None:
        self.arena = arena
        self.bits = bits
        layers = [(g, arena.spec.groups[g].layer) for g in arena.window_groups]
        self.sizes = {g: layer.max_size for g, layer in layers if isinstance(layer, WindowLayer)}
        self.widest = max(self.sizes.values(), default=0)
        # A ring that always keeps its first tokens is not the last ones alone.
        self.can_be_cut = not any(layer.keep for _, layer in layers if isinstance(layer, WindowLayer))

    def segments(self, node: Node, position: int) -> Iterator[WindowSegment]:
        """Where the tokens lie that the rings at `position`, which is in `node`, hold: the last segment first."""
        end = position
        while node.parent is not None:
            yield WindowSegment(node, end)
            if node.start <= position - self.widest:
                return
            node, end = node.parent, node.start

    def covers(self, segment: WindowSegment, cut: int, position: int) -> bool:
        """Return whether a record of `segment` that was cut at `cut` has all that the rings at `position` hold of it."""
        return all(
            max(segment.node.start, cut - size) <= max(segment.node.start, position - size) for size in self.sizes.values()
        )

    def contents(self, segment: WindowSegment, cut: int) -> list[Content]:
        """What a record of `segment` holds, array by array."""
        found = []
        for group, start in self._starts(segment, cut):
            found += contents(self.arena, [group], segment.end - start, self.bits)
        return found

    def cut(self, segment: WindowSegment, checkpoint: Checkpoint) -> list[memoryview]:
        """The bytes of `segment` out of the rings of a checkpoint, in the order of contents()."""
        found: list[mx.array] = []
        for group, start in self._starts(segment, checkpoint.position):
            ids, index = checkpoint.rings[group]
            places = self._places(group, index - (checkpoint.position - start), segment.end - start)
            parts = [self._copy(group, ids, place, count) for place, count in places]
            found += [concatenated(same, 1) for same in zip(*parts, strict=True)]
        mx.eval(found)
        return [as_bytes(array) for array in found]

    def _copy(self, group: int, ids: Sequence[int], place: int, count: int) -> list[mx.array]:
        block, first = divmod(place, BLOCK_TOKENS)
        return copy_out(self.arena, [(group, ids[block])], first, first + count, self.bits)

    def counts(self, position: int) -> list[int]:
        """Blocks of each ring at `position`."""
        return [blocks_for(min(position, size)) for size in self.sizes.values()]

    def put_back(
        self, segment: WindowSegment, cut: int, views: Sequence[memoryview], position: int, ids: dict[int, list[int]]
    ) -> None:
        """Lay what a record has of `segment` into held blocks, where rings at `position` in temporal order have it."""
        arrays = iter([c.array(view) for c, view in zip(self.contents(segment, cut), views, strict=True)])
        for group, start in self._starts(segment, cut):
            size = self.sizes[group]
            mine = [next(arrays) for _ in contents(self.arena, [group], 1, self.bits)]
            first = max(start, position - size)
            done = first - start
            for place, count in self._places(group, first - max(0, position - size), segment.end - first):
                part = [array[:, done : done + count] for array in mine]
                copy_in(self.arena, [(group, ids[group][place // BLOCK_TOKENS])], place % BLOCK_TOKENS, part, self.bits)
                done += count

    def indices(self, position: int, ids: dict[int, list[int]]) -> dict[int, tuple[tuple[int, ...], int]]:
        """The rings of a checkpoint as put_back() has laid them out."""
        return {g: (tuple(ids[g]), min(position, size)) for g, size in self.sizes.items()}

    def _starts(self, segment: WindowSegment, cut: int) -> Iterator[tuple[int, int]]:
        """(group, first token) where the rings at `cut` still hold any token of a segment."""
        for group, size in self.sizes.items():
            start = max(segment.node.start, cut - size)
            if start < segment.end:
                yield group, start

    def _places(self, group: int, place: int, count: int) -> Iterator[tuple[int, int]]:
        """Stretches (place in the ring, tokens) of `count` tokens from `place` on, each in one block."""
        size = self.sizes[group]
        while count > 0:
            place %= size
            taken = min(count, size - place, BLOCK_TOKENS - place % BLOCK_TOKENS)
            yield place, taken
            place, count = place + taken, count - taken
