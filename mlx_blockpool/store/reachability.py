"""Which records an agent's path stands on, and which of them nobody else needs. Knows headers; no trie, no arrays.

A path stands on its own records and on others that hold a beginning of the same tokens: what an earlier, shorter end left
behind, and the fuller block that has taken the place of its end. Both are proven by their hashes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..errors import BadRecordError
from ..spec import BLOCK_TOKENS
from .fs import Disk
from .fsck import Judged, RecordPlace
from .manifest import Agent
from .paths import KINDS
from .record import BLOCK, Expected, Naming
from .scan import File
from .verify import read_header


@dataclass(frozen=True)
class Stay:
    """A record of an agent's path that others need: `agents` whose paths stand on it, or `behind`: so many records."""

    file: File
    agents: tuple[str, ...] = ()
    behind: int = 0


@dataclass(frozen=True)
class PathRecords:
    """The records that an agent's path stands on: `own` only for it, ends first, and those that stay without it."""

    own: list[File]
    stays: list[Stay]


class Sharing:
    """The good records of one namespace, and the agents there. `naming` is the rule for the hash of a prefix.

    What is made once is linear in the records and in the paths of the agents; so is a question about each agent.
    """

    def __init__(self, judged: Iterable[Judged], agents: Sequence[Agent], naming: Naming, disk: Disk | None = None) -> None:
        self._naming = naming
        self._disk = disk or Disk()
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

    # -- what is asked -------------------------------------------------------------------------------------------------

    def tokens_on_disk(self, agent: Agent) -> int:
        """How many tokens of its path are there without a gap, from the first on."""
        for index, digest in enumerate(agent.hashes):
            if digest not in self._blocks and not (digest == agent.last_hash and self._fuller.get(digest)):
                return index * BLOCK_TOKENS
        return agent.tokens

    def share(self, agent: Agent) -> PathRecords:
        """What would go with an agent, and what would stay."""
        own, stays = self._split(agent)
        own_files = [file for digest in own for file in self._files[digest]]
        return PathRecords(own_files, [stay for digest, behind in stays for stay in self._stays(agent, digest, behind)])

    def files(self, agent: Agent) -> tuple[list[File], list[File]]:
        """The same as files alone: those that would go, and those that would stay."""
        own, stays = self._split(agent)
        own_files = [file for digest in own for file in self._files[digest]]
        return own_files, [file for digest, _ in stays for file in self._files[digest]]

    def _split(self, agent: Agent) -> tuple[list[bytes], list[tuple[bytes, int]]]:
        """The records that only an agent's path stands on, ends first, and the others with how many stand behind each of them."""
        path = self._paths[agent.name]
        own: list[bytes] = []
        stays: list[tuple[bytes, int]] = []
        going: Counter[bytes] = Counter()
        for digest in sorted(path, key=lambda digest: self._headers[digest].end, reverse=True):
            behind = len(self._children.get(digest, ())) - going[digest]
            if len(self._users[digest]) > 1 or behind or not path[digest]:
                stays.append((digest, behind))
            else:
                own.append(digest)
                going[self._headers[digest].parent] += 1
        return own, stays

    def _stays(self, agent: Agent, digest: bytes, behind: int) -> list[Stay]:
        others = tuple(sorted(name for name in self._users[digest] if name != agent.name))
        return [Stay(file, others, behind) for file in self._files[digest]]

    # -- paths ---------------------------------------------------------------------------------------------------------

    def _path(self, agent: Agent) -> dict[bytes, bool]:
        """The hashes of all records that a path stands on, and whether they hold nothing beyond it."""
        own = [digest for digest in agent.hashes if digest in self._files]
        fuller = self._fuller.get(agent.hashes[-1], []) if agent.hashes else []
        beyond = fuller + [digest for whole in fuller for digest in self._shorter(whole)]
        shorter = [digest for whole in own for digest in self._shorter(whole)]
        return dict.fromkeys(beyond, False) | dict.fromkeys(shorter, True) | dict.fromkeys(own, True)

    def _fuller_ends(self, agents: Sequence[Agent]) -> dict[bytes, list[bytes]]:
        """By the end of a path whose own block has gone: the blocks that begin with it."""
        # By what stands before it: the ends that are looked for, and how many tokens they have at least.
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
                    end = self._naming(parent, tokens[:size])
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
        named = [self._naming(header.parent, tokens[:size]) for size in sorted(sizes) if size <= len(tokens)]
        return [digest for digest in named if digest in self._files and self._headers[digest].start == header.start]

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

    def _first(self) -> list[bytes]:
        return sorted(digest for digest, header in self._headers.items() if header.start == 0)
