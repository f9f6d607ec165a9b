"""Facts as mail."""

from __future__ import annotations

import marshal
from dataclasses import fields
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from thorough import tried

from mlx_blockpool.errors import GroupError
from mlx_blockpool.ranks.facts import Cancel, Fact, Insert, Load, Lost, read, write

INTS = st.integers(-(2**31), 2**31 - 1)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
TEXTS = st.text(max_size=5)
HASHES = st.binary(max_size=4)
PATHS = st.tuples(st.lists(HASHES, max_size=2).map(tuple), INTS, HASHES)


def tuples(*of: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    return st.lists(of[0] if len(of) == 1 else st.tuples(*of), max_size=2).map(tuple)


# By annotation.
FIELDS = {
    "int": INTS,
    "int | None": st.none() | INTS,
    "bool": st.booleans(),
    "float": FLOATS,
    "float | None": st.none() | FLOATS,
    "str": TEXTS,
    "str | None": st.none() | TEXTS,
    "bytes": HASHES,
    "tuple[int, ...]": tuples(INTS),
    "PathName": PATHS,
    "tuple[bytes, ...]": tuples(HASHES),
    "tuple[RecordKey, ...]": tuples(TEXTS, HASHES),
    "tuple[tuple[int, ...], ...]": tuples(tuples(INTS)),
    "tuple[tuple[int, str], ...]": tuples(INTS, TEXTS),
    "tuple[tuple[int, float], ...]": tuples(INTS, FLOATS),
}
FACTS = st.one_of(
    [
        st.builds(kind, **{each.name: FIELDS[each.type] for each in fields(kind)})
        for kind in get_args(Fact)
    ]
)


@tried(25, 300)
@given(st.lists(st.tuples(TEXTS, FACTS), max_size=4))
def test_facts_come_back_from_mail_in_order(facts: list[tuple[str, Fact]]) -> None:
    assert read(write(facts)) == facts


def test_no_facts_are_no_mail() -> None:
    assert (write([]), read(b"")) == (b"", [])


def test_a_prompt_is_sent_in_32_bits_a_token() -> None:
    insert = Insert(1, tuple(range(100_000)), 8, stop=((1, 2),), pins=((256, 60),), salt=b"s" * 32)
    mail = write([("", insert)])
    assert len(mail) < 540_000
    assert read(mail) == [("", insert)]


@pytest.mark.parametrize(
    "mail",
    [
        b"\x80\x04K\x01.",
        b"[]",
        *map(
            marshal.dumps,
            [
                1,
                [1],
                [("m", "Explode", ())],
                [("m", "Cancel", ())],
                [("m", "Cancel", (1, "so"))],
                [("m", "Cancel", 1)],
                [("m", ["Cancel"], (1,))],
            ],
        ),
        marshal.dumps([("m", "Cancel", (1,))])[:-1],
    ],
)
def test_other_mail_is_refused(mail: bytes) -> None:
    with pytest.raises(GroupError, match="Run one version of mlx-blockpool on all ranks"):
        read(mail)


def test_what_a_fact_looks_like() -> None:
    facts: list[tuple[str, Fact]] = [
        ("m", Cancel(1)),
        ("n", Load()),
        ("m", Lost((("block", b"\x01"),), again=True)),
    ]
    expected: list[Any] = [
        ("m", "Cancel", (1,)),
        ("n", "Load", ()),
        ("m", "Lost", ((("block", b"\x01"),), True)),
    ]
    assert marshal.loads(write(facts)) == expected
