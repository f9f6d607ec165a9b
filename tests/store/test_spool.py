"""Spool: room for files on their way in and out, and nothing of them afterwards."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mlx_blockpool.errors import NoRoomError
from mlx_blockpool.store.fs import Disk
from mlx_blockpool.store.spool import MOST, Spool


class Full(Disk):
    """A file system with 1,000 bytes left."""

    def free_bytes(self, path: Path) -> int:
        return 1000


def test_a_file_is_there_within_the_block_and_for_its_owner_only(tmp_path: Path) -> None:
    with Spool(tmp_path, 0).file(5) as path:
        assert (path.parent, path.stat().st_mode & 0o777, path.suffix) == (tmp_path, 0o600, ".safetensors")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="whatever"), Spool(tmp_path, 0).file(5):
        raise ValueError("whatever")
    assert list(tmp_path.iterdir()) == []


def test_all_of_them_together_leave_the_disk_its_room(tmp_path: Path) -> None:
    spool = Spool(tmp_path, 100, Full())
    with pytest.raises(NoRoomError, match="the disk has 900 beside"), spool.file(901):
        pass
    with spool.file(600):
        with pytest.raises(NoRoomError, match="the disk has 300 beside"), spool.file(301):
            pass
        with spool.file(300):
            pass
    with spool.file(900):
        pass


def test_no_more_are_on_their_way_than_allowed(tmp_path: Path) -> None:
    spool = Spool(tmp_path, 0)
    files = [spool.file(1) for _ in range(MOST)]
    for file in files:
        file.__enter__()
    with pytest.raises(NoRoomError, match="Try again"), spool.file(1):
        pass
    for file in files:
        file.__exit__(None, None, None)
    with spool.file(1):
        pass


def test_what_a_killed_server_left_goes_with_the_next_file(tmp_path: Path) -> None:
    old, young = tmp_path / ".writing-1-aa.safetensors", tmp_path / ".writing-1-bb.safetensors"
    for path, moment in ((old, 1000), (young, None)):
        path.write_bytes(b"x")
        os.utime(path, None if moment is None else (moment, moment))
    with Spool(tmp_path, 0).file(1):
        pass
    assert list(tmp_path.iterdir()) == [young]
