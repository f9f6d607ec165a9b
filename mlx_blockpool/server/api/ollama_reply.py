"""Renders a reply for Ollama's API: lines of JSON that each have a piece of it, and a last one with its figures.

Knows events of a reply and token counts; no sockets.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Any

from ..request import ParsedRequest
from .logprobs import logprobs_of
from .reply import BlockEnd, Call, Done, Json, Packet, Renderer, Text, Thinking, call_id


class OllamaRenderer(Renderer):
    """Renders one reply to a chat, or to a prompt of /api/generate. `arrived`: when the request did, by time.monotonic_ns()."""

    def __init__(self, parsed: ParsedRequest, context: Any, name: str, is_chat: bool, arrived: int) -> None:
        super().__init__(parsed, context, keeps_space=True)
        self._name, self._is_chat, self._arrived = name, is_chat, arrived
        self._started = time.monotonic_ns()
        self._first: int | None = None
        self._thinking: list[str] = []
        self._calls: list[Json] = []
        self._logprobs = logprobs_of(parsed)
        self._entries: list[Json] = []

    def keepalive(self, progress: str = "") -> Iterable[Packet]:
        return [self._packet("")]

    def add(self, response: Any) -> Iterator[Packet]:
        self._first = self._first or time.monotonic_ns()
        if self._logprobs is not None:
            self._logprobs.add(response)
        return super().add(response)

    def _render(self, event: Text | Thinking | Call | BlockEnd) -> Iterable[Packet]:
        if isinstance(event, Call):
            function = {"index": len(self._calls), "name": event.name, "arguments": event.arguments}
            self._calls.append({"id": call_id(event), "function": function})
            return [self._packet("", tool_calls=self._calls[-1:])]
        if isinstance(event, Thinking):
            self._thinking.append(event.text)
            return [self._packet("", thinking=event.text)]
        return [self._packet(event.text)] if isinstance(event, Text) and event.text else ()

    def _end(self, done: Done) -> Iterable[Packet]:
        figures = {"done_reason": "length" if done.reason == "length" else "stop", **self._figures(done)}
        more: Json = {"thinking": "".join(self._thinking)} if self._thinking else {}
        more |= {"tool_calls": self._calls} if self._calls else {}
        last = {**self._packet(""), "done": True, **figures}
        self.whole = {**self._packet(self.parser.blocks.text, **more), "done": True, **figures}
        if self._logprobs is not None:
            self.whole["logprobs"] = self._entries
        return [last]

    def _packet(self, text: str, **more: Any) -> Json:
        said = {"message": {"role": "assistant", "content": text, **more}} if self._is_chat else {"response": text, **more}
        packet = {"model": self._name, "created_at": written_now(), **said, "done": False}
        if self._logprobs is not None and (entries := self._logprobs.take()):
            # Of the tokens since the line before.
            self._entries += entries
            packet["logprobs"] = entries
        return packet

    def _figures(self, done: Done) -> Json:
        """Tokens and durations in nanoseconds: until the request started, until its first token, and until its last."""
        ended = time.monotonic_ns()
        first = self._first or ended
        return {
            "total_duration": ended - self._arrived,
            "load_duration": self._started - self._arrived,
            "prompt_eval_count": len(self._context.prompt),
            "prompt_eval_duration": first - self._started,
            "eval_count": done.num_tokens,
            "eval_duration": ended - first,
        }


def written_now(seconds: float | None = None) -> str:
    """A time as Ollama writes it: now, or so many `seconds` after 1970."""
    moment = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return moment.isoformat().replace("+00:00", "Z")
