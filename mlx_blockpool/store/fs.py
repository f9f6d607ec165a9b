"""Files that are whole or absent, and the few system calls that the store makes. Knows bytes and
names; no records, no arrays.

Any thread may call anything here: it holds no state.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple, TypeAlias

from ..errors import BadRecordError

Buffer: TypeAlias = bytes | bytearray | memoryview
# Gives memory of this many bytes to read into.
Into: TypeAlias = Callable[[int], "bytearray | memoryview"]

# The beginning of a file's name until it is whole. Hidden, and never the beginning of a safe name.
TEMPORARY = ".writing-"
# Network shares and some FUSE file systems refuse to sync what they cannot.
_CANNOT_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOTTY}

_PLAIN_NAME = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,78}[a-z0-9_-])?")
_WINDOWS_DEVICE = re.compile(r"(?:con|prn|aux|nul|com[0-9]|lpt[0-9])(?:\..*)?")
_READABLE_CHARACTERS = 60
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class Stamp(NamedTuple):
    """The same as long as nothing changes the file: bytes, nanoseconds since the epoch, inode."""

    size: int
    modified_ns: int
    inode: int


class Entry(NamedTuple):
    """One name in a directory. `size` is bytes, `modified` seconds since the epoch.

    `is_file`: a regular file, neither a link nor a pipe nor a device.
    """

    name: str
    size: int
    modified: float
    is_directory: bool
    is_file: bool = True
    stamp: Stamp = Stamp(0, 0, 0)


class Disk:
    """A thin method for each system call, so that a test can fail, die or lose writes at any of
    them. Each raises OSError.

    Only regular files are read: a link, pipe, device or directory in place of one raises
    BadRecordError at once.
    """

    def create(self, path: Path) -> int:
        """A new file that only its owner reads (0600). Raises FileExistsError."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)

    def write(self, fd: int, buffers: Iterable[Buffer]) -> None:
        """All bytes of all buffers, in order. A buffer is contiguous, of any shape."""
        for buffer in buffers:
            rest = memoryview(buffer)
            if rest.nbytes:
                rest = rest.cast("B")
            while rest.nbytes:
                rest = rest[os.write(fd, rest) :]

    def sync(self, fd: int) -> None:
        """To the medium. On macOS fsync stops at the drive's own cache, F_FULLFSYNC does not."""
        full = getattr(fcntl, "F_FULLFSYNC", None)
        if full is not None:
            try:
                fcntl.fcntl(fd, full)
                return
            except OSError as error:
                if error.errno not in _CANNOT_SYNC:
                    raise
        os.fsync(fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def rename(self, old: Path, new: Path) -> None:
        """Atomic; replaces a file of the new name."""
        os.replace(old, new)

    def sync_directory(self, path: Path) -> None:
        """The names in a directory, to the medium.

        File systems that cannot do that keep their own promise.
        """
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self.sync(fd)
        except OSError as error:
            if error.errno not in _CANNOT_SYNC:
                raise
        finally:
            os.close(fd)

    def touch(self, path: Path, moment: float) -> None:
        """Set the time of modification, in seconds since the epoch; of a link itself, not of its
        target.
        """
        os.utime(path, (moment, moment), follow_symlinks=False)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def make_one_directory(self, path: Path) -> None:
        """Only for its owner (0700). Raises FileExistsError."""
        os.mkdir(path, 0o700)

    def make_directory(self, path: Path) -> None:
        """With its parents, each name synced; directories that exist stay as they are."""
        try:
            self.make_one_directory(path)
        except FileExistsError:
            return
        except FileNotFoundError:
            self.make_directory(path.parent)
            with suppress(FileExistsError):
                self.make_one_directory(path)
        self.sync_directory(path.parent)

    def scan(self, path: Path) -> list[Entry]:
        """The names in a directory, in no order, without those that go away meanwhile.

        Links are not followed.
        """
        found = []
        with os.scandir(path) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    found.append(_entry(entry.name, entry.stat(follow_symlinks=False)))
        return found

    def read(self, path: Path, start: int = 0, size: int | None = None) -> bytes:
        """At most `size` bytes from byte `start` on, or all.

        Never allocates more than the file has.
        """
        with _open_regular(path) as file:
            rest = max(0, os.fstat(file.fileno()).st_size - start)
            file.seek(start)
            return file.read(rest if size is None else min(rest, size))

    def read_into(self, path: Path, into: Into, most: int) -> memoryview:
        """read() from the beginning, at most `most` bytes, into the memory that into(bytes)
        gives.
        """
        with _open_regular(path) as file:
            data = memoryview(into(min(most, os.fstat(file.fileno()).st_size)))
            return data[: file.readinto(data)]

    def size(self, path: Path) -> int:
        """Bytes of a file."""
        return self.stat(path).size

    def stat(self, path: Path) -> Entry:
        """The entry of a regular file, as in scan()."""
        found = os.lstat(path)
        _need_regular(found.st_mode)
        return _entry(path.name, found)

    def free_bytes(self, path: Path) -> int:
        """Bytes that this user may still write to the file system of `path`."""
        figures = os.statvfs(path)
        return figures.f_bavail * figures.f_frsize


def _entry(name: str, found: os.stat_result) -> Entry:
    return Entry(
        name,
        found.st_size,
        found.st_mtime,
        stat.S_ISDIR(found.st_mode),
        stat.S_ISREG(found.st_mode),
        Stamp(found.st_size, found.st_mtime_ns, found.st_ino),
    )


def _open_regular(path: Path) -> BufferedReader:
    """Opens a regular file. Raises BadRecordError for anything else under its name, and OSError."""
    # Opening a device can have effects, so it is checked before.
    _need_regular(os.lstat(path).st_mode)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno == errno.ELOOP:
            _need_regular(stat.S_IFLNK)
        raise
    try:
        _need_regular(os.fstat(fd).st_mode)
    except BaseException:
        os.close(fd)
        raise
    return open(fd, "rb")


def _need_regular(mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise BadRecordError(
            f"It is {_KINDS.get(stat.S_IFMT(mode), 'no file')}, not a regular file."
        )


def write_whole(disk: Disk, path: Path, buffers: Iterable[Buffer]) -> None:
    """After a crash at any point a reader finds the old file or all of `buffers`; once this
    returns, the latter.

    Raises OSError with the path. The old file is then still there, or, if only the directory could
    not be synced, the new one. A failed write leaves at most a temporary file.
    """
    with removed_on_error(disk, temporary_for(path), path) as temporary:
        write_synced(disk, temporary, buffers)
        disk.rename(temporary, path)
        disk.sync_directory(path.parent)


def temporary_for(path: Path) -> Path:
    """A name in the folder of `path` for a file that is not whole yet."""
    return path.with_name(f"{TEMPORARY}{os.getpid()}-{secrets.token_hex(8)}")


def write_synced(disk: Disk, path: Path, buffers: Iterable[Buffer], sync: bool = True) -> None:
    """Write a new file, to the medium unless `sync` is False. Raises OSError."""
    fd = disk.create(path)
    try:
        disk.write(fd, buffers)
        if sync:
            disk.sync(fd)
    finally:
        disk.close(fd)


@contextmanager
def removed_on_error(disk: Disk, temporary: Path, path: Path) -> Iterator[Path]:
    """Remove a temporary file if the block raises; an OSError names `path` then."""
    try:
        yield temporary
    except BaseException as error:
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)
        with suppress(OSError):
            disk.unlink(temporary)
        raise


def safe_name(text: str) -> str:
    """A file name of at most 120 bytes for any text; different texts have different names on every
    file system.

    Plain names (lower-case ASCII letters, digits, inner dots, _ and -) stay as they are. All others
    become their readable characters, "~" and 128 bits of a hash, so that no case folding or Unicode
    normalisation makes two of them one.
    """
    if _PLAIN_NAME.fullmatch(text) and not _WINDOWS_DEVICE.fullmatch(text):
        return text
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    readable = re.sub(r"[^a-z0-9_]+", "-", text.lower())[:_READABLE_CHARACTERS].strip("-")
    return f"{readable or '_'}~{digest}"
