"""How the attention of a step is divided: between members that begin with the same blocks, between
streams, and between heads.

A row is one token of a member of the batch. Knows block ids and where tokens lie, not how they are
read. Owned by the generation thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, takewhile
from typing import Any

import mlx.core as mx

from ..spec import BLOCK_TOKENS
from .quantised import concatenated
from .slab import SlabRun

# Work for other cores runs on these streams, each thread has its own.
_helpers = [mx.new_thread_local_stream(mx.cpu)]
MOST_STREAMS = 1 + len(_helpers)
# Members that read the same number of these are read as one. It divides a block, so that the longer
# ones end in their last block where the shorter ones do.
ALIKE_TOKENS = 128

# What members read together, and what each of them reads alone.
Pieces = tuple[Sequence[SlabRun], Sequence[list[SlabRun]]]


@dataclass(frozen=True)
class Cluster:
    """Members, by their place in the batch, whose block tables begin with the same `blocks` full
    blocks.
    """

    members: tuple[int, ...]
    blocks: int

    @property
    def saved(self) -> int:
        """Blocks that are not read again if these members read theirs together."""
        return (len(self.members) - 1) * self.blocks


@dataclass(frozen=True)
class Share:
    """A part of one layer's attention that waits for no other: what some members read in some of
    their kv heads.

    rows:         the rows of these members.
    heads:        kv heads [start, end), of `kv_heads` in all.
    shared, own:  where in the slabs their keys and values lie: those that all of them read, and
                  those of each member.
    cost:         how long it takes in relation to other shares.
    parts:        the shares that merged() made this one of; `own` has the run of each.
    """

    members: tuple[int, ...]
    cost: float
    heads: tuple[int, int]
    rows: Sequence[int] = ()
    pieces: Pieces = ((), ())
    is_whole: bool = True
    parts: Sequence[Share] = ()

    @cached_property
    def queries(self) -> tuple[slice | mx.array, slice]:
        """Which of the grouped queries attend."""
        first, last = self.rows[0], self.rows[-1]
        return slice(first, last + 1) if last - first == len(self.rows) - 1 else mx.array(
            list(self.rows)
        ), slice(*self.heads)

    @cached_property
    def is_one_run(self) -> bool:
        """Whether one member reads one run, or several alike, and nothing with others."""
        shared, own = self.pieces
        return not shared and len(own[0]) == 1 and (len(own) == 1 or bool(self.parts))


class Shares:
    """The attention of one step, in shares for each stream. single: its only share, if so."""

    def __init__(self, loads: Sequence[Sequence[Share]]) -> None:
        self._loads = loads
        # The others get their work before the stream that waits for them.
        self._streams = (*_helpers[: len(loads) - 1], None)
        shares = [share for load in loads for share in load]
        divided = {share.members: share.rows for share in shares if not share.is_whole}
        self._divided = list(divided)
        self.single = shares[0] if len(shares) == 1 else None
        found = [row for share in shares if share.is_whole for row in share.rows] + [
            row for rows in divided.values() for row in rows
        ]
        self._order = (
            None
            if found == sorted(found)
            else mx.array([found.index(row) for row in range(len(found))])
        )

    def attend(self, read: Callable[..., mx.array], *args: Any) -> mx.array:
        """What `read` makes of each share, and of `args`, [its rows, its kv heads, group, dim], as
        [rows, kv_heads, group, dim].
        """
        whole: list[mx.array] = []
        parts: dict[tuple[int, ...], dict[int, mx.array]] = {
            members: {} for members in self._divided
        }
        for stream, load in zip(self._streams, self._loads, strict=True):
            with nullcontext() if stream is None else mx.stream(stream):
                found = [(share, read(share, *args)) for share in load]
                # Joined on their own stream: else mlx schedules the work of both in turns, and they
                # wait for each other.
                own = [out for share, out in found if share.is_whole]
                whole += [concatenated(own, 0)] if own else []
            for share, out in found:
                if not share.is_whole:
                    parts[share.members][share.heads[0]] = out
        out = concatenated(
            whole + [concatenated([p[first] for first in sorted(p)], 1) for p in parts.values()], 0
        )
        return out if self._order is None else out[self._order]


def pieces_of(
    runs: list[list[SlabRun]], clusters: Sequence[Cluster]
) -> dict[tuple[int, ...], Pieces]:
    """Members -> what they read together and what each reads alone; a member of no cluster reads
    everything alone.
    """
    found = {
        c.members: cut([runs[i] for i in c.members], c.blocks * BLOCK_TOKENS) for c in clusters
    }
    clustered = {i for together in found for i in together}
    found.update({(i,): ((), [list(mine)]) for i, mine in enumerate(runs) if i not in clustered})
    return found


def cut(runs: Sequence[Sequence[SlabRun]], shared: int) -> Pieces:
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


def tokens_of(runs: Sequence[SlabRun]) -> int:
    return sum(count for _, _, count in runs)


def find_clusters(tables: Sequence[list[int]]) -> list[Cluster]:
    """The clusters, each member in one at most, that save the most blocks; `tables` are the ids of
    each member's full blocks.

    Where some members of a cluster share more with each other, either all read together what all
    share, or they part, and each smaller cluster reads its longer prefix.
    """
    return _part(tables, range(len(tables)), 0)


def _part(tables: Sequence[list[int]], members: Sequence[int], depth: int) -> list[Cluster]:
    by_block: dict[int, list[int]] = {}
    for i in members:
        if len(tables[i]) > depth:
            by_block.setdefault(tables[i][depth], []).append(i)
    return [
        c for together in by_block.values() if len(together) > 1 for c in _best(tables, together)
    ]


def _best(tables: Sequence[list[int]], members: list[int]) -> list[Cluster]:
    # Whatever the smallest and the largest begin with, all that lie between them begin with.
    low, high = min(tables[i] for i in members), max(tables[i] for i in members)
    whole = Cluster(
        tuple(members),
        sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(low, high, strict=False))),
    )
    parts = _part(tables, members, whole.blocks)
    return parts if sum(p.saved for p in parts) > whole.saved else [whole]


def divide(shares: Sequence[Share], streams: int) -> list[list[Share]]:
    """The shares for each of `streams` streams that run at the same time, nearly equal in cost.

    What is larger than one stream's part is divided by its heads first.
    """
    fair = sum(s.cost for s in shares) / streams
    pieces = [p for s in shares for p in (_by_heads(s, streams) if s.cost > 1.2 * fair else [s])]
    loads: list[list[Share]] = [[] for _ in range(streams)]
    costs = [0.0] * streams
    for piece in sorted(pieces, key=lambda p: -p.cost):
        least = costs.index(min(costs))
        loads[least].append(piece)
        costs[least] += piece.cost
    return [sorted(load, key=lambda p: (p.members, p.heads)) for load in loads]


def merged(shares: Sequence[Share]) -> list[Share]:
    """The shares of members that read one run each in the same slab, about as long, as one; and
    the others.
    """
    found: dict[tuple[int, int], list[Share]] = {}
    for share in shares:
        key = id(share), 0
        if share.is_one_run and share.is_whole:
            ((slab, _, count),) = share.pieces[1][0]
            key = id(slab), -(-count // ALIKE_TOKENS)
        found.setdefault(key, []).append(share)
    return [parts[0] if len(parts) == 1 else _merge(parts) for parts in found.values()]


def _merge(parts: list[Share]) -> Share:
    return Share(
        tuple(i for share in parts for i in share.members),
        sum(share.cost for share in parts),
        parts[0].heads,
        [row for share in parts for row in share.rows],
        ((), [share.pieces[1][0] for share in parts]),
        parts=parts,
    )


def _by_heads(share: Share, parts: int) -> list[Share]:
    first, last = share.heads
    heads = last - first
    parts = min(parts, heads)
    cuts = [first + heads * i // parts for i in range(parts + 1)]
    return [
        replace(share, heads=(a, b), cost=share.cost * (b - a) / heads, is_whole=parts == 1)
        for a, b in pairwise(cuts)
    ]
