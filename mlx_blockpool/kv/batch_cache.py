"""PooledBatchCache: several sequences side by side in one layer, each read where it lies. No
padding, no copies.

Needs an attached model (kv/attach.py), whose attention calls attend() instead of reading padded
arrays. Owned by the generation thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import deepcopy
from typing import Any

import mlx.core as mx

from ..mlx_lm_compat import BaseCache
from .quantised import Rows, View, concatenated
from .sequence import ALL_ALIKE
from .shards import placeholder_keys, send_now
from .step import Step, plain_step, tentative_step


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
        self._prompts: list[tuple[int, Any]] = []
        # The plain step whose attention is computed next; the step that is not committed yet, and
        # what its write() returned.
        self._plain: Step | None = None
        self._tentative: Step | None = None
        self._new: View | None = None

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
        return (
            mx.array([m.offset for m in self.members])
            if self._tentative is None
            else self._tentative.offsets
        )

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
        self._tentative = tentative_step(self.members, counts)

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

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> View:
        """Append keys and values [members, kv_heads, n, dim]; of a right-padded prompt only its own
        tokens.

        Returns them as they are: attend() reads the slabs.
        """
        n = keys.shape[2]
        if self.members[0].layer == self.members[0].sequence.arena.first:
            self.members[0].sequence.arena.check_dtype(keys)
        if self._tentative is not None:
            self._new = self._tentative.write(self.members[0].place.index, keys, values)
            return keys, values
        if n == 1 and self._lengths is None:
            self._decode(keys, values)
            return keys, values
        self._plain, self._prompts = None, []
        for i, member in enumerate(self.members):
            count = n if self._lengths is None else max(0, min(n, self._lengths[i]))
            mask = _mask(member, count)
            if count:
                member.write(keys[i : i + 1, :, :count], values[i : i + 1, :, :count])
            self._prompts.append((count, mask))
        if self._lengths is not None:
            self._lengths = [length - n for length in self._lengths]
        return keys, values

    def attend(
        self, queries: mx.array, keys: Rows, values: Rows, scale: float, mask: Any, sinks: Any
    ) -> mx.array:
        """Attention of queries [members, heads, n, dim], each member to its own keys and values."""
        step, self._plain = self._tentative or self._plain, None
        if step is None:
            return self._attend_prompts(queries, values, scale, sinks)
        first = self.members[0]
        first.sequence.arena.decode.path_counts[step.path] += 1
        return step.attend(first.place.index, queries, self._new, scale, sinks)

    def _decode(self, keys: mx.array, values: mx.array) -> None:
        first = self.members[0]
        if first.layer == first.sequence.arena.first and any(
            m.sequence.arena.capabilities.synchronous for m in self.members
        ):
            # A step in flight still reads the slabs; writing now would copy them.
            mx.synchronize()
        self._plain = plain_step(self.members)
        self._plain.write(first.place.index, keys, values)
        for member in self.members:
            member.advance(1)

    def _attend_prompts(
        self, queries: mx.array, values: Rows, scale: float, sinks: Any
    ) -> mx.array:
        n, dim = queries.shape[2], values.shape[3]
        prompts, self._prompts = self._prompts, []
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
        """A stand-in: each member has its own mask, made where it attends."""
        needed = getattr(self.members[0], "max_size", None)
        if return_array or (window_size is not None and window_size != needed):
            raise NotImplementedError(
                f"A model that masks a window of {window_size} in a cache of {needed} needs "
                "padding."
            )
        return "causal" if N > 1 else None

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
