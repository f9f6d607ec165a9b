"""mlx-blockpool top: what it shows of a running server, in words, in a terminal, and of a server that does not answer."""

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
from rich.console import Console, ConsoleDimensions
from server.serving import Client, blockpool_server

from mlx_blockpool.cli import main
from mlx_blockpool.commands import top_screen
from mlx_blockpool.commands.top import Requests, api_key, events
from mlx_blockpool.errors import BlockpoolError


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    model = save_model(tmp_path_factory.mktemp("top") / "model", "llama")
    with blockpool_server(model, "--pool-bytes", "20MB", "--api-key", "secret") as running:
        chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
        for agent in ("ann", "bob"):
            status, _ = running.send("/v1/chat/completions", chat, headers={"X-Agent-Id": agent, "x-api-key": "secret"})
            assert status == 200
        yield running


@pytest.fixture
def arguments(server: Client, tmp_path: Path) -> list[str]:
    (tmp_path / "key").write_text("# of the server\nsecret\n")
    return ["top", "--url", f"http://127.0.0.1:{server.port}", "--api-key-file", str(tmp_path / "key")]


FACTS: dict[str, Any] = {
    "health": {"status": "ok", "doing": "prefill and decode"},
    "cache": {
        "array_bytes": 3_000_000, "pool_bytes": 4_000_000, "alarm": None,
        "kv_bits": {"keys": 8, "values": 4, "group_size": 64},
        "groups": [{"group": "full x4", "total": 100, "held": 1, "pinned": 20, "evictable": 29, "free": 50}],
        "store": {"bytes": 1000, "store_bytes": 10_000, "problem": "the disk\nis full"},
        "engine": {"decode_steps": 1234, "tokens": 99, "swapped_out": 2},
        "drafts": {"drafted": 2000, "accepted": 1500},
    },
    "agents": {"agents": [
        {"name": name, "shown": name, "used": used, "running": running, "waiting": 0, "pinned": name == "ann",
         "pinned_in_memory": False, "tokens": 300, "tokens_in_memory": 256, "tokens_on_disk": 44,
         "memory": {"own_bytes": 5000, "shared_bytes": 0}}
        for name, used, running in (("ann", "1", 0), ("[red]", "2", 0), ("old", "0", 1))
    ]},
    "models": {
        "models": [{"id": "demo", "state": "loaded", "failure": None}, {"id": "big", "state": "available", "failure": "no room"}],
        "change": {"stage": "draining", "unload": "demo", "load": "big"},
    },
    "hour": {
        "minutes": [{"cached_tokens": 30, "prompt_tokens": 40, "ttft": {"median": 0.5, "p95": 1.25}}],
        "agents": {"ann": {"cached_tokens": 3, "prompt_tokens": 4}},
    },
    "last": {"requests": [{"time": "2026-01-02T03:04:05.6+00:00", "agent": "ann", "prompt_tokens": 8, "cached_tokens": 4,
                           "why": "4 of 8 tokens cached"}]},
    "requests": [{"id": "req_1", "agent": None, "model": "demo", "state": "prefill", "since": 0.0, "done": 10, "total": 2000}],
}  # fmt: skip


def test_no_text_of_a_server_changes_the_terminal() -> None:
    evil = "\x1b]0;title\x07\x9b31m\u202e"
    facts = {
        **FACTS,
        "health": {"status": evil, "doing": evil},
        "agents": {"agents": [{**agent, "shown": f":smile: {evil}"} for agent in FACTS["agents"]["agents"]]},
        "last": {"requests": [{**FACTS["last"]["requests"][0], "agent": evil, "why": evil}]},
        "models": {"models": [{"id": evil, "state": "loaded", "failure": evil}], "change": None},
        "requests": [{**FACTS["requests"][0], "agent": evil, "model": evil}],
    }
    out = io.StringIO()
    Console(file=out, width=200).print(top_screen.screen(facts, "http://h", ConsoleDimensions(200, 60), evil))
    shown = out.getvalue()
    assert shown.replace("\n", "").isprintable()
    assert (shown.count(r"\x1b]0;title"), ":smile:" in shown) == (13, True)


def test_the_words_have_every_fact() -> None:
    words = top_screen.text(FACTS, "http://h")
    for part in (
        "mlx-blockpool  demo  http://h  ok, prefill and decode",
        "! The store is not written: the disk is full",
        "! big: no room",
        "changing models: draining, demo -> big",
        "3.0 MB of 4.0 MB, 8-bit keys and 4-bit values",
        "75 % of 40 prompt tokens reused; first token after 0.50 s, 1.25 s at the 95th percentile",
        "1,234 steps, 99 tokens, 2 preempted, 75 % of 2,000 drafted tokens accepted",
        "1 held, 20 pinned, 29 cached, 50 free: full x4",
        "10 of 2,000",
        "03:04:05 ann",
    ):
        assert part in words
    rows = [line.split()[0] for line in words.splitlines() if "300" in line]
    assert rows == ["old", "[red]", "ann"]
    (ann,) = [line.split() for line in words.splitlines() if line.startswith("ann")]
    assert ann[-3:] == ["75", "%", "pin"]


