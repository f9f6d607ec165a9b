"""The path of each file below the store's folder. Knows names of files, and model.json; nothing of
records.

models/<namespace>/model.json                     for people to read
models/<namespace>/<folder of the kind>/ab/<hash>.safetensors
quarantine/                                       as in quarantine.py
store.db                                          as in db.py
"""

from __future__ import annotations

import errno
import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from platformdirs import user_cache_path

from ..errors import BadRecordError, StoreError
from .fs import TEMPORARY, Disk, write_whole
from .record import BLOCK, STATE, SUFFIX, WINDOW, Key

MODEL_FILE = "model.json"
MAX_MODEL_FILE_BYTES = 1 << 20
# Younger temporary files may be live writes of another process.
LEFTOVER_SECONDS = 3600.0
FOLDERS = {BLOCK: "blocks", WINDOW: "windows", STATE: "states"}
KINDS = {folder: kind for kind, folder in FOLDERS.items()}


def default_folder() -> Path:
    """The user's cache folder: in $XDG_CACHE_HOME if that is an absolute path, else
    ~/Library/Caches (macOS) or ~/.cache.
    """
    return user_cache_path("mlx-blockpool", appauthor=False)


def check_usable(root: Path) -> None:
    """Raises StoreError if the store's folder cannot be made or no files can be made in it. A full
    disk is accepted.

    Makes nothing that stays.
    """
    for folder in (root, root / "models"):
        existing = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
        try:
            fd, name = tempfile.mkstemp(prefix=TEMPORARY, dir=existing)
            os.close(fd)
            os.unlink(name)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                why = f"no file can be made in {existing} ({error.strerror})"
                advice = (
                    "Give another folder with --store-dir DIR, or serve without a store: --no-store"
                )
                raise StoreError(f"The store cannot use {root}: {why}. {advice}.") from error


def folder_of(namespace: str) -> str:
    return f"models/{namespace}"


def name_of(namespace: str, key: Key) -> str:
    """The path of a record below the store's folder."""
    text = key.hash.hex()
    return f"{folder_of(namespace)}/{FOLDERS[key.kind]}/{text[:2]}/{text}{SUFFIX}"


def key_of(name: str) -> Key | None:
    """The inverse of name_of(); None if the name is not that of a record."""
    _, _, folder, _, file = name.split("/")
    try:
        return Key(KINDS[folder], bytes.fromhex(file.removesuffix(SUFFIX)))
    except ValueError:
        return None


def keys_in(namespace: str, names: Iterable[str]) -> list[Key]:
    """The keys of those names that are records under a namespace."""
    own = folder_of(namespace) + "/"
    keys = [key_of(name) for name in names if name.startswith(own)]
    return [key for key in keys if key is not None]


def describe(disk: Disk, root: Path, namespace: str, about: dict[str, Any]) -> None:
    """Make the folder of a namespace, and write `about` into its model.json. Raises OSError."""
    path = root / folder_of(namespace) / MODEL_FILE
    disk.make_directory(path.parent)
    text = json.dumps(about, indent=2).encode()
    try:
        found: bytes | None = disk.read(path, 0, len(text) + 1)
    except (OSError, BadRecordError):
        found = None
    if found != text:
        write_whole(disk, path, [text])


def described(disk: Disk, root: Path, namespace: str) -> dict[str, Any] | None:
    """The `about` that describe() wrote; None if nothing can be read."""
    try:
        text = disk.read(root / folder_of(namespace) / MODEL_FILE, 0, MAX_MODEL_FILE_BYTES + 1)
        found = json.loads(text.decode("utf-8")) if len(text) <= MAX_MODEL_FILE_BYTES else None
    except (BadRecordError, OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
