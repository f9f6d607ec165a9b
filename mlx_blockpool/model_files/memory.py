"""Compares the memory of a batch in blocks and padded, as mlx-lm batches. Computes from a spec and
lengths alone.

Padded is what BatchKVCache.merge and BatchRotatingKVCache.merge allocate (mlx_lm/models/cache.py):
each sequence at the length of the longest, and at most a window. Their arrays then grow by 256
tokens at a time. Does not know arrays or pools.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import reduce
from typing import Any

from ..spec import BLOCK_TOKENS, FullLayer, LayerGroup, ModelCacheSpec, WindowLayer


@dataclass(frozen=True)
class Allocation:
    """Memory that is allocated, and how much of it is used: both in tokens of one layer, or both
    in bytes.
    """

    allocated: int
    used: int

    def __add__(self, other: Allocation) -> Allocation:
        return Allocation(self.allocated + other.allocated, self.used + other.used)

    @property
    def waste(self) -> int:
        return self.allocated - self.used

    @property
    def waste_share(self) -> float:
        return self.waste / self.allocated

    @property
    def utilisation(self) -> float:
        return self.used / self.allocated

    def times(self, factor: int) -> Allocation:
        return Allocation(self.allocated * factor, self.used * factor)

    def as_dict(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "waste": self.waste,
            "waste_share": self.waste_share,
            "utilisation": self.utilisation,
        }


@dataclass(frozen=True)
class Comparison:
    """The same content allocated in three ways.

    padded:  each sequence at the length of the longest, as mlx-lm merges a batch.
    grown:   the same right after mlx-lm's arrays have grown: a batch that decodes is between padded
             and grown.
    pool:    whole blocks; `used` counts shared tokens once.
    shared:  what further readers of a block would take in addition if padded.
    """

    padded: Allocation
    grown: Allocation
    pool: Allocation
    shared: int = 0

    def __add__(self, other: Comparison) -> Comparison:
        return Comparison(
            self.padded + other.padded,
            self.grown + other.grown,
            self.pool + other.pool,
            self.shared + other.shared,
        )

    @property
    def saved(self) -> int:
        """How much less the pool allocates than the padded batch; below 0 if whole blocks cost
        more than the padding.
        """
        return self.padded.allocated - self.pool.allocated

    @property
    def ratio(self) -> float:
        """The padded batch in relation to the pool."""
        return self.padded.allocated / self.pool.allocated

    def times(self, padded: int, pool: int) -> Comparison:
        return Comparison(
            self.padded.times(padded),
            self.grown.times(padded),
            self.pool.times(pool),
            self.shared * padded,
        )

    def as_dict(self) -> dict[str, Any]:
        parts = {"padded": self.padded, "grown": self.grown, "pool": self.pool}
        found = {name: part.as_dict() for name, part in parts.items()}
        return {**found, "shared": self.shared, "saved": self.saved, "ratio": self.ratio}


@dataclass(frozen=True)
class GroupMemory:
    """One layer group of a batch, in `tokens` of one layer; `sequences`: each sequence by itself,
    nothing shared.

    bytes_per_token:        keys and values of one token in all layers of the group, as blocks hold
                            them.
    padded_bytes_per_token: the same in mlx-lm's batch, which is never quantised.
    """

    group: LayerGroup
    bytes_per_token: int
    padded_bytes_per_token: int
    sequences: tuple[Comparison, ...]
    tokens: Comparison

    @property
    def bytes(self) -> Comparison:
        return self.tokens.times(self.padded_bytes_per_token, self.bytes_per_token)


@dataclass(frozen=True)
class BatchMemory:
    """All layer groups of a batch.

    Layers that are not in blocks (states and unused caches) are not counted.
    """

    groups: tuple[GroupMemory, ...]

    @property
    def bytes(self) -> Comparison:
        return reduce(operator.add, (g.bytes for g in self.groups))


def batch_memory(
    spec: ModelCacheSpec, lengths: Sequence[int], held_blocks: Sequence[int] | None = None
) -> BatchMemory:
    """The memory of a batch of sequences of `lengths` tokens, 1 or more each.

    held_blocks: the number of different blocks that the sequences of a running batch hold in each
    of spec.groups, taken at the same moment as `lengths`. None: nothing is shared.
    """
    held: Sequence[int | None] = [None] * len(spec.groups) if held_blocks is None else held_blocks
    return BatchMemory(
        tuple(
            _group_memory(spec, group, lengths, count)
            for group, count in zip(spec.groups, held, strict=True)
        )
    )


def _group_memory(
    spec: ModelCacheSpec, group: LayerGroup, lengths: Sequence[int], held: int | None
) -> GroupMemory:
    longest = max(lengths)
    sequences = tuple(_sequence(spec, group.layer, length, longest) for length in lengths)
    tokens = reduce(operator.add, sequences)
    if held is not None:
        least = spec.blocks(longest, group.layer)
        assert held >= least, (
            f"{group.name}: {held} blocks held < {least} of the longest sequence, {longest} tokens"
        )
        pool = _shared(sequences, held * BLOCK_TOKENS)
        tokens = Comparison(tokens.padded, tokens.grown, pool, tokens.padded.used - pool.used)
    pool_bytes, padded_bytes = (
        of.bytes_per_block(group) // BLOCK_TOKENS for of in (spec, spec.with_bits(None))
    )
    return GroupMemory(group, pool_bytes, padded_bytes, sequences, tokens)


def _sequence(spec: ModelCacheSpec, layer: FullLayer, length: int, longest: int) -> Comparison:
    """Tokens of one layer for one sequence of a batch; `longest`: the tokens of its longest
    sequence.
    """
    used = _kept(layer, length)
    return Comparison(
        padded=Allocation(_kept(layer, longest), used),
        # The step that made this token found the arrays full and added 256 tokens.
        grown=Allocation(_kept(layer, longest - 1 + BLOCK_TOKENS), used),
        pool=Allocation(spec.blocks(length, layer) * BLOCK_TOKENS, used),
    )


def _kept(layer: FullLayer, tokens: int) -> int:
    return min(tokens, layer.max_size) if isinstance(layer, WindowLayer) else tokens


def _shared(sequences: Sequence[Comparison], allocated: int) -> Allocation:
    """The pool's side of a batch whose sequences share blocks for `allocated` tokens.

    Counts full blocks as shared, because a sequence that continues in a partial block copies it
    first. Before that `used` is a lower bound, and the tokens of the longest sequence are a better
    one.
    """
    alone = reduce(operator.add, (s.pool for s in sequences))
    shared = max(0, alone.allocated - allocated)
    return Allocation(allocated, max(alone.used - shared, *(s.pool.used for s in sequences)))
