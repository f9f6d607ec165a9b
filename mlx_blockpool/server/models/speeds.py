"""ModelSpeeds: when the server measures how fast its models are: at their load, or later where requests would wait for it.

Owned by the generation thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

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


class ModelSpeeds:
    """`has_arrivals`: whether something arrived that the thread has not taken yet."""

    def __init__(self, registry: ModelRegistry, config: EngineConfig, measurements: Measurements) -> None:
        self.has_arrivals: Callable[[], bool] = lambda: False
        self._registry = registry
        self._config = config
        self._measurements = measurements

    def at_load(self, model: LoadedModel, caches: PooledCaches) -> PooledCaches:
        """The caches of a model that is being loaded, with its figures; without those that requests of others would wait for."""
        return self._measured(model, caches, partial(self._look_at_others, model.key))

    def catch_up(self) -> None:
        """Measure what is not known yet of the loaded models, if the server is quiet, and until something arrives."""
        loaded = list(self._registry.loaded.values())
        left = [model for model in loaded if isinstance(model.caches, PooledCaches) and model.caches.is_unmeasured]
        now = self._registry.queue.clock()
        if not left or any(now - model.used < QUIET_SECONDS for model in loaded):
            return
        for model in left:
            if not self._is_needed():
                self._measure_later(model)

    def _measure_later(self, model: LoadedModel) -> None:
        caches = model.caches
        assert isinstance(caches, PooledCaches)
        self._measured(model, caches, self._look)
        if caches.is_unmeasured:
            return
        log.info("measured what steps of %s cost", model.provider.name)
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
        is_busy = any(model.is_busy for model in registry.loaded.values())
        return is_busy or bool(registry.queue) or registry.swap is not None or self.has_arrivals()

    def _look_at_others(self, key: ModelKey) -> None:
        # What arrives may be for a loaded model. Beside none, all wait for this one.
        registry = self._registry
        others = [model for model in registry.loaded.values() if model.key != key]
        are_waiting = any(place.key != key for place in registry.queue)
        if are_waiting or any(model.is_busy for model in others) or (others and self.has_arrivals()):
            raise MeasuringStoppedError
