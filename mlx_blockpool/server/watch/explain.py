"""Explains how each request has used the cache, and why not more of its prompt was cached.

One thread at a time writes an Explained: the socket's, then the generation thread, then the
socket's again. Its fields are replaced as a whole, so that any thread may read it.

A client sees the text of its own prompts only. Cached text is shown to the agent whose last turn it
was, or under the client's salt. Every client with the same rights sees the figures of a request.
The log belongs to the operator and has all.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import islice
from typing import Any

from ...config import HistoryConfig
from ...formatting import plain
from ...prefix.lookup import CAUSES, Lookup, compared_with
from ...prefix.salts import is_of_one_client
from ...store.agents import Agent
from ..access import shown
from ..bodies import StatusError
from ..normalise import LAST
from ..routes import Route
from .divergence import Chat, Difference

log = logging.getLogger(__name__)

PATH = "/v1/cache/explain"
LISTED, LISTED_MISSES = 20, 50
# Causes that a setting or the client can avoid.
AVOIDABLE = ("differs", "evicted", "on disk", "no checkpoint", "no room", "other salt")
# Characters; some clients take no more than 8 KB of all headers.
LONGEST_HEADER = 1500
# Sentences for the causes of lookups and of our own.
WORDS = CAUSES | {
    "other namespace": "the agent's last turn was computed by another model, or with another "
    "adapter or cache "
    "format",
    "other salt": "the agent's last turn had another cache_salt, with which nothing is shared",
    "not told": "mlx-lm's own caches are used, which do not say why not more is cached",
}


# The fields of an explanation for clients, and those in a list.
FIELDS = (
    "id",
    "time",
    "path",
    "model",
    "agent",
    "state",
    "prompt_tokens",
    "known_tokens",
    "cached_tokens",
    "restored_tokens",
    "cause",
    "cause_words",
    "why",
    "difference",
    "elsewhere",
    "error",
    "normalised",
)
LISTED_FIELDS = (
    "id",
    "time",
    "agent",
    "model",
    "state",
    "prompt_tokens",
    "cached_tokens",
    "cause",
    "why",
)


@dataclass(frozen=True)
class Explanation:
    """`state`: waiting, restoring, started or failed. `cause`: a key of WORDS. Tokens are None
    until they are known.

    known_tokens:  tokens of the prompt in memory, even if they cannot be resumed from.
    cached_tokens: tokens that are not computed; `restored_tokens` of them were read from disk for
    this request.
    elsewhere:     the agent's last turn, if its keys and values are of no use here.
    is_named:      the client has given the agent's name; otherwise it is derived from the chat.
    normalised:    the normalisers that have changed the prompt.
    owner:         the name of the request's key, if keys have names.
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
        restored = (
            f" ({self.restored_tokens:,} of them restored from disk)"
            if self.restored_tokens
            else ""
        )
        failed = "" if self.error is None else f"; it failed: {self.error}"
        return f"{cached} cached{restored}{self._reason()}{failed}"

    def _reason(self) -> str:
        if self.elsewhere is not None:
            return f": {self.elsewhere}"
        found = self.difference
        reason = (
            "" if found is not None and self.cause == "differs" else f": {WORDS[str(self.cause)]}"
        )
        if found is None:
            return reason
        keep = tools = ""
        if found.normaliser == LAST:
            keep = (
                f": an earlier reply is written in other tokens; --normalise {LAST} would put it "
                "back as it was sampled"
            )
        elif found.normaliser:
            keep = f": that line changes; --normalise {found.normaliser} would keep it"
        if found.line == found.known_line:
            what = "the same text is other tokens than before"
        elif not found.line:
            what = "it has other text than was known before"
        else:
            known = "other text" if found.known_line is None else f'"{found.known_line}"'
            what = f'the prompt has "{found.line}" where {known} was known before'
            tools = (
                "; the model's template has the tools after it, which are computed again with it"
                if found.moves_tools
                else ""
            )
        return f"{reason}; at token {found.position:,} {what}{keep}{tools}"

    def as_dict(self) -> dict[str, Any]:
        """The fields for a client."""
        return {name: getattr(self, name) for name in FIELDS} | {
            "id": self.id or None,
            "time": datetime.fromtimestamp(self.time, UTC).isoformat(timespec="milliseconds"),
            "why": plain(self.why),
            "difference": None if self.difference is None else {**vars(self.difference)},
            "normalised": list(self.normalised),
        }

    @property
    def line(self) -> str:
        """The explanation for the log."""
        normalised = f"; normalised by {', '.join(self.normalised)}" if self.normalised else ""
        why = f"{self.cause or self.state}: {self.why}{normalised}"
        return plain(f"{self.id} {self.path} of {self.agent or 'no agent'}, {self.model}: {why}")

    @property
    def without_text(self) -> Explanation:
        """The part that other clients may see: nothing of the prompt, and no id that would give
        access to more.
        """
        place = None if self.difference is None else Difference(self.difference.position, "", None)
        seen = replace(
            self,
            difference=place,
            elsewhere=None,
            error=None if self.error is None else "it failed",
        )
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
            found["X-Cache-Why"] = (
                plain(self.why).encode("ascii", "backslashreplace").decode()[:LONGEST_HEADER]
            )
        return found


