"""One decode step of one layer group: what all its layers do alike, worked out by the first of them.

Knows where members write and read; holds positions, never views of a slab. Owned by the generation thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import mlx.core as mx

from ..spec import BLOCK_TOKENS, WindowLayer
from .arena import KVArena
from .decode_policy import Cluster, Share, device, divide, find_clusters
from .layer_caches import PooledLayer
from .rows import Quantised, concatenated, dense, joined, part_of
from .runs import attend_cluster, attend_grouped, group_queries
from .sequence import SlabRun

# Work for other cores runs on these streams, each thread has its own.
_helpers = [mx.new_thread_local_stream(mx.cpu)]
# What one read costs beside its tokens, in tokens; and tokens * heads below which a second stream does not pay.
READ_COST = 100
PARALLEL_WORK = 4000
# More than a pool has.
MOST_BLOCKS = 2**40

# What members read together, and what each of them reads alone.
Pieces = tuple[list[SlabRun], list[list[SlabRun]]]


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


class _Reading(NamedTuple):
    """What one share reads in each layer: which of the grouped queries, which heads, and where in the slabs."""

    members: tuple[int, ...]
    queries: tuple[slice | mx.array, slice]
    heads: slice
    is_whole: bool
    shared: list[SlabRun]
    own: list[list[SlabRun]]


class Step:
    """Where each member writes one token, what it reads then, on which path and on which stream."""

    def __init__(self, arena: KVArena, group: int, members: Sequence[PooledLayer], places: list[SlabRun]) -> None:
        self.key = _key(arena, group, members)
        self.tables = [m.sequence.tables[group] for m in members]
        self.pools = [m.sequence.pool for m in members]
        self.sizes = [m.next_size() for m in members]
        self.layer = members[0].place.layer
        self.order: mx.array | None = None
        # On CPU mlx's own attention is the same two products, with more operations around them and, for 16-bit numbers, one
        # pass over the keys for each query head.
        self._products = device() == "cpu"
        self._places = places
        in_one_slab = len(places) > 1 and all(slab is places[0][0] for slab, _, _ in places)
        self._scattered = mx.array([first for _, first, _ in places]) if in_one_slab else None
        clusters = self._clusters(arena)
        self.path = arena.decode.choose(self.sizes, clusters)
        pieces = [m.sequence.slab_runs(group, size) for m, size in zip(members, self.sizes, strict=True)]
        if self.path == "padded":
            self._pieces = pieces
            self._mask = _padding_mask(self.sizes)
            return
        pieces_of = _readings(pieces, clusters if self.path == "shared" else [])
        loads = self._divide(pieces_of, min(arena.decode.streams, 1 + len(_helpers)))
        self._loads = [[_reading(s, *pieces_of[s.members], self.layer.kv_heads) for s in load] for load in loads]
        # The others get their work before the stream that waits for them.
        self._streams = (*_helpers[: len(self._loads) - 1], None)
        whole = [reading.members for load in self._loads for reading in load if reading.is_whole]
        self._divided = [members for members in pieces_of if members not in whole]
        rows = [i for together in whole + self._divided for i in together]
        if rows != sorted(rows):
            self.order = mx.array([rows.index(i) for i in range(len(rows))])

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
        batch, heads, _, _ = queries.shape
        grouped = group_queries(queries, self.layer.kv_heads, scale)
        sinks = None if sinks is None else sinks.reshape(self.layer.kv_heads, -1)
        whole: list[mx.array] = []
        parts: dict[tuple[int, ...], dict[int, mx.array]] = {members: {} for members in self._divided}
        for stream, load in zip(self._streams, self._loads, strict=True):
            with nullcontext() if stream is None else mx.stream(stream):
                read = [(reading, self._read(reading, index, grouped, sinks)) for reading in load]
                # Joined on their own stream: else mlx hands out the work of both in turns, and they wait for each other.
                own = [out for reading, out in read if reading.is_whole]
                whole += [concatenated(own, 0)] if own else []
            for reading, out in read:
                if not reading.is_whole:
                    parts[reading.members][reading.heads.start] = out
        out = concatenated(whole + [concatenated([p[first] for first in sorted(p)], 1) for p in parts.values()], 0)
        out = out if self.order is None else out[self.order]
        return out.reshape(batch, heads, 1, -1)

    def _clusters(self, arena: KVArena) -> list[Cluster]:
        """Windows keep writing in every block of their ring, so that they share nothing for long."""
        if arena.decode.path == "ragged" or len(self.tables) == 1 or isinstance(self.layer, WindowLayer):
            return []
        # An id is a block of its own pool: those of the second one follow those of the first.
        pools = {pool: i for i, pool in enumerate(dict.fromkeys(self.pools))}
        starts = [pools[pool] * MOST_BLOCKS for pool in self.pools]
        full = [t.ids[: size // BLOCK_TOKENS] for t, size in zip(self.tables, self.sizes, strict=True)]
        return find_clusters([[start + i for i in ids] if start else ids for start, ids in zip(starts, full, strict=True)])

    def _divide(self, pieces_of: dict[tuple[int, ...], Pieces], streams: int) -> list[list[Share]]:
        heads = (0, self.layer.kv_heads)
        shares = [
            Share(members, len(members) * (READ_COST + _tokens(shared)) + sum(map(_tokens, own)), heads)
            for members, (shared, own) in pieces_of.items()
        ]
        if streams == 1 or sum(s.cost for s in shares) * self.layer.kv_heads < PARALLEL_WORK:
            return [shares]
        return divide(shares, streams)

    def _read(self, reading: _Reading, index: int, grouped: mx.array, sinks: mx.array | None) -> mx.array:
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


def _reading(share: Share, shared: list[SlabRun], own: list[list[SlabRun]], kv_heads: int) -> _Reading:
    rows, heads = share.members, slice(*share.heads)
    queries = (slice(rows[0], rows[-1] + 1) if _is_range(rows) else mx.array(rows), heads)
    return _Reading(rows, queries, heads, share.heads == (0, kv_heads), shared, own)


def _readings(pieces: list[list[SlabRun]], clusters: list[Cluster]) -> dict[tuple[int, ...], Pieces]:
    """Members -> what they read together and what each reads alone; a member of no cluster reads everything alone."""
    readings: dict[tuple[int, ...], Pieces] = {
        c.members: _cut([pieces[i] for i in c.members], c.blocks * BLOCK_TOKENS) for c in clusters
    }
    clustered = {i for together in readings for i in together}
    readings.update({(i,): ([], [mine]) for i, mine in enumerate(pieces) if i not in clustered})
    return readings


def _cut(pieces: list[list[SlabRun]], shared: int) -> tuple[list[SlabRun], list[list[SlabRun]]]:
    """The first `shared` tokens, which are the same for all, and what follows them for each."""
    together: list[SlabRun] = []
    own: list[list[SlabRun]] = []
    for mine in pieces:
        together, tail, left = [], [], shared
        for slab, start, count in mine:
            head = min(left, count)
            left -= head
            together += [(slab, start, head)] if head else []
            tail += [(slab, start + head, count - head)] if head < count else []
        own.append(tail)
    return together, own


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


def _tokens(pieces: list[SlabRun]) -> int:
    return sum(count for _, _, count in pieces)


def _is_range(rows: tuple[int, ...]) -> bool:
    return rows[-1] - rows[0] == len(rows) - 1
