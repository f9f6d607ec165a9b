"""Job: what an HTTP thread has done on the generation thread between two steps, and what came of it.

A job is short: no file is read in it, nobody is waited for. What takes long is many jobs, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from queue import Queue
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Job(Generic[T]):
    """`act` runs on the generation thread, once; result() is for the thread that asked."""

    def __init__(self, act: Callable[[], T]) -> None:
        self._act: Callable[[], T] | None = act
        self._answers: Queue[tuple[T | None, Exception | None]] = Queue()

    def run(self) -> None:
        """Whatever the act raises is for who asked."""
        act, self._act = self._act, None
        assert act is not None, "a job runs once"
        try:
            self._answers.put((act(), None))
        except Exception as error:
            # The top of what was asked for: the generation thread goes on.
            self._answers.put((None, _bare(error)))

    def result(self, wait: Callable[[Queue[Any]], Any]) -> T:
        """What the act returned, or raises what it raised. `wait` takes from a queue, and raises if nothing can come any more."""
        answer, error = wait(self._answers)
        if error is not None:
            raise error
        return answer  # type: ignore[no-any-return]


def run_on_generation_thread(generator: Any, act: Callable[[], T]) -> T:
    """Let a generation thread do something now, and wait for it. Raises what `act` raises; RuntimeError if the thread ended."""
    job = Job(act)
    generator.requests.put(job)
    return job.result(generator.receive)


def _bare(error: Exception) -> Exception:
    """Without the frames of those who raised it, and what it came from: they hold caches and with them blocks."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)
