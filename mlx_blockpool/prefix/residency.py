"""What is kept of an edge of the trie: the blocks and checkpoints in memory, and the records on disk.

Knows ids and positions; no tokens, no trie. Owned by the generation thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

Owned = tuple[int, int]  # (layer group, block)


@dataclass(eq=False)
class Checkpoint:
    """What window and state layers held at one token position.

    rings:       per window group the ring's block ids and its ring index.
    states:      per state leaf its arrays, copies; `nbytes` of all of them.
    kind:        what ends here: system, user or assistant.
    owner:       the agent it is accounted to; None: no agent.
    noted:       whether it was handed to the tier to be written.
    superseded:  whether its conversation has a later one of the same kind and it was not resumed since: evicted before others.
    """

    position: int
    rings: dict[int, tuple[tuple[int, ...], int]]
    states: dict[int, list[Any]] = field(default_factory=dict, repr=False)
    kind: str = "assistant"
    owner: str | None = None
    noted: bool = False
    superseded: bool = False

    @cached_property
    def nbytes(self) -> int:
        return sum(a.nbytes for arrays in self.states.values() for a in arrays if a is not None)

    @property
    def ring_blocks(self) -> list[Owned]:
        return [(group, block) for group, (ids, _) in self.rings.items() for block in ids]


@dataclass(eq=False, slots=True)
class Residency:
    """Where the keys and values of one edge are.

    blocks:          the block of each full layer group, while `in_memory`.
    on_disk:         whether its block record is on disk, or about to be.
    checkpoints:     those inside the edge, by absolute token position.
    window_records:  the positions at which window records end, each with that of the checkpoint it was cut from.
    state_records:   the positions of state records.
    kind:            what ends here: system, user or assistant.
    owner:           the agent its blocks are accounted to; None: no agent.
    """

    blocks: tuple[int, ...] = ()
    in_memory: bool = True
    on_disk: bool = False
    checkpoints: dict[int, Checkpoint] = field(default_factory=dict)
    window_records: dict[int, int] = field(default_factory=dict)
    state_records: set[int] = field(default_factory=set)
    kind: str = "assistant"
    owner: str | None = None

    @property
    def ring_blocks(self) -> list[Owned]:
        """Every ring block, once for each checkpoint."""
        return [owned for checkpoint in self.checkpoints.values() for owned in checkpoint.ring_blocks]

    def take_over(self, shorter: Residency) -> None:
        """Take the checkpoints and their records of a shorter edge that this one contains."""
        self.checkpoints |= shorter.checkpoints
        self.window_records |= shorter.window_records
        self.state_records |= shorter.state_records
        shorter.checkpoints = {}
