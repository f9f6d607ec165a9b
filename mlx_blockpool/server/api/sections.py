"""Sections: finds by a reply's tokens which of its text is thinking, a call or the content of a
form.

mlx-lm's state machine finds markers by their text, however they were tokenized. A form follows
tokens, and a JSON string in it may say `</tool_call>` with other tokens than the marker's. Runs on
the socket's thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mlx_lm.generate import TextStateMachine, make_text_state_machine

from ...forms.form import mark_tokens
from ...forms.vocabulary import added_of
from ..request import PromptRequest

# "start": where thinking or a call may come before a form's content; "free": text in which mlx-lm's
# state machine finds markers.
Section = Literal["thinking", "start", "free", "form", "call"]


@dataclass(frozen=True)
class Mark:
    """A marker: its tokens, its text, and the section that it begins."""

    tokens: tuple[int, ...]
    text: str
    section: Section


class Sections:
    """Cuts the text of one reply at those tokens that are marks. Text may come later than its
    tokens, and never earlier.

    drawn:      the section of the next token.
    by_tokens:  whether there are marks; without any, all of the reply is `section`.
    """

    def __init__(self, marks: Mapping[Section, Sequence[Mark]], section: Section) -> None:
        self.drawn = section
        self.by_tokens = bool(marks)
        self._marks = {
            where: [mark for mark in each if mark.tokens] for where, each in marks.items()
        }
        self._section = section
        # Positions are in the text of the whole reply. An edge: the start and the end of a mark,
        # and the section after it.
        self._edges: deque[tuple[int, int, Section]] = deque()
        self._length = self._taken = 0
        self._held = ""
        # The last tokens, with which a mark may have begun, and where the text of each begins; the
        # section's last characters.
        self._recent: list[tuple[int, int]] = []
        self._tail = ""

    @classmethod
    def for_reply(cls, request: PromptRequest, initial_state: str) -> Sections:
        """The sections of a reply to a request.

        Without marks where markers are found by their text: the reply has no form, or its markers
        are not added tokens.
        """
        form, tokenizer = request.compiled, request.tokenizer
        if form is None:
            return cls({}, "free")
        added = added_of(tokenizer)

        def mark(text: str | None, tokens: Sequence[int] | None, section: Section) -> Mark:
            return Mark(mark_tokens(text, tokens, added), text or "", section)

        call = mark(tokenizer.tool_call_start, tokenizer.tool_call_start_tokens, "call")
        end = mark(tokenizer.tool_call_end, tokenizer.tool_call_end_tokens, "free")
        if initial_state == "tool" or request.form is None:
            # Calls alone keep their form.
            if not call.tokens or (end.text and not end.tokens):
                return cls({}, "free")
            return cls(
                {"free": [call], "call": [end]}, "call" if initial_state == "tool" else "free"
            )
        calls = [call] if form.may_call else []
        thinking = mark(tokenizer.think_start, tokenizer.think_start_tokens, "thinking")
        answer = mark(tokenizer.think_end, tokenizer.think_end_tokens, "start")
        begun: Section = (
            "thinking" if form.state == "thinking" else "form" if form.state == "form" else "start"
        )
        return cls(
            {
                "thinking": [answer, *calls],
                "start": [thinking, *calls],
                "call": [end],
                "free": [call],
            },
            begun,
        )

    def add(self, token: int, text: str) -> None:
        """Follow one token, and the text that came with it."""
        marks = self._marks.get(self.drawn, [])
        self._recent.append((token, self._length))
        self._length += len(text)
        longest = max((len(mark.text) for mark in marks), default=0)
        self._tail = (self._tail + text)[-longest:] if longest else ""
        for mark in marks:
            if self._ends_with(mark.tokens):
                # A detokenizer may hold back text, which comes with the mark then.
                begun = self._recent[-len(mark.tokens)][1]
                start = self._length - len(mark.text) if self._tail.endswith(mark.text) else begun
                self._edges.append((start, self._length, mark.section))
                self.drawn, self._recent, self._tail = mark.section, [], ""
                return
        sizes = (
            size
            for mark in marks
            for size in range(1, len(mark.tokens))
            if self._ends_with(mark.tokens[:size])
        )
        self._recent = self._recent[len(self._recent) - max(sizes, default=0) :]
        if self.drawn == "start" and not self._recent and text.strip():
            # Content has begun, in which no mark can be.
            self._edges.append((self._length, self._length, "form"))
            self.drawn = "form"

    def split(self, text: str) -> list[tuple[Section, str]]:
        """The text that follows, by its sections, the current one last.

        What may be part of a mark is held back.
        """
        self._held += text
        found: list[tuple[Section, str]] = []
        while self._edges and self._edges[0][1] <= self._taken + len(self._held):
            start, end, section = self._edges.popleft()
            found.append((self._section, self._release(start)))
            self._release(end)
            self._section = section
        unsure = (
            self._edges[0][0]
            if self._edges
            else self._recent[0][1]
            if self._recent
            else self._length
        )
        return [*found, (self._section, self._release(unsure))]

    def flush(self) -> tuple[Section, str]:
        """What was held back, at the end of the reply."""
        return self._section, self._release(self._length)

    def _ends_with(self, tokens: tuple[int, ...]) -> bool:
        return tuple(token for token, _ in self._recent[-len(tokens) :]) == tokens

    def _release(self, until: int) -> str:
        """The held text up to a position."""
        size = max(until - self._taken, 0)
        part, self._held = self._held[:size], self._held[size:]
        self._taken += len(part)
        return part


def machine_of_text(tokenizer: Any) -> TextStateMachine:
    """mlx-lm's state machine for text between calls: a call's marker in it is text where it is
    not the marker's token.
    """
    return make_text_state_machine(_WithoutCalls(tokenizer))


class _WithoutCalls:
    has_tool_calling = False

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)
