"""PooledKVCache and PooledRotatingKVCache: stand in for mlx-lm's KVCache and RotatingKVCache, keys and values in blocks.

A layer cache knows its place in the pool and where it is in its sequence. It does not know prefixes or requests.
Owned by the generation thread.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import BatchKVCache, BatchRotatingKVCache, KVCache, RotatingKVCache

from ..mlx_lm_compat import saved_as
from ..spec import WindowLayer
from .rows import Rows, View, dense
from .runs import attend_runs
from .sequence import SequenceBlocks, SequenceCache, join
from .state_caches import copied


class PooledLayer(SequenceCache):
    """What both have in common. Subclasses say where tokens go (write) and how many places are read (size).

    first_held:    tokens before it are in no block: the state that was assigned lacks them.
    reads_runs:    whether one token attends to all that is held, which may lie in several runs.
    _stock_batch:  mlx-lm's class of a batch.
    """

    offset: int
    first_held = 0
    reads_runs = True
    _stock_batch: Any

    def __init__(self, sequence: SequenceBlocks, layer: int) -> None:
        self.sequence = sequence
        self.place = sequence.arena.places[layer]
        self.layer = layer
        self.offset = 0
        sequence.add_layer(self)

    def _on(self, sequence: SequenceBlocks) -> Any:
        copy = super()._on(sequence)
        sequence.add_layer(copy)
        return copy

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> View:
        """Append keys and values [1, kv_heads, n, dim]; returns those that these n tokens attend to."""
        if keys.shape[0] != 1:
            raise ValueError(
                f"A pooled cache holds one sequence and was given a batch of {keys.shape[0]}. "
                "Make one cache for each sequence and merge() them, as batch_generate does."
            )
        return self.write(keys, values) or self.keys_and_values()

    def write(self, keys: mx.array, values: mx.array) -> View | None:
        """The first half of update_and_fetch: no view of a slab is left behind. Returns what to attend to, or None for all."""
        arena = self.sequence.arena
        if self.layer == arena.first:
            arena.check_dtype(keys)
            if keys.shape[2] > 1 or arena.decode.synchronous:
                # A decode step in flight still reads the slabs; writing now would copy them.
                mx.synchronize()
        return self._write(keys, values)

    def _write(self, keys: mx.array, values: mx.array) -> View | None:
        raise NotImplementedError

    def next_place(self) -> int:
        """Where in its table the next token goes, in tokens."""
        raise NotImplementedError

    def next_size(self) -> int:
        """Places that are read once the next token is there."""
        raise NotImplementedError

    def advance(self) -> None:
        """The next token was written at next_place(), by the batch."""
        self.offset += 1

    def needs_block(self) -> bool:
        """Return whether the next token needs a block that is not reserved for the sequence."""
        return self.sequence.needs_block(self.place.group, self.next_place())

    def trim(self, n: int) -> int:
        """Take back the last `n` tokens, fewer where it holds fewer. Returns how many; whole blocks go back to the pool."""
        n = int(super().trim(n))  # type: ignore[misc]
        self.sequence.cut(self.place.group, self.size())
        return n

    def attend(self, queries: mx.array, keys: Rows, values: Rows, scale: float, mask: Any, sinks: Any) -> mx.array:
        """Attention of queries [1, heads, n, dim]; keys and values are what update_and_fetch returned."""
        one = self.reads_runs and queries.shape[2] == 1 and mask is None
        if one and len(self.sequence.slab_runs(self.place.group, self.size())) > 1:
            return attend_runs(queries, self.views(), scale, sinks)
        out: mx.array = scaled_dot_product_attention(
            queries, dense(keys), dense(values), None, scale=scale, mask=mask, sinks=sinks
        )
        return out

    def views(self) -> list[View]:
        """Keys and values of each run, in the order in which they are stored."""
        return self.sequence.read(self.place, self.size())

    def keys_and_values(self) -> View:
        return join(self.views())

    @property
    def keys(self) -> Rows | None:
        return None if self.empty() else join(self.views())[0]

    @keys.setter
    def keys(self, keys: Rows) -> None:
        if not _is_put_back(sys._getframe(1)):
            self._assign(keys, self.values)

    @property
    def values(self) -> Rows | None:
        return None if self.empty() else join(self.views())[1]

    @values.setter
    def values(self, values: Rows) -> None:
        if not _is_put_back(sys._getframe(1)):
            self._assign(self.keys, values)

    def _assign(self, keys: Any, values: Any) -> None:
        """Write keys and values over those of all tokens that are read."""
        if keys is None or values is None:
            raise ValueError(
                "This pooled cache is empty: keys and values that are assigned one after the other have no place in it yet. "
                "Assign its `state`, or call mlx_blockpool.from_stock()."
            )
        size = self.size()
        self._write_over(keys, values, min(size, keys.shape[2]))

    def _write_over(self, keys: mx.array, values: mx.array, size: int, start: int = 0) -> None:
        """Write the first `size` tokens of given arrays at token `start` of the table. Raises ValueError if they do not fit."""
        layer = self.place.layer
        for name, array, dim in (("keys", keys, layer.key_dim), ("values", values, layer.value_dim)):
            found, needed = (*array.shape[:2], array.shape[-1]), (1, layer.kv_heads, dim)
            if array.ndim != 4 or found != needed or array.shape[2] < size or array.dtype != self.sequence.arena.dtype:
                raise ValueError(
                    f"This layer takes {name} of shape {(1, layer.kv_heads, size, dim)} in {self.sequence.arena.dtype}; "
                    f"those given are {array.shape} in {array.dtype}."
                )
        # What is given may be a view of the blocks, and a step in flight may read them: either would have the slab copied.
        given = copied([keys[..., :size, :], values[..., :size, :]])
        mx.synchronize()
        self.sequence.write(self.place, start, *given)

    def size(self) -> int:
        raise NotImplementedError

    def empty(self) -> bool:
        return self.offset == 0

    @property
    def nbytes(self) -> int:
        """Bytes of this layer's blocks, shared ones included."""
        blocks = len(self.sequence.tables[self.place.group])
        return blocks * self.sequence.arena.spec.bytes_per_block_per_layer(self.place.layer)

    @classmethod
    def merge(cls, caches: list[Any]) -> Any:
        """One batch cache of several sequences, which stay as they are: the batch continues in forks of them.

        Ragged where the model was attached and all are pooled, else mlx-lm's padded one.
        """
        if not cls._is_ragged(caches):
            return cls._stock_batch.merge(caches)
        forks = [c.fork() for c in caches]
        for cache, fork in zip(caches, forks, strict=True):
            # Only the batch continues: it gets the room that was reserved for that.
            cache.sequence.hand_over(cache.place.group, fork.sequence)
        return cls.join(forks)

    @classmethod
    def join(cls, caches: list[Any]) -> Any:
        """merge() of caches that their owner gives up: the batch continues in them and copies nothing."""
        from .batch_cache import PooledBatchCache

        return PooledBatchCache(caches) if cls._is_ragged(caches) else cls._stock_batch.merge(caches)

    @classmethod
    def _is_ragged(cls, caches: list[Any]) -> bool:
        wrong = next((c for c in caches if not isinstance(c, cls._stock)), None)
        if wrong is not None:
            raise ValueError(f"A batch of {cls._stock.__name__}s cannot take in a {type(wrong).__name__}.")
        pooled = [c for c in caches if isinstance(c, PooledLayer)]
        for cache in pooled:
            # mlx-lm's batch never reads an empty cache, whose blocks may have been released.
            cache.sequence.need_blocks()
        return len(pooled) == len(caches) and all(cache.sequence.arena.ragged for cache in pooled)

    def _state(self, views: list[View], *rest: Any) -> Any:
        """(keys, values, *rest) as mlx-lm has them; of several runs they are gathered when they are read."""
        if self.empty():
            self.sequence.need_blocks()
            return None, None, *rest
        return (*views[0], *rest) if len(views) == 1 else GatheredState(views, rest)


