"""Measurements: how fast models were on this device, remembered in the store's database between
starts.

Hints: figures decide what is faster, never what is right, and without them a model is measured
again. What a model was proven to do is confirmed before it is used. Knows names; what the figures
say is known to those that measure. Any thread may call anything here.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from .db import Database, keep_last

log = logging.getLogger(__name__)

MOST_MODELS = 256
# The row of the seconds that reuse has saved.
SAVED = "saved"


class MeasuredOn(NamedTuple):
    """What figures depend on.

    device:   its name, and how many cores of it are used.
    versions: of what computes.
    spec:     the fingerprint of the caches, which has their KV bits.
    weights:  a digest of the names, shapes and types of all weights.
    """

    device: str
    versions: str
    spec: str
    weights: str


class Measurements:
    """The figures of models, remembered in the folder `root`, or in memory for None."""

    def __init__(self, root: Path | None) -> None:
        self._database = Database(root)

    def figures(self, on: MeasuredOn) -> dict[str, Any]:
        """The figures of a model by name; empty if it was not measured, or if they cannot be read.

        They may be anything that JSON holds.
        """
        query = "SELECT figures FROM measurements WHERE measured_on = ?"
        try:
            rows = self._database.rows(query, json.dumps(on))
            return dict(json.loads(rows[0][0])) if rows else {}
        except (OSError, ValueError, TypeError, RecursionError) as error:
            log.info("measurements cannot be read: %s", error)
            return {}

    def add_saved(self, seconds: float) -> float | None:
        """Add to the seconds that reuse has saved in this folder since the installation.

        Returns their sum; None if the disk fails, and then nothing was added.
        """
        select = "SELECT figures FROM measurements WHERE measured_on = ?"
        try:
            rows = self._database.rows(select, SAVED)
            if not seconds:
                return float(rows[0][0]) if rows else 0.0
            with self._database.transaction() as connection:
                connection.execute(
                    "INSERT OR REPLACE INTO measurements VALUES "
                    f"(?, '', '', coalesce(({select}), 0) + ?)",
                    (SAVED, SAVED, seconds),
                )
                return float(connection.execute(select, (SAVED,)).fetchone()[0])
        except (OSError, ValueError, TypeError) as error:
            log.info("saved seconds are not remembered: %s", error)
            return None

    def save(self, on: MeasuredOn, model: str, figures: Mapping[str, Any]) -> None:
        """Add `figures` that JSON can hold; those of the same name are replaced.

        A disk that fails costs the time to measure again.
        """
        found = json.dumps(self.figures(on) | dict(figures))
        row = json.dumps(on), model, datetime.now(UTC).isoformat(timespec="seconds"), found
        try:
            with self._database.transaction() as connection:
                connection.execute("INSERT OR REPLACE INTO measurements VALUES (?, ?, ?, ?)", row)
                keep_last(connection, "measurements", MOST_MODELS)
        except OSError as error:
            log.info("measurements are not remembered: %s", error)