class Explained:
    """The explanation of one request as it is `now`. Text to compare, such as the chat's messages,
    is dropped when it starts.

    noted_as:  the name that its agent is noted under, if the client has named one.
    last_turn: the agent's file before this request.
    """

    def __init__(self, first: Explanation, chat: Chat, noted_as: str | None = None) -> None:
        self.now = first
        self.last_turn: Agent | None = None
        self._chat: Chat | None = chat
        self._noted_as = noted_as

    def restore(self, model: str, prompt_tokens: int, cached: int) -> None:
        """Note that the request waits for `cached` tokens from disk."""
        self.now = replace(
            self.now,
            model=model,
            state="restoring",
            prompt_tokens=prompt_tokens,
            cached_tokens=cached,
        )

    def start(
        self, served: Any, salt: bytes, prompt: Sequence[int], cached: int, lookup: Lookup | None
    ) -> None:
        """Note that the request has its caches in the LoadedModel `served`, and log the
        explanation.

        salt: the one that its prompt was looked up under. lookup: None for mlx-lm's own caches.
        """
        name, cause = served.provider.name, "all" if cached >= len(prompt) - 1 else "not told"
        now = replace(
            self.now,
            model=name,
            state="started",
            prompt_tokens=len(prompt),
            cached_tokens=cached,
            cause=cause,
        )
        whole = None
        if lookup is not None and self._chat is not None:
            now, whole = self._compare(self._chat, now, served, salt, prompt, lookup)
        self.now, self._chat, self.last_turn = now, None, None
        # The operator sees the cached text of all clients.
        log.info("%s", (now if whole is None else replace(now, difference=whole)).line)

    def _compare(
        self,
        chat: Chat,
        now: Explanation,
        served: Any,
        salt: bytes,
        prompt: Sequence[int],
        lookup: Lookup,
    ) -> tuple[Explanation, Difference | None]:
        """The explanation with the cause and the difference that the client may see, and the
        whole difference.
        """
        is_own, turn = is_of_one_client(salt), served.last_turn(self._noted_as)
        # Whether the agent's last turn was looked up under another salt.
        salt_changed = turn is not None and turn.salt != salt
        if lookup.expected and not is_own:
            own = (
                []
                if turn is None or salt_changed
                else served.prefix.index.trie.find(turn).token_ids()
            )
            lookup, is_own = compared_with(lookup, prompt, own)
        lookup, shown, whole = chat.compare(
            served.provider.tokenizer, prompt, lookup, self._noted_as, is_own
        )
        cause, elsewhere = lookup.cause, None
        if cause in ("new", "differs", "longer"):
            elsewhere = self._elsewhere(None if served.agents is None else served.agents.namespace)
            cause = (
                "other namespace"
                if elsewhere is not None
                else "other salt"
                if salt_changed
                else cause
            )
        explained = replace(
            now,
            known_tokens=lookup.matched,
            restored_tokens=lookup.restored,
            cause=cause,
            difference=shown,
            elsewhere=elsewhere,
        )
        return explained, whole

    def fail(self, error: Exception) -> None:
        """Note that the request was rejected or has failed, and log it."""
        self._chat = self.last_turn = None
        text = (
            "the client hung up"
            if isinstance(error, ConnectionError)
            else plain(str(error) or type(error).__name__)
        )
        self.now = replace(self.now, state="failed", error=text)
        if self.now.prompt_tokens is None:
            log.info("%s", self.now.line)
        else:
            log.warning("%s failed: %s", self.now.id, self.now.error)

    def _elsewhere(self, namespace: str | None) -> str | None:
        """Where the agent's last turn was, if its keys and values are not those of `namespace`,
        which is None without a store.
        """
        last = self.last_turn
        if last is None or namespace is None or last.namespace == namespace:
            return None
        return (
            f"the last turn of {last.name} ({last.tokens:,} tokens) was with {last.model_id}, "
            "which has other keys and values"
        )


