"""What drafts bring on this device: what forwards of a model cost by their rows, and how much faster that makes its replies.

Imports mlx where it measures, as device.py does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...config import EngineConfig
from ...drafts.curve import CostCurve
from ...drafts.lengths import speed_up
from ...errors import PoolExhaustedError, UnmeasurableError
from ...formatting import human_bytes
from ...store.measurements import Measurements
from ...store.paths import default_folder
from .finding import Finding

ABOUT = "drafts"
# How often a drafted token is accepted where those before it are: on fresh text, on similar text, and on edits.
ACCEPTANCES = (0.5, 0.8, 0.95)
SHOWN_ROWS = (2, 4, 8, 16)


def remembered(store_dir: Path | None) -> list[Finding]:
    """The curves of all models that servers have measured on this device."""
    from ...engine.measuring import CURVE, device_name

    found = []
    for measured in Measurements(store_dir or default_folder()).load():
        try:
            curve = CostCurve.from_json(measured.figures.get(CURVE))
        except ValueError:
            continue
        if measured.on.device == device_name():
            found.append(described(curve, f"{measured.model}, as measured {measured.date[:10]}", measured.on._asdict()))
    return found


def measured(network: Any, arena: Any) -> list[Finding]:
    """Measure a loaded model in its pool. Nothing of it is remembered."""
    from ...engine.measuring import curve_of

    try:
        curve = curve_of(network, arena, Measurements(None))
    except UnmeasurableError as error:
        return [Finding(ABOUT, "note", f"What drafts bring was not measured: {error}.")]
    except PoolExhaustedError:
        size = human_bytes(arena.pool.pool_bytes)
        return [Finding(ABOUT, "note", f"What drafts bring was not measured: a pool of {size} has no room for a sequence.")]
    if curve is None:
        return [Finding(ABOUT, "note", "Nothing is drafted for this model: its caches cannot take tokens back.")]
    return [described(curve, "This model")]


def described(curve: CostCurve, whose: str, more: dict[str, Any] | None = None) -> Finding:
    """A finding with the curve, and what drafts of each length bring at each acceptance."""
    one = curve.seconds(1)
    costs = ", ".join(f"{rows} rows {curve.seconds(rows) / one:.1f}" for rows in SHOWN_ROWS)
    lengths = range(1, EngineConfig.most_drafted + 1)
    gains = {share: [round(speed_up(curve, 1, length, share), 3) for length in lengths] for share in ACCEPTANCES}
    best = []
    for share, found in gains.items():
        most = max(found)
        count = found.index(most) + 1
        tokens = "token" if count == 1 else "tokens"
        best.append(f"{most:.1f}x at an acceptance of {share} ({count} {tokens})" if most > 1 else f"nothing at {share}")
    text = f"{whose}: against a forward of 1 row ({1000 * one:.1f} ms) {costs}. Drafts bring {', '.join(best)}."
    figures = {"curve": curve.to_json(), "speed_up": {str(share): found for share, found in gains.items()}}
    return Finding(ABOUT, "ok", text, figures=figures | (more or {}))
