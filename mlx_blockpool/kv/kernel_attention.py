"""KernelAttention: the attention of one step of a layer group through the kernel, which reads whole
slabs by a plan.

Knows where tokens lie and which rows see them, not how they are read. Owned by the generation
thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np

from ..kernel.form import KernelForm
from ..kernel.launch import Launcher, RaggedKernel
from ..kernel.plan import KernelPlan, Piece, Source, plan_of
from ..spec import BLOCK_TOKENS, FullLayer, ModelCacheSpec
from .quantised import View
from .shares import Pieces, cut, tokens_of
from .slab import SlabRun

Seen: TypeAlias = np.ndarray[Any, np.dtype[np.bool_]]

# Threadgroups that keep a device busy. More of them on a small device wait for each other, and cost
# their partial sums.
FILL = 512
# Only the last tokens of a longer run have masks, which are words of each row.
MASKED_TOKENS = 256


def kernel_form(spec: ModelCacheSpec, layer: FullLayer, heads: int) -> KernelForm:
    """The form of the kernel for a layer with `heads` query heads."""
    return KernelForm(
        getattr(mx, spec.dtype),
        layer.key_dim,
        layer.value_dim,
        layer.kv_heads,
        heads // layer.kv_heads,
        *spec.forms(layer)[:2],
    )


class KernelAttention:
    """What the rows of a step read: `pieces`, of which those that members share are read once for
    all of them.

    counts:       rows of each member.
    sees:         what the rows of a member see of the last tokens that it reads, [rows, tokens]; by
                  default everything.
    has_new_rows: whether new rows, which are in no slab yet, are the last tokens of each member.
    """

    def __init__(
        self,
        spec: ModelCacheSpec,
        layer: FullLayer,
        launch: Launcher,
        pieces: Mapping[tuple[int, ...], Pieces],
        counts: Sequence[int],
        sees: Callable[[int], Seen] | None = None,
        has_new_rows: bool = False,
    ) -> None:
        self._spec, self._layer, self._launch = spec, layer, launch
        self._has_new_rows = has_new_rows
        self._rows = [range(start, end) for start, end in pairwise(accumulate(counts, initial=0))]
        runs = [run for shared, own in pieces.values() for part in (shared, *own) for run in part]
        self._slabs = list({id(slab): slab for slab, _, _ in runs}.values())
        self._numbers = {id(slab): number for number, slab in enumerate(self._slabs)}
        self._pieces = [
            piece
            for members, each in pieces.items()
            for piece in self._pieces_of(members, each, sees)
        ]
        # Layers of one group may have other numbers of query heads.
        self._kernels: dict[int, tuple[RaggedKernel, KernelPlan]] = {}

    def attend(
        self,
        index: int,
        queries: mx.array,
        scale: float,
        sinks: mx.array | None,
        new: View | None = None,
    ) -> mx.array:
        """Attention of queries [rows, heads, 1, dim] in the group's layer `index`.

        new: keys and values [rows, kv_heads, 1, dim], first of all arrays, of rows that are in no
        slab yet.
        """
        rows, heads, _, dim = queries.shape
        kernel, plan = self._kernels.get(heads) or self._kernel_of(heads)
        sources = [slab.layers[index][:2] for slab in self._slabs]
        if self._has_new_rows:
            assert new is not None, "the new rows of a ring were not passed"
            sources.append(new[:2])
        out = kernel.attend(plan, queries.reshape(rows, heads, dim), sources, scale, sinks)
        return out.reshape(rows, heads, 1, -1)

    def _kernel_of(self, heads: int) -> tuple[RaggedKernel, KernelPlan]:
        form = kernel_form(self._spec, self._layer, heads)
        sources = [Source(slab.blocks * BLOCK_TOKENS, 1) for slab in self._slabs]
        if self._has_new_rows:
            sources.append(Source(1, form.kv_heads))
        plan = plan_of(self._pieces, sources, self._rows[-1].stop, form.group, form.kv_heads, FILL)
        self._kernels[heads] = RaggedKernel(form, self._launch), plan
        return self._kernels[heads]

    def _pieces_of(
        self, members: tuple[int, ...], pieces: Pieces, sees: Callable[[int], Seen] | None
    ) -> list[Piece]:
        shared, own = pieces
        together = tuple(row for i in members for row in self._rows[i])
        found = [
            Piece(self._numbers[id(slab)], start, count, together, None)
            for slab, start, count in shared
        ]
        for i, runs in zip(members, own, strict=True):
            found += self._own_pieces(i, runs, None if sees is None else sees(i))
        return found

    def _own_pieces(self, member: int, runs: Sequence[SlabRun], seen: Seen | None) -> list[Piece]:
        """What one member reads alone."""
        rows = self._rows[member]
        lasts = [(self._numbers[id(slab)], start, count) for slab, start, count in runs]
        firsts = []
        if seen is not None:
            before = tokens_of(runs) - max(MASKED_TOKENS, seen.shape[1])
            head, (tail,) = cut([runs], before if before > MASKED_TOKENS else 0)
            firsts, lasts = (
                [(self._numbers[id(slab)], start, count) for slab, start, count in part]
                for part in (head, tail)
            )
        if self._has_new_rows:
            lasts.append((len(self._slabs), rows.start, len(rows)))
        masks = _masks(seen, [count for _, _, count in lasts])
        found = [Piece(*where, tuple(rows), None) for where in firsts]
        return found + [
            Piece(*where, tuple(rows), mask) for where, mask in zip(lasts, masks, strict=True)
        ]


def _masks(seen: Seen | None, counts: list[int]) -> list[Seen | None]:
    """`seen`, which is of the last tokens, for each of several parts; None where all rows see
    all.
    """
    if seen is None:
        return [None] * len(counts)
    rows, last = seen.shape
    whole = np.concatenate([np.ones((rows, sum(counts) - last), bool), seen], axis=1)
    parts = np.split(whole, list(accumulate(counts))[:-1], axis=1)
    return [None if part.all() else part for part in parts]
