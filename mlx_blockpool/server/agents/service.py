"""AgentService: lists, pins, forks, saves, restores and deletes the agents of loaded models and of
the store's folder.

One service serves one request, on the socket's thread. It reads files there. What touches memory
runs on the generation thread in short jobs between two decode steps, so that replies in progress
continue.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from ...config import EngineConfig, RequestConfig, StoreConfig
from ...errors import PoolExhaustedError, StoreError
from ...formatting import Report
from ...prefix.sharing import SharedPaths, exclusive_from
from ...prefix.trie import Node, PrefixRef
from ...ranks.facts import BringBack, Discard, Save, Uncache, WriteOut
from ...store.agents import Agent, Agents, shown
from ...store.fs import safe_name
from ...store.limits import OVER_BUDGET
from ...store.paths import key_of
from ...tier.agent_records import AgentRecords, PathRecords, utc
from ...tier.cache import Measure, TieredPrefixCache
from ...tier.path_facts import PathFact, TakenOut, Then, name_of
from ...tier.restore import RestoreJob
from ...tier.write_behind import StoredPrefixes
from ..access import belongs, own_name
from ..bodies import StatusError
from ..conversation_id import is_conversation_id
from ..jobs import Steps, between_steps
from ..model import LoadedModel
from ..provider import ModelKey
from ..replies import Reply
from ..scope import RequestScope
from ..served_agents import ServedAgents, bound_notes, path_of

T = TypeVar("T")
# Proposes a fact, and has its result passed on once all ranks have applied it.
Act: TypeAlias = Callable[[LoadedModel, TieredPrefixCache, Then], object]

# Names that an error lists.
NAMES_SHOWN = 10
PAUSE_SECONDS = 0.005


@dataclass(frozen=True)
class LoadedAgents:
    """A loaded model with agents, as one request sees it.

    model:   its id, by which requests name it.
    noted:   its agents in memory, by name.
    pinned:  names of pinned agents, and whether the blocks of each are pinned in memory.
    """

    key: ModelKey
    model: str
    agents: ServedAgents
    noted: dict[str, Agent]
    pinned: dict[str, bool]


@dataclass(frozen=True)
class AgentView:
    """One agent, as one request sees it.

    agent:     with its last turn, from memory or from its file, and its pin.
    loaded:    the loaded model that has its path, or None.
    has_file:  whether it has a file in the store's folder.
    """

    agent: Agent
    loaded: LoadedAgents | None
    has_file: bool

    @property
    def name(self) -> str:
        return self.agent.name

    @property
    def path(self) -> PrefixRef:
        return path_of(self.agent)

    @property
    def last_path(self) -> PrefixRef:
        """The path of its last turn in memory, which may have come after this view.

        On the generation thread.
        """
        return (
            self.path
            if self.loaded is None
            else path_of(self.loaded.agents.noted.get(self.name, self.agent))
        )

    @property
    def model(self) -> str:
        return self.agent.model_id if self.loaded is None else self.loaded.model


class AgentService:
    """The agents of one server's loaded models and of its store's folder, for the request of
    `scope`; every call reads both.

    `root`: the store's folder, or None without a store. Methods raise StatusError for an unknown
    agent and for a model that was unloaded in the meantime, and OSError for a folder that cannot be
    read.
    """

    def __init__(self, scope: RequestScope) -> None:
        self.scope = scope
        self._generator = scope.generator
        self._registry = scope.generator.registry
        self.files: Agents | None = scope.generator.agent_files
        self.root: Path | None = None if self.files is None else self.files.root
        self.records = None if self.root is None else AgentRecords(self.root, self.files)

    # -- finding -----------------------------------------------------------------------------------

    def views(self) -> dict[str, AgentView]:
        """All agents by name, once all turns that have ended are on disk."""
        loaded_models = between_steps(self._generator, self._loaded_models)
        for loaded in loaded_models:
            loaded.agents.settle()
        files: dict[str, Agent] = {}
        if self.files is not None:
            files = {agent.name: agent for agent in self.files.all()}
        names = sorted({*files, *(name for loaded in loaded_models for name in loaded.noted)})
        return {name: _view(name, loaded_models, files.get(name)) for name in names}

    def visible(self, views: dict[str, AgentView]) -> dict[str, AgentView]:
        """The agents that the owner of the request's key may see."""
        return {name: view for name, view in views.items() if belongs(name, self.scope.owner)}

    def find(self, name: str, views: dict[str, AgentView] | None = None) -> AgentView:
        """An agent by its name, or by the name of its file, among `views`: by default those of now.

        Raises StatusError.
        """
        views = self.visible(self.views() if views is None else views)
        called = (own_name(name), name)
        found = views.get(name) or next(
            (view for view in views.values() if safe_name(view.name) in called), None
        )
        if found is None:
            known = [shown(other) for other in views]
            there = ", ".join(known[:NAMES_SHOWN]) + (
                f" and {len(known) - NAMES_SHOWN} more" if len(known) > NAMES_SHOWN else ""
            )
            raise StatusError(
                404,
                f"There is no agent {shown(name)}. The agents are: {there or 'none'}. GET "
                "/v1/agents lists them.",
            )
        return found

    def find_loaded(self, name: str) -> tuple[AgentView, LoadedAgents]:
        """An agent and its model, which must be loaded."""
        view = self.find(name)
        if view.loaded is None:
            raise StatusError(
                409,
                f"Agent {shown(view.name)} belongs to {shown(view.model)}, and the loaded models "
                "have other weights, adapters, "
                "or KV bits. Load its model with POST /admin/load, or send it a request.",
            )
        return view, view.loaded

    def _own(self, name: str) -> str:
        """The name of an agent as the owner of the request's key has given it."""
        return name if self.scope.owner is None else own_name(name)

    def refuse_if_busy(self, name: str) -> None:
        """Raise StatusError while a request of this agent runs or waits.

        On the generation thread.
        """
        running, waiting = (counts[name] for counts in self._requests())
        if running or waiting:
            found = f"{running} running and {waiting} waiting requests"
            raise StatusError(
                409, f"Agent {shown(name)} has {found}. Try again once they have ended."
            )

    # -- listing -----------------------------------------------------------------------------------

    def listing(self, views: dict[str, AgentView], names: Sequence[str]) -> list[Report]:
        """Figures of the agents `names` among all `views`; sizes in bytes, times in UTC."""
        chosen = [views[name] for name in names]
        running, waiting = between_steps(self._generator, self._requests)
        measured = self._on_disk({view.agent.namespace for view in chosen if view.loaded is None})
        for loaded in {
            id(view.loaded): view.loaded for view in chosen if view.loaded is not None
        }.values():
            measured |= self._in_memory(
                loaded, views, [view for view in chosen if view.loaded is loaded]
            )
        return [
            _about(view, self._own(view.name))
            | {"running": running[view.name], "waiting": waiting[view.name]}
            | measured.get(view.name, {})
            for view in chosen
        ]

    def _in_memory(
        self, loaded: LoadedAgents, views: dict[str, AgentView], chosen: list[AgentView]
    ) -> dict[str, Report]:
        """Figures of some agents of a loaded model.

        Blocks that only a running request shares count as the agent's own.
        """
        shared = SharedPaths(
            {view.name: view.path for view in views.values() if view.loaded is loaded}
        )
        measured: dict[str, Report] = {}

        def measure() -> Steps[None]:
            sizes: dict[Node, tuple[int, int]] = {}
            for view in chosen:
                prefix = self.served(loaded)[1]
                trie = prefix.index.trie
                own = exclusive_from(trie, view.path, trie.find(view.path).path, shared)
                measured[view.name] = asdict(prefix.measure(view.path, own, sizes))
                # Nothing here may refer to the caches while the model is unloaded.
                del prefix, trie
                yield None

        between_steps(self._generator, measure())
        return measured

    def _on_disk(self, namespaces: set[str]) -> dict[str, Report]:
        """Figures of the agents of models that are not loaded, from the headers of their
        records.
        """
        if not namespaces or self.records is None:
            return {}
        return {
            found["name"]: {
                "tokens_in_memory": 0,
                "tokens_on_disk": found["tokens_on_disk"],
                "resumes_from_memory": 0,
                "memory": {"own_bytes": 0, "shared_bytes": 0},
                "disk": {
                    "own_bytes": found["own"]["bytes"],
                    "shared_bytes": found["shared"]["bytes"],
                },
            }
            for found in self.records.listing(namespaces)["agents"]
        }

    # -- names and pins ----------------------------------------------------------------------------

    def pin(self, name: str) -> Report:
        """Retain its path on disk, and in memory as far as half of the pool allows."""
        view = self.find(name)
        self._change_file(view, lambda files: files.pin(view.name))
        in_memory = view.loaded is not None and self._agree(view.loaded, partial(_pin, view))
        return {
            "agent": self._own(view.name),
            "pinned": True,
            "pinned_in_memory": in_memory,
            "pinned_on_disk": view.has_file,
        }

    def unpin(self, name: str) -> Report:
        """Let its path be evicted and dropped like any other."""
        view = self.find(name)
        self._change_file(view, lambda files: files.unpin(view.name))
        if view.loaded is not None:
            self.run_with(view.loaded, partial(_unpin, view))
        return {"agent": self._own(view.name), "pinned": False}

    def fork(self, name: str, new: str) -> Report:
        """Make a second agent that continues this one's path."""
        view = self.find(name)
        self._need_free(new)
        self._change_file(view, lambda files: files.fork(view.name, new))
        if view.loaded is not None:
            agents = view.loaded.agents
            self.run_with(view.loaded, lambda *_: agents.fork(new, view.path))
        return {"agent": self._own(new), "of": self._own(view.name), "tokens": view.path.tokens}

    def _need_free(self, new: str) -> None:
        if is_conversation_id(new):
            raise StatusError(
                400,
                f"{new} is like the names that are derived from the content of chats. Choose "
                "another one.",
            )
        if new in self.views():
            raise StatusError(409, f"An agent {shown(new)} exists already. Choose another name.")

    def _change_file(self, view: AgentView, act: Callable[[Agents], object]) -> None:
        """Change the agent's file, if it has one, after all of its turns are noted there."""
        if not view.has_file or self.files is None:
            return
        try:
            if view.loaded is not None:
                view.loaded.agents.run(act)
            else:
                act(self.files)
                bound_notes(self.files, self.scope.generator.store_config or StoreConfig(), {})
        except StoreError as error:
            raise StatusError(409, str(error)) from error

    # -- save and restore --------------------------------------------------------------------------

    def save(self, name: str) -> Report:
        """Write all of an agent's path to disk, with its partial last block, windows and states.

        Raises StatusError.
        """
        view, loaded = self.find_loaded(name)
        path, start = view.path, time.monotonic()
        store = self.run_with(loaded, lambda _, prefix: stored_in(prefix)).store
        refused = store.counts[OVER_BUDGET]
        self._agree(loaded, _proposing(Save(name_of(path))))
        before, now = None, self._written(loaded, path)
        while now != before:
            if store.problem is not None:
                raise StatusError(
                    503,
                    f"The store cannot write: {store.problem}. Free space or repair the disk, and "
                    "try again.",
                )
            # Waits for the writer's thread, which any thread may do.
            store.flush()
            before, now = now, self._written(loaded, path)
        found, _ = now
        if (
            found.tokens_on_disk < path.tokens
            or found.resumes_from_disk < found.resumes_from_memory
        ):
            there = (
                f"{found.tokens_on_disk} of {path.tokens} tokens are on disk and "
                f"{found.tokens_in_memory} in memory"
            )
            if store.counts[OVER_BUDGET] > refused:
                most = store.config.store_bytes
                raise StatusError(
                    503,
                    f"{there}: the store is limited to {most} bytes. Raise --store-bytes or unpin "
                    "agents.",
                )
            raise StatusError(503, f"{there}. The agent's next turn computes the missing ones.")
        return {
            "agent": self._own(view.name),
            "saved": True,
            "seconds": _since(start),
            "tokens": path.tokens,
        } | asdict(found)

    def _written(self, loaded: LoadedAgents, path: PrefixRef) -> tuple[Measure, int]:
        """Write what is queued.

        Returns how much of the path is on disk, and how many records the store has written.
        """
        self._agree(loaded, _proposing(WriteOut()))
        return self.run_with(
            loaded,
            lambda _, prefix: (prefix.measure(path, 0), stored_in(prefix).store.counts["written"]),
        )

    def restore(self, name: str) -> Report:
        """Bring all of an agent's path on disk back into memory. Raises StatusError."""
        view, loaded = self.find_loaded(name)
        start = time.monotonic()
        before = self._measure(loaded, view.path)
        n_bytes = between_steps(self._generator, self._bring_back(loaded, view))
        found = self._measure(loaded, view.path)
        if (
            found.tokens_in_memory < max(before.tokens_on_disk, 1)
            or found.resumes_from_memory < before.resumes_from_disk
        ):
            raise StatusError(
                503,
                f"Only {found.tokens_in_memory} of {view.path.tokens} tokens are in memory and "
                f"{found.tokens_on_disk} on disk: "
                "some records cannot be read. The agent's next turn computes the missing tokens.",
            )
        brought = {
            "restored_tokens": found.tokens_in_memory - before.tokens_in_memory,
            "restored_bytes": n_bytes,
        }
        report = {
            "agent": self._own(view.name),
            "restored": True,
            "seconds": _since(start),
            "tokens": view.path.tokens,
        }
        return report | brought | asdict(found)

    def _bring_back(self, loaded: LoadedAgents, view: AgentView) -> Steps[int]:
        """Bring records that are only on disk into memory. Returns their bytes."""
        job = yield from self._agreed(loaded, _proposing(BringBack(name_of(view.path))))
        if isinstance(job, PoolExhaustedError):
            raise StatusError(503, f"Agent {shown(view.name)} cannot be restored: {job}") from job
        if not isinstance(job, RestoreJob):
            return 0
        try:
            most = EngineConfig.restore_seconds
            while not job.advance(0.0 if self._is_computing(loaded) else most, most):
                yield PAUSE_SECONDS
        finally:
            job.let_go()
        if view.name in loaded.agents.pinned:
            # A pinned agent retains them in memory from now on.
            loaded.agents.pin(view.name, view.last_path)
        return job.n_bytes

    def _is_computing(self, loaded: LoadedAgents) -> bool:
        engine = self.served(loaded)[0].engine
        return engine is not None and bool(engine.live)

    def _measure(self, loaded: LoadedAgents, path: PrefixRef) -> Measure:
        return self.run_with(loaded, lambda _, prefix: prefix.measure(path, 0))

    # -- delete ------------------------------------------------------------------------------------

    def delete(self, name: str) -> Report:
        """Remove an agent with the records and blocks that only its path needs, and prove that they
        are gone: `clean`.

        Raises StatusError while it has requests, and StoreError.
        """
        views = self.views()
        view = self.find(name, views)
        records = self.records if view.has_file else None
        # Its records can be named only while its file is there.
        share = PathRecords([], []) if records is None else records.share(view.name)
        report: Report = {"agent": self._own(view.name), "deleted": True, "clean": True}
        if view.loaded is None:
            between_steps(self._generator, partial(self.refuse_if_busy, view.name))
        else:
            shared = SharedPaths(
                {other.name: other.path for other in views.values() if other.loaded is view.loaded}
            )
            taken: TakenOut = self._agree(view.loaded, partial(self._forget, view, shared))
            share = PathRecords(
                [file for file in share.own if bytes.fromhex(file.path.stem) not in taken.hashes],
                share.stays,
            )
            report["memory"] = {"blocks": taken.blocks, "bytes": taken.n_bytes, "kept": taken.kept}
            report["clean"] = self.run_with(
                view.loaded,
                lambda _, prefix: len(prefix.index.trie.find(view.path).path) <= taken.kept,
            )
        if records is not None:
            if view.loaded is not None:
                self._agree(view.loaded, _proposing(_discard(share)))
                # flush() waits for the writer's thread, which any thread may do.
                self.run_with(view.loaded, lambda _, prefix: stored_in(prefix)).store.flush()
            # The store does not list records that another process has written.
            self._change_file(view, lambda _: records.remove(view.name, share))
            proof = records.proof(share)
            for stay in proof["stays"] if (owner := self.scope.owner) is not None else ():
                own = [name for name in stay["agents"] if name.startswith(f"{owner}/")]
                stay["agents"] = [name.removeprefix(f"{owner}/") for name in own]
            report |= (
                {"removed": proof["gone"]} | proof | {"clean": report["clean"] and proof["clean"]}
            )
        if self.root is None:
            return report
        # Its paths are relative to the store's folder.
        return dict(json.loads(json.dumps(report).replace(json.dumps(f"{self.root}/")[1:-1], "")))

    def _forget(
        self,
        view: AgentView,
        shared: SharedPaths,
        served: LoadedModel,
        prefix: TieredPrefixCache,
        then: Then,
    ) -> None:
        """Remove the path from memory as far as no other agent or request needs it.

        On the generation thread.
        """
        assert served.agents is not None
        self.refuse_if_busy(view.name)
        served.agents.forget(view.name)
        live = [] if served.engine is None else served.engine.sequences
        in_use = [
            (sequence.tokens, sequence.policy.salt)
            for sequence in live
            if sequence.request.name != view.name
        ]
        trie = prefix.index.trie
        own = exclusive_from(trie, view.path, trie.find(view.path).path, shared, in_use)
        _proposing(Uncache(name_of(view.path), own))(served, prefix, then)

    # -- the generation thread ---------------------------------------------------------------------

    def run_with(
        self, loaded: LoadedAgents, act: Callable[[LoadedModel, TieredPrefixCache], T]
    ) -> T:
        """The result of an act with a model between two steps, unless the model has been
        unloaded.
        """
        return between_steps(self._generator, lambda: act(*self.served(loaded)))

    def _agree(self, loaded: LoadedAgents, act: Act) -> Any:
        """run_with() with an act that proposes a fact to all ranks.

        Returns its result once they have applied it.
        """
        return between_steps(self._generator, self._agreed(loaded, act))

    def _agreed(self, loaded: LoadedAgents, act: Act) -> Steps[Any]:
        results: list[Any] = []
        act(*self.served(loaded), results.append)
        while not results:
            yield PAUSE_SECONDS
        if results[0] is None:
            raise _unloaded(loaded)
        return results[0]

    def served(self, loaded: LoadedAgents) -> tuple[LoadedModel, TieredPrefixCache]:
        """The model and its prefixes, unless it has been unloaded. On the generation thread."""
        served = self._registry.loaded.get(loaded.key)
        if served is None or served.agents is not loaded.agents or served.prefix is None:
            raise _unloaded(loaded)
        return served, served.prefix

    def _loaded_models(self) -> list[LoadedAgents]:
        loaded_models = []
        for key, served in self._registry.loaded.items():
            served.note_turns()
            if (agents := served.agents) is not None:
                model = self._registry.catalog.id_of(key.model)
                loaded_models.append(
                    LoadedAgents(key, model, agents, dict(agents.noted), dict(agents.pinned))
                )
        return loaded_models

    def _requests(self) -> tuple[Counter[str | None], Counter[str | None]]:
        engines = [
            served.engine for served in self._registry.loaded.values() if served.engine is not None
        ]
        running = Counter(live.request.name for engine in engines for live in engine.live)
        waiting = Counter(
            waits.request.name for engine in engines for waits in engine.scheduler.waiting
        )
        waiting.update(
            entry.item.request.options.name
            for entry in self._registry.queue
            if isinstance(entry.item, Reply)
        )
        return running, waiting


