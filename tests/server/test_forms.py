"""Replies that keep their form, over HTTP: choices, seeds, swaps, restarts, hang-ups, models
that are not loaded, drafts.
"""

from __future__ import annotations

import itertools
import json
import re
import socket
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jsonschema
import pytest
from forms.vocabularies import tokenizer_of, vocabulary_of
from models import save_ending
from thorough import only, seeds

from mlx_blockpool.config import FormConfig
from mlx_blockpool.errors import FormError
from mlx_blockpool.forms.compiler import Compiler
from mlx_blockpool.forms.form import Marks
from mlx_blockpool.forms.output_format import OutputFormat, ToolFormat
from mlx_blockpool.server.forms import Forms, FormTokens, consume
from mlx_blockpool.server.prompts.job import PreparedPrompt, TokenizerSource
from mlx_blockpool.server.provider import ModelKey
from mlx_blockpool.server.request import ChatRequest
from server.scripted import TEMPLATE, raw_events
from server.serving import Client, at_once, blockpool_server, cached_tokens, until
from server.test_hang_ups import ask

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["a rather long name of a kind", "a rather long name of another kind"]},
        "number": {"type": "integer", "minimum": 1, "maximum": 99},
        "words": {"type": "array", "items": {"type": "string", "maxLength": 6}, "maxItems": 3},
    },
    "required": ["kind", "number", "words"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
HELLO = [{"role": "user", "content": "Describe a thing."}]
DRAWN = {"temperature": 1.0, "seed": 5, "max_tokens": 200}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    return [save_ending(folder / "A", TEMPLATE), save_ending(folder / "B", TEMPLATE, seed=2)]


def serve(models: list[Path], *options: str) -> Any:
    return blockpool_server(
        models[0], "--pool-bytes", "60MB", "--allow-models", str(models[1]), *options
    )


@pytest.fixture(scope="module")
def swapping(models: list[Path]) -> Iterator[Client]:
    with serve(models, "--swap-patience", "0s") as running:
        running.chat(HELLO, max_tokens=1)
        yield running


def chat(client: Client, **body: Any) -> dict[str, Any]:
    return client.chat(HELLO, **{"response_format": FORMAT, **DRAWN, **body})


@pytest.mark.parametrize("seed", seeds(2, 4))
def test_a_reply_closes_its_form_before_max_tokens_cuts_it(swapping: Client, seed: int) -> None:
    texts = {"title": {"type": "string", "minLength": 25}, "text": {"type": "string"}}
    schema = {"type": "object", "properties": texts, "required": ["title", "text"]}
    format = {"type": "json_schema", "json_schema": {"name": "texts", "schema": schema}}
    answer = chat(swapping, response_format=format, seed=seed, max_tokens=60)
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop"
    jsonschema.validate(json.loads(choice["message"]["content"]), schema)


def counts(client: Client) -> Any:
    """What the engine of the first model has counted."""
    client.settle()
    return next(iter(client.generator.registry.loaded.values())).engine.counts


def contents(answer: dict[str, Any]) -> list[str]:
    """The choices that ended by themselves, each of them a right one."""
    ended = [choice for choice in answer["choices"] if choice["finish_reason"] == "stop"]
    texts = [choice["message"]["content"] for choice in ended]
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)
    return texts


def test_every_choice_keeps_the_form_and_follows_its_own_seed(swapping: Client) -> None:
    before = swapping.send("/v1/cache")[1]["forms"]
    texts = contents(chat(swapping, n=4))
    assert len(texts) == len(set(texts)) == 4
    assert contents(chat(swapping, seed=7)) == [texts[2]]
    after = swapping.send("/v1/cache")[1]
    assert (
        after["forms"]["compiled"] - before["compiled"],
        after["forms"]["cached"] - before["cached"],
    ) == (1, 1)
    assert 0 < after["forms"]["bytes"] <= after["forms"]["max_bytes"] == 128 << 20
    assert counts(swapping)["jumps"] > 0
    assert counts(swapping)["forced_tokens"] > 100


