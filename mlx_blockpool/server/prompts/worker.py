"""A prompt worker's process: loads tokenizers, renders one prompt after the other, and ends with the server.

main() is given the descriptor of a socket and a mode. "fork": it forks a worker for each connection that is sent over the
socket. "serve": it is a worker itself, on that socket. The processor time and the memory of each job are bounded by the kernel,
whatever its code does.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import pickle
import resource
import signal
import socket
import sys
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_config, load_tokenizer

from ...errors import PromptError
from ..bodies import check_json
from .conversion import convert
from .job import OUT_OF_TIME, Job, Limits, Pieces, PreparedPrompt, PromptJob, TokenizerSource, pack_error, send
from .renderer import PromptRenderer

log = logging.getLogger(__name__)

# Tokenizers that a worker keeps.
MOST_TOKENIZERS = 4
# A job whose code does not let Python's own limit end it is ended by the kernel after this many seconds more.
GRACE_SECONDS = 2
# How much a worker gives way to its server.
NICE = 5
# A worker that has needed this part of its memory for a job ends after its result.
WORN = 0.25


class OutOfTimeError(BaseException):
    """Raised where a job has used up its time. No `except Exception` of a template's code holds it."""


class Tokenizers:
    """The tokenizers used last. One whose files have changed is loaded again."""

    def __init__(self) -> None:
        self._renderers: OrderedDict[Any, PromptRenderer] = OrderedDict()

    def get(self, source: TokenizerSource) -> PromptRenderer:
        """Raises whatever mlx-lm and the files raise."""
        key = source.folder, repr(source.config), source.use_default_chat_template, stamp_of(Path(source.folder))
        if key not in self._renderers:
            self._renderers[key] = PromptRenderer(load_tokenizer_of(source))
            while len(self._renderers) > MOST_TOKENIZERS:
                self._renderers.popitem(last=False)
        self._renderers.move_to_end(key)
        return self._renderers[key]


def serve(connection: Connection) -> None:
    """Do jobs until the server has closed its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGPROF, _out_of_time)
    tokenizers = Tokenizers()
    fresh = _resident_bytes()
    connection.send(os.getpid())
    while True:
        limits, job = pickle.loads(connection.recv_bytes())
        pieces = _result(tokenizers, limits, job)
        is_worn = _resident_bytes() - fresh > WORN * limits.memory_bytes
        send(connection, pieces, is_worn)
        if is_worn:
            return
        del pieces


def _result(tokenizers: Tokenizers, limits: Limits, job: Job) -> Pieces:
    try:
        with _memory(limits.memory_bytes):
            if isinstance(job, bytes):
                with _processor_time(limits.seconds):
                    check_json(job)
                return PreparedPrompt().pack()
            with _processor_time(limits.load_seconds):
                renderer = tokenizers.get(job if isinstance(job, TokenizerSource) else job.source)
            if isinstance(job, TokenizerSource):
                return PreparedPrompt().pack()
            with _processor_time(limits.seconds):
                return (renderer.render(job) if isinstance(job, PromptJob) else convert(renderer, job)).pack()
    except OutOfTimeError:
        return OUT_OF_TIME
    except MemoryError:
        return pack_error(PromptError(f"The prompt needs more than {limits.memory_bytes:,} bytes of memory to be rendered."))
    except Exception as error:
        # Templates and tokenizers are other people's code.
        log.debug("the prompt cannot be rendered", exc_info=True)
        return pack_error(error)


def load_tokenizer_of(source: TokenizerSource) -> TokenizerWrapper:
    """As mlx-lm's ModelProvider does."""
    folder = Path(source.folder)
    end = load_config(folder).get("eos_token_id", None)
    tokenizer = load_tokenizer(folder, dict(source.config), eos_token_ids=end)
    if source.use_default_chat_template and tokenizer.chat_template is None:
        tokenizer.chat_template = tokenizer.default_chat_template
    return tokenizer


def stamp_of(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """A value that changes with every file beside the weights."""
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if not entry.name.endswith(".safetensors"):
                with contextlib.suppress(OSError):
                    status = entry.stat()
                    found.append((entry.name, status.st_size, status.st_mtime_ns))
    return tuple(sorted(found))


# -- limits ------------------------------------------------------------------------------------------------------------


def _out_of_time(*_: Any) -> None:
    raise OutOfTimeError


@contextlib.contextmanager
def _processor_time(seconds: float) -> Iterator[None]:
    """Raises OutOfTimeError once the block has run this long; code that does not return to Python ends with the process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    hard = int(used.ru_utime + used.ru_stime + seconds) + GRACE_SECONDS
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (hard if most == resource.RLIM_INFINITY else min(hard, most), most))
    signal.setitimer(signal.ITIMER_PROF, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_CPU, (most, most))


@contextlib.contextmanager
def _memory(size: int) -> Iterator[None]:
    """MemoryError where the block takes this many bytes more than there are now. macOS sets no such limit; the server looks."""
    before, most = resource.getrlimit(resource.RLIMIT_AS)
    taken = _address_bytes()
    if taken is not None:
        limit = taken + size
        resource.setrlimit(resource.RLIMIT_AS, (limit if most == resource.RLIM_INFINITY else min(limit, most), most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (before, most))


def _address_bytes() -> int | None:
    """Bytes of the address space in use; None where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return None


def _resident_bytes() -> int:
    """The most memory that this process has had."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


# -- the process -------------------------------------------------------------------------------------------------------


def fork_workers(control: socket.socket) -> None:
    """Fork a worker for each connection that arrives, until the server has closed its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The kernel takes ended workers away.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    # Libraries have started threads that no worker uses.
    warnings.simplefilter("ignore", DeprecationWarning)
    gc.freeze()
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not data:
            return
        if os.fork() == 0:
            control.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _serve_and_exit(Connection(descriptors[0]))
        os.close(descriptors[0])


def _serve_and_exit(connection: Connection) -> None:
    try:
        serve(connection)
    except (EOFError, OSError):
        pass
    finally:
        # Other people's code must not run again at the end.
        os._exit(0)


def main(descriptor: int, mode: str) -> None:
    """The whole life of a process; it never returns."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Where processors are few, the replies that run come first.
    os.nice(NICE)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s - %(levelname)s - %(message)s", force=True)
    # The server loads the same tokenizers, and logs their warnings.
    logging.getLogger("transformers").setLevel(logging.ERROR)
    if mode == "fork":
        with contextlib.suppress(OSError):
            fork_workers(socket.socket(fileno=descriptor))
        os._exit(0)
    _serve_and_exit(Connection(descriptor))


def main_of_fork(descriptor: int) -> None:
    """main() in "fork" mode, in a fork of the server's process: of its files it keeps the output and the descriptor."""
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for name in os.listdir("/dev/fd"):
            if int(name) not in (0, 1, 2, descriptor):
                with contextlib.suppress(OSError):
                    os.close(int(name))
        main(descriptor, "fork")
    finally:
        # Nothing of the server's code may run here.
        os._exit(1)
