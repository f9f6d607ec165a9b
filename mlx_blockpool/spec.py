"""The shapes of one model's caches, and their sizes in bytes.

Knows layer kinds, shapes and arithmetic. Does not know mlx, models or pools.
A provider (see hookspecs) makes a ModelCacheSpec; everything else reads it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import ClassVar, TypeAlias

from .dtypes import bytes_of
from .errors import SpecError

BLOCK_TOKENS = 256

# mlx-lm's --kv-group-size.
GROUP_SIZE = 64
# Of keys and values.
DTYPE_BYTES = {name: bytes_of(name) for name in ("float32", "float16", "bfloat16")}


@dataclass(frozen=True)
class FullLayer:
    """Keys and values of every token. Cache arrays: [1, kv_heads, tokens, key_dim | value_dim]."""

    kind: ClassVar[str] = "full"
    kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def values_per_token(self) -> int:
        return self.kv_heads * (self.key_dim + self.value_dim)

    @property
    def max_blocks(self) -> int | None:
        """The most blocks of one sequence; None: they grow with the context."""
        return None


@dataclass(frozen=True)
class WindowLayer(FullLayer):
    """Keys and values of the last `max_size` tokens, and always of the first `keep`."""

    kind: ClassVar[str] = "window"
    max_size: int
    keep: int = 0

    @property
    def max_blocks(self) -> int | None:
        return blocks_for(self.max_size)


@dataclass(frozen=True)
class ChunkLayer(FullLayer):
    """Keys and values of every token, of which a chunk of `chunk_size` is read; a prefix can be resumed at any token."""

    kind: ClassVar[str] = "chunk"
    chunk_size: int


@dataclass(frozen=True)
class StateLayer:
    """Arrays that do not grow with the context: (shape, dtype) of each for one sequence."""

    kind: ClassVar[str] = "state"
    arrays: tuple[tuple[tuple[int, ...], str], ...]

    @property
    def nbytes(self) -> int:
        return sum(bytes_of(dtype) * math.prod(shape) for shape, dtype in self.arrays)


@dataclass(frozen=True)
class CompositeLayer:
    """Several caches in one layer."""

    kind: ClassVar[str] = "composite"
    parts: tuple[LayerSpec, ...]


LayerSpec: TypeAlias = "FullLayer | WindowLayer | ChunkLayer | StateLayer | CompositeLayer"


@dataclass(frozen=True)
class LayerGroup:
    """Equal leaves: one block id addresses the same 256 tokens in each. `layers`: their places in spec.leaves."""

    layer: FullLayer
    layers: tuple[int, ...]

    @property
    def name(self) -> str:
        window = f" {self.layer.max_size}" if isinstance(self.layer, WindowLayer) else ""
        dims = f"{self.layer.key_dim}" + ("" if self.layer.key_dim == self.layer.value_dim else f"/{self.layer.value_dim}")
        return f"{self.layer.kind}{window} x{len(self.layers)} ({self.layer.kv_heads} heads, dim {dims})"


def blocks_for(tokens: int) -> int:
    """Blocks that `tokens` tokens of one growing layer group occupy."""
    return -(-tokens // BLOCK_TOKENS)


@dataclass(frozen=True)
class ModelCacheSpec:
    """The caches of one model: `layers` has one entry per cache that mlx-lm makes, in order.

    dtype:       of keys and values in memory: float32, float16 or bfloat16.
    batches:     whether a batch gives the replies that each sequence gives alone; if not, the model never runs several.
    max_kv_size: mlx-lm's option that bounds full layers, which are windows then.

    Sizes are bytes. With `bits`, keys and values are quantised as in mlx-lm's QuantizedKVCache: each GROUP_SIZE values have a
    scale and a bias, and rows that are no multiple of that stay as they are. States are never quantised.
    """

    model_id: str
    layers: tuple[LayerSpec, ...]
    dtype: str = "float16"
    batches: bool = True
    max_kv_size: int | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise SpecError(f"{self.model_id}: dtype {self.dtype!r} is none of {sorted(DTYPE_BYTES)}.")
        if not self.layers:
            raise SpecError(f"{self.model_id}: a spec needs at least one layer.")

    @cached_property
    def leaves(self) -> tuple[LayerSpec, ...]:
        """The layers, each composite one replaced by its parts."""
        return tuple(leaf for layer in self.layers for leaf in leaves_of(layer))

    @cached_property
    def groups(self) -> tuple[LayerGroup, ...]:
        """Groups of the leaves that are kept in blocks, in order of their first leaf."""
        members: dict[FullLayer, list[int]] = {}
        for index, layer in enumerate(self.leaves):
            # A model may make caches that it never uses.
            if isinstance(layer, FullLayer) and layer.values_per_token:
                members.setdefault(layer, []).append(index)
        return tuple(LayerGroup(layer, tuple(layers)) for layer, layers in members.items())

    @property
    def needs_checkpoints(self) -> bool:
        """True if a prefix can be resumed only where its windows and states were kept."""
        return any(isinstance(leaf, WindowLayer | StateLayer) for leaf in self.leaves)

    def bytes_per_token_per_layer(self, leaf: LayerSpec, bits: int | None = None) -> int:
        """Keys and values of one token in one leaf."""
        if not isinstance(leaf, FullLayer):
            return 0
        return leaf.kv_heads * sum(_row_bytes(dim, DTYPE_BYTES[self.dtype], bits) for dim in (leaf.key_dim, leaf.value_dim))

    def bytes_per_block_per_layer(self, leaf: LayerSpec, bits: int | None = None) -> int:
        return BLOCK_TOKENS * self.bytes_per_token_per_layer(leaf, bits)

    def bytes_per_block(self, group: LayerGroup) -> int:
        """One block in all layers of its group."""
        return len(group.layers) * self.bytes_per_block_per_layer(group.layer)

    def bytes_per_token(self) -> int:
        """What one more token takes once every window is full."""
        growing = (leaf for leaf in self.leaves if isinstance(leaf, FullLayer) and leaf.max_blocks is None)
        return sum(map(self.bytes_per_token_per_layer, growing))

    def fixed_bytes_per_agent(self) -> int:
        """The state arrays of one sequence."""
        return sum(leaf.nbytes for leaf in self.leaves if isinstance(leaf, StateLayer))

    def bytes_per_checkpoint(self) -> int:
        """What one checkpoint takes at most: full windows and states; 0: prefixes need none."""
        windows = (self.bytes_per_block(g) * g.layer.max_blocks for g in self.groups if g.layer.max_blocks is not None)
        return sum(windows) + self.fixed_bytes_per_agent()

    def blocks(self, tokens: int, leaf: LayerSpec) -> int:
        """Blocks that one leaf holds for a sequence of `tokens` tokens."""
        if not isinstance(leaf, FullLayer):
            return 0
        return blocks_for(tokens) if leaf.max_blocks is None else min(blocks_for(tokens), leaf.max_blocks)

    def bytes_per_agent(self, tokens: int) -> int:
        """What one sequence of `tokens` tokens takes, in whole blocks, nothing shared."""
        return self.fixed_bytes_per_agent() + sum(self.blocks(tokens, e) * self.bytes_per_block_per_layer(e) for e in self.leaves)

    def fingerprint(self) -> str:
        """32 hex digits that name the shapes and dtypes of the caches, but not the model."""
        layers = [[layer.kind, asdict(layer)] for layer in self.layers]
        content = json.dumps([BLOCK_TOKENS, self.dtype, layers], sort_keys=True)
        return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()

    def with_dtype(self, dtype: str) -> ModelCacheSpec:
        return replace(self, dtype=dtype)

    def with_windows(self, max_kv_size: int, keep: int) -> ModelCacheSpec:
        """The same model with windows of `max_kv_size` tokens in place of full layers."""
        layers = tuple(
            WindowLayer(layer.kv_heads, layer.key_dim, layer.value_dim, max_kv_size, keep) if type(layer) is FullLayer else layer
            for layer in self.layers
        )
        return replace(self, layers=layers, max_kv_size=max_kv_size)

    def bits_per_value(self, bits: int | None = None) -> int:
        """`bits`, or those of the dtype."""
        return 8 * DTYPE_BYTES[self.dtype] if bits is None else bits


def leaves_of(layer: LayerSpec) -> Iterator[LayerSpec]:
    """The layer itself, or the leaves of a composite layer's parts."""
    if isinstance(layer, CompositeLayer):
        for part in layer.parts:
            yield from leaves_of(part)
    else:
        yield layer


def _row_bytes(dim: int, dtype_bytes: int, bits: int | None) -> int:
    """Keys or values of one head and token."""
    if bits is None or dim % GROUP_SIZE:
        return dim * dtype_bytes
    return dim * bits // 8 + 2 * dtype_bytes * (dim // GROUP_SIZE)
