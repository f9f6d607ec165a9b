"""Ollama's API below /api: chats, prompts and the list of models as its clients read them.

Replies are streams of JSON lines unless the body says otherwise. Works for one request, on the socket's thread.
"""

from __future__ import annotations

import json
import time
from typing import Any

from ...errors import ModelNotFoundError
from ...mlx_lm_compat import ModelDescription
from ..models.catalog import DEFAULT
from ..models.http import ModelsEndpoint
from ..request import ParsedRequest
from ..validation import validated
from .embeddings import EmbedBody, texts_of, vectors_of
from .endpoint import Endpoint
from .errors import StatusError, openai_status
from .ollama_body import Named, ReplyBody
from .ollama_models import OllamaModels
from .ollama_reply import OllamaRenderer, written_now
from .ollama_request import parse_chat, parse_generate
from .reply import Json, Packet

OLLAMA = "/api"
CHAT, GENERATE, SHOW = "/api/chat", "/api/generate", "/api/show"
EMBEDS = ("/api/embed", "/api/embeddings")
MANAGES = ("/api/pull", "/api/push", "/api/create", "/api/copy", "/api/delete")
# The version of Ollama whose API this is; clients compare it with the one that they need.
VERSION = "0.12.0"
# What Ollama answers to GET /, by which clients see that it runs.
RUNNING = b"Ollama is running"


class OllamaEndpoint(Endpoint):
    """Chats, prompts, embeddings and models in Ollama's shapes."""

    stream_type = "application/x-ndjson"

    def __init__(self, handler: Any) -> None:
        super().__init__(handler)
        self._arrived = time.monotonic_ns()
        self._name = ""

    def _get(self) -> None:
        models = OllamaModels(self._scope.generator)
        route = self._handler.route
        if route == "/api/tags":
            self._handler.send_json(200, models.tags())
        elif route == "/api/ps":
            self._handler.send_json(200, models.loaded())
        elif route == "/api/version":
            self._handler.send_json(200, {"version": VERSION})
        else:
            self._refuse()

    def _post(self) -> None:
        route = self._handler.route
        if route in (CHAT, GENERATE):
            self._generate(route)
        elif route == SHOW:
            name = validated(Named, self._body()).id
            self._handler.send_json(200, OllamaModels(self._scope.generator).show(name))
        elif route in EMBEDS:
            self._embed(route)
        else:
            self._refuse()

    def _refuse(self) -> None:
        if self._handler.route in MANAGES:
            why = "Models are not managed over this API: give serve --model, --allow-models or --allow-downloads"
            raise StatusError(501, f"{why}, and requests load the models that they name.")
        super()._refuse()

    # -- a reply -------------------------------------------------------------------------------------------------------

    def _generate(self, route: str) -> None:
        body = self._body()
        parse = parse_chat if route == CHAT else parse_generate
        given, parsed = parse(body, self._scope.cli_args)
        self._name = given.shown
        self._scope.parse_headers(self._handler.headers, body)
        self._scope.take_options(self._handler.headers, given)
        self._scope.options.keep_seconds = given.keep_alive
        if parsed is None:
            self._load(given)
        else:
            self._reply(parsed)

    def _load(self, given: ReplyBody) -> None:
        """A request without a prompt loads its model, or unloads it if the model is to be kept for no time."""
        models, wanted = ModelsEndpoint(self._scope.generator), ModelDescription(given.id, DEFAULT, None)
        models.change(wanted, given.unloads, keep_seconds=given.keep_alive)
        said: Json = {"response": ""} if self._handler.route == GENERATE else {"message": {"role": "assistant", "content": ""}}
        reason = "unload" if given.unloads else "load"
        packet = {"model": self._name, "created_at": written_now(), **said, "done": True, "done_reason": reason}
        self._handler.send_json(200, packet)

    def _embed(self, route: str) -> None:
        given = validated(EmbedBody, self._body())
        self._scope.options.keep_seconds = given.keep_alive
        wanted = given.prompt if route == EMBEDS[1] else given.input
        vectors, count = vectors_of(self._handler, given.id, texts_of(wanted), given.dimensions)
        duration = time.monotonic_ns() - self._arrived
        figures = {"total_duration": duration, "load_duration": 0, "prompt_eval_count": count}
        self._handler.send_json(
            200, {"embedding": vectors[0]} if route == EMBEDS[1] else {"model": given.shown, "embeddings": vectors, **figures}
        )

    def _render(self, parsed: ParsedRequest, context: Any) -> OllamaRenderer:
        return OllamaRenderer(parsed, context, self._name, self._handler.route == CHAT, self._arrived)

    def _packed(self, packet: Packet) -> bytes:
        return packet if isinstance(packet, bytes) else json.dumps(packet).encode() + b"\n"

    def _error(self, error: Exception) -> tuple[int, Json]:
        status = 404 if isinstance(error, ModelNotFoundError) else openai_status(error)
        return status, {"error": str(error) or type(error).__name__}
