"""Connections: many requests on one, how each response says where it ends, and who may keep a
connection open.
"""

from __future__ import annotations

import http.client
import json
import shutil
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack, closing
from http.server import HTTPServer
from pathlib import Path
from typing import Any

import pytest

from mlx_blockpool.server import http as http_module
from mlx_blockpool.server.app import BlockpoolHTTPServer
from mlx_blockpool.server.http import BlockpoolHandler
from server.serving import Client, until, with_access
from server.test_access import KEY, received, wait_for_threads

pytestmark = pytest.mark.server("--pool-bytes 8MB --max-body 20KB", model="llama")

TESTS = Path(__file__).parent.parent
CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
STREAMED = {**CHAT, "stream": True}


def connected(server: Client) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.connect()
    return connection


def ask(
    connection: Any, method: str, path: str, body: Any = None, headers: Any = ()
) -> tuple[Any, bytes]:
    connection.request(method, path, None if body is None else json.dumps(body), dict(headers))
    answer = connection.getresponse()
    return answer, answer.read()


def request(path: str, body: Any, version: str = "1.1", more: str = "") -> bytes:
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/{version}\r\nHost: localhost\r\nContent-Length: "
        f"{len(data)}\r\n{more}\r\n"
    )
    return head.encode() + data


def until_closed(connection: socket.socket) -> bytes:
    content = b""
    while more := connection.recv(65536):
        content += more
    return content


def test_one_connection_serves_all_endpoints_and_their_errors(server: Client) -> None:
    """What one request has left in the handler is nothing to the next."""
    steps: list[tuple[str, str, Any, int]] = [
        ("GET", "/health", None, 200),
        ("POST", "/v1/chat/completions", CHAT, 200),
        ("POST", "/v1/chat/completions", STREAMED, 200),
        ("POST", "/v1/messages", {**STREAMED, "model": "default_model"}, 200),
        ("POST", "/v1/messages", {**CHAT, "model": "default_model", "messages": 3}, 400),
        ("POST", "/v1/responses", {"input": "x", "max_output_tokens": 3, "stream": True}, 200),
        ("POST", "/v1/chat/completions", {**CHAT, "max_tokens": -1}, 400),
        ("POST", "/v1/chat/completions", {**CHAT, "model": "nothing/here"}, 404),
        ("HEAD", "/health", None, 200),
        ("HEAD", "/v1/models", None, 200),
        ("HEAD", "/nothing", None, 404),
        ("OPTIONS", "/v1/messages", None, 204),
        ("GET", "/nothing", None, 404),
        ("DELETE", "/nothing", None, 404),
        ("POST", "/v1/agents/nobody/pin", {"x": "y" * 1000}, 404),
    ]
    ids = set()
    with closing(connected(server)) as connection:
        sock = connection.sock
        for method, path, body, status in steps:
            answer, content = ask(connection, method, path, body)
            assert (answer.status, connection.sock) == (status, sock), (method, path, content)
            assert bool(content) == (method not in ("HEAD", "OPTIONS"))
            ids.add(answer.headers["X-Request-Id"])
    assert len(ids) == len(steps)
    server.settle()


def test_a_stream_is_sent_in_chunks_that_end(server: Client) -> None:
    for path, last in (
        ("/v1/chat/completions", b"data: [DONE]\n\n"),
        ("/v1/messages", b'data: {"type": "message_stop"}\n\n'),
    ):
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
            connection.sendall(request(path, STREAMED, more="Connection: close\r\n"))
            head, _, body = until_closed(connection).partition(b"\r\n\r\n")
        assert b"Transfer-Encoding: chunked" in head
        assert b"Content-Length" not in head
        content = b""
        while body:
            size, _, body = body.partition(b"\r\n")
            content, rest = content + body[: int(size, 16)], body[int(size, 16) :]
            assert rest[:2] == b"\r\n"
            body = rest[2:]
        assert (int(size, 16), content.endswith(last)) == (0, True)


