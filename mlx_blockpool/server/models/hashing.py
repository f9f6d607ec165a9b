"""WeightsHash: the name of a model's weights, of every byte of them, made in a thread of its own while the model is loaded.

The thread knows files alone. Begun, awaited and stopped by the generation thread.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path

from ...errors import StoreError
from ...store.digests import Digests
from ...store.identity import Stamps, check_unchanged, identity

log = logging.getLogger(__name__)


class WeightsHash:
    """The hash of the weights in a model folder and an adapter folder. `stamps`: those of the files when mlx-lm opened them."""

    def __init__(self, model: Path, adapter: Path | None, stamps: Stamps, digests: Digests) -> None:
        self._folders = (model, adapter)
        self._stamps = stamps
        self._digests = digests
        self._name: str | None = None
        self._error: Exception = StoreError(f"The weights in {model} are not hashed yet.")
        self._done = threading.Event()
        threading.Thread(target=self._run, name="weights", daemon=True).start()

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    @property
    def read_bytes(self) -> int:
        """What was hashed so far; 0 where all was remembered."""
        return self._digests.read_bytes

    def wait(self, seconds: float) -> None:
        """Return when it is done, or after so many seconds."""
        self._done.wait(seconds)

    def stop(self) -> None:
        """End the thread soon, without waiting for it: a disk that hangs must not hold up whoever stops."""
        self._digests.stop()

    def result(self) -> str:
        """The name of the weights that were loaded. Raises StoreError where they have none."""
        if self._name is None:
            raise self._error.with_traceback(None)
        check_unchanged(*self._folders, self._stamps)
        return self._name

    def _run(self) -> None:
        try:
            self._name = identity(*self._folders, self._digests)
        except StoreError as error:
            self._error = error
        except Exception as error:
            # The top of the thread: the load goes on without a store.
            log.exception("the weights were not hashed")
            self._error = StoreError(f"Cannot hash the weights: {type(error).__name__}: {error}")
        finally:
            self._done.set()
