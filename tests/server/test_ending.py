"""A server that is asked to stop ends soon, whatever hangs; one that hangs, or has lost its
group, ends with a status.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from forks import Program, server_forks
from store.disks import QuickDisk
from store.records import make_buffers, make_record
from thorough import only

from mlx_blockpool.config import EngineConfig, RankConfig, ServerConfig, StoreConfig
from mlx_blockpool.errors import DisagreeError, GroupLostError
from mlx_blockpool.ranks.group import ALONE
from mlx_blockpool.ranks.head import Head
from mlx_blockpool.server.api.errors import STATUSES
from mlx_blockpool.server.health import HUNG, Watchdog
from mlx_blockpool.server.ranked.ending import LOST, Loss, RankLauncher
from mlx_blockpool.server.ranked.leader import Leader
from mlx_blockpool.server.ranked.replica import Replica
from mlx_blockpool.store.prompt_store import PromptStore
from server.processes import SERVE, needs_proc, port_of

pytestmark = pytest.mark.server(model="endless")

# What hangs, as code that runs in the server's process before it starts.
HANGS = {
    "an engine that waits": """
from mlx_blockpool.engine.engine import BlockPoolBatchEngine
BlockPoolBatchEngine.next = lambda self: hang()
""",
    "a store that does not close": """
from mlx_blockpool.tier.cache import TieredPrefixCache
from mlx_blockpool.engine.engine import BlockPoolBatchEngine
TieredPrefixCache.close = lambda self: hang()
step = BlockPoolBatchEngine.next
BlockPoolBatchEngine.next = lambda self: (said(), step(self))[1]
""",
    "a model that loads": """
from mlx_blockpool.server.provider import BlockpoolModelProvider
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


def server(
    model: Path, code: str, exit_seconds: float = EngineConfig.exit_seconds
) -> AbstractContextManager[Program]:
    arguments = [
        "--model",
        str(model),
        "--port",
        "0",
        "--pool-bytes",
        "60MB",
        "--no-store",
        "--measure",
        "off",
    ]
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


BODY = {
    "model": "default_model",
    "messages": [{"role": "user", "content": "all"}],
    "max_tokens": 30_000,
    "temperature": 0,
}


@needs_proc
@pytest.mark.parametrize("what", only(HANGS, "a store that does not close"))
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
        assert status in ([0, 1] if "loads" in what else [1])
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


# The places of its threads go to a pipe that is full, or nowhere.
UNREAD = """
os.set_blocking(2, False)
try:
    while True:
        os.write(2, b"x" * 4096)
except BlockingIOError:
    os.set_blocking(2, True)
"""
CLOSED = """
os.close(2)
sys.stderr = None
"""
HANGING = """
import os, signal, sys, threading
from mlx_blockpool.server.ending import end_on_signals
{}
begun = threading.Event()
end_on_signals(0.1, begun.set)
try:
    os.kill(os.getpid(), signal.SIGTERM)
except RuntimeError:
    os._exit(2)
assert begun.wait()
threading.Event().wait()
"""


@pytest.mark.parametrize("where", [UNREAD, CLOSED])
def test_a_process_whose_log_nobody_reads_ends_as_soon(where: str) -> None:
    with server_forks().start(HANGING.format(where)).ended() as process:
        assert process.wait(timeout=60) == 1


# A rank without requests: it ends in order with its first turn after a signal.
FOLLOWER = """
import os, signal, sys, time
from mlx_blockpool.server.ending import end_on_signals
{}
stop = []
end_on_signals(60, lambda: stop.append(True))
{}
os.write(2, b"it follows\\n")
# The handler runs in this thread, which may hold no lock that it takes.
while not stop:
    time.sleep(0.01)
{}
"""
# Signals that come before the turn in which the rank ends.
MORE = "os.kill(os.getpid(), signal.{})"


