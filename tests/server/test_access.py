"""Who is let in: keys, hosts, origins; and what a request may be: its size, its headers, its pace.

Over real sockets.
"""

from __future__ import annotations

import http.client
import json
import logging
import socket
import threading
from email.message import Message
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from forks import server_forks

from mlx_blockpool.config import AccessConfig
from mlx_blockpool.errors import BlockpoolError
from mlx_blockpool.server import app
from mlx_blockpool.server.access import (
    AccessPolicy,
    cause_of,
    checked_text,
    header_text,
    host_name,
)
from mlx_blockpool.server.bodies import StatusError
from mlx_blockpool.server.http import BlockpoolHandler
from mlx_blockpool.server.options import access_config, api_key
from mlx_blockpool.server.origins import is_foreign
from mlx_blockpool.server.provider import BlockpoolModelProvider
from server.processes import SERVE
from server.serving import Client, parse, until, with_access

pytestmark = pytest.mark.server("--pool-bytes 8MB --max-body 20KB", model="llama")

KEY = "a-key-that-nobody-guesses-0815"
CHAT = {"model": "default_model", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}


def ask(
    server: Client, method: str, path: str, body: Any = None, **headers: str
) -> tuple[int, Any]:
    """Status and JSON of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    data = None if body is None else json.dumps(body).encode()
    connection.request(
        method, path, data, {name.replace("_", "-"): value for name, value in headers.items()}
    )
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, json.loads(content) if content else None


def raw(server: Client, data: bytes) -> tuple[int, Any]:
    """Status and JSON of what is answered to these bytes."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(data)
        return received(connection)


def received(connection: socket.socket) -> tuple[int, Any]:
    answer = http.client.HTTPResponse(connection)
    answer.begin()
    body = answer.read()
    return answer.status, json.loads(body) if body else None


def message(answer: Any) -> str:
    error = answer["error"]
    return str(error["message"])


OTHERS: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def threads_of_others() -> None:
    """Clients of other tests keep their connections, and with them threads."""
    OTHERS.clear()
    OTHERS.update(threading.enumerate())


def threads() -> set[threading.Thread]:
    """Those of this test's requests."""
    return {
        thread for thread in threading.enumerate() if "process_request_thread" in thread.name
    } - OTHERS


def wait_for_threads() -> None:
    """Return once no request is being served; the test's own time limit is the limit."""
    until(lambda: not threads())


# -- keys ------------------------------------------------------------------------------------------


def test_every_endpoint_but_health_needs_the_key(server: Client) -> None:
    with with_access(server, api_key=KEY):
        for path in (
            "/v1/models",
            "/v1/cache",
            "/v1/cache/explain",
            "/admin/models",
            "/v1/agents",
            "/nothing/here",
        ):
            assert (
                ask(server, "GET", path)[0]
                == ask(server, "HEAD", path)[0]
                == ask(server, "DELETE", path)[0]
                == 401
            ), path
        for method, path, body in [
            ("POST", "/v1/chat/completions", CHAT),
            ("POST", "/v1/messages", CHAT),
            ("POST", "/admin/unload", {"model": "x"}),
        ]:
            assert ask(server, method, path, body, Authorization="Bearer wrong")[0] == 401
            assert ask(server, method, path, body, Authorization=KEY)[0] == 401
            assert ask(server, method, path, body, x_api_key=f"{KEY}x")[0] == 401
        assert ask(server, "GET", "/health")[0] == ask(server, "HEAD", "/")[0] == 200
        assert ask(server, "GET", "/v1/cache", Authorization=f"bearer  {KEY}")[0] == 200
        assert ask(server, "GET", "/v1/cache", x_api_key=KEY)[0] == 200
        assert ask(server, "OPTIONS", "/v1/messages")[0] == 204


def test_a_missing_key_is_told_in_the_shape_of_the_protocol(server: Client) -> None:
    base = f"http://127.0.0.1:{server.port}"
    with with_access(server, api_key=KEY):
        with pytest.raises(anthropic.AuthenticationError, match="Send the server's key") as theirs:
            anthropic.Anthropic(base_url=base, api_key="no", max_retries=0).messages.create(**CHAT)  # type: ignore[call-overload]
        assert theirs.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]
        gpt = openai.OpenAI(base_url=f"{base}/v1", api_key="no", max_retries=0)
        with pytest.raises(openai.AuthenticationError, match="API key is wrong") as other:
            gpt.chat.completions.create(**CHAT)  # type: ignore[call-overload]
        assert other.value.type == "authentication_error"
        assert (
            anthropic.Anthropic(base_url=base, api_key=KEY, max_retries=0)
            .messages.create(**CHAT)
            .content
        )  # type: ignore[call-overload]
        assert (
            openai.OpenAI(base_url=f"{base}/v1", api_key=KEY)
            .chat.completions.create(**CHAT)
            .choices
        )  # type: ignore[call-overload]


