"""Readers of tool calls as they are written, one for each syntax of mlx-lm's tool parsers.

A reader emits what is certain of a call before its end: the name, then the beginning of its
arguments as json.dumps() writes what mlx-lm's parser returns for the whole call. It may emit less:
CallStream adds the rest at the end, and checks all of it against the parser. Runs on the socket's
thread.
"""

from __future__ import annotations

import ast
import json
import re
import string
from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from ...forms.calls import FAMILIES
from ...forms.tags import Tags

T = TypeVar("T")
# Runs until it needs more text, and returns.
Steps = Generator[None, None, T]
# The arguments of the only call in a text, as mlx-lm's parser reads them; None for other texts.
Parse = Callable[[str], Mapping[str, Any] | None]
# The types that the schema of a function's parameter allows, by their names; empty if not declared.
Types = Callable[[str, str], frozenset[str]]

# Deeper values are sent at the end of the call.
MOST_DEEP = 100
KEY = re.compile(r"\w+")
NAME = re.compile(r"[\w-]+")
DOTTED = re.compile(r"[\w.]+")
# The keys and values of function_gemma.
BEFORE_VALUE, VALUE = re.compile("[^}:]*"), re.compile("[^},]*")
TAG_WORD = re.compile(r"[^\s<>\"'=]+")
# The characters of numbers and of words such as `true`.
JSON_WORD = re.compile(r"[-+.0-9eEtrufalsnNIiy]+")
PYTHON_WORD = re.compile(r"[-+.\w]+", re.ASCII)
HIGH = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}")
LOW = re.compile(r"\\u[dD][c-fC-F][0-9a-fA-F]{2}")
OCTAL = re.compile(r"\\[0-7]{1,3}")
# What literals of Python and JSON raise.
NO_LITERAL = (ValueError, SyntaxError, TypeError, MemoryError, RecursionError)


class UncertainError(Exception):
    """The rest of the call is certain at its end only."""


@dataclass(frozen=True)
class Begin:
    """A call begins. `id`: None unless the model has named the call."""

    id: str | None
    name: str


@dataclass(frozen=True)
class More:
    """More of the JSON of the open call's arguments, after the brace that opens it and without
    the one that closes it.
    """

    text: str


@dataclass(frozen=True)
class End:
    """The open call ends, and others may follow in the same block.

    `text`: a block with this call alone. `position`: where the call ends in the text of its block.
    """

    text: str
    position: int


CallEvent = Begin | More | End


@dataclass(frozen=True)
class Notation:
    """How values are written.

    quotes:     what begins and ends a string, longer ones before their beginnings.
    escape:     reads an escape of a string; None where there are none.
    forbidden:  characters that are not allowed in a string of one line.
    word:       the characters of numbers and words.
    scalar:     reads a number or a word. Raises one of NO_LITERAL.
    bare_keys:  whether keys are written without quotes.
    more_commas: whether a comma may follow the last item.
    """

    quotes: tuple[str, ...]
    escape: Callable[[CallReader], Steps[str]] | None
    forbidden: str
    word: re.Pattern[str]
    scalar: Callable[[str], Any]
    bare_keys: bool = False
    more_commas: bool = False


