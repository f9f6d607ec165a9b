"""POST /v1/chat/completions: mlx-lm's endpoint with tool_choice, and with text cut as in the other protocols.

Space around calls and thinking belongs to the template: a client that sends it back would have it twice in the next prompt.
For one request of a BlockpoolHandler, on the socket's thread.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from ...mlx_lm_compat import GenerationArguments, LogitsProcessorArguments, ModelDescription, SamplingArguments, image_parts
from ..fields import InvalidRequestError, checked, field, one_of
from ..request import ChatRequest
from .endpoint import Endpoint
from .errors import openai_answer
from .reply import Call, Done, Event, ReplyParser, ReplyReader, Silence, Text, Thinking, call_id

log = logging.getLogger(__name__)

CHOICES = ("auto", "none", "required")
FINISH_REASONS = {"stop": "stop", "stop_word": "stop", "length": "length", "calls": "tool_calls"}
Arguments = TypeVar("Arguments")


@dataclasses.dataclass(frozen=True)
class Choice:
    """What a body says about calls: ChatRequest.calls, the tools to show, and whether the reply ends with its first call."""

    calls: Any
    tools: list[Any]
    one_call: bool


def choice_of(body: dict[str, Any]) -> Choice:
    """Raises InvalidRequestError, also for what a reply would need and cannot have."""
    tools = field(body, "tools", "", list, [])
    one_call = not field(body, "parallel_tool_calls", "", bool, True)
    if field(body, "n", "", int, 1) != 1:
        raise InvalidRequestError("n", f"found {body['n']}; this server gives one choice. Ask several times instead.")
    shape = field(field(body, "response_format", "", dict, {}), "type", "response_format", str, "text")
    if shape != "text":
        why = "mlx-lm cannot hold a reply to a format; describe it in the prompt, or use a tool"
        raise InvalidRequestError("response_format", f"found {shape[:50]!r}; {why}")
    choice: Any = body.get("tool_choice")
    if choice is None:
        return Choice("may", tools, one_call)
    if isinstance(choice, str):
        one_of(choice, CHOICES, "tool_choice")
        if choice == "required" and not tools:
            raise InvalidRequestError("tool_choice", "'required' needs tools, and there are none")
        return Choice({"auto": "may", "none": "never", "required": "must"}[choice], tools, one_call)
    one_of(field(checked(choice, dict, "tool_choice"), "type", "tool_choice", str), ("function",), "tool_choice.type")
    name = field(field(choice, "function", "tool_choice", dict), "name", "tool_choice.function", str)
    tools = [tool for tool in tools if _name_of(tool) == name]
    if not tools:
        raise InvalidRequestError("tool_choice.function.name", f"Tool {name[:50]!r} not found in tools")
    return Choice("must", tools, one_call)


def _name_of(tool: Any) -> Any:
    function = tool.get("function") if isinstance(tool, dict) else None
    return function.get("name") if isinstance(function, dict) else None


def chat_request(body: dict[str, Any], request: Any, choice: Choice) -> ChatRequest:
    """mlx-lm's request with the choice and the place of its first image."""
    image_at = next((f"messages[{i}]" for i, message in enumerate(request.messages) if any(image_parts([message]))), None)
    return ChatRequest(
        "chat", "", request.messages, choice.tools or None, body.get("role_mapping"), calls=choice.calls, image_at=image_at
    )


