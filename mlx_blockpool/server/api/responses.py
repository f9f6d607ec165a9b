"""OpenAI's Responses API: its endpoints, responses that were kept, and the rendering of replies.

For one request, on the socket's thread.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from ..bodies import Json, StatusError
from ..kept_responses import KeptResponses
from ..scope import retention_of
from .call_readers import CallPart
from .call_stream import Call, CallCut
from .endpoint import Endpoint
from .reply import BlockEnd, Event, Packet, Renderer, StopReason, Text, Thinking, call_id
from .responses_request import SECRET, Name, ResponsesRequest, parse
from .thinking import signature_of

RESPONSES = "/v1/responses"
COUNT = "input_tokens"


# While nothing can be shown, a client is sent an event at most this often: the event has the whole
# response in it.
PROGRESS_SECONDS = 1.0


@dataclass(frozen=True)
class Kind:
    """An output item: its type, the prefix of its id, the names of its events and of its content's
    index in them.

    part_events: the names of the events of its content's only part. content: an empty one.
    """

    item: str
    prefix: str
    events: str
    index: str | None = None
    part_events: str = ""
    content: Json = field(default_factory=dict)


TEXT = Kind(
    "message",
    "msg",
    "output_text",
    "content_index",
    "content_part",
    {"role": "assistant", "content": []},
)
THINKING = Kind(
    "reasoning",
    "rs",
    "reasoning_text",
    "content_index",
    "content_part",
    {"summary": [], "content": []},
)
SUMMARY = Kind(
    "reasoning",
    "rs",
    "reasoning_summary_text",
    "summary_index",
    "reasoning_summary_part",
    {"summary": []},
)
CALL = Kind("function_call", "fc", "function_call_arguments")


class ResponseRenderer(Renderer):
    """Renders one reply: output items as the protocol's events, and the response that they add
    up to, as it is now.
    """

    def __init__(self, parsed: ResponsesRequest, context: Any) -> None:
        super().__init__(parsed, context)
        self.output: list[Json] = []
        self._names = parsed.names
        self._number, self._sent = 0, 0.0
        # The item in progress, and the log probabilities of its text.
        self._item: Json = {}
        self._kind: Kind | None = None
        self._item_logprobs: list[Json] = []
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

    def keepalive(self, progress: str) -> Iterable[Packet]:
        """An event that the response continues, unless there was one a moment ago.

        Some clients ignore comments in a stream.
        """
        if time.monotonic() - self._sent >= PROGRESS_SECONDS:
            yield self._in_progress()

    def failed(self, error: Json) -> Json:
        return self._ended(
            "failed", {"error": {"code": "server_error", "message": error["error"]["message"]}}
        )

    def begin(self) -> Iterable[Packet]:
        return [
            self._numbered({"type": "response.created", "response": self.whole}),
            self._in_progress(),
        ]

    def _render(self, event: Event) -> Iterable[Packet]:
        if not isinstance(event, Text) and self._logprobs is not None:
            # Only the last token can belong to text that follows.
            self._logprobs.skip()
        match event:
            case CallPart():
                packets = self._add_to_call(event)
            case Call():
                packets = self._close_call(event)
            case CallCut():
                packets = iter([self._done("incomplete")])
            case BlockEnd():
                packets = self._close(event)
            case _:
                packets = self._add(event)
        return map(self._numbered, packets)

    def _add(self, event: Text | Thinking) -> Iterator[Json]:
        if self._kind is None:
            thinking = SUMMARY if self._parsed.body.reasoning.summary is not None else THINKING
            kind = TEXT if isinstance(event, Text) else thinking
            yield self._open(kind, kind.content)
            yield self._event("added", kind.part_events, part=self._part("", []))
        if event.text:
            entries = (
                self._logprobs.drain()
                if isinstance(event, Text) and self._logprobs is not None
                else []
            )
            self._item_logprobs += entries
            yield self._event("delta", delta=event.text, **self._logprobs_of(entries))

    def _close(self, end: BlockEnd) -> Iterator[Json]:
        assert self._kind is not None, "a block ends that has not begun"
        entries, self._item_logprobs = self._item_logprobs, []
        part = self._part(end.text, entries)
        yield self._event("done", text=end.text, **self._logprobs_of(entries))
        yield self._event("done", self._kind.part_events, part=part)
        self._item["summary" if self._kind == SUMMARY else "content"] = [part]
        if self._kind != TEXT and SECRET in self._parsed.body.include:
            self._item["encrypted_content"] = signature_of(end.text, shown=False)
        yield self._done("incomplete" if end.is_cut else "completed")

    def _add_to_call(self, part: CallPart) -> Iterator[Json]:
        if self._kind is None:
            name = self._names.get(part.name, Name(part.name))
            namespace = {} if name.namespace is None else {"namespace": name.namespace}
            yield self._open(
                CALL, {"call_id": call_id(part), "name": name.name, "arguments": "", **namespace}
            )
        self._item["arguments"] += part.text
        yield self._event("delta", delta=part.text)

    def _close_call(self, call: Call) -> Iterator[Json]:
        yield self._event("done", name=self._item["name"], arguments=call.written)
        yield self._done("completed")

    def _open(self, kind: Kind, content: Json) -> Json:
        self._kind = kind
        self._item = {
            "id": f"{kind.prefix}_{uuid.uuid4().hex}",
            "type": kind.item,
            "status": "in_progress",
            **content,
        }
        return {
            "type": "response.output_item.added",
            "output_index": len(self.output),
            "item": dict(self._item),
        }

    def _done(self, status: str) -> Json:
        self._kind = None
        self._item["status"] = status
        self.output.append(self._item)
        return {
            "type": "response.output_item.done",
            "output_index": len(self.output) - 1,
            "item": self._item,
        }

    def _event(self, what: str, events: str = "", **more: Any) -> Json:
        """An event about the content of the item."""
        assert self._kind is not None, "content without an item"
        return {
            "type": f"response.{events or self._kind.events}.{what}",
            "item_id": self._item["id"],
            "output_index": len(self.output),
            **({} if self._kind.index is None else {self._kind.index: 0}),
            **more,
        }

    def _part(self, text: str, logprobs: list[Json]) -> Json:
        if self._kind == TEXT:
            return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
        return {"type": "summary_text" if self._kind == SUMMARY else "reasoning_text", "text": text}

    def _logprobs_of(self, entries: list[Json]) -> Json:
        return {"logprobs": entries} if self._kind == TEXT else {}

    def _end(self, reason: StopReason) -> Iterable[Packet]:
        if reason.is_cut:
            return [
                self._ended("incomplete", {"incomplete_details": {"reason": "max_output_tokens"}})
            ]
        return [self._ended("completed", {"completed_at": int(time.time())})]

    def _in_progress(self) -> Packet:
        self._sent = time.monotonic()
        return self._numbered({"type": "response.in_progress", "response": self.whole})

    def _ended(self, status: str, change: Json) -> Json:
        self.whole = {
            **self.whole,
            "status": status,
            "output": self.output,
            "usage": self._usage(),
            **change,
        }
        return self._numbered({"type": f"response.{status}", "response": self.whole})

    def _numbered(self, event: Json) -> Json:
        self._number += 1
        return {"type": event["type"], "sequence_number": self._number - 1, **event}

    def _usage(self) -> Json:
        """Tokens of the prompt, of them those that were cached and those that are from now on;
        and of the reply.
        """
        usage = self.usage
        return {
            "input_tokens": usage.prompt,
            "input_tokens_details": {
                "cached_tokens": usage.cached,
                "cache_write_tokens": usage.prompt - usage.cached,
            },
            "output_tokens": usage.reply,
            "output_tokens_details": {"reasoning_tokens": usage.thinking},
            "total_tokens": usage.prompt + usage.reply,
        }


class ResponsesEndpoint(Endpoint):
    """Responses, the tokens of their input, and those that were kept."""

    def __init__(self, handler: Any) -> None:
        super().__init__(handler)
        self._kept: KeptResponses = self._scope.generator.responses

    def count(self) -> None:
        self._handler.send_json(
            200, {"object": "response.input_tokens", "input_tokens": self._count()}
        )

    def refuse_post(self) -> None:
        raise StatusError(
            404,
            f"Unknown path {self._handler.path[:80]} for POST; there are {RESPONSES} and /{COUNT} "
            "below",
        )

    def kept(self) -> None:
        """A response that its client let the server keep."""
        name = unquote(self._handler.route.removeprefix(RESPONSES).removeprefix("/"))
        kept = self._kept.get(name, self._scope.client)
        if kept is None:
            why = "this server keeps the last ones only, and none over a restart"
            raise StatusError(404, f"Response with id {name[:80]!r} not found; {why}.")
        self._handler.send_json(200, kept.response)

    def _parse(self, body: Json, counts: bool) -> ResponsesRequest:
        parsed = parse(body, self._scope.cli_args, self._kept, self._scope.client, counts)
        self._scope.options.retention = retention_of(body)
        return parsed

    def _render(self, parsed: Any, context: Any, index: int) -> Renderer:
        return ResponseRenderer(parsed, context)

    def _remember(self, parsed: Any, choice: Renderer) -> None:
        super()._remember(parsed, choice)
        if parsed.body.store:
            items = [*parsed.items, *choice.whole["output"]]
            self._kept.keep(choice.whole, items, self._scope.client, parsed.body.cache_salt)


ROUTES = (
    ResponsesEndpoint.route(RESPONSES, ResponsesEndpoint.reply, "POST", is_explained=True),
    ResponsesEndpoint.route(RESPONSES, ResponsesEndpoint.kept, "GET", is_explained=True),
    ResponsesEndpoint.route(RESPONSES, ResponsesEndpoint.refuse, "DELETE", is_explained=True),
    ResponsesEndpoint.route(f"{RESPONSES}/{COUNT}", ResponsesEndpoint.count, "POST"),
    ResponsesEndpoint.route(f"{RESPONSES}/*", ResponsesEndpoint.kept, "GET"),
    ResponsesEndpoint.route(f"{RESPONSES}/*", ResponsesEndpoint.refuse_post, "POST"),
    ResponsesEndpoint.route(f"{RESPONSES}/*", ResponsesEndpoint.refuse, "DELETE"),
)