class CallReader:
    """Reads one block of calls. `parse` and `types`: see above."""

    notation: Notation

    def __init__(self, parse: Parse, types: Types) -> None:
        self._parse, self._types = parse, types
        self._buffer = ""
        # The next character, and the first one of the call.
        self._at = self._start = 0
        self._name = ""
        self._is_named = False
        self._events: list[CallEvent] = []
        # What was written since the last event, and all that was written of the call.
        self._written: list[str] = []
        self._sent: list[str] = []
        self._steps: Steps[None] = self._read()
        self.is_over = False

    def feed(self, text: str) -> list[CallEvent]:
        """What is certain with the next part of the block's text."""
        if not self.is_over:
            self._buffer += text
            try:
                next(self._steps)
            except (StopIteration, UncertainError, RecursionError):
                self.is_over = True
        self._flush()
        events, self._events = self._events, []
        return events

    def _read(self) -> Steps[None]:
        raise NotImplementedError

    # -- events ------------------------------------------------------------------------------------

    def _begin(self, name: str, id: str | None = None) -> None:
        self._name, self._is_named = name, True
        self._events.append(Begin(id, name))

    def _put(self, text: str) -> None:
        self._written.append(text)
        self._sent.append(text)

    def _put_text(self, text: str) -> None:
        self._put(json.dumps(text, ensure_ascii=False)[1:-1])

    def _end(self, text: str) -> None:
        self._flush()
        self._events.append(End(text, self._at))
        self._start, self._is_named, self._sent = self._at, False, []

    def _flush(self) -> None:
        if self._is_named:
            if text := "".join(self._written):
                self._events.append(More(text))
            self._written = []

    @property
    def _call(self) -> str:
        """The text of the call so far."""
        return self._buffer[self._start : self._at]

    # -- text --------------------------------------------------------------------------------------

    def _peek(self, size: int = 1) -> Steps[str]:
        while len(self._buffer) - self._at < size:
            yield
        return self._buffer[self._at : self._at + size]

    def _space(self) -> Steps[str]:
        """Skip space. Returns the character after it."""
        while (char := (yield from self._peek())).isspace():
            self._at += 1
        return char

    def _comes(self, word: str) -> Steps[bool]:
        """Whether a word comes next, which is skipped then."""
        while True:
            found = self._buffer[self._at : self._at + len(word)]
            if found == word:
                self._at += len(word)
                return True
            if not word.startswith(found):
                return False
            yield

    def _expect(self, word: str) -> Steps[None]:
        if not (yield from self._comes(word)):
            raise UncertainError

    def _next(self, word: str) -> Steps[None]:
        """Skip space, and a word that has to follow it."""
        yield from self._space()
        yield from self._expect(word)

    def _until(self, word: str) -> Steps[str]:
        """The text before a word, which is skipped."""
        start = self._at
        while (end := self._buffer.find(word, self._at)) < 0:
            self._at = max(len(self._buffer) - len(word) + 1, start)
            yield
        self._at = end + len(word)
        return self._buffer[start:end]

    def _word(self, pattern: re.Pattern[str]) -> Steps[str]:
        """The longest text of a pattern, which repeats a set of characters."""
        start = self._at
        while True:
            match = pattern.match(self._buffer, self._at)
            if match is not None:
                self._at = match.end()
            if self._at < len(self._buffer):
                if match is None and self._at == start:
                    raise UncertainError
                return self._buffer[start : self._at]
            yield

    # -- values ------------------------------------------------------------------------------------

    def _value(self, depth: int = 1) -> Steps[None]:
        char = yield from self._space()
        if depth > MOST_DEEP:
            raise UncertainError
        if char in "{[":
            close, between = ("}", ":") if char == "{" else ("]", "")
            self._at += 1
            self._put(char)
            yield from self._items(close, between, depth)
            self._put(close)
        elif quote := (yield from self._quote()):
            self._put('"')
            yield from self._string(quote, self._put_text)
            # Python joins strings that follow each other.
            if (yield from self._space()) not in ",:]})":
                raise UncertainError
            self._put('"')
        else:
            word = yield from self._word(self.notation.word)
            try:
                self._put(json.dumps(self.notation.scalar(word), allow_nan=False))
            except NO_LITERAL as error:
                raise UncertainError from error

    def _items(
        self, close: str, between: str, depth: int = 0, is_bare: bool = False
    ) -> Steps[None]:
        """The items of a list or, with `between` keys and values, of an object, and what closes
        it.

        `is_bare`: whether keys are words.
        """
        is_first = True
        while True:
            char = yield from self._space()
            if char == close and (is_first or self.notation.more_commas):
                break
            if not is_first:
                self._put(", ")
            if between:
                yield from self._key(between, is_bare or self.notation.bare_keys)
            yield from self._value(depth + 1)
            is_first = False
            char = yield from self._space()
            if char == close:
                break
            yield from self._expect(",")
        self._at += 1

    def _object(self) -> Steps[None]:
        """The items of an object, without its braces."""
        yield from self._next("{")
        yield from self._items("}", ":")

    def _key(self, between: str, is_bare: bool) -> Steps[None]:
        self._put('"')
        if quote := (yield from self._quote()):
            yield from self._string(quote, self._put_text)
        elif is_bare:
            self._put_text((yield from self._word(KEY)))
        else:
            raise UncertainError
        yield from self._next(between)
        self._put('": ')

    def _quote(self) -> Steps[str]:
        """The quote that begins a string here, which is skipped; empty if there is none."""
        for quote in self.notation.quotes:
            if (yield from self._comes(quote)):
                return quote
        return ""

    def _string(self, quote: str, put: Callable[[str], None]) -> Steps[None]:
        """The text of a string, its quote skipped."""
        escape = self.notation.escape
        forbidden = self.notation.forbidden if len(quote) == 1 else "\r\0" * (escape is not None)
        special = re.compile(
            "[" + re.escape(quote[0] + "\\" * (escape is not None) + forbidden) + "]"
        )
        while True:
            match = special.search(self._buffer, self._at)
            end = len(self._buffer) if match is None else match.start()
            put(self._buffer[self._at : end])
            self._at = end
            if match is None:
                yield
            elif match.group() == "\\" and escape is not None:
                put((yield from escape(self)))
            elif match.group() in forbidden:
                raise UncertainError
            elif (yield from self._comes(quote)):
                return
            else:
                put(match.group())
                self._at += 1


