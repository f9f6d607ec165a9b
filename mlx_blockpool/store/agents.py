"""Agents: names for paths of records, in the store's database. Knows names and hashes; no records,
no trie.

Any thread may call anything here, of any process.
"""

from __future__ import annotations

import sqlite3
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import StoreError
from ..spec import blocks_for
from .db import Database
from .fs import safe_name
from .record import HASH_BYTES

# Between the name of an owner and that of its agent, in the names of agents that have owners.
SEPARATOR = "\x1f"
# A turn that changes nothing but the time of use is written at most this often.
USED_SECONDS = 60

_SHOWN_CHARACTERS = 40
_COLUMNS = "name, namespace, model_id, hashes, tokens, created, used, pinned, salt, checksum"
_VALUES = f"INTO agents ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"


@dataclass(frozen=True)
class Agent:
    """A named path of records, from whose end the agent's next turn continues.

    hashes         of the records of its path, from the first block on; the last one may be a
                   partial block.
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


def turn_of(
    name: str,
    namespace: str,
    model_id: str,
    hashes: Sequence[bytes],
    tokens: int,
    salt: bytes = b"",
) -> Agent:
    """An agent that ends a turn now, as it is noted if it was not before."""
    assert len(hashes) == blocks_for(tokens), (
        f"{len(hashes)} hashes for {tokens} tokens; needed {blocks_for(tokens)}"
    )
    now = int(time.time())
    return Agent(name, namespace, model_id, tuple(hashes), tokens, now, now, salt=salt)


def shown(name: str) -> str:
    """A name as people can read and type it: itself, or the name of its file if it is long or
    not all printable.
    """
    if name.count(SEPARATOR) == 1:
        return "/".join(map(shown, name.split(SEPARATOR)))
    plain = name.isprintable() and name == name.strip() and 0 < len(name) <= _SHOWN_CHARACTERS
    return name if plain else safe_name(name)


def _text(text: str) -> bytes:
    # Any str is read back unchanged, even one that is not Unicode text.
    return text.encode("utf-8", "surrogatepass")


def _row(agent: Agent) -> tuple[object, ...]:
    """The columns of an agent, and a checksum of them."""
    texts = (_text(text) for text in (agent.name, agent.namespace, agent.model_id))
    row = (
        *texts,
        b"".join(agent.hashes),
        agent.tokens,
        agent.created,
        agent.used,
        int(agent.pinned),
        agent.salt,
    )
    return (*row, zlib.crc32(repr(row).encode()))


def _agent(row: Sequence[Any]) -> Agent | None:
    """The agent of these columns; None for those of a damaged row."""
    *columns, checksum = row
    if zlib.crc32(repr(tuple(columns)).encode()) != checksum:
        return None
    name, namespace, model_id = (text.decode("utf-8", "surrogatepass") for text in columns[:3])
    joined, tokens, created, used, pinned, salt = columns[3:]
    hashes = tuple(joined[at : at + HASH_BYTES] for at in range(0, len(joined), HASH_BYTES))
    return Agent(name, namespace, model_id, hashes, tokens, created, used, bool(pinned), salt)


class Agents:
    """The agents of the store in the folder `root`, which need not be there yet.

    Errors: StoreError for a name that no agent has, or that is taken; OSError if the disk fails.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._database = Database(root, durable=True)
        self._read_before: dict[bytes, tuple[Sequence[Any], Agent | None]] = {}

    def close(self) -> None:
        """Close the database until the next use."""
        self._database.close()

    # -- reading -----------------------------------------------------------------------------------

    def get(self, name: str) -> Agent | None:
        """Raises OSError."""
        rows = self._database.rows(f"SELECT {_COLUMNS} FROM agents WHERE name = ?", _text(name))
        return _agent(rows[0]) if rows else None

    def need(self, name: str) -> Agent:
        """Raises StoreError and OSError."""
        found = self.get(name)
        if found is None:
            names = ", ".join(shown(agent.name) for agent in self.all()) or "none"
            raise StoreError(
                f"There is no agent {shown(name)} in {self.root}. The agents are: {names}. `store "
                "agents` lists them."
            )
        return found

    def all(self) -> list[Agent]:
        """Every agent, by name. Raises OSError."""
        return sorted(self._all(), key=lambda agent: agent.name)

    def _all(self) -> list[Agent]:
        """Every agent, the one that was written last at the end."""
        before, read = self._read_before, {}
        for row in self._database.rows(f"SELECT {_COLUMNS} FROM agents ORDER BY rowid"):
            known = before.get(row[0])
            # A long path is not taken apart again.
            read[row[0]] = known if known is not None and known[0] == row else (row, _agent(row))
        self._read_before = read
        return [agent for _, agent in read.values() if agent is not None]

    # -- changing ----------------------------------------------------------------------------------

    def note(
        self,
        name: str,
        namespace: str,
        model_id: str,
        hashes: Sequence[bytes],
        tokens: int,
        salt: bytes = b"",
    ) -> Agent:
        """Note the end of a turn here. Retains when the agent was created and whether it is pinned.
        Raises OSError.

        Nothing is written if the path is the same and was used within USED_SECONDS.
        """
        return self.note_all([turn_of(name, namespace, model_id, hashes, tokens, salt)])[0]

    def note_all(self, turns: Sequence[Agent]) -> list[Agent]:
        """note() for several agents, from turn_of(), in one transaction.

        Returns the agents as noted. Raises OSError.
        """
        with self._database.transaction() as connection:
            return [_note(connection, turn) for turn in turns]

    def pin(self, name: str) -> Agent:
        return self._set_pinned(name, True)

    def unpin(self, name: str) -> Agent:
        return self._set_pinned(name, False)

    def fork(self, old: str, new: str) -> Agent:
        """The same path under a second name, created and used now, not pinned."""
        now = int(time.time())
        agent = replace(self.need(old), name=new, created=now, used=now, pinned=False)
        with self._database.transaction() as connection:
            # A damaged row is replaced.
            if _find(connection, new) is not None:
                raise StoreError(
                    f"An agent {shown(new)} exists in {self.root} already. Choose another name."
                )
            connection.execute(f"INSERT OR REPLACE {_VALUES}", _row(agent))
        return agent

    def remove(self, name: str) -> Agent:
        """Only the name goes; the records stay."""
        found = self.need(name)
        with self._database.transaction() as connection:
            connection.execute("DELETE FROM agents WHERE name = ?", (_text(name),))
        return found

    def bound(self, most: int, which: Callable[[str], bool], used: Mapping[str, int]) -> None:
        """Remove all but the `most` last used of the agents whose names `which` accepts. Pinned
        agents stay, and do not count.

        A turn that changes nothing is not always written: `used` has later times of use by name, in
        seconds since the epoch.
        """
        # Of two with the same time, the one that was written first goes first.
        found = [agent for agent in self._all() if not agent.pinned and which(agent.name)]
        found.sort(key=lambda agent: max(agent.used, used.get(agent.name, 0)))
        if len(found) > most:
            with self._database.transaction() as connection:
                gone = [(_text(agent.name),) for agent in found[: len(found) - most]]
                connection.executemany("DELETE FROM agents WHERE name = ? AND NOT pinned", gone)

    def _set_pinned(self, name: str, pinned: bool) -> Agent:
        # Before the transaction, which makes a database.
        self.need(name)
        with self._database.transaction() as connection:
            before = _find(connection, name)
            if before is None:
                raise StoreError(f"Agent {shown(name)} was removed in the meantime.")
            agent = replace(before, pinned=pinned)
            connection.execute(f"INSERT OR REPLACE {_VALUES}", _row(agent))
        return agent


def _find(connection: sqlite3.Connection, name: str) -> Agent | None:
    row = connection.execute(
        f"SELECT {_COLUMNS} FROM agents WHERE name = ?", (_text(name),)
    ).fetchone()
    return None if row is None else _agent(row)


def _note(connection: sqlite3.Connection, turn: Agent) -> Agent:
    """Write a turn, unless nothing but the time of use changes and that only a little.

    Returns the agent as it is then.
    """
    before = _find(connection, turn.name)
    agent = turn if before is None else replace(turn, created=before.created, pinned=before.pinned)
    if (
        before is not None
        and agent == replace(before, used=turn.used)
        and abs(turn.used - before.used) < USED_SECONDS
    ):
        return before
    connection.execute(f"INSERT OR REPLACE {_VALUES}", _row(agent))
    return agent
