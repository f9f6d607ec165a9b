"""Replies in a form: in batches with others, in every cache, over all that can happen to a
request on its way.
"""

from __future__ import annotations

import functools
import json
from typing import Any

import jsonschema
import mlx.core as mx
import numpy as np
import pytest
from engine.engines import (
    VOCABULARY,
    Told,
    assert_nothing_held,
    attached,
    bytes_of,
    drive,
    make_engine,
    words,
)
from engine.forms import EOS, FLAGS, PERSON, SAYING, STOP, assert_stock_form, form_of, text_of
from engine.test_other_caches import stock_engine, unattached_engine
from mlx_lm.generate import StopSequences
from thorough import only

from mlx_blockpool.config import EngineConfig, FormConfig
from mlx_blockpool.drafts.curve import CostCurve
from mlx_blockpool.engine import caches as caches_module
from mlx_blockpool.engine import decode as decode_module
from mlx_blockpool.engine.caches import PooledCaches
from mlx_blockpool.engine.engine import BlockPoolBatchEngine
from mlx_blockpool.engine.request import Request
from mlx_blockpool.engine.sampling import follow, masked
from mlx_blockpool.engine.sequence import Sequence
from mlx_blockpool.errors import FormError, PoolExhaustedError
from mlx_blockpool.kv.prompt_cache import tokens_held
from mlx_blockpool.server.sampling import OwnRandomness, SeededSampler

SCHEMAS = [PERSON, None, FLAGS, None, PERSON, None, FLAGS, None]
FEW = [PERSON, None, FLAGS, None]
PROMPTS = [words(i, 4 + 37 * i % 300) for i in range(len(SCHEMAS))]
# Room for any reply in these forms.
MOST = 100
# Seconds of forwards that cost the same for any number of rows, and of some that cost as much as
# they have rows.
FLAT, LINEAR = CostCurve.from_points({1: 1.0, 64: 1.1}), CostCurve.from_points({1: 1.0, 64: 64.0})


def sampler(seed: int) -> Any:
    own = OwnRandomness(seed)
    return SeededSampler(lambda logprobs: own.categorical(logprobs, 1.0), own, keys=1)


def requests(seed: int | None = None, schemas: list[Any] = FEW, **more: Any) -> list[Request]:
    """A request for each schema, or a free one for None."""
    found = []
    for i, (prompt, schema) in enumerate(zip(PROMPTS, schemas, strict=False)):
        own = {
            "sampler": None if seed is None else sampler(seed + i),
            "form": schema and form_of(schema),
            "stop": STOP,
        }
        found.append(Request(prompt, MOST if schema else 12, **{**own, **more}))
    return found


def serve_all(
    name: str, given: list[Request], **config: Any
) -> tuple[BlockPoolBatchEngine, list[list[int]], Told]:
    engine, prefix = make_engine(name, **config)
    uids = engine.insert_all(given)
    told = drive(engine)
    assert told.failed == {}
    assert_nothing_held(prefix)
    return engine, [told.tokens[uid] for uid in uids], told


@functools.cache
def served(seed: int | None) -> list[list[int]]:
    """The replies to the few."""
    return serve_all("llama", requests(seed))[1]


def check_form(schema: Any, tokens: list[int]) -> None:
    """The reply has ended by itself, and validates."""
    assert tokens[-1] == EOS
    jsonschema.validate(json.loads(text_of(tokens)), schema)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_a_mask_closes_the_tokens_whose_bits_are_0(dtype: mx.Dtype) -> None:
    logits = mx.random.normal((3, VOCABULARY)).astype(dtype)
    is_open = np.random.default_rng(1).random((3, 160)) < 0.5
    is_open[1] = True
    found = masked(logits, np.packbits(is_open, axis=1, bitorder="little").view(np.int32))
    assert found.dtype == dtype
    assert mx.array_equal(found, mx.where(mx.array(is_open[:, :VOCABULARY]), logits, -mx.inf))


