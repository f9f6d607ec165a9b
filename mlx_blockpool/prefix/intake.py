"""mlx-lm's caches of one sequence on their way into the pool, a layer at a time. Owned by the generation thread."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from ..cache.factory import pooled_caches
from ..cache.layers import PooledLayer
from ..cache.parts import leaves_of
from ..cache.sequence import Sequence
from ..cache.slabs import Slabs
from ..cache.states import PooledArraysCache
from .room import Room


class Intake:
    """Pooled caches `pooled` that take over what `theirs` hold, leaf by leaf; the room for it is promised to `sequence`."""

    def __init__(self, slabs: Slabs, sequence: Sequence, theirs: list[Any]) -> None:
        self.sequence = sequence
        self.pooled = pooled_caches(slabs, sequence)
        self._leaves = list(zip(leaves_of(self.pooled), leaves_of(theirs), strict=True))[::-1]

    def advance(self) -> bool:
        """Take over one leaf, of which nothing is needed from then on. Whether there are more."""
        if self._leaves:
            mine, their = self._leaves.pop()
            if isinstance(mine, PooledArraysCache):
                mine.cache = list(their.cache)
            elif isinstance(mine, PooledLayer):
                mine.state = their.state
                mx.eval(mine.state)
        return bool(self._leaves)


def begin_intake(slabs: Slabs, room: Room, theirs: list[Any]) -> Intake | None:
    """None where there is no room."""
    sequence = Sequence(slabs)
    held = max([0, *(leaf.offset for leaf in leaves_of(theirs) if hasattr(leaf, "offset"))])
    counts = [slabs.spec.blocks(held, group.layer) for group in slabs.spec.groups]
    return Intake(slabs, sequence, theirs) if room.can_promise(sequence.tables, counts) else None
