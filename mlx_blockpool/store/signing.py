"""Signatures of exported files: a store knows its own files again by a key that only it has. Knows bytes; no arrays, no tokens.

The signature is an HMAC-SHA256 over every byte of a safetensors file, with zeros where the signature itself stands in the header.
Any thread may call anything here.
"""

from __future__ import annotations

import errno
import hmac
import json
import re
import secrets
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from ..claims import head_of
from ..errors import BadRecordError, StoreError
from .fs import Disk, temporary_for, write_synced
from .paths import KEY_FILE

KEY_BYTES = 32
# A field of the header's metadata as mlx-lm's save_prompt_cache names it, and what stands there before the file is signed.
FIELD = "0.signature"
UNSIGNED = "0" * 64

_SIGNATURE = re.compile("[0-9a-f]{64}")
_DOMAIN = b"mlx-blockpool export 1\n"
_READ_BYTES = 1 << 20
# Some file systems have one name for a file and no second one.
_CANNOT_LINK = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}


def export_key(root: Path, disk: Disk | None = None) -> bytes:
    """The key of the store in `root`, made if there is none. Raises StoreError where it can neither be read nor made."""
    disk, path = disk or Disk(), root / KEY_FILE
    try:
        try:
            key = disk.read(path, 0, KEY_BYTES + 1)
        except FileNotFoundError:
            _make_key(disk, path)
            key = disk.read(path, 0, KEY_BYTES + 1)
    except OSError as error:
        raise StoreError(
            f"Cannot read or make {path}: {error.strerror or error}. Give --store-dir a folder that can be read and written."
        ) from error
    except BadRecordError as error:
        raise StoreError(f"{path}: {error}") from error
    if len(key) != KEY_BYTES:
        raise StoreError(f"{path} holds no key of {KEY_BYTES} bytes. Remove it: a new one will be made.")
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
    """Return whether every byte of a file is as it was when it was signed with this key. Raises OSError."""
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


def _digest(opened: BinaryIO, head: bytes, key: bytes) -> str:
    """Of `head`, and of what comes after it in the file."""
    mac = hmac.new(key, _DOMAIN + head, "sha256")
    opened.seek(len(head))
    while data := opened.read(_READ_BYTES):
        mac.update(data)
    return mac.hexdigest()


def _make_key(disk: Disk, path: Path) -> None:
    """Make a key, whole or absent; of two processes that make one at once the first one's stays."""
    disk.make_directory(path.parent)
    temporary = temporary_for(path)
    try:
        write_synced(disk, temporary, [secrets.token_bytes(KEY_BYTES)])
        try:
            disk.link(temporary, path)
        except FileExistsError:
            pass
        except OSError as error:
            if error.errno not in _CANNOT_LINK:
                raise
            disk.rename(temporary, path)
        disk.sync_directory(path.parent)
    finally:
        with suppress(FileNotFoundError):
            disk.unlink(temporary)
