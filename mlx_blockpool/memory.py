"""What a batch takes in memory: padded, as mlx-lm batches, against blocks. Figures only, from a spec and lengths.

Padded is what BatchKVCache.merge and BatchRotatingKVCache.merge allocate (mlx_lm/models/cache.py): every sequence at the
longest, a window at no more than its size. Their arrays then grow by 256 tokens at a time. Knows no arrays and no pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .errors import BlockpoolError, SpecError
from .spec import BLOCK_TOKENS, FullLayer, LayerGroup, ModelCacheSpec, WindowLayer


@dataclass(frozen=True)
class Allocation:
    """Room that is taken, and what of it is in use: both in tokens of one layer, or both in bytes."""

    allocated: int
    used: int

    @property
    def waste(self) -> int:
        return self.allocated - self.used

    @property
    def waste_share(self) -> float:
        """0.0: all of it is in use; towards 1.0: hardly any."""
        return self.waste / self.allocated

    @property
    def utilisation(self) -> float:
        return self.used / self.allocated

    def times(self, factor: int) -> Allocation:
        return Allocation(self.allocated * factor, self.used * factor)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "waste": self.waste, "waste_share": self.waste_share, "utilisation": self.utilisation}


@dataclass(frozen=True)
class Comparison:
    """The same content held in three ways.

    padded:  every sequence at the longest, as mlx-lm merges a batch.
    grown:   the same right after mlx-lm's arrays have grown: a batch that decodes is between padded and grown.
    pool:    whole blocks; `used` counts what several sequences read from one block once.
    """

    padded: Allocation
    grown: Allocation
    pool: Allocation

    @property
    def shared(self) -> int:
        """What the pool holds once and padding holds again for each further reader."""
        return self.padded.used - self.pool.used

    @property
    def saved(self) -> int:
        """What the pool takes less than the padded batch; below 0 where whole blocks cost more than the padding."""
        return self.padded.allocated - self.pool.allocated

    @property
    def ratio(self) -> float:
        """How many times as much as the pool the padded batch takes."""
        return self.padded.allocated / self.pool.allocated

    def times(self, factor: int) -> Comparison:
        return Comparison(*(part.times(factor) for part in self._parts()))

    def as_dict(self) -> dict[str, Any]:
        parts = {name: part.as_dict() for name, part in zip(("padded", "grown", "pool"), self._parts(), strict=True)}
        return {**parts, "shared": self.shared, "saved": self.saved, "ratio": self.ratio}

    def _parts(self) -> tuple[Allocation, Allocation, Allocation]:
        return self.padded, self.grown, self.pool


@dataclass(frozen=True)
class GroupMemory:
    """One layer group of a batch. `tokens` are those of one layer; `sequences` the same for each sequence, nothing shared.

    bytes_per_token: keys and values of one token in all layers of the group.
    """

    group: LayerGroup
    bytes_per_token: int
    sequences: tuple[Comparison, ...]
    tokens: Comparison

    @property
    def bytes(self) -> Comparison:
        return self.tokens.times(self.bytes_per_token)

    def as_dict(self) -> dict[str, Any]:
        return {
            "group": self.group.name,
            "layers": len(self.group.layers),
            "bytes_per_token": self.bytes_per_token,
            "sequences": [s.as_dict() for s in self.sequences],
            "tokens": self.tokens.as_dict(),
            "bytes": self.bytes.as_dict(),
        }


@dataclass(frozen=True)
class BatchMemory:
    """All layer groups of a batch of sequences of `lengths` tokens.

    other_layers: layers that do not live in blocks (state, chunk, composite). They are in no figure.
    """

    model_id: str
    dtype: str
    lengths: tuple[int, ...]
    groups: tuple[GroupMemory, ...]
    other_layers: int

    @property
    def bytes(self) -> Comparison:
        return _total([g.bytes for g in self.groups])

    def as_dict(self) -> dict[str, Any]:
        """Every figure, for JSON; sizes are bytes unless under `tokens` or `sequences`."""
        return {
            "model_id": self.model_id,
            "dtype": self.dtype,
            "block_tokens": BLOCK_TOKENS,
            "lengths": list(self.lengths),
            "groups": [g.as_dict() for g in self.groups],
            "bytes": self.bytes.as_dict(),
            "other_layers": self.other_layers,
        }


def batch_memory(spec: ModelCacheSpec, lengths: Sequence[int], held_blocks: Sequence[int] | None = None) -> BatchMemory:
    """The memory of a batch of sequences of `lengths` tokens, 1 or more each.

    held_blocks: of a running batch the different blocks that its sequences hold together, one count for each of spec.groups,
    from the same moment as `lengths`. None: nothing is shared.
    Raises BlockpoolError for other lengths, SpecError for a model without a layer that lives in blocks.
    """
    if not lengths or min(lengths) < 1:
        found = f"a sequence of {min(lengths)} tokens" if lengths else "no sequences"
        raise BlockpoolError(f"Found {found}; needed one length or more, each at least 1 token.")
    if not spec.groups:
        raise SpecError(
            f"{spec.model_id}: found no full or window layers; needed one that lives in blocks. Serve the model as with mlx-lm."
        )
    held: Sequence[int | None] = [None] * len(spec.groups) if held_blocks is None else held_blocks
    groups = tuple(_group_memory(spec, group, lengths, count) for group, count in zip(spec.groups, held, strict=True))
    other = len(spec.layers) - sum(len(g.layers) for g in spec.groups)
    return BatchMemory(spec.model_id, spec.dtype, tuple(lengths), groups, other)


def _group_memory(spec: ModelCacheSpec, group: LayerGroup, lengths: Sequence[int], held: int | None) -> GroupMemory:
    longest = max(lengths)
    sequences = tuple(_sequence(spec, group.layer, length, longest) for length in lengths)
    tokens = _total(sequences)
    if held is not None:
        least = spec.blocks(longest, group.layer)
        assert held >= least, f"{group.name}: {held} blocks held < {least} of the longest sequence, {longest} tokens"
        tokens = Comparison(tokens.padded, tokens.grown, _shared(sequences, held * BLOCK_TOKENS))
    per_token = len(group.layers) * spec.bytes_per_token_per_layer(group.layer)
    return GroupMemory(group, per_token, sequences, tokens)


def _sequence(spec: ModelCacheSpec, layer: FullLayer, length: int, longest: int) -> Comparison:
    """Tokens of one layer for one sequence of a batch whose longest member has `longest` tokens."""
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
    """The pool's side of a batch that holds blocks with room for `allocated` tokens, some of them together.

    Counts what is shared in full blocks, because whoever goes on in a partial one copies it first. Before that `used` is a
    lower bound, and the tokens of the longest sequence are a better one.
    """
    alone = _sum([s.pool for s in sequences])
    twice = max(0, alone.allocated - allocated)
    return Allocation(allocated, max(alone.used - twice, *(s.pool.used for s in sequences)))


def _total(parts: Sequence[Comparison]) -> Comparison:
    return Comparison(
        padded=_sum([p.padded for p in parts]), grown=_sum([p.grown for p in parts]), pool=_sum([p.pool for p in parts])
    )


def _sum(parts: Sequence[Allocation]) -> Allocation:
    return Allocation(sum(p.allocated for p in parts), sum(p.used for p in parts))
