"""Attention by rows: several next tokens of each member of a batch in one forward, each of them a row of its own.

What all layers of one group do alike is worked out by the first of them. Full layers write all rows and cut off those that are
not kept; windows write nothing before commit(), as a ring cannot take a token back.
Owned by the generation thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, groupby, pairwise
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from ..errors import PoolExhaustedError
from ..spec import BLOCK_TOKENS, WindowLayer
from .decode_attention import PARALLEL_SECONDS
from .decode_policy import Share, device, divide
from .kernel_attention import KernelAttention
from .layer_caches import PooledLayer
from .path_costs import PathCosts
from .readings import MOST_STREAMS, Pieces, Reading, Readings, clusters_of, pieces_of
from .rows import View, each, in_form, part_of
from .runs import attend_causally, attend_cluster, attend_rows, group_queries
from .sequence import SlabRun
from .slab import Slab

# Rows that go to neighbouring places are one slice; more slices than these in one slab take longer than a scatter.
MOST_SLICES = 2


class Target(NamedTuple):
    """Rows that go into one slab: to the token `start` and its neighbours, or to the tokens `places`."""

    slab: Slab
    rows: slice | mx.array
    start: int
    places: mx.array | None


def row_places(member: PooledLayer, count: int) -> list[int]:
    """Where in its table the next tokens of a member go, one by one; in a ring several may go to the same place."""
    layer, start = member.place.layer, member.next_place()
    if not isinstance(layer, WindowLayer):
        return list(range(start, start + count))
    places = [start]
    while len(places) < count:
        places.append(layer.keep if places[-1] + 1 == layer.max_size else places[-1] + 1)
    return places


def missing_row_blocks(member: PooledLayer, count: int) -> int:
    """How many blocks the next tokens of a member take, by rows, that are not reserved for its sequence."""
    table = member.sequence.tables[member.place.group]
    taken = sum(member.sequence.num_taken(member.place.group, start, end) for start, end in _stretches(member, count))
    return max(0, taken - table.reserved)


def rows_of(members: Sequence[PooledLayer], counts: Sequence[int]) -> RowStep:
    """The step in which counts[i] next tokens of each member are computed; the layers of a group get the same one.

    Takes the blocks of all rows and copies shared ones. Raises PoolExhaustedError, and what was taken is given back.
    """
    arena, group = members[0].sequence.arena, members[0].place.group
    found = arena.steps.get(group)
    if found is None or found.key != _key(group, members, counts):
        try:
            for member, count in zip(members, counts, strict=True):
                for start, end in _stretches(member, count):
                    member.sequence.writable(group, start, end)
        except PoolExhaustedError:
            for member in members:
                member.sequence.cut(group, member.size())
            raise
        cls = RingRows if isinstance(members[0].place.layer, WindowLayer) else FullRows
        found = arena.steps[group] = cls(members, counts)
    return found


def _key(group: int, members: Sequence[PooledLayer], counts: Sequence[int]) -> tuple[Any, ...]:
    """What a step depends on. Tables are distinguished by id: the step that remembers an id keeps the table."""
    tables = [m.sequence.tables[group] for m in members]
    state = [(id(t), t.version, m.next_place(), m.offset) for t, m in zip(tables, members, strict=True)]
    sharing = tuple(pool.groups[group].share_epoch for pool in {m.sequence.pool: None for m in members})
    decode = members[0].sequence.arena.decode
    return "rows", decode.path, decode.streams, tuple(counts), sharing, state


def _stretches(member: PooledLayer, count: int) -> list[tuple[int, int]]:
    """The places of the next tokens of a member as intervals [start, end), no two of them with a block in common."""
    blocks = [
        sorted(places) for _, places in groupby(sorted(set(row_places(member, count))), lambda place: place // BLOCK_TOKENS)
    ]
    return [(places[0], places[-1] + 1) for places in blocks]


class RowStep:
    """Rows of each member of one layer group: where they go, and what each of them reads.

    key:         what the step depends on.
    counts:      rows of each member.
    offsets:     the position of each row in its sequence.
    path:        what a batch's attention is counted as: rows, or kernel_rows.
    has_kernel:  whether mlx's own attention is faster than two products, and has the mask of these rows.
    is_beside:   whether the new rows are read beside the table and not in it.
    """

    has_kernel = False
    is_beside = False

    def __init__(self, members: Sequence[PooledLayer], counts: Sequence[int]) -> None:
        arena, self.group = members[0].sequence.arena, members[0].place.group
        self.key = _key(self.group, members, counts)
        self.tables = [m.sequence.tables[self.group] for m in members]
        self.kv_heads = members[0].place.layer.kv_heads
        self.counts = list(counts)
        self.offsets = mx.array([m.offset + j for m, count in zip(members, counts, strict=True) for j in range(count)])
        self.sizes = [self.size_of(m, count) for m, count in zip(members, counts, strict=True)]
        self._places = [row_places(m, count) for m, count in zip(members, counts, strict=True)]
        # The rows of each member.
        self._rows = [slice(start, end) for start, end in pairwise(accumulate(self.counts, initial=0))]
        clusters = clusters_of(members, [m.offset for m in members]) if arena.decode.may_share(self.group) else []
        path = arena.decode.choose(self.group, self.sizes, clusters, self.counts)
        self._runs = [m.sequence.slab_runs(self.group, size) for m, size in zip(members, self.sizes, strict=True)]
        pieces = pieces_of(self._runs, clusters if path in ("shared", "kernel") else [])
        self.path = "kernel_rows" if path == "kernel" else "rows"
        self._kernel: KernelAttention | None = None
        if path == "kernel":
            assert arena.decode.launch is not None, "the kernel of a device without one is trusted"
            layer = members[0].place.layer
            self._kernel = KernelAttention(arena.spec, layer, arena.decode.launch, pieces, self.counts, self.sees, self.is_beside)
            return
        loads = self._divide(pieces, arena.decode.costs_of(self.group, self.kv_heads), min(arena.decode.streams, MOST_STREAMS))
        self._readings = Readings(loads, pieces, self.kv_heads, self.counts)
        self._masks: dict[int, mx.array | None] = {}

    def size_of(self, member: PooledLayer, count: int) -> int:
        """Tokens of its table that a member reads."""
        raise NotImplementedError

    def write(self, index: int, keys: mx.array, values: mx.array) -> View:
        """Take keys and values [rows, kv_heads, 1, dim] of the group's layer `index`; returns them as they are held."""
        raise NotImplementedError

    def new_views(self, member: int, new: View, heads: slice) -> list[View]:
        """What a member reads beside its table; `new` is what write() returned."""
        raise NotImplementedError

    def sees(self, member: int) -> np.ndarray[Any, Any]:
        """What each row of a member attends to of the last tokens that it reads: [rows, tokens]. All see those before them."""
        raise NotImplementedError

    def commit(self, members: Sequence[PooledLayer], new: View | None, kept: Sequence[int]) -> None:
        """Keep the first kept[i] rows of each member in one layer, and none of the others."""
        raise NotImplementedError

    def attend(self, index: int, queries: mx.array, new: View, scale: float, sinks: mx.array | None) -> mx.array:
        """Attention of queries [rows, heads, 1, dim] in the group's layer `index`, after its write()."""
        if self._kernel is not None:
            return self._kernel.attend(index, queries, scale, sinks, new if self.is_beside else None)
        rows, heads, _, _ = queries.shape
        grouped = group_queries(queries, self.kv_heads, scale)
        sinks = None if sinks is None else sinks.reshape(self.kv_heads, -1)
        out = self._readings.attend(lambda reading: self._read(reading, index, grouped, new, sinks))
        return out.reshape(rows, heads, 1, -1)

    def _read(self, reading: Reading, index: int, grouped: mx.array, new: View, sinks: mx.array | None) -> mx.array:
        """Attention of one share: [its rows, its kv heads, group, dim]."""
        members, queries_of, heads, _, shared, own = reading
        first, last = heads.start, heads.stop
        mine = grouped[queries_of]
        sinks = None if sinks is None else sinks[heads]
        tails = [
            [slab.read(index, start, count, first, last) for slab, start, count in runs] + self.new_views(i, new, heads)
            for i, runs in zip(members, own, strict=True)
        ]
        keys, values = tails[0][0]
        if self.has_kernel and not shared and len(tails[0]) == 1 and isinstance(keys, mx.array) and isinstance(values, mx.array):
            return attend_causally(mine, keys, values, sinks)
        masks = [self._mask_of(i, mine.shape[2]) for i in members]
        if shared:
            together = [slab.read(index, start, count, first, last) for slab, start, count in shared]
            return attend_cluster(mine, together, tails, sinks, [self.counts[i] for i in members], masks)
        return attend_rows(mine, tails[0], sinks, masks[0])

    def _mask_of(self, member: int, group: int) -> mx.array | None:
        """sees() for each query head of a kv head, [rows * group, tokens]; None: all rows see everything."""
        if member not in self._masks:
            seen = self.sees(member)
            self._masks[member] = None if seen.all() else mx.array(np.repeat(seen, group, axis=0))
        return self._masks[member]

    def _divide(self, pieces: Mapping[tuple[int, ...], Pieces], costs: PathCosts, streams: int) -> list[list[Share]]:
        """Each row costs what a member does that reads alone in a decode step."""
        shares = [
            Share(members, sum(self.counts[i] * costs.of_ragged([self.sizes[i]]) for i in members), (0, self.kv_heads))
            for members in pieces
        ]
        if streams == 1 or sum(share.cost for share in shares) < PARALLEL_SECONDS:
            return [shares]
        return divide(shares, streams)


