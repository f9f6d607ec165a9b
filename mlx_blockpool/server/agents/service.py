"""AgentService: every agent in the memory of loaded models and in the store's folder, and the changes to one by its name.

One service serves one request on the socket's thread: it reads files there, and touches memory on the generation thread.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ...config import StoreConfig
from ...errors import BlockpoolError, StoreError
from ...formatting import Report
from ...prefix.ref import Freed, SharedPaths, forget, kept_hashes, own_from
from ...prefix.salts import SHARED
from ...prefix.trie import PrefixRef, naming
from ...store import fsck
from ...store.agent_files import Agents
from ...store.agent_records import AgentRecords
from ...store.fs import safe_name
from ...store.manifest import Agent, shown
from ...store.paths import KINDS
from ...store.prompt_store import PromptStore
from ...store.reachability import PathRecords
from ...store.record import Key
from ...store.scan import File
from ...store.spool import Spool
from ...tier.cache import TieredPrefixCache
from ..jobs import run_on_generation_thread
from ..model import LoadedModel
from ..models.provider import ModelKey
from ..owners import belongs, own_name
from .by_content import is_by_content
from .served import Noted, ServedAgents, at, bound_notes

T = TypeVar("T")

# Names that an error lists.
NAMES_SHOWN = 10
LONGEST_NAME = 256


class RefusedError(BlockpoolError):
    """A request about agents that cannot be carried out, and its HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Home:
    """A loaded model with agents, as one request sees it.

    `noted`: its agents in memory, by name; `pinned`: names of pinned agents; `in_memory`: those of them whose blocks are pinned.
    """

    key: ModelKey
    agents: ServedAgents
    noted: dict[str, Noted]
    pinned: frozenset[str]
    in_memory: frozenset[str]


@dataclass(frozen=True)
class AgentView:
    """One agent, as one request sees it.

    `home`: the loaded model that has its path, or None; `file`: the agent's file in the store's folder, or None.
    """

    name: str
    noted: Noted
    home: Home | None
    file: Agent | None

    @property
    def path(self) -> PrefixRef:
        return self.noted.path

    @property
    def model(self) -> str:
        if self.home is not None:
            return self.home.agents.model_id
        return "" if self.file is None else self.file.model_id

    @property
    def namespace(self) -> str | None:
        """The namespace of its records on disk; None: it has none."""
        if self.file is not None:
            return self.file.namespace
        return None if self.home is None else self.home.agents.namespace

    @property
    def is_pinned(self) -> bool:
        in_memory = self.home is not None and self.name in self.home.pinned
        return in_memory if self.file is None else self.file.pinned