def test_a_client_of_http_1_0_is_answered_until_the_end_of_the_connection(server: Client) -> None:
    for more in ("", "Connection: keep-alive\r\n"):
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
            connection.sendall(request("/v1/chat/completions", STREAMED, "1.0", more))
            content = until_closed(connection)
        assert b"chunked" not in content
        assert content.endswith(b"\n\ndata: [DONE]\n\n")
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        for _ in range(2):
            connection.sendall(b"GET /health HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
            assert received(connection)[0] == 200


def test_requests_that_are_sent_before_their_answers_are_answered_in_order(server: Client) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        first = request("/v1/chat/completions", STREAMED)
        connection.sendall(
            first
            + request("/v1/messages", {})
            + b"GET /health HTTP/1.1\r\nConnection: close\r\n\r\n"
        )
        content = until_closed(connection)
    places = [
        content.index(part)
        for part in (b"data: [DONE]", b"HTTP/1.1 400", b"invalid_request_error", b'"status": "ok"')
    ]
    assert places == sorted(places)
    assert content.count(b"HTTP/1.1 ") == 3


def test_a_body_is_asked_for_once_its_headers_are_checked(server: Client) -> None:
    sent = request("/v1/chat/completions", CHAT, more="Expect: 100-continue\r\n")
    head, body = sent[: sent.index(b"\r\n\r\n") + 4], sent[sent.index(b"\r\n\r\n") + 4 :]
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(head)
        assert connection.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(body)
        assert received(connection)[0] == 200
    with (
        with_access(server, api_key=KEY),
        socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection,
    ):
        connection.sendall(head)
        connection.shutdown(socket.SHUT_WR)
        content = until_closed(connection)
    assert (content.startswith(b"HTTP/1.1 401"), b"Connection: close" in content) == (True, True)


def test_what_is_refused_before_it_is_read_ends_the_connection(server: Client) -> None:
    with closing(connected(server)) as connection:
        answer, content = ask(connection, "POST", "/v1/chat/completions", {"x": "y" * 50_000})
        assert (answer.status, answer.headers["Connection"], connection.sock) == (
            413,
            "close",
            None,
        )
        assert "--max-body" in content.decode()


def test_an_idle_connection_is_closed_after_its_time(server: Client) -> None:
    with with_access(server, keep_alive_seconds=0.2), closing(connected(server)) as connection:
        answer, _ = ask(connection, "GET", "/health")
        assert answer.headers["Keep-Alive"] == "timeout=0"
        assert connection.sock.recv(1) == b""
    wait_for_threads()


def test_an_idle_connection_holds_no_place(server: Client) -> None:
    with with_access(server, max_connections=1), closing(connected(server)) as first:
        access = server.generator.access
        assert ask(first, "GET", "/health")[0].status == 200
        until(lambda: not access.idle._value)
        with closing(connected(server)) as second:
            assert ask(second, "GET", "/health")[0].status == 200
        # An answer is out a moment before its place is free.
        until(lambda: access.connections._value)
        assert ask(first, "GET", "/health")[0].status == 200


def test_idle_connections_are_bounded(server: Client) -> None:
    with with_access(server, max_connections=1), closing(connected(server)) as first:
        assert ask(first, "GET", "/health")[0].status == 200
        until(lambda: not server.generator.access.idle._value)
        with closing(connected(server)) as second:
            assert ask(second, "GET", "/health")[0].status == 200
            assert second.sock.recv(1) == b""


def test_a_slow_second_request_is_dropped_as_a_first_one_is(server: Client) -> None:
    with with_access(server, stall_seconds=0.3), closing(connected(server)) as connection:
        assert ask(connection, "GET", "/health")[0].status == 200
        connection.sock.sendall(b"GET /health HTTP/1.1\r\nHo")
        assert received(connection.sock)[0] == 408
    wait_for_threads()


def test_a_burst_of_connections_waits_to_be_accepted(server: Client) -> None:
    """None is reset, though nobody accepts yet."""
    http_server = BlockpoolHTTPServer(
        ("127.0.0.1", 0),
        lambda *args: BlockpoolHandler(server.generator, *args, system_fingerprint="test"),
    )
    with ExitStack() as stack:
        stack.callback(http_server.server_close)
        port = http_server.server_address[1]
        clients = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5))
            for _ in range(128)
        ]
        thread = threading.Thread(target=http_server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        stack.callback(thread.join)
        stack.callback(http_server.shutdown)
        for client in clients:
            client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert [received(client)[0] for client in clients] == [200] * 128


def test_connections_to_vanished_machines_end(
    server: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[float] = []
    monkeypatch.setattr(
        http_module, "drop_vanished", lambda connection, seconds: given.append(seconds)
    )
    assert server.send("/health")[0] == 200
    assert given == [2 * server.generator.access.config.send_seconds]
    alone = ["unshare", "--net", "--map-root-user"]
    if (
        not shutil.which("unshare")
        or subprocess.run([*alone, "true"], capture_output=True).returncode
    ):
        pytest.skip("needs network namespaces")
    ran = subprocess.run(
        [*alone, sys.executable, "-m", "server.vanished", "1"],
        cwd=TESTS,
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout.split() == ["ETIMEDOUT", "ETIMEDOUT"]


def test_a_server_without_threads_keeps_no_connection_from_the_others(server: Client) -> None:
    """As mlx-lm's own tests serve: http.server.HTTPServer has one thread for all connections."""
    with HTTPServer(
        ("127.0.0.1", 0), lambda *args: BlockpoolHandler(server.generator, *args)
    ) as one_by_one:
        serving = threading.Thread(target=one_by_one.serve_forever, kwargs={"poll_interval": 0.01})
        serving.start()
        try:
            with ExitStack() as open_until_the_end:
                for method, path, body in (
                    ("GET", "/health", None),
                    ("POST", "/v1/chat/completions", STREAMED),
                ) * 2:
                    connection = open_until_the_end.enter_context(
                        closing(connected(Client(one_by_one.server_port, None)))
                    )
                    connection.request(method, path, None if body is None else json.dumps(body))
                    answer = connection.getresponse()
                    assert (answer.status, answer.getheader("Connection")) == (200, "close")
                    assert answer.read()
        finally:
            one_by_one.shutdown()
            serving.join()


def test_a_client_that_speaks_tls_is_named_and_leaves_the_others_alone(
    server: Client, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(b"\x16\x03\x01\x02\x00\x01\x00")
        assert connection.recv(100) == b""
    assert [record.message for record in caplog.records if "TLS" in record.message] == [
        "127.0.0.1 speaks TLS, and this port serves plain HTTP: use http:// in its URL"
    ]
    assert server.chat([{"role": "user", "content": "Hi"}], max_tokens=1)["choices"]
