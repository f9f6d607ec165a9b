"""How much is tried: `pytest` runs every behaviour on a sample, `pytest --thorough` (or BLOCKPOOL_THOROUGH=1) on all there is.

A test with the marker `sampled` is quick on so few of its cases that every value of every parameter is still among them.
What differs between the two runs carries the marker `thorough`: `pytest --thorough -m thorough` runs what `pytest` leaves out.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import pytest
from hypothesis import Phase, settings


def is_thorough() -> bool:
    return os.environ.get("BLOCKPOOL_THOROUGH", "") not in ("", "0")


def mark_samples(items: Sequence[pytest.Item]) -> None:
    """Give the cases of each sampled test that are not in its sample the marker `thorough`."""
    tests: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and item.get_closest_marker("sampled"):
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
    return {(name, value if isinstance(value, Hashable) else spec.indices[name]) for name, value in spec.params.items()}


def only(cases: Iterable[Any], *quick: Any) -> list[Any]:
    """Parameters of a test: all the cases. Those named in `quick` also run without --thorough."""
    found = list(cases)
    assert set(quick) <= set(found), f"{set(quick) - set(found)} are no cases"
    return [case if case in quick else pytest.param(case, marks=pytest.mark.thorough) for case in found]


def seeds(quick: int, thorough: int) -> list[Any]:
    """Parameters of a test: the numbers below `thorough`. Those below `quick` also run without --thorough."""
    return only(range(thorough), *range(quick))


def tried(quick: int, thorough: int, **more: Any) -> Callable[[Any], Any]:
    """Decorates a hypothesis test or state machine: how many examples it has, new ones each time with --thorough.

    Failures are shrunk but not explained, which would take minutes.
    """
    phases = [phase for phase in Phase if phase is not Phase.explain]
    count = thorough if is_thorough() else quick
    tried_so = settings(**{"max_examples": count, "derandomize": not is_thorough(), "phases": phases, **more})

    def decorate(test: Any) -> Any:
        test = tried_so(test)
        if is_thorough():
            pytest.mark.thorough(test.TestCase if isinstance(test, type) else test)
        return test

    return decorate
