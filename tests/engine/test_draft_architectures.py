"""Every model type whose caches take tokens back gives the replies with drafts that it gives
without.
"""

from __future__ import annotations

import mlx.core as mx
import pytest
from architectures.configs import RUNNABLE
from architectures.test_configs import build
from engine.drafts import script
from engine.engines import TIE, Told, assert_nothing_held, drive, words
from thorough import only

from mlx_blockpool.config import EngineConfig
from mlx_blockpool.engine.engine import BlockPoolBatchEngine
from mlx_blockpool.engine.opening import open_caches
from mlx_blockpool.engine.request import Request

# Windows and chunks have 32 tokens.
REQUESTS = [Request(words(1, 45), 14), Request(words(2, 10), 14)]
# States and windows together; logits that depend on where a prompt is cut; states of another class.
WITHOUT = {
    *("baichuan_m1", "gear", "recurrent_gemma"),
    *("phi3small", "deepseek_v41"),
}


@pytest.mark.parametrize("name", only(RUNNABLE, "cohere2", "falcon_h1"))
def test_replies_with_drafts_are_those_without(name: str) -> None:
    model = build(name)
    mx.eval(model.parameters())
    caches = open_caches(model, 20_000_000)
    assert (caches.capabilities.verifies is None) == (name in WITHOUT)
    if caches.capabilities.verifies is None:
        return
    expected = served(BlockPoolBatchEngine(model, caches))
    caches.prefix.clear()
    engine = BlockPoolBatchEngine(model, caches, EngineConfig(drafts=6))
    found = served(engine, expected)
    assert engine.counts["verifications"] > 3
    for uid, tokens in expected.tokens.items():
        certain = certain_count(expected, uid)
        assert found.tokens[uid][:certain] == tokens[:certain]
    assert_nothing_held(caches.prefix)


def served(engine: BlockPoolBatchEngine, drafts: Told | None = None) -> Told:
    """All requests, with drafts that are wrong from their third token on."""
    for request in REQUESTS:
        uid = engine.insert(request)
        if drafts is not None:
            script(engine, uid, drafts.tokens[uid], 6, "behind 2")
    return drive(engine)


def certain_count(told: Told, uid: int) -> int:
    """How many tokens of a reply come before the first whose logits are too near to each other."""
    for count, logprobs in enumerate(told.logprobs[uid]):
        assert logprobs is not None
        second, first = mx.sort(logprobs)[-2:].tolist()
        if first - second < TIE:
            return count
    return len(told.tokens[uid])
