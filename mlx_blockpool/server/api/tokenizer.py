"""POST /tokenize, /detokenize and /apply-template, in llama.cpp's shapes and in vLLM's.

The first two differ between both servers by names: text is `content` to llama.cpp, and `prompt` or
`messages` to vLLM. Prompt workers tokenize, and write the long parts of an answer. For one request,
on the socket's thread.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic import Field

from ...mlx_lm_compat import ModelDescription
from ..bodies import InvalidRequestError
from ..prompts.job import TokenizerJob, TokenizerResult
from ..request import ChatRequest
from ..validation import (
    Body,
    List,
    Object,
    Sampling,
    Text,
    TextOr,
    Token,
    generation_arguments,
    validated,
)
from .completions_request import Messages
from .endpoint import Endpoint


class TokenizerBody(Body):
    model: Text = "default_model"

    @property
    def description(self) -> ModelDescription:
        return ModelDescription(self.model, "default_model", None)


class ChatFields(TokenizerBody):
    """A chat as both servers take it."""

    messages: Messages | None = None
    tools: list[Any] = Field(default=[])
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: Text | None = None
    chat_template_kwargs: Object = Field(default={})


class TokenizeBody(ChatFields):
    """llama.cpp's `content`, `add_special`, `parse_special` and `with_pieces`; all others are
    vLLM's.
    """

    content: TextOr[List[Text | Token]] | None = None
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False
    prompt: Text | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False


class DetokenizeBody(TokenizerBody):
    tokens: List[Token]


class TemplateBody(ChatFields):
    messages: Messages


class TokenizerEndpoint(Endpoint):
    """Tokens and rendered chats, without a reply."""

    def _send(self, written: dict[str, bytes]) -> None:
        members = (json.dumps(name).encode() + b": " + value for name, value in written.items())
        self._handler.send_body(200, "application/json", b"{" + b", ".join(members) + b"}")

    def tokenize(self) -> None:
        given = validated(TokenizeBody, self._body())
        named = [
            name for name in ("content", "prompt", "messages") if getattr(given, name) is not None
        ]
        if len(named) != 1:
            found = " and ".join(named) or "none of them"
            raise InvalidRequestError(
                "", f"One of content, prompt and messages is needed; found {found}"
            )
        if given.content is not None:
            job = TokenizerJob(
                parts=[given.content] if isinstance(given.content, str) else given.content,
                adds_special_tokens=given.add_special,
                reads_special_tokens=given.parse_special,
                wants="pieces" if given.with_pieces else "tokens",
            )
            self._send({"tokens": self._convert(job, given).written["tokens"]})
            return
        if given.messages is None:
            job = TokenizerJob(parts=[given.prompt or ""])
        else:
            job = self._chat(given)
            job.tokenizes, job.adds_special_tokens = True, False
        if given.add_special_tokens is not None:
            job.adds_special_tokens = given.add_special_tokens
        job.wants = "strings" if given.return_token_strs else "tokens"
        result = self._convert(job, given)
        positions = self._scope.generator.preparation.positions(given.description)
        self._send(
            {
                "count": json.dumps(len(result.tokens)).encode(),
                "max_model_len": json.dumps(positions).encode(),
                "tokens": result.written["tokens"],
                "token_strs": result.written.get("token_strs", b"null"),
            }
        )

    def detokenize(self) -> None:
        given = validated(DetokenizeBody, self._body())
        text = (
            self._convert(TokenizerJob(tokens=given.tokens), given).written["text"]
            if given.tokens
            else b'""'
        )
        self._send({"content": text, "prompt": text})

    def apply_template(self) -> None:
        given = validated(TemplateBody, self._body())
        self._send({"prompt": self._convert(self._chat(given), given).written["text"]})

    def _chat(self, given: ChatFields) -> TokenizerJob:
        """The job of a chat, which is checked and normalised as for a reply."""
        options = self._scope.cli_args
        template = given.chat_template_kwargs | (
            {"chat_template": given.chat_template} if given.chat_template else {}
        )
        request = ChatRequest("chat", "", given.messages or [], given.tools or None, None)
        arguments = generation_arguments(Sampling(model=given.model), options, 1, [], template)
        self._scope.generator.preparation.check(request, arguments)
        self._scope.parse_headers(self._handler.headers, {})
        normalisers = self._scope.generator.normalisers
        messages, _ = normalisers.changes(self._scope.normalisers, request.messages, b"")
        switches = {"add_generation_prompt": given.add_generation_prompt}
        if given.continue_final_message:
            switches["continue_final_message"] = True
        template = {**options.chat_template_args, **template, **switches}
        return TokenizerJob(messages=messages, tools=request.tools, options=template)

    def _convert(self, job: TokenizerJob, given: TokenizerBody) -> TokenizerResult:
        return self._scope.generator.preparation.convert(job, given.description)


# SGLang has the first two under both names.
ROUTES = (
    *(
        TokenizerEndpoint.route(path, TokenizerEndpoint.tokenize, "POST")
        for path in ("/tokenize", "/v1/tokenize")
    ),
    *(
        TokenizerEndpoint.route(path, TokenizerEndpoint.detokenize, "POST")
        for path in ("/detokenize", "/v1/detokenize")
    ),
    TokenizerEndpoint.route("/apply-template", TokenizerEndpoint.apply_template, "POST"),
)
