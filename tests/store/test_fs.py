"""Files that are whole or absent: modes, errors at each call, names, quarantine."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import subprocess
import sys
import unicodedata
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from store import children
from store.damages import ODD_FILES
from store.disks import COMMIT, FailingDisk, sweep
from store.records import NEW, NEW_FILE, OLD_FILE, read_turn
from thorough import tried

from mlx_blockpool.errors import BadRecordError
from mlx_blockpool.store.fs import Disk, Stamp, safe_name, write_whole
from mlx_blockpool.store.quarantine import Quarantine

FULL, READ_ONLY, BROKEN = errno.ENOSPC, errno.EROFS, errno.EIO
FOREVER = float("inf")


@pytest.fixture
def _no_umask() -> Iterator[None]:
    old = os.umask(0)
    yield
    os.umask(old)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def quarantine(disk: Disk, path: Path, folder: Path, reason: str) -> Path | None:
    return Quarantine(disk, folder.parent, 10**9).set_aside(path, reason)


@pytest.mark.usefixtures("_no_umask")
def test_only_the_owner_reads_what_was_written(tmp_path: Path) -> None:
    disk, folder = Disk(), tmp_path / "models" / "a" / "blocks"
    disk.make_directory(folder)
    write_whole(disk, folder / "file", [b"secret"])
    aside = quarantine(disk, folder / "file", tmp_path / "quarantine", "because")
    write_whole(disk, folder / "file", [b"secret"])
    assert aside is not None
    files = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert {p.name for p in files} == {"file", aside.name, aside.name + ".txt"}
    assert {mode(p) for p in files} == {0o600}
    assert {mode(p) for p in tmp_path.rglob("*") if p.is_dir()} == {0o700}


def test_a_directory_that_exists_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir(mode=0o755)
    (tmp_path / "shared" / "file").touch()
    Disk().make_directory(tmp_path / "shared")
    Disk().make_directory(tmp_path / "shared" / "mine")
    assert (mode(tmp_path / "shared"), mode(tmp_path / "shared" / "mine")) == (0o755, 0o700)
    assert (tmp_path / "shared" / "file").exists()
    with pytest.raises(NotADirectoryError):
        Disk().make_directory(tmp_path / "shared" / "file" / "below")


def test_buffers_of_any_shape_are_written_in_order(tmp_path: Path) -> None:
    grid = memoryview(bytes(range(24))).cast("B", (2, 3, 4))
    words = memoryview(b"abcd").cast("I")
    write_whole(Disk(), tmp_path / "file", [b"first", grid, b"", bytearray(b"second"), words])
    assert (tmp_path / "file").read_bytes() == b"first" + bytes(range(24)) + b"secondabcd"


def test_a_write_goes_on_where_the_system_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:7]))
    write_whole(Disk(), tmp_path / "file", [NEW_FILE, b"end"])
    assert (tmp_path / "file").read_bytes() == NEW_FILE + b"end"


def test_a_part_of_a_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(range(100)))
    assert Disk().read(tmp_path / "file") == bytes(range(100))
    assert Disk().read(tmp_path / "file", 10, 30) == bytes(range(10, 40))
    assert Disk().read(tmp_path / "file", 90, 30) == bytes(range(90, 100))
    assert Disk().read(tmp_path / "file", 200) == b""


def test_a_giant_size_allocates_no_more_than_there_is(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    assert Disk().read(tmp_path / "file", 0, 1 << 62) == b"abc"


def test_the_medium_is_reached_where_the_system_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    answers: list[int | None] = []

    def control(fd: int, command: int) -> None:
        calls.append(f"fcntl {command}")
        if (answer := answers.pop()) is not None:
            raise OSError(answer, "no")

    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", control)
    monkeypatch.setattr(os, "fsync", lambda fd: calls.append("fsync"))
    with (tmp_path / "file").open("wb") as file:
        answers[:] = [None]
        Disk().sync(file.fileno())
        answers[:] = [errno.ENOTSUP]
        Disk().sync(file.fileno())
        answers[:] = [BROKEN]
        with pytest.raises(OSError, match="no"):
            Disk().sync(file.fileno())
    assert calls == ["fcntl 51", "fcntl 51", "fsync", "fcntl 51"]


@pytest.mark.parametrize(
    ("error", "is_raised"), [(errno.EINVAL, False), (errno.EOPNOTSUPP, False), (BROKEN, True)]
)
def test_a_file_system_that_cannot_sync_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int, is_raised: bool
) -> None:
    def fsync(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(error, "no")

    monkeypatch.setattr(os, "fsync", fsync)
    if is_raised:
        with pytest.raises(OSError, match="no"):
            write_whole(Disk(), tmp_path / "file", [b"data"])
    else:
        write_whole(Disk(), tmp_path / "file", [b"data"])
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("for_good", [False, True])
@pytest.mark.parametrize("error", [FULL, READ_ONLY, BROKEN])
@pytest.mark.parametrize("k", range(len(COMMIT)))
def test_an_error_at_any_call_leaves_a_whole_record_and_tells_the_path(
    tmp_path: Path, k: int, error: int, for_good: bool
) -> None:
    path = tmp_path / NEW.file_name
    path.write_bytes(OLD_FILE)
    disk = FailingDisk(k, error, for_good)
    with pytest.raises(OSError, match=os.strerror(error)) as raised:
        write_whole(disk, path, [NEW_FILE])
    assert raised.value.errno == error

    assert disk.calls[: k + 1] == COMMIT[: k + 1]
    if k:
        assert str(path) in str(raised.value)
    assert read_turn(Disk(), path) == ("new" if k > COMMIT.index("rename") else "old")
    if for_good:
        sweep(Disk(), tmp_path, FOREVER)
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_file_system_keeps_what_is_whole(tmp_path: Path) -> None:
    mounted = [
        "unshare",
        "-rm",
        "sh",
        "-c",
        'mount -t tmpfs -o size=64k none "$1" && shift && exec "$@"',
        "sh",
        str(tmp_path),
    ]
    try:
        subprocess.run([*mounted, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no file system can be mounted here: {error}")
    child = subprocess.run(
        [*mounted, sys.executable, children.__file__, "fill", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert not child.returncode, child.stderr
    first, full, again, whole, files, free = json.loads(child.stdout)
    assert whole >= 3
    assert (first, full, again) == (None, [FULL, f"{whole}"], [FULL, "old"])
    assert files == {"old": "old" * 1000} | {f"{n}": chr(n) * 10_000 for n in range(whole)}
    assert free < 10_000


def test_a_directory_that_is_gone_is_the_callers_to_hear_of(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="gone"):
        write_whole(Disk(), tmp_path / "gone" / "file", [b"data"])


def test_writers_of_one_file_do_not_meet(tmp_path: Path) -> None:
    path = tmp_path / NEW.file_name
    write_whole(Disk(), path, [OLD_FILE])
    with ThreadPoolExecutor(8) as threads:
        writes = [
            threads.submit(write_whole, Disk(), path, [data]) for data in [OLD_FILE, NEW_FILE] * 20
        ]
        found = {read_turn(Disk(), path) for _ in range(50)}
    assert [write.exception() for write in writes] == [None] * 40
    assert found <= {"old", "new"}
    assert list(tmp_path.iterdir()) == [path]


def test_scan_tells_files_from_directories_and_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    os.utime(tmp_path / "file", (1000, 1000))
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    found = {e.name: e for e in Disk().scan(tmp_path)}
    inode = (tmp_path / "file").stat().st_ino
    assert (
        found["file"]
        == ("file", 5, 1000.0, False, True, Stamp(5, 1000 * 10**9, inode))
        == Disk().stat(tmp_path / "file")
    )
    assert {name for name, entry in found.items() if entry.is_directory} == {"folder"}
    assert {name for name, entry in found.items() if entry.is_file} == {"file"}


@pytest.mark.parametrize("kind", ODD_FILES)
def test_only_regular_files_are_read_and_nothing_is_waited_for(tmp_path: Path, kind: str) -> None:
    """Whatever opening would wait for, or follow, or never end."""
    path = tmp_path / "odd"
    ODD_FILES[kind](path)
    for call in (Disk().read, Disk().size, lambda p: Disk().read_into(p, bytearray, 1 << 20)):
        with pytest.raises(BadRecordError, match=r"^It is .*, not a regular file\.$"):
            call(path)
    assert not {entry.name: entry.is_file for entry in Disk().scan(tmp_path)}["odd"]


def test_a_sparse_file_takes_no_more_memory_than_what_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    path.touch()
    os.truncate(path, 1 << 40)
    assert Disk().read(path, 5, 100) == bytes(100)
    assert len(Disk().read_into(path, bytearray, 1000)) == 1000


def test_free_bytes_are_those_of_the_file_system(tmp_path: Path) -> None:
    figures = os.statvfs(tmp_path)
    assert 0 < Disk().free_bytes(tmp_path) <= figures.f_blocks * figures.f_frsize


def test_quarantine_keeps_every_file_and_its_reason(tmp_path: Path) -> None:
    folder, bad = tmp_path / "quarantine", tmp_path / "bad.safetensors"
    moved = []
    for n in range(3):
        bad.write_bytes(b"%d" % n)
        moved.append(quarantine(Disk(), bad, folder, f"Checksum: got {n}, expected 7.\udcff"))
    assert not bad.exists()
    assert len(set(moved)) == 3
    for n, aside in enumerate(moved):
        assert aside is not None
        assert aside.read_bytes() == b"%d" % n
        assert aside.name.endswith("-bad.safetensors")
        assert (
            aside.with_name(aside.name + ".txt").read_text()
            == f"{bad}\nChecksum: got {n}, expected 7.\\udcff\n"
        )


def test_quarantine_of_a_file_that_is_gone_is_done(tmp_path: Path) -> None:
    assert quarantine(Disk(), tmp_path / "gone", tmp_path / "quarantine", "because") is None
    assert list((tmp_path / "quarantine").iterdir()) == []


def test_quarantine_moves_the_file_even_without_room_for_the_reason(tmp_path: Path) -> None:
    class FullDisk(Disk):
        def create(self, path: Path) -> int:
            raise OSError(FULL, "full")

    (tmp_path / "bad").write_bytes(b"bad")
    aside = quarantine(FullDisk(), tmp_path / "bad", tmp_path / "quarantine", "because")
    assert list((tmp_path / "quarantine").iterdir()) == [aside]


UGLY = [
    *(
        "",
        ".",
        "..",
        "../../etc/passwd",
        "/abs",
        "a/b",
        "a\\b",
        "a\0b",
        "a\nb",
        "\x1b[2J",
        "a:b",
        "a?*<>|\"'",
        "-rf",
        "~",
    ),
    *(
        "CON",
        "con",
        "con.txt",
        "lpt1",
        "a.",
        "a ",
        ".hidden",
        ".writing-1",
        "Claude",
        "claude",
        "CLAUDE",
        "İ",
        "i",
        "\ud800",
    ),
    *(
        "é",
        "e\u0301",
        "\ufb01",
        "fi",
        "ß",
        "ss",
        "x" * 500,
        "名" * 200,
        "\u202egnp.exe",
        "name~0123456789abcdef0123456789abcdef",
    ),
]


def assert_safe(name: str) -> None:
    assert 0 < len(name.encode("ascii")) <= 120
    assert name == name.lower()
    assert name[0] not in ".-~ "
    assert name[-1] not in ". "
    assert set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789._-~")
    assert name.partition(".")[0] not in ("con", "prn", "aux", "nul", "com1", "lpt1")


@given(st.text(st.characters(codec=None)))
@example("")
def test_any_text_makes_a_safe_name(text: str) -> None:
    assert_safe(safe_name(text))


def test_ugly_texts_make_safe_names_that_differ(tmp_path: Path) -> None:
    names = {safe_name(text) for text in UGLY}
    assert len(names) == len(UGLY)
    for name in names:
        assert_safe(name)
        write_whole(Disk(), tmp_path / f"{name}.json", [b"{}"])
    assert {p.stem for p in tmp_path.iterdir()} == names


@tried(40, 3000)
@given(
    st.text(max_size=12),
    st.sampled_from(["lower", "upper", "casefold", "strip", "NFC", "NFD", "NFKC", "NFKD", "name"]),
)
def test_texts_that_a_file_system_may_take_for_one_have_different_names(
    text: str, change: str
) -> None:
    if change == "name":
        other = safe_name(text)
    else:
        other = (
            getattr(str, change)(text) if change.islower() else unicodedata.normalize(change, text)
        )  # type: ignore[arg-type]
    assert (safe_name(text) == safe_name(other)) == (text == other)


def test_plain_names_stay_as_they_are() -> None:
    plain = ["claude", "agent-7", "my_agent.v2", "0", "a" * 80]
    assert [safe_name(text) for text in plain] == plain


def test_a_name_stays_readable() -> None:
    assert safe_name("Claude Code (main)").startswith("claude-code-main~")
    assert safe_name("名").startswith("_~")
