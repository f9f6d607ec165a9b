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
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from ...forms.calls import FAMILIES, Parameters
from ...forms.tags import Tags

T = TypeVar("T")
# Runs until it needs more text, and returns.
Steps = Generator[None, None, T]
# The arguments of the only call in a text, as mlx-lm's parser reads them; None for other texts.
Parse = Callable[[str], Mapping[str, Any] | None]

# Deeper values are sent at the end of the call.
MOST_DEEP = 100
# What stands before the arguments of a call, or before one in tags, is not longer.
LONGEST_HEAD = 1_000
KEY = re.compile(r"\w+")
# The keys and values of function_gemma.
BEFORE_VALUE, VALUE = re.compile("[^}:]*"), re.compile("[^},]*")
# The characters of numbers and of words such as `true`.
JSON_WORD = re.compile(r"[-+.0-9eEtrufalsnNIiy]+")
PYTHON_WORD = re.compile(r"[-+.\w]+", re.ASCII)
# An escape of JSON or Python, once it is certain: both halves of a surrogate pair make one
# character, and octal digits may follow each other.
HIGH = r"\\(?:u|U0000)[dD][89abAB][0-9a-fA-F]{2}"
LOW = r"\\(?:u|U0000)[dD][c-fC-F][0-9a-fA-F]{2}"
HEX = r"\\(?:x..|u.{4}|U.{8})"
ESCAPE = (
    rf"{HIGH}(?:{LOW}|(?=[^\\]|\\[^xuU]|(?!{LOW}){HEX}))|(?!{HIGH}){HEX}"
    r"|\\[0-7](?:[0-7]{2}|[0-7]?(?=[^0-7]))|\\[^xuUN0-7]"
)
LONGEST_ESCAPE = 20
# What literals of Python and JSON raise.
NO_LITERAL = (ValueError, SyntaxError, TypeError, MemoryError, RecursionError)


class UncertainError(Exception):
    """The rest of the call is certain at its end only."""


@dataclass(frozen=True)
class CallPart:
    """More of the arguments of a call, as JSON; a call begins with it where none is open.

    `id`: None unless the model has named the call.
    """

    id: str | None
    name: str
    text: str


@dataclass(frozen=True)
class End:
    """The open call ends, and others may follow in the same block.

    `text`: a block with this call alone. `position`: where the call ends in the text of its block.
    """

    text: str
    position: int


def strings(forbidden: Mapping[str, str], escape: str = "") -> dict[str, re.Pattern[str]]:
    """Patterns of what is certain of a string's text, by the string's quotes.

    `forbidden`: the characters that are not its text as they are, in the form of a set.
    """
    found = {}
    for quote, characters in forbidden.items():
        parts = [f"[^{re.escape(quote[0])}{characters}]+", *filter(None, [escape])]
        # The beginning of a quote that is not one.
        starts = [f"{re.escape(quote[1:i])}[^{re.escape(quote[i])}]" for i in range(1, len(quote))]
        parts += [f"{re.escape(quote[0])}(?={'|'.join(starts)})"] * bool(starts)
        found[quote] = re.compile(f"(?:{'|'.join(parts)})*", re.DOTALL)
    return found


def json_text(raw: str, quote: str) -> str:
    """The text that is written in a string of JSON."""
    return str(json.loads(f'"{raw}"', strict=False))


def python_text(raw: str, quote: str) -> str:
    """The text that is written in a string of Python, as JSON has it."""
    # A space follows the text, which may end with a quote.
    found = ast.literal_eval(f"{quote}{raw} {quote}")[:-1]
    return str(json.loads(json.dumps(found)))


def python_scalar(word: str) -> Any:
    """A number or a constant; templates write those of JSON too."""
    constants = {"true": True, "false": False, "null": None}
    if word in constants:
        return constants[word]
    found = ast.literal_eval(word)
    if isinstance(found, bool | int | float | None):
        return found
    raise ValueError(word)


