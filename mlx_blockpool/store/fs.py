"""Files that are whole or absent, and the few system calls that the store makes. Knows bytes and names; no records, no arrays.

Any thread may call anything here: nothing is kept between two calls.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeAlias

from ..errors import BadRecordError

Buffer: TypeAlias = bytes | bytearray | memoryview
# Gives so many bytes to read into.
Into: TypeAlias = Callable[[int], "bytearray | memoryview"]

# What a file is called until it is whole. Hidden, and never the beginning of a safe name.
TEMPORARY = ".writing-"
# A journal commits what several threads sync at once together.
SYNCED_AT_ONCE = 8
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
    """By what a file is known again that nobody has changed: bytes, nanoseconds since the epoch, and where it lies."""

    size: int
    modified_ns: int
    inode: int


class Entry(NamedTuple):
    """What a directory holds under one name. `size` is bytes, `modified` seconds since the epoch, `modified_ns` the same exactly.

    `is_file`: a regular file, neither a link nor a pipe nor a device.
    """

    name: str
    size: int
    modified: float
    is_directory: bool
    is_file: bool = True
    modified_ns: int = 0
    inode: int = 0

    @property
    def stamp(self) -> Stamp:
        return Stamp(self.size, self.modified_ns, self.inode)


class Disk:
    """A thin method for each system call, so that a test can fail, die or lose writes at any of them. Each raises OSError.

    Only regular files are read: a link, pipe, device or directory in place of one is a BadRecordError, and nobody waits for it.
    """

    def create(self, path: Path) -> int:
        """A new file that only its owner reads (0600). FileExistsError if there is one."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)

    def write(self, fd: int, buffers: Iterable[Buffer]) -> None:
        """All bytes of all buffers, in order. A buffer is contiguous, of any shape."""
        for buffer in buffers:
            rest = memoryview(buffer)
            if rest.nbytes:
                rest = rest.cast("B")
            while rest.nbytes:
                rest = rest[os.write(fd, rest) :]

    def append(self, path: Path, data: Buffer) -> None:
        """Add to the end of a file that is there, in one call: others who append to it come before or after."""
        fd = _open_regular(path, os.O_WRONLY | os.O_APPEND)
        try:
            done = os.write(fd, data)
            if done < len(data):
                raise OSError(errno.ENOSPC, f"{done} of {len(data)} bytes were written", str(path))
        finally:
            os.close(fd)

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
        """At once, over a file that `new` may name."""
        os.replace(old, new)

    def link(self, old: Path, new: Path) -> None:
        """A second name for a file. FileExistsError if there is one of that name."""
        os.link(old, new)

    def sync_directory(self, path: Path) -> None:
        """The names in a directory, to the medium. File systems that cannot do that keep their own promise."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self.sync(fd)
        except OSError as error:
            if error.errno not in _CANNOT_SYNC:
                raise
        finally:
            os.close(fd)

    def touch(self, path: Path, moment: float) -> None:
        """Used then, in seconds since the epoch: its time of modification. That of a link itself, not of what it leads to."""
        os.utime(path, (moment, moment), follow_symlinks=False)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def make_one_directory(self, path: Path) -> None:
        """Only for its owner (0700). FileExistsError if there is one."""
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
        """What a directory holds, in no order, without what goes away meanwhile. Links are not followed."""
        found = []
        with os.scandir(path) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    found.append(_entry(entry.name, entry.stat(follow_symlinks=False)))
        return found

    def read(self, path: Path, start: int = 0, size: int | None = None) -> bytes:
        """At most `size` bytes from byte `start` on, None: all. Fewer where the file ends; never allocates more than there is."""
        fd = _open_regular(path)
        try:
            rest = max(0, os.fstat(fd).st_size - start)
            rest = rest if size is None else min(rest, size)
            os.lseek(fd, start, os.SEEK_SET)
            pieces = []
            while rest and (piece := os.read(fd, rest)):
                pieces.append(piece)
                rest -= len(piece)
            return b"".join(pieces)
        finally:
            os.close(fd)

    def read_into(self, path: Path, into: Into, most: int) -> memoryview:
        """read() from the beginning, at most `most` bytes, into what into(bytes) gives."""
        fd = _open_regular(path)
        try:
            data = memoryview(into(min(most, os.fstat(fd).st_size)))
            done = 0
            while done < len(data) and (count := os.readv(fd, [data[done:]])):
                done += count
            return data[:done]
        finally:
            os.close(fd)

    def size(self, path: Path) -> int:
        """Bytes of a file."""
        return self.stat(path).size

    def stat(self, path: Path) -> Entry:
        """A file as scan() finds it."""
        found = os.lstat(path)
        _need_regular(found.st_mode)
        return _entry(path.name, found)

    def free_bytes(self, path: Path) -> int:
        """Bytes that this user may still write to the file system of `path`."""
        figures = os.statvfs(path)
        return figures.f_bavail * figures.f_frsize


def _entry(name: str, found: os.stat_result) -> Entry:
    kind = stat.S_IFMT(found.st_mode)
    is_directory, is_file = kind == stat.S_IFDIR, kind == stat.S_IFREG
    return Entry(name, found.st_size, found.st_mtime, is_directory, is_file, found.st_mtime_ns, found.st_ino)


def _open_regular(path: Path, mode: int = os.O_RDONLY) -> int:
    """Opens a regular file. Raises BadRecordError for anything else under its name, and OSError."""
    # Opening a device can have effects of its own, so it is looked at before.
    _need_regular(os.lstat(path).st_mode)
    try:
        fd = os.open(path, mode | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno == errno.ELOOP:
            _need_regular(stat.S_IFLNK)
        raise
    try:
        _need_regular(os.fstat(fd).st_mode)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _need_regular(mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise BadRecordError(f"Found {_KINDS.get(stat.S_IFMT(mode), 'no file')}; needed a regular file.")


def write_whole(disk: Disk, path: Path, buffers: Iterable[Buffer]) -> None:
    """After a crash at any point a reader finds what was there before or all of `buffers`; once this returns, the latter.

    Raises OSError with the path. What was there before is then still there, or, if only the directory could not be synced,
    the new file. A failed write leaves nothing behind that `sweep` does not take.
    """
    temporary = _temporary_for(path)
    fd = disk.create(temporary)
    try:
        try:
            disk.write(fd, buffers)
            disk.sync(fd)
        finally:
            disk.close(fd)
        disk.rename(temporary, path)
        disk.sync_directory(path.parent)
    except BaseException as error:
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)
        with suppress(OSError):
            disk.unlink(temporary)
        raise


def write_all_whole(disk: Disk, files: Mapping[Path, Sequence[Buffer]]) -> dict[Path, OSError]:
    """write_whole() for files of one directory, which are synced side by side, and their directory once.

    Returns the errors of those that could not be written; the others are written all the same.
    """

    def write(item: tuple[Path, Sequence[Buffer]]) -> Path | OSError:
        temporary = _temporary_for(item[0])
        try:
            fd = disk.create(temporary)
            try:
                disk.write(fd, item[1])
                disk.sync(fd)
            finally:
                disk.close(fd)
        except OSError as error:
            with suppress(OSError):
                disk.unlink(temporary)
            return error
        return temporary

    failed: dict[Path, OSError] = {}
    with ThreadPoolExecutor(SYNCED_AT_ONCE) as threads:
        for path, written in zip(files, threads.map(write, files.items()), strict=True):
            if isinstance(written, OSError):
                failed[path] = written
                continue
            try:
                disk.rename(written, path)
            except OSError as error:
                failed[path] = error
                with suppress(OSError):
                    disk.unlink(written)
    for directory in {path.parent for path in files.keys() - failed.keys()}:
        try:
            disk.sync_directory(directory)
        except OSError as error:
            failed |= {path: error for path in files if path.parent == directory}
    return failed


def _temporary_for(path: Path) -> Path:
    return path.with_name(f"{TEMPORARY}{os.getpid()}-{secrets.token_hex(8)}")


def sweep(disk: Disk, directory: Path, older_than: float) -> list[Path]:
    """Remove what writes that never ended left in a directory. Returns their paths; raises OSError.

    `older_than` is a moment, in seconds since the epoch: a younger one may be a live write of another process.
    """
    found = disk.scan(directory)
    leftovers = [e for e in found if e.name.startswith(TEMPORARY) and not e.is_directory and e.modified < older_than]
    removed = []
    for entry in leftovers:
        with suppress(FileNotFoundError):
            disk.unlink(directory / entry.name)
            removed.append(directory / entry.name)
    return removed


def quarantine(disk: Disk, path: Path, folder: Path, reason: str) -> Path | None:
    """Move a bad file aside, never over another one, and put the reason beside it (`.txt`). Returns where it is now.

    None: the file is gone, which is as good. Raises OSError if it can neither be moved nor is gone.
    Nothing is synced: after a power cut a bad file is as bad as before.
    """
    disk.make_directory(folder)
    aside = folder / f"{secrets.token_hex(8)}-{safe_name(path.name)}"
    try:
        disk.rename(path, aside)
    except FileNotFoundError:
        return None
    # From now on its time is the one at which it came here.
    with suppress(OSError):
        disk.touch(aside, time.time())
    # The reason is a service to the user; a disk without room for it must not stop the move.
    with suppress(OSError):
        fd = disk.create(aside.with_name(f"{aside.name}.txt"))
        try:
            disk.write(fd, [f"{path}\n{reason}\n".encode(errors="backslashreplace")])
        finally:
            disk.close(fd)
    return aside


def safe_name(text: str) -> str:
    """A file name of at most 120 bytes for any text; different texts have different names on every file system.

    Plain names (lower-case ASCII letters, digits, inner dots, _ and -) stay as they are. All others get what is readable of
    them, "~" and 128 bits of a hash, so that no case folding or Unicode normalisation makes two of them one.
    """
    if _PLAIN_NAME.fullmatch(text) and not _WINDOWS_DEVICE.fullmatch(text):
        return text
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    readable = re.sub(r"[^a-z0-9_]+", "-", text.lower())[:_READABLE_CHARACTERS].strip("-")
    return f"{readable or '_'}~{digest}"
