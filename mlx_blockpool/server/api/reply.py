"""A reply as it is generated, as events that know no protocol: text, thinking and calls, where each ends, and the reply's end.

mlx-lm's state machine and tool parsers find them in mlx-lm's responses, and tokens in a reply that keeps a form. Runs on the
socket's thread.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from mlx_lm.generate import TextStateMachine

from ...forms.calls import arguments, as_strings
from ..request import ChatRequest, ParsedRequest
from .sections import Section, Sections, machine_of_text

log = logging.getLogger(__name__)

# The errors of mlx-lm's parsers for text that is no call.
BAD_CALL = (ValueError, KeyError, TypeError, AttributeError, IndexError, SyntaxError, RecursionError)
# A Silence is emitted after this many tokens that show nothing, as those of a long tool call, for keepalives.
SILENT_TOKENS = 32


@dataclass(frozen=True)
class Text:
    """More text; a block begins with it where none is open. Empty only in a reply that has nothing else."""

    text: str


@dataclass(frozen=True)
class Thinking:
    """More thinking; a block begins with it where none is open."""

    text: str


@dataclass(frozen=True)
class BlockEnd:
    """The open block of text or thinking ends. `text`: all of it. `is_cut`: max_tokens ended it."""

    text: str
    is_cut: bool = False


@dataclass(frozen=True)
class Call:
    """A whole tool call, between blocks. `id`: None unless the model has named the call itself."""

    id: str | None
    name: str
    arguments: dict[str, Any]

    @property
    def written(self) -> str:
        """The arguments as JSON."""
        return json.dumps(self.arguments, ensure_ascii=False)


@dataclass(frozen=True)
class Silence:
    """Tokens that show nothing yet."""


@dataclass(frozen=True)
class Done:
    """The reply has ended, and why. `num_tokens` were generated, `num_thinking` of them before the end of the thinking."""

    reason: Literal["stop", "stop_word", "length", "calls"]
    stop_word: str | None
    num_tokens: int
    num_thinking: int


Piece = Text | Thinking | Call | Silence
Json = dict[str, Any]
# One event of a stream: JSON, or the bytes themselves.
Packet = Json | bytes


class Renderer:
    """Renders one reply for the clients of a protocol. `whole`: the whole response, once all packets are made."""

    def __init__(self, parsed: ParsedRequest, context: Any, keeps_space: bool = False) -> None:
        self.parser = ReplyParser(context, parsed.request, parsed.arguments.stop_words, parsed.one_call, keeps_space)
        self.whole: Json = {}
        self._parsed = parsed
        self._context = context

    def packets(self, responses: Iterable[Any]) -> Iterator[Packet]:
        """The events of a stream before finish(); `responses` are read on the way, until the reply has ended."""
        yield from self.begin()
        for response in responses:
            yield from self.add(response)
            if self.parser.finish is not None:
                break

    def begin(self) -> Iterable[Packet]:
        """The first packets of a stream."""
        return ()

    def add(self, response: Any) -> Iterator[Packet]:
        """The events of one response."""
        for event in self.parser.add(response):
            yield from self.keepalive() if isinstance(event, Silence) else self._render(event)

    def finish(self) -> Iterator[Packet]:
        """The rest of the events. Sets `whole`."""
        *rest, done = self.parser.end()
        for event in rest:
            yield from self._render(event)
        yield from self._end(done)

    def keepalive(self, progress: str = "") -> Iterable[Packet]:
        """Packets that a stream sends while there is nothing to show. `progress`: how far the prompt is computed."""
        raise NotImplementedError

    def failed(self, error: Json) -> Json:
        """The event that ends a stream with an error's body."""
        return error

    def _render(self, event: Text | Thinking | Call | BlockEnd) -> Iterable[Packet]:
        raise NotImplementedError

    def _end(self, done: Done) -> Iterable[Packet]:
        """The last packets. Sets `whole`."""
        raise NotImplementedError

    @property
    def _cached(self) -> int:
        """Tokens of the prompt that were not computed again."""
        return max(int(self._context.prompt_cache_count), 0)


def call_id(call: Call) -> str:
    """The id of a call for OpenAI's clients."""
    return f"call_{call.id or uuid.uuid4().hex[:24]}"


