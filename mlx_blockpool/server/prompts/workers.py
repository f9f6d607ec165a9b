"""PromptWorkers: worker processes render prompts, small ones beside large ones. Any thread may call it.

A worker that takes too long or too much memory, or ends, is replaced; the jobs of others continue. Workers hold tokenizers and no
other state.
"""

from __future__ import annotations

import contextlib
import functools
import heapq
import itertools
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

from ...config import PromptConfig
from ...errors import PromptError, UnavailableError
from ..bodies import UNCHECKED_BYTES
from . import worker
from .job import (
    OUT_OF_TIME,
    Job,
    Limits,
    Pieces,
    PreparedPrompt,
    PromptJob,
    Result,
    TokenizerJob,
    TokenizerResult,
    TokenizerSource,
    receive,
    unpack,
)

log = logging.getLogger(__name__)

# A waiting job lets smaller ones pass that arrive within this time for each MB that it is larger.
SECONDS_PER_MB = 10.0
# A job whose worker gets no time on the processor is given up after this many times its seconds.
PATIENCE = 10
LOOK_SECONDS = 0.1
START_SECONDS = 120.0
# Most systems lend their processes to forks; on macOS a library that has used the system's services does not survive one.
FORKS = sys.platform != "darwin"


class WorkerEndedError(Exception):
    """A worker's process is gone."""


class ForkServer:
    """A process that has imported what workers need, and forks one in milliseconds."""

    def __init__(self) -> None:
        self._changing = threading.Lock()
        self._control: socket.socket | None = None

    def start_here(self) -> None:
        """Start it as a fork of this process, which saves a second import of everything.

        For a process that has only imported modules, since a fork of an open device or of other threads' locks is not safe. Does
        nothing in a process with threads, or on macOS: there the first worker starts a fresh process.
        """
        with self._changing:
            if FORKS and self._control is None and threading.active_count() == 1:
                self._control = _fork()

    def connect(self) -> Connection:
        """A connection to a worker of one's own."""
        ours, theirs = socket.socketpair()
        with self._changing, theirs:
            for _ in range(2):
                if self._control is None:
                    self._control = _start("fork")
                try:
                    socket.send_fds(self._control, [b"w"], [theirs.fileno()])
                    break
                except OSError:
                    # It was ended from outside.
                    self._control.close()
                    self._control = None
        return Connection(ours.detach())


def _start(mode: str) -> socket.socket:
    """A process of the worker's module. It ends when this socket closes, which it does however this process ends."""
    ours, theirs = socket.socketpair()
    with theirs:
        # The same modules as here, wherever they were found, and nothing of the working directory.
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            f"from mlx_blockpool.server.prompts.worker import main; main({theirs.fileno()}, {mode!r})"
        )
        # The server has logged what libraries log when they start.
        environment = {**os.environ, "TRANSFORMERS_VERBOSITY": "error"}
        command = [sys.executable, "-c", code]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=environment)
    _reap(process.wait)
    return ours


def _fork() -> socket.socket:
    """As _start("fork"), but a fork of this process."""
    ours, theirs = socket.socketpair()
    with theirs, warnings.catch_warnings():
        # Threads that libraries have started are not used in the fork.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
        if pid == 0:
            worker.main_of_fork(theirs.fileno())
    _reap(lambda: os.waitpid(pid, 0))
    return ours


def _reap(wait: Callable[[], object]) -> None:
    threading.Thread(target=wait, name="prompt-worker-end", daemon=True).start()


@functools.cache
def fork_server() -> ForkServer:
    """This process's own, which all its servers share."""
    return ForkServer()


class PromptWorker:
    """The server's end of one worker process. Used by one thread at a time."""

    def __init__(self) -> None:
        self._connection = fork_server().connect() if FORKS else Connection(_start("serve").detach())
        self._pid: int | None = None

    def run(self, data: bytes, seconds: float, memory_bytes: int) -> Pieces:
        """The result of a packed job; OUT_OF_TIME if it took too long. A worker that ends after it is closed.

        Raises WorkerEndedError, and PromptError for too much memory.
        """
        try:
            if self._pid is None:
                if not self._connection.poll(START_SECONDS):
                    raise WorkerEndedError
                self._pid = self._connection.recv()
            self._connection.send_bytes(data)
            until = time.monotonic() + seconds
            while not self._connection.poll(LOOK_SECONDS):
                if time.monotonic() > until:
                    self.close()
                    return OUT_OF_TIME
                if resident_bytes(self._pid) > memory_bytes:
                    self.close()
                    raise PromptError(f"The prompt needs more than {memory_bytes:,} bytes of memory to be rendered.")
            pieces, is_last = receive(self._connection)
        except (EOFError, OSError) as error:
            self.close()
            raise WorkerEndedError from error
        if is_last:
            self.close()
        return pieces

    @property
    def closed(self) -> bool:
        return self._connection.closed

    def end(self) -> None:
        """End the process, which may have ended before. Any thread may do this, at any time."""
        if self.closed:
            return
        has_ended = self._has_ended()
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as pipe:
            # No job reaches it any more, and no result comes back.
            pipe.shutdown(socket.SHUT_RDWR)
        if self._pid is not None and not has_ended:
            with contextlib.suppress(OSError):
                os.kill(self._pid, signal.SIGKILL)

    def close(self) -> None:
        """End the process, and give the connection back."""
        self.end()
        self._connection.close()

    def _has_ended(self) -> bool:
        """Return whether its end of the pipe is closed: the system may have given its id to another process."""
        with socket.socket(fileno=os.dup(self._connection.fileno())) as pipe:
            try:
                return pipe.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
            except BlockingIOError:
                return False
            except OSError:
                return True


