"""Renders a reply for Anthropic's Messages API: its events in the protocol's order, and the message that they add up to.

Knows events of a reply and token counts; no sockets.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from typing import Any

from ..request import ParsedRequest
from .reply import BlockEnd, Call, Done, Json, Packet, Renderer, Text, Thinking
from .thinking import signature_of


class ContentBlocks:
    """Content blocks as the protocol's events. `content`: the blocks that have ended, whole."""

    def __init__(self, shows_thinking: bool = True) -> None:
        self.content: list[Json] = []
        self._shows_thinking = shows_thinking
        self._open: Json | None = None

    def render(self, event: Text | Thinking | Call | BlockEnd) -> Iterator[Json]:
        if isinstance(event, Call):
            called = event.id or f"toolu_{uuid.uuid4().hex[:24]}"
            block: Json = {"type": "tool_use", "id": called, "name": event.name}
            yield self._start({**block, "input": {}})
            yield self._delta({"type": "input_json_delta", "partial_json": event.written})
            yield self._stop({**block, "input": event.arguments})
        elif isinstance(event, BlockEnd):
            yield from self._end(event.text)
        else:
            yield from self._add(event)

    def _add(self, event: Text | Thinking) -> Iterator[Json]:
        is_text = isinstance(event, Text)
        if self._open is None:
            self._open = {"type": "text", "text": ""} if is_text else {"type": "thinking", "thinking": "", "signature": ""}
            yield self._start(self._open)
        if is_text and event.text:
            yield self._delta({"type": "text_delta", "text": event.text})
        elif not is_text and self._shows_thinking:
            yield self._delta({"type": "thinking_delta", "thinking": event.text})

    def _end(self, text: str) -> Iterator[Json]:
        block, self._open = self._open, None
        assert block is not None, "a block ends that has not begun"
        if block["type"] == "text":
            yield self._stop({**block, "text": text})
            return
        signature = signature_of(text, self._shows_thinking)
        yield self._delta({"type": "signature_delta", "signature": signature})
        yield self._stop({**block, "thinking": text if self._shows_thinking else "", "signature": signature})

    def _start(self, block: Json) -> Json:
        return {"type": "content_block_start", "index": len(self.content), "content_block": block}

    def _delta(self, delta: dict[str, str]) -> Json:
        return {"type": "content_block_delta", "index": len(self.content), "delta": delta}

    def _stop(self, block: Json) -> Json:
        self.content.append(block)
        return {"type": "content_block_stop", "index": len(self.content) - 1}


class MessageRenderer(Renderer):
    """Renders one reply."""

    def __init__(self, parsed: ParsedRequest, context: Any) -> None:
        super().__init__(parsed, context)
        self._blocks = ContentBlocks(parsed.body.shows_thinking)

    def keepalive(self, progress: str = "") -> Iterable[Packet]:
        return [{"type": "ping"}]

    def begin(self) -> Iterable[Packet]:
        self.whole = {
            "id": f"msg_{uuid.uuid4().hex[:24]}",
            "type": "message",
            "role": "assistant",
            "model": self._parsed.body.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {**self._input_usage(), "output_tokens": 0},
        }
        return [{"type": "message_start", "message": self.whole}, *self.keepalive()]

    def add(self, response: Any) -> Iterator[Packet]:
        # The engine generates one token at least, and this client may want none.
        return super().add(response) if self._parsed.body.max_tokens else iter(())

    def finish(self) -> Iterator[Packet]:
        return super().finish() if self._parsed.body.max_tokens else iter(self._end(Done("length", None, 0, 0)))

    def _render(self, event: Text | Thinking | Call | BlockEnd) -> Iterable[Packet]:
        return self._blocks.render(event)

    def _end(self, done: Done) -> Iterable[Packet]:
        delta = {"stop_reason": self._stop_reason(done), "stop_sequence": done.stop_word}
        usage = {**self._input_usage(), "output_tokens": done.num_tokens}
        if done.num_thinking:
            usage["output_tokens_details"] = {"thinking_tokens": done.num_thinking}
        self.whole = {**self.whole, "content": self._blocks.content, **delta, "usage": usage}
        return [{"type": "message_delta", "delta": delta, "usage": usage}, {"type": "message_stop"}]

    def _stop_reason(self, done: Done) -> str:
        if done.reason == "length":
            # The pool's room after a prompt may be less than max_tokens.
            return "max_tokens" if done.num_tokens >= self._parsed.body.max_tokens else "model_context_window_exceeded"
        return {"stop_word": "stop_sequence", "calls": "tool_use", "stop": "end_turn"}[done.reason]

    def _input_usage(self) -> Json:
        return input_usage(len(self._context.prompt), self._cached, self._parsed.request.prepared.breakpoints)


def input_usage(total: int, cached: int, breakpoints: list[tuple[int, int]]) -> Json:
    """Count the tokens of a prompt by how they were served. The first three figures add up to `total`.

    Read: `cached` tokens that were not computed again. Created: those that were, up to the last of `breakpoints`, which are
    (tokens, seconds); without breakpoints all of them, for this server keeps what it computes. Input: the rest.
    """
    created = {300: 0, 3600: 0}
    begin = cached
    for end, seconds in breakpoints or [(total, 300)]:
        created[seconds] += max(end - begin, 0)
        begin = max(begin, end)
    return {
        "input_tokens": total - begin,
        "cache_creation_input_tokens": sum(created.values()),
        "cache_read_input_tokens": cached,
        "cache_creation": {"ephemeral_5m_input_tokens": created[300], "ephemeral_1h_input_tokens": created[3600]},
    }