def checked_name(name: Any) -> str:
    """`name`, if it can name an agent. Raises StatusError."""
    most = RequestConfig.agent_characters
    if not isinstance(name, str) or not 0 < len(name) <= most or not name.isprintable():
        raise StatusError(
            400,
            f"{str(name)[:40]!r} cannot be an agent's name, which has 1 to {most} printable "
            "characters.",
        )
    return name


def _view(name: str, loaded_models: list[LoadedAgents], file: Agent | None) -> AgentView:
    """An agent from its file, which names the model that it used last, and from memory, which
    has the last turn.
    """
    if file is not None:
        loaded = next(
            (loaded for loaded in loaded_models if loaded.agents.namespace == file.namespace), None
        )
        noted = None if loaded is None else loaded.noted.get(name)
        turn = file if noted is None or noted.used < file.used else noted
        return AgentView(replace(turn, pinned=file.pinned), loaded, has_file=True)
    loaded = max(
        (loaded for loaded in loaded_models if name in loaded.noted),
        key=lambda loaded: loaded.noted[name].used,
    )
    return AgentView(
        replace(loaded.noted[name], pinned=name in loaded.pinned), loaded, has_file=False
    )


def _unloaded(loaded: LoadedAgents) -> StatusError:
    return StatusError(
        409, f"Model {shown(loaded.agents.model_id)} was unloaded in the meantime. Try again."
    )


