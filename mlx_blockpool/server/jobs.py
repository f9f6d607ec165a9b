"""between_steps: work of other threads that the generation thread does between two steps of its
engines.

A job reads no file and waits for nothing: one that has to wait pauses.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from queue import Queue
from typing import Any, Generic, TypeAlias, TypeVar

from ..errors import UnavailableError
from ..ranks.group import as_loss
from .wire import check_connection

T = TypeVar("T")
# Yields None where other work may go first, or for how many seconds the job pauses. Returns its
# result.
Steps: TypeAlias = Generator[float | None, None, T]
# Seconds of processor time that a job takes between two steps.
SLICE_SECONDS = 0.002


class Pause(float):
    """For how many seconds a job pauses."""


class Job(Generic[T]):
    """`work` for the generation thread: a function, or steps that it runs SLICE_SECONDS at a time,
    until they end or pause.

    results: holds then what the work has returned, or a Pause, after which the job has to be put
    again, and its error.
    seconds: its processor time so far.
    """

    def __init__(self, work: Callable[[], T] | Steps[T]) -> None:
        self.results: Queue[tuple[T | Pause | None, Exception | None]] = Queue()
        self.seconds = 0.0
        self._steps = work if isinstance(work, Generator) else _single(work)
        self._has_begun = False

    def run(self, requests: Queue[Any]) -> None:
        """Run a slice of the work. `requests`: where the job waits for the next one."""
        start, self._has_begun = time.thread_time(), True
        try:
            while (pause := next(self._steps)) is None:
                if time.thread_time() - start > SLICE_SECONDS:
                    requests.put(self)
                    break
            else:
                self.results.put((Pause(pause), None))
        except StopIteration as end:
            self.results.put((end.value, None))
        except Exception as error:
            # Whatever the work raises, the generation thread continues. Frames and causes hold
            # caches and with them blocks.
            error.__cause__ = error.__context__ = None
            self.fail(as_loss(error))
        self.seconds += time.thread_time() - start

    def fail(self, error: Exception) -> None:
        """Put an error in place of a result: the job will not run."""
        self.results.put((None, error.with_traceback(None)))

    def stop(self) -> None:
        """End what has begun, and let go of what it refers to. On the generation thread."""
        if self._has_begun:
            self._steps.close()


def _single(act: Callable[[], T]) -> Steps[T]:
    yield from ()
    return act()


def between_steps(generator: Any, work: Callable[[], T] | Steps[T], connection: Any = None) -> T:
    """The result of work on the thread of a generator.

    Raises its errors, and what BlockpoolGenerator.receive() raises.
    """
    job = Job(work)
    generator.requests.put(job)
    try:
        while True:
            result, error = generator.receive(job.results, connection)
            if error is not None:
                raise error
            if not isinstance(result, Pause):
                return result  # type: ignore[no-any-return]
            time.sleep(result)
            check_connection(connection)
            generator.requests.put(job)
    except (ConnectionError, UnavailableError):
        # The thread closes the steps, or the queue holds them: closed here, they would run at the
        # same time as that thread.
        generator.requests.put(Job(job.stop))
        raise
