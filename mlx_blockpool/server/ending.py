"""Ends a server's process on a signal, in order if possible and in any case soon.

A thread ends the process if another thread hangs, and a guardian process ends it if no thread gets to run.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from typing import Any

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


def end_on_signals(seconds: float) -> None:
    """SIGINT and SIGTERM raise KeyboardInterrupt in the main thread, and `seconds` later the process has ended in any case.

    A second signal ends it at once. For the main thread.
    """
    signalled = threading.Event()

    def interrupt(*_: Any) -> None:
        if signalled.is_set():
            os._exit(1)
        signalled.set()
        late = threading.Timer(seconds, _end_late, [seconds])
        late.daemon = True
        late.start()
        raise KeyboardInterrupt

    _start_guardian(seconds + GUARDIAN_SECONDS)
    for which in (signal.SIGINT, signal.SIGTERM):
        signal.signal(which, interrupt)


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
