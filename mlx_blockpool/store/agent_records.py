"""AgentRecords: the agents of a store's folder, and the records on disk that each path stands on.

Knows names, hashes and record headers; no trie, no arrays. The command line and the server use it for agents whose model is not
loaded. Any thread may call anything here.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import StoreError
from ..formatting import Report, progress
from . import fsck
from .agent_files import Agents, AgentsFound
from .fs import safe_name
from .manifest import Agent, shown
from .reachability import PathRecords, Sharing
from .record import Naming
from .scan import File, Listing


class AgentRecords:
    """The agents in the store's folder `root`, whose records are named by the rule `naming`.

    Every method raises StoreError, also for what the disk refuses.
    """

    def __init__(self, root: Path, naming: Naming) -> None:
        self.root = root
        self._naming = naming
        self._agents = Agents(root)

    def listing(self, namespaces: Collection[str] | None = None) -> Report:
        """Every agent (of these namespaces) with its records on disk; sizes in bytes, times in UTC."""
        with _disk_errors():
            found, sharing = self._look(namespaces, noted=True)
        return {
            "folder": str(self.root),
            "agents": [_figures(a, sharing[a.namespace]) for a in found.agents if a.namespace in sharing],
            "bad": [{"path": str(path), "reason": reason} for path, reason in found.bad],
        }

    def resolve(self, name: str) -> str:
        """The agent's own name: it may also be given as reports show it, or as its file is called."""
        with _disk_errors():
            if self._agents.get(name) is not None:
                return name
            return next((a.name for a in self._agents.all() if name in (safe_name(a.name), shown(a.name))), name)

    def change(self, act: str, name: str, *new: str) -> Agent:
        """The agent after 'pin', 'unpin', or 'rename' or 'fork' to a `new` name."""
        with _disk_errors():
            changed: Agent = getattr(self._agents, act)(name, *new)
        return changed

    def share(self, name: str) -> PathRecords:
        """The records that deleting the agent removes, and those of its path that stay for others.

        An agent file that cannot be read is an error: its records are not known.
        """
        with _disk_errors():
            namespace = self._agents.need(name).namespace
            found, sharing = self._look({namespace})
        if found.bad:
            raise StoreError(f"{found.bad[0][1]} Needed to know what it stands on. Put it aside with `store check --fix`.")
        agent = next((agent for agent in found.agents if (agent.name, agent.namespace) == (name, namespace)), None)
        if agent is None:
            raise StoreError(f"Agent {shown(name)} was replaced by another of the same name meanwhile. Try again.")
        return sharing[namespace].share(agent)

    def remove(self, name: str, share: PathRecords) -> None:
        """Remove an agent with the records that only its path stands on; proof() reads the folder again."""
        with _disk_errors():
            # Ends first: wherever this stops, the remaining records can be reached and the agent can be deleted again.
            fsck.remove(share.own)
            self._agents.remove(name)

    def proof(self, share: PathRecords) -> Report:
        """Whether the files of `share.own` are gone and those of `share.stays` are whole: `clean`."""
        with _disk_errors():
            there = {file.path for file in Listing(self.root).records}
            stays = [stay.file for stay in share.stays]
            judged = list(progress(fsck.judge(stays, self._naming, with_data=True), len(stays), "checksums"))
        still = [str(file.path) for file in share.own if file.path in there]
        bad = [{"path": str(found.file.path), "reason": found.problem} for found in judged if found.problem is not None]
        return {
            "stays": [
                {"path": str(s.file.path), "bytes": s.file.size, "agents": [shown(name) for name in s.agents], "behind": s.behind}
                for s in share.stays
            ],
            "gone": sizes(file for file in share.own if file.path not in there),
            "still_there": still,
            "whole": sizes(found.file for found in judged if found.header is not None),
            "bad": bad,
            "clean": not (still or bad),
        }

    def _look(self, namespaces: Collection[str] | None, noted: bool = False) -> tuple[AgentsFound, dict[str, Sharing]]:
        """The agents, and by namespace (None: of all agents) the records that their paths share.

        `noted`: trust the headers that a server has noted instead of reading every record's own.
        """
        names = {agent.namespace for agent in self._agents.all()} if namespaces is None else set(namespaces)
        files = [file for file in Listing(self.root).records if file.namespace in names]
        found = fsck.seen(self.root, files, self._naming) if noted else fsck.judge(files, self._naming)
        judged = list(progress(found, len(files), "headers"))
        # A server may have written more behind what was listed already.
        seen = {file.path for file in files}
        later = [file for file in Listing(self.root).records if file.namespace in names and file.path not in seen]
        judged += fsck.judge(later, self._naming)
        agents = self._agents.look()
        return agents, {
            name: Sharing(
                (one for one in judged if one.file.namespace == name),
                [agent for agent in agents.agents if agent.namespace == name],
                self._naming,
            )
            for name in names
        }


@contextmanager
def _disk_errors() -> Iterator[None]:
    """Raise OSErrors as StoreError."""
    try:
        yield
    except OSError as error:
        where = f" at {error.filename}" if error.filename else ""
        reason = error.strerror or str(error)
        raise StoreError(f"Cannot go on{where}: {reason}. Needed a folder to read and write, and room there.") from error


def _figures(agent: Agent, sharing: Sharing) -> Report:
    own, shared = sharing.files(agent)
    return fields(agent) | {"tokens_on_disk": sharing.tokens_on_disk(agent), "own": sizes(own), "shared": sizes(shared)}


def fields(agent: Agent) -> Report:
    """An agent's file as reports show it; times in UTC."""
    return {
        "name": agent.name,
        "shown": shown(agent.name),
        "model": agent.model_id,
        "namespace": agent.namespace,
        "last_hash": None if agent.last_hash is None else agent.last_hash.hex(),
        "tokens": agent.tokens,
        "created": utc(agent.created),
        "used": utc(agent.used),
        "pinned": agent.pinned,
    }


def utc(moment: float) -> str:
    """Seconds since the epoch in ISO 8601."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(moment))


def sizes(files: Iterable[File]) -> Report:
    """How many records, and their bytes."""
    found = [file.size for file in files]
    return {"records": len(found), "bytes": sum(found)}
