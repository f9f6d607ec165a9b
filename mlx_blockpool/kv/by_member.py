"""Attention of any kind over the blocks of a batch: the module itself computes each member.

A module that reads its keys and values in its own way runs as far as its last cache first, which
writes the new rows of all members in one step. It runs again for each member, whose arrays it gets
as mlx-lm's caches of one sequence have them. Quantised rows are dequantised for it. Owned by the
generation thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList

from ..spec import WindowLayer
from .batch_cache import MemberMasks, PooledBatchCache
from .layer_caches import PooledLayer
from .quantised import View, dense
from .sequence import join
from .step import by_name, names_of


def attend_by_member(module: Any, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What a module's own `call` returns for a batch, one member after another.

    Without pooled caches among the arguments, and for one sequence that is not quantised, this is
    `call` itself. Raises NotImplementedError for a batch that cannot be divided that way.
    """
    given = [*args, *kwargs.values()]
    leaves = [leaf for value in given for leaf in _leaves(value)]
    batches = [leaf for leaf in leaves if isinstance(leaf, PooledBatchCache)]
    if not batches:
        return call(module, *[_densely(value) for value in args], **_each(kwargs, _densely))
    if len(batches) != len(leaves):
        raise NotImplementedError("A module with states next to its keys computes a whole batch.")
    passed = _Pass(batches, given)

    def own(write: Callable[[Any], Any]) -> Any:
        return call(module, *[write(value) for value in args], **_each(kwargs, write))

    with suppress(_AllWrittenError):
        own(passed.writing)
    outputs = [
        own(lambda value, i=i: passed.reading(value, i))  # type: ignore[misc]
        for i, count in enumerate(passed.counts)
        if count
    ]
    return passed.joined(outputs)


class _AllWrittenError(Exception):
    """The last cache of a module has its new rows: nothing else of this run is needed."""


class _Pass:
    """The next tokens of a batch in one module.

    counts: how many are each member's. length: of the padded tokens. starts: the offset of each
    member in each cache, before it writes.
    """

    def __init__(self, batches: list[PooledBatchCache], given: list[Any]) -> None:
        first = batches[0]
        self.is_tentative = first.is_tentative
        rows = sum(first.counts(1)) if self.is_tentative else len(first.members)
        self.num_rows = rows
        self.length = next((v.shape[1] for v in given if isinstance(v, mx.array) and v.ndim > 1), 1)
        self.counts = first.counts(self.length)
        self.starts = {id(b): [m.offset for m in b.members] for b in batches}
        self.left = {id(b) for b in batches}

    def writing(self, value: Any) -> Any:
        """An argument of the run that writes."""
        return _map_caches(value, self._writer)

    def _writer(self, batch: PooledBatchCache) -> _Proxy:
        def update(_: _Proxy, rows: tuple[mx.array, ...]) -> View:
            batch.update_and_fetch(*rows)
            self.left.discard(id(batch))
            if not self.left:
                raise _AllWrittenError
            return rows

        return _Proxy(batch.members[0], batch.offset, update)

    def reading(self, value: Any, member: int) -> Any:
        """An argument of the run of one member, whose caches have the new rows already."""
        if isinstance(value, MemberMasks):
            return value.masks[member]
        if isinstance(value, mx.array):
            return self._own_rows(value, member)
        if isinstance(value, tuple):
            return tuple(self.reading(part, member) for part in value)
        return _map_caches(value, lambda batch: self._reader(batch, member))

    def _reader(self, batch: PooledBatchCache, member: int) -> _Proxy:
        cache, count = batch.members[member], self.counts[member]

        def update(proxy: _Proxy, _: tuple[mx.array, ...]) -> View:
            proxy.offset += count
            if not self.is_tentative:
                return tuple(map(dense, cache.fetch()))
            if isinstance(cache.place.layer, WindowLayer):
                raise NotImplementedError("Windows are not verified member by member.")
            views = cache.sequence.read(cache.place, cache.size_after(count))
            return tuple(map(dense, join(views)))

        return _Proxy(cache, self.starts[id(batch)][member], update)

    def _own_rows(self, array: mx.array, member: int) -> mx.array:
        """The rows of a member of an array [num_rows, length, ..], [num_rows, .., length, dim] or
        of positions [num_rows]; others as they are.

        Raises NotImplementedError for another array with as many rows by chance: nothing says
        whether they are the members'.
        """
        if not array.ndim or array.shape[0] != self.num_rows:
            return array
        count, start = self.counts[member], member
        if self.is_tentative:
            start = sum(self.counts[:member])
        if array.ndim == 1:
            # The position of the first of them; scales and slopes are not integers.
            is_positions = mx.issubdtype(array.dtype, mx.integer)
            return array[start : start + 1] if is_positions else array
        axes = (2, 1) if array.ndim > 3 else (1, 2)
        axis = next((a for a in axes[: array.ndim - 1] if array.shape[a] == self.length), None)
        if axis is None:
            raise NotImplementedError(
                f"An array {array.shape} has no rows of {self.length} tokens."
            )
        if self.is_tentative:
            return array[start : start + count].swapaxes(0, axis)
        own = array[member : member + 1]
        if count == self.length:
            return own
        return own[:, :count] if axis == 1 else own[:, :, :count]

    def joined(self, outputs: Sequence[Any]) -> Any:
        """The outputs of all members that had tokens as one of the batch."""
        first = outputs[0]
        if isinstance(first, tuple):
            return tuple(self.joined(parts) for parts in zip(*outputs, strict=True))
        if not isinstance(first, mx.array):
            return first
        if self.is_tentative:
            return mx.concatenate([out.swapaxes(0, 1) for out in outputs])
        rest, rows = iter(outputs), []
        for count in self.counts:
            out = next(rest) if count else mx.zeros((1, 0, *first.shape[2:]), first.dtype)
            missing = self.length - count
            pads = [(0, 0), (0, missing), *[(0, 0)] * (out.ndim - 2)]
            rows.append(mx.pad(out, pads) if missing else out)
        return mx.concatenate(rows)