def test_compiled_forms_are_dropped_after_minutes_without_a_request_for_one(
    swapping: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = swapping.generator.registry.queue
    assert len(contents(chat(swapping))) == 1
    swapping.settle()
    assert swapping.send("/v1/cache")[1]["forms"]["kept"] > 0
    ticks = itertools.count(queue.clock(), FormConfig.idle_seconds)
    with monkeypatch.context() as patched:
        patched.setattr(queue, "clock", lambda: next(ticks))
        until(lambda: swapping.send("/v1/cache")[1]["forms"]["bytes"] == 0)
    assert swapping.send("/v1/cache")[1]["forms"]["kept"] == 0
    compiled = swapping.send("/v1/cache")[1]["forms"]["compiled"]
    assert len(contents(chat(swapping))) == 1
    assert swapping.send("/v1/cache")[1]["forms"]["compiled"] == compiled + 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_header_names_what_the_reply_does_not_keep(swapping: Client, stream: bool) -> None:
    schema = {
        "type": "object",
        "properties": {
            "a\r\né": {"type": "array", "uniqueItems": True, "items": {}, "maxItems": 2}
        },
    }
    body = {"messages": HELLO, "max_tokens": 5, "stream": stream}
    formed = {
        **body,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "thing", "schema": schema},
        },
    }
    place = 'response_format.json_schema.schema.properties["a\\r\\n\\u00e9"].uniqueItems'
    found = []
    for each in (formed, body):
        data = json.dumps(each).encode()
        with urllib.request.urlopen(
            f"http://127.0.0.1:{swapping.port}/v1/chat/completions", data, timeout=120
        ) as response:
            found.append(response.headers["X-Form-Not-Kept"])
    assert found == [place, None]


@pytest.mark.thorough
def test_a_stream_has_the_text_of_the_whole_reply(swapping: Client) -> None:
    body = {
        "model": "default_model",
        "input": "Describe a thing.",
        "temperature": 0,
        "max_output_tokens": 200,
    }
    body["text"] = {"format": {"type": "json_schema", "name": "thing", "schema": SCHEMA}}
    events = raw_events(swapping, "/v1/responses", **body)
    text = "".join(
        event["delta"] for event in events if event["type"] == "response.output_text.delta"
    )
    jsonschema.validate(json.loads(text), SCHEMA)
    answer = swapping.send("/v1/responses", body)[1]
    assert answer["output"][-1]["content"][0]["text"] == text


def test_the_best_of_several_keep_the_form(swapping: Client) -> None:
    body = {
        "prompt": "Name: ",
        "n": 2,
        "best_of": 4,
        "structured_outputs": {"regex": "[a-z]{2,9}( [a-z]{2,9})?"},
        **DRAWN,
    }
    status, answer = swapping.send("/v1/completions", body)
    assert status == 200, answer
    found = [choice["text"] for choice in answer["choices"]]
    assert len(found) == 2
    assert all(re.fullmatch("[a-z]{2,9}( [a-z]{2,9})?", text) for text in found), found


