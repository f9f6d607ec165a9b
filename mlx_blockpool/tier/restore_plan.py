"""What a restore brings back from disk, record by record, and the blocks that it goes into.

Owned by the generation thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import PoolExhaustedError
from ..prefix.admission import Admission
from ..prefix.checkpoints import WindowCheckpoint, WindowSegment
from ..prefix.trie import Node
from ..store.record import Key


@dataclass(frozen=True)
class RestorePlan:
    """A path to bring back.

    missing          nodes of it that are on disk only.
    have             tokens that can be resumed from memory; `tokens` more can be once the plan is carried out.
    node, position   where a checkpoint is brought back too; None: the model needs none.
    """

    path: Sequence[Node]
    missing: Sequence[Node]
    have: int
    tokens: int
    node: Node | None = None
    position: int = 0

    @property
    def arriving(self) -> set[Node]:
        """Nodes that no other restore needs to bring back meanwhile."""
        return {*self.missing} | ({self.node} if self.node is not None else set())

    def cut(self, tokens: int) -> RestorePlan | None:
        """The plan for the first `tokens` of its tokens; None: nothing can be resumed there."""
        if tokens >= self.tokens:
            return self
        end = self.have + tokens
        missing = [node for node in self.missing if node.start < end]
        if self.node is not None or not missing:
            return None
        return RestorePlan([node for node in self.path if node.start < end], missing, self.have, tokens)


@dataclass(frozen=True)
class RestoreStep:
    """A record to bring back: a block for a node, a segment of what windows held, or a state.

    block      ids of the held blocks that it goes into, one for each full group.
    segment    the tokens that a record of windows covers.
    """

    key: Key
    node: Node
    block: tuple[int, ...] = ()
    segment: WindowSegment | None = None


class HeldBlocks:
    """The blocks of a whole path, in memory or to be filled, held until release(); states beside them in `states`.

    blocks   for each missing node of the plan, the ids of its blocks to be.
    rings    ids of the blocks of each window group.
    """

    def __init__(self, admission: Admission, full_groups: Sequence[int], windows: WindowCheckpoint, plan: RestorePlan) -> None:
        """Raises PoolExhaustedError if there is no room, and holds nothing then."""
        self._pool = pool = admission.pool
        self._tables = [pool.open_table(group) for group in full_groups]
        self._ring_tables = [pool.open_table(group) for group in windows.sizes] if plan.node is not None else []
        self.states: dict[int, list[Any]] = {}
        for index, table in enumerate(self._tables):
            pool.append_shared(table, [node.residency.blocks[index] for node in plan.path if node.residency.in_memory])
        counts = [len(plan.missing)] * len(full_groups) + (windows.counts(plan.position) if self._ring_tables else [])
        first = [len(table) for table in self._tables]
        try:
            admission.need_states(admission.arena.spec.fixed_bytes_per_agent())
            admission.reserve([*self._tables, *self._ring_tables], counts)
        except PoolExhaustedError:
            self.release()
            raise
        for table, count in zip([*self._tables, *self._ring_tables], counts, strict=True):
            pool.extend(table, count)
        ids = [table.ids[start:] for table, start in zip(self._tables, first, strict=True)]
        self.blocks: list[tuple[int, ...]] = list(zip(*ids, strict=True)) if ids else [()] * len(plan.missing)

    @property
    def rings(self) -> dict[int, list[int]]:
        return {table.group: table.ids for table in self._ring_tables}

    def release(self) -> None:
        for table in [*self._tables, *self._ring_tables]:
            self._pool.release(table)
