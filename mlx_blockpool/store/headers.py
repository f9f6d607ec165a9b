"""Notes of the headers of records, so that a start need not read each file: hints, never the truth.

    models/<namespace>/headers      MAGIC, then frames: length, CRC-32, and a note

A note counts for a file of the same size, time of modification and inode, and only if its parent and tokens make the hash in the
file's name; other headers are read from the files. Frames are appended. A frame that a crash or anything else has damaged ends
the reading, costs the time to read files again, and is written over.

Any thread may call load(); the rest is for one, the store's writer once the store is open.
"""

from __future__ import annotations

import json
import logging
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path

from ..errors import BadRecordError
from ..hashing import prefix_hash
from ..spec import BLOCK_TOKENS
from .fs import Disk, Stamp, write_whole
from .paths import HEADERS_FILE, folder_of, key_of, name_of
from .record import BLOCK, STATE, WINDOW, Key, Record

log = logging.getLogger(__name__)

MAGIC = b"mlx-blockpool headers 1\n"
# A file with more bytes than this for each record is not read.
MOST_BYTES = 4096
SMALL_BYTES = 1 << 20
# Notes that are written together.
TOGETHER = 64

_FRAME = struct.Struct("<II")
_HEADER, _TOUCHED, _GONE = 1, 2, 3
_KINDS = (BLOCK, WINDOW, STATE)
# What it is, the kind of record and its hash; then size, time and inode.
_KEY = struct.Struct("<BB32s")
_STAMP = struct.Struct("<QqQ")
# Bytes of a token, tokens, bytes of the extra; start, parent.
_FACTS = struct.Struct("<BHHQ32s")
_FACTS_AT = _KEY.size + _STAMP.size
_REST_AT = _FACTS_AT + _FACTS.size


