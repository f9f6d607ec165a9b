"""Models that run one sequence at a time: on mlx-lm's own caches, and in a pool that is not
attached.
"""

from __future__ import annotations

import functools
from typing import Any

import mlx.core as mx
import pytest
from engine.engines import StockReply, Told, assert_nothing_held, drive, words
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import KVCache, make_prompt_cache
from models import make_model
from thorough import only

from mlx_blockpool.config import EngineConfig
from mlx_blockpool.engine import stock
from mlx_blockpool.engine.caches import PooledCaches
from mlx_blockpool.engine.engine import BlockPoolBatchEngine
from mlx_blockpool.engine.request import Request
from mlx_blockpool.engine.stock import GuardedPromptCache, StockCaches
from mlx_blockpool.kv.build import open_pool
from mlx_blockpool.tier.cache import TieredPrefixCache

ROOMY = 40_000_000
COMMON = words(1, 300)
PROMPTS = [
    words(2, 1),
    words(3, 40),
    (*COMMON, *words(4, 30)),
    words(5, 129),
    (*COMMON, *words(6, 90)),
    words(7, 130),
]


@functools.cache
def plain_model(name: str) -> Any:
    return make_model(name)


@functools.cache
def expected(name: str, prompt: tuple[int, ...]) -> StockReply:
    return StockReply(plain_model(name), prompt)


def check(name: str, prompt: tuple[int, ...], found: list[int], count: int) -> None:
    assert len(found) == count
    certain = expected(name, prompt).certain(count)
    assert list(certain) == found[: len(certain)]


def stock_engine(name: str, **config: Any) -> tuple[BlockPoolBatchEngine, GuardedPromptCache]:
    known = GuardedPromptCache(50)
    caches = StockCaches(plain_model(name), name, known)
    return BlockPoolBatchEngine(
        plain_model(name), caches, EngineConfig(**{"prefill_tokens": 128, **config})
    ), known


def unattached_engine(
    name: str, pool_bytes: int = ROOMY
) -> tuple[BlockPoolBatchEngine, TieredPrefixCache]:
    prefix = TieredPrefixCache(open_pool(plain_model(name), pool_bytes, attach=False))
    config = EngineConfig(prefill_tokens=128)
    return BlockPoolBatchEngine(plain_model(name), PooledCaches(prefix), config), prefix


def serve_all(engine: BlockPoolBatchEngine, name: str, count: int = 8) -> Told:
    uids = [engine.insert(Request(prompt, count)) for prompt in PROMPTS]
    told = drive(engine)
    for uid, prompt in zip(uids, PROMPTS, strict=True):
        check(name, prompt, told.tokens[uid], count)
    return told


# -- mlx-lm's own caches ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", only(["lfm2", "gemma2", "llama", "gemma3_text"], "lfm2", "gemma2"))
def test_on_mlx_lms_own_caches_replies_are_those_of_single_sequences(name: str) -> None:
    engine, _ = stock_engine(name)
    serve_all(engine, name)
    assert engine.counts["decode_steps"] >= engine.counts["tokens"]
    assert not engine.live


@pytest.mark.parametrize("name", ["lfm2", "gemma2", "llama"])
def test_on_mlx_lms_own_caches_a_second_turn_reuses_the_first(name: str) -> None:
    engine, known = stock_engine(name)
    first = engine.insert(Request(COMMON, 5))
    told = drive(engine)
    turn = (*COMMON, *told.tokens[first], *words(9, 20))
    assert engine.caches.cached_tokens(turn) == 305
    second = engine.insert(Request(turn, 5))
    told = drive(engine)
    assert told.started[second].cached == 305
    check(name, turn, told.tokens[second], 5)
    assert known.nbytes > 0


