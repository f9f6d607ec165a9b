"""One decode step of one layer group: what all its layers do alike, worked out by the first of them.

Knows where members write and read; holds positions, never views of a slab. Owned by the generation thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from .arena import KVArena
from .decode_policy import Share, device, divide
from .kernel_attention import KernelAttention
from .layer_caches import PooledLayer
from .path_costs import PathCosts, Shape
from .readings import MOST_STREAMS, Pieces, Reading, Readings, clusters_of, pieces_of, tokens_of
from .rows import Quantised, dense, joined, part_of
from .runs import attend_cluster, attend_grouped, group_queries
from .sequence import SlabRun

# Work below which a second stream does not pay. Not measured: whether its core is free changes from second to second.
PARALLEL_SECONDS = 4e-4


def step_of(members: Sequence[PooledLayer]) -> Step:
    """The step in which each member writes its next token; the layers of a group get the same one.

    Takes blocks and copies shared ones for all members before anything is written: a PoolExhaustedError changes no array.
    """
    arena, group = members[0].sequence.arena, members[0].place.group
    found = arena.steps.get(group)
    if found is None or found.key != _key(arena, group, members):
        places = [m.sequence.writable(group, m.next_place(), m.next_place() + 1)[0] for m in members]
        found = arena.steps[group] = Step(arena, group, members, places)
    return found


def _key(arena: KVArena, group: int, members: Sequence[PooledLayer]) -> tuple[Any, ...]:
    """What a step depends on. Tables are distinguished by id: the step that remembers an id keeps the table."""
    tables = [m.sequence.tables[group] for m in members]
    state = [(id(t), t.version, m.next_place(), m.offset) for t, m in zip(tables, members, strict=True)]
    sharing = tuple(pool.groups[group].share_epoch for pool in {m.sequence.pool: None for m in members})
    return arena.decode.path, arena.decode.streams, sharing, state


class Step:
    """Where each member writes one token, what it reads then, on which path and on which stream."""

    def __init__(self, arena: KVArena, group: int, members: Sequence[PooledLayer], places: list[SlabRun]) -> None:
        self.key = _key(arena, group, members)
        self.tables = [m.sequence.tables[group] for m in members]
        self.sizes = [m.next_size() for m in members]
        self.layer = members[0].place.layer
        # On CPU mlx's own attention is the same two products, with more operations around them and, for 16-bit numbers, one
        # pass over the keys for each query head.
        self._products = device() == "cpu"
        self._places = places
        in_one_slab = len(places) > 1 and all(slab is places[0][0] for slab, _, _ in places)
        self._scattered = mx.array([first for _, first, _ in places]) if in_one_slab else None
        clusters = clusters_of(members, self.sizes) if arena.decode.may_share(group) else []
        self.path = arena.decode.choose(group, self.sizes, clusters)
        pieces = [m.sequence.slab_runs(group, size) for m, size in zip(members, self.sizes, strict=True)]
        self._kernel: KernelAttention | None = None
        if self.path == "padded":
            self._pieces = pieces
            self._mask = _padding_mask(self.sizes)
            return
        together = pieces_of(pieces, clusters if self.path in ("shared", "kernel") else [])
        if self.path == "kernel":
            assert arena.decode.launch is not None, "the kernel of a device without one is trusted"
            self._kernel = KernelAttention(arena.spec, self.layer, arena.decode.launch, together, [1] * len(members))
            return
        costs = arena.decode.costs_of(group, self.layer.kv_heads)
        loads = self._divide(together, costs, min(arena.decode.streams, MOST_STREAMS))
        self._readings = Readings(loads, together, self.layer.kv_heads, [1] * len(members))

    def write(self, index: int, keys: mx.array, values: mx.array) -> None:
        """Put keys and values [members, kv_heads, 1, dim] of the group's layer `index` where they belong."""
        slab = self._places[0][0]
        if self._scattered is not None:
            slab.scatter(index, self._scattered, keys.swapaxes(0, 2), values.swapaxes(0, 2))
            return
        # Quantised once, not once a member.
        written = slab.as_written(keys, values)
        for i, (slab, first, _) in enumerate(self._places):
            row = slice(i, i + 1)
            slab.write(index, first, part_of(written[0], row), part_of(written[1], row))

    def attend(self, index: int, queries: mx.array, scale: float, sinks: mx.array | None) -> mx.array:
        """Attention of queries [members, heads, 1, dim] in the group's layer `index`, after its write()."""
        if self.path == "padded":
            keys, values = _gather(self._pieces, self.sizes, index)
            return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=self._mask, sinks=sinks)
        if self._kernel is not None:
            return self._kernel.attend(index, queries, scale, sinks)
        batch, heads, _, _ = queries.shape
        grouped = group_queries(queries, self.layer.kv_heads, scale)
        sinks = None if sinks is None else sinks.reshape(self.layer.kv_heads, -1)
        out = self._readings.attend(lambda reading: self._read(reading, index, grouped, sinks))
        return out.reshape(batch, heads, 1, -1)

    def _divide(self, pieces: dict[tuple[int, ...], Pieces], costs: PathCosts, streams: int) -> list[list[Share]]:
        heads = (0, self.layer.kv_heads)
        shares = [Share(members, _cost(costs, shared, own), heads) for members, (shared, own) in pieces.items()]
        if streams == 1 or sum(s.cost for s in shares) < PARALLEL_SECONDS:
            return [shares]
        return divide(shares, streams)

    def _read(self, reading: Reading, index: int, grouped: mx.array, sinks: mx.array | None) -> mx.array:
        """Attention of one share: [its members, its kv heads, group, dim]."""
        _, queries_of, heads, _, shared, own = reading
        first, last = heads.start, heads.stop
        mine = grouped[queries_of]
        sinks = None if sinks is None else sinks[heads]
        tails = [[slab.read(index, start, count, first, last) for slab, start, count in pieces] for pieces in own]
        if shared:
            return attend_cluster(mine, [slab.read(index, start, n, first, last) for slab, start, n in shared], tails, sinks)
        keys, values = tails[0][0]
        if self._products or len(tails[0]) > 1 or isinstance(keys, Quantised) or isinstance(values, Quantised):
            return attend_grouped(mine, tails[0], sinks)
        queries = mine.reshape(1, -1, 1, mine.shape[-1])
        sinks = None if sinks is None else sinks.reshape(-1)
        out = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=1.0, mask=None, sinks=sinks)
        return out.reshape(*mine.shape[:3], -1)


