"""Explains how each request has used the cache, and why not more of its prompt was cached.

One thread at a time writes an Explained: the socket's, then the generation thread, then the socket's again. Its fields are
replaced as a whole, so that any thread may read it.

A client sees the text of its own prompts only. Cached text is shown to the agent whose last turn it was, or under a salt of the
client's own. Every client with the same rights sees the figures of a request. The log belongs to the operator and has all.
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

from ..formatting import plain
from ..messages import Message
from ..prefix.lookup import CAUSES, Lookup, beside
from ..prefix.salts import SHARED, is_of_one_client
from ..store.agent_files import Agent
from .access import shown
from .divergence import Chat, Difference
from .normalise import LAST, Normalisers, RememberedReply

log = logging.getLogger(__name__)

PATH = "/v1/cache/explain"
MOST = 1000
LISTED = 20
# Characters; some clients take no more than 8 KB of all headers.
LONGEST_HEADER = 1500
# Sentences for the causes of lookups and of our own.
WORDS = CAUSES | {
    "other namespace": "the agent's last turn was computed by another model, or with another adapter or cache format",
    "other salt": "the agent's last turn had another cache_salt, with which nothing is shared",
    "not told": "mlx-lm's own caches are used, which do not say why not more is cached",
}


# The fields of an explanation for clients, and those in a list.
FIELDS: tuple[str, ...] = ("id", "time", "path", "model", "agent", "state", "prompt_tokens", "known_tokens", "cached_tokens")
FIELDS += ("restored_tokens", "cause", "cause_words", "why", "difference", "elsewhere", "error", "normalised")
LISTED_FIELDS = ("id", "time", "agent", "model", "state", "prompt_tokens", "cached_tokens", "cause", "why")


@dataclass(frozen=True)
class Explanation:
    """`state`: waiting, restoring, started or failed. `cause`: a key of WORDS. Tokens are None until they are known.

    known_tokens:  tokens of the prompt in memory, even if they cannot be resumed from.
    cached_tokens: tokens that are not computed; `restored_tokens` of them were read from disk for this request.
    elsewhere:     the agent's last turn, if its keys and values are of no use here.
    is_named:      the client has given the agent's name; otherwise it is derived from the chat.
    normalised:    the normalisers that have changed the prompt.
    owner:         the name of the request's key; None: keys have no names.
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
    def cause_words(self) -> str | None:
        return None if self.cause is None else WORDS[self.cause]

    @property
    def why(self) -> str:
        """One sentence that explains the cached tokens."""
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
        tools = "; the model's template has the tools after it, which are computed again with it" if found.moves_tools else ""
        return f"{reason}; at token {found.position:,} {lines}{keep}{tools}"

    def as_dict(self, names: Sequence[str] = FIELDS) -> dict[str, Any]:
        """These fields, for a client."""
        return {name: self._field(name) for name in names}

    def _field(self, name: str) -> Any:
        match name:
            case "id":
                return self.id or None
            case "time":
                return datetime.fromtimestamp(self.time, UTC).isoformat(timespec="milliseconds")
            case "why":
                return plain(self.why)
            case "difference":
                return None if self.difference is None else {**vars(self.difference)}
            case "normalised":
                return list(self.normalised)
        return getattr(self, name)

    @property
    def without_text(self) -> Explanation:
        """The part that other clients may see: nothing of the prompt, and no id that would give access to more."""
        place = None if self.difference is None else Difference(self.difference.position, "", None)
        seen = replace(self, difference=place, elsewhere=None, error=None if self.error is None else "it failed")
        # A name that is derived from the chat would confirm a guess of its content.
        return seen if self.is_named else replace(seen, id="", agent=None)

    def headers(self, wanted: bool) -> dict[str, str]:
        """Headers of the response: the tokens if they are known and, if `wanted`, the cause."""
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
    """The explanation of one request as it is `now`. Text to compare, such as the chat's `messages`, is kept until it starts.

    on:        the normalisers that the prompt went through.
    noted_as:  the name that its agent is noted under; None: the client has named none.
    salt:      the salt that the prompt is looked up under.
    replies:   the remembered replies that the chat repeats, unless they are replayed.
    last_turn: the agent's file before this request.
    is_salted_anew: the agent's last turn was looked up under another salt.
    """

    def __init__(
        self,
        first: Explanation,
        normalisers: Normalisers,
        on: Sequence[str],
        messages: list[Message],
        noted_as: str | None = None,
        has_tools: bool = False,
    ) -> None:
        self.now = first
        self.noted_as = noted_as
        self.salt = SHARED
        self.replies: Sequence[RememberedReply] = ()
        self.last_turn: Agent | None = None
        self.is_salted_anew = False
        off = [name for name in normalisers.by_name if name not in on]
        self._chat = Chat(messages, normalisers, off, has_tools)
        self._line: str | None = None

    def restore(self, model: str, prompt_tokens: int, cached: int) -> None:
        """Note that the request waits for `cached` tokens from disk."""
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
        """Note that the request has its caches, and log the explanation.

        namespace: of the model's records; None: it has no store. lookup: None for mlx-lm's own caches.
        is_own:    the cached text that the prompt differs from is the same client's.
        """
        cause = "all" if cached >= len(prompt) - 1 else "not told"
        now = replace(self.now, model=model, state="started", prompt_tokens=len(prompt), cached_tokens=cached, cause=cause)
        if lookup is None:
            self.now = now
        else:
            found = self._chat.compare(tokenizer, prompt, lookup, self.replies, self.noted_as, is_own)
            is_new = found.lookup.cause in ("new", "differs", "longer")
            elsewhere = self._elsewhere(namespace) if is_new else None
            cause = "other salt" if is_new and self.is_salted_anew else found.lookup.cause
            self.now = replace(
                now,
                known_tokens=found.lookup.matched,
                restored_tokens=found.lookup.restored,
                cause=cause if elsewhere is None else "other namespace",
                difference=found.shown,
                elsewhere=elsewhere,
            )
            self._line = self._line_of(replace(self.now, difference=found.whole))
        self._forget_text()
        log.info("%s", self.line)

    def fail(self, error: Exception) -> None:
        """Note that the request was rejected or has failed, and log it."""
        self._forget_text()
        text = "the client hung up" if isinstance(error, ConnectionError) else plain(str(error) or type(error).__name__)
        self.now = replace(self.now, state="failed", error=text)
        if self.now.prompt_tokens is None:
            log.info("%s", self.line)
        else:
            log.warning("%s failed: %s", self.now.id, self.now.error)

    def _forget_text(self) -> None:
        self._chat, self.replies, self.last_turn = replace(self._chat, messages=[]), (), None

    @property
    def line(self) -> str:
        """The explanation for the log."""
        return self._line or self._line_of(self.now)

    def _line_of(self, now: Explanation) -> str:
        normalised = f"; normalised by {', '.join(now.normalised)}" if now.normalised else ""
        why = f"{now.cause or now.state}: {now.why}{normalised}"
        return plain(f"{now.id} {now.path} of {now.agent or 'no agent'}, {now.model}: {why}")

    def _elsewhere(self, namespace: str | None) -> str | None:
        last = self.last_turn
        if last is None or namespace is None or last.namespace == namespace:
            return None
        return f"the last turn of {last.name} ({last.tokens:,} tokens) was with {last.model_id}, which has other keys and values"


