"""Admission: reserves blocks for sequences, and evicts cached blocks that no sequence holds where
that is needed.

    admit(sequence)              reserve all that a request may need; its prompt's blocks are taken
                                 at once
    ensure_next_blocks(batch)    reserve the blocks of each sequence's next tokens
    try_reserve_rows(sequence)   reserve those of drafts, if they fit
    reserve, try_reserve         evict as needed and reserve, all or none

Owned by the generation thread.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import PoolExhaustedError
from ..kv.arena import KVArena
from ..kv.blocks import BlockTable, by_group
from ..kv.layer_caches import PooledLayer
from ..kv.pool import BlockPool
from ..kv.prompt_cache import blocks_of, leaves_of, sequence_of, take_over
from ..kv.sequence import SequenceBlocks
from ..kv.step import missing_blocks
from ..spec import BLOCK_TOKENS, blocks_for
from .eviction import evict_for
from .index import KVIndex
from .retention import Pins


@dataclass
class Admission:
    """Reserves blocks of `arena` for sequences, and evicts cached prefixes for them.

    Timed pins are released for requests, the one that ends soonest first, but not for an insert.
    """

    arena: KVArena
    index: KVIndex
    pins: Pins

    @property
    def pool(self) -> BlockPool:
        return self.arena.pool

    def evict_for(self, counts: Mapping[int, int]) -> None:
        """Evict what counts[group] more blocks need; nothing if that would not be enough."""
        self.index.remove_evicted(evict_for(self.pool, counts))

    def reserve(self, tables: list[BlockTable], counts: list[int]) -> None:
        """Reserve counts[i] more blocks for tables[i], evicting as needed.

        Raises PoolExhaustedError and reserves nothing.
        """
        if self.try_reserve(tables, counts):
            return
        if not self._could_reserve(tables, counts) or not self._unpin_until(
            lambda: self.try_reserve(tables, counts)
        ):
            self._reserve(tables, counts)

    def try_reserve(self, tables: list[BlockTable], counts: list[int]) -> bool:
        """reserve() without unpinning anything. Returns whether it could."""
        try:
            self._reserve(tables, counts)
        except PoolExhaustedError:
            return False
        return True

    def _reserve(self, tables: list[BlockTable], counts: list[int]) -> None:
        self.evict_for(by_group(tables, counts))
        self.pool.reserve(tables, counts)

    def _unpin_until(self, attempt: Callable[[], bool]) -> bool:
        """Release as few timed pins as possible until an attempt succeeds.

        Returns whether it did; if not, the pins stay.
        """
        released = []
        while (pin := self.pins.release_soonest()) is not None:
            released.append(pin)
            if attempt():
                self.pins.num_gave_way += len(released)
                return True
        for pin in released:
            self.pins.put(pin)
        return False

    def _could_reserve(self, tables: list[BlockTable], counts: list[int]) -> bool:
        """Return whether the blocks might fit if nothing were pinned: if not, no pin needs to be
        tried.
        """
        if not self.pins:
            return False
        groups = self.pool.counts()
        usable = sum((g.free - g.reserved + g.evictable) * g.bytes_per_block for g in groups)
        needed = sum(
            count * groups[group].bytes_per_block
            for group, count in by_group(tables, counts).items()
        )
        return needed <= usable + self.pool.pool_bytes - self.pool.nbytes

    def ensure_next_blocks(self, batch: Collection[tuple[list[Any], int]]) -> None:
        """Reserve the blocks of each sequence's next tokens: of its layer caches and their number.

        Raises PoolExhaustedError.
        """
        steps = self.arena.steps
        if None not in steps and {tokens for _, tokens in batch} == {1}:
            caches = [own for own, _ in batch]
            for step in steps:
                if not step.may_move_on(caches):
                    break
            else:
                return
        tables, counts = [], []
        for caches, tokens in batch:
            for cache in self._firsts_of_groups(caches):
                missing = cache.missing_blocks(tokens)
                if missing:
                    tables.append(cache.sequence.tables[cache.place.group])
                    counts.append(missing)
        if tables:
            self.reserve(tables, counts)

    def try_reserve_rows(self, caches: list[Any], rows: int) -> bool:
        """Reserve the blocks of a sequence's next tokens, computed by rows; nothing is unpinned.

        Returns whether it could.
        """
        firsts = self._firsts_of_groups(caches)
        counts = [missing_blocks(cache, rows) for cache in firsts]
        if not any(counts):
            return True
        tables = [cache.sequence.tables[cache.place.group] for cache in firsts]
        capacities = [table.capacity for table in tables]
        if not self.try_reserve(tables, counts):
            return False
        for table, capacity in zip(tables, capacities, strict=True):
            # The blocks of rows that are rolled back are returned to all sequences.
            table.capacity = capacity
        return True

    def _firsts_of_groups(self, caches: list[Any]) -> list[PooledLayer]:
        """The cache of a sequence's first layer in each group."""
        leaves = leaves_of(caches)
        return [leaves[group.layers[0]] for group in self.arena.spec.groups]

    def ensure_spare_blocks(self, blocks: int) -> None:
        """Make sure that `blocks` more fit in each full group. Raises PoolExhaustedError."""
        if not blocks:
            return
        tables = [self.pool.open_table(group) for group in self.arena.full_groups]
        self.reserve(tables, [blocks] * len(tables))
        for table in tables:
            self.pool.release(table)

    def evict_states_for(self, n_bytes: int) -> bool:
        """Evict the least recently used states until `n_bytes` more fit.

        Returns whether they do.
        """
        limit = self.arena.state_bytes - self.arena.running_bytes - n_bytes
        while limit >= 0 and self.index.state_bytes > limit and self.index.evict_state():
            pass
        return 0 <= limit >= self.index.state_bytes

    def ensure_states(self, n_bytes: int) -> None:
        """evict_states_for() for a request: timed pins are released too.

        Raises PoolExhaustedError.
        """
        if not n_bytes or self.evict_states_for(n_bytes):
            return
        is_possible = self.arena.running_bytes + n_bytes <= self.arena.state_bytes
        if not is_possible or not self._unpin_until(lambda: self.evict_states_for(n_bytes)):
            figures = (
                f"States have {self.arena.state_bytes} bytes, and {self.arena.running_bytes} are "
                "in use."
            )
            raise PoolExhaustedError(1, 0, 0, "state", f"{figures} Raise --pool-bytes.")

    def ensure_growth(self, caches: list[Any], tokens: int) -> None:
        """ensure_states() for what the states of a sequence grow by, up to `tokens` tokens."""
        sequence = sequence_of(caches)
        assert sequence is not None, "caches of a pool without a sequence"
        needed = self.arena.spec.state_bytes(tokens)
        if needed > sequence.state_bytes:
            self.ensure_states(needed - sequence.state_bytes)
            sequence.state_bytes = needed

    def admit(self, sequence: SequenceBlocks, hit: int, prompt: int, total: int) -> None:
        """Reserve blocks for `total` tokens of which `hit` are held; the prompt's blocks are taken
        at once, to be neighbours.

        Raises PoolExhaustedError.
        """
        states = self.arena.spec.state_bytes(total)
        self.ensure_states(states)
        sequence.state_bytes = states
        one_run = not self.arena.capabilities.ragged
        counts = []
        for table in sequence.tables:
            if table.max_blocks is not None:
                counts.append(min(table.max_blocks, blocks_for(total)))
                continue
            copied = (
                len(table) if one_run else self._ends_in_shared_block(sequence, table.group, hit)
            )
            counts.append(blocks_for(total) - len(table) + copied)
        self.reserve(sequence.tables, counts)
        for group in self.arena.full_groups:
            if one_run and hit:
                sequence.make_own_run(group)
            elif self._ends_in_shared_block(sequence, group, hit):
                sequence.copy_on_write(group, hit // BLOCK_TOKENS)
            table = sequence.tables[group]
            self.pool.extend(table, blocks_for(prompt) - len(table))

    def admit_import(self, theirs: list[Any]) -> list[Any] | None:
        """Pooled caches with the content of mlx-lm's.

        Returns None if the pool has no blocks for them, else as take_over().
        """
        sequence = SequenceBlocks(self.arena)
        return (
            take_over(sequence, theirs)
            if self.try_reserve(sequence.tables, blocks_of(self.arena, theirs))
            else None
        )

    def reserve_second_rings(self, sequence: SequenceBlocks) -> bool:
        """Reserve copies of a checkpoint's ring blocks for a sequence that continues.

        Returns whether it could.
        """
        tables = [sequence.tables[g] for g in self.arena.window_groups]
        return self.try_reserve(
            tables, [max(0, (table.max_blocks or 0) - table.reserved) for table in tables]
        )

    def _ends_in_shared_block(self, sequence: SequenceBlocks, group: int, hit: int) -> bool:
        index, token = divmod(hit, BLOCK_TOKENS)
        return token > 0 and self.pool.is_shared(sequence.tables[group], index, token)
