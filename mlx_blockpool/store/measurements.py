"""Measurements: how fast models were on this device, remembered between starts.

    measurements.json   in the store's folder: the figures of each model by name, and what they depend on; the last at the end

That file is a hint: figures decide what is faster, never what is right, and a missing or damaged file costs the time to measure
again. Knows files and names; what the figures say is known to those that measure. Any thread may call anything here.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import BadRecordError
from .fs import Disk, write_whole
from .paths import MEASUREMENTS_FILE

log = logging.getLogger(__name__)

FORMAT = "mlx-blockpool measurements 1"
MOST_MODELS = 256
MAX_BYTES = 4 << 20


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


@dataclass(frozen=True)
class Measured:
    """`figures` by the name of what was measured, as JSON has them. `model` and `date` (ISO 8601) are for people to read."""

    on: MeasuredOn
    model: str
    date: str
    figures: dict[str, Any] = field(default_factory=dict)


class Measurements:
    """The figures of models, remembered in the folder `root`; None: in memory, for as long as this lives."""

    def __init__(self, root: Path | None, disk: Disk | None = None) -> None:
        self._path = None if root is None else root / MEASUREMENTS_FILE
        self._disk = disk or Disk()
        self._in_memory: list[Measured] = []

    def load(self) -> list[Measured]:
        """All that is remembered, in the order in which it was measured; nothing if the file is not as save() writes it."""
        if self._path is None:
            return self._in_memory
        try:
            data = self._disk.read(self._path, 0, MAX_BYTES + 1)
            return _decode(data) if len(data) <= MAX_BYTES else []
        except (OSError, BadRecordError, ValueError, KeyError, TypeError, RecursionError):
            return []

    def figures(self, on: MeasuredOn) -> dict[str, Any]:
        """The figures of a model by name; empty: it was not measured. They may be anything that JSON holds."""
        return next((measured.figures for measured in self.load() if measured.on == on), {})

    def save(self, on: MeasuredOn, model: str, figures: Mapping[str, Any]) -> None:
        """Add to what others have saved since, `figures` that JSON can hold; those of the same name are replaced.

        A disk that fails costs the time to measure again.
        """
        found = self.load()
        before = next((measured.figures for measured in found if measured.on == on), {})
        date = datetime.now(UTC).isoformat(timespec="seconds")
        found = [measured for measured in found if measured.on != on] + [Measured(on, model, date, before | dict(figures))]
        if self._path is None:
            self._in_memory = found[-MOST_MODELS:]
            return
        try:
            self._disk.make_directory(self._path.parent)
            write_whole(self._disk, self._path, [_encode(found[-MOST_MODELS:])])
        except OSError as error:
            log.info("measurements are not remembered: %s", error)


def _encode(found: list[Measured]) -> bytes:
    models = [asdict(measured) | {"on": measured.on._asdict()} for measured in found]
    return json.dumps({"format": FORMAT, "models": models}, indent=1).encode("ascii")


def _decode(data: bytes) -> list[Measured]:
    """Raises ValueError, KeyError, TypeError or RecursionError for bytes that _encode() did not make."""
    found = json.loads(data.decode("ascii"))
    if found["format"] != FORMAT:
        raise ValueError("another format")
    models = [Measured(MeasuredOn(**each["on"]), each["model"], each["date"], each["figures"]) for each in found["models"]]
    texts = (text for each in models for text in (*each.on, each.model, each.date))
    if not all(isinstance(text, str) for text in texts) or not all(isinstance(each.figures, dict) for each in models):
        raise ValueError("no figures of a model")
    return models