def test_the_key_is_never_told(
    server: Client, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with with_access(server, api_key=KEY), caplog.at_level(logging.DEBUG):
        answers = [
            ask(server, "POST", "/v1/chat/completions", CHAT, Authorization=f"Bearer {key}")
            for key in (KEY, "no")
        ]
        answers += [
            ask(server, "GET", path, x_api_key=KEY)
            for path in ("/v1/cache", "/admin/models", "/v1/cache/explain")
        ]
        shown = repr(server.generator.access.config)
    told = capfd.readouterr()
    assert KEY not in json.dumps(answers) + caplog.text + told.out + told.err + shown


def test_where_a_key_comes_from(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(f"{KEY}\n")
    assert (api_key("a", file, "c"), api_key(None, file, "c"), api_key(None, None, "c")) == (
        "a",
        KEY,
        "c",
    )
    assert api_key(None, None, None) is api_key(None, None, "") is None
    for given, path in (
        ("", None),
        ("tw\no", None),
        (" a", None),
        ("schlüssel", None),
        (None, tmp_path / "none"),
        (None, tmp_path),
    ):
        with pytest.raises(BlockpoolError):
            api_key(given, path, None)


# -- where it listens ------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", ""])
def test_other_machines_are_let_in_with_a_key_or_on_request_only(host: str) -> None:
    provider = BlockpoolModelProvider(parse(["--model", "demo", f"--host={host}"]))
    with pytest.raises(BlockpoolError, match=r"--api-key-file FILE .* leave --host at 127.0.0.1"):
        app.run(host, 0, provider)
    for options in (["--allow-remote"], ["--api-key", KEY]):
        AccessPolicy(access_config(parse([f"--host={host}", *options]))).check_bind()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.8.8.8", "::1"])
def test_this_machine_needs_no_key(host: str) -> None:
    AccessPolicy(AccessConfig(host)).check_bind()


def test_the_process_says_so_and_ends() -> None:
    ran = server_forks().run(SERVE, "--model", "demo", "--host", "0.0.0.0", "--port", "0")
    assert ran.returncode == 2
    assert "mlx-blockpool: error: --host 0.0.0.0 lets other machines in" in ran.stderr
    assert "Traceback" not in ran.stderr


# -- pages in browsers -----------------------------------------------------------------------------


def test_a_name_that_was_made_to_lead_here_is_refused(server: Client) -> None:
    for host in (
        "localhost",
        "localhost:8080",
        "127.0.0.1:1",
        "[::1]:8080",
        "LOCALHOST",
        "x.localhost",
        "127.0.0.1.",
    ):
        assert ask(server, "GET", "/v1/cache", Host=host)[0] == 200, host
    for host in (
        "evil.example",
        "evil.example:8080",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "192.0.2.1",
        "",
    ):
        status, answer = ask(server, "GET", "/health", Host=host)
        assert (status, "--allow-hosts" in message(answer)) == (403, True), host
    assert (
        raw(server, b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n")[0]
        == 403
    )
    assert raw(server, b"GET /health HTTP/1.0\r\n\r\n")[0] == 200
    with with_access(server, allowed_hosts=("mac.local",)):
        assert ask(server, "GET", "/health", Host="mac.local:8080")[0] == 200
        assert ask(server, "GET", "/health", Host="evil.example")[0] == 403
    with with_access(server, host="0.0.0.0", api_key=KEY):
        assert ask(server, "GET", "/v1/cache", Host="evil.example", x_api_key=KEY)[0] == 200
    with with_access(server, host="0.0.0.0", api_key=KEY, allowed_hosts=("mac.local",)):
        assert ask(server, "GET", "/v1/cache", Host="evil.example", x_api_key=KEY)[0] == 403


def test_pages_from_elsewhere(server: Client) -> None:
    """What mlx-lm has is for all, as its default says; what it has not is for pages of this
    machine, and for apps.
    """
    elsewhere, here = "https://evil.example", "http://localhost:3000"
    for origin in (elsewhere, "null", "http://127.0.0.1.evil.example"):
        for method, path, body in (
            ("GET", "/v1/cache/explain", None),
            ("POST", "/v1/messages", CHAT),
            ("POST", "/admin/unload", {}),
        ):
            status, answer = ask(server, method, path, body, Origin=origin)
            assert (status, "--allowed-origins" in message(answer)) == (403, True)
        assert ask(server, "POST", "/v1/chat/completions", CHAT, Origin=origin)[0] == 200
        assert ask(server, "OPTIONS", "/v1/messages", Origin=origin)[0] == 204
    for origin in (
        here,
        "https://127.0.0.1:1",
        "http://[::1]",
        "vscode-webview://abc",
        "app://obsidian.md",
    ):
        assert ask(server, "POST", "/v1/messages", CHAT, Origin=origin)[0] == 200, origin
    with with_access(server, allowed_origins=("https://chat.example",)):
        assert ask(server, "POST", "/v1/messages", CHAT, Origin="https://chat.example")[0] == 200
        assert ask(server, "POST", "/v1/chat/completions", CHAT, Origin=here)[0] == 200
        assert ask(server, "POST", "/v1/chat/completions", CHAT, Origin=elsewhere)[0] == 403
    for changes in ({"allowed_origins": ("*",)}, {"api_key": KEY}):
        with with_access(server, **changes):
            assert (
                ask(server, "POST", "/v1/messages", CHAT, Origin=elsewhere, x_api_key=KEY)[0] == 200
            )


def test_origins_of_the_options() -> None:
    found = [
        access_config(parse(options)).allowed_origins
        for options in ([], ["--allowed-origins", "*"], ["--allowed-origins=a,b"])
    ]
    assert found == [(), ("*",), ("a", "b")]
    assert [host_name(host) for host in ("A:1", "[::1]:1", "a.", " a ")] == ["a", "::1", "a", "a"]


def test_only_this_machine_and_schemes_of_apps_are_no_pages_from_elsewhere() -> None:
    for origin in (
        "http://[",
        "",
        "null",
        "https://localhost.:1",
        "file://",
        "file:///home/ann/page.html",
        "javascript:alert(1)",
        "javascript://localhost",
        "data:text/html,x",
        "blob:http://localhost/1",
        "about:blank",
        "ftp://localhost",
        "app:",
        "app://",
        "another://localhost",
        "HTTPS://evil.example",
    ):
        assert is_foreign(origin), origin
    for origin in (
        "http://localhost:3000",
        "http://tauri.localhost",
        "tauri://localhost",
        "app://obsidian.md",
        "vscode-webview://1gd2",
        "vscode-file://vscode-app",
        "chrome-extension://abcdef",
        "moz-extension://abc-def",
        "safari-web-extension://ABC",
        "capacitor://localhost",
    ):
        assert not is_foreign(origin), origin


# -- sizes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    ["/v1/chat/completions", "/v1/messages", "/v1/completions", "/v1/responses", "/admin/load"],
)
def test_a_body_that_is_too_large_is_413(server: Client, path: str) -> None:
    status, answer = ask(server, "POST", path, {"x": "y" * 8_000_000})
    assert (status, "--max-body" in message(answer)) == (413, True)
    assert (
        ask(server, "POST", "/v1/messages", {**CHAT, "stop_sequences": ["y" * 250] * 60})[0] == 200
    )


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ("Content-Length: -1", 400),
        ("Content-Length: +5", 400),
        ("Content-Length: five", 400),
        ("Content-Length: \N{ARABIC-INDIC DIGIT FIVE}", 400),
        ("Content-Length: 2, 2", 400),
        ("Content-Length: 2\r\nContent-Length: 3", 400),
        ("Content-Length: " + "9" * 30, 400),
        ("Content-Length: 999999999999", 413),
        ("X: y", 411),
        ("Transfer-Encoding: chunked", 411),
        ("Content-Length: 2\r\nTransfer-Encoding: chunked", 411),
    ],
)
def test_lengths_that_are_none(server: Client, header: str, status: int) -> None:
    for path, kind in (("/v1/chat/completions", "openai"), ("/v1/messages", "anthropic")):
        found, answer = raw(
            server, f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{header}\r\n\r\n".encode() + b"{}"
        )
        assert (found, answer.get("type")) == (status, "error" if kind == "anthropic" else None)
        assert message(answer)