def json_escape(reader: CallReader) -> Steps[str]:
    """The character of an escape of JSON; both halves of a surrogate pair make one."""
    text = yield from reader._peek(2)
    if text == "\\u":
        text = yield from reader._peek(6)
        if HIGH.fullmatch(text) and (yield from reader._peek(8))[6:] == "\\u":
            pair = yield from reader._peek(12)
            text = pair if LOW.fullmatch(pair[6:]) else text
    reader._at += len(text)
    try:
        return str(json.loads(f'"{text}"'))
    except ValueError as error:
        raise UncertainError from error


def python_escape(reader: CallReader) -> Steps[str]:
    """The characters of an escape in a string of Python; both halves of a surrogate pair make one,
    as in the JSON of a whole call.
    """
    text = yield from reader._peek(2)
    kind = text[1]
    if kind in "xuU":
        text = yield from reader._peek({"x": 4, "u": 6, "U": 10}[kind])
    elif match := OCTAL.match(text):
        match = OCTAL.match((yield from reader._peek(4)))
        assert match is not None
        text = match.group()
    elif kind == "N":
        raise UncertainError
    elif kind not in "\\'\"abfnrtv\n":
        # Not an escape: the backslash stays.
        reader._at += 2
        return text
    reader._at += len(text)
    try:
        found = str(ast.literal_eval(f'"{text}"')) if kind != "\n" else ""
    except NO_LITERAL as error:
        raise UncertainError from error
    if "\ud800" <= found <= "\udbff" and (yield from reader._peek(2)) in ("\\u", "\\U"):
        found += yield from python_escape(reader)
        found = found.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
    return found


def python_scalar(word: str) -> Any:
    """A number or a constant; templates write those of JSON too."""
    constants = {"true": True, "false": False, "null": None}
    if word in constants:
        return constants[word]
    found = ast.literal_eval(word)
    if isinstance(found, bool | int | float | None):
        return found
    raise ValueError(word)


CONTROLS = "".join(map(chr, range(32)))
JSON = Notation(('"',), json_escape, CONTROLS, JSON_WORD, json.loads)
# As json.loads() with strict=False.
LOOSE_JSON = Notation(('"',), json_escape, "", JSON_WORD, json.loads)
PYTHON = Notation(
    ('"""', "'''", '"', "'"), python_escape, "\n\r\0", PYTHON_WORD, python_scalar, more_commas=True
)
GEMMA = Notation(('<|"|>',), None, "", JSON_WORD, json.loads, bare_keys=True)


class JsonReader(CallReader):
    """json_tools: an object with a name and arguments."""

    notation = JSON

    def _read(self) -> Steps[None]:
        yield from self._next("{")
        id, seen = None, set()
        while True:
            key = yield from self._text()
            if key in seen:
                raise UncertainError
            seen.add(key)
            yield from self._next(":")
            if key == "arguments":
                yield from self._object()
            else:
                text = yield from self._text()
                if key == "name":
                    self._begin(text, id)
                elif key == "id":
                    id = text or None
            yield from self._next(",")

    def _text(self) -> Steps[str]:
        """A whole string, and the space before it."""
        yield from self._next('"')
        found: list[str] = []
        yield from self._string('"', found.append)
        return "".join(found)


