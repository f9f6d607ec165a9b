"""What one HTTP request tells the generator beside its prompt, and what it is told back."""

from __future__ import annotations

import socket
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import BlockpoolError, ModelNotFoundError
from ..prefix.salts import SHARED, is_of_import, salt_of_key
from ..store.manifest import Agent
from .access import LONGEST_AGENT, checked_text, header_text
from .agents import by_content
from .explained import Asker, Explained, Explanation
from .normalise import LAST, Normalisers, scope_of
from .owners import noted_name, own_name

# Fields of a body that name the agent, the first that is there. `user` comes last: one person may have several agents.
AGENT_FIELDS = ("prompt_cache_key", "session_id", "agent_id", "user")
# Who asks these is explained what became of it.
GENERATES = ("/v1/completions", "/v1/chat/completions", "/chat/completions", "/v1/messages", "/v1/responses")
RETENTIONS = {"in_memory": "memory", "in-memory": "memory", "24h": "day"}


@dataclass
class Wishes:
    """What a request asks for beside its reply.

    id:     names the request, in the answer's headers, in explanations and in the log.
    agent:  who asks; requests of one agent run in order.
    conversation:  the name that the chat's content gives it where nobody asks by a name; it orders nothing.
    retention:  where the prompt is worth keeping: "memory" never on disk, "day" for a day since its last use; None: as ever.
    salt:  what its prefixes are kept under; SHARED: what all requests share.
    """

    id: str = field(default_factory=lambda: f"req_{uuid.uuid4().hex[:24]}")
    agent: str | None = None
    conversation: str | None = None
    retention: str | None = None
    salt: bytes = SHARED


def agent_of(header: str | None, body: Mapping[str, Any], names: tuple[str, ...] = AGENT_FIELDS) -> str | None:
    """Who asks: what the header X-Agent-Id says, or else the first of `names` in the body. Raises ValueError for no string."""
    for name in names:
        if not isinstance(body.get(name), str | None):
            raise ValueError(f"{name} must be a string")
    return header_text(header or "") or next((body[name] for name in names if body.get(name)), None)


def retention_of(body: Mapping[str, Any]) -> str | None:
    """Wishes.retention as OpenAI's prompt_cache_retention says it. Raises ValueError for what it does not know."""
    asked = body.get("prompt_cache_retention")
    if asked is None:
        return None
    if not (isinstance(asked, str) and asked in RETENTIONS):
        raise ValueError(f"prompt_cache_retention: found {str(asked)[:50]!r}; needed 'in_memory' or '24h'")
    return RETENTIONS[asked]


