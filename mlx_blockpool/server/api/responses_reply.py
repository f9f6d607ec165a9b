"""Renders a reply for OpenAI's Responses API: its events in the protocol's order, and the response that they add up to.

Knows events of a reply and token counts; no sockets.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .logprobs import logprobs_of
from .reply import BlockEnd, Call, Done, Json, Packet, Renderer, Text, Thinking, call_id
from .responses_kept import KeptResponses
from .responses_request import SECRET, Name, ResponsesRequest
from .thinking import signature_of

# While nothing can be shown, a client is sent an event at most this often: the event has the whole response in it.
PROGRESS_SECONDS = 1.0


@dataclass(frozen=True)
class Kind:
    """An output item: its type, the prefix of its id, the names of its events and of its content's index in them."""

    item: str
    prefix: str
    events: str
    index: str | None = None


TEXT = Kind("message", "msg", "output_text", "content_index")
THINKING = Kind("reasoning", "rs", "reasoning_text", "content_index")
SUMMARY = Kind("reasoning", "rs", "reasoning_summary_text", "summary_index")
CALL = Kind("function_call", "fc", "function_call_arguments")


class OutputItems:
    """Output items as events without numbers, one after the other. `output`: the items that have ended."""

    def __init__(self, parsed: ResponsesRequest) -> None:
        self.output: list[Json] = []
        self._parsed, self._body = parsed, parsed.body
        self._item: Json = {}
        self._kind: Kind | None = None
        self._logprobs = logprobs_of(parsed)
        self._spoken: list[Json] = []

    def note(self, response: Any) -> None:
        """Note the log probabilities of a token before its events are rendered."""
        if self._logprobs is not None:
            self._logprobs.add(response)

    def render(self, event: Text | Thinking | Call | BlockEnd) -> Iterator[Json]:
        """The protocol's events for one event of a reply."""
        if not isinstance(event, Text) and self._logprobs is not None:
            # Only the last token can belong to text that follows.
            self._logprobs.keep_last(1)
        if isinstance(event, Call):
            yield from self._call(event)
        elif isinstance(event, BlockEnd):
            yield from self._close(event)
        else:
            if self._kind is None:
                thinking = SUMMARY if self._body.reasoning.summary is not None else THINKING
                yield from self._open(TEXT if isinstance(event, Text) else thinking)
            if event.text:
                yield self._event("delta", delta=event.text, **self._logprobs_of(self._take(event)))

    def _open(self, kind: Kind) -> Iterator[Json]:
        content: dict[Kind, Json] = {
            TEXT: {"role": "assistant", "content": []},
            THINKING: {"summary": [], "content": []},
            SUMMARY: {"summary": []},
        }
        yield self._add(kind, content[kind])
        yield self._event("added", self._part_events(), part=self._part(""))

    def _close(self, end: BlockEnd) -> Iterator[Json]:
        part = self._part(end.text, self._spoken)
        yield self._event("done", text=end.text, **self._logprobs_of(self._spoken))
        self._spoken = []
        yield self._event("done", self._part_events(), part=part)
        self._item["summary" if self._kind == SUMMARY else "content"] = [part]
        if self._kind != TEXT and SECRET in self._body.include:
            self._item["encrypted_content"] = signature_of(end.text, shown=False)
        yield self._done("incomplete" if end.is_cut else "completed")

    def _call(self, call: Call) -> Iterator[Json]:
        name = self._parsed.names.get(call.name, Name(call.name))
        namespace = {} if name.namespace is None else {"namespace": name.namespace}
        yield self._add(CALL, {"call_id": call_id(call), "name": name.name, "arguments": "", **namespace})
        yield self._event("delta", delta=call.written)
        self._item["arguments"] = call.written
        yield self._event("done", name=name.name, arguments=call.written)
        yield self._done("completed")

    def _add(self, kind: Kind, content: Json) -> Json:
        self._kind = kind
        self._item = {"id": f"{kind.prefix}_{uuid.uuid4().hex}", "type": kind.item, "status": "in_progress", **content}
        return {"type": "response.output_item.added", "output_index": len(self.output), "item": dict(self._item)}

    def _done(self, status: str) -> Json:
        self._kind = None
        self._item["status"] = status
        self.output.append(self._item)
        return {"type": "response.output_item.done", "output_index": len(self.output) - 1, "item": self._item}

    def _event(self, what: str, events: str = "", **more: Any) -> Json:
        """An event about the content of the item."""
        assert self._kind is not None
        return {
            "type": f"response.{events or self._kind.events}.{what}",
            "item_id": self._item["id"],
            "output_index": len(self.output),
            **({} if self._kind.index is None else {self._kind.index: 0}),
            **more,
        }

    def _part_events(self) -> str:
        return "reasoning_summary_part" if self._kind == SUMMARY else "content_part"

    def _part(self, text: str, logprobs: Sequence[Json] = ()) -> Json:
        if self._kind == TEXT:
            return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}
        return {"type": "summary_text" if self._kind == SUMMARY else "reasoning_text", "text": text}

    def _take(self, event: Text | Thinking) -> list[Json]:
        """The entries of the tokens that this text was made of."""
        entries = [] if self._logprobs is None or isinstance(event, Thinking) else self._logprobs.take()
        self._spoken += entries
        return entries

    def _logprobs_of(self, entries: list[Json]) -> Json:
        return {"logprobs": entries} if self._kind == TEXT else {}


