"""In place of the module time in the store: moves only by hand."""

from __future__ import annotations

import pytest

from mlx_blockpool.store import limits, problems, prompt_store


class Clock:
    """Seconds of every clock there is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1_000_000.0
        for module in (limits, problems, prompt_store):
            monkeypatch.setattr(module, "time", self)

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now
