"""Headers of records as the database notes them, so that a start need not read each file: hints,
never the truth.

A note counts for a file of the same size, time of modification and inode, and only if its parent
and tokens make the hash in the file's name; other headers are read from the files.

Any thread may call load(); the rest belongs to one thread, the store's writer once the store is
open.
"""

from __future__ import annotations

import json
import logging
import struct
import time
import zlib
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from pathlib import Path

from .db import DATABASE_FILE, Database, stamp_text
from .fs import Stamp
from .hashing import edge_hash
from .paths import folder_of, key_of
from .record import VERSION, Record

log = logging.getLogger(__name__)

# Changes that are written together.
TOGETHER = 64
# The most in one transaction, and the pause after it: the first start on a store of many records
# notes all of them.
AT_MOST = 1000
PAUSE_SECONDS = 0.02


class Headers:
    """The notes of the records under `namespace` in the store's folder `root`."""

    def __init__(self, root: Path, namespace: str) -> None:
        self._database = Database(root)
        self._namespace = namespace
        self._changes: list[tuple[str, tuple[object, ...]]] = []

    def load(self, files: Mapping[str, Stamp]) -> dict[str, Record]:
        """The noted headers of these files, all that there are, by their names.

        A noted record has no parts.
        """
        folder = folder_of(self._namespace)
        query = (
            "SELECT name, stamp, start, parent, tokens, extra, checksum FROM headers WHERE name > "
            "? AND name < ?"
        )
        try:
            rows = self._database.rows(query, f"{folder}/", f"{folder}0")
        except OSError as error:
            log.info("prompt store: noted headers cannot be read: %s", error)
            return {}
        found: dict[str, Record] = {}
        for name, stamp, *note in rows:
            record = (
                self._record(name, *note)
                if name in files and stamp == stamp_text(files[name])
                else None
            )
            if record is None:
                self.remove(name)
            else:
                found[name] = record
        return found

    def _record(
        self, name: str, start: int, parent: bytes, tokens: bytes, extra: str, checksum: int
    ) -> Record | None:
        """None for a note that is damaged."""
        key = key_of(name)
        try:
            if (
                key is None
                or edge_hash(parent, tokens) != key.hash
                or _checksum(name, start, extra) != checksum
            ):
                return None
            return Record(
                key.kind,
                self._namespace,
                key.hash,
                parent,
                start,
                tokens,
                (),
                _extra(extra),
            )
        except (TypeError, ValueError, struct.error, RecursionError):
            return None

    def add(self, record: Record, name: str, stamp: Stamp) -> None:
        """Note the header of a file."""
        extra = json.dumps(dict(record.extra), sort_keys=True)
        facts = (
            record.start,
            record.parent,
            record.tokens,
            extra,
            _checksum(name, record.start, extra),
        )
        self._changes.append(
            (
                "INSERT OR REPLACE INTO headers VALUES (?, ?, ?, ?, ?, ?, ?)",
                (name, stamp_text(stamp), *facts),
            )
        )

    def touch(self, name: str, stamp: Stamp) -> None:
        """Note another time of a file."""
        self._changes.append(
            ("UPDATE headers SET stamp = ? WHERE name = ?", (stamp_text(stamp), name))
        )

    def remove(self, name: str) -> None:
        """Note that a file was removed."""
        self._changes.append(("DELETE FROM headers WHERE name = ?", (name,)))

    def forget_others(self, namespaces: Collection[str]) -> None:
        """Note that only these namespaces still have files. Raises OSError."""
        # Of "models/<namespace>/...".
        noted = self._database.rows(
            "SELECT DISTINCT substr(name, 8, instr(substr(name, 8), '/') - 1) FROM headers"
        )
        self._changes += [
            _deletion(namespace) for (namespace,) in noted if namespace not in namespaces
        ]

    def write(self, at_once: bool = True) -> None:
        """Write the changes, unless they are few and need not be written `at_once`.

        A disk that fails costs the notes alone.
        """
        if not self._changes or (not at_once and len(self._changes) < TOGETHER):
            return
        changes, self._changes = self._changes, []
        for start in range(0, len(changes), AT_MOST):
            if start:
                # Others wait for the lock by trying again, and agents' turns are more than hints.
                time.sleep(PAUSE_SECONDS)
            try:
                with self._database.transaction() as connection:
                    for change in changes[start : start + AT_MOST]:
                        connection.execute(*change)
            except OSError as error:
                log.info("prompt store: headers are not noted: %s", error)
                return

    def close(self) -> None:
        self._database.close()


def forget(root: Path, namespaces: Iterable[str]) -> None:
    """Delete what is noted of the records of these namespaces, with the tokens. Raises OSError."""
    database = Database(root)
    if not (root / DATABASE_FILE).is_file():
        return
    try:
        with database.transaction() as connection:
            for namespace in namespaces:
                connection.execute(*_deletion(namespace))
    finally:
        database.close()


def _deletion(namespace: str) -> tuple[str, tuple[object, ...]]:
    """The statement that deletes the notes of a namespace."""
    folder = folder_of(namespace)
    return "DELETE FROM headers WHERE name > ? AND name < ?", (f"{folder}/", f"{folder}0")


def _checksum(name: str, start: int, extra: str) -> int:
    """Of what the hash of a prefix does not cover."""
    return zlib.crc32(f"{VERSION} {name} {start} {extra}".encode())


@lru_cache(maxsize=256)
def _extra(text: str) -> Mapping[str, str]:
    """Raises ValueError. The result is shared, and not changed."""
    found = json.loads(text)
    if not isinstance(found, dict) or not all(type(value) is str for value in found.values()):
        raise ValueError("not texts by name")
    return found