@dataclass(frozen=True)
class Notation:
    """How values are written.

    strings:    patterns of the texts of strings by their quotes, longer ones before their
                beginnings.
    text:       what a part of a string says, given its quote. Raises one of NO_LITERAL.
    word:       the characters of numbers and words.
    scalar:     reads a number or a word. Raises one of NO_LITERAL.
    bare_keys:  whether keys are written without quotes.
    more_commas: whether a comma may follow the last item.
    """

    strings: Mapping[str, re.Pattern[str]]
    text: Callable[[str, str], str] = json_text
    word: re.Pattern[str] = JSON_WORD
    scalar: Callable[[str], Any] = json.loads
    bare_keys: bool = False
    more_commas: bool = False


JSON = Notation(strings({'"': r"\\\x00-\x1f"}, ESCAPE))
# As json.loads() with strict=False.
LOOSE_JSON = Notation(strings({'"': r"\\"}, ESCAPE))
PYTHON = Notation(
    strings({'"""': r"\\\r\0", "'''": r"\\\r\0", '"': r"\\\n\r\0", "'": r"\\\n\r\0"}, ESCAPE),
    python_text,
    PYTHON_WORD,
    python_scalar,
    bare_keys=True,
    more_commas=True,
)
GEMMA = Notation(strings({'<|"|>': ""}), lambda raw, quote: raw, bare_keys=True)
FLAT = Notation(strings({"<escape>": "}"}), lambda raw, quote: raw)


class CallReader:
    """Reads one block of calls. `types`: those of the functions' parameters."""

    notation: Notation

    def __init__(self, parse: Parse, types: Parameters) -> None:
        self._parse, self._types = parse, types
        self._buffer = ""
        # The next character, and the first one of the call.
        self._at = self._start = 0
        # The first part of the open call.
        self._begun: CallPart | None = None
        self._events: list[CallPart | End] = []
        # What was written since the last event, and all that was written of the call.
        self._written: list[str] = []
        self._sent: list[str] = []
        self._steps: Steps[None] = self._read()
        self.is_over = False

    def feed(self, text: str) -> list[CallPart | End]:
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
        self._begun, self._written, self._sent = CallPart(id, name, "{"), [], []
        self._events.append(self._begun)

    def _put(self, text: str) -> None:
        self._written.append(text)
        self._sent.append(text)

    def _put_text(self, text: str) -> None:
        self._put(json.dumps(text, ensure_ascii=False)[1:-1])

    def _end(self, text: str) -> None:
        self._flush()
        self._events.append(End(text, self._at))

    def _flush(self) -> None:
        if self._begun is not None and (text := "".join(self._written)):
            self._events.append(replace(self._begun, text=text))
        self._written = []

    @property
    def _call(self) -> str:
        """The text of the call so far."""
        return self._buffer[self._start : self._at]

    # -- text --------------------------------------------------------------------------------------

    def _head(self, pattern: str) -> Steps[re.Match[str]]:
        """What stands next to arguments, which is skipped. Its end does not depend on what follows
        it.
        """
        matches = re.compile(pattern, re.DOTALL).match
        while (found := matches(self._buffer, self._at)) is None:
            if len(self._buffer) - self._at > LONGEST_HEAD:
                raise UncertainError
            yield
        self._at = found.end()
        return found

    def _space(self) -> Steps[str]:
        """Skip space. Returns the character after it."""
        while True:
            while self._at == len(self._buffer):
                yield
            if not (char := self._buffer[self._at]).isspace():
                return char
            self._at += 1

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
            yield from self._items(close, between, depth=depth)
            self._put(close)
        elif quote := (yield from self._quote()):
            yield from self._string(quote)
            # Python joins strings that follow each other.
            if (yield from self._space()) not in ",:]})":
                raise UncertainError
        else:
            word = yield from self._word(self.notation.word)
            try:
                self._put(json.dumps(self.notation.scalar(word), allow_nan=False))
            except NO_LITERAL as error:
                raise UncertainError from error

    def _items(self, close: str, between: str, depth: int = 0) -> Steps[None]:
        """The items of a list or, with `between` keys and values, of an object, and what closes
        it.
        """
        is_first = True
        while True:
            char = yield from self._space()
            if char == close and (is_first or self.notation.more_commas):
                break
            if not is_first:
                self._put(", ")
            if between:
                yield from self._key(between)
            yield from self._value(depth + 1)
            is_first = False
            char = yield from self._space()
            if char == close:
                break
            yield from self._expect(",")
        self._at += 1

    def _key(self, between: str) -> Steps[None]:
        if quote := (yield from self._quote()):
            yield from self._string(quote)
        elif self.notation.bare_keys:
            self._put(f'"{(yield from self._word(KEY))}"')
        else:
            raise UncertainError
        yield from self._next(between)
        self._put(": ")

    def _quote(self) -> Steps[str]:
        """The quote that begins a string here, which is skipped; empty if there is none."""
        for quote in self.notation.strings:
            if (yield from self._comes(quote)):
                return quote
        return ""

    def _string(self, quote: str) -> Steps[None]:
        """A string, its first quote skipped."""
        self._put('"')
        while True:
            found = self.notation.strings[quote].match(self._buffer, self._at)
            assert found is not None, "a string may have no text"
            self._at = found.end()
            try:
                self._put_text(self.notation.text(found[0], quote))
            except NO_LITERAL as error:
                raise UncertainError from error
            if self._buffer.startswith(quote, self._at):
                break
            if len(self._buffer) - self._at > LONGEST_ESCAPE:
                raise UncertainError
            yield
        self._at += len(quote)
        self._put('"')


