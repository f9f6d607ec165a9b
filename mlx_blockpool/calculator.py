"""What a model's caches cost: a token, an agent, a checkpoint, and how many agents fit. Figures only, from a spec.

Knows no files, no mlx and no pool. Whole blocks, nothing shared. With `bits` the keys and values are quantised as mlx-lm's
QuantizedKVCache does it: a scale and a bias for each GROUP_SIZE values are counted, and what cannot be divided into such
groups stays as it is. State arrays are never quantised.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from .errors import SpecError
from .spec import (
    BLOCK_TOKENS,
    DTYPE_BYTES,
    CompositeLayer,
    FullLayer,
    LayerSpec,
    ModelCacheSpec,
    StateLayer,
    leaves_of,
    state_bytes,
)

# mlx-lm's --kv-group-size.
GROUP_SIZE = 64
KV_BITS = (8, 4)


@dataclass(frozen=True)
class LayerCost:
    """Layers that look alike, `indices` in the spec. Bytes are those of all of them together, for one agent.

    per_token:  one more token while there is room for it; of that grows_by for ever.
    fixed:      state arrays, and windows at most, in whole blocks.
    agent:      at the plan's context; of that checkpoint is what does not live in shared blocks.
    """

    layer: LayerSpec
    indices: tuple[int, ...]
    per_token: int
    grows_by: int
    fixed: int
    agent: int
    checkpoint: int

    @property
    def per_block(self) -> int:
        return BLOCK_TOKENS * self.per_token

    @property
    def at_most(self) -> int | None:
        """None: it grows with the context."""
        return None if self.grows_by else self.fixed


@dataclass(frozen=True)
class AgentCost:
    """One agent of `tokens` tokens, in `bits` bits or as the model has it (None)."""

    tokens: int
    bits: int | None
    layers: tuple[LayerCost, ...]

    @cached_property
    def per_token(self) -> int:
        """One more token once windows are full."""
        return sum(cost.grows_by for cost in self.layers)

    @cached_property
    def fixed(self) -> int:
        return sum(cost.fixed for cost in self.layers)

    @cached_property
    def agent(self) -> int:
        return sum(cost.agent for cost in self.layers)

    @cached_property
    def checkpoint(self) -> int:
        """What a prefix costs beside its blocks so that it can be resumed behind its last token; 0: full layers need none."""
        return sum(cost.checkpoint for cost in self.layers)

    def agents(self, budget: int) -> int:
        """How many fit in `budget` bytes; 0 also where that is below 0."""
        return max(0, budget) // self.agent

    def as_dict(self, budget: int) -> dict[str, Any]:
        return {
            "bytes_per_token": self.per_token,
            "bytes_per_block": BLOCK_TOKENS * self.per_token,
            "fixed_bytes": self.fixed,
            "agent_bytes": self.agent,
            "checkpoint_bytes": self.checkpoint,
            "agents": self.agents(budget),
        }


@dataclass(frozen=True)
class Weights:
    """What the weights take in memory. `source`: files, index, estimate or unknown; None: not known.

    An estimate has the number of parameters and the bits that most of them have, None if they are not quantised.
    """

    bytes: int | None = None
    source: str = "unknown"
    parameters: int | None = None
    bits: int | None = None


@dataclass(frozen=True)
class Memory:
    """What weights and agents may take together. `source`: option or machine."""

    bytes: int
    source: str


@dataclass(frozen=True)
class ModelPlan:
    """One model in `memory` with agents of `tokens` tokens whose keys and values have `bits` bits; None: as the model has them.

    longest: the context that config.json says the model is made for, or None.
    """

    spec: ModelCacheSpec
    model_type: str
    weights: Weights
    memory: Memory
    tokens: int
    bits: int | None = None
    longest: int | None = None

    @cached_property
    def costs(self) -> dict[int | None, AgentCost]:
        """By bits: None, 8 and 4."""
        return {bits: cost_of(self.spec, self.tokens, bits) for bits in (None, *KV_BITS)}

    @property
    def cost(self) -> AgentCost:
        return self.costs[self.bits]

    @property
    def left(self) -> int:
        """Bytes for agents; below 0 where the weights alone are too large. Unknown weights count as nothing."""
        return self.memory.bytes - (self.weights.bytes or 0)

    @property
    def agents(self) -> int:
        return self.cost.agents(self.left)

    def as_dict(self) -> dict[str, Any]:
        """Every figure, for JSON; what is about layers and about `agents` is with `kv_bits`."""
        return {
            "model": self.spec.model_id,
            "model_type": self.model_type,
            "dtype": self.spec.dtype,
            "block_tokens": BLOCK_TOKENS,
            "context": self.tokens,
            "longest_context": self.longest,
            "kv_bits": self.bits,
            "groups": [_group_dict(cost) for cost in self.cost.layers],
            "kv": {f"bits_{bits}" if bits else "as_it_is": cost.as_dict(self.left) for bits, cost in self.costs.items()},
            "weights": vars(self.weights).copy(),
            "memory": vars(self.memory).copy(),
            "left_bytes": self.left,
            "agents": self.agents,
        }


def cost_of(spec: ModelCacheSpec, tokens: int, bits: int | None = None) -> AgentCost:
    """One agent of `tokens` tokens, 1 or more. Raises SpecError for caches that hold nothing."""
    members: dict[LayerSpec, list[int]] = {}
    for index, layer in enumerate(spec.layers):
        members.setdefault(layer, []).append(index)
    found = AgentCost(tokens, bits, tuple(_layer_cost(spec, layer, at, tokens, bits) for layer, at in members.items()))
    if not found.agent:
        raise SpecError(f"{spec.model_id}: found caches of 0 bytes; needed layers that hold something")
    return found


def unquantisable(spec: ModelCacheSpec) -> list[int]:
    """The sizes of keys and values that cannot be quantised, as they are no multiple of GROUP_SIZE."""
    leaves = [leaf for leaf in spec.leaves if isinstance(leaf, FullLayer)]
    return sorted({dim for leaf in leaves for dim in (leaf.key_dim, leaf.value_dim) if dim % GROUP_SIZE})


def _layer_cost(spec: ModelCacheSpec, layer: LayerSpec, indices: list[int], tokens: int, bits: int | None) -> LayerCost:
    sums = [0] * 5
    for leaf in leaves_of(layer):
        figures = _leaf_cost(spec, leaf, tokens, bits)
        sums = [total + len(indices) * figure for total, figure in zip(sums, figures, strict=True)]
    return LayerCost(layer, tuple(indices), *sums)


def _leaf_cost(spec: ModelCacheSpec, leaf: LayerSpec, tokens: int, bits: int | None) -> tuple[int, int, int, int, int]:
    """per_token, grows_by, fixed, agent and checkpoint of one layer that is no composite."""
    if not isinstance(leaf, FullLayer):
        state = state_bytes(leaf)
        return 0, 0, state, state, state
    rows = (leaf.key_dim, leaf.value_dim)
    per_token = leaf.kv_heads * sum(_row_bytes(dim, DTYPE_BYTES[spec.dtype], bits) for dim in rows)
    per_block = BLOCK_TOKENS * per_token
    agent = spec.blocks(tokens, leaf) * per_block
    if leaf.max_blocks is None:
        return per_token, per_token, 0, agent, 0
    return per_token, 0, leaf.max_blocks * per_block, agent, agent


def _row_bytes(dim: int, dtype_bytes: int, bits: int | None) -> int:
    """Keys or values of one head and token."""
    if bits is None or dim % GROUP_SIZE:
        return dim * dtype_bytes
    return dim * bits // 8 + 2 * dtype_bytes * (dim // GROUP_SIZE)


def _group_dict(cost: LayerCost) -> dict[str, Any]:
    return {
        **_layer_dict(cost.layer),
        "layers": len(cost.indices),
        "bytes_per_token": cost.per_token,
        "bytes_per_block": cost.per_block,
        "bytes_at_most": cost.at_most,
        "bytes_at_context": cost.agent,
    }


def _layer_dict(layer: LayerSpec) -> dict[str, Any]:
    if isinstance(layer, CompositeLayer):
        return {"kind": layer.kind, "parts": [_layer_dict(part) for part in layer.parts]}
    if isinstance(layer, StateLayer):
        return {"kind": layer.kind, "arrays": [{"shape": list(shape), "dtype": dtype} for shape, dtype in layer.arrays]}
    return {"kind": layer.kind, **vars(layer)}
