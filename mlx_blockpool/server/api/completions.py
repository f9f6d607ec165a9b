"""POST /v1/chat/completions and /v1/completions: the endpoint, and the rendering of each choice and
of the whole response.

Space around calls and thinking belongs to the template: a client that sends it back would have it
twice in the next prompt. For one request, on the socket's thread.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ...errors import FormError, UnavailableError
from ..access import COMPLETIONS, cause_of
from ..bodies import InvalidRequestError, Json, StatusError
from ..request import ChatRequest, ParsedRequest
from ..scope import retention_of
from .call_readers import CallPart
from .call_stream import CallPiece
from .completions_request import parse
from .endpoint import Endpoint
from .errors import openai_answer, openai_error
from .logprobs import in_lists
from .reply import Event, Packet, PieceRenderer, Renderer, StopReason, Text, call_id


@dataclass(frozen=True)
class Packets:
    """Makes the packets of one response.

    head:  the fields that all of them have. said: the field of a choice that has its content.
    """

    head: Json
    said: str

    def choice(self, index: int, reason: str | None, text: str = "", **more: Any) -> Json:
        """A choice as it stands in a packet or in the whole response.

        `more`: further fields of a chat's message.
        """
        if self.said == "text":
            return {"index": index, "finish_reason": reason, "text": text}
        content = {"content": text or None} if text or self.said == "message" else {}
        message = {
            "role": "assistant",
            **content,
            **{name: value for name, value in more.items() if value},
        }
        return {"index": index, "finish_reason": reason, self.said: message}

    def packet(self, choice: Json) -> Json:
        return {**self.head, "choices": [choice]}


class ChoiceRenderer(PieceRenderer):
    """Renders one choice: its packets for a stream, or else the choice as it stands in the
    response.
    """

    def __init__(self, parsed: ParsedRequest, context: Any, index: int, packets: Packets) -> None:
        super().__init__(parsed, context)
        self._index, self._packets = index, packets

    def _choice(self, reason: str | None, text: str = "", **more: Any) -> Json:
        choice = self._packets.choice(self._index, reason, text, **more)
        if self._logprobs is not None:
            choice["logprobs"] = self._shown(self._logprobs.drain())
        return choice

    def _packet(self, text: str, reason: str | None = None, **more: Any) -> Json:
        return self._packets.packet(self._choice(reason, text, **more))

    def _shown(self, entries: list[Json]) -> Json:
        """Log probabilities in the protocol's shape."""
        return {"content": entries, "refusal": None}


class ChatRenderer(ChoiceRenderer):
    """Renders one choice of a chat."""

    thinking_field = "reasoning"
    # The calls that have begun, and whether the last of them is open.
    _num_calls, _is_open = 0, False

    def _called(self, piece: CallPiece) -> Json | None:
        if not isinstance(piece, CallPart):
            self._is_open = False
            return None
        head: Json = {}
        function = {"arguments": piece.text}
        if not self._is_open:
            self._num_calls, self._is_open = self._num_calls + 1, True
            head = {"id": call_id(piece), "type": "function"}
            function = {"name": piece.name, **function}
        return {"index": self._num_calls - 1, **head, "function": function}

    def _end(self, reason: StopReason) -> Iterable[Packet]:
        if self._parsed.body.stream:
            return [self._packet("", reason.openai)]
        blocks = self.parser.blocks
        calls = [call.openai(call_id(call)) for call in blocks.calls]
        self.whole = self._choice(
            reason.openai, blocks.text, reasoning=blocks.thinking, tool_calls=calls
        )
        return ()


class TextRenderer(ChoiceRenderer):
    """Renders one choice of a completion: the text outside of thinking and calls with its space,
    as mlx-lm's handler does.
    """

    # The text that was not sent, and the characters of the tokens whose log probabilities were.
    _text = ""
    _written = 0

    def add(self, response: Any) -> Iterator[Packet]:
        self._record(response)
        self._text += "".join(
            piece.text for piece in self.parser.parse(response) if isinstance(piece, Text)
        )
        if self._parsed.body.stream and self._text:
            yield self._packet(self._text)
            self._text = ""

    def _render(self, event: Event) -> Iterable[Packet]:
        return ()

    def _end(self, reason: StopReason) -> Iterable[Packet]:
        self.whole = self._choice(reason.openai, self._text)
        return [self._packets.packet(self.whole)]

    def _shown(self, entries: list[Json]) -> Json:
        """OpenAI's lists for a client that asks with a number, as its clients do; what a chat
        has for mlx-lm's `true`.
        """
        if isinstance(self._parsed.body.logprobs, bool):
            return {"content": entries}
        start = self._written
        self._written += sum(len(entry["token"]) for entry in entries)
        return in_lists(entries, start)