def _proposing(fact: PathFact) -> Act:
    """The act that proposes a fact."""

    def propose(served: LoadedModel, _: TieredPrefixCache, then: Then) -> None:
        assert served.path_facts is not None
        served.path_facts.propose(fact, then)

    return propose


def _pin(view: AgentView, served: LoadedModel, _: TieredPrefixCache, then: Then) -> None:
    assert served.agents is not None
    served.agents.pin(view.name, view.last_path, then)
    served.note_turns()


def _unpin(view: AgentView, served: LoadedModel, _: TieredPrefixCache) -> None:
    assert served.agents is not None
    served.agents.unpin(view.name)
    served.note_turns()


def _discard(share: PathRecords) -> Discard:
    keys = (key_of(file.name) for file in share.own)
    return Discard(tuple((key.kind, key.hash) for key in keys if key is not None))


def _about(view: AgentView, name: str) -> Report:
    """Figures of an agent under the `name` that its owner has given it."""
    agent, loaded = view.agent, view.loaded
    return {
        "name": name,
        "shown": shown(name),
        "by": "content" if is_conversation_id(view.name) else "name",
        "model": view.model,
        "namespace": agent.namespace or None,
        "loaded": loaded is not None,
        "tokens": agent.tokens,
        "created": utc(agent.created),
        "used": utc(agent.used),
        "pinned": agent.pinned,
        "pinned_in_memory": loaded is not None and loaded.pinned.get(view.name, False),
    }


def stored_in(prefix: TieredPrefixCache) -> StoredPrefixes:
    """The store's side of a model's prefixes. Raises StatusError if there is no store."""
    if not isinstance(prefix.stored, StoredPrefixes):
        raise StatusError(
            503, "This server has no store for the model. Start it without --no-store."
        )
    return prefix.stored


def _since(start: float) -> float:
    """Seconds since a moment of time.monotonic()."""
    return round(time.monotonic() - start, 3)
