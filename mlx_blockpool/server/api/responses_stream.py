"""The answer of OpenAI's Responses API: its events in the protocol's order, and the response that they add up to.

Knows content blocks and token counts; no sockets. What belongs to a block, and what is space around it, is for Blocks to say.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Iterator
from typing import Any

from .anthropic_stream import SILENT_TOKENS, Blocks, Event
from .reply import Reading, Silence
from .responses import Asked
from .responses_items import Item
from .responses_tools import Name
from .thinking import signature_of

# While nothing can be told, a client hears so often at most that something goes on: the event has the whole response in it.
PROGRESS_SECONDS = 1.0
# Blocks by their types: the item, the prefix of its id, and its events.
ITEMS = {
    "text": ("message", "msg", "output_text"),
    "thinking": ("reasoning", "rs", "reasoning_text"),
    "summary": ("reasoning", "rs", "reasoning_summary_text"),
    "tool_use": ("function_call", "fc", "function_call_arguments"),
}


class Items:
    """Output items as events without numbers, one after the other, from the events of blocks. `output`: those that ended."""

    def __init__(self, asked: Asked) -> None:
        self.output: list[Item] = []
        self._asked = asked
        self._item: Item = {}
        self._kind = self._events = self._written = ""

    def told(self, event: Event, status: str = "completed") -> Iterator[Event]:
        """The events of one event of a block; `status`: that of an item which ends here."""
        if event["type"] == "content_block_start":
            yield from self._open(event["content_block"])
        elif event["type"] == "content_block_stop":
            yield from self._close(status)
        elif event["delta"]["type"] != "signature_delta":
            delta = next(value for name, value in event["delta"].items() if name != "type")
            self._written += delta
            yield self._event("delta", delta=delta, **self._logprobs())

    def _open(self, block: dict[str, Any]) -> Iterator[Event]:
        self._kind = "summary" if block["type"] == "thinking" and self._asked.summarises else block["type"]
        kind, prefix, self._events = ITEMS[self._kind]
        self._written = ""
        self._item = {"id": f"{prefix}_{uuid.uuid4().hex}", "type": kind, "status": "in_progress"}
        if kind == "message":
            self._item |= {"role": "assistant", "content": []}
        elif kind == "reasoning":
            self._item |= {"summary": [], **({} if self._kind == "summary" else {"content": []})}
        else:
            called = f"call_{block['id'].removeprefix('toolu_')}"
            name = self._asked.names.get(block["name"], Name(block["name"]))
            self._item |= {"call_id": called, "name": name.name, "arguments": ""}
            if name.namespace is not None:
                self._item["namespace"] = name.namespace
        yield {"type": "response.output_item.added", "output_index": len(self.output), "item": dict(self._item)}
        if kind != "function_call":
            yield self._event("added", self._part_events(), part=self._part())

    def _close(self, status: str) -> Iterator[Event]:
        if self._kind == "tool_use":
            self._item["arguments"] = self._written
            yield self._event("done", name=self._item["name"], arguments=self._written)
        else:
            yield self._event("done", text=self._written, **self._logprobs())
            yield self._event("done", self._part_events(), part=self._part())
            self._item["summary" if self._kind == "summary" else "content"] = [self._part()]
        if self._item["type"] == "reasoning" and self._asked.packs:
            self._item["encrypted_content"] = signature_of(self._written, shown=False)
        self._item["status"] = status
        yield {"type": "response.output_item.done", "output_index": len(self.output), "item": self._item}
        self.output.append(self._item)

    def _event(self, what: str, events: str = "", **more: Any) -> Event:
        """An event about what is inside of the item."""
        index = {"text": "content_index", "thinking": "content_index", "summary": "summary_index"}.get(self._kind)
        return {
            "type": f"response.{events or self._events}.{what}",
            "item_id": self._item["id"],
            "output_index": len(self.output),
            **({} if index is None else {index: 0}),
            **more,
        }

    def _part_events(self) -> str:
        return "reasoning_summary_part" if self._kind == "summary" else "content_part"

    def _part(self) -> dict[str, Any]:
        if self._kind == "text":
            return {"type": "output_text", "text": self._written, "annotations": [], "logprobs": []}
        return {"type": "summary_text" if self._kind == "summary" else "reasoning_text", "text": self._written}

    def _logprobs(self) -> dict[str, Any]:
        return {"logprobs": []} if self._kind == "text" else {}


class Answer:
    """One answer. `blocks`: what was told; `response`: the response as it is now; `finished`: whether all of it was told."""

    def __init__(self, asked: Asked, context: Any) -> None:
        self.blocks = Blocks(shows_thinking=True)
        self.finished = False
        self._asked = asked
        self._context = context
        self._reading = Reading(context, asked.request, asked.arguments.stop_words, asked.one_call)
        self._items = Items(asked)
        self._number = 0
        self._told = 0.0
        self.response: dict[str, Any] = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "completed_at": None,
            "status": "in_progress",
            "model": asked.model,
            "output": [],
            "usage": None,
            "error": None,
            "incomplete_details": None,
            **asked.echo,
        }

    def events(self, responses: Iterable[Any]) -> Iterator[Event]:
        """All events; `responses` are read on the way."""
        yield self._numbered({"type": "response.created", "response": self.response})
        yield self._in_progress()
        for event in self._content(responses):
            yield event if "sequence_number" in event else self._numbered(event)
        self.finished = True
        cut = self._reading.finish == "length"
        change = {"incomplete_details": {"reason": "max_output_tokens"}} if cut else {"completed_at": int(time.time())}
        yield self._end("incomplete" if cut else "completed", change)

    def goes_on(self) -> Iterator[Event]:
        """An event that says so, unless there was one a moment ago. Comments in a stream do not count for every client."""
        if time.monotonic() - self._told >= PROGRESS_SECONDS:
            yield self._in_progress()

    def _in_progress(self) -> Event:
        self._told = time.monotonic()
        return self._numbered({"type": "response.in_progress", "response": self.response})

    def failed(self, message: str) -> Event:
        """The last event, where the reply cannot go on."""
        return self._end("failed", {"error": {"code": "server_error", "message": message}})

    def _content(self, responses: Iterable[Any]) -> Iterator[Event]:
        silent = 0
        for piece in self._reading.read(responses):
            silent = silent + 1 if isinstance(piece, Silence) else 0
            if silent and silent % SILENT_TOKENS == 0:
                yield from self.goes_on()
            for event in self.blocks.add(piece):
                yield from self._items.told(event)
        for event in self.blocks.end():
            yield from self._items.told(event, "incomplete" if self._reading.finish == "length" else "completed")

    def _end(self, status: str, change: dict[str, Any]) -> Event:
        self.response = {**self.response, "status": status, "output": self._items.output, "usage": self._usage(), **change}
        return self._numbered({"type": f"response.{status}", "response": self.response})

    def _numbered(self, event: Event) -> Event:
        self._number += 1
        return {"type": event["type"], "sequence_number": self._number - 1, **event}

    def _usage(self) -> dict[str, Any]:
        """Tokens of the prompt, of them those that were known and those that are kept from now on; and of the reply."""
        prompt, reading = len(self._context.prompt), self._reading
        cached = max(self._context.prompt_cache_count, 0)
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": prompt - cached},
            "output_tokens": reading.num_tokens,
            "output_tokens_details": {"reasoning_tokens": reading.num_thinking},
            "total_tokens": prompt + reading.num_tokens,
        }
