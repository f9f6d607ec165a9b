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
from ...store.reachability import Share
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
    """An order that cannot be carried out, and the HTTP status that says why."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Home:
    """A loaded model that keeps paths of agents: who is noted in its memory, and who is pinned there."""

    key: ModelKey
    agents: ServedAgents
    noted: dict[str, Noted]
    pinned: frozenset[str]
    in_memory: frozenset[str]


@dataclass(frozen=True)
class Subject:
    """One agent. `home`: the loaded model that has its path; None: it is not loaded. `file`: what the store's folder says."""

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
        """Under which its records are kept; None: nothing is."""
        if self.file is not None:
            return self.file.namespace
        return None if self.home is None else self.home.agents.namespace

    @property
    def is_pinned(self) -> bool:
        in_memory = self.home is not None and self.name in self.home.pinned
        return in_memory if self.file is None else self.file.pinned


class AgentService:
    """What there is when it is asked for; each look is a new one. `root`: the store's folder; None: nothing is on disk."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator
        self.files: Agents | None = generator.agent_files
        self.root: Path | None = None if self.files is None else self.files.root
        self.records = None if self.root is None else AgentRecords(self.root, naming)
        self.config: StoreConfig = generator.store_config or StoreConfig()
        self.bad: list[tuple[Path, str]] = []
        self.spool: Spool = generator.spool
        # What its agents' prefixes are kept under, but for imports that are not proven.
        self.salt: bytes = getattr(generator, "salt", SHARED)
        self.owner: str | None = getattr(generator, "owner", None)

    # -- who there is --------------------------------------------------------------------------------------------------

    def look(self) -> dict[str, Subject]:
        """All agents by name. Raises OSError where the folder cannot be read."""
        homes = self.homes()
        for home in homes:
            home.agents.settle()
        files: dict[str, Agent] = {}
        if self.files is not None:
            found = self.files.look()
            files, self.bad = {agent.name: agent for agent in found.agents}, found.bad
        subjects: dict[str, Subject] = {}
        for name in sorted({*files, *(name for home in homes for name in home.noted)}):
            subjects[name] = _subject(name, homes, files.get(name))
        return subjects

    def mine(self, subjects: dict[str, Subject]) -> dict[str, Subject]:
        """Those of the agents that whoever asks may know of."""
        return {name: subject for name, subject in subjects.items() if belongs(name, self.owner)}

    def homes(self) -> list[Home]:
        """The loaded models that keep paths."""
        return self.do(self._homes)

    def need(self, name: str) -> Subject:
        """An agent by its name, or by what its file is called. Raises RefusedError."""
        return self.need_in(self.look(), name)

    def need_in(self, subjects: dict[str, Subject], name: str) -> Subject:
        """The same, among those that a look has found."""
        subjects = self.mine(subjects)
        called = (own_name(name), name)
        found = subjects.get(name) or next((s for s in subjects.values() if safe_name(s.name) in called), None)
        if found is None:
            known = [shown(other) for other in subjects]
            there = ", ".join(known[:NAMES_SHOWN]) + (f" and {len(known) - NAMES_SHOWN} more" if len(known) > NAMES_SHOWN else "")
            raise RefusedError(
                404, f"Found no agent {shown(name)}, but {there or 'none'}. Give a name that GET /v1/agents shows."
            )
        return found

    def need_home(self, name: str) -> tuple[Subject, Home]:
        """An agent whose model is loaded. Raises RefusedError."""
        subject = self.need(name)
        if subject.home is None:
            raise RefusedError(
                409,
                f"Found agent {shown(subject.name)} under {shown(subject.model)}, with other weights, store bits or adapter than "
                "the loaded models have; needed its model loaded. POST /admin/load, or send it a request.",
            )
        return subject, subject.home

    def requests(self) -> tuple[Counter[str], Counter[str]]:
        """How many requests of each agent run, and how many wait."""
        return self.do(self._requests)

    def refuse_if_busy(self, name: str) -> None:
        """On the generation thread. Raises RefusedError while a request of this agent runs or waits."""
        running, waiting = (counts[name] for counts in self._requests())
        if running or waiting:
            found = f"{running} running and {waiting} waiting requests of agent {shown(name)}"
            raise RefusedError(409, f"Found {found}; needed none. Try again once they have ended.")

    # -- names and pins ------------------------------------------------------------------------------------------------

    def pin(self, name: str) -> Report:
        """Nothing of its path goes, from memory as far as half of the pool allows, and from disk."""
        subject = self.need(name)
        self._change_file(subject, lambda files: files.pin(subject.name))
        in_memory = False
        if subject.home is not None:
            in_memory = self.at(subject.home, lambda served, _: _pin(served, subject))
        return {"agent": subject.name, "pinned": True, "pinned_in_memory": in_memory, "pinned_on_disk": subject.file is not None}

    def unpin(self, name: str) -> Report:
        """It may go like any other."""
        subject = self.need(name)
        self._change_file(subject, lambda files: files.unpin(subject.name))
        if subject.home is not None:
            self.at(subject.home, lambda served, _: _unpin(served, subject.name))
        return {"agent": subject.name, "pinned": False}

    def rename(self, name: str, new: str) -> Report:
        """The same agent under a name that is free."""
        subject = self.need(name)
        self._need_free(new)
        self.do(lambda: self.refuse_if_busy(subject.name))
        self._change_file(subject, lambda files: files.rename(subject.name, new))
        if subject.home is not None:
            self.at(subject.home, lambda served, _: agents_of(served).rename(subject.name, new))
        return {"agent": new, "was": subject.name}

    def fork(self, name: str, new: str) -> Report:
        """A second agent that goes on from where this one is."""
        subject = self.need(name)
        self._need_free(new)
        self._change_file(subject, lambda files: files.fork(subject.name, new))
        if subject.home is not None:
            self.at(subject.home, lambda served, _: agents_of(served).fork(new, subject.path))
        return {"agent": new, "of": subject.name, "tokens": subject.path.tokens}

    def _need_free(self, new: str) -> None:
        if is_by_content(new):
            raise RefusedError(400, f"Found {new} as a name; needed another one: names like this are made of what a chat says.")
        if new in self.look():
            raise RefusedError(409, f"Found an agent {shown(new)} already; needed a name that is free.")

    def _change_file(self, subject: Subject, act: Callable[[Agents], object]) -> None:
        """Where the agent has a file. What goes on in memory is noted there first. Raises RefusedError and OSError."""
        if subject.file is None or self.files is None:
            return
        try:
            if subject.home is not None:
                subject.home.agents.run(act)
            else:
                act(self.files)
                bound_notes(self.files, self.config, {})
        except StoreError as error:
            raise RefusedError(409, str(error)) from error

    # -- delete --------------------------------------------------------------------------------------------------------

    def delete(self, name: str) -> Report:
        """Its name, and the records and blocks that only its path stands on; then another look proves that they are gone.

        Raises RefusedError while it has requests, StoreError and OSError.
        """
        subjects = self.look()
        subject = self.need_in(subjects, name)
        on_disk = subject.file is not None and self.root is not None
        if subject.home is None:
            assert self.root is not None
            assert self.records is not None
            self.do(lambda: self.refuse_if_busy(subject.name))
            deleted = self.records.delete(subject.name, self.records.share(subject.name))
            return _below(self.root, {name: value for name, value in deleted.items() if name != "folder"})
        # What its files stand on is known by their names as long as the agent is.
        share = self.records.share(subject.name) if on_disk and self.records is not None else Share([], [])
        shared = shared_with(subject.home, subjects)
        freed, kept = self.at(subject.home, lambda served, prefix: self._forget(served, prefix, subject, shared))
        report: Report = {
            "agent": subject.name,
            "deleted": True,
            "memory": {"blocks": freed.blocks, "bytes": freed.bytes, "kept": freed.kept},
            "clean": self.at(subject.home, lambda _, prefix: len(prefix.index.trie.find(subject.path).path) <= freed.kept),
        }
        if on_disk and self.records is not None:
            mine = [file for file in share.own if _hash_of(file) not in kept]
            disk = self._remove(subject, subject.home, self.records, Share(mine, share.stays))
            report |= disk | {"clean": report["clean"] and disk["clean"]}
        return _below(self.root, report)

    def _forget(
        self, served: LoadedModel, prefix: TieredPrefixCache, subject: Subject, shared: SharedPaths
    ) -> tuple[Freed, set[bytes]]:
        """On the generation thread: forget the path in memory, as far as nobody else needs it, and name what somebody does."""
        self.refuse_if_busy(subject.name)
        agents_of(served).forget(subject.name)
        freed = forget(prefix.index, subject.path, self.own_from(served, prefix, subject, shared))
        if prefix.stored is not None:
            prefix.stored.write_behind(0)
        return freed, kept_hashes(prefix.index, subject.path)

    def _remove(self, subject: Subject, home: Home, records: AgentRecords, share: Share) -> Report:
        """The records that are left of an agent, then its name."""
        keys = [Key(KINDS[file.path.parents[1].name], _hash_of(file)) for file in share.own]

        def forgotten(_: LoadedModel, prefix: TieredPrefixCache) -> PromptStore:
            assert prefix.stored is not None
            prefix.stored.store.forget(keys)
            return prefix.stored.store

        # Waits for the writer's thread, as any thread may.
        self.at(home, forgotten).flush()
        # What another process has written is not known to the store.
        fsck.remove(share.own)
        home.agents.run(lambda files: files.remove(subject.name))
        proof = records.proof(share)
        return {"removed": proof["gone"]} | proof

    # -- the generation thread -----------------------------------------------------------------------------------------

    def do(self, act: Callable[[], T]) -> T:
        """An errand. Raises what `act` raises, and RuntimeError if there is nobody to do it."""
        return run_on_generation_thread(self._generator, act)

    def at(self, home: Home, act: Callable[[LoadedModel, TieredPrefixCache], T]) -> T:
        """An errand at a model. Raises RefusedError if it has been unloaded since."""
        return self.do(lambda: act(*self.served(home)))

    def served(self, home: Home) -> tuple[LoadedModel, TieredPrefixCache]:
        """On the generation thread. Raises RefusedError."""
        served = self._generator.registry.loaded.get(home.key)
        if served is None or served.agents is not home.agents or served.prefix is None:
            raise RefusedError(409, f"Model {shown(home.agents.model_id)} was unloaded meanwhile; needed it loaded. Try again.")
        return served, served.prefix

    def own_from(self, served: LoadedModel, prefix: TieredPrefixCache, subject: Subject, shared: SharedPaths) -> int:
        """On the generation thread: from which edge of its path on an agent is alone."""
        engine = served.engine
        live = [] if engine is None else [*engine.live, *engine._waiting]
        in_use = [(running.tokens, running.terms.salt) for running in live if _name_of(running.request) != subject.name]
        return own_from(prefix.index, subject.path, shared, in_use)

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
    """Raises RefusedError for what cannot be the name of an agent."""
    if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME or not name.isprintable():
        raise RefusedError(400, f"Found {str(name)[:40]!r} as a name; needed 1 to {LONGEST_NAME} printable characters.")
    return name


def agents_of(served: LoadedModel) -> ServedAgents:
    """Who speaks with a model that keeps paths."""
    assert served.agents is not None
    return served.agents


def shared_with(home: Home, subjects: dict[str, Subject]) -> SharedPaths:
    """The paths of all agents of one loaded model."""
    return SharedPaths(subject.path for subject in subjects.values() if subject.home is home)


def _name_of(request: Any) -> str | None:
    """The name under which an engine's request is noted."""
    name: str | None = request.noted_as or request.agent
    return name


def _subject(name: str, homes: list[Home], file: Agent | None) -> Subject:
    """Where a file is, it says with which model the agent spoke last; memory knows of the last turn."""
    if file is not None:
        home = next((home for home in homes if home.agents.namespace == file.namespace), None)
        noted = None if home is None else home.noted.get(name)
        return Subject(name, at(file) if noted is None or noted.used < file.used else noted, home, file)
    home = max((home for home in homes if name in home.noted), key=lambda home: home.noted[name].used)
    return Subject(name, home.noted[name], home, None)


def _pin(served: LoadedModel, subject: Subject) -> bool:
    agents = agents_of(served)
    # It may have gone on since it was looked for.
    noted = agents.noted.get(subject.name, subject.noted)
    pinned = agents.pin(subject.name, noted.path)
    served.note_turns()
    return pinned


def _unpin(served: LoadedModel, name: str) -> None:
    agents_of(served).unpin(name)
    served.note_turns()


def _below(root: Path | None, report: Report) -> Report:
    """A report without the place of the store's folder in it."""
    text = json.dumps(report)
    return report if root is None else dict(json.loads(text.replace(json.dumps(f"{root}/")[1:-1], "")))


def _hash_of(file: File) -> bytes:
    return bytes.fromhex(file.path.stem)
