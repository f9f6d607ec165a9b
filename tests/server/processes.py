"""Servers in processes of their own, and agents that talk to them."""

from __future__ import annotations

import json
import os
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from forks import Program, server_forks

from server.serving import text_of

# The server's main(), with the options that follow.
SERVE = "import sys; from mlx_blockpool.server.app import main; main(sys.argv[1:])"
needs_proc = pytest.mark.skipif(
    not Path("/proc/self/net/tcp").exists(), reason="the port of another process is read from /proc"
)


@contextmanager
def process(
    model: Path, store: Path, *options: str, before: str = ""
) -> Iterator[tuple[int, Program]]:
    """A server process of its own, which runs the statements `before` first, and its port."""
    arguments = [
        "--model",
        str(model),
        "--port",
        "0",
        "--pool-bytes",
        "60MB",
        "--store-dir",
        str(store),
        "--measure",
        "off",
    ]
    with server_forks().start(f"{before}\n{SERVE}", *arguments, *options).ended() as started:
        started.read_until("Starting httpd at")
        yield port_of(started.pid), started


def port_of(pid: int) -> int:
    """The TCP port that a process listens on."""
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        # A file may be closed while the list is read.
        with suppress(FileNotFoundError):
            if (link := os.readlink(fd)).startswith("socket:["):
                inodes.add(link[8:-1])
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and fields[9] in inodes:
            return int(fields[1].split(":")[1], 16)
    raise AssertionError("it listens on no port")


def send(port: int, path: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(
        urllib.request.Request(f"http://127.0.0.1:{port}{path}", data), timeout=60
    ) as response:
        return json.loads(response.read())


def turn(port: int, messages: list[dict[str, str]], agent: int, **more: Any) -> dict[str, Any]:
    """One turn of an agent: its question and the answer join its messages, or neither does.

    `more` goes into the body.
    """
    asked = [
        *messages,
        {"role": "user", "content": f"Agent {agent} asks for the {len(messages)}th time. "},
    ]
    answer = send(port, "/v1/chat/completions", {"messages": asked, "max_tokens": 16, **more})
    messages[:] = [*asked, {"role": "assistant", "content": text_of(answer)}]
    return answer["usage"]  # type: ignore[no-any-return]


def written(port: int) -> None:
    """Return once the store has nothing left to write."""
    while True:
        store = send(port, "/v1/cache")["store"]
        if store["pending"] == 0 and store["queued_bytes"] == 0 and store.get("written", 0) > 0:
            return
        # Each request is a line in a pipe that nobody reads.
        time.sleep(0.1)
