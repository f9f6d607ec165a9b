"""What a run leaves out: of a sampled test no value of a parameter, and of a file no value that
is no number.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from thorough import TRIES, cover, draw, only, seeds


def test_a_sample_has_every_value_of_every_parameter() -> None:
    cases = [
        {("call", call), ("error", error), ("again", again)}
        for call, error, again in product("abcd", "xyz", (True, False))
    ]
    chosen = cover(cases)
    assert set().union(*(cases[number] for number in chosen)) == set().union(*cases)
    assert len(chosen) == 4


def test_seeds_beyond_the_first_are_thorough(monkeypatch: pytest.MonkeyPatch) -> None:
    last = pytest.param(2, marks=pytest.mark.thorough)
    monkeypatch.setenv(TRIES, "thorough")
    assert seeds(2, 3) == [0, 1, last]
    monkeypatch.delenv(TRIES)
    assert seeds(2, 3) == [0, 1]
    assert only([2]) == [last]


class Item:
    """What the choice reads of a pytest.Item."""

    path = Path("file")

    def __init__(self, test: str, is_thorough: bool = True, **values: Any) -> None:
        self.nodeid = f"{test}[{values}]"
        self.callspec = SimpleNamespace(params=values)
        self._markers = {"thorough"} if is_thorough else set()

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self._markers else None


def test_a_thorough_run_has_a_fourth_of_the_cases_and_every_name() -> None:
    quick = [Item("quick", False, number=1)]
    small = [Item("small", seed=seed) for seed in range(6)]
    large = [Item("large", seed=seed, name=name) for seed, name in product(range(20), "ab")]
    names = [Item("names", model=name) for name in "abcdefghijklmnopqrstuvwxyz"]
    again = [Item("again", model=name) for name in "abcdefghijklmnopqrstuvwxyz"]

    def drawn(cases: list[Any]) -> list[Any]:
        return [case for case in cases if case in chosen]

    cases: Any = [*quick, *small, *large, *names, *again]
    chosen = draw(cases)
    assert chosen == draw(cases)
    assert [drawn(quick), drawn(small)] == [quick, small]
    assert len(drawn(large)) == 10
    assert {case.callspec.params["model"] for case in drawn(names + again)} == set(
        "abcdefghijklmnopqrstuvwxyz"
    )
    assert len(drawn(names + again)) < 30
