"""Room in the pool for sequences, made by evicting cached blocks that no sequence holds. Owned by the generation thread."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import PoolExhaustedError
from ..kv.blocks import BlockTable
from ..kv.layer_caches import PooledLayer
from ..kv.parts import leaves_of
from ..kv.sequence import SequenceBlocks
from ..kv.slabs import KVArena
from ..spec import BLOCK_TOKENS, blocks_for
from .pins import Pins
from .residency import KVIndex, Owned
from .trie import Node, Pin


class Admission:
    """Reserves blocks of `slabs` for sequences, and evicts cached prefixes for them.

    Timed pins give way to requests, the one that ends soonest first, but not to an insert.
    """

    def __init__(self, slabs: KVArena, known: KVIndex, pins: Pins) -> None:
        self.slabs = slabs
        self.pool = slabs.pool
        self.known = known
        self.pins = pins

    def make(self, counts: dict[int, int]) -> None:
        """Evict what is needed for `counts[group]` more blocks, leaves first, oldest first; nothing if it cannot be enough."""
        self.known.forget(self.pool.make_room(counts))

    def reserve(self, tables: list[BlockTable], counts: list[int]) -> None:
        """counts[i] more blocks for tables[i]: all of them, or PoolExhaustedError and none."""
        try:
            self._promise(tables, counts)
        except PoolExhaustedError:
            if not self._could_promise(tables, counts) or not self._promise_without_pins(tables, counts):
                raise

    def can_reserve(self, tables: list[BlockTable], counts: list[int]) -> bool:
        """reserve() without unpinning anything. Returns whether there was room."""
        try:
            self._promise(tables, counts)
        except PoolExhaustedError:
            return False
        return True

    def _promise(self, tables: list[BlockTable], counts: list[int]) -> None:
        self.make(_by_group(tables, counts))
        self.pool.reserve(tables, counts)

    def _promise_without_pins(self, tables: list[BlockTable], counts: list[int]) -> bool:
        """reserve() with as few timed pins released as possible. Returns whether there was room; without, the pins stay."""
        released = []
        while (pin := self.pins.release_soonest()) is not None:
            released.append(pin)
            if self.can_reserve(tables, counts):
                self.pins.num_gave_way += len(released)
                return True
        self.pins.put_back(released)
        return False

    def _could_promise(self, tables: list[BlockTable], counts: list[int]) -> bool:
        """Whether there might be room if nothing were pinned: if not, no pin needs to be tried."""
        if not self.pins:
            return False
        groups = self.pool.counts()
        usable = sum((g.free - g.reserved + g.evictable) * g.bytes_per_block for g in groups)
        needed = sum(count * groups[group].bytes_per_block for group, count in _by_group(tables, counts).items())
        return needed <= usable + self.pool.pool_bytes - self.pool.nbytes

    def ensure_next_blocks(self, batch: Iterable[list[Any]]) -> None:
        """Reserve the blocks of each sequence's next token; a sequence is its layer caches. Raises PoolExhaustedError."""
        tables = []
        for caches in batch:
            leaves = leaves_of(caches)
            for layer in (group.layers[0] for group in self.slabs.spec.groups):
                cache: PooledLayer = leaves[layer]
                if cache.needs_block():
                    tables.append(cache.sequence.tables[cache.place.group])
        if tables:
            self.reserve(tables, [1] * len(tables))

    def need_spare(self, blocks: int) -> None:
        """Make sure that each full group has room for `blocks` more. Raises PoolExhaustedError."""
        if not blocks:
            return
        tables = [self.pool.open_table(group) for group in self.slabs.full_groups]
        self.reserve(tables, [blocks] * len(tables))
        for table in tables:
            self.pool.release(table)

    def for_states(self, n_bytes: int) -> bool:
        """Whether there is room for so many bytes of states, after those used longest ago had to go for it."""
        limit = self.slabs.state_bytes - self.slabs.running_bytes - n_bytes
        while limit >= 0 and self.known.state_bytes > limit and self.known.evict_state():
            pass
        return 0 <= limit >= self.known.state_bytes

    def need_states(self, n_bytes: int) -> None:
        """for_states() for a request: also what is pinned for a time goes for it. Raises PoolExhaustedError."""
        released: list[Pin] = []
        while n_bytes and not self.for_states(n_bytes):
            possible = self.slabs.running_bytes + n_bytes <= self.slabs.state_bytes
            pin = self.pins.release_soonest() if possible else None
            if pin is None:
                self.pins.put_back(released)
                figures = f"States have {self.slabs.state_bytes} bytes, and {self.slabs.running_bytes} are in use."
                raise PoolExhaustedError(1, 0, 0, "state", f"{figures} Raise --pool-bytes.")
            released.append(pin)
        self.pins.num_gave_way += len(released)

    def take(self, sequence: SequenceBlocks, hit: int, prompt: int, total: int) -> None:
        """Room for `total` tokens behind a hit of `hit`; the prompt's blocks are taken at once, so that they are neighbours.

        Raises PoolExhaustedError.
        """
        states = self.slabs.spec.fixed_bytes_per_agent()
        self.need_states(states)
        sequence.count_states(states)
        one_run = not self.slabs.ragged
        counts = []
        for table in sequence.tables:
            if table.max_blocks is not None:
                counts.append(min(table.max_blocks, blocks_for(total)))
                continue
            copied = len(table) if one_run else self._ends_in_shared_block(sequence, table.group, hit)
            counts.append(blocks_for(total) - len(table) + copied)
        self.reserve(sequence.tables, counts)
        for group in self.slabs.full_groups:
            if one_run and hit:
                sequence.make_own_run(group)
            elif self._ends_in_shared_block(sequence, group, hit):
                sequence.own(group, hit // BLOCK_TOKENS)
            table = sequence.tables[group]
            self.pool.extend(table, blocks_for(prompt) - len(table))

    def for_second_rings(self, sequence: SequenceBlocks) -> bool:
        """Promise a sequence that goes on the copies of a checkpoint's blocks that it writes to; whether there was room."""
        tables = [sequence.tables[g] for g in self.slabs.window_groups]
        return self.can_reserve(tables, [max(0, (table.max_blocks or 0) - table.reserved) for table in tables])

    def trim_to(self, n_bytes: int) -> None:
        """Evict, in every group in turn, until at most `n_bytes` are cached."""
        went = True
        while went and self.known.nbytes > max(0, n_bytes):
            victims = [v for group in range(len(self.slabs.spec.groups)) for v in self.pool.evict(group, 1)]
            self.known.forget(victims)
            went = self.known.evict_state() or bool(victims)

    def trim_to_sequences(self, count: int) -> None:
        """Evict sequences that are the beginning of no other, those used longest ago first, until at most `count` are known."""
        while (surplus := len(ends := self.known.ends()) - max(0, count)) > 0:
            order = {
                (group, block): at for group in self.slabs.full_groups for at, block in enumerate(self.pool.evictable(group))
            }
            evictable = [node for node in ends if self._is_evictable(node, order)]
            if not evictable:
                return
            for node in sorted(evictable, key=lambda node: order.get(self._first_block(node), 0))[:surplus]:
                self._let_go_of_sequence(node, order)

    def _let_go_of_sequence(self, end: Node, order: Mapping[Owned, int]) -> None:
        """Take an end out of memory, with what leads to nothing else."""
        node: Node | None = end
        below: list[Node] = []
        while node is not None and node.parent is not None and not below and self._is_evictable(node, order):
            parent = node.parent
            for checkpoint in list(node.checkpoints.values()):
                self.known.drop_checkpoint(node, checkpoint)
            if node.blocks:
                self.known.let_go(node)
            node, below = parent, [child for child in parent.children if child.blocks or child.checkpoints]

    def _is_evictable(self, node: Node, order: Mapping[Owned, int]) -> bool:
        held = any((group, block) not in order for group, block in zip(self.slabs.full_groups, node.blocks, strict=False))
        return not node.pins and not held

    def _first_block(self, node: Node) -> Owned:
        return (self.slabs.full_groups[0], node.blocks[0]) if node.blocks else (-1, -1)

    def _ends_in_shared_block(self, sequence: SequenceBlocks, group: int, hit: int) -> bool:
        index, token = divmod(hit, BLOCK_TOKENS)
        return token > 0 and self.pool.is_shared(sequence.tables[group], index, token)


def _by_group(tables: list[BlockTable], counts: list[int]) -> dict[int, int]:
    needed: dict[int, int] = {}
    for table, count in zip(tables, counts, strict=True):
        needed[table.group] = needed.get(table.group, 0) + count
    return needed
