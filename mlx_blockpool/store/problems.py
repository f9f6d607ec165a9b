"""What fails at present in a store's folder, for the log, GET /health and GET /v1/cache. Any thread
may call this.

A disk that has failed is tried again and again: the log says that once, and again only after
`log_seconds` or for another error.
"""

from __future__ import annotations

import errno
import logging
import threading
import time

from ..config import StoreConfig

log = logging.getLogger(__name__)


class StoreProblems:
    """The last error of each use of the folder, such as `records` or `agents`, until that use
    works again.
    """

    def __init__(self, log_seconds: float = StoreConfig.log_seconds) -> None:
        self._log_seconds = log_seconds
        self._errors: dict[str, Exception] = {}
        self._logged: dict[object, float] = {}
        self._changing = threading.Lock()

    def report_failure(self, use: str, error: Exception, effect: str = "") -> None:
        """Note that a use has failed. `effect`: what does not happen for that reason."""
        # Texts of errors name temporary files, which differ each time.
        kind, now = getattr(error, "errno", None) or type(error), time.monotonic()
        with self._changing:
            self._errors[use] = error
            logged = self._logged.get(kind)
            if logged is not None and now - logged < self._log_seconds:
                return
            self._logged[kind] = now
        log.warning("prompt store: %s: %s%s", use, error, effect and f"; {effect}")

    def report_success(self, use: str) -> None:
        """Note that a use works."""
        with self._changing:
            self._errors.pop(use, None)

    def error_of(self, use: str) -> Exception | None:
        """The error of a use that does not work, or None."""
        return self._errors.get(use)

    @property
    def text(self) -> str | None:
        """All errors in words, or None."""
        with self._changing:
            return "; ".join(dict.fromkeys(map(str, self._errors.values()))) or None

    @property
    def number(self) -> int:
        """One of the errors as a number of errno; 0 if all uses work."""
        with self._changing:
            return next(
                (getattr(error, "errno", None) or errno.EIO for error in self._errors.values()), 0
            )
