"""CallStream: the calls between one pair of markers, as they are written.

A reader of the model's syntax says what is certain before a call's end, and mlx-lm's parser what
the calls are. Runs on the socket's thread.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ...forms.calls import Tool, argument_types, arguments, as_strings, writes_tags
from ..bodies import Json
from .call_readers import READERS, CallPart, End

log = logging.getLogger(__name__)

# The errors of mlx-lm's parsers for text that is not a call.
BAD_CALL = (
    MemoryError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    IndexError,
    SyntaxError,
    RecursionError,
)


@dataclass(frozen=True)
class Call:
    """A whole tool call, between blocks. `id`: None unless the model has named the call itself."""

    id: str | None
    name: str
    arguments: Json

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
class CallCut:
    """The open call ends malformed. Its arguments, as far as they were emitted, are not JSON."""


CallPiece = Call | CallPart | CallCut


class CallStream:
    """Reads one block of calls.

    parse:   mlx-lm's parser. tools: those that were offered, in OpenAI's shape.
    text:    what was written so far.
    """

    def __init__(self, parse: Callable[..., Any], tools: Sequence[Tool]) -> None:
        self.text = ""
        self._parser = parse.__module__.rpartition(".")[2]
        self._parse_text, self._types = parse, argument_types(self._parser, tools)
        self._tools = as_strings(self._types) if writes_tags(self._parser) else tools
        kind = READERS.get(self._parser)
        self._reader = None if kind is None else kind(self._only_arguments, self._types)
        # Calls that have ended before their block did, and where the text after them begins.
        self._ended: list[Call] = []
        self._rest = 0
        # The open call, where the reader has found its end, and what was emitted of its arguments.
        self._begun: CallPart | None = None
        self._end: End | None = None
        self._sent = ""

    @property
    def reads_cut_calls(self) -> bool:
        """Whether the parser may take the beginning of the call in progress for a whole call: one
        of tags leaves out what is missing.
        """
        return self._end is None and writes_tags(self._parser)

    def feed(self, text: str) -> Iterator[CallPiece]:
        """The pieces that are certain with more text of the block."""
        self.text += text
        if self._reader is None:
            return
        for event in self._reader.feed(text):
            if isinstance(event, End):
                self._end = event
                continue
            if self._end is not None:
                # A last call ends with its block.
                calls = self._calls(self._end.text)
                if len(calls) != 1 or not self._continues(calls[0]):
                    self._reader = None
                    return
                self._ended += calls
                self._rest, self._end, self._sent = self._end.position, None, ""
                yield calls[0]
            self._begun, self._sent = event, self._sent + event.text
            yield event

    def end(self, is_cut: bool) -> tuple[list[CallPiece], str | None]:
        """The remaining pieces, and the text that is not a call; None if all of it was.

        `is_cut`: the call in progress was cut.
        """
        calls = [] if is_cut else self._calls(self.text, is_last=True)
        is_same = calls[: len(self._ended)] == self._ended and bool(calls)
        calls = calls[len(self._ended) :] if is_same else []
        is_open = self._begun is not None
        is_malformed = is_open and not (calls and self._continues(calls[0]))
        rest = self.text[self._rest :]
        # Some parsers skip what is malformed.
        is_read = bool(calls) or (is_same and not is_open) or (self._ended and not rest.strip())
        return [*[CallCut()] * is_malformed, *calls], None if is_read else rest

    def _continues(self, call: Call) -> bool:
        """Whether a call begins with what was emitted."""
        begun = self._begun
        return begun is not None and call.name == begun.name and call.written.startswith(self._sent)

    def _only_arguments(self, text: str) -> Json | None:
        calls = self._calls(text)
        return calls[0].arguments if len(calls) == 1 else None

    def _calls(self, text: str, is_last: bool = False) -> list[Call]:
        """The calls in a text; none if it is malformed, which is logged with `is_last`."""
        try:
            parsed = self._parse_text(text, self._tools)
            return [self._call(one) for one in (parsed if isinstance(parsed, list) else [parsed])]
        except BAD_CALL as error:
            if is_last:
                log.warning(
                    "a malformed tool call is returned as text: %s: %s", type(error).__name__, error
                )
            return []

    def _call(self, parsed: Json) -> Call:
        """A call as the parser has returned it. Raises one of BAD_CALL."""
        name, found, called = parsed["name"], parsed["arguments"], parsed.get("id")
        if isinstance(found, str):
            found = json.loads(found)
        if not (isinstance(name, str) and isinstance(found, dict)):
            raise ValueError("a call has a name and a dictionary of arguments")
        found = arguments(self._types.get(name, {}), found)
        # Literals of Python may be sets or bytes, and numbers infinite: they are not JSON. Two
        # escapes of Python may be the halves of a character, which JSON joins.
        found = json.loads(json.dumps(found, allow_nan=False))
        return Call(str(called) if called else None, name, found)
