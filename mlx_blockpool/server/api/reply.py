"""A reply as it is generated: ReplyParser finds text, thinking and calls in it and decides why it
ended; a Renderer writes it.

mlx-lm's state machine and tool parsers find thinking and calls in the text of mlx-lm's responses,
and Sections by their tokens in a reply that keeps a form. The events know no protocol. Runs on the
socket's thread.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from mlx_lm.generate import TextStateMachine

from ...forms.calls import arguments, as_strings
from ..bodies import Json
from ..request import ChatRequest, ParsedRequest
from .logprobs import logprobs_of
from .sections import Section, Sections, machine_of_text

log = logging.getLogger(__name__)

# The errors of mlx-lm's parsers for text that is not a call.
BAD_CALL = (
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    IndexError,
    SyntaxError,
    RecursionError,
)
# A Silence is emitted after this many tokens that show nothing, as those of a long tool call, for
# keepalives.
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
class Call:
    """A whole tool call, between blocks. `id`: None unless the model has named the call itself."""

    id: str | None
    name: str
    arguments: dict[str, Any]

    @property
    def written(self) -> str:
        """The arguments as JSON."""
        return json.dumps(self.arguments, ensure_ascii=False)

    def openai(self, id: str | None) -> Json:
        """The call in the shape of OpenAI's messages."""
        return {
            "function": {"name": self.name, "arguments": self.written},
            "type": "function",
            "id": id,
        }


@dataclass(frozen=True)
class Silence:
    """Tokens that show nothing yet."""


Piece = Text | Thinking | Call
Event = Piece | BlockEnd
# One event of a stream: JSON, or the bytes themselves.
Packet = Json | bytes


def call_id(call: Call) -> str:
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

    def add(self, piece: Piece) -> Iterator[Event]:
        """The events of a piece."""
        if self._kind is not type(piece):
            yield from self._close()
            self._strips = self._kind is not None or isinstance(piece, Thinking)
            self._kind = type(piece)
        if isinstance(piece, Call):
            self._is_empty = False
            self.calls.append(piece)
            yield piece
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

    def __init__(self, parsed: ParsedRequest, context: Any, keeps_space: bool = False) -> None:
        self.blocks = ReplyBlocks(keeps_space)
        self.reason: StopReason | None = None
        self.stop_word: str | None = None
        self.tokens: list[int] = []
        self.num_thinking = self.num_calls = self._silent = 0
        self._context = context
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
        # The text of the call in progress.
        self._called: str | None = "" if context.initial_state == "tool" else None

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
        if self._called is not None:
            pieces += self._calls(is_closed=False)
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
            self._called = (self._called or "") + part
        elif self._called is not None and state == "normal":
            pieces += self._calls(is_closed=True)
        if part and state in ("normal", "reasoning") and self.reason is None:
            pieces.append(Text(part) if state == "normal" else Thinking(part))
        return pieces

    def _calls(self, is_closed: bool) -> list[Piece]:
        """The calls in what was written between the markers; as text where there are none, or where
        none were offered.

        `is_closed`: whether the second marker was written. A completion of text shows no calls and
        counts them.
        """
        written, self._called = self._called or "", None
        if not isinstance(self._request, ChatRequest):
            self.num_calls += 1
            return []
        start, end = self._request.prepared.call
        # Some parsers read calls that were cut, whose arguments have not kept their form.
        is_cut = bool(end) and not is_closed and self._request.compiled is not None
        is_offered = self._request.tools and self._request.calls != "never"
        calls = self._parse(written) if is_offered and not is_cut else []
        if not calls:
            return [Text(f"{start}{written}{end if is_closed else ''}")]
        calls = calls[:1] if self._one_call else calls
        self.num_calls += len(calls)
        if self._one_call:
            self.reason = self._decide(None)
        return list(calls)

    def _parse(self, written: str) -> list[Call]:
        parse, tools = self._context.tool_parser, self._request.tools or []
        name = parse.__module__.rpartition(".")[2]
        try:
            parsed = parse(written, as_strings(name, tools))
            calls = [_call(one) for one in (parsed if isinstance(parsed, list) else [parsed])]
            return [
                replace(call, arguments=arguments(name, call.name, call.arguments, tools))
                for call in calls
            ]
        except BAD_CALL as error:
            log.warning(
                "a malformed tool call is returned as text: %s: %s", type(error).__name__, error
            )
            return []


def _without_beginning(held: str, word: str) -> str:
    """`held` without the longest beginning of `word` that it ends with."""
    end = next((n for n in range(min(len(word), len(held)), 0, -1) if held.endswith(word[:n])), 0)
    return held[: len(held) - end]


def _call(parsed: dict[str, Any]) -> Call:
    arguments = parsed["arguments"]
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not (isinstance(parsed["name"], str) and isinstance(arguments, dict)):
        raise ValueError("a call has a name and a dictionary of arguments")
    called = parsed.get("id")
    return Call(str(called) if called else None, parsed["name"], arguments)


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

    `whole`: all of it, once finish() has returned.
    """

    def __init__(self, parsed: ParsedRequest, context: Any, keeps_space: bool = False) -> None:
        self.parser = ReplyParser(parsed, context, keeps_space)
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

    def _render(self, event: Event) -> Iterable[Packet]:
        if not self._parsed.body.stream:
            return
        # The parser has added the event to its blocks already.
        match event:
            case Call():
                yield self._packet(
                    "", tool_calls=[self._called(event, len(self.parser.blocks.calls) - 1)]
                )
            case Thinking(text):
                yield self._packet("", **{self.thinking_field: text})
            case Text(text) if text:
                yield self._packet(text)

    def _packet(self, text: str, **more: Any) -> Json:
        raise NotImplementedError

    def _called(self, call: Call, index: int) -> Json:
        """A call in the shape of the protocol's packets."""
        raise NotImplementedError
