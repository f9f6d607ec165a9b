"""One agent on disk: a name for a path of records, as JSON sealed by a hash of the rest. Knows names and hashes; no records.

Any thread may call anything here.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import BadRecordError
from ..spec import blocks_for
from .fs import Disk, safe_name
from .record import HASH_BYTES

SUFFIX = ".json"
FORMAT = "mlx-blockpool agent"
VERSION = 1

# Between the name of an owner and that of its agent, in the names of agents that have owners.
SEPARATOR = "\x1f"

_MAX_BYTES = 1 << 24
_MAX_NUMBER = 1 << 40
_SHOWN_CHARACTERS = 40


@dataclass(frozen=True)
class Agent:
    """A path and who goes on from its end.

    hashes         of the records of its path, from the first block on; the last one may be a partial block.
    tokens         that the path holds for this agent; the last record may have more.
    created, used  seconds since the epoch.
    pinned         the budget is to spare its records.
    salt           what its path is known under; empty: what all share.
    """

    name: str
    namespace: str
    model_id: str
    hashes: tuple[bytes, ...]
    tokens: int
    created: int
    used: int
    pinned: bool = False
    salt: bytes = b""

    @property
    def last_hash(self) -> bytes | None:
        return self.hashes[-1] if self.hashes else None


def read(disk: Disk, path: Path) -> Agent:
    """Raises BadRecordError for what is not as it was written, and OSError."""
    try:
        data = disk.read(path, 0, _MAX_BYTES + 1)
        return decode(data, path.name.removesuffix(SUFFIX))
    except BadRecordError as error:
        raise BadRecordError(f"{path}: {error}") from None


def encode(agent: Agent, becoming: str | None = None) -> bytes:
    """The one way to write an agent. `becoming`: the name it has once its file is called so."""
    fields = {
        "format": FORMAT,
        "version": VERSION,
        "name": agent.name,
        "becoming": becoming,
        "namespace": agent.namespace,
        "model_id": agent.model_id,
        "last_hash": None if agent.last_hash is None else agent.last_hash.hex(),
        "tokens": agent.tokens,
        "created": agent.created,
        "used": agent.used,
        "pinned": agent.pinned,
        "hashes": [digest.hex() for digest in agent.hashes],
    } | ({"salt": agent.salt.hex()} if agent.salt else {})
    seal = hashlib.blake2b(_text(fields), digest_size=HASH_BYTES).hexdigest()
    return _text(fields | {"seal": seal})


def _text(fields: dict[str, Any]) -> bytes:
    # Any str comes back as it was, even one that is no Unicode text: JSON's own escapes would join two surrogates.
    return (json.dumps(fields, indent=2, ensure_ascii=False) + "\n").encode("utf-8", "surrogatepass")


def decode(data: bytes, stem: str) -> Agent:
    """The agent whose file is called `stem`. Raises BadRecordError unless each byte is as it was written."""
    try:
        fields = json.loads(data.decode("utf-8", "surrogatepass"))
        agent, becoming = _parse(fields), fields["becoming"]
        if encode(agent, becoming) != data:
            raise BadRecordError("Agent: found a file that was changed; needed the one that its seal was made for.")
        names = [name for name in (agent.name, becoming) if name is not None and safe_name(name) == stem]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadRecordError(f"Agent: found {type(error).__name__} ({error}); needed the file of one.") from None
    if not names:
        raise BadRecordError(f"Agent: found a file called {stem}; needed {safe_name(agent.name)}, as its name demands.")
    return replace(agent, name=names[0])


def _parse(fields: dict[str, Any]) -> Agent:
    """Raises BadRecordError, ValueError, KeyError, TypeError or AttributeError."""
    found = (fields["format"], fields["version"])
    if found != (FORMAT, VERSION):
        raise BadRecordError(f"Agent: found format {str(found)[:_SHOWN_CHARACTERS]}; needed {(FORMAT, VERSION)}.")
    agent = Agent(
        name=fields["name"],
        namespace=fields["namespace"],
        model_id=fields["model_id"],
        hashes=tuple(map(bytes.fromhex, fields["hashes"])),
        tokens=fields["tokens"],
        created=fields["created"],
        used=fields["used"],
        pinned=fields["pinned"],
        salt=bytes.fromhex(fields.get("salt", "")),
    )
    texts = (agent.name, agent.namespace, agent.model_id, fields["becoming"] or "")
    numbers = (agent.tokens, agent.created, agent.used)
    digests = (*agent.hashes, *([agent.salt] if agent.salt else []))
    proper = all(type(text) is str for text in texts) and all(type(n) is int and 0 <= n < _MAX_NUMBER for n in numbers)
    if not (proper and type(agent.pinned) is bool and all(len(digest) == HASH_BYTES for digest in digests)):
        raise ValueError("a field of the wrong type or size")
    if len(agent.hashes) != blocks_for(agent.tokens):
        raise ValueError(f"{len(agent.hashes)} hashes for {agent.tokens} tokens")
    return agent


def shown(name: str) -> str:
    """A name as people can read and type it: itself, or what its file is called where it is long or not all printable."""
    if name.count(SEPARATOR) == 1:
        return "/".join(map(shown, name.split(SEPARATOR)))
    plain = name.isprintable() and name == name.strip() and 0 < len(name) <= _SHOWN_CHARACTERS
    return name if plain else safe_name(name)
