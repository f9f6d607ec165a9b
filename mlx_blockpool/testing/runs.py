"""Runs of a model over caches, and the distance between two runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from ..config import KVBits
from ..kv.layer_caches import PooledLayer, PooledRotatingKVCache
from ..kv.parts import leaves_of
from ..kv.rows import arrays_of
from ..kv.state_caches import PooledArraysCache
from .outcome import ConformanceError, NotCheckedError
from .subject import Subject

# Parts of the largest logit: sums in another order stay far below, one wrong key of a few hundred far above.
TOLERANCE = 1e-5
# Where mlx-lm's own logits depend on where a prompt is cut, this many times as much is allowed. Beyond UNSTEADY nothing is
# checked.
LEEWAY = 10
UNSTEADY = 0.01
HINT = "The spec says what the caches are; caches or attention of the model's own may need a layer kind that there is not."

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
    """The logits on mlx-lm's own caches, which may be rounded. Raises ConformanceError if a row has no finite logit."""
    found = run(subject.model, subject.stock(bits), parts)
    if not all(bool(mx.isfinite(row).any()) for row in found):
        raise ConformanceError("no finite logits on mlx-lm's own caches", "a model that runs", "Scale its weights down.")
    return found


def distance(needed: Sequence[mx.array], found: Sequence[mx.array]) -> list[float]:
    """The largest difference of each pair of rows, in parts of the largest finite logit; infinite where one is finite alone."""
    scale = max(float(mx.abs(mx.where(mx.isfinite(row), row, 0)).max()) for row in needed) or 1.0
    return [_apart(a, b) / scale for a, b in zip(needed, found, strict=True)]


def same(needed: Sequence[mx.array], found: Sequence[mx.array], parts: Parts, what: str, tolerance: float = TOLERANCE) -> float:
    """Compare the logits after each part; the largest difference. Raises ConformanceError that names the first wrong one."""
    apart = distance(needed, found)
    for i, gap in enumerate(apart):
        if not gap <= tolerance:
            at = sum(len(part) for part in parts[: i + 1])
            raise ConformanceError(
                f"{what}: logits after token {at} that differ by {gap:.1e} of the largest", f"{tolerance:.0e} at most", HINT
            )
    return max(apart)


def allowed(subject: Subject, parts: Parts, tolerance: float = TOLERANCE) -> float:
    """The tolerance for a prompt that is computed in parts, where a cold run may compute it in others.

    Raises NotCheckedError if mlx-lm's own caches give something else altogether then.
    """
    whole = [token for part in parts for token in part]
    own = max(distance(cold(subject, [whole]), cold(subject, parts)[-1:]))
    if own > UNSTEADY:
        raise NotCheckedError(f"On mlx-lm's own caches logits differ by {own:.1e} where a prompt is cut elsewhere.")
    return max(tolerance, LEEWAY * own)


def exactly(gap: float) -> str:
    return "exact" if gap == 0 else f"within {gap:.0e} of the largest logit"


def content(caches: list[Any]) -> list[bytes]:
    """The bytes that caches hold, layer by layer; windows in temporal order."""
    found: list[bytes] = []
    for leaf in leaves_of(caches):
        if isinstance(leaf, PooledArraysCache):
            found += [b"" if array is None else _bytes(array) for array in leaf.cache]
        elif isinstance(leaf, PooledRotatingKVCache) and not leaf.empty():
            found += [_bytes(leaf._temporal_order(array)) for array in _arrays(leaf)]
        elif isinstance(leaf, PooledLayer) and not leaf.empty():
            found += [_bytes(array) for array in _arrays(leaf)]
    return found


def _arrays(leaf: PooledLayer) -> list[mx.array]:
    return [array for rows in leaf.held()[:2] for array in arrays_of(rows)]


def _bytes(array: Any) -> bytes:
    return np.array(mx.contiguous(array).view(mx.uint8)).tobytes() if array.size else b""


def _apart(needed: mx.array, found: mx.array) -> float:
    finite = mx.isfinite(needed)
    if needed.shape != found.shape or not bool((finite == mx.isfinite(found)).all()):
        return float("inf")
    return float(mx.abs(mx.where(finite, needed - found, 0)).max())