class CompletionsEndpoint(Endpoint):
    """Chats and completions. A request may have several choices, which fail by themselves."""

    _packets: Packets

    def _parse(self, body: Json, counts: bool) -> ParsedRequest:
        handler, is_chat = self._handler, self._handler.route.endswith("/chat/completions")
        try:
            parsed = parse(body, self._scope.cli_args, is_chat)
        except InvalidRequestError as error:
            # As the errors of mlx-lm's own endpoints, these name no param.
            raise StatusError(400, str(error)) from error
        streams = parsed.body.stream
        head = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4()}",
            "system_fingerprint": handler.system_fingerprint,
            "object": ("chat.completion.chunk" if streams else "chat.completion")
            if is_chat
            else "text_completion",
            "model": parsed.body.model,
            "created": handler.created,
        }
        self._packets = Packets(head, ("delta" if streams else "message") if is_chat else "text")
        self._scope.options.retention = retention_of(body)
        return parsed

    def _render(self, parsed: ParsedRequest, context: Any, index: int) -> Renderer:
        kind = ChatRenderer if isinstance(parsed.request, ChatRequest) else TextRenderer
        return kind(parsed, context, index, self._packets)

    def _failure_packets(self, parsed: ParsedRequest, index: int) -> Iterable[Packet]:
        return (
            [self._packets.packet(self._failed_choice(index))] if parsed.request.choices > 1 else ()
        )

    def _failed_choice(self, index: int) -> Json:
        return {**self._packets.choice(index, "error"), **openai_answer(self._errors[index])[1]}

    def _closing_packets(self, parsed: ParsedRequest) -> Iterable[Packet]:
        usage = {
            **self._packets.head,
            "object": "chat.completion",
            "choices": [],
            "usage": self._usage(parsed),
        }
        return [*([usage] if parsed.body.stream_options.include_usage else []), b"data: [DONE]\n\n"]

    def _response(self, parsed: ParsedRequest) -> Json:
        """The response.

        Of more choices than the client wants those with the highest mean logprob are shown.
        """
        indices = list(range(parsed.request.choices))
        if parsed.body.n < len(indices):
            indices = sorted(
                indices,
                key=lambda i: math.inf if i in self._errors else -self._choices[i].mean_logprob,
            )
        choices = [
            self._failed_choice(i) if i in self._errors else self._choices[i].whole
            for i in indices[: parsed.body.n]
        ]
        shown = [{**choice, "index": i} for i, choice in enumerate(choices)]
        return {**self._packets.head, "choices": shown, "usage": self._usage(parsed)}

    def _usage(self, parsed: ParsedRequest) -> Json:
        """The tokens of the prompt, which all choices have in common, and of all choices."""
        counts = self._choices[min(self._choices)].usage
        reply = sum(len(choice.parser.tokens) for choice in self._choices.values())
        usage = {
            "prompt_tokens": counts.prompt,
            "completion_tokens": reply,
            "total_tokens": counts.prompt + reply,
            "prompt_tokens_details": {"cached_tokens": counts.cached},
        }
        if not parsed.request.prediction:
            return usage
        predictions = parsed.request.predictions
        accepted = sum(each.accepted for each in predictions)
        rejected = sum(each.rejected for each in predictions)
        details = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}
        return {**usage, "completion_tokens_details": details}

    def _error(self, error: Exception) -> tuple[int, Json]:
        if self._choices and not isinstance(error, UnavailableError | FormError):
            # The request was served: it is the server that has failed.
            return 500, openai_error(500, cause_of(error))
        return super()._error(error)


ROUTES = tuple(
    CompletionsEndpoint.route(path, CompletionsEndpoint.reply, "POST", is_explained=True)
    for path in COMPLETIONS
)