@pytest.mark.parametrize(
    "line", ["Content-Length : 2", "Content-Length", "X y: 1", "From nobody", ": 1", "\x0c: 1"]
)
def test_a_line_that_is_no_header_does_not_hide_others(server: Client, line: str) -> None:
    """Behind such a line the parser reads nothing: a body would be the next request, and a
    foreign page one from here.
    """
    hidden = (
        "Origin: http://evil.example\r\nContent-Length: 2\r\n\r\n{}GET /health HTTP/1.1\r\n\r\n"
    )
    for before in ("", "Host: localhost\r\n"):
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
            connection.sendall(f"GET /v1/agents HTTP/1.1\r\n{before}{line}\r\n{hidden}".encode())
            content = b""
            while more := connection.recv(65536):
                content += more
        assert (content[:12], content.count(b"HTTP/1.1 ")) == (b"HTTP/1.1 400", 1)


def test_all_bodies_together_have_a_bound(server: Client) -> None:
    """What many send slowly or wait with stays within it; who asks meanwhile is told, and what
    has ended is given back.
    """
    with with_access(server, bodies=1, max_body_bytes=40_000):
        left = server.generator.access.bodies
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as slow:
            slow.sendall(
                b"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nContent-Length: 30000\r\n\r\n"
                + b"x" * 20_000
            )
            until(lambda: left.left != 40_000)
            status, answer = ask(server, "POST", "/v1/messages", {"x": "y" * 30_000})
            assert (status, "large requests" in message(answer)) == (503, True)
            assert (
                ask(server, "POST", "/v1/messages", CHAT)[0]
                == ask(server, "GET", "/health")[0]
                == 200
            )
        until(lambda: left.left >= 40_000)
        assert ask(server, "POST", "/v1/messages", {**CHAT, "x": "y" * 30_000})[0] == 200


