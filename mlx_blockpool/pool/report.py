"""Figures, a map and the invariant of one layer group's blocks. Changes nothing."""

from __future__ import annotations

from .blocks import GroupBlocks
from .table import BlockTable


def fragmentation(blocks: GroupBlocks) -> float:
    free = blocks.free
    return 1.0 - free.longest / free.count if free.count else 0.0


def block_map(blocks: GroupBlocks, width: int) -> list[str]:
    lines = [f"{blocks.group.name}: {blocks.free.count} of {len(blocks.blocks)} free"]
    for index in sorted(blocks.slabs):
        row = "".join(_letter(blocks, i) for i in blocks.slab_ids(index))
        lines += [f"  {index}: {row[i : i + width]}" for i in range(0, len(row), width)]
    return lines


def _letter(blocks: GroupBlocks, block: int) -> str:
    state = blocks.blocks[block]
    if state.pins:
        return "*"
    if state.ref_count:
        return "#"
    return "o" if state.known else "."


def check(blocks: GroupBlocks, tables: list[BlockTable]) -> None:
    """The invariant of one group, given every live table of it. Raises AssertionError with the figures."""
    name = blocks.group.name
    refs: dict[int, int] = {}
    for table in tables:
        for block in table.ids:
            refs[block] = refs.get(block, 0) + 1
    free = {i for start, end in blocks.free for i in range(start, end)}
    assert len(free) == blocks.free.count, f"{name}: {len(free)} blocks in free runs != {blocks.free.count} counted"
    for i, state in blocks.blocks.items():
        assert state.ref_count == refs.get(i, 0), f"{name} block {i}: ref_count {state.ref_count} != {refs.get(i, 0)} tables"
        assert (i in free) == (state.ref_count == 0 and state.known == 0), f"{name} block {i}: free={i in free}, {state}"
        assert (i in blocks.evictable) == (state.ref_count == 0 and state.known > 0), f"{name} block {i}: {state}"
    promised = sum(t.reserved for t in tables)
    assert blocks.reserved == promised, f"{name}: {blocks.reserved} reserved != {promised} in tables"
    assert blocks.available >= 0, f"{name}: {blocks.free.count} free < {blocks.reserved} reserved"
