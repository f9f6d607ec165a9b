"""Figures of a prefix cache: equal where two caches hold the same, in memory and on disk, and
else not.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from prefix.computed import family
from prefix.lives import STATED, Life

from mlx_blockpool.prefix.retention import RetentionPolicy
from mlx_blockpool.store.record import BLOCK, Key

PROMPT = family(1, 600)
# Of the same length: whatever is counted is the same.
OTHER, ANOTHER = family(2, 600), family(3, 600)
PLACES = (300, 400)


def answer_as(life: Life, agent: str) -> None:
    found = life.prefix.acquire(OTHER, 20)
    policy = RetentionPolicy(agent)
    life.compute(found, OTHER, policy)
    life.prefix.release(OTHER, found.caches, policy=policy)


def lose_block(life: Life, number: int) -> None:
    life.stored.records.forget([Key(BLOCK, life.prefix.match(PROMPT).path[number].hash)])


def lose_state(life: Life, position: int) -> None:
    life.stored.records.forget(
        life.stored.records.keys(life.prefix.match(PROMPT).path[1], position)
    )


# What happens to one cache, and to the other.
CHANGES: dict[str, list[Callable[[Life], object]]] = {
    "tokens": [lambda life: life.answer(OTHER), lambda life: life.answer(ANOTHER)],
    "owner": [lambda life: answer_as(life, "one"), lambda life: answer_as(life, "two")],
    "pin": [lambda life: life.prefix.pin(PROMPT), lambda life: life.prefix.pin(PROMPT[:512])],
    "block": [lambda life: lose_block(life, 1), lambda life: lose_block(life, 2)],
    "state": [lambda life: lose_state(life, 300), lambda life: lose_state(life, 400)],
}


@pytest.mark.parametrize("change", CHANGES)
def test_figures_differ_where_caches_hold_other_things_of_the_same_size(
    tmp_path: Path, change: str
) -> None:
    lives = [
        Life(STATED["hybrid"], tmp_path / str(number), idle_seconds=0.0) for number in range(2)
    ]
    for life in lives:
        life.answer(PROMPT, PLACES)
        life.write(tails=True)
    assert lives[0].prefix.figures() == lives[1].prefix.figures()
    for life, act in zip(lives, CHANGES[change], strict=True):
        act(life)
    assert lives[0].prefix.figures() != lives[1].prefix.figures()
