"""The database: deaths and failing disks at every system call, other processes, and files that
are not a database.
"""

from __future__ import annotations

import errno
import logging
import os
import random
import shutil
import sqlite3
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from store import faults
from store.damages import ODD_FILES, make_sparse
from store.faults import KILLED, OLD_HASHES, TORN
from store.stores import temporaries
from thorough import only

from mlx_blockpool.config import StoreConfig
from mlx_blockpool.store import db
from mlx_blockpool.store.agents import Agents
from mlx_blockpool.store.db import DATABASE_FILE, Database
from mlx_blockpool.store.fs import TEMPORARY
from mlx_blockpool.store.scan import Listing

needs_preload = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("cc") is None, reason="needs cc and LD_PRELOAD"
)


def note(root: Path, name: str = "Old") -> None:
    agents = Agents(root)
    agents.note(name, "model", "tiny", OLD_HASHES, 700)
    agents.close()


def names(root: Path) -> list[str]:
    return [agent.name for agent in Agents(root).all()]


# -- every system call -----------------------------------------------------------------------------


@needs_preload
@pytest.mark.sampled
@pytest.mark.parametrize("how", [KILLED, TORN])
@pytest.mark.parametrize("action", only(faults.ACTIONS, "first", "fork", "headers"))
def test_a_process_that_dies_leaves_the_old_state_or_the_new(
    tmp_path: Path, action: str, how: int
) -> None:
    *died, whole = faults.run(tmp_path, action, how)
    assert len(died) >= 5
    for found in died:
        assert found["status"] == -9
        assert found["then"] in (whole["before"], whole["then"])
        assert found["again"] == whole["then"]
    others = {
        name
        for found in died
        for name in found["left"]
        if not name.startswith((TEMPORARY, DATABASE_FILE))
    }
    assert others == set(), "nothing was set aside"


@needs_preload
@pytest.mark.sampled
@pytest.mark.parametrize("for_good", [False, True])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("action", only(faults.ACTIONS, "note", "remove", "headers"))
def test_a_disk_that_fails_is_an_error_for_the_caller_alone(
    tmp_path: Path, action: str, code: int, for_good: bool
) -> None:
    *failed, whole = faults.run(tmp_path, action, code, for_good)
    # SQLite has one code for most failures; the removal of its own files after a commit may fail in
    # silence.
    assert {found["status"] for found in failed} <= {
        errno.ENOSPC,
        errno.EIO,
        errno.EROFS,
        errno.EACCES,
        200,
    }
    for found in failed:
        assert found["then"] in (whole["before"], whole["then"])
        assert found["then"] == whole["then"] or found["status"] != 200 or action == "headers"
        assert found["again"] == whole["then"]
        assert not any(name == "quarantine" for name in found["left"])


# -- other processes -------------------------------------------------------------------------------


def test_a_transaction_waits_for_another_only_so_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note(tmp_path)
    monkeypatch.setattr(StoreConfig, "lock_seconds", 0.02)
    with Database(tmp_path).transaction():
        with pytest.raises(TimeoutError, match="another process has kept the lock"):
            note(tmp_path, "New")
        assert names(tmp_path) == ["Old"]
    note(tmp_path, "New")
    assert names(tmp_path) == ["New", "Old"]


