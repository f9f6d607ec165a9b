"""Replica: the models of one rank of a server, and what all ranks do alike: an exchange, its facts,
the steps that follow.

Every rank has its own engines, tries and pools over its share of each model. They stay equal
because nothing changes them but what an exchange has brought to all. follow() is what the ranks
without clients do. Owned by the thread that runs the steps.
"""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Several
from dataclasses import replace

import mlx.core as mx

from ... import __version__
from ...config import EngineConfig, ServerConfig
from ...engine.caches import PooledCaches
from ...engine.sequence import Sequence
from ...errors import DisagreeError, GroupError, GroupLostError, LoadError, PoolExhaustedError
from ...kv.build import describe
from ...mlx_lm_compat import installed
from ...model_files.device import memory_bytes
from ...ranks.driver import GroupDriver, SharedPathFacts
from ...ranks.facts import Addressed, Cancel, Fact, Load, Lost, Unload, read, write
from ...ranks.group import Ranks
from ...ranks.head import MB, Act, Head, TurnClock
from ...ranks.wakes import Wakes, connect
from ...ranks.watchdog import TurnWatchdog
from ...store.identity import sample
from ...store.prompt_store import PromptStore
from ...tier.agreement import AgreedPrefixes, AgreedRestores, Restored
from ...tier.path_facts import PathFact
from ..ending import end_on_signals
from ..model import LoadedModel
from ..models.registry import ModelRegistry
from ..provider import BlockpoolModelProvider, ModelKey, canonical
from .ending import Loss, RankLauncher

log = logging.getLogger(__name__)


def _stored(models: Iterable[LoadedModel]) -> list[AgreedPrefixes]:
    found = (model.prefix.stored for model in models if model.prefix is not None)
    return [stored for stored in found if isinstance(stored, AgreedPrefixes)]


def driver_of(model: LoadedModel) -> GroupDriver:
    """The driver of a model that several ranks share."""
    assert isinstance(model.driver, GroupDriver), f"{model.key.model} has no driver of a group"
    return model.driver


class SharedModel(LoadedModel):
    """A model of which this rank has a share. It is described once the share is loaded.

    number:    of its load, on all ranks alike. clock: that of its engines.
    requests:  those that were suspended when it was unloaded before.
    content:   equal on all ranks with the same model: of its config and a sample of its weights.
    """

    path_facts_type = SharedPathFacts
    number: int
    clock: TurnClock
    requests: dict[int, Sequence]
    content: bytes

    def prepare(self, pool_bytes: int | None) -> None:
        self.provider.read_config(self.key)
        self.content = json.dumps(self.provider.config, sort_keys=True).encode() + sample(
            self.provider.folder
        )

    @property
    def may_have_pool(self) -> bool:
        return True

    def load_share(self) -> None:
        """Load this rank's share, by itself. Raises what the model's files and mlx-lm raise."""
        self.provider.load_share(self.key)
        self.weights_bytes = self.read_bytes = sum(
            array.nbytes for array in self.provider.weights()
        )

    def open(self, pool_bytes: int) -> None:
        self._spec = describe(self.provider.model, ranks=self.ranks)
        super().open(pool_bytes)

    def _with_costs(self, caches: PooledCaches) -> PooledCaches:
        """Ranks would have to measure together: each has other figures, and takes another number
        of readings.
        """
        return caches

    def _open_agents(self, store: PromptStore | None) -> None:
        if self.ranks.rank == 0:
            super()._open_agents(store)

    def open_engine(self) -> None:
        if self.engine is None and isinstance(self.caches, PooledCaches):
            model, config = self.provider.model, self._config.engine
            self.driver = driver = GroupDriver(
                model, self.caches, config, self.ranks, self.clock, self.requests
            )
            self.engine = driver.engine

    def fail_all(self, error: Exception) -> None:
        """Fail all requests. The engines of all ranks continue and cancel them."""
        for uid in list(self.live):
            driver_of(self).cancel(uid)
            self.live.pop(uid).fail(error)