def _cost(costs: PathCosts, shared: list[SlabRun], own: list[list[SlabRun]]) -> float:
    sizes = tuple(map(tokens_of, own))
    return costs.of_cluster(Shape(tokens_of(shared), sizes)) if shared else costs.of_ragged(sizes)


def _padding_mask(sizes: list[int]) -> mx.array | None:
    """[members, 1, 1, longest], or None where all have the same length."""
    return None if min(sizes) == max(sizes) else (mx.arange(max(sizes)) < mx.array(sizes)[:, None])[:, None, None]


def _gather(pieces: list[list[SlabRun]], sizes: list[int], index: int) -> tuple[mx.array, mx.array]:
    """Keys and values [members, kv_heads, longest, dim] of the group's layer `index`: a copy, zeros after the shorter ones."""
    longest = max(sizes)
    rows: tuple[list[mx.array], list[mx.array]] = ([], [])
    for mine, size in zip(pieces, sizes, strict=True):
        views = zip(*(slab.read(index, start, count) for slab, start, count in mine), strict=True)
        for row, parts in zip(rows, views, strict=True):
            whole = dense(joined(parts, 2))
            row.append(whole if size == longest else mx.pad(whole, [(0, 0), (0, 0), (0, longest - size), (0, 0)]))
    return mx.concatenate(rows[0]), mx.concatenate(rows[1])
