"""The work list of a step, made once for all layers of a kind: which threadgroup reads which keys
for which queries.

Knows only numbers. A vector is one query head of one row: vector v of a list of rows is head v %
group of row rows[v // group].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import mlx.core as mx
import numpy as np

Ints: TypeAlias = np.ndarray[Any, np.dtype[np.int32]]

# As attention.h has them.
ITEM_INTS = 12
SIMDGROUPS = 4
# Fewer tokens are not worth separate partial sums.
LEAST_TOKENS = 256
# Cuts are at the ends of a threadgroup's passes.
CUT_TOKENS = 64
# Vectors that a simdgroup can hold in registers. Eight would leave each lane eight elements of a
# row instead of sixteen, and on Metal no registers at all.
QUERIES = (1, 2, 4)
# The cost of reading and unpacking a key, in scores of one vector.
KEY_COST = 1.0


class Source(NamedTuple):
    """The position of rows in an array: token t of kv head h is row h * head_stride + t *
    token_stride.
    """

    head_stride: int
    token_stride: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens [start, start + count) of a source, which rows of the batch read.

    sees: [len(rows), count], which of the tokens each row sees; None if all see all of them.
    """

    source: int
    start: int
    count: int
    rows: tuple[int, ...]
    sees: np.ndarray[Any, np.dtype[np.bool_]] | None = None


class Launch(NamedTuple):
    """The items of a few sources: one call of the kernel."""

    sources: range
    items: int
    places: int
    work: mx.array


class KernelPlan:
    """What each threadgroup of a step reads, and which partial sums belong together.

    queries: vectors that a simdgroup holds; sources: the position of the rows of each source.
    """

    def __init__(
        self,
        rows: int,
        group: int,
        queries: int,
        sources: Sequence[Source],
        pieces: Sequence[Piece],
    ) -> None:
        self.rows, self.group, self.queries = rows, group, queries
        self.sources = list(sources)
        self._pieces = sorted(pieces, key=lambda piece: piece.source)
        self._spans = [_spans(len(piece.rows) * group, queries) for piece in self._pieces]
        self._launches: dict[int, list[Launch]] = {}

    def launches(self, most_sources: int) -> list[Launch]:
        """The kernel calls if each can read from `most_sources` sources.

        Their places follow each other.
        """
        if most_sources not in self._launches:
            starts = range(0, len(self.sources), most_sources)
            ranges = [
                range(start, min(start + most_sources, len(self.sources))) for start in starts
            ]
            self._launches[most_sources] = [
                launch for sources in ranges if (launch := self._launch(sources)) is not None
            ]
        return self._launches[most_sources]

    @cached_property
    def places(self) -> mx.array:
        """The partial sums of each vector: where its list begins [rows * group + 1], then the
        lists.
        """
        owners = [
            np.repeat(np.asarray(piece.rows, np.int32) * self.group, self.group)
            + np.tile(np.arange(self.group), len(piece.rows))
            for piece in self._pieces
        ]
        owner = np.concatenate(owners)
        vectors = self.rows * self.group
        counts = np.bincount(owner, minlength=vectors)
        assert len(counts) == vectors, (
            f"{len(counts)} != {vectors}: vectors with sums, vectors of the rows"
        )
        assert counts.all(), (
            f"rows {np.flatnonzero(counts == 0) // self.group} have nothing to read"
        )
        begins = vectors + 1 + np.concatenate([[0], np.cumsum(counts)])
        return _array([begins, np.argsort(owner, kind="stable")])

    def _launch(self, sources: range) -> Launch | None:
        """None if nothing is read from these sources."""
        mine = [
            (piece, spans)
            for piece, spans in zip(self._pieces, self._spans, strict=True)
            if piece.source in sources
        ]
        items = sum(len(spans) for _, spans in mine)
        if not items:
            return None
        found: list[list[int]] = []
        lists: list[Ints] = []
        at, place = items * ITEM_INTS, 0
        for piece, spans in mine:
            extra, words = _lists(piece)
            lists += extra
            source = self.sources[piece.source]
            for first, count in spans:
                where = [
                    piece.source - sources.start,
                    *source,
                    piece.start,
                    piece.count,
                    at,
                    first,
                    count,
                ]
                found.append(
                    [*where, at + len(piece.rows) if words else -1, words, place + first, 0]
                )
            place += len(piece.rows) * self.group
            at += sum(map(len, extra))
        return Launch(
            sources, items, place, _array([np.asarray(found, np.int32).reshape(-1), *lists])
        )


