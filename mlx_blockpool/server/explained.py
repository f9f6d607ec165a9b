"""Explains how each request has used the cache, and why not more of its prompt was cached.

An Explained is written by one thread at a time: the socket's, then the generation thread, then the socket's again. Its fields are
replaced as a whole, so that any thread may read it.

Text of a prompt is shown to its own client only. Cached text is shown to the agent whose last turn it was, or under a salt of the
client's own. Figures of a request are shown to every client with the same rights. The log belongs to the operator and has both.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import islice
from typing import Any

from ..messages import Message
from ..prefix.lookup import CAUSES, Lookup
from ..prefix.salts import SHARED
from ..store.agent_files import Agent
from .access import shown
from .divergence import Difference, cut_reply, difference, names_replay, sampled_from
from .normalise import LAST, Normalisers, RememberedReply

log = logging.getLogger(__name__)

PATH = "/v1/cache/explain"
MOST = 1000
LISTED = 20
# Of a header, in characters: some clients take no more than 8 KB of all of them.
LONGEST_HEADER = 1500
# Beside what a lookup says.
WORDS = CAUSES | {
    "other namespace": "the agent's last turn was computed by another model, or with another adapter or cache format",
    "not told": "mlx-lm's own caches are used, which do not say why not more is cached",
}


@dataclass(frozen=True)
class Explanation:
    """`state`: waiting, restoring, started or failed. `cause`: a key of WORDS. Tokens are None as long as they are not known.

    known_tokens:     of the prompt are in memory, whether they could be resumed from or not.
    cached_tokens:    need not be computed; restored_tokens of them were brought back from disk for this request.
    elsewhere:        what the agent did last, if its keys and values are of no use here.
    is_named:         the client has given the agent's name; else it was made of what the chat says.
    normalised:       the normalisers that have changed what the model sees.
    owner:            the name of the key that it has shown; None: keys have no names.
    """

    id: str
    time: float
    path: str
    model: str
    agent: str | None
    state: str = "waiting"
    prompt_tokens: int | None = None
    known_tokens: int | None = None
    cached_tokens: int | None = None
    restored_tokens: int = 0
    cause: str | None = None
    difference: Difference | None = None
    elsewhere: str | None = None
    error: str | None = None
    is_named: bool = False
    normalised: tuple[str, ...] = ()
    owner: str | None = None

    @property
    def why(self) -> str:
        """In one sentence."""
        if self.prompt_tokens is None:
            return "it waits to start" if self.error is None else f"refused: {self.error}"
        cached = f"{self.cached_tokens:,} of {self.prompt_tokens:,} tokens"
        if self.state == "restoring":
            return f"{cached} are being restored from disk"
        restored = f" ({self.restored_tokens:,} of them restored from disk)" if self.restored_tokens else ""
        failed = "" if self.error is None else f"; it failed: {self.error}"
        return f"{cached} cached{restored}{self._reason()}{failed}"

    def _reason(self) -> str:
        if self.elsewhere is not None:
            return f": {self.elsewhere}"
        found = self.difference
        reason = "" if found is not None and self.cause == "differs" else f": {WORDS[str(self.cause)]}"
        if found is None:
            return reason
        keep = f": that line changes; --normalise {found.normaliser} would keep it" if found.normaliser else ""
        if found.normaliser == LAST:
            keep = f": an earlier reply is written in other tokens; --normalise {LAST} would put it back as it was sampled"
        if found.line == found.known_line:
            return f"{reason}; at token {found.position:,} the same text is other tokens than before{keep}"
        if not found.line:
            return f"{reason}; at token {found.position:,} it has other text than was known before{keep}"
        known = "other text" if found.known_line is None else f'"{found.known_line}"'
        lines = f'the prompt has "{found.line}" where {known} was known before'
        tools = "; the model's template has the tools behind it, which are computed again with it" if found.moves_tools else ""
        return f"{reason}; at token {found.position:,} {lines}{keep}{tools}"

    def as_dict(self) -> dict[str, Any]:
        """All of it, for a client."""
        found = self.difference
        return {
            "id": self.id or None,
            "time": datetime.fromtimestamp(self.time, UTC).isoformat(timespec="milliseconds"),
            "path": self.path,
            "model": self.model,
            "agent": self.agent,
            "state": self.state,
            "prompt_tokens": self.prompt_tokens,
            "known_tokens": self.known_tokens,
            "cached_tokens": self.cached_tokens,
            "restored_tokens": self.restored_tokens,
            "cause": self.cause,
            "cause_words": None if self.cause is None else WORDS[self.cause],
            "why": plain(self.why),
            "difference": None if found is None else {**vars(found)},
            "elsewhere": self.elsewhere,
            "error": self.error,
            "normalised": list(self.normalised),
        }

    @property
    def without_text(self) -> Explanation:
        """What other clients may see: nothing of the prompt, and no id that would give access to more."""
        found = self.difference
        place = None if found is None else Difference(found.position, "", None)
        error = None if self.error is None else "it failed"
        seen = replace(self, difference=place, elsewhere=None, error=error)
        # A name that is made of the chat's content would confirm a guess of that content.
        return seen if self.is_named else replace(seen, id="", agent=None)

    def in_short(self) -> dict[str, Any]:
        """For a list."""
        names = ("id", "time", "agent", "model", "state", "prompt_tokens", "cached_tokens", "cause", "why")
        return {name: value for name, value in self.as_dict().items() if name in names}

    def headers(self, wanted: bool) -> dict[str, str]:
        """Headers of the response: the tokens where they are known and, if `wanted`, why not more."""
        found: dict[str, str] = {}
        if self.state == "restoring":
            found["X-Cache-Tokens"] = self.state
        elif self.prompt_tokens is not None:
            found["X-Cache-Tokens"] = f"{self.cached_tokens}/{self.prompt_tokens}"
        if wanted:
            found["X-Cache-Cause"] = self.cause or self.state
            if self.normalised:
                found["X-Cache-Normalised"] = ", ".join(self.normalised)
            found["X-Cache-Why"] = plain(self.why).encode("ascii", "backslashreplace").decode()[:LONGEST_HEADER]
        return found


class Explained:
    """The explanation of one request as it is `now`. `messages`: its chat, until it has started.

    `account`: the name that its agent is noted under; None: the client has named none. `salt`: what it is looked up under.
    `has_tools`: the chat has some. `replies`: those of its owner and salt that the chat repeats, unless they are replayed.
    """

    def __init__(
        self,
        first: Explanation,
        normalisers: Normalisers,
        on: Sequence[str],
        messages: list[Message],
        account: str | None = None,
        has_tools: bool = False,
    ) -> None:
        self._has_tools = has_tools
        self.now = first
        self.account = account
        self.salt = SHARED
        self.replies: Sequence[RememberedReply] = ()
        self._line: str | None = None
        self.last_turn: Agent | None = None
        self._messages = messages
        self._normalisers = normalisers
        self._off = [name for name in normalisers.by_name if name not in on]

    def restore(self, model: str, prompt_tokens: int, cached: int) -> None:
        """The request waits for `cached` tokens from disk."""
        self.now = replace(self.now, model=model, state="restoring", prompt_tokens=prompt_tokens, cached_tokens=cached)

    def start(
        self,
        model: str,
        namespace: str | None,
        tokenizer: Any,
        prompt: Sequence[int],
        cached: int,
        lookup: Lookup | None,
        is_own: bool = False,
    ) -> None:
        """The request has its caches. `namespace`: that of a model with a store; `lookup`: None for mlx-lm's own caches.

        `is_own`: what the lookup expected is the same client's.
        """
        cause = "all" if cached >= len(prompt) - 1 else "not told"
        self.now = now = replace(
            self.now, model=model, state="started", prompt_tokens=len(prompt), cached_tokens=cached, cause=cause
        )
        if lookup is not None:
            lookup, found, whole = self._compared(tokenizer, prompt, lookup, is_own)
            elsewhere = self._elsewhere(namespace) if lookup.cause in ("new", "differs", "longer") else None
            self.now = replace(
                now,
                known_tokens=lookup.known,
                restored_tokens=lookup.restored,
                cause=lookup.cause if elsewhere is None else "other namespace",
                difference=found,
                elsewhere=elsewhere,
            )
            self._line = self._line_of(replace(self.now, difference=whole))
        self._messages, self.replies, self.last_turn = [], (), None
        log.info("%s", self.line)

    def _compared(
        self, tokenizer: Any, prompt: Sequence[int], lookup: Lookup, is_own: bool
    ) -> tuple[Lookup, Difference | None, Difference | None]:
        """The lookup, where the prompt parts from what it found as the client may see it, and the same with all text."""
        cut = cut_reply(tokenizer, prompt, lookup.known, self.replies)
        if cut is not None and lookup.cause == "longer":
            lookup = sampled_from(tokenizer, lookup, prompt, cut)
            is_own = is_own or (cut.agent is not None and cut.agent == self.account)
        given = (tokenizer, prompt, lookup, self._messages, self._off, self._normalisers)
        found = difference(*given, is_own=is_own, has_tools=self._has_tools)
        whole = difference(*given, has_tools=self._has_tools)
        if cut is not None:
            found, whole = (names_replay(each, tokenizer, self._off) for each in (found, whole))
        return lookup, found, whole

    def fail(self, error: Exception) -> None:
        """The request was refused, or has failed."""
        before, self._messages, self.replies = self.now.prompt_tokens, [], ()
        text = "the client hung up" if isinstance(error, ConnectionError) else plain(str(error) or type(error).__name__)
        self.now = replace(self.now, state="failed", error=text)
        if before is None:
            log.info("%s", self.line)
        else:
            log.warning("%s failed: %s", self.now.id, self.now.error)

    @property
    def line(self) -> str:
        """For the log."""
        return self._line or self._line_of(self.now)

    def _line_of(self, now: Explanation) -> str:
        normalised = f"; normalised by {', '.join(now.normalised)}" if now.normalised else ""
        why = f"{now.cause or now.state}: {now.why}{normalised}"
        return plain(f"{now.id} {now.path} of {now.agent or 'no agent'}, {now.model}: {why}")

    def _elsewhere(self, namespace: str | None) -> str | None:
        last = self.last_turn
        if last is None or namespace is None or last.namespace == namespace:
            return None
        return (
            f"the last turn of {last.name} ({last.tokens:,} tokens) was with {last.model_id}, whose keys and values are not these"
        )


@dataclass(frozen=True)
class Asker:
    """A client that reads explanations: its agent's name, and the name of its key."""

    agent: str | None = None
    owner: str | None = None

    def sees(self, now: Explanation, has_id: bool) -> Explanation | None:
        """An explanation as this client may see it; None for another owner's.

        `has_id`: the client has named the request by its id, which only the client that sent it has.
        """
        if now.owner != self.owner:
            return None
        if self.owner is not None:
            return now
        is_own = now.agent == self.agent if now.is_named else has_id
        return now if is_own else now.without_text


