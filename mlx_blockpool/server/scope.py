"""RequestScope: one request on the socket's thread, from its headers to the reply that is
remembered.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..config import RequestConfig
from ..errors import BlockpoolError, ModelNotFoundError, UnavailableError
from ..mlx_lm_compat import GenerationContext, Response
from ..prefix.salts import salt_of
from ..store.agents import Agent
from .access import checked_text, header_text, noted_name, own_name, shown
from .bodies import StatusError
from .conversation_id import conversation_id
from .generator import BlockpoolGenerator
from .images import HeldPixels
from .normalise import LAST, scope_of
from .origins import ForeignPage
from .provider import ModelKey
from .replies import Choices
from .request import PromptRequest, RequestOptions
from .watch.divergence import Chat
from .watch.explain import LONGEST_HEADER, Explained, Explanation, ExplanationReader

if TYPE_CHECKING:
    from .validation import Serving

log = logging.getLogger(__name__)

# Fields of a body that may name the agent; the first that is set counts. `user` comes last: one
# person may have several agents.
AGENT_FIELDS = ("prompt_cache_key", "session_id", "agent_id", "user")
# What Claude Code, Codex (twice) and opencode send with the requests of sub-agents, and not with
# those of main threads.
SUB_AGENT_HEADERS = (
    "X-Claude-Code-Agent-Id",
    "X-OpenAI-Subagent",
    "X-Codex-Parent-Thread-Id",
    "X-Parent-Session-Id",
)
RETENTIONS = {"in_memory": "memory", "in-memory": "memory", "24h": "day"}


def agent_of(
    header: str | None, body: Mapping[str, Any], names: tuple[str, ...] = AGENT_FIELDS
) -> str | None:
    """The agent: the header X-Agent-Id, or else the first of `names` in the body.

    Raises ValueError unless it is a string.
    """
    for name in names:
        if not isinstance(body.get(name), str | None):
            raise ValueError(f"{name} must be a string")
    return header_text(header or "") or next((body[name] for name in names if body.get(name)), None)


def retention_of(body: Mapping[str, Any]) -> str | None:
    """RequestOptions.retention from OpenAI's prompt_cache_retention.

    Raises ValueError for an unknown value.
    """
    name = body.get("prompt_cache_retention")
    if name is None:
        return None
    if not (isinstance(name, str) and name in RETENTIONS):
        raise ValueError(
            "prompt_cache_retention: Input should be 'in_memory' or '24h'; found "
            f"{str(name)[:50]!r}"
        )
    return RETENTIONS[name]


def is_of_sub_agent(headers: Any) -> bool:
    """Return whether the headers of a known client say that a sub-agent sends the request."""
    return any((headers.get(name) or "").strip() for name in SUB_AGENT_HEADERS)


class RequestScope:
    """One request to `generator`. mlx-lm's handler gets it as its generator, of which it only reads
    cli_args.

    owner:        the name of the request's key; None if keys have no names.
    page:         the page of another site that sends the request, which may name no agent; None for
                  other clients.
    connection:   the client's, if the request came over one.
    path:         without query. normalisers: the names of the normalisers of its prompt.
    is_explained: whether /v1/cache/explain explains the request, as its route says.
    explained:    how the request has used the cache, once it is known; None for a path that is not
                  explained.
    pixels:       of the request's images; the handler, or the warm-up, releases them when the
                  request ends.
    """

    def __init__(
        self, generator: BlockpoolGenerator, connection: socket.socket | None = None
    ) -> None:
        self.generator = generator
        self.cli_args = generator.cli_args
        self.options = RequestOptions()
        self.owner: str | None = None
        self.page: ForeignPage | None = None
        self.path = ""
        self.is_explained = False
        self.explained: Explained | None = None
        self.pixels = HeldPixels(generator.pixels)
        self.normalisers: tuple[str, ...] = ()
        self.connection = connection
        self._messages: list[Any] = []
        self._scope, self._user_agent = b"", ""
        # What the prompt was rendered from in addition to the messages.
        self._context: Any = None
        # mlx-lm's context of the first choice that has begun.
        self._begun: GenerationContext | None = None
        # The places of keywords in the request's schemas that its reply may break.
        self._unkept: list[str] = []

    def parse_headers(
        self, headers: Any, body: Mapping[str, Any], names: tuple[str, ...] = AGENT_FIELDS
    ) -> None:
        """Set the options that headers and body name. Raises ValueError. A page of another site
        names no agent.

        Codex's sub-agents have the `prompt_cache_key` of their main thread, and their own
        Thread-Id.
        """
        self._user_agent = headers.get("User-Agent") or ""
        thread = headers.get("Thread-Id") if is_of_sub_agent(headers) else None
        agent = agent_of(headers.get("X-Agent-Id") or thread, body, names)
        self.options.agent = agent if self.page is None else None
        self.normalisers = self.generator.normalisers.chosen(headers.get("X-Normalise"))

    def take_options(self, headers: Any, body: Serving) -> None:
        """Set the options that any body may have.

        Without a priority sub-agents are served after their main thread.
        """
        self.options.cache_salt = body.cache_salt
        self.options.priority = (
            int(is_of_sub_agent(headers)) if body.priority is None else body.priority
        )

    def generate_choices(
        self, request: PromptRequest, arguments: Any, progress_callback: Any = None
    ) -> Choices:
        """Generate for this request's agent and owner, with its prompt normalised. Raises what the
        generator raises.

        One of several choices that fails is not explained.
        """
        begun, is_counted = time.monotonic(), False
        try:
            self._prepare(request, arguments)
            for index, part in self.generator.generate_choices(
                request, arguments, progress_callback
            ):
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
        """Normalise the prompt, and set what the generation thread needs on the request."""
        self._check(arguments.model)
        self._unkept = [place for form in request.forms for place in form.unkept]
        options, known, key = self.options, self.generator.normalisers, self._key(arguments.model)
        if self.page is not None:
            self._restrict(self.page, key)
        is_chat = request.request_type == "chat"
        if options.agent is None and self.page is None and is_chat and key is not None:
            # As the client sent it: normalisers move dates.
            options.conversation = conversation_id(
                key, request.messages, known, options.cache_salt, self._user_agent
            )
        self._scope = scope_of(self.owner, self.salt, key and key.model)
        changed: tuple[str, ...] = ()
        if self.normalisers and is_chat:
            request.messages, changed = known.changes(
                self.normalisers, request.messages, self._scope
            )
        options.agent = options.agent and noted_name(self.owner, own_name(options.agent))
        options.conversation = options.conversation and noted_name(
            self.owner, own_name(options.conversation)
        )
        options.salt, options.owner = self.salt, self.owner
        self._messages = request.messages
        self._context = [request.tools, getattr(arguments, "chat_template_kwargs", None)]
        request.options, request.connection, request.pixels = options, self.connection, self.pixels
        if self.is_explained:
            request.explained = self._explain(
                arguments.model.model, request.messages, changed, bool(request.tools)
            )
            request.explained.last_turn = self._last_turn()

    @property
    def salt(self) -> bytes:
        """The salt of the request's prefixes."""
        return salt_of(
            self.private_key,
            self.options.cache_salt,
            None if self.page is None else self.page.scope,
        )

    @property
    def client(self) -> str | None:
        """Whose responses the request may read: the owner's, or those to the same page of
        another site.
        """
        return self.owner if self.page is None else noted_name(self.owner, self.page.scope)

    def check_model(self, key: ModelKey | None) -> None:
        """Raises StatusError if a page of another site names a model for which another one might
        be unloaded.
        """
        registry = self.generator.registry
        if self.page is None or key is None or key in registry.loaded:
            return
        if registry.loaded or registry.swap is not None:
            name = registry.catalog.id_of(key.model)
            raise StatusError(
                403, f"{name} is not loaded, and a page of another site may use loaded models only."
            )

    def _restrict(self, page: ForeignPage, key: ModelKey | None) -> None:
        """Drop options that a page of another site may not set.

        Raises StatusError as check_model().
        """
        self.check_model(key)
        options = self.options
        served = None if key is None else self.generator.registry.loaded.get(key)
        options.priority, options.may_pin, options.may_load = 0, False, False
        options.keep_seconds = None if served is None else served.idle_seconds
        if page.nonce:
            # No later request can find its prefix on disk.
            options.retention = "memory"
        elif options.retention == "day":
            options.retention = None

    @property
    def private_key(self) -> str | None:
        """The name of the key whose prefixes no other key's requests share.

        None if keys share theirs.
        """
        return self.owner if self.generator.access.config.private_prefixes else None

    def _key(self, wanted: Any) -> ModelKey | None:
        """The key of the model that a request names.

        None if there is none: the generator raises the reason.
        """
        try:
            return self.generator.registry.catalog.key_of(wanted)
        except (OSError, ValueError, BlockpoolError):
            return None

    def fail(self, error: Exception) -> None:
        """Explain the request's failure. Only the first one counts."""
        if not self.is_explained:
            return
        explained = self.explained or self._explain("", [])
        if explained.now.error is None:
            explained.fail(error)

    def log_unavailable(self, error: UnavailableError) -> None:
        """Log that the server could not answer now, in one line for each request: the
        explanation of a failure has logged it.
        """
        if self.explained is None or self.explained.now.error is None:
            log.warning("%s: %s", shown(self.path), error)

    def headers(self, explain: str | None) -> dict[str, str]:
        """Headers of the response: the request's id, its cached tokens, and the keywords of its
        schemas that are not enforced.

        `explain`: the request's X-Explain.
        """
        names = {"request-id": self.options.id, "X-Request-Id": self.options.id}
        if self._unkept:
            places = ", ".join(self._unkept).encode("ascii", "backslashreplace").decode()
            names["X-Form-Not-Kept"] = places[:LONGEST_HEADER]
        if self.explained is None:
            return names
        return names | self.explained.now.headers(
            explain is not None and explain.strip().lower() in ("1", "true", "yes")
        )

    def asker(self, headers: Any) -> ExplanationReader:
        """Who reads explanations, by the request's headers."""
        return ExplanationReader(header_text(headers.get("X-Agent-Id") or "") or None, self.owner)

    def remember(self, content: str, tool_calls: list[Any], sampled: Sequence[int]) -> None:
        """Note a whole reply as it was sent, in OpenAI's shape, so that it can be put back in
        the tokens that were `sampled`.
        """
        if self.page is not None and self.page.nonce:
            # No later request has its salt.
            return
        message = {"role": "assistant", "content": content, "tool_calls": tool_calls}
        prompt = () if self._begun is None else self._begun.prompt
        self.generator.normalisers.replies.remember(
            self._messages, message, sampled, self._scope, prompt, self._context, self.options.agent
        )

    def _count(self, ttft: float) -> None:
        context = self._begun
        assert context is not None, "a reply has tokens before it has begun"
        self.generator.hour.record(
            self.owner, self.options.name, len(context.prompt), context.prompt_cache_count, ttft
        )

    def _check(self, model: Any) -> None:
        """Raises ValueError and ModelNotFoundError for names that no agent and no model can
        have.
        """
        if self.options.agent is not None:
            checked_text("The agent's name", self.options.agent, RequestConfig.agent_characters)
        for what, name in (
            ("model", model.model),
            ("draft_model", model.draft),
            ("adapters", model.adapter),
        ):
            if not isinstance(name, str | None):
                raise ValueError(f"{what} must be a string")
            try:
                checked_text(f"its name under {what}", name or "")
            except ValueError as error:
                raise ModelNotFoundError(f"There is no model of that name: {error}.") from error

    def _explain(
        self,
        model: str,
        messages: list[Any],
        changed: tuple[str, ...] = (),
        has_tools: bool = False,
    ) -> Explained:
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
        known = self.generator.normalisers
        is_replayed = not messages or LAST in self.normalisers
        replies = (
            () if is_replayed else known.replies.rendered_anew(messages, self._scope, self._context)
        )
        off = [name for name in known.by_name if name not in self.normalisers]
        self.explained = Explained(
            first, Chat(list(messages or ()), known, off, has_tools, replies), agent
        )
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
