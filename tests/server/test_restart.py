"""Agents go on where they were, after a kill -9 and after a clean stop: real processes, real files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from models import save_model

from server.serving import at_once, blockpool_server, stock_server

AGENTS = 5
SYSTEM = "You are one of five agents, and all of them begin with this text. " * 12


@contextmanager
def process(model: Path, store: Path) -> Iterator[tuple[int, subprocess.Popen[str]]]:
    """A server process of its own, and its port."""
    arguments = ["--model", str(model), "--port", "0", "--pool-bytes", "60MB", "--store-dir", str(store)]
    code = "import os, sys; from mlx_lm import server; from mlx_blockpool.server.app import main; main(sys.argv[1:])"
    started = subprocess.Popen([sys.executable, "-c", code, *arguments], stderr=subprocess.PIPE, text=True)
    assert started.stderr is not None
    lines: list[str] = []
    for line in started.stderr:
        lines.append(line)
        if "Starting httpd at" in line:
            break
    assert "Starting httpd at" in "".join(lines), lines
    try:
        yield port_of(started.pid), started
    finally:
        if started.poll() is None:
            started.kill()
        started.stderr.close()
        started.wait()


def port_of(pid: int) -> int:
    """The TCP port that a process listens on."""
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        if (link := os.readlink(fd)).startswith("socket:["):
            inodes.add(link[8:-1])
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and fields[9] in inodes:
            return int(fields[1].split(":")[1], 16)
    raise AssertionError("it listens on no port")


def send(port: int, path: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{port}{path}", data), timeout=60) as response:
        return json.loads(response.read())


def turn(port: int, messages: list[dict[str, str]], agent: int) -> dict[str, Any]:
    """One turn of an agent: its question and the answer join its messages."""
    messages.append({"role": "user", "content": f"Agent {agent} asks for the {len(messages)}th time. "})
    answer = send(port, "/v1/chat/completions", {"messages": messages, "max_tokens": 16})
    messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
    return answer["usage"]  # type: ignore[no-any-return]


def written(port: int) -> None:
    """Return once the store has nothing left to write."""
    while True:
        store = send(port, "/v1/cache")["store"]
        if store["pending"] == 0 and store["queued_bytes"] == 0 and store["written"] > 0:
            return


@pytest.mark.parametrize("ending", ["kill -9", "SIGTERM"])
@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="the port of another process is read from /proc")
def test_agents_go_on_after_a_restart(ending: str, tmp_path: Path) -> None:
    model = save_model(tmp_path / "llama", "llama")
    expected = [[{"role": "system", "content": SYSTEM}] for _ in range(AGENTS)]
    with stock_server(model) as stock:
        for _ in range(4):
            at_once([lambda a=a: turn(stock.port, expected[a], a) for a in range(AGENTS)])
    talks = [[{"role": "system", "content": SYSTEM}] for _ in range(AGENTS)]
    with process(model, tmp_path / "store") as (port, server):
        for _ in range(3):
            usage = at_once([lambda a=a: turn(port, talks[a], a) for a in range(AGENTS)])
        if ending == "kill -9":
            written(port)
            server.kill()
        else:
            server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=60) == (-signal.SIGKILL if ending == "kill -9" else 0)
    with process(model, tmp_path / "store") as (port, _):
        later = at_once([lambda a=a: turn(port, talks[a], a) for a in range(AGENTS)])
    assert talks == expected, "another reply than without a restart"
    for before, after in zip(usage, later, strict=True):
        # What a finished block held; a clean stop has written the unfinished ones too.
        held = before["total_tokens"] - 1
        needed = held // 256 * 256 if ending == "kill -9" else 0.98 * held
        assert after["prompt_tokens_details"]["cached_tokens"] >= needed


def test_a_stored_prefix_is_not_that_of_other_weights(tmp_path: Path) -> None:
    one, two = save_model(tmp_path / "one", "llama"), save_model(tmp_path / "two", "llama", seed=7)
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Who are you?"}]
    stored = ("--pool-bytes", "60MB", "--store-dir", str(tmp_path / "store"))
    with blockpool_server(one, *stored) as first:
        first.chat(messages, max_tokens=4)
    with blockpool_server(two, *stored) as second:
        assert second.chat(messages, max_tokens=4)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    (tmp_path / "one").rename(tmp_path / "moved")
    with blockpool_server(tmp_path / "moved", *stored) as third:
        usage = third.chat(messages, max_tokens=4)["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1
        third.settle()
