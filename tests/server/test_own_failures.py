"""A request's failure is its own, and turns are noted as they end: with others live beside it."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from mlx_blockpool.prefix.cache import PrefixCache
from mlx_blockpool.server.jobs import between_steps
from mlx_blockpool.server.replies import Reply
from server.serving import Client

pytestmark = pytest.mark.server("--pool-bytes 20MB --prefill-step-size 128", model="endless")


@contextmanager
def long_reply(server: Client) -> Iterator[Any]:
    """Lines of a stream that goes on until it is left; it has begun."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    body = {"prompt": "a long reply", "max_tokens": 20_000, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(body))
    response = connection.getresponse()
    while not response.readline().startswith(b"data: {"):
        pass
    try:
        yield response
        # Still well.
        assert response.readline() is not None
    finally:
        response.close()
        connection.close()
    server.settle()


def test_a_request_that_fails_at_its_start_takes_nobody_along(
    server: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its start and its progress come with the same step."""
    started = Reply.started

    def broken(self: Reply, served: Any, cached: int, lookup: Any) -> None:
        if len(self.request.prepared.tokens) == 5:
            raise LookupError("cannot explain this")
        started(self, served, cached, lookup)

    monkeypatch.setattr(Reply, "started", broken)
    with long_reply(server) as lines:
        status, answer = server.send("/v1/completions", {"prompt": "12345", "max_tokens": 3})
        assert status == 400
        assert "cannot explain this" in answer["error"]["message"]
        assert len(server.generator._live) == 1
        while not lines.readline().startswith(b"data: {"):
            pass


def test_a_client_that_leaves_what_cannot_be_kept_takes_nobody_along(
    server: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any, **kwargs: Any) -> int:
        raise LookupError("cannot keep this")

    with long_reply(server) as lines:
        with monkeypatch.context() as patch:
            patch.setattr(PrefixCache, "release", broken)
            (served,) = server.generator.registry.loaded.values()

            def second() -> int:
                """The number of live requests, once a second one has come and gone."""
                return len(served.live)

            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
            body = {"prompt": "another one", "max_tokens": 20_000, "stream": True}
            connection.request("POST", "/v1/completions", json.dumps(body))
            other = connection.getresponse()
            other.readline()
            assert between_steps(server.generator, second) == 2
            other.close()
            connection.close()
            while between_steps(server.generator, second) == 2:
                pass
            assert between_steps(server.generator, second) == 1
        while not lines.readline().startswith(b"data: {"):
            pass


def test_a_turn_is_noted_when_it_ends_and_not_when_nothing_is_live(server: Client) -> None:
    with long_reply(server):
        messages = [{"role": "user", "content": "note me"}]
        server.chat(messages, max_tokens=2, prompt_cache_key="noted at once")
        (served,) = server.generator.registry.loaded.values()

        def look() -> tuple[int, bool, int]:
            agents = served.agents
            return len(served.live), "noted at once" in agents.noted, len(served.caches.turns)

        assert between_steps(server.generator, look) == (1, True, 0)


def test_a_path_in_the_log_changes_no_terminal(
    server: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server.generator, "hour", None)
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(b"GET /v1/cache/hour?\x1b[2J HTTP/1.0\r\n\r\n")
        assert b" 500 " in connection.recv(100)
    assert r"/v1/cache/hour?\x1b[2J" in caplog.text
    assert "\x1b" not in caplog.text


class Broken:
    """The logprobs of a step whose rank was lost, as they are read."""

    def __getitem__(self, token: int) -> Any:
        raise RuntimeError("[ring] connection to a peer was lost")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "12345", "max_tokens": 3}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "1"}], "max_tokens": 3}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "1"}], "max_tokens": 3}),
        ("/v1/responses", {"input": "1", "max_output_tokens": 3}),
        ("/api/generate", {"prompt": "1", "options": {"num_predict": 3}}),
    ],
)
def test_what_mlx_raises_for_a_lost_rank_is_an_answer_in_words(
    server: Client, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    emit = Reply.emit
    monkeypatch.setattr(
        Reply, "emit", lambda reply, token: emit(reply, replace(token, logprobs=Broken()))
    )
    status, answer = server.send(path, {"model": "m", **body, "stream": False})
    assert status == 503
    assert "A rank was lost" in json.dumps(answer)
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("POST", path, json.dumps({"model": "m", **body, "stream": True}))
    streamed = connection.getresponse().read()
    connection.close()
    assert b"A rank was lost" in streamed
    assert b"send the request again" in streamed


OPENAI, ANTHROPIC = {"message", "type", "param", "code"}, {"message", "type"}


@pytest.mark.parametrize(
    ("path", "known"), [("/v1/modles", "/v1/models"), ("/v1/cache/explian", "/v1/cache/explain")]
)
def test_a_mistyped_path_names_one_that_is_served(server: Client, path: str, known: str) -> None:
    status, answer = server.send(path)
    assert status == 404
    assert answer["error"]["message"] == f"Unknown path {path}. Is it {known}?"
    assert server.send(known)[0] == 200


@pytest.mark.parametrize("body", [None, {}])
@pytest.mark.parametrize(
    ("path", "headers", "fields"),
    [
        ("/v1", {}, OPENAI),
        ("/v2/chat/completions", {}, OPENAI),
        ("/v1/chat", {}, OPENAI),
        ("/v1/responses/x/y/z", {}, OPENAI),
        ("/nothing", {"anthropic-version": "2023-06-01"}, ANTHROPIC),
        ("/v1/messages/nothing", {}, ANTHROPIC),
        ("/api/nothing", {}, None),
    ],
)
def test_an_unknown_path_is_an_error_in_the_shape_of_the_protocol(
    server: Client, path: str, headers: dict[str, str], fields: set[str] | None, body: Any
) -> None:
    status, answer = server.send(path, body, headers=headers)
    assert status == 404
    if fields is None:
        assert answer == {
            "error": f"Unknown path {path}. See the server's README for the endpoints."
        }
    else:
        assert set(answer["error"]) == fields
        assert answer["error"]["type"] == (
            "not_found_error" if fields is ANTHROPIC else "invalid_request_error"
        )
        assert answer.get("type") == ("error" if fields is ANTHROPIC else None)
