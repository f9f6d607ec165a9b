"""How rank 0 takes turns: Solo without other ranks; Leader with them, by exchanges that bring all that changes an engine.

Owned by the generation thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from ...config import RankConfig, ServerConfig
from ...errors import GroupError, GroupLostError
from ...ranks.facts import Addressed, Cancel, Load, Unload
from ...ranks.head import Act, Head
from ...ranks.lookout import Lookout
from ..ending import Loss
from ..model import LoadedModel
from ..models.provider import ModelKey
from ..replies import Reply
from .acts import engine_of
from .condition import Condition
from .replica import Replica, loss_of

if TYPE_CHECKING:
    from ..generator import BlockpoolGenerator

log = logging.getLogger(__name__)

# How long an idle thread waits for a request at a time.
IDLE_SECONDS = 0.1
# How long a process that ends waits for the responses that say why requests have ended.
LAST_WORDS_SECONDS = 0.5


class Turns(Protocol):
    """How the generation thread takes turns.

    nap_seconds: how long it may wait for arrivals while there is no work.
    stop:        what stops the server in order, once it listens.
    condition:   the ranks as their last heads have them.
    """

    nap_seconds: float
    condition: Condition
    stop: Callable[[], None] | None

    def begin(self) -> None:
        """Before the first turn. Raises GroupError if the ranks cannot serve together."""

    def step(self, served: LoadedModel) -> bool:
        """A step of a model, or several short ones. Returns whether it has made progress."""
        ...

    def idle(self, models: Collection[LoadedModel], rests: bool = False) -> None:
        """Let the idle ones of the models write behind. `rests`: there is no work, and the next turn may come later."""

    def drop(self, key: ModelKey, reply: Reply) -> None:
        """A request that waits for its model to be loaded again is dropped."""

    def lose(self, error: BaseException) -> None:
        """After an error in the generation thread: end the process if the other ranks cannot know how far this one is."""

    def end(self) -> None:
        """Behind the last turn."""


class Solo:
    """Turns of one rank. `catch_up`: work that waits until there is no other."""

    nap_seconds = IDLE_SECONDS
    stop: Callable[[], None] | None = None

    def __init__(self, catch_up: Callable[[], None] = lambda: None) -> None:
        self.condition = Condition()
        self._catch_up = catch_up

    def begin(self) -> None:
        pass

    def step(self, served: LoadedModel) -> bool:
        return served.step()

    def idle(self, models: Collection[LoadedModel], rests: bool = False) -> None:
        for served in models:
            if not served.live:
                served.idle()
        if rests:
            self._catch_up()

    def drop(self, key: ModelKey, reply: Reply) -> None:
        pass

    def lose(self, error: BaseException) -> None:
        pass

    def end(self) -> None:
        pass


class Leader:
    """Turns of a group, on rank 0. `loss`: the end of the process."""

    def __init__(self, replica: Replica, config: RankConfig, loss: Loss) -> None:
        self.stop: Callable[[], None] | None = None
        self.nap_seconds = IDLE_SECONDS
        self.condition = Condition()
        self.lose = loss.end
        self._replica = replica
        self._config = config
        self._facts: list[Addressed] = []
        self._has_begun = False
        self._step_seconds = config.lease_seconds
        # When there was work last, in seconds of time.monotonic().
        self._worked = time.monotonic()

    def begin(self) -> None:
        self._replica.agree()
        self._has_begun = True

    def step(self, served: LoadedModel) -> bool:
        turns = engine_of(served).lease_for(self._step_seconds, self._config)
        step_us = int(self._step_seconds * 1e6)
        head = self._exchange(Head(Act.STEP, step_us=step_us, turns=turns, model=served.number))
        self._worked = start = time.monotonic()
        progress, steps = self._run(head)
        self._step_seconds = (time.monotonic() - start) / steps
        return progress

    def idle(self, models: Collection[LoadedModel], rests: bool = False) -> None:
        if not self._has_begun:
            # The other ranks have ended, and this one is about to.
            return
        calm = int((time.monotonic() - self._worked) / self._config.calm_seconds)
        naps = self._config.nap_ms
        nap_ms = naps[min(calm, len(naps) - 1)] if rests else 0
        self._run(self._exchange(Head(Act.IDLE, nap_ms=nap_ms)))
        self.nap_seconds = nap_ms / 1000

    def drop(self, key: ModelKey, reply: Reply) -> None:
        if reply.sequence is not None:
            self._facts.append((self._replica.name_of(key), Cancel(reply.sequence.uid)))

    def load(self, model: LoadedModel) -> None:
        """Load a prepared model on all ranks. Raises LoadError if one of them cannot, and what Replica.load() raises."""
        self._exchange(Head(), (self._replica.name_of(model.key), Load()))
        self._replica.load(model)
        self._worked = time.monotonic()

    def unload(self, model: LoadedModel) -> None:
        """Have the other ranks unload a model, which is still loaded here."""
        self._exchange(Head(), (self._replica.name_of(model.key), Unload()))
        # Of the facts that came with it: their errors, and tokens that forms force.
        for event in engine_of(model).take_events():
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
        noted, self._facts = [*self._facts, *facts], []
        with _alike():
            heads, _ = self._replica.exchange(replace(head, now_us=int(time.monotonic() * 1e6)), noted)
        self.condition.note(heads)
        if self.stop is not None and any(each.wants_stop for each in heads):
            # It waits for the requests in progress, on a thread of its own.
            threading.Thread(target=self.stop, name="stop", daemon=True).start()
            self.stop = None
        return heads[0]

    def _run(self, head: Head) -> tuple[bool, int]:
        with _alike():
            done = self._replica.run(head)
        self._replica.rest()
        return done


@contextmanager
def _alike() -> Iterator[None]:
    """What all ranks do alike: after an error in it no other rank knows how far this one has come. Raises GroupError for any."""
    try:
        yield
    except GroupError:
        raise
    except Exception as error:
        raise GroupLostError(0, f"{type(error).__name__}: {error}") from error


def turns_of(generator: BlockpoolGenerator, config: ServerConfig) -> Solo | Leader:
    """The turns of a server, alone or as rank 0."""
    registry, ranks = generator.registry, generator.registry.template.ranks
    if ranks.size == 1:
        registry.speeds.has_arrivals = lambda: generator._stop or not generator.requests.empty()
        return Solo(registry.speeds.catch_up)
    loss = loss_of(registry, config, generator.give_up, lambda: generator.access.wait_until_empty(LAST_WORDS_SECONDS))
    lookout = Lookout(config.ranks.seconds, loss.end)
    lookout.start()
    replica = Replica(ranks, registry, config, lookout)
    registry.leader = Leader(replica, config.ranks, loss)
    return registry.leader