@pytest.mark.parametrize("own", [True, False], ids=["mlx-lm's", "unattached"])
@pytest.mark.parametrize("name", ["lfm2", "gemma2"])
def test_choices_for_one_prompt_compute_it_once(name: str, own: bool) -> None:
    engine = (stock_engine(name) if own else unattached_engine(name))[0]
    prompt = words(41, 40)
    uids = [engine.insert(Request(prompt, 4, group="one")) for _ in range(3)]
    told = drive(engine)
    for uid in uids:
        check(name, prompt, told.tokens[uid], 4)
    # Batches of gemma2 do not merge: its choices run one after the other, and mlx-lm's cache leaves
    # a token of each to compute.
    left = int(own and name == "gemma2")
    assert engine.counts["prompt_tokens"] == 39 + 2 * left
    assert sorted(told.started[uid].cached for uid in uids) == [0, 39 - left, 39 - left]


def test_on_mlx_lms_own_caches_a_common_beginning_is_computed_once() -> None:
    engine, _ = stock_engine("llama")
    prompts = [(*COMMON, i, *words(20 + i, 60)) for i in range(3)]
    uids = [engine.insert(Request(prompt, 4)) for prompt in prompts]
    told = drive(engine)
    assert engine.counts["prompt_tokens"] == 300 + 3 * 60
    # What was kept on the way is as it was, though the first went on with it.
    prompts.append((*COMMON, 9, *words(29, 60)))
    uids.append(engine.insert(Request(prompts[-1], 4)))
    drive(engine, told)
    assert told.started[uids[-1]].cached == 300
    for uid, prompt in zip(uids, prompts, strict=True):
        check("llama", prompt, told.tokens[uid], 4)


@pytest.mark.parametrize("name", ["lfm2", "gemma2"])
@pytest.mark.parametrize("steps", only([1, 2, 4, 6], 4))
def test_on_mlx_lms_own_caches_cancel_keeps_what_was_computed(name: str, steps: int) -> None:
    engine, _ = stock_engine(name)
    uid, other = engine.insert(Request(COMMON, 20)), engine.insert(Request(words(3, 40), 4))
    told = Told()
    for _ in range(steps):
        told.take(engine.next())
    (computed,) = [r.computed for r in engine.live if r.uid == uid]
    engine.cancel(uid)
    question = (*COMMON, *expected(name, COMMON).tokens(20), 9)
    assert engine.caches.cached_tokens(question) == computed
    drive(engine, told)
    check(name, words(3, 40), told.tokens[other], 4)
    again = engine.insert(Request(question, 4))
    told = drive(engine)
    check(name, question, told.tokens[again], 4)


# -- pools that are not attached -------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", only(["gemma2", "llama", "gemma3_text", "gpt_oss", "lfm2"], "gemma2", "lfm2")
)
def test_in_a_pool_that_is_not_attached_replies_are_those_of_single_sequences(name: str) -> None:
    engine, prefix = unattached_engine(name)
    serve_all(engine, name)
    assert engine.counts["decode_steps"] >= engine.counts["tokens"]
    assert engine.counts["swapped_out"] == 0
    assert_nothing_held(prefix)


@pytest.mark.parametrize("name", ["gemma2", "llama", "gemma3_text"])
def test_in_a_pool_that_is_not_attached_a_second_turn_reuses_the_first(name: str) -> None:
    engine, prefix = unattached_engine(name)
    first = engine.insert(Request(COMMON, 5))
    told = drive(engine)
    turn = (*COMMON, *told.tokens[first], *words(9, 20))
    second, beside = engine.insert(Request(turn, 5)), engine.insert(Request(words(3, 40), 5))
    told = drive(engine)
    assert told.started[second].cached == 305
    check(name, turn, told.tokens[second], 5)
    check(name, words(3, 40), told.tokens[beside], 5)
    assert_nothing_held(prefix)


def test_a_model_that_does_not_batch_has_its_pool_to_one_sequence() -> None:
    spec = open_pool(plain_model("gemma2"), ROOMY, attach=False).spec
    engine, prefix = unattached_engine(
        "gemma2", pool_bytes=2 * sum(map(spec.bytes_per_block, spec.groups))
    )
    uids = [engine.insert(Request(words(i, 250), 20)) for i in range(3)]

    def alone(_: Told) -> None:
        assert len(engine.live) <= 1

    told = drive(engine, after=alone)
    for i, uid in enumerate(uids):
        check("gemma2", words(i, 250), told.tokens[uid], 20)
    assert_nothing_held(prefix)