@dataclass(frozen=True)
class Asker:
    """A client that reads explanations, by the names of its agent and its key."""

    agent: str | None = None
    owner: str | None = None

    def sees(self, now: Explanation, has_id: bool) -> Explanation | None:
        """The part of an explanation that this client may see; None for another owner's.

        `has_id`: the client has named the request by its id, which only its sender knows.
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
        """The part of an explanation that `asker` may see."""
        with self._changing:
            found = self._found.get(request_id)
        return None if found is None else asker.sees(found.now, has_id=True)

    def latest(self, count: int, asker: Asker) -> list[Explanation]:
        """The last explanations that `asker` may see, the newest first."""
        with self._changing:
            found = list(self._found.values())[::-1]
        seen = (asker.sees(explained.now, has_id=False) for explained in found)
        return list(islice((explanation for explanation in seen if explanation is not None), count))


def is_explain(path: str) -> bool:
    """Return whether a path, without its query, is that of explanations."""
    return path == PATH or path.startswith(PATH + "/")


def answer_about(path: str, explanations: Explanations, asker: Asker) -> tuple[int, dict[str, Any]]:
    """Status and body for GET /v1/cache/explain/ID, or without an ID for the last requests."""
    request_id = path.removeprefix(PATH).removeprefix("/")
    if not request_id:
        return 200, {"requests": [explanation.as_dict(LISTED_FIELDS) for explanation in explanations.latest(LISTED, asker)]}
    found = explanations.get(request_id, asker)
    if found is None:
        advice = f"Take an id from the header X-Request-Id of a response; the last {MOST:,} since the start are kept."
        return 404, {"error": f"There is no explanation of the request {shown(request_id)}. {advice}"}
    return 200, found.as_dict()


def explain_hit(served: Any, explained: Explained, prompt: list[int], cached: int, lookup: Lookup | None) -> None:
    """Explain the cached tokens of a request that has its caches, which the LoadedModel `served` has found by `lookup`."""
    agents, is_own, last = served.agents, is_of_one_client(explained.salt), served.last_turn(explained.noted_as)
    explained.is_salted_anew = last is not None and last.salt != explained.salt
    if lookup is not None and lookup.expected and not is_own:
        own = [] if last is None or explained.is_salted_anew else served.prefix.index.trie.find(last).token_ids()
        lookup, is_own = beside(lookup, prompt, own)
    namespace = None if agents is None else agents.namespace
    explained.start(served.provider.name, namespace, served.provider.tokenizer, prompt, cached, lookup, is_own)
