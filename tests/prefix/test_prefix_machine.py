"""PrefixCache under random requests, without a model: every token's key says what it was
computed from (computed.py).
"""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from prefix.computed import LAYER_STEP, answer, family, keys_of, numbers
from prefix.machines import LENGTHS, Conversation, ConversationMachine
from thorough import tried

from mlx_blockpool.config import PoolConfig
from mlx_blockpool.errors import PoolExhaustedError, RequestTooLargeError
from mlx_blockpool.kv.arena import KVArena
from mlx_blockpool.kv.capabilities import Capabilities
from mlx_blockpool.kv.layer_caches import PooledRotatingKVCache
from mlx_blockpool.prefix.cache import PrefixCache
from mlx_blockpool.spec import FullLayer, ModelCacheSpec, WindowLayer

WINDOW = 300
# A block of the two full layers is 8192 bytes, one of the window layer 4096; a ring has 2 blocks.
SPEC = ModelCacheSpec(
    "m", (FullLayer(1, 2, 2), WindowLayer(1, 2, 2, WINDOW), FullLayer(1, 2, 2)), "float32"
)

FAMILIES = 3
room = st.sampled_from([1, 20, 300])
steps = st.sampled_from([1, 7, 64, 256, 299, 300, 301, 2000])
# What follows a fetch at once: (size of the prefill's steps, tokens to decode, whether it
# finishes).
afterwards = st.none() | st.tuples(
    st.sampled_from([64, 256, 300, 2000]), st.integers(0, 12), st.booleans()
)