@pytest.mark.parametrize(("vocabulary", "num_words"), [(VOCABULARY, 5), (200, 7), (128, 4)])
def test_logits_beyond_the_vocabulary_of_a_form_are_closed_in_its_row(
    vocabulary: int, num_words: int
) -> None:
    """Models pad their logits."""
    free, formed = (
        Sequence(1, Request([1]), 0.0),
        Sequence(2, Request([1], form=form_of(SAYING)), 0.0),
    )
    words, forced = follow([free, formed], [1, 1], vocabulary, {})
    assert words is not None
    assert words.shape == (2, num_words)
    is_open = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
    assert is_open[0].all()
    assert np.flatnonzero(is_open[1]).tolist() == [forced[formed][0]]


def test_behind_the_last_token_nothing_is_closed_and_nothing_forced() -> None:
    sequence = Sequence(1, Request([1], 1, form=form_of(SAYING)), 0.0)
    sequence.computed = 1
    assert follow([sequence], list(b'"'), VOCABULARY, {}) == (None, {})


@pytest.mark.parametrize("seed", only([None, 5], 5))
def test_replies_keep_their_forms_and_the_others_of_the_batch_are_as_without(
    seed: int | None,
) -> None:
    _, free, _ = serve_all("llama", requests(seed, [None] * len(SCHEMAS)))
    engine, found, _ = serve_all("llama", requests(seed, SCHEMAS))
    for schema, reply, as_without in zip(SCHEMAS, found, free, strict=True):
        if schema is None:
            assert reply == as_without
        else:
            check_form(schema, reply)
    assert engine.counts["jumps"] > 0


@pytest.mark.parametrize("least", only([1, 10**9], 10**9))
@pytest.mark.parametrize("seed", only([None, 5], 5))
def test_jumps_over_forced_tokens_save_steps_and_change_no_token(
    least: int, seed: int | None
) -> None:
    engine, found, _ = serve_all("llama", requests(seed), forced_tokens=least)
    assert found == served(seed)
    assert engine.counts["tokens"] == sum(map(len, found))
    if least > MOST:
        assert engine.counts["jumps"] == engine.counts["forced_tokens"] == 0
        assert engine.counts["decode_steps"] >= len(found[0])
    else:
        assert engine.counts["decode_steps"] < 2 / 3 * len(found[0])


@pytest.mark.parametrize(
    "name",
    only(
        ["gemma3_text", "gpt_oss", "qwen2", "lfm2", "llama K8V8", "gemma3_text K8V4"], "gemma3_text"
    ),
)
def test_replies_of_every_model_are_those_of_mlx_lm_in_the_form(name: str) -> None:
    engine, found, _ = serve_all(name, requests())
    assert engine.counts["jumps"] > 0
    for schema, prompt, reply in zip(FEW, PROMPTS, found, strict=False):
        if schema is not None:
            check_form(schema, reply)
            assert_stock_form(name, prompt, schema, reply, MOST)


@pytest.mark.parametrize("caches", only(["unattached", "stock"], "unattached"))
def test_on_other_caches_replies_keep_their_forms_and_nothing_jumps(caches: str) -> None:
    engine, _ = unattached_engine("llama") if caches == "unattached" else stock_engine("llama")
    uids = engine.insert_all(requests())
    told = drive(engine)
    assert engine.counts["jumps"] == 0
    for uid, schema, prompt in zip(uids, FEW, PROMPTS, strict=False):
        if schema is not None:
            check_form(schema, told.tokens[uid])
            assert_stock_form("llama", prompt, schema, told.tokens[uid], MOST)