class KimiReader(CallReader):
    """kimi_k2: names with a number, before JSON."""

    notation = JSON
    _named = re.compile(r"\s*((?:functions\.)?(.+?):\d+)\s*", re.DOTALL)

    def _read(self) -> Steps[None]:
        while True:
            yield from self._space()
            self._start = self._at
            yield from self._comes("<|tool_call_begin|>")
            named = self._named.fullmatch((yield from self._until("<|tool_call_argument_begin|>")))
            if named is None:
                raise UncertainError
            self._begin(named[2], named[1])
            yield from self._object()
            yield from self._next("<|tool_call_end|>")
            self._end(self._call)


class MistralReader(CallReader):
    """mistral: names before JSON. Calls in a list are certain at its end, where their ids are."""

    notation = JSON

    def _read(self) -> Steps[None]:
        while True:
            yield from self._space()
            yield from self._comes("[TOOL_CALLS]")
            yield from self._space()
            self._start = self._at
            name = yield from self._word(NAME)
            yield from self._next("[ARGS]")
            self._begin(name)
            yield from self._object()
            self._end(self._call)


class PythonReader(CallReader):
    """pythonic: a list of calls with keywords."""

    notation = PYTHON

    def _read(self) -> Steps[None]:
        yield from self._next("[")
        while True:
            yield from self._space()
            self._start = self._at
            name = yield from self._word(DOTTED)
            yield from self._expect("(")
            self._begin(name)
            yield from self._items(")", "=", is_bare=True)
            self._end(f"[{self._call}]")
            yield from self._next(",")


class GemmaReader(CallReader):
    """gemma4: an object with bare keys after the name."""

    notation = GEMMA

    def _read(self) -> Steps[None]:
        yield from self._next("call:")
        name = yield from self._word(NAME)
        yield from self._expect("{")
        self._begin(name)
        yield from self._items("}", ":")


class FunctionGemmaReader(CallReader):
    """function_gemma: texts between two escapes, other values up to a comma. The first closing
    brace ends the call wherever it stands.
    """

    def _read(self) -> Steps[None]:
        yield from self._next("call:")
        name = yield from self._word(KEY)
        yield from self._expect("{")
        self._begin(name)
        lead = ""
        while True:
            key = yield from self._word(BEFORE_VALUE)
            yield from self._expect(":")
            self._put(f"{lead}{json.dumps(key, ensure_ascii=False)}: ")
            lead = ", "
            if (yield from self._comes("<escape>")):
                self._put('"')
                while (char := (yield from self._peek())) != "<" or not (
                    yield from self._comes("<escape>")
                ):
                    if char == "}":
                        raise UncertainError
                    self._put_text(char)
                    self._at += 1
                self._put('"')
            else:
                value: Any = yield from self._word(VALUE)
                with suppress(ValueError):
                    value = json.loads(value)
                self._put(json.dumps(value, ensure_ascii=False))
            yield from self._expect(",")


