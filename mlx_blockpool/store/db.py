"""The store's database: what the store notes about its files, in SQLite's WAL mode.

    store.db    in the store's folder, with store.db-wal and store.db-shm while a process has it
                open

    headers       of record files (headers.py): a start reads the files that have no note, or
                  another one
    weights       digests of files of weights (identity.py): computed again without them
    measurements  of models on this device (measurements.py): measured again without them
    agents        names, pins and paths of agents (agents.py): they exist only here

The records stay the truth: everything but `agents` is a hint, checked before use and rebuilt when
in doubt. A transaction on agents is on the medium once it returns; a power cut may undo the last
transactions on hints. A database that is damaged or of another version is moved to quarantine, the
log says so, and a new one is begun. Agents are lost with it; their prefixes are found by their
tokens all the same, and their next turns name them again.

Knows tables and transactions; no records, no agents. Any thread may call anything here, of any
process.
"""

from __future__ import annotations

import errno
import logging
import os
import sqlite3
import stat
import threading
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from ..config import StoreConfig
from .fs import Disk, removed_on_error, temporary_for
from .quarantine import Quarantine

log = logging.getLogger(__name__)

DATABASE_FILE = "store.db"
DATABASE_FILES = (DATABASE_FILE, f"{DATABASE_FILE}-wal", f"{DATABASE_FILE}-shm")
SCHEMA_VERSION = 1

_TABLES = """
CREATE TABLE headers (name TEXT PRIMARY KEY, stamp TEXT, start INTEGER, parent BLOB, tokens BLOB,
                      extra TEXT, checksum INTEGER);
CREATE TABLE weights (stamp TEXT PRIMARY KEY, digest BLOB);
CREATE TABLE measurements (measured_on TEXT PRIMARY KEY, model TEXT, date TEXT, figures TEXT);
CREATE TABLE agents (name BLOB PRIMARY KEY, namespace BLOB, model_id BLOB, hashes BLOB,
                     tokens INTEGER, created INTEGER, used INTEGER, pinned INTEGER, salt BLOB,
                     checksum INTEGER);
"""
_DAMAGED = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR}
_READ_ONLY = {sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY}
# Others count as EIO.
_ERRNO = {
    sqlite3.SQLITE_FULL: errno.ENOSPC,
    sqlite3.SQLITE_READONLY: errno.EROFS,
    sqlite3.SQLITE_CANTOPEN: errno.EACCES,
    sqlite3.SQLITE_PERM: errno.EACCES,
    sqlite3.SQLITE_IOERR: errno.EIO,
}


class _Unusable(sqlite3.DatabaseError):
    sqlite_errorcode = sqlite3.SQLITE_NOTADB


