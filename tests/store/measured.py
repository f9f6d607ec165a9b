"""The measurements in a store's database, read for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from mlx_blockpool.store.db import Database


class Measured(NamedTuple):
    model: str
    date: str
    figures: dict[str, Any]


def measured_in(root: Path) -> list[Measured]:
    """What was measured, in the order in which it was; without what models were proven to do."""
    rows = Database(root).rows(
        "SELECT model, date, figures FROM measurements WHERE model != '' ORDER BY rowid"
    )
    found = [Measured(model, date, json.loads(figures)) for model, date, figures in rows]
    return [measured for measured in found if "proof" not in measured.figures]