class ChatEndpoint(Endpoint):
    """Answers one request of `handler`, whose body mlx-lm has read into the handler's fields."""

    def __init__(self, handler: Any, request: ChatRequest, stop_words: list[str], one_call: bool) -> None:
        super().__init__(handler)
        self._request = request
        self._arguments = self._all_arguments(stop_words)
        self._one_call = one_call
        # Of the tokens, for a client that asks for them: numbers, log probabilities, and those of others.
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._others: list[Any] = []

    def answer(self) -> None:
        """A stream or a whole response; an error as its client reads errors."""
        try:
            context, responses = self._scope.generate(self._request, self._arguments, progress_callback=self._progress)
        except ConnectionError:
            raise
        except Exception as error:
            self._send(*openai_answer(error))
            return
        parser = ReplyParser(context, self._request, self._arguments.stop_words, self._one_call)
        reader = ReplyReader(parser, keeps_space=True)
        try:
            events = reader.events(self._collected(responses))
            if self._handler.stream:
                self._stream(context, events)
            else:
                self._whole(context, reader, events)
        finally:
            context.stop()
        self._remember(self._request, reader)

    # -- the request ---------------------------------------------------------------------------------------------------

    def _all_arguments(self, stop_words: list[str]) -> GenerationArguments:
        handler = self._handler
        return GenerationArguments(
            model=ModelDescription(handler.requested_model, handler.requested_draft_model, handler.adapter),
            sampling=self._fields(SamplingArguments),
            logits=self._fields(LogitsProcessorArguments),
            stop_words=stop_words,
            max_tokens=handler.max_tokens,
            num_draft_tokens=handler.num_draft_tokens,
            logprobs=handler.logprobs,
            top_logprobs=handler.top_logprobs,
            seed=handler.seed,
            chat_template_kwargs=handler.chat_template_kwargs,
        )

    def _fields(self, kind: type[Arguments]) -> Arguments:
        """Arguments whose names are those of the handler's fields."""
        names = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
        return kind(**{name: getattr(self._handler, name) for name in names})

    # -- the reply -----------------------------------------------------------------------------------------------------

    def _collected(self, responses: Iterable[Any]) -> Iterator[Any]:
        for response in responses:
            self._tokens.append(response.token)
            if self._arguments.logprobs:
                self._logprobs.append(response.logprob)
            if self._arguments.top_logprobs > 0:
                self._others.append(response.top_tokens)
            yield response

    def _stream(self, context: Any, events: Iterator[Event]) -> None:
        handler, calls = self._handler, 0
        handler.start_stream()
        for event in events:
            if isinstance(event, Silence):
                self._comment("keepalive")
            elif isinstance(event, Text) and event.text:
                self._chunk(handler.generate_response(event.text, None))
            elif isinstance(event, Thinking):
                self._chunk(handler.generate_response("", None, reasoning_text=event.text))
            elif isinstance(event, Call):
                self._chunk(handler.generate_response("", None, tool_calls=[_call(event) | {"index": calls}]))
                calls += 1
            elif isinstance(event, Done):
                self._chunk(handler.generate_response("", FINISH_REASONS[event.reason]))
        if (handler.stream_options or {}).get("include_usage"):
            self._chunk(handler.completion_usage_response(len(context.prompt), len(self._tokens), context.prompt_cache_count))
        handler.wfile.write(b"data: [DONE]\n\n")
        handler.wfile.flush()

    def _whole(self, context: Any, reader: ReplyReader, events: Iterator[Event]) -> None:
        seen = list(events)
        answer = self._handler.generate_response(
            reader.message[0],
            FINISH_REASONS[reader.done().reason],
            len(context.prompt),
            len(self._tokens),
            context.prompt_cache_count,
            token_logprobs=self._logprobs,
            top_tokens=self._others,
            tokens=self._tokens,
            tool_calls=[_call(event) for event in seen if isinstance(event, Call)],
            reasoning_text="".join(event.text for event in seen if isinstance(event, Thinking)),
        )
        self._send(200, answer)

    # -- the wire ------------------------------------------------------------------------------------------------------

    def _progress(self, done: int, total: int) -> None:
        log.info("Prompt processing progress: %d/%d", done, total)
        self._comment(f"keepalive {done}/{total}")

    def _comment(self, text: str) -> None:
        if self._handler.stream:
            self._handler.wfile.write(f": {text}\n\n".encode())
            self._handler.wfile.flush()

    def _chunk(self, packet: dict[str, Any]) -> None:
        self._handler.wfile.write(f"data: {json.dumps(packet)}\n\n".encode())
        self._handler.wfile.flush()


def _call(call: Call) -> dict[str, Any]:
    return {"function": {"name": call.name, "arguments": call.written}, "type": "function", "id": call_id(call)}
