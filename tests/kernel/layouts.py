"""Random layouts of a step: which rows read which pieces of which sources; and what attention to
them is, by two other ways.
"""

from __future__ import annotations

import random
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from mlx_blockpool.kernel.form import KernelForm
from mlx_blockpool.kernel.launch import Launcher, RaggedKernel, Rows
from mlx_blockpool.kernel.plan import Piece, Source, plan_of
from mlx_blockpool.kv.attention import attend_cluster
from mlx_blockpool.kv.quantised import Quantised, View, dense, in_form, part_of
from mlx_blockpool.spec import Form

EIGHT, FOUR = Form(8, 64), Form(4, 32)
F32, F16, BF16 = mx.float32, mx.float16, mx.bfloat16


class Case(NamedTuple):
    """A form, how many slabs there are, and whether the new rows are a source of their own, as
    those of windows are.
    """

    form: KernelForm
    slabs: int
    has_new_rows: bool


# One case is a few texts to compile, whatever the layout.
CASES = [
    Case(KernelForm(F32, 64, 64, 2, 1), 1, False),
    Case(KernelForm(BF16, 128, 128, 2, 4), 2, False),
    Case(KernelForm(F16, 64, 128, 2, 2, EIGHT, EIGHT), 1, True),
    Case(KernelForm(F32, 96, 64, 1, 3, FOUR, None), 2, True),
    Case(KernelForm(BF16, 256, 256, 1, 8), 1, True),
    Case(KernelForm(F32, 16, 16, 3, 2), 14, False),
    Case(KernelForm(F32, 8, 8, 2, 2), 2, True),
    Case(KernelForm(F32, 128, 128, 1, 16), 1, False),
    Case(KernelForm(F32, 192, 128, 2, 1), 2, False),
    Case(KernelForm(F32, 32, 40, 2, 5), 3, False),
    Case(KernelForm(F32, 64, 64, 2, 4, EIGHT, EIGHT), 5, True),
    Case(KernelForm(F32, 128, 64, 2, 2, EIGHT, FOUR), 1, False),
    Case(KernelForm(F32, 72, 128, 2, 2, None, Form(8, 128)), 7, False),
    Case(KernelForm(F32, 256, 256, 1, 2, FOUR, FOUR), 1, True),
    Case(KernelForm(F16, 80, 80, 4, 1), 1, True),
    Case(KernelForm(F16, 128, 128, 2, 7), 1, False),
    Case(KernelForm(F16, 32, 32, 1, 40), 1, False),
    Case(KernelForm(F16, 256, 192, 1, 2, EIGHT, EIGHT), 2, False),
    Case(KernelForm(F16, 96, 96, 2, 3, Form(4, 32), Form(4, 32)), 1, False),
    Case(KernelForm(BF16, 64, 64, 8, 8), 1, True),
    Case(KernelForm(BF16, 96, 96, 2, 1), 3, False),
    Case(KernelForm(BF16, 128, 128, 2, 4, EIGHT, EIGHT), 1, True),
    Case(KernelForm(BF16, 64, 64, 2, 2, Form(4, 64), Form(8, 32)), 2, False),
    Case(KernelForm(BF16, 128, 256, 1, 6, None, FOUR), 1, False),
]
# Of the largest figure. Results are sums in float32, rounded once; the portable path also rounds
# products and weights.
ONCE = {F32: 1e-5, F16: 2**-11 + 1e-5, BF16: 2**-8 + 1e-5}
OFTEN = {F32: 1e-5, F16: 5e-3, BF16: 4e-2}


class Layout(NamedTuple):
    """A step: its arrays, pieces, and the tokens of each source that each row sees."""

    case: Case
    counts: list[int]
    pieces: list[Piece]
    strides: list[Source]
    sources: list[tuple[Rows, Rows]]
    queries: mx.array
    sinks: mx.array | None
    fill: int

    def attend(self, launch: Launcher) -> mx.array:
        form = self.case.form
        plan = plan_of(
            self.pieces, self.strides, len(self.queries), form.group, form.kv_heads, self.fill
        )
        return RaggedKernel(form, launch).attend(
            plan, self.queries, self.sources, SCALE, self.sinks
        )


