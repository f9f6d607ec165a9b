"""Admission: room for sequences, made by evicting cached blocks that no sequence holds.

    admit(sequence)              reserve all that a request may need; its prompt's blocks are taken at once
    ensure_next_blocks(batch)    reserve the blocks of each sequence's next tokens
    try_reserve_rows(sequence)   reserve those of drafts, if there is room
    reserve, try_reserve         evict as needed and reserve, all or none
    trim_to                      evict down to a size

Owned by the generation thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ..errors import PoolExhaustedError
from ..kv.arena import KVArena
from ..kv.blocks import BlockTable, by_group
from ..kv.intake import Intake
from ..kv.layer_caches import PooledLayer
from ..kv.parts import leaves_of
from ..kv.row_attention import missing_row_blocks
from ..kv.sequence import SequenceBlocks
from ..spec import BLOCK_TOKENS, blocks_for
from .index import KVIndex, Pin
from .residency import Owned
from .retention import Pins
from .trie import Node


class Admission:
    """Reserves blocks of `arena` for sequences, and evicts cached prefixes for them.

    Timed pins give way to requests, the one that ends soonest first, but not to an insert.
    """

    def __init__(self, arena: KVArena, index: KVIndex, pins: Pins) -> None:
        self.arena = arena
        self.pool = arena.pool
        self.index = index
        self.pins = pins

    def make_room(self, counts: Mapping[int, int]) -> None:
        """Evict what is needed for `counts[group]` more blocks; nothing if it cannot be enough. See eviction_order.py."""
        self.index.uncache_blocks(self.pool.make_room(counts))

    def reserve(self, tables: list[BlockTable], counts: list[int]) -> None:
        """Reserve counts[i] more blocks for tables[i], evicting as needed. Raises PoolExhaustedError and reserves nothing."""
        try:
            self._reserve(tables, counts)
        except PoolExhaustedError:
            if not self._could_reserve(tables, counts) or not self._reserve_without_pins(tables, counts):
                raise

    def try_reserve(self, tables: list[BlockTable], counts: list[int]) -> bool:
        """reserve() without unpinning anything. Returns whether there was room."""
        try:
            self._reserve(tables, counts)
        except PoolExhaustedError:
            return False
        return True

    def _reserve(self, tables: list[BlockTable], counts: list[int]) -> None:
        self.make_room(by_group(tables, counts))
        self.pool.reserve(tables, counts)

    def _reserve_without_pins(self, tables: list[BlockTable], counts: list[int]) -> bool:
        """reserve() with as few timed pins released as possible. Returns whether there was room; without, the pins stay."""
        released = []
        while (pin := self.pins.release_soonest()) is not None:
            released.append(pin)
            if self.try_reserve(tables, counts):
                self.pins.num_gave_way += len(released)
                return True
        for pin in released:
            self.pins.put(pin)
        return False

    def _could_reserve(self, tables: list[BlockTable], counts: list[int]) -> bool:
        """Return whether there might be room if nothing were pinned: if not, no pin needs to be tried."""
        if not self.pins:
            return False
        groups = self.pool.counts()
        usable = sum((g.free - g.reserved + g.evictable) * g.bytes_per_block for g in groups)
        needed = sum(count * groups[group].bytes_per_block for group, count in by_group(tables, counts).items())
        return needed <= usable + self.pool.pool_bytes - self.pool.nbytes

    def ensure_next_blocks(self, batch: Iterable[list[Any]], tokens: int = 1) -> None:
        """Reserve the blocks of each sequence's next `tokens`; a sequence is its layer caches. Raises PoolExhaustedError."""
        tables, counts = [], []
        for cache in self._firsts_of_groups(batch):
            missing = cache.missing_blocks(tokens)
            if missing:
                tables.append(cache.sequence.tables[cache.place.group])
                counts.append(missing)
        if tables:
            self.reserve(tables, counts)

    def try_reserve_rows(self, caches: list[Any], rows: int) -> bool:
        """Reserve the blocks of a sequence's next tokens, computed by rows; nothing is unpinned. Returns whether it could."""
        firsts = list(self._firsts_of_groups([caches]))
        counts = [missing_row_blocks(cache, rows) for cache in firsts]
        if not any(counts):
            return True
        tables = [cache.sequence.tables[cache.place.group] for cache in firsts]
        capacities = [table.capacity for table in tables]
        if not self.try_reserve(tables, counts):
            return False
        for table, capacity in zip(tables, capacities, strict=True):
            # The blocks of rows that are not kept go back to all sequences.
            table.capacity = capacity
        return True

    def _firsts_of_groups(self, batch: Iterable[list[Any]]) -> Iterator[PooledLayer]:
        """The cache of each sequence's first layer in each group."""
        for caches in batch:
            leaves = leaves_of(caches)
            yield from (leaves[group.layers[0]] for group in self.arena.spec.groups)

    def need_spare(self, blocks: int) -> None:
        """Make sure that each full group has room for `blocks` more. Raises PoolExhaustedError."""
        if not blocks:
            return
        tables = [self.pool.open_table(group) for group in self.arena.full_groups]
        self.reserve(tables, [blocks] * len(tables))
        for table in tables:
            self.pool.release(table)

    def make_room_for_states(self, n_bytes: int) -> bool:
        """Evict the least recently used states until `n_bytes` more have room. Returns whether they have."""
        limit = self.arena.state_bytes - self.arena.running_bytes - n_bytes
        while limit >= 0 and self.index.state_bytes > limit and self.index.evict_state():
            pass
        return 0 <= limit >= self.index.state_bytes

    def need_states(self, n_bytes: int) -> None:
        """make_room_for_states() for a request: timed pins give way too. Raises PoolExhaustedError."""
        released: list[Pin] = []
        while n_bytes and not self.make_room_for_states(n_bytes):
            possible = self.arena.running_bytes + n_bytes <= self.arena.state_bytes
            pin = self.pins.release_soonest() if possible else None
            if pin is None:
                for other in released:
                    self.pins.put(other)
                figures = f"States have {self.arena.state_bytes} bytes, and {self.arena.running_bytes} are in use."
                raise PoolExhaustedError(1, 0, 0, "state", f"{figures} Raise --pool-bytes.")
            released.append(pin)
        self.pins.num_gave_way += len(released)

    def admit(self, sequence: SequenceBlocks, hit: int, prompt: int, total: int) -> None:
        """Reserve room for `total` tokens of which `hit` are held; the prompt's blocks are taken at once, to be neighbours.

        Raises PoolExhaustedError.
        """
        states = self.arena.spec.fixed_bytes_per_agent()
        self.need_states(states)
        sequence.count_states(states)
        one_run = not self.arena.ragged
        counts = []
        for table in sequence.tables:
            if table.max_blocks is not None:
                counts.append(min(table.max_blocks, blocks_for(total)))
                continue
            copied = len(table) if one_run else self._ends_in_shared_block(sequence, table.group, hit)
            counts.append(blocks_for(total) - len(table) + copied)
        self.reserve(sequence.tables, counts)
        for group in self.arena.full_groups:
            if one_run and hit:
                sequence.make_own_run(group)
            elif self._ends_in_shared_block(sequence, group, hit):
                sequence.copy_on_write(group, hit // BLOCK_TOKENS)
            table = sequence.tables[group]
            self.pool.extend(table, blocks_for(prompt) - len(table))

    def admit_import(self, theirs: list[Any]) -> Intake | None:
        """An intake of mlx-lm's caches, with room reserved for it; None: there is no room."""
        intake = Intake(self.arena, theirs)
        return intake if self.try_reserve(intake.sequence.tables, intake.blocks) else None

    def reserve_second_rings(self, sequence: SequenceBlocks) -> bool:
        """Reserve copies of a checkpoint's ring blocks for a sequence that continues. Returns whether there was room."""
        tables = [sequence.tables[g] for g in self.arena.window_groups]
        return self.try_reserve(tables, [max(0, (table.max_blocks or 0) - table.reserved) for table in tables])

    def trim_to(self, n_bytes: int) -> None:
        """Evict, in every group in turn, until at most `n_bytes` are cached."""
        went = True
        while went and self.index.nbytes > max(0, n_bytes):
            victims = [v for group in range(len(self.arena.spec.groups)) for v in self.pool.evict(group, 1)]
            self.index.uncache_blocks(victims)
            went = self.index.evict_state() or bool(victims)

    def trim_to_sequences(self, count: int) -> None:
        """Evict sequences that are the beginning of no other, the least recently used first, until at most `count` are cached."""
        while (surplus := len(ends := self.index.ends()) - max(0, count)) > 0:
            order = {
                (group, block): at for group in self.arena.full_groups for at, block in enumerate(self.pool.eviction_order(group))
            }
            evictable = [node for node in ends if self._is_evictable(node, order)]
            if not evictable:
                return
            for node in sorted(evictable, key=lambda node: order.get(self._first_block(node), 0))[:surplus]:
                self._evict_sequence(node, order)

    def _evict_sequence(self, end: Node, order: Mapping[Owned, int]) -> None:
        """Evict the last edge of a sequence, and the edges above it that no other sequence uses."""
        node: Node | None = end
        below: list[Node] = []
        while node is not None and node.parent is not None and not below and self._is_evictable(node, order):
            parent = node.parent
            for checkpoint in list(node.residency.checkpoints.values()):
                self.index.remove_checkpoint(node, checkpoint)
            if node.residency.blocks:
                self.index.evict(node)
            node, below = parent, [c for c in parent.children if c.residency.blocks or c.residency.checkpoints]

    def _is_evictable(self, node: Node, order: Mapping[Owned, int]) -> bool:
        held = any(
            (group, block) not in order for group, block in zip(self.arena.full_groups, node.residency.blocks, strict=False)
        )
        return not self.index.pins(node) and not held

    def _first_block(self, node: Node) -> Owned:
        blocks = node.residency.blocks
        return (self.arena.full_groups[0], blocks[0]) if blocks else (-1, -1)

    def _ends_in_shared_block(self, sequence: SequenceBlocks, group: int, hit: int) -> bool:
        index, token = divmod(hit, BLOCK_TOKENS)
        return token > 0 and self.pool.is_shared(sequence.tables[group], index, token)
