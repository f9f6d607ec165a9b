"""Plans: the bytes of a token, an agent and a checkpoint, and how many agents fit next to a model's
weights.

Computes from a spec, in whole blocks, of which agents share those of a common prefix. Does not know
files, mlx or pools.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ..config import KV_BITS, KVBits
from ..errors import SpecError
from ..spec import (
    BLOCK_TOKENS,
    CompositeLayer,
    FullLayer,
    LayerSpec,
    ModelCacheSpec,
    StateLayer,
    blocks_for,
    figures_of,
    leaves_of,
)


@dataclass(frozen=True)
class LayerCost:
    """Equal layers, at `indices` of the spec. Bytes count all of them together, for one agent.

    per_token:  one more token while a window is not full; grows_by: the part that grows without a
                limit.
    fixed:      state arrays and full windows, in whole blocks.
    agent:      at the plan's context; checkpoint: the part that is not in blocks that prefixes
                share.
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
        """The most for any context, or None if it grows with the context."""
        return None if self.grows_by else self.fixed


@dataclass(frozen=True)
class AgentCost:
    """One agent of `tokens` tokens. `shared`: bytes of its blocks that all agents share."""

    tokens: int
    layers: tuple[LayerCost, ...]
    shared: int = 0

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
        """What a prefix takes in addition to its blocks so that it can be resumed at its end; 0
        with full layers alone.
        """
        return sum(cost.checkpoint for cost in self.layers)

    def agents(self, budget: int) -> int:
        """How many agents fit in `budget` bytes, which may be below 0."""
        return max(0, budget - self.shared) // (self.agent - self.shared)

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
    """Bytes of the weights; None: unknown. `source`: files, index, estimate or unknown.

    An estimate has the number of parameters, and the bits of most of them if they are quantised.
    """

    bytes: int | None = None
    source: str = "unknown"
    parameters: int | None = None
    bits: int | None = None


@dataclass(frozen=True)
class Memory:
    """Memory for weights and agents together. `source`: option or machine."""

    bytes: int
    source: str


@dataclass(frozen=True)
class ModelPlan:
    """One model in `memory`, with agents of `tokens` tokens.

    bits:    how their keys and values are stored; None: as the model computes them.
    longest: the longest context according to config.json, or None.
    shared:  tokens at their beginning that all agents have in common; whole blocks of them count.
    """

    spec: ModelCacheSpec
    model_type: str
    weights: Weights
    memory: Memory
    tokens: int
    bits: KVBits | None = None
    longest: int | None = None
    shared: int = 0

    @cached_property
    def costs(self) -> dict[KVBits | None, AgentCost]:
        """By bits: None, 8, 4, and those of the plan."""
        wanted = (None, *(KVBits(bits, bits, self.group_size) for bits in KV_BITS), self.bits)
        return {
            bits: cost_of(self.spec.with_bits(bits), self.tokens, self.shared) for bits in wanted
        }

    @property
    def group_size(self) -> int:
        return (self.bits or KVBits()).group_size

    @property
    def cost(self) -> AgentCost:
        return self.costs[self.bits]

    @property
    def left(self) -> int:
        """Bytes for agents; below 0 if the weights alone are too large.

        Unknown weights count as 0.
        """
        return self.memory.bytes - (self.weights.bytes or 0)

    @property
    def agents(self) -> int:
        return self.cost.agents(self.left)

    def as_dict(self) -> dict[str, Any]:
        """Every figure, for JSON. `groups` and `agents` are computed with `kv_bits`."""
        return {
            "model": self.spec.model_id,
            "model_type": self.model_type,
            "dtype": self.spec.dtype,
            "block_tokens": BLOCK_TOKENS,
            "context": self.tokens,
            "shared": self.shared,
            "longest_context": self.longest,
            "kv_bits": None if self.bits is None else _bits_dict(self.bits),
            "kv_group_size": self.group_size,
            "groups": [_group_dict(cost) for cost in self.cost.layers],
            "kv": {_bits_name(bits): cost.as_dict(self.left) for bits, cost in self.costs.items()},
            "weights": vars(self.weights).copy(),
            "memory": vars(self.memory).copy(),
            "left_bytes": self.left,
            "agents": self.agents,
        }


def cost_of(spec: ModelCacheSpec, tokens: int, shared: int = 0) -> AgentCost:
    """One agent of `tokens` tokens, more than are shared, in the bits of the spec.

    Raises SpecError for caches that hold nothing.
    """
    members: dict[LayerSpec, list[int]] = {}
    for index, layer in enumerate(spec.layers):
        members.setdefault(layer, []).append(index)
    found = AgentCost(
        tokens, tuple(_layer_cost(spec, layer, at, tokens) for layer, at in members.items())
    )
    if not found.agent:
        raise SpecError(f"{spec.model_id}: its caches take 0 bytes, so there is nothing to plan.")
    if shared < BLOCK_TOKENS:
        return found
    # Windows and states are each agent's.
    prefix = cost_of(spec, shared // BLOCK_TOKENS * BLOCK_TOKENS)
    return replace(found, shared=prefix.agent - prefix.checkpoint)


def _layer_cost(
    spec: ModelCacheSpec, layer: LayerSpec, indices: list[int], tokens: int
) -> LayerCost:
    figures = zip(*(_leaf_cost(spec, leaf, tokens) for leaf in leaves_of(layer)), strict=True)
    return LayerCost(layer, tuple(indices), *(len(indices) * sum(column) for column in figures))


def _leaf_cost(
    spec: ModelCacheSpec, leaf: LayerSpec, tokens: int
) -> tuple[int, int, int, int, int]:
    """per_token, grows_by, fixed, agent and checkpoint of one leaf."""
    if isinstance(leaf, StateLayer):
        agent = leaf.nbytes + leaf.growth * BLOCK_TOKENS * blocks_for(tokens)
        return leaf.growth, leaf.growth, leaf.nbytes, agent, agent
    assert isinstance(leaf, FullLayer)
    per_token, per_block = (
        spec.bytes_per_token_per_layer(leaf),
        spec.bytes_per_block_per_layer(leaf),
    )
    agent = spec.blocks(tokens, leaf) * per_block
    if leaf.max_blocks is None:
        return per_token, per_token, 0, agent, 0
    return per_token, 0, leaf.max_blocks * per_block, agent, agent


def _bits_dict(bits: KVBits) -> int | dict[str, int | None] | None:
    return bits.keys if bits.keys == bits.values else {"keys": bits.keys, "values": bits.values}


def _bits_name(bits: KVBits | None) -> str:
    if bits is None:
        return "as_it_is"
    return (
        f"bits_{bits.keys}"
        if bits.keys == bits.values
        else f"bits_{bits.keys or 16}_{bits.values or 16}"
    )


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
        return {
            "kind": layer.kind,
            "arrays": [{"shape": list(shape), "dtype": dtype} for shape, dtype in layer.arrays],
            **({"growth": layer.growth} if layer.growth else {}),
        }
    return {"kind": layer.kind, **figures_of(layer)}
