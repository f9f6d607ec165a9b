"""PooledBatchCache: several sequences side by side in one layer, each read where it lies. No
padding, no copies.

Needs an attached model (kv/attach.py), whose attention calls attend() instead of reading padded
arrays. Owned by the generation thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import deepcopy
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import Any

import mlx.core as mx

from ..mlx_lm_compat import BaseCache
from ..spec import BLOCK_TOKENS
from .attention import attend_runs
from .quantised import KEYS_AND_VALUES, Roles, View, concatenated
from .sequence import ALL_ALIKE
from .shards import placeholder_keys, send_now
from .step import Step, by_name, names_of, put_rows, step_of

offset_of = attrgetter("offset")


def need_one_form(caches: Iterable[Any]) -> None:
    """Raises ValueError if the keys or values of some are in other bits than those of others, as
    those of other pools may be.
    """
    if len({cache.forms for cache in caches}) > 1:
        raise ValueError(
            "One batch cannot hold keys and values in several bits. Give each sequence a cache of "
            "the same pool."
        )


class PooledBatchCache(BaseCache):  # type: ignore[misc]
    """Stands in for BatchKVCache and BatchRotatingKVCache. Joining and leaving is list work."""

    def __init__(self, members: list[Any]) -> None:
        self.members = list(members)
        self._lengths: list[int] | None = None
        # Of the last prompts that were written: each member's count and mask; None after a step.
        self._prompts: list[tuple[int, Any]] | None = None
        # The step that is not committed yet, and what its write() returned.
        self._tentative: Step | None = None
        self._new: View | None = None
        # The chunks of prompts that the next pass computes too: the rows of each, and its cache.
        self._chunks: list[tuple[slice, PooledBatchCache]] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> PooledBatchCache:
        copy = PooledBatchCache([deepcopy(member, memo) for member in self.members])
        copy._lengths = None if self._lengths is None else list(self._lengths)
        return copy

    def __copy__(self) -> PooledBatchCache:
        return self.__deepcopy__({})

    def __reduce__(self) -> Any:
        raise TypeError(
            "A batch of pooled caches cannot be pickled. Pickle what extract() makes of each "
            "sequence."
        )

    def __getattr__(self, name: str) -> Any:
        members = self.__dict__.get("members")
        if members and name in (names := names_of(members[0])):
            return by_name(self, names, name)
        raise AttributeError(
            f"A batch of pooled caches has no {name!r}, as its keys and values lie in blocks. A "
            "batch of mlx-lm's cannot contain "
            f"it. {ALL_ALIKE}"
        )

    @property
    def keys(self) -> mx.array:
        """A placeholder for a stage of a pipeline, which assigns it again to order what it sends.

        Other models find no keys.
        """
        self._need_stage()
        return placeholder_keys()

    @keys.setter
    def keys(self, given: mx.array) -> None:
        self._need_stage()
        send_now(given)

    def _need_stage(self) -> None:
        if not self.members[0].sequence.arena.capabilities.is_stage:
            raise AttributeError("keys")

    @property
    def offset(self) -> mx.array:
        own = (
            mx.array(list(map(offset_of, self.members)))
            if self._tentative is None
            else self._tentative.offsets
        )
        if not self._chunks:
            return own
        chunks = [c.offset + mx.arange(rows.stop - rows.start) for rows, c in self._chunks]
        return mx.concatenate([own, *chunks])

    def begin_rows(self, counts: Sequence[int]) -> None:
        """Compute the next tokens of each member by rows until commit_rows(): counts[i] of member
        i, 1 or more.

        Takes the blocks that all rows need. Raises PoolExhaustedError, and the batch is as it was.

        Between the two, `offset` is the position of each row, and what comes in is [rows, .., 1,
        dim], the rows of one member next to each other and in their order. No step may be in
        flight.
        """
        assert self._tentative is None, "rows of this batch are computed already"
        assert len(counts) == len(self.members), (
            f"{len(counts)} counts for {len(self.members)} members"
        )
        self._tentative = step_of(self.members, list(counts))

    def commit_rows(self, kept: Sequence[int]) -> None:
        """Accept the first kept[i] rows of each member, 0 or more, and roll back the others.

        What was computed from the rows must be evaluated: a lazy view of a slab would make mlx copy
        the slab.
        """
        step, new, self._tentative, self._new = self._tentative, self._new, None, None
        assert step is not None, "no rows of this batch are computed"
        assert all(0 <= k <= count for k, count in zip(kept, step.counts, strict=True)), (
            f"{kept} kept of {step.counts}"
        )
        step.commit(self.members, new, kept)

    def begin_chunks(self, chunks: Sequence[PooledBatchCache], counts: Sequence[int]) -> None:
        """Compute the next counts[i] tokens of each of some prompts, batches of one, in the next
        pass until end_chunks().

        Between the two what comes in is [rows, .., 1, dim]: the rows of the members, then those of
        each prompt. A prompt is written and attends as without the members.
        """
        ends = pairwise(accumulate(counts, initial=sum(self.counts(1))))
        self._chunks = [(slice(*rows), chunk) for rows, chunk in zip(ends, chunks, strict=True)]
        for chunk, count in zip(chunks, counts, strict=True):
            chunk._lengths = [count]

    def end_chunks(self) -> None:
        """Return to the members alone."""
        for _, chunk in self._chunks:
            chunk.finalize()
        self._chunks = []

    def update_and_fetch(self, *rows: mx.array) -> tuple[Any, ...]:
        """Append rows [members, heads, n, dim] of each of the layer's arrays: keys, values, then
        others; of a right-padded prompt only its own tokens.

        Returns the batch itself in place of each array, as they lie in blocks: attention
        reads them there, also that of a layer without a cache. A module that computes with them
        fails.
        """
        first, n = self.members[0], rows[0].shape[2]
        arena = first.sequence.arena
        if first.layer == arena.first:
            arena.check_dtype(rows[0])
        if first.layer in arena.unread and n == 1:
            arena.evaluate_writes(first.place)
        if self._chunks:
            # Before the members' step is made: blocks that a chunk takes may change the slabs.
            for own, chunk in self._chunks:
                chunk.update_and_fetch(*(array[own].swapaxes(0, 2) for array in rows))
            rows = tuple(array[: self._chunks[0][0].start] for array in rows)
        self._prompts = None
        if self._tentative is not None:
            self._new = self._tentative.write(first.place.index, rows)
        elif n == 1 and self._lengths is None:
            if first.layer == arena.first and True in [
                m.sequence.arena.capabilities.synchronous for m in self.members
            ]:
                # A step in flight still reads the slabs; writing now would copy them.
                mx.synchronize()
            step = step_of(self.members)
            put_rows(step.targets, first.place.index, rows)
            for member in self.members:
                if step.is_ring:
                    member.advance(1)
                else:
                    # In each layer of each step: a call would be felt.
                    member.offset += 1
        else:
            self._prompts = self._write_prompts(rows)
        return (self, self) if not rows[2:] else (self,) * len(rows)

    def keys_and_values(self) -> tuple[Any, Any]:
        """What update_and_fetch() has returned, for another layer in the same pass."""
        return self, self

    def attend(
        self, queries: mx.array, keys: Any, values: Any, scale: float, mask: Any, sinks: Any
    ) -> mx.array:
        """Attention of queries [members, heads, n, dim], each member to its own keys and values.

        Raises NotImplementedError for a mask that the caches do not make.
        """
        prompts = self._prompts
        if mask is not None and getattr(mask, "is_special", not isinstance(mask, str)):
            if prompts is None or not isinstance(mask, MemberMasks):
                raise NotImplementedError("The model has a mask that its caches do not make.")
            prompts = [(count, own) for (count, _), own in zip(prompts, mask.masks, strict=True)]
        if prompts is not None:
            return self._attend_prompts(queries, prompts, scale, sinks)
        if not self._chunks:
            return self.attend_step(queries, scale, sinks, KEYS_AND_VALUES)
        after = self._chunks[0][0].start
        found = self.attend_step(queries[:after], scale, sinks, KEYS_AND_VALUES)
        first = self.members[0]
        if first.layer == first.sequence.arena.last:
            # No later layer writes anything of these tokens, and nothing else of them is read.
            unread = (queries.shape[0] - after, *found.shape[1:])
            return mx.concatenate([found, mx.zeros(unread, found.dtype)])
        outputs = [
            chunk.attend(queries[own].swapaxes(0, 2), chunk, chunk, scale, None, sinks)
            for own, chunk in self._chunks
        ]
        return mx.concatenate([found, *(out.swapaxes(0, 2) for out in outputs)])

    def attend_parts(
        self,
        queries: Sequence[mx.array],
        scale: float,
        value: int = 0,
        chosen: Sequence[mx.array | None] | None = None,
    ) -> mx.array:
        """Attention of a step (is_step()) in which several arrays of the layer score a token.

        queries: one for each of the first arrays, in their order, [rows, heads, 1, its dim]. The
        score of a token is `scale` times the sum of their products with its rows. value: the array
        whose rows are summed by the softmax of the scores. chosen: for each member the positions
        [n] of the tokens that it attends to, the same n for each, or None for all tokens; not while
        rows are computed. Call it after update_and_fetch(). Returns [rows, heads, 1, dim of the
        array `value`].
        """
        if chosen is not None:
            return self._attend_chosen(queries, scale, value, chosen)
        if self._chunks:
            raise NotImplementedError("A chunk of a prompt does not attend by parts.")
        roles = Roles(len(queries), value)
        return self.attend_step(concatenated(queries, -1), scale, None, roles)

    def _attend_chosen(
        self,
        queries: Sequence[mx.array],
        scale: float,
        value: int,
        chosen: Sequence[mx.array | None],
    ) -> mx.array:
        assert self._tentative is None, "rows attend to all tokens"
        few = [i for i, places in enumerate(chosen) if places is not None]
        outputs = {
            i: member.attend_parts([q[i : i + 1] for q in queries], scale, value)
            for i, member in enumerate(self.members)
            if chosen[i] is None
        }
        if few:
            read = Roles(len(queries), value).attended(
                self._rows_at(few, mx.stack([c for c in chosen if c is not None]))
            )
            own = concatenated(queries, -1)
            if len(few) < len(chosen):
                own = own[mx.array(few)]
            found = attend_runs(own, [read], scale, None)
            if len(few) == len(chosen):
                return found
            outputs.update({i: found[n : n + 1] for n, i in enumerate(few)})
        return concatenated([outputs[i] for i in range(len(chosen))])

    def _rows_at(self, few: list[int], places: mx.array) -> View:
        """Copies of the rows [members, heads, n, dim] of each array at some positions [members, n],
        as the model computes them, of a few members.
        """
        members, place = [self.members[i] for i in few], self.members[0].place
        runs = [m.sequence.slab_runs(place.group, m.size()) for m in members]
        slabs = list({id(slab): slab for own in runs for slab, _, _ in own}.values())
        if len(slabs) > 1:
            rows = [m.rows_at(own) for m, own in zip(members, places, strict=True)]
            return tuple(concatenated(arrays) for arrays in zip(*rows, strict=True))
        # Where the blocks of each member begin, so that one gather reads all rows of an array.
        starts = [
            [start + n for _, start, count in own for n in range(0, count, BLOCK_TOKENS)]
            for own in runs
        ]
        most = max(map(len, starts))
        table = mx.array([own + [0] * (most - len(own)) for own in starts])
        begins = mx.take_along_axis(table, places // BLOCK_TOKENS, axis=1)
        found: View = slabs[0].rows_at(place.index, begins + places % BLOCK_TOKENS)
        return found

    def attend_step(
        self, queries: mx.array, scale: float, sinks: mx.array | None, roles: Roles
    ) -> mx.array:
        """Attention of a step to what is keys and values by `roles`; queries are scored by all
        arrays that are keys as one.
        """
        first = self.members[0]
        arena = first.sequence.arena
        step = self._tentative or arena.steps[first.place.group]
        arena.decode.path_counts[step.path] += 1
        out: mx.array = step.attend(first.place.index, queries, self._new, scale, sinks, roles)
        return out

    def is_step(self, n: int) -> bool:
        """Return whether the next `n` tokens of a pass are one of each member, or rows."""
        return self._tentative is not None or (n == 1 and self._lengths is None)

    @property
    def is_tentative(self) -> bool:
        """True between begin_rows() and commit_rows()."""
        return self._tentative is not None

    def counts(self, n: int) -> list[int]:
        """How many of the next `n` tokens of a pass are each member's, or its rows."""
        if self._tentative is not None:
            return self._tentative.counts
        if self._lengths is None:
            return [n] * len(self.members)
        return [max(0, min(n, length)) for length in self._lengths]

    def _write_prompts(self, rows: tuple[mx.array, ...]) -> list[tuple[int, Any]]:
        """The count of each member's tokens, and its own mask."""
        n, prompts = rows[0].shape[2], []
        for i, (member, count) in enumerate(zip(self.members, self.counts(n), strict=True)):
            prompts.append((count, _mask(member, count)))
            if count:
                member.write(*(array[i : i + 1, :, :count] for array in rows))
        if self._lengths is not None:
            self._lengths = [length - n for length in self._lengths]
        return prompts

    def _attend_prompts(
        self, queries: mx.array, prompts: list[tuple[int, Any]], scale: float, sinks: Any
    ) -> mx.array:
        n, dim = queries.shape[2], self.members[0].place.layer.value_dim
        outputs = []
        for i, (member, (count, own_mask)) in enumerate(zip(self.members, prompts, strict=True)):
            parts = []
            if count:
                read = member.keys_and_values()
                parts.append(
                    member.attend(queries[i : i + 1, :, :count], *read, scale, own_mask, sinks)
                )
            if count < n:
                parts.append(mx.zeros((1, queries.shape[1], n - count, dim), queries.dtype))
            outputs.append(concatenated(parts, 2))
        return concatenated(outputs)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:  # noqa: N803
        """The masks of all members, for modules that compute member by member.

        Others need none: each member has its own mask where it attends.
        """
        needed = getattr(self.members[0], "max_size", None)
        is_special = window_size is not None and window_size != needed
        if N == 1 and is_special and needed is not None:
            # One token sees all of a ring, unless its window is shorter.
            is_special = window_size < needed
        if N == 1 and not (return_array or is_special):
            return None
        pairs = list(zip(self.members, self.counts(N), strict=True))
        if not (return_array or is_special):
            return MemberMasks([_mask(member, count) for member, count in pairs], False)
        given = {"return_array": return_array, "window_size": window_size}
        masks = [member.make_mask(count, **given) if count else None for member, count in pairs]
        # One token sees all before it.
        has_masks = any(mask is not None for mask in masks)
        return MemberMasks(masks, is_special) if has_masks else None

    def prepare(
        self, *, left_padding: Any = None, lengths: Any = None, right_padding: Any = None
    ) -> None:
        if left_padding is not None and max(left_padding) > 0:
            raise ValueError("A pooled batch takes no left_padding. Pad prompts on the right.")
        if right_padding is not None and max(right_padding) > 0:
            self._lengths = list(lengths)

    def finalize(self) -> None:
        self._lengths = None

    def filter(self, batch_indices: Any) -> None:
        self.members = [self.members[int(i)] for i in batch_indices]

    def extend(self, other: Any) -> None:
        if not isinstance(other, PooledBatchCache) or type(self.members[0]) is not type(
            other.members[0]
        ):
            raise ValueError(
                f"A batch of pooled caches cannot be extended by a {type(other).__name__}. "
                f"{ALL_ALIKE}"
            )
        need_one_form(self.members[:1] + other.members[:1])
        self.members = self.members + other.members

    def extract(self, idx: int) -> Any:
        """A cache with what one member holds now, which continues on its own."""
        return self.members[idx].fork()

    def member(self, idx: int) -> Any:
        """The cache of one member itself, for the owner of a sequence that leaves the batch."""
        return self.members[idx]

    def size(self) -> int:
        return max((m.size() for m in self.members), default=0)

    def is_trimmable(self) -> bool:
        return all(m.is_trimmable() for m in self.members)

    def trim(self, n: int) -> int:
        return min(int(m.trim(n)) for m in self.members)

    def empty(self) -> bool:
        return all(m.empty() for m in self.members)

    @property
    def state(self) -> list[Any]:
        """The slabs, for mx.eval(), which completes the writes and gathers nothing.

        Do not save or assign it.
        """
        return [self.members[0].sequence.arena.arrays(), _NotSaved()] if self.members else []

    @property
    def nbytes(self) -> int:
        return sum(m.nbytes for m in self.members)


class MemberMasks(str):
    """The mask of each member for the next tokens of a pass; a model that compares it finds
    mlx-lm's "causal".

    is_special: whether attention to the members' caches would apply another one.
    """

    masks: list[Any]
    is_special: bool

    def __new__(cls, masks: list[Any], is_special: bool) -> MemberMasks:
        found = super().__new__(cls, "causal")
        found.masks, found.is_special = masks, is_special
        return found


class _NotSaved:
    """Follows the slabs in a batch's state: mx.eval() passes over it, and save_prompt_cache
    names it as what it cannot write.
    """

    def __repr__(self) -> str:
        return (
            "a batch of pooled caches, which lies in blocks among those of others. Save what "
            "extract() makes of each sequence"
        )


def _mask(member: Any, count: int) -> Any:
    """The member's own mask for its next `count` tokens, made once for all layers that look
    alike.
    """
    if count <= 1:
        return None
    window = getattr(member, "max_size", None)
    key = (count, member.offset, window or 0)
    return member.sequence.mask(
        key, lambda: member.make_mask(count, return_array=False, window_size=window)
    )
