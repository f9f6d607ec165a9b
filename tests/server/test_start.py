"""Starting and stopping the real process: what goes wrong is said in one line, and nothing hangs."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys

import pytest

COMMAND = [sys.executable, "-m", "mlx_blockpool.cli", "serve"]


def test_a_port_in_use_is_said_and_ends_the_process() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ran = subprocess.run([*COMMAND, "--model", "demo", "--port", str(port)], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 1
    assert f"Cannot listen on 127.0.0.1, port {port}" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_a_model_that_is_not_there_is_said_and_ends_the_process() -> None:
    ran = subprocess.run([*COMMAND, "--model", "/no/such/model"], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 1
    assert "mlx-blockpool: Cannot serve /no/such/model" in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize("which", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_whether_it_loads_or_serves(which: signal.Signals) -> None:
    arguments = [*COMMAND, "--model", "demo", "--port", "0"]
    # A shell that runs the tests in the background has them, and what they start, ignore SIGINT.
    process = subprocess.Popen(
        arguments, stderr=subprocess.PIPE, text=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler)
    )
    assert process.stderr is not None
    # The first line comes while the server starts, whichever that is.
    process.stderr.readline()
    process.send_signal(which)
    assert process.wait(timeout=60) == 0
