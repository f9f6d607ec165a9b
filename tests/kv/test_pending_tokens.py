"""Verification of sequences of which rejected tokens are rolled back: logits, caches and
checkpoints are those of mlx-lm's caches, token by token.
"""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from architectures.pooled import POOL, make_model, prompt, stock
from thorough import only, seeds

from mlx_blockpool.config import PoolConfig
from mlx_blockpool.engine.opening import open_caches
from mlx_blockpool.kv.attach import detach
from mlx_blockpool.kv.build import open_pool
from mlx_blockpool.kv.other_caches import PooledArraysCache
from mlx_blockpool.kv.pending_tokens import PendingTokens
from mlx_blockpool.kv.prompt_cache import (
    batch_of,
    leaves_of,
    make_prompt_cache,
    member_of,
    sequence_of,
    tokens_held,
)
from mlx_blockpool.prefix.cache import PrefixCache
from mlx_blockpool.spec import blocks_for

# States next to full layers, in one layer with them, and without any; chunks of 32 tokens.
NAMES = ["qwen3_5", "qwen3_next", "lfm2", "falcon_h1", "mamba2", "llama4"]
# Those of plugins/states.py, and states that take padding in.
ADAPTED = ["bailing_moe_linear", "jamba", "mamba", "nemotron_h", "olmo_hybrid", "rwkv7"]
UNPADDED = ["longcat_flash_ngram"]
MOST = 17
# Verifications from these places end before, at and after the end of a block.
STARTS = [238, 250, 255, 256]
WRONG = 130


@functools.cache
def text() -> list[int]:
    return prompt(7, 800)


def tokens_of(count: int) -> list[int]:
    return text()[:count]


@dataclass
class Stock:
    """mlx-lm's logits after each token from `start` on, and its caches there."""

    logits: list[mx.array]
    caches: list[list[Any]]


@functools.cache
def stock_of(name: str, start: int, count: int) -> Stock:
    """Of tokens_of(): those before `start` as a prompt, then `count` one by one."""
    model, found = make_model(name), Stock([], [])
    caches, tokens = stock(model), tokens_of(start + count)
    mx.eval(model(mx.array([tokens[:start]]), cache=caches))
    for token in tokens[start:]:
        found.logits.append(model(mx.array([[token]]), cache=caches)[0, -1])
        mx.eval(found.logits, [c.state for c in caches])
        found.caches.append(copy.deepcopy(caches))
    return found


@pytest.fixture(params=only(NAMES, "lfm2", "falcon_h1", "llama4"))
def name(request: pytest.FixtureRequest) -> Iterator[str]:
    """A model, attached where it can be."""
    yield request.param
    detach(make_model(request.param))


def opened(name: str, start: int) -> list[Any]:
    """Caches of a new pool that hold the first tokens."""
    model = make_model(name)
    caches = make_prompt_cache(model, open_pool(model, POOL, PoolConfig(preallocate=True)))
    if start:
        mx.eval(model(mx.array([tokens_of(start)]), cache=caches), [c.state for c in caches])
    return caches


def verify(name: str, caches: list[Any], start: int, count: int, kept: int) -> PendingTokens:
    """`kept` tokens that come next in tokens_of(), and wrong ones up to `count`."""
    drafts = tokens_of(start + kept)[start:] + [WRONG] * (count - kept)
    return PendingTokens(make_model(name), caches, [drafts])


def accept(pending: PendingTokens, kept: int) -> int:
    """Returns how many tokens the caches of the one sequence hold then."""
    (held,) = pending.accept([kept])
    return held


def assert_near(found: mx.array, expected: mx.array) -> None:
    assert found.shape == expected.shape
    assert mx.abs(found - expected).max() <= 2e-5 * max(1.0, mx.abs(expected).max().item())


def assert_like(caches: list[Any], theirs: list[Any]) -> None:
    """Each leaf holds what mlx-lm's cache does; chunks hold what is read of them."""
    for ours, other in zip(leaves_of(caches), leaves_of(theirs), strict=True):
        if isinstance(ours, PooledArraysCache):
            for mine, needed in zip(ours.cache, other.cache, strict=True):
                assert_near(mine, needed)
            continue
        assert ours.offset == other.offset
        count = min(ours.offset - getattr(each, "start_position", 0) for each in (ours, other))
        for mine, needed in zip(ours.keys_and_values(), other.keys_and_values(), strict=True):
            assert_near(mine[..., -count:, :], needed[..., -count:, :])


