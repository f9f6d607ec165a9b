"""What the quick run leaves out: of a sampled test no value of a parameter."""

from __future__ import annotations

from itertools import product

import pytest
from thorough import cover, seeds


def test_a_sample_has_every_value_of_every_parameter() -> None:
    cases = [{("call", call), ("error", error), ("again", again)} for call, error, again in product("abcd", "xyz", (True, False))]
    chosen = cover(cases)
    assert set().union(*(cases[number] for number in chosen)) == set().union(*cases)
    assert len(chosen) == 4


def test_seeds_beyond_the_first_are_thorough() -> None:
    assert seeds(2, 3) == [0, 1, pytest.param(2, marks=pytest.mark.thorough)]
