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
from ..cache.parts import leaves_of, sequence_of, state_caches
from ..cache.sequence import Sequence
from ..cache.slabs import Slabs
from ..cache.states import PooledArraysCache, copied
from ..config import PoolConfig
from ..errors import PoolExhaustedError, RequestTooLargeError
from ..spec import BLOCK_TOKENS
from ..store.store import PromptStore
from .known import KnownBlocks
from .lookup import Lookup, explain
from .restore import Wanted
from .resume import lay_out, resumable
from .room import Room
from .stored import StoredPrefixes
from .trie import Checkpoint, Match, Node, encode

# So many known tokens are enough to tell, and less than this part of them reused is an alarm.
ALARM_TOKENS = 20_000
ALARM_SHARE = 0.05


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
        self.slabs = slabs
        self.pool = slabs.pool
        named = f"{namespace}/{slabs.spec.fingerprint()}" if store is None else store.namespace
        self.known = KnownBlocks(slabs.pool, slabs.full_groups, named)
        self.room = Room(slabs, self.known)
        self.stored = None if store is None else StoredPrefixes(self.known, slabs, self.room, store)
        self._handed_out: WeakSet[Sequence] = WeakSet()
        self.num_lookups = self.num_prompt_tokens = self.num_known_tokens = self.num_hit_tokens = self.num_skipped = 0

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
        most = len(tokens) - 1 if at_most is None else min(at_most, len(tokens) - 1)
        match = self._in_memory(tokens, most)
        hit, checkpoint = resumable(self.slabs, match, most)
        try:
            caches = lay_out(self.room, match, hit, checkpoint, len(tokens), total)
        except PoolExhaustedError:
            if not hit:
                raise
            # A window that resumes needs room for two rings; from the first token on it needs one.
            caches = lay_out(self.room, match, 0, None, len(tokens), total)
            lookup = Lookup(len(tokens), match.tokens, 0, "no room")
        else:
            lookup = explain(self.known, tokens, match, hit)
            if checkpoint is not None:
                self.known.use(checkpoint)
        self._note(caches)
        self.num_lookups += 1
        self.num_prompt_tokens += lookup.tokens
        self.num_known_tokens += lookup.known
        self.num_hit_tokens += lookup.hit
        return Fetch(caches, list(tokens[lookup.hit :]), lookup)

    def _in_memory(self, tokens: Tokens[int], most: int) -> Match:
        """What is known of a prompt, brought back from disk as far as there is room for it."""
        match = self.known.trie.match(tokens)
        if self.stored is None:
            return match
        wanted = self._on_disk(match, most)
        if wanted is not None and not self.stored.is_worth_reading(wanted):
            self.stored.num_cheaper += 1
        elif wanted is not None:
            with suppress(PoolExhaustedError):
                self.stored.restore_now(wanted)
            match = self.known.trie.match(tokens)
        self.stored.touch(match.path)
        return match.in_memory()

    def wanted(self, tokens: Tokens[int], at_most: int | None = None) -> Wanted | None:
        """What is to be brought back of a prompt; None: nothing that the store has beyond memory, or that is worth it."""
        wanted = self._on_disk(self.known.trie.match(tokens), len(tokens) - 1 if at_most is None else at_most)
        return wanted if wanted is not None and self.stored and self.stored.is_worth_reading(wanted) else None

    def _on_disk(self, match: Match, most: int) -> Wanted | None:
        if self.stored is None:
            return None
        return self.stored.wanted(match, most, resumable(self.slabs, match.in_memory(), most)[0])

    def look(self, tokens: Tokens[int]) -> Lookup:
        """What a fetch of these tokens would find. Changes nothing."""
        tokens = _ids(tokens)
        match = self.known.trie.match(tokens)
        return explain(self.known, tokens, match, resumable(self.slabs, match, len(tokens) - 1)[0])

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
        sequence = sequence_of(caches)
        if sequence is not None:
            sequence.release()

    def _keep(self, tokens: Tokens[int], caches: list[Any], kind: str, goes_on: bool) -> int:
        sequence = sequence_of(caches)
        if sequence is None:
            imported = self._import(caches, len(tokens))
            return 0 if imported is None else self.finish(tokens, imported, kind)
        leaves = leaves_of(caches)
        offsets = [leaf.offset for leaf in leaves if isinstance(leaf, PooledLayer)]
        count: int = min([len(tokens), *offsets])
        if not count:
            return 0
        # A state is what it is now: it cannot be cut back to where the tokens end.
        places = self.slabs.spec.needs_checkpoints and all(offset == count for offset in offsets)
        # Room before the path: making it may evict what the path would lean on.
        room = places and self._has_room(sequence, goes_on)
        node = self._insert(_ids(tokens)[:count], sequence, kind)
        if room and count not in node.checkpoints:
            self._place(node, count, sequence, leaves, kind)
        self.num_skipped += places and not room
        self.known.prune(node)
        return count

    def _has_room(self, sequence: Sequence, goes_on: bool) -> bool:
        """Whether a checkpoint of a sequence can be kept; its states take the place of the sequence's own where that ends."""
        if not goes_on:
            sequence.count_states(0)
        states = self.slabs.spec.fixed_bytes_per_agent()
        return (not states or self.room.for_states(states)) and (not goes_on or self.room.for_second_rings(sequence))

    def _place(self, node: Node, position: int, sequence: Sequence, leaves: list[Any], kind: str) -> None:
        rings = {
            leaf.place.group: (tuple(sequence.tables[leaf.place.group].ids), leaf.ring_index)
            for leaf in leaves
            if isinstance(leaf, PooledRotatingKVCache)
        }
        states = {i: copied(leaf.cache) for i, leaf in state_caches(leaves).items()}
        checkpoint = Checkpoint(position, rings, states, kind)
        self.known.add_checkpoint(node, checkpoint)
        if self.stored is not None:
            self.stored.placed.note(node, checkpoint)

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

    def _import(self, caches: list[Any], tokens: int) -> list[Any] | None:
        """mlx-lm's caches of one sequence of `tokens`, copied into the pool; None where there is no room."""
        sequence = Sequence(self.slabs)
        theirs = leaves_of(caches)
        held = max([0, *(leaf.offset for leaf in theirs if hasattr(leaf, "offset"))])
        counts = [self.slabs.spec.blocks(held, group.layer) for group in self.slabs.spec.groups]
        if not self.room.can_promise(sequence.tables, counts):
            self.num_skipped += 1
            return None
        pooled = pooled_caches(self.slabs, sequence)
        for mine, their in zip(leaves_of(pooled), theirs, strict=True):
            if isinstance(mine, PooledArraysCache):
                mine.cache = list(their.cache)
            elif isinstance(mine, PooledLayer):
                mine.state = their.state
        return pooled

    def _note(self, caches: list[Any]) -> None:
        sequence = sequence_of(caches)
        assert sequence is not None, "caches of a model that has none"
        self._handed_out.add(sequence)

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
    def alarm(self) -> str | None:
        """What is wrong if prompts are known again and again and next to nothing of them can be resumed."""
        if self.num_known_tokens < ALARM_TOKENS or self.num_hit_tokens > self.num_known_tokens * ALARM_SHARE:
            return None
        found = f"{self.num_hit_tokens} of {self.num_known_tokens} known tokens were reused"
        own = self.slabs.spec.bytes_per_checkpoint()
        return f"{found}: checkpoints are gone before they are asked for. One takes {own} bytes; raise --pool-bytes."

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