@tried(
    6,
    1500,
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
class PrefixMachine(ConversationMachine):
    @initialize(
        size=st.integers(60_000, 400_000),
        ragged=st.booleans(),
        preallocate=st.booleans(),
    )
    def start(self, size: int, ragged: bool, preallocate: bool) -> None:
        self.arena = KVArena(SPEC, size, PoolConfig(preallocate=preallocate))
        self.arena.capabilities = Capabilities(ragged=ragged)
        self.pool_bytes = size
        self.prefix = PrefixCache(self.arena, "test")
        self.live: list[Conversation] = []
        self.past: list[list[int]] = [[1, 2, 3]]
        self.pinned: tuple[list[int], int] | None = None

    # -- requests ----------------------------------------------------------------------------------

    @precondition(lambda self: len(self.live) < 4)
    @rule(
        which=st.integers(0, FAMILIES - 1),
        length=st.sampled_from(LENGTHS),
        branch=st.integers(0, FAMILIES),
        tail=st.sampled_from([1, 30, 256]),
        max_tokens=room,
        then=afterwards,
    )
    def fetch_of_a_family(
        self, which: int, length: int, branch: int, tail: int, max_tokens: int, then: Any
    ) -> None:
        self.fetch(
            [*family(which, length), *(family(branch + 5, tail) if branch else ())],
            max_tokens,
            then,
        )

    @precondition(lambda self: len(self.live) < 4)
    @rule(
        number=st.integers(0, 100),
        cut=st.sampled_from([0, 0, 0, 1, 2, 50]),
        tail=st.integers(0, 40),
        max_tokens=room,
        then=afterwards,
    )
    def fetch_of_a_next_turn(
        self, number: int, cut: int, tail: int, max_tokens: int, then: Any
    ) -> None:
        past = self.past[number % len(self.past)]
        prompt = [*past[: max(1, len(past) - cut)], *(900 + number % 50 for _ in range(tail))]
        self.fetch(prompt, max_tokens, then)

    @rule(which=st.integers(0, FAMILIES - 1), then=afterwards)
    def fetch_of_all_that_fits(self, which: int, then: Any) -> None:
        if not self.live and self.pinned is None:
            self.fetch(list(family(which, self.arena.pool.sequence_capacity() - 20)), 20, then)
            assert self.live or then, "what fits in an empty pool was refused"

    def fetch(self, prompt: list[int], max_tokens: int, then: Any) -> None:
        expected = self.prefix.look(prompt)
        try:
            found = self.prefix.acquire(prompt, max_tokens)
        except PoolExhaustedError:
            assert self.live or self.pinned, "exhausted, and nobody holds or pins anything"
            return
        except RequestTooLargeError:
            assert len(prompt) + max_tokens > self.arena.pool.sequence_capacity()
            return
        assert found.rest == prompt[found.lookup.hit :]
        assert 0 <= found.lookup.hit < len(prompt)
        assert found.lookup.hit in (expected.hit, 0)
        assert found.lookup.matched == expected.matched
        self.live.append(
            Conversation(prompt, found.caches, found.lookup.hit, len(prompt), max_tokens)
        )
        self.look_into(self.live[-1])
        if then is not None:
            self.serve(self.live[-1], *then)

    def serve(self, conversation: Conversation, step: int, answer: int, finishes: bool) -> None:
        while conversation.fed < conversation.prompt:
            assert self.feed(conversation, min(step, conversation.prompt - conversation.fed))
        self.prefix.insert(conversation.tokens, conversation.caches, "user")
        self.remembered(conversation)
        self.say(conversation, [7] * answer)
        if finishes and conversation in self.live:
            self.live.remove(conversation)
            self.prefix.release(conversation.tokens, conversation.caches)
            self.remembered(conversation)

    def say(self, conversation: Conversation, tokens: list[int]) -> None:
        for token in tokens[: conversation.room]:
            conversation.tokens.append(token)
            conversation.room -= 1
            if not self.feed(conversation, 1):
                return
        self.look_into(conversation)

    # -- steps -------------------------------------------------------------------------------------

    def pick(self, number: int) -> Conversation:
        return self.live[number % len(self.live)]

    def feed(self, conversation: Conversation, count: int) -> bool:
        """One forward pass over the next `count` tokens.

        False: a fork found no room, and is gone.
        """
        start = conversation.fed
        tokens = conversation.tokens[: start + count]
        try:
            for layer, cache in enumerate(conversation.caches):
                keys = keys_of(tokens, start, layer)
                seen, values = cache.update_and_fetch(keys, keys + 1000)
                mx.eval(seen, values)
                self.attended(cache, np.array(seen), tokens, count, layer)
                del seen, values
        except PoolExhaustedError:
            assert conversation.forked, "a request found no room that fetch had promised"
            self.live.remove(conversation)
            return False
        conversation.fed += count
        return True

    def attended(self, cache: Any, seen: Any, tokens: list[int], count: int, layer: int) -> None:
        """A step sees every token that its own tokens may attend to."""
        expected = numbers(tuple(tokens)) + layer * LAYER_STEP
        if isinstance(cache, PooledRotatingKVCache):
            needed = expected[-(WINDOW + count - 1) :]
            assert set(needed) <= set(seen[0, 0, :, 0])
        else:
            assert np.array_equal(expected, seen[0, 0, :, 0])

    @precondition(lambda self: any(c.fed < c.prompt for c in self.live))
    @rule(number=st.integers(0, 100), count=steps)
    def prefill(self, number: int, count: int) -> None:
        waiting = [c for c in self.live if c.fed < c.prompt]
        conversation = waiting[number % len(waiting)]
        if self.feed(conversation, min(count, conversation.prompt - conversation.fed)):
            self.look_into(conversation)

    @precondition(lambda self: any(c.fed >= c.prompt for c in self.live))
    @rule(number=st.integers(0, 100), count=st.integers(1, 12), token=st.integers(0, 5))
    def decode(self, number: int, count: int, token: int) -> None:
        running = [c for c in self.live if c.fed >= c.prompt]
        conversation = running[number % len(running)]
        self.say(conversation, [token] * count)

    @precondition(lambda self: any(c.fed >= c.prompt and c.room >= 200 for c in self.live))
    @rule(number=st.integers(0, 100), token=st.integers(0, 5))
    def many_tokens_at_once(self, number: int, token: int) -> None:
        running = [c for c in self.live if c.fed >= c.prompt and c.room >= 200]
        conversation = running[number % len(running)]
        conversation.tokens += [token] * 200
        conversation.room -= 200
        if self.feed(conversation, 200):
            self.look_into(conversation)

    # -- what is remembered ------------------------------------------------------------------------

    @precondition(lambda self: self.live)
    @rule(number=st.integers(0, 100), kind=st.sampled_from(["system", "user", "assistant"]))
    def keep(self, number: int, kind: str) -> None:
        conversation = self.pick(number)
        assert (
            self.prefix.insert(conversation.tokens, conversation.caches, kind) == conversation.fed
        )
        self.remembered(conversation)

    @precondition(lambda self: self.live)
    @rule(number=st.integers(0, 100))
    def finish(self, number: int) -> None:
        conversation = self.live.pop(number % len(self.live))
        assert self.prefix.release(conversation.tokens, conversation.caches) == conversation.fed
        self.remembered(conversation)

    def remembered(self, conversation: Conversation) -> None:
        tokens = conversation.tokens[: conversation.fed]
        if tokens:
            self.past = [*self.past[-5:], tokens]
            assert self.prefix.look(tokens).matched == len(tokens)

    @precondition(lambda self: self.live)
    @rule(number=st.integers(0, 100))
    def drop(self, number: int) -> None:
        self.live.pop(number % len(self.live))

    @precondition(lambda self: 0 < len(self.live) < 4)
    @rule(number=st.integers(0, 100))
    def fork(self, number: int) -> None:
        conversation = self.pick(number)
        conversation.forked = True
        # Neither may grow beyond what was there without being told that there is no room.
        c = conversation
        self.live.append(
            Conversation(c.tokens[:], copy.deepcopy(c.caches), c.fed, c.prompt, c.room, forked=True)
        )
        sequences = {id(cache.sequence) for cache in self.live[-1].caches}
        assert len(sequences) == 1
        assert sequences != {id(cache.sequence) for cache in c.caches}

    @precondition(lambda self: self.pinned is None and len(self.past) > 2)
    @rule(number=st.integers(0, 100))
    def pin(self, number: int) -> None:
        tokens = self.past[number % len(self.past)]
        known = self.prefix.pin(tokens)
        assert known == self.prefix.look(tokens).matched
        if known:
            self.pinned = (tokens, known)

    @precondition(lambda self: self.pinned is not None)
    @rule()
    def unpin(self) -> None:
        assert self.pinned is not None
        assert self.prefix.unpin(self.pinned[0]) >= self.pinned[1]
        self.pinned = None

    @rule(
        n_bytes=st.sampled_from([None, 0, 20_000, 60_000, 100_000, 100_000]),
        really=st.sampled_from([False, True]),
    )
    def trim_to(self, n_bytes: int | None, really: bool) -> None:
        if not really:
            return
        if n_bytes is None:
            self.prefix.clear()
            self.pinned = None
            assert (self.prefix.nbytes, len(self.prefix)) == (0, 0)
            return
        self.prefix.trim_to(n_bytes)
        assert self.prefix.nbytes <= n_bytes or self.live or self.pinned

    # -- what always holds -------------------------------------------------------------------------

    @invariant()
    def the_budget_holds(self) -> None:
        assert self.arena.pool.nbytes <= self.pool_bytes
        assert self.arena.nbytes <= self.pool_bytes
        assert self.prefix.nbytes <= self.pool_bytes

    @invariant()
    def what_is_pinned_stays_known(self) -> None:
        if self.pinned is not None:
            tokens, known = self.pinned
            assert self.prefix.look(tokens).matched >= known

    def teardown(self) -> None:
        self.live.clear()
        if hasattr(self, "prefix"):
            assert [(c.held, c.reserved) for c in self.arena.pool.settle()] == [(0, 0), (0, 0)]


TestPrefixMachine = PrefixMachine.TestCase


@pytest.mark.parametrize("ragged", [True, False])
def test_a_pinned_prompt_stays_when_a_longer_one_takes_its_place_in_the_trie(ragged: bool) -> None:
    slabs = KVArena(SPEC, 400_000)
    slabs.capabilities = Capabilities(ragged=ragged)
    prefix = PrefixCache(slabs)
    system = list(family(1, 300))
    answer(prefix, system)
    assert prefix.pin(system) == 300
    answer(prefix, [*system, 9, 9])
    prefix.trim_to(0)
    lookup = prefix.look([*system, 8])
    assert (lookup.matched, lookup.hit) == (300, 300)
    prefix.check()
    prefix.unpin(system)
    prefix.trim_to(0)
    assert prefix.nbytes == 0


@pytest.mark.parametrize("first", [10, 300, 1000])
def test_a_prompt_of_the_pools_capacity_can_be_served_after_a_short_one(first: int) -> None:
    prefix = PrefixCache(KVArena(SPEC, 20 * 4096))
    answer(prefix, list(family(1, first)))
    prompt = list(family(2, prefix.pool.sequence_capacity() - 20))
    answer(prefix, prompt)
    assert prefix.look(prompt).matched == len(prompt)
    prefix.check()
