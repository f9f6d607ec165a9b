"""Ollama's own client against /api: replies, streams, thinking, calls, images' refusal, models,
and what is refused by name.
"""

from __future__ import annotations

import json
import math
import urllib.error
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import ollama
import pytest

from mlx_blockpool.config import WHAT_FITS
from mlx_blockpool.server.api.ollama_request import parse_chat, parse_generate, seconds_of
from server.scripted import CALL, LOOK_UP, SYSTEM, Say
from server.serving import Client, blockpool_server, parse, text_of, until

pytestmark = pytest.mark.server("--pool-bytes 20MB --prefill-step-size 128", model="agent")

CHAT = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "What is a pool?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a word up.",
        "parameters": LOOK_UP["input_schema"],
    },
}
OPTIONS = {"num_predict": 12}


@pytest.fixture
def sdk(well: Client) -> ollama.Client:
    return sdk_of(well)


def sdk_of(server: Client) -> ollama.Client:
    return ollama.Client(host=f"http://127.0.0.1:{server.port}")


def lines(server: Client, path: str, **body: Any) -> list[dict[str, Any]]:
    """What a stream has on the wire."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}{path}", json.dumps(body).encode()
    )
    with urllib.request.urlopen(request) as answer:
        assert answer.headers["Content-type"] == "application/x-ndjson"
        return [json.loads(line) for line in answer.read().splitlines()]


def test_a_chat_is_answered_as_openais_is(sdk: ollama.Client, well: Client) -> None:
    expected = well.chat(CHAT, max_tokens=12)
    answer = sdk.chat("default_model", CHAT, options=OPTIONS)
    assert answer.message.content == text_of(expected)
    assert (answer.done, answer.done_reason) == (True, "length")
    assert (answer.prompt_eval_count, answer.eval_count) == (expected["usage"]["prompt_tokens"], 12)
    parts = answer.load_duration, answer.prompt_eval_duration, answer.eval_duration
    assert all(part is not None and part >= 0 for part in parts)
    assert answer.total_duration == sum(part for part in parts if part is not None)


def test_a_stream_has_the_same_reply_in_pieces(sdk: ollama.Client, well: Client) -> None:
    whole = sdk.chat("default_model", CHAT, options=OPTIONS)
    pieces = list(sdk.chat("default_model", CHAT, options=OPTIONS, stream=True))
    assert "".join(piece.message.content or "" for piece in pieces) == whole.message.content
    assert [piece.done for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert (pieces[-1].done_reason, pieces[-1].eval_count) == ("length", 12)
    wire = lines(well, "/api/chat", model="default_model:latest", messages=CHAT, options=OPTIONS)
    assert {line["model"] for line in wire} == {"default_model:latest"}
    assert wire[0]["created_at"].endswith("Z")


def test_a_prompt_is_a_chat_or_goes_to_the_model_as_it_is(sdk: ollama.Client, well: Client) -> None:
    chat = sdk.chat("default_model", CHAT, options=OPTIONS)
    asked = sdk.generate("default_model", CHAT[1]["content"], system=SYSTEM, options=OPTIONS)
    assert asked.response == chat.message.content
    assert asked.prompt_eval_count == chat.prompt_eval_count
    raw = sdk.generate("default_model", "Once upon", raw=True, options=OPTIONS)
    status, expected = well.send("/v1/completions", {"prompt": "Once upon", "max_tokens": 12})
    assert (status, raw.response) == (200, expected["choices"][0]["text"])
    pieces = [
        piece.response
        for piece in sdk.generate(
            "default_model", "Once upon", raw=True, options=OPTIONS, stream=True
        )
    ]
    assert "".join(pieces) == raw.response


def test_thinking_and_calls_have_fields_of_their_own(sdk: ollama.Client, say: Say) -> None:
    say(f"<think>\nHm.\n</think>\n\nI look.\n{CALL}")
    answer = sdk.chat("default_model", CHAT, tools=[TOOL], think=True)
    assert (answer.message.thinking, answer.message.content) == ("Hm.", "I look.")
    assert answer.message.tool_calls is not None
    (call,) = answer.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("look_up", {"word": "pool"})
    assert answer.done_reason == "stop"
    pieces = [
        piece.message
        for piece in sdk.chat("default_model", CHAT, tools=[TOOL], think=True, stream=True)
    ]
    assert "".join(piece.thinking or "" for piece in pieces) == "Hm."
    assert "".join(piece.content or "" for piece in pieces) == "I look."
    assert [piece.tool_calls for piece in pieces if piece.tool_calls] == [answer.message.tool_calls]


def test_a_result_goes_back_under_the_name_of_its_tool(sdk: ollama.Client, well: Client) -> None:
    call = {"function": {"name": "look_up", "arguments": {"word": "pool"}}}
    turns = [*CHAT, {"role": "assistant", "content": "", "tool_calls": [call]}]
    turns += [{"role": "tool", "tool_name": "look_up", "content": "water"}]
    answer = sdk.chat("default_model", turns, options=OPTIONS)
    named = {
        "id": "c",
        "type": "function",
        "function": {"name": "look_up", "arguments": '{"word": "pool"}'},
    }
    same = [*CHAT, {"role": "assistant", "content": "", "tool_calls": [named]}]
    same += [{"role": "tool", "tool_call_id": "c", "content": "water"}]
    expected = well.chat(same, max_tokens=12)
    assert answer.message.content == text_of(expected)
    assert answer.prompt_eval_count == expected["usage"]["prompt_tokens"]


def test_a_last_message_of_the_assistant_is_continued(sdk: ollama.Client, well: Client) -> None:
    begun = [*CHAT, {"role": "assistant", "content": "A pool is"}]
    answer = sdk.chat("default_model", begun, options=OPTIONS)
    status, expected = well.send(
        "/v1/messages",
        {"max_tokens": 12, "system": SYSTEM, "messages": begun[1:], "model": "default_model"},
    )
    assert (status, answer.message.content) == (200, expected["content"][0]["text"])


def test_logprobs_are_those_of_openais_reply(sdk: ollama.Client, well: Client) -> None:
    expected = well.chat(CHAT, max_tokens=12, logprobs=True, top_logprobs=2)["choices"][0][
        "logprobs"
    ]["content"]
    whole = sdk.chat("default_model", CHAT, options=OPTIONS, logprobs=True, top_logprobs=2)
    pieces = sdk.chat(
        "default_model", CHAT, options=OPTIONS, logprobs=True, top_logprobs=2, stream=True
    )
    streamed = [each for piece in pieces for each in piece.logprobs or ()]
    for found in (list(whole.logprobs or ()), streamed):
        assert [each.token for each in found] == [each["token"] for each in expected]
        assert [each.logprob for each in found] == pytest.approx(
            [each["logprob"] for each in expected], abs=1e-4
        )
        assert [len(each.top_logprobs or ()) for each in found] == [2] * 12


def test_stop_words_end_a_reply(sdk: ollama.Client, say: Say) -> None:
    say("One two three")
    answer = sdk.chat("default_model", CHAT, options={"stop": ["two"]}, think=False)
    assert (answer.message.content, answer.done_reason) == ("One ", "stop")


@pytest.fixture
def own(agent: Path) -> Iterator[Client]:
    """A server of the test's own: on one where the model was loaded again, the next unload would
    wait until it has rested.
    """
    with blockpool_server(agent, "--pool-bytes", "20MB") as running:
        yield running


def test_models_are_listed_shown_loaded_and_unloaded(own: Client) -> None:
    sdk = sdk_of(own)
    assert own.capacity()
    (model,) = sdk.list().models
    assert model.model == own.generator.registry.catalog.listed()[0]
    assert model.size
    assert model.details is not None
    assert (model.details.family, model.details.format) == ("llama", "safetensors")
    shown = sdk.show(f"{model.model}:latest")
    assert shown.capabilities == ["completion", "tools", "thinking"]
    assert shown.modelinfo is not None
    assert shown.modelinfo["general.architecture"] == "llama"
    assert shown.modelinfo["llama.block_count"] == len(
        next(iter(own.generator.registry.loaded.values())).provider.model.layers
    )
    assert "<|im_start|>" in str(shown.template)
    (loaded,) = sdk.ps().models
    assert (loaded.model, loaded.digest) == (model.model, model.digest)
    assert loaded.size_vram
    assert sdk.generate("default_model", "", keep_alive=0).done_reason == "unload"
    assert sdk.ps().models == []
    assert sdk.chat("default_model", []).done_reason == "load"
    assert len(sdk.ps().models) == 1
    assert own.send("/api/version")[1]["version"].count(".") == 2


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        (300, 300),
        ("300", 300),
        ("5m", 300),
        ("1h30m", 5400),
        ("1.5s", 1.5),
        ("250ms", 0.25),
        (0, 0),
        ("0s", 0),
        ("-0s", 0),
    ],
)
def test_durations_are_those_of_ollama(given: Any, seconds: float) -> None:
    assert seconds_of(given) == seconds
    assert seconds_of(f"-{given}" if seconds else -1) == math.inf


def test_a_model_stays_as_long_as_the_last_request_has_said(
    sdk: ollama.Client, well: Client
) -> None:
    registry = well.generator.registry

    def kept() -> float:
        (model,) = registry.loaded.values()
        return model.idle_seconds

    sdk.generate("default_model", "Hello", options={"num_predict": 1}, keep_alive="1h")
    assert kept() == 3600
    (loaded,) = sdk.ps().models
    assert loaded.expires_at is not None
    assert 3500 < (loaded.expires_at - datetime.now(UTC)).total_seconds() <= 3600
    sdk.chat("default_model", [], keep_alive=-1)
    assert kept() == math.inf
    sdk.chat("default_model", CHAT, options={"num_predict": 1})
    assert kept() == math.inf
    sdk.chat("default_model", CHAT, options={"num_predict": 1}, keep_alive=0)
    until(lambda: not (registry.loaded or registry.swap))
    for bad in ("soon", True, {}, 10**399, math.nan):
        status, answer = well.send("/api/generate", {"prompt": "Hello", "keep_alive": bad})
        assert (status, "keep_alive: " in answer["error"], "such as 5m" in answer["error"]) == (
            400,
            True,
            True,
        ), answer


def test_a_probe_finds_a_server(well: Client) -> None:
    with urllib.request.urlopen(f"http://127.0.0.1:{well.port}/") as answer:
        assert (answer.status, answer.read()) == (200, b"Ollama is running")
    request = urllib.request.Request(f"http://127.0.0.1:{well.port}/", method="HEAD")
    with urllib.request.urlopen(request) as answer:
        assert (answer.status, answer.read()) == (200, b"")


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        (
            "/api/chat",
            {"messages": CHAT, "format": "yaml"},
            400,
            "format: Input should be 'json' or a JSON schema; found 'yaml'",
        ),
        ("/api/chat", {"messages": CHAT, "format": {"not": {}}}, 400, "format.not: not"),
        (
            "/api/chat",
            {"messages": CHAT, "options": {"top_p": 2}},
            400,
            "options.top_p: Input should be less than or equal to 1",
        ),
        (
            "/api/chat",
            {"messages": CHAT, "think": "much"},
            400,
            "think: Input should be 'low', 'medium', 'high' or 'max'",
        ),
        (
            "/api/chat",
            {"messages": [{"role": "bot", "content": "a"}]},
            400,
            "messages[0].role: Input should be 'system'",
        ),
        (
            "/api/chat",
            {"messages": [{"role": "user", "content": "a", "images": ["aGk="]}]},
            400,
            "messages[0].images: this model",
        ),
        (
            "/api/generate",
            {"prompt": "a", "suffix": "b"},
            400,
            "suffix: 'b' is not supported; this server takes no text after",
        ),
        (
            "/api/generate",
            {"prompt": "a", "context": [1]},
            400,
            "context: a list is not supported; this server takes no",
        ),
        ("/api/generate", {"prompt": "a", "model": "no/such"}, 404, "There is no model 'no/such'"),
        ("/api/show", {"model": "no/such"}, 404, "There is no model 'no/such'"),
        (
            "/api/embed",
            {"input": "a"},
            501,
            "gives no embeddings: it has no pooling in a modules.json, as embedding models",
        ),
        ("/api/pull", {"model": "a"}, 501, "Models are not managed over this API"),
        ("/api/nothing", {}, 404, "Unknown path /api/nothing"),
        ("/api/nothing", None, 404, "Unknown path /api/nothing"),
    ],
)
def test_what_cannot_be_done_is_named(
    path: str, body: Any, status: int, says: str, well: Client
) -> None:
    found, answer = well.send(path, body)
    assert (found, list(answer)) == (status, ["error"])
    assert says in answer["error"]


def test_what_the_access_policy_rejects_has_the_same_shape(well: Client) -> None:
    status, answer = well.send("/api/tags", headers={"Host": "elsewhere.example"})
    assert (status, list(answer)) == (403, ["error"])
    assert "elsewhere.example" in answer["error"]


def test_a_stream_that_fails_ends_with_the_error(
    fourth_word_fails: Any, sdk: ollama.Client
) -> None:
    fourth_word_fails(RuntimeError("lost"))
    pieces: Iterator[Any] = sdk.chat("default_model", CHAT, options=OPTIONS, stream=True)
    with pytest.raises(ollama.ResponseError, match="lost"):
        list(pieces)


@pytest.fixture(scope="module")
def options() -> Any:
    return parse(["--model", "demo", "--top-p", "0.7", "--max-tokens", "77"])


def test_options_have_mlx_lms_names(options: Any) -> None:
    drawn = {
        "num_predict": -1,
        "temperature": 0.5,
        "top_k": 3,
        "min_p": 0.1,
        "seed": -1,
        "repeat_penalty": 1.5,
        "num_ctx": 9,
    }
    parsed = parse_chat(
        {"messages": CHAT, "options": {**drawn, "repeat_last_n": 7, "presence_penalty": 0.2}},
        options,
    )
    arguments = parsed.arguments
    assert (arguments.max_tokens, arguments.seed, arguments.stop_words) == (WHAT_FITS, None, [])
    sampling, logits = arguments.sampling, arguments.logits
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (
        0.5,
        0.7,
        3,
        0.1,
    )
    assert (logits.repetition_penalty, logits.repetition_context_size) == (1.5, 7)
    assert (logits.presence_penalty, logits.presence_context_size) == (0.2, 7)


@pytest.mark.parametrize(
    ("drawn", "penalty"), [({}, 0.0), ({"repeat_penalty": 1.0}, 0.0), ({"repeat_last_n": 0}, 0.0)]
)
def test_a_penalty_without_effect_is_none(
    drawn: dict[str, Any], penalty: float, options: Any
) -> None:
    parsed = parse_generate(
        {"prompt": "a", "options": {"repeat_penalty": 1.2, **drawn}} if drawn else {"prompt": "a"},
        options,
    )
    assert parsed.arguments.logits.repetition_penalty == penalty
    assert parsed.arguments.max_tokens == 77


def test_images_and_levels_of_thinking_reach_the_template(options: Any) -> None:
    message = {"role": "user", "content": "Look.", "images": ["aGk="]}
    parsed = parse_chat({"messages": [message], "think": "high"}, options)
    image, text = parsed.request.messages[0]["content"]
    assert image == {"type": "image_url", "image_url": {"url": "data:image;base64,aGk="}}
    assert text == {"type": "text", "text": "Look."}
    assert parsed.request.image_at == "messages[0].images"
    assert parsed.arguments.chat_template_kwargs == {
        "enable_thinking": True,
        "reasoning_effort": "high",
    }
