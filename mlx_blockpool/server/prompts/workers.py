"""PromptWorkers: worker processes render prompts, small and large ones at the same time. For any
thread.

A worker that takes too long or too much memory, or ends, is replaced; the jobs of others continue.
Workers hold tokenizers and no other state.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from queue import LifoQueue

from ...config import PromptConfig
from ...errors import PromptError, TooManyRequestsError, UnavailableError
from ..bodies import UNCHECKED_BYTES
from .job import (
    Job,
    OutOfTimeError,
    PreparedPrompt,
    PromptJob,
    Result,
    TokenizerJob,
    TokenizerResult,
    TokenizerSource,
)
from .worker import main

# A job fails after this many times its seconds if its worker gets no time on the processor.
PATIENCE = 10
LOOK_SECONDS = 0.1
# On macOS libraries that have used the system's services do not survive a fork.
FORKS = sys.platform != "darwin"


class ForkServer:
    """A process that has imported what workers need, and forks one in milliseconds."""

    def __init__(self) -> None:
        self._changing = threading.Lock()
        self._control: socket.socket | None = None

    def start(self) -> None:
        """Have it import what workers need, unless it does so already."""
        with self._changing:
            self._started()

    def _started(self) -> socket.socket:
        if self._control is None:
            self._control = _start("fork")
        return self._control

    def fork(self) -> None:
        """Fork it from this process, which has no threads and has imported what workers need."""
        # Loading a tokenizer imports what all configs of models need; workers share that.
        importlib.import_module("transformers.models.llama.configuration_llama")
        ours, theirs = socket.socketpair()
        process = os.fork()
        if process == 0:
            # As in a process of subprocess: it holds no file of this one.
            control = os.dup2(theirs.detach(), 3)
            os.closerange(control + 1, os.sysconf("SC_OPEN_MAX"))
            main(control, "fork")
        theirs.close()
        self._control = ours
        _reap(functools.partial(os.waitpid, process, 0))

    def connect(self) -> Connection:
        """A connection to a new worker."""
        ours, theirs = socket.socketpair()
        with theirs, self._changing:
            for _ in range(2):
                control = self._started()
                with contextlib.suppress(OSError):
                    socket.send_fds(control, [b"w"], [theirs.fileno()])
                    break
                # It was ended from outside.
                self._control = None
        return Connection(ours.detach())


def _start(mode: str) -> socket.socket:
    """A process of the worker's module.

    It ends when this socket closes, which it does however this process ends.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        # The same modules as in this process, and nothing from the working directory.
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            f"from mlx_blockpool.server.prompts.worker import main; main({theirs.fileno()}, "
            f"{mode!r})"
        )
        # The server has logged what libraries log when they start.
        environment = {**os.environ, "TRANSFORMERS_VERBOSITY": "error"}
        command = [sys.executable, "-c", code]
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=environment
        )
    _reap(process.wait)
    return ours


def _reap(wait: Callable[[], object]) -> None:
    """Have a thread wait for the end of a process, which would stay a zombie."""
    threading.Thread(target=wait, name="prompt-worker-end", daemon=True).start()


@functools.cache
def fork_server() -> ForkServer:
    """The fork server of this process, which all its servers share."""
    return ForkServer()


def packed(job: Job) -> bytes:
    """A job for the pipe, whose size decides which worker it waits for."""
    return pickle.dumps(job, pickle.HIGHEST_PROTOCOL)


class PromptWorker:
    """A worker process, started for its first job and again after it has ended. run() is called
    by one thread at a time.
    """

    def __init__(self) -> None:
        self._connection: Connection | None = None
        self._pid: int | None = None
        self._running = threading.Lock()
        self._closed = False

    def run(self, data: bytes, seconds: float, config: PromptConfig) -> Result:
        """The result of a packed job, which may take this many seconds of the processor.

        The process is ended by a job that takes too long or too much memory. Raises the error of
        the job: OutOfTimeError, PromptError or RequestTooLargeError, and UnavailableError after
        close().
        """
        if self._closed:
            raise UnavailableError("The server is shutting down.")
        # The process may have ended since its last job; a fresh one is ended by this job.
        for _ in range(2):
            with self._running:
                try:
                    result = self._result(data, seconds, config)
                except (EOFError, OSError):
                    self._forget()
                    continue
            if isinstance(result, BaseException):
                raise result
            return result
        if self._closed:
            raise UnavailableError("The server is shutting down.")
        raise PromptError(
            f"The process that rendered the prompt ended twice: it needs more than {seconds:g} "
            "seconds or "
            f"{config.memory_bytes:,} bytes of memory, or breaks the tokenizer."
        )

    def _result(self, data: bytes, seconds: float, config: PromptConfig) -> Result | BaseException:
        """What the process sends. Raises EOFError and OSError where it has ended."""
        if self._connection is None and not self._closed:
            self._connection = (
                fork_server().connect() if FORKS else Connection(_start("serve").detach())
            )
            if not self._connection.poll(config.start_seconds):
                raise EOFError
            self._pid = self._connection.recv()
        if self._closed or self._connection is None:
            self._forget()
            return UnavailableError("The server is shutting down.")
        assert self._pid is not None
        self._connection.send((config, seconds))
        self._connection.send_bytes(data)
        until = time.monotonic() + PATIENCE * seconds + config.load_seconds
        while not self._connection.poll(LOOK_SECONDS):
            if time.monotonic() > until:
                self._end()
                return OutOfTimeError()
            if resident_bytes(self._pid) > config.memory_bytes:
                self._end()
                return PromptError(
                    f"The prompt needs more than {config.memory_bytes:,} bytes of memory to be "
                    "rendered."
                )
        return self._connection.recv()  # type: ignore[no-any-return]

    def _end(self) -> None:
        """End the process and its connection: a result that is in the pipe already must not
        become that of the next job.
        """
        self.kill()
        self._forget()

    def _forget(self) -> None:
        """Let go of a process that has ended, or is about to."""
        if self._connection is not None:
            self._connection.close()
        self._connection = self._pid = None

    def kill(self) -> None:
        """End the process during a job. Any thread may call this."""
        if (pid := self._pid) is not None:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        """End the process for good, whether a job runs or not. Any thread may call this."""
        self._closed = True
        if self._running.acquire(blocking=False):
            # It is idle, and ends with its connection.
            self._forget()
            self._running.release()
        else:
            self.kill()


