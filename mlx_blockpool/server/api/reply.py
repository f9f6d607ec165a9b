"""A reply as it is generated: ReplyParser finds text, thinking and calls in it and decides why it
ended; a Renderer writes it.

mlx-lm's state machine and tool parsers find thinking and calls in the text of mlx-lm's responses,
and Sections by their tokens in a reply that keeps a form. The events know no protocol. Runs on the
socket's thread.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from mlx_lm.generate import TextStateMachine

from ..bodies import Json
from ..request import ChatRequest, ParsedRequest
from .call_readers import CallPart
from .call_stream import Call, CallCut, CallPiece, CallStream
from .logprobs import logprobs_of
from .sections import Section, Sections, machine_of_text

# A Silence is emitted after this many tokens that show nothing, for keepalives.
SILENT_TOKENS = 32
# The states of mlx-lm's machine for the sections of a reply that keeps a form.
STATES: dict[Section, str] = {
    "thinking": "reasoning",
    "start": "normal",
    "form": "normal",
    "call": "tool",
}


class StopReason(NamedTuple):
    """Why a reply has ended: OpenAI's and Anthropic's names for it, and whether a limit on tokens
    has cut the reply.

    A new reason is added below, and ReplyParser decides where it applies; renderers read these
    fields alone.
    """

    openai: str
    anthropic: str
    is_cut: bool = False


END_OF_TURN = StopReason("stop", "end_turn")
STOP_WORD = StopReason("stop", "stop_sequence")
CALLS = StopReason("tool_calls", "tool_use")
MAX_TOKENS = StopReason("length", "max_tokens", is_cut=True)
# Fewer tokens than the request's max_tokens fit after its prompt.
OUT_OF_CONTEXT = StopReason("length", "model_context_window_exceeded", is_cut=True)


@dataclass(frozen=True)
class Text:
    """More text; a block begins with it where none is open.

    Empty only in a reply that has nothing else.
    """

    text: str


@dataclass(frozen=True)
class Thinking:
    """More thinking; a block begins with it where none is open."""

    text: str


@dataclass(frozen=True)
class BlockEnd:
    """The open block of text or thinking ends.

    `text`: all of it. `is_cut`: a limit on tokens ended it.
    """

    text: str
    is_cut: bool = False


@dataclass(frozen=True)
class Silence:
    """Tokens that show nothing yet."""


Piece = Text | Thinking | CallPiece
Event = Piece | BlockEnd
# One event of a stream: JSON, or the bytes themselves.
Packet = Json | bytes


def call_id(call: Call | CallPart) -> str:
    """The id of a call for OpenAI's clients."""
    return f"call_{call.id or uuid.uuid4().hex[:24]}"


class ReplyBlocks:
    """Pieces of a reply as blocks, one after the other. `text`, `thinking` and `calls`: what was
    emitted of each.

    Space at the edges belongs to the template and not to the reply: before a call and around
    thinking. A reply of space alone is empty without `keeps_space`.
    """

    def __init__(self, keeps_space: bool = False) -> None:
        self.text = self.thinking = ""
        self.calls: list[Call] = []
        self._keeps_space = keeps_space
        self._kind: type[Piece] | None = None
        self._is_empty, self._strips = True, False
        # The whitespace at the end of the current block, which may be its edge, and what was
        # emitted of the block.
        self._held = self._written = ""
        # What was emitted of the open call's arguments; None between calls.
        self._called: str | None = None

    def add(self, piece: Piece) -> Iterator[Event]:
        """The events of a piece."""
        kind = Call if isinstance(piece, CallPiece) else type(piece)
        if self._kind is not kind:
            yield from self._close()
            self._strips = self._kind is not None or isinstance(piece, Thinking)
            self._kind = kind
        if isinstance(piece, CallPiece):
            self._is_empty = False
            yield from self._add_call(piece)
            return
        text = self._held + piece.text
        if not self._written and self._strips:
            text = text.lstrip()
        shown = text.rstrip()
        self._held = text[len(shown) :]
        if shown:
            yield self._emit(type(piece)(shown))

    def end(self, is_cut: bool = False) -> Iterator[Event]:
        """The remaining events. A reply has at least one block."""
        if (
            self._kind is Text
            and self._held
            and (self._written or (self._is_empty and self._keeps_space))
        ):
            yield self._emit(Text(self._held))
        yield from self._close(is_cut)
        if self._is_empty:
            yield Text("")
            yield BlockEnd("", is_cut)

    def _add_call(self, piece: CallPiece) -> Iterator[Event]:
        """The events of a piece of a call: before a whole one, what is missing of its parts."""
        if isinstance(piece, CallPart):
            self._called = (self._called or "") + piece.text
            yield piece
            return
        if isinstance(piece, Call):
            self.calls.append(piece)
            rest = piece.written.removeprefix(self._called or "")
            if rest:
                yield CallPart(piece.id, piece.name, rest)
        self._called = None
        yield piece

    def _emit(self, piece: Text | Thinking) -> Text | Thinking:
        self._is_empty = False
        self._written += piece.text
        if isinstance(piece, Text):
            self.text += piece.text
        else:
            self.thinking += piece.text
        return piece

    def _close(self, is_cut: bool = False) -> Iterator[BlockEnd]:
        if self._written:
            yield BlockEnd(self._written, is_cut)
        self._held = self._written = ""


