"""Digests of whole files, remembered by their stamps. Knows bytes and stamps of files; no models.

    weights.json        in the store's folder: device, inode, size, both times and digest of each file, the last one at the end

The file is a hint: a missing or damaged one costs the time to hash again, and only a process that can write to the folder can
make it lie. Any thread may call anything here.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ..errors import BadRecordError, StoreError
from .fs import Disk, write_whole
from .paths import WEIGHTS_FILE

log = logging.getLogger(__name__)

FORMAT = "mlx-blockpool weights 1"
MOST_FILES = 4096
MAX_BYTES = 2 << 20
# A file that was changed so lately may change again without a later time: its digest is not remembered.
SETTLED_SECONDS = 2.0
# A reader that is to stop looks after each piece of this many bytes.
PIECE_BYTES = 4 << 20
THREADS = 2
AGAIN = "Load the model again once its files are whole."

_DIGEST_BYTES = hashlib.sha256().digest_size


class FileStamp(NamedTuple):
    """The same as long as nothing changes the file: any write and any change of its times sets `changed_ns`."""

    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int


class Digests:
    """Digests of files, remembered in the folder `root`; None: nowhere. `read_bytes` of files were read so far."""

    def __init__(self, root: Path | None, disk: Disk | None = None) -> None:
        self.read_bytes = 0
        self._path = None if root is None else root / WEIGHTS_FILE
        self._disk = disk or Disk()
        self._stopped = threading.Event()
        self._counting = threading.Lock()

    def stop(self) -> None:
        """Make of() end soon, from any thread."""
        self._stopped.set()

    def of(self, paths: Sequence[Path], check: Callable[[Path], None]) -> list[bytes]:
        """The SHA-256 of each file; check() raises what is wrong with one that has to be read.

        Raises StoreError for a file that changes meanwhile, and after stop(); OSError; and the errors of check().
        """
        remembered, stamps = self._load(), {path: stamp_of(os.stat(path)) for path in paths}
        unknown = [path for path in paths if stamps[path] not in remembered]
        for path in unknown:
            check(path)
        if unknown:
            remembered |= self._read(unknown)
        if any(stamp not in remembered for stamp in stamps.values()):
            raise StoreError(f"Files in {paths[0].parent} changed while they were read. {AGAIN}")
        return [remembered[stamps[path]] for path in paths]

    def _read(self, paths: list[Path]) -> dict[FileStamp, bytes]:
        """Hash these files, and remember those that are not too young."""
        start = time.time()
        found = self._hash_all(paths)
        size, seconds = sum(stamp.size for stamp in found), time.time() - start
        log.info("hashed %.2f GB of weights in %.1f s (%s)", size / 1e9, seconds, paths[0].parent)
        settled = int((start - SETTLED_SECONDS) * 1e9)
        self._remember({stamp: digest for stamp, digest in found.items() if stamp.changed_ns < settled})
        return found

    # -- hashing -------------------------------------------------------------------------------------------------------

    def _hash_all(self, paths: list[Path]) -> dict[FileStamp, bytes]:
        """The largest files first, on threads that do not keep the process from ending."""
        queue = iter(sorted(paths, key=lambda path: -path.stat().st_size))
        found: dict[FileStamp, bytes] = {}
        errors: list[BaseException] = []

        def work() -> None:
            while not errors and (path := self._next(queue)) is not None:
                try:
                    stamp, digest = self._hash(path)
                    found[stamp] = digest
                except BaseException as error:
                    # The top of a thread: the thread that waits raises it.
                    errors.append(error)

        threads = [threading.Thread(target=work, name="hash", daemon=True) for _ in paths[:THREADS]]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except BaseException:
            self.stop()
            raise
        if errors:
            raise errors[0]
        return found

    def _next(self, queue: Iterator[Path]) -> Path | None:
        with self._counting:
            return next(queue, None)

    def _hash(self, path: Path) -> tuple[FileStamp, bytes]:
        """The digest of a file, and the stamp that it has before and after."""
        fd = _open(path)
        with open(fd, "rb", buffering=0) as file:
            before = stamp_of(os.fstat(fd))
            digest, piece = hashlib.sha256(), memoryview(bytearray(min(PIECE_BYTES, before.size) or 1))
            while size := file.readinto(piece):
                digest.update(piece[:size])
                with self._counting:
                    self.read_bytes += size
                if self._stopped.is_set():
                    raise StoreError(f"Hashing {path.name} was stopped before its end.")
            if stamp_of(os.fstat(fd)) != before:
                raise StoreError(f"{path.name} changed while it was read. {AGAIN}")
        return before, digest.digest()

    # -- remembering ---------------------------------------------------------------------------------------------------

    def _load(self) -> dict[FileStamp, bytes]:
        """The remembered digests; none if the file is not as _remember() writes it."""
        if self._path is None:
            return {}
        try:
            data = self._disk.read(self._path, 0, MAX_BYTES + 1)
            return _decode(data) if len(data) <= MAX_BYTES else {}
        except (OSError, BadRecordError, ValueError, KeyError, TypeError, RecursionError):
            return {}

    def _remember(self, new: dict[FileStamp, bytes]) -> None:
        """Add to the digests that others have written since. A disk that fails costs the time to hash again."""
        if self._path is None or not new:
            return
        kept = {stamp: digest for stamp, digest in self._load().items() if stamp not in new} | new
        try:
            self._disk.make_directory(self._path.parent)
            write_whole(self._disk, self._path, [_encode(list(kept.items())[-MOST_FILES:])])
        except OSError as error:
            log.info("prompt store: digests of weights are not remembered: %s", error)


def stamp_of(found: os.stat_result) -> FileStamp:
    return FileStamp(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def _open(path: Path) -> int:
    """A regular file, or a link to one, as the hub's folders have them. Raises StoreError for anything else, and OSError."""
    # Opening a device can have effects of its own, so its kind is checked before.
    if stat.S_ISREG(os.stat(path).st_mode):
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        if stat.S_ISREG(os.fstat(fd).st_mode):
            return fd
        os.close(fd)
    raise StoreError(f"{path.name} is no regular file. Needed one that holds weights.")


def _encode(entries: Sequence[tuple[FileStamp, bytes]]) -> bytes:
    files = [[*stamp, digest.hex()] for stamp, digest in entries]
    return json.dumps({"format": FORMAT, "files": files}).encode("ascii")


def _decode(data: bytes) -> dict[FileStamp, bytes]:
    """Raises ValueError, KeyError, TypeError or RecursionError for bytes that _encode() did not make."""
    found = json.loads(data.decode("ascii"))
    if found["format"] != FORMAT or len(found["files"]) > MOST_FILES:
        raise ValueError("another format")
    digests = {}
    for *numbers, text in found["files"]:
        stamp, digest = FileStamp(*numbers), bytes.fromhex(text)
        if not all(type(number) is int for number in numbers) or len(digest) != _DIGEST_BYTES:
            raise ValueError("no digest of a file")
        digests[stamp] = digest
    return digests
