"""The identity of a model's weights, adapter and config, by their content, and the digests of files
that it is made of.

Two copies of a model in different folders have the same identity; a fine-tune of the same shape has
another.

The store's database remembers the digests of files by device, inode, size and both times. That is a
hint: without it files are hashed again, and only a process that can write to the folder can make it
lie. Knows files; no arrays. Any thread may call anything here.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from ..config import StoreConfig
from ..errors import StoreError
from ..model_files.check import WEIGHTS, open_regular, read_header
from .db import Database, keep_last, stamp_text

log = logging.getLogger(__name__)

MOST_FILES = 4096
# A file that was changed so lately may change again without a later time: its digest is not
# remembered.
SETTLED_SECONDS = 2.0
# A reader that is to stop looks after each piece of this many bytes.
PIECE_BYTES = 4 << 20
AGAIN = "Load the model again once its files are whole."

# Of each tensor that sample() reads.
SAMPLE_BYTES = 256
# Keys of a config that change no key or value: names, versions, and those that only generation or
# the tokenizer reads.
INSTANCE_KEYS = {
    "_name_or_path",
    "architectures",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "transformers_version",
    "use_cache",
}
ADAPTER_FILES = "adapters.safetensors"


# -- digests ---------------------------------------------------------------------------------------


class FileStamp(NamedTuple):
    """The same as long as nothing changes the file: any write and any change of its times sets
    `changed_ns`.
    """

    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int


class Digests:
    """Digests of files, remembered in the folder `root`, or in memory for None.

    `read_bytes` of files were read so far.
    """

    def __init__(self, root: Path | None) -> None:
        self.read_bytes = 0
        self._database = Database(root)
        self._stopped = threading.Event()
        self._counting = threading.Lock()

    def stop(self) -> None:
        """Make of() end soon, from any thread."""
        self._stopped.set()

    def of(self, paths: Sequence[Path], check: Callable[[Path], None]) -> list[bytes]:
        """The SHA-256 of each file; check() raises what is wrong with one that has to be read.

        Raises StoreError for a file that changes meanwhile, and after stop(); ValueError for one
        that is not regular; OSError; and the errors of check().
        """
        stamps = {path: stamp_of(os.stat(path)) for path in paths}
        remembered = self._load(stamps.values())
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
        self._remember(
            {stamp: digest for stamp, digest in found.items() if stamp.changed_ns < settled}
        )
        return found

    # -- hashing -----------------------------------------------------------------------------------

    def _hash_all(self, paths: list[Path]) -> dict[FileStamp, bytes]:
        """The largest files first, on several daemon threads: a disk that hangs does not keep
        the process from ending.
        """
        # Each thread takes the next file of this iterator.
        waiting = iter(sorted(paths, key=lambda path: -path.stat().st_size))
        found: dict[FileStamp, bytes] = {}
        errors: list[Exception] = []

        def work() -> None:
            try:
                for path in waiting:
                    if not errors:
                        stamp, digest = self._hash(path)
                        found[stamp] = digest
            except Exception as error:
                # The top of a thread: the thread that waits raises it.
                errors.append(error)

        threads = [
            threading.Thread(target=work, name="hash", daemon=True)
            for _ in paths[: StoreConfig.hash_threads]
        ]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        except KeyboardInterrupt:
            self.stop()
            raise
        if errors:
            raise errors[0]
        return found

    def _hash(self, path: Path) -> tuple[FileStamp, bytes]:
        """The digest of a file, and the stamp that it has before and after."""
        with open_regular(path) as file:
            before = stamp_of(os.fstat(file.fileno()))
            digest, piece = (
                hashlib.sha256(),
                memoryview(bytearray(min(PIECE_BYTES, before.size) or 1)),
            )
            while size := file.readinto(piece):
                if self._stopped.is_set():
                    raise StoreError(f"Hashing {path.name} was stopped before its end.")
                digest.update(piece[:size])
                with self._counting:
                    self.read_bytes += size
            if stamp_of(os.fstat(file.fileno())) != before:
                raise StoreError(f"{path.name} changed while it was read. {AGAIN}")
        return before, digest.digest()

    # -- remembering -------------------------------------------------------------------------------

    def _load(self, stamps: Iterable[FileStamp]) -> dict[FileStamp, bytes]:
        """The remembered digests of files with these stamps."""
        found = {}
        try:
            for stamp in stamps:
                for (digest,) in self._database.rows(
                    "SELECT digest FROM weights WHERE stamp = ? AND length(digest) = 32",
                    stamp_text(stamp),
                ):
                    found[stamp] = digest
        except OSError as error:
            log.info("prompt store: remembered digests of weights cannot be read: %s", error)
        return found

    def _remember(self, new: dict[FileStamp, bytes]) -> None:
        """A disk that fails costs the time to hash again."""
        if not new:
            return
        rows = [(stamp_text(stamp), digest) for stamp, digest in new.items()]
        try:
            with self._database.transaction() as connection:
                connection.executemany("INSERT OR REPLACE INTO weights VALUES (?, ?)", rows)
                keep_last(connection, "weights", MOST_FILES)
        except OSError as error:
            log.info("prompt store: digests of weights are not remembered: %s", error)


def stamp_of(found: os.stat_result) -> FileStamp:
    return FileStamp(
        found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
    )


# -- identity --------------------------------------------------------------------------------------

# The stamps of files, by their paths.
Stamps: TypeAlias = dict[Path, FileStamp]


def identity(model: Path, adapter: Path | None = None, digests: Digests | None = None) -> str:
    """A name of the weights in a model folder and an adapter folder: of every byte of their files,
    and of config.json.

    Reads all files but those with remembered digests. Raises StoreError for a folder without
    weights or with files that cannot be read, and once `digests` are stopped.
    """
    digests = digests or Digests(None)
    name = hashlib.blake2b(digest_size=32)
    for pattern, folder, files in _files(model, adapter):
        with _named(folder):
            name.update(pattern.encode() + _config(folder))
            for digest in digests.of(files, _check_tensors):
                name.update(digest)
    return name.hexdigest()


def check_weights(model: Path, adapter: Path | None = None) -> None:
    """Check configs and headers alone: some kilobytes a file.

    Raises StoreError as identity() does.
    """
    for _, folder, files in _files(model, adapter):
        with _named(folder):
            _config(folder)
            for path in files:
                _check_tensors(path)


def sample(model: Path) -> bytes:
    """A digest of where each tensor of the weights is and how it begins: the same for one model on
    all machines.

    Reads a thousandth of the files or less. Raises OSError, ValueError, KeyError, TypeError or
    RecursionError for other files.
    """
    found = hashlib.blake2b()
    for path in sorted(model.glob(WEIGHTS)):
        header = read_header(path)
        found.update(f"{path.name} {json.dumps(header.tensors, sort_keys=True)}".encode())
        with open_regular(path) as file:
            for begin in sorted(
                header.start + about["data_offsets"][0] for about in header.tensors.values()
            ):
                file.seek(begin)
                found.update(file.read(SAMPLE_BYTES))
    return found.digest()


def stamps_of(model: Path, adapter: Path | None = None) -> Stamps:
    """The stamps of the files of the weights. Raises OSError."""
    files = [*model.glob(WEIGHTS), *([] if adapter is None else adapter.glob(ADAPTER_FILES))]
    return {path: stamp_of(os.stat(path)) for path in files}


def check_unchanged(model: Path, adapter: Path | None, stamps: Stamps) -> None:
    """Raises StoreError unless the files are still those that had these stamps."""
    try:
        now = stamps_of(model, adapter)
    except OSError:
        now = {}
    if now != stamps:
        raise StoreError(
            f"The weights in {model} changed after they were loaded. Load the model again."
        )


def namespace(weights: str, *parts: str) -> str:
    """The name under which records of these weights are kept; `parts` say how keys and values
    look (spec, dtype, bits).
    """
    return hashlib.blake2b("\n".join((weights, *parts)).encode(), digest_size=16).hexdigest()


def _config(folder: Path) -> bytes:
    """config.json and adapter_config.json, without INSTANCE_KEYS."""
    config: dict[str, Any] = {}
    for name in ("config.json", "adapter_config.json"):
        path = folder / name
        if path.exists():
            config[name] = {
                k: v for k, v in json.loads(path.read_text()).items() if k not in INSTANCE_KEYS
            }
    return json.dumps(config, sort_keys=True).encode()


def _files(model: Path, adapter: Path | None) -> Iterator[tuple[str, Path, list[Path]]]:
    """The files that mlx-lm loads of each folder; a training leaves others next to them.

    Raises StoreError if there are none.
    """
    for pattern, folder in ((WEIGHTS, model), (ADAPTER_FILES, adapter)):
        if folder is None:
            continue
        files = sorted(folder.glob(pattern))
        if not files:
            raise StoreError(
                f"{folder} has no {pattern}, and keys and values of unknown weights are not stored."
            )
        yield pattern, folder, files


@contextmanager
def _named(folder: Path) -> Iterator[None]:
    """Raise errors of a folder's files as a StoreError that names the folder."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        found = f"{type(error).__name__} ({error})"
        raise StoreError(
            f"{folder} is not a model that mlx-lm loads: {found} in its config.json or "
            "safetensors files."
        ) from error


def _check_tensors(path: Path) -> None:
    """Raises StoreError for a file without a safetensors header, or with fewer bytes than its
    tensors take.
    """
    header = read_header(path)
    for name, tensor in header.tensors.items():
        _, end = tensor["data_offsets"]
        if header.start + end > header.size:
            raise StoreError(
                f"{path.name} is cut off: {name} would end at byte {header.start + end} of "
                f"{header.size}."
            )
