"""Bodies and requests within bounds: what would hold others is refused with a clear error,
before it can.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.server import CompletionRequest, LogitsProcessorArguments
from models import save_model
from pydantic import ValidationError

from mlx_blockpool.config import RequestConfig
from mlx_blockpool.server.api.anthropic_request import MessagesBody
from mlx_blockpool.server.api.completions_request import ChatBody
from mlx_blockpool.server.api.responses_request import ResponsesBody
from mlx_blockpool.server.bodies import UNCHECKED_BYTES, InvalidRequestError, check_json, parse_json
from mlx_blockpool.server.validation import check_bounds
from server.serving import Client, blockpool_server

pytestmark = pytest.mark.server(model="llama")

HELLO = [{"role": "user", "content": "Hello"}]
LONG = b"1" * 5000


# -- JSON ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"a": ' + LONG + b"}", "integer that is too long"),
        (b"{", "Invalid JSON"),
        (b'"\xff"', "not UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_what_is_no_json_has_a_clear_error(data: bytes, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        parse_json(data)
    with pytest.raises(InvalidRequestError):
        check_json(data)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"[" + b"1," * RequestConfig.values + b"1]", f"more than {RequestConfig.values:,} values"),
        (
            b"[" + b"{}," * RequestConfig.values + b"1]",
            f"more than {RequestConfig.values:,} values",
        ),
        (
            b'"' + b"\\n" * (RequestConfig.escapes + 1) + b'"',
            f"{RequestConfig.escapes + 1:,} escaped characters",
        ),
        (
            b"[" + b"1" * (RequestConfig.digits + 1) + b"]",
            f"integer of {RequestConfig.digits + 1} digits",
        ),
        (b"[" * 300 + b"]" * 300, "nested too deeply: more than 200 levels"),
    ],
)
def test_what_takes_long_to_read_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        check_json(data)


def test_a_long_conversation_is_read() -> None:
    body = {
        "messages": [{"role": "user", "content": 'line "of" text\n' * 100}] * 400,
        "max_tokens": 10**30,
    }
    data = json.dumps(body).encode()
    assert len(data) > UNCHECKED_BYTES
    check_json(data)
    assert parse_json(data) == body


PATHS = [
    "/v1/chat/completions",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/responses",
    "/v1/completions",
]
PATHS += ["/admin/load", "/v1/agents/ann/fork"]


@pytest.mark.parametrize("path", PATHS)
def test_an_integer_of_5000_digits_is_a_400_wherever_a_number_is_read(
    server: Client, path: str
) -> None:
    status, answer = server.send(path, raw=b'{"max_tokens": ' + LONG + b"}")
    assert (status, "too long" in json.dumps(answer)) == (400, True), answer


@pytest.mark.parametrize("path", PATHS[:5])
def test_large_bodies_are_looked_at_in_a_worker(server: Client, path: str) -> None:
    before = server.generator.prompts.counts["bodies"]
    status, answer = server.send(
        path, raw=b'{"messages": [' + b"[]," * RequestConfig.values + b"1]}"
    )
    assert (status, "values" in json.dumps(answer)) == (400, True), answer
    assert server.generator.prompts.counts["bodies"] == before + 1


# -- fields ----------------------------------------------------------------------------------------


class Arguments:
    def __init__(
        self, stop_words: list[str] | None = None, logit_bias: dict[int, float] | None = None
    ) -> None:
        self.stop_words = stop_words or []
        self.logits = LogitsProcessorArguments(logit_bias, 0.0, 20, 0.0, 20, 0.0, 20)


@pytest.mark.parametrize(
    ("messages", "tools", "args", "place"),
    [
        (HELLO * 4, [], Arguments(), "messages"),
        (HELLO, [{}] * 4, Arguments(), "tools"),
        (HELLO, [], Arguments(["a", "b", "c", "d"]), "stop"),
        (HELLO, [], Arguments(["a" * 11]), "stop"),
        (HELLO, [], Arguments(logit_bias=dict.fromkeys(range(4), 0.0)), "logit_bias"),
    ],
)
def test_more_than_a_request_may_have_is_refused_by_name(
    messages: Any, tools: Any, args: Any, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, most in {
        "messages": 3,
        "tools": 3,
        "logit_bias": 3,
        "stop_words": 3,
        "stop_characters": 10,
    }.items():
        monkeypatch.setattr(RequestConfig, name, most)
    check_bounds(
        CompletionRequest("chat", "", HELLO * 3, [{}] * 3, None),
        Arguments(["a" * 10] * 3, {1: 0.0}),
    )
    with pytest.raises(InvalidRequestError) as raised:
        check_bounds(CompletionRequest("chat", "", messages, tools, None), args)
    assert raised.value.place == place


MANY = 5_000


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (ChatBody, {"messages": [1] * MANY}),
        (ChatBody, {"messages": HELLO, "stop": [1] * MANY}),
        (ChatBody, {"messages": HELLO, "logit_bias": {f"a{i}": "b" for i in range(MANY)}}),
        (MessagesBody, {"max_tokens": 1, "messages": [{}] * MANY}),
        (
            MessagesBody,
            {"max_tokens": 1, "messages": [{"role": "user", "content": [{"type": "text"}] * MANY}]},
        ),
        (MessagesBody, {"max_tokens": 1, "messages": HELLO, "tools": [{"name": "a"}] * MANY}),
        (MessagesBody, {"max_tokens": 1, "messages": HELLO, "stop_sequences": [""] * MANY}),
        (ResponsesBody, {"input": [{}] * MANY}),
        (ResponsesBody, {"input": [{"role": "user", "content": [{"type": "input_text"}] * MANY}]}),
        (
            ResponsesBody,
            {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function"}] * MANY}]},
        ),
    ],
)
def test_a_large_body_that_is_wrong_everywhere_has_one_error(
    model: Any, body: dict[str, Any]
) -> None:
    with pytest.raises(ValidationError) as raised:
        model.model_validate(body)
    assert raised.value.error_count() == 1


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"stop": "x" * 1_000_000}),
        ("/v1/chat/completions", {"stop": [str(i) for i in range(10_000)]}),
        ("/v1/completions", {"stop": [str(i) for i in range(10_000)], "prompt": "x"}),
        ("/v1/messages", {"stop_sequences": ["x" * 10_000]}),
        ("/v1/messages", {"tools": [{"name": f"t{i}", "input_schema": {}} for i in range(1_500)]}),
        (
            "/v1/chat/completions",
            {"tools": [{"type": "function", "function": {"name": f"t{i}"}} for i in range(1_500)]},
        ),
        ("/v1/chat/completions", {"logit_bias": {str(i): 1 for i in range(5_000)}}),
        ("/v1/chat/completions", {"messages": HELLO * 10_001}),
    ],
)
def test_a_request_with_too_much_is_a_400_that_names_it(
    server: Client, path: str, fields: dict[str, Any]
) -> None:
    before = dict(server.generator.prompts.counts)
    status, answer = server.send(path, {"messages": HELLO, "max_tokens": 2, **fields})
    name = next(iter(fields)).replace("stop_sequences", "stop")
    assert (status, name in json.dumps(answer)) == (400, True), answer
    assert server.generator.prompts.counts["prompts"] == before["prompts"]


def test_a_message_that_cannot_fit_is_refused_without_the_generation_thread(tmp_path: Path) -> None:
    arrived: list[Any] = []
    with blockpool_server(save_model(tmp_path / "model", "llama"), "--pool-bytes", "8MB") as client:
        client.generator.wait_until_loaded()
        client.generator._arrive = arrived.append
        capacity = next(iter(client.generator.registry.loaded.values())).capacity()
        body = {"messages": [{"role": "user", "content": "x" * (capacity * 12)}], "max_tokens": 2}
        status, answer = client.send("/v1/messages", body)
        assert (status, answer["error"]["message"].startswith("prompt is too long: ")) == (
            400,
            True,
        )
        status, answer = client.send("/v1/chat/completions", body)
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert not arrived