def test_a_bar_shows_every_state_that_there_is() -> None:
    (line,) = [line for line in top_screen.text(FACTS, "http://h").splitlines() if line.startswith("blocks")]
    assert (line.count(top_screen.FULL), line.count(top_screen.EMPTY)) == (21, 19)


@pytest.mark.parametrize("height", [8, 12, 16, 24, 50])
def test_the_screen_fits_into_the_terminal(height: int) -> None:
    agents = [{**FACTS["agents"]["agents"][0], "name": f"a{i}", "shown": f"a{i}"} for i in range(40)]
    facts = {**FACTS, "agents": {"agents": agents}, "requests": FACTS["requests"] * 9}
    with open(os.devnull, "w") as out:
        console = Console(file=out, width=60, height=height)
        lines = console.render_lines(top_screen.screen(facts, "http://h", ConsoleDimensions(60, height), "gone"))
    assert len(lines) <= max(height, 12)


def test_requests_follow_the_events() -> None:
    requests = Requests()

    def after(kind: str, **fields: Any) -> list[tuple[str, int, int]]:
        requests.apply({"kind": kind, "time": 1.0, "model": "m", "id": "a", **fields})
        return [(each["state"], each["done"], each["total"]) for each in requests.running.values()]

    assert after("request_progress", done=1, total=2) == []
    assert after("request_begun", agent="ann", prompt_tokens=100) == [("waiting", 0, 100)]
    assert after("restore_begun", tokens=50, bytes=1) == [("from disk", 0, 100)]
    assert after("request_started", cached_tokens=40) == [("prefill", 40, 100)]
    assert after("request_progress", done=90, total=100) == [("prefill", 90, 100)]
    assert after("request_progress", done=100, total=100) == [("reply", 100, 100)]
    assert after("swapped_out") == [("swapped out", 100, 100)]
    assert after("model_loaded", id="") == [("swapped out", 100, 100)]
    assert after("swapped_in") == [("reply", 100, 100)]
    assert after("swapped_out") == [("swapped out", 100, 100)]
    assert after("all_cleared", id="") == [("swapped out", 100, 100)]
    assert after("request_ended") == []
    after("request_begun", agent="ann", prompt_tokens=100)
    assert after("request_started", cached_tokens=99) == [("reply", 99, 100)], "nothing of it is left to be computed"
    assert after("gap", id="", lost=3) == []
    assert list(events([b": hello\n", b"event: x\n", b'data: {"kind": "gap"}\n', b"\n"])) == [{"kind": "gap"}]


def test_once_and_as_json(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments, "--once"]) == 0
    words = capsys.readouterr().out
    assert "mlx-blockpool  model" in words
    assert {line.split()[0] for line in words.splitlines() if line.startswith(("ann ", "bob "))} == {"ann", "bob"}
    assert main([*arguments, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert {agent["name"] for agent in facts["agents"]["agents"]} == {"ann", "bob"}
    assert facts["cache"]["pool_bytes"] == 20_000_000
    assert len(facts["hour"]["minutes"]) >= 1


def test_in_a_terminal_it_shows_agents_until_q_is_typed(arguments: list[str]) -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 90, 0, 0))
    command = [sys.executable, "-m", "mlx_blockpool.cli", *arguments, "--seconds", "0.1"]
    env = {**os.environ, "TERM": "xterm-256color"}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, env=env, start_new_session=True)
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
        ("nonsense", "nonsense is no URL"),
        ("http://127.0.0.1:{port}", "rejects the key. Give --api-key-file"),
    ],
)
def test_a_server_that_does_not_answer_is_said(
    url: str, says: str, server: Client, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLX_BLOCKPOOL_API_KEY", raising=False)
    assert main(["top", "--once", "--url", url.format(port=server.port)]) == 1
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        (404, b"<html>", "/health: Expecting value"),
        (200, b"[1]", "/health: the answer is no JSON object"),
        (200, b"[" * 100_000, "/health: maximum recursion depth"),
        (200, json.dumps({"store": 3, "models": 3}).encode(), "does not answer as this version"),
        (200, json.dumps({"array_bytes": 10**400}).encode(), "does not answer as this version"),
    ],
)
def test_another_program_at_the_url_is_said(status: int, body: bytes, says: str, capsys: pytest.CaptureFixture[str]) -> None:
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
            assert main(["top", "--once", "--url", f"http://127.0.0.1:{other.server_port}"]) == 1
        finally:
            other.shutdown()
    assert says in capsys.readouterr().err


def test_the_key_is_that_of_the_file_or_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_BLOCKPOOL_API_KEY", "of the environment")
    assert api_key(None) == "of the environment"
    (tmp_path / "one").write_text("secret\n")
    (tmp_path / "several").write_text("# keys\n\nann:first\nbob:second\n")
    (tmp_path / "none").write_text("# nothing\n")
    assert (api_key(tmp_path / "one"), api_key(tmp_path / "several")) == ("secret", "first")
    for name in ("none", "missing"):
        with pytest.raises(BlockpoolError, match="Give a text file with the server's key"):
            api_key(tmp_path / name)
