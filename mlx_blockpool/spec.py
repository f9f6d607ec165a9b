"""What one model's caches look like, and what they cost in memory.

Knows layer kinds, shapes and arithmetic. Does not know mlx, models or pools.
A provider (see hookspecs) makes a ModelCacheSpec; everything else reads it. All sizes are bytes.
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
        """The most blocks one sequence can hold; None: it grows with the context."""
        return None


@dataclass(frozen=True)
class WindowLayer(FullLayer):
    """Keys and values of the last `max_size` tokens, the first `keep` always among them."""

    kind: ClassVar[str] = "window"
    max_size: int
    keep: int = 0

    @property
    def max_blocks(self) -> int | None:
        return blocks_for(self.max_size)


@dataclass(frozen=True)
class ChunkLayer(FullLayer):
    """Keys and values of which `chunk_size` tokens are read; all are kept, so that a prefix is resumed at any token."""

    kind: ClassVar[str] = "chunk"
    chunk_size: int


@dataclass(frozen=True)
class StateLayer:
    """Fixed arrays, whatever the context: (shape, dtype) of each for one sequence."""

    kind: ClassVar[str] = "state"
    arrays: tuple[tuple[tuple[int, ...], str], ...]


@dataclass(frozen=True)
class CompositeLayer:
    """Several caches in one layer."""

    kind: ClassVar[str] = "composite"
    parts: tuple[LayerSpec, ...]


LayerSpec: TypeAlias = "FullLayer | WindowLayer | ChunkLayer | StateLayer | CompositeLayer"


@dataclass(frozen=True)
class LayerGroup:
    """Leaves that look alike: one block id addresses the same 256 tokens in all. `layers`: their places in spec.leaves."""

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

    `dtype` is the type of keys and values in memory: float32, float16 or bfloat16. `batches` False: sequences side by side do
    not give the replies that each gives alone, so that the model is never asked for several. `max_kv_size`: what mlx-lm was
    asked to bound full layers to; they are windows then.
    """

    model_id: str
    layers: tuple[LayerSpec, ...]
    dtype: str = "float16"
    batches: bool = True
    max_kv_size: int | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise SpecError(f"{self.model_id}: found dtype {self.dtype!r}, needed one of {sorted(DTYPE_BYTES)}.")
        if not self.layers:
            raise SpecError(f"{self.model_id}: a spec needs at least one layer.")

    @cached_property
    def leaves(self) -> tuple[LayerSpec, ...]:
        """The layers, each composite one replaced by its parts."""
        return tuple(leaf for layer in self.layers for leaf in leaves_of(layer))

    @cached_property
    def groups(self) -> tuple[LayerGroup, ...]:
        """Layer groups of the leaves that live in blocks, in order of their first leaf."""
        members: dict[FullLayer, list[int]] = {}
        for index, layer in enumerate(self.leaves):
            if is_poolable(layer):
                assert isinstance(layer, FullLayer)
                members.setdefault(layer, []).append(index)
        return tuple(LayerGroup(layer, tuple(layers)) for layer, layers in members.items())

    @property
    def needs_checkpoints(self) -> bool:
        """Whether a prefix can be resumed only where its windows and states were kept."""
        return any(isinstance(leaf, WindowLayer | StateLayer) for leaf in self.leaves)

    def bytes_per_token_per_layer(self, layer: LayerSpec, bits: int | None = None) -> int:
        """Keys and values of one token in one layer; `bits` as in memory_per_block_per_layer."""
        if isinstance(layer, CompositeLayer):
            return sum(self.bytes_per_token_per_layer(part, bits) for part in layer.parts)
        if isinstance(layer, StateLayer):
            return 0
        return layer.values_per_token * self.bits_per_value(bits) // 8

    def memory_per_block_per_layer(self, layer: LayerSpec, bits: int | None = None) -> int:
        """Bytes of one block in one layer; `bits=8` for 8-bit values (their scales, 6 % in mlx, not counted)."""
        return BLOCK_TOKENS * self.bytes_per_token_per_layer(layer, bits)

    def bytes_per_block(self, group: LayerGroup, bits: int | None = None) -> int:
        """Bytes of one block in all layers of its group."""
        return len(group.layers) * self.memory_per_block_per_layer(group.layer, bits)

    def bytes_per_token(self, bits: int | None = None) -> int:
        """What one more token costs once every window is full: its growing layers."""
        return sum(self.bytes_per_token_per_layer(leaf, bits) for leaf in self.leaves if _grows(leaf))

    def fixed_bytes_per_agent(self) -> int:
        """State arrays of one sequence."""
        return sum(state_bytes(layer) for layer in self.layers)

    def bytes_per_checkpoint(self) -> int:
        """What one checkpoint takes at most: full rings and states; 0: none is needed."""
        rings = sum(self.bytes_per_block(g) * g.layer.max_blocks for g in self.groups if g.layer.max_blocks is not None)
        return rings + self.fixed_bytes_per_agent()

    def blocks(self, tokens: int, layer: LayerSpec) -> int:
        """Blocks that one layer holds for a sequence of `tokens` tokens."""
        if isinstance(layer, CompositeLayer):
            return sum(self.blocks(tokens, part) for part in layer.parts)
        if isinstance(layer, StateLayer):
            return 0
        limit = layer.max_blocks
        return blocks_for(tokens) if limit is None else min(blocks_for(tokens), limit)

    def bytes_per_agent(self, tokens: int, bits: int | None = None) -> int:
        """What one sequence of `tokens` tokens holds, in whole blocks, nothing shared."""
        return self.fixed_bytes_per_agent() + sum(self._layer_bytes(layer, tokens, bits) for layer in self.layers)

    def max_agents(self, budget_bytes: int, tokens: int, bits: int | None = None) -> int:
        """How many sequences of `tokens` tokens fit in `budget_bytes`, nothing shared."""
        return budget_bytes // self.bytes_per_agent(tokens, bits)

    def fingerprint(self) -> str:
        """32 hex digits that name the shape and type of the caches, whatever the model is called."""
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

    def _layer_bytes(self, layer: LayerSpec, tokens: int, bits: int | None) -> int:
        if isinstance(layer, CompositeLayer):
            return sum(self._layer_bytes(part, tokens, bits) for part in layer.parts)
        return self.blocks(tokens, layer) * self.memory_per_block_per_layer(layer, bits)


def is_poolable(layer: LayerSpec) -> bool:
    """Whether a leaf lives in blocks: not states, and not caches that a model makes and never uses."""
    return isinstance(layer, FullLayer) and layer.values_per_token > 0


def leaves_of(layer: LayerSpec) -> Iterator[LayerSpec]:
    """The layer itself, or what a composite layer is made of in the end."""
    if isinstance(layer, CompositeLayer):
        for part in layer.parts:
            yield from leaves_of(part)
    else:
        yield layer


def _grows(leaf: LayerSpec) -> bool:
    return isinstance(leaf, FullLayer) and leaf.max_blocks is None


def state_bytes(layer: LayerSpec) -> int:
    """Bytes of the state arrays of one layer for one sequence."""
    if isinstance(layer, CompositeLayer):
        return sum(state_bytes(part) for part in layer.parts)
    if not isinstance(layer, StateLayer):
        return 0
    return sum(bytes_of(dtype) * math.prod(shape) for shape, dtype in layer.arrays)
