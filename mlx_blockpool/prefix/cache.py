"""PrefixCache: computes each prefix once and hands it to whoever starts with it.

Ties tokens to layer caches. What it hands out is held by the layer caches themselves and goes back to the pool with them.
Owned by the generation thread.
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

from ..cache.factory import pooled_caches
from ..cache.layers import PooledLayer, PooledRotatingKVCache
from ..cache.sequence import Sequence
from ..cache.slabs import Slabs
from ..config import PoolConfig
from ..errors import PoolExhaustedError, RequestTooLargeError, SpecError
from ..spec import BLOCK_TOKENS, WindowLayer, blocks_for
from ..store.store import PromptStore
from .known import KnownBlocks
from .lookup import Lookup, explain
from .room import Room
from .stored import StoredPrefixes
from .trie import Checkpoint, Match, Node, encode


@dataclass(frozen=True)
class Fetch:
    """Layer caches that hold the first `lookup.hit` tokens, and the tokens that are left to compute (at least one)."""

    caches: list[Any]
    rest: list[int]
    lookup: Lookup


class PrefixCache:
    """The prefix cache of one model in the pool `slabs`. `namespace` names what its keys and values are computed with.

    `room` makes and promises room in the pool.
    """

    def __init__(self, slabs: Slabs, namespace: str = "", store: PromptStore | None = None) -> None:
        if not slabs.spec.is_poolable:
            kinds = sorted({layer.kind for layer in slabs.spec.layers} - {"full", "window"})
            raise SpecError(
                f"{slabs.spec.model_id} has layers of kind {kinds}; a prefix cache needs full and window layers only. "
                "Use mlx-lm's LRUPromptCache for this model."
            )
        self.slabs = slabs
        self.pool = slabs.pool
        named = f"{namespace}/{slabs.spec.fingerprint()}" if store is None else store.namespace
        self.known = KnownBlocks(slabs.pool, slabs.full_groups, named)
        self.room = Room(slabs, self.known)
        self.stored = None if store is None else StoredPrefixes(self.known, slabs, self.room, store)
        self._handed_out: WeakSet[Sequence] = WeakSet()
        self.num_lookups = self.num_prompt_tokens = self.num_hit_tokens = self.num_skipped = 0

    # -- fetch ---------------------------------------------------------------------------------------------------------

    def fetch(self, tokens: Tokens[int], max_tokens: int = PoolConfig.max_tokens, at_most: int | None = None) -> Fetch:
        """Caches for a prompt, with room for `max_tokens` more. A hit has no more than `at_most` tokens.

        Raises RequestTooLargeError if that can never fit in the pool, PoolExhaustedError if it cannot fit now.
        """
        tokens = _ids(tokens)
        if not tokens:
            raise ValueError("Found an empty prompt; needed at least one token.")
        total = len(tokens) + max_tokens
        if total > self.pool.sequence_capacity():
            raise RequestTooLargeError(total, self.pool.sequence_capacity())
        match = self._in_memory(tokens)
        most = len(tokens) - 1 if at_most is None else min(at_most, len(tokens) - 1)
        hit, checkpoint = self._resumable(match, most)
        try:
            caches = self._caches(match, hit, checkpoint, len(tokens), total)
        except PoolExhaustedError:
            if not hit:
                raise
            # A window that resumes needs room for two rings; from the first token on it needs one.
            caches = self._caches(match, 0, None, len(tokens), total)
            lookup = Lookup(len(tokens), match.tokens, 0, "no room")
        else:
            lookup = explain(self.known, tokens, match, hit)
        self.num_lookups += 1
        self.num_prompt_tokens += lookup.tokens
        self.num_hit_tokens += lookup.hit
        return Fetch(caches, list(tokens[lookup.hit :]), lookup)

    def _in_memory(self, tokens: Tokens[int]) -> Match:
        """What is known of a prompt, brought back from disk as far as there is room for it."""
        match = self.known.trie.match(tokens)
        if self.stored is None:
            return match
        if self.stored.missing(match.path):
            with suppress(PoolExhaustedError):
                self.stored.restore_now(match.path)
            match = self.known.trie.match(tokens)
        self.stored.touch(match.path)
        return match.in_memory()

    def look(self, tokens: Tokens[int]) -> Lookup:
        """What a fetch of these tokens would find. Changes nothing."""
        tokens = _ids(tokens)
        match = self.known.trie.match(tokens)
        return explain(self.known, tokens, match, self._resumable(match, len(tokens) - 1)[0])

    def _resumable(self, match: Match, most: int) -> tuple[int, Checkpoint | None]:
        """How many of the matched tokens can be taken over, and from which checkpoint where there are window layers."""
        known = max(0, min(match.tokens, most))
        if not self.slabs.window_groups or not known:
            return known, None
        last = match.partial or match.nodes[-1]
        placed = [c for node in last.path() for c in node.checkpoints.values() if c.position <= known]
        best = max(placed, key=lambda c: c.position, default=None)
        if best is None or best.position < known:
            later = self._unwrapped(last, known)
            if later is not None:
                return known, later
        return (best.position, best) if best else (0, None)

    def _unwrapped(self, node: Node, known: int) -> Checkpoint | None:
        """A later checkpoint whose rings still hold every token: it can be cut back to `known`."""
        sizes = [g.layer.max_size for g in self.slabs.spec.groups if isinstance(g.layer, WindowLayer)]
        near = [node, *node.children[:64]]
        return next((c for n in near for c in n.checkpoints.values() if known <= c.position < min(sizes)), None)

    def _caches(self, match: Match, hit: int, checkpoint: Checkpoint | None, prompt: int, total: int) -> list[Any]:
        sequence = Sequence(self.slabs)
        try:
            self._adopt(sequence, match, hit, checkpoint)
            self.room.take(sequence, hit, prompt, total)
        except PoolExhaustedError:
            sequence.release()
            raise
        self._handed_out.add(sequence)
        caches = pooled_caches(self.slabs, sequence)
        for cache in caches:
            cache.offset = hit
            if isinstance(cache, PooledRotatingKVCache) and checkpoint is not None:
                cache.set_ring_index(hit if hit < checkpoint.position else checkpoint.rings[cache.place.group][1])
        return caches

    def _adopt(self, sequence: Sequence, match: Match, hit: int, checkpoint: Checkpoint | None) -> None:
        """Hold the blocks of the hit, before anything is evicted for the rest."""
        path = [*match.nodes, match.partial][: blocks_for(hit)]
        for index, group in enumerate(self.slabs.full_groups):
            self.pool.adopt(sequence.tables[group], [node.blocks[index] for node in path if node is not None])
        if checkpoint is not None:
            for group, (ids, _) in checkpoint.rings.items():
                self.pool.adopt(sequence.tables[group], ids[: blocks_for(hit)])

    # -- keep ----------------------------------------------------------------------------------------------------------

    def keep(self, tokens: Tokens[int], caches: list[Any], kind: str = "assistant") -> int:
        """Remember what `caches` hold of `tokens`; the sequence may go on. Returns how many tokens are known now.

        Takes pooled caches by reference and mlx-lm's own by copy. Where there is no room it skips, and counts num_skipped.
        """
        return self._keep(tokens, caches, kind, goes_on=True)

    def finish(self, tokens: Tokens[int], caches: list[Any], kind: str = "assistant") -> int:
        """keep(), and give the blocks back to the pool, evictable from now on. The caches must not be used again."""
        known = self._keep(tokens, caches, kind, goes_on=False)
        self.release(caches)
        return known

    def release(self, caches: list[Any]) -> None:
        """Give the blocks back and keep nothing. The caches must not be used again."""
        if isinstance(caches[0], PooledLayer):
            caches[0].sequence.release()

    def _keep(self, tokens: Tokens[int], caches: list[Any], kind: str, goes_on: bool) -> int:
        if not isinstance(caches[0], PooledLayer):
            imported = self._import(caches)
            return 0 if imported is None else self.finish(tokens, imported, kind)
        count: int = min(len(tokens), *(c.offset for c in caches))
        if not count:
            return 0
        sequence = caches[0].sequence
        rings = [c for c in caches if isinstance(c, PooledRotatingKVCache)]
        places = bool(rings) and all(c.offset == count for c in rings)
        # Room before the path: making it may evict what the path would lean on.
        room = places and (not goes_on or self.room.for_second_rings(sequence))
        node = self._insert(_ids(tokens)[:count], sequence, kind)
        if room and count not in node.checkpoints:
            held = {c.place.group: (tuple(sequence.tables[c.place.group].ids), c.ring_index) for c in rings}
            self.known.add_checkpoint(node, Checkpoint(count, held))
        self.num_skipped += places and not room
        self.known.prune(node)
        return count

    def _insert(self, tokens: Tokens[int], sequence: Sequence, kind: str) -> Node:
        """Add the path of `tokens`; blocks that are known already replace the sequence's own."""
        node = self.known.trie.root
        for index, start in enumerate(range(0, len(tokens), BLOCK_TOKENS)):
            edge = encode(tokens[start : start + BLOCK_TOKENS])
            child = self.known.trie.child(node, edge)
            if child is None:
                blocks = tuple(sequence.tables[g].ids[index] for g in self.slabs.full_groups)
                child = self.known.add(node, edge, blocks, kind)
            elif len(edge) == len(child.tokens) and not child.resident:
                self.known.revive(child, tuple(sequence.tables[g].ids[index] for g in self.slabs.full_groups))
            elif len(edge) == len(child.tokens) and child.is_full:
                for group, block in zip(self.slabs.full_groups, child.blocks, strict=True):
                    if sequence.tables[group].ids[index] != block:
                        self.pool.swap(sequence.tables[group], index, block)
            if self.stored is not None:
                self.stored.note(child)
            node = child
        return node

    def _import(self, caches: list[Any]) -> list[Any] | None:
        """mlx-lm's caches of one sequence, copied into the pool; None where there is no room."""
        sequence = Sequence(self.slabs)
        counts = [self.slabs.spec.blocks(caches[0].offset, group.layer) for group in self.slabs.spec.groups]
        if not self.room.can_promise(sequence.tables, counts):
            self.num_skipped += 1
            return None
        pooled = pooled_caches(self.slabs, sequence)
        for mine, theirs in zip(pooled, caches, strict=True):
            mine.state = theirs.state
        return pooled

    # -- what stays -------------------------------------------------------------------------------------------------------

    def trim_to(self, n_bytes: int) -> None:
        """Evict until at most `n_bytes` of known blocks are left, or all the rest is held or pinned."""
        self.room.trim_to(n_bytes)

    def pin(self, tokens: Tokens[int]) -> int:
        """Keep the known part of `tokens` from eviction. Returns its length in tokens."""
        return self.known.pin(_ids(tokens))

    def unpin(self, tokens: Tokens[int]) -> int:
        """Take back one pin() of the same tokens. Returns how many of them are known."""
        return self.known.unpin(_ids(tokens))

    def release_all(self) -> None:
        """Take the blocks of all handed out caches back, whoever still refers to them. None may be used again."""
        for sequence in list(self._handed_out):
            sequence.release()
        self._handed_out.clear()

    def close(self) -> bool:
        """Write what is not on disk yet. Whether all of it is; without a store there is nothing to write."""
        return self.stored is None or self.stored.close()

    def clear(self) -> None:
        """Forget everything. What live sequences hold stays with them."""
        self.known.clear()

    # -- figures -------------------------------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Bytes of all known blocks, each counted once however many sequences share it."""
        return self.known.nbytes

    def __len__(self) -> int:
        """How many known sequences are not the beginning of another."""
        return sum(1 for node in self.known.trie if not node.children)

    def stats_by_kind(self) -> dict[str, dict[str, int]]:
        """Known sequences, and bytes of their full layers, by what they end with: system, user or assistant."""
        groups = self.slabs.spec.groups
        size = sum(self.slabs.spec.bytes_per_block(groups[g]) for g in self.slabs.full_groups)
        stats = {kind: {"n_sequences": 0, "n_bytes": 0} for kind in ("assistant", "user", "system")}
        for node in self.known.trie:
            stats[node.kind]["n_sequences"] += not node.children
            stats[node.kind]["n_bytes"] += size
        return stats

    def check(self) -> None:
        """The invariants of trie and pool together. Raises AssertionError: a broken one is our own bug."""
        self.known.check()


def _ids(tokens: Any) -> Tokens[int]:
    """Token ids as a sequence of ints, also where they come as an mlx or numpy array."""
    ids: Tokens[int] = tokens.tolist() if hasattr(tokens, "tolist") else tokens
    return ids
