"""One step of one layer group: where each member's next tokens go and what they read, computed by
the first layer of the group.

In a plain step each member writes its next token. In a tentative step members write several tokens
each, of which commit() keeps the first ones: full layers write all of them and cut off the others,
windows write nothing before commit(), as a ring cannot take a token back. One token of a member is
a row of the step. Holds positions, never views of a slab. Owned by the generation thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, groupby, pairwise
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from ..errors import PoolExhaustedError
from ..spec import BLOCK_TOKENS, Form, WindowLayer, blocks_for
from .arena import KVArena, Place
from .attention import (
    MergedAttention,
    attend_causally,
    attend_cluster,
    attend_grouped,
    softmax,
)
from .decode_policy import device
from .kernel_attention import KernelAttention
from .quantised import (
    KEYS_AND_VALUES,
    Attended,
    Roles,
    Rows,
    View,
    concatenated,
    each,
    in_form,
    part_of,
)
from .sequence import SequenceCache
from .shares import (
    MOST_STREAMS,
    Cluster,
    Pieces,
    Share,
    Shares,
    divide,
    find_clusters,
    merged,
    pieces_of,
)
from .slab import Slab, SlabRun

# Keys times kv heads below which a second stream does not pay: about 0.4 ms. Not measured, as
# whether its core is free changes from second to second.
PARALLEL_KEYS = 4000
# What reading costs a row in addition to its keys, in keys.
ROW_KEYS = 100
# The offset between block ids of two pools; larger than any id.
POOL_STRIDE = 2**40


def names_of(cache: Member) -> tuple[str, str]:
    """FullLayer.names of a pooled cache of one sequence: layers of one group may differ in them."""
    leaf: Any = cache.sequence.arena.spec.leaves[cache.layer]
    names: tuple[str, str] = leaf.names
    return names


def by_name(cache: Any, names: tuple[str, str], name: str) -> Any:
    """What a model reads of a cache under the name that its own cache class has for it, by
    FullLayer.names. Raises AttributeError.
    """
    write, size = names
    if name == write:
        return cache.update_and_fetch
    if name == size:
        return cache.offset
    raise AttributeError(f"{type(cache).__name__!r} object has no attribute {name!r}")


class Member(SequenceCache):
    """A layer cache that a step writes and reads.

    offset: the position of its next token. _idx: where in its ring that goes, by mlx-lm's count; 0
    without a ring.
    """

    place: Place
    offset: int
    _idx: int = 0
    forms: tuple[Form | None, ...]

    def size(self) -> int:
        """Places of its table that are read."""
        raise NotImplementedError

    def size_after(self, count: int) -> int:
        """size() after `count` more tokens are written, one by one."""
        raise NotImplementedError

    def next_place(self) -> int:
        """Where in its table the next token goes, in tokens."""
        raise NotImplementedError

    def advance(self, count: int) -> None:
        """Count the next tokens as written, one by one, as a batch does it."""
        self.offset += count


class Target(NamedTuple):
    """Rows that go into one slab, None for all: one to the token `start`, several by the indices
    `places`.
    """

    slab: Slab
    rows: tuple[slice | mx.array] | None
    start: int
    places: tuple[mx.array, ...] | None


def step_of(members: Sequence[Member], counts: Sequence[int] | None = None) -> Step:
    """The step in which each member writes its next token; the layers of a group get the same one.
    With counts the tentative step in which counts[i] next tokens of each member are computed, 1 or
    more, of which commit() keeps some.

    Takes blocks and copies shared ones for all members before anything is written. Raises
    PoolExhaustedError and takes none.
    """
    arena, group = members[0].sequence.arena, members[0].place.group
    found: Step | None = arena.steps[group]
    key = _key(arena, group, members, counts)
    if found is not None and found.following == key:
        # Forgets steps if slabs have come or gone.
        arena.sync()
        found = arena.steps[group]
        if found is not None:
            found.move_on()
    if found is None or found.key != key:
        own_counts = [1] * len(members) if counts is None else counts
        try:
            destinations = [
                _destination(member, count)
                for member, count in zip(members, own_counts, strict=True)
            ]
        except PoolExhaustedError:
            for member in members:
                member.sequence.cut(group, member.size())
            raise
        is_late = counts is not None and isinstance(members[0].place.layer, WindowLayer)
        cls = WindowStep if is_late else Step
        found = arena.steps[group] = cls(members, counts, destinations)
    return found


def _key(
    arena: KVArena, group: int, members: Sequence[Member], counts: Sequence[int] | None
) -> list[Any]:
    """What a step depends on. A table is equal to itself alone."""
    of_members = [
        (
            m.offset,
            m._idx,
            m.sequence.tables[group],
            m.sequence.tables[group].version,
            m.sequence.pool.groups[group].share_epoch,
        )
        for m in members
    ]
    return [arena.decode.path, arena.decode.streams, counts, of_members]


def missing_blocks(member: Member, count: int) -> int:
    """How many blocks a tentative step of a member takes that are not reserved for its sequence."""
    sequence, group = member.sequence, member.place.group
    taken = sum(
        sequence.num_taken(group, start, end)
        for start, end in _stretches(_next_places(member, count))
    )
    return max(0, taken - sequence.tables[group].reserved)


def _next_places(member: Member, count: int) -> list[int]:
    """Where in its table the next tokens of a member go, one by one; in a ring several may go to
    the same place.
    """
    layer, places = member.place.layer, [member.next_place()]
    while len(places) < count:
        following = places[-1] + 1
        places.append(
            layer.keep
            if isinstance(layer, WindowLayer) and following == layer.max_size
            else following
        )
    return places


def _stretches(places: list[int]) -> list[tuple[int, int]]:
    """Places in a table as intervals [start, end), no two of them with a block in common."""
    blocks = [
        sorted(together)
        for _, together in groupby(sorted(set(places)), lambda place: place // BLOCK_TOKENS)
    ]
    return [(together[0], together[-1] + 1) for together in blocks]


class Destination(NamedTuple):
    """Where the rows of one member go: the place of each in its table, and the slab and the
    token in it at that place.
    """

    places: list[int]
    spots: list[tuple[Slab, int]]


def _destination(member: Member, count: int) -> Destination:
    """Takes the blocks of a member's next tokens and copies shared ones."""
    places, spots = _next_places(member, count), dict[int, tuple[Slab, int]]()
    for start, end in [(places[0], places[0] + 1)] if count == 1 else _stretches(places):
        for slab, first, length in member.sequence.writable(member.place.group, start, end):
            for token in range(first, first + length):
                spots[start] = slab, token
                start += 1
    return Destination(places, [spots[place] for place in places])


