"""A client that hangs up is noticed at once, in every form and wherever its request waits;
nothing is computed for nobody.
"""

from __future__ import annotations

import json
import select
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from models import save_endless, save_model
from thorough import only

from mlx_blockpool.server.wire import has_hung_up
from server.serving import Client, blockpool_server, until

LONG = 30_000
MESSAGES = [{"role": "user", "content": "tell me everything"}]
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": LONG}),
    "completions": ("/v1/completions", {"prompt": "everything", "max_tokens": LONG}),
    "messages": (
        "/v1/messages",
        {"model": "default_model", "messages": MESSAGES, "max_tokens": LONG, "temperature": 0},
    ),
    "responses": (
        "/v1/responses",
        {
            "model": "default_model",
            "input": "everything",
            "max_output_tokens": LONG,
            "temperature": 0,
        },
    ),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    return [save_endless(folder / "A"), save_endless(folder / "B", seed=2)]


@pytest.fixture(scope="module")
def swapping(models: list[Path]) -> Iterator[Client]:
    options = ("--swap-patience", "10m", "--allow-models", str(models[1]))
    with blockpool_server(models[0], "--pool-bytes", "60MB", *options) as running:
        yield running


def ask(client: Client, path: str, body: dict[str, Any], more: bytes = b"") -> socket.socket:
    """A connection whose request was sent, with what comes behind it."""
    connection = socket.create_connection(("127.0.0.1", client.port))
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data + more)
    return connection


def tokens(client: Client) -> int:
    return sum(
        served.engine.counts["tokens"]
        for served in client.generator.registry.loaded.values()
        if served.engine
    )


def left_alone(client: Client, leave: Callable[[], None]) -> None:
    """The requests that run end soon after this, long before their replies would."""
    before = tokens(client)
    leave()
    until(lambda: not client.generator._live)
    assert tokens(client) - before < LONG // 2
    client.settle()


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@pytest.mark.sampled
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("leave", [socket.socket.close, reset])
def test_a_running_reply_ends_when_its_client_hangs_up(
    swapping: Client, form: str, stream: bool, leave: Any
) -> None:
    path, body = FORMS[form]
    connection = ask(swapping, path, {**body, "stream": stream})
    until(lambda: swapping.generator._live)
    left_alone(swapping, lambda: leave(connection))


def test_bytes_of_a_next_request_are_no_hang_up_and_hide_none(swapping: Client) -> None:
    path, body = FORMS["completions"]
    connection = ask(
        swapping,
        path,
        {**body, "max_tokens": 600},
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
    )
    received = b""
    while b'"status"' not in received:
        received += connection.recv(1 << 16)
    assert received.count(b"HTTP/1.1 200") == 2
    assert b'"completion_tokens": 600' in received
    connection.close()
    connection = ask(swapping, path, body, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    until(lambda: swapping.generator._live)
    left_alone(swapping, connection.close)


@pytest.mark.sampled
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_a_request_that_waits_for_another_model_goes_with_its_client(
    swapping: Client, models: list[Path], form: str, stream: bool
) -> None:
    path, body = FORMS[form]
    running = ask(swapping, *FORMS["chat"])
    until(lambda: swapping.generator._live)
    waiting = ask(swapping, path, {**body, "model": str(models[1]), "stream": stream})
    until(lambda: len(swapping.generator.registry.queue))
    waiting.close()
    until(lambda: not len(swapping.generator.registry.queue))
    assert len(swapping.generator._live) == 1
    assert swapping.generator.registry.counts["swaps"] == 0
    left_alone(swapping, running.close)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_waits_behind_its_agents_other_goes_with_its_client(
    swapping: Client, stream: bool
) -> None:
    path, body = FORMS["chat"]
    body = {**body, "prompt_cache_key": "one", "stream": stream}
    running = ask(swapping, path, body)
    until(lambda: swapping.generator._live)
    (served,) = swapping.generator.registry.loaded.values()
    until(lambda: served.engine.live)
    waiting = ask(swapping, path, body)
    until(lambda: len(served.engine.scheduler.waiting) == 1 and len(served.live) == 2)
    waiting.close()
    until(lambda: len(served.live) == 1)
    assert len(served.engine.scheduler.waiting) == 0
    left_alone(swapping, running.close)


@pytest.mark.parametrize(
    "name", only(["llama", "gemma3_text", "gpt_oss", "lfm2", "qwen3_5"], "lfm2")
)
def test_a_prefill_goes_on_where_its_client_hung_up(name: str, tmp_path: Path) -> None:
    """Each attempt hangs up a quarter after the one before."""
    model = save_model(tmp_path / name, name)
    with blockpool_server(
        model, "--pool-bytes", "60MB", "--prefill-step-size", "16", "--max-positions", "20000"
    ) as client:
        client.capacity()
        (served,) = client.generator.registry.loaded.values()
        counts = served.engine.counts
        before, quarter = counts["prompt_tokens"], 600
        body = {"messages": [{"role": "user", "content": "ab c" * quarter}], "max_tokens": 4}
        for attempt in range(1, 4):
            connection = ask(client, FORMS["chat"][0], body)
            until(lambda n=attempt: counts["prompt_tokens"] - before >= quarter * n)
            connection.close()
            until(lambda: not client.generator._live)
            client.settle()
        usage = client.send(FORMS["chat"][0], body)[1]["usage"]
        computed = counts["prompt_tokens"] - before
        # The last token is computed with the reply's first, and so is the reply's opening again
        # where the client was not gone before it.
        assert usage["prompt_tokens"] - 1 <= computed <= usage["prompt_tokens"] + len("<assistant.")
        client.settle()


def test_a_request_that_is_served_alone_ends_with_its_client(models: list[Path]) -> None:
    with blockpool_server(
        models[0], "--pool-bytes", "60MB", "--draft-model", str(models[1]), "--no-store"
    ) as client:
        path, body = FORMS["completions"]
        connection = ask(client, path, {**body, "max_tokens": 4000, "stream": True})
        while b"data: {" not in connection.recv(1 << 16):
            pass
        connection.close()
        answer = client.send(path, {"prompt": "the next", "max_tokens": 3})[1]
        assert answer["usage"]["completion_tokens"] == 3
        known = client.send("/v1/cache")[1]["known_tokens"]
        assert known < 4000


def pair() -> tuple[socket.socket, socket.socket]:
    server = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(server.getsockname())
    accepted, _ = server.accept()
    server.close()
    # As a handler's: a look must not wait.
    accepted.settimeout(60)
    return accepted, client


def test_what_is_a_hang_up_and_what_is_not() -> None:
    ours, theirs = pair()
    assert not has_hung_up(ours)
    theirs.sendall(b"GET / HTTP/1.1")
    until(lambda: select.select([ours], [], [], 0)[0])
    assert not has_hung_up(ours)
    assert ours.recv(100) == b"GET / HTTP/1.1"
    theirs.close()
    until(lambda: has_hung_up(ours))
    ours.close()
    assert has_hung_up(ours)


@pytest.mark.skipif(not hasattr(select, "POLLRDHUP"), reason="the system does not say it")
def test_an_end_behind_unread_bytes_is_a_hang_up() -> None:
    ours, theirs = pair()
    theirs.sendall(b"more")
    theirs.close()
    until(lambda: has_hung_up(ours))
    assert ours.recv(100) == b"more"
