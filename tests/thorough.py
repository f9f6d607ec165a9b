"""How much is tried: every behaviour, on more or less of all there is.

`pytest` runs a small sample, `pytest --thorough` a fourth of all seeds, cases and examples, and
`pytest --exhaustive` all. The environment says the same: BLOCKPOOL_TRIES=thorough or exhaustive.

A test with the marker `sampled` is quick on so few of its quick cases that every value of every
parameter is still among them. What the quick run leaves out, or tries less of, carries the marker
`thorough`: `pytest --thorough -m thorough` runs that alone.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import pytest
from hypothesis import Phase, settings

TRIES = "BLOCKPOOL_TRIES"
SHARE = 4
# Tests with no more thorough cases than this keep all of them.
FEW = 6


def is_thorough() -> bool:
    return os.environ.get(TRIES) in ("thorough", "exhaustive")


def many(quick: int, exhaustive: int) -> int:
    """How often something is tried in this run."""
    share = 1 if os.environ.get(TRIES) == "exhaustive" else SHARE
    return max(quick, exhaustive // share) if is_thorough() else quick


def choose(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """The items of this run."""
    if not is_thorough():
        return {item for item in items if not item.get_closest_marker("thorough")}
    return set(items) if os.environ[TRIES] == "exhaustive" else draw(items)


def draw(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """Of each test's thorough cases a fourth, but in each file all values that are no numbers;
    and all other items.
    """
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("thorough"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    drawn = set(items).difference(*tests.values())
    for name, cases in tests.items():
        drawn |= set(
            random.Random(name).sample(cases, min(len(cases), max(FEW, len(cases) // SHARE)))
        )
    found = {(item.path, pair) for item in drawn for pair in _named(item)}
    for item in items:
        named = {(item.path, pair) for pair in _named(item)}
        if not named <= found:
            drawn.add(item)
            found |= named
    return drawn


def _named(item: pytest.Item) -> set[tuple[str, str]]:
    """The values of an item's parameters that are no numbers."""
    values = item.callspec.params.items() if hasattr(item, "callspec") else ()
    return {
        (name, str(value))
        for name, value in values
        if isinstance(value, bool) or not isinstance(value, int)
    }


def mark_samples(items: Sequence[pytest.Item]) -> None:
    """Mark the quick cases of each sampled test that are not in its sample as thorough."""
    tests: dict[str, list[pytest.Function]] = {}
    for item in items:
        if (
            isinstance(item, pytest.Function)
            and hasattr(item, "callspec")
            and item.get_closest_marker("sampled")
            and not item.get_closest_marker("thorough")
        ):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in tests.values():
        chosen = cover([_values(case) for case in cases])
        for number, case in enumerate(cases):
            if number not in chosen:
                case.add_marker("thorough")


def cover(cases: Sequence[set[Any]]) -> set[int]:
    """Numbers of a few cases in which every value of every parameter occurs."""
    missing: set[Any] = set().union(*cases)
    chosen: set[int] = set()
    while missing:
        best = max(range(len(cases)), key=lambda number: len(cases[number] & missing))
        chosen.add(best)
        missing -= cases[best]
    return chosen


def _values(case: Any) -> set[tuple[str, Any]]:
    """Parameters with their values, or the numbers of values that have no hash."""
    spec = case.callspec
    return {
        (name, value if isinstance(value, Hashable) else spec.indices[name])
        for name, value in spec.params.items()
    }


def only(cases: Iterable[Any], *quick: Any) -> list[Any]:
    """Parameters of a test: all the cases, or in the quick run those named in `quick`.

    A test without quick cases keeps all of them, so that its run says how many it leaves out.
    """
    found = list(cases)
    assert set(quick) <= set(found), f"{set(quick) - set(found)} are not cases"
    if quick and not is_thorough():
        # A case that is collected costs time in each process, whether it runs or not.
        return [case for case in found if case in quick]
    return [
        case if case in quick else pytest.param(case, marks=pytest.mark.thorough) for case in found
    ]


def seeds(quick: int, exhaustive: int) -> list[Any]:
    """Parameters of a test: the numbers below `exhaustive`.

    Those below `quick` also run in the quick run.
    """
    return only(range(exhaustive), *range(quick))


def tried(quick: int, exhaustive: int, **more: Any) -> Callable[[Any], Any]:
    """Decorates a hypothesis test or state machine: how many examples it has, new ones each time
    unless the run is quick.

    Failures are shrunk but not explained, which would take minutes.
    """
    phases = [phase for phase in Phase if phase is not Phase.explain]
    tried_so = settings(
        **{
            "max_examples": many(quick, exhaustive),
            "derandomize": not is_thorough(),
            "phases": phases,
            **more,
        }
    )

    def decorate(test: Any) -> Any:
        test = tried_so(test)
        if is_thorough():
            pytest.mark.thorough(test.TestCase if isinstance(test, type) else test)
        return test

    return decorate
