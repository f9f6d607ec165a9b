"""PooledKVCache and PooledRotatingKVCache: stand in for mlx-lm's KVCache and RotatingKVCache, keys
and values in blocks, and the further arrays that a layer may have.

A layer cache knows its place in the pool and where it is in its sequence. It does not know prefixes
or requests. Owned by the generation thread.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import BatchKVCache, BatchRotatingKVCache, KVCache, RotatingKVCache

from ..errors import SpecError
from ..mlx_lm_compat import saved_as
from ..spec import Form, WindowLayer
from .attention import attend_quantised, attend_runs
from .batch_cache import PooledBatchCache, need_one_form
from .quantised import (
    Quantised,
    Roles,
    Rows,
    View,
    arrays_of,
    as_rows,
    columns,
    concatenated,
    dense,
    each,
    in_form,
    joined,
    own_copies,
    tokens,
)
from .sequence import SequenceBlocks, join
from .shards import placeholder_keys, send_now
from .step import Member, by_name, names_of


class PooledLayer(Member):
    """What all layer caches have in common. Subclasses say where tokens go (write) and how many
    places are read (size).

    forms:         how its blocks hold each array; None where it is as the model computes it.
    first_held:    tokens before it are in no block: the state that was assigned lacks them.
    _attended:     what the last tokens attended to, if that is more than is held: layers that share
                   this cache read it in the same pass.
    _stock_batch:  mlx-lm's class of a batch.
    """

    first_held = 0
    _attended: View | None = None
    _stock_batch: Any

    def __init__(self, sequence: SequenceBlocks, layer: int) -> None:
        self.sequence = sequence
        self.place = sequence.arena.places[layer]
        self.forms = sequence.arena.spec.forms(self.place.layer)
        self.layer = layer
        self.offset = 0
        sequence.add_layer(self)

    def __getattr__(self, name: str) -> Any:
        if "sequence" not in self.__dict__ or "layer" not in self.__dict__:
            raise AttributeError(name)
        return by_name(self, names_of(self), name)

    def _on(self, sequence: SequenceBlocks) -> Any:
        copy = super()._on(sequence)
        sequence.add_layer(copy)
        return copy

    def update_and_fetch(self, *rows: mx.array) -> View:
        """Append rows [1, heads, n, dim] of each of the layer's arrays: keys, values, then others.
        Returns those that these n tokens attend to.

        Raises SpecError if these are not the arrays of the spec, and ValueError for a batch.
        """
        if rows[0].shape[0] != 1:
            raise ValueError(
                f"A pooled cache holds one sequence and was given a batch of {rows[0].shape[0]}. "
                "Make one cache for each sequence and merge() them, as batch_generate does."
            )
        self.write(*rows)
        return self.fetch()

    def write(self, *rows: mx.array) -> None:
        """The first half of update_and_fetch(): makes no view of a slab."""
        arena = self.sequence.arena
        if self.layer == arena.first:
            arena.check_dtype(rows[0])
            if rows[0].shape[2] > 1 or arena.capabilities.synchronous:
                # A decode step in flight still reads the slabs; writing now would copy them.
                mx.synchronize()
        if self.layer in arena.unread and rows[0].shape[2] == 1:
            arena.evaluate_writes(self.place)
        if self.offset == 0:
            self._check_arrays(rows)
        self._write(*rows)

    def _write(self, *rows: mx.array) -> None:
        raise NotImplementedError

    def _check_arrays(self, rows: View) -> None:
        """Raises SpecError unless rows are those of the layer's arrays.

        Sequences begin here, the first ones when a model is loaded: mlx would repeat heads and
        convert types where the spec is wrong.
        """
        spec, layer = self.sequence.arena.spec, self.place.layer
        needed = [(a.heads, a.dim, spec.dtype_of(a)) for a in layer.arrays]
        found = [(*given.shape[1::2], str(given.dtype).rpartition(".")[2]) for given in rows]
        # Keys and values of some layers may have another type than those of the first.
        own = len(needed) - len(layer.more)
        if [figures[:2] for figures in found] + found[own:] != [
            figures[:2] for figures in needed
        ] + needed[own:]:
            raise SpecError(
                f"{spec.model_id}, layer cache {self.layer}: the spec has the arrays "
                f"{', '.join(a.name for a in layer.arrays)} of (heads, dim, dtype) {needed}, and "
                f"the model's cache writes {found}. Correct the spec, or provide a cache class "
                "that writes all of these arrays."
            )

    def next_places(self, count: int) -> tuple[int, int]:
        """Where in its table the next tokens go: within [start, end)."""
        start = self.next_place()
        return start, start + count

    def missing_blocks(self, count: int) -> int:
        """How many blocks the next tokens take that are not reserved for the sequence."""
        return self.sequence.missing_blocks(self.place.group, *self.next_places(count))

    def trim(self, n: int) -> int:
        """Remove the last `n` tokens, or all if there are fewer.

        Returns how many; whole blocks return to the pool.
        """
        n = int(super().trim(n))  # type: ignore[misc]
        self.sequence.cut(self.place.group, self.size())
        return n

    def attend(
        self, queries: mx.array, keys: Rows, values: Rows, scale: float, mask: Any, sinks: Any
    ) -> mx.array:
        """Attention of queries [1, heads, n, dim]; keys and values are what update_and_fetch
        returned.
        """
        quantised = isinstance(keys, Quantised) or isinstance(values, Quantised)
        if quantised or (queries.shape[2] == 1 and mask is None):
            in_runs = len(self.sequence.slab_runs(self.place.group, self.size())) > 1
            views = (
                [(read[0], read[1]) for read in self.attended()] if in_runs else [(keys, values)]
            )
            if quantised:
                return attend_quantised(queries, views, scale, mask, sinks)
            if in_runs:
                return attend_runs(queries, views, scale, sinks)
        out: mx.array = scaled_dot_product_attention(
            queries, keys, values, None, scale=scale, mask=mask, sinks=sinks
        )
        return out

    def attend_parts(
        self,
        queries: Sequence[mx.array],
        scale: float,
        value: int = 0,
        chosen: Sequence[mx.array | None] | None = None,
    ) -> mx.array:
        """PooledBatchCache.attend_parts() of one sequence."""
        roles, views = Roles(len(queries), value), self.attended()
        if chosen is not None and chosen[0] is not None:
            views = [self.rows_at(chosen[0])]
        read = [roles.attended(view) for view in views]
        return attend_runs(concatenated(queries, -1), read, scale, None)

    def rows_at(self, places: mx.array) -> View:
        """Copies of the rows of each array at some positions [n], as the model computes them."""
        return tuple(
            dense(each(lambda held: mx.take(held, places, axis=2), rows)) for rows in self.fetch()
        )

    def views(self) -> list[View]:
        """The rows of each run, in the order in which they are stored."""
        return self.sequence.read(self.place, self.size())

    def attended(self) -> list[View]:
        """The rows that the last tokens attend to, in one piece or several."""
        return self.views() if self._attended is None else [self._attended]

    def fetch(self) -> View:
        """The rows [1, heads, n, dim] of each array that the last tokens attend to."""
        return join(self.attended())

    def keys_and_values(self) -> View:
        """The first two of fetch(), for layers that read those of this one."""
        return join(self.attended())[:2]

    @property
    def keys(self) -> Any:
        """As mlx-lm's class has them. To write keys and values, assign `state`.

        Models assign keys and values that they have read, which orders what mlx evaluates. Such an
        assignment writes nothing.
        """
        if self.sequence.arena.capabilities.is_stage and _is_model(sys._getframe(1)):
            return placeholder_keys()
        return None if self.empty() else self._saved(join(self.views())[0])

    @keys.setter
    def keys(self, given: Any) -> None:
        if not _is_model(sys._getframe(1)):
            self._assign(0, given)
        elif self.sequence.arena.capabilities.is_stage:
            send_now(given)

    @property
    def values(self) -> Any:
        return None if self.empty() else self._saved(join(self.views())[1])

    @values.setter
    def values(self, given: Any) -> None:
        if not _is_model(sys._getframe(1)):
            self._assign(1, given)

    def _assign(self, index: int, given: Any) -> None:
        """Write the rows of one array over those of all tokens that are read.

        Raises ValueError if the cache is empty.
        """
        self._attended = None
        if given is None or self.empty():
            raise ValueError(
                "This pooled cache is empty: keys and values that are assigned one after the "
                "other have no place in it yet. "
                "Assign its `state`, or call mlx_blockpool.from_stock()."
            )
        rows = list(join(self.views()))
        rows[index] = self._rows(given)
        self._write_over(rows, min(self.size(), rows[0].shape[2]))

    def _write_over(self, rows: Sequence[Any], size: int, start: int = 0) -> None:
        """Write the first `size` tokens of given rows of each array at token `start` of the table.

        Arrays are quantised if the blocks are; words stay as they are. Raises ValueError if they do
        not fit.
        """
        spec, arrays = self.sequence.arena.spec, self.place.layer.arrays
        if len(rows) != len(arrays):
            raise ValueError(
                f"This layer takes {', '.join(array.name for array in arrays)}, and was given "
                f"{len(rows)} arrays."
            )
        copies = [
            taken(
                array.name,
                self._rows(given),
                (1, array.heads, size, array.dim),
                getattr(mx, spec.dtype_of(array)),
                form,
            )
            for array, given, form in zip(arrays, rows, self.forms, strict=True)
        ]
        # A step in flight may read the blocks: writing now would have the slab copied.
        mx.synchronize()
        self.sequence.write(self.place, start, *copies)

    def empty(self) -> bool:
        return self.offset == 0

    @property
    def nbytes(self) -> int:
        """Bytes of this layer's blocks, shared ones included."""
        blocks = len(self.sequence.tables[self.place.group])
        return blocks * self.sequence.arena.spec.bytes_per_block_per_layer(self.place.layer)

    @classmethod
    def merge(cls, caches: list[Any]) -> Any:
        """One batch cache of several sequences, which stay as they are: the batch continues in
        forks of them.

        Ragged where the model was attached and all are pooled, else mlx-lm's padded one.
        """
        if not cls._is_ragged(caches):
            return cls._stock_batch.merge(caches)
        forks = [c.fork() for c in caches]
        for cache, fork in zip(caches, forks, strict=True):
            # Only the batch continues: it gets the blocks that were reserved for that.
            cache.sequence.hand_over(cache.place.group, fork.sequence)
        return cls.join(forks)

    @classmethod
    def join(cls, caches: list[Any]) -> Any:
        """merge() of caches of an attached model whose owner no longer uses them: the batch
        continues in them and copies nothing.
        """
        return PooledBatchCache(caches)

    @classmethod
    def _is_ragged(cls, caches: list[Any]) -> bool:
        wrong = next((c for c in caches if not isinstance(c, cls._stock)), None)
        if wrong is not None:
            raise ValueError(
                f"A batch of {cls._stock.__name__}s cannot hold a {type(wrong).__name__}."
            )
        pooled = [c for c in caches if isinstance(c, PooledLayer)]
        for cache in pooled:
            # mlx-lm's batch never reads an empty cache, whose blocks may have been released.
            cache.sequence.need_blocks()
        ragged = len(pooled) == len(caches) and all(
            cache.sequence.arena.capabilities.ragged for cache in pooled
        )
        need_one_form(pooled)
        if not ragged and any(any(cache.forms) or cache.place.layer.more for cache in pooled):
            raise ValueError(
                "A padded batch of mlx-lm's cannot hold quantised keys and values, nor further "
                "arrays. Attach the model, as open_pool() does, and make the caches of all "
                "sequences with mlx_blockpool.make_prompt_cache()."
            )
        return ragged

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> Any:
        """In a pool of these bits the cache itself, in one without any what mlx-lm's class
        makes; else raises ValueError.
        """
        own = self.sequence.arena.spec.bits
        if own is None:
            return super().to_quantized(group_size=group_size, bits=bits)  # type: ignore[misc]
        if (own.keys, own.values, own.group_size) != (bits, bits, group_size):
            raise ValueError(
                f"Keys are in {own.keys or 16} bits here and values in {own.values or 16}, in "
                f"groups of {own.group_size}. For "
                f"{bits} bits in groups of {group_size} open a pool with "
                f"PoolConfig(bits=KVBits({bits}, {bits}, {group_size}))."
            )
        return self

    @property
    def state(self) -> Any:
        """(keys, values, offset, ..) as mlx-lm's class has them, further arrays next to the values;
        dequantised if that class cannot hold words.

        Keys and values in several runs are gathered, and quantised ones dequantised, when they are
        read. Reading a state ends a pass.
        """
        self._attended = None
        if self.empty() or (len(self.views()) == 1 and not any(self.forms)):
            return self.held()
        return GatheredState(self.attended(), self._position(), self._saved)

    @state.setter
    def state(self, state: tuple[Any, ...]) -> None:
        self._take(*state)

    def held(self) -> tuple[Any, ...]:
        """The state with rows as the blocks hold them: another cache of the same forms takes them
        as they are.
        """
        self._attended = None
        self.sequence.need_blocks()
        rows = [None] * len(self.forms) if self.empty() else self.fetch()
        return *rows, *self._position()

    def _position(self) -> tuple[Any, ...]:
        """What follows the rows in a state."""
        raise NotImplementedError

    def _take(self, *state: Any) -> None:
        """Write a state over what it holds. Raises ValueError if it does not fit."""
        raise NotImplementedError

    @staticmethod
    def _saved(rows: Rows) -> Any:
        """Keys or values as mlx-lm's class has them."""
        return dense(rows)

    def _rows(self, given: Any) -> Rows:
        """The rows of keys or values that mlx-lm's class has. Rows of words stay as they are."""
        if not isinstance(given, mx.array | Quantised):
            raise ValueError(
                "This layer takes keys and values that are arrays, and was given a "
                f"{type(given).__name__}."
            )
        return given


