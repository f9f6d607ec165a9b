"""Mixed steps: a chunk of a prompt and the next tokens of replies in one forward."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from architectures.test_configs import build
from engine.drafts import plain, script
from engine.engines import (
    Told,
    assert_nothing_held,
    assert_stock,
    drive,
    make_engine,
    stock_caches,
    stock_model,
    words,
)
from engine.forms import FLAGS, STOP, assert_stock_form, form_of
from engine.test_forms import sampler

from mlx_blockpool.config import EngineConfig
from mlx_blockpool.engine import engine as engine_module
from mlx_blockpool.engine.opening import open_caches
from mlx_blockpool.engine.request import Request
from mlx_blockpool.kv.batch_cache import PooledBatchCache

LEAST = EngineConfig.mixed_tokens
NAMES = ["llama", "gemma3_text", "gpt_oss", "gemma3_text K8V8", "llama K8V4"]


@pytest.mark.parametrize("name", [*NAMES, "deepseek_v2"])
@pytest.mark.parametrize("drafts", ["off", 4])
def test_replies_and_prompts_of_mixed_steps_are_those_of_single_sequences(
    name: str, drafts: Any
) -> None:
    """Past the ends of windows and blocks, with a prompt of two chunks and several short ones."""
    prompts = [words(i, n) for i, n in enumerate((30, 9, 41))]
    later = [words(9, 700), words(8, 20), words(7, 33)]
    expected = plain(name, [Request(each, 30) for each in prompts])
    engine, prefix = make_engine(name, drafts=drafts, decode_share=0.0, prefill_tokens=64)
    uids = [engine.insert(Request(each, 30)) for each in prompts]
    if drafts != "off":
        for uid in uids:
            script(engine, uid, expected.tokens[uid], 4, "every 5th")
    told = drive(engine, after=lambda told: len(told.tokens) == 3)
    before = Counter(engine.counts)
    uids += [engine.insert(Request(each, 12)) for each in later]
    drive(engine, told)
    found = engine.counts - before
    assert found["mixed"] >= 5
    assert (drafts == "off") == (found["verifications"] == 0)
    for uid, prompt in zip(uids, prompts + later, strict=True):
        assert_stock(name, prompt, told.tokens[uid])
    assert_nothing_held(prefix)


def test_a_chunk_next_to_replies_does_not_attend_in_the_last_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attended: list[int] = []
    attend = PooledBatchCache._attend_prompts

    def counted(self: PooledBatchCache, *args: Any) -> mx.array:
        attended.append(self.members[0].layer)
        return attend(self, *args)

    engine, _ = make_engine("llama", decode_share=0.0, prefill_tokens=64)
    engine.insert(Request(words(1, 30), 30))
    told = drive(engine, after=lambda told: 1 in told.tokens)
    uid = engine.insert(Request(words(2, 200), 4))
    monkeypatch.setattr(PooledBatchCache, "_attend_prompts", counted)
    before = Counter(engine.counts)
    drive(engine, told, after=lambda _: not engine.scheduler.prefilling)
    found = engine.counts - before
    assert found["mixed"] == found["chunks"] > 2
    layers = len(stock_model("llama").layers)
    assert Counter(attended) == dict.fromkeys(range(layers - 1), found["mixed"])
    drive(engine, told)
    assert_stock("llama", words(2, 200), told.tokens[uid])


def test_seeds_and_forms_do_not_notice_that_a_prompt_is_computed_next_to_them() -> None:
    def served(prompt: tuple[int, ...] | None) -> tuple[Told, int]:
        engine, _ = make_engine("llama", decode_share=0.0, prefill_tokens=64)
        engine.insert(Request(words(1, 30), 40, sampler=sampler(5)))
        engine.insert(Request(words(2, 20), 100, form=form_of(FLAGS), stop=STOP))
        told = drive(engine, after=lambda told: len(told.tokens) == 2)
        if prompt is not None:
            engine.insert(Request(prompt, 1))
        return drive(engine, told), engine.counts["mixed"]

    alone, mixed = served(None), served(words(3, 900))
    assert alone[1] <= 2
    assert mixed[1] >= 10
    for uid in (1, 2):
        assert mixed[0].tokens[uid] == alone[0].tokens[uid]
    found = mixed[0].tokens[2]
    assert_stock_form("llama", words(2, 20), FLAGS, found, 100)


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_of_mixed_steps_has_the_logits_of_one_that_is_computed_alone(name: str) -> None:
    """Cold next to replies, resumed from that, and on mlx-lm's own caches."""
    prompt, engine = words(4, 300), make_engine(name, decode_share=0.0)[0]
    engine.insert(Request(words(1, 20), 200))
    drive(engine, after=lambda told: 1 in told.tokens)
    rows = []
    for _ in range(2):
        uid = engine.insert(Request(prompt, 1, breakpoints=[(200, "system")]))
        told = drive(engine, after=lambda told, uid=uid: uid in told.reasons)
        rows.append(told.logprobs[uid][0])
    assert engine.counts["mixed"] >= 3
    assert told.started[uid].cached >= 200
    logits = stock_model(name)(mx.array([prompt]), cache=stock_caches(name))[0, -1]
    expected = logits - mx.logsumexp(logits)
    for row in rows:
        assert row is not None
        assert mx.allclose(row, expected, atol=1e-4 if " " not in name else 5e-2)


