"""RequestScope: the socket side of one request, from its headers to the reply that is remembered."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import BlockpoolError, ModelNotFoundError
from ..mlx_lm_compat import GenerationContext, Response
from ..prefix.salts import is_of_import, salt_of
from ..store.agent_files import Agent
from .access import COMPLETIONS, LONGEST_AGENT, checked_text, header_text, noted_name, own_name
from .agents.conversation_id import conversation_id
from .explain import Asker, Explained, Explanation
from .generator import BlockpoolGenerator
from .images import HeldPixels
from .models.provider import ModelKey
from .normalise import LAST, scope_of
from .replies import Choices, only_choice
from .request import PromptRequest, RequestOptions
from .validation import Serving

# Fields of a body that may name the agent; the first that is set counts. `user` comes last: one person may have several agents.
AGENT_FIELDS = ("prompt_cache_key", "session_id", "agent_id", "user")
# What Claude Code, Codex (twice) and opencode send with the requests of sub-agents, and of no main thread.
SUB_AGENT_HEADERS = ("X-Claude-Code-Agent-Id", "X-OpenAI-Subagent", "X-Codex-Parent-Thread-Id", "X-Parent-Session-Id")
# Requests to these paths are explained.
GENERATES = (*COMPLETIONS, "/v1/messages", "/v1/responses", "/api/chat", "/api/generate")
RETENTIONS = {"in_memory": "memory", "in-memory": "memory", "24h": "day"}


def agent_of(header: str | None, body: Mapping[str, Any], names: tuple[str, ...] = AGENT_FIELDS) -> str | None:
    """The agent: the header X-Agent-Id, or else the first of `names` in the body. Raises ValueError for no string."""
    for name in names:
        if not isinstance(body.get(name), str | None):
            raise ValueError(f"{name} must be a string")
    return header_text(header or "") or next((body[name] for name in names if body.get(name)), None)


def retention_of(body: Mapping[str, Any]) -> str | None:
    """RequestOptions.retention from OpenAI's prompt_cache_retention. Raises ValueError for an unknown value."""
    name = body.get("prompt_cache_retention")
    if name is None:
        return None
    if not (isinstance(name, str) and name in RETENTIONS):
        raise ValueError(f"prompt_cache_retention: Input should be 'in_memory' or '24h'; found {str(name)[:50]!r}")
    return RETENTIONS[name]


def is_of_sub_agent(headers: Any) -> bool:
    """Return whether the headers of a known client say that a sub-agent sends the request."""
    return any((headers.get(name) or "").strip() for name in SUB_AGENT_HEADERS)


