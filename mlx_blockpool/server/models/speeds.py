"""ModelSpeeds: when the server measures how fast its models are: at their load, or later where requests would wait for it.

Owned by the generation thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from ...config import EngineConfig
from ...engine.caches import PooledCaches
from ...engine.measuring import measured
from ...errors import MeasuringStoppedError
from ...store.measurements import Measurements

if TYPE_CHECKING:
    from ..model import LoadedModel
    from .provider import ModelKey
    from .registry import ModelRegistry

log = logging.getLogger(__name__)

# A server is quiet once no request has started or ended for so long: between two turns of an agent it often is not.
QUIET_SECONDS = 1.0
# Each time that measuring a model is stopped it waits twice as long, up to these, so that an agent with longer pauses between its
# requests is not held up again and again.
LONGEST_QUIET_SECONDS = 60.0


class ModelSpeeds:
    """`has_arrivals`: whether something arrived that the thread has not taken yet."""

    def __init__(self, registry: ModelRegistry, config: EngineConfig, measurements: Measurements) -> None:
        self.has_arrivals: Callable[[], bool] = lambda: False
        self._registry = registry
        self._config = config
        self._measurements = measurements
        # Of models that are still to be measured: when it was tried last, and how long the server has to be quiet then.
        self._tried: dict[ModelKey, tuple[float, float]] = {}

    def at_load(self, model: LoadedModel, caches: PooledCaches) -> PooledCaches:
        """The caches of a model that is being loaded, with its figures; without those that requests of others would wait for."""
        self._tried.pop(model.key, None)
        return self._measured(model, caches, partial(self._look_at_others, model.key))

    def catch_up(self) -> None:
        """Measure what is not known yet of the loaded models, if the server is quiet, and until something arrives."""
        loaded = list(self._registry.loaded.values())
        for model in loaded:
            if isinstance(model.caches, PooledCaches) and model.caches.is_unmeasured:
                tried, seconds = self._tried.get(model.key, (0.0, QUIET_SECONDS))
                since = max(tried, *(other.used for other in loaded))
                if self._registry.queue.clock() - since >= seconds and not self._is_needed():
                    self._measure_later(model, model.caches, seconds)

    def _measure_later(self, model: LoadedModel, caches: PooledCaches, seconds: float) -> None:
        before = _known(caches)
        self._measured(model, caches, self._look)
        if caches.is_unmeasured:
            self._tried[model.key] = self._registry.queue.clock(), min(2 * seconds, LONGEST_QUIET_SECONDS)
        else:
            self._tried.pop(model.key, None)
        if _known(caches) == before:
            return
        log.info("it is known now what steps of %s cost", model.provider.name)
        if model.engine is not None:
            model.engine.steps.decide()
        model.update_report()

    def _measured(self, model: LoadedModel, caches: PooledCaches, look: Callable[[], None]) -> PooledCaches:
        return measured(model.provider.model, caches, self._config, self._measurements, model.provider.name, look)

    def _look(self) -> None:
        if self._is_needed():
            raise MeasuringStoppedError

    def _is_needed(self) -> bool:
        registry = self._registry
        is_busy = any(_is_busy(model) for model in registry.loaded.values())
        return is_busy or bool(registry.queue) or registry.swap is not None or self.has_arrivals()

    def _look_at_others(self, key: ModelKey) -> None:
        # What arrives may be for a loaded model. Beside none, all wait for this one.
        registry = self._registry
        others = [model for model in registry.loaded.values() if model.key != key]
        are_waiting = any(place.key != key for place in registry.queue)
        if are_waiting or any(_is_busy(model) for model in others) or (others and self.has_arrivals()):
            raise MeasuringStoppedError


def _known(caches: PooledCaches) -> tuple[Any, ...]:
    """What is known of a model's speed, for comparison."""
    return caches.curve, caches.prefix.arena.decode.costs, caches.unmeasurable, caches.is_unmeasured


def _is_busy(model: LoadedModel) -> bool:
    """Whether a model has requests, or reads or writes records: a measuring would wait for the disk, and delay what reads it."""
    if model.is_busy:
        return True
    caches = model.caches
    return isinstance(caches, PooledCaches) and (caches.is_room_coming or caches.is_writing)