class Blocks:
    """Pieces of a reply as blocks, one after the other. `text` and `calls`: as they were emitted, in OpenAI's shape.

    Space at the edges belongs to the template and not to the reply: before a call and around thinking. A reply of space alone is
    empty without `keeps_space`.
    """

    def __init__(self, keeps_space: bool = False) -> None:
        self.text = ""
        self.calls: list[dict[str, Any]] = []
        self._keeps_space = keeps_space
        self._kind: type[Piece] | None = None
        self._is_empty, self._is_open, self._strips = True, False, False
        self._held = self._written = ""

    def add(self, piece: Piece) -> Iterator[Text | Thinking | BlockEnd | Call]:
        """The events of a piece."""
        if isinstance(piece, Silence):
            return
        if self._kind is not type(piece):
            yield from self._close()
            self._strips = self._kind is not None or isinstance(piece, Thinking)
            self._kind = type(piece)
        if isinstance(piece, Call):
            self._is_empty = False
            function = {"name": piece.name, "arguments": piece.written}
            self.calls.append({"id": piece.id, "type": "function", "function": function})
            yield piece
        else:
            yield from self._write(piece)

    def end(self, is_cut: bool = False) -> Iterator[Text | Thinking | BlockEnd]:
        """The rest. A reply has at least one block."""
        is_alone = self._is_empty and self._keeps_space
        if self._kind is Text and self._held and (self._is_open or is_alone):
            yield self._emit(Text(self._held))
        yield from self._close(is_cut)
        if self._is_empty:
            yield self._emit(Text(""))
            yield from self._close(is_cut)

    def _write(self, piece: Text | Thinking) -> Iterator[Text | Thinking]:
        text = self._held + piece.text
        if not self._is_open and self._strips:
            text = text.lstrip()
        shown = text.rstrip()
        self._held = text[len(shown) :]
        if shown:
            yield self._emit(type(piece)(shown))

    def _emit(self, piece: Text | Thinking) -> Text | Thinking:
        self._is_open, self._is_empty = True, False
        self._written += piece.text
        if isinstance(piece, Text):
            self.text += piece.text
        return piece

    def _close(self, is_cut: bool = False) -> Iterator[BlockEnd]:
        if self._is_open:
            yield BlockEnd(self._written, is_cut)
        self._is_open, self._held, self._written = False, "", ""


