"""Draft sources of plugins in the engine: their guesses are verified, and replies are those without them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
from engine.drafts import assert_alike, plain
from engine.engines import VOCABULARY, StockReply, attached, drive, open_prefix, stock_model, words
from models import CONFIGS, make_model, write_model
from plugin_example import blockpool_tiny_llama
from plugin_example.blockpool_tiny_llama import draft_model

from mlx_blockpool.config import EngineConfig
from mlx_blockpool.drafts.draft import DraftSource, Guess, SourceFactory
from mlx_blockpool.engine.caches import PooledCaches
from mlx_blockpool.engine.engine import BlockPoolBatchEngine
from mlx_blockpool.engine.request import Request
from mlx_blockpool.plugins import empty_plugin_manager, source_factories

ROOMY = 1 << 26


class Prophet:
    """Knows the reply to one prompt."""

    name = "prophet"

    def __init__(self, reply: Sequence[int], fails_at: int | None = None) -> None:
        self.reply = list(reply)
        self.num_seen = 0
        self.fails_at = fails_at

    def observe(self, tokens: Sequence[int]) -> None:
        self.num_seen += len(tokens)
        if self.num_seen == self.fails_at:
            raise RuntimeError("lost its sight")

    def guess(self, next_tokens: Sequence[int], at_most: int) -> Guess:
        start = self.num_seen + len(next_tokens)
        return Guess(self.reply[start : start + at_most])


class Strange(Prophet):
    """Knows the next token, and behind it one that no model has."""

    def __init__(self, reply: Sequence[int], token: int) -> None:
        super().__init__(reply)
        self.token = token

    def guess(self, next_tokens: Sequence[int], at_most: int) -> Guess:
        return Guess([*super().guess(next_tokens, 1).tokens, self.token])


def drafting(sources: list[SourceFactory]) -> BlockPoolBatchEngine:
    caches = PooledCaches(open_prefix("llama", ROOMY))
    caches.sources = sources
    return BlockPoolBatchEngine(attached("llama")[0], caches, EngineConfig(prefill_tokens=128, drafts=4))


@pytest.mark.parametrize(
    "make", [Prophet, partial(Prophet, fails_at=9), *(partial(Strange, token=t) for t in (-1, 10**6, 1 << 40))]
)
def test_replies_with_a_source_of_a_plugin_are_those_without(make: Callable[[list[int]], DraftSource]) -> None:
    requests = [Request(words(1, 40), max_tokens=30), Request(words(2, 50), max_tokens=20)]
    expected = plain("llama", requests)
    known = {tuple(request.tokens): expected.tokens[uid] for uid, request in enumerate(requests, 1)}
    engine = drafting([lambda prompt: make(known[tuple(prompt)])])
    for request in requests:
        engine.insert(request)
    assert_alike(expected, drive(engine))
    assert engine.counts["accepted prophet"] == engine.counts["drafted prophet"] > (20 if make is Prophet else 0)


def sources_of(path: Path, monkeypatch: pytest.MonkeyPatch) -> list[SourceFactory]:
    """Those of the example of plugins/README.md, with the model in `path`."""
    monkeypatch.setenv("BLOCKPOOL_DRAFT_MODEL", str(path))
    manager = empty_plugin_manager()
    manager.register(blockpool_tiny_llama)
    return source_factories(attached("llama")[0], CONFIGS["llama"], manager)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_plugin_drafts_with_a_model_of_its_own(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # With the seed of the model that is served all guesses are right.
    requests = [Request(words(1, 40), max_tokens=60), Request(words(2, 700), max_tokens=50), Request(words(3, 9), max_tokens=40)]
    expected = plain("llama", requests)
    engine = drafting(sources_of(write_model(tmp_path, make_model("llama", seed), CONFIGS["llama"]), monkeypatch))
    for request in requests:
        engine.insert(request)
    assert_alike(expected, drive(engine))
    drafted, accepted = (engine.counts[f"{what} draft-model"] for what in ("drafted", "accepted"))
    assert accepted == drafted > 60 if seed == 0 else accepted < drafted


def test_a_draft_model_goes_on_behind_the_tokens_that_came(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_model, "PREFILL_TOKENS", 16)
    prompt = words(4, 50)
    source = draft_model.DraftModel(stock_model("llama"), prompt)
    for known in ((), (7,), (7,), (7, 8, 9), words(5, 40), ()):
        expected = StockReply(stock_model("llama"), (*prompt, *known)).tokens(6)
        assert tuple(source.guess(known, 6).tokens) == expected
        source.observe(known)
        prompt = (*prompt, *known)


def test_a_draft_model_that_lacks_tokens_or_is_not_named_drafts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {**CONFIGS["llama"], "vocab_size": VOCABULARY - 1}
    folder = write_model(tmp_path, make_model("llama", vocab_size=VOCABULARY - 1), small)
    assert sources_of(folder, monkeypatch) == []
    monkeypatch.delenv("BLOCKPOOL_DRAFT_MODEL")
    assert blockpool_tiny_llama.draft_sources({}) == []
