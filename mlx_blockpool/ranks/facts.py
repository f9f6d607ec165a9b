"""Facts: what changes the engines and caches of all ranks, which all apply in the same order; and facts as mail.

Every rank derives the rest from facts, heads and drawn tokens. Knows numbers, names and hashes; no arrays.
"""

from __future__ import annotations

import base64
import functools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias, get_args

import numpy as np
from pydantic import ConfigDict, PlainSerializer, PlainValidator, TypeAdapter, with_config

from ..errors import GroupError


def _encode(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _decode(text: Any) -> bytes:
    if not isinstance(text, str):
        raise ValueError("expected base64")
    return base64.b64decode(text, validate=True)


def _encode_tokens(tokens: Sequence[int]) -> str:
    return _encode(np.array(tokens, "<i4").tobytes())


def _decode_tokens(text: Any) -> tuple[int, ...]:
    return tuple(np.frombuffer(_decode(text), "<i4").tolist())


# JSON has no bytes, and takes milliseconds for 100,000 numbers, in which no other thread runs.
Bytes: TypeAlias = Annotated[bytes, PlainValidator(_decode), PlainSerializer(_encode)]
Tokens: TypeAlias = Annotated[tuple[int, ...], PlainValidator(_decode_tokens), PlainSerializer(_encode_tokens)]
# The kind and the hash of a record.
RecordKey: TypeAlias = tuple[str, Bytes]

_exact = with_config(ConfigDict(extra="forbid", strict=True))


@_exact
@dataclass(frozen=True)
class PathName:
    """A prefix of `tokens` tokens under `salt`, by the hash at the end of each of its blocks."""

    hashes: tuple[Bytes, ...]
    tokens: int
    salt: Bytes = b""


# -- requests ----------------------------------------------------------------------------------------------------------


@_exact
@dataclass(frozen=True)
class Insert:
    """A request is inserted as `uid`. `stop`: its stop sequences; `due`: a time of the group's clock; the rest as in Request."""

    uid: int
    tokens: Tokens
    max_tokens: int
    stop: tuple[tuple[int, ...], ...] = ()
    breakpoints: tuple[tuple[int, str], ...] = ()
    agent: str | None = None
    noted_as: str | None = None
    pins: tuple[tuple[int, float], ...] = ()
    retention: str | None = None
    group: str | None = None
    priority: int = 0
    salt: Bytes = b""
    due: float = 0.0


@_exact
@dataclass(frozen=True)
class Cancel:
    """A request ends: its client has gone, or its reply is complete for a reason that only rank 0 sees."""

    uid: int


@_exact
@dataclass(frozen=True)
class Fail:
    """A request ends with an error of rank 0's own, such as one of its sampler."""

    uid: int


@_exact
@dataclass(frozen=True)
class Append:
    """The form of a request forces these tokens, which are appended without a draw."""

    uid: int
    tokens: Tokens


# -- models ------------------------------------------------------------------------------------------------------------


@_exact
@dataclass(frozen=True)
class Load:
    """The model is loaded."""


@_exact
@dataclass(frozen=True)
class Unload:
    """The model is unloaded; its requests wait for Resume."""


@_exact
@dataclass(frozen=True)
class Resume:
    """The request that was suspended as `was` is taken in again, as `uid`."""

    uid: int
    was: int


# -- prefixes and records ----------------------------------------------------------------------------------------------


@_exact
@dataclass(frozen=True)
class Lost:
    """A rank has not, or no more, these records: all forget them. `again`: they may be written once more."""

    keys: tuple[RecordKey, ...]
    again: bool = False


@_exact
@dataclass(frozen=True)
class Pin:
    """A path stays in memory under a name until Unpin, in place of the path that had the name before."""

    name: str
    path: PathName


@_exact
@dataclass(frozen=True)
class Unpin:
    """The path that Pin has given this name may be evicted."""

    name: str


@_exact
@dataclass(frozen=True)
class Uncache:
    """The edges of a path leave the cache, from edge number `own` on."""

    path: PathName
    own: int


@_exact
@dataclass(frozen=True)
class BringBack:
    """What is on disk of a path is read into memory."""

    path: PathName


@_exact
@dataclass(frozen=True)
class Save:
    """All of a path that is not on disk is queued for writing."""

    path: PathName


@_exact
@dataclass(frozen=True)
class WriteOut:
    """What is queued for writing is written now, ends of conversations too."""


@_exact
@dataclass(frozen=True)
class Discard:
    """The files of these records, which no cached path needs, are removed."""

    keys: tuple[RecordKey, ...]


@_exact
@dataclass(frozen=True)
class Spare:
    """The disk's budget spares the records of these hashes too, and those of others no more."""

    hashes: tuple[Bytes, ...]
    no_more: tuple[Bytes, ...] = ()


@_exact
@dataclass(frozen=True)
class Gather:
    """What every rank holds of a path is to be read, under a number, until GatherEnd."""

    number: int
    path: PathName


@_exact
@dataclass(frozen=True)
class GatherPart:
    """Rank 0 gets one head of an array of every rank, or all of it."""

    number: int
    name: str
    head: int | None


@_exact
@dataclass(frozen=True)
class GatherEnd:
    """No more of a Gather is read."""

    number: int


Fact: TypeAlias = (
    Insert | Cancel | Fail | Append | Load | Unload | Resume | Lost
    | Pin | Unpin | Uncache | BringBack | Save | WriteOut | Discard | Spare
    | Gather | GatherPart | GatherEnd
)  # fmt: skip
# The key of the model that a fact is about, and the fact.
Addressed: TypeAlias = tuple[str, Fact]

_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in get_args(Fact)}


@functools.cache
def _adapter(kind: str) -> TypeAdapter[Any]:
    return TypeAdapter(_KINDS[kind])


def write(facts: Iterable[Addressed]) -> bytes:
    """Facts as mail; no facts are no mail."""
    named = ((model, type(fact).__name__, fact) for model, fact in facts)
    written = [(model, kind, _adapter(kind).dump_python(fact, mode="json")) for model, kind, fact in named]
    return json.dumps(written, separators=(",", ":")).encode() if written else b""


def read(mail: bytes) -> list[Addressed]:
    """The facts that write() made this mail of. Raises GroupError for anything else."""
    try:
        # Each again as JSON, in which a list may stand for a tuple.
        return [(model, _adapter(kind).validate_json(json.dumps(fields))) for model, kind, fields in _read_rows(mail)]
    except (ValueError, KeyError) as error:
        raise GroupError(f"Mail of a rank cannot be read. Run one version of mlx-blockpool on all ranks. ({error})") from error


def _read_rows(mail: bytes) -> list[tuple[str, str, Any]]:
    return TypeAdapter(list[tuple[str, str, Any]]).validate_json(mail, strict=True) if mail else []