def test_replies_that_are_swapped_out_go_on_in_their_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request starts with room for one token, and runs out of it within its form."""
    monkeypatch.setattr(caches_module, "BLOCK_TOKENS", 1)
    prompts = [words(i, 250 - 7 * i) for i in range(3)]

    def serve(n_bytes: int) -> tuple[dict[str, int], list[list[int]]]:
        engine, prefix = make_engine("llama", n_bytes)
        given = [
            Request(p, MOST, sampler(i), form=form_of(PERSON), stop=STOP)
            for i, p in enumerate(prompts)
        ]
        uids = engine.insert_all(given)
        told = drive(engine)
        assert_nothing_held(prefix)
        return dict(engine.counts), [told.tokens[uid] for uid in uids]

    counts, found = serve(bytes_of("llama", 256, 2))
    assert counts["swapped_out"] > 0
    assert counts["jumps"] > 0
    assert found == serve(40_000_000)[1]


@pytest.mark.parametrize("steps", only(range(30), 14))
def test_requests_go_on_in_another_engine_in_their_forms(steps: int) -> None:
    engine, prefix = make_engine("llama")
    uids = engine.insert_all(requests(5))
    told = Told()
    for _ in range(steps):
        told.take(engine.next())
    suspended = engine.suspend()
    again = BlockPoolBatchEngine(
        attached("llama")[0], PooledCaches(prefix), EngineConfig(prefill_tokens=128)
    )
    before = {running: running.uid for running in suspended}
    renamed = {before[running]: again.resume(running) for running in suspended}
    later = drive(again)
    found = [
        [*told.tokens.get(uid, []), *later.tokens.get(renamed.get(uid, 0), [])] for uid in uids
    ]
    assert found == served(5)
    assert_nothing_held(prefix)


def test_a_request_that_is_cancelled_behind_a_jump_leaves_nothing() -> None:
    engine, prefix = make_engine("llama")
    uids = engine.insert_all(requests())
    told = drive(engine, after=lambda _: engine.counts["jumps"] > 0)
    (jumped,) = {event.uid for event in told.order if getattr(event, "logprobs", 0) is None}
    (caches, tokens), *_ = engine.extract_cache([jumped]).values()
    assert (
        len(tokens)
        == tokens_held(caches)
        == len(PROMPTS[uids.index(jumped)]) + len(told.tokens[jumped]) - 1
    )
    prefix.discard(caches)
    engine.cancel(jumped)
    drive(engine, told)
    for uid, reply in zip(uids, served(None), strict=True):
        assert uid == jumped or told.tokens[uid] == reply
    assert_nothing_held(prefix)


def test_one_pass_takes_a_bounded_number_of_forced_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[list[int]] = []
    run = decode_module.compute_chunk

    def note(model: Any, chunk: Any, ragged: bool) -> int:
        passes.append([end - row.computed for row, end in chunk if not row.is_new])
        return run(model, chunk, ragged)

    monkeypatch.setattr(decode_module, "compute_chunk", note)
    engine, found, _ = serve_all(
        "llama", [Request(PROMPTS[1], MOST, form=form_of(PERSON), stop=STOP) for _ in range(6)]
    )
    assert len(set(map(tuple, found))) == 1
    jumps = [rows for rows in passes if rows]
    assert sum(map(len, jumps)) == engine.counts["jumps"] > 6
    assert max(map(len, jumps)) > 1
    assert max(len(rows) * (max(rows) + 1) for rows in jumps) <= 64


@pytest.mark.parametrize(("others", "jumps"), [(3, 1), (12, 0)])
def test_a_run_that_is_shorter_than_the_batch_does_not_jump(others: int, jumps: int) -> None:
    """All others would wait for it."""
    free = [Request(words(i, 4), 30) for i in range(others)]
    formed = Request(PROMPTS[0], 14, form=form_of(PERSON), stop=STOP)
    no_cost = CostCurve.from_points({1: 1e-3, 64: 1e-3}, {1: 1.0, 16: 1.0})
    engine, (*_, found), _ = serve_all("llama", [*free, formed], curve=no_cost, **NO_DRAFTS)
    assert found == served(None)[0][:14]
    assert engine.counts["jumps"] == jumps


LONG: Any = {
    "const": "".join(
        map(chr, np.random.default_rng(3).integers(ord("a"), ord("z") + 1, 180).tolist())
    )
}
# Nothing is drafted.
NO_DRAFTS = {"most_drafted": 0}


@pytest.mark.parametrize(
    ("curve", "jumps"),
    [(FLAT, True), (LINEAR, False), pytest.param(None, False, marks=pytest.mark.thorough)],
)
def test_next_to_others_a_run_jumps_where_that_pays_by_the_measured_curve(
    curve: CostCurve | None, jumps: bool
) -> None:
    """Where the cost of a forward grows with its rows, as on a CPU, the others would lose more
    than the form gains.
    """
    given = [Request(PROMPTS[1], 200), Request(PROMPTS[0], 400, form=form_of(LONG), stop=STOP)]
    engine, (free, formed), _ = serve_all("llama", given, curve=curve, **NO_DRAFTS)
    assert (engine.counts["jumps"] > 0) == jumps
    assert text_of(formed[:-1]) == json.dumps(LONG["const"])
    assert free == serve_all("llama", given[:1])[1][0]


def test_alone_a_run_jumps_whatever_forwards_cost() -> None:
    for curve in (LINEAR, FLAT, None):
        given = [Request(PROMPTS[0], 400, form=form_of(LONG), stop=STOP)]
        engine, _, _ = serve_all("llama", given, curve=curve, **NO_DRAFTS)
        assert engine.counts["decode_steps"] <= 2 + -(-180 // FormConfig.most_forced)


def test_jumps_that_others_wait_for_get_no_more_than_their_share_of_the_time() -> None:
    """Each jump takes as long as nine steps, so that nine steps follow before the next one."""
    given = [Request(PROMPTS[1], 200), Request(PROMPTS[0], 400, form=form_of(LONG), stop=STOP)]
    engine, _ = make_engine("llama", curve=FLAT, **NO_DRAFTS)
    account, order = engine.steps.account, list[str]()

    def note(_: float, others_waited: bool = False) -> None:
        order.append("jump" if others_waited else "step")
        account(9.0 if others_waited else 1.0, others_waited)

    engine.steps.account = note  # type: ignore[method-assign]
    engine.insert_all(given)
    drive(engine)
    first, *later = (i for i, what in enumerate(order) if what == "jump")
    assert len(later) >= 2
    assert {after - before for before, after in zip([first, *later], later, strict=False)} == {10}


def test_while_prompts_wait_for_their_share_no_others_wait_for_a_jump() -> None:
    """Running replies are delayed by chunks of prompts or by jumps, and not by the sum of both."""
    engine, _ = make_engine("llama", curve=FLAT, prefill_tokens=32, **NO_DRAFTS)
    jumps, found = engine.steps.jumps, dict[bool, list[int]]({True: [], False: []})

    def note(batch: Any, forced: Any, prompts_wait: bool) -> Any:
        runs = jumps(batch, forced, prompts_wait)
        if 0 < len(forced) < len(batch):
            found[prompts_wait].append(len(runs))
        return runs

    engine.steps.jumps = note  # type: ignore[method-assign]
    engine.steps.account = lambda *_: None  # type: ignore[method-assign]
    schedule = engine.scheduler.schedule
    # All steps count as equally long, so that shares of time do not depend on the machine.
    engine.scheduler.schedule = lambda seconds: schedule(0.01)  # type: ignore[method-assign]
    engine.insert_all(
        [Request(PROMPTS[1], 200), Request(PROMPTS[0], 400, form=form_of(LONG), stop=STOP)]
    )
    told = drive(engine, after=lambda _: engine.counts["jumps"] == 2)
    engine.insert(Request(words(3, 300), 1))
    drive(engine, told)
    assert any(found[False])
    assert found[True]
    assert not any(found[True])


def test_where_every_member_is_in_a_form_none_waits_for_the_runs_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three runs of 32 tokens do not fit into one pass. Each gets a third of it."""
    append, passes = decode_module.DecodeBatch.append, list[list[int]]()

    def note(batch: Any, runs: Any, together: bool) -> None:
        passes.append([len(run) for run in runs.values()])
        append(batch, runs, together)

    monkeypatch.setattr(decode_module.DecodeBatch, "append", note)
    given = [Request(words(i, 9), 400, form=form_of(LONG), stop=STOP) for i in range(3)]
    _, found, _ = serve_all("llama", given)
    assert len(set(map(tuple, found))) == 1
    assert text_of(found[0][:-1]) == json.dumps(LONG["const"])
    assert passes[0] == [64 // 3] * 3
    assert {len(runs) for runs in passes if len(runs) > 1} == {3}


def test_jumps_leave_the_buffers_of_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only chunks of prompts are of sizes that do not come again."""
    cleared: list[None] = []
    monkeypatch.setattr(mx, "clear_cache", lambda: cleared.append(None))
    append, counts = decode_module.DecodeBatch.append, list[int]()

    def note(*args: Any) -> None:
        before = len(cleared)
        append(*args)
        counts.append(len(cleared) - before)

    monkeypatch.setattr(decode_module.DecodeBatch, "append", note)
    engine, _, _ = serve_all("llama", requests())
    assert set(counts) == {0}
    assert len(cleared) >= engine.counts["chunks"]


def test_each_choice_has_a_form_of_its_own() -> None:
    form = form_of(PERSON)
    same = {"stop": STOP, "group": "one"}
    given = [Request(PROMPTS[2], MOST, sampler(20 + i), form=form.copy(), **same) for i in range(3)]
    alone = [
        serve_all("llama", [each])[1][0]
        for each in [
            Request(PROMPTS[2], MOST, sampler(20 + i), form=form.copy(), stop=STOP)
            for i in range(3)
        ]
    ]
    _, found, _ = serve_all("llama", given)
    assert found == alone
    assert len(set(map(tuple, found))) > 1


@pytest.mark.parametrize("least", [4, 10**9])
def test_a_form_follows_new_tokens_alone(least: int) -> None:
    """A step of a long reply costs no more than one of a short reply."""
    given = requests()
    counts: list[int] = []
    form: Any = given[0].form
    follow = form.follow
    form.follow = lambda generated, start: counts.append(len(generated)) or follow(generated, start)
    _, found, _ = serve_all("llama", given, forced_tokens=least)
    assert found == served(None)
    assert max(counts) <= (1 if least > MOST else FormConfig.most_forced + 1)


def test_max_tokens_cuts_a_jump() -> None:
    whole = served(None)[0]
    given = [Request(PROMPTS[0], most, form=form_of(PERSON), stop=STOP) for most in range(1, 16)]
    engine, found, told = serve_all("llama", given, max_members=2)
    assert found == [whole[:most] for most in range(1, 16)]
    assert set(told.reasons.values()) == {"length"}
    assert engine.counts["jumps"] > 10


@pytest.mark.parametrize(
    ("stops", "jumps"), [([b"_name"], 1), ([b'"y', b'"n'], 1), ([b"it is"], 2)]
)
def test_a_stop_sequence_ends_the_reply_in_a_jump_and_before_one(
    stops: list[bytes], jumps: int
) -> None:
    whole = served(None)[0]
    stop = StopSequences([(EOS,), *map(tuple, stops)])
    engine, (found,), told = serve_all(
        "llama", [Request(PROMPTS[0], MOST, form=form_of(PERSON), stop=stop)]
    )
    assert text_of(found).encode().endswith(tuple(stops))
    assert found == whole[: len(found)]
    assert list(told.reasons.values()) == ["stop"]
    assert engine.counts["jumps"] == jumps


@pytest.mark.parametrize("name", only(["llama", "lfm2"], "lfm2"))
def test_runs_of_several_lengths_jump_together(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding must not reach a state."""
    append, lengths = decode_module.DecodeBatch.append, list[set[int]]()

    def note(batch: Any, runs: Any, together: bool) -> None:
        lengths.append({len(run) for run in runs.values()})
        append(batch, runs, together)

    monkeypatch.setattr(decode_module.DecodeBatch, "append", note)
    longer = {
        "type": "object",
        "properties": {"a_long_name_of_another": FLAGS},
        "required": ["a_long_name_of_another"],
    }
    schemas = [PERSON, longer, PERSON]
    given = [
        Request(PROMPTS[1], MOST, form=form_of(schema), stop=STOP, group="one")
        for schema in schemas
    ]
    _, found, _ = serve_all(name, given)
    assert max(map(len, lengths)) > 1
    for schema, reply in zip(schemas, found, strict=True):
        check_form(schema, reply)
        assert_stock_form(name, PROMPTS[1], schema, reply, MOST)


@pytest.mark.thorough
def test_without_room_nothing_jumps_and_nothing_is_swapped_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, prefix = make_engine("llama")
    reserve = prefix.admission.ensure_next_blocks

    def only_one(batch: Any) -> None:
        wanted = list(batch)
        if any(tokens > 1 for _, tokens in wanted):
            raise PoolExhaustedError(1, 0, 0, "full", "")
        reserve(wanted)

    monkeypatch.setattr(prefix.admission, "ensure_next_blocks", only_one)
    uids = engine.insert_all(requests())
    told = drive(engine)
    assert [told.tokens[uid] for uid in uids] == served(None)
    assert engine.counts["jumps"] == engine.counts["swapped_out"] == 0


def test_processors_open_nothing_that_a_form_closes_and_see_every_token() -> None:
    seen: list[list[int]] = []

    def bias(tokens: mx.array, logits: mx.array) -> mx.array:
        seen.append(tokens.tolist())
        return logits + 1000 * (mx.arange(VOCABULARY) == EOS)

    given = [
        Request(PROMPTS[0], MOST, processors=[bias], form=form_of(SAYING), stop=STOP),
        *requests()[1:],
    ]
    _, found, told = serve_all("llama", given)
    check_form(SAYING, found[0])
    assert seen == [[*PROMPTS[0], *found[0][:i]] for i in range(len(found[0]) + 1)]
    assert all(logprobs is not None for logprobs in told.logprobs[1])


def test_processors_that_leave_nothing_of_the_form_fail_the_request_alone() -> None:
    closed = Request(
        PROMPTS[0],
        MOST,
        processors=[lambda _, logits: logits - mx.inf],
        form=form_of(PERSON),
        stop=STOP,
    )
    engine, prefix = make_engine("llama")
    uids = engine.insert_all([closed, *requests()[1:]])
    told = drive(engine)
    assert list(told.failed) == uids[:1]
    assert [told.tokens[uid] for uid in uids[1:]] == served(None)[1:]
    assert_nothing_held(prefix)


@pytest.mark.parametrize("method", only(["follow", "fill", "forced"], "fill"))
def test_a_form_that_raises_fails_its_request_alone(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, prefix = make_engine("llama")
    given = requests()
    calls: list[Any] = []

    def fail(*args: Any) -> Any:
        calls.append(args)
        if len(calls) > 5:
            raise FormError("the form's limits are met")
        return of_the_form(*args)

    of_the_form = getattr(given[0].form, method)
    monkeypatch.setattr(given[0].form, method, fail)
    uids = engine.insert_all(given)
    told = drive(engine)
    assert [str(error) for error in told.failed.values()] == ["the form's limits are met"]
    expected = served(None)
    assert told.tokens[uids[0]] == expected[0][: len(told.tokens[uids[0]])]
    assert [told.tokens[uid] for uid in uids[1:]] == expected[1:]
    assert_nothing_held(prefix)


def test_a_request_that_needs_logprobs_has_them_for_every_token() -> None:
    given = requests()
    assert given[0].form is not None
    given[0].form.jumps = False
    _, found, told = serve_all("llama", given)
    assert found == served(None)
    for token, logprobs in zip(found[0], told.logprobs[1], strict=True):
        assert logprobs is not None
        assert mx.isfinite(logprobs[token])
        assert abs(mx.logsumexp(logprobs).item()) < 1e-4
        assert mx.isinf(logprobs).any()
    # A forced token had no other beside it.
    assert told.logprobs[1][2].max().item() == 0  # type: ignore[union-attr]


def test_after_a_model_has_failed_in_a_jump_all_that_were_live_are_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("the model has failed")

    engine, prefix = make_engine("llama")
    uids = engine.insert_all(requests())
    told = Told()
    drive(engine, told, after=lambda told: len(told.tokens) == len(FEW))
    monkeypatch.setattr(decode_module, "compute_chunk", fail)
    with pytest.raises(RuntimeError, match="the model has failed"):
        drive(engine, told)
    assert engine.reset() == [uid for uid in uids if uid not in told.reasons]
    assert_nothing_held(prefix)