SCALE = 0.3


def layout(case: Case, seed: int) -> Layout:
    """What a pool may look like: runs anywhere in slabs, some read by several members, rows that
    do not see the last tokens.
    """
    rng = random.Random(seed)
    form = case.form
    is_drafting = rng.random() < 0.5
    counts = [
        rng.choice([1, 2, 5, 16]) if is_drafting else 1
        for _ in range(rng.randint(1, 6 if form.group < 8 else 3))
    ]
    rows = [tuple(range(start, end)) for start, end in pairwise(accumulate(counts, initial=0))]
    tokens = rng.choice([60, 330, 900])
    sources = [_slab(form, tokens, rng) for _ in range(case.slabs)]
    strides = [Source(tokens, 1)] * case.slabs
    pieces = []
    shared = [i for i in range(len(counts)) if rng.random() < 0.6]
    if len(shared) > 1:
        together = tuple(row for i in shared for row in rows[i])
        pieces += [_run(case, tokens, together, rng, None) for _ in range(rng.randint(1, 2))]
    for i, count in enumerate(counts):
        pieces += [_run(case, tokens, rows[i], rng, None) for _ in range(rng.randint(0, 3))]
        pieces.append(
            _run(case, tokens, rows[i], rng, rng.choice(["causal", "ring"]) if count > 1 else None)
        )
    if case.has_new_rows:
        sources.append(_new(form, sum(counts), rng))
        strides.append(Source(1, form.kv_heads))
        pieces += [
            Piece(case.slabs, mine[0], len(mine), mine, np.tri(len(mine), dtype=bool))
            for mine in rows
        ]
    queries = _normal((sum(counts), form.kv_heads * form.group, form.key_dim), rng).astype(
        form.dtype
    )
    sinks = (
        _normal((form.kv_heads * form.group,), rng).astype(form.dtype)
        if rng.random() < 0.4
        else None
    )
    return Layout(
        case, counts, pieces, strides, sources, queries, sinks, rng.choice([1, 4, 30, 1000])
    )


def _normal(shape: tuple[int, ...], rng: random.Random) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(rng.getrandbits(32)))


def _slab(form: KernelForm, tokens: int, rng: random.Random) -> tuple[Rows, Rows]:
    return _rows(form, (1, form.kv_heads, tokens), rng)


def _new(form: KernelForm, rows: int, rng: random.Random) -> tuple[Rows, Rows]:
    return _rows(form, (rows, form.kv_heads, 1), rng)


def _rows(form: KernelForm, shape: tuple[int, ...], rng: random.Random) -> tuple[Rows, Rows]:
    keys = in_form(_normal((*shape, form.key_dim), rng).astype(form.dtype), form.key_form)
    return keys, in_form(_normal((*shape, form.value_dim), rng).astype(form.dtype), form.value_form)


def _run(
    case: Case, tokens: int, rows: tuple[int, ...], rng: random.Random, mask: str | None
) -> Piece:
    """A run of some slab; with a mask the rows are its last tokens, or places of a ring that
    they will overwrite.
    """
    least = len(rows) if mask else 1
    count = rng.choice([least, rng.randint(least, tokens), tokens - rng.randint(0, tokens - least)])
    sees = None
    if mask == "causal":
        sees = np.tri(len(rows), count, count - len(rows), dtype=bool)
    elif mask == "ring":
        place = rng.randrange(count)
        sees = (np.arange(count) - place) % count >= np.arange(len(rows))[:, None]
        sees[:, place - 1] = True
    return Piece(rng.randrange(case.slabs), rng.randint(0, tokens - count), count, rows, sees)


