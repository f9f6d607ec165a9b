"""Looks at the store's folder: what there is at start, and later what other processes changed. Knows headers; no budget.

Looks are taken in the writer's thread, in the order of its jobs; what was handed to it after that is not in them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from .folder import Folder, Found
from .fs import Stamp
from .headers import Headers
from .paths import folder_of, key_of
from .reader import Header, Reader
from .record import Key, Record


@dataclass
class Seen:
    """What others have done.

    found:    files that they wrote or used, the one used longest ago first; gone: names that are no more.
    records:  what new files of our own model say of themselves; unread: those of them that cannot be read at present.
    """

    found: list[Found]
    gone: list[str]
    records: list[Record] = field(default_factory=list)
    unread: list[Key] = field(default_factory=list)


@dataclass(frozen=True)
class News:
    """The same for whoever knows the records of our model: new ones, and keys of those that are not there any more."""

    found: list[Record]
    lost: list[Key]


class Looks:
    """Looks at `folder` for the records under `namespace`. `describe` writes down what they belong to, or raises OSError."""

    def __init__(self, folder: Folder, reader: Reader, headers: Headers, namespace: str, describe: Callable[[], None]) -> None:
        self._folder = folder
        self._headers = headers
        self._unnoted: list[tuple[Record, Stamp]] = []
        self._reader = reader
        self._describe = describe
        self._own = folder_of(namespace) + "/"
        self._namespace = namespace

    def first(self) -> Seen:
        """All that there is; headers that are not noted are read, several at a time. Raises OSError where nothing can be seen."""
        return self._seen(self._noted_or_read)

    def _noted_or_read(self, names: list[str]) -> list[Header]:
        stamps = {name: stamp for name in names if (stamp := self._folder.stamp_of(name)) is not None}
        found = {name: Header(record) for name, record in self._headers.load(stamps).items()}
        noted = set(found) if self._headers.is_whole else set()
        missing = [name for name in names if name not in found]
        found |= zip(missing, self._reader.headers(self._namespace, missing), strict=True)
        self._unnoted = [(r, stamps[name]) for name in stamps if name not in noted and (r := found[name].record) is not None]
        return [found[name] for name in names]

    def note(self) -> None:
        """Note what the first look had to read, for the next start."""
        for record, stamp in self._unnoted:
            self._headers.add(record, stamp)
        self._unnoted = []
        self._headers.write()

    def use(self, names: Sequence[str]) -> None:
        """These were used just now, the last of them last: so that others know, and the next start."""
        self._folder.touch(names)
        for name in names:
            stamp = self._folder.stamp_of(name)
            if stamp is not None:
                self._headers.touch(name, stamp)
        self._headers.write()

    def again(self, used: Sequence[str]) -> Seen:
        """What has changed since. `used`: what was used here meanwhile, the last of them last, so that others know."""
        self.use(used)
        with suppress(OSError):
            self._describe()
        return self._seen(lambda names: [self._reader.header(self._namespace, name) for name in names])

    def _seen(self, read: Callable[[list[str]], list[Header]]) -> Seen:
        changes = self._folder.look()
        seen = Seen(changes.found, changes.gone)
        new = [found.name for found in changes.found if found.is_new and found.name.startswith(self._own)]
        bad = set()
        for name, header in zip(new, read(new), strict=True):
            key = key_of(name)
            if not header.is_there:
                # No record, or gone again; it may have been one before.
                bad.add(name)
                self._folder.forget(name)
                seen.gone.append(name)
            elif header.record is not None:
                seen.records.append(header.record)
            elif key is not None:
                seen.unread.append(key)
        seen.found = [found for found in changes.found if found.name not in bad]
        return seen


class Watch:
    """When it is time to look again, and which names have changed hands since the last look was asked for. Asked by the
    generation thread.

    A look is due once `look_bytes` were handed to the writer since, or `seconds` after anything was written or used. No more
    than `look_bytes` are handed over while one is under way.
    """

    def __init__(self, look_bytes: int, seconds: float) -> None:
        self.look_bytes = look_bytes
        self.seconds = seconds
        self.is_looking = False
        self.names: set[str] = set()
        self._handed = 0
        self._asked_at = time.monotonic()

    def hand(self, name: str, size: int) -> None:
        self.names.add(name)
        self._handed += size

    def allows(self, size: int) -> bool:
        return not self.is_looking or not self._handed or self._handed + size <= self.look_bytes

    def is_due(self, has_news: bool, at_once: bool) -> bool:
        """`has_news`: there is something to tell the others; `at_once`: nothing was seen yet."""
        waited = time.monotonic() - self._asked_at >= self.seconds
        wrote = 0 < self._handed >= self.look_bytes
        return not self.is_looking and (at_once or wrote or (waited and (has_news or self._handed > 0)))

    def ask(self) -> None:
        self.is_looking, self._handed, self._asked_at = True, 0, time.monotonic()
        self.names = set()

    def sift(self, seen: Seen) -> Seen:
        """What was seen, without what changed hands since."""
        found = [found for found in seen.found if found.name not in self.names]
        return replace(seen, found=found, gone=[name for name in seen.gone if name not in self.names])