class FullRows(RowStep):
    """Rows of full layers. All are written at once and read where they lie."""

    def __init__(self, members: Sequence[PooledLayer], counts: Sequence[int]) -> None:
        super().__init__(members, counts)
        self.has_kernel = device() != "cpu"
        self._targets = _targets(
            (runs, {place: rows.start + j for j, place in enumerate(places)})
            for runs, rows, places in zip(self._runs, self._rows, self._places, strict=True)
        )

    def size_of(self, member: PooledLayer, count: int) -> int:
        return member.offset + count

    def write(self, index: int, keys: mx.array, values: mx.array) -> View:
        _put(self._targets, index, (keys, values))
        return keys, values

    def new_views(self, member: int, new: View, heads: slice) -> list[View]:
        return []

    def sees(self, member: int) -> np.ndarray[Any, Any]:
        return _until_itself(self.counts[member])

    def commit(self, members: Sequence[PooledLayer], new: View | None, kept: Sequence[int]) -> None:
        for member, count in zip(members, kept, strict=True):
            member.offset += count
            member.sequence.cut(self.group, member.size())


class RingRows(RowStep):
    """Rows of windows. They are read beside the ring, and those that are kept go into it at last."""

    is_beside = True

    def __init__(self, members: Sequence[PooledLayer], counts: Sequence[int]) -> None:
        super().__init__(members, counts)
        self._forms = members[0].forms
        self._keeps: tuple[list[int], list[Target]] = ([], [])

    def size_of(self, member: PooledLayer, count: int) -> int:
        return member.size()

    def write(self, index: int, keys: mx.array, values: mx.array) -> View:
        return in_form(keys, self._forms[0]), in_form(values, self._forms[1])

    def new_views(self, member: int, new: View, heads: slice) -> list[View]:
        where = (self._rows[member], heads)
        keys, values = (each(lambda part: part.swapaxes(0, 2), part_of(rows, where)) for rows in new)
        return [(keys, values)]

    def sees(self, member: int) -> np.ndarray[Any, Any]:
        """A row does not see what it and the rows before it have taken the places of."""
        places, size = self._places[member], self.sizes[member]
        old, new = np.ones((len(places), size), bool), _until_itself(len(places))
        last: dict[int, int] = {}
        for row, place in enumerate(places):
            if place < size:
                old[row:, place] = False
            if place in last:
                new[row:, last[place]] = False
            last[place] = row
        return new if old.all() else np.concatenate([old, new], axis=1)

    def commit(self, members: Sequence[PooledLayer], new: View | None, kept: Sequence[int]) -> None:
        if any(kept):
            assert new is not None, "rows are kept that were not computed"
            _put(self._kept(members, kept), members[0].place.index, new)
        for member, count in zip(members, kept, strict=True):
            for _ in range(count):
                member.advance()
            member.sequence.cut(self.group, member.size())

    def _kept(self, members: Sequence[PooledLayer], kept: Sequence[int]) -> list[Target]:
        """Where the rows that are kept go, worked out once for the layers of the group."""
        if self._keeps[0] != list(kept):
            # Of several rows that go to one place the last one stays.
            last = [
                {place: rows.start + j for j, place in enumerate(places[:count])}
                for rows, places, count in zip(self._rows, self._places, kept, strict=True)
            ]
            sizes = [max(size, max(rows, default=-1) + 1) for size, rows in zip(self.sizes, last, strict=True)]
            runs = [m.sequence.slab_runs(self.group, size) for m, size in zip(members, sizes, strict=True)]
            self._keeps = list(kept), _targets(zip(runs, last, strict=True))
        return self._keeps[1]


