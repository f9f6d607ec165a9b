"""Runs of a model over caches, and the distance between two runs."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from ..config import KVBits
from ..kv.proof import TOLERANCE, Parts, distance, run
from .subject import ConformanceError, NotCheckedError, Subject

# If mlx-lm's own logits depend on where a prompt is cut, LEEWAY times their difference is allowed.
# Beyond UNSTEADY nothing is checked.
LEEWAY = 10
UNSTEADY = 0.01
HINT = (
    "The spec describes the caches; a model with its own caches or attention may need a layer "
    "kind that does not exist."
)


def cold(subject: Subject, parts: Parts, bits: KVBits | None = None) -> list[mx.array]:
    """The logits on mlx-lm's own caches, which may be rounded. They are computed once for all
    checks.

    Raises ConformanceError if a row has no finite logit.
    """
    known, key = subject.cold_logits, (bits, *map(tuple, parts))
    if key not in known:
        known[key] = run(subject.model, subject.stock(bits), parts)
    found = known[key]
    if not all(bool(mx.isfinite(row).any()) for row in found):
        raise ConformanceError(
            "no finite logits on mlx-lm's own caches",
            "a model that runs",
            "Scale its weights down.",
        )
    return found


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
