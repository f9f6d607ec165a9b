"""Agents on disk: names for paths of records. Knows names and hashes; no records, no trie.

    agents/<safe name>.json     one agent, sealed by a hash of the rest; only for its owner, whole or absent

Any thread may call anything here, of any process: a change to a file holds the folder's lock meanwhile.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import BadRecordError, StoreError
from ..spec import blocks_for
from .fs import Disk, Entry, safe_name, write_all_whole, write_whole
from .record import HASH_BYTES

FOLDER = "agents"
SUFFIX = ".json"
FORMAT = "mlx-blockpool agent"
VERSION = 1
# Between the name of an owner and that of its agent, in the names of agents that have owners.
SEPARATOR = "\x1f"
# A turn that changes nothing but the time of use is written down only so often.
USED_SECONDS = 60
# The longest wait for another process that changes an agent.
LOCK_SECONDS = 1.0
# A file that was changed so lately may change again without a later time of modification.
SETTLED_SECONDS = 2.0

_WAIT_SECONDS = 0.005
_MAX_BYTES = 1 << 24
_MAX_NUMBER = 1 << 40
_SHOWN_CHARACTERS = 40


# -- one agent ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Agent:
    """A named path of records, from whose end the agent's next turn continues.

    hashes         of the records of its path, from the first block on; the last one may be a partial block.
    tokens         that the path holds for this agent; the last record may have more.
    created, used  seconds since the epoch.
    pinned         the budget spares its records.
    salt           of its path; empty for the salt that all share.
    """

    name: str
    namespace: str
    model_id: str
    hashes: tuple[bytes, ...]
    tokens: int
    created: int
    used: int
    pinned: bool = False
    salt: bytes = b""

    @property
    def last_hash(self) -> bytes | None:
        return self.hashes[-1] if self.hashes else None


def turn_of(name: str, namespace: str, model_id: str, hashes: Sequence[bytes], tokens: int, salt: bytes = b"") -> Agent:
    """An agent that ends a turn now, as it is noted if there is no file of it yet."""
    assert len(hashes) == blocks_for(tokens), f"{len(hashes)} hashes for {tokens} tokens; needed {blocks_for(tokens)}"
    now = int(time.time())
    return Agent(name, namespace, model_id, tuple(hashes), tokens, now, now, salt=salt)


def shown(name: str) -> str:
    """A name as people can read and type it: itself, or the name of its file if it is long or not all printable."""
    if name.count(SEPARATOR) == 1:
        return "/".join(map(shown, name.split(SEPARATOR)))
    plain = name.isprintable() and name == name.strip() and 0 < len(name) <= _SHOWN_CHARACTERS
    return name if plain else safe_name(name)


def encode(agent: Agent, becoming: str | None = None) -> bytes:
    """The one way to write an agent. `becoming`: the name it has once its file is called so."""
    fields = {
        "format": FORMAT,
        "version": VERSION,
        "name": agent.name,
        "becoming": becoming,
        "namespace": agent.namespace,
        "model_id": agent.model_id,
        "last_hash": None if agent.last_hash is None else agent.last_hash.hex(),
        "tokens": agent.tokens,
        "created": agent.created,
        "used": agent.used,
        "pinned": agent.pinned,
        "hashes": [digest.hex() for digest in agent.hashes],
    } | ({"salt": agent.salt.hex()} if agent.salt else {})
    seal = hashlib.blake2b(_text(fields), digest_size=HASH_BYTES).hexdigest()
    return _text(fields | {"seal": seal})


def _text(fields: dict[str, Any]) -> bytes:
    # Any str comes back as it was, even one that is no Unicode text: JSON's own escapes would join two surrogates.
    return (json.dumps(fields, indent=2, ensure_ascii=False) + "\n").encode("utf-8", "surrogatepass")


def decode(data: bytes, stem: str) -> Agent:
    """The agent whose file is called `stem`. Raises BadRecordError unless each byte is as it was written."""
    try:
        fields = json.loads(data.decode("utf-8", "surrogatepass"))
        agent, becoming = _parse(fields), fields["becoming"]
        if encode(agent, becoming) != data:
            raise BadRecordError("The file of an agent was changed after it was written: its seal is of other content.")
        names = [name for name in (agent.name, becoming) if name is not None and safe_name(name) == stem]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadRecordError(f"This is not the file of an agent: {type(error).__name__} ({error}).") from None
    if not names:
        raise BadRecordError(f"The file of an agent is called {stem}; by the agent's name it is {safe_name(agent.name)}.")
    return replace(agent, name=names[0])


def _parse(fields: dict[str, Any]) -> Agent:
    """Raises BadRecordError, ValueError, KeyError, TypeError or AttributeError."""
    found = (fields["format"], fields["version"])
    if found != (FORMAT, VERSION):
        raise BadRecordError(
            f"The file of an agent has format {str(found)[:_SHOWN_CHARACTERS]}; this version reads {(FORMAT, VERSION)}."
        )
    plain = {name: fields[name] for name in ("name", "namespace", "model_id", "tokens", "created", "used", "pinned")}
    hashes = tuple(map(bytes.fromhex, fields["hashes"]))
    agent = Agent(**plain, hashes=hashes, salt=bytes.fromhex(fields.get("salt", "")))
    texts = (agent.name, agent.namespace, agent.model_id, fields["becoming"] or "")
    numbers = (agent.tokens, agent.created, agent.used)
    digests = (*agent.hashes, *([agent.salt] if agent.salt else []))
    proper = all(type(text) is str for text in texts) and all(type(n) is int and 0 <= n < _MAX_NUMBER for n in numbers)
    if not (proper and type(agent.pinned) is bool and all(len(digest) == HASH_BYTES for digest in digests)):
        raise ValueError("a field of the wrong type or size")
    if len(agent.hashes) != blocks_for(agent.tokens):
        raise ValueError(f"{len(agent.hashes)} hashes for {agent.tokens} tokens")
    return agent


# -- the folder -----------------------------------------------------------------------------------------------------------


class AgentsFound(NamedTuple):
    """The agents by name, and the bad files with the reason."""

    agents: list[Agent]
    bad: list[tuple[Path, str]]


class Agents:
    """The agents in the store's folder `root`, which need not be there yet. A bad file counts as none, unless a method says more.

    Errors: StoreError for a name that no agent has, or that is taken; OSError if the disk fails.
    """

    def __init__(self, root: Path, disk: Disk | None = None) -> None:
        self.root = root
        self.folder = root / FOLDER
        self._disk = disk or Disk()
        self._read_before: dict[str, tuple[Entry, float, Agent]] = {}

    # -- looking -------------------------------------------------------------------------------------------------------

    def get(self, name: str) -> Agent | None:
        """Raises OSError."""
        try:
            return self._read(self._path(name))
        except (FileNotFoundError, BadRecordError):
            return None

    def need(self, name: str) -> Agent:
        """Raises StoreError, BadRecordError for a file that is not as it was written, and OSError."""
        try:
            return self._read(self._path(name))
        except FileNotFoundError:
            names = ", ".join(shown(agent.name) for agent in self.all()) or "none"
            raise StoreError(
                f"There is no agent {shown(name)} in {self.folder}. The agents are: {names}. `store agents` lists them."
            ) from None

    def look(self) -> AgentsFound:
        """Every file. Those that did not change since the last look are not read again. Raises OSError for the folder."""
        found = AgentsFound([], [])
        read: dict[str, tuple[Entry, float, Agent]] = {}
        for entry in self._entries():
            try:
                read[entry.name] = self._read_again(entry)
            except FileNotFoundError:
                continue
            except (BadRecordError, OSError) as error:
                found.bad.append((self.folder / entry.name, str(error)))
        self._read_before = read
        found.agents.extend(sorted((agent for _, _, agent in read.values()), key=lambda agent: agent.name))
        return found

    def bad_among(self, names: Iterable[str]) -> list[tuple[Path, str]]:
        """The bad ones of these files of the folder, with the reason. A file that is gone is not bad."""
        bad = []
        for name in names:
            try:
                self._read(self.folder / name)
            except FileNotFoundError:
                continue
            except (BadRecordError, OSError) as error:
                bad.append((self.folder / name, str(error)))
        return bad

    def all(self) -> list[Agent]:
        """Every agent, by name. Raises OSError."""
        return self.look().agents

    def _read(self, path: Path) -> Agent:
        try:
            return decode(self._disk.read(path, 0, _MAX_BYTES + 1), path.name.removesuffix(SUFFIX))
        except BadRecordError as error:
            raise BadRecordError(f"{path}: {error}") from None

    def _entries(self) -> list[Entry]:
        try:
            entries = self._disk.scan(self.folder)
        except FileNotFoundError:
            return []
        # A link or a pipe is not the store's.
        return sorted(e for e in entries if e.name.endswith(SUFFIX) and not e.name.startswith(".") and e.is_file)

    def _read_again(self, entry: Entry) -> tuple[Entry, float, Agent]:
        """The agent of an entry with the time at which it was read; a file that did not change is not read again."""
        before = self._read_before.get(entry.name)
        if before is not None and before[0] == entry and before[1] - entry.modified > SETTLED_SECONDS:
            return before
        now = time.time()
        return entry, now, self._read(self.folder / entry.name)

    # -- changing ------------------------------------------------------------------------------------------------------

    def note(self, name: str, namespace: str, model_id: str, hashes: Sequence[bytes], tokens: int, salt: bytes = b"") -> Agent:
        """Note the end of a turn here. Keeps when the agent was created and whether it is pinned. Raises OSError.

        One small file is read and one synced; none is written if the path is the same and was used within USED_SECONDS.
        """
        agents, errors = self.note_all([turn_of(name, namespace, model_id, hashes, tokens, salt)])
        if errors:
            raise errors[0]
        return agents[0]

    def note_all(self, turns: Sequence[Agent]) -> tuple[list[Agent], list[OSError]]:
        """note() for several agents, from turn_of(): their files are synced side by side, and the folder once.

        Returns the agents noted, and the errors of those that could not be. Raises OSError if none could be.
        """
        if not self.folder.is_dir():
            self._disk.make_directory(self.folder)
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
        """Remove all but the `most` last used of the agents whose names `which` accepts. Pinned agents stay, and do not count.

        A turn that changes nothing is not always written: `used` has later times of use by name, in seconds since the epoch.
        """
        agents = [agent for agent in self.all() if not agent.pinned and which(agent.name)]
        if len(agents) > most:
            written = {agent.name: entry.modified for entry, _, agent in self._read_before.values()}
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
            # There is something that is not the store's.
            pass
        raise StoreError(f"An agent {shown(name)} exists in {self.folder} already. Choose another name.")

    def _write(self, agent: Agent, becoming: str | None = None) -> None:
        write_whole(self._disk, self._path(agent.name), [encode(agent, becoming)])

    def _path(self, name: str) -> Path:
        return self.folder / (safe_name(name) + SUFFIX)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the folder's lock. Raises TimeoutError, an OSError, after LOCK_SECONDS."""
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
