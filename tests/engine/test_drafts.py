"""Drafts change no reply: tokens, logprobs and what is cached are as without them, whatever the
drafters guess.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from engine.drafts import assert_alike, make_drafting, plain, script
from engine.engines import Told, assert_nothing_held, attached, bytes_of, drive, make_engine, words
from engine.forms import FLAGS, PERSON, STOP, form_of
from engine.schedules import breaking
from engine.test_seeds import sampler
from mlx_lm.generate import StopSequences
from mlx_lm.sample_utils import make_logits_processors
from thorough import only

from mlx_blockpool.config import EngineConfig
from mlx_blockpool.engine import caches as caches_module
from mlx_blockpool.engine.caches import PooledCaches
from mlx_blockpool.engine.engine import BlockPoolBatchEngine
from mlx_blockpool.engine.request import Request

NAMES = ["llama", "gemma3_text", "lfm2"]
PROMPTS = [words(1, 300), words(2, 40), words(3, 7), (*words(1, 300), *words(4, 20))]


@pytest.fixture
def little_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request starts with room for one token, so that short replies run out of it."""
    monkeypatch.setattr(caches_module, "BLOCK_TOKENS", 1)


def drafted(
    name: str, requests: Sequence[Request], expected: Told, length: int = 4, mistakes: str = "never"
) -> Told:
    """The requests with scripted drafts of the replies that are `expected`, checked against
    these.
    """
    engine, prefix = make_drafting(name)
    for request in requests:
        uid = engine.insert(request)
        if uid in expected.tokens:
            script(engine, uid, expected.tokens[uid], length, mistakes)
    told = drive(engine)
    assert_alike(expected, told)
    assert_nothing_held(prefix)
    assert engine.counts["verifications"] > 0
    return told


@pytest.mark.sampled
@pytest.mark.parametrize(
    "name", only([*NAMES, "gpt_oss", "qwen3_5", "gemma3_text K8V8", "lfm2 K8V4"], *NAMES)
)
@pytest.mark.parametrize(
    ("mistakes", "length"),
    [("never", 16), ("always", 4), ("behind 2", 5), ("every 5th", 1), ("every 5th", 16)],
)
def test_replies_are_those_without_drafts(name: str, mistakes: str, length: int) -> None:
    requests = [Request(prompt, 20) for prompt in PROMPTS]
    expected = plain(name, requests)
    engine, prefix = make_drafting(name)
    uids = [engine.insert(request) for request in requests]
    # The last one is decoded beside the others without a draft.
    scripts = [script(engine, uid, expected.tokens[uid], length, mistakes) for uid in uids[:-1]]
    told = drive(engine)
    assert_alike(expected, told)
    assert_nothing_held(prefix)
    for uid, each in zip(uids, scripts, strict=False):
        assert each.observed == expected.tokens[uid]
        if mistakes == "never":
            assert each.accepted == each.proposed
        if mistakes == "always":
            assert not any(each.accepted)
    for prompt, uid in zip(PROMPTS, uids, strict=True):
        computed = [*prompt, *told.tokens[uid]]
        assert prefix.match(computed).tokens == len(computed)


def test_drafts_that_are_right_take_one_forward_for_all_their_tokens() -> None:
    request = Request(words(1, 40), 41)
    expected = plain("llama", [request])
    engine, _ = make_drafting("llama")
    made = script(engine, engine.insert(request), expected.tokens[1], length=7)
    drive(engine)
    # The last prompt token is computed alone, and then a token and 7 drafted ones in each of 5
    # forwards; one is left.
    assert made.proposed == [7] * 5
    assert (
        engine.counts["verifications"],
        engine.counts["decode_steps"],
        engine.counts["tokens"],
    ) == (5, 7, 41)


@pytest.mark.parametrize("name", only(["lfm2", "qwen3_5"], "lfm2"))
@pytest.mark.parametrize(("mistakes", "length"), [("never", 7), ("behind 2", 5), ("every 5th", 16)])
def test_sequences_with_states_accept_as_much_a_forward_together_as_alone(
    name: str, mistakes: str, length: int
) -> None:
    """Also where drafts are partly rejected: what was accepted comes again in the next forward."""
    prompts = [words(i, 40 + i) for i in range(4)]
    expected = plain(name, [Request(prompt, 41) for prompt in prompts])

    def steps(uids: Sequence[int]) -> int:
        engine, prefix = make_drafting(name, prefill_tokens=512)
        told = Told()
        for uid in uids:
            own = engine.insert(Request(prompts[uid - 1], 41))
            script(engine, own, expected.tokens[uid], length, mistakes)
        drive(engine, told)
        assert [told.tokens[i] for i, _ in enumerate(uids, 1)] == [
            expected.tokens[uid] for uid in uids
        ]
        assert_nothing_held(prefix)
        return engine.counts["decode_steps"]

    together, alone = steps([1, 2, 3, 4]), [steps([uid]) for uid in (1, 2, 3, 4)]
    assert together == max(alone)
    assert max(alone) < {"never": 8, "behind 2": 24, "every 5th": 20}[mistakes]


