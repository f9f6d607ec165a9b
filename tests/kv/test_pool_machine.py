"""BlockPool under random operations, against a model that counts references and keeps the order
of use on its own.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from thorough import tried

from mlx_blockpool.config import PoolConfig
from mlx_blockpool.errors import PoolExhaustedError
from mlx_blockpool.kv.blocks import BlockTable
from mlx_blockpool.kv.pool import BlockPool
from mlx_blockpool.prefix.eviction import evict, evict_for
from mlx_blockpool.spec import FullLayer, ModelCacheSpec, WindowLayer

# A block of the two full layers is 8192 bytes, one of the window layer 4096; a ring has 3 blocks.
SPEC = ModelCacheSpec(
    "m", (FullLayer(1, 2, 2), WindowLayer(1, 2, 2, 700), FullLayer(1, 2, 2)), "float32"
)
SIZES = (8192, 4096)
CAPS = (None, 3)
Owned = tuple[int, int]

groups = st.integers(0, 1)
picks = st.integers(0, 1000)
amounts = st.integers(0, 4)


@tried(40, 3000, stateful_step_count=60)
class PoolMachine(RuleBasedStateMachine):
    """`tables`: the blocks that each table must have and has reserved. `cached`, `pins`: counts of
    each block.

    `order`: the evictable blocks of each group, those used longest ago first. `surplus`: those of
    them that are evicted first.
    """

    @initialize(
        blocks=st.integers(6, 14),
        extra=st.integers(0, 4095),
        preallocate=st.booleans(),
    )
    def start(self, blocks: int, extra: int, preallocate: bool) -> None:
        self.preallocate = preallocate
        self.pool_bytes = blocks * 4096 + extra
        config = PoolConfig(preallocate=preallocate)
        self.pool = BlockPool(SPEC, self.pool_bytes, config)
        self.tables: list[tuple[BlockTable, list[int]]] = []
        self.reserved: dict[int, int] = {}
        self.cached: Counter[Owned] = Counter()
        self.cached_tokens: dict[Owned, int] = {}
        self.pins: Counter[Owned] = Counter()
        self.order: list[list[int]] = [[], []]
        self.surplus: list[list[int]] = [[], []]
        self.add(self.pool.open_table(0), [])
        self.add(self.pool.open_table(1), [])

    # -- the model ---------------------------------------------------------------------------------

    def refs(self, group: int) -> Counter[int]:
        return Counter(block for table, ids in self.tables if table.group == group for block in ids)

    def let_go(self, group: int, ids: list[int]) -> None:
        """After the references are gone: what is cached waits for eviction, last blocks first."""
        held = self.refs(group)
        for block in reversed(ids):
            if not held[block] and self.cached[group, block]:
                self.order[group].append(block)

    def hold(self, group: int, ids: list[int]) -> None:
        self.order[group] = [block for block in self.order[group] if block not in ids]
        self.surplus[group] = [block for block in self.surplus[group] if block not in ids]

    def uncache(self, owned: Owned, times: int = 1) -> None:
        self.cached[owned] -= times
        if not self.cached[owned]:
            self.pins.pop(owned, None)
            self.cached_tokens.pop(owned, None)
            self.hold(owned[0], [owned[1]])

    def take_away(self, victims: list[Owned]) -> None:
        for owned in victims:
            assert owned[1] in self.order[owned[0]], f"{owned} was evicted and is not evictable"
            assert not self.pins[owned], f"{owned} was evicted and is pinned"
            self.uncache(owned, self.cached[owned])

    def pick(self, number: int) -> tuple[BlockTable, list[int]]:
        return self.tables[number % len(self.tables)]

    def in_use(self, group: int) -> set[int]:
        return {*self.refs(group), *self.order[group]}

    def snapshot(self) -> Any:
        return (
            self.pool.counts(),
            [t.ids[:] for t, _ in self.tables],
            [t.reserved for t, _ in self.tables],
        )

    def spend(self, table: BlockTable, count: int) -> None:
        self.reserved[id(table)] -= min(count, self.reserved[id(table)])

    # -- rules -------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.tables) < 7)
    @rule(group=groups)
    def open_table(self, group: int) -> None:
        self.add(self.pool.open_table(group), [])

    def add(self, table: BlockTable, ids: list[int]) -> None:
        self.tables.append((table, ids))
        self.reserved[id(table)] = 0

    @precondition(lambda self: self.tables)
    @rule(number=picks, count=amounts)
    def extend(self, number: int, count: int) -> None:
        table, ids = self.pick(number)
        cap = CAPS[table.group]
        capped = cap is not None and len(ids) + count > cap
        promised = count <= self.reserved[id(table)]
        before = self.snapshot()
        try:
            self.pool.extend(table, count)
        except PoolExhaustedError:
            assert capped or not promised, "an extend that was promised failed"
            return self.unchanged(before)
        assert not capped
        new = table.ids[len(ids) :]
        assert len(set(new)) == count
        assert not set(new) & self.in_use(table.group), f"{new} were in use"
        ids += new
        self.spend(table, count)

    def unchanged(self, before: Any) -> None:
        """References, cached blocks, tables and what they reserve; an empty slab may have gone."""
        counts, ids, reserved = self.snapshot()
        assert [(c.held, c.evictable, c.pinned, c.reserved) for c in counts] == [
            (c.held, c.evictable, c.pinned, c.reserved) for c in before[0]
        ]
        assert (ids, reserved) == before[1:]

    @precondition(lambda self: self.tables)
    @rule(number=picks, blocks=st.lists(picks, max_size=3, unique=True))
    def adopt(self, number: int, blocks: list[int]) -> None:
        table, ids = self.pick(number)
        usable = sorted(self.in_use(table.group) - set(ids))
        wanted = list(dict.fromkeys(usable[b % len(usable)] for b in blocks)) if usable else []
        cap = CAPS[table.group]
        if cap is not None and len(ids) + len(wanted) > cap:
            before = self.snapshot()
            try:
                self.pool.append_shared(table, wanted)
            except PoolExhaustedError:
                return self.unchanged(before)
            raise AssertionError("a window took more than its cap")
        self.pool.append_shared(table, wanted)
        self.hold(table.group, wanted)
        ids += wanted

    @precondition(lambda self: self.tables and len(self.tables) < 7)
    @rule(number=picks)
    def fork(self, number: int) -> None:
        table, ids = self.pick(number)
        self.add(self.pool.fork(table), ids[:])

    @precondition(lambda self: any(ids for _, ids in self.tables))
    @rule(number=picks, at=picks)
    def own(self, number: int, at: int) -> None:
        table, ids = [pair for pair in self.tables if pair[1]][
            number % sum(1 for _, ids in self.tables if ids)
        ]
        index = at % len(ids)
        before, promised = self.snapshot(), self.reserved[id(table)]
        try:
            old, new = self.pool.take_own(table, index)
        except PoolExhaustedError:
            assert not promised
            return self.unchanged(before)
        assert old == ids[index]
        assert new not in self.in_use(table.group)
        ids[index] = new
        self.spend(table, 1)
        self.let_go(table.group, [old])

    @precondition(lambda self: any(ids for _, ids in self.tables))
    @rule(number=picks, at=picks, other=picks)
    def swap(self, number: int, at: int, other: int) -> None:
        table, ids = [pair for pair in self.tables if pair[1]][
            number % sum(1 for _, ids in self.tables if ids)
        ]
        index = at % len(ids)
        usable = sorted(self.in_use(table.group))
        block = usable[other % len(usable)]
        if block in ids:
            return
        old = ids[index]
        self.pool.replace_shared(table, index, block)
        ids[index] = block
        self.hold(table.group, [block])
        self.let_go(table.group, [old])

    @precondition(lambda self: self.tables)
    @rule(number=picks)
    def replace(self, number: int) -> None:
        table, ids = self.pick(number)
        before, promised = self.snapshot(), len(ids) <= self.reserved[id(table)]
        try:
            old = self.pool.take_own_run(table)
        except PoolExhaustedError:
            assert not promised
            return self.unchanged(before)
        assert old.ids == ids
        assert not set(table.ids) & self.in_use(table.group)
        assert len(set(table.ids)) == len(ids)
        self.spend(table, len(ids))
        self.add(old, ids[:])
        ids[:] = table.ids

    @precondition(lambda self: self.tables)
    @rule(number=picks, late=st.booleans())
    def release(self, number: int, late: bool) -> None:
        table, ids = self.tables.pop(number % len(self.tables))
        if late:
            self.pool.release_deferred(table)
            self.pool.settle()
        else:
            self.pool.release(table)
        assert (table.ids, table.reserved) == ([], 0)
        del self.reserved[id(table)]
        self.let_go(table.group, ids)

    @precondition(lambda self: self.tables)
    @rule(wanted=st.lists(st.tuples(picks, amounts), min_size=1, max_size=3))
    def reserve(self, wanted: list[tuple[int, int]]) -> None:
        tables = [self.pick(number)[0] for number, _ in wanted]
        before = self.snapshot()
        try:
            self.pool.reserve(tables, [count for _, count in wanted])
        except PoolExhaustedError:
            return self.unchanged(before)
        for table, (_, count) in zip(tables, wanted, strict=True):
            self.reserved[id(table)] += count

    @precondition(lambda self: any(ids for _, ids in self.tables))
    @rule(number=picks, tokens=st.integers(1, 256))
    def know(self, number: int, tokens: int) -> None:
        blocks = sorted((t.group, block) for t, ids in self.tables for block in ids)
        owned = blocks[number % len(blocks)]
        self.pool.groups[owned[0]].cache(owned[1], tokens)
        self.cached[owned] += 1
        self.cached_tokens[owned] = max(tokens, self.cached_tokens.get(owned, 0))

    @precondition(lambda self: +self.cached)
    @rule(number=picks)
    def uncache_one(self, number: int) -> None:
        owned = self.pick_cached(number)
        self.pool.groups[owned[0]].uncache(owned[1])
        self.uncache(owned)

    def pick_cached(self, number: int) -> Owned:
        blocks = sorted(+self.cached)
        return blocks[number % len(blocks)]

    @precondition(lambda self: +self.cached)
    @rule(numbers=st.lists(picks, max_size=3))
    def touch(self, numbers: list[int]) -> None:
        for group in range(2):
            ids = [block for g, block in map(self.pick_cached, numbers) if g == group]
            for block in ids:
                self.pool.groups[group].touch(block)
                if block in self.order[group]:
                    self.hold(group, [block])
                    self.order[group].append(block)

    @precondition(lambda self: +self.cached)
    @rule(number=picks)
    def demote(self, number: int) -> None:
        group, block = self.pick_cached(number)
        self.pool.groups[group].demote(block)
        if block in self.order[group] and block not in self.surplus[group]:
            self.surplus[group].append(block)
        assert (block in self.pool.groups[group].demoted) == (block in self.surplus[group])

    def victims(self, group: int) -> list[int]:
        blocks = dict.fromkeys([*self.surplus[group], *self.order[group]])
        return [block for block in blocks if not self.pins[group, block]]

    @precondition(lambda self: +self.cached)
    @rule(number=picks, on=st.booleans())
    def pin(self, number: int, on: bool) -> None:
        owned = self.pick_cached(number)
        self.pool.groups[owned[0]].pin(owned[1], 1 if on else -1)
        self.pins[owned] = max(0, self.pins[owned] + (1 if on else -1))

    @rule(group=groups, count=amounts)
    def evict(self, group: int, count: int) -> None:
        expected = [(group, block) for block in self.victims(group)][:count]
        assert evict(self.pool, group, count) == expected
        self.take_away(expected)

    @rule(full=st.sampled_from([0, 0, 1, 2, 3, 8]), window=st.sampled_from([0, 1, 2, 4, 6, 12]))
    def make_room(self, full: int, window: int) -> None:
        counts = {0: full, 1: window}
        victims = evict_for(self.pool, counts)
        assert len(set(victims)) == len(victims)
        self.take_away(victims)
        tables = [self.pool.open_table(group) for group in counts]
        try:
            self.pool.reserve(tables, list(counts.values()))
        except PoolExhaustedError:
            assert not victims, f"{victims} were evicted and it was not enough"
        for table in tables:
            self.pool.release(table)

    @rule(group=groups, count=st.integers(1, 4))
    def serve(self, group: int, count: int) -> None:
        """A whole request: its blocks are cached and evictable at the end."""
        count = min(count, CAPS[group] or count)
        self.take_away(evict_for(self.pool, {group: count}))
        table = self.pool.open_table(group)
        try:
            self.pool.extend(table, count)
        except PoolExhaustedError:
            return
        assert not set(table.ids) & self.in_use(group)
        for block in table.ids:
            self.pool.groups[group].cache(block, 256)
            self.cached[group, block], self.cached_tokens[group, block] = 1, 256
        self.order[group] += reversed(table.ids)
        self.pool.release(table)

    @rule()
    def make_room_for_as_much_as_there_can_be(self) -> None:
        """What nobody holds, pins or was promised is room for anybody."""
        if any(self.tables) or +self.pins:
            return
        blocks = (self.pool_bytes - 3 * 4096) // 8192
        self.take_away(evict_for(self.pool, {0: blocks, 1: 3}))
        tables = [self.pool.open_table(0), self.pool.open_table(1)]
        self.pool.reserve(tables, [blocks, 3])
        for table in tables:
            self.pool.release(table)

    # -- what always holds -------------------------------------------------------------------------

    @invariant()
    def the_pool_is_whole(self) -> None:
        self.pool.check()
        assert self.pool.nbytes <= self.pool_bytes
        sizes = [sum(self.pool.groups[g].slabs.values()) * SIZES[g] for g in range(2)]
        assert self.pool.nbytes == sum(sizes)

    @invariant()
    def no_slab_is_empty_that_could_be_given_back(self) -> None:
        for blocks, counts in zip(self.pool.groups, self.pool.settle(), strict=True):
            used = counts.held + counts.evictable + counts.reserved
            if counts.total > 2 * used + 1 and not self.preallocate:
                in_use = self.in_use(blocks.index)
                assert all(
                    size > counts.total - used or in_use & set(blocks.slab_ids(i))
                    for i, size in blocks.slabs.items()
                )

    @invariant()
    def tables_have_their_blocks(self) -> None:
        for table, ids in self.tables:
            assert table.ids == ids
            assert table.reserved == self.reserved[id(table)]
            runs = table.runs
            assert [block for first, count in runs for block in range(first, first + count)] == ids
            slabs, stride = (
                self.pool.groups[table.group].slabs,
                self.pool.groups[table.group].stride,
            )
            for first, count in runs:
                assert first % stride + count <= slabs[first // stride], (
                    f"run {first}+{count} leaves its slab {slabs}"
                )

    @invariant()
    def figures_are_those_of_the_model(self) -> None:
        for group, counts in enumerate(self.pool.counts()):
            held = len(self.refs(group))
            assert counts.held == held
            assert counts.evictable == len(self.order[group])
            assert counts.free == counts.total - held - len(self.order[group])
            assert counts.pinned == sum(
                1 for owned, n in self.pins.items() if n and owned[0] == group
            )
            assert counts.reserved == sum(
                self.reserved[id(t)] for t, _ in self.tables if t.group == group
            )

    @invariant()
    def what_others_read_is_shared(self) -> None:
        for table, ids in self.tables:
            held = self.refs(table.group)
            for index, block in enumerate(ids):
                cached_tokens = self.cached_tokens.get((table.group, block), 0)
                for token in {0, max(0, cached_tokens - 1), cached_tokens}:
                    expected = held[block] > 1 or token < cached_tokens
                    assert self.pool.is_shared(table, index, token) == expected


TestPoolMachine = PoolMachine.TestCase