@pytest.mark.parametrize(
    ("which", "more", "status"),
    [
        ("SIGINT", "", 0),
        ("SIGTERM", "", 0),
        ("SIGHUP", "SIGTERM", 0),
        ("SIGINT", "SIGHUP", 0),
        ("SIGHUP", "SIGHUP", 0),
        ("SIGTERM", "SIGTERM", 1),
    ],
)
def test_a_rank_ends_in_order_on_a_signal_and_the_ends_of_its_launcher_and_of_ssh_are_one(
    which: str, more: str, status: int
) -> None:
    with (
        server_forks()
        .start(FOLLOWER.format("", "", MORE.format(more) if more else ""))
        .ended() as rank
    ):
        rank.read_until("it follows")
        rank.send_signal(signal.Signals[which])
        assert rank.wait(timeout=60) == status


def test_a_rank_that_nohup_has_started_outlives_its_terminal() -> None:
    ignored, hung_up = (
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)",
        "os.kill(os.getpid(), signal.SIGHUP); assert not stop",
    )
    with server_forks().start(FOLLOWER.format(ignored, hung_up, "")).ended() as rank:
        rank.read_until("it follows")


# A launcher that starts a rank as mlx.launch does, and this rank.
LAUNCHES = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdin=subprocess.PIPE).wait()
"""
LAUNCHED = """
import os, signal
from mlx_blockpool.server.ranked import ending
ending.LAUNCHER_SECONDS = 0.01
signal.signal(signal.SIGTERM, lambda *_: os.write(2, b"it was told to end\\n"))
# It ends also where nobody tells it to.
signal.alarm(60)
ending.RankLauncher().watch()
os.write(2, b"it runs\\n")
signal.pause()
"""


def test_a_rank_whose_launcher_is_killed_ends_as_after_a_signal() -> None:
    with server_forks().start(LAUNCHES, LAUNCHED).ended() as launcher:
        launcher.read_until("it runs")
        launcher.kill()
        launcher.read_until("it was told to end")


def test_a_rank_outlives_a_parent_that_is_no_launcher() -> None:
    """As a terminal, a service, or a shell that has started it with nohup: none of them gives it
    a pipe.
    """
    parents = [7]
    read, write = os.pipe()
    null = os.open(os.devnull, os.O_RDONLY)
    closed = os.dup(null)
    os.close(closed)
    found = [RankLauncher(lambda: parents[-1], each) for each in (read, null, closed)]
    assert [each.is_gone for each in found] == [False] * 3
    parents.append(1)
    assert [each.is_gone for each in found] == [True, False, False]
    for each in (read, write, null):
        os.close(each)


class Left(BaseException):
    """The process would have ended with this status."""


def leaving(events: list[Any]) -> Callable[[int], None]:
    def leave(status: int) -> None:
        events.append(status)
        raise Left(status)

    return leave


ERROR = GroupLostError(1)


class GatedDisk(QuickDisk):
    """Begins no file while the gate is closed."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()

    def create(self, path: Path) -> int:
        assert self.gate.wait(30)
        return super().create(path)


def test_a_rank_that_has_lost_its_group_answers_its_clients_and_writes_what_waits_for_the_writer(
    tmp_path: Path,
) -> None:
    disk, events = GatedDisk(), list[Any]()
    store = PromptStore(StoreConfig(tmp_path, min_free_bytes=0), "a model", {}, disk)
    store.open()
    disk.gate.clear()
    records = [make_record((number, number + 1)) for number in range(3)]
    for record in records:
        store.write(record, lambda record=record: make_buffers(record))

    def fail(error: Exception) -> None:
        # The clients know it before the disk is waited for.
        events.append(error)
        disk.gate.set()

    loss = Loss(
        lambda: events.append("no collective"),
        lambda: [store],
        30,
        fail,
        lambda: events.append("answered"),
        end_process=leaving(events),
    )
    with pytest.raises(Left):
        loss.end(ERROR)
    assert events == ["no collective", ERROR, "answered", LOST]
    assert len([path for path in store.root.rglob("*") if path.suffix == ".safetensors"]) == len(
        records
    )
    store.close()


