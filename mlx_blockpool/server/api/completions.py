"""POST /v1/chat/completions and /v1/completions: chats have tool_choice, and text that is cut as in the other protocols.

Space around calls and thinking belongs to the template: a client that sends it back would have it twice in the next prompt.
mlx-lm's handler makes the packets of both, and serves the reply of a completion. For one request, on the socket's thread.
"""

from __future__ import annotations

import types
import uuid
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from ...mlx_lm_compat import image_parts
from ..bodies import InvalidRequestError
from ..request import ChatRequest, ParsedRequest, PromptRequest
from ..scope import retention_of
from ..validation import AllSampling, Body, Int, List, Object, ReplyFormat, Text, TextOr, generation_arguments, only, validated
from .conversation import ToolChoice, calls_of, tools_named
from .endpoint import Endpoint
from .errors import StatusError, openai_answer
from .reply import BlockEnd, Call, Done, Event, Json, Packet, Renderer, Thinking, call_id
from .reply import Text as TextEvent

FINISH_REASONS = {"stop": "stop", "stop_word": "stop", "length": "length", "calls": "tool_calls"}


def _has_role(message: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(message.get("role"), str):
        raise ValueError("Input should have a role, which is a string")
    return message


Message = Annotated[Object, AfterValidator(_has_role)]


class StreamOptions(Body):
    include_usage: bool = False


class CompletionBody(AllSampling):
    """What both endpoints read."""

    stream_options: StreamOptions = StreamOptions()
    max_tokens: Annotated[Int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[Int, Field(ge=1)] | None = None
    stop: TextOr[List[Text]] = ""
    chat_template_kwargs: Object | None = None

    def request(self) -> PromptRequest:
        """Raises InvalidRequestError for fields that do not go together."""
        raise NotImplementedError


class TextBody(CompletionBody):
    prompt: Text

    def request(self) -> PromptRequest:
        return PromptRequest("text", self.prompt, [], None, None)


class Function(Body):
    name: Text


class NamedTool(Body):
    type: Literal["function"]
    function: Function


class ChatBody(CompletionBody):
    messages: Annotated[List[Message], Field(min_length=1)]
    tools: list[Any] = Field(default=[])
    tool_choice: ToolChoice[NamedTool] = "auto"
    parallel_tool_calls: bool = True
    role_mapping: Any = None
    n: Annotated[Int, only(1, why="this server gives one choice. Ask several times instead.")] = 1
    response_format: ReplyFormat | None = None

    def request(self) -> ChatRequest:
        tools, choice = self.tools, self.tool_choice
        if isinstance(choice, NamedTool):
            tools = tools_named(choice.function.name, tools, "tool_choice.function.name")
        image_at = next((f"messages[{i}]" for i, message in enumerate(self.messages) if any(image_parts([message]))), None)
        calls = calls_of(choice if isinstance(choice, str) else "required", tools)
        return ChatRequest("chat", "", self.messages, tools or None, self.role_mapping, calls=calls, image_at=image_at)


class ChatRenderer(Renderer):
    """Renders a chat by the packets of mlx-lm's `handler`."""

    def __init__(self, handler: Any, parsed: ParsedRequest, context: Any) -> None:
        super().__init__(parsed, context, keeps_space=True)
        self._handler = handler
        self._arguments = parsed.arguments
        # Of the tokens, for a client that asks for them: numbers, log probabilities, and those of others.
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._others: list[Any] = []
        self._calls: list[Json] = []
        self._thinking: list[str] = []

    def keepalive(self, progress: str = "") -> Iterable[Packet]:
        return _keepalive(progress)

    def _events(self, responses: Iterable[Any]) -> Iterator[Event]:
        return super()._events(self._collected(responses))

    def _collected(self, responses: Iterable[Any]) -> Iterator[Any]:
        for response in responses:
            self._tokens.append(response.token)
            if self._arguments.logprobs:
                self._logprobs.append(response.logprob)
            if self._arguments.top_logprobs > 0:
                self._others.append(response.top_tokens)
            yield response

    def _render(self, event: TextEvent | Thinking | Call | BlockEnd) -> Iterable[Packet]:
        respond = self._handler.generate_response
        if isinstance(event, Thinking):
            self._thinking.append(event.text)
        elif isinstance(event, Call):
            self._calls.append(_call(event))
        if not self._handler.stream or isinstance(event, BlockEnd):
            return ()
        if isinstance(event, Call):
            return [respond("", None, tool_calls=[self._calls[-1] | {"index": len(self._calls) - 1}])]
        if isinstance(event, Thinking):
            return [respond("", None, reasoning_text=event.text)]
        return [respond(event.text, None)] if event.text else ()

    def _end(self, done: Done) -> Iterable[Packet]:
        handler, reason = self._handler, FINISH_REASONS[done.reason]
        counts = len(self._context.prompt), len(self._tokens), self._context.prompt_cache_count
        if handler.stream:
            usage = [handler.completion_usage_response(*counts)] if handler.stream_options["include_usage"] else []
            return [handler.generate_response("", reason), *usage, b"data: [DONE]\n\n"]
        self.whole = handler.generate_response(
            self.parser.blocks.text,
            reason,
            *counts,
            token_logprobs=self._logprobs,
            top_tokens=self._others,
            tokens=self._tokens,
            tool_calls=self._calls,
            reasoning_text="".join(self._thinking),
        )
        return ()


def _keepalive(progress: str) -> Iterable[Packet]:
    return [f": keepalive{progress}\n\n".encode()]


def _call(call: Call) -> Json:
    return {"function": {"name": call.name, "arguments": call.written}, "type": "function", "id": call_id(call)}


class CompletionsEndpoint(Endpoint):
    """Answers one request of `handler`, which answers itself where a reply fails."""

    def __init__(self, handler: Any) -> None:
        super().__init__(handler)
        self._replies = False

    def _post(self) -> None:
        body = self._body()
        try:
            parsed = self._parsed(body)
        except InvalidRequestError as error:
            # As the errors of mlx-lm's own endpoints, these name no param.
            raise StatusError(400, str(error)) from error
        self._scope.parse_headers(self._handler.headers, body)
        self._scope.options.retention = retention_of(body)
        self._scope.options.cache_salt = parsed.body.cache_salt
        if isinstance(parsed.request, ChatRequest):
            self._reply(parsed)
        else:
            self._complete(parsed)

    def _parsed(self, body: Json) -> ParsedRequest:
        """The request, after what its packets have is set in mlx-lm's handler. Raises InvalidRequestError."""
        is_chat = self._handler.route.endswith("/chat/completions")
        given = validated(ChatBody if is_chat else TextBody, body)
        options = self._scope.cli_args
        most = given.max_completion_tokens or given.max_tokens or options.max_tokens
        stop_words = [given.stop] if isinstance(given.stop, str) else given.stop
        template = given.chat_template_kwargs
        arguments = generation_arguments(given, options, most, stop_words if given.stop else [], template)
        kind = ("chat.completion.chunk" if given.stream else "chat.completion") if is_chat else "text_completion"
        vars(self._handler).update(
            requested_model=given.model,
            request_id=f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4()}",
            object_type=kind,
            stream=given.stream,
            stream_options=given.stream_options.model_dump(),
        )
        one_call = isinstance(given, ChatBody) and not given.parallel_tool_calls
        return ParsedRequest(given.request(), arguments, given, one_call)

    def _render(self, parsed: ParsedRequest, context: Any) -> ChatRenderer:
        self._replies = True
        return ChatRenderer(self._handler, parsed, context)

    def _complete(self, parsed: ParsedRequest) -> None:
        """A completion by mlx-lm's handler, which gets the reply where it would ask for it."""
        handler, arguments = self._handler, parsed.arguments
        reply = self._scope.generate(parsed.request, arguments, progress_callback=self._progress)
        self._replies, self._streams = True, parsed.body.stream
        handler.response_generator = types.SimpleNamespace(generate=lambda *_, **__: reply, cli_args=self._scope.cli_args)
        model = arguments.model
        vars(handler).update(requested_draft_model=model.draft, adapter=model.adapter)
        vars(handler).update(**vars(arguments.sampling), **vars(arguments.logits), **vars(arguments))
        handler.handle_completion(parsed.request, arguments.stop_words)

    def _keepalive(self, progress: str) -> Iterable[Packet]:
        return _keepalive(progress)

    def _error(self, error: Exception) -> tuple[int, Json]:
        if self._replies:
            raise error
        return openai_answer(error)