def test_many_threads_begin_one_database_at_once(tmp_path: Path) -> None:
    ready = threading.Barrier(8)

    def begin(name: str) -> None:
        ready.wait()
        note(tmp_path / "store", name)

    threads = [threading.Thread(target=begin, args=(f"agent {n}",)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert names(tmp_path / "store") == [f"agent {n}" for n in range(8)]
    assert temporaries(tmp_path) == []


def test_a_folder_that_was_moved_away_and_came_back(tmp_path: Path) -> None:
    root, aside = tmp_path / "store", tmp_path / "aside"
    agents = Agents(root)
    agents.note("Old", "model", "tiny", [], 0)
    root.rename(aside)
    assert agents.all() == []
    root.touch()
    with pytest.raises(NotADirectoryError):
        agents.all()
    root.unlink()
    agents.note("New", "model", "tiny", [], 0)
    assert [agent.name for agent in agents.all()] == ["New"]
    shutil.rmtree(root)
    aside.rename(root)
    assert [agent.name for agent in agents.all()] == ["Old"]


def test_a_database_that_cannot_be_written_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note(tmp_path)
    connect = sqlite3.connect

    def refuse(name: str, **options: object) -> sqlite3.Connection:
        """As where WAL mode can make no file in the folder."""
        if "immutable" not in name:
            error = sqlite3.OperationalError("unable to open database file")
            error.sqlite_errorcode = sqlite3.SQLITE_CANTOPEN
            raise error
        return connect(name, **options)  # type: ignore[no-any-return, call-overload]

    monkeypatch.setattr(sqlite3, "connect", refuse)
    assert names(tmp_path) == ["Old"]
    with pytest.raises(OSError, match="readonly") as caught:
        note(tmp_path, "New")
    assert caught.value.errno == errno.EROFS


# -- files that are not a database -----------------------------------------------------------------


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    for at in random.Random(1).sample(range(len(data)), 2000):
        data[at] ^= 255
    path.write_bytes(data)


def _other_version(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()


def _without_tables(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("DROP TABLE agents")
    connection.close()


DAMAGES: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "text": lambda path: path.write_text("not a database" * 1000),
    "flips": _flip,
    "another version": _other_version,
    "a missing table": _without_tables,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_database_is_set_aside_and_a_new_one_begun(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    note(tmp_path)
    DAMAGES[damage](tmp_path / DATABASE_FILE)
    agents = Agents(tmp_path)
    with pytest.raises(OSError, match=r"/store\.db"):
        agents.all()
    assert agents.all() == []
    note(tmp_path, "New")
    assert names(tmp_path) == ["New"]
    (aside,) = (path for path in (tmp_path / "quarantine").iterdir() if path.suffix != ".txt")
    assert aside.name.endswith("-store.db")
    assert [record.levelno for record in caplog.records].count(logging.WARNING) == 1
    assert Listing(tmp_path).foreign == []


@pytest.mark.parametrize("make", [*ODD_FILES.values(), make_sparse], ids=[*ODD_FILES, "sparse"])
def test_something_else_in_its_place_is_set_aside(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    make(tmp_path / DATABASE_FILE)
    with pytest.raises(OSError, match=r"/store\.db"):
        note(tmp_path)
    note(tmp_path)
    assert names(tmp_path) == ["Old"]


def test_only_the_file_that_was_found_damaged_is_set_aside(tmp_path: Path) -> None:
    (tmp_path / DATABASE_FILE).write_text("not a database")
    first, second = Agents(tmp_path), Agents(tmp_path)
    for agents in (first, second):
        agents._database._file = (0, 0)
    with pytest.raises(OSError, match=r"/store\.db"):
        first.all()
    note(tmp_path)
    assert second.all() == first.all() != []


def test_reading_makes_nothing(tmp_path: Path) -> None:
    assert names(tmp_path / "store") == []
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_database_goes_with_its_log_while_another_connection_is_open(
    tmp_path: Path,
) -> None:
    note(tmp_path)
    idle = Agents(tmp_path)
    assert [agent.name for agent in idle.all()] == ["Old"]
    # The log of another connection has what was not yet copied into the file.
    idle.note("Later", "model", "tiny", OLD_HASHES, 700)
    path = tmp_path / DATABASE_FILE
    content = path.read_bytes()
    path.write_bytes(b"no database" + content[11:])
    with pytest.raises(OSError, match="database"):
        names(tmp_path)
    note(tmp_path, "New")
    assert names(tmp_path) == ["New"]
    assert [agent.name for agent in idle.all()] == ["New"]
    assert len(list(tmp_path.glob(f"quarantine/*{DATABASE_FILE}"))) == 1


def test_a_mistake_in_a_query_costs_no_database(tmp_path: Path) -> None:
    note(tmp_path)
    with pytest.raises(sqlite3.OperationalError, match="nosuch"):
        Database(tmp_path).rows("SELECT nosuch FROM agents")
    assert names(tmp_path) == ["Old"]


def test_the_last_rows_stay_however_often_one_was_written(tmp_path: Path) -> None:
    database = Database(tmp_path)
    for stamp in ["one", "two", *["three"] * 10]:
        with database.transaction() as connection:
            connection.execute("INSERT OR REPLACE INTO weights VALUES (?, ?)", (stamp, b""))
            db.keep_last(connection, "weights", 2)
    assert [stamp for (stamp,) in database.rows("SELECT stamp FROM weights ORDER BY rowid")] == [
        "two",
        "three",
    ]