class AgentService:
    """The agents of one server's loaded models and of its store's folder; every call reads both anew.

    `root`: the store's folder; None: the server has no store. Methods raise RefusedError for an unknown agent and for a model
    that was unloaded meanwhile, and OSError for a folder that cannot be read.
    """

    def __init__(self, generator: Any) -> None:
        self._generator = generator
        self.files: Agents | None = generator.agent_files
        self.root: Path | None = None if self.files is None else self.files.root
        self.records = None if self.root is None else AgentRecords(self.root, naming)
        self.config: StoreConfig = generator.store_config or StoreConfig()
        self.bad: list[tuple[Path, str]] = []
        self.spool: Spool = generator.spool
        # The salt of its agents' prefixes, other than unproven imports.
        self.salt: bytes = getattr(generator, "salt", SHARED)
        self.owner: str | None = getattr(generator, "owner", None)

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
        views: dict[str, AgentView] = {}
        for name in sorted({*files, *(name for home in homes for name in home.noted)}):
            views[name] = _view(name, homes, files.get(name))
        return views

    def mine(self, views: dict[str, AgentView]) -> dict[str, AgentView]:
        """The agents that the owner of the request's key may see."""
        return {name: view for name, view in views.items() if belongs(name, self.owner)}

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
        found = views.get(name) or next((s for s in views.values() if safe_name(s.name) in called), None)
        if found is None:
            known = [shown(other) for other in views]
            there = ", ".join(known[:NAMES_SHOWN]) + (f" and {len(known) - NAMES_SHOWN} more" if len(known) > NAMES_SHOWN else "")
            raise RefusedError(
                404, f"Found no agent {shown(name)}, but {there or 'none'}. Give a name that GET /v1/agents shows."
            )
        return found

    def need_home(self, name: str) -> tuple[AgentView, Home]:
        """An agent and its model, which must be loaded."""
        view = self.need(name)
        if view.home is None:
            raise RefusedError(
                409,
                f"Found agent {shown(view.name)} under {shown(view.model)}, with other weights, store bits or adapter than "
                "the loaded models have; needed its model loaded. POST /admin/load, or send it a request.",
            )
        return view, view.home

    def requests(self) -> tuple[Counter[str], Counter[str]]:
        """The numbers of running and of waiting requests of each agent."""
        return self.do(self._requests)

    def refuse_if_busy(self, name: str) -> None:
        """Raise RefusedError while a request of this agent runs or waits. On the generation thread."""
        running, waiting = (counts[name] for counts in self._requests())
        if running or waiting:
            found = f"{running} running and {waiting} waiting requests of agent {shown(name)}"
            raise RefusedError(409, f"Found {found}; needed none. Try again once they have ended.")

    # -- names and pins ------------------------------------------------------------------------------------------------

    def pin(self, name: str) -> Report:
        """Keep its path on disk, and in memory as far as half of the pool allows."""
        view = self.need(name)
        self._change_file(view, lambda files: files.pin(view.name))
        in_memory = False
        if view.home is not None:
            in_memory = self.at(view.home, lambda served, _: _pin(served, view))
        return {"agent": view.name, "pinned": True, "pinned_in_memory": in_memory, "pinned_on_disk": view.file is not None}

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
        if is_by_content(new):
            raise RefusedError(400, f"Found {new} as a name; needed another one: names like this are made of what a chat says.")
        if new in self.look():
            raise RefusedError(409, f"Found an agent {shown(new)} already; needed a name that is free.")

    def _change_file(self, view: AgentView, act: Callable[[Agents], object]) -> None:
        """Change the agent's file, if it has one, after all of its turns are noted there."""
        if view.file is None or self.files is None:
            return
        try:
            if view.home is not None:
                view.home.agents.run(act)
            else:
                act(self.files)
                bound_notes(self.files, self.config, {})
        except StoreError as error:
            raise RefusedError(409, str(error)) from error

    # -- delete --------------------------------------------------------------------------------------------------------

    def delete(self, name: str) -> Report:
        """Remove an agent with the records and blocks that only its path needs, and prove that they are gone: `clean`.

        Raises RefusedError while it has requests, and StoreError.
        """
        views = self.look()
        view = self.need_in(views, name)
        on_disk = view.file is not None and self.root is not None
        if view.home is None:
            assert self.root is not None
            assert self.records is not None
            self.do(lambda: self.refuse_if_busy(view.name))
            deleted = self.records.delete(view.name, self.records.share(view.name))
            return _below(self.root, {name: value for name, value in deleted.items() if name != "folder"})
        # Its records can be named only while its file is there.
        share = self.records.share(view.name) if on_disk and self.records is not None else PathRecords([], [])
        shared = shared_with(view.home, views)
        freed, kept = self.at(view.home, lambda served, prefix: self._forget(served, prefix, view, shared))
        report: Report = {
            "agent": view.name,
            "deleted": True,
            "memory": {"blocks": freed.blocks, "bytes": freed.bytes, "kept": freed.kept},
            "clean": self.at(view.home, lambda _, prefix: len(prefix.index.trie.find(view.path).path) <= freed.kept),
        }
        if on_disk and self.records is not None:
            mine = [file for file in share.own if _hash_of(file) not in kept]
            disk = self._remove(view, view.home, self.records, PathRecords(mine, share.stays))
            report |= disk | {"clean": report["clean"] and disk["clean"]}
        return _below(self.root, report)

    def _forget(
        self, served: LoadedModel, prefix: TieredPrefixCache, view: AgentView, shared: SharedPaths
    ) -> tuple[Freed, set[bytes]]:
        """Forget the path in memory as far as no other agent or request needs it. Returns also the hashes of the rest.

        On the generation thread.
        """
        self.refuse_if_busy(view.name)
        agents_of(served).forget(view.name)
        freed = forget(prefix.index, view.path, self.own_from(served, prefix, view, shared))
        if prefix.stored is not None:
            prefix.stored.write_behind(0)
        return freed, kept_hashes(prefix.index, view.path)

    def _remove(self, view: AgentView, home: Home, records: AgentRecords, share: PathRecords) -> Report:
        """Remove the agent's own records from disk, then its file."""
        keys = [Key(KINDS[file.path.parents[1].name], _hash_of(file)) for file in share.own]

        def forgotten(_: LoadedModel, prefix: TieredPrefixCache) -> PromptStore:
            assert prefix.stored is not None
            prefix.stored.store.forget(keys)
            return prefix.stored.store

        # Waits for the writer's thread, which any thread may do.
        self.at(home, forgotten).flush()
        # The store does not know records that another process has written.
        fsck.remove(share.own)
        home.agents.run(lambda files: files.remove(view.name))
        proof = records.proof(share)
        return {"removed": proof["gone"]} | proof

    # -- the generation thread -----------------------------------------------------------------------------------------

    def do(self, act: Callable[[], T]) -> T:
        """Run `act` on the generation thread and return its result. Raises its errors; RuntimeError if the thread has ended."""
        return run_on_generation_thread(self._generator, act)

    def at(self, home: Home, act: Callable[[LoadedModel, TieredPrefixCache], T]) -> T:
        """do() with a model, unless it has been unloaded."""
        return self.do(lambda: act(*self.served(home)))

    def served(self, home: Home) -> tuple[LoadedModel, TieredPrefixCache]:
        """The model and its prefixes, unless it has been unloaded. On the generation thread."""
        served = self._generator.registry.loaded.get(home.key)
        if served is None or served.agents is not home.agents or served.prefix is None:
            raise RefusedError(409, f"Model {shown(home.agents.model_id)} was unloaded meanwhile; needed it loaded. Try again.")
        return served, served.prefix

    def own_from(self, served: LoadedModel, prefix: TieredPrefixCache, view: AgentView, shared: SharedPaths) -> int:
        """The index of the first edge of its path that no other agent or request needs. On the generation thread."""
        engine = served.engine
        live = [] if engine is None else [*engine.live, *engine._waiting]
        in_use = [(running.tokens, running.terms.salt) for running in live if _name_of(running.request) != view.name]
        return own_from(prefix.index, view.path, shared, in_use)

    def _homes(self) -> list[Home]:
        homes = []
        for key, served in self._generator.registry.loaded.items():
            served.note_turns()
            agents = served.agents
            if agents is not None:
                in_memory = frozenset(name for name, pin in agents.pinned.items() if pin is not None)
                homes.append(Home(key, agents, dict(agents.noted), frozenset(agents.pinned), in_memory))
        return homes

    def _requests(self) -> tuple[Counter[str], Counter[str]]:
        running: Counter[str] = Counter()
        waiting: Counter[str] = Counter()
        for served in self._generator.registry.loaded.values():
            if served.engine is not None:
                running.update(filter(None, (_name_of(live.request) for live in served.engine.live)))
                waiting.update(filter(None, (_name_of(waits.request) for waits in served.engine._waiting)))
        for place in self._generator._waiting:
            options = getattr(getattr(place.item, "request", None), "options", None)
            if options is not None:
                waiting.update(filter(None, [options.agent or options.conversation]))
        return running, waiting