class Database:
    """The database in the store's folder `root`, which need not be there yet, or one in memory for
    None.

    `durable`: a transaction is on the medium once it returns. Every method raises OSError if the
    disk fails, or if another process keeps the database for StoreConfig.lock_seconds
    (TimeoutError).
    """

    def __init__(self, root: Path | None, durable: bool = False) -> None:
        self._path = None if root is None else root / DATABASE_FILE
        self._synchronous = "FULL" if durable else "NORMAL"
        self._connection: sqlite3.Connection | None = None
        # Device and inode of the file that is open: another process may have moved it and begun a
        # new one.
        self._file: tuple[int, int] | None = None
        self._lock = threading.Lock()

    def rows(self, query: str, *values: object) -> list[Any]:
        """The rows of a query; none if there is no database yet."""
        with self._lock, self._errors():
            connection = self._open(create=False)
            return [] if connection is None else connection.execute(query, values).fetchall()

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """All that the block executes is written together, or nothing of it if it raises.

        Makes the database at need.
        """
        with self._lock, self._errors():
            connection = self._open(create=True)
            assert connection is not None
            connection.execute("BEGIN IMMEDIATE")
            with connection:
                yield connection

    def close(self) -> None:
        """Close the file until the next use."""
        with self._lock:
            self._close()

    def __del__(self) -> None:
        # A connection refers to itself, and would stay open until cycles are collected.
        self._close()

    def _close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(sqlite3.Error):
                connection.close()

    def _open(self, create: bool) -> sqlite3.Connection | None:
        if self._path is None:
            self._connection = self._connection or _with_tables(":memory:")
            return self._connection
        try:
            found = os.lstat(self._path)
        except FileNotFoundError:
            self._close()
            if not create:
                return None
            _make(self._path)
            found = os.lstat(self._path)
        file = found.st_dev, found.st_ino
        if self._connection is None or self._file != file:
            self._close()
            self._file = file
            if not stat.S_ISREG(found.st_mode):
                raise _Unusable("it is not a regular file")
            self._connection = self._connect(self._path)
        return self._connection

    def _connect(self, path: Path) -> sqlite3.Connection:
        try:
            return self._connected(f"{path.absolute().as_uri()}?mode=rw")
        except sqlite3.Error as error:
            if _code(error) not in _READ_ONLY:
                raise
            # A folder in which WAL mode can make no file; its database can be read if no process
            # writes it.
            return self._connected(f"{path.absolute().as_uri()}?immutable=1")

    def _connected(self, uri: str) -> sqlite3.Connection:
        connection = sqlite3.connect(
            uri,
            timeout=StoreConfig.lock_seconds,
            isolation_level=None,
            check_same_thread=False,
            uri=True,
        )
        try:
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version != SCHEMA_VERSION:
                raise _Unusable(f"it has version {version}; this version reads {SCHEMA_VERSION}")
            # Of a damaged text something else is read than what was written, and no error.
            connection.text_factory = lambda text: text.decode(errors="replace")
            connection.execute(f"PRAGMA synchronous = {self._synchronous}")
            # What was cleared is not left in free pages.
            connection.execute("PRAGMA secure_delete = ON")
            # On macOS fsync stops at the drive's own cache.
            connection.execute("PRAGMA fullfsync = ON")
        except BaseException:
            connection.close()
            raise
        return connection

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Raise SQLite's errors as OSError, and begin a new database after this one if it is
        damaged.
        """
        try:
            yield
        except (sqlite3.Error, UnicodeDecodeError) as error:
            self._close()
            # A damaged schema may be in the text of the error itself. SQLITE_OK: a mistake in a
            # call, which never got to SQLite.
            code = sqlite3.SQLITE_NOTADB if isinstance(error, UnicodeDecodeError) else _code(error)
            if code == sqlite3.SQLITE_OK:
                raise
            if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                raise TimeoutError(
                    f"{self._path}: another process has kept the lock for "
                    f"{StoreConfig.lock_seconds:g} seconds"
                ) from error
            if code == sqlite3.SQLITE_ERROR and self._is_whole():
                # A mistake in a query.
                raise
            if code in _DAMAGED:
                self._set_aside(error)
            raise OSError(_ERRNO.get(code, errno.EIO), str(error), str(self._path)) from error

    def _set_aside(self, error: Exception) -> None:
        assert self._path is not None, error
        found = os.lstat(self._path)
        # Another process may have moved it, and begun a new one, in the meantime.
        if (found.st_dev, found.st_ino) == self._file:
            log.warning(
                "prompt store: %s is damaged (%s); a new one is begun, without the names of agents",
                self._path,
                error,
            )
            quarantine = Quarantine(Disk(), self._path.parent, StoreConfig().quarantine_bytes)
            # The log and its index first: SQLite would apply them to a new database of the same
            # name.
            for name in reversed(DATABASE_FILES):
                quarantine.set_aside(self._path.with_name(name), str(error))

    def _is_whole(self) -> bool:
        """Return whether the file has all tables, and SQLite finds no damage in it."""
        try:
            tables = "SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY name"
            with (
                closing(_with_tables(":memory:")) as new,
                closing(sqlite3.connect(str(self._path))) as found,
            ):
                is_alike = new.execute(tables).fetchall() == found.execute(tables).fetchall()
                return is_alike and found.execute("PRAGMA quick_check(1)").fetchone() == ("ok",)
        except (sqlite3.Error, UnicodeDecodeError):
            return False


def keep_last(connection: sqlite3.Connection, name: str, most: int) -> None:
    """Delete all but the rows of a table that were written last."""
    query = (
        f"DELETE FROM {name} WHERE rowid NOT IN (SELECT rowid FROM {name} ORDER BY rowid DESC "
        "LIMIT ?)"
    )
    connection.execute(query, (most,))


def stamp_text(stamp: Iterable[int]) -> str:
    """A stamp of a file in a column: an inode may have more bits than SQLite's integers."""
    return " ".join(map(str, stamp))


def _code(error: sqlite3.Error) -> int:
    """SQLite's primary code."""
    return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_OK) & 0xFF


def _make(path: Path) -> None:
    """Make an empty database, whole or not at all; one that another process makes meanwhile
    stays.
    """
    disk = Disk()
    disk.make_directory(path.parent)
    with removed_on_error(disk, temporary_for(path), path) as temporary:
        fd = disk.create(temporary)
        try:
            _with_tables(str(temporary)).close()
            disk.sync(fd)
        finally:
            disk.close(fd)
        try:
            os.link(temporary, path)
            disk.unlink(temporary)
        except FileExistsError:
            disk.unlink(temporary)
        except OSError:
            # A file system without links: the first of two processes that are here at once loses
            # what it has noted so far.
            disk.rename(temporary, path)
        disk.sync_directory(path.parent)


def _with_tables(name: str) -> sqlite3.Connection:
    connection = sqlite3.connect(name, isolation_level=None, check_same_thread=False)
    tables = f"BEGIN; {_TABLES} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;"
    connection.executescript(f"PRAGMA synchronous = OFF; {tables} PRAGMA journal_mode = WAL;")
    return connection