class RequestScope:
    """One request to `generator`. To mlx-lm's handler it is the generator, of which that reads cli_args alone.

    owner:        the name of the key that the request has shown; None: keys have no names.
    path:         without query. normalisers: the names of those that the prompt goes through.
    explained:    how the request has used the cache, once it is known; None for a path that is not explained.
    pixels:       of the request's images; the handler, or the warm-up, releases them when the request ends.
    """

    def __init__(self, generator: BlockpoolGenerator, connection: socket.socket | None = None) -> None:
        self.generator = generator
        self.cli_args = generator.cli_args
        self.options = RequestOptions()
        self.owner: str | None = None
        self.path = ""
        self.explained: Explained | None = None
        self.pixels = HeldPixels(generator.pixels)
        self.normalisers: tuple[str, ...] = ()
        self._connection = connection
        self._messages: list[Any] = []
        self._scope = b""
        # What the prompt was rendered from beside the messages.
        self._context: Any = None
        # mlx-lm's context of the first choice that has begun.
        self._begun: GenerationContext | None = None

    def parse_headers(self, headers: Any, body: Mapping[str, Any], names: tuple[str, ...] = AGENT_FIELDS) -> None:
        """Set the options that headers and body name. Raises ValueError.

        Codex's sub-agents have the `prompt_cache_key` of their main thread, and a Thread-Id of their own.
        """
        thread = headers.get("Thread-Id") if is_of_sub_agent(headers) else None
        self.options.agent = agent_of(headers.get("X-Agent-Id") or thread, body, names)
        self.normalisers = self.generator.normalisers.chosen(headers.get("X-Normalise"))

    def take_options(self, headers: Any, body: Serving) -> None:
        """Set the options that a body of any protocol may have. Without a priority sub-agents come behind their main thread."""
        self.options.cache_salt = body.cache_salt
        self.options.priority = int(is_of_sub_agent(headers)) if body.priority is None else body.priority

    def generate(self, request: PromptRequest, arguments: Any, progress_callback: Any = None) -> Any:
        """The reply's context, and an iterator over its parts, which raises what ends the request early."""
        parts = only_choice(self.generate_choices(request, arguments, progress_callback))
        return next(parts), parts

    def generate_choices(self, request: PromptRequest, arguments: Any, progress_callback: Any) -> Choices:
        """The generator's own, for this request's agent and owner, with its prompt normalised. Raises what that raises.

        One of several choices that fails is not explained.
        """
        begun, is_counted = time.monotonic(), False
        try:
            self._prepare(request, arguments)
            for index, part in self.generator.generate_choices(request, arguments, progress_callback):
                if isinstance(part, Response) and not is_counted:
                    is_counted = True
                    self._count(time.monotonic() - begun)
                elif isinstance(part, GenerationContext) and self._begun is None:
                    self._begun = part
                elif isinstance(part, Exception) and request.choices == 1:
                    self.fail(part)
                yield index, part
        except Exception as error:
            self.fail(error)
            raise

    def _prepare(self, request: PromptRequest, arguments: Any) -> None:
        """Normalise the prompt, and give the request what the generation thread reads of this scope."""
        self._check(arguments.model)
        options, known, key = self.options, self.generator.normalisers, self._key(arguments.model)
        is_chat = request.request_type == "chat"
        if options.agent is None and is_chat and key is not None:
            # As the client sent it: what the model is to see has its dates elsewhere.
            options.conversation = conversation_id(key, request.messages, known, options.cache_salt)
        self._scope = scope_of(self.owner, self.salt, key and key.model)
        changed: tuple[str, ...] = ()
        if self.normalisers and is_chat:
            request.messages, changed = known.changes(self.normalisers, request.messages, self._scope)
        options.agent = options.agent and noted_name(self.owner, own_name(options.agent))
        options.conversation = options.conversation and noted_name(self.owner, own_name(options.conversation))
        options.salt, options.owner = self.salt, self.owner
        self._messages = request.messages
        self._context = [request.tools, getattr(arguments, "chat_template_kwargs", None)]
        request.options, request.connection, request.pixels = options, self._connection, self.pixels
        if self.path in GENERATES:
            request.explained = self._explain(arguments.model.model, request.messages, changed, bool(request.tools))
            request.explained.last_turn = self._last_turn()

    @property
    def salt(self) -> bytes:
        """The salt of the request's prefixes."""
        return salt_of(self.private_key, self.options.cache_salt)

    @property
    def private_key(self) -> str | None:
        """The name of the key whose prefixes no other key's requests share; None: keys share theirs."""
        return self.owner if self.generator.access.config.private_prefixes else None

    def _key(self, wanted: Any) -> ModelKey | None:
        """The model, however the request names it; None where it is not found: generate() raises why."""
        try:
            return self.generator.registry.catalog.key_of(wanted)
        except (OSError, ValueError, BlockpoolError):
            return None

    def fail(self, error: Exception) -> None:
        """Explain the request's failure. Only the first one counts."""
        if self.path not in GENERATES:
            return
        explained = self.explained or self._explain("", [])
        if explained.now.error is None:
            explained.fail(error)

    def headers(self, explain: str | None) -> dict[str, str]:
        """Headers of the response: the request's id and its cached tokens. `explain`: the request's X-Explain."""
        names = {"request-id": self.options.id, "X-Request-Id": self.options.id}
        if self.explained is None:
            return names
        return names | self.explained.now.headers(explain is not None and explain.strip().lower() in ("1", "true", "yes"))

    def asker(self, headers: Any) -> Asker:
        """The client that reads explanations, by the headers of the request."""
        return Asker(header_text(headers.get("X-Agent-Id") or "") or None, self.owner)

    def remember(self, content: str, tool_calls: list[Any], sampled: Sequence[int]) -> None:
        """Note a whole reply as it was sent, in OpenAI's shape, so that it can be put back in the tokens that were `sampled`."""
        if self.explained is not None and is_of_import(self.explained.salt):
            # The keys and values were not computed here, so the reply proves nothing.
            return
        message = {"role": "assistant", "content": content, "tool_calls": tool_calls}
        prompt = () if self._begun is None else self._begun.prompt
        self.generator.normalisers.replies.remember(
            self._messages, message, sampled, self._scope, prompt, self._context, self.options.agent
        )

    def _count(self, ttft: float) -> None:
        context = self._begun
        assert context is not None, "a reply has tokens before it has begun"
        self.generator.hour.record(self.owner, self.options.name, len(context.prompt), context.prompt_cache_count, ttft)

    def _check(self, model: Any) -> None:
        """Raises ValueError and ModelNotFoundError for names that no agent and no model can have."""
        if self.options.agent is not None:
            checked_text("The agent's name", self.options.agent, LONGEST_AGENT)
        for what, name in (("model", model.model), ("draft_model", model.draft), ("adapters", model.adapter)):
            if not isinstance(name, str | None):
                raise ValueError(f"{what} must be a string")
            try:
                checked_text(f"its name under {what}", name or "")
            except ValueError as error:
                raise ModelNotFoundError(f"There is no model of that name: {error}.") from error

    def _explain(self, model: str, messages: list[Any], changed: tuple[str, ...] = (), has_tools: bool = False) -> Explained:
        agent = self.options.agent
        named = self.options.name
        first = Explanation(
            self.options.id,
            time.time(),
            self.path,
            model,
            None if named is None else own_name(named),
            is_named=agent is not None,
            normalised=changed,
            owner=self.owner,
        )
        self.explained = Explained(first, self.generator.normalisers, self.normalisers, list(messages or ()), agent, has_tools)
        if messages and LAST not in self.normalisers:
            replies = self.generator.normalisers.replies
            self.explained.replies = replies.rendered_anew(messages, self._scope, self._context)
        self.generator.explanations.add(self.explained)
        return self.explained

    def _last_turn(self) -> Agent | None:
        """The agent's file before this turn, which will replace it."""
        files = self.generator.agent_files
        if self.options.agent is None or files is None:
            return None
        try:
            return files.get(self.options.agent)
        except (OSError, BlockpoolError):
            return None
