"""The events of a server beside those of blocks, and all of them as JSON: what each reader may see of them.

A reader sees requests as `/v1/cache/explain` shows them: with named keys those of its own key, without names the requests of all,
of which those that named no agent have neither their id nor a name that is derived from the chat. Tokens are only counted.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any, NamedTuple, get_args

from ...hashing import TOKEN_BYTES
from ...prefix.changes import AllCleared, BlocksRemoved, BlocksStored
from ...prefix.salts import mark_of, salt_marked
from ..access import own_name
from ..request import RequestOptions


class Who(NamedTuple):
    """Whose request it is, as its events show it. `owner`: the name of its key; None: keys have no names."""

    id: str
    agent: str | None
    owner: str | None


class RequestBegun(NamedTuple):
    who: Who
    prompt_tokens: int


class RequestStarted(NamedTuple):
    who: Who
    cached_tokens: int


class RequestProgress(NamedTuple):
    """`done` of the `total` tokens of its prompt are computed."""

    who: Who
    done: int
    total: int


class RequestEnded(NamedTuple):
    """`forced_tokens`: of the generated ones, those that its form forced. `ttft`: seconds to the first token, None if there was
    none; `seconds`: in all.
    """

    who: Who
    reason: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    forced_tokens: int
    ttft: float | None
    seconds: float


class RestoreBegun(NamedTuple):
    who: Who
    tokens: int
    bytes: int


class RestoreEnded(NamedTuple):
    who: Who
    tokens: int
    bytes: int


class SwappedOut(NamedTuple):
    who: Who


class SwappedIn(NamedTuple):
    who: Who


class ModelLoading(NamedTuple):
    pass


class ModelLoaded(NamedTuple):
    pass


class ModelUnloaded(NamedTuple):
    pass


Happening = (
    BlocksStored | BlocksRemoved | AllCleared
    | RequestBegun | RequestStarted | RequestProgress | RequestEnded
    | RestoreBegun | RestoreEnded | SwappedOut | SwappedIn
    | ModelLoading | ModelLoaded | ModelUnloaded
)  # fmt: skip

# Their names for clients, such as blocks_stored.
KINDS = {kind: re.sub("(?<=[a-z])(?=[A-Z])", "_", kind.__name__).lower() for kind in get_args(Happening)}


def who_of(options: RequestOptions) -> Who:
    """A request as its events show it."""
    if options.owner is not None:
        # Only the owner sees it.
        return Who(options.id, None if options.name is None else own_name(options.name), options.owner)
    if options.agent is not None:
        return Who(options.id, options.agent, None)
    # The id of a request without an agent gives access to its text, which its sender alone may have.
    return Who(f"anonymous_{hashlib.blake2b(options.id.encode(), digest_size=12).hexdigest()}", None, None)


class Sight(NamedTuple):
    """The view of a reader. `is_private`: names share no prefixes, so that each sees the blocks of its own alone."""

    owner: str | None = None
    is_private: bool = False

    def data(self, what: Happening) -> dict[str, Any] | None:
        """The fields of an event; None for one that the reader may not see."""
        if isinstance(what, BlocksStored | BlocksRemoved):
            return blocks_of(what) if self.sees(what.salt) else None
        fields = what._asdict()
        who: Who | None = fields.pop("who", None)
        if who is None:
            return fields
        if who.owner != self.owner:
            return None
        return {"id": who.id, **({"agent": who.agent} if isinstance(what, RequestBegun) else {}), **fields}

    def sees(self, salt: bytes) -> bool:
        """Return whether the reader may see blocks under a salt."""
        return not self.is_private or (self.owner is not None and salt == salt_marked(mark_of(salt), self.owner))


def packet(number: int, kind: str, data: dict[str, Any], model: str | None, seconds: float) -> bytes:
    """Format an event as text/event-stream."""
    body = json.dumps({"kind": kind, "time": round(seconds, 3), "model": model, **data})
    return f"event: {kind}\nid: {number}\ndata: {body}\n\n".encode()


def blocks_of(what: BlocksStored | BlocksRemoved) -> dict[str, Any]:
    """The fields of an event of blocks."""
    hashes = [digest.hex() for digest in what.hashes]
    if isinstance(what, BlocksRemoved):
        return {"hashes": hashes, "tier": what.tier}
    return {
        "hashes": hashes,
        "parent": None if what.parent is None else what.parent.hex(),
        "tokens": sum(map(len, what.edges)) // TOKEN_BYTES,
        "blocks": [list(ids) for ids in what.blocks],
        "tier": what.tier,
    }
