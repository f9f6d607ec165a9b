"""Pipes, devices, links and files without an end, in every place of a store's folder: nothing
waits, nothing is read wrong.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from store.chains import (
    chain,
    data_of,
    file_of,
    is_right,
    keep,
    note,
    path_of,
    put,
    put_all,
    settled,
)
from store.damages import ODD_FILES, make_sparse
from store.records import make_file, prefix_hash
from store.stores import NAMESPACE, open_store

from mlx_blockpool.commands import store as store_command
from mlx_blockpool.errors import BadRecordError
from mlx_blockpool.store.agents import Agents
from mlx_blockpool.store.db import DATABASE_FILE
from mlx_blockpool.store.fs import TEMPORARY, Disk
from mlx_blockpool.store.hashing import encode
from mlx_blockpool.store.paths import MODEL_FILE, folder_of
from mlx_blockpool.store.reader import check
from mlx_blockpool.store.record import BLOCK, Expected, Part, Record, file_size
from mlx_blockpool.tier.agent_records import AgentRecords

ALL = {**ODD_FILES, "sparse file": make_sparse}
pytestmark = pytest.mark.timeout(120)


@pytest.fixture(params=ALL)
def make(request: pytest.FixtureRequest) -> Callable[[Path], None]:
    """Puts one of them in the place of whatever has a name."""

    def replace(path: Path) -> None:
        path.unlink(missing_ok=True)
        ALL[request.param](path)

    return replace


def test_a_store_opens_beside_them_and_writes_on(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    store = open_store(tmp_path)
    store.open()
    put_all(store, records := chain(1, 4))
    assert store.close()
    odd, *good = records
    make(file_of(tmp_path, odd))
    make(tmp_path / folder_of(NAMESPACE) / MODEL_FILE)
    make(file_of(tmp_path, good[0]).with_name(f"{TEMPORARY}1-0"))

    store = open_store(tmp_path)
    assert {record.hash for record in store.open()} == {record.hash for record in good}
    assert all(is_right(store, record) for record in good)
    assert odd.key not in store
    assert put(store, odd) is None
    put_all(store, more := chain(2, 2))
    assert all(is_right(store, record) for record in more)
    assert store.problem is None
    assert store.close()


def test_one_that_takes_the_place_of_a_known_record_is_a_miss(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    store = open_store(tmp_path)
    store.open()
    put_all(store, records := chain(1, 2))
    make(file_of(tmp_path, records[0]))
    with pytest.raises(BadRecordError, match=r"It is a [a-z ]+, not a regular file\.|expected"):
        data_of(store, records[0])
    assert not file_of(tmp_path, records[0]).is_symlink()
    assert not file_of(tmp_path, records[0]).exists(), "it is set aside"
    store.gone(records[0].key)
    put_all(store, [records[0]])
    assert all(is_right(store, record) for record in records)
    assert store.close()


def test_one_that_takes_the_place_of_a_record_is_gone_at_the_next_look(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    store = open_store(tmp_path, look_bytes=1)
    store.open()
    put_all(store, records := chain(1, 2))
    make(file_of(tmp_path, records[0]))
    put_all(store, chain(2, 1))
    settled(store)
    assert [record.key in store for record in records] == [False, True]
    assert store.close()


def test_commands_see_them_and_go_on(tmp_path: Path, make: Callable[[Path], None]) -> None:
    keep(tmp_path, range(600), range(1000, 1100))
    note(tmp_path, "agent", range(600))
    records = path_of(range(1000, 1100))
    make(file_of(tmp_path, records[0]))
    make(tmp_path / folder_of(NAMESPACE) / MODEL_FILE)
    make(tmp_path / "quarantine")
    assert [agent["name"] for agent in AgentRecords(tmp_path).listing()["agents"]] == ["agent"]
    assert store_command.stats(tmp_path)["total"]["records"] in (3, 4)
    for with_data in (False, True):
        report = store_command.check(tmp_path, with_data)
        assert report["records"] - len(report["bad"]) == 3


def test_turns_are_noted_after_one_was_in_the_place_of_the_database(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    make(tmp_path / DATABASE_FILE)
    with pytest.raises(OSError, match=DATABASE_FILE):
        note(tmp_path, "agent", range(300))
    assert note(tmp_path, "agent", range(300)) == Agents(tmp_path).get("agent")


def test_a_record_is_checked_to_its_last_byte_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlx_blockpool.store.reader.PIECE_BYTES", 300)
    (record,) = chain(1, 1)
    path = file_of(tmp_path, record)
    path.parent.mkdir(parents=True)
    data = bytearray(make_file(record))
    path.write_bytes(data)
    pieces: list[int] = []

    class Watched(Disk):
        def read(self, path: Path, start: int = 0, size: int | None = None) -> bytes:
            pieces.append(start)
            return super().read(path, start, size)

    expected = Expected(NAMESPACE, BLOCK)
    assert check(Watched(), path, expected).hash == record.hash
    assert len(pieces) == 1 + 4, "the header, and four pieces of a thousand bytes"
    for at in random.Random(0).sample(range(len(data) - record.nbytes, len(data)), 50):
        data[at] ^= 1
        path.write_bytes(data)
        with pytest.raises(BadRecordError, match="Checksum of data: got"):
            check(Disk(), path, expected)
        data[at] ^= 1


def test_a_record_that_says_it_is_larger_than_any_is_bad() -> None:
    parts = (Part("data", "U8", (1 << 35,)),)
    with pytest.raises(BadRecordError, match="Bytes of data: got"):
        file_size(
            Record(
                BLOCK, NAMESPACE, prefix_hash(b"p" * 32, (1,)), b"p" * 32, 0, encode((1,)), parts
            )
        )