def _until_itself(count: int) -> np.ndarray[Any, Any]:
    return np.tril(np.ones((count, count), bool))


def _targets(members: Iterable[tuple[list[SlabRun], dict[int, int]]]) -> list[Target]:
    """Where rows go: for each member where its tokens lie, and the row that goes to each place."""
    found: dict[int, tuple[Slab, list[tuple[int, int]]]] = {}
    for runs, rows in members:
        base = 0
        for slab, start, count in runs:
            pairs = found.setdefault(id(slab), (slab, []))[1]
            pairs += [(row, start + place - base) for place, row in rows.items() if base <= place < base + count]
            base += count
    return [target for slab, pairs in found.values() for target in _targets_in(slab, sorted(pairs))]


def _targets_in(slab: Slab, pairs: list[tuple[int, int]]) -> list[Target]:
    """Targets of pairs of a row and its token in the slab."""
    stretches = [list(pairs) for _, pairs in groupby(enumerate(pairs), lambda pair: (pair[1][0] - pair[0], pair[1][1] - pair[0]))]
    if len(stretches) <= MOST_SLICES:
        firsts = [(stretch[0][1], len(stretch)) for stretch in stretches]
        return [Target(slab, slice(row, row + count), token, None) for (row, token), count in firsts]
    rows, tokens = zip(*pairs, strict=True)
    return [Target(slab, mx.array(rows), 0, mx.array(tokens))]


def _put(targets: list[Target], index: int, new: View) -> None:
    """Put rows [rows, kv_heads, 1, dim] of keys and values where they go in the group's layer `index`."""
    for slab, rows, start, places in targets:
        mine = (each(lambda part: part.swapaxes(0, 2), part_of(part, (rows,))) for part in new)
        if places is None:
            slab.write(index, start, *mine)
        else:
            slab.scatter(index, places, *mine)