@dataclass(frozen=True)
class ExplanationReader:
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
    """The explanations of the last requests, by id; the oldest are dropped.

    Any thread may call this.
    """

    def __init__(self, most: int = HistoryConfig.explained) -> None:
        self._most = most
        self._found: OrderedDict[str, Explained] = OrderedDict()
        # Avoidable misses that are older than those.
        self._missed: deque[Explained] = deque(maxlen=LISTED_MISSES)
        self._changing = threading.Lock()

    def add(self, explained: Explained) -> None:
        with self._changing:
            self._found[explained.now.id] = explained
            while len(self._found) > self._most:
                _, oldest = self._found.popitem(last=False)
                if oldest.now.cause in AVOIDABLE:
                    self._missed.append(oldest)

    def get(self, request_id: str, asker: ExplanationReader) -> Explanation | None:
        """The part of an explanation that `asker` may see."""
        with self._changing:
            found = self._found.get(request_id)
        return None if found is None else asker.sees(found.now, has_id=True)

    def latest(
        self, count: int, asker: ExplanationReader, are_avoidable: bool = False
    ) -> list[Explanation]:
        """The last explanations that `asker` may see, the newest first; `are_avoidable`: those
        of avoidable misses alone.
        """
        with self._changing:
            found = [*self._missed, *self._found.values()][::-1]
        if are_avoidable:
            found = [explained for explained in found if explained.now.cause in AVOIDABLE]
        else:
            found = found[: self._most]
        seen = (asker.sees(explained.now, has_id=False) for explained in found)
        return list(islice((explanation for explanation in seen if explanation is not None), count))


def answer_about(handler: Any) -> None:
    """Answer GET /v1/cache/explain/ID, or without an ID for the last requests."""
    request_id = handler.route.removeprefix(PATH).removeprefix("/")
    explanations = handler.scope.generator.explanations
    asker = handler.scope.asker(handler.headers)
    if not request_id:
        lists = {
            "requests": explanations.latest(LISTED, asker),
            "avoidable": explanations.latest(LISTED_MISSES, asker, are_avoidable=True),
        }
        answer = {
            name: [{key: each.as_dict()[key] for key in LISTED_FIELDS} for each in found]
            for name, found in lists.items()
        }
        handler.send_json(200, answer)
        return
    found = explanations.get(request_id, asker)
    if found is None:
        last = f"the last {HistoryConfig.explained:,} since the start"
        advice = f"Take an id from the header X-Request-Id of a response; {last} are kept."
        raise StatusError(
            404, f"No explanation of the request {shown(request_id)} was found. {advice}"
        )
    handler.send_json(200, found.as_dict())


ROUTES = (Route(f"{PATH}/*", answer_about),)