class ReplyParser:
    """Parses mlx-lm's responses into the events of one reply.

    reason:      why the reply has ended; None while it continues. stop_word: the client's word that
                 ended it.
    blocks:      the text, thinking and calls that were emitted.
    tokens:      those that were generated so far; num_thinking of them before the end of the
                 thinking.
    """

    def __init__(
        self,
        parsed: ParsedRequest,
        context: Any,
        keeps_space: bool = False,
        shows_parts: bool = False,
    ) -> None:
        self.blocks = ReplyBlocks(keeps_space)
        self.reason: StopReason | None = None
        self.stop_word: str | None = None
        self.tokens: list[int] = []
        self.num_thinking = self.num_calls = self._silent = 0
        self._context = context
        self._shows_parts = shows_parts
        self._request = request = parsed.request
        self._one_call = parsed.one_call
        self._max_tokens = parsed.arguments.max_tokens
        self._stop_words = parsed.arguments.stop_words
        # Each stop word ends in a state of its own, which has the word.
        ends: dict[Any, Any] = {(word,): [] for word in parsed.arguments.stop_words}
        words = [(word, (word,)) for word in parsed.arguments.stop_words]
        self._before = TextStateMachine({"normal": words, **ends}).make_state()
        self._sections = Sections.for_reply(request, context.initial_state)
        self._section: Section = self._sections.drawn
        self._text_sm = (
            machine_of_text(request.tokenizer) if self._sections.by_tokens else context.text_sm
        )
        self._within = self._text_sm.make_state(context.initial_state)
        # Calls that were not offered are text.
        self._is_text = isinstance(request, ChatRequest) and not (
            request.tools and request.calls != "never"
        )
        # The block of calls in progress.
        self._stream: CallStream | None = None
        if context.initial_state == "tool":
            self._stream = self._new_stream()

    def add(self, response: Any) -> Iterator[Event | Silence]:
        """The events of one response. The reply ends with it if `reason` is set then."""
        pieces = self.parse(response)
        self._silent = 0 if pieces else self._silent + 1
        if self._silent and self._silent % SILENT_TOKENS == 0:
            yield Silence()
        for piece in pieces:
            yield from self.blocks.add(piece)

    def end(self) -> Iterator[Event]:
        """The remaining events. Sets `reason`."""
        self.reason = self.reason or self._decide(None)
        yield from self.blocks.end(self.reason.is_cut)

    @property
    def is_whole(self) -> bool:
        """Return whether the reply has ended, and not at a stop word, which would be missing
        from it.
        """
        return self.reason not in (None, STOP_WORD)

    def parse(self, response: Any) -> list[Piece]:
        """The pieces of one response, up to the end of the reply.

        A stop word ends it however it was tokenized.
        """
        self.tokens.append(response.token)
        self.num_thinking += self._is_thinking
        self._sections.add(response.token, response.text)
        self._before, segments = TextStateMachine.split(self._before, response.text)
        state = self._before[0]
        if state != "normal":
            (self.stop_word,) = state
        pieces = self._pieces_of("".join(part for state, part in segments if state == "normal"))
        if self.reason is None and (
            response.finish_reason is not None or self.stop_word is not None
        ):
            pieces += self._end(response.finish_reason)
        return pieces

    @property
    def _is_thinking(self) -> bool:
        """Whether the next token is part of thinking."""
        drawn = self._sections.drawn
        return drawn == "thinking" or (drawn == "free" and self._within[0] == "reasoning")

    def _end(self, finish_reason: str | None) -> list[Piece]:
        """Emit what is still held back, and decide why the reply has ended."""
        _, held, _ = TextStateMachine.flush(self._before)
        if self.stop_word is None and finish_reason == "stop":
            self.stop_word = self._stopped_by()
            held = _without_beginning(held, self.stop_word or "")
        pieces = [*self._pieces_of(held), *self._pieces_in_section(*self._sections.flush())]
        self._within, tail, state = TextStateMachine.flush(self._within)
        if tail and (state != "tool" or finish_reason == "length"):
            pieces += self._pieces_in_state(state, tail)
            tail = ""
        if self._stream is not None:
            ends_turn = finish_reason != "length" and self.stop_word is None
            pieces += self._calls(is_closed=False, tail=tail, ends_turn=ends_turn)
        self.reason = self._decide(finish_reason)
        return pieces

    def _stopped_by(self) -> str | None:
        """The stop word whose tokens came last: text lacks one that ends a turn, and a space at
        the very beginning.
        """
        words: list[str] = self._stop_words
        for word in words:
            tokens = self._request.tokenizer.encode(word, add_special_tokens=False)
            if tokens and self.tokens[-len(tokens) :] == tokens:
                return word
        return None

    def _decide(self, finish_reason: str | None) -> StopReason:
        """Why the reply ends now.

        `finish_reason`: the engine's "length" for a limit on tokens, "stop" for a stop sequence.
        """
        if self.stop_word is not None:
            return STOP_WORD
        if finish_reason == "length":
            return MAX_TOKENS if len(self.tokens) >= self._max_tokens else OUT_OF_CONTEXT
        return CALLS if self.num_calls else END_OF_TURN

    def _pieces_of(self, text: str) -> list[Piece]:
        return [
            piece
            for section, part in self._sections.split(text)
            for piece in self._pieces_in_section(section, part)
        ]

    def _pieces_in_section(self, section: Section, part: str) -> list[Piece]:
        """The pieces of text in a section of the reply."""
        pieces: list[Piece] = []
        if section != "call" == self._section:
            pieces += self._calls(is_closed=True)
            self._within = self._text_sm.make_state("normal")
        self._section = section
        if section != "free":
            return pieces + self._pieces_in_state(STATES[section], part)
        if part and self._within[0] is not None:
            self._within, segments = TextStateMachine.split(self._within, part)
            pieces += [
                piece for state, text in segments for piece in self._pieces_in_state(state, text)
            ]
        return pieces

    def _pieces_in_state(self, state: str | None, part: str) -> list[Piece]:
        """The pieces of text in a state of mlx-lm's state machine."""
        pieces: list[Piece] = []
        if state == "tool":
            if self._stream is None:
                self._stream = self._new_stream()
                pieces += [Text(self._markers[0])] if self._is_text else []
            pieces += self._call_pieces(self._stream, part)
        elif self._stream is not None and state == "normal":
            pieces += self._calls(is_closed=True)
        if part and state in ("normal", "reasoning") and self.reason is None:
            pieces.append(Text(part) if state == "normal" else Thinking(part))
        return pieces

    @property
    def _markers(self) -> tuple[str, str]:
        """What begins and ends a block of calls."""
        assert isinstance(self._request, ChatRequest), "a completion shows no calls"
        return self._request.prepared.call

    def _new_stream(self) -> CallStream:
        tools = self._request.tools if isinstance(self._request, ChatRequest) else None
        return CallStream(self._context.tool_parser, tools or [])

    def _call_pieces(self, stream: CallStream, part: str) -> list[Piece]:
        """The pieces of text between the markers of calls."""
        if self._is_text:
            return [Text(part)] if part else []
        if not isinstance(self._request, ChatRequest):
            return []
        return self._counted(stream.feed(part))

    def _calls(self, is_closed: bool, tail: str = "", ends_turn: bool = True) -> list[Piece]:
        """The remaining pieces of a block of calls; text where it has none.

        `is_closed`: whether the second marker was written. `tail`: the beginning of one that was
        not. `ends_turn`: whether the model ended the reply, which no limit or stop word has cut. A
        completion of text shows no calls and counts them.
        """
        stream, self._stream = self._stream, None
        if not isinstance(self._request, ChatRequest):
            self.num_calls += 1
            return []
        start, end = self._markers
        last = end if is_closed else tail
        if stream is None or self._is_text:
            return [Text(last)] if last and self._is_text else []
        # Some parsers read calls that were cut, whose arguments are not all there.
        is_cut = (
            bool(end)
            and not is_closed
            and (self._request.compiled is not None or (not ends_turn and stream.reads_cut_calls))
        )
        calls, text = stream.end(is_cut)
        pieces = self._counted(calls)
        if text is not None and self.reason is None:
            pieces.append(Text(f"{start}{text}{last}"))
        return pieces

    def _counted(self, calls: Iterable[CallPiece]) -> list[Piece]:
        """The pieces of calls up to the end of the reply, those that are shown."""
        pieces: list[Piece] = []
        for piece in calls:
            if self.reason is not None:
                break
            if self._shows_parts or isinstance(piece, Call):
                pieces.append(piece)
            if isinstance(piece, Call):
                self.num_calls += 1
                if self._one_call:
                    self.reason = self._decide(None)
        return pieces


