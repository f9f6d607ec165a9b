"""A server that is asked to stop ends soon, whatever hangs; one that hangs by itself ends with a status."""

from __future__ import annotations

import http.client
import json
import signal
import threading
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from forks import Program, server_forks
from models import save_endless
from thorough import only

from mlx_blockpool.config import EngineConfig
from mlx_blockpool.server.health import HUNG, Watchdog
from server.processes import needs_proc, port_of

# What hangs, as code that runs in the server's process before it starts.
HANGS = {
    "an engine that waits": """
from mlx_blockpool.engine.engine import BlockPoolBatchEngine
BlockPoolBatchEngine.next = lambda self: hang()
""",
    "an engine that lets no other thread run": """
import ctypes
from mlx_blockpool.engine.engine import BlockPoolBatchEngine
BlockPoolBatchEngine.next = lambda self: (said(), ctypes.PyDLL(None).sleep(3600))
""",
    "a store that does not close": """
from mlx_blockpool.tier.cache import TieredPrefixCache
from mlx_blockpool.engine.engine import BlockPoolBatchEngine
TieredPrefixCache.close = lambda self: hang()
step = BlockPoolBatchEngine.next
BlockPoolBatchEngine.next = lambda self: (said(), step(self))[1]
""",
    "a model that loads": """
from mlx_blockpool.server.models.provider import BlockpoolModelProvider
BlockpoolModelProvider.prepare = lambda self, key: hang()
""",
}
PROGRAM = """
import os, sys, threading
def said():
    os.write(2, b"it hangs\\n")
def hang():
    said()
    threading.Event().wait()
from mlx_blockpool.config import EngineConfig
EngineConfig.exit_seconds = {}
from mlx_blockpool.server import app
{}
app.main(sys.argv[1:])
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_endless(tmp_path_factory.mktemp("model"))


def server(model: Path, code: str, exit_seconds: float = EngineConfig.exit_seconds) -> AbstractContextManager[Program]:
    arguments = ["--model", str(model), "--port", "0", "--pool-bytes", "60MB", "--no-store"]
    return server_forks().start(PROGRAM.format(exit_seconds, code), *arguments).ended()


def ask(process: Program, answers: list[Any]) -> threading.Thread:
    """A whole reply that takes long, asked for by a thread; what came of it."""

    def wait() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port_of(process.pid), timeout=60)
        try:
            connection.request("POST", "/v1/messages", json.dumps(BODY))
            answers.append(connection.getresponse().status)
        except (OSError, http.client.HTTPException) as error:
            answers.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


BODY = {"model": "default_model", "messages": [{"role": "user", "content": "all"}], "max_tokens": 30_000, "temperature": 0}


@needs_proc
@pytest.mark.parametrize("what", only(HANGS, "an engine that lets no other thread run", "a store that does not close"))
def test_a_server_that_is_asked_to_stop_ends_whatever_hangs(model: Path, what: str) -> None:
    """Without the end that is forced it would hang for ever."""
    with server(model, HANGS[what], 1.0) as process:
        thread = None
        if what != "a model that loads":
            process.read_until("Starting httpd at")
            thread = ask(process, [])
        process.read_until("it hangs")
        process.send_signal(signal.SIGTERM)
        status = process.wait(timeout=60)
        # What is being loaded has nothing to save: that is left in order.
        assert status in ([-signal.SIGKILL] if "no other thread" in what else [0, 1] if "loads" in what else [1])
        if thread is not None:
            thread.join()


@needs_proc
def test_clients_of_a_server_that_stops_are_told_so(model: Path) -> None:
    code = """
from mlx_blockpool.engine.engine import BlockPoolBatchEngine
step = BlockPoolBatchEngine.next
BlockPoolBatchEngine.next = lambda self: (said(), step(self))[1]
"""
    answers: list[Any] = []
    with server(model, code) as process:
        process.read_until("Starting httpd at")
        thread = ask(process, answers)
        process.read_until("it hangs")
        process.send_signal(signal.SIGTERM)
        # What it says must not fill the pipe.
        assert process.stderr is not None
        process.stderr.read()
        assert process.wait(timeout=60) == 0
        thread.join()
    assert answers == [503]


def test_the_watchdog_ends_what_has_hung_for_long_enough_and_nothing_else() -> None:
    stalled = [0.0]
    ended: list[int] = []
    watchdog = Watchdog(lambda: stalled[0], EngineConfig.end_seconds, ended.append)
    watchdog.look()
    stalled[0] = EngineConfig.end_seconds
    watchdog.look()
    assert ended == []
    stalled[0] += 1
    watchdog.look()
    assert ended == [HUNG]
