"""POST /v1/chat/completions and /v1/completions: chats have tool_choice, and text that is cut as in the other protocols.

Space around calls and thinking belongs to the template: a client that sends it back would have it twice in the next prompt.
For one request, on the socket's thread.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from ...config import RequestConfig
from ...forms.wanted import Wanted
from ...mlx_lm_compat import image_parts
from ..bodies import InvalidRequestError
from ..request import ChatRequest, ParsedRequest, PromptRequest
from ..scope import retention_of
from ..validation import (
    AllSampling,
    Body,
    Int,
    List,
    Object,
    Positive,
    Text,
    TextOr,
    generation_arguments,
    validated,
)
from .completions_reply import ChatRenderer, ChoicesRenderer, TextRenderer, keepalive
from .endpoint import Endpoint
from .errors import StatusError
from .formats import PLAIN, ChatReplyFormat, StructuredOutputs, Texts, choice_form, json_form, only_form, text_form
from .reply import Json, Packet
from .tools import ToolChoice, calls_of, held_tools, strict_places, tools_named


def _has_role(message: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(message.get("role"), str):
        raise ValueError("Input should have a role, which is a string")
    return message


Message = Annotated[Object, AfterValidator(_has_role)]


def _is_count_or_flag(logprobs: Any) -> Any:
    most = RequestConfig.top_logprobs
    if not isinstance(logprobs, bool) and not (isinstance(logprobs, int) and 0 <= logprobs <= most):
        raise ValueError(f"Input should be true, false or a number from 0 to {most}; found {logprobs!r:.50}")
    return logprobs


class StreamOptions(Body):
    include_usage: bool = False


class CompletionBody(AllSampling):
    """The fields of both endpoints."""

    stream_options: StreamOptions = StreamOptions()
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    stop: TextOr[List[Text]] = ""
    chat_template_kwargs: Object | None = None
    n: Annotated[Int, Field(ge=1, le=RequestConfig.choices)] = 1
    response_format: ChatReplyFormat = PLAIN
    structured_outputs: StructuredOutputs = StructuredOutputs()
    guided_json: TextOr[Object] | None = None
    guided_regex: Text | None = None
    guided_choice: Texts | None = None
    guided_grammar: Text | None = None
    json_schema: TextOr[Object] | None = None
    grammar: Text | None = None

    @property
    def num_choices(self) -> int:
        """The number of choices to generate."""
        return self.n

    def form(self) -> Wanted | None:
        """The form of the reply. Raises InvalidRequestError, and SchemaError for a schema that cannot be kept."""
        return only_form(
            (
                self.response_format.wanted("response_format"),
                self.structured_outputs.wanted("structured_outputs"),
                json_form(self.guided_json, "guided_json"),
                text_form("regex", self.guided_regex, "guided_regex"),
                choice_form(self.guided_choice, "guided_choice"),
                text_form("grammar", self.guided_grammar, "guided_grammar"),
                json_form(self.json_schema, "json_schema"),
                # llama.cpp's clients may send an empty one.
                text_form("grammar", self.grammar or None, "grammar"),
            )
        )

    def request(self) -> PromptRequest:
        """Raises InvalidRequestError for fields that do not go together, and SchemaError."""
        raise NotImplementedError


class TextBody(CompletionBody):
    prompt: Text
    best_of: Annotated[Int, Field(ge=1, le=RequestConfig.choices)] | None = None
    logprobs: Annotated[Any, AfterValidator(_is_count_or_flag)] = False

    @property
    def num_choices(self) -> int:
        best_of = self.n if self.best_of is None else self.best_of
        if best_of < self.n:
            raise InvalidRequestError("best_of", f"Input should be at least n, which is {self.n}; found {best_of}")
        if best_of > self.n and self.stream:
            raise InvalidRequestError("best_of", "the best choices are known at their ends; leave out stream, or ask for n alone")
        return best_of

    def request(self) -> PromptRequest:
        return PromptRequest("text", self.prompt, [], None, None, form=self.form())


class Function(Body):
    name: Text


class NamedTool(Body):
    type: Literal["function"]
    function: Function


class PredictedText(Body):
    type: Literal["text"]
    text: Text


class PredictedContent(Body):
    """OpenAI's Predicted Outputs: text that the client expects in the reply, such as a file that is to be changed."""

    type: Literal["content"]
    content: TextOr[List[PredictedText]]

    @property
    def text(self) -> str:
        """Raises InvalidRequestError for a text that would take too much memory."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        most = RequestConfig.prediction_characters
        if len(text) > most:
            raise InvalidRequestError(
                "prediction.content", f"a prediction may have {most:,} characters; this one has {len(text):,}"
            )
        return text


class ChatBody(CompletionBody):
    messages: Annotated[List[Message], Field(min_length=1)]
    tools: list[Any] = Field(default=[])
    tool_choice: ToolChoice[NamedTool] = "auto"
    parallel_tool_calls: bool = True
    role_mapping: Any = None
    prediction: PredictedContent | None = None

    def request(self) -> ChatRequest:
        tools, choice = self.tools, self.tool_choice
        if isinstance(choice, NamedTool):
            tools = tools_named(choice.function.name, tools, "tool_choice.function.name")
        image_at = next((f"messages[{i}]" for i, message in enumerate(self.messages) if any(image_parts([message]))), None)
        calls = calls_of(choice if isinstance(choice, str) else "required", tools)
        request = ChatRequest("chat", "", self.messages, tools or None, self.role_mapping, calls=calls, image_at=image_at)
        request.form, request.prediction = self.form(), "" if self.prediction is None else self.prediction.text
        request.held = held_tools(tools, calls, strict_places(self.tools), request.form)
        return request


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
        self._scope.take_options(self._handler.headers, parsed.body)
        self._reply_with_choices(parsed)

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
        if not isinstance(given.logprobs, bool):
            arguments = replace(arguments, logprobs=True, top_logprobs=given.logprobs)
        request = given.request()
        request.choices = given.num_choices
        one_call = isinstance(given, ChatBody) and (not given.parallel_tool_calls or isinstance(given.tool_choice, NamedTool))
        return ParsedRequest(request, arguments, given, one_call)

    def _reply_with_choices(self, parsed: ParsedRequest) -> None:
        """Generate all choices, and send them as a stream or whole."""
        kind = ChatRenderer if isinstance(parsed.request, ChatRequest) else TextRenderer
        choices = ChoicesRenderer(self._handler, parsed, kind, parsed.body.n)
        streams = parsed.body.stream
        with closing(self._scope.generate_choices(parsed.request, parsed.arguments, self._progress)) as parts:
            for index, part in parts:
                packets = choices.add(index, part)
                self._replies = choices.has_begun
                if streams and self._replies and not self._streams:
                    self._handler.start_stream(self.stream_type)
                    self._streams = True
                self._write_all(packets)
        last = choices.finish()
        for reply in choices.replies:
            self._remember(parsed, reply)
        self._write_all(last)
        if not streams:
            self._handler.send_json(200, choices.whole)

    def _keepalive(self, progress: str) -> Iterable[Packet]:
        return keepalive(progress)

    def _error(self, error: Exception) -> tuple[int, Json]:
        if self._replies:
            raise error
        return super()._error(error)