def test_the_log_of_a_lost_rank_has_the_error_that_it_was_lost_by(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def compute() -> None:
        raise MemoryError("no memory for a step")

    with pytest.raises(MemoryError) as caught:
        compute()
    with pytest.raises(Left):
        Loss(lambda: None, list, 1, end_process=leaving([])).end(caught.value)
    assert "in compute" in caplog.text
    assert "no memory for a step" in caplog.text


def test_clients_are_told_to_send_the_request_again_whatever_the_group_was_lost_by() -> None:
    errors: list[Exception] = []
    with pytest.raises(Left):
        Loss(lambda: None, list, 1, errors.append, end_process=leaving([])).end(
            DisagreeError("The ranks disagree.")
        )
    assert next(statuses for kind, *statuses in STATUSES if isinstance(errors[0], kind)) == [
        503,
        503,
    ]
    assert "The ranks disagree." in str(errors[0])
    assert "send the request again" in str(errors[0])


def test_no_error_on_the_way_keeps_a_lost_rank_from_its_end() -> None:
    events: list[Any] = []

    def fails(*_: Any) -> None:
        events.append("failed")
        raise RuntimeError("this fails too")

    with pytest.raises(Left):
        Loss(fails, fails, 1, fails, fails, end_process=leaving(events)).end(ERROR)
    assert events == ["failed"] * 4 + [LOST]


def test_a_lost_rank_ends_whatever_hangs_and_only_once() -> None:
    hangs, ended = threading.Event(), threading.Event()
    events: list[int] = []

    def leave(status: int) -> None:
        events.append(status)
        ended.set()

    loss = Loss(lambda: None, list, 0, lambda error: hangs.wait(), grace=0, end_process=leave)
    for _ in range(2):
        # The thread that computes and the watchdog.
        threading.Thread(target=loss.end, args=[ERROR], daemon=True).start()
    assert ended.wait(30)
    assert events == [LOST]


JOINS = """
import os, sys
os.environ.update(MLX_RANK="1", MLX_HOSTFILE=sys.argv.pop(1))
"""


def test_a_rank_that_cannot_join_the_others_says_what_to_do(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts.json"
    hosts.write_text("no hosts")
    ran = server_forks().run(f"{JOINS}{SERVE}", str(hosts), "--model", "demo")
    assert ran.returncode == 2
    assert ran.stderr.startswith("mlx-blockpool: error: The other ranks cannot be reached: ")
    assert "Start every rank, with the same file of hosts." in ran.stderr


def test_rank_0_stops_in_order_where_another_rank_has_ended_before() -> None:
    replica: Any = SimpleNamespace(exchange=Mock(side_effect=GroupLostError(1)), agree=Mock())
    loss = Loss(lambda: None, list, 0, end_process=leaving([]))
    leader = Leader(replica, RankConfig(), loss)
    leader.begin()
    leader.end()
    assert replica.exchange.call_count == 1


def test_ranks_that_disagree_at_the_stop_end_as_at_any_other_time() -> None:
    replica: Any = SimpleNamespace(
        exchange=Mock(side_effect=DisagreeError("The ranks have come to different results."))
    )
    ended: list[int] = []
    leader = Leader(replica, RankConfig(), Loss(lambda: None, list, 0, end_process=ended.append))
    replica.agree = Mock()
    leader.begin()
    leader.end()
    assert ended == [LOST]


def test_only_the_first_exchange_may_take_as_long_as_a_load() -> None:
    """Also while no model is loaded, as after the idle ones were unloaded, a rank that hangs is
    noticed soon.
    """
    registry: Any = SimpleNamespace(loaded={}, catalog=None)
    turn_watchdog = Mock()
    replica = Replica(ALONE, registry, ServerConfig(), turn_watchdog)
    for _ in range(2):
        replica.exchange(Head())
    assert [call.args for call in turn_watchdog.begin.call_args_list] == [
        ("an exchange", 600.0),
        ("an exchange", None),
    ]
