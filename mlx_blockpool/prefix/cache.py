"""PrefixCache: each prefix is computed once, and every prompt that begins with it shares its
blocks.

    acquire(tokens)          match, choose where to resume, reserve blocks: caches that hold [0,
                             hit)
    insert(tokens, caches)   add what the caches hold to the trie; the sequence continues
    release(tokens, caches)  insert, and give the blocks back to the pool, evictable
    discard(caches)          give the blocks back and cache nothing
    use(tokens)              acquire for a `with` block, then release, or discard after an error
    lend(count)              empty caches for tokens that are never cached

Of the n tokens of a prompt:

    [0, hit)         held by the caches that acquire() returns, in blocks that the trie and other
                     sequences share
    [hit, matched)   in the trie, but there is no checkpoint to resume from, the pool is full, or
                     only one token would be left
    [matched, n)     not cached

Layer caches hold their blocks themselves: the cache knows tokens, the pool knows blocks.
Owned by the generation thread.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Tokens
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat, takewhile
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from ..config import PoolConfig
from ..errors import PoolExhaustedError, RequestTooLargeError, StateError
from ..kv.arena import KVArena
from ..kv.layer_caches import PooledLayer, PooledRotatingKVCache
from ..kv.prompt_cache import leaves_of, resumed, sequence_of, state_caches, tokens_held
from ..kv.quantised import own_copies
from ..kv.sequence import SequenceBlocks
from ..spec import BLOCK_TOKENS, WindowLayer, blocks_for
from ..store.hashing import encode
from .admission import Admission
from .eviction import evict
from .index import KVIndex
from .lookup import Lookup, explain
from .retention import Retention, RetentionPolicy
from .salts import SHARED
from .trie import Checkpoint, Node, PinnedPrefix, PrefixRef, positions

log = logging.getLogger(__name__)

ORDINARY, USUAL = RetentionPolicy(), PoolConfig()


@dataclass(frozen=True)
class Acquired:
    """Layer caches that hold the first `lookup.hit` tokens, and the tokens that are left to
    compute (at least one).
    """

    caches: list[Any]
    rest: list[int]
    lookup: Lookup


class PrefixCache:
    """The prefix cache of one model in the pool `arena`. It stands in for mlx-lm's LRUPromptCache
    of a single model.

    namespace:  names what the keys and values are computed with; empty: the fingerprint of the spec
                does.
    admission:  evicts and reserves blocks.
    retention:  decides what is retained for whom, and how long.
    """

    def __init__(self, arena: KVArena, namespace: str = "", config: PoolConfig = USUAL) -> None:
        self.arena = arena
        self.pool = arena.pool
        self.index = KVIndex(
            arena.pool, arena.full_groups, namespace or arena.spec.name_on_all_ranks()
        )
        self.retention = Retention(self.index, self.pool.pool_bytes, arena.state_bytes, config)
        self.admission = Admission(arena, self.index, self.retention.pins)
        arena.evict_with(self.admission.evict_for)
        # The cached prefix whose blocks each acquired sequence holds: insert() continues from
        # there.
        self._refs: WeakKeyDictionary[SequenceBlocks, PrefixRef] = WeakKeyDictionary()
        self._lent: WeakSet[SequenceBlocks] = WeakSet()
        self._pinned: dict[tuple[int, ...], list[PinnedPrefix]] = {}
        self._config = config
        # What mlx-lm's methods were given as the model: the first one, in a tuple, and the last
        # other one.
        self._model: tuple[Any] | None = None
        self._refused: Any = None
        self.num_lookups = self.num_prompt_tokens = self.num_matched_tokens = (
            self.num_hit_tokens
        ) = self.num_skipped = 0

    # -- acquire -----------------------------------------------------------------------------------

    def acquire(
        self,
        tokens: Tokens[int],
        max_tokens: int = PoolConfig.max_tokens,
        at_most: int | None = None,
        salt: bytes = SHARED,
        start: PrefixRef | None = None,
    ) -> Acquired:
        """Caches for a prompt and `max_tokens` more. A hit has no more than `at_most` tokens.

        Only what was inserted under the same `salt` is found; `start` as in match(). Raises
        RequestTooLargeError if it can never fit in the pool, PoolExhaustedError if it cannot fit
        now.
        """
        match = self.match(tokens, salt, start)
        self._restore(match, len(tokens) - 1 if at_most is None else at_most)
        return self.acquire_resident(tokens, max_tokens, at_most, salt, match)

    def _restore(self, match: PrefixRef, at_most: int) -> None:
        """Bring what is on disk of a match into memory, before `at_most` tokens of it at most
        are acquired.
        """

    def acquire_resident(
        self,
        tokens: Tokens[int],
        max_tokens: int,
        at_most: int | None = None,
        salt: bytes = SHARED,
        start: PrefixRef | None = None,
    ) -> Acquired:
        """acquire() from memory alone."""
        tokens = _ids(tokens)
        if not tokens:
            raise ValueError("The prompt is empty. Give at least one token.")
        total = len(tokens) + max_tokens
        if total > self.pool.sequence_capacity():
            raise RequestTooLargeError(total, self.pool.sequence_capacity())
        most = len(tokens) - 1 if at_most is None else min(at_most, len(tokens) - 1)
        match = self._resident(self.match(tokens, salt, start))
        hit, checkpoint = resumable(self.arena, match, most)
        try:
            caches = lay_out(self.admission, match, hit, checkpoint, len(tokens), total)
        except PoolExhaustedError:
            if not hit:
                raise
            # A window that resumes needs two rings; from the first token on it needs one.
            caches = lay_out(self.admission, match, 0, None, len(tokens), total)
            lookup = Lookup(len(tokens), match.tokens, 0, "no room")
        except StateError as error:
            assert checkpoint is not None, "a state without a checkpoint"
            log.warning("%s. What it holds is computed again.", error)
            self.index.remove_checkpoint(checkpoint)
            return self.acquire_resident(tokens, max_tokens, at_most, salt)
        else:
            lookup = explain(self.index, tokens, match, hit, salt)
            if checkpoint is not None:
                self.index.use(checkpoint)
        self.retention.use(match.path, lookup.hit)
        self._refs[_sequence(caches)] = match.first(lookup.hit)
        self._count(lookup)
        return Acquired(caches, list(tokens[lookup.hit :]), lookup)

    @contextmanager
    def use(
        self, tokens: list[int], max_tokens: int = PoolConfig.max_tokens, salt: bytes = SHARED
    ) -> Iterator[Acquired]:
        """acquire() for a `with` block, whose end releases the caches.

        Append to `tokens` what the model generates, so that the reply is cached as well. After an
        exception the blocks return to the pool, and nothing is cached. Raises as acquire() does.
        """
        hit = self.acquire(tokens, max_tokens, salt=salt)
        try:
            yield hit
        except BaseException:
            self.discard(hit.caches)
            raise
        self.release(tokens, hit.caches, policy=RetentionPolicy(salt=salt))

    def lend(self, count: int) -> list[Any]:
        """Empty caches for `count` tokens, until discard(). Raises as acquire() does."""
        if count > self.pool.sequence_capacity():
            raise RequestTooLargeError(count, self.pool.sequence_capacity())
        caches = lay_out(self.admission, PrefixRef(), 0, None, count, count)
        self._lent.add(_sequence(caches))
        return caches

    @property
    def num_lent(self) -> int:
        """How many caches are lent: their blocks are returned without the engine's doing."""
        return len(self._lent)

    def _count(self, lookup: Lookup) -> None:
        self.num_lookups += 1
        self.num_prompt_tokens += lookup.tokens
        self.num_matched_tokens += lookup.matched
        self.num_hit_tokens += lookup.hit

    def match(
        self, tokens: Tokens[int], salt: bytes = SHARED, start: PrefixRef | None = None
    ) -> PrefixRef:
        """The longest cached prefix of `tokens` under a salt, in memory or on disk. Changes
        nothing.

        `start`: a prefix of these tokens from an earlier match() or from ref_of(): only what
        follows it is compared.
        """
        return self.index.trie.match(_ids(tokens), salt, start)

    def ref_of(self, caches: list[Any]) -> PrefixRef | None:
        """The prefix that acquire(), insert() or release() found last for these caches, or None
        if they are not in the pool.
        """
        sequence = sequence_of(caches)
        return None if sequence is None else self._refs.get(sequence)

    def _resident(self, match: PrefixRef) -> PrefixRef:
        """The part of a match that is in memory, which is about to be acquired."""
        return in_memory(match)

    def within_reach(self, tokens: Tokens[int], salt: bytes = SHARED) -> int:
        """How many tokens of a prompt need not be computed if it is acquired now."""
        return resumable(self.arena, in_memory(self.match(tokens, salt)), len(tokens) - 1)[0]

    def look(self, tokens: Tokens[int], salt: bytes = SHARED) -> Lookup:
        """What acquire() of these tokens would find. Changes nothing."""
        tokens = _ids(tokens)
        match = self.match(tokens, salt)
        return explain(
            self.index, tokens, match, resumable(self.arena, match, len(tokens) - 1)[0], salt
        )

    # -- insert ------------------------------------------------------------------------------------

    def insert(
        self,
        tokens: Tokens[int],
        caches: list[Any],
        kind: str = "assistant",
        policy: RetentionPolicy = ORDINARY,
    ) -> int:
        """Cache what `caches` hold of `tokens`; the sequence may continue. Returns how many tokens
        are cached now.

        Takes pooled caches by reference and mlx-lm's own by copy. What does not fit is skipped, and
        counted in num_skipped.
        """
        return self.remember(tokens, caches, kind, policy, continues=True).tokens

    def release(
        self,
        tokens: Tokens[int],
        caches: list[Any],
        kind: str = "assistant",
        policy: RetentionPolicy = ORDINARY,
    ) -> int:
        """insert(), and give the blocks back to the pool, evictable.

        Using the caches again raises ReleasedCacheError.
        """
        count = self.remember(tokens, caches, kind, policy, continues=False).tokens
        self._release(caches, "release()")
        if policy.retention == "day":
            ref = self.match(_ids(tokens)[:count], policy.salt, self.ref_of(caches))
            self.retention.retain_for_a_day(pin_of(self.arena, ref))
        return count

    def discard(self, caches: list[Any]) -> None:
        """Give the blocks back and cache nothing.

        Using the caches again raises ReleasedCacheError.
        """
        self._release(caches, "discard()")

    def _release(self, caches: list[Any], released_by: str) -> None:
        sequence = sequence_of(caches)
        if sequence is not None:
            sequence.release(released_by)
            self._lent.discard(sequence)

    def remember(
        self,
        tokens: Tokens[int],
        caches: list[Any],
        kind: str,
        policy: RetentionPolicy,
        continues: bool,
    ) -> PrefixRef:
        """insert() or, where the sequence does not continue, the first half of release(): the
        caches still hold their blocks.
        """
        sequence = sequence_of(caches)
        if sequence is not None and sequence.arena is not self.arena:
            # Its block ids are another pool's.
            sequence = None
        if sequence is None:
            imported = self._import(caches)
            if imported is None or not self.release(tokens, imported, kind, policy):
                return PrefixRef()
            return self._refs[_sequence(imported)]
        leaves = leaves_of(caches)
        if any(isinstance(leaf, PooledLayer) and leaf.first_held for leaf in leaves):
            # Nobody has written the first blocks, which others would read.
            self.num_skipped += 1
            return PrefixRef()
        offsets = [leaf.offset for leaf in leaves if isinstance(leaf, PooledLayer)]
        count: int = min([len(tokens), *offsets])
        if not count:
            return PrefixRef()
        # A state is what it is now: it cannot be cut back to where the tokens end.
        places = self.arena.spec.needs_checkpoints and all(offset == count for offset in offsets)
        places = places and tokens_held(leaves) <= count
        # Before the path is added: an eviction may remove what the path would continue.
        fits = places and self._checkpoint_fits(sequence, count, continues)
        path = self._insert(_ids(tokens)[:count], sequence, kind, policy)
        ref = self._refs[sequence] = PrefixRef.from_path(path, count, policy.salt)
        node = path[-1]
        if fits and count not in node.checkpoints:
            self._place(node, count, sequence, leaves, kind, policy)
        self.num_skipped += places and not fits
        self.index.prune(node)
        return ref

    def _checkpoint_fits(self, sequence: SequenceBlocks, count: int, continues: bool) -> bool:
        """Return whether a checkpoint after `count` tokens fits.

        Where its sequence ends, its states replace those of the sequence.
        """
        if not continues:
            sequence.state_bytes = 0
        states = self.arena.spec.state_bytes(count)
        if states and not self.admission.evict_states_for(states):
            return False
        return not continues or self.admission.reserve_second_rings(sequence)

    def _place(
        self,
        node: Node,
        position: int,
        sequence: SequenceBlocks,
        leaves: list[Any],
        kind: str,
        policy: RetentionPolicy,
    ) -> None:
        rings = {
            leaf.place.group: (tuple(sequence.tables[leaf.place.group].ids), leaf.ring_index)
            for leaf in leaves
            if isinstance(leaf, PooledRotatingKVCache)
        }
        try:
            states = {
                i: own_copies(leaf.saved_arrays()) for i, leaf in state_caches(leaves).items()
            }
        except StateError as error:
            log.warning("%s. The prompt is not resumed there.", error)
            self.num_skipped += 1
            return
        checkpoint = Checkpoint(position, rings, states, kind, policy.owner)
        # States of other classes may take more than was seen when the model was loaded.
        fits = checkpoint.nbytes <= self.arena.spec.state_bytes(position)
        if fits or self.admission.evict_states_for(checkpoint.nbytes):
            self.index.add_checkpoint(node, checkpoint)
        else:
            self.num_skipped += 1

    def _insert(
        self, tokens: Tokens[int], sequence: SequenceBlocks, kind: str, policy: RetentionPolicy
    ) -> list[Node]:
        """Add the path of `tokens`; blocks that are cached already replace the sequence's own."""
        path = self._held_path(sequence, policy.salt)[: len(tokens) // BLOCK_TOKENS]
        node = path[-1] if path else self.index.trie.root_of(policy.salt)
        for index, start in enumerate(range(node.end, len(tokens), BLOCK_TOKENS), len(path)):
            edge = encode(tokens[start : start + BLOCK_TOKENS])
            blocks = tuple(
                (group, sequence.tables[group].ids[index]) for group in self.arena.full_groups
            )
            child = self.index.trie.child(node, edge)
            if child is None:
                child = self.index.add(node, edge, blocks, kind, policy.owner)
            elif len(edge) == len(child.tokens) and not child.in_memory:
                self.index.set_blocks(child, blocks, policy.owner)
            elif len(edge) == len(child.tokens) and child.is_full:
                for group, block in child.blocks:
                    if sequence.tables[group].ids[index] != block:
                        self.pool.replace_shared(sequence.tables[group], index, block)
            path.append(child)
            node = child
        return path

    def _held_path(self, sequence: SequenceBlocks, salt: bytes) -> list[Node]:
        """The whole edges whose blocks a sequence still holds.

        A block that the trie refers to is copied before it is written to: where the ids are the
        same, so are the tokens.
        """
        ref = self._refs.get(sequence)
        if ref is None or ref.salt != salt or not self.arena.full_groups:
            return []
        held = zip(
            *(zip(repeat(g), sequence.tables[g].ids, strict=False) for g in self.arena.full_groups),
            strict=False,
        )
        pairs = zip(ref.cached_nodes(), held, strict=False)
        return [node for node, _ in takewhile(lambda pair: pair[0].blocks == pair[1], pairs)]

    # -- in place of mlx-lm's LRUPromptCache -------------------------------------------------------

    def fetch_nearest_cache(
        self, model: Any, tokens: list[int]
    ) -> tuple[list[Any] | None, list[int]]:
        """acquire() under mlx-lm's name: (caches, tokens left to compute), or (None, tokens) where
        nothing is cached.

        At least one token is left. A prompt that does not fit in the pool is a miss, and so is one
        of another model than the first call named.
        """
        tokens = list(_ids(tokens))
        left = self.pool.sequence_capacity() - len(tokens)
        if not tokens or left < 1 or not self._is_own(model):
            return None, tokens
        if not self.within_reach(tokens) and not (lookup := self.look(tokens)).hit:
            self._count(lookup)
            return None, tokens
        try:
            acquired = self.acquire(tokens, min(self._config.max_tokens, left))
        except PoolExhaustedError:
            return None, tokens
        if not acquired.lookup.hit:
            self.discard(acquired.caches)
            return None, tokens
        return acquired.caches, acquired.rest

    def insert_cache(
        self,
        model: Any,
        tokens: list[int],
        prompt_cache: list[Any],
        *,
        cache_type: str = "assistant",
    ) -> None:
        """insert() under mlx-lm's name: the caches may be used further, and their blocks return
        to the pool with the last one.
        """
        if self._is_own(model):
            self.insert(tokens, prompt_cache, cache_type)

    def _is_own(self, model: Any) -> bool:
        """Return whether `model` is the one that the first call named."""
        if self._model is None:
            self._model = (model,)
        own: bool = self._model == (model,)
        if not own and model != self._refused:
            self._refused = model
            log.warning(
                "This PrefixCache is of the model %s and caches nothing of %s. Open one for each.",
                self._model[0],
                model,
            )
        return own

    def _import(self, caches: list[Any]) -> list[Any] | None:
        """mlx-lm's caches of one sequence, copied into the pool.

        Returns None if they do not fit, or are of another kind.
        """
        taken = None
        try:
            taken = self.admission.admit_import(caches)
        except ValueError as error:
            log.warning("Prompt caches were not cached: %s", error)
        self.num_skipped += taken is None
        return taken

    # -- evict and pin -----------------------------------------------------------------------------

    def trim_to(self, n_bytes: int) -> None:
        """Evict until at most `n_bytes` are cached, or all the rest is held or pinned."""
        went = True
        while went and self.nbytes > max(0, n_bytes):
            evicted = [
                first
                for group in range(len(self.arena.spec.groups))
                for first in evict(self.pool, group, 1)
            ]
            self.index.remove_evicted(evicted)
            went = self.index.evict_state() or bool(evicted)
        self.arena.settle()

    def pin(self, tokens: Tokens[int]) -> int:
        """Keep the cached part of `tokens` in memory until unpin(), without a limit.

        Returns its length in tokens.
        """
        pin = pin_of(self.arena, self.match(tokens))
        self.index.pin(pin)
        self._pinned.setdefault(tuple(_ids(tokens)), []).append(pin)
        return pin.ref.tokens

    def unpin(self, tokens: Tokens[int]) -> int:
        """Take back one pin() of the same tokens. Returns how many of them are cached."""
        pins = self._pinned.pop(tuple(_ids(tokens)), [])
        if pins:
            self.index.unpin(pins.pop())
        if pins:
            self._pinned[tuple(_ids(tokens))] = pins
        return self.match(tokens).tokens

    def pin_for(
        self,
        tokens: Tokens[int],
        seconds: float,
        salt: bytes = SHARED,
        start: PrefixRef | None = None,
    ) -> None:
        """Keep the cached part of `tokens` in memory for `seconds` after each use, within the
        limits. `start` as in match().
        """
        self.retention.pins.pin(pin_of(self.arena, self.match(tokens, salt, start)), seconds)

    def use_clock(self, clock: Callable[[], float]) -> None:
        """Measure by `clock` from now on how long pins last; by default by time.monotonic().

        Nothing is pinned yet.
        """
        self.retention.pins.clock = self.retention.days.clock = clock

    def keep_up(self) -> None:
        """Between two steps: unpin what has been retained for long enough. Cheap."""
        self.retention.expire()

    def release_all(self) -> None:
        """Release the blocks of all acquired caches.

        Using one of them again raises ReleasedCacheError.
        """
        for sequence in list(self._refs):
            sequence.release("release_all()")
        self._refs.clear()

    def clear(self) -> None:
        """Remove everything. What live sequences hold stays with them."""
        self._pinned.clear()
        self.retention.clear()
        self.index.clear()
        self.arena.settle()

    # -- figures -----------------------------------------------------------------------------------

    def figures(self) -> list[int]:
        """Numbers of all that decides what is found and evicted, equal on all ranks of a group.

        Cheap.
        """
        found = [self.num_lookups, self.num_hit_tokens, self.index.history, self.index.nbytes]
        for each in self.pool.groups:
            found += (
                len(each.blocks),
                each.free.count,
                len(each.evictable),
                each.reserved,
                each.num_evicted,
            )
        return found

    @property
    def alarm(self) -> str | None:
        """A warning if prompts are matched again and again and next to nothing of them can be
        resumed.
        """
        config, matched = self._config, self.num_matched_tokens
        if matched < config.alarm_tokens or self.num_hit_tokens > matched * config.alarm_share:
            return None
        found = f"{self.num_hit_tokens} of {self.num_matched_tokens} known tokens were reused"
        own = self.arena.spec.bytes_per_checkpoint()
        return (
            f"{found}: checkpoints are evicted before they are used. One takes {own} bytes; raise "
            "--pool-bytes."
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all cached blocks, each counted once however many sequences share it."""
        return self.index.nbytes

    def __len__(self) -> int:
        """How many sequences in memory are not the beginning of another."""
        return self.index.num_ends

    def stats_by_type(self) -> dict[str, dict[str, int]]:
        """Sequences and bytes in memory by what they end with: system, user or assistant.

        They add up to len() and nbytes.
        """
        sequences = Counter(node.kind for node in self.index.ends())
        sizes = self.index.bytes_by_type()
        return {
            kind: {"n_sequences": sequences[kind], "n_bytes": sizes[kind]}
            for kind in ("assistant", "user", "system")
        }

    def check(self) -> None:
        """The invariants of trie and pool together.

        Raises AssertionError: a broken one is our own bug.
        """
        self.index.check()


def _sequence(caches: list[Any]) -> SequenceBlocks:
    sequence = sequence_of(caches)
    assert sequence is not None, "caches of a model that has none"
    return sequence


def _ids(tokens: Any) -> Tokens[int]:
    """Token ids as a sequence of ints, also where they come as an mlx or numpy array."""
    ids: Tokens[int] = tokens.tolist() if hasattr(tokens, "tolist") else tokens
    return ids


# -- where a prefix can be resumed, and the layer caches that resume it


def in_memory(ref: PrefixRef) -> PrefixRef:
    """As much of a prefix as has its blocks in the pool, without a gap from the first token on."""
    count = next(
        (index for index, node in enumerate(ref.path) if not node.in_memory),
        len(ref.path),
    )
    return ref if count == len(ref.path) else ref.first(count * BLOCK_TOKENS)


def last_checkpoint(ref: PrefixRef, at_most: int) -> tuple[Node | None, int]:
    """The position of the last checkpoint in the first `at_most` tokens, and the node that has
    it; (None, 0): none.
    """
    found = positions(ref.path, at_most, lambda node: node.checkpoints)
    return next(found, (None, 0))


def resumable(arena: KVArena, match: PrefixRef, most: int) -> tuple[int, Checkpoint | None]:
    """How many of the matched tokens can be taken over, `most` at most, and from which
    checkpoint where one is needed.
    """
    count = max(0, min(match.tokens, most))
    if not arena.spec.needs_checkpoints or not count:
        return count, None
    node, position = last_checkpoint(match, count)
    if position < count:
        later = _unwrapped(arena, match.path[-1], count)
        if later is not None:
            return count, later
    return position, None if node is None else node.checkpoints[position]


def pin_of(arena: KVArena, ref: PrefixRef) -> PinnedPrefix:
    """A pin of all that the whole of a prefix is resumed from."""
    return PinnedPrefix(
        ref, *(last_checkpoint(ref, ref.tokens) if arena.spec.needs_checkpoints else ())
    )


def _unwrapped(arena: KVArena, node: Node, count: int) -> Checkpoint | None:
    """A later checkpoint whose rings still hold every token: it can be cut back to `count`.

    A state cannot.
    """
    if arena.state_leaves:
        return None
    sizes = [g.layer.max_size for g in arena.spec.groups if isinstance(g.layer, WindowLayer)]
    near = [node, *node.children[:64]]
    return next(
        (c for n in near for c in n.checkpoints.values() if count <= c.position < min(sizes)),
        None,
    )


def lay_out(
    admission: Admission,
    match: PrefixRef,
    hit: int,
    checkpoint: Checkpoint | None,
    prompt: int,
    total: int,
) -> list[Any]:
    """Caches that hold `hit` tokens of a match, with blocks for `total`.

    Raises PoolExhaustedError, or StateError for a checkpoint, and holds nothing then.
    """
    sequence = SequenceBlocks(admission.arena)
    rings, states = {}, {}
    if checkpoint is not None:
        states = checkpoint.states
        rings = {
            group: hit if hit < checkpoint.position else index
            for group, (_, index) in checkpoint.rings.items()
        }
    try:
        _append_shared(sequence, match, hit, checkpoint)
        admission.admit(sequence, hit, prompt, total)
        return resumed(sequence, hit, rings, states)
    except (PoolExhaustedError, StateError):
        sequence.release()
        raise


def _append_shared(
    sequence: SequenceBlocks, match: PrefixRef, hit: int, checkpoint: Checkpoint | None
) -> None:
    """Hold the blocks of the hit, before anything is evicted for the rest."""
    path = match.path[: blocks_for(hit)]
    for index, group in enumerate(sequence.arena.full_groups):
        sequence.pool.append_shared(
            sequence.tables[group], [node.blocks[index][1] for node in path]
        )
    if checkpoint is not None:
        for group, (ids, _) in checkpoint.rings.items():
            sequence.pool.append_shared(sequence.tables[group], ids[: blocks_for(hit)])
