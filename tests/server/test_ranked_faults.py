"""A rank that is killed, hangs or fails: the others say so and end soon, and after the next
start agents go on from the disk.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import plistlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from documents import blocks, commands
from forks import Program, server_forks
from models import save_model
from ranks.rings import TURN, free_ports

from mlx_blockpool.server.ranked.ending import LOST
from server.processes import needs_proc, turn, written
from server.ranked import ring_server
from server.serving import at_once, blockpool_server, cached_tokens

pytestmark = [
    pytest.mark.server(model="endless"),
    pytest.mark.thorough,
    pytest.mark.xdist_group("ranks"),
    pytest.mark.timeout(180),
]

BIN = Path(sys.executable).parent
README = "mlx_blockpool/ranks/README.md"
AGENTS = 3
SYSTEM = "You are one of some agents, and all of them begin with this text. " * 12
# A rank is lost after three seconds.
BEFORE = """
from mlx_blockpool.config import ServerConfig
object.__setattr__(ServerConfig.ranks, "seconds", 3.0)
"""
# Once a file exists, a method does something else on one rank.
CHANGED = """
import os
from {module} import {owner}
def changed(method):
    def act(*args):
        if os.path.exists({trigger!r}):
            {act}
        return method(*args)
    return act
if {{rank}} == {rank}:
    {owner}.{method} = changed({owner}.{method})
