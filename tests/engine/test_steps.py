"""Which steps verify drafts: what the sources of an engine guess, where that pays."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from engine.engines import Told, attached, drive, make_engine, open_prefix, words

from mlx_blockpool.config import EngineConfig
from mlx_blockpool.drafts.curve import CostCurve
from mlx_blockpool.engine.caches import PooledCaches
from mlx_blockpool.engine.engine import BlockPoolBatchEngine
from mlx_blockpool.engine.request import Request
from mlx_blockpool.errors import BlockpoolError
from mlx_blockpool.kv.capabilities import Capabilities

PROMPT = words(1, 40)


def accepted(engine: BlockPoolBatchEngine, source: str) -> int:
    return engine.counts[f"accepted {source}"]


def again(engine: BlockPoolBatchEngine, **more: Any) -> tuple[Told, int]:
    """Another run of the same prompt, and how many decode steps it took."""
    before = engine.counts["decode_steps"]
    engine.insert(Request(PROMPT, 60, **more))
    told = drive(engine)
    return told, engine.counts["decode_steps"] - before


def repeating(tokens: mx.array, logits: mx.array) -> mx.array:
    """A processor: what comes next is the token ten before."""
    return logits.at[0, tokens[-10]].add(100)


def test_a_reply_that_repeats_itself_is_drafted_from_its_own_tokens() -> None:
    plain, _ = make_engine("llama")
    expected, steps = again(plain, processors=[repeating])
    engine, _ = make_engine("llama", drafts=8)
    told, fewer = again(engine, processors=[repeating])
    assert told.tokens == expected.tokens
    # Three tokens are recognised, and then nine are emitted by each forward.
    assert accepted(engine, "context") == steps - fewer > 40


def test_a_reply_that_is_cached_behind_its_prompt_is_drafted_from_the_trie() -> None:
    engine, _ = make_engine("llama", drafts=8)
    first, _ = again(engine)
    before = accepted(engine, "prefix")
    second, steps = again(engine)
    assert second.tokens[2] == first.tokens[1]
    # 60 tokens, of which each forward emits 9 from the first one on.
    assert (steps, accepted(engine, "prefix") - before) == (8, 53)
    assert engine.counts["drafted prefix"] == 53


def test_another_salt_finds_neither_the_trie_nor_the_replies_of_an_agent() -> None:
    engine, _ = make_engine("llama", drafts=8)
    again(engine, agent="a", salt=bytes(32))
    again(engine, agent="a", salt=bytes(31) + b"1")
    assert not [name for name in engine.counts if name.endswith(("prefix", "replies"))]


def test_an_agents_last_reply_is_drafted_where_nothing_is_cached() -> None:
    engine, prefix = make_engine("llama", drafts=8)
    first, _ = again(engine, agent="a")
    prefix.clear()
    second, _ = again(engine, agent="a")
    assert second.tokens[2] == first.tokens[1]
    assert accepted(engine, "replies") > 20
    assert accepted(engine, "prefix") == 0


def measured(curve: CostCurve | None, **config: Any) -> BlockPoolBatchEngine:
    caches = PooledCaches(open_prefix("llama"))
    caches.curve = curve
    return BlockPoolBatchEngine(attached("llama")[0], caches, EngineConfig(drafts="auto", **config))


def test_auto_drafts_where_it_pays_by_the_measured_curve() -> None:
    cheap, dear = (
        CostCurve.from_points({1: 1.0, 32: 1.1}),
        CostCurve.from_points({1: 1.0, 2: 2.0, 32: 32.0}),
    )
    found = {}
    for name, curve in (("cheap", cheap), ("dear", dear)):
        engine = measured(curve)
        again(engine)
        _, steps = again(engine)
        found[name] = steps, engine.counts["verifications"]
    assert found["cheap"][0] < 20
    assert found["cheap"][1] > 0
    assert found["dear"] == (61, 0)


def test_drafts_begin_once_it_is_known_what_forwards_cost() -> None:
    engine = measured(None)
    engine.caches.is_unmeasured = True
    engine.steps.decide()
    assert engine.steps.off == "it is measured later what forwards cost"
    again(engine)
    engine.caches.curve, engine.caches.is_unmeasured = (
        CostCurve.from_points({1: 1.0, 32: 1.1}),
        False,
    )
    engine.steps.decide()
    assert engine.steps.off is None
    _, steps = again(engine)
    assert steps < 20
    drafting = engine.steps.drafting
    engine.steps.decide()
    assert engine.steps.drafting is drafting, "it keeps what it has learned"


def test_drafts_that_are_off_say_why() -> None:
    caches = PooledCaches(open_prefix("llama"))
    model = attached("llama")[0]
    assert measured(None).steps.off == "it was not measured what forwards cost"
    assert (
        BlockPoolBatchEngine(model, caches, EngineConfig(drafts="off")).steps.off
        == "drafts are off"
    )
    caches.no_drafts = "several ranks run the model together"
    assert BlockPoolBatchEngine(model, caches, EngineConfig(drafts=4)).steps.off == caches.no_drafts
    caches.no_drafts = None
    caches.capabilities = Capabilities(ragged=True)
    off = BlockPoolBatchEngine(model, caches, EngineConfig(drafts=4)).steps.off
    assert (
        off
        == "the model does not compute several tokens of a sequence as it computes them one by one"
    )


@pytest.mark.parametrize("drafts", ["on", 0, -1, 2.5])
def test_drafts_are_auto_off_or_a_number(drafts: Any) -> None:
    with pytest.raises(BlockpoolError, match="must be 'auto', 'off' or a positive integer"):
        EngineConfig(drafts=drafts)


def test_a_request_that_goes_on_in_another_engine_is_drafted_and_counted_there() -> None:
    engine, prefix = make_engine("llama", drafts=8)
    first, _ = again(engine)
    engine.insert(Request(PROMPT, 60))
    told = drive(engine, after=lambda told: engine.counts["accepted prefix"] > 0)
    before = dict(engine.counts)
    (drafter,) = (sequence.drafter for sequence in engine.sequences)
    assert drafter is not None
    (suspended,) = engine.suspend()
    assert suspended.drafter is None
    other = BlockPoolBatchEngine(attached("llama")[0], PooledCaches(prefix), EngineConfig(drafts=8))
    uid = other.resume(suspended)
    later = drive(other)
    assert suspended.drafter is not None
    assert told.tokens[2] + later.tokens[uid] == first.tokens[1]
    # From its first step on, as the trie knows what follows the token that was drawn last.
    assert other.counts["decode_steps"] == -(-len(later.tokens[uid]) // 9)
    assert before["accepted prefix"] == accepted(engine, "prefix")