def test_tokens_with_logprobs_are_all_drawn_and_the_same(swapping: Client) -> None:
    before = counts(swapping)["forced_tokens"]
    answer = chat(swapping, logprobs=True, top_logprobs=2)
    assert counts(swapping)["forced_tokens"] == before
    entries = answer["choices"][0]["logprobs"]["content"]
    assert len(entries) == answer["usage"]["completion_tokens"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
    # One of one: what a form forces has all of the probability.
    assert sum(entry["logprob"] == 0.0 for entry in entries) > 20
    assert contents(answer) == contents(chat(swapping))


def test_events_and_metrics_count_forced_tokens(swapping: Client) -> None:
    answer = chat(swapping, seed=11)
    swapping.settle()
    (served,) = swapping.generator.registry.loaded.values()
    log = swapping.generator.registry.log
    _, events = log.read(max(log.oldest, log.end - 100))
    ended: Any = next(
        event.what
        for event in reversed(events)
        if isinstance(event.what, dict) and "reason" in event.what
    )
    assert (
        20
        < ended["forced_tokens"]
        < ended["completion_tokens"]
        == answer["usage"]["completion_tokens"]
    )
    assert served.events.counts.forced_tokens == served.engine.counts["forced_tokens"]
    assert served.events.counts.jumps == served.engine.counts["jumps"]


def test_a_reply_that_meets_the_limits_of_its_form_fails_and_the_others_do_not_share_them(
    swapping: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swapping.generator.forms, "_compiler", Compiler(FormConfig(row_items=200)))
    (served,) = swapping.generator.registry.loaded.values()
    endless = {str(token): -100 for token in served.provider.tokenizer.eos_token_ids}
    grammar = "start: a\na: a a | /[a-z]/ | b\nb: b a | a b | /[a-y]/\n"
    body = {
        "messages": HELLO,
        **DRAWN,
        "structured_outputs": {"grammar": grammar},
        "logit_bias": endless,
    }
    assert len(contents(chat(swapping))) == 1
    status, answer = swapping.send("/v1/chat/completions", body)
    assert (status, "items; max is 200" in str(answer)) == (400, True), answer
    swapping.settle()
    assert swapping.send("/v1/cache")[1]["forms"]["kept"] == 0
    assert len(contents(chat(swapping))) == 1


@pytest.mark.parametrize("strict", only([True, False], True))
def test_a_call_that_must_be_made_has_the_parameters_of_its_tool(
    swapping: Client, strict: bool
) -> None:
    tool = {
        "type": "function",
        "function": {"name": "describe", "strict": strict, "parameters": SCHEMA},
    }
    answer = chat(
        swapping,
        response_format=None,
        tools=[tool],
        tool_choice="required",
        n=3,
        parallel_tool_calls=False,
    )
    ended = [choice for choice in answer["choices"] if choice["finish_reason"] != "length"]
    assert len(ended) > 1
    for choice in ended:
        calls = choice["message"]["tool_calls"]
        assert choice["finish_reason"] == "tool_calls"
        assert not choice["message"].get("content")
        for call in calls:
            assert call["function"]["name"] == "describe"
            jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)


@pytest.mark.parametrize("strict", [True, False])
def test_a_reply_is_its_content_or_a_call(swapping: Client, strict: bool) -> None:
    tool = {
        "type": "function",
        "function": {"name": "describe", "strict": strict, "parameters": SCHEMA},
    }
    start = swapping.generator.model.provider.tokenizer.tool_call_start_tokens[0]
    free = chat(swapping, tools=[tool], logit_bias={str(start): -60.0})
    assert (contents(free) != [], free["choices"][0]["message"].get("tool_calls")) == (True, None)
    called = chat(swapping, tools=[tool], logit_bias={str(start): 60.0}, parallel_tool_calls=False)[
        "choices"
    ][0]
    assert (called["finish_reason"], called["message"].get("content") or "") == ("tool_calls", "")
    for call in called["message"]["tool_calls"]:
        jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)


def test_a_beginning_that_the_form_does_not_allow_is_refused(swapping: Client) -> None:
    body = {
        "model": "default_model",
        "max_tokens": 200,
        "temperature": 0,
        "output_format": {"type": "json_schema", "schema": SCHEMA},
    }
    given = {"role": "assistant", "content": '{"kind":'}
    status, answer = swapping.send("/v1/messages", {**body, "messages": [*HELLO, given]})
    assert status == 200, answer
    jsonschema.validate(json.loads(given["content"] + answer["content"][0]["text"]), SCHEMA)
    status, answer = swapping.send(
        "/v1/messages", {**body, "messages": [*HELLO, {**given, "content": "Well, "}]}
    )
    assert status == 400
    assert (
        "output_format.schema: the form does not allow the beginning" in answer["error"]["message"]
    )


@pytest.mark.parametrize("stream", [False, True])
def test_a_form_without_an_end_ends_with_its_client(swapping: Client, stream: bool) -> None:
    body = {"prompt": "Name: ", "temperature": 1.0, "max_tokens": 30_000, "stream": stream}
    connection: socket.socket = ask(
        swapping, "/v1/completions", {**body, "structured_outputs": {"regex": "[a-d]{20000}"}}
    )
    until(lambda: swapping.generator._live)
    connection.close()
    until(lambda: not swapping.generator._live)
    swapping.settle()


