"""Readings: the attention of a step in pieces for several streams, and their outputs in the order of its rows.

A row is one token of a member of the batch. Knows which slabs are read, not how. Owned by the generation thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from itertools import accumulate, pairwise
from typing import NamedTuple

import mlx.core as mx

from ..spec import BLOCK_TOKENS, WindowLayer
from .decode_policy import Cluster, Share, find_clusters
from .layer_caches import PooledLayer
from .rows import concatenated
from .sequence import SlabRun

# Work for other cores runs on these streams, each thread has its own.
_helpers = [mx.new_thread_local_stream(mx.cpu)]
MOST_STREAMS = 1 + len(_helpers)

# More than a pool has.
MOST_BLOCKS = 2**40

# What members read together, and what each of them reads alone.
Pieces = tuple[list[SlabRun], list[list[SlabRun]]]


class Reading(NamedTuple):
    """What one share reads in each layer: which of the grouped queries, which heads, and where in the slabs."""

    members: tuple[int, ...]
    queries: tuple[slice | mx.array, slice]
    heads: slice
    is_whole: bool
    shared: list[SlabRun]
    own: list[list[SlabRun]]


class Readings:
    """The readings of one step: `loads` has the shares of each stream, and member i has counts[i] rows."""

    def __init__(
        self, loads: Sequence[list[Share]], pieces: Mapping[tuple[int, ...], Pieces], kv_heads: int, counts: Sequence[int]
    ) -> None:
        rows_of = [range(start, end) for start, end in pairwise(accumulate(counts, initial=0))]
        rows = {members: [row for i in members for row in rows_of[i]] for members in pieces}
        self._loads = [
            [_reading(share, pieces[share.members], rows[share.members], kv_heads) for share in load] for load in loads
        ]
        # The others get their work before the stream that waits for them.
        self._streams = (*_helpers[: len(self._loads) - 1], None)
        whole = [reading.members for load in self._loads for reading in load if reading.is_whole]
        self._divided = [members for members in pieces if members not in whole]
        found = [row for members in whole + self._divided for row in rows[members]]
        self._order = None if found == sorted(found) else mx.array([found.index(row) for row in range(len(found))])

    def attend(self, read: Callable[[Reading], mx.array]) -> mx.array:
        """What `read` makes of each reading, [its rows, its kv heads, group, dim], as [rows, kv_heads, group, dim]."""
        whole: list[mx.array] = []
        parts: dict[tuple[int, ...], dict[int, mx.array]] = {members: {} for members in self._divided}
        for stream, load in zip(self._streams, self._loads, strict=True):
            with nullcontext() if stream is None else mx.stream(stream):
                outputs = [(reading, read(reading)) for reading in load]
                # Joined on their own stream: else mlx hands out the work of both in turns, and they wait for each other.
                own = [out for reading, out in outputs if reading.is_whole]
                whole += [concatenated(own, 0)] if own else []
            for reading, out in outputs:
                if not reading.is_whole:
                    parts[reading.members][reading.heads.start] = out
        out = concatenated(whole + [concatenated([p[first] for first in sorted(p)], 1) for p in parts.values()], 0)
        return out if self._order is None else out[self._order]


def _reading(share: Share, pieces: Pieces, rows: list[int], kv_heads: int) -> Reading:
    heads = slice(*share.heads)
    is_range = rows[-1] - rows[0] == len(rows) - 1
    queries = (slice(rows[0], rows[-1] + 1) if is_range else mx.array(rows), heads)
    return Reading(share.members, queries, heads, share.heads == (0, kv_heads), *pieces)


def clusters_of(members: Sequence[PooledLayer], sizes: Sequence[int]) -> list[Cluster]:
    """The members that begin with the same full blocks; sizes[i]: tokens that member i reads.

    Windows keep writing in every block of their ring, so that they share nothing for long.
    """
    if len(members) == 1 or isinstance(members[0].place.layer, WindowLayer):
        return []
    # An id is a block of its own pool: those of the second one follow those of the first.
    pools = {pool: i for i, pool in enumerate(dict.fromkeys(m.sequence.pool for m in members))}
    starts = [pools[m.sequence.pool] * MOST_BLOCKS for m in members]
    tables = [m.sequence.tables[m.place.group] for m in members]
    full = [table.ids[: size // BLOCK_TOKENS] for table, size in zip(tables, sizes, strict=True)]
    return find_clusters([[start + i for i in ids] if start else ids for start, ids in zip(starts, full, strict=True)])


def pieces_of(runs: list[list[SlabRun]], clusters: Sequence[Cluster]) -> dict[tuple[int, ...], Pieces]:
    """Members -> what they read together and what each reads alone; a member of no cluster reads everything alone."""
    found = {c.members: cut([runs[i] for i in c.members], c.blocks * BLOCK_TOKENS) for c in clusters}
    clustered = {i for together in found for i in together}
    found.update({(i,): ([], [mine]) for i, mine in enumerate(runs) if i not in clustered})
    return found


def cut(runs: list[list[SlabRun]], shared: int) -> Pieces:
    """The first `shared` tokens, which are the same for all, and what follows them for each."""
    together: list[SlabRun] = []
    own: list[list[SlabRun]] = []
    for mine in runs:
        together, tail, left = [], [], shared
        for slab, start, count in mine:
            head = min(left, count)
            left -= head
            together += [(slab, start, head)] if head else []
            tail += [(slab, start + head, count - head)] if head < count else []
        own.append(tail)
    return together, own


def tokens_of(runs: list[SlabRun]) -> int:
    return sum(count for _, _, count in runs)
