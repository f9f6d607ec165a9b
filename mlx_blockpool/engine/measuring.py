"""What an engine decides by of its model's speed: figures that are remembered, or measured now."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any, TypeVar

import mlx.core as mx
from mlx.utils import tree_flatten

from ..config import EngineConfig
from ..drafts.curve import CostCurve
from ..errors import MeasuringStoppedError
from ..kv.arena import KVArena
from ..kv.decode_policy import device
from ..kv.measuring import measure_curve, proceed
from ..kv.path_costs import PathCosts
from ..kv.path_measuring import measure_paths
from ..store.measurements import MeasuredOn, Measurements
from ..system import WiredLimit
from .caches import Caches, PooledCaches

log = logging.getLogger(__name__)

CURVE, PATHS = "curve", "paths"

C = TypeVar("C", bound=Caches)


def device_name() -> str:
    """The device that computes, as far as figures differ by it."""
    return f"{device()} {mx.device_info().get('device_name', 'unknown')}, {os.cpu_count()} cores"


def measured_on(model: Any, arena: KVArena) -> MeasuredOn:
    """What figures of this model in this pool depend on."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("mlx", "mlx-lm", "mlx-blockpool"))
    return MeasuredOn(device_name(), versions, arena.spec.fingerprint(), _digest(model))


def measured(
    model: Any,
    caches: C,
    config: EngineConfig | None,
    measurements: Measurements | None = None,
    name: str | None = None,
    look: Callable[[], None] = proceed,
) -> C:
    """The caches of an engine with the figures that it decides by, if `config` wants them: as remembered, or measured now.

    What is measured is added to `measurements`, under `name`; None: it is not remembered. `look` is called before and between
    readings. Where it raises MeasuringStoppedError, what is not known yet is left for another call, and `is_unmeasured` says so.
    """
    config = config or EngineConfig()
    # Ranks would have to measure together: each has figures of its own, and none takes as many readings as another.
    if not config.measures or not isinstance(caches, PooledCaches) or caches.prefix.ranks.size > 1:
        return caches
    arena, remembered = caches.prefix.arena, measurements or Measurements(None)
    caches.is_unmeasured = False
    limit = WiredLimit(config.wired_bytes)
    try:
        if config.drafts != "off" and caches.curve is None:
            with _left_where_stopped(caches):
                caches.curve = curve_of(model, arena, remembered, name, look)
        if arena.decode.path == "auto" and not arena.decode.costs:
            with _left_where_stopped(caches):
                arena.decode.costs = paths_of(model, arena, remembered, name, look)
    finally:
        limit.restore()
    return caches


@contextmanager
def _left_where_stopped(caches: PooledCaches) -> Iterator[None]:
    try:
        yield
    except MeasuringStoppedError:
        caches.is_unmeasured = True


def curve_of(
    model: Any, arena: KVArena, measurements: Measurements, name: str | None = None, look: Callable[[], None] = proceed
) -> CostCurve | None:
    """The cost curve of a model that verifies drafts; None for another one, and for a pool without room to measure in."""
    if arena.verifies is None:
        return None
    on = measured_on(model, arena)
    try:
        return CostCurve.from_json(measurements.figures(on).get(CURVE))
    except ValueError:
        log.debug("the cost curve of %s is measured", arena.spec.model_id)
    look()
    curve = measure_curve(model, arena, look=look)
    if curve is not None:
        measurements.save(on, name or arena.spec.model_id, {CURVE: curve.to_json()})
    return curve


def paths_of(
    model: Any, arena: KVArena, measurements: Measurements, name: str | None = None, look: Callable[[], None] = proceed
) -> dict[int, PathCosts]:
    """The costs of decode paths, by layer group; nothing for groups that are not measured.

    What is measured is added to `measurements`, under `name`; a machine that was too busy to measure tries again next time.
    """
    on = measured_on(model, arena)
    try:
        found = measurements.figures(on).get(PATHS)
        if not isinstance(found, dict):
            raise ValueError("not measured")
        remembered = {int(group): PathCosts.from_json(costs) for group, costs in found.items()}
        if all(group in remembered and remembered[group].kernel for group in arena.decode.trusted):
            return remembered
    except ValueError:
        log.debug("the decode paths of %s are measured", arena.spec.model_id)
    look()
    costs = measure_paths(model, arena, look=look)
    if costs:
        measurements.save(on, name or arena.spec.model_id, {PATHS: {str(group): each.to_json() for group, each in costs.items()}})
    return costs


def _digest(model: Any) -> str:
    """32 hex digits for the names, shapes and types of all weights, whatever their values."""
    shapes = sorted((name, array.shape, str(array.dtype)) for name, array in tree_flatten(model.parameters()))
    return hashlib.blake2b(repr(shapes).encode(), digest_size=16).hexdigest()
