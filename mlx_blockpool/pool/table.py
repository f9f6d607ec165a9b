"""The blocks of one sequence in one layer group, in order. Owned by the sequence; only BlockPool changes it."""

from __future__ import annotations


class BlockTable:
    """ids[i] holds the tokens [256 * i, 256 * (i + 1)) of the sequence, or of its ring where the group is a window.

    `reserved` blocks are promised to this table and not yet taken; `promised`: the most that it was ever promised to hold.
    """

    def __init__(self, group: int, stride: int, max_blocks: int | None, generation: int = 0) -> None:
        self.group = group
        self.max_blocks = max_blocks
        self.ids: list[int] = []
        self.reserved = 0
        self.promised = 0
        self.generation = generation
        self._stride = stride
        self.version = 0
        self._runs: list[tuple[int, int]] | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def changed(self) -> None:
        self.version += 1
        self._runs = None

    @property
    def runs(self) -> list[tuple[int, int]]:
        """(first id, blocks) of each stretch of neighbouring blocks in one slab, in order of the sequence."""
        if self._runs is None:
            runs: list[tuple[int, int]] = []
            for block in self.ids:
                if runs and block == sum(runs[-1]) and block % self._stride:
                    runs[-1] = (runs[-1][0], runs[-1][1] + 1)
                else:
                    runs.append((block, 1))
            self._runs = runs
        return self._runs