def cases(count: int) -> list[int]:
    return sorted({1, count // 2, count - 1, count} - {0})


@pytest.mark.parametrize("start", only(STARTS, 250))
@pytest.mark.parametrize("count", only(range(1, MOST + 1), 9))
def test_kept_tokens_are_as_computed_one_by_one(name: str, start: int, count: int) -> None:
    needed, caches = stock_of(name, start, MOST + 1), opened(name, start)
    pool = sequence_of(caches).pool
    held = [c.held for c in pool.settle()]
    for kept in range(1, count + 1) if start == 250 else cases(count):
        fork = copy.deepcopy(caches)
        pending = verify(name, fork, start, count, kept)
        assert pending.logits.shape == (count, 131)
        assert_near(pending.logits[:kept], mx.stack(needed.logits[:kept]))
        at = start + accept(pending, kept)
        assert at == start + (kept if kept == count or name == "llama4" else 0)
        if at > start:
            assert_like(fork, needed.caches[kept - 1])
        assert [len(table) for table in sequence_of(fork).tables] == [blocks_for(at)] * len(held)
        # What was rolled back comes again.
        logits = make_model(name)(mx.array([tokens_of(start + kept + 1)[at:]]), cache=fork)
        assert_like(fork, needed.caches[kept])
        assert_near(logits[0, -1], needed.logits[kept])
        pool.check()
    del fork, pending
    assert [c.held for c in pool.settle()] == held


@pytest.mark.parametrize("seed", seeds(1, 8))
def test_a_long_reply_of_random_verifications_after_a_shared_block(name: str, seed: int) -> None:
    rng, start, end = random.Random(seed), 256, 256 + 100
    model, theirs = make_model(name), stock(make_model(name))
    needed = model(mx.array([tokens_of(end)]), cache=theirs)[0]
    caches = opened(name, start)
    own, other = sequence_of(caches), copy.deepcopy(caches)
    # It takes the place after the shared block, so that the sequence is in two pieces.
    mx.eval(model(mx.array([tokens_of(3)]), cache=other), [c.state for c in other])
    at = known = start
    while at < end:
        # All that was accepted comes again with the next tokens.
        count = min(known - at + rng.randint(0, MOST), end - at)
        count = max(count, known - at, 1)
        kept = rng.choice([max(known - at, 1), count, rng.randint(max(known - at, 1), count)])
        pending = verify(name, caches, at, count, kept)
        assert_near(pending.logits[:kept], needed[at : at + kept])
        known = at + kept
        at += accept(pending, kept)
        assert at in (known, known - kept)
    assert_like(caches, theirs)
    assert all(len(own.slab_runs(table.group, end)) == 2 for table in own.tables)
    own.pool.check()


def test_slabs_stay_where_they_are(name: str) -> None:
    caches = opened(name, 250)
    arena = sequence_of(caches).arena
    before = addresses(arena)
    at = 250
    for count, kept in [(9, 3), (20, 20), (5, 1), (4, 3)]:
        pending = verify(name, caches, at, count, kept)
        mx.eval(mx.argmax(pending.logits, axis=-1))
        at += accept(pending, kept)
    assert addresses(arena) == before


def addresses(arena: Any) -> list[int]:
    return [np.asarray(memoryview(a.view(mx.uint8))).ctypes.data for a in arena.arrays()]


@pytest.mark.parametrize("start", only([0, 1, 250], 250))
@pytest.mark.parametrize("kept", only([1, 5, 6, 9], 6))
def test_what_is_kept_for_others_has_no_rejected_token(name: str, start: int, kept: int) -> None:
    """A checkpoint of the caches is resumed by another sequence; 256 tokens are a whole block."""
    model = make_model(name)
    prefix = PrefixCache(open_pool(model, POOL))
    known = tokens_of(start + kept)
    needed = stock_of(name, max(start, 1), 12)
    hit = prefix.acquire(tokens_of(start + 20), 20)
    if start:
        mx.eval(model(mx.array([known[:start]]), cache=hit.caches), [c.state for c in hit.caches])
    at = start + accept(verify(name, hit.caches, start, 9, kept), kept)
    assert prefix.release(known[:at], hit.caches) == at
    again = prefix.acquire(tokens_of(at + 1), 20)
    assert len(again.rest) == 1
    assert tokens_held(again.caches) in (0, at)
    if at >= max(start, 1):
        logits = model(mx.array([again.rest]), cache=again.caches)[0, -1]
        assert_near(logits, needed.logits[at - max(start, 1)])
    prefix.discard(again.caches)
    prefix.check()
    prefix.pool.check()
    assert [(c.held, c.reserved) for c in prefix.pool.settle()] == [(0, 0)] * len(
        prefix.arena.spec.groups
    )


def test_a_sequence_without_states_or_with_empty_ones_starts_with_a_verification(name: str) -> None:
    caches = opened(name, 0)
    pending = verify(name, caches, 0, 7, 3)
    at = accept(pending, 3)
    expected = make_model(name)(mx.array([tokens_of(4)]), cache=stock(make_model(name)))[0, -1]
    assert_near(make_model(name)(mx.array([tokens_of(4)[at:]]), cache=caches)[0, -1], expected)


@pytest.mark.parametrize(
    "type_",
    only(
        [*NAMES, *ADAPTED, *UNPADDED],
        *("lfm2", "rwkv7", "llama4"),
    ),
)
@pytest.mark.parametrize("seed", seeds(1, 8))
def test_members_of_a_batch_are_verified_together(type_: str, seed: int) -> None:
    """With and without drafts, and with tokens that come again, in one forward."""
    rng, model, starts = random.Random(seed), make_model(type_), [3, 250, 0, 40]
    arena = open_pool(model, POOL, PoolConfig(preallocate=True))
    ragged = arena.capabilities.ragged
    if not ragged:
        # Its caches do not merge.
        starts = starts[1:2]
    forwards = Counted(model)
    sequences = [make_prompt_cache(model, arena) for _ in starts]
    for start, caches in zip(starts, sequences, strict=True):
        if start:
            mx.eval(model(mx.array([tokens_of(start)]), cache=caches), [c.state for c in caches])
    needed = model(mx.array([tokens_of(400)]), cache=stock(model))[0]
    batch = batch_of(sequences) if ragged else sequences[0]
    at, known = list(starts), list(starts)
    before = addresses(arena)
    for _ in range(6):
        first = [max(k - i, 0) for i, k in zip(at, known, strict=True)]
        kept = [again + rng.choice([1, 1, 5]) for again in first]
        counts = [k + rng.choice([0, 0, 6]) for k in kept]
        drafts = [
            tokens_of(i + k)[i:] + [WRONG] * (n - k)
            for i, k, n in zip(at, kept, counts, strict=True)
        ]
        forwards.count = 0
        pending = PendingTokens(forwards, batch, drafts)
        assert forwards.count == 1
        logits = mx.split(pending.logits, list(accumulate(counts))[:-1])
        for own, i, k in zip(logits, at, kept, strict=True):
            assert_near(own[:k], needed[i : i + k])
        held = pending.accept(kept)
        known = [i + k for i, k in zip(at, kept, strict=True)]
        at = [i + h for i, h in zip(at, held, strict=True)]
        assert addresses(arena) == before
    for i, here in enumerate(at):
        if here:
            theirs = stock(model)
            mx.eval(model(mx.array([tokens_of(here)]), cache=theirs))
            assert_like(member_of(batch, i) if ragged else batch, theirs)
    arena.pool.check()
    detach(model)


class Counted:
    """A model, and how often it was called."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.count = 0

    def __call__(self, *given: Any, **more: Any) -> mx.array:
        self.count += 1
        logits: mx.array = self.model(*given, **more)
        return logits


@pytest.mark.parametrize("kept", [0, 4])
def test_at_least_one_token_is_kept_and_no_more_than_there_are(kept: int) -> None:
    pending = verify("mamba2", opened("mamba2", 5), 5, 3, 2)
    with pytest.raises(AssertionError, match=f"{kept} tokens kept of 3"):
        pending.accept([kept])


@pytest.mark.parametrize(
    ("type_", "expected"),
    [
        *((name, "padded") for name in [*NAMES[:-1], *ADAPTED]),
        *((name, "alone") for name in ["llama4", *UNPADDED]),
        ("gpt_oss", "rows"),
        ("gear", None),
    ],
)
def test_how_a_model_verifies(type_: str, expected: str | None) -> None:
    """A full window takes nothing back, and states are no rows: gear has both."""
    model = make_model(type_)
    try:
        assert open_caches(model, POOL).prefix.arena.capabilities.verifies == expected
    finally:
        detach(model)
