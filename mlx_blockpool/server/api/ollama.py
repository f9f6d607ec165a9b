"""Ollama's API below /api: chats, prompts and the list of models as its clients read them.

Replies are streams of JSON lines unless the body says otherwise. Works for one request, on the
socket's thread.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from typing import Any

from ...errors import ModelNotFoundError
from ...mlx_lm_compat import ModelDescription
from ..bodies import Json, StatusError
from ..models.catalog import DEFAULT
from ..models.http import ModelsEndpoint
from ..request import ParsedRequest
from ..validation import validated
from . import ollama_models
from .call_stream import Call, CallPiece
from .embeddings import EmbedBody, texts_of, vectors_of
from .endpoint import Endpoint
from .errors import OLLAMA, openai_status
from .ollama_models import written_now
from .ollama_request import Named, ReplyBody, parse_chat, parse_generate
from .reply import Packet, PieceRenderer, Renderer, StopReason, call_id

CHAT, GENERATE = "/api/chat", "/api/generate"
EMBEDS = ("/api/embed", "/api/embeddings")
MANAGES = ("/api/pull", "/api/push", "/api/create", "/api/copy", "/api/delete")
# The version of Ollama whose API this is; clients compare it with the one that they need.
VERSION = "0.12.0"
# What Ollama answers to GET /, by which clients see that it runs.
RUNNING = b"Ollama is running"


class OllamaRenderer(PieceRenderer):
    """Renders one reply to a chat, or to a prompt of /api/generate.

    `arrived`: when the request did, by time.monotonic_ns().
    """

    thinking_field = "thinking"
    # Arguments are an object, which has no parts: each call is sent when it is whole.
    shows_parts = False

    def __init__(self, parsed: ParsedRequest, context: Any, is_chat: bool, arrived: int) -> None:
        super().__init__(parsed, context)
        self._is_chat, self._arrived = is_chat, arrived
        self._started = time.monotonic_ns()
        self._first: int | None = None

    def keepalive(self, progress: str) -> Iterable[Packet]:
        return [self._packet("")]

    def add(self, response: Any) -> Iterator[Packet]:
        self._first = self._first or time.monotonic_ns()
        return super().add(response)

    def _end(self, reason: StopReason) -> Iterable[Packet]:
        last = {
            "done": True,
            "done_reason": "length" if reason.is_cut else "stop",
            **self._figures(),
        }
        if self._parsed.body.stream:
            return [{**self._packet(""), **last}]
        blocks = self.parser.blocks
        calls = [_shown(call, index) for index, call in enumerate(blocks.calls)]
        more = {"thinking": blocks.thinking, "tool_calls": calls}
        more = {name: value for name, value in more.items() if value}
        self.whole = {**said(self._parsed.body, self._is_chat, blocks.text, **more), **last}
        if self._logprobs is not None:
            self.whole["logprobs"] = self._logprobs.drain()
        return ()

    def _packet(self, text: str, **more: Any) -> Json:
        packet = said(self._parsed.body, self._is_chat, text, **more)
        if self._logprobs is not None and (entries := self._logprobs.drain()):
            # Of the tokens since the line before.
            packet["logprobs"] = entries
        return packet

    def _called(self, piece: CallPiece) -> Json | None:
        # The parser has added the call to its blocks already.
        index = len(self.parser.blocks.calls) - 1
        return _shown(piece, index) if isinstance(piece, Call) else None

    def _figures(self) -> Json:
        """Tokens and durations in nanoseconds: until the request started, until its first token,
        and until its last.
        """
        ended = time.monotonic_ns()
        first = self._first or ended
        return {
            "total_duration": ended - self._arrived,
            "load_duration": self._started - self._arrived,
            "prompt_eval_count": self.usage.prompt,
            "prompt_eval_duration": first - self._started,
            "eval_count": self.usage.reply,
            "eval_duration": ended - first,
        }


def said(body: ReplyBody, is_chat: bool, text: str, **more: Any) -> Json:
    """A packet with a part of a reply."""
    content = (
        {"message": {"role": "assistant", "content": text, **more}}
        if is_chat
        else {"response": text, **more}
    )
    return {"model": body.shown, "created_at": written_now(), **content, "done": False}


def _shown(call: Call, index: int) -> Json:
    return {
        "id": call_id(call),
        "function": {"index": index, "name": call.name, "arguments": call.arguments},
    }


class OllamaEndpoint(Endpoint):
    """Chats, prompts, embeddings and models in Ollama's shapes."""

    stream_type = "application/x-ndjson"

    def __init__(self, handler: Any) -> None:
        super().__init__(handler)
        self._arrived = time.monotonic_ns()

    def tags(self) -> None:
        self._handler.send_json(200, ollama_models.tags(self._scope.generator))

    def loaded(self) -> None:
        self._handler.send_json(200, ollama_models.loaded(self._scope.generator))

    def version(self) -> None:
        self._handler.send_json(200, {"version": VERSION})

    def show(self) -> None:
        name = validated(Named, self._body()).id
        self._handler.send_json(200, ollama_models.show(self._scope.generator, name))

    def refuse_to_manage(self) -> None:
        why = (
            "Models are not managed over this API: give serve --model, --allow-models or "
            "--allow-downloads"
        )
        raise StatusError(501, f"{why}, and requests load the models that they name.")

    # -- a reply -----------------------------------------------------------------------------------

    def reply(self) -> None:
        parsed = self._parsed()
        self._scope.options.keep_seconds = parsed.body.keep_alive
        if parsed.request.messages or parsed.request.prompt:
            self._reply(parsed)
        else:
            self._load(parsed.body)

    def _parse(self, body: Json, counts: bool) -> ParsedRequest:
        parse = parse_chat if self._handler.route == CHAT else parse_generate
        return parse(body, self._scope.cli_args)

    def _load(self, given: ReplyBody) -> None:
        """A request without a prompt loads its model, or unloads it if the model is to be kept
        for no time.
        """
        if self._scope.page is not None:
            raise StatusError(403, "A page of another site may not load or unload models.")
        wanted = ModelDescription(given.id, DEFAULT, None)
        ModelsEndpoint(self._scope.generator).change(self._scope, wanted, given.unloads)
        reason = "unload" if given.unloads else "load"
        packet = said(given, self._handler.route == CHAT, "")
        self._handler.send_json(200, {**packet, "done": True, "done_reason": reason})

    def embed(self) -> None:
        given, is_one = validated(EmbedBody, self._body()), self._handler.route == EMBEDS[1]
        self._scope.options.keep_seconds = given.keep_alive if self._scope.page is None else None
        wanted = given.prompt if is_one else given.input
        vectors, count = vectors_of(self._handler, given.id, texts_of(wanted), given.dimensions)
        duration = time.monotonic_ns() - self._arrived
        figures = {"total_duration": duration, "load_duration": 0, "prompt_eval_count": count}
        several = {"model": given.shown, "embeddings": vectors, **figures}
        self._handler.send_json(200, {"embedding": vectors[0]} if is_one else several)

    def _render(self, parsed: ParsedRequest, context: Any, index: int) -> Renderer:
        return OllamaRenderer(parsed, context, self._handler.route == CHAT, self._arrived)

    def _packed(self, packet: Packet) -> bytes:
        return packet if isinstance(packet, bytes) else json.dumps(packet).encode() + b"\n"

    def _error(self, error: Exception) -> tuple[int, Json]:
        status = 404 if isinstance(error, ModelNotFoundError) else openai_status(error)
        return status, {"error": str(error) or type(error).__name__}


ROUTES = (
    *(
        OllamaEndpoint.route(path, OllamaEndpoint.reply, "POST", is_explained=True)
        for path in (CHAT, GENERATE)
    ),
    *(
        OllamaEndpoint.route(path, OllamaEndpoint.refuse, "GET", "DELETE", is_explained=True)
        for path in (CHAT, GENERATE)
    ),
    *(OllamaEndpoint.route(path, OllamaEndpoint.embed, "POST") for path in EMBEDS),
    *(
        OllamaEndpoint.route(path, OllamaEndpoint.refuse_to_manage, "POST", "GET", "DELETE")
        for path in MANAGES
    ),
    OllamaEndpoint.route("/api/show", OllamaEndpoint.show, "POST"),
    OllamaEndpoint.route("/api/tags", OllamaEndpoint.tags, "GET"),
    OllamaEndpoint.route("/api/ps", OllamaEndpoint.loaded, "GET"),
    OllamaEndpoint.route("/api/version", OllamaEndpoint.version, "GET"),
    OllamaEndpoint.route(f"{OLLAMA}/*", OllamaEndpoint.refuse, "GET", "POST", "DELETE"),
)
