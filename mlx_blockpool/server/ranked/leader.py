"""Leader: how rank 0 runs the steps of a group's models: by exchanges that bring all that changes
an engine.

Owned by the generation thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from ...config import RankConfig, ServerConfig
from ...errors import GroupError, GroupLostError
from ...ranks.facts import Addressed, Cancel, Load, Unload
from ...ranks.head import Act, Head
from ...ranks.watchdog import TurnWatchdog
from ..generator import LAST_WORDS_SECONDS, BlockpoolGenerator
from ..model import LoadedModel
from ..models.registry import ModelSwap
from ..provider import ModelKey
from ..replies import Reply
from ..step_driver import StepDriver
from .ending import Loss
from .replica import Replica, SharedModel, driver_of, loss_of

log = logging.getLogger(__name__)


class Leader(StepDriver):
    """Runs the steps of a group, on rank 0. `loss`: the end of the process. `clock`: seconds."""

    def __init__(
        self,
        replica: Replica,
        config: RankConfig,
        loss: Loss,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        # A group reads a model in one turn.
        self.most_seconds = config.load_seconds
        self._loss = loss
        self._replica = replica
        self._config = config
        self._facts: list[Addressed] = []
        self._has_begun = self._is_napping = False
        # How long a step of each model took last, by its number.
        self._step_seconds: dict[int, float] = {}
        self._clock = clock
        # When there was work last.
        self._worked = clock()

    def begin(self) -> None:
        self._replica.agree()
        self._has_begun = True

    def step(self, served: LoadedModel) -> bool:
        assert isinstance(served, SharedModel)
        seconds = self._step_seconds.get(served.number, self._config.lease_seconds)
        turns = driver_of(served).lease_for(seconds, self._config)
        step_us = int(seconds * 1e6)
        head = self._exchange(Head(Act.STEP, step_us=step_us, turns=turns, model=served.number))
        self._worked = start = self._clock()
        progress, steps = self._run(head)
        self._step_seconds[served.number] = (self._clock() - start) / steps
        return progress

    def idle(self, models: Collection[LoadedModel], rests: bool = False) -> None:
        if not self._has_begun:
            # The other ranks have ended, and this one is about to.
            return
        nap_ms = self._nap_ms() if rests else 0
        self._run(self._exchange(Head(Act.IDLE, nap_ms=nap_ms)))
        self.nap_seconds, self._is_napping = nap_ms / 1000, nap_ms > 0

    def _nap_ms(self) -> int:
        """How long all ranks sleep now: the longer, the longer there was no work.

        The longest nap is one that can be ended.
        """
        config = self._config
        calm = int((self._clock() - self._worked) / config.calm_seconds)
        naps = (
            (*config.nap_ms, config.long_nap_ms)
            if self._replica.wakes.are_connected
            else config.nap_ms
        )
        return naps[min(calm, len(naps) - 1)]

    def drop(self, key: ModelKey, reply: Reply) -> None:
        if reply.sequence is not None:
            self._facts.append((self._replica.name_of(key), Cancel(reply.sequence.uid)))

    def lose(self, error: BaseException) -> None:
        self._loss.end(error)

    def load(self, model: LoadedModel) -> None:
        """Load a prepared model on all ranks.

        Raises LoadError if one of them cannot, and what Replica.load() raises.
        """
        self._exchange(Head(), (self._replica.name_of(model.key), Load()))
        self._replica.load(model)
        self._worked = self._clock()

    def unload(self, model: LoadedModel) -> None:
        """Have the other ranks unload a model, which is still loaded here."""
        self._exchange(Head(), (self._replica.name_of(model.key), Unload()))
        # Of the facts that came with it: their errors, and tokens that forms force.
        for event in driver_of(model).take_events():
            model.deliver(event)

    def end(self) -> None:
        if not self._has_begun:
            return
        try:
            self._exchange(Head(Act.STOP))
            self._replica.finish()
        except GroupLostError as error:
            # Another rank has ended before. What this one has to write, it writes by itself.
            log.warning("%s", error)
        except GroupError as error:
            self.lose(error)

    def _exchange(self, head: Head, *facts: Addressed) -> Head:
        if self._is_napping:
            self._is_napping = False
            self._replica.wakes.wake()
        noted, self._facts = [*self._facts, *facts], []
        with _alike():
            heads, _ = self._replica.exchange(replace(head, now_us=int(self._clock() * 1e6)), noted)
        self.condition.note(heads)
        if self.stop is not None and any(each.wants_stop for each in heads):
            # It waits for the requests in progress, on another thread.
            threading.Thread(target=self.stop, name="stop", daemon=True).start()
            self.stop = None
        return heads[0]

    def _run(self, head: Head) -> tuple[bool, int]:
        with _alike():
            done = self._replica.run(head)
        self._replica.rest()
        return done


class SharedSwap(ModelSwap):
    """A swap on all ranks of a group, which stand still meanwhile."""

    def __init__(self, leader: Leader, *of_swap: Any, **more: Any) -> None:
        self._leader = leader
        super().__init__(*of_swap, **more)

    def _take_out(self, key: ModelKey) -> Iterator[None]:
        self._leader.unload(self._models.loaded[key])
        yield from super()._take_out(key)

    def _save(self, leaving: LoadedModel) -> Iterator[None]:
        yield from ()

    def _open(self, coming: LoadedModel) -> Iterator[None]:
        yield
        self._leader.load(coming)


@contextmanager
def _alike() -> Iterator[None]:
    """What all ranks do alike: other ranks cannot know how far this one has come after an error.

    Raises GroupError for any.
    """
    try:
        yield
    except GroupError:
        raise
    except Exception as error:
        raise GroupLostError(0, f"{type(error).__name__}: {error}") from error


def step_driver(generator: BlockpoolGenerator, config: ServerConfig) -> StepDriver:
    """The driver of a server on one machine, or of rank 0."""
    registry, ranks = generator.registry, generator.registry.template.ranks
    if ranks.decides:
        return StepDriver()
    loss = loss_of(
        registry,
        config,
        generator.give_up,
        lambda: generator.access.wait_until_empty(LAST_WORDS_SECONDS),
    )
    watchdog = TurnWatchdog(config.ranks.seconds, loss.end)
    watchdog.start()
    leader = Leader(Replica(ranks, registry, config, watchdog), config.ranks, loss)
    registry.swap_class = partial(SharedSwap, leader)
    return leader
