"""mlx-blockpool top: what it shows of a running server, in words, in a terminal, and of a server
that does not answer.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from models import save_model
from rich.console import Console
from server.serving import Client, blockpool_server

from mlx_blockpool.cli import main
from mlx_blockpool.commands import top_screen
from mlx_blockpool.commands.top import Server, api_key
from mlx_blockpool.errors import BlockpoolError


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    model = save_model(tmp_path_factory.mktemp("top") / "model", "llama")
    with blockpool_server(model, "--pool-bytes", "20MB", "--api-key", "secret") as running:
        chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
        for agent in ("ann", "bob"):
            status, _ = running.send(
                "/v1/chat/completions", chat, headers={"X-Agent-Id": agent, "x-api-key": "secret"}
            )
            assert status == 200
        yield running


@pytest.fixture
def arguments(server: Client, tmp_path: Path) -> list[str]:
    (tmp_path / "key").write_text("# of the server\nsecret\n")
    return [
        "top",
        "--url",
        f"http://127.0.0.1:{server.port}",
        "--api-key-file",
        str(tmp_path / "key"),
    ]


FACTS: dict[str, Any] = {
    "health": {"status": "ok", "doing": "prefill and decode"},
    "cache": {
        "used_bytes": 3_000_000,
        "array_bytes": 3_900_000,
        "pool_bytes": 4_000_000,
        "alarm": None,
        "memory": {
            "total_bytes": 16_000_000,
            "active_bytes": 12_000_000,
            "cache_bytes": 0,
            "weights_bytes": 8_000_000,
        },
        "seconds_saved": {"since_start": 90.0, "since_installation": 1234.5},
        "kv_bits": {"keys": 8, "values": 4, "group_size": 64},
        "groups": [
            {"group": "full x4", "total": 100, "held": 1, "pinned": 20, "evictable": 29, "free": 50}
        ],
        "store": {"bytes": 1000, "store_bytes": 10_000, "problem": "the disk\nis full"},
        "engine": {"decode_steps": 1234, "tokens": 99, "swapped_out": 2},
        "drafts": {"drafted": 2000, "accepted": 1500},
    },
    "agents": {
        "agents": [
            {
                "name": name,
                "shown": name,
                "used": used,
                "running": running,
                "waiting": 0,
                "pinned": name == "ann",
                "pinned_in_memory": False,
                "tokens": 300,
                "tokens_in_memory": 256,
                "tokens_on_disk": 44,
                "memory": {"own_bytes": 5000, "shared_bytes": 0},
            }
            for name, used, running in (("ann", "1", 0), ("[red]", "2", 0), ("old", "0", 1))
        ]
    },
    "models": {
        "models": [
            {"id": "demo", "state": "loaded", "failure": None},
            {"id": "big", "state": "available", "failure": "no room"},
        ],
        "change": {"stage": "draining", "unload": "demo", "load": "big"},
    },
    "hour": {
        "minutes": [
            {"cached_tokens": 30, "prompt_tokens": 40, "ttft": {"median": 0.5, "p95": 1.25}}
        ],
        "agents": {"ann": {"cached_tokens": 3, "prompt_tokens": 4}},
    },
    "last": {
        "requests": [
            {
                "time": "2026-01-02T03:04:05.6+00:00",
                "agent": "ann",
                "prompt_tokens": 8,
                "cached_tokens": 4,
                "why": "4 of 8 tokens cached",
            }
        ]
    },
    "requests": [
        {
            "agent": None,
            "model": "demo",
            "state": "prefill",
            "prompt": 2000,
            "cached": 0,
            "done": 10,
            "generated": 7,
            "most": 9,
            "seconds": 3.4,
        }
    ],
}


def test_no_text_of_a_server_changes_the_terminal() -> None:
    evil = "\x1b]0;title\x07\x9b31m\u202e"
    facts = {
        **FACTS,
        "health": {"status": evil, "doing": evil},
        "agents": {
            "agents": [{**agent, "shown": f":smile: {evil}"} for agent in FACTS["agents"]["agents"]]
        },
        "last": {"requests": [{**FACTS["last"]["requests"][0], "agent": evil, "why": evil}]},
        "models": {"models": [{"id": evil, "state": "loaded", "failure": evil}], "change": None},
        "requests": [{**FACTS["requests"][0], "agent": evil, "model": evil}],
    }
    out = io.StringIO()
    Console(file=out, width=200).print(top_screen.screen(facts, "http://h", 200, 100, evil))
    shown = out.getvalue()
    assert shown.replace("\n", "").isprintable()
    assert (shown.count(r"\x1b]0;title"), ":smile:" in shown) == (13, True)


def test_the_words_have_every_fact() -> None:
    words = top_screen.text(FACTS, "http://h")
    for part in (
        "mlx-blockpool  demo  http://h  ok, prefill and decode",
        "! The prompt store does not work: the disk is full",
        "! big: no room",
        "changing models: draining, demo -> big",
        "12.0 MB of 16.0 MB, 8.0 MB of weights",
        "3.0 MB of 4.0 MB, 8-bit keys and 4-bit values",
        "90.0 s of prefill since the start, 1,234.5 s since installation",
        "75 % of 40 prompt tokens reused; first token after 0.50 s, 1.25 s at the 95th percentile",
        "1,234 steps, 99 tokens, 2 preempted, 75 % of 2,000 drafted tokens accepted",
        "1 held, 20 pinned, 29 cached, 50 free: full x4",
        "demo   prefill, 3 s  10 of 2,000      7",
        "03:04:05 ann",
    ):
        assert part in words
    rows = [line.split()[0] for line in words.splitlines() if "300" in line]
    assert rows == ["old", "[red]", "ann"]
    (ann,) = [line.split() for line in words.splitlines() if line.startswith("ann")]
    assert ann[-3:] == ["75", "%", "pin"]


def test_a_bar_shows_every_state_that_there_is() -> None:
    (line,) = [
        line
        for line in top_screen.text(FACTS, "http://h").splitlines()
        if line.startswith("blocks")
    ]
    assert (line.count(top_screen.FULL), line.count(top_screen.EMPTY)) == (50, 50)


@pytest.mark.parametrize("height", [8, 12, 16, 24, 50])
def test_the_screen_fits_into_the_terminal(height: int) -> None:
    agents = [
        {**FACTS["agents"]["agents"][0], "name": f"a{i}", "shown": f"a{i}"} for i in range(40)
    ]
    facts = {**FACTS, "agents": {"agents": agents}, "requests": FACTS["requests"] * 9}
    out = io.StringIO()
    Console(file=out, width=60, height=height).print(
        top_screen.screen(facts, "http://h", 60, height, "gone")
    )
    # The lines above the tables are always shown.
    assert len(out.getvalue().splitlines()) <= max(height, 13)


def test_a_terminal_of_24_lines_shows_the_first_rows_of_each_table() -> None:
    agents = [
        {**FACTS["agents"]["agents"][0], "name": f"a{i}", "shown": f"a{i}"} for i in range(10)
    ]
    last = {"requests": FACTS["last"]["requests"] * 10}
    facts = {
        **FACTS,
        "agents": {"agents": agents},
        "requests": FACTS["requests"] * 8,
        "last": last,
        "models": {},
    }
    out = io.StringIO()
    Console(file=out, width=100).print(top_screen.screen(facts, "http://h", 100, 24, ""))
    shown = out.getvalue()
    for title in ("requests (2 of 8)", "agents (2 of 10)", "last requests (2 of 10)"):
        assert title in shown
    assert ("a1 " in shown, "a2 " in shown) == (True, False)


def test_the_screen_waits_for_an_answer_less_long_than_the_first_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited: list[float] = []

    def hangs(opener: object, request: object, timeout: float) -> None:
        waited.append(timeout)
        raise TimeoutError("timed out")

    monkeypatch.setattr("urllib.request.OpenerDirector.open", hangs)
    server = Server("http://h", None)
    with pytest.raises(BlockpoolError):
        server.read()
    # The second pause ends the loop.
    pauses = iter([None])
    monkeypatch.setattr("time.sleep", lambda seconds: next(pauses))
    with pytest.raises(StopIteration):
        server.poll(1.0)
    assert len(waited) == 2
    assert waited[1] < waited[0]
    assert "timed out" in server.problem


def test_once_and_as_json(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments, "--once"]) == 0
    words = capsys.readouterr().out
    assert "mlx-blockpool  model" in words
    assert {
        line.split()[0] for line in words.splitlines() if line.startswith(("ann ", "bob "))
    } == {"ann", "bob"}
    assert main([*arguments, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert {agent["name"] for agent in facts["agents"]["agents"]} == {"ann", "bob"}
    assert facts["cache"]["pool_bytes"] == 20_000_000
    assert len(facts["hour"]["minutes"]) >= 1
    assert facts["requests"] == []


def test_in_a_terminal_it_shows_agents_until_q_is_typed(arguments: list[str]) -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 90, 0, 0))
    command = [sys.executable, "-m", "mlx_blockpool.cli", *arguments, "--seconds", "0.1"]
    env = {**os.environ, "TERM": "xterm-256color"}
    process = subprocess.Popen(
        command,
        stdin=theirs,
        stdout=theirs,
        stderr=subprocess.PIPE,
        env=env,
        start_new_session=True,
    )
    os.close(theirs)
    shown = b""
    while b"last requests" not in shown:
        shown += os.read(ours, 65536)
    assert b"ann" in shown
    assert b"\x1b[?1049h" in shown
    os.write(ours, b"q")
    left = b""
    while b"2 agents" not in left:
        left += os.read(ours, 65536)
    assert b"\x1b[?1049l" in left
    assert process.wait(timeout=60) == 0
    os.close(ours)
    assert process.stderr is not None
    assert process.stderr.read() == b""
    process.stderr.close()


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://127.0.0.1:1", "Start the server, or give --url another one"),
        ("mailto://me", "unknown url type"),
        ("http://127.0.0.1:99999", "--url must be a URL with a port between 1 and 65535"),
        ("http://127.0.0.1:0", "(got http://127.0.0.1:0)"),
        ("http://[::1", "(got http://[::1)"),
        ("http://127.0.0.1:{port}", "rejects the key. Give --api-key-file"),
    ],
)
def test_a_server_that_does_not_answer_is_said(
    url: str,
    says: str,
    server: Client,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("MLX_BLOCKPOOL_API_KEY", raising=False)
    assert main(["top", "--once", "--url", url.format(port=server.port)]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        (404, b"<html>", "/health: Expecting value"),
        (200, b"[1]", "/health: the answer is not a JSON object"),
        (200, b"[" * 100_000, "/health: maximum recursion depth"),
        (200, json.dumps({"store": 3, "models": 3}).encode(), "does not answer as this version"),
        (200, json.dumps({"used_bytes": 10**400}).encode(), "does not answer as this version"),
    ],
)
def test_another_program_at_the_url_is_said(
    status: int, body: bytes, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    class Another(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Another) as other:
        threading.Thread(target=other.serve_forever, args=[0.01], daemon=True).start()
        try:
            assert main(["top", "--once", "--url", f"http://127.0.0.1:{other.server_port}"]) == 2
        finally:
            other.shutdown()
    assert says in capsys.readouterr().err


def test_the_key_is_that_of_the_file_or_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_BLOCKPOOL_API_KEY", "of the environment")
    assert api_key(None) == "of the environment"
    (tmp_path / "one").write_text("secret\n")
    (tmp_path / "several").write_text("# keys\n\nann:first\nbob:second\n")
    (tmp_path / "admins").write_text("ann:first\nbob:sec:ond:admin\ncarl:third:admin\n")
    (tmp_path / "none").write_text("# nothing\n")
    found = [api_key(tmp_path / name) for name in ("one", "several", "admins")]
    assert found == ["secret", "first", "sec:ond"]
    for name in ("none", "missing"):
        with pytest.raises(BlockpoolError, match="Give a text file with the server's key"):
            api_key(tmp_path / name)