@saved_as(KVCache)
class PooledKVCache(PooledLayer, KVCache):  # type: ignore[misc]
    """The keys and values of one layer of one sequence: [1, kv_heads, offset, dim]. Bit-equal to
    KVCache.

    Appending takes no copy and reading is a view as long as the sequence is one run.
    """

    _stock = KVCache
    _stock_batch = BatchKVCache

    def _write(self, *rows: mx.array) -> None:
        self.sequence.write(self.place, self.offset, *rows)
        self.offset += rows[0].shape[2]

    def next_place(self) -> int:
        return self.offset

    def size_after(self, count: int) -> int:
        return self.offset + count

    def size(self) -> int:
        return self.offset

    def _position(self) -> tuple[int, ...]:
        return (self.offset,)

    def _take(self, *state: Any) -> None:
        *rows, offset = state
        if offset:
            self._write_over(rows, offset)
        self.offset = offset
        self.sequence.cut(self.place.group, self.size())


@saved_as(RotatingKVCache)
class PooledRotatingKVCache(PooledLayer, RotatingKVCache):  # type: ignore[misc]
    """The last `max_size` tokens of one layer of one sequence, the first `keep` always among them.

    The ring keeps RotatingKVCache's order, temporal after several tokens and rotating one by one,
    so that attention sums in the same order. Bit-equal to it.
    """

    _stock = RotatingKVCache
    _stock_batch = BatchRotatingKVCache

    def __init__(self, sequence: SequenceBlocks, layer: int) -> None:
        super().__init__(sequence, layer)
        assert isinstance(self.place.layer, WindowLayer)
        self.max_size = self.place.layer.max_size
        self.keep = self.place.layer.keep
        self._idx = 0

    @property
    def ring_index(self) -> int:
        """Where in the ring the next token goes, before it starts over."""
        return int(self._idx)

    def set_ring_index(self, index: int) -> None:
        self._idx = index

    def size(self) -> int:
        return min(self.offset, self.max_size)

    def _write(self, *rows: mx.array) -> None:
        self._attended = None
        if rows[0].shape[2] == 1:
            self._write_one(rows)
        else:
            self._write_many(rows)

    def next_place(self) -> int:
        if self.offset < self.max_size:
            return self.offset
        return self.keep if self._idx == self.max_size else self._idx

    def next_places(self, count: int) -> tuple[int, int]:
        # Several tokens beyond the wrap have the whole ring written in temporal order.
        wraps = count > 1 and self.offset + count > self.max_size
        return (0, self.max_size) if wraps else super().next_places(count)

    def size_after(self, count: int) -> int:
        return min(self.offset + count, self.max_size)

    def advance(self, count: int) -> None:
        self._attended = None
        for _ in range(count):
            self._idx = self.next_place() + 1
            self.offset += 1

    def _write_one(self, rows: View) -> None:
        self.sequence.write(self.place, self.next_place(), *rows)
        self.advance(1)

    def _write_many(self, rows: View) -> None:
        """Each of several tokens sees max_size tokens: beyond the wrap they attend to more than
        the ring keeps.
        """
        before, count = self.size(), rows[0].shape[2]
        self.offset += count
        if self.offset <= self.max_size:
            self.sequence.write(self.place, before, *rows)
            self._idx = self.offset
            return
        # What goes back into the ring is moved as it is: quantised again, words would be others.
        new = tuple(map(in_form, rows, self.forms))
        self._attended = self._after(before, new) if before else new
        last = [self._last_tokens(kept, self.max_size) for kept in self._attended]
        self.sequence.write(self.place, 0, *last)
        self._idx = self.max_size

    def _after(self, before: int, new: View) -> View:
        """What new tokens attend to: the `before` tokens of the ring, then the new ones."""
        ring = join(self.sequence.read(self.place, before))
        old = [
            self._last_tokens(each(self._temporal_order, rows), self.max_size - 1) for rows in ring
        ]
        # Evaluated now: a lazy copy would be a reader of the slab while the ring is written.
        mx.eval(old)
        return tuple(joined(pair, 2) for pair in zip(old, new, strict=True))

    def _last_tokens(self, rows: Rows, count: int) -> Rows:
        """The first `keep` and the last of a stretch in temporal order, `count` in all; a copy
        where it is shorter.
        """
        surplus = rows.shape[2] - count
        if surplus <= 0:
            return each(mx.contiguous, rows)
        return joined([tokens(rows, 0, self.keep), tokens(rows, self.keep + surplus)], 2)

    def _position(self) -> tuple[int, ...]:
        return self.offset, self.keep, self.max_size, self._idx

    def _take(self, *state: Any) -> None:
        *rows, offset, keep, max_size, index = state
        if (keep, max_size) != (self.keep, self.max_size):
            raise ValueError(
                f"This is the state of a window of {max_size} tokens that keeps {keep}; the "
                f"pool's windows have {self.max_size} "
                f"tokens and keep {self.keep}."
            )
        if offset:
            last = [
                self._last_tokens(tokens(self._rows(given), 0, offset), max_size) for given in rows
            ]
            self._write_over(last, min(offset, max_size))
        self._attended = None
        self.offset, self._idx = offset, min(index, max_size)
        self.sequence.cut(self.place.group, self.size())

    def trim(self, n: int) -> int:
        """Raises ValueError once the window is full: what it held before is gone."""
        if n > 0 and not self.is_trimmable():
            raise ValueError(
                f"A window of {self.max_size} tokens that is full cannot be trimmed: the tokens "
                "before are gone."
            )
        return super().trim(n)


