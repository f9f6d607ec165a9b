"""Ends a server's process on a signal: in order if possible, and in any case soon.

If a thread hangs meanwhile, faulthandler writes where and ends the process. A timer ends it where
the reader of what is written hangs too.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

# How long the places of the threads may take to be written: a full pipe without a reader never
# takes them.
DUMP_SECONDS = 0.5


def _interrupt() -> None:
    raise KeyboardInterrupt


def end_on_signals(seconds: float, begin: Callable[[], Any] = _interrupt) -> None:
    """SIGINT, SIGTERM and SIGHUP call `begin` in the main thread, and `seconds` later the process
    has ended in any case.

    A second signal ends it at once. For the main thread. SIGHUP comes from a terminal that is
    closed, and to a rank on another machine from ssh when its launcher ends. The SIGTERM that may
    follow it does not count as a second signal.
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
            timer = threading.Timer(seconds + DUMP_SECONDS, os._exit, [1])
            timer.daemon = True
            timer.start()
            if sys.stderr is not None:
                # With the places of all threads, which show what hangs, also while one holds the
                # interpreter's lock.
                faulthandler.dump_traceback_later(seconds, exit=True)
            begin()

    for which in (signal.SIGINT, signal.SIGTERM):
        signal.signal(which, end)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        # nohup has not started it.
        signal.signal(signal.SIGHUP, end)
