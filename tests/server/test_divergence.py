"""The lines in which two prompts differ, put together from tokens of which each may be half a
character.
"""

from __future__ import annotations

from typing import Any

import pytest

from mlx_blockpool.hooks import Normaliser
from mlx_blockpool.plugins import make_plugin_manager
from mlx_blockpool.prefix.lookup import SHOWN, Lookup
from mlx_blockpool.server.normalise import Normalisers
from mlx_blockpool.server.watch.divergence import AROUND, BEFORE, Chat, Difference


class Bytes:
    """A tokenizer whose tokens are bytes, which raises for others."""

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")


@pytest.fixture(scope="module")
def normalisers() -> Normalisers:
    return Normalisers(make_plugin_manager())


def differ(
    normalisers: Normalisers,
    prompt: str,
    known: str,
    messages: Any = (),
    off: Any = ("bookkeeping", "date"),
) -> Any:
    """As of a lookup that found all that the two have in common."""
    return differ_in(normalisers, list(prompt.encode()), list(known.encode()), messages, off)


def differ_in(
    normalisers: Normalisers, ours: list[int], theirs: list[int], messages: Any = (), off: Any = ()
) -> Any:
    at = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
    lookup = Lookup(
        len(ours), at, at, "differs", tuple(ours[at : at + SHOWN]), tuple(theirs[at : at + SHOWN])
    )
    return Chat(list(messages), normalisers, off).difference(Bytes(), ours, lookup)


def test_whole_lines(normalisers: Normalisers) -> None:
    assert differ(normalisers, "one\ntwo three\nfour", "one\ntwo 3\nfour") == Difference(
        8, "two three", "two 3"
    )
    assert differ(normalisers, "a\n\nb", "a\n-\nb") == Difference(2, "", "-")


def test_long_lines_are_cut_around_the_difference(normalisers: Normalisers) -> None:
    found = differ(normalisers, "x" * 500 + "a" + "y" * 500, "x" * 500 + "b" + "y" * 500)
    assert found.line == "... " + "x" * AROUND + "a" + "y" * (SHOWN - 1) + " ..."
    assert found.known_line == found.line.replace("a", "b")
    found = differ(normalisers, "x" * BEFORE + "ab", "x" * BEFORE + "bb")
    assert (found.line[:4], found.line[-2:]) == ("... ", "ab")


def test_characters_of_several_tokens(normalisers: Normalisers) -> None:
    """The first different token is the second half of a character, and both ends of what is
    shown are within one.
    """
    long = "ä" * BEFORE
    found = differ(normalisers, f"{long}é{long}", f"{long}è{long}")
    assert (found.position, "é" in found.line, "è" in found.known_line) == (
        2 * BEFORE + 1,
        True,
        True,
    )
    assert "\ufffd" not in found.line + found.known_line


def test_images_and_ids_without_words(normalisers: Normalisers) -> None:
    found = differ_in(normalisers, [97, -5, -6, 98], [97, -5, -7, 98])
    assert (found.position, found.line, found.known_line) == (2, "a[image]b", "a[image]b")
    assert differ_in(normalisers, [97, 300], [97, 301]) is None


def test_without_a_difference_there_is_none(normalisers: Normalisers) -> None:
    assert Chat([], normalisers, ()).difference(Bytes(), [1, 2], Lookup(2, 0, 0, "new")) is None


def test_only_a_normaliser_that_keeps_the_line_is_named(normalisers: Normalisers) -> None:
    def named(
        line: str, known: str, role: str = "system", off: Any = ("bookkeeping", "date", "replay")
    ) -> Any:
        messages = [
            {"role": role, "content": [{"type": "text", "text": f"Be brief.\n{line}\nMore."}]},
            {"role": "user", "content": "x"},
        ]
        return differ(
            normalisers, f"Be brief.\n{line}\nMore.", f"Be brief.\n{known}\nMore.", messages, off
        ).normaliser

    assert named("request id: 5", "request id: 6") == "bookkeeping"
    assert named("[INST] nonce: 5", "[INST] nonce: 6") is None, "this line it leaves as it is"
    assert named("Date: 5 May", "Date: 6 May") == "date"
    assert named("request id: 5", "request id: 6", off=["date"]) is None, "it is on"
    assert named("request id: 5", "request id: 6", role="user") is None
    assert named("request id: 5", "request ideas: 6") is None, "not the same with it"


def test_a_normaliser_that_fails_is_not_named(normalisers: Normalisers) -> None:
    def failing(*_: Any) -> Any:
        raise RuntimeError("no")

    broken = Normalisers(make_plugin_manager())
    broken.by_name["date"] = Normaliser("date", "Fails.", failing)
    messages = [{"role": "system", "content": "Date: 5 May"}]
    assert differ(broken, "Date: 5 May", "Date: 6 May", messages).normaliser is None
