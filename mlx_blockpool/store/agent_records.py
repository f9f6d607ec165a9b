"""AgentRecords: the agents of a store's folder, the records on disk that each path needs, and those that nothing else needs.

A path needs its own records and others that hold a beginning of the same tokens: those that an earlier, shorter end left
behind, and the fuller block that has taken the place of its end. Both are proven by their hashes.

Knows names, hashes and record headers; no trie, no arrays. The command line and the server use it for agents whose model is not
loaded. Any thread may call anything here.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..errors import StoreError
from ..formatting import Report, progress
from ..hashing import prefix_hash
from ..spec import BLOCK_TOKENS
from . import fsck
from .agent_files import Agent, Agents, AgentsFound, shown
from .fs import Disk, safe_name
from .fsck import Judged, RecordPlace
from .reader import inspect
from .record import BLOCK, Record
from .scan import File, Listing


@dataclass(frozen=True)
class Stay:
    """A record of the path of `agent` that others need: `agents`, among all its `users`, or this many records `behind` it."""

    file: File
    agent: str
    users: Sequence[str]
    behind: int

    @property
    def agents(self) -> tuple[str, ...]:
        # Not made before: many agents with one system prompt would each list all the others.
        return tuple(sorted(name for name in self.users if name != self.agent))


@dataclass(frozen=True)
class PathRecords:
    """The records of an agent's path: `own`, which nothing else needs, ends first, and those that stay without the agent."""

    own: list[File]
    stays: list[Stay]


class Sharing:
    """The good records of one namespace, and the agents there.

    Making one is linear in the records and in the paths of the agents; so is a question about each agent.
    """

    def __init__(self, judged: Iterable[Judged], agents: Sequence[Agent]) -> None:
        self._files: dict[bytes, list[File]] = {}
        self._headers: dict[bytes, RecordPlace] = {}
        self._blocks: set[bytes] = set()
        self._children: dict[bytes, set[bytes]] = {}
        # By parent and start: how many tokens its records have.
        self._sizes: dict[tuple[bytes, int], set[int]] = {}
        self._tokens: dict[bytes, tuple[int, ...]] = {}
        for found in judged:
            if found.header is not None:
                self._add(found.file, found.header)
        self._fuller = self._fuller_ends(agents)
        self._paths = {agent.name: self._path(agent) for agent in agents}
        self._users: dict[bytes, list[str]] = {}
        for name, path in self._paths.items():
            for digest in path:
                self._users.setdefault(digest, []).append(name)

    def _add(self, file: File, header: RecordPlace) -> None:
        self._files.setdefault(header.hash, []).append(file)
        self._headers[header.hash] = header
        self._blocks.update([header.hash] if header.kind == BLOCK else [])
        self._children.setdefault(header.parent, set()).add(header.hash)
        self._sizes.setdefault((header.parent, header.start), set()).add(header.end - header.start)

    def tokens_on_disk(self, agent: Agent) -> int:
        """How many tokens of its path are on disk without a gap, from the first on."""
        for index, digest in enumerate(agent.hashes):
            if digest not in self._blocks and not (digest == agent.last_hash and self._fuller.get(digest)):
                return index * BLOCK_TOKENS
        return agent.tokens

    def share(self, agent: Agent) -> PathRecords:
        """The records that would go with an agent, and those that would stay."""
        path = self._paths[agent.name]
        found = PathRecords([], [])
        going: Counter[bytes] = Counter()
        for digest in sorted(path, key=lambda digest: self._headers[digest].end, reverse=True):
            behind = len(self._children.get(digest, ())) - going[digest]
            if len(self._users[digest]) > 1 or behind or not path[digest]:
                found.stays.extend(Stay(file, agent.name, self._users[digest], behind) for file in self._files[digest])
            else:
                found.own.extend(self._files[digest])
                going[self._headers[digest].parent] += 1
        return found

    def _path(self, agent: Agent) -> dict[bytes, bool]:
        """The hashes of all records that a path needs, and whether they hold nothing beyond it."""
        own = [digest for digest in agent.hashes if digest in self._files]
        fuller = self._fuller.get(agent.hashes[-1], []) if agent.hashes else []
        beyond = fuller + [digest for whole in fuller for digest in self._shorter(whole)]
        shorter = [digest for whole in own for digest in self._shorter(whole)]
        return dict.fromkeys(beyond, False) | dict.fromkeys(shorter, True) | dict.fromkeys(own, True)

    def _fuller_ends(self, agents: Sequence[Agent]) -> dict[bytes, list[bytes]]:
        """The blocks that begin with the end of a path whose own block has gone, by that end."""
        # By the hash before it: the wanted ends, and how many tokens they have at least.
        wanted: dict[tuple[bytes | None, int], dict[bytes, int]] = {}
        for agent in agents:
            if agent.hashes and agent.hashes[-1] not in self._blocks:
                before, start = (None if len(agent.hashes) == 1 else agent.hashes[-2]), (len(agent.hashes) - 1) * BLOCK_TOKENS
                ends = wanted.setdefault((before, start), {})
                ends[agent.hashes[-1]] = min(agent.tokens - start, ends.get(agent.hashes[-1], BLOCK_TOKENS))
        found: dict[bytes, list[bytes]] = {}
        for (before, _), ends in wanted.items():
            beside = self._first() if before is None else sorted(self._children.get(before, ()))
            for whole in (digest for digest in beside if digest in self._blocks):
                tokens, parent = self._tokens_of(whole), self._headers[whole].parent
                for size in range(min(ends.values()), min(len(tokens), BLOCK_TOKENS - 1) + 1):
                    end = prefix_hash(parent, tokens[:size])
                    if ends.get(end, BLOCK_TOKENS) <= size:
                        found.setdefault(end, []).append(whole)
        return found

    def _shorter(self, whole: bytes) -> list[bytes]:
        """The records beside one that hold a beginning of its tokens."""
        header = self._headers[whole]
        sizes = [size for size in self._sizes[header.parent, header.start] if size < header.end - header.start]
        if not sizes:
            return []
        tokens = self._tokens_of(whole)
        named = [prefix_hash(header.parent, tokens[:size]) for size in sorted(sizes) if size <= len(tokens)]
        return [digest for digest in named if digest in self._files and self._headers[digest].start == header.start]

    def _tokens_of(self, digest: bytes) -> tuple[int, ...]:
        """The tokens of a record, read at need: those of all would be too many. Empty if the file has gone meanwhile."""
        if digest not in self._tokens:
            file = self._files[digest][0]
            found = inspect(Disk(), file.path, file.namespace)
            self._tokens[digest] = found.tokens if isinstance(found, Record) else ()
        return self._tokens[digest]

    def _first(self) -> list[bytes]:
        return sorted(digest for digest, header in self._headers.items() if header.start == 0)


