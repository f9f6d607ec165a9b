"""Runs of a model over caches, and the distance between two runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx

from ..config import KVBits
from .subject import ConformanceError, NotCheckedError, Subject

# A fraction of the largest logit: sums in another order stay far below it, and one wrong key of a
# few hundred is far above it.
TOLERANCE = 1e-5
# If mlx-lm's own logits depend on where a prompt is cut, LEEWAY times their difference is allowed.
# Beyond UNSTEADY nothing is checked.
LEEWAY = 10
UNSTEADY = 0.01
HINT = (
    "The spec describes the caches; a model with its own caches or attention may need a layer "
    "kind that does not exist."
)

Parts = Sequence[Sequence[int]]


def run(model: Any, caches: list[Any], parts: Parts) -> list[mx.array]:
    """Logits [vocabulary] after each part of a prompt."""
    found = []
    for part in parts:
        found.append(model(mx.array([list(part)]), cache=caches)[0, -1].astype(mx.float32))
        mx.eval([c.state for c in caches if len(part) > 1], found[-1])
    return found


def cut(tokens: Sequence[int], places: Iterable[int]) -> list[list[int]]:
    """Split tokens at `places`."""
    ends = [*sorted({p for p in places if 0 < p < len(tokens)}), len(tokens)]
    return [list(tokens[a:b]) for a, b in zip([0, *ends], ends, strict=False)]


def cold(subject: Subject, parts: Parts, bits: KVBits | None = None) -> list[mx.array]:
    """The logits on mlx-lm's own caches, which may be rounded.

    Raises ConformanceError if a row has no finite logit.
    """
    found = run(subject.model, subject.stock(bits), parts)
    if not all(bool(mx.isfinite(row).any()) for row in found):
        raise ConformanceError(
            "no finite logits on mlx-lm's own caches",
            "a model that runs",
            "Scale its weights down.",
        )
    return found


def distance(needed: Sequence[mx.array], found: Sequence[mx.array]) -> list[float]:
    """The largest difference of each pair of rows, as a fraction of the largest finite logit;
    infinite if only one is finite.
    """
    scale = max(float(mx.abs(mx.where(mx.isfinite(row), row, 0)).max()) for row in needed) or 1.0
    return [_apart(a, b) / scale for a, b in zip(needed, found, strict=True)]


def same(
    needed: Sequence[mx.array],
    found: Sequence[mx.array],
    parts: Parts,
    what: str,
    tolerance: float = TOLERANCE,
) -> float:
    """Compare the logits after each part.

    Returns the largest difference. Raises ConformanceError for the first that is wrong.
    """
    apart = distance(needed, found)
    for i, gap in enumerate(apart):
        if not gap <= tolerance:
            at = sum(len(part) for part in parts[: i + 1])
            raise ConformanceError(
                f"{what}: logits after token {at} that differ by {gap:.1e} of the largest",
                f"at most {tolerance:.0e}",
                HINT,
            )
    return max(apart)


def allowed(subject: Subject, parts: Parts, tolerance: float = TOLERANCE) -> float:
    """The tolerance for a prompt that is computed in other parts than in a cold run.

    Raises NotCheckedError if the logits on mlx-lm's own caches differ too much then.
    """
    whole = [token for part in parts for token in part]
    own = max(distance(cold(subject, [whole]), cold(subject, parts)[-1:]))
    if own > UNSTEADY:
        raise NotCheckedError(
            f"On mlx-lm's own caches logits differ by {own:.1e} if a prompt is cut elsewhere."
        )
    return max(tolerance, LEEWAY * own)


def exactly(gap: float) -> str:
    return "exact" if gap == 0 else f"within {gap:.0e} of the largest logit"


def _apart(needed: mx.array, found: mx.array) -> float:
    finite = mx.isfinite(needed)
    if needed.shape != found.shape or not bool((finite == mx.isfinite(found)).all()):
        return float("inf")
    return float(mx.abs(mx.where(finite, needed - found, 0)).max())