"""
STEP = {"module": "mlx_blockpool.engine.decode", "owner": "DecodeBatch", "method": "run"}
TABLES = {"module": "mlx_blockpool.ranks.driver", "owner": "GroupDriver", "method": "fingerprint"}


class Group:
    """A running server of several ranks."""

    def __init__(self, port: int, ranks: list[Program]) -> None:
        self.port = port
        self.ranks = ranks


@contextmanager
def group(
    model: Path, store: Path, *options: str, before: str = "", size: int = 2
) -> Iterator[Group]:
    """A server of several ranks that has started; behind the block its ranks have ended."""
    with ring_server(
        model, "--store-dir", str(store), *options, size=size, before=f"{BEFORE}{before}"
    ) as (port, ranks):
        yield Group(port, ranks)


class Client(threading.Thread):
    """A client whose reply would take very long, and what it gets.

    `begun`: it has got something of its reply.
    """

    def __init__(self, port: int, streams: bool) -> None:
        super().__init__(daemon=True)
        self.port = port
        self.begun = threading.Event()
        self.text = ""
        self.streams = streams
        self.start()

    def run(self) -> None:
        body = {
            "messages": [{"role": "user", "content": "all"}],
            "max_tokens": 30_000,
            "temperature": 0,
            "stream": self.streams,
        }
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request("POST", "/v1/chat/completions", json.dumps(body))
            response = connection.getresponse()
            self.text = f"{response.status} "
            for line in response:
                self.text += line.decode()
                self.begun.set()
        except (OSError, http.client.HTTPException) as error:
            self.text += f"{type(error).__name__}"


@contextmanager
def under_load(port: int) -> Iterator[list[Client]]:
    """Two clients that wait for replies, one of them with the beginning of its own."""
    clients = [Client(port, False), Client(port, True)]
    assert clients[1].begun.wait(60)
    yield clients
    for client in clients:
        client.join(30)
        assert not client.is_alive()


def talk() -> list[list[dict[str, str]]]:
    return [[{"role": "system", "content": SYSTEM}] for _ in range(AGENTS)]


def turns(port: int, talks: list[list[dict[str, str]]], count: int) -> list[dict[str, Any]]:
    """So many turns of all agents; the usage of the last."""
    for _ in range(count):
        usage = at_once([lambda a=a: turn(port, talks[a], a) for a in range(AGENTS)])
    return usage


@pytest.fixture(scope="module")
def uninterrupted(model: Path) -> list[list[dict[str, str]]]:
    """Four turns of the agents on one rank."""
    talks = talk()
    with blockpool_server(model, "--pool-bytes", "60MB", "--no-store") as server:
        turns(server.port, talks, 4)
    return talks


# What happens to which rank: a signal, or a method that does something else.
SIGNALS = {
    "rank 0 is killed": (0, signal.SIGKILL),
    "rank 1 is killed": (1, signal.SIGKILL),
    "rank 1 hangs": (1, signal.SIGSTOP),
}
ERRORS = {
    "rank 0 has no memory": (0, {**STEP, "act": "raise MemoryError('no memory for a step')"}),
    "rank 1 fails": (1, {**STEP, "act": "raise RuntimeError('a step that fails')"}),
    "rank 1 disagrees": (1, {**TABLES, "act": "return 1"}),
}


def check_errors(clients: list[Client]) -> None:
    """Both clients were told why there is no reply, or no more of it."""
    whole, stream = (client.text for client in clients)
    assert whole.startswith("503 ")
    assert stream.startswith("200 ")
    for text in (whole, stream):
        assert "was lost" in text
        assert "send the request again" in text


@pytest.mark.parametrize("fault", SIGNALS)
def test_agents_go_on_after_a_rank_is_lost(
    fault: str, model: Path, uninterrupted: list[list[dict[str, str]]], tmp_path: Path
) -> None:
    rank, what = SIGNALS[fault]
    talks = talk()
    with group(model, tmp_path) as running:
        usage = turns(running.port, talks, 3)
        written(running.port)
        with under_load(running.port) as clients:
            running.ranks[rank].send_signal(what)
        assert running.ranks[1 - rank].wait(30) == LOST
        if what == signal.SIGSTOP:
            # One that goes on again has lost its group too.
            running.ranks[rank].send_signal(signal.SIGCONT)
            assert running.ranks[rank].wait(30) == LOST
    if rank:
        check_errors(clients)
    with group(model, tmp_path) as again:
        later = turns(again.port, talks, 1)
    assert talks == uninterrupted, "another reply than without the fault"
    for turn_before, turn_after in zip(usage, later, strict=True):
        cached = cached_tokens(turn_after)
        assert cached >= (turn_before["total_tokens"] - 1) // 256 * 256 > 0


@pytest.mark.parametrize("fault", ERRORS)
def test_a_rank_that_fails_by_itself_ends_all(fault: str, model: Path, tmp_path: Path) -> None:
    rank, what = ERRORS[fault]
    trigger = tmp_path / "trigger"
    with group(
        model, tmp_path, before=CHANGED.format(trigger=str(trigger), rank=rank, **what)
    ) as running:
        with under_load(running.port) as clients:
            trigger.touch()
        assert [each.wait(30) for each in running.ranks] == [LOST] * 2
    check_errors(clients)


def test_a_rank_of_three_is_killed(tmp_path: Path) -> None:
    """One of the others has no connection to it that it reads from."""
    heads = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}
    model = save_model(tmp_path / "model", "llama", **heads)
    with group(model, tmp_path / "store", size=3) as running:
        with under_load(running.port):
            running.ranks[2].kill()
        assert [running.ranks[rank].wait(30) for rank in (0, 1)] == [LOST] * 2


def test_a_stage_of_a_pipeline_is_killed(tmp_path: Path) -> None:
    """The one behind it has sent it what it computes, and is not told that this was never read."""
    model = save_model(tmp_path / "model", "qwen2")
    names = dict.fromkeys(mx.load(str(model / "model.safetensors")), "model.safetensors")
    (model / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": names})
    )
    with group(model, tmp_path / "store", "--pipeline") as running:
        with under_load(running.port):
            running.ranks[0].kill()
        assert running.ranks[1].wait(30) == LOST


def check_all_written(usage: list[dict[str, Any]], later: list[dict[str, Any]]) -> None:
    """The turns after a start read from disk what those before the end had cached, unfinished
    blocks too.
    """
    for before, after in zip(usage, later, strict=True):
        assert cached_tokens(after) >= 0.97 * (before["total_tokens"] - 1)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_one_rank_ends_all_in_order(rank: int, model: Path, tmp_path: Path) -> None:
    talks = talk()
    with group(model, tmp_path) as running:
        usage = turns(running.port, talks, 1)
        with under_load(running.port) as clients:
            running.ranks[rank].terminate()
        assert [each.wait(30) for each in running.ranks] == [0, 0]
    assert all("shutting down" in client.text for client in clients)
    with group(model, tmp_path) as again:
        later = turns(again.port, talks, 1)
    check_all_written(usage, later)


def processes_of(session: int) -> dict[int, tuple[int, str]]:
    """The processes of a session that have not ended, by their ids: their parents and command
    lines.
    """
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, parent, _, of, *_ = (folder / "stat").read_text().rpartition(") ")[2].split()
            if int(of) == session and state != "Z":
                found[int(folder.name)] = (
                    int(parent),
                    (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(),
                )
    return found


def ranks_of(session: int) -> list[int]:
    """The ranks that the launcher in a session has started, in order."""
    running = processes_of(session)
    (launcher,) = (
        pid
        for pid, (_, command) in running.items()
        if "mlx.launch" in command and "python" in command
    )
    return sorted(pid for pid, (parent, _) in running.items() if parent == launcher)


@needs_proc
def test_the_loop_of_the_readme_starts_the_server_again_and_ctrl_c_ends_everything(
    tmp_path: Path,
) -> None:
    (loop,) = (command for command in commands(README) if command.startswith("while"))
    first, port = free_ports(2)
    loop = loop.replace(".venv/bin", str(BIN)).replace("-n 2", f"-n 2 --starting-port {first}")
    loop = loop.replace("1GB", f"60MB --port {port} --store-dir {tmp_path}")
    pipes: dict[str, Any] = {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
        "text": True,
    }
    with (
        TURN.taken(),
        subprocess.Popen(["bash", "-c", loop], start_new_session=True, **pipes) as launched,
    ):
        session = launched.pid
        try:
            starts = (line for line in launched.stdout if "Starting httpd at" in line)
            next(starts)
            os.kill(ranks_of(session)[1], signal.SIGKILL)
            next(starts)
            turns(port, talk(), 1)
            os.killpg(session, signal.SIGINT)
            launched.communicate(timeout=30)
            while processes_of(session):
                time.sleep(0.05)
        finally:
            for pid in processes_of(session):
                os.kill(pid, signal.SIGKILL)


@needs_proc
def test_ranks_whose_launcher_is_killed_end_in_order(model: Path, tmp_path: Path) -> None:
    first, port = free_ports(2)
    launch = [
        BIN / "mlx.launch",
        "-n",
        "2",
        "--backend",
        "ring",
        "--starting-port",
        str(first),
        "--",
        BIN / "mlx-blockpool",
        "serve",
    ]
    options = [
        "--model",
        model,
        "--pool-bytes",
        "60MB",
        "--port",
        str(port),
        "--store-dir",
        tmp_path,
        "--measure",
        "off",
    ]
    pipes: dict[str, Any] = {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
        "text": True,
    }
    talks = talk()
    with (
        TURN.taken(),
        subprocess.Popen([*launch, *options], start_new_session=True, **pipes) as launcher,
    ):
        try:
            next(line for line in launcher.stdout if "Starting httpd at" in line)
            usage = turns(port, talks, 1)
            launcher.kill()
            while processes_of(launcher.pid):
                time.sleep(0.05)
        finally:
            for pid in processes_of(launcher.pid):
                os.kill(pid, signal.SIGKILL)
    with group(model, tmp_path) as again:
        later = turns(again.port, talks, 1)
    check_all_written(usage, later)


def test_a_service_on_each_machine_joins_the_others_as_the_readme_says(tmp_path: Path) -> None:
    (hosts,), (entries,) = (
        [json.loads(block) for block in blocks("json", README)],
        blocks("xml", README),
    )
    service = plistlib.loads(f"<plist><dict>{entries}</dict></plist>".encode())
    assert service["KeepAlive"] is True
    assert len(hosts) == 2
    file = tmp_path / "hosts.json"
    file.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(len(hosts))]))
    environment = service["EnvironmentVariables"] | {"MLX_HOSTFILE": str(file)}
    assert environment["MLX_RANK"] == "1"
    join = (
        "import os; os.environ.update({}); import mlx.core as mx; "
        "print(mx.distributed.init().rank(), 'joins')"
    )
    with TURN.taken(), contextlib.ExitStack() as started:
        codes = [join.format(environment | {"MLX_RANK": str(rank)}) for rank in range(len(hosts))]
        ranks = [started.enter_context(server_forks().start(code).ended()) for code in codes]
        for number, rank in enumerate(ranks):
            rank.read_until(f"{number} joins")