def test_states_that_take_padding_in_are_drafted_for_alone_and_computed_before_others_join() -> (
    None
):
    requests = [Request(words(1, 40), 41), Request(words(2, 9), 20)]
    expected = plain("lfm2", requests)
    engine, prefix = make_drafting("lfm2")
    engine.caches.capabilities = replace(
        engine.caches.capabilities, verifies="alone", pads_states=False
    )
    prefix.arena.capabilities = engine.caches.capabilities
    script(engine, engine.insert(requests[0]), expected.tokens[1], 5, "behind 2")
    told = Told()
    while not (members := engine.scheduler.batch.members) or not members[0].rolled_back:
        told.take(engine.next())
    before = engine.counts["verifications"]
    script(engine, engine.insert(requests[1]), expected.tokens[2], 5, "behind 2")
    while 2 not in told.reasons:
        told.take(engine.next())
    assert engine.counts["verifications"] <= before + 1
    drive(engine, told)
    assert engine.counts["verifications"] > before + 1
    assert_alike(expected, told)
    assert_nothing_held(prefix)


def test_nothing_is_drafted_where_nobody_guesses_or_drafts_are_off() -> None:
    for config, off in (({"drafts": 4}, None), ({"drafts": "off"}, "drafts are off")):
        engine, _ = make_engine("llama", **config)
        engine.insert(Request(tuple(range(100)), 5))
        drive(engine)
        assert (
            engine.steps.off,
            engine.counts["verifications"],
            engine.counts["decode_steps"],
        ) == (off, 0, 6)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("end", only([1, 2, 5, 6], 5))
def test_nothing_behind_the_end_of_a_reply_is_emitted_or_cached(name: str, end: int) -> None:
    prompt = words(1, 300)
    reply = plain(name, [Request(prompt, 12)]).tokens[1]
    stop = next(
        i for i in range(1, 9) if reply[i : i + 2] not in [reply[j : j + 2] for j in range(i)]
    )
    ends = StopSequences([reply[stop : stop + 2]])
    for request in (Request(prompt, end), Request(prompt, 12, stop=ends)):
        expected = plain(name, [request])
        engine, prefix = make_drafting(name)
        script(engine, engine.insert(request), reply, length=16)
        told = drive(engine)
        assert_alike(expected, told)
        known = [*prompt, *told.tokens[1]]
        assert len(known) < len(prompt) + 12
        assert prefix.match([*prompt, *reply]).tokens == len(known)
        assert sum(node.end - node.start for node in prefix.index.trie) == len(known)
        assert_nothing_held(prefix)


@pytest.mark.parametrize("length", only([3, 16], 16))
def test_blocks_are_cached_when_a_draft_crosses_their_border(length: int) -> None:
    prompt = words(1, 250)
    reply = plain("llama", [Request(prompt, 30)]).tokens[1]

    def cached(drafts: int | str) -> dict[int, int]:
        """By the number of emitted tokens."""
        found: dict[int, int] = {}
        engine, prefix = make_engine("llama", drafts=drafts)
        uid = engine.insert(Request(prompt, 30))
        if drafts != "off":
            script(engine, uid, reply, length)
        drive(
            engine,
            after=lambda told: found.update(
                {len(told.tokens.get(1, [])): prefix.match([*prompt, *reply]).tokens}
            ),
        )
        return found

    without, found = cached("off"), cached(16)
    assert len(found) < len(without)
    assert {without[count] for count in range(6, 30)} == {256}
    assert found == {count: without[count] for count in found}