class _Proxy:
    """Stands in for `cache`, or a batch of such caches, in one run of a module. `update`: what its
    update_and_fetch() does with rows.
    """

    def __init__(
        self,
        cache: PooledLayer,
        offset: Any,
        update: Callable[[_Proxy, tuple[mx.array, ...]], View],
    ) -> None:
        self._names, self._update = names_of(cache), update
        self.offset = offset
        self.keys = self.values = mx.zeros(1)

    def __getattr__(self, name: str) -> Any:
        return by_name(self, self._names, name)

    def update_and_fetch(self, *rows: mx.array) -> View:
        return self._update(self, rows)


def _densely(value: Any) -> Any:
    """An argument with quantised caches of one sequence, for a module that computes with their
    arrays.
    """

    def dense_cache(cache: Any) -> Any:
        if not _is_quantised(cache):
            return cache

        def update(proxy: _Proxy, rows: tuple[mx.array, ...]) -> View:
            found = tuple(map(dense, cache.update_and_fetch(*rows)))
            proxy.offset = cache.offset
            return found

        return _Proxy(cache, cache.offset, update)

    return _map_caches(value, dense_cache) if any(map(_is_quantised, _leaves(value))) else value


def _is_quantised(cache: Any) -> bool:
    return isinstance(cache, PooledLayer) and any(cache.forms)


def _leaves(value: Any) -> list[Any]:
    """The caches in an argument."""
    if isinstance(value, CacheList):
        return [leaf for part in value.caches for leaf in _leaves(part)]
    return [value] if hasattr(value, "update_and_fetch") else []


def _map_caches(value: Any, change: Callable[[Any], Any]) -> Any:
    """An argument with other caches; a list of them in place of a CacheList."""
    if isinstance(value, CacheList):
        return [_map_caches(part, change) for part in value.caches]
    return change(value) if hasattr(value, "update_and_fetch") else value


def _each(kwargs: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    return {name: change(value) for name, value in kwargs.items()}
