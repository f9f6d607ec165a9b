"""The bodies of /v1/chat/completions and /v1/completions, as requests and generation arguments.

Knows no sockets.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from ...config import RequestConfig
from ...forms.output_format import OutputFormat
from ...mlx_lm_compat import image_parts
from ..bodies import InvalidRequestError, Json
from ..request import ChatRequest, ParsedRequest, PromptRequest
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
from .conversation import arguments_of
from .formats import (
    PLAIN,
    ChatReplyFormat,
    StructuredOutputs,
    Texts,
    named_form,
    only_form,
)
from .tools import ToolChoice, calls_of, chat_request, strict_places, tools_named


def _has_role(message: Json) -> Json:
    if not isinstance(message.get("role"), str):
        raise ValueError("Input should have a role, which is a string")
    return message


def _with_arguments(message: Json) -> Json:
    """The message with an object as the arguments of each call that has none."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_with_object(call) for call in calls]}


def _with_object(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    written = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(written, str) or not isinstance(function, dict) or arguments_of(written):
        return call
    return {**call, "function": {**function, "arguments": {}}}


Message = Annotated[Object, AfterValidator(_has_role), AfterValidator(_with_arguments)]
ChoiceCount = Annotated[Int, Field(ge=1, le=RequestConfig.choices)]
Messages = Annotated[List[Message], Field(min_length=1)]


def _is_count_or_flag(logprobs: Any) -> Any:
    most = RequestConfig.top_logprobs
    if not isinstance(logprobs, bool) and not (isinstance(logprobs, int) and 0 <= logprobs <= most):
        raise ValueError(
            f"Input should be true, false or a number from 0 to {most}; found {logprobs!r:.50}"
        )
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
    n: ChoiceCount = 1
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

    def form(self) -> OutputFormat | None:
        """The form of the reply.

        Raises InvalidRequestError, and SchemaError for a schema that cannot be kept.
        """
        return only_form(
            (
                self.response_format.wanted("response_format"),
                self.structured_outputs.wanted("structured_outputs"),
                named_form("json", self.guided_json, "guided_json"),
                named_form("regex", self.guided_regex, "guided_regex"),
                named_form("choice", self.guided_choice, "guided_choice"),
                named_form("grammar", self.guided_grammar, "guided_grammar"),
                named_form("json", self.json_schema, "json_schema"),
                # llama.cpp's clients may send an empty one.
                named_form("grammar", self.grammar or None, "grammar"),
            )
        )

    def request(self) -> PromptRequest:
        """Raises InvalidRequestError for fields that do not go together, and SchemaError."""
        raise NotImplementedError


class TextBody(CompletionBody):
    prompt: Text
    best_of: ChoiceCount | None = None
    logprobs: Annotated[Any, AfterValidator(_is_count_or_flag)] = False

    @property
    def num_choices(self) -> int:
        best_of = self.n if self.best_of is None else self.best_of
        if best_of < self.n:
            raise InvalidRequestError(
                "best_of", f"Input should be at least n, which is {self.n}; found {best_of}"
            )
        if best_of > self.n and self.stream:
            raise InvalidRequestError(
                "best_of", "the best choices are known at their ends; leave out stream or best_of"
            )
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
    """OpenAI's Predicted Outputs: text that the client expects in the reply, such as a file to
    change.
    """

    type: Literal["content"]
    content: TextOr[List[PredictedText]]

    @property
    def text(self) -> str:
        """Raises InvalidRequestError for a text that would take too much memory."""
        text = (
            self.content
            if isinstance(self.content, str)
            else "".join(part.text for part in self.content)
        )
        most = RequestConfig.prediction_characters
        if len(text) > most:
            raise InvalidRequestError(
                "prediction.content",
                f"a prediction may have {most:,} characters; this one has {len(text):,}",
            )
        return text


class ChatBody(CompletionBody):
    messages: Messages
    tools: list[Any] = Field(default=[])
    tool_choice: ToolChoice[NamedTool] = "auto"
    parallel_tool_calls: bool = True
    role_mapping: Any = None
    prediction: PredictedContent | None = None

    def request(self) -> ChatRequest:
        tools, choice = self.tools, self.tool_choice
        if isinstance(choice, NamedTool):
            tools = tools_named(choice.function.name, tools, "tool_choice.function.name")
        image_at = next(
            (
                f"messages[{i}]"
                for i, message in enumerate(self.messages)
                if any(image_parts([message]))
            ),
            None,
        )
        calls = calls_of(choice if isinstance(choice, str) else "required", tools)
        form, prediction = self.form(), "" if self.prediction is None else self.prediction.text
        request = chat_request(
            self.messages, tools, calls, strict_places(self.tools), form, image_at=image_at
        )
        request.prediction, request.role_mapping = prediction, self.role_mapping
        return request


def parse(body: Json, options: Any, is_chat: bool) -> ParsedRequest:
    """Parse a body.

    `options`: the server's, for what the body leaves open. Raises InvalidRequestError and
    SchemaError.
    """
    given = validated(ChatBody if is_chat else TextBody, body)
    most = given.max_completion_tokens or given.max_tokens or options.max_tokens
    stop_words = [given.stop] if isinstance(given.stop, str) else given.stop
    arguments = generation_arguments(
        given, options, most, stop_words if given.stop else [], given.chat_template_kwargs
    )
    if not isinstance(given.logprobs, bool):
        arguments = replace(arguments, logprobs=True, top_logprobs=given.logprobs)
    request = given.request()
    request.choices = given.num_choices
    one_call = isinstance(given, ChatBody) and (
        not given.parallel_tool_calls or isinstance(given.tool_choice, NamedTool)
    )
    return ParsedRequest(request, arguments, given, one_call)