@pytest.mark.parametrize("name", ["lfm2", "qwen3_5", "deepseek_v3", "gemma2", "gemma3n"])
def test_other_models_share_the_time(name: str) -> None:
    """States take a chunk as one sequence, some modules do not attend through the cache, and layers
    that read the keys of others would be computed for each token of a prompt.
    """
    engine, prefix = make_engine(name, decode_share=0.0, prefill_tokens=64)
    assert not engine.caches.capabilities.mixes
    engine.insert(Request(words(1, 30), 30))
    told = drive(engine, after=lambda told: 1 in told.tokens)
    uid = engine.insert(Request(words(2, 200), 8))
    steps = engine.counts["decode_steps"]
    drive(engine, told, after=lambda _: not engine.scheduler.prefilling)
    assert engine.counts["decode_steps"] <= steps + 1
    drive(engine, told)
    assert engine.counts["mixed"] == 0
    for number, prompt in ((1, words(1, 30)), (uid, words(2, 200))):
        assert_stock(name, prompt, told.tokens[number])
    assert_nothing_held(prefix)


@pytest.mark.parametrize(("name", "expected"), [("cohere2", True), ("gemma2", False)])
def test_a_model_mixes_if_a_trial_gives_the_logits_of_single_sequences(
    name: str, expected: bool
) -> None:
    model = build(name)
    mx.eval(model.parameters())
    assert open_caches(model, 20_000_000).capabilities.mixes == expected


class Clock:
    """Stands in for time where a forward takes a second, and one more for `rows` rows.

    Where it has a row for each of `members` alone, the next one waits for it.
    """

    def __init__(self, model: Any, rows: int, members: int) -> None:
        self.now, self.rows, self.members = 0.0, rows, members
        self._in_flight = 0.0
        self.forwards: list[int] = []
        self._model = model

    def seconds(self, rows: int) -> float:
        return 1 + rows / self.rows

    def __call__(self, tokens: Any, **more: Any) -> Any:
        self.now += self._in_flight
        self._in_flight = self.seconds(tokens.size)
        if tokens.size > self.members:
            self.now, self._in_flight = self.now + self._in_flight, 0.0
        self.forwards.append(tokens.size)
        return self._model(tokens, **more)


