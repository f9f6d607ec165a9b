"""AgentService: every agent in the memory of loaded models and in the store's folder, and the changes to one by its name.

One service serves one request on the socket's thread: it reads files there, and touches memory on the generation thread.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Queue
from typing import Any, TypeVar

from ...config import StoreConfig
from ...errors import StoreError
from ...formatting import Report
from ...prefix.trie import PrefixRef
from ...prefix.uncache import SharedPaths, exclusive_from
from ...ranks.facts import Discard, Uncache
from ...store.agent_files import Agent, Agents, shown
from ...store.agent_records import AgentRecords, PathRecords
from ...store.fs import safe_name
from ...store.paths import key_of
from ...store.prompt_store import PromptStore
from ...tier.cache import TieredPrefixCache
from ...tier.path_acts import PathActs, TakenOut, Then, name_of
from ..access import LONGEST_AGENT, belongs, own_name
from ..api.errors import StatusError
from ..jobs import run_on_generation_thread
from ..model import LoadedModel
from ..models.provider import ModelKey
from ..replies import Reply
from ..scope import RequestScope
from .conversation_id import is_conversation_id
from .served import ServedAgents, bound_notes, path_of

T = TypeVar("T")

# Names that an error lists.
NAMES_SHOWN = 10


@dataclass(frozen=True)
class Home:
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
    home:      the loaded model that has its path, or None.
    has_file:  whether it has a file in the store's folder.
    """

    agent: Agent
    home: Home | None
    has_file: bool

    @property
    def name(self) -> str:
        return self.agent.name

    @property
    def path(self) -> PrefixRef:
        return path_of(self.agent)

    @property
    def model(self) -> str:
        return self.agent.model_id if self.home is None else self.home.model


