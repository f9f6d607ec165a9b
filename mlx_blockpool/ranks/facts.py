"""Facts: what changes the engines and caches of all ranks. All apply the same facts in the same
order.

Every rank derives the rest from facts, heads and drawn tokens. Knows numbers, names and hashes; no
arrays.
"""

from __future__ import annotations

import marshal
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias, get_args

from ..errors import GroupError

# The kind and the hash of a record.
RecordKey: TypeAlias = tuple[str, bytes]
# A prefix: the hash at the end of each of its blocks, its tokens, and its salt.
PathName: TypeAlias = tuple[tuple[bytes, ...], int, bytes]

# -- requests --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Insert:
    """A request is inserted as `uid`.

    `stop`: its stop sequences; `due`: as in Sequence; the rest as in Request.
    """

    uid: int
    tokens: tuple[int, ...]
    max_tokens: int
    stop: tuple[tuple[int, ...], ...] = ()
    breakpoints: tuple[tuple[int, str], ...] = ()
    agent: str | None = None
    noted_as: str | None = None
    pins: tuple[tuple[int, float], ...] = ()
    retention: str | None = None
    group: str | None = None
    priority: int = 0
    salt: bytes = b""
    due: float = 0.0


@dataclass(frozen=True)
class Cancel:
    """A request ends: its client has gone, or its reply is complete for a reason that only rank
    0 sees.
    """

    uid: int


@dataclass(frozen=True)
class Fail:
    """A request ends with an error of rank 0's own, such as one of its sampler."""

    uid: int


@dataclass(frozen=True)
class Append:
    """The form of a request forces these tokens, which are appended without a draw."""

    uid: int
    tokens: tuple[int, ...]


# -- models ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Load:
    """The model is loaded."""


@dataclass(frozen=True)
class Unload:
    """The model is unloaded; its requests wait for Resume."""


@dataclass(frozen=True)
class Resume:
    """The request that was suspended as `was` continues, as `uid`."""

    uid: int
    was: int


# -- prefixes and records --------------------------------------------------------------------------


@dataclass(frozen=True)
class Lost:
    """A rank lacks these records: all forget them. `again`: they may be written once more."""

    keys: tuple[RecordKey, ...]
    again: bool = False


@dataclass(frozen=True)
class PinPath:
    """A path stays in memory under a name until UnpinPath, in place of the path that had the
    name before.
    """

    name: str
    path: PathName


@dataclass(frozen=True)
class UnpinPath:
    """The path that PinPath has given this name may be evicted."""

    name: str


@dataclass(frozen=True)
class Uncache:
    """The edges of a path leave the cache, from edge number `own` on."""

    path: PathName
    own: int


@dataclass(frozen=True)
class BringBack:
    """What is on disk of a path is read into memory."""

    path: PathName


@dataclass(frozen=True)
class Save:
    """All of a path that is not on disk is queued for writing."""

    path: PathName


@dataclass(frozen=True)
class WriteOut:
    """What is queued for writing is written now, ends of conversations too."""


@dataclass(frozen=True)
class Discard:
    """The files of these records, which no cached path needs, are removed."""

    keys: tuple[RecordKey, ...]


@dataclass(frozen=True)
class Spare:
    """The disk's budget spares the records of these hashes too, and no longer those of
    `no_more`.
    """

    hashes: tuple[bytes, ...]
    no_more: tuple[bytes, ...] = ()


Fact: TypeAlias = (
    Insert | Cancel | Fail | Append | Load | Unload | Resume | Lost
    | PinPath | UnpinPath | Uncache | BringBack | Save | WriteOut | Discard | Spare
)  # fmt: skip
# The key of the model that a fact is about, and the fact.
Addressed: TypeAlias = tuple[str, Fact]

_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in get_args(Fact)}


# Without references to equal objects, which take longer to write than they save.
_MARSHAL_VERSION = 2


def write(facts: Iterable[Addressed]) -> bytes:
    """Facts as bytes; empty without facts.

    marshal writes 100,000 tokens in a millisecond, in which no other thread runs. It reads plain
    values alone and runs no code.
    """
    rows = [(model, type(fact).__name__, tuple(vars(fact).values())) for model, fact in facts]
    return marshal.dumps(rows, _MARSHAL_VERSION) if rows else b""


def read(mail: bytes) -> list[Addressed]:
    """The facts that write() made this mail of. Raises GroupError for anything else."""
    try:
        return (
            [(model, _KINDS[kind](*fields)) for model, kind, fields in marshal.loads(mail)]
            if mail
            else []
        )
    except (ValueError, TypeError, KeyError, EOFError) as error:
        raise GroupError(
            "Mail of a rank cannot be read. Run one version of mlx-blockpool on all ranks. "
            f"({error})"
        ) from error