def resident_bytes(pid: int) -> int:
    """Memory of a process; 0 where the system does not say."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        if sys.platform != "darwin":
            return 0
    found = subprocess.run(
        ["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True, check=False
    ).stdout.strip()
    return int(found) * 1024 if found.isdecimal() else 0


class Lane:
    """Workers for jobs of one kind, and the jobs that wait for one.

    most_bytes: the most bytes of the jobs that wait or run; None for no limit. A job that is alone
    in the lane may have more.
    """

    def __init__(
        self, workers: int, seconds: float, config: PromptConfig, most_bytes: int | None = None
    ) -> None:
        self.seconds = seconds
        self.workers = [PromptWorker() for _ in range(workers)]
        self._config = config
        self._most_bytes, self._bytes = most_bytes, 0
        self._changing = threading.Lock()
        # Those that have loaded tokenizers come first.
        self._idle: LifoQueue[PromptWorker] = LifoQueue()
        for worker in self.workers:
            self._idle.put(worker)

    def run(self, data: bytes) -> Result:
        """The result of a packed job, in its turn.

        Raises TooManyRequestsError, and as PromptWorker.run().
        """
        with self._admitted(len(data)):
            worker = self._idle.get()
            try:
                return worker.run(data, self.seconds, self._config)
            finally:
                self._idle.put(worker)

    @contextlib.contextmanager
    def _admitted(self, size: int) -> Iterator[None]:
        """Count a job until it has ended. Raises TooManyRequestsError if the lane is full."""
        with self._changing:
            most, held = self._most_bytes, self._bytes
            if most is not None and held and held + size > most:
                raise TooManyRequestsError(
                    f"The request has {size:,} bytes to tokenize, and {held:,} of at most "
                    f"{most:,} bytes wait already. "
                    "Try again in some seconds, or send less at a time."
                )
            self._bytes += size
        try:
            yield
        finally:
            with self._changing:
                self._bytes -= size

    def close(self) -> None:
        """End all workers. The jobs that wait or run raise UnavailableError."""
        for worker in self.workers:
            worker.close()
            # The jobs that wait are woken, one after the other.
            self._idle.put(worker)


class PromptWorkers:
    """Renders prompts in worker processes. A small prompt never waits for a large one.

    Prompts to generate from never wait for requests that only tokenize, whose lanes are bounded.
    """

    def __init__(self, config: PromptConfig) -> None:
        self.config = config
        self.counts = {"prompts": 0, "bodies": 0, "slow": 0}
        self._small = Lane(1, config.small_seconds, config)
        self._large = Lane(config.large_workers, config.seconds, config)
        self._tokenizing = (
            Lane(1, config.small_seconds, config, config.tokenizer_bytes),
            Lane(1, config.seconds, config, config.tokenizer_bytes),
        )
        if FORKS:
            fork_server().start()

    def prepare(self, job: PromptJob) -> PreparedPrompt:
        """Raises PromptError for what cannot be rendered, RequestTooLargeError, and
        UnavailableError when the server stops.

        A job that only counts tokens also raises TooManyRequestsError.
        """
        result = self._run(job, job.only_count)
        assert isinstance(result, PreparedPrompt)
        return result

    def convert(self, job: TokenizerJob) -> TokenizerResult:
        """Raises as prepare() does for a job that only counts tokens."""
        result = self._run(job, only_tokenizes=True)
        assert isinstance(result, TokenizerResult)
        return result

    def _run(self, job: PromptJob | TokenizerJob, only_tokenizes: bool) -> Result:
        self.counts["prompts"] += 1
        small, large = self._tokenizing if only_tokenizes else (self._small, self._large)
        data = packed(job)
        for lane in (small, large) if len(data) <= self.config.small_bytes else (large,):
            try:
                return lane.run(data)
            except OutOfTimeError:
                self.counts["slow"] += 1
        raise PromptError(
            f"The prompt takes more than {self.config.seconds:g} seconds to be rendered and "
            "tokenized. Shorten it."
        )

    def load(self, source: TokenizerSource) -> None:
        """Have the worker for small prompts load a tokenizer, which the first prompt would wait
        for. Raises as prepare() does.
        """
        with contextlib.suppress(OutOfTimeError):
            self._small.run(packed(source))

    def check_body(self, data: bytes, only_tokenizes: bool) -> None:
        """Check the body of a request, of which nothing is generated if it `only_tokenizes`.

        Raises PromptError for a body that is not JSON or takes too long to be read, and as
        convert() does.
        """
        if len(data) <= UNCHECKED_BYTES:
            return
        self.counts["bodies"] += 1
        try:
            (self._tokenizing[1] if only_tokenizes else self._large).run(packed(data))
        except OutOfTimeError:
            raise PromptError(
                f"The body takes more than {self.config.seconds:g} seconds to be read. Shorten it."
            ) from None

    def close(self) -> None:
        """End all workers."""
        for lane in (self._small, self._large, *self._tokenizing):
            lane.close()