@dataclass(frozen=True)
class Syntax:
    """How calls are written whose arguments are an object or keywords.

    first:          what stands before the arguments, as far as the name is certain, with the groups
                    "call", where the text of a call begins, "name" and maybe "id".
    opens:          the rest of it.
    last:           what follows the arguments; None where a block has one call.
    close, between: what ends the arguments, and what stands between a key and its value.
    alone:          the block of one call.
    """

    notation: Notation
    first: str
    opens: str = r"\s*\{"
    last: str | None = None
    close: str = "}"
    between: str = ":"
    alone: str = "{}"


# Calls of mistral in a list are certain at its end, where their ids are.
SYNTAXES = {
    "json_tools": Syntax(
        JSON,
        r'(?P<call>\s*)\{\s*(?:"id"\s*:\s*"(?P<id>[^"\\]+)"\s*,\s*)?"name"\s*:\s*"(?P<name>[^"\\]*)"',
        r'\s*,\s*"arguments"\s*:\s*\{',
    ),
    "kimi_k2": Syntax(
        JSON,
        r"(?P<call>\s*)(?:<\|tool_call_begin\|>)?\s*(?P<id>(?:functions\.)?(?P<name>.+?):\d+)\s*"
        r"<\|tool_call_argument_begin\|>",
        last=r"\s*<\|tool_call_end\|>",
    ),
    "mistral": Syntax(
        JSON, r"(?P<call>\s*)(?:\[TOOL_CALLS\])?\s*(?P<name>[\w-]+)\s*\[ARGS\]", last=""
    ),
    "pythonic": Syntax(
        PYTHON, r"\s*[\[,]\s*(?P<call>)(?P<name>[\w.]+)\(", "", "", ")", "=", "[{}]"
    ),
    "gemma4": Syntax(GEMMA, r"(?P<call>\s*)call:(?P<name>[\w-]+)\{", ""),
}


class ObjectReader(CallReader):
    """Reads calls of a syntax."""

    def __init__(self, syntax: Syntax, parse: Parse, types: Parameters) -> None:
        super().__init__(parse, types)
        self._syntax, self.notation = syntax, syntax.notation

    def _read(self) -> Steps[None]:
        syntax = self._syntax
        while True:
            begun = yield from self._head(syntax.first)
            self._start = begun.start("call")
            self._begin(begun["name"], begun.groupdict().get("id"))
            yield from self._head(syntax.opens)
            yield from self._items(syntax.close, syntax.between)
            if syntax.last is None:
                return
            yield from self._head(syntax.last)
            self._end(syntax.alone.format(self._call))