# -- mlx-lm's prompt cache with a guard ------------------------------------------------------------


def computed(name: str, tokens: tuple[int, ...]) -> list[Any]:
    caches = make_prompt_cache(plain_model(name))
    mx.eval(plain_model(name)(mx.array([tokens]), cache=caches))
    return caches


@pytest.mark.parametrize(("name", "kept"), [("llama", 298), ("lfm2", 0)])
def test_an_exact_repeat_leaves_tokens_to_compute(name: str, kept: int) -> None:
    """mlx-lm's cut and ours leave one each.

    A state cannot be cut: only what was kept at a shorter place serves.
    """
    known = GuardedPromptCache(10)
    known.insert_cache(name, list(COMMON), computed(name, COMMON))
    assert known.cached_tokens(name, list(COMMON)) == kept
    caches, rest = known.fetch_nearest_cache(name, list(COMMON))
    assert (rest, caches is None) == (list(COMMON[kept:]), kept == 0)
    steps = generate_step(mx.array(rest), plain_model(name), max_tokens=5, prompt_cache=caches)
    check(name, COMMON, [token for token, _ in steps], 5)


@pytest.mark.parametrize("name", ["llama", "lfm2"])
def test_an_exact_repeat_is_served_from_what_was_kept_before_its_last_token(name: str) -> None:
    engine, known = stock_engine(name)
    for _ in range(3):
        uid = engine.insert(Request(COMMON, 5, breakpoints=[(299, "user")]))
        told = drive(engine)
        check(name, COMMON, told.tokens[uid], 5)
    assert told.started[uid].cached == (299 if name == "lfm2" else 298)
    assert known.cached_tokens(name, [COMMON[0]]) == 0


def test_caches_that_are_ahead_of_their_tokens_are_cut_back_to_them() -> None:
    known = GuardedPromptCache(10)
    caches = computed("llama", COMMON)
    known.insert_cache("llama", list(COMMON[:250]), caches)
    assert [c.offset for c in caches] == [250, 250]
    found, rest = known.fetch_nearest_cache("llama", list(COMMON))
    assert (rest, [c.offset for c in found]) == (list(COMMON[250:]), [250, 250])


def test_given_caches_are_known_under_the_salt_of_their_request_alone() -> None:
    engine, known = stock_engine("llama")
    prompt = [*COMMON, *words(4, 30)]
    caches = make_prompt_cache(plain_model("llama"))
    plain_model("llama")(mx.array([prompt[:200]]), cache=caches)
    engine.insert(Request(prompt, 5, salt=bytes(32)), caches)
    assert known.cached_tokens(("llama", bytes(32)), prompt) == 200
    assert known.cached_tokens("llama", prompt) == 0


def test_salts_of_which_nothing_is_cached_any_more_are_dropped() -> None:
    known = GuardedPromptCache(2)
    for number in range(5):
        known.insert_cache(("llama", bytes([number])), [1, 2, 3], computed("llama", [1, 2, 3]))
    assert list(known._trie._trie) == [("llama", bytes([number])) for number in (3, 4)]


class Untrimmable:
    """A cache of another package, whose class is not of mlx-lm."""

    def __init__(self) -> None:
        self._cache = KVCache()

    def __getattr__(self, name: str) -> Any:
        if name in ("is_trimmable", "_cache"):
            raise AttributeError(f"Untrimmable has no {name}")
        return getattr(self._cache, name)


def test_caches_that_lack_a_part_of_the_interface_are_not_reused_which_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine, known = stock_engine("llama")
    layers = plain_model("llama").layers
    monkeypatch.setattr(stock, "stock_prompt_cache", lambda _: [Untrimmable() for _ in layers])
    for _ in range(2):
        told = serve_all(engine, "llama")
        assert [started.cached for started in told.started.values()] == [0] * len(PROMPTS)
    assert len(known) == 0
    (said,) = caplog.messages
    assert "every prompt is computed whole: Untrimmable has no is_trimmable" in said
