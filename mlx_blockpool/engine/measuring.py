"""What an engine decides by of its model's speed: figures that are remembered, or measured now."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, TypeVar

import mlx.core as mx
from mlx.utils import tree_flatten

from ..config import EngineConfig
from ..drafts.curve import CostCurve
from ..errors import MeasuringStoppedError, PoolExhaustedError, UnmeasurableError
from ..kv.arena import KVArena
from ..kv.decode_policy import device
from ..kv.measuring import SECONDS, measure_curve, proceed
from ..kv.path_costs import PathCosts
from ..kv.path_measuring import measure_paths
from ..store.measurements import MeasuredOn, Measurements
from ..system import WiredLimit
from .caches import Caches, PooledCaches

log = logging.getLogger(__name__)

CURVE, PATHS = "curve", "paths"

C = TypeVar("C", bound=Caches)
Figures = TypeVar("Figures")


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

    What is measured is added to `measurements`, under `name`; None: it is not remembered. It takes free blocks only and evicts
    nothing. `look` is called before and between readings. Where it raises MeasuringStoppedError, or where blocks are in use or
    cached and too few are free, what is not known yet is left for another call, and `is_unmeasured` says so. Whatever else is
    raised is logged and ends the measuring for this load: a model serves without its figures.
    """
    config = config or EngineConfig()
    # Ranks would have to measure together: each has figures of its own, and none takes as many readings as another.
    if not config.measures or not isinstance(caches, PooledCaches) or caches.prefix.ranks.size > 1:
        return caches
    arena, remembered = caches.prefix.arena, measurements or Measurements(None)
    caches.is_unmeasured = False
    limit = WiredLimit(config.wired_bytes)
    try:
        with arena.evicting_nothing():
            # Paths first, as the forwards of the curve take those that are chosen.
            if arena.decode.path == "auto" and not arena.decode.costs:
                found = _tried(PATHS, lambda: paths_of(model, arena, remembered, name, look), caches)
                arena.decode.costs = found or arena.decode.costs
            if config.drafts == "auto" and caches.curve is None:
                caches.curve = _tried(CURVE, lambda: curve_of(model, arena, remembered, name, look), caches)
    finally:
        limit.restore()
    return caches


def _tried(what: str, measure: Callable[[], Figures], caches: PooledCaches) -> Figures | None:
    """What `measure` returns; None where it raises, or has failed for this load before."""
    if what in caches.unmeasurable:
        return None
    arena, why = caches.prefix.arena, ""
    model, was_empty = arena.spec.model_id, _is_empty(arena)
    try:
        return measure()
    except MeasuringStoppedError:
        caches.is_unmeasured = True
    except PoolExhaustedError:
        if was_empty:
            why = "the pool is too small"
        else:
            caches.is_unmeasured = True
    except UnmeasurableError as error:
        why = str(error)
        log.info("the %s of %s is not measured: %s", what, model, why)
    except Exception as error:
        # The model's own code ran, on batches that no request may ever ask for.
        why = f"{type(error).__name__}: {error}"
        log.warning("measuring the %s of %s has failed, and it is served without: %s", what, model, why)
    if why:
        caches.unmeasurable = {**caches.unmeasurable, what: why}
    return None


def _is_empty(arena: KVArena) -> bool:
    return not any(counts.held or counts.evictable for counts in arena.pool.settle())


def curve_of(
    model: Any, arena: KVArena, measurements: Measurements, name: str | None = None, look: Callable[[], None] = proceed
) -> CostCurve | None:
    """The cost curve of a model that verifies drafts; None for another one.

    What is measured with room for all of it is added to `measurements`, under `name`. Raises what measure_curve() raises.
    """
    if arena.verifies is None:
        return None
    on = measured_on(model, arena)
    try:
        return CostCurve.from_json(measurements.figures(on).get(CURVE))
    except ValueError:
        log.debug("the cost curve of %s is measured", arena.spec.model_id)
    look()
    log.info("measuring what forwards of %s cost: about %g seconds", name or arena.spec.model_id, SECONDS)
    curve = measure_curve(model, arena, look=look)
    if curve.is_whole:
        measurements.save(on, name or arena.spec.model_id, {CURVE: curve.to_json()})
    return curve


def paths_of(
    model: Any, arena: KVArena, measurements: Measurements, name: str | None = None, look: Callable[[], None] = proceed
) -> dict[int, PathCosts]:
    """The costs of decode paths, by layer group; nothing for groups that are not measured.

    What is measured is added to `measurements`, under `name`; a machine that was too busy to measure tries again next time.
    Raises PoolExhaustedError where not even one block of each group is free.
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
    _need_room(arena)
    log.info("measuring decode paths of %s: about a second", name or arena.spec.model_id)
    costs = measure_paths(model, arena, look=look)
    if costs:
        measurements.save(on, name or arena.spec.model_id, {PATHS: {str(group): each.to_json() for group, each in costs.items()}})
    return costs


def _need_room(arena: KVArena) -> None:
    tables = [arena.pool.open_table(group) for group in range(len(arena.spec.groups))]
    arena.pool.reserve(tables, [1] * len(tables))
    for table in tables:
        arena.pool.release(table)


def _digest(model: Any) -> str:
    """32 hex digits for the names, shapes and types of all weights, whatever their values."""
    shapes = sorted((name, array.shape, str(array.dtype)) for name, array in tree_flatten(model.parameters()))
    return hashlib.blake2b(repr(shapes).encode(), digest_size=16).hexdigest()