def checked_name(name: Any) -> str:
    """`name`, if it can name an agent. Raises RefusedError."""
    if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME or not name.isprintable():
        raise RefusedError(400, f"Found {str(name)[:40]!r} as a name; needed 1 to {LONGEST_NAME} printable characters.")
    return name


def agents_of(served: LoadedModel) -> ServedAgents:
    """The agents of a loaded model that has some."""
    assert served.agents is not None
    return served.agents


def shared_with(home: Home, views: dict[str, AgentView]) -> SharedPaths:
    """The paths of all agents of one loaded model."""
    return SharedPaths(view.path for view in views.values() if view.home is home)


def _name_of(request: Any) -> str | None:
    """The name under which an engine's request is noted."""
    name: str | None = request.noted_as or request.agent
    return name


def _view(name: str, homes: list[Home], file: Agent | None) -> AgentView:
    """An agent from its file, which names the model that it used last, and from memory, which has the last turn."""
    if file is not None:
        home = next((home for home in homes if home.agents.namespace == file.namespace), None)
        noted = None if home is None else home.noted.get(name)
        return AgentView(name, at(file) if noted is None or noted.used < file.used else noted, home, file)
    home = max((home for home in homes if name in home.noted), key=lambda home: home.noted[name].used)
    return AgentView(name, home.noted[name], home, None)


def _pin(served: LoadedModel, view: AgentView) -> bool:
    agents = agents_of(served)
    # It may have had another turn since look().
    noted = agents.noted.get(view.name, view.noted)
    pinned = agents.pin(view.name, noted.path)
    served.note_turns()
    return pinned


def _unpin(served: LoadedModel, name: str) -> None:
    agents_of(served).unpin(name)
    served.note_turns()


def _below(root: Path | None, report: Report) -> Report:
    """A report with paths relative to the store's folder."""
    text = json.dumps(report)
    return report if root is None else dict(json.loads(text.replace(json.dumps(f"{root}/")[1:-1], "")))


def _hash_of(file: File) -> bytes:
    return bytes.fromhex(file.path.stem)