def _without_beginning(held: str, word: str) -> str:
    """`held` without the longest beginning of `word` that it ends with."""
    end = next((n for n in range(min(len(word), len(held)), 0, -1) if held.endswith(word[:n])), 0)
    return held[: len(held) - end]


@dataclass(frozen=True)
class Usage:
    """Tokens of a prompt, those of them that were not computed again, tokens of the reply, and
    those of its thinking.
    """

    prompt: int
    cached: int
    reply: int
    thinking: int


class Renderer:
    """Renders one reply for the clients of a protocol.

    `whole`: all of it, once finish() has returned. `shows_parts`: whether the protocol has parts of
    calls. `keeps_space`: whether a reply may be space alone.
    """

    shows_parts, keeps_space = True, False

    def __init__(self, parsed: ParsedRequest, context: Any) -> None:
        shows_parts = self.shows_parts and parsed.body is not None and parsed.body.stream
        self.parser = ReplyParser(parsed, context, self.keeps_space, shows_parts)
        self.whole: Json = {}
        self._logprobs = logprobs_of(parsed)
        self._total_logprob = 0.0
        self._parsed = parsed
        self._context = context

    def begin(self) -> Iterable[Packet]:
        """The first packets of a stream."""
        return ()

    def add(self, response: Any) -> Iterator[Packet]:
        """The packets of one of mlx-lm's responses."""
        self._record(response)
        for event in self.parser.add(response):
            yield from self.keepalive("") if isinstance(event, Silence) else self._render(event)

    def _record(self, response: Any) -> None:
        self._total_logprob += response.logprob
        if self._logprobs is not None:
            self._logprobs.add(response)

    @property
    def mean_logprob(self) -> float:
        """The mean log probability of the tokens."""
        return self._total_logprob / max(len(self.parser.tokens), 1)

    def finish(self) -> Iterator[Packet]:
        """The remaining packets. Sets `whole`."""
        for event in self.parser.end():
            yield from self._render(event)
        assert self.parser.reason is not None, "a reply has ended without a reason"
        yield from self._end(self.parser.reason)

    def stop(self) -> None:
        """Let the engine drop what is left of the reply."""
        self._context.stop()

    def keepalive(self, progress: str) -> Iterable[Packet]:
        """Packets that a stream sends while there is nothing to show.

        `progress`: how far the prompt is computed.
        """
        return [f": keepalive{progress}\n\n".encode()]

    def failed(self, error: Json) -> Json:
        """The event that ends a stream with an error's body."""
        return error

    def _render(self, event: Event) -> Iterable[Packet]:
        raise NotImplementedError

    def _end(self, reason: StopReason) -> Iterable[Packet]:
        """The last packets. Sets `whole`."""
        raise NotImplementedError

    @property
    def usage(self) -> Usage:
        """The counts so far."""
        prompt, cached = len(self._context.prompt), max(int(self._context.prompt_cache_count), 0)
        return Usage(prompt, cached, len(self.parser.tokens), self.parser.num_thinking)


class PieceRenderer(Renderer):
    """Renders each piece of a streamed reply as one packet.

    `thinking_field`: the field of thinking.
    """

    thinking_field: str
    keeps_space = True

    def _render(self, event: Event) -> Iterable[Packet]:
        if not self._parsed.body.stream:
            return
        # The parser has added the event to its blocks already.
        match event:
            case CallPart() | Call() | CallCut():
                if shown := self._called(event):
                    yield self._packet("", tool_calls=[shown])
            case Thinking(text):
                yield self._packet("", **{self.thinking_field: text})
            case Text(text) if text:
                yield self._packet(text)

    def _packet(self, text: str, **more: Any) -> Json:
        raise NotImplementedError

    def _called(self, piece: CallPiece) -> Json | None:
        """A piece of a call in the shape of the protocol's packets; None if it shows nothing."""
        raise NotImplementedError