@pytest.mark.parametrize("name", only(NAMES, "llama"))
def test_replies_in_forms_are_those_without_drafts(name: str) -> None:
    def requests() -> list[Request]:
        forms = [form_of(PERSON), form_of(FLAGS), form_of(PERSON)]
        forms[2].jumps = False
        return [
            Request(words(i, 30 + i), 100, form=form, stop=STOP) for i, form in enumerate(forms)
        ]

    # Forced tokens are appended at once where the request is alone, as nothing is known of what
    # forwards cost.
    for count in (1, 3):
        expected = plain(name, requests()[:count])
        assert any(row is None for row in expected.logprobs[1]) == (count == 1)
        for mistakes in ("never", "every 5th"):
            drafted(name, requests()[:count], expected, 6, mistakes)


@pytest.mark.parametrize("name", only(NAMES, "llama"))
def test_processors_and_samplers_are_called_as_without_drafts(name: str) -> None:
    def requests(seen: list[list[int]]) -> list[Request]:
        def look(tokens: mx.array, logits: mx.array) -> mx.array:
            seen.append(tokens.tolist())
            return logits

        penalties = make_logits_processors(repetition_penalty=1.5, logit_bias={3: 1.0})
        return [
            Request(words(1, 60), 14, sampler(7, top_p=0.9), processors=[*penalties, look]),
            Request(words(2, 30), 14, sampler(8, xtc_probability=0.5, xtc_threshold=0.02)),
            Request(words(3, 30), 14, processors=penalties),
            Request(words(4, 30), 14),
        ]

    seen: list[list[int]] = []
    expected = plain(name, requests(seen))
    for mistakes in ("never", "every 5th"):
        found: list[list[int]] = []
        drafted(name, requests(found), expected, 5, mistakes)
        assert found == seen


def test_choices_of_one_prompt_draft_each_for_itself() -> None:
    requests = [Request(words(1, 300), 12, sampler(seed), group="a") for seed in range(4)]

    def again() -> list[Request]:
        return [replace(request, sampler=sampler(seed)) for seed, request in enumerate(requests)]

    expected = plain("llama", again())
    assert len({tuple(tokens) for tokens in expected.tokens.values()}) > 1
    drafted("llama", again(), expected, 4, "every 5th")


def failing(calls: int) -> Any:
    """A processor that raises behind so many calls."""
    draw = breaking(calls)

    def process(tokens: mx.array, logits: mx.array) -> mx.array:
        draw(logits)
        return logits

    return process


class Broken:
    """A form that allows all tokens, and raises behind so many of them."""

    jumps, num_words, seen = False, 5, 0

    def __init__(self, count: int) -> None:
        self.count = count

    def follow(self, generated: list[int], start: int) -> None:
        self.seen = start + len(generated)
        if self.seen > self.count:
            raise KeyError("somebody else's grammar")

    def fill(self, words: Any) -> bool:
        return False


@pytest.mark.sampled
@pytest.mark.parametrize("part", ["sampler", "processor", "form"])
@pytest.mark.parametrize("calls", range(6))
def test_what_raises_behind_some_tokens_fails_its_request_as_without_drafts(
    part: str, calls: int
) -> None:
    prompt, other = words(1, 40), words(2, 30)
    reply = plain("llama", [Request(prompt, 12)]).tokens[1]

    def requests() -> list[Request]:
        more: dict[str, Any] = {
            "sampler": {"sampler": breaking(calls)},
            "processor": {"processors": [failing(calls)]},
            "form": {"form": Broken(calls)},
        }[part]
        return [Request(prompt, 12, **more), Request(other, 12)]

    expected = plain("llama", requests())
    engine, prefix = make_drafting("llama")
    uids = [engine.insert(request) for request in requests()]
    script(engine, uids[0], reply, 4)
    script(engine, uids[1], expected.tokens[2], 4)
    told = drive(engine)
    assert_alike(expected, told)
    assert told.failed.keys() == {1}
    assert_nothing_held(prefix)