class AgentRecords:
    """The agents in the store's folder `root`.

    Every method raises StoreError, also for errors of the disk.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
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
        """The agent's own name, given that, the name in reports, or that of its file."""
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

        A bad agent file is an error: nothing says which records it needs.
        """
        with _disk_errors():
            namespace = self._agents.need(name).namespace
            found, sharing = self._look({namespace})
        if found.bad:
            raise StoreError(
                f"{found.bad[0][1]} Nothing says which records it needs. Move it to quarantine with `store check --fix`."
            )
        agent = next((agent for agent in found.agents if (agent.name, agent.namespace) == (name, namespace)), None)
        if agent is None:
            raise StoreError(f"Agent {shown(name)} was replaced by another of the same name in the meantime. Try again.")
        return sharing[namespace].share(agent)

    def remove(self, name: str, share: PathRecords) -> None:
        """Remove an agent with the records that only its path needs; proof() reads the folder again."""
        with _disk_errors():
            # Ends first: wherever this stops, the remaining records can be reached and the agent can be deleted again.
            fsck.remove(share.own)
            self._agents.remove(name)

    def proof(self, share: PathRecords) -> Report:
        """Look again: `clean` if the files of `share.own` are gone and those of `share.stays` are whole."""
        with _disk_errors():
            there = {file.path for file in Listing(self.root).records}
            stays = [stay.file for stay in share.stays]
            judged = list(progress(fsck.judge(stays, with_data=True), len(stays), "checksums"))
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
        """The agents, and by namespace (None: of all agents) the records that their paths share. `noted` as in judge()."""
        names = {agent.namespace for agent in self._agents.all()} if namespaces is None else set(namespaces)
        _, judged, later = fsck.judge_all(self.root, noted=noted, namespaces=names)
        agents = self._agents.look()
        return agents, {
            name: Sharing(
                (one for one in judged + later if one.file.namespace == name),
                [agent for agent in agents.agents if agent.namespace == name],
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
        raise StoreError(
            f"Cannot continue{where}: {reason}. Free some space, or give --store-dir a folder that can be read and written."
        ) from error


def _figures(agent: Agent, sharing: Sharing) -> Report:
    share = sharing.share(agent)
    sizes_of = {"own": sizes(share.own), "shared": sizes(stay.file for stay in share.stays)}
    return fields(agent) | {"tokens_on_disk": sharing.tokens_on_disk(agent)} | sizes_of


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
