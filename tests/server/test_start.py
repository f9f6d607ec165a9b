"""Starting and stopping a server process: what goes wrong is said in one line, and nothing
hangs.
"""

from __future__ import annotations

import signal
import socket

import pytest
from forks import server_forks

COMMAND = "import sys; from mlx_blockpool.cli import main; sys.exit(main())"


def test_a_port_in_use_is_said_and_ends_the_process() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ran = server_forks().run(
            COMMAND, "serve", "--model", "demo", "--port", str(port), "--measure", "off"
        )
    assert ran.returncode == 1
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
        assert process.wait(timeout=60) == 1
        assert process.stderr is not None
        assert (
            process.stderr.read().splitlines()[-1]
            == f"mlx-blockpool: --port must be between 0 and 65535 (got {port})"
        )


def test_a_model_that_is_not_there_is_said_and_ends_the_process() -> None:
    ran = server_forks().run(COMMAND, "serve", "--model", "/no/such/model")
    assert ran.returncode == 1
    assert "mlx-blockpool: Cannot serve /no/such/model" in ran.stderr
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
