"""Job: a function that the generation thread calls between two steps for another thread.

A job is short: it reads no file and waits for nothing. Longer work is many jobs, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from queue import Queue
from typing import Any, Generic, TypeVar

from ..ranks.group import as_loss

T = TypeVar("T")


class Job(Generic[T]):
    """`act` runs once, on the generation thread. `results` then holds its result and its error."""

    def __init__(self, act: Callable[[], T]) -> None:
        self._act: Callable[[], T] | None = act
        self.results: Queue[tuple[T | None, Exception | None]] = Queue()

    def run(self) -> None:
        act, self._act = self._act, None
        assert act is not None, "a job runs once"
        try:
            self.results.put((act(), None))
        except Exception as error:
            # Whatever the act raises, the generation thread continues. Frames and causes hold caches and with them blocks.
            error.__cause__ = error.__context__ = None
            self.results.put((None, as_loss(error).with_traceback(None)))

    def fail(self, error: Exception) -> None:
        """Put an error in place of a result: the job will not run."""
        self.results.put((None, error.with_traceback(None)))


def run_on_generation_thread(generator: Any, act: Callable[[], T]) -> T:
    """Run `act` on a generator's thread. Returns or raises what it does; UnavailableError if the thread has ended."""
    job = Job(act)
    generator.requests.put(job)
    result, error = generator.receive(job.results)
    if error is not None:
        raise error
    return result  # type: ignore[no-any-return]
