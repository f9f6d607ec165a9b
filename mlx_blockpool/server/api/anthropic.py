"""Anthropic's Messages API: its endpoints, the list of models as its clients read it, and the
rendering of replies.

For one request, on the socket's thread.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from ..bodies import InvalidRequestError, Json, StatusError
from ..models.http import MODELS, ModelsEndpoint
from ..request import ParsedRequest
from .anthropic_request import parse
from .call_readers import CallPart
from .call_stream import Call, CallCut
from .endpoint import Endpoint
from .errors import MESSAGES, anthropic_error, anthropic_status
from .reply import MAX_TOKENS, BlockEnd, Event, Packet, Renderer, StopReason, Text, Thinking
from .thinking import signature_of


class MessageRenderer(Renderer):
    """Renders one reply: content blocks as the protocol's events, and the message that they add
    up to.
    """

    def __init__(self, parsed: ParsedRequest, context: Any) -> None:
        super().__init__(parsed, context)
        self._content: list[Json] = []
        # The open block as it began; empty between blocks.
        self._block: Json = {}

    def keepalive(self, progress: str) -> Iterable[Packet]:
        return [{"type": "ping"}]

    def begin(self) -> Iterable[Packet]:
        self.whole = {
            "id": f"msg_{uuid.uuid4().hex[:24]}",
            "type": "message",
            "role": "assistant",
            "model": self._parsed.body.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {**self._input_usage(), "output_tokens": 0},
        }
        return [{"type": "message_start", "message": self.whole}, *self.keepalive("")]

    def add(self, response: Any) -> Iterator[Packet]:
        # The engine generates one token at least, and this client may want none.
        return super().add(response) if self._parsed.body.max_tokens else iter(())

    def finish(self) -> Iterator[Packet]:
        return super().finish() if self._parsed.body.max_tokens else iter(self._end(MAX_TOKENS))

    def _render(self, event: Event) -> Iterable[Packet]:
        match event:
            case CallPart():
                if not self._block:
                    called = event.id or f"toolu_{uuid.uuid4().hex[:24]}"
                    yield self._start(
                        {"type": "tool_use", "id": called, "name": event.name, "input": {}}
                    )
                yield self._delta(type="input_json_delta", partial_json=event.text)
            case Call():
                yield self._stop(input=event.arguments)
            case CallCut():
                yield self._stop()
            case Text(text):
                if not self._block:
                    yield self._start({"type": "text", "text": ""})
                if text:
                    yield self._delta(type="text_delta", text=text)
            case Thinking(text):
                if not self._block:
                    yield self._start({"type": "thinking", "thinking": "", "signature": ""})
                if self._parsed.body.shows_thinking:
                    yield self._delta(type="thinking_delta", thinking=text)
            case BlockEnd(text):
                if self._block["type"] == "text":
                    yield self._stop(text=text)
                    return
                shows = self._parsed.body.shows_thinking
                signature = signature_of(text, shows)
                yield self._delta(type="signature_delta", signature=signature)
                yield self._stop(thinking=text if shows else "", signature=signature)

    def _start(self, block: Json) -> Json:
        self._block = block
        return {"type": "content_block_start", "index": len(self._content), "content_block": block}

    def _delta(self, **delta: str) -> Json:
        return {"type": "content_block_delta", "index": len(self._content), "delta": delta}

    def _stop(self, **fields: Any) -> Json:
        """End the open block, whose fields are known now."""
        self._content.append({**self._block, **fields})
        self._block = {}
        return {"type": "content_block_stop", "index": len(self._content) - 1}

    def _end(self, reason: StopReason) -> Iterable[Packet]:
        delta = {"stop_reason": reason.anthropic, "stop_sequence": self.parser.stop_word}
        usage = {**self._input_usage(), "output_tokens": self.usage.reply}
        if self.usage.thinking:
            usage["output_tokens_details"] = {"thinking_tokens": self.usage.thinking}
        self.whole = {**self.whole, "content": self._content, **delta, "usage": usage}
        return [{"type": "message_delta", "delta": delta, "usage": usage}, {"type": "message_stop"}]

    def _input_usage(self) -> Json:
        return input_usage(
            self.usage.prompt, self.usage.cached, self._parsed.request.prepared.breakpoints
        )


def input_usage(total: int, cached: int, breakpoints: list[tuple[int, int]]) -> Json:
    """Count the tokens of a prompt by how they were served. The first three figures add up to
    `total`.

    Read: `cached` tokens that were not computed again. Created: those that were, up to the last of
    `breakpoints`, which are (tokens, seconds); without breakpoints all of them, for this server
    keeps what it computes. Input: the rest.
    """
    created = {300: 0, 3600: 0}
    begin = cached
    for end, seconds in breakpoints or [(total, 300)]:
        created[seconds] += max(end - begin, 0)
        begin = max(begin, end)
    return {
        "input_tokens": total - begin,
        "cache_creation_input_tokens": sum(created.values()),
        "cache_read_input_tokens": cached,
        "cache_creation": {
            "ephemeral_5m_input_tokens": created[300],
            "ephemeral_1h_input_tokens": created[3600],
        },
    }


class MessagesEndpoint(Endpoint):
    """Messages, and the list of models for clients of this protocol."""

    # metadata.user_id names no agent: sub-agents share it, and run at the same time.
    agent_fields = ("session_id", "agent_id")

    def count(self) -> None:
        self._handler.send_json(200, {"input_tokens": self._count()})

    def refuse(self) -> None:
        """Raises StatusError, for what the protocol has and this server does not, such as
        batches.
        """
        path = self._handler.route[:80]
        raise StatusError(
            404,
            f"{self._handler.command} {path}: there are only POST {MESSAGES} and /count_tokens "
            "below",
        )

    def models(self) -> None:
        """All models, or the one that the path names."""
        query = parse_qs(urlsplit(self._handler.path.rstrip("/")).query)
        models = [_model(model["id"]) for model in ModelsEndpoint(self._scope.generator).models(0)]
        name = unquote(self._handler.route.removeprefix(MODELS).removeprefix("/"))
        if not name:
            self._handler.send_json(200, _page(models, query))
            return
        found = next((model for model in models if model["id"] == name), None)
        if found is None:
            raise StatusError(404, f"model: {name}")
        self._handler.send_json(200, found)

    # -- a message ---------------------------------------------------------------------------------

    def _parse(self, body: Json, counts: bool) -> ParsedRequest:
        return parse(body, self._scope.cli_args, counts)

    def _render(self, parsed: ParsedRequest, context: Any, index: int) -> Renderer:
        return MessageRenderer(parsed, context)

    def _error(self, error: Exception) -> tuple[int, Json]:
        status, message = anthropic_status(error)
        if status >= 500:
            message = " ".join(message.split())
        return status, anthropic_error(status, message, self._scope.options.id)


def _model(name: str) -> Json:
    released = "1970-01-01T00:00:00Z"  # the protocol's way to say that it is not known
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": released,
        "lifecycle": "active",
    }


def _page(models: list[Json], query: dict[str, list[str]]) -> Json:
    """The part of a list that limit, after_id and before_id choose. Raises InvalidRequestError."""
    limit = query.get("limit", ["20"])[0]
    if not limit.isdecimal() or not 1 <= int(limit) <= 1000:
        raise InvalidRequestError("limit", "Input should be between 1 and 1000")
    names = [model["id"] for model in models]
    after, before = (query.get(name, [""])[0] for name in ("after_id", "before_id"))
    found = models[
        names.index(after) + 1 if after in names else 0 : names.index(before)
        if before in names
        else len(names)
    ]
    shown = found[-int(limit) :] if before else found[: int(limit)]
    return {
        "data": shown,
        "has_more": len(shown) < len(found),
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
    }


ROUTES = (
    MessagesEndpoint.route(MESSAGES, MessagesEndpoint.reply, "POST", is_explained=True),
    MessagesEndpoint.route(MESSAGES, MessagesEndpoint.refuse, "GET", "DELETE", is_explained=True),
    MessagesEndpoint.route(f"{MESSAGES}/count_tokens", MessagesEndpoint.count, "POST"),
    MessagesEndpoint.route(f"{MESSAGES}/*", MessagesEndpoint.refuse, "GET", "POST", "DELETE"),
    MessagesEndpoint.route(
        f"{MODELS}/*", MessagesEndpoint.models, "GET", header="anthropic-version"
    ),
)