class Replica:
    """One rank of a server.

    clock:       the time of all engines; each turn begins at that of rank 0.
    wants_stop:  this rank was asked to stop, which its next head reports to rank 0.
    wakes:       how rank 0 ends the naps of the others.
    """

    def __init__(
        self, ranks: Ranks, registry: ModelRegistry, config: ServerConfig, watchdog: TurnWatchdog
    ) -> None:
        self.ranks = ranks
        self.registry = registry
        registry.model_class = SharedModel
        self.clock = TurnClock()
        self.wants_stop = False
        self.wakes = Wakes()
        self._config = config
        self._watchdog = watchdog
        self._loads = 0
        self._has_exchanged = False
        # Requests whose model was unloaded, by its key and by their uids.
        self._suspended: dict[ModelKey, dict[int, Sequence]] = {}

    def ask_to_stop(self) -> None:
        """Have the next head request that rank 0 stops the server.

        Any thread, and a handler of signals, may call this.
        """
        self.wants_stop = True

    # -- an exchange -------------------------------------------------------------------------------

    def agree(self) -> None:
        """Raises GroupError unless all ranks were started alike.

        From then on rank 0 can wake the others, if they can connect.
        """
        config = self._config
        engine = replace(config.engine, wired_bytes=None)
        pool = replace(config.pool, pool_bytes=None)
        versions = __version__, installed(), mx.__version__  # type: ignore[attr-defined]
        if not self._is_common(
            repr(
                (versions, self.ranks.kind, engine, pool, config.store is not None, config.ranks)
            ).encode()
        ):
            raise GroupError(
                "The ranks have different options or versions. Start all of them with one command "
                "line."
            )
        self.wakes = connect(self.ranks)

    def exchange(
        self, head: Head, facts: Several[Addressed] = ()
    ) -> tuple[list[Head], list[Addressed]]:
        """Exchange heads and facts with all ranks, and apply the facts of all to the engines and
        caches.

        Returns the heads, that of rank 0 first, and the facts that change models. Raises
        GroupLostError, and DisagreeError if the ranks have come to different results.
        """
        # Rank 0 checks the files of the first model before its first exchange.
        self._watchdog.begin(
            "an exchange", None if self._has_exchanged else self._config.ranks.load_seconds
        )
        self._has_exchanged = True
        restores = self._restoring()
        own = self._with_report(
            head, Restored(0, 0, False) if restores is None else restores.restored()
        )
        noted = [
            (self.name_of(model.key), fact)
            for model in self.models
            for fact in self._outgoing(model)
        ]
        sent = self.ranks.exchange(own, write([*noted, *facts]))
        if len({each.head.fingerprint for each in sent}) > 1:
            raise DisagreeError(
                "The ranks have come to different results. The server starts again; send the "
                "request again."
            )
        self.clock.begin(sent[0].head)
        heads = [each.head for each in sent]
        for stored in _stored(self.models):
            stored.agreed.agree(all(head.takes for head in heads))
        if restores is not None:
            restores.commit(heads)
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
    def models(self) -> list[SharedModel]:
        """The loaded models, on all ranks in the same order."""
        models = [
            model for model in self.registry.loaded.values() if isinstance(model, SharedModel)
        ]
        return sorted(models, key=lambda model: model.number)

    def name_of(self, key: ModelKey) -> str:
        """The name of a model in facts.

        The default one may be in another folder on each machine.
        """
        return "" if key == self.registry.catalog.default else key.model

    def key_of(self, name: str) -> ModelKey:
        """The key of a model on this rank."""
        default = self.registry.catalog.default
        return default if default is not None and not name else ModelKey(canonical(name))

    def _apply(self, key: ModelKey, facts: list[Fact]) -> None:
        model = self.registry.loaded.get(key)
        if model is not None:
            driver_of(model).apply(facts)
        for fact in facts:
            if model is None:
                if isinstance(fact, Cancel):
                    self._suspended.get(key, {}).pop(fact.uid, None)
            elif isinstance(fact, PathFact) and model.path_facts is not None:
                model.path_facts.take(fact)
            elif isinstance(fact, Lost):
                for stored in _stored([model]):
                    stored.forget(fact)

    def _outgoing(self, model: LoadedModel) -> list[Fact]:
        """The facts about a model since the last exchange: of requests and paths, on rank 0, and
        records that this rank lacks.
        """
        of_paths = [] if model.path_facts is None else model.path_facts.outgoing()
        lost = [fact for stored in _stored([model]) for fact in stored.agreed.take_lost()]
        return [*driver_of(model).outgoing(), *of_paths, *lost]

    def _restoring(self) -> AgreedRestores | None:
        """The restores of the model of which the ranks finish one next: of the same model on all
        of them.
        """
        return next(
            (
                stored.restores
                for stored in _stored(self.models)
                if stored.restores.restored().number
            ),
            None,
        )

    def _with_report(self, head: Head, restored: Restored) -> Head:
        """The head with what this rank reports: whether its disk takes records, how far its
        restore is, its free memory.
        """
        stores = [stored.store for stored in _stored(self.models)]
        return replace(
            head,
            takes=all(store.takes() for store in stores),
            problem=next((store.problems.number for store in stores if store.problems.number), 0),
            free_mb=max(0, memory_bytes() - mx.get_active_memory()) // MB,
            restore=restored.number,
            restored=restored.records,
            failed=restored.has_failed,
            fingerprint=self._fingerprint(),
            wants_stop=self.wants_stop,
        )

    def _fingerprint(self) -> int:
        found = [(model.number, driver_of(model).fingerprint()) for model in self.models]
        return zlib.crc32(repr(found).encode())

    def _is_common(self, data: bytes) -> bool:
        """Whether all ranks call this with the same bytes."""
        digest = zlib.crc32(data)
        least = self.ranks.least([digest, -digest])
        return least[0] == -least[1]

    # -- a turn ------------------------------------------------------------------------------------

    def run(self, head: Head) -> tuple[bool, int]:
        """What follows an exchange: steps of an engine, or the work of idle models.

        Returns whether something was computed or has changed, and the number of steps.
        """
        models, steps, progress = self.models, 0, False
        if head.act == Act.STEP:
            model = next(each for each in models if each.number == head.model)
            while steps < head.turns and (not steps or driver_of(model).is_steady):
                self._watchdog.begin("a step")
                progress |= model.step()
                steps += 1
        elif head.act == Act.IDLE:
            for model in models:
                if not len(driver_of(model)):
                    model.idle()
        return progress, steps

    def rest(self) -> None:
        """Nothing is awaited from other ranks until the next exchange."""
        self._watchdog.rest()

    def finish(self) -> None:
        """End after an exchange that says STOP: the steps that are in flight end on all ranks
        before any of them leaves.
        """
        self._watchdog.begin("the end")
        mx.synchronize()
        self.ranks.exchange(Head(Act.STOP))
        self.ranks.leave()
        self.wakes.close()
        self._watchdog.rest()

    # -- models ------------------------------------------------------------------------------------

    def load(self, model: LoadedModel) -> None:
        """Load a model on all ranks or on none; on rank 0 it is prepared.

        Raises LoadError on all ranks, and GroupLostError if something has gone wrong on this rank
        alone in the midst of it.
        """
        assert isinstance(model, SharedModel)
        self._watchdog.begin("loading a model", self._config.ranks.load_seconds)
        failure = self._read(model)
        if not self.ranks.least([failure is None])[0]:
            raise LoadError(failure or "another rank could not load it; its log says why")
        if not self._is_common(model.content):
            raise LoadError(
                "the ranks have different files of it: copy the model's folder to all machines"
            )
        self._loads += 1
        model.number, model.clock = self._loads, self.clock
        model.requests = self._suspended.setdefault(model.key, {})
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

    def _read(self, model: SharedModel) -> str | None:
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
    """The end of a rank that has lost its group.

    `give_up` fails all requests, `answered` waits for their last words.
    """

    def stores() -> list[PromptStore]:
        return [stored.store for stored in _stored(registry.loaded.values())]

    seconds = 0.0 if config.store is None else config.store.flush_seconds
    return Loss(registry.template.ranks.leave, stores, seconds, give_up, answered)


