"""Regular expressions and formats of JSON schemas, written so that llguidance, ECMAScript and
Python read them alike.

Where these disagree about a character (`.`, `\\s`, `\\W` and their like), the pattern is rewritten
to what all of them accept. What only some of them take, or take for something else, is refused:
flags, look-around, word boundaries, possessive quantifiers.
"""

from __future__ import annotations

import re

# Of which characters an escape consists, inside of square brackets: all readings of it together, or
# what is common to all.
_SPACES = r"\t-\r \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_COMMON = {
    "d": r"\d",
    "w": r"\w",
    "s": _SPACES,
    "D": r"[^\p{Nd}]",
    "W": r"[^\p{L}\p{N}_]",
    "S": r"[^\s\x1c-\x1f\ufeff]",
}
_ANY = {
    "d": r"\p{Nd}",
    "w": r"\p{L}\p{N}_",
    "s": r"\s\x1c-\x1f\ufeff",
    "D": r"\D",
    "W": r"\W",
    "S": rf"[^{_SPACES}]",
}
_LINE_CHARACTER = r"[^\n\r\u2028\u2029]"

_ESCAPE = re.compile(
    r"\\(?:x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|[pP]\{[^{}]*\}|[^0-9A-Za-z\s]|[dDwWsStnrfv])"
)
_GROUP = re.compile(r"\((?!\?)|\(\?:|\(\?P?<[A-Za-z_]\w*>")
_QUANTIFIER = re.compile(r"[*+?]|\{\d+(?:,\d*)?\}")

_DATE = (
    "(?:(?:(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)-02-29)"
    "|(?:(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
    "-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))))"
)
_MINUTE = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_MINUTE}:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:[Zz]|[+-]{_MINUTE})"

_N = "[0-9]{1,6}"
_DAYS = f"(?:{_N}Y(?:{_N}M(?:{_N}D)?)?|{_N}M(?:{_N}D)?|{_N}D)"
_HOURS = f"T(?:{_N}H(?:{_N}M(?:{_N}S)?)?|{_N}M(?:{_N}S)?|{_N}S)"

# llguidance's own patterns of these accept days and seconds that are none, and durations that no
# library computes with.
FORMAT_PATTERNS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}[Tt]{_TIME}$",
    "duration": f"^P(?:{_DAYS}(?:{_HOURS})?|{_HOURS}|{_N}W)$",
}
FORMATS = frozenset({*FORMAT_PATTERNS, "email", "hostname", "ipv4", "ipv6", "uri", "uuid"})


def common(pattern: str) -> str:
    """A pattern that matches only what ECMAScript and Python match with `pattern`.

    Raises ValueError for what is refused.
    """
    parts: list[str] = []
    at = quantifiers = 0  # in a row before `at`
    while at < len(pattern):
        end, part = _part(pattern, at)
        quantifiers = quantifiers + 1 if _QUANTIFIER.fullmatch(part) else 0
        # A `?` after a quantifier makes it lazy, which changes nothing about what matches as a
        # whole.
        if quantifiers > 2 or (quantifiers == 2 and part != "?"):
            raise ValueError(
                f"{pattern[at - 1 : end]!r}: a quantifier after a quantifier is not supported"
            )
        parts.append(part)
        at = end
    return "".join(parts)


def _part(pattern: str, at: int) -> tuple[int, str]:
    """The end of the part of a pattern that starts at `at`, and what it becomes."""
    character = pattern[at]
    if character == "[":
        return _character_class(pattern, at)
    if character == "\\":
        end, text = _escape(pattern, at)
        return end, f"[{_COMMON[text[1]]}]" if text[1:] in _COMMON else text
    if character == ".":
        return at + 1, _LINE_CHARACTER
    if character == "(":
        if group := _GROUP.match(pattern, at):
            return group.end(), group.group()
        if pattern.startswith(("(?=", "(?!", "(?<=", "(?<!"), at):
            raise ValueError("look-around is not supported")
        raise ValueError(
            f"{pattern[at : at + 4]!r}: flags and other extensions of groups are not supported"
        )
    if character == "{":
        if quantifier := _QUANTIFIER.match(pattern, at):
            return quantifier.end(), quantifier.group()
        raise ValueError("'{' that does not begin a quantifier has to be written as '\\{'")
    return at + 1, character


def _character_class(pattern: str, at: int) -> tuple[int, str]:
    """As `_part`, for what square brackets hold.

    Characters that nest or combine classes for llguidance are escaped.
    """
    start = at
    at += 1
    negated = pattern.startswith("^", at)
    at += negated
    parts: list[str] = []
    readings = _ANY if negated else _COMMON
    while not pattern.startswith("]", at):
        if at >= len(pattern):
            raise ValueError(f"{pattern[start : start + 20]!r} has no closing ']'")
        character, end = pattern[at], at + 1
        if character == "\\":
            end, character = _escape(pattern, at)
            character = readings.get(character[1:], character)
        elif character in "[&~":
            character = f"\\{character}"
        elif character == "-" and pattern.startswith("-", end):
            raise ValueError("'--' within square brackets has to be written as '\\-'")
        parts.append(character)
        at = end
    if not parts:
        raise ValueError("'[]' and '[^]' are not supported")
    return at + 1, f"[{'^' if negated else ''}{''.join(parts)}]"


def _escape(pattern: str, at: int) -> tuple[int, str]:
    if found := _ESCAPE.match(pattern, at):
        return found.end(), found.group()
    if pattern[at + 1 : at + 2] in ("b", "B"):
        raise ValueError("word boundaries are not supported")
    raise ValueError(f"{pattern[at : at + 2]!r} is not supported")