class ResponseRenderer(Renderer):
    """Renders one reply. `whole`: the response as it is now, which is kept for its `owner` once it has ended."""

    def __init__(self, parsed: ResponsesRequest, context: Any, kept: KeptResponses, owner: str | None) -> None:
        super().__init__(parsed, context)
        self._kept, self._owner = kept, owner
        self._given_items = parsed.items
        self._items = OutputItems(parsed)
        self._number = 0
        self._sent = 0.0
        self.whole = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "completed_at": None,
            "status": "in_progress",
            "model": parsed.body.model,
            "output": [],
            "usage": None,
            "error": None,
            "incomplete_details": None,
            **parsed.echo,
        }
        # A body that is too deep to be written is found out before the headers are sent.
        json.dumps(self.whole)

    def add(self, response: Any) -> Iterator[Packet]:
        self._items.note(response)
        return super().add(response)

    def keepalive(self, progress: str = "") -> Iterable[Packet]:
        """An event that the response continues, unless there was one a moment ago. Some clients ignore comments in a stream."""
        if time.monotonic() - self._sent >= PROGRESS_SECONDS:
            yield self._in_progress()

    def failed(self, error: Json) -> Json:
        return self._ended("failed", {"error": {"code": "server_error", "message": error["error"]["message"]}})

    def begin(self) -> Iterable[Packet]:
        return [self._numbered({"type": "response.created", "response": self.whole}), self._in_progress()]

    def _render(self, event: Text | Thinking | Call | BlockEnd) -> Iterable[Packet]:
        return map(self._numbered, self._items.render(event))

    def _end(self, done: Done) -> Iterable[Packet]:
        if done.reason == "length":
            last = self._ended("incomplete", {"incomplete_details": {"reason": "max_output_tokens"}})
        else:
            last = self._ended("completed", {"completed_at": int(time.time())})
        if self._parsed.body.store:
            # Before the client reads the last event, for it may continue at once.
            self._kept.keep(self.whole, [*self._given_items, *self._items.output], self._owner, self._parsed.body.cache_salt)
        return [last]

    def _in_progress(self) -> Json:
        self._sent = time.monotonic()
        return self._numbered({"type": "response.in_progress", "response": self.whole})

    def _ended(self, status: str, change: Json) -> Json:
        self.whole = {**self.whole, "status": status, "output": self._items.output, "usage": self._usage(), **change}
        return self._numbered({"type": f"response.{status}", "response": self.whole})

    def _numbered(self, event: Json) -> Json:
        self._number += 1
        return {"type": event["type"], "sequence_number": self._number - 1, **event}

    def _usage(self) -> Json:
        """Tokens of the prompt, of them those that were cached and those that are from now on; and of the reply."""
        prompt, reply = len(self._context.prompt), self.parser.done()
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": self._cached, "cache_write_tokens": prompt - self._cached},
            "output_tokens": reply.num_tokens,
            "output_tokens_details": {"reasoning_tokens": reply.num_thinking},
            "total_tokens": prompt + reply.num_tokens,
        }
