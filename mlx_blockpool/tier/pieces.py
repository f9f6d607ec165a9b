"""CachePieces: what the caches of one prefix hold, as mlx-lm saves it, piece by piece: one head of one array."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import save_prompt_cache

from ..kv.arena import KVArena
from ..kv.block_bytes import as_bytes
from ..kv.parts import as_stock, sequence_of
from ..mlx_lm_compat import rebind
from ..prefix.index import KVIndex
from ..prefix.resume import in_memory, lay_out_to_read, resumable
from ..prefix.trie import PrefixRef


class CachePieces:
    """Pooled caches of one sequence, whose blocks are held until close(). They must not change before.

    `keeps`: the arrays are made for each piece anew, which takes as long for one head as for all: one array at a time is kept.
    No view of a slab outlives the step that copies it. Owned by the generation thread.
    """

    def __init__(self, caches: list[Any], keeps: bool) -> None:
        self.caches = caches
        self._keeps = keeps
        self._kept: dict[str, mx.array] = {}

    @staticmethod
    def of_path(arena: KVArena, index: KVIndex, path: PrefixRef) -> tuple[CachePieces, int] | None:
        """The pieces of a path as far as it can be resumed from memory, and its tokens there; None: nowhere."""
        match = in_memory(index.trie.find(path))
        hit, checkpoint = resumable(arena, match, match.tokens)
        if not hit:
            return None
        return CachePieces(lay_out_to_read(arena, match, hit, checkpoint), arena.spec.bits is not None), hit

    def arrays(self) -> dict[str, mx.array]:
        """All arrays, not evaluated, by the names that mlx-lm saves them under."""
        return as_saved(self.caches, {})[0]

    def piece(self, name: str, head: int | None) -> bytes:
        """One head of an array; None: all of it."""
        array = self._kept[name] if name in self._kept else self.arrays()[name]
        if self._keeps and name not in self._kept:
            # A copy, and no view of a slab.
            self._kept = {name: mx.contiguous(array)}
            array = self._kept[name]
        part = mx.contiguous(array if head is None else array[:, head])
        mx.eval(part)
        return bytes(as_bytes(part))

    def close(self) -> None:
        """Give the blocks of the caches back. May be called again."""
        sequence = sequence_of(self.caches)
        if sequence is not None:
            sequence.release()
        self.caches = []
        self._kept = {}


def as_saved(caches: list[Any], metadata: dict[str, str]) -> tuple[dict[str, mx.array], dict[str, str]]:
    """What mlx-lm would write: arrays, not evaluated, and texts, by name."""
    found: list[tuple[dict[str, mx.array], dict[str, str]]] = []
    writer = SimpleNamespace(array=mx.array, save_safetensors=lambda _, arrays, texts: found.append((arrays, texts)))
    rebind(save_prompt_cache, mx=writer)("", as_stock(caches), metadata)
    return found[0]