def test_headers_that_are_too_many_or_too_long(server: Client) -> None:
    start = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
    many = b"".join(b"X-%d: y\r\n" % i for i in range(101))
    long = b"X-Long: " + b"y" * 70_000 + b"\r\n"
    several = b"".join(b"X-%d: %s\r\n" % (i, b"y" * 30_000) for i in range(3))
    for headers in (many, long, several):
        status, answer = raw(server, start + headers + b"\r\n")
        assert (status, bool(message(answer))) == (431, True)
    assert raw(server, b"GET /" + b"y" * 70_000 + b" HTTP/1.1\r\n\r\n")[0] == 414
    assert raw(server, b"BREW /health HTTP/1.1\r\nHost: localhost\r\n\r\n")[0] == 501
    assert raw(server, b"GET /health HTTP/9.9\r\n\r\n")[0] == 505
    assert raw(server, b"GET http://[ HTTP/1.1\r\nHost: localhost\r\n\r\n")[0] == 400
    assert ask(server, "GET", "/health")[0] == 200


# -- pace ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sent",
    [
        b"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nContent-",
        b"POST /v1/messages HTTP/1.1\r\nContent-Length: 9\r\n\r\n{",
    ],
)
def test_a_client_that_goes_silent_is_dropped(server: Client, sent: bytes) -> None:
    with with_access(server, stall_seconds=0.3):
        status, answer = raw(server, sent)
    assert (status, "in time" in message(answer)) == (408, True)
    wait_for_threads()


def test_a_client_that_drips_is_dropped(server: Client) -> None:
    """A byte now and then does not keep a thread for ever."""
    with (
        with_access(server, request_seconds=0.5),
        socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection,
    ):
        connection.sendall(b"POST /v1/messages HTTP/1.1\r\nContent-Length: 5000\r\n\r\n")
        connection.settimeout(0.05)
        content = b""
        while not content:
            connection.sendall(b"x")
            try:
                content = connection.recv(4096)
            except TimeoutError:
                continue
        assert content.startswith(b"HTTP/1.1 408")
    wait_for_threads()


def test_a_client_that_says_nothing_is_dropped(server: Client) -> None:
    with (
        with_access(server, stall_seconds=0.2),
        socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection,
    ):
        assert connection.recv(10) == b""
    wait_for_threads()


def test_a_client_that_does_not_read_its_stream_is_left(
    server: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    setup = BlockpoolHandler.setup

    def narrow(self: Any) -> None:
        self.request.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        setup(self)

    monkeypatch.setattr(BlockpoolHandler, "setup", narrow)
    eos = str(server.generator.model_provider.tokenizer.eos_token_id)
    body = json.dumps(
        {**CHAT, "max_tokens": 3000, "stream": True, "logit_bias": {eos: -1e4}}
    ).encode()
    with (
        with_access(server, send_seconds=0.3),
        socket.socket() as connection,
        caplog.at_level(logging.INFO),
    ):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: "
            f"{len(body)}\r\n\r\n"
        )
        connection.sendall(head.encode() + body)
        until(threads)
        wait_for_threads()
    assert "the client does not read its response" in caplog.text
    server.settle()


