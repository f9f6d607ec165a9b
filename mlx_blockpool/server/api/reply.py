"""A reply as it is generated, read piece by piece: text, thinking, tool calls.

mlx-lm's state machine and tool parsers find them. Knows mlx-lm's responses and no protocol. Runs on the socket's thread.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from mlx_lm.generate import TextStateMachine

from ..chat import ChatRequest

log = logging.getLogger(__name__)

# What parsers of mlx-lm raise over text that is no call.
BAD_CALL = (ValueError, KeyError, TypeError, AttributeError, IndexError, SyntaxError)


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True)
class Thinking:
    text: str


@dataclass(frozen=True)
class Call:
    """`id`: None unless the model has named the call itself."""

    id: str | None
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Silence:
    """A token that shows nothing yet."""


Piece = Text | Thinking | Call | Silence


class Reading:
    """Reads one reply.

    finish:      "stop" or "length", None while it goes on. stop_word: the client's word that ended it.
    num_tokens:  generated so far; num_thinking of them before the end of the thinking.
    """

    def __init__(self, context: Any, request: ChatRequest, stop_words: list[str], one_call: bool = False) -> None:
        self.finish: str | None = None
        self.stop_word: str | None = None
        self.num_tokens = self.num_thinking = self.num_calls = 0
        self._context = context
        self._request = request
        self._one_call = one_call
        self._words = stop_words
        # Each word ends in a state of its own, which says which one it was.
        ends: dict[str, Any] = {str(i): [] for i in range(len(stop_words))}
        words = {"normal": [(word, str(i)) for i, word in enumerate(stop_words)]}
        self._before = TextStateMachine({**words, **ends}).make_state()
        self._within = context.text_sm.make_state(context.initial_state)
        self._called: str | None = "" if context.initial_state == "tool" else None
        self._last: deque[int] = deque(maxlen=max(map(len, request.rendered.stops), default=0))

    def read(self, responses: Iterable[Any]) -> Iterator[Piece]:
        """The pieces of all responses. Ends with the reply, at a stop word however it was tokenized, or with the one call."""
        for response in responses:
            self.num_tokens += 1
            self.num_thinking += self._within[0] == "reasoning"
            self._last.append(response.token)
            pieces = self._until_stop(response.text)
            if response.finish_reason is not None or self.stop_word is not None:
                pieces += self._end(response.finish_reason)
            yield from pieces or [Silence()]
            if self.finish is not None:
                return
        self.finish = self.finish or "stop"

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
        """What is still held back. A stop word's own beginning is not part of the reply."""
        if self.finish is not None:
            return []
        held = "" if self.stop_word is not None else self._before[3]
        if self.stop_word is None and reason == "stop":
            self.stop_word = self._stopped_by()
            held = _without_beginning(held, self.stop_word or "")
        pieces = self._split(held)
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
        stops = self._request.rendered.stops.items()
        return next((word for tokens, word in stops if tokens and last[-len(tokens) :] == tokens), None)

    def _split(self, text: str) -> list[Piece]:
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
        calls = self._parse(written) if self._request.tools and self._request.calls != "never" else []
        if not calls:
            start, end = self._request.rendered.call
            return [Text(f"{start}{written}{end if is_closed else ''}")]
        if self._one_call:
            calls, self.finish = calls[:1], "stop"
        self.num_calls += len(calls)
        return list(calls)

    def _parse(self, written: str) -> list[Call]:
        try:
            parsed = self._context.tool_parser(written, self._request.tools)
            return [_call(one) for one in (parsed if isinstance(parsed, list) else [parsed])]
        except BAD_CALL as error:
            log.warning("what was written as a tool call is none: %s: %s", type(error).__name__, error)
            return []


def _call(parsed: dict[str, Any]) -> Call:
    arguments = parsed["arguments"]
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not (isinstance(parsed["name"], str) and isinstance(arguments, dict)):
        raise ValueError("needed a name and a dictionary of arguments")
    called = parsed.get("id")
    return Call(str(called) if called else None, parsed["name"], arguments)


def _without_beginning(held: str, word: str) -> str:
    """`held` without the longest beginning of `word` that it ends with."""
    end = next((n for n in range(min(len(word), len(held)), 0, -1) if held.endswith(word[:n])), 0)
    return held[: len(held) - end]
