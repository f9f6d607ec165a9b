"""Replica: the models of one rank, and what all ranks do alike: the exchange before a turn, its facts, the steps behind it.

Every rank has its own engines, tries and pools over its share of each model. They stay equal because nothing changes them but
what an exchange has brought to all. Owned by the thread that takes the turns.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from collections.abc import Sequence as Several
from dataclasses import replace

import mlx.core as mx

from ... import __version__
from ...config import ServerConfig
from ...engine.sequence import Sequence
from ...errors import DisagreeError, GroupError, GroupLostError, LoadError, PoolExhaustedError
from ...mlx_lm_compat import installed
from ...ranks.facts import Addressed, Cancel, Fact, Load, Unload, read, write
from ...ranks.group import Ranks
from ...ranks.head import Act, Head, TurnClock
from ...ranks.lookout import Lookout
from ...store.prompt_store import PromptStore
from ..ending import Loss
from ..model import LoadedModel
from ..models.provider import ModelKey, canonical
from ..models.registry import ModelRegistry
from .acts import act, engine_of, heed, outgoing, reading, reported


class Replica:
    """One rank of a server.

    clock:       the time of all engines; each turn begins at that of rank 0.
    wants_stop:  this rank was asked to stop, which its next head says to rank 0.
    """

    def __init__(self, ranks: Ranks, registry: ModelRegistry, config: ServerConfig, lookout: Lookout) -> None:
        self.ranks = ranks
        self.registry = registry
        self.clock = TurnClock()
        self.wants_stop = False
        self._config = config
        self._lookout = lookout
        self._loads = 0
        self._has_exchanged = False
        # Requests whose model was unloaded, by its key and by their uids.
        self._suspended: dict[ModelKey, dict[int, Sequence]] = {}

    def ask_to_stop(self) -> None:
        """Have the next head ask rank 0 to stop the server. Any thread, and a handler of signals, may call this."""
        self.wants_stop = True

    # -- an exchange ---------------------------------------------------------------------------------------------------

    def agree(self) -> None:
        """Raises GroupError unless all ranks were started alike."""
        config = self._config
        engine, pool = replace(config.engine, wired_bytes=None), replace(config.pool, pool_bytes=None)
        store = None if config.store is None else config.store.bits or 16
        versions = __version__, installed(), mx.__version__  # type: ignore[attr-defined]
        if not self._is_common(repr((versions, self.ranks.kind, engine, pool, store, config.ranks)).encode()):
            raise GroupError("The ranks have different options or versions. Start all of them with one command line.")

    def exchange(self, head: Head, facts: Several[Addressed] = ()) -> tuple[list[Head], list[Addressed]]:
        """Exchange heads and facts with all ranks, and apply the facts of all to the engines and caches.

        Returns the heads, that of rank 0 first, and the facts that change models. Raises GroupLostError, and DisagreeError if
        the ranks have come to different results.
        """
        # Rank 0 checks the files of the first model before its first exchange.
        self._lookout.begin("an exchange", None if self._has_exchanged else self._config.ranks.load_seconds)
        self._has_exchanged = True
        restores = reading(self.models)
        own = replace(reported(self.models, head), fingerprint=self._fingerprint(), wants_stop=self.wants_stop)
        noted = [(self.name_of(model.key), fact) for model in self.models for fact in outgoing(model)]
        sent = self.ranks.exchange(own, write([*noted, *facts]))
        if len({each.head.fingerprint for each in sent}) > 1:
            raise DisagreeError("The ranks have come to different results. The server starts again; send the request again.")
        self.clock.begin(sent[0].head)
        heads = [each.head for each in sent]
        heed(self.models, restores, heads)
        changes: list[Addressed] = []
        found: dict[ModelKey, list[Fact]] = {}
        for name, fact in [each for rank in sent for each in read(rank.mail)]:
            if isinstance(fact, Load | Unload):
                changes.append((name, fact))
            else:
                found.setdefault(self.key_of(name), []).append(fact)
        for key, about in found.items():
            self._apply(key, about)
        return heads, changes

    @property
    def models(self) -> list[LoadedModel]:
        """The loaded models, on all ranks in the same order."""
        return sorted(self.registry.loaded.values(), key=lambda model: model.number)

    def name_of(self, key: ModelKey) -> str:
        """The name of a model in facts. The default one may be in another folder on each machine."""
        return "" if key == self.registry.catalog.default else key.model

    def key_of(self, name: str) -> ModelKey:
        """The key of a model on this rank."""
        default = self.registry.catalog.default
        return default if default is not None and not name else ModelKey(canonical(name))

    def _apply(self, key: ModelKey, facts: list[Fact]) -> None:
        model = self.registry.loaded.get(key)
        if model is not None:
            act(model, facts)
            return
        for fact in facts:
            if isinstance(fact, Cancel):
                self._suspended.get(key, {}).pop(fact.uid, None)

    def _fingerprint(self) -> int:
        found = [(model.number, engine_of(model).fingerprint()) for model in self.models]
        return zlib.crc32(repr(found).encode())

    def _is_common(self, data: bytes) -> bool:
        """Whether all ranks call this with the same bytes."""
        digest = zlib.crc32(data)
        least = self.ranks.least([digest, -digest])
        return least[0] == -least[1]

    # -- a turn --------------------------------------------------------------------------------------------------------

    def run(self, head: Head) -> tuple[bool, int]:
        """What follows an exchange: steps of an engine, or the work of idle models.

        Returns whether something was computed or has changed, and the number of steps.
        """
        models, steps, progress = self.models, 0, False
        if head.act == Act.STEP:
            model = next(each for each in models if each.number == head.model)
            while steps < head.turns and (not steps or engine_of(model).is_steady):
                self._lookout.begin("a step")
                progress |= model.step()
                steps += 1
        elif head.act == Act.IDLE:
            for model in models:
                if not len(engine_of(model)):
                    model.idle()
        return progress, steps

    def rest(self) -> None:
        """Nothing is awaited of other ranks until the next exchange."""
        self._lookout.rest()

    def finish(self) -> None:
        """End behind an exchange that says STOP: the steps that are in flight end on all ranks before any of them leaves."""
        self._lookout.begin("the end")
        mx.synchronize()
        self.ranks.exchange(Head(Act.STOP))
        self.ranks.leave()
        self._lookout.rest()

    # -- models --------------------------------------------------------------------------------------------------------

    def load(self, model: LoadedModel) -> None:
        """Load a model on all ranks or on none; on rank 0 it is prepared.

        Raises LoadError on all ranks, and GroupLostError if something has gone wrong on this rank alone in the midst of it.
        """
        self._lookout.begin("loading a model", self._config.ranks.load_seconds)
        failure = self._read(model)
        if not self.ranks.least([failure is None])[0]:
            raise LoadError(failure or "another rank could not load it; its log says why")
        if not self._is_common(model.provider.content):
            raise LoadError("the ranks have different files of it: copy the model's folder to all machines")
        self._loads += 1
        model.number, model.clock = self._loads, self.clock
        model.suspended = self._suspended.setdefault(model.key, {})
        try:
            model.open(self.ranks.least([self.registry.share()])[0])
        except GroupLostError:
            raise
        except (GroupError, PoolExhaustedError) as error:
            # All ranks raise these alike.
            raise LoadError(str(error)) from error
        except Exception as error:
            # The others wait in a collective that this rank does not come to.
            self.ranks.leave()
            raise GroupLostError(self.ranks.rank, f"{type(error).__name__}: {error}") from error

    def _read(self, model: LoadedModel) -> str | None:
        """Read this rank's share of a model. Returns why that failed."""
        try:
            if self.ranks.rank:
                model.prepare(None)
            hashing = model.begin_hashing()
            model.load_share()
            while hashing is not None and not hashing.is_done:
                hashing.wait(1.0)
        except LoadError as error:
            return str(error)
        except (Exception, SystemExit) as error:
            # Files and code from anywhere. (Some model files call exit().)
            return f"{type(error).__name__}: {error}"
        return None


def loss_of(
    registry: ModelRegistry,
    config: ServerConfig,
    give_up: Callable[[Exception], object] = lambda error: None,
    answered: Callable[[], object] = lambda: None,
) -> Loss:
    """The end of a rank that has lost its group. `give_up` fails all requests, `answered` waits for their last words."""

    def stores() -> list[PromptStore]:
        prefixes = [model.prefix for model in registry.loaded.values()]
        return [prefix.stored.store for prefix in prefixes if prefix is not None and prefix.stored is not None]

    seconds = 0.0 if config.store is None else config.store.flush_seconds
    return Loss(registry.template.ranks.leave, stores, seconds, give_up, answered)