class ReplyParser:
    """Takes mlx-lm's responses apart, for the events of one reply.

    finish:      "stop" or "length", None while the reply continues. stop_word: the client's word that ended it.
    blocks:      the text and calls that were emitted.
    tokens:      those that were generated so far; num_thinking of them before the end of the thinking.
    """

    def __init__(
        self, context: Any, request: ChatRequest, stop_words: list[str], one_call: bool = False, keeps_space: bool = False
    ) -> None:
        self.blocks = Blocks(keeps_space)
        self.finish: str | None = None
        self.stop_word: str | None = None
        self.tokens: list[int] = []
        self.num_thinking = self.num_calls = self._silent = 0
        self._context = context
        self._request = request
        self._one_call = one_call
        self._words = stop_words
        # Each word ends in a state of its own, which identifies it.
        ends: dict[str, Any] = {str(i): [] for i in range(len(stop_words))}
        words = {"normal": [(word, str(i)) for i, word in enumerate(stop_words)]}
        self._before = TextStateMachine({**words, **ends}).make_state()
        self._sections = Sections.of(request, context.initial_state)
        self._text_sm = context.text_sm if self._sections is None else machine_of_text(request.tokenizer)
        self._within = self._text_sm.make_state(context.initial_state)
        self._called: str | None = "" if context.initial_state == "tool" else None
        self._last: deque[int] = deque(maxlen=max((len(tokens) for tokens, _ in request.prepared.stops), default=0))

    def add(self, response: Any) -> Iterator[Text | Thinking | BlockEnd | Call | Silence]:
        """The events of one response. With it ends the reply where `finish` is set then."""
        for piece in self.parse([response]):
            self._silent = self._silent + 1 if isinstance(piece, Silence) else 0
            if self._silent and self._silent % SILENT_TOKENS == 0:
                yield Silence()
            yield from self.blocks.add(piece)

    def end(self) -> Iterator[Any]:
        """The rest of the events, Done last."""
        self.finish = self.finish or "stop"
        yield from self.blocks.end(self.finish == "length")
        yield self.done()

    @property
    def is_whole(self) -> bool:
        """Return whether the reply has ended, and not at a stop word, which would be missing from it."""
        return self.finish is not None and self.stop_word is None

    def parse(self, responses: Iterable[Any]) -> Iterator[Piece]:
        """The pieces of responses. Ends with the reply, at a stop word however it was tokenized, or with the one call."""
        for response in responses:
            self.tokens.append(response.token)
            self.num_thinking += self._is_thinking
            self._last.append(response.token)
            if self._sections is not None:
                self._sections.add(response.token, response.text)
            pieces = self._until_stop(response.text)
            if response.finish_reason is not None or self.stop_word is not None:
                pieces += self._end(response.finish_reason)
            yield from pieces or [Silence()]
            if self.finish is not None:
                return

    def done(self) -> Done:
        """The end of the reply, or its counts so far."""
        reason: Any = "stop_word" if self.stop_word is not None else "calls" if self.num_calls else "stop"
        return Done("length" if self.finish == "length" else reason, self.stop_word, len(self.tokens), self.num_thinking)

    @property
    def _is_thinking(self) -> bool:
        """Whether the next token is part of thinking."""
        drawn = None if self._sections is None else self._sections.drawn
        return drawn == "thinking" or (drawn in (None, "free") and self._within[0] == "reasoning")

    def _until_stop(self, text: str) -> list[Piece]:
        if not self._words:
            return self._split(text)
        self._before, segments = TextStateMachine.split(self._before, text)
        text = "".join(part for state, part in segments if state == "normal")
        ended = next((state for state, _ in segments if state != "normal"), None)
        if ended is not None:
            self.stop_word = self._words[int(ended)]
        return self._split(text)

    def _end(self, reason: str | None) -> list[Piece]:
        """Emit what is still held back. A stop word's own beginning is not part of the reply."""
        if self.finish is not None:
            return []
        held = "" if self.stop_word is not None else self._before[3]
        if self.stop_word is None and reason == "stop":
            self.stop_word = self._stopped_by()
            held = _without_beginning(held, self.stop_word or "")
        pieces = self._split(held)
        if self._sections is not None:
            pieces += self._place(*self._sections.flush())
        self._within, tail, state = TextStateMachine.flush(self._within)
        if tail and (state != "tool" or reason == "length"):
            pieces += self._sort(state, tail)
        if self._called is not None:
            pieces += self._calls(is_closed=False)
        self.finish = "length" if reason == "length" and self.stop_word is None else "stop"
        return pieces

    def _stopped_by(self) -> str | None:
        """The stop word whose tokens came last."""
        last = tuple(self._last)
        stops = self._request.prepared.stops
        return next((word for tokens, word in stops if tokens and last[-len(tokens) :] == tokens), None)

    def _split(self, text: str) -> list[Piece]:
        if self._sections is None:
            return self._find_markers(text)
        return [piece for section, part in self._sections.take(text) for piece in self._place(section, part)]

    def _place(self, section: Section, part: str) -> list[Piece]:
        """The pieces of text in a section of a reply that keeps a form."""
        if section == "call":
            self._called = (self._called or "") + part
            return []
        pieces: list[Piece] = []
        if self._called is not None:
            pieces += self._calls(is_closed=True)
            self._within = self._text_sm.make_state("normal")
        if section == "free":
            pieces += self._find_markers(part)
        elif part and self.finish is None:
            pieces.append(Thinking(part) if section == "thinking" else Text(part))
        return pieces

    def _find_markers(self, text: str) -> list[Piece]:
        if not text or self._within[0] is None:
            return []
        self._within, segments = TextStateMachine.split(self._within, text)
        return [piece for state, part in segments for piece in self._sort(state, part)]

    def _sort(self, state: str | None, part: str) -> list[Piece]:
        pieces: list[Piece] = []
        if state == "tool":
            self._called = (self._called or "") + part
        elif self._called is not None and state == "normal":
            pieces += self._calls(is_closed=True)
        if part and state in ("normal", "reasoning") and self.finish is None:
            pieces.append(Text(part) if state == "normal" else Thinking(part))
        return pieces

    def _calls(self, is_closed: bool) -> list[Piece]:
        """The calls in what was written between the markers; as text where there are none, or where none were offered.

        `is_closed`: whether the second marker was written.
        """
        written, self._called = self._called or "", None
        start, end = self._request.prepared.call
        # Some parsers read calls that were cut, whose arguments have not kept their form.
        is_cut = bool(end) and not is_closed and self._request.compiled is not None
        is_offered = self._request.tools and self._request.calls != "never"
        calls = self._parse(written) if is_offered and not is_cut else []
        if not calls:
            return [Text(f"{start}{written}{end if is_closed else ''}")]
        if self._one_call:
            calls, self.finish = calls[:1], "stop"
        self.num_calls += len(calls)
        return list(calls)

    def _parse(self, written: str) -> list[Call]:
        parse, tools = self._context.tool_parser, self._request.tools or []
        name = parse.__module__.rpartition(".")[2]
        try:
            parsed = parse(written, as_strings(name, tools))
            calls = [_call(one) for one in (parsed if isinstance(parsed, list) else [parsed])]
            return [replace(call, arguments=arguments(name, call.name, call.arguments, tools)) for call in calls]
        except BAD_CALL as error:
            log.warning("a malformed tool call is returned as text: %s: %s", type(error).__name__, error)
            return []


def _call(parsed: dict[str, Any]) -> Call:
    arguments = parsed["arguments"]
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not (isinstance(parsed["name"], str) and isinstance(arguments, dict)):
        raise ValueError("a call has a name and a dictionary of arguments")
    called = parsed.get("id")
    return Call(str(called) if called else None, parsed["name"], arguments)


def _without_beginning(held: str, word: str) -> str:
    """`held` without the longest beginning of `word` that it ends with."""
    end = next((n for n in range(min(len(word), len(held)), 0, -1) if held.endswith(word[:n])), 0)
    return held[: len(held) - end]
