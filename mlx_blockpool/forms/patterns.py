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

_ESCAPE = r"\\(?:x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|[pP]\{[^{}]*\}|[^0-9A-Za-z\s]|[dDwWsStnrfv])"
_TOKEN = re.compile(
    rf"(?P<set>\[\^?(?:\\.|[^\]\\])*\])|(?P<escape>{_ESCAPE})"
    r"|(?P<group>\((?!\?)|\(\?:|\(\?P?<[A-Za-z_]\w*>)|(?P<quantifier>[*+?]|\{\d+(?:,\d*)?\})|.",
    re.DOTALL,
)
# Of a set: escapes, beginnings of those that are refused, and what nests or combines sets for
# llguidance.
_IN_SET = re.compile(rf"(?P<escape>{_ESCAPE})|\\.|[\[&~]|--", re.DOTALL)

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
    quantifiers = 0  # in a row
    for token in _TOKEN.finditer(pattern):
        text, kind = token[0], token.lastgroup
        quantifiers = quantifiers + 1 if kind == "quantifier" else 0
        # A `?` after a quantifier makes it lazy, which changes nothing about what matches as a
        # whole.
        if quantifiers > 2 or (quantifiers == 2 and text != "?"):
            raise ValueError(
                f"{pattern[token.start() - 1 : token.end()]!r}: a quantifier after a quantifier is "
                "not supported"
            )
        if kind == "set":
            text = _set(text)
        elif kind == "escape" and text[1:] in _COMMON:
            text = f"[{_COMMON[text[1:]]}]"
        elif kind is None and text in "[({\\":
            raise ValueError(_refusal(pattern[token.start() : token.start() + 20]))
        elif text == ".":
            text = _LINE_CHARACTER
        parts.append(text)
    return "".join(parts)


def _set(text: str) -> str:
    """As common(), for square brackets and what they hold."""
    negated = text.startswith("[^")
    readings = _ANY if negated else _COMMON

    def written(token: re.Match[str]) -> str:
        part = token[0]
        if token["escape"]:
            return readings.get(part[1:], part)
        if part.startswith("\\"):
            raise ValueError(_refusal(part))
        if part == "--":
            raise ValueError("'--' within square brackets has to be written as '\\-'")
        return f"\\{part}"

    if not (inner := text[1 + negated : -1]):
        raise ValueError("'[]' and '[^]' are not supported")
    return f"[{'^' if negated else ''}{_IN_SET.sub(written, inner)}]"


def _refusal(rest: str) -> str:
    """Why a pattern may not have what begins here."""
    if rest.startswith("["):
        return f"{rest!r} has no closing ']'"
    if rest.startswith("{"):
        return "'{' that does not begin a quantifier has to be written as '\\{'"
    if rest.startswith(("(?=", "(?!", "(?<=", "(?<!")):
        return "look-around is not supported"
    if rest.startswith("("):
        return f"{rest[:4]!r}: flags and other extensions of groups are not supported"
    if rest.startswith(("\\b", "\\B")):
        return "word boundaries are not supported"
    return f"{rest[:2]!r} is not supported"
