"""Agents on disk: names for paths of records. Knows names and hashes; no records, no trie.

    agents/<safe name>.json     as in manifest.py; only for its owner, whole or absent

Any thread may call anything here, of any process: whoever changes a file holds the folder's lock meanwhile.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ..errors import BadRecordError, StoreError
from ..spec import blocks_for
from .fs import Disk, Entry, safe_name, write_all_whole, write_whole
from .manifest import SUFFIX, Agent, encode, read, shown

FOLDER = "agents"
# A turn that changes nothing but the time of use is written down only so often.
USED_SECONDS = 60
# Nobody waits longer for another process that changes an agent.
LOCK_SECONDS = 1.0
# A file that was changed so lately may change again without a later time of modification.
SETTLED_SECONDS = 2.0

_WAIT_SECONDS = 0.005


class AgentsFound(NamedTuple):
    """The agents there are, by name, and the files that are not what they should be, with the reason."""

    agents: list[Agent]
    bad: list[tuple[Path, str]]


class Agents:
    """The agents in a store's folder, which need not be there yet. What is bad counts as not there, unless a method says more.

    Errors: StoreError for a name that is not there, or is taken; OSError where the disk does not let us.
    """

    def __init__(self, root: Path, disk: Disk | None = None) -> None:
        self.root = root
        self.folder = root / FOLDER
        self._disk = disk or Disk()
        self._known: dict[str, tuple[Entry, float, Agent]] = {}

    # -- looking -------------------------------------------------------------------------------------------------------

    def get(self, name: str) -> Agent | None:
        """Raises OSError."""
        try:
            return read(self._disk, self._path(name))
        except (FileNotFoundError, BadRecordError):
            return None

    def need(self, name: str) -> Agent:
        """Raises StoreError, BadRecordError for a file that is not as it was written, and OSError."""
        try:
            return read(self._disk, self._path(name))
        except FileNotFoundError:
            known = ", ".join(shown(agent.name) for agent in self.all()) or "none"
            raise StoreError(
                f"Found no agent {shown(name)} in {self.folder}, but {known}. Give a name that `store agents` shows."
            ) from None

    def look(self) -> AgentsFound:
        """Every file. Those that did not change since the last look are not read again. Raises OSError for the folder."""
        found = AgentsFound([], [])
        known: dict[str, tuple[Entry, float, Agent]] = {}
        for entry in self._entries():
            try:
                known[entry.name] = self._looked_at(entry)
            except FileNotFoundError:
                continue
            except (BadRecordError, OSError) as error:
                found.bad.append((self.folder / entry.name, str(error)))
        self._known = known
        found.agents.extend(sorted((agent for _, _, agent in known.values()), key=lambda agent: agent.name))
        return found

    def all(self) -> list[Agent]:
        """Every agent, by name. Raises OSError."""
        return self.look().agents

    def _entries(self) -> list[Entry]:
        try:
            entries = self._disk.scan(self.folder)
        except FileNotFoundError:
            return []
        # A link or a pipe is not the store's.
        return sorted(e for e in entries if e.name.endswith(SUFFIX) and not e.name.startswith(".") and e.is_file)

    def _looked_at(self, entry: Entry) -> tuple[Entry, float, Agent]:
        """With the moment at which it was read."""
        before = self._known.get(entry.name)
        if before is not None and before[0] == entry and before[1] - entry.modified > SETTLED_SECONDS:
            return before
        now = time.time()
        return entry, now, read(self._disk, self.folder / entry.name)

    # -- changing ------------------------------------------------------------------------------------------------------

    def note(self, name: str, namespace: str, model_id: str, hashes: Sequence[bytes], tokens: int, salt: bytes = b"") -> Agent:
        """An agent has ended a turn here. Keeps when it was created and whether it is pinned. Raises OSError.

        One small file is read and one synced; none is written if the path is the same and was used within USED_SECONDS.
        """
        turn = turn_of(name, namespace, model_id, hashes, tokens, salt)
        self._make_folder()
        with self._alone():
            agent, is_changed = self._after(turn)
            if is_changed:
                self._write(agent)
        return agent

    def note_all(self, turns: Sequence[Agent]) -> tuple[list[Agent], list[OSError]]:
        """note() for several agents, from turn_of(): their files are synced side by side, and the folder once.

        Returns the agents noted, and the errors of those that could not be. Raises OSError if none could be.
        """
        self._make_folder()
        noted: dict[Path, Agent] = {}
        changed: dict[Path, list[bytes]] = {}
        failed: dict[Path, OSError] = {}
        with self._alone():
            for turn in turns:
                path = self._path(turn.name)
                try:
                    noted[path], is_changed = self._after(turn)
                except OSError as error:
                    failed[path] = error
                    continue
                if is_changed:
                    changed[path] = [encode(noted[path])]
            failed |= write_all_whole(self._disk, changed)
        return [agent for path, agent in noted.items() if path not in failed], list(failed.values())

    def _make_folder(self) -> None:
        if not self.folder.is_dir():
            self._disk.make_directory(self.folder)

    def _after(self, turn: Agent) -> tuple[Agent, bool]:
        """The agent after a turn, and whether its file has to change. Raises OSError."""
        before = self.get(turn.name)
        if before is None:
            return turn, True
        agent = replace(turn, created=before.created, pinned=before.pinned)
        if agent == replace(before, used=turn.used) and abs(turn.used - before.used) < USED_SECONDS:
            return before, False
        return agent, True

    def pin(self, name: str) -> Agent:
        return self._set_pinned(name, True)

    def unpin(self, name: str) -> Agent:
        return self._set_pinned(name, False)

    def fork(self, old: str, new: str) -> Agent:
        """The same path under a second name, created and used now, not pinned."""
        now = int(time.time())
        with self._alone():
            agent = replace(self.need(old), name=new, created=now, used=now, pinned=False)
            self._need_free(new)
            self._write(agent)
        return agent

    def rename(self, old: str, new: str) -> Agent:
        """The same agent under another name. After a crash at any point it has one of the two."""
        with self._alone():
            agent = self.need(old)
            self._need_free(new)
            # The file knows both names, and which of them holds by what it is called itself.
            self._write(agent, becoming=new)
            self._disk.rename(self._path(old), self._path(new))
            self._disk.sync_directory(self.folder)
            renamed = replace(agent, name=new)
            with suppress(OSError):
                self._write(renamed)
        return renamed

    def remove(self, name: str) -> Agent:
        """Only the name goes; the records stay."""
        with self._alone():
            agent = self.need(name)
            self._disk.unlink(self._path(name))
            self._disk.sync_directory(self.folder)
        return agent

    def bound(self, most: int, which: Callable[[str], bool], used: Mapping[str, int]) -> None:
        """Remove the notes of all but `most` of those agents `which` are meant, by their names: those used longest ago go.

        A turn that changes nothing is not always written: `used` says what is known beside the files, in seconds since the epoch.
        What is pinned stays, and does not count.
        """
        agents = [agent for agent in self.all() if not agent.pinned and which(agent.name)]
        if len(agents) > most:
            written = {agent.name: entry.modified for entry, _, agent in self._known.values()}
            agents.sort(key=lambda agent: (max(agent.used, used.get(agent.name, 0)), written.get(agent.name, 0.0)))
            for agent in agents[: len(agents) - most]:
                with suppress(StoreError):
                    self.remove(agent.name)

    def _set_pinned(self, name: str, pinned: bool) -> Agent:
        with self._alone():
            before = self.need(name)
            agent = replace(before, pinned=pinned)
            if agent != before:
                self._write(agent)
        return agent

    def _need_free(self, name: str) -> None:
        try:
            self._disk.stat(self._path(name))
        except FileNotFoundError:
            return
        except BadRecordError:
            # Something is there, and it is not the store's.
            pass
        raise StoreError(f"Found an agent {shown(name)} in {self.folder} already; needed a name that is free.")

    def _write(self, agent: Agent, becoming: str | None = None) -> None:
        write_whole(self._disk, self._path(agent.name), [encode(agent, becoming)])

    def _path(self, name: str) -> Path:
        return self.folder / (safe_name(name) + SUFFIX)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Nobody else changes an agent meanwhile. Raises TimeoutError, an OSError, after LOCK_SECONDS."""
        try:
            fd = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            # Nothing to change, or a disk that is not the machine's own.
            yield
            return
        try:
            _lock(fd, self.folder)
            yield
        finally:
            os.close(fd)


def turn_of(name: str, namespace: str, model_id: str, hashes: Sequence[bytes], tokens: int, salt: bytes = b"") -> Agent:
    """An agent that ends a turn now, as it is noted if there is no file of it yet."""
    assert len(hashes) == blocks_for(tokens), f"{len(hashes)} hashes for {tokens} tokens; needed {blocks_for(tokens)}"
    now = int(time.time())
    return Agent(name, namespace, model_id, tuple(hashes), tokens, now, now, salt=salt)


def _lock(fd: int, folder: Path) -> None:
    until = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= until:
                raise TimeoutError(f"{folder}: another process has kept the lock for {LOCK_SECONDS:g} seconds") from None
            time.sleep(_WAIT_SECONDS)
        except OSError:
            # A file system without locks; files are whole there, too.
            return