@pytest.mark.thorough
def test_a_reply_goes_on_in_its_form_after_its_model_was_away(
    swapping: Client, models: list[Path]
) -> None:
    long = {
        "prompt": "Name: ",
        "structured_outputs": {"regex": "a name: [a-d]{500} which ends here"},
        **DRAWN,
        "max_tokens": 600,
    }

    def complete() -> str:
        status, answer = swapping.send("/v1/completions", long)
        assert (status, answer["choices"][0]["finish_reason"]) == (200, "stop"), answer
        return answer["choices"][0]["text"]  # type: ignore[no-any-return]

    def other() -> list[str]:
        until(lambda: generator._live)
        return contents(chat(swapping, model=str(models[1])))

    expected, generator = complete(), swapping.generator
    counts = generator.model.events.counts
    before, generator.registry.queue.drain = counts.swaps["out"], 0.05
    try:
        found, of_other = at_once([complete, other])
    finally:
        generator.registry.queue.drain = 600.0
    assert counts.swaps["out"] > before
    # What was compiled for a model goes with it.
    assert {key for key, _ in generator.forms._compiler._kept} <= set(generator.registry.loaded)
    assert found == expected
    assert re.fullmatch(long["structured_outputs"]["regex"], found)
    assert of_other != []
    swapping.settle()


def test_the_form_of_a_model_that_is_not_loaded_is_refused_before_it_is_loaded(
    swapping: Client, models: list[Path]
) -> None:
    loads = swapping.generator.registry.counts["loads"]
    body = {
        "prompt": "a",
        "model": str(models[1]),
        "max_tokens": 4,
        "structured_outputs": {"regex": "(unclosed"},
    }
    status, answer = swapping.send("/v1/completions", body)
    assert status == 400
    assert "structured_outputs.regex" in answer["error"]["message"]
    assert swapping.generator.registry.counts["loads"] == loads


@pytest.mark.thorough
def test_a_reply_is_the_same_after_a_restart(models: list[Path], tmp_path: Path) -> None:
    def once() -> tuple[list[str], int]:
        with serve(models, "--store-dir", str(tmp_path / "store")) as client:
            long = [{"role": "system", "content": "Describe things. " * 40}, *HELLO]
            answer = client.chat(long, response_format=FORMAT, **DRAWN)
            return contents(answer), cached_tokens(answer["usage"])

    (texts, cached), (again, cached_again) = once(), once()
    assert texts == again != []
    assert cached == 0 < cached_again


def test_a_draft_keeps_the_form_and_changes_no_reply(models: list[Path], swapping: Client) -> None:
    expected = contents(chat(swapping, temperature=0))
    with blockpool_server(
        models[0], "--pool-bytes", "60MB", "--draft-model", str(models[1])
    ) as drafted:
        assert contents(chat(drafted, temperature=0)) == expected != []
        assert contents(chat(drafted)) != []


def test_a_strict_tool_is_named_that_cannot_be_compiled() -> None:
    """The others of the request are no reason to refuse it: those that are not strict lose their
    schemas first.
    """
    vocabulary = vocabulary_of("bpe")
    forms, tokens = Forms(FormConfig()), FormTokens(vocabulary, Marks(), "qwen3_coder")

    def compiled(**places: str | None) -> Any:
        large = {"type": "array", "items": {"type": "string", "pattern": "(a|b)*a(a|b){9999}"}}
        schemas = {
            "good": {"type": "object"},
            "bad": {"type": "object", "properties": {"a": large}, "required": ["a"]},
        }
        held = tuple(
            ToolFormat(name, json.dumps(schemas[name]), place) for name, place in places.items()
        )
        request = ChatRequest("chat", "", [], None, None, calls="must", held=held)
        request.prepared = PreparedPrompt()
        return forms.form_for(request, "key", tokens)

    assert compiled(good="tools[0].input_schema", bad=None) is not None
    assert compiled(bad=None) is not None
    with pytest.raises(
        FormError, match=r"^tools\[1\].input_schema: a pattern or a bound of length is too large"
    ):
        compiled(good="tools[0].input_schema", bad="tools[1].input_schema")


