"""KernelAttention: the attention of one step of a layer group through the kernel, which reads whole slabs by a plan.

Knows where tokens lie and which rows see them, not how they are read. Owned by the generation thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np

from ..kernel.form import KernelForm
from ..kernel.launch import Launcher, RaggedKernel
from ..kernel.plan import Piece, Plan, Source, plan_of
from ..spec import FullLayer, ModelCacheSpec
from .readings import Pieces, cut, tokens_of
from .rows import View, arrays_of, as_rows, columns
from .sequence import SlabRun

Seen: TypeAlias = np.ndarray[Any, np.dtype[np.bool_]]

# Threadgroups that keep a device busy. More of them on a small device wait for each other, and cost their partial sums.
FILL = 512
# Of a longer run only the last tokens have masks, which are words of each row.
MASKED_TOKENS = 256
# No array of theirs has fewer than eight elements, which mlx would pass in another way.
SPARE_TOKENS = 8


def kernel_form(spec: ModelCacheSpec, layer: FullLayer, heads: int) -> KernelForm:
    """The form of the kernel for a layer with so many query heads."""
    return KernelForm(
        getattr(mx, spec.dtype), layer.key_dim, layer.value_dim, layer.kv_heads, heads // layer.kv_heads, *spec.forms(layer)
    )


class KernelAttention:
    """What the rows of a step read: `pieces`, of which those that members share are read once for all of them.

    counts:     rows of each member.
    sees:       what the rows of a member see of the last tokens that it reads, [rows, tokens]; None: all see all.
    is_beside:  whether new rows, which are in no slab yet, are the last tokens of each member.
    """

    def __init__(
        self,
        spec: ModelCacheSpec,
        layer: FullLayer,
        launch: Launcher,
        pieces: Mapping[tuple[int, ...], Pieces],
        counts: Sequence[int],
        sees: Callable[[int], Seen] | None = None,
        is_beside: bool = False,
    ) -> None:
        self._spec, self._layer, self._launch = spec, layer, launch
        self._is_beside = is_beside
        self._rows = [range(start, end) for start, end in pairwise(accumulate(counts, initial=0))]
        runs = [run for shared, own in pieces.values() for part in (shared, *own) for run in part]
        self._slabs = list({id(slab): slab for slab, _, _ in runs}.values())
        self._numbers = {id(slab): number for number, slab in enumerate(self._slabs)}
        self._pieces = [piece for members, each in pieces.items() for piece in self._pieces_of(members, each, sees)]
        # Layers of one group may have other numbers of query heads.
        self._kernels: dict[int, tuple[RaggedKernel, Plan, list[View]]] = {}

    def attend(self, index: int, queries: mx.array, scale: float, sinks: mx.array | None, new: View | None = None) -> mx.array:
        """Attention of queries [rows, heads, 1, dim] in the group's layer `index`.

        new: keys and values [rows, kv_heads, 1, dim] of rows that are in no slab yet.
        """
        rows, heads, _, dim = queries.shape
        kernel, plan, spares = self._kernels.get(heads) or self._kernel_of(heads)
        sources = [slab.whole(index) for slab in self._slabs]
        if self._is_beside:
            assert new is not None, "rows beside a ring were not passed"
            sources.append(new)
        out = kernel.attend(plan, queries.reshape(rows, heads, dim), sources + spares, scale, sinks)
        return out.reshape(rows, heads, 1, -1)

    def _kernel_of(self, heads: int) -> tuple[RaggedKernel, Plan, list[View]]:
        form = kernel_form(self._spec, self._layer, heads)
        sources = [Source(slab.keys[0].shape[2], 1) for slab in self._slabs]
        if self._is_beside:
            sources.append(Source(1, form.kv_heads))
        spares = [_spare(form, number) for number in range(num_spares(len(sources), form.most_sources))]
        sources += [Source(SPARE_TOKENS, 1)] * len(spares)
        plan = plan_of(self._pieces, sources, self._rows[-1].stop, form.group, form.kv_heads, FILL)
        self._kernels[heads] = RaggedKernel(form, self._launch), plan, spares
        return self._kernels[heads]

    def _pieces_of(self, members: tuple[int, ...], pieces: Pieces, sees: Callable[[int], Seen] | None) -> list[Piece]:
        shared, own = pieces
        together = tuple(row for i in members for row in self._rows[i])
        found = [Piece(self._numbers[id(slab)], start, count, together, None) for slab, start, count in shared]
        for i, runs in zip(members, own, strict=True):
            found += self._own_pieces(i, runs, None if sees is None else sees(i))
        return found

    def _own_pieces(self, member: int, runs: list[SlabRun], seen: Seen | None) -> list[Piece]:
        """What one member reads alone."""
        rows = self._rows[member]
        lasts = [(self._numbers[id(slab)], start, count) for slab, start, count in runs]
        firsts = []
        if seen is not None:
            before = tokens_of(runs) - max(MASKED_TOKENS, seen.shape[1])
            head, (tail,) = cut([runs], before if before > MASKED_TOKENS else 0)
            firsts, lasts = ([(self._numbers[id(slab)], start, count) for slab, start, count in part] for part in (head, tail))
        if self._is_beside:
            lasts.append((len(self._slabs), rows.start, len(rows)))
        masks = _masks(seen, [count for _, _, count in lasts])
        found = [Piece(*where, tuple(rows), None) for where in firsts]
        return found + [Piece(*where, tuple(rows), mask) for where, mask in zip(lasts, masks, strict=True)]


def num_spares(sources: int, most: int) -> int:
    """How many sources are added to those of a step, of which a launch takes `most`.

    A device compiles a text for each number of sources, which takes longer than many steps: it gets to see powers of two.
    """
    rest = sources % most
    return min(most, 1 << (rest - 1).bit_length()) - rest if rest else 0


@cache
def _spare(form: KernelForm, number: int) -> View:
    """Rows that nothing reads."""
    shape = (1, form.kv_heads, SPARE_TOKENS)
    keys, values = (
        as_rows([mx.zeros((*shape, width), of) for width, of in columns(dim, form.dtype, quantised)], quantised)
        for dim, quantised in ((form.key_dim, form.key_form), (form.value_dim, form.value_form))
    )
    mx.eval(arrays_of(keys), arrays_of(values))
    return keys, values


def _masks(seen: Seen | None, counts: list[int]) -> list[Seen | None]:
    """`seen`, which is of the last tokens, for each of several parts; None where all rows see all."""
    if seen is None:
        return [None] * len(counts)
    rows, last = seen.shape
    whole = np.concatenate([np.ones((rows, sum(counts) - last), bool), seen], axis=1)
    parts = np.split(whole, list(accumulate(counts))[:-1], axis=1)
    return [None if part.all() else part for part in parts]