def _is_model(caller: FrameType) -> bool:
    """Return whether a model of mlx-lm assigns: it puts back what it has just read, which orders
    its evaluation.
    """
    module: str = caller.f_globals.get("__name__", "")
    return module.startswith("mlx_lm.models.") and module != "mlx_lm.models.cache"


class GatheredState:
    """(keys, values, .., *rest) of a layer, which `saved` makes of its rows when they are read: one
    array of several runs.

    To isinstance() it is a tuple, so that mlx.utils and mlx-lm look into it. mx.eval() does not,
    and gathers nothing: the runs were evaluated where they lie.
    """

    def __init__(
        self, views: list[View], rest: tuple[Any, ...], saved: Callable[[Rows], Any]
    ) -> None:
        mx.eval(views)
        self._views = views
        self._rest = rest
        self._saved = saved

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return tuple

    def __len__(self) -> int:
        return len(self._views[0]) + len(self._rest)

    def __getitem__(self, index: Any) -> Any:
        return tuple(self)[index]

    def __iter__(self) -> Iterator[Any]:
        return iter((*map(self._saved, join(self._views)), *self._rest))

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (tuple(self),)


def taken(
    name: str, given: Any, shape: tuple[int, int, int, int], dtype: mx.Dtype, form: Form | None
) -> Rows:
    """Copies of the first tokens of given rows of one array, of `shape`: an array, or words of
    `form`.

    What is given may be a view of the blocks, and a slab with another reader would be copied.
    Raises ValueError if it does not fit.
    """
    batch, heads, size, dim = shape
    arrays = arrays_of(given)
    given_as = form if isinstance(given, Quantised) else None
    needed = [(batch, heads, size, width, of) for width, of in columns(dim, dtype, given_as)]
    if [
        (*array.shape[:2], min(size, array.shape[2]), *array.shape[3:], array.dtype)
        for array in arrays
    ] != needed:
        found = [(*array.shape, array.dtype) for array in arrays]
        raise ValueError(
            f"This layer takes {name} of (batch, heads, tokens, dim, dtype) {needed}; those given "
            f"are {found}."
        )
    return as_rows(own_copies([array[..., :size, :] for array in arrays]), given_as)
