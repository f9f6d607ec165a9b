"""Which records an agent's path stands on, and which of them nobody else needs. Knows headers; no trie, no arrays.

A path stands on its own records and on others that hold a beginning of the same tokens: what an earlier, shorter end left
behind, and the fuller block that has taken the place of its end. Both are proven by their hashes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..errors import BadRecordError
from ..spec import BLOCK_TOKENS
from .disk import Disk
from .layout import KINDS
from .manifest import Agent
from .offline import File, Header, Judged
from .proof import read_header
from .record import BLOCK, Expected, Naming


@dataclass(frozen=True)
class Stay:
    """A record of an agent's path that others need: `agents` whose paths stand on it, or `behind`: so many records."""

    file: File
    agents: tuple[str, ...] = ()
    behind: int = 0


@dataclass(frozen=True)
class Share:
    """The records that an agent's path stands on: `own` only for it, ends first, and those that stay without it."""

    own: list[File]
    stays: list[Stay]


class Sharing:
    """The good records of one namespace, and the agents there. `naming` is the rule for the hash of a prefix."""

    def __init__(self, judged: Iterable[Judged], agents: Sequence[Agent], naming: Naming, disk: Disk | None = None) -> None:
        self._naming = naming
        self._disk = disk or Disk()
        self._files: dict[bytes, list[File]] = {}
        self._headers: dict[bytes, Header] = {}
        self._blocks: set[bytes] = set()
        self._children: dict[bytes, set[bytes]] = {}
        self._tokens: dict[bytes, tuple[int, ...]] = {}
        for found in judged:
            if found.header is not None:
                self._add(found.file, found.header)
        self._paths = {agent.name: self._path(agent) for agent in agents}
        self._users: dict[bytes, set[str]] = {}
        for name, path in self._paths.items():
            for digest in path:
                self._users.setdefault(digest, set()).add(name)

    def _add(self, file: File, header: Header) -> None:
        self._files.setdefault(header.hash, []).append(file)
        self._headers[header.hash] = header
        self._blocks.update([header.hash] if header.kind == BLOCK else [])
        self._children.setdefault(header.parent, set()).add(header.hash)

    # -- what is asked -------------------------------------------------------------------------------------------------

    def tokens_on_disk(self, agent: Agent) -> int:
        """How many tokens of its path are there without a gap, from the first on."""
        for index, digest in enumerate(agent.hashes):
            if digest not in self._blocks and not (digest == agent.last_hash and self._fuller(agent)):
                return index * BLOCK_TOKENS
        return agent.tokens

    def share(self, agent: Agent) -> Share:
        """What would go with an agent, and what would stay."""
        path = self._paths[agent.name]
        own: list[File] = []
        stays: list[Stay] = []
        going: set[bytes] = set()
        for digest in sorted(path, key=lambda digest: self._headers[digest].end, reverse=True):
            others = self._users[digest] - {agent.name}
            behind = self._children.get(digest, set()) - going
            if others or behind or not path[digest]:
                stays += [Stay(file, tuple(sorted(others)), len(behind)) for file in self._files[digest]]
            else:
                going.add(digest)
                own += self._files[digest]
        return Share(own, stays)

    # -- paths ---------------------------------------------------------------------------------------------------------

    def _path(self, agent: Agent) -> dict[bytes, bool]:
        """The hashes of all records that a path stands on, and whether they hold nothing beyond it."""
        own = [digest for digest in agent.hashes if digest in self._files]
        fuller = self._fuller(agent)
        beyond = fuller + [digest for whole in fuller for digest in self._shorter(whole)]
        shorter = [digest for whole in own for digest in self._shorter(whole)]
        return dict.fromkeys(beyond, False) | dict.fromkeys(shorter, True) | dict.fromkeys(own, True)

    def _fuller(self, agent: Agent) -> list[bytes]:
        """The blocks that begin with the end of a path, if its own block has gone."""
        if not agent.hashes or agent.hashes[-1] in self._blocks:
            return []
        size = agent.tokens - (len(agent.hashes) - 1) * BLOCK_TOKENS
        beside = self._behind(agent.hashes[-2]) if len(agent.hashes) > 1 else self._first()
        return [d for d in beside if d in self._blocks and self._begins(d, agent.hashes[-1], range(size, BLOCK_TOKENS))]

    def _shorter(self, whole: bytes) -> list[bytes]:
        """The records beside one that hold a beginning of its tokens."""
        header = self._headers[whole]
        beside = [(d, self._headers[d]) for d in self._behind(header.parent) if d != whole]
        sizes = [(d, h.end - h.start) for d, h in beside if h.start == header.start and h.end < header.end]
        return [digest for digest, size in sizes if self._begins(whole, digest, range(size, size + 1))]

    def _begins(self, whole: bytes, digest: bytes, sizes: range) -> bool:
        """Whether the first of a record's tokens, as many as one of `sizes`, are those that `digest` names."""
        tokens, parent = self._tokens_of(whole), self._headers[whole].parent
        return any(self._naming(parent, tokens[:size]) == digest for size in sizes if size <= len(tokens))

    def _tokens_of(self, digest: bytes) -> tuple[int, ...]:
        """Read when they are asked for: those of all records would be too many. Empty if the file has gone meanwhile."""
        if digest not in self._tokens:
            file = self._files[digest][0]
            expected = Expected(file.namespace, KINDS[file.path.parents[1].name], digest)
            try:
                self._tokens[digest] = read_header(self._disk, file.path, expected, self._naming).tokens
            except (BadRecordError, OSError):
                self._tokens[digest] = ()
        return self._tokens[digest]

    def _behind(self, digest: bytes) -> list[bytes]:
        return sorted(self._children.get(digest, ()))

    def _first(self) -> list[bytes]:
        return sorted(digest for digest, header in self._headers.items() if header.start == 0)
