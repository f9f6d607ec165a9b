"""Signatures of exported files: a store knows its own files again by a key that only it has. Knows bytes; no arrays, no tokens.

The signature is an HMAC-SHA256 over every byte of a safetensors file, with zeros where the signature itself stands in the header.
Any thread may call anything here.
"""

from __future__ import annotations

import errno
import hmac
import json
import os
import re
import secrets
import stat
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from ..errors import StoreError
from .fs import TEMPORARY, Disk
from .paths import KEY_FILE

KEY_BYTES = 32
# A field of the header's metadata as mlx-lm's save_prompt_cache names it, and what stands there before the file is signed.
FIELD = "0.signature"
UNSIGNED = "0" * 64
MAX_HEADER_BYTES = 100_000_000

_SIGNATURE = re.compile("[0-9a-f]{64}")
_DOMAIN = b"mlx-blockpool export 1\n"
_READ_BYTES = 1 << 20
# Some file systems have one name for a file and no second one.
_CANNOT_LINK = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}


def export_key(root: Path, disk: Disk | None = None) -> bytes:
    """The key of the store in `root`, made if there is none. Raises StoreError where it can neither be read nor made."""
    used, path = disk or Disk(), root / KEY_FILE
    try:
        key = _read_key(path)
        if key is None:
            _make_key(used, root, path)
            key = _read_key(path)
    except OSError as error:
        raise StoreError(f"Cannot read or make {path}: {error.strerror or error}. Needed a folder to read and write.") from error
    if key is None:
        raise StoreError(f"Found {path} without a key in it; needed {KEY_BYTES} bytes. Remove it: a new one will be made.")
    return key


def sign(file: Path, key: bytes) -> None:
    """Sign a whole file whose header has UNSIGNED as its signature. Raises OSError."""
    with file.open("r+b") as opened:
        head = head_of(opened)
        at = head.index(UNSIGNED.encode(), head.index(FIELD.encode()))
        signature = _digest(opened, head, key)
        opened.seek(at)
        opened.write(signature.encode())


def is_signed(file: Path, key: bytes) -> bool:
    """Whether every byte of a file is as it was when it was signed with this key. Raises OSError."""
    with file.open("rb") as opened:
        try:
            head = head_of(opened)
            found = json.loads(head[8:])["__metadata__"][FIELD]
        except (ValueError, KeyError, TypeError, RecursionError):
            return False
        if not isinstance(found, str) or not _SIGNATURE.fullmatch(found) or head.count(found.encode()) != 1:
            return False
        needed = _digest(opened, head.replace(found.encode(), UNSIGNED.encode()), key)
        return hmac.compare_digest(found, needed)


def head_of(opened: BinaryIO) -> bytes:
    """The header of a safetensors file with its length before it. Raises ValueError for what cannot be one."""
    length = opened.read(8)
    size = int.from_bytes(length, "little")
    if len(length) < 8 or size > min(MAX_HEADER_BYTES, os.fstat(opened.fileno()).st_size):
        raise ValueError(f"a header of {size} bytes")
    return length + opened.read(size)


def _digest(opened: BinaryIO, head: bytes, key: bytes) -> str:
    """Of `head`, and of what comes behind it in the file."""
    mac = hmac.new(key, _DOMAIN + head, "sha256")
    opened.seek(len(head))
    while data := opened.read(_READ_BYTES):
        mac.update(data)
    return mac.hexdigest()


def _read_key(path: Path) -> bytes | None:
    """None: there is no key. What is no plain file is not opened."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    with open(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(f"{path} is not a plain file")
        key = file.read(KEY_BYTES + 1)
    return key if len(key) == KEY_BYTES else None


def _make_key(disk: Disk, root: Path, path: Path) -> None:
    """Whole or absent, and of two processes that make one at once the first one's."""
    disk.make_directory(root)
    temporary = root / f"{TEMPORARY}{os.getpid()}-{secrets.token_hex(8)}"
    fd = disk.create(temporary)
    try:
        try:
            disk.write(fd, [secrets.token_bytes(KEY_BYTES)])
            disk.sync(fd)
        finally:
            disk.close(fd)
        _name(disk, temporary, path)
        disk.sync_directory(root)
    finally:
        with suppress(FileNotFoundError):
            disk.unlink(temporary)


def _name(disk: Disk, temporary: Path, path: Path) -> None:
    """Give a file its name, unless another has it."""
    try:
        disk.link(temporary, path)
    except FileExistsError:
        return
    except OSError as error:
        if error.errno not in _CANNOT_LINK:
            raise
        disk.rename(temporary, path)
