"""Heads as words, and the clock of a group."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from thorough import tried

from mlx_blockpool.ranks.head import WORDS, Act, Head, TurnClock

INT32 = st.integers(-(2**31), 2**31 - 1)
HEADS = st.builds(
    Head,
    act=st.sampled_from(Act),
    now_us=st.integers(0, 2**62),
    step_us=INT32, turns=INT32, nap_ms=INT32, model=INT32, mail_bytes=INT32,
    fingerprint=st.integers(0, 2**32 - 1),
    takes=st.booleans(),
    restore=INT32, restored=INT32,
    failed=st.booleans(), wants_stop=st.booleans(),
    problem=INT32, free_mb=INT32,
)  # fmt: skip


@tried(25, 300)
@given(HEADS)
def test_a_head_comes_back_from_its_words(head: Head) -> None:
    words = head.pack()
    assert (len(words), Head.unpack(words)) == (WORDS, head)
    assert all(-(2**31) <= word < 2**31 for word in words)
    assert isinstance(Head.unpack(words).act, Act)


def test_what_does_not_fit_raises() -> None:
    with pytest.raises(struct.error):
        Head(turns=2**31).pack()


def test_the_clock_goes_on_within_a_turn_and_never_back() -> None:
    clock, seen = TurnClock(), []
    for now_us in (1_000_000, 1_050_000, 2_000_000):
        clock.begin(Head(now_us=now_us, step_us=100_000))
        seen.append(clock())
        clock.step()
    assert seen == [1.0, 1.1, 2.0]
    assert clock() == 2.1
