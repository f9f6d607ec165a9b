"""Which pool a model is served from: in few bits where its attention reads them, and what is
said where it does not.
"""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from architectures.configs import CONFIGS
from architectures.configs_common import wide
from engine.engines import StockReply, drive, words
from mlx_lm.models.cache import make_prompt_cache
from models import make_model

from mlx_blockpool.config import EngineConfig, KVBits
from mlx_blockpool.engine.engine import BlockPoolBatchEngine
from mlx_blockpool.engine.opening import open_caches
from mlx_blockpool.engine.request import Request
from mlx_blockpool.engine.stock import StockCaches
from mlx_blockpool.kv.rounded_caches import rounded
from mlx_blockpool.testing import tiny_model

ROOMY = 20_000_000
UNREAD = (
    "its attention does not read quantised blocks. Keys and values stay in float32, and --kv-bits "
    "is not used."
)


@pytest.mark.parametrize("bits", [None, KVBits(), KVBits(8, 4)])
def test_a_pool_holds_the_bits_that_are_asked_for(
    bits: KVBits | None, caplog: pytest.LogCaptureFixture
) -> None:
    caches: Any = open_caches(make_model("llama", head_dim=64), ROOMY, bits=bits)
    assert (caches.ragged, caches.prefix.arena.spec.bits, caplog.text) == (True, bits, "")
    assert caches.prefix.pool.pool_bytes == ROOMY


def test_attention_that_reads_no_quantised_blocks_has_others_and_all_of_the_bytes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caches: Any = open_caches(make_model("unattachable", head_dim=32), ROOMY, bits=KVBits())
    assert (caches.ragged, caches.prefix.arena.spec.bits) == (False, None)
    assert caches.prefix.pool.pool_bytes == ROOMY
    assert [
        record.getMessage() for record in caplog.records if record.levelno == logging.WARNING
    ] == [f"unattachable: {UNREAD}"]


def test_bits_never_cost_a_model_its_batches(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "mlx_blockpool.kv.probe.rounded",
        lambda caches, spec: rounded(caches, spec.with_bits(KVBits(4, 4))),
    )
    caches: Any = open_caches(make_model("llama", head_dim=64), ROOMY, bits=KVBits())
    assert (caches.ragged, caches.prefix.arena.spec.bits) == (True, None)
    assert f"llama: {UNREAD}" in caplog.text


def test_rows_that_no_group_divides_stay_as_they_are_and_that_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caches: Any = open_caches(make_model("llama"), ROOMY, bits=KVBits())
    assert (caches.ragged, caches.prefix.arena.spec.bits) == (True, None)
    assert "llama has no keys or values whose size is a multiple of 32" in caplog.text
    assert "Keys and values stay in float32, and --kv-bits is not used." in caplog.text


def test_a_model_that_cannot_be_described_has_no_pool_and_that_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = make_model("llama")
    model.make_cache = lambda: [SimpleNamespace() for _ in model.layers]
    assert isinstance(open_caches(model, ROOMY, bits=KVBits()), StockCaches)
    assert "no pool, and no 8-bit keys and values: llama" in caplog.text


def test_a_model_without_batches_has_quantised_blocks_and_all_of_the_bytes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = tiny_model(wide(CONFIGS["llama4"]))
    engine = BlockPoolBatchEngine.open(model, ROOMY, EngineConfig(prefill_tokens=64), bits=KVBits())
    caches: Any = engine.caches
    arena = caches.prefix.arena
    assert (caches.ragged, arena.spec.bits, caplog.text) == (False, KVBits(), "")
    assert arena.pool.pool_bytes == ROOMY
    prompts = [words(1, 90), (*words(1, 70), *words(2, 9))]
    uids = [engine.insert(Request(prompt, 5)) for prompt in prompts]
    told = drive(engine)
    for uid, prompt in zip(uids, prompts, strict=True):
        expected = StockReply(model, prompt, rounded(make_prompt_cache(model), arena.spec)).certain(
            5
        )
        assert list(expected) == told.tokens[uid][: len(expected)]
    assert told.started[uids[1]].cached == 70
    assert mx.all(told.logprobs[uids[0]][0] <= 0)
