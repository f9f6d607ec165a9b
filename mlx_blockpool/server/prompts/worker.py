"""A prompt worker's process: loads tokenizers, renders one prompt after the other, and ends with
the server.

main() is given the descriptor of a socket and a mode. "fork": it forks a worker for each connection
that is sent over the socket. "serve": it is a worker itself, on that socket. The processor time of
each job is bounded by the kernel, whatever its code does; the server watches its memory.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
import resource
import signal
import socket
import sys
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_config, load_tokenizer

from ...config import PromptConfig
from ...errors import PromptError, RequestTooLargeError
from ..bodies import check_json
from .conversion import convert
from .job import Job, OutOfTimeError, PromptJob, Result, TokenizerSource
from .renderer import PromptRenderer

log = logging.getLogger(__name__)

# A job whose code does not let Python's own limit end it is ended by the kernel after this many
# seconds more.
GRACE_SECONDS = 2
# A worker ends after a job that has used this share of its memory.
WORN = 0.25


def renderer_of(source: TokenizerSource, stamp: object) -> PromptRenderer:
    """The renderer of a tokenizer whose files have this stamp_of().

    Raises whatever mlx-lm and the files raise.
    """
    return PromptRenderer(load_tokenizer_of(source))


def serve(connection: Connection) -> None:
    """Do jobs until the server has closed its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGPROF, _out_of_time)
    fresh = _resident_bytes()
    connection.send(os.getpid())
    renderers, is_worn = None, False
    while not is_worn:
        config, seconds = connection.recv()
        renderers = renderers or functools.lru_cache(config.tokenizers)(renderer_of)
        connection.send(_result(renderers, config, seconds, connection.recv()))
        is_worn = _resident_bytes() - fresh > WORN * config.memory_bytes


def _result(
    renderers: Callable[..., PromptRenderer], config: PromptConfig, seconds: float, job: Job
) -> Result | BaseException:
    """The result of a job, or why it has failed.

    `renderers`: renderer_of(), which keeps some. `seconds`: of the processor, without those for
    loading its tokenizer.
    """
    try:
        if isinstance(job, bytes):
            with _processor_time(seconds):
                check_json(job)
            return None
        with _processor_time(config.load_seconds):
            source = job if isinstance(job, TokenizerSource) else job.source
            renderer = renderers(source, stamp_of(Path(source.folder)))
        if isinstance(job, TokenizerSource):
            return None
        with _processor_time(seconds):
            return renderer.render(job) if isinstance(job, PromptJob) else convert(renderer, job)
    except (OutOfTimeError, RequestTooLargeError) as error:
        return error
    except Exception as error:
        # Templates and tokenizers are other people's code.
        log.debug("the prompt cannot be rendered", exc_info=True)
        return PromptError(str(error) or type(error).__name__)


def load_tokenizer_of(source: TokenizerSource) -> TokenizerWrapper:
    """As mlx-lm's ModelProvider does."""
    folder = Path(source.folder)
    end = load_config(folder).get("eos_token_id", None)
    tokenizer = load_tokenizer(folder, dict(source.config), eos_token_ids=end)
    if source.use_default_chat_template and tokenizer.chat_template is None:
        tokenizer.chat_template = tokenizer.default_chat_template
    return tokenizer


def stamp_of(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """A value that changes with every file except the weights."""
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if not entry.name.endswith(".safetensors"):
                with contextlib.suppress(OSError):
                    status = entry.stat()
                    found.append((entry.name, status.st_size, status.st_mtime_ns))
    return tuple(sorted(found))


# -- limits ----------------------------------------------------------------------------------------


def _out_of_time(*_: Any) -> None:
    raise OutOfTimeError


@contextlib.contextmanager
def _processor_time(seconds: float) -> Iterator[None]:
    """Raises OutOfTimeError once the block has run this long; code that does not return to
    Python ends with the process.
    """
    used = resource.getrusage(resource.RUSAGE_SELF)
    hard = int(used.ru_utime + used.ru_stime + seconds) + GRACE_SECONDS
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(
        resource.RLIMIT_CPU, (hard if most == resource.RLIM_INFINITY else min(hard, most), most)
    )
    signal.setitimer(signal.ITIMER_PROF, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_CPU, (most, most))


def _resident_bytes() -> int:
    """The most memory that this process has had."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


# -- the process -----------------------------------------------------------------------------------


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
    # Running replies go first if there are few processors.
    os.nice(PromptConfig.niceness)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    logging.basicConfig(
        level=logging.WARNING, format="%(asctime)s - %(levelname)s - %(message)s", force=True
    )
    # The server loads the same tokenizers, and logs their warnings.
    logging.getLogger("transformers").setLevel(logging.ERROR)
    if mode == "fork":
        with contextlib.suppress(OSError):
            fork_workers(socket.socket(fileno=descriptor))
        os._exit(0)
    _serve_and_exit(Connection(descriptor))