class Step:
    """Where the rows of each member go, and what each of them reads, on which path and on which
    stream.

    key:             what the step depends on.
    following:       the key() of the step after this one, if that writes into the same blocks: this
                     one becomes it by move_on(). None if there is more to do.
    counts:          rows of each member.
    is_tentative:    whether commit() says which rows are kept.
    is_ring:         whether the places of members wrap.
    path:            what the attention is counted as: the path of a plain step; of a tentative one
                     rows, or kernel_rows.
    reads_new_rows:  whether the new rows are read from what write() returned, as they are in no
                     slab.
    """

    reads_new_rows = False

    def __init__(
        self,
        members: Sequence[Member],
        counts: Sequence[int] | None,
        destinations: list[Destination],
    ) -> None:
        arena, self.group = members[0].sequence.arena, members[0].place.group
        self.key = _key(arena, self.group, members, counts)
        self._leaf, self._kind = members[0].layer, type(members[0])
        self.is_tentative = counts is not None
        self.counts = [1] * len(members) if counts is None else list(counts)
        self.layer = members[0].place.layer
        self.is_ring = isinstance(self.layer, WindowLayer)
        self._forms = members[0].forms
        self._is_quantised = any(self._forms)
        # The rows of each member.
        self._rows = [
            slice(start, end) for start, end in pairwise(accumulate(self.counts, initial=0))
        ]
        self._destinations = destinations
        self.targets = [] if self.reads_new_rows else self._targets_of(self.counts)
        self.sizes = [
            self._size_of(m, count) for m, count in zip(members, self.counts, strict=True)
        ]
        # On CPU mlx's own attention is the same two products, with more operations around them and,
        # for 16-bit numbers, one pass over the keys for each query head. Elsewhere it has no mask
        # for rows that are read next to a ring.
        self._uses_products = self.reads_new_rows or device() == "cpu"
        # mlx multiplies picked matrices of float32 only on a CPU, and copies none there.
        types = {arena.spec.dtype_of(array) for array in self.layer.arrays}
        self._may_merge = (
            device() == "cpu"
            and types == {"float32"}
            and not (self.is_tentative or self._is_quantised or self.is_ring)
        )
        self._masks: dict[tuple[int, int], mx.array | None] = {}
        # The attention of merged shares, which all layers of this step use, by members.
        self._readings: dict[tuple[int, ...], MergedAttention] = {}
        self._offsets: mx.array | None = None
        self._starts = [m.offset for m in members]
        self._kernel: KernelAttention | None = None
        # The runs of each member that grow with it.
        self._tails: list[list[SlabRun]] = [[] for _ in members]
        self._set_path(arena, members, None if counts is None else self.counts)
        self.following = None if self.is_tentative or self._kernel is not None else self._next_key()

    def _set_path(
        self, arena: KVArena, members: Sequence[Member], counts: list[int] | None
    ) -> None:
        has_kernel = self.group in arena.capabilities.kernels
        clusters = _clusters_of(members) if arena.decode.may_share(self.group, has_kernel) else []
        path = arena.decode.choose(self.group, self.sizes, clusters, counts, has_kernel)
        runs = [
            m.sequence.slab_runs(self.group, size)
            for m, size in zip(members, self.sizes, strict=True)
        ]
        self.path = ("kernel_rows" if path == "kernel" else "rows") if self.is_tentative else path
        pieces = pieces_of(runs, clusters if path in ("shared", "kernel") else [])
        if path == "kernel":
            launch = arena.decode.launch
            assert launch is not None, "the kernel of a device without one is trusted"
            sees = self._seen if self.is_tentative else None
            self._kernel = KernelAttention(
                arena.spec, self.layer, launch, pieces, self.counts, sees, self.reads_new_rows
            )
            return
        for together, (_, own) in pieces.items():
            for i, tail in zip(together, own, strict=True):
                self._tails[i] = tail
        self._shares = Shares(self._divided(pieces, arena.decode.streams))

    def _next_key(self) -> list[Any] | None:
        """The key after each member has written one token; None at the end of a block or ring."""
        most = getattr(self.layer, "max_size", None)
        nexts = [places[0] + 1 for places, _ in self._destinations]
        if any(place % BLOCK_TOKENS == 0 or place == most for place in nexts):
            return None
        *policy, of_members = self.key
        return [
            *policy,
            [
                (offset + 1, place * self.is_ring, *table)
                for (offset, _, *table), place in zip(of_members, nexts, strict=True)
            ],
        ]

    def may_move_on(self, caches: Sequence[list[Any]]) -> bool:
        """Return whether the next token of each of these sequences is the step after this one: they
        need no blocks. caches: the layer caches of each.
        """
        # A model with lists of caches has others at these places, or none.
        if self.following is None or self._leaf >= len(caches[0]):
            return False
        members = [own[self._leaf] for own in caches]
        if {type(each) for each in members} != {self._kind}:
            return False
        return self.following == _key(members[0].sequence.arena, self.group, members, None)

    def move_on(self) -> None:
        """Become the step of the next token of each member."""
        assert self.following is not None, "the next token of a member needs another block"
        self.key = self.following
        self._destinations = [
            Destination([places[0] + 1], [(spots[0][0], spots[0][1] + 1)])
            for places, spots in self._destinations
        ]
        self.targets = [
            Target(slab, rows, start + 1, places and (*places[:2], places[2] + 1))
            for slab, rows, start, places in self.targets
        ]
        most = getattr(self.layer, "max_size", None)
        for i, tail in enumerate(self._tails):
            if self.sizes[i] != most:
                slab, start, count = tail[-1]
                tail[-1] = slab, start, count + 1
                self.sizes[i] += 1
        self._starts = [start + 1 for start in self._starts]
        self._offsets = None
        self._readings = {}
        self.following = self._next_key()

    @property
    def offsets(self) -> mx.array:
        """The position of each row in its sequence."""
        if self._offsets is None:
            starts = zip(self._starts, self.counts, strict=True)
            self._offsets = mx.array([start + j for start, count in starts for j in range(count)])
        return self._offsets

    def write(self, index: int, new: View) -> View | None:
        """Put `new` rows [rows, heads, 1, dim] of each array of the group's layer `index` where
        they belong.

        Returns them, as the slabs hold them, if they are read from there.
        """
        put_rows(self.targets, index, new)
        return None

    def _as_held(self, new: View) -> View:
        return tuple(map(in_form, new, self._forms))

    def attend(
        self,
        index: int,
        queries: mx.array,
        new: View | None,
        scale: float,
        sinks: mx.array | None,
        roles: Roles = KEYS_AND_VALUES,
    ) -> mx.array:
        """Attention of queries [rows, heads, 1, dim] in the group's layer `index`; `new` is what
        write() returned.
        """
        if self._kernel is not None:
            assert roles == KEYS_AND_VALUES, f"the kernel is trusted with {roles}"
            return self._kernel.attend(index, queries, scale, sinks, new)
        rows, heads, _, _ = queries.shape
        kv_heads = self.layer.kv_heads
        grouped = (queries * scale).reshape(rows, kv_heads, heads // kv_heads, -1)
        sinks = None if sinks is None else sinks.reshape(kv_heads, -1)
        single = self._shares.single
        out = (
            self._shares.attend(self._read, index, grouped, new, sinks, roles)
            if single is None
            else self._read(single, index, grouped, new, sinks, roles)
        )
        return out.reshape(rows, heads, 1, -1)

    def commit(self, members: Sequence[Member], new: View | None, kept: Sequence[int]) -> None:
        """Keep the first kept[i] rows of each member in one layer, and none of the others; `new`
        is what write() returned.
        """
        for member, count in zip(members, kept, strict=True):
            member.advance(count)
            member.sequence.cut(self.group, member.size())

    def _read(
        self,
        share: Share,
        index: int,
        grouped: mx.array,
        new: View | None,
        sinks: mx.array | None,
        roles: Roles,
    ) -> mx.array:
        """Attention of one share: [its rows, its kv heads, group, dim]."""
        mine, heads = grouped[share.queries], share.queries[1]
        sinks = None if sinks is None else sinks[heads]
        if share.is_one_run and roles.keys == 1 and not (self._is_quantised or new):
            # What most members read in most steps, with the fewest calls.
            slab, start, count = share.pieces[1][0][0]
            held: Any = slab.layers[index]
            if share.parts and sinks is None:
                reading = self._readings.get(share.members) or self._reading_of(share)
                return reading.attend(mine, held, roles.values)
            where = slice(None), heads, slice(start, start + count)
            keys, values = held[0][where], held[roles.values][where]
            if not self._uses_products:
                return attend_causally(mine, keys, values, sinks)
            if sinks is None and not self.is_tentative:
                weights = softmax(mine @ keys.swapaxes(-1, -2)).astype(values.dtype)
                out: mx.array = (weights @ values).astype(mine.dtype)
                return out
        if share.parts:
            return concatenated(
                [self._read(each, index, grouped, new, sinks, roles) for each in share.parts]
            )
        members, (first, last), (shared, own) = share.members, share.heads, share.pieces
        tails = [
            [
                slab.read_attended(index, start, count, first, last, roles)
                for slab, start, count in runs
            ]
            for runs in own
        ]
        if new is not None:
            for i, tail in zip(members, tails, strict=True):
                tail.append(self._new_rows(i, new, heads, roles))
        masks = [self._mask_of(i, mine.shape[2]) for i in members] if self.is_tentative else None
        if mine.shape[0] == 1:
            return attend_grouped(mine, tails[0], sinks, None if masks is None else masks[0])
        together = [
            slab.read_attended(index, start, count, first, last, roles)
            for slab, start, count in shared
        ]
        return attend_cluster(
            mine, together, tails, sinks, [self.counts[i] for i in members], masks
        )

    def _reading_of(self, share: Share) -> MergedAttention:
        runs = [run for (run,) in share.pieces[1]]
        slabs, starts, counts = zip(*runs, strict=True)
        dims = [array.dim for array in self.layer.arrays]
        found = self._readings[share.members] = MergedAttention(
            starts, counts, slabs[0].blocks, self.layer.kv_heads, dims
        )
        return found

    def _new_rows(self, member: int, new: View, heads: slice, roles: Roles) -> Attended:
        where = (self._rows[member], heads)
        read = new[: roles.num_arrays]
        return roles.attended(tuple([_as_tokens(part_of(rows, where)) for rows in read]))

    def _size_of(self, member: Member, count: int) -> int:
        """Tokens of its table that a member reads."""
        return member.size_after(count)

    def _seen(self, member: int) -> np.ndarray[Any, Any]:
        """What each row of a member attends to of the last tokens that it reads: [rows, tokens].

        All see those before them.
        """
        return _causal(self.counts[member])

    def _mask_of(self, member: int, group: int) -> mx.array | None:
        """_seen() for each query head of a kv head, [rows * group, tokens]; None if all rows see
        everything.
        """
        if (member, group) not in self._masks:
            seen = self._seen(member)
            self._masks[member, group] = (
                None if seen.all() else mx.array(np.repeat(seen, group, axis=0))
            )
        return self._masks[member, group]

    def _targets_of(self, kept: Sequence[int]) -> list[Target]:
        """Where the first kept[i] rows of each member go.

        Of several rows that go to one place the last one stays.
        """
        found: dict[int, tuple[Slab, dict[int, int]]] = {}
        for rows, (_, spots), count in zip(self._rows, self._destinations, kept, strict=True):
            for row, (slab, token) in enumerate(spots[:count], rows.start):
                found.setdefault(id(slab), (slab, {}))[1][token] = row
        num_rows = self._rows[-1].stop
        targets = []
        for slab, own in found.values():
            tokens = sorted(own, key=own.__getitem__)
            places = slab.indices(tokens) if tokens[1:] else None
            of_slab = _index_of(sorted(own.values()), num_rows)
            targets.append(Target(slab, of_slab, tokens[0], places))
        return targets

    def _divided(
        self, pieces: Mapping[tuple[int, ...], Pieces], streams: int
    ) -> Sequence[Sequence[Share]]:
        """The shares of each stream. A row costs as much with others as alone."""
        heads, shares = (0, self.layer.kv_heads), []
        for members, runs in pieces.items():
            rows, cost = list[int](), 0
            for i in members:
                rows += range(self._rows[i].start, self._rows[i].stop)
                cost += self.counts[i] * (ROW_KEYS + self.sizes[i])
            shares.append(Share(members, cost, heads, rows, runs))
        streams = min(streams, MOST_STREAMS)
        keys = sum(share.cost for share in shares) * self.layer.kv_heads
        loads = [shares] if streams == 1 or keys < PARALLEL_KEYS else divide(shares, streams)
        if not self._may_merge:
            return loads
        loads = [merged(load) for load in loads]
        for share in (share for load in loads for share in load if share.parts):
            for ((slab, start, count),) in share.pieces[1]:
                # Another sequence may have left infinities there.
                slab.clear(start + count, start + blocks_for(count) * BLOCK_TOKENS)
        return loads


class WindowStep(Step):
    """A tentative step of windows: its rows are read next to the ring, and those that are kept
    go into it at last.
    """

    reads_new_rows = True
    # The counts that were kept in another layer of the group, and where their rows go.
    _kept: tuple[list[int], list[Target]] = ([], [])

    def write(self, index: int, new: View) -> View | None:
        return self._as_held(new)

    def commit(self, members: Sequence[Member], new: View | None, kept: Sequence[int]) -> None:
        if any(kept):
            assert new is not None, "rows are kept that were not computed"
            if self._kept[0] != list(kept):
                self._kept = list(kept), self._targets_of(kept)
            put_rows(self._kept[1], members[0].place.index, new)
        super().commit(members, new, kept)

    def _size_of(self, member: Member, count: int) -> int:
        return member.size()

    def _seen(self, member: int) -> np.ndarray[Any, Any]:
        """Masks the places of the ring that a row or one before it overwrites."""
        places, size = self._destinations[member].places, self.sizes[member]
        old, new = np.ones((len(places), size), bool), _causal(len(places))
        last: dict[int, int] = {}
        for row, place in enumerate(places):
            if place < size:
                old[row:, place] = False
            if place in last:
                new[row:, last[place]] = False
            last[place] = row
        return new if old.all() else np.concatenate([old, new], axis=1)


def _clusters_of(members: Sequence[Member]) -> list[Cluster]:
    """The members that begin with the same full blocks.

    Windows keep writing in every block of their ring, so that they share nothing for long.
    """
    if len(members) == 1 or isinstance(members[0].place.layer, WindowLayer):
        return []
    # Ids of several pools overlap: those of the second pool are moved after those of the first.
    pools = {pool: i for i, pool in enumerate(dict.fromkeys(m.sequence.pool for m in members))}
    starts = [pools[m.sequence.pool] * POOL_STRIDE for m in members]
    full = [m.sequence.tables[m.place.group].ids[: m.offset // BLOCK_TOKENS] for m in members]
    return find_clusters(
        [
            [start + i for i in ids] if start else ids
            for start, ids in zip(starts, full, strict=True)
        ]
    )


def _causal(count: int) -> np.ndarray[Any, Any]:
    return np.tril(np.ones((count, count), bool))


def _index_of(rows: list[int], num_rows: int) -> tuple[slice | mx.array] | None:
    """Ascending rows as an index of the first axis; None for all."""
    if len(rows) == num_rows:
        return None
    return (
        slice(rows[0], rows[-1] + 1) if rows[-1] - rows[0] == len(rows) - 1 else mx.array(rows),
    )


def put_rows(targets: list[Target], index: int, new: View) -> None:
    """Put rows [rows, heads, 1, dim] of each array where they go in the group's layer `index`."""
    is_plain = not targets or targets[0].slab.is_plain
    if targets[1:] and not is_plain:
        # One target quantises what it puts. For several the rows are quantised once.
        new = targets[0].slab.as_written(*new)
    for slab, rows, start, places in targets:
        view: Any = new
        if rows is not None:
            # In each layer of each step: a call for each array would be felt.
            view = (
                [given[rows] for given in view]
                if is_plain
                else [part_of(given, rows) for given in new]
            )
        if places is None:
            slab.write(index, start, *view)
        else:
            slab.scatter(index, places, *view)


def _as_tokens(rows: Rows) -> Rows:
    """Rows [n, heads, 1, dim] as the tokens of one sequence, [1, heads, n, dim]."""
    return (
        rows.swapaxes(0, 2)
        if isinstance(rows, mx.array)
        else each(lambda array: array.swapaxes(0, 2), rows)
    )