def test_strict_tools_leave_a_model_alone_that_calls_none(swapping: Client) -> None:
    tool = {"type": "function", "function": {"name": "find", "strict": True, "parameters": SCHEMA}}
    assert (
        swapping.chat(HELLO, tools=[tool], max_tokens=3)["choices"][0]["finish_reason"] == "length"
    )
    bad = {
        "type": "function",
        "function": {"name": "find", "strict": True, "parameters": {"not": {}}},
    }
    status, answer = swapping.send(
        "/v1/chat/completions", {"messages": HELLO, "tools": [bad], "max_tokens": 3}
    )
    assert (status, answer["error"]["param"]) == (400, "tools[0].function.parameters.not")


def test_a_model_that_cannot_keep_a_form_refuses_it_with_its_place(swapping: Client) -> None:
    forms, key = swapping.generator.forms, ModelKey("a model")
    served = swapping.generator.model
    tokens = served.form_tokens
    assert tokens is not None
    channels = replace(
        tokens.vocabulary, added={**tokens.vocabulary.added, "<|channel|>": 1, "<|message|>": 2}
    )
    content, chat = OutputFormat("regex", "[ab]+", "regex"), ChatRequest("chat", "", [], [{}], None)
    for found, why in ((None, "tokenizer"), (replace(tokens, vocabulary=channels), "channels")):
        with pytest.raises(FormError, match=f"^regex: .*{why}"):
            forms.form_for(replace(chat, form=content), key, found)
    strict, loose = (
        ToolFormat("a", json.dumps(SCHEMA), place)
        for place in ("tools[0].function.parameters", None)
    )
    without = replace(tokens, parser="no such parser")
    with pytest.raises(FormError, match="cannot be held to a form"):
        forms.form_for(replace(chat, held=(strict,)), key, without)
    # A call that must be made is as free as before, and so is one beside content.
    for found in (None, without):
        assert forms.form_for(replace(chat, held=(loose,), calls="must"), key, found) is None
    assert forms.form_for(replace(chat, held=(loose,), form=content), key, without) is not None


def test_a_loaded_model_waits_for_no_tokens_of_others_and_reads_its_own_once(
    swapping: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = swapping.generator.model
    vars(served).pop("form_tokens", None)
    read = Mock(wraps=FormTokens.from_tokenizer)
    monkeypatch.setattr(FormTokens, "from_tokenizer", read)
    form = {"type": "json_object"}
    with swapping.generator.forms._loading:
        for _ in range(2):
            assert swapping.chat(HELLO, response_format=form, max_tokens=2)["choices"]
    assert read.call_count == 1


def test_other_threads_run_while_a_long_beginning_is_followed() -> None:
    """A matcher holds the GIL for all tokens that it is given at once."""
    matcher = Mock()
    matcher.try_consume_tokens.return_value = 1
    consume(matcher, [5, 6], "format")
    assert [call.args for call in matcher.try_consume_tokens.call_args_list] == [([5],), ([6],)]


def test_a_long_beginning_of_a_form_that_costs_much_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    matcher = Mock()
    matcher.try_consume_tokens.return_value = 1
    monkeypatch.setattr(time, "thread_time", Mock(side_effect=itertools.count(0, 0.1)))
    with pytest.raises(FormError, match=r"the form has cost 0\.6 s for 5 tokens"):
        consume(matcher, [5] * 100, "format")


def test_tokens_of_models_that_are_not_loaded_are_read_once_for_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    def load(source: TokenizerSource) -> Any:
        read.append(Path(source.folder).name)
        return tokenizer_of("bpe")

    monkeypatch.setattr("mlx_blockpool.server.forms.load_tokenizer_of", load)
    forms = Forms(FormConfig())

    def tokens(name: str) -> FormTokens:
        (tmp_path / name).mkdir(exist_ok=True)
        return forms.tokens_before(ModelKey(name), TokenizerSource(str(tmp_path / name), {}))

    assert tokens("A") is tokens("A")
    assert read == ["A"]
    (tmp_path / "A" / "tokenizer.json").write_text("{}")
    tokens("A")
    assert read == ["A", "A"]
    # A is the one of three that was used first.
    for name in "BCCBA":
        tokens(name)
    assert read[2:] == ["B", "C", "A"]
    forms.drop(ModelKey("A"))
    tokens("A")
    assert read[5:] == ["A"]