class AgentService:
    """The agents of one server's loaded models and of its store's folder, for the request of `scope`; every call reads both.

    `root`: the store's folder; None: the server has no store. Methods raise StatusError for an unknown agent and for a model
    that was unloaded in the meantime, and OSError for a folder that cannot be read.
    """

    def __init__(self, scope: RequestScope) -> None:
        self.scope = scope
        self._registry = scope.generator.registry
        self.files: Agents | None = scope.generator.agent_files
        self.root: Path | None = None if self.files is None else self.files.root
        self.records = None if self.root is None else AgentRecords(self.root)
        self.bad: list[tuple[Path, str]] = []

    # -- looking -------------------------------------------------------------------------------------------------------

    def look(self) -> dict[str, AgentView]:
        """All agents by name, once all turns that have ended are on disk."""
        homes = self.homes()
        for home in homes:
            home.agents.settle()
        files: dict[str, Agent] = {}
        if self.files is not None:
            found = self.files.look()
            files, self.bad = {agent.name: agent for agent in found.agents}, found.bad
        names = sorted({*files, *(name for home in homes for name in home.noted)})
        return {name: _view(name, homes, files.get(name)) for name in names}

    def mine(self, views: dict[str, AgentView]) -> dict[str, AgentView]:
        """The agents that the owner of the request's key may see."""
        return {name: view for name, view in views.items() if belongs(name, self.scope.owner)}

    def homes(self) -> list[Home]:
        """The loaded models that have agents."""
        return self.do(self._homes)

    def need(self, name: str) -> AgentView:
        """An agent by its own name, or by the name of its file."""
        return self.need_in(self.look(), name)

    def need_in(self, views: dict[str, AgentView], name: str) -> AgentView:
        """need() among the agents that look() has returned."""
        views = self.mine(views)
        called = (own_name(name), name)
        found = views.get(name) or next((view for view in views.values() if safe_name(view.name) in called), None)
        if found is None:
            known = [shown(other) for other in views]
            there = ", ".join(known[:NAMES_SHOWN]) + (f" and {len(known) - NAMES_SHOWN} more" if len(known) > NAMES_SHOWN else "")
            raise StatusError(
                404, f"There is no agent {shown(name)}. The agents are: {there or 'none'}. GET /v1/agents lists them."
            )
        return found

    def need_home(self, name: str) -> tuple[AgentView, Home]:
        """An agent and its model, which must be loaded."""
        view = self.need(name)
        if view.home is None:
            raise StatusError(
                409,
                f"Agent {shown(view.name)} belongs to {shown(view.model)}, and the loaded models have other weights, adapters, "
                "kv bits or store bits. Load its model with POST /admin/load, or send it a request.",
            )
        return view, view.home

    def requests(self) -> tuple[Counter[str | None], Counter[str | None]]:
        """The numbers of running and of waiting requests of each agent; of None, those without one."""
        return self.do(self._requests)

    def refuse_if_busy(self, name: str) -> None:
        """Raise StatusError while a request of this agent runs or waits. On the generation thread."""
        running, waiting = (counts[name] for counts in self._requests())
        if running or waiting:
            found = f"{running} running and {waiting} waiting requests"
            raise StatusError(409, f"Agent {shown(name)} has {found}. Try again once they have ended.")

    # -- names and pins ------------------------------------------------------------------------------------------------

    def pin(self, name: str) -> Report:
        """Keep its path on disk, and in memory as far as half of the pool allows."""
        view = self.need(name)
        self._change_file(view, lambda files: files.pin(view.name))
        in_memory = view.home is not None and self.agree(view.home, lambda served, _, then: _pin(served, view, then))
        return {"agent": view.name, "pinned": True, "pinned_in_memory": in_memory, "pinned_on_disk": view.has_file}

    def unpin(self, name: str) -> Report:
        """Let its path be evicted and dropped like any other."""
        view = self.need(name)
        self._change_file(view, lambda files: files.unpin(view.name))
        if view.home is not None:
            self.at(view.home, lambda served, _: _unpin(served, view.name))
        return {"agent": view.name, "pinned": False}

    def rename(self, name: str, new: str) -> Report:
        """Give an agent without requests another, free name."""
        view = self.need(name)
        self._need_free(new)
        self.do(lambda: self.refuse_if_busy(view.name))
        self._change_file(view, lambda files: files.rename(view.name, new))
        if view.home is not None:
            self.at(view.home, lambda served, _: agents_of(served).rename(view.name, new))
        return {"agent": new, "was": view.name}

    def fork(self, name: str, new: str) -> Report:
        """Make a second agent that continues this one's path."""
        view = self.need(name)
        self._need_free(new)
        self._change_file(view, lambda files: files.fork(view.name, new))
        if view.home is not None:
            self.at(view.home, lambda served, _: agents_of(served).fork(new, view.path))
        return {"agent": new, "of": view.name, "tokens": view.path.tokens}

    def _need_free(self, new: str) -> None:
        if is_conversation_id(new):
            raise StatusError(400, f"{new} is like the names that are derived from the content of chats. Choose another one.")
        if new in self.look():
            raise StatusError(409, f"An agent {shown(new)} exists already. Choose another name.")

    def _change_file(self, view: AgentView, act: Callable[[Agents], object]) -> None:
        """Change the agent's file, if it has one, after all of its turns are noted there."""
        if not view.has_file or self.files is None:
            return
        try:
            if view.home is not None:
                view.home.agents.run(act)
            else:
                act(self.files)
                bound_notes(self.files, self.scope.generator.store_config or StoreConfig(), {})
        except StoreError as error:
            raise StatusError(409, str(error)) from error

    # -- delete --------------------------------------------------------------------------------------------------------

    def delete(self, name: str) -> Report:
        """Remove an agent with the records and blocks that only its path needs, and prove that they are gone: `clean`.

        Raises StatusError while it has requests, and StoreError.
        """
        views = self.look()
        view = self.need_in(views, name)
        records = self.records if view.has_file else None
        # Its records can be named only while its file is there.
        share = PathRecords([], []) if records is None else records.share(view.name)
        report: Report = {"agent": view.name, "deleted": True, "clean": True}
        if view.home is None:
            self.do(lambda: self.refuse_if_busy(view.name))
        else:
            shared = shared_with(view.home, views)
            taken: TakenOut = self.agree(view.home, lambda served, prefix, then: self._forget(served, prefix, view, shared, then))
            freed = taken.uncached
            share = PathRecords([file for file in share.own if bytes.fromhex(file.path.stem) not in taken.kept], share.stays)
            report["memory"] = {"blocks": freed.blocks, "bytes": freed.bytes, "kept": freed.kept}
            report["clean"] = self.at(view.home, lambda _, prefix: len(prefix.index.trie.find(view.path).path) <= freed.kept)
        if records is not None:
            if view.home is not None:
                self.agree(view.home, lambda served, _, then: acts_of(served).propose(_discard(share), then))
                # flush() waits for the writer's thread, which any thread may do.
                self.at(view.home, lambda _, prefix: store_of(prefix)).flush()
            # The store does not know records that another process has written.
            self._change_file(view, lambda _: records.remove(view.name, share))
            proof = records.proof(share)
            report |= {"removed": proof["gone"]} | proof | {"clean": report["clean"] and proof["clean"]}
        if self.root is None:
            return report
        # Its paths are relative to the store's folder.
        return dict(json.loads(json.dumps(report).replace(json.dumps(f"{self.root}/")[1:-1], "")))

    def _forget(
        self,
        served: LoadedModel,
        prefix: TieredPrefixCache,
        view: AgentView,
        shared: SharedPaths,
        then: Then,
    ) -> None:
        """Forget the path in memory as far as no other agent or request needs it. On the generation thread."""
        self.refuse_if_busy(view.name)
        agents_of(served).forget(view.name)
        live = [] if served.engine is None else served.engine.sequences
        in_use = [(sequence.tokens, sequence.policy.salt) for sequence in live if sequence.request.name != view.name]
        own = exclusive_from(prefix.index, view.path, shared, in_use)
        acts_of(served).propose(Uncache(name_of(view.path), own), then)

    # -- the generation thread -----------------------------------------------------------------------------------------

    def do(self, act: Callable[[], T]) -> T:
        """Run `act` on the generation thread and return its result. Raises its errors; RuntimeError if the thread has ended."""
        return run_on_generation_thread(self.scope.generator, act)

    def at(self, home: Home, act: Callable[[LoadedModel, TieredPrefixCache], T]) -> T:
        """do() with a model, unless it has been unloaded."""
        return self.do(lambda: act(*self.served(home)))

    def agree(self, home: Home, act: Callable[[LoadedModel, TieredPrefixCache, Then], object]) -> Any:
        """at() with an act that proposes a fact to all ranks. Returns what it passes on once they have applied it."""
        results: Queue[Any] = Queue()
        self.at(home, lambda served, prefix: act(served, prefix, results.put))
        result = self.scope.generator.receive(results)
        if result is None:
            raise _unloaded(home)
        return result

    def served(self, home: Home) -> tuple[LoadedModel, TieredPrefixCache]:
        """The model and its prefixes, unless it has been unloaded. On the generation thread."""
        served = self._registry.loaded.get(home.key)
        if served is None or served.agents is not home.agents or served.prefix is None:
            raise _unloaded(home)
        return served, served.prefix

    def _homes(self) -> list[Home]:
        homes = []
        for key, served in self._registry.loaded.items():
            served.note_turns()
            agents = served.agents
            if agents is not None:
                model = self._registry.catalog.id_of(key.model)
                homes.append(Home(key, model, agents, dict(agents.noted), dict(agents.pinned)))
        return homes

    def _requests(self) -> tuple[Counter[str | None], Counter[str | None]]:
        engines = [served.engine for served in self._registry.loaded.values() if served.engine is not None]
        running = Counter(live.request.name for engine in engines for live in engine.live)
        waiting = Counter(waits.request.name for engine in engines for waits in engine.waiting)
        waiting.update(entry.item.request.options.name for entry in self._registry.queue if isinstance(entry.item, Reply))
        return running, waiting


