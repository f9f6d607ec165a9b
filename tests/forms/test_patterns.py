"""Patterns: what all readings of one accept, and what is refused."""

from __future__ import annotations

import json
import random
import re

import pytest
from forms.schemas import accepts, compiled, refusal
from thorough import seeds

from mlx_blockpool.forms.patterns import FORMAT_PATTERNS, common

PARTS = (
    *(
        "a",
        "b",
        "ab",
        ".",
        r"\d",
        r"\w",
        r"\s",
        r"\D",
        r"\W",
        r"\S",
        "[ab]",
        "[^ab]",
        r"[\w-]",
        r"[^\W]",
        r"[^\s]",
        r"[^\d]",
        r"[\D]",
    ),
    *(
        "[[a]",
        "[a&&b]",
        "[a~~b]",
        "[+-]",
        "^",
        "$",
        "|",
        "(",
        ")",
        "(?:",
        "(?P<m>",
        "*",
        "+",
        "?",
        "{2}",
        "{0,2}",
        "*?",
        "++",
        "??",
    ),
    *(
        "(?i)",
        "(?=a)",
        "[[:alpha:]]",
        r"\b",
        r"\.",
        r"\-",
        r"\/",
        "/",
        "é",
        '"',
        r"\\",
        r"\n",
        r"\u0041",
        r"\x41",
        "-",
        "[^]",
        "#",
    ),
)
CHARACTERS = 'abcdA019_ -+.&~[]:é٣\x1c\x85\ufeff\n\r\u2028"\\/#²'


@pytest.mark.filterwarnings("ignore:Possible:FutureWarning")
@pytest.mark.parametrize("number", seeds(1, 30))
def test_nothing_is_accepted_that_python_rejects(number: int) -> None:
    draw, kept = random.Random(number), 0
    while kept < 25:
        pattern = "".join(draw.choice(PARTS) for _ in range(draw.randint(1, 6)))
        try:
            expected = re.compile(pattern)
            common(pattern)
        except (re.error, ValueError):
            continue
        if refusal({"type": "string", "pattern": pattern}) is None:
            kept += 1
            matcher = compiled({"type": "string", "pattern": pattern})
            for text in [
                "".join(draw.choices(CHARACTERS, k=draw.randint(0, 4))) for _ in range(12)
            ]:
                if accepts(matcher, json.dumps(text, ensure_ascii=draw.random() < 0.3)):
                    assert expected.search(text), (pattern, text)


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        ("^a|b$", ["a", "ax", "xb"], ["xay"]),
        ("^.$", ["a", "é"], ["\r", "\u2028", "ab"]),
        (r"^\W$", ["-", " "], ["é", "a", "٣"]),
        (r"^[^\w]$", ["-", " "], ["é", "a", "_"]),
        (r"^\S$", ["a", "é"], ["\x1c", "\ufeff", " ", "\u00a0"]),
        (r"^[\s\d]$", [" ", "1", "\u00a0"], ["\x85", "٣"]),
        (r"^[[a&~]$", ["[", "a", "&", "~"], ["b"]),
        (r"^(?<year>\d{4})\/\d+?$", ["2024/1"], ["24/1"]),
        (r"^\p{Lu}$", ["A", "É"], ["a"]),
    ],
)
def test_a_pattern_matches_what_every_reading_of_it_does(
    pattern: str, matching: list[str], others: list[str]
) -> None:
    matcher = compiled({"type": "string", "pattern": pattern})
    for text in (*matching, *others):
        assert (text, text in matching) == (
            text,
            accepts(matcher, json.dumps(text, ensure_ascii=False)),
        )


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("a(?!b)", "look-around"),
        ("(?i)a", "flags"),
        ("(?x: a)", "flags"),
        (r"\bword", "word boundaries"),
        (r"(a)\1", r"'\\\\1' is not supported"),
        (r"\Aa", r"'\\\\A' is not supported"),
        ("a++", "a quantifier after a quantifier"),
        ("a??+", "a quantifier after a quantifier"),
        ("a{,3}", "has to be written as"),
        ("[a-z--b]", "has to be written as"),
        ("[abc", "has no closing"),
        ("[]a]", "are not supported"),
        ("a\\", "is not supported"),
    ],
)
def test_what_readings_disagree_about_is_refused(pattern: str, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        common(pattern)


def test_patterns_of_formats_are_common_already() -> None:
    for name, pattern in FORMAT_PATTERNS.items():
        assert (name, pattern) == (name, common(pattern))
