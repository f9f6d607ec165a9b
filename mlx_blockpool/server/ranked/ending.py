"""The end of a rank: with its launcher, or because it has lost its group."""

from __future__ import annotations

import logging
import os
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from ...errors import GroupLostError

log = logging.getLogger(__name__)

# The status of a rank whose group is lost: EX_TEMPFAIL of sysexits.h, as the next start may well
# succeed.
LOST = 75
# How often a rank checks that its launcher is still running.
LAUNCHER_SECONDS = 1.0


class RankLauncher:
    """The process that has started this one, if it is a launcher of ranks, which run no longer than
    it does.

    mlx.launch is known by the pipe that it gives each rank as standard input. A service, a terminal
    and nohup give none, and there a rank outlives the process that has started it. `parent`: the id
    of the present parent process.
    """

    def __init__(self, parent: Callable[[], int] = os.getppid, standard_input: int = 0) -> None:
        self._parent = parent
        self._first = parent()
        self._is_launcher = _is_pipe(standard_input)

    @property
    def is_gone(self) -> bool:
        return self._is_launcher and self._parent() != self._first

    def watch(self) -> None:
        """From now on, end this process as SIGTERM does once the launcher is gone."""
        if self._is_launcher:
            threading.Thread(target=self._run, name="launcher", daemon=True).start()

    def _run(self) -> None:
        pause = threading.Event()
        while not self.is_gone:
            pause.wait(LAUNCHER_SECONDS)
        log.warning("the launcher of the ranks has ended, and so does this rank")
        os.kill(os.getpid(), signal.SIGTERM)


def _is_pipe(descriptor: int) -> bool:
    try:
        return stat.S_ISFIFO(os.fstat(descriptor).st_mode)
    except OSError:
        # It is closed.
        return False


class Flushes(Protocol):
    """A prompt store that can be flushed."""

    def flush(self, seconds: float) -> bool: ...


@dataclass(eq=False)
class Loss:
    """The end of a rank that has lost its group, for the thread that notices it first.

    After a collective has failed once, the next one may wait for ever, and an array of a step that
    was in flight raises when it is read. So nothing is computed or copied any more: the requests
    fail, what waits for the stores' writers is written, and the process ends with status LOST, also
    if one of these hangs.

    leave:   prevents further collectives.
    fail:    fails all requests with an error. answered: waits for their last words. A follower has
             neither.
    stores:  those of the loaded models.
    seconds: for the writers; the process ends at most `grace` later.
    """

    leave: Callable[[], Any]
    stores: Callable[[], Iterable[Flushes]]
    seconds: float
    fail: Callable[[Exception], Any] = lambda error: None
    answered: Callable[[], Any] = lambda: None
    grace: float = 1.0
    end_process: Callable[[int], Any] = os._exit

    def __post_init__(self) -> None:
        self._begun = threading.Lock()

    def end(self, error: BaseException) -> None:
        """End the process because of `error`, which the requests get as a GroupLostError; other
        threads wait here for the end.
        """
        if not self._begun.acquire(blocking=False):
            threading.Event().wait()
        # Not even a log whose reader hangs may delay it.
        late = threading.Timer(self.seconds + self.grace, self.end_process, [LOST])
        late.daemon = True
        late.start()
        lost = (
            error
            if isinstance(error, GroupLostError)
            else GroupLostError(None, f"{type(error).__name__}: {error}")
        )
        lost.__cause__ = error.__cause__ if lost is error else error
        for act in (
            self.leave,
            lambda: self.fail(lost),
            lambda: self._log(lost),
            self._flush,
            self.answered,
        ):
            try:
                act()
            except Exception:
                log.exception("the end of a lost group continues after an error")
        late.cancel()
        self.end_process(LOST)

    def _log(self, error: Exception) -> None:
        log.critical("%s This rank ends with status %d.", error, LOST, exc_info=error)

    def _flush(self) -> None:
        until = time.monotonic() + self.seconds
        for store in self.stores():
            if not store.flush(max(0.0, until - time.monotonic())):
                log.error("not all that was to be written is on disk; the rest is computed again")