def resident_bytes(pid: int) -> int:
    """Memory of a process; 0 where the system does not say."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        if sys.platform != "darwin":
            return 0
    found = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout.strip()
    return int(found) * 1024 if found.isdecimal() else 0


class Lane:
    """Workers for jobs of one kind, and the jobs that wait for one."""

    def __init__(self, workers: int, seconds: float, config: PromptConfig) -> None:
        self.seconds = seconds
        self._config = config
        self._free = workers
        self._idle: list[PromptWorker] = []
        self._busy: set[PromptWorker] = set()
        self._waiting: list[tuple[float, int]] = []
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._closed = False

    def pack(self, job: Job) -> bytes:
        return pickle.dumps(
            (Limits(self._config.load_seconds, self.seconds, self._config.memory_bytes), job), pickle.HIGHEST_PROTOCOL
        )

    def run(self, data: bytes) -> Result | None:
        """The result of a packed job; None if it took too long.

        Raises what unpack() raises, and UnavailableError when the server stops.
        """
        with self._turn(len(data)):
            pieces = self._result(data)
        return None if pieces == OUT_OF_TIME else unpack(pieces)

    def _result(self, data: bytes) -> Pieces:
        patience = PATIENCE * self.seconds + self._config.load_seconds
        # An idle worker may have ended before the job; a fresh one is ended by the job.
        for idle in (self._idle, []):
            with self._worker(idle) as worker, contextlib.suppress(WorkerEndedError):
                return worker.run(data, patience, self._config.memory_bytes)
            log.info("a prompt worker has ended; a new one takes its job")
        limit = f"{self.seconds:g} seconds or {self._config.memory_bytes:,} bytes of memory"
        raise PromptError(
            f"The process that rendered the prompt ended twice: it needs more than {limit}, or breaks the tokenizer."
        )

    @contextlib.contextmanager
    def _turn(self, size: int) -> Iterator[None]:
        """Wait until it is this job's turn to have a worker."""
        place = time.monotonic() + size / 1e6 * SECONDS_PER_MB, next(self._numbers)
        with self._changed:
            heapq.heappush(self._waiting, place)
            while not self._closed and (self._waiting[0] != place or not self._free):
                self._changed.wait()
            self._check_open()
            heapq.heappop(self._waiting)
            self._free -= 1
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._free += 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def _worker(self, idle: list[PromptWorker]) -> Iterator[PromptWorker]:
        """One of the idle workers, or a fresh one where there are none."""
        with self._changed:
            worker = idle.pop() if idle else None
        worker = worker or PromptWorker()
        try:
            with self._changed:
                self._check_open()
                self._busy.add(worker)
            yield worker
        finally:
            self._give_back(worker)

    def _give_back(self, worker: PromptWorker) -> None:
        with self._changed:
            self._busy.discard(worker)
            if self._closed:
                worker.close()
            elif not worker.closed:
                self._idle.append(worker)

    def _check_open(self) -> None:
        if self._closed:
            raise UnavailableError("The server is shutting down.")

    def start(self) -> None:
        """Have a worker ready for the first job."""
        with self._changed:
            self._idle.append(PromptWorker())

    def close(self) -> None:
        """End all workers. The jobs that wait raise UnavailableError."""
        with self._changed:
            self._closed = True
            for worker in self._busy:
                worker.end()
            while self._idle:
                self._idle.pop().close()
            self._changed.notify_all()


class PromptWorkers:
    """Renders prompts in worker processes. A small prompt never waits behind a large one."""

    def __init__(self, config: PromptConfig) -> None:
        self.config = config
        self.counts = {"prompts": 0, "bodies": 0, "slow": 0}
        self._small = Lane(1, config.small_seconds, config)
        self._large = Lane(config.large_workers, config.seconds, config)
        self._small.start()

    def prepare(self, job: PromptJob) -> PreparedPrompt:
        """Raises PromptError for what cannot be rendered, RequestTooLargeError, and UnavailableError when the server stops."""
        result = self._run(job)
        assert isinstance(result, PreparedPrompt)
        return result

    def convert(self, job: TokenizerJob) -> TokenizerResult:
        """Raises as prepare() does."""
        result = self._run(job)
        assert isinstance(result, TokenizerResult)
        return result

    def _run(self, job: PromptJob | TokenizerJob) -> Result:
        self.counts["prompts"] += 1
        for lane in (self._small, self._large):
            data = lane.pack(job)
            if lane is self._small and len(data) > self.config.small_bytes:
                continue
            result = lane.run(data)
            if result is not None:
                return result
            self.counts["slow"] += 1
        raise PromptError(f"The prompt takes more than {self.config.seconds:g} seconds to be rendered and tokenized. Shorten it.")

    def load(self, source: TokenizerSource) -> None:
        """Have the worker for small prompts load a tokenizer, which the first prompt would wait for. Raises as prepare() does."""
        self._small.run(self._small.pack(source))

    def check_body(self, data: bytes) -> None:
        """Raises PromptError for a request's body that is no JSON or takes too long to be read."""
        if len(data) <= UNCHECKED_BYTES:
            return
        self.counts["bodies"] += 1
        if self._large.run(self._large.pack(data)) is None:
            raise PromptError(f"The body takes more than {self.config.seconds:g} seconds to be read. Shorten it.")

    def close(self) -> None:
        """End all workers."""
        self._small.close()
        self._large.close()