def test_too_many_connections_are_told_so(server: Client) -> None:
    with with_access(server, max_connections=1):
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as first:
            first.sendall(b"GET /health HTTP/1.1\r\n")
            until(lambda: not server.generator.access.connections._value)
            status, answer = ask(server, "POST", "/v1/chat/completions", CHAT)
            assert (status, "connections" in message(answer)) == (503, True)
        wait_for_threads()
        assert ask(server, "GET", "/health")[0] == 200


# -- names and paths -------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_names_that_none_can_have(server: Client, path: str) -> None:
    body = {**CHAT, "input": "x"} if path == "/v1/responses" else dict(CHAT)
    if path == "/v1/responses":
        body.pop("messages")
        body.pop("max_tokens")
        body["max_output_tokens"] = 1
    for name in ("a" * 257, "a\tb", "\x1b[31m"):
        status, answer = ask(server, "POST", path, body, X_Agent_Id=name)
        assert (status, "agent" in message(answer)) == (400, True)
    assert ask(server, "POST", path, body, X_Agent_Id="a" * 256)[0] == 200
    assert ask(server, "POST", path, body, X_Agent_Id="drei ✓".encode().decode("latin-1"))[0] == 200
    assert ask(server, "POST", path, body, X_Normalise="x" * 400)[0] == 400
    for model in ("m" * 2000, "a\x00b", "a\nb"):
        assert ask(server, "POST", path, {**body, "model": model})[0] == 404
    assert ask(server, "POST", path, {**body, "model": 7})[0] == 400


def test_paths_with_a_query_or_a_last_slash(server: Client) -> None:
    for path in (
        "/v1/cache/",
        "/v1/cache?x=1",
        "/health?x",
        "/health/",
        "/admin/models/?a=b",
        "/v1/models/?limit=2",
    ):
        assert ask(server, "GET", path)[0] == 200, path
    for path in (
        "/v1/chat/completions/",
        "/v1/chat/completions?beta=true",
        "/v1/messages/?beta=true",
        "/chat/completions?",
    ):
        assert ask(server, "POST", path, CHAT)[0] == 200, path
    assert ask(server, "POST", "/v1/completions/?x", {"prompt": "x", "max_tokens": 1})[0] == 200


def test_an_unexpected_error_is_one_line_without_our_folders(
    server: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any, **__: Any) -> Any:
        raise KeyError("/srv/us/secret/place.py is gone\nTraceback: more")

    monkeypatch.setattr("mlx_blockpool.server.endpoints.cache_report", failing)
    status, answer = ask(server, "GET", "/v1/cache")
    assert (status, answer["error"]) == (500, "KeyError: 'place.py is gone\\nTraceback: more'")
    assert (
        cause_of(OSError("open /a/b/c.txt, see http://x/y/z\nat line 2"))
        == "OSError: open c.txt, see http://x/y/z"
    )
    for text, needed in (
        ("'/home/a/[b]/secret/file.json'", "'file.json'"),
        ("[/a/b/c]", "[c]"),
        ("[load] /a/[b]", "[load] [b]"),
    ):
        assert cause_of(OSError(text)) == f"OSError: {needed}"
    advice = "see GET /v1/agents or POST /admin/load, not "
    assert cause_of(OSError(f"{advice}/a/b/c.txt")) == f"OSError: {advice}c.txt"


def test_text_of_names_and_headers() -> None:
    assert (header_text("drei âœ“"), header_text("Ã¼"), header_text("\xff")) == (
        "drei âœ“",
        "ü",
        "\xff",
    )
    assert checked_text("It", "ok ✓", 4) == "ok ✓"
    for text in ("12345", "a\u202e", "\ud800"):
        with pytest.raises(ValueError, match="It has"):
            checked_text("It", text, 4)


def test_headers_as_they_are_counted() -> None:
    headers = Message()
    for i in range(3):
        headers[f"X-{i}"] = "y"
    AccessPolicy(AccessConfig(max_header_bytes=12)).check("GET", "/health", headers)
    with pytest.raises(StatusError, match="12 bytes of headers; at most 11"):
        AccessPolicy(AccessConfig(max_header_bytes=11)).check("GET", "/health", headers)