class GatheredState:
    """(keys, values, *rest) of a layer that lies in several runs; reading one gathers it into one array.

    To isinstance() it is a tuple, so that mlx.utils and mlx-lm look into it. mx.eval() does not, and gathers nothing: the runs
    were evaluated where they lie.
    """

    def __init__(self, views: list[View], rest: tuple[Any, ...]) -> None:
        mx.eval(views)
        self._views = views
        self._rest = rest

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return tuple

    def __len__(self) -> int:
        return 2 + len(self._rest)

    def __getitem__(self, index: Any) -> Any:
        return tuple(self)[index]

    def __iter__(self) -> Iterator[Any]:
        return iter((*join(self._views), *self._rest))

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (tuple(self),)


@saved_as(KVCache)
class PooledKVCache(PooledLayer, KVCache):  # type: ignore[misc]
    """The keys and values of one layer of one sequence: [1, kv_heads, offset, dim]. Bit-equal to KVCache.

    Appending takes no copy and reading is a view as long as the sequence is one run.
    """

    _stock = KVCache
    _stock_batch = BatchKVCache

    def _write(self, keys: mx.array, values: mx.array) -> None:
        self.sequence.write(self.place, self.offset, keys, values)
        self.offset += keys.shape[2]

    def next_place(self) -> int:
        return self.offset

    def next_size(self) -> int:
        return self.offset + 1

    def size(self) -> int:
        return self.offset

    @property
    def state(self) -> tuple[Any, ...]:
        """(keys, values, offset), as KVCache has them: views where the sequence is one run."""
        state: tuple[Any, ...] = self._state([] if self.empty() else self.views(), self.offset)
        return state

    @state.setter
    def state(self, state: tuple[Any, ...]) -> None:
        keys, values, offset = state
        if offset:
            self._write_over(keys, values, offset)
        self.offset = offset
        self.sequence.cut(self.place.group, self.size())


