"""The walk of a request that the package's README draws is the one that a request takes."""

from __future__ import annotations

import walk

MOST_STATIONS = 20


def test_the_walk_in_the_readme_is_that_of_a_chat() -> None:
    taken = walk.record()
    assert walk.in_document() == walk.render(taken), f"run {walk.COMMAND}"
    assert all(taken.values())
    assert sum(map(len, taken.values())) <= MOST_STATIONS