class FunctionGemmaReader(CallReader):
    """function_gemma: texts between two escapes, other values up to a comma. The first closing
    brace ends the call wherever it stands.
    """

    notation = FLAT

    def _read(self) -> Steps[None]:
        begun = yield from self._head(r"\s*call:(\w+)\{")
        self._begin(begun[1])
        lead = ""
        while True:
            key = yield from self._word(BEFORE_VALUE)
            yield from self._expect(":")
            self._put(f"{lead}{json.dumps(key, ensure_ascii=False)}: ")
            lead = ", "
            if quote := (yield from self._quote()):
                yield from self._string(quote)
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

    def __init__(self, tags: Tags, several: bool, parse: Parse, types: Parameters) -> None:
        """`several`: whether several calls may stand in one block."""
        super().__init__(parse, types)
        self._tags, self._several = tags, several

    def _read(self) -> Steps[None]:
        tags = self._tags
        close, finish = tags.close.strip("~\n"), tags.finish.strip("~\n")
        begin, key = self._pattern(tags.begin), self._pattern(tags.key)
        if begin.endswith(")"):
            # The first argument shows that it was a name.
            begin += rf"\s*(?={re.escape(tags.key[: tags.key.index('{')])})"
        argument = rf"{key}|\s*(?P<end>{re.escape(finish)})" if finish else key
        while True:
            self._start = self._at
            self._begin((yield from self._head(begin))["name"])
            seen: set[str] = set()
            while True:
                found = (yield from self._head(argument)).groupdict()
                if found.get("end"):
                    break
                if found["key"] in seen:
                    raise UncertainError
                self._put(", " if seen else "")
                self._put(f"{json.dumps(found['key'], ensure_ascii=False)}: ")
                seen.add(found["key"])
                yield from self._argument(found, close)
                self._settle(finish)
            if not self._several:
                return
            self._end(self._call)

    def _pattern(self, form: str) -> str:
        """A regular expression for a form of `Tags`."""
        parts = re.split(r"(\{\w+\}|[~\n])", form.strip("~\n"))
        return r"\s*" + "".join(
            r"\s*"
            if part in ("~", "\n")
            else rf"(?P<{part[1:-1]}>[^\s<>\"'=]+)"
            if part.startswith("{")
            else re.escape(part)
            for part in parts
            if part
        )

    def _argument(self, argument: Mapping[str, str], close: str) -> Steps[None]:
        """Read a value and the tag that closes it."""
        assert self._begun is not None, "an argument without a call"
        types = self._types.get(self._begun.name, {}).get(argument["key"], frozenset())
        if types and types <= {"array", "object"}:
            yield from self._value()
            yield from self._next(close)
            return
        is_text = "string" in types and argument.get("type", "string") == "string"
        may_be_json = types != {"string"} or self._tags.reads_json
        start, num_shown, num_probed = self._at, 0, 0
        probe = JsonProbe(self._parse, self._types)
        while (end := self._buffer.find(close, max(start, self._at - len(close)))) < 0:
            self._at = len(self._buffer)
            if is_text:
                text = self._buffer[start : self._at - held(self._buffer, close)]
                if may_be_json and not probe.is_over:
                    probe.feed(text[num_probed:])
                    num_probed = len(text)
                if not may_be_json or probe.is_over:
                    shown = self._certain(text)
                    if len(shown) > num_shown:
                        self._put("" if num_shown else '"')
                        self._put_text(shown[num_shown:])
                        num_shown = len(shown)
            yield
        self._at = end + len(close)

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
READERS: Mapping[str, Callable[[Parse, Parameters], CallReader]] = {
    "function_gemma": FunctionGemmaReader,
    **{parser: partial(ObjectReader, syntax) for parser, syntax in SYNTAXES.items()},
    **{
        parser: partial(TagReader, family.build, family.within is not None)
        for parser, family in FAMILIES.items()
        if isinstance(family.build, Tags)
    },
}
