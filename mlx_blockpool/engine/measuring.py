"""Figures of a model's speed that its engine decides by: remembered, or measured now.

Owned by the generation thread.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
from collections.abc import Callable
from dataclasses import asdict
from importlib import metadata
from typing import Any, TypeVar

import mlx.core as mx
from mlx.utils import tree_flatten

from ..config import EngineConfig
from ..drafts.curve import CostCurve
from ..errors import MeasuringStoppedError, PoolExhaustedError, UnmeasurableError
from ..kv.arena import KVArena
from ..kv.build import Probe
from ..kv.capabilities import Capabilities
from ..kv.cost_model import PathCosts
from ..kv.decode_policy import device
from ..kv.measuring import SECONDS, measure_curve, no_interrupt
from ..kv.path_measuring import measure_paths
from ..kv.probe import ENOUGH_BLOCKS, confirms, probe
from ..kv.proof import TOO_SMALL
from ..model_files.device import WiredLimit
from ..plugins import code_digest
from ..ranks.group import Ranks
from ..store.measurements import MeasuredOn, Measurements
from .caches import Caches, PooledCaches

log = logging.getLogger(__name__)

CURVE, PATHS, PROOF = "curve", "paths", "proof"

# It reads a file each time.
version = functools.cache(metadata.version)

C = TypeVar("C", bound=Caches)
Figures = TypeVar("Figures")


def device_name() -> str:
    """The device that computes, in as much detail as figures depend on."""
    return f"{device()} {mx.device_info().get('device_name', 'unknown')}, {os.cpu_count()} cores"


def measured_on(model: Any, arena: KVArena) -> MeasuredOn:
    """What the figures of this model in this pool depend on."""
    return MeasuredOn(device_name(), _versions(), arena.spec.fingerprint(), _digest(model))


def _versions() -> str:
    return ", ".join(f"{name} {version(name)}" for name in ("mlx", "mlx-lm", "mlx-blockpool"))


def remembering(measurements: Measurements, weights: str, name: str) -> Probe:
    """probe() for the model `name`, whose weights and config have the identity `weights`.

    What it finds is remembered with these, the versions and the code of all that computes, the
    device, the caches and how many blocks the pool has for trying them. While none of them changes,
    one forward confirms it at the next load.
    """

    def probed(model: Any, arena: KVArena, ranks: Ranks) -> Capabilities:
        modules = {type(module).__module__ for _, module in model.named_modules()}
        digest = code_digest(modules)
        if digest is None:
            return probe(model, arena, ranks)
        # A smaller pool cannot show all.
        size = max(1, sum(map(arena.spec.bytes_per_block, arena.spec.groups)))
        blocks = min(arena.pool.pool_bytes // size, ENOUGH_BLOCKS).bit_length()
        code = f"{_versions()}, code {digest}, path {arena.decode.path}, blocks {blocks}"
        on = MeasuredOn(device_name(), code, arena.spec.fingerprint(), weights)
        known = _remembered(Capabilities.from_json, measurements.figures(on).get(PROOF))
        if known is not None and confirms(model, arena, known):
            return known
        found = probe(model, arena, ranks)
        if not any(TOO_SMALL in why for why in found.differs):
            measurements.save(on, name, {PROOF: found.to_json()})
        return found

    return probed


def measured(
    model: Any,
    caches: C,
    config: EngineConfig | None,
    measurements: Measurements | None = None,
    name: str | None = None,
    interrupt: Callable[[], None] = no_interrupt,
) -> C:
    """The caches of an engine with the figures that it decides by, if `config` wants them: as
    remembered, or measured now.

    What is measured is added to `measurements`, under `name`; without `measurements` it is not
    remembered. Measuring takes free blocks only and evicts nothing. `interrupt` is called before
    and between steps. Where it raises MeasuringStoppedError, or where blocks are in use or cached
    and too few are free, the rest is left for another call, and `is_unmeasured` says so. Other
    errors are logged and end the measuring for this load: a model serves without its figures.
    """
    config = config or EngineConfig()
    if not config.measures or not isinstance(caches, PooledCaches):
        return caches
    arena, remembered = caches.prefix.arena, measurements or Measurements(None)
    caches.is_unmeasured = False
    needs_paths = arena.decode.path == "auto" and not arena.decode.costs
    needs_curve = (
        config.drafts == "auto" and caches.curve is None and arena.capabilities.verifies is not None
    )
    if not needs_paths and not needs_curve:
        return caches
    on, name = measured_on(model, arena), name or arena.spec.model_id
    figures = remembered.figures(on)
    limit = WiredLimit(config.wired_bytes)
    try:
        with arena.evicting_nothing():
            # Paths first, as the forwards of the curve take those that are chosen.
            if needs_paths:
                kernels = arena.capabilities.kernels
                known = _remembered(_paths, figures.get(PATHS)) or {}
                if known and all(group in known and known[group].kernel for group in kernels):
                    arena.decode.costs = known
                else:
                    found = _tried(
                        PATHS, lambda: _measure_paths(model, arena, name, interrupt), caches
                    )
                    arena.decode.costs = found or {}
                    if found:
                        remembered.save(
                            on,
                            name,
                            {PATHS: {str(group): asdict(costs) for group, costs in found.items()}},
                        )
            if needs_curve:
                caches.curve = _remembered(CostCurve.from_json, figures.get(CURVE))
                if caches.curve is None:
                    caches.curve = _tried(
                        CURVE, lambda: _measure_curve(model, arena, name, interrupt), caches
                    )
                    if caches.curve is not None and caches.curve.is_whole:
                        remembered.save(on, name, {CURVE: caches.curve.to_json()})
    finally:
        limit.restore()
    return caches


def _remembered(read: Callable[[Any], Figures], figures: Any) -> Figures | None:
    """Figures of the store; None where there are none, or none that an engine can decide by."""
    try:
        return read(figures)
    except (AttributeError, KeyError, TypeError, ValueError):
        return None


def _paths(figures: Any) -> dict[int, PathCosts]:
    return {int(group): PathCosts.from_json(costs) for group, costs in figures.items()}


def _measure_curve(
    model: Any, arena: KVArena, name: str, interrupt: Callable[[], None]
) -> CostCurve:
    interrupt()
    log.info("measuring what forwards of %s cost: about %g seconds", name, SECONDS)
    return measure_curve(model, arena, interrupt=interrupt)


def _measure_paths(
    model: Any, arena: KVArena, name: str, interrupt: Callable[[], None]
) -> dict[int, PathCosts]:
    """The costs of decode paths.

    A machine that was too busy to measure any tries again at the next load.
    """
    interrupt()
    _need_blocks(arena)
    log.info("measuring decode paths of %s: about a second", name)
    return measure_paths(model, arena, interrupt=interrupt)


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
        log.warning(
            "measuring the %s of %s has failed, and it is served without: %s", what, model, why
        )
    if why:
        caches.unmeasurable = {**caches.unmeasurable, what: why}
    return None


def _is_empty(arena: KVArena) -> bool:
    return not any(counts.held or counts.evictable for counts in arena.pool.settle())


def _need_blocks(arena: KVArena) -> None:
    """Raises PoolExhaustedError where not even one block of each group is free."""
    tables = [arena.pool.open_table(group) for group in range(len(arena.spec.groups))]
    arena.pool.reserve(tables, [1] * len(tables))
    for table in tables:
        arena.pool.release(table)


def _digest(model: Any) -> str:
    """32 hex digits for the names, shapes and types of all weights, whatever their values."""
    shapes = sorted(
        (name, array.shape, str(array.dtype)) for name, array in tree_flatten(model.parameters())
    )
    return hashlib.blake2b(repr(shapes).encode(), digest_size=16).hexdigest()
