"""AgentRecords: the agents of a store's folder, the records on disk that each path needs, and those
that nothing else needs.

The records are a trie, as in memory. An edge goes or stays with all its records, those that an
earlier, shorter end has left, except for checkpoints whose tokens another edge begins with too. The
command line and the server use it for agents whose model is not loaded. Any thread may call
anything here.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ..errors import StoreError
from ..formatting import Report, progress
from ..prefix.sharing import SharedPaths, exclusive_from
from ..prefix.trie import Node, PrefixRef, Trie
from ..store import fsck
from ..store.agents import Agent, Agents, shown
from ..store.fs import safe_name
from ..store.fsck import Judged
from ..store.paths import FOLDERS
from ..store.record import BLOCK, Key, Record
from ..store.scan import File, Listing


@dataclass(frozen=True)
class Stay:
    """A record of the path of `agent` that others need: `agents` of all its users, or the
    `following` edges after it.
    """

    file: File
    agent: str
    users: Callable[[], set[str]]
    following: int

    @property
    def agents(self) -> tuple[str, ...]:
        # Not made before: many agents with one system prompt would each list all the others.
        return tuple(sorted(self.users() - {self.agent}))


@dataclass(frozen=True)
class PathRecords:
    """The records of an agent's path: `own`, which nothing else needs, ends first, and those
    that stay without the agent.
    """

    own: list[File]
    stays: list[Stay]


class StoredPaths:
    """The good records of one namespace as a trie, and the paths of the agents there.

    orphans:  records that no chain of whole blocks leads to from a beginning: a restart would not
              find them.
    """

    def __init__(self, judged: Iterable[Judged], agents: Sequence[Agent] = ()) -> None:
        self.orphans: list[File] = []
        self._paths = {
            agent.name: PrefixRef(agent.hashes, agent.tokens, agent.salt) for agent in agents
        }
        # An end with its own record needs no other, so that is an edge even where a longer one
        # begins with its tokens.
        self._ends = {path.hashes[-1] for path in self._paths.values() if path.hashes}
        self._trie = Trie("")
        # By their hashes, which are those of the namespace's salts.
        self._roots: dict[bytes, Node] = {}
        self._files: dict[Key, File] = {}
        # The records of each edge: of its block and of shorter ones with its tokens, then of
        # checkpoints.
        self._records: defaultdict[Node, list[tuple[Record, File]]] = defaultdict(list)
        full: dict[bytes, Node] = {}
        places = [(found.header, found.file) for found in judged if found.header is not None]
        # Parents first, and a block before those that have a beginning of its tokens.
        for place, file in sorted(
            places, key=lambda found: (found[0].kind != BLOCK, found[0].start, -found[0].end)
        ):
            self._files[place.key] = file
            parent = full.get(place.parent)
            if place.start == 0:
                parent = self._roots.setdefault(place.parent, Node(None, 0, b"", place.parent))
            if parent is None or parent.end != place.start:
                self.orphans.append(file)
            elif (node := self._add(parent, place, file)) is not None and node.is_full:
                full[place.hash] = node
        self._shared = SharedPaths(
            self._paths, {end for end in self._ends if self._trie.node(end) is not None}
        )

    def _add(self, parent: Node, place: Record, file: File) -> Node | None:
        """The edge of a record, or the first one that begins with its tokens."""
        node = self._trie.child(parent, place.tokens)
        edges: Iterable[Node] = () if node is None else (node,)
        if place.kind == BLOCK and (node is None or node.hash != place.hash):
            if node is None or place.hash in self._ends:
                node, _ = self._trie.add(parent, place.tokens)
                edges = (node,)
            else:
                edges = self._trie.children_with(parent, place.tokens)
        for edge in edges:
            self._records[edge].append((place, file))
        return node

    def _match(self, path: PrefixRef) -> PrefixRef:
        """As much of a path as is on disk without a gap from the first token on."""
        found = (self._trie.find(path, root) for root in self._roots.values())
        return max(found, key=lambda match: match.tokens, default=PrefixRef())

    def tokens_on_disk(self, agent: Agent) -> int:
        """How many tokens of its path are on disk without a gap, from the first on."""
        return self._match(self._paths[agent.name]).tokens

    def share(self, agent: Agent) -> PathRecords:
        """The records that would go with an agent, ends first, and those that would stay."""
        path = self._paths[agent.name]
        nodes = self._match(path).path
        own = exclusive_from(self._trie, path, nodes, self._shared)
        stays = list(self._stays_for_siblings(nodes[own], agent.name)) if own < len(nodes) else []
        staying = {stay.file for stay in stays}
        going = (file for node in reversed(nodes[own:]) for file in self._files_of(node))
        found = PathRecords([file for file in going if file not in staying], stays)
        for node in reversed(nodes[:own]):
            following = len(set(node.children) - set(nodes[own : own + 1]))
            users = partial(self._shared.users, node)
            found.stays.extend(
                Stay(file, agent.name, users, following) for file in self._files_of(node)
            )
        # Records that nothing leads to any more.
        rest = [digest for digest in path.hashes[len(nodes) :] if self._shared.is_of_one(digest)]
        found.own[:0] = [file for digest in reversed(rest) for file in self._named(digest)]
        return found

    def _stays_for_siblings(self, node: Node, name: str) -> Iterator[Stay]:
        """The checkpoints of the first edge that goes with an agent whose tokens other edges
        begin with: those resume there.
        """
        assert node.parent is not None
        for place, file in self._records[node]:
            siblings = [
                each
                for each in self._trie.children_with(node.parent, place.tokens)
                if each is not node
            ]
            if place.kind != BLOCK and siblings:
                yield Stay(file, name, partial(self._users_of_any, siblings), len(siblings))

    def _users_of_any(self, nodes: Sequence[Node]) -> set[str]:
        return set[str]().union(*map(self._shared.users, nodes))

    def _files_of(self, node: Node) -> list[File]:
        return [file for _, file in self._records[node]]

    def _named(self, digest: bytes) -> list[File]:
        return [self._files[key] for kind in FOLDERS if (key := Key(kind, digest)) in self._files]


class AgentRecords:
    """The agents in the store's folder `root`.

    Every method raises StoreError, also for errors of the disk.
    """

    def __init__(self, root: Path, agents: Agents | None = None) -> None:
        self.root = root
        self._agents = agents or Agents(root)

    def listing(self, namespaces: Collection[str] | None = None) -> Report:
        """Every agent (of these namespaces) with its records on disk; sizes in bytes, times in
        UTC.
        """
        with _disk_errors():
            found, sharing = self._look(namespaces, noted=True)
        return {
            "folder": str(self.root),
            "agents": [_figures(a, sharing[a.namespace]) for a in found if a.namespace in sharing],
        }

    def resolve(self, name: str) -> str:
        """The agent's own name, given that, the name in reports, or that of its file."""
        with _disk_errors():
            if self._agents.get(name) is not None:
                return name
            return next(
                (a.name for a in self._agents.all() if name in (safe_name(a.name), shown(a.name))),
                name,
            )

    def change(self, act: str, name: str, *new: str) -> Agent:
        """The agent after 'pin', 'unpin', or 'fork' to a `new` name."""
        with _disk_errors():
            changed: Agent = getattr(self._agents, act)(name, *new)
        return changed

    def share(self, name: str) -> PathRecords:
        """The records that deleting the agent removes, and those of its path that stay for
        others.
        """
        with _disk_errors():
            namespace = self._agents.need(name).namespace
            found, sharing = self._look({namespace})
        agent = next(
            (agent for agent in found if (agent.name, agent.namespace) == (name, namespace)), None
        )
        if agent is None:
            raise StoreError(
                f"Agent {shown(name)} was replaced by another of the same name in the meantime. "
                "Try again."
            )
        return sharing[namespace].share(agent)

    def remove(self, name: str, share: PathRecords) -> None:
        """Remove an agent with the records that only its path needs; proof() reads the folder
        again.
        """
        with _disk_errors():
            # Ends first: wherever this stops, the remaining records can be reached and the agent
            # can be deleted again.
            fsck.remove(share.own)
            self._agents.remove(name)

    def proof(self, share: PathRecords) -> Report:
        """Check the disk: `clean` if the files of `share.own` are gone and those of
        `share.stays` are complete.
        """
        with _disk_errors():
            there = {file.path for file in Listing(self.root).records}
            stays = [stay.file for stay in share.stays]
            judged = list(progress(fsck.judge(stays, with_data=True), len(stays), "checksums"))
        still = [str(file.path) for file in share.own if file.path in there]
        bad = [
            {"path": str(found.file.path), "reason": found.problem}
            for found in judged
            if found.problem is not None
        ]
        return {
            "stays": [
                {
                    "path": str(s.file.path),
                    "bytes": s.file.size,
                    "agents": [shown(name) for name in s.agents],
                    "behind": s.following,
                }
                for s in share.stays
            ],
            "gone": sizes(file for file in share.own if file.path not in there),
            "still_there": still,
            "whole": sizes(found.file for found in judged if found.header is not None),
            "bad": bad,
            "clean": not (still or bad),
        }

    def _look(
        self, namespaces: Collection[str] | None, noted: bool = False
    ) -> tuple[list[Agent], dict[str, StoredPaths]]:
        """The agents, and by namespace (None: of all agents) the records that their paths share.

        `noted` as in judge().
        """
        names = (
            {agent.namespace for agent in self._agents.all()}
            if namespaces is None
            else set(namespaces)
        )
        _, judged, later = fsck.judge_all(self.root, noted=noted, namespaces=names)
        agents = self._agents.all()
        return agents, {
            name: StoredPaths(
                (one for one in judged + later if one.file.namespace == name),
                [agent for agent in agents if agent.namespace == name],
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
            f"Cannot continue{where}: {reason}. Free some space, or give --store-dir a folder "
            "that can be read and written."
        ) from error


def _figures(agent: Agent, sharing: StoredPaths) -> Report:
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
        "last_hash": agent.hashes[-1].hex() if agent.hashes else None,
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
