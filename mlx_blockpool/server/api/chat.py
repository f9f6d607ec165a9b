"""POST /v1/chat/completions: what mlx-lm's endpoint does, with choices of tools, and with the text of the other protocols.

Space around calls and thinking belongs to the template: a client that sends it back would have it twice in the next prompt.
Works for one request of a BlockpoolHandler, on the socket's thread.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from ...mlx_lm_compat import GenerationArguments, LogitsProcessorArguments, ModelDescription, SamplingArguments, image_parts
from ..chat import ChatRequest
from ..fields import InvalidRequestError, checked, field, one_of
from .anthropic_stream import SILENT_TOKENS, Blocks, Event
from .openai_errors import answer_to
from .reply import Reading, Silence

log = logging.getLogger(__name__)

CHOICES = ("auto", "none", "required")
Arguments = TypeVar("Arguments")


@dataclasses.dataclass(frozen=True)
class Choice:
    """What a body says about calls: ChatRequest.calls, the tools to show, and whether the reply ends with its first call."""

    calls: Any
    tools: list[Any]
    one_call: bool


def choice_of(body: dict[str, Any]) -> Choice:
    """Raises InvalidRequestError, also for what a reply would have to have and cannot."""
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
    """mlx-lm's request with what it has no words for."""
    image_at = next((f"messages[{i}]" for i, message in enumerate(request.messages) if any(image_parts([message]))), None)
    return ChatRequest(
        "chat", "", request.messages, choice.tools or None, body.get("role_mapping"), calls=choice.calls, image_at=image_at
    )


class ChatEndpoint:
    """Answers one request of `handler`, whose body mlx-lm has read into the handler's fields."""

    def __init__(self, handler: Any, request: ChatRequest, stop_words: list[str], one_call: bool) -> None:
        self._handler = handler
        self._generator = handler.response_generator
        self._request = request
        self._arguments = self._all_arguments(stop_words)
        self._one_call = one_call
        # Of the tokens, for a client that wants them: numbers, log probabilities, and those of others.
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._others: list[Any] = []

    def answer(self) -> None:
        """A stream or a whole answer; an error as its client reads errors."""
        try:
            context, responses = self._generator.generate(self._request, self._arguments, progress_callback=self._progress)
        except Exception as error:
            self._handler.send_json(*answer_to(error))
            return
        reading = Reading(context, self._request, self._arguments.stop_words, self._one_call)
        blocks = Blocks(shows_thinking=True, keeps_space=True)
        try:
            events = self._events(reading, blocks, self._noted(responses))
            if self._handler.stream:
                self._stream(context, reading, events)
            else:
                self._whole(context, reading, blocks, events)
        finally:
            context.stop()
        if reading.stop_word is None and self._request.calls != "must":
            # What is sampled behind a given beginning is not the whole message.
            self._generator.told(blocks.text, blocks.calls, True)

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

    def _noted(self, responses: Iterable[Any]) -> Iterator[Any]:
        for response in responses:
            self._tokens.append(response.token)
            if self._arguments.logprobs:
                self._logprobs.append(response.logprob)
            if self._arguments.top_logprobs > 0:
                self._others.append(response.top_tokens)
            yield response

    def _events(self, reading: Reading, blocks: Blocks, responses: Iterable[Any]) -> Iterator[Event]:
        """The events of blocks; the client hears meanwhile that somebody is there."""
        silent = 0
        for piece in reading.read(responses):
            silent = silent + 1 if isinstance(piece, Silence) else 0
            if silent and silent % SILENT_TOKENS == 0:
                self._comment("keepalive")
            yield from blocks.add(piece)
        yield from blocks.end()

    def _stream(self, context: Any, reading: Reading, events: Iterator[Event]) -> None:
        handler, calls = self._handler, 0
        handler._set_stream_headers(200)
        handler.end_headers()
        for event in events:
            delta = event.get("delta") or event.get("content_block") or {}
            if delta.get("type") == "text_delta":
                self._write(handler.generate_response(delta["text"], None))
            elif delta.get("type") == "thinking_delta":
                self._write(handler.generate_response("", None, reasoning_text=delta["thinking"]))
            elif delta.get("type") == "tool_use":
                called = delta
            elif delta.get("type") == "input_json_delta":
                call = _call(called["id"], called["name"], delta["partial_json"]) | {"index": calls}
                self._write(handler.generate_response("", None, tool_calls=[call]))
                calls += 1
        self._write(handler.generate_response("", _reason(reading)))
        if (handler.stream_options or {}).get("include_usage"):
            self._write(handler.completion_usage_response(len(context.prompt), len(self._tokens), context.prompt_cache_count))
        handler.wfile.write(b"data: [DONE]\n\n")
        handler.wfile.flush()

    def _whole(self, context: Any, reading: Reading, blocks: Blocks, events: Iterator[Event]) -> None:
        thoughts = [e["delta"]["thinking"] for e in events if e.get("delta", {}).get("type") == "thinking_delta"]
        answer = self._handler.generate_response(
            blocks.text,
            _reason(reading),
            len(context.prompt),
            len(self._tokens),
            context.prompt_cache_count,
            token_logprobs=self._logprobs,
            top_tokens=self._others,
            tokens=self._tokens,
            tool_calls=[_call(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in blocks.calls],
            reasoning_text="".join(thoughts),
        )
        self._handler.send_json(200, answer)

    # -- the wire ------------------------------------------------------------------------------------------------------

    def _progress(self, done: int, total: int) -> None:
        log.info("Prompt processing progress: %d/%d", done, total)
        self._comment(f"keepalive {done}/{total}")

    def _comment(self, text: str) -> None:
        if self._handler.stream:
            self._handler.wfile.write(f": {text}\n\n".encode())
            self._handler.wfile.flush()

    def _write(self, packet: dict[str, Any]) -> None:
        self._handler.wfile.write(f"data: {json.dumps(packet)}\n\n".encode())
        self._handler.wfile.flush()


def _call(called: str, name: str, arguments: str) -> dict[str, Any]:
    return {
        "function": {"name": name, "arguments": arguments},
        "type": "function",
        "id": f"call_{called.removeprefix('toolu_')}",
    }


def _reason(reading: Reading) -> str:
    if reading.finish == "length":
        return "length"
    return "tool_calls" if reading.num_calls and reading.stop_word is None else "stop"
