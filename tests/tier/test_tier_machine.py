"""TieredPrefixCache over a store, under random requests, restarts and damage: what comes back from
disk is what was computed.

Nothing is computed by a model: see prefix/computed.py.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from prefix.computed import compute, family
from prefix.machines import LENGTHS, Conversation, ConversationMachine
from store.damages import DAMAGES, remove_bad
from store.disks import QuickDisk
from store.stores import open_store, record_files, temporaries
from thorough import tried

from mlx_blockpool.config import KVBits
from mlx_blockpool.errors import PoolExhaustedError
from mlx_blockpool.kv.arena import KVArena
from mlx_blockpool.kv.capabilities import RAGGED
from mlx_blockpool.spec import FullLayer, ModelCacheSpec
from mlx_blockpool.store.record import BLOCK as RECORD
from mlx_blockpool.store.record import Key
from mlx_blockpool.tier.cache import TieredPrefixCache
from mlx_blockpool.tier.write_behind import StoredPrefixes

# A block of the two layers is 8192 bytes; quantised, of rows that stay exact, LARGER times as many.
PLAIN = ModelCacheSpec("m", (FullLayer(1, 2, 2), FullLayer(1, 2, 2)), "float32")
QUANTISED = ModelCacheSpec("m", (FullLayer(1, 64, 64), FullLayer(1, 64, 64)), "float32").with_bits(
    KVBits(8, 4, 32)
)
LARGER = QUANTISED.bytes_per_block(QUANTISED.groups[0]) // PLAIN.bytes_per_block(PLAIN.groups[0])


@tried(
    10,
    1500,
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
class StoredMachine(ConversationMachine):
    @initialize(
        size=st.integers(60_000, 250_000),
        store_bytes=st.sampled_from([30_000, 70_000, 150_000, 10**9]),
        queue_bytes=st.sampled_from([1, 30_000, 10**9]),
        spec=st.sampled_from([PLAIN, QUANTISED]),
    )
    def start(self, size: int, store_bytes: int, queue_bytes: int, spec: ModelCacheSpec) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.spec, self.factor = spec, 1 if spec is PLAIN else LARGER
        self.config = {
            "store_bytes": store_bytes * self.factor,
            "queue_bytes": queue_bytes * self.factor,
        }
        self.pool_bytes = size * self.factor
        self.past: list[list[int]] = [[1, 2, 3]]
        self.is_damaged = self.has_orphans = False
        self.open()

    def open(self) -> None:
        self.arena = KVArena(self.spec, self.pool_bytes)
        self.arena.capabilities = RAGGED
        self.store = open_store(self.folder, QuickDisk(), **self.config)
        self.prefix = TieredPrefixCache(self.arena, store=self.store)
        self.live: list[Conversation] = []

    # -- requests ----------------------------------------------------------------------------------

    @precondition(lambda self: len(self.live) < 3)
    @rule(
        which=st.integers(0, 2),
        length=st.sampled_from(LENGTHS),
        branch=st.integers(0, 2),
        tail=st.sampled_from([1, 30, 256]),
        answer=st.integers(0, 12),
        finishes=st.booleans(),
    )
    def request(
        self, which: int, length: int, branch: int, tail: int, answer: int, finishes: bool
    ) -> None:
        self.serve(
            [*family(which, length), *(family(branch + 5, tail) if branch else ())],
            answer,
            finishes,
        )

    @precondition(lambda self: len(self.live) < 3)
    @rule(
        number=st.integers(0, 100),
        cut=st.sampled_from([0, 0, 1, 50]),
        tail=st.integers(0, 300),
        answer=st.integers(0, 12),
    )
    def next_turn(self, number: int, cut: int, tail: int, answer: int) -> None:
        past = self.past[number % len(self.past)]
        self.serve(
            [*past[: max(1, len(past) - cut)], *(900 + number % 50 for _ in range(tail))],
            answer,
            True,
        )

    def serve(self, prompt: list[int], answer: int, finishes: bool) -> None:
        if len(prompt) + 20 > self.arena.pool.sequence_capacity() - 512:
            return
        expected = self.prefix.look(prompt).hit
        try:
            found = self.prefix.acquire(prompt, 20)
        except PoolExhaustedError:
            assert self.live, "exhausted, and nobody holds anything"
            return
        assert found.lookup.hit <= expected
        assert found.lookup.hit == expected or self.live or self.is_damaged, (
            "what is on disk was not brought back"
        )
        conversation = Conversation(prompt, found.caches, found.lookup.hit, len(prompt), 20)
        self.look_into(conversation)
        self.feed(conversation)
        conversation.tokens = [*prompt, *[7] * answer]
        self.feed(conversation)
        self.live.append(conversation)
        if finishes:
            self.finish(len(self.live) - 1)

    def feed(self, conversation: Conversation) -> None:
        if conversation.fed < len(conversation.tokens):
            compute(conversation.caches, conversation.tokens, conversation.fed)
        conversation.fed = len(conversation.tokens)

    @precondition(lambda self: self.live)
    @rule(number=st.integers(0, 100))
    def keep(self, number: int) -> None:
        conversation = self.live[number % len(self.live)]
        self.prefix.insert(conversation.tokens, conversation.caches, "user")

    @precondition(lambda self: self.live)
    @rule(number=st.integers(0, 100))
    def finish(self, number: int) -> None:
        conversation = self.live.pop(number % len(self.live))
        self.prefix.release(conversation.tokens, conversation.caches)
        self.past = [*self.past[-5:], conversation.tokens]
        assert self.prefix.look(conversation.tokens).matched == len(conversation.tokens)

    @precondition(lambda self: self.live)
    @rule(number=st.integers(0, 100))
    def hang_up(self, number: int) -> None:
        self.prefix.discard(self.live.pop(number % len(self.live)).caches)

    # -- memory and disk ---------------------------------------------------------------------------

    @rule(n_bytes=st.sampled_from([0, 20_000, 60_000]))
    def evict(self, n_bytes: int) -> None:
        self.prefix.trim_to(n_bytes * self.factor)

    @rule(rarely=st.integers(0, 9))
    def clear(self, rarely: int) -> None:
        if rarely == 0:
            self.prefix.clear()

    @rule(limit=st.sampled_from([1, 20_000, None]), flush=st.booleans())
    def write_behind(self, limit: int | None, flush: bool) -> None:
        assert isinstance(self.prefix.stored, StoredPrefixes)
        self.prefix.stored.write_behind(limit)
        if flush:
            assert self.store.flush()

    @rule()
    def write_tails(self) -> None:
        assert isinstance(self.prefix.stored, StoredPrefixes)
        self.prefix.stored.write_tails()

    @rule(
        number=st.integers(0, 1000), how=st.sampled_from(sorted(DAMAGES)), seed=st.integers(0, 1000)
    )
    def damage(self, number: int, how: str, seed: int) -> None:
        assert self.store.flush()
        files = record_files(self.folder)
        if files:
            self.is_damaged = self.has_orphans = True
            DAMAGES[how](files[number % len(files)], random.Random(seed))

    @rule(closes=st.booleans(), repairs=st.booleans())
    def restart(self, closes: bool, repairs: bool) -> None:
        """With close(), or killed: then the disk has what the writer has finished."""
        for conversation in self.live:
            self.prefix.discard(conversation.caches)
        prefix, was_damaged = self.prefix, self.is_damaged
        if closes:
            assert prefix.close()
        else:
            assert self.store.flush()
            self.store.close()
        self.nothing_is_held()
        if repairs:
            assert not remove_bad(self.folder) or self.is_damaged
            self.is_damaged = False
        self.open()
        if closes and not was_damaged and self.config["store_bytes"] >= 10**9:
            before, now = ({n.hash for n in p.index.trie} for p in (prefix, self.prefix))
            # A record whose parent was lost to damage, and is there again, is known again.
            assert before == now or (self.has_orphans and before < now)

    # -- what always holds -------------------------------------------------------------------------

    @invariant()
    def what_is_on_disk_can_be_reached(self) -> None:
        for node in self.prefix.index.trie:
            parent = node.parent
            assert parent is not None
            assert not node.on_disk or parent.parent is None or parent.on_disk, (
                f"the parent of {node.start} is not on disk"
            )
            assert not node.on_disk or Key(RECORD, node.hash) in self.store
            assert node.in_memory or node.on_disk

    @invariant()
    def index_and_disk_agree(self) -> None:
        assert self.store.flush()
        assert self.store.report()["bytes"] <= self.config["store_bytes"]
        if not self.is_damaged:
            index = dict(self.store._index._sizes)
            found = {
                p.relative_to(self.folder).as_posix(): p.stat().st_size
                for p in record_files(self.folder)
            }
            assert index == found
            assert temporaries(self.folder) == []
            assert self.store.counts["quarantined"] == self.store.counts["failed"] == 0

    def nothing_is_held(self) -> None:
        assert [(c.held, c.reserved) for c in self.arena.pool.settle()] == [(0, 0)]

    def teardown(self) -> None:
        if hasattr(self, "prefix"):
            for conversation in self.live:
                self.prefix.discard(conversation.caches)
            self.nothing_is_held()
            self.store.close()
            shutil.rmtree(self.folder)


TestStoredMachine = StoredMachine.TestCase