class Explanations:
    """The explanations of the last requests, by id; the oldest are dropped. Any thread may call this."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._found: OrderedDict[str, Explained] = OrderedDict()
        self._changing = threading.Lock()

    def add(self, explained: Explained) -> None:
        with self._changing:
            self._found[explained.now.id] = explained
            while len(self._found) > self._most:
                self._found.popitem(last=False)

    def get(self, request_id: str, asker: Asker) -> Explanation | None:
        """One request as `asker` may see it."""
        with self._changing:
            found = self._found.get(request_id)
        return None if found is None else asker.sees(found.now, has_id=True)

    def latest(self, count: int, asker: Asker) -> list[Explanation]:
        """Those that `asker` may see, the newest first."""
        with self._changing:
            found = list(self._found.values())[::-1]
        seen = (asker.sees(explained.now, has_id=False) for explained in found)
        return list(islice((explanation for explanation in seen if explanation is not None), count))


def is_explain(path: str) -> bool:
    """Whether a path, without its query, is that of explanations."""
    return path == PATH or path.startswith(PATH + "/")


def answer_about(path: str, explanations: Explanations, asker: Asker) -> tuple[int, dict[str, Any]]:
    """Status and body for GET /v1/cache/explain/ID, and for the last requests without an ID."""
    request_id = path.removeprefix(PATH).removeprefix("/")
    if not request_id:
        return 200, {"requests": [explanation.in_short() for explanation in explanations.latest(LISTED, asker)]}
    found = explanations.get(request_id, asker)
    if found is None:
        why = f"The header X-Request-Id of a response names its request; the last {MOST:,} are kept, and none over a restart."
        return 404, {"error": f"Found no request {shown(request_id)}. {why}"}
    return 200, found.as_dict()


def plain(text: str) -> str:
    """Text in one line: what is no character to be seen is written as its escape."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