def join_group(template: BlockpoolModelProvider, launcher: RankLauncher) -> None:
    """What a rank of several does first. Raises GroupError for options that they do not take."""
    if template.ranks.decides:
        return
    for option, given in (
        ("--adapter-path", template.cli_args.adapter_path),
        ("--draft-model", template.cli_args.draft_model),
    ):
        if given:
            raise GroupError(
                f"{option} needs a server of one rank. Leave it out, or start the server without "
                "mlx.launch."
            )
    launcher.watch()


def follow(template: BlockpoolModelProvider, config: ServerConfig) -> None:
    """Serve as a rank without clients until rank 0 stops. Ends the process if the group is lost.

    Raises GroupError if the ranks cannot serve together.
    """
    registry, ranks = ModelRegistry(template, config), template.ranks
    loss = loss_of(registry, config)
    watchdog = TurnWatchdog(config.ranks.seconds, loss.end)
    replica = Replica(ranks, registry, config, watchdog)
    end_on_signals(EngineConfig.exit_seconds, replica.ask_to_stop)
    watchdog.start()
    replica.agree()
    try:
        follow_turns(replica)
        registry.close()
    except (GroupLostError, DisagreeError) as error:
        loss.end(error)


def follow_turns(replica: Replica) -> None:
    """Take the turns of rank 0 until it stops. Raises GroupLostError and DisagreeError."""
    try:
        while True:
            heads, changes = replica.exchange(Head())
            head = heads[0]
            for change in changes:
                _change(replica, *change)
            if head.act == Act.STOP:
                replica.finish()
                return
            replica.run(head)
            replica.rest()
            if head.nap_ms:
                replica.wakes.nap(head.nap_ms / 1000)
    except (GroupLostError, DisagreeError):
        raise
    except Exception as error:
        # Rank 0 does not know how far this rank has come.
        log.exception("a turn has failed")
        raise GroupLostError(replica.ranks.rank, f"{type(error).__name__}: {error}") from error


def _change(replica: Replica, name: str, fact: Fact) -> None:
    registry, key = replica.registry, replica.key_of(name)
    if isinstance(fact, Load):
        model = registry.make(key)
        try:
            replica.load(model)
        except LoadError as error:
            log.warning("Cannot load %s: %s", key.model, error)
            model.close()
        else:
            registry.add(model)
    else:
        model = registry.take_out(key)
        model.suspend()
        model.close()