class TagReader(CallReader):
    """Calls in tags. Texts are certain as they are written, lists and objects as JSON, and other
    values at their ends.
    """

    # Values of lists and objects are JSON.
    notation = LOOSE_JSON

    def __init__(self, tags: Tags, several: bool, parse: Parse, types: Types) -> None:
        """`several`: whether several calls may stand in one block."""
        super().__init__(parse, types)
        self._tags, self._several = tags, several

    def _read(self) -> Steps[None]:
        forms = (self._tags.begin, self._tags.key, self._tags.close, self._tags.finish)
        begin, key, close, finish = (form.strip("~\n") for form in forms)
        while True:
            yield from self._space()
            self._start = self._at
            name = (yield from self._follow(begin))["name"]
            if begin.endswith("}"):
                # The first argument shows that it was a name.
                yield from self._space()
                at = self._at
                yield from self._expect(key[: key.index("{")])
                self._at = at
            self._begin(name)
            seen: set[str] = set()
            while True:
                yield from self._space()
                if finish and (yield from self._comes(finish)):
                    break
                argument = yield from self._follow(key)
                if argument["key"] in seen:
                    raise UncertainError
                self._put(", " if seen else "")
                self._put(f"{json.dumps(argument['key'], ensure_ascii=False)}: ")
                seen.add(argument["key"])
                yield from self._argument(argument, close)
                self._settle(finish)
            if not self._several:
                return
            self._end(self._call)

    def _follow(self, form: str) -> Steps[dict[str, str]]:
        """Read what a form of `Tags` says. Returns its words."""
        found = {}
        for part in re.split(r"(\{\w+\}|[~\n])", form):
            if part in ("~", "\n"):
                yield from self._space()
            elif part.startswith("{"):
                found[part[1:-1]] = yield from self._word(TAG_WORD)
            else:
                yield from self._expect(part)
        return found

    def _argument(self, argument: Mapping[str, str], close: str) -> Steps[None]:
        """Read a value and the tag that closes it."""
        types = self._types(self._name, argument["key"])
        if types and types <= {"array", "object"}:
            yield from self._value()
            yield from self._next(close)
        elif "string" in types and argument.get("type", "string") == "string":
            yield from self._string_in_tags(close, types != {"string"} or self._tags.reads_json)
        else:
            yield from self._until(close)

    def _string_in_tags(self, close: str, may_be_json: bool) -> Steps[None]:
        """`may_be_json`: text that is JSON has another value."""
        start, num_shown, num_probed = self._at, 0, 0
        json_text = JsonProbe(self._parse, self._types)
        while True:
            end = self._buffer.find(close, max(start, self._at - len(close)))
            if end >= 0:
                self._at = end + len(close)
                return
            text = self._buffer[start : len(self._buffer) - held(self._buffer, close)]
            if may_be_json and not json_text.is_over:
                json_text.feed(text[num_probed:])
                num_probed = len(text)
            if not may_be_json or json_text.is_over:
                shown = self._certain(text)
                if len(shown) > num_shown:
                    self._put("" if num_shown else '"')
                    self._put_text(shown[num_shown:])
                    num_shown = len(shown)
            self._at = len(self._buffer)
            yield

    def _certain(self, text: str) -> str:
        """The beginning of a value, given its text so far."""
        tags = self._tags
        if tags.takes:
            is_line = tags.takes == "line"
            text = text.removeprefix("\n").removesuffix("\n") if is_line else text.strip()
        opens, closes = tags.section
        if opens and opens.startswith(text):
            return ""
        if opens and text.startswith(opens):
            text = text[len(opens) :].rstrip(closes + string.whitespace)
        return "" if tags.nulls and "null".startswith(text[:5].lower()) else text

    def _settle(self, finish: str) -> None:
        """Write the rest of the arguments whose ends were read, as mlx-lm's parser reads them."""
        arguments = self._parse(self._call + finish)
        whole = json.dumps(arguments, ensure_ascii=False)[1:-1]
        sent = "".join(self._sent)
        if arguments is None or not whole.startswith(sent):
            raise UncertainError
        self._put(whole[len(sent) :])


class JsonProbe(CallReader):
    """Reads text as JSON. `is_over` once it is not JSON, whatever follows."""

    notation = LOOSE_JSON

    def _read(self) -> Steps[None]:
        yield from self._value()
        yield from self._space()


def held(text: str, word: str) -> int:
    """The length of the longest beginning of `word` that ends the text."""
    sizes = range(min(len(word) - 1, len(text)), 0, -1)
    return next((size for size in sizes if text.endswith(word[:size])), 0)


# Makes the reader of a block; by mlx-lm's parsers. The calls of others are certain at their ends.
READERS: Mapping[str, Callable[[Parse, Types], CallReader]] = {
    "function_gemma": FunctionGemmaReader,
    "gemma4": GemmaReader,
    "json_tools": JsonReader,
    "kimi_k2": KimiReader,
    "mistral": MistralReader,
    "pythonic": PythonReader,
    **{
        parser: partial(TagReader, family.build, family.within is not None)
        for parser, family in FAMILIES.items()
        if isinstance(family.build, Tags)
    },
}