def checked_name(name: Any) -> str:
    """`name`, if it can name an agent. Raises StatusError."""
    if not isinstance(name, str) or not 0 < len(name) <= LONGEST_AGENT or not name.isprintable():
        raise StatusError(
            400, f"{str(name)[:40]!r} cannot be an agent's name, which has 1 to {LONGEST_AGENT} printable characters."
        )
    return name


def agents_of(served: LoadedModel) -> ServedAgents:
    """The agents of a loaded model that has some."""
    assert served.agents is not None
    return served.agents


def acts_of(served: LoadedModel) -> PathActs:
    """The acts on the cached paths of a loaded model that has agents."""
    assert served.acts is not None
    return served.acts


def store_of(prefix: TieredPrefixCache) -> PromptStore:
    """The store of a loaded model, some of whose records are on disk."""
    assert prefix.stored is not None
    return prefix.stored.store


def shared_with(home: Home, views: dict[str, AgentView]) -> SharedPaths:
    """The paths of all agents of one loaded model."""
    return SharedPaths(view.path for view in views.values() if view.home is home)


def _view(name: str, homes: list[Home], file: Agent | None) -> AgentView:
    """An agent from its file, which names the model that it used last, and from memory, which has the last turn."""
    if file is not None:
        home = next((home for home in homes if home.agents.namespace == file.namespace), None)
        noted = None if home is None else home.noted.get(name)
        turn = file if noted is None or noted.used < file.used else noted
        return AgentView(replace(turn, pinned=file.pinned), home, has_file=True)
    home = max((home for home in homes if name in home.noted), key=lambda home: home.noted[name].used)
    return AgentView(replace(home.noted[name], pinned=name in home.pinned), home, has_file=False)


def _unloaded(home: Home) -> StatusError:
    return StatusError(409, f"Model {shown(home.agents.model_id)} was unloaded in the meantime. Try again.")


def _pin(served: LoadedModel, view: AgentView, then: Then) -> None:
    # It may have had another turn since look().
    path = path_of(agents_of(served).noted.get(view.name, view.agent))
    agents_of(served).pin(view.name, path, then)
    served.note_turns()


def _unpin(served: LoadedModel, name: str) -> None:
    agents_of(served).unpin(name)
    served.note_turns()


def _discard(share: PathRecords) -> Discard:
    keys = (key_of(file.name) for file in share.own)
    return Discard(tuple((key.kind, key.hash) for key in keys if key is not None))
