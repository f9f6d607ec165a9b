"""Programs in processes of their own without their imports each time: forks of a process that has
imported much.

A program is what `python -c code arguments...` runs. It has its own output, environment, signals
and exit status, as one that subprocess.Popen starts, and starts in milliseconds where an import of
mlx-lm takes more than a second of the processor.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

# What `mlx-blockpool serve` imports, and pytest with the plugin's checks.
IMPORTS = (
    "import mlx_lm.server, mlx_blockpool.cli, mlx_blockpool.server.app, "
    "mlx_blockpool.testing.checks, pytest"
)
# Where the process of server_forks() takes orders.
ADDRESS = "BLOCKPOOL_TEST_FORKS"
# Forks prompt workers for a connection to an address.
PROMPT_WORKERS = """
import socket, sys
from mlx_blockpool.server.prompts.worker import main
control = socket.socket(socket.AF_UNIX)
control.connect(sys.argv[1])
main(control.detach(), "fork")
"""
# An id or a status on its way here.
NUMBER = struct.Struct("<i")


class Program:
    """A running program, with what tests use of subprocess.Popen.

    `stderr`: None if it goes into a file.
    """

    def __init__(self, status: socket.socket, stderr: TextIO | None = None) -> None:
        self._status = status
        self.stderr = stderr
        self.returncode: int | None = None
        self.pid = _received(status)

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._status.settimeout(timeout)
            self.returncode = _received(self._status)
            self._status.close()
        return self.returncode

    def read_until(self, text: str) -> None:
        """Read its stderr up to a line with this text."""
        assert self.stderr is not None
        lines = []
        for line in self.stderr:
            lines.append(line)
            if text in line:
                return
        raise AssertionError(f"it ended without {text!r}: {''.join(lines)}")

    def send_signal(self, which: int) -> None:
        # Another thread may be waiting.
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, which)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    @contextlib.contextmanager
    def ended(self) -> Iterator[Program]:
        """The program; behind the block it has ended."""
        try:
            yield self
        finally:
            self.kill()
            self.wait()
            if self.stderr is not None:
                self.stderr.close()


class Forks:
    """Orders for programs, to a process that forks them. `folder`: where they run."""

    def __init__(self, address: str, folder: Path | None = None, **environment: str) -> None:
        self._control = socket.socket(socket.AF_UNIX)
        self._control.connect(address)
        self._folder = folder or Path.cwd()
        self._environment = environment

    def start(self, code: str, *arguments: str) -> Program:
        """Start a program; what it prints and its errors are its `stderr`."""
        read, write = os.pipe()
        with os.fdopen(write, "w") as theirs:
            status = self._fork(code, arguments, self._folder, theirs, theirs)
        return Program(status, os.fdopen(read))

    def run(
        self, code: str, *arguments: str, folder: Path | None = None, timeout: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """Run a program to its end."""
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            program = Program(self._fork(code, arguments, folder or self._folder, out, err))
            status = program.wait(timeout)
            for file in (out, err):
                file.seek(0)
            return subprocess.CompletedProcess([code, *arguments], status, out.read(), err.read())

    def leave(self, code: str, *arguments: str) -> None:
        """Start a program that ends by itself and says nothing."""
        with open(os.devnull, "w") as out:
            self._fork(code, arguments, self._folder, out, out).close()

    def _fork(
        self, code: str, arguments: tuple[str, ...], folder: Path, out: TextIO, err: TextIO
    ) -> socket.socket:
        status, theirs = socket.socketpair()
        order = {
            "code": code,
            "arguments": arguments,
            "folder": str(folder),
            "env": {**os.environ, **self._environment},
        }
        with theirs:
            data = json.dumps(order).encode() + b"\n"
            socket.send_fds(self._control, [data], [out.fileno(), err.fileno(), theirs.fileno()])
        return status

    def close(self) -> None:
        """Give no more orders. The programs continue."""
        self._control.close()


@contextlib.contextmanager
def taking_orders(imports: str, folder: Path, **environment: str) -> Iterator[str]:
    """The address of a process that has run the statements `imports`.

    It ends with the block, and its programs continue.
    """
    with tempfile.TemporaryDirectory() as own, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{own}/forks")
        # Orders wait until it has imported everything.
        listener.listen()
        code = f"""
{imports}
import sys
sys.path.append({str(Path(__file__).parent)!r})
from forks import fork_programs
sys.path.pop()
fork_programs({listener.fileno()})
"""
        command, env = [sys.executable, "-c", code], {**os.environ, **environment}
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, pass_fds=[listener.fileno()], env=env, cwd=folder
        )
        try:
            yield listener.getsockname()
        finally:
            process.communicate()


@contextlib.contextmanager
def forks(imports: str, folder: Path, **environment: str) -> Iterator[Forks]:
    """Forks of a process that nobody else uses."""
    with (
        taking_orders(imports, folder, **environment) as address,
        contextlib.closing(Forks(address, folder, **environment)) as found,
    ):
        yield found


def share_forks() -> None:
    """Start the process of server_forks(), for this process and those that it starts from now
    on.
    """
    started = contextlib.ExitStack()
    os.environ[ADDRESS] = started.enter_context(taking_orders(IMPORTS, Path.cwd()))
    atexit.register(started.close)


@functools.cache
def server_forks() -> Forks:
    """Forks of a process that has imported the server: one for all tests of a run."""
    if ADDRESS not in os.environ:
        share_forks()
    return Forks(os.environ[ADDRESS])


def fork_prompt_workers() -> socket.socket:
    """The connection to a process that forks prompt workers, as a server starts one, and that
    ends when it is closed.
    """
    with tempfile.TemporaryDirectory() as own, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{own}/workers")
        listener.listen()
        listener.settimeout(60)
        server_forks().leave(PROMPT_WORKERS, listener.getsockname())
        return listener.accept()[0]


def fork_programs(descriptor: int) -> None:
    """Fork a program for each order, until the standard input ends."""
    listener = socket.socket(fileno=descriptor)
    controls: list[socket.socket] = []
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    # A collection would look through all that was imported, and copy it.
    gc.freeze()
    # numpy has threads, which no program uses before its own.
    warnings.simplefilter("ignore", DeprecationWarning)
    while True:
        ready = select.select([0, listener, *controls], [], [])[0]
        if 0 in ready:
            return
        if listener in ready:
            controls.append(listener.accept()[0])
        for control in [each for each in controls if each in ready]:
            if not _fork_program(control, [listener, *controls]):
                control.close()
                controls.remove(control)


def _fork_program(control: socket.socket, not_its: list[socket.socket]) -> bool:
    """Fork what one order asks for. False: there will be no more."""
    data, descriptors, _, _ = socket.recv_fds(control, 1 << 16, 3)
    if not data:
        return False
    out, err, status = descriptors
    while not data.endswith(b"\n"):
        data += control.recv(1 << 16)
    if os.fork() == 0:
        for each in not_its:
            each.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _fork_watched(status)
        for number, file in ((0, os.open(os.devnull, os.O_RDONLY)), (1, out), (2, err)):
            os.dup2(file, number)
            os.close(file)
        _run_program(**json.loads(data))
    for each in descriptors:
        os.close(each)
    return True


def _run_program(code: str, arguments: list[str], folder: str, env: dict[str, str]) -> None:
    """Run it, and end without the ends of the modules that were imported before."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    sys.argv[1:] = arguments
    status: Any = 0
    try:
        exec(code, {"__name__": "__main__"})
    except SystemExit as end:
        status = end.code or 0
    except BaseException:
        traceback.print_exc()
        status = 1
    if not isinstance(status, int):
        print(status, file=sys.stderr)
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _fork_watched(status: int) -> None:
    """Fork once more and return in the child.

    The parent sends its id, and its exit status as Popen has it.
    """
    pid = os.fork()
    if pid == 0:
        os.close(status)
        return
    # Nobody may wait for it.
    with socket.socket(fileno=status) as theirs, contextlib.suppress(BrokenPipeError):
        theirs.send(NUMBER.pack(pid))
        theirs.send(NUMBER.pack(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
    os._exit(0)


def _received(status: socket.socket) -> int:
    return int(NUMBER.unpack(status.recv(NUMBER.size, socket.MSG_WAITALL))[0])