def _part(rows: Rows, is_slab: bool, piece: Piece) -> Rows:
    """The rows of a piece as [1, kv_heads, count, dim]."""
    if is_slab:
        return part_of(
            rows, (slice(None), slice(None), slice(piece.start, piece.start + piece.count))
        )
    mine = part_of(rows, (slice(piece.start, piece.start + piece.count),))
    if isinstance(mine, Quantised):
        return Quantised(*[a.transpose(2, 1, 0, 3) for a in mine[:3]], mine.form)
    return mine.transpose(2, 1, 0, 3)


def _members(step: Layout) -> list[tuple[slice, list[View], Any]]:
    """The rows of each member, the views that it reads, and what each row sees of them [rows,
    tokens].
    """
    found = []
    for start, end in pairwise(accumulate(step.counts, initial=0)):
        views, sees = [], []
        for piece in step.pieces:
            if start not in piece.rows:
                continue
            at = piece.rows.index(start)
            is_slab = piece.source < step.case.slabs
            keys, values = (_part(rows, is_slab, piece) for rows in step.sources[piece.source])
            views.append((keys, values))
            hidden = np.ones((end - start, piece.count), bool)
            sees.append(hidden if piece.sees is None else piece.sees[at : at + end - start])
        found.append((slice(start, end), views, np.concatenate(sees, axis=1)))
    return found


def in_float64(step: Layout) -> Any:
    """Softmax by numpy, in float64, of the rows as they are held."""
    form = step.case.form
    out = np.zeros((len(step.queries), form.kv_heads, form.group, form.value_dim))
    queries = _wide(step.queries).reshape(
        len(step.queries), form.kv_heads, form.group, form.key_dim
    )
    for rows, views, sees in _members(step):
        keys = np.concatenate([_wide(dense(_in_float32(keys)))[0] for keys, _ in views], axis=1)
        values = np.concatenate(
            [_wide(dense(_in_float32(values)))[0] for _, values in views], axis=1
        )
        scores = np.einsum("rhgd,hnd->rhgn", queries[rows], keys) * SCALE
        scores = np.where(sees[:, None, None], scores, -np.inf)
        if step.sinks is not None:
            sinks = _wide(step.sinks).reshape(form.kv_heads, form.group, 1)
            scores = np.concatenate(
                [scores, np.broadcast_to(sinks, (*scores.shape[:3], 1))], axis=-1
            )
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        out[rows] = np.einsum("rhgn,hnd->rhgd", weights[..., : keys.shape[1]], values)
    return out.reshape(len(step.queries), -1, form.value_dim)


def portable(step: Layout) -> mx.array:
    """The path that every device has."""
    form = step.case.form
    grouped = (step.queries * SCALE).reshape(
        len(step.queries), form.kv_heads, form.group, form.key_dim
    )
    sinks = None if step.sinks is None else step.sinks.reshape(form.kv_heads, form.group)
    outputs = []
    for rows, views, sees in _members(step):
        mask = mx.array(np.repeat(sees, form.group, axis=0))
        outputs.append(
            attend_cluster(grouped[rows], [], [views], sinks, [rows.stop - rows.start], [mask])
        )
    return mx.concatenate(outputs).reshape(len(step.queries), -1, form.value_dim)


def _in_float32(rows: Rows) -> Rows:
    if isinstance(rows, Quantised):
        return rows._replace(
            scales=rows.scales.astype(mx.float32), biases=rows.biases.astype(mx.float32)
        )
    return rows


def _wide(array: mx.array) -> Any:
    return np.array(array.astype(mx.float32)).astype(np.float64)


def assert_right(step: Layout, found: mx.array) -> None:
    """As exact as the type of the results, against float64; and equal to the portable path."""
    dtype, needed = step.case.form.dtype, in_float64(step)
    assert found.dtype == dtype
    assert found.shape == needed.shape
    most = np.abs(needed).max()
    assert np.abs(_wide(found) - needed).max() <= ONCE[dtype] * most
    assert np.abs(_wide(found) - _wide(portable(step))).max() <= OFTEN[dtype] * most
