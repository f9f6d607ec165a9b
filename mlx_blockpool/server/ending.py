"""Ends a server's process on a signal or because its group is lost: in order if possible, and in any case soon.

A thread ends the process if another thread hangs, and a guardian process ends it if no thread gets to run.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from ..errors import GroupLostError

log = logging.getLogger(__name__)

# The status of a rank whose group is lost: EX_TEMPFAIL of sysexits.h, as the next start may well succeed.
LOST = 75
# The guardian waits this much longer than the thread, which logs why it ends the process.
GUARDIAN_SECONDS = 0.6
# A process of its own: it reads what a signal writes, and kills the process if the pipe is still open some time later.
GUARDIAN = """
import os, select, signal, sys
for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(each, signal.SIG_IGN)
process, seconds = int(sys.argv[1]), float(sys.argv[2])
if os.read(0, 1):
    signal.signal(signal.SIGALRM, lambda *_: os.kill(process, signal.SIGKILL) if os.getppid() == process else None)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    while os.read(0, 1):
        pass
"""


def _interrupt() -> None:
    raise KeyboardInterrupt


def end_on_signals(seconds: float, begin: Callable[[], Any] = _interrupt, hang_up: bool = False) -> None:
    """SIGINT and SIGTERM call `begin` in the main thread, and `seconds` later the process has ended in any case.

    A second signal ends it at once. For the main thread. `hang_up`: SIGHUP calls `begin` too, as that is what a rank on another
    machine gets from ssh when its launcher ends. The SIGTERM that may follow it is no second signal.
    """
    # No locks: a signal may come while the handler of another one runs.
    begun = signalled = False

    def end(which: int, _: Any) -> None:
        nonlocal begun, signalled
        if which != signal.SIGHUP:
            if signalled:
                os._exit(1)
            signalled = True
        if not begun:
            begun = True
            late = threading.Timer(seconds, _end_late, [seconds])
            late.daemon = True
            late.start()
            begin()

    _start_guardian(seconds + GUARDIAN_SECONDS)
    for which in (signal.SIGINT, signal.SIGTERM):
        signal.signal(which, end)
    if hang_up and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, end)


def _start_guardian(seconds: float) -> None:
    read, write = os.pipe()
    # A signal is written by the interpreter's own handler, also while no thread can run Python.
    os.set_blocking(write, False)
    command = [sys.executable, "-I", "-S", "-c", GUARDIAN, str(os.getpid()), str(seconds)]
    subprocess.Popen(command, stdin=read, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    os.close(read)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)


def _end_late(seconds: float) -> None:
    # Nothing that could wait, such as a log whose reader hangs, comes before the exit.
    text = f"The server did not stop within {seconds:g} seconds and is ended; what was not written yet is computed again.\n"
    threading.Thread(target=sys.stderr.write, args=[text], daemon=True).start()
    threading.Event().wait(0.1)
    os._exit(1)


class Flushes(Protocol):
    """A prompt store, as far as its end goes."""

    def flush(self, seconds: float) -> bool: ...


class Loss:
    """The end of a rank that has lost its group, for the thread that notices it first.

    After a collective has failed once, the next one may wait for ever, and an array of a step that was in flight raises when it
    is read. So nothing is computed or copied any more: the requests fail, what waits for the stores' writers is written, and the
    process ends with status LOST, also if one of these hangs.

    leave:   sees to it that no collective is begun any more.
    fail:    fails all requests with an error. answered: waits for their last words. A follower has neither.
    stores:  those of the loaded models.
    seconds: for the writers; the process ends at most `grace` later.
    """

    def __init__(
        self,
        leave: Callable[[], Any],
        stores: Callable[[], Iterable[Flushes]],
        seconds: float,
        fail: Callable[[Exception], Any] = lambda error: None,
        answered: Callable[[], Any] = lambda: None,
        grace: float = 1.0,
        end_process: Callable[[int], Any] = os._exit,
    ) -> None:
        self._leave = leave
        self._stores = stores
        self._seconds = seconds
        self._fail = fail
        self._answered = answered
        self._grace = grace
        self._end_process = end_process
        self._begun = threading.Lock()

    def end(self, error: BaseException) -> None:
        """End the process because of `error`, which the requests get as a GroupLostError; other threads wait here for the end."""
        if not self._begun.acquire(blocking=False):
            threading.Event().wait()
        # Also a log whose reader hangs may not delay it.
        late = threading.Timer(self._seconds + self._grace, self._end_process, [LOST])
        late.daemon = True
        late.start()
        lost = error if isinstance(error, GroupLostError) else GroupLostError(None, f"{type(error).__name__}: {error}")
        lost.__cause__ = error.__cause__ if lost is error else error
        for act in (self._leave, lambda: self._fail(lost), lambda: self._log(lost), self._flush, self._answered):
            try:
                act()
            except Exception:
                log.exception("the end of a lost group continues after an error")
        late.cancel()
        self._end_process(LOST)

    def _log(self, error: Exception) -> None:
        log.critical("%s This rank ends with status %d.", error, LOST, exc_info=error)

    def _flush(self) -> None:
        until = time.monotonic() + self._seconds
        for store in self._stores():
            if not store.flush(max(0.0, until - time.monotonic())):
                log.error("not all that was to be written is on disk; the rest is computed again")
