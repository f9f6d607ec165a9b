"""The answer of Anthropic's Messages API: its events in the protocol's order, and the message that they add up to.

Knows pieces of a reply and token counts; no sockets.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Iterator
from typing import Any

from .anthropic_request import Asked
from .reply import Call, Piece, Reading, Silence, Text, Thinking
from .thinking import signature_of

Event = dict[str, Any]

PING: Event = {"type": "ping"}
# Tokens that show nothing, as those inside of a long tool call, after which the client hears that there is still somebody.
SILENT_TOKENS = 32


class Blocks:
    """Content blocks as events, one after the other. `text` and `calls`: what the client was told, in OpenAI's shape.

    Space at the edges belongs to the template and not to the reply: before a call and around thinking. A reply of space alone is
    empty without `keeps_space`.
    """

    def __init__(self, shows_thinking: bool, keeps_space: bool = False) -> None:
        self._keeps_space = keeps_space
        self.text = ""
        self.calls: list[dict[str, Any]] = []
        self._shows_thinking = shows_thinking
        self._index = -1
        self._kind: type[Piece] | None = None
        self._open = self._strips = False
        self._held = ""
        self._thought = ""

    def add(self, piece: Piece) -> Iterator[Event]:
        """The events of a piece."""
        if isinstance(piece, Silence):
            return
        if self._kind is not type(piece):
            yield from self._close()
            self._strips = self._kind is not None or isinstance(piece, Thinking)
            self._kind = type(piece)
        if isinstance(piece, Call):
            yield from self._call(piece)
        else:
            yield from self._write(piece.text)

    def end(self) -> Iterator[Event]:
        """The rest. A message has at least one block."""
        is_alone = self._index < 0 and self._keeps_space
        if self._kind is Text and self._held and (self._open or is_alone):
            yield self._delta(self._told(self._held))
        yield from self._close()
        if self._index < 0:
            yield self._start({"type": "text", "text": ""})
            yield self._stop()

    def _write(self, text: str) -> Iterator[Event]:
        text = self._held + text
        if not self._open and self._strips:
            text = text.lstrip()
        shown = text.rstrip()
        self._held = text[len(shown) :]
        if not shown:
            return
        thinks = self._kind is Thinking
        if not self._open:
            yield self._start({"type": "thinking", "thinking": "", "signature": ""} if thinks else {"type": "text", "text": ""})
            self._open = True
        if not thinks:
            yield self._delta(self._told(shown))
            return
        self._thought += shown
        if self._shows_thinking:
            yield self._delta({"type": "thinking_delta", "thinking": shown})

    def _call(self, call: Call) -> Iterator[Event]:
        called = call.id or f"toolu_{uuid.uuid4().hex[:24]}"
        written = json.dumps(call.arguments, ensure_ascii=False)
        self.calls.append({"id": called, "type": "function", "function": {"name": call.name, "arguments": written}})
        yield self._start({"type": "tool_use", "id": called, "name": call.name, "input": {}})
        yield self._delta({"type": "input_json_delta", "partial_json": written})
        yield self._stop()

    def _told(self, text: str) -> dict[str, str]:
        self.text += text
        return {"type": "text_delta", "text": text}

    def _close(self) -> Iterator[Event]:
        if self._open:
            if self._kind is Thinking:
                yield self._delta({"type": "signature_delta", "signature": signature_of(self._thought, self._shows_thinking)})
            yield self._stop()
        self._open, self._held, self._thought = False, "", ""

    def _start(self, block: dict[str, Any]) -> Event:
        self._index += 1
        return {"type": "content_block_start", "index": self._index, "content_block": block}

    def _delta(self, delta: dict[str, str]) -> Event:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _stop(self) -> Event:
        return {"type": "content_block_stop", "index": self._index}


class Answer:
    """One answer. `blocks`: what was told; `finished`: whether all of it was, and it ended by itself."""

    def __init__(self, asked: Asked, context: Any) -> None:
        self.blocks = Blocks(asked.shows_thinking)
        self.finished = False
        self._asked = asked
        self._context = context
        self._reading = Reading(context, asked.request, asked.arguments.stop_words, asked.one_call)

    def events(self, responses: Iterable[Any]) -> Iterator[Event]:
        """All events; `responses` are read on the way."""
        message: dict[str, Any] = {
            "id": f"msg_{uuid.uuid4().hex[:24]}",
            "type": "message",
            "role": "assistant",
            "model": self._asked.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {**self._input_usage(), "output_tokens": 0},
        }
        yield {"type": "message_start", "message": message}
        yield PING
        if self._asked.max_tokens == 0:
            # The engine generates one token at least; nobody has asked for it.
            for _ in responses:
                pass
        else:
            yield from self._content(responses)
        yield {
            "type": "message_delta",
            "delta": {"stop_reason": self._stop_reason(), "stop_sequence": self._reading.stop_word},
            "usage": {**self._input_usage(), **self._output_usage()},
        }
        yield {"type": "message_stop"}

    def _content(self, responses: Iterable[Any]) -> Iterator[Event]:
        silent = 0
        for piece in self._reading.read(responses):
            silent = silent + 1 if isinstance(piece, Silence) else 0
            if silent and silent % SILENT_TOKENS == 0:
                yield PING
            yield from self.blocks.add(piece)
        yield from self.blocks.end()
        self.finished = self._reading.stop_word is None

    def _stop_reason(self) -> str:
        reading = self._reading
        if self._asked.max_tokens == 0:
            return "max_tokens"
        if reading.stop_word is not None:
            return "stop_sequence"
        if reading.finish == "length":
            # The pool's room behind a prompt may be less than what was asked for.
            return "max_tokens" if reading.num_tokens >= self._asked.max_tokens else "model_context_window_exceeded"
        return "tool_use" if reading.num_calls else "end_turn"

    def _output_usage(self) -> dict[str, Any]:
        reading = self._reading
        usage: dict[str, Any] = {"output_tokens": reading.num_tokens}
        if reading.num_thinking:
            usage["output_tokens_details"] = {"thinking_tokens": reading.num_thinking}
        return usage

    def _input_usage(self) -> dict[str, Any]:
        cached = max(self._context.prompt_cache_count, 0)
        return input_usage(len(self._context.prompt), cached, self._asked.request.rendered.marks or [])


def input_usage(total: int, cached: int, marks: list[tuple[int, int]]) -> dict[str, Any]:
    """How the tokens of a prompt are counted. The first three figures add up to `total`.

    Read: `cached` tokens that were not computed again. Created: those that were, up to the last of `marks`, (tokens, seconds);
    without marks all of them, for this server keeps what it computes. Input: the rest.
    """
    created = {300: 0, 3600: 0}
    begin = cached
    for end, seconds in marks or [(total, 300)]:
        created[seconds] += max(end - begin, 0)
        begin = max(begin, end)
    return {
        "input_tokens": total - begin,
        "cache_creation_input_tokens": sum(created.values()),
        "cache_read_input_tokens": cached,
        "cache_creation": {"ephemeral_5m_input_tokens": created[300], "ephemeral_1h_input_tokens": created[3600]},
    }


def message_of(events: Iterable[Event]) -> dict[str, Any]:
    """The message that events add up to, for a client that wants it whole."""
    message: dict[str, Any] = {}
    written = ""
    for event in events:
        kind = event["type"]
        if kind == "message_start":
            message = {**event["message"], "content": [], "usage": {**event["message"]["usage"]}}
        elif kind == "content_block_start":
            message["content"].append(dict(event["content_block"]))
            written = ""
        elif kind == "content_block_delta":
            block, delta = message["content"][-1], event["delta"]
            name = delta["type"].removesuffix("_delta")
            if name == "input_json":
                written += delta["partial_json"]
                block["input"] = json.loads(written)
            else:
                block[name] += delta[name]
        elif kind == "message_delta":
            message.update(event["delta"])
            message["usage"].update(event["usage"])
    return message