class Headers:
    """The notes of the records under `namespace`."""

    def __init__(self, disk: Disk, root: Path, namespace: str) -> None:
        self.path = root / folder_of(namespace) / HEADERS_FILE
        self._disk = disk
        self._namespace = namespace
        self._new: list[bytes] = []
        # Bytes of the file when it was written as a whole, and those appended since; None: it has to be written again.
        self._whole: int | None = None
        self._behind = 0

    # -- reading -------------------------------------------------------------------------------------------------------

    @property
    def is_whole(self) -> bool:
        """True if new notes can be appended to those that were loaded; if not, everything has to be noted again."""
        return self._whole is not None

    def load(self, files: Mapping[str, Stamp]) -> dict[str, Record]:
        """The noted headers of these files, by their names. A noted record has no parts."""
        notes, size = self._read(MOST_BYTES * len(files) + SMALL_BYTES)
        found: dict[str, Record] = {}
        for name, stamp in files.items():
            key = key_of(name)
            note = None if key is None else notes.get(key)
            record = None if key is None or note is None else self._record(key, note, stamp)
            if record is not None and name == name_of(self._namespace, record.key):
                found[name] = record
        # A file that is mostly of notes without a record is written again.
        self._whole = size if 2 * len(found) >= len(notes) else None
        self._behind = 0
        return found

    def _read(self, most: int) -> tuple[dict[Key, bytes], int | None]:
        """The last note of each record, and the bytes of the file; None: not all of it could be read."""
        try:
            data = self._disk.read(self.path, 0, most + 1)
        except (OSError, BadRecordError):
            return {}, None
        if len(data) > most or not data.startswith(MAGIC):
            return {}, None
        notes: dict[Key, bytes] = {}
        end = len(MAGIC)
        for note in _frames(data):
            end += _FRAME.size + len(note)
            act, kind, digest = _KEY.unpack_from(note) if len(note) >= _KEY.size else (0, 0, b"")
            if act not in (_HEADER, _TOUCHED, _GONE) or kind >= len(_KINDS):
                return notes, None
            key = Key(_KINDS[kind], digest)
            before = notes.pop(key, None)
            if act == _HEADER:
                notes[key] = note
            elif act == _TOUCHED and before is not None:
                notes[key] = before[: _KEY.size] + note[_KEY.size : _FACTS_AT] + before[_FACTS_AT:]
        return notes, len(data) if end == len(data) else None

    def _record(self, key: Key, note: bytes, stamp: Stamp) -> Record | None:
        """None if the note is of another file, or damaged."""
        try:
            width, count, n_extra, start, parent = _FACTS.unpack_from(note, _FACTS_AT)
            if _STAMP.unpack_from(note, _KEY.size) != stamp or count > BLOCK_TOKENS or width not in (4, 8):
                return None
            tokens = struct.unpack_from(f"<{count}{'I' if width == 4 else 'q'}", note, _REST_AT + n_extra)
            extra = dict(_extra(note[_REST_AT : _REST_AT + n_extra]))
        except (struct.error, ValueError, RecursionError):
            return None
        if len(note) != _REST_AT + n_extra + width * count or prefix_hash(parent, tokens) != key.hash:
            return None
        return Record(key.kind, self._namespace, key.hash, parent, start, tokens, (), extra)

    # -- writing -------------------------------------------------------------------------------------------------------

    def add(self, record: Record, stamp: Stamp) -> None:
        """Note the header of a file."""
        fits = all(0 <= token < 1 << 32 for token in record.tokens)
        extra = json.dumps(dict(record.extra), sort_keys=True).encode("ascii")
        if len(extra) < 1 << 16:
            width = 4 if fits else 8
            facts = _FACTS.pack(width, len(record.tokens), len(extra), record.start, record.parent)
            tokens = struct.pack(f"<{len(record.tokens)}{'I' if fits else 'q'}", *record.tokens)
            self._new.append(_key(_HEADER, record.key) + _STAMP.pack(*stamp) + facts + extra + tokens)

    def touch(self, name: str, stamp: Stamp) -> None:
        """Note another time of a file."""
        key = self._own(name)
        if key is not None:
            self._new.append(_key(_TOUCHED, key) + _STAMP.pack(*stamp))

    def remove(self, name: str) -> None:
        """Note that a file was removed."""
        key = self._own(name)
        if key is not None:
            self._new.append(_key(_GONE, key))

    def _own(self, name: str) -> Key | None:
        return key_of(name) if name.startswith(folder_of(self._namespace) + "/") else None

    def write(self, at_once: bool = True) -> None:
        """Write new notes, unless they are few and need not be written `at_once`. A disk that fails costs the notes alone."""
        if not self._new or (not at_once and len(self._new) < TOGETHER):
            return
        new, self._new = self._new, []
        try:
            if self._whole is None or self._behind > max(self._whole, SMALL_BYTES):
                self._write_whole(new)
            else:
                data = b"".join(map(_framed, new))
                self._disk.append(self.path, data)
                self._behind += len(data)
        except (OSError, BadRecordError) as error:
            self._whole = None
            log.info("prompt store: headers are not noted: %s", error)

    def _write_whole(self, new: Iterable[bytes]) -> None:
        """Write the last note of each record in the file, and the new ones."""
        size = self._disk.size(self.path) if self._whole is not None else 0
        notes = dict(self._read(size)[0]) if self._whole is not None else {}
        buffers = [MAGIC, *(_framed(note) for note in [*notes.values(), *new])]
        write_whole(self._disk, self.path, buffers)
        self._whole, self._behind = sum(map(len, buffers)), 0


def _key(act: int, key: Key) -> bytes:
    return _KEY.pack(act, _KINDS.index(key.kind), key.hash)


def _framed(note: bytes) -> bytes:
    return _FRAME.pack(len(note), zlib.crc32(note)) + note


def _frames(data: bytes) -> Iterator[bytes]:
    """The notes of a file, up to the first frame that is not whole."""
    at = len(MAGIC)
    while at + _FRAME.size <= len(data):
        length, checksum = _FRAME.unpack_from(data, at)
        note = data[at + _FRAME.size : at + _FRAME.size + length]
        if len(note) != length or zlib.crc32(note) != checksum:
            return
        yield note
        at += _FRAME.size + length


@lru_cache(maxsize=256)
def _extra(text: bytes) -> tuple[tuple[str, str], ...]:
    """Raises ValueError."""
    found = json.loads(text.decode("ascii"))
    if not isinstance(found, dict) or not all(type(value) is str for value in found.values()):
        raise ValueError("no texts by name")
    return tuple(found.items())