def clocked(
    patch: pytest.MonkeyPatch, rows: int, members: int = 1, **config: Any
) -> tuple[Any, Clock]:
    """An engine by that clock."""
    engine, _ = make_engine("llama", 80_000_000, **{"prefill_tokens": 512, **config})
    clock = Clock(engine.model, rows, members)
    patch.setattr(engine_module, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    engine.model = engine.scheduler.batch.model = clock
    return engine, clock


@pytest.mark.parametrize(
    ("rows", "share", "expected"),
    [
        (300, 0.5, 256),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in ((32, 0.5, LEAST), (300, 0.8, LEAST), (10_000, 0.8, 512))
        ),
    ],
)
def test_a_chunk_next_to_replies_is_as_long_as_their_share_of_the_time_allows(
    monkeypatch: pytest.MonkeyPatch, rows: int, share: float, expected: int
) -> None:
    """Of the smallest part of the grid that takes longer, the replies get the rest afterwards."""
    engine, clock = clocked(monkeypatch, rows, decode_share=share)
    engine.insert(Request(words(1, 30), 1000))
    drive(engine, after=lambda told: len(told.tokens.get(1, [])) == 4)
    engine.insert(Request(words(2, 512 * 10 + 1), 1))
    drive(engine, after=lambda _: engine.scheduler.prefilling and engine.live[0].computed >= 2048)
    del clock.forwards[:]
    drive(engine, after=lambda _: not engine.scheduler.prefilling)
    longest = max(clock.forwards) - 1
    assert longest == expected
    plain = clock.seconds(1)
    assert longest == LEAST or clock.seconds(longest + 1) <= plain / share
    seconds = sum(map(clock.seconds, clock.forwards))
    assert 0.99 * share * seconds <= len(clock.forwards) * plain
    assert longest > LEAST or len(clock.forwards) * plain <= 1.05 * share * seconds


def test_eight_replies_continue_while_long_prompts_are_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A token of each in every forward, and no more forwards than the smallest chunks take."""
    engine, clock = clocked(monkeypatch, 300, 8)
    for i in range(8):
        engine.insert(Request(words(10 + i, 40), 2000))
    told = drive(engine, after=lambda told: len(told.tokens) == 8)
    lengths = (1024, 3840)
    for i, length in enumerate(lengths):
        engine.insert(Request(words(i, length), 1))
    drive(engine, told, after=lambda _: bool(engine.scheduler.prefilling))
    before, start = {uid: len(told.tokens[uid]) for uid in range(1, 9)}, len(clock.forwards)
    drive(engine, told, after=lambda _: not engine.scheduler.prefilling)
    forwards = len(clock.forwards) - start
    assert forwards <= sum(lengths) // LEAST + 2
    for uid, count in before.items():
        assert len(told.tokens[uid]) - count >= 0.8 * forwards


def test_a_forward_that_fails_ends_what_is_live_and_nothing_that_waits() -> None:
    engine, prefix = make_engine("llama", decode_share=0.0, max_members=2)
    model = engine.scheduler.batch.model
    live = [engine.insert(Request(words(1, 20), 50))]
    drive(engine, after=lambda told: 1 in told.tokens)
    live.append(engine.insert(Request(words(2, 500), 4)))
    waiting = engine.insert(Request(words(3, 30), 4))

    def fail(*given: Any, **more: Any) -> Any:
        raise RuntimeError("the model has failed")

    engine.scheduler.batch.model = fail
    with pytest.raises(RuntimeError, match="the model has failed"):
        engine.next()
    engine.scheduler.batch.model = model
    assert engine.reset() == live
    told = drive(engine)
    assert_stock("llama", words(3, 30), told.tokens[waiting])
    assert_nothing_held(prefix)


def test_the_head_computes_the_rows_of_replies_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = make_engine("llama", decode_share=0.0, prefill_tokens=64)
    for seed in range(2):
        engine.insert(Request(words(seed, 20), 30))
    told = drive(engine, after=lambda told: len(told.tokens) == 2)
    rows: list[int] = []
    as_linear = nn.Embedding.as_linear

    def counted(self: nn.Embedding, hidden: mx.array) -> mx.array:
        rows.append(hidden.shape[0] * hidden.shape[1])
        return as_linear(self, hidden)

    monkeypatch.setattr(nn.Embedding, "as_linear", counted)
    engine.insert(Request(words(5, 200), 1))
    drive(engine, told, after=lambda _: engine.counts["mixed"] == 3)
    assert rows
    assert max(rows) <= 3


def test_a_model_whose_layer_has_a_list_of_caches_is_served_alone_in_a_batch() -> None:
    """Its one layer has two leaves: a state, and keys and values."""
    engine, prefix = make_engine("falcon_h1")
    uid = engine.insert(Request(words(1, 30), 5))
    told = drive(engine)
    assert told.failed == {}
    assert_stock("falcon_h1", words(1, 30), told.tokens[uid])
    assert_nothing_held(prefix)