class Asking:
    """A ResponseGenerator as one request sees it: tells it who asks, remembers why its generate() failed and what it said."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator
        self.wishes = Wishes()
        self.connection: socket.socket | None = None
        # The name of the key that the request has shown; None: keys have no names.
        self.owner: str | None = None
        self.path = ""
        self.error: Exception | None = None
        self.explained: Explained | None = None
        self.normalisers: tuple[str, ...] = ()
        self._messages: list[Any] = []
        self._scope = b""
        # What the prompt was rendered from beside the messages, and its tokens.
        self._context: Any = None
        self._prompt: Sequence[int] = ()
        self._sampled: list[int] = []
        self._content: list[str] = []
        self._calls: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)

    def generate(self, request: Any, arguments: Any, *args: Any, **kwargs: Any) -> Any:
        """The generator's own, for this agent and with the prompt normalised as it was asked for; it is explained."""
        try:
            self._check(arguments.model)
            if self.wishes.agent is None and request.request_type == "chat":
                self.wishes.conversation = self._conversation(request, arguments.model)
            changed: tuple[str, ...] = ()
            self._scope = scope_of(self.owner, self.salt, self._model(arguments.model))
            if self.normalisers and request.request_type == "chat":
                messages, changed = self.known_normalisers.changes(self.normalisers, request.messages, self._scope)
                request = replace(request, messages=messages)
            self._own()
            self._messages = request.messages
            self._context = [request.tools, getattr(arguments, "chat_template_kwargs", None)]
            request.wishes, request.connection = self.wishes, self.connection
            if self.path in GENERATES:
                request.explained = self._explain(arguments.model.model, request.messages, changed, bool(request.tools))
                request.explained.last_turn = self._last_turn()
            context, responses = self._generator.generate(request, arguments, *args, **kwargs)
            self._prompt = context.prompt
        except Exception as error:
            self.error = error
            self.refused(error)
            raise
        return context, self._heard(responses)

    def _own(self) -> None:
        """What the request leaves behind is its owner's."""
        wishes = self.wishes
        wishes.agent = wishes.agent and noted_name(self.owner, own_name(wishes.agent))
        wishes.conversation = wishes.conversation and noted_name(self.owner, own_name(wishes.conversation))
        wishes.salt = self.salt

    @property
    def salt(self) -> bytes:
        """What the prefixes of its owner are kept under."""
        is_private = self.owner is not None and self._generator.guard.config.private_prefixes
        return salt_of_key(self.owner) if is_private and self.owner is not None else SHARED

    def _model(self, wanted: Any) -> str | None:
        """The model that replies are sampled by, however the request names it."""
        try:
            model: str | None = self._generator.registry.catalog.key_of(wanted).model
        except (OSError, ValueError, BlockpoolError):
            # The generator says why.
            return None
        return model

    def _conversation(self, request: Any, wanted: Any) -> str | None:
        """None where no model is found; the generator says why."""
        try:
            key = self._generator.registry.catalog.key_of(wanted)
        except (OSError, ValueError):
            return None
        # As the client sent it: what the model is to see has its dates elsewhere.
        return by_content.name_of(key, request.messages, self.known_normalisers)

    def refused(self, error: Exception) -> None:
        """The request has failed, or will not be asked at all; told twice it is the same failure."""
        if self.path not in GENERATES:
            return
        explained = self.explained or self._explain("", [])
        if explained.now.error is None:
            explained.fail(error)

    def headers(self, explain: str | None) -> dict[str, str]:
        """For the answer: its id, and what is known of its cache. `explain`: what the request's X-Explain says."""
        names = {"request-id": self.wishes.id, "X-Request-Id": self.wishes.id}
        if self.explained is None:
            return names
        return names | self.explained.now.headers(explain is not None and explain.strip().lower() in ("1", "true", "yes"))

    def asker(self, headers: Any) -> Asker:
        """Who asks for explanations, by the headers of the request."""
        return Asker(header_text(headers.get("X-Agent-Id") or "") or None, self.owner)

    def told(self, content: str | None, tool_calls: list[Any] | None, is_last: bool) -> None:
        """The client was told a part of the reply, in the form of OpenAI's API."""
        self._content.append(content or "")
        self._calls += tool_calls or []
        if is_last:
            message = {"role": "assistant", "content": "".join(self._content), "tool_calls": self._calls}
            if self.explained is not None and is_of_import(self.explained.salt):
                # Keys and values that were not proven may have said anything.
                return
            self.known_normalisers.replies.remember(
                self._messages, message, self._sampled, self._scope, self._prompt, self._context, self.wishes.agent
            )

    @property
    def known_normalisers(self) -> Normalisers:
        """All that there are."""
        known: Normalisers = self._generator.normalisers
        return known

    def _heard(self, responses: Iterator[Any]) -> Iterator[Any]:
        try:
            for response in responses:
                self._sampled.append(response.token)
                yield response
        except Exception as error:
            self.refused(error)
            raise

    def _check(self, model: Any) -> None:
        """Raises ValueError and ModelNotFoundError for names that no agent and no model can have."""
        if self.wishes.agent is not None:
            checked_text("The agent's name", self.wishes.agent, LONGEST_AGENT)
        for what, name in (("model", model.model), ("draft_model", model.draft), ("adapters", model.adapter)):
            if not isinstance(name, str | None):
                raise ValueError(f"{what} must be a string")
            try:
                checked_text(f"its name under {what}", name or "")
            except ValueError as error:
                raise ModelNotFoundError(f"Found no model: {error}.") from error

    def _explain(self, model: str, messages: list[Any], changed: tuple[str, ...] = (), has_tools: bool = False) -> Explained:
        agent = self.wishes.agent
        named = agent or self.wishes.conversation
        first = Explanation(
            self.wishes.id,
            time.time(),
            self.path,
            model,
            None if named is None else own_name(named),
            is_named=agent is not None,
            normalised=changed,
            owner=self.owner,
        )
        self.explained = Explained(first, self.known_normalisers, self.normalisers, list(messages or ()), agent, has_tools)
        if messages and LAST not in self.normalisers:
            replies = self.known_normalisers.replies
            self.explained.replies = replies.rendered_anew(messages, self._scope, self._context)
        self._generator.explanations.add(self.explained)
        return self.explained

    def _last_turn(self) -> Agent | None:
        """What is noted of the agent before this turn, which will take its place."""
        files = self._generator.agent_files
        if self.wishes.agent is None or files is None:
            return None
        try:
            found: Agent | None = files.get(self.wishes.agent)
            return found
        except (OSError, BlockpoolError):
            return None