@saved_as(RotatingKVCache)
class PooledRotatingKVCache(PooledLayer, RotatingKVCache):  # type: ignore[misc]
    """The last `max_size` tokens of one layer of one sequence, the first `keep` always among them.

    The ring keeps RotatingKVCache's order, temporal after several tokens and rotating one by one, so that attention sums
    in the same order. Bit-equal to it.
    """

    _stock = RotatingKVCache
    _stock_batch = BatchRotatingKVCache

    def __init__(self, sequence: SequenceBlocks, layer: int) -> None:
        super().__init__(sequence, layer)
        assert isinstance(self.place.layer, WindowLayer)
        self.max_size = self.place.layer.max_size
        self.keep = self.place.layer.keep
        self._idx = 0
        # What several tokens were attended with beyond the wrap: layers that share this cache read it in the same pass.
        self._attended: View | None = None

    @property
    def ring_index(self) -> int:
        """Where in the ring the next token goes, before it starts over."""
        return int(self._idx)

    def set_ring_index(self, index: int) -> None:
        self._idx = index

    def size(self) -> int:
        return min(self.offset, self.max_size)

    def keys_and_values(self) -> View:
        return self._attended or super().keys_and_values()

    def _write(self, keys: mx.array, values: mx.array) -> View | None:
        self._attended = self._write_one(keys, values) if keys.shape[2] == 1 else self._write_many(keys, values)
        return self._attended

    def next_place(self) -> int:
        if self.offset < self.max_size:
            return self.offset
        return self.keep if self._idx == self.max_size else self._idx

    def next_size(self) -> int:
        return min(self.offset + 1, self.max_size)

    def advance(self) -> None:
        self._attended = None
        self._idx = self.next_place() + 1
        self.offset += 1

    def _write_one(self, keys: mx.array, values: mx.array) -> View | None:
        self.sequence.write(self.place, self.next_place(), keys, values)
        self.advance()
        return None

    def _write_many(self, keys: mx.array, values: mx.array) -> View | None:
        """Each of several tokens sees max_size tokens: beyond the wrap more are returned than the ring keeps."""
        before, count = self.size(), keys.shape[2]
        self.offset += count
        if self.offset <= self.max_size:
            self.sequence.write(self.place, before, keys, values)
            self._idx = self.offset
            return None
        if before:
            old = [self._last_tokens(a, self.max_size - 1) for a in self._temporal(before)]
            # Evaluated now: a lazy copy would be a reader of the slab while the ring is written.
            mx.eval(old)
            keys, values = (mx.concatenate(list(pair), axis=2) for pair in zip(old, (keys, values), strict=True))
        self.sequence.write(self.place, 0, self._last_tokens(keys, self.max_size), self._last_tokens(values, self.max_size))
        self._idx = self.max_size
        return keys, values

    def _temporal(self, size: int) -> list[mx.array]:
        return [self._temporal_order(a) for a in join(self.sequence.read(self.place, size))]

    def _last_tokens(self, array: mx.array, count: int) -> mx.array:
        """The first `keep` and the last of a stretch in temporal order, `count` in all; a copy where it is shorter."""
        surplus = array.shape[2] - count
        if surplus <= 0:
            return mx.contiguous(array)
        return mx.concatenate([array[..., : self.keep, :], array[..., self.keep + surplus :, :]], axis=2)

    @property
    def state(self) -> tuple[Any, ...]:
        """(keys, values, offset, keep, max_size, ring index), as RotatingKVCache has them. Reading it ends a pass."""
        self._attended = None
        views = [] if self.empty() else self.views()
        state: tuple[Any, ...] = self._state(views, self.offset, self.keep, self.max_size, self._idx)
        return state

    @state.setter
    def state(self, state: tuple[Any, ...]) -> None:
        keys, values, offset, keep, max_size, index = state
        if (keep, max_size) != (self.keep, self.max_size):
            raise ValueError(
                f"This is the state of a window of {max_size} tokens that keeps {keep}; the pool's windows have {self.max_size} "
                f"tokens and keep {self.keep}."
            )
        if offset:
            keys, values = (self._last_tokens(a[..., :offset, :], max_size) for a in (keys, values))
            self._write_over(keys, values, min(offset, max_size))
        self._attended = None
        self.offset, self._idx = offset, min(index, max_size)
        self.sequence.cut(self.place.group, self.size())

    def _assign(self, keys: Any, values: Any) -> None:
        self._attended = None
        super()._assign(keys, values)

    def trim(self, n: int) -> int:
        """Raises ValueError once the window is full: what it held before is gone."""
        if n > 0 and not self.is_trimmable():
            raise ValueError(f"A window of {self.max_size} tokens that is full cannot be trimmed: the tokens before are gone.")
        return super().trim(n)


def _is_put_back(caller: FrameType) -> bool:
    """Return whether a model of mlx-lm assigns back what it has just read, which orders its evaluation."""
    module: str = caller.f_globals.get("__name__", "")
    return module.startswith("mlx_lm.models.") and module != "mlx_lm.models.cache"
