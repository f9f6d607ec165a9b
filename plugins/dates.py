"""Statements of today's date or time in a text, such as `Today is Monday, 24 November 2026.`

A statement is a line or a sentence that has a label, such as `Current date:`, followed by a date or
a time and nothing else. Text with any other word, as in `Today is the deadline: 24 November`, does
not change.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain, islice

MONTHS = "january|february|march|april|may|june|july|august|september|october|november|december|"
MONTHS += r"(?:jan|feb|mar|apr|jun|jul|aug|sept?|oct|nov|dec)\b\.?"
WEEKDAYS = (
    r"(?:mon|tues|wednes|thurs|fri|satur|sun)day|(?:mon|tues?|wed|thu(?:rs?)?|fri|sat|sun)\b\.?"
)
ZONES = (
    "z|utc|gmt|cet|cest|eet|eest|bst|ist|jst|kst|msk|pst|pdt|mst|mdt|cst|cdt|est|edt|akst|hst|aest|aedt|"
    "nzst|nzdt|sgt|hkt"
)
AREAS = "africa|america|antarctica|asia|atlantic|australia|etc|europe|indian|pacific"
OFFSET = r"[+-]\d{1,2}(?::?\d{2})?"
CLOCK = r"\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d{1,9})?)?"
# Repetitions of blanks are possessive (++, *+), so that the time is proportional to the text.
LABEL = re.compile(
    r"(?:(?P<line>^[ \t]*+(?:[-*\u2022][ \t]++)?+)|(?<=[.!?][ \t]))[*_]{0,2}"
    # Whatever the text around it, these mean now.
    r"(?:(?P<now>today(?:['\u2019]s (?:date|day))?|it(?: is|['\u2019]s) (?:now|currently|today)|"
    r"(?:the )?(?:date|time) (?:today|now)|"
    r"(?:the )?current (?:local |system )?(?:date(?:(?: and | & |[ /])?time)?|time(?: (?:and|&) "
    r"date)?|day))"
    # These do so at the beginning of a line.
    r"|(?P<date>(?:the )?date|it(?: is|['\u2019]s)))(?!\w)"
    r"(?:[ \t]*+[*_]{0,2}(?:is|[:=])[*_]{0,2}(?: (?:now|currently))?(?!\w))?+"
    # A part of a date is next. This skips lines that are not statements quickly.
    r"(?=[ \t]*+[\dadefjmnostw])",
    re.IGNORECASE | re.MULTILINE,
)
# Where a label may begin, apart from a text's beginning: trying LABEL at each character takes
# longer.
BEGINNING = re.compile(r"\n|[.!?][ \t]")
# One part of a date, by what it is; `number` is a date in figures.
PART = re.compile(
    r"[ \t]*+,?+[ \t]*+(?:"
    rf"(?P<number>\d{{4}}-\d{{2}}-\d{{2}}(?:T{CLOCK}(?:z|{OFFSET})?)?|\d{{4}}[-/.]\d{{1,2}}[-/.]\d{{1,2}}|"
    rf"\d{{1,2}}[-/.]\d{{1,2}}[-/.](?:\d{{4}}|\d{{2}})|\d{{1,2}}-(?:{MONTHS})-(?:\d{{4}}|\d{{2}})|"
    r"\d{4}\u5e74\d{1,2}\u6708\d{1,2}\u65e5)"
    rf"|(?P<time>{CLOCK}(?:[ ]?[ap](?:m|\.m\.))?|\d{{1,2}}[ "
    rf"]?[ap](?:m|\.m\.)|\d{{10}}(?:\d{{3}}|\.\d{{1,9}})?)"
    r"|(?P<day>\d{1,2}(?:st|nd|rd|th)?)"
    r"|(?P<year>\d{4})"
    rf"|(?P<month>{MONTHS})"
    rf"|(?P<weekday>{WEEKDAYS})"
    rf"|(?P<zone>(?:{ZONES})(?:{OFFSET})?|{OFFSET}|(?:{AREAS})/[a-z_]+|local time)"
    r"|(?P<word>the|of|at|and|in|o'clock)"
    r"|(?P<remark>\([^()\n]{0,100}\)))"
    r"(?!\w)",
    re.IGNORECASE,
)
# The most labels that are examined in a text. A prompt has a few; this bounds the time for one that
# consists of labels.
MOST_LABELS = 1000
# A sentence's end, or that of its line.
END = re.compile(r"[ \t]*+[*_]{0,2}(?:[.!][*_]{0,2}(?=[ \t\n]|\Z)|(?=\n|\Z))[ \t]*+")


def statements(text: str) -> Iterator[tuple[int, int]]:
    """The start and the end of each statement, with the blanks or the line's end after it."""
    last = 0
    starts = chain([0], (beginning.end() for beginning in BEGINNING.finditer(text)))
    labels = (label for start in starts if (label := LABEL.match(text, start)) is not None)
    for label in islice(labels, MOST_LABELS):
        if label.start() < last:
            # In a remark of the statement before.
            continue
        at, parts = label.end(), set[str | None]()
        while part := PART.match(text, at):
            at = part.end()
            parts.add(part.lastgroup)
        end = END.match(text, at)
        if end is None or not _is_date(parts, label["now"] is not None):
            continue
        is_at_end = end.end() == len(text) or text[end.end()] == "\n"
        if label["line"] is not None and is_at_end:
            last = min(end.end() + 1, len(text))
        elif label["now"] is not None:
            last = end.end()
        else:
            continue
        yield label.start(), last


def _is_date(parts: set[str | None], is_now: bool) -> bool:
    """Return whether the parts name a day or, after a label that means now, also a time, a
    weekday or a month.
    """
    if "number" in parts or {"month", "day"} <= parts:
        return True
    return is_now and (bool(parts & {"time", "weekday"}) or {"month", "year"} <= parts)