def plan_of(
    pieces: Sequence[Piece],
    sources: Sequence[Source],
    rows: int,
    group: int,
    kv_heads: int,
    fill: int,
) -> KernelPlan:
    """The plan of a step of `rows` rows that attend to all pieces.

    fill: threadgroups that keep the device busy. Pieces are cut only if fewer would work, or if one
    is much longer than the others.
    """
    for source in sources:
        assert kv_heads * max(source) < 2**31, (
            f"{kv_heads} * {max(source)}: rows of a source that 32 bits cannot count"
        )
    # Vectors of a piece -> tokens of all such pieces.
    tokens: dict[int, int] = {}
    for piece in pieces:
        vectors = len(piece.rows) * group
        tokens[vectors] = tokens.get(vectors, 0) + piece.count
    queries = _best_queries(tokens)
    work = sum(count * len(_spans(vectors, queries)) for vectors, count in tokens.items())
    most = max(LEAST_TOKENS, -(-work * kv_heads // fill))
    return KernelPlan(
        rows, group, queries, sources, [part for piece in pieces for part in _parts(piece, most)]
    )


def _best_queries(tokens: dict[int, int]) -> int:
    """The number of vectors of a simdgroup with the least work for all pieces."""

    def cost(queries: int) -> float:
        sets = (
            count * _sets(size, queries)
            for vectors, count in tokens.items()
            for _, size in _spans(vectors, queries)
        )
        return sum(sets) * (KEY_COST + queries)

    return min(QUERIES, key=cost)


def _sets(vectors: int, queries: int) -> int:
    """Simdgroups of an item that have different vectors."""
    return 4 if vectors > 2 * queries else 2 if vectors > queries else 1


def _spans(vectors: int, queries: int) -> list[tuple[int, int]]:
    """First vector and count of each item: at most SIMDGROUPS * queries, nearly the same for
    all.
    """
    items = -(-vectors // (SIMDGROUPS * queries))
    size = -(-vectors // (items * queries)) * queries
    return [(first, min(size, vectors - first)) for first in range(0, vectors, size)]


def _parts(piece: Piece, most: int) -> list[Piece]:
    """The piece in parts of about `most` tokens, without those that no row sees."""
    size = -(-piece.count // -(-piece.count // most))
    if size < piece.count:
        size = -(-size // CUT_TOKENS) * CUT_TOKENS
    elif piece.sees is None:
        return [piece]
    parts = [
        _part(piece, first, min(size, piece.count - first)) for first in range(0, piece.count, size)
    ]
    return [part for part in parts if part.sees is None or part.sees.any()]


def _part(piece: Piece, first: int, count: int) -> Piece:
    sees = None if piece.sees is None else piece.sees[:, first : first + count]
    return replace(
        piece,
        start=piece.start + first,
        count=count,
        sees=None if sees is None or sees.all() else sees,
    )


def _lists(piece: Piece) -> tuple[list[Ints], int]:
    """The rows of a piece and the bits of the tokens that they see, and the words of one row, 0
    if all rows see all tokens.
    """
    rows = np.asarray(piece.rows, np.int32)
    if piece.sees is None:
        return [rows], 0
    words = -(-piece.count // 32)
    bits = np.zeros((len(rows), words * 32), np.bool_)
    bits[:, : piece.count] = piece.sees
    return [rows, np.packbits(bits, axis=1, bitorder="little").view(np.int32).reshape(-1)], words


def _array(parts: Sequence[np.ndarray[Any, Any]]) -> mx.array:
    """One array of int32, of at least 8: mlx passes shorter ones in another way, which would
    need another kernel.
    """
    found = np.concatenate(parts).astype(np.int32)
    return mx.array(np.pad(found, (0, max(0, 8 - len(found)))))