@pytest.mark.sampled
@pytest.mark.parametrize("name", only(NAMES, "llama", "lfm2"))
@pytest.mark.parametrize("steps", [1, 2])
def test_a_request_that_is_cancelled_or_suspended_between_two_steps_leaves_what_it_has_emitted(
    name: str, steps: int
) -> None:
    requests = [Request(prompt, 24) for prompt in PROMPTS[:3]]
    expected = plain(name, requests)
    engine, prefix = make_drafting(name, decode_share=0.0)
    for request in requests:
        uid = engine.insert(request)
        script(engine, uid, expected.tokens[uid], 3, "every 5th")
    told = drive(engine, after=lambda told: len(told.tokens) == 3)
    for _ in range(steps):
        told.take(engine.next())
    assert told.reasons == {}
    (rolled_back,) = (sequence.rolled_back for sequence in engine.live if sequence.uid == 2)
    assert rolled_back == 0 or name == "lfm2"
    emitted = [*PROMPTS[1], *told.tokens[2]]
    known = emitted[: len(emitted) - rolled_back]
    assert engine.extract_cache([2])[2][1] == known
    engine.cancel(2)
    assert prefix.match([*PROMPTS[1], *expected.tokens[2]]).tokens == len(known)
    suspended = engine.suspend()
    assert_nothing_held(prefix)
    prefix.clear()
    again = BlockPoolBatchEngine(
        attached(name)[0], PooledCaches(prefix), EngineConfig(prefill_tokens=128, drafts=16)
    )
    before = [sequence.uid for sequence in suspended]
    renamed = {again.resume(sequence): uid for sequence, uid in zip(suspended, before, strict=True)}
    for uid, old in renamed.items():
        script(again, uid, expected.tokens[old], 3).observe(told.tokens[old])
    later = drive(again)
    assert again.counts["verifications"] > 0
    for uid, old in renamed.items():
        assert told.tokens[old] + later.tokens[uid] == expected.tokens[old]
    assert_nothing_held(prefix)


@pytest.mark.usefixtures("little_promised")
def test_drafts_wait_for_room_and_preempt_nobody() -> None:
    requests = [Request(words(1, 250), 30), Request(words(2, 40), 5)]
    expected = plain("llama", requests)
    # Two blocks: the second one of the first request is free once the other has ended.
    engine, prefix = make_drafting("llama", bytes_of("llama", 256, more_blocks=1), decode_share=0.0)
    uids = [engine.insert(request) for request in requests]
    made = script(engine, uids[0], expected.tokens[1], 16)
    told = drive(engine, after=lambda told: 2 in told.reasons)
    assert made.proposed == []
    drive(engine, told)
    assert_alike(expected, told)
    assert made.proposed
    assert engine.counts["swapped_out"] == 0
    assert_nothing_held(prefix)


@pytest.mark.usefixtures("little_promised")
def test_rejected_drafts_keep_no_room_from_others() -> None:
    prompt = words(1, 243)
    reply = plain("llama", [Request(prompt, 10)]).tokens[1]
    requests = [Request(prompt, 40, stop=StopSequences([reply[7:10]])), Request(words(2, 252), 10)]
    expected = plain("llama", requests)
    assert len(expected.tokens[1]) <= 10
    # A block for each, and one for the second request, which the drafts of the first one take
    # before.
    engine, _ = make_drafting("llama", bytes_of("llama", 256, more_blocks=2), decode_share=0.0)
    uids = [engine.insert(request) for request in requests]
    made = script(engine, uids[0], [*expected.tokens[1], *words(3, 20)], 16, "always")
    told = drive(engine)
    assert_alike(expected, told)
    assert made.proposed
    assert engine.counts["swapped_out"] == 0


@pytest.mark.sampled
@pytest.mark.parametrize("name", only(NAMES, "llama"))
@pytest.mark.parametrize("mistakes", ["always", "every 5th"])
@pytest.mark.usefixtures("little_promised")
def test_drafts_go_on_behind_a_preemption(name: str, mistakes: str) -> None:
    requests = [Request(words(i, 250 - i), 20) for i in range(6)]
    expected = plain(name, requests)
    engine, prefix = make_drafting(name, 2 * bytes_of(name, 300))
    scripts = [
        script(engine, engine.insert(request), expected.tokens[uid], 3, mistakes)
        for uid, request in enumerate(requests, 1)
    ]
    told = drive(engine)
    assert told.tokens == expected.tokens
    assert engine.counts["swapped_out"] > 0
    assert all(each.observed == expected.tokens[uid] for uid, each in enumerate(scripts, 1))
    assert engine.counts["verifications"] > 0
    assert_nothing_held(prefix)


@pytest.mark.parametrize("name", only(NAMES, "gemma3_text"))
def test_slabs_are_written_in_place(name: str) -> None:
    requests = [Request(prompt, 24) for prompt in PROMPTS]
    expected = plain(name, requests)
    engine, prefix = make_drafting(name, preallocate=True)
    for request in requests:
        uid = engine.insert(request)
        script(engine, uid, expected.tokens[uid], 6, "every 5th")
    drive(engine, after=lambda told: engine.counts["verifications"] == 1)
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    drive(engine)
    # A copied slab would count twice.
    slab = max(array.nbytes for array in prefix.arena.arrays())
    assert mx.get_peak_memory() < before + slab
