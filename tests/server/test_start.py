"""Starting and stopping a server process: what goes wrong is said in one line, and nothing
hangs.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys

import pytest
from forks import server_forks

from mlx_blockpool.server.http import find_routes
from server.processes import needs_proc

COMMAND = "import sys; from mlx_blockpool.cli import main; sys.exit(main())"


def test_a_port_in_use_is_said_and_ends_the_process() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ran = server_forks().run(
            COMMAND, "serve", "--model", "demo", "--port", str(port), "--measure", "off"
        )
    assert ran.returncode == 2
    assert f"Cannot listen on 127.0.0.1, port {port}" in ran.stderr
    assert "Traceback" not in ran.stderr
    # Before anything is loaded.
    assert "loaded" not in ran.stderr


@pytest.mark.parametrize("port", ["99999", "65536", "-1"])
def test_a_number_that_is_not_a_port_is_refused(port: str) -> None:
    """getaddrinfo() takes it modulo 65536: the server listened on another port."""
    with (
        server_forks().start(COMMAND, "serve", "--model", "demo", "--port", port).ended() as process
    ):
        assert process.wait(timeout=60) == 2
        assert process.stderr is not None
        assert (
            process.stderr.read().splitlines()[-1]
            == f"mlx-blockpool: error: --port must be between 0 and 65535 (got {port})"
        )


def test_a_model_that_is_not_there_is_said_and_ends_the_process() -> None:
    ran = server_forks().run(COMMAND, "serve", "--model", "/no/such/model")
    assert ran.returncode == 2
    assert "mlx-blockpool: error: Cannot serve /no/such/model" in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize("which", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_whether_it_loads_or_serves(which: signal.Signals) -> None:
    with (
        server_forks().start(COMMAND, "serve", "--model", "demo", "--port", "0").ended() as process
    ):
        assert process.stderr is not None
        # The first line comes while the server starts, whichever that is.
        process.stderr.readline()
        process.send_signal(which)
        assert process.wait(timeout=60) == 0


def test_a_start_imports_no_protocol_and_the_first_request_for_one_does() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", "import sys, mlx_blockpool.server.app; print(*sys.modules)"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    late = {"pydantic", "prometheus_client", "mlx_blockpool.server.api.completions"}
    assert late.isdisjoint(ran.stdout.split())
    find_routes()
    assert late <= set(sys.modules)


@needs_proc
def test_prompt_workers_are_forks_of_the_server_and_hold_no_file_of_it() -> None:
    ran = server_forks().run("""
import os
from mlx_blockpool.server.prompts import workers
workers._start = None
held = open("/etc/hosts")
workers.fork_server().fork()
worker = workers.fork_server().connect()
folder = f"/proc/{worker.recv()}/fd"
print(len(os.listdir(folder)), "/etc/hosts" in map(os.path.realpath, os.scandir(folder)))
""")
    # Its standard files and its connection.
    assert ran.stdout == "4 False\n"
