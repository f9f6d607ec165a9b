"""Costs of decode paths: fitted to readings, and kept as JSON."""

from __future__ import annotations

import json
import math
import random
from dataclasses import asdict
from typing import Any

import pytest

from mlx_blockpool.kv.cost_model import (
    KernelWork,
    PathCosts,
    PathTimes,
    Shape,
    fitted,
    kernel_amounts,
    kernel_work,
    least_squares,
    row_amounts,
    shared_amounts,
)
from mlx_blockpool.kv.path_measuring import ROWS, SHAPES

COSTS = PathCosts(
    1e-4,
    1e-6,
    shared=(2e-4, 6e-5, 4e-7, 6e-7, 9e-7, 2e-7),
    kernel=(6e-5, 3e-6, 2e-7, 4e-8),
    rows=(1e-4, 4e-7, 2e-7),
    kernel_rows=(2e-4, 2e-6, 3e-7, 5e-8),
)


def reading(
    shape: Shape, noise: float = 0.0, drift: float = 1.0, rng: random.Random | None = None
) -> PathTimes:
    """What a machine with COSTS would read, `drift` times as slow as it mostly is, each path
    wrong by up to `noise`.
    """
    rng = rng or random.Random(0)
    alone = COSTS.of_ragged(shape.sizes)
    if shape.rows > 1:
        seconds = sum(
            a * b
            for a, b in zip(
                COSTS.rows, row_amounts(shape.sizes, kernel_work(shape).by_rows), strict=True
            )
        )
        return PathTimes(
            shape, drift * seconds, {"kernel": COSTS.rows_ratio(shape.sizes, kernel_work(shape))}
        )
    ratios = {"kernel": COSTS.of_kernel(kernel_work(shape)) / alone}
    if shape.shared:
        ratios["shared"] = COSTS.of_cluster(shape) / alone
    ratios = {path: ratio * (1 + rng.uniform(-noise, noise)) for path, ratio in ratios.items()}
    return PathTimes(shape, drift * alone, ratios)


def test_amounts_of_a_cluster() -> None:
    assert shared_amounts(Shape(512, (10, 30))) == (1, 2, 512, 1024, 40, 60)


def test_amounts_of_the_kernel() -> None:
    assert kernel_amounts(kernel_work(Shape(512, (10, 30)))) == (1, 2, 552, 1064)


def test_readings_without_noise_give_the_costs_back() -> None:
    found = fitted([reading(shape) for shape in SHAPES])
    assert found.read == pytest.approx(COSTS.read, rel=1e-3)
    assert found.token == pytest.approx(COSTS.token, rel=1e-3)
    for shape in (*SHAPES, Shape(4096, (2000,) * 8), Shape(4096, (60, 2000, 300, 1200))):
        if shape.shared:
            assert found.of_cluster(shape) == pytest.approx(COSTS.of_cluster(shape), rel=1e-2)
        assert found.of_kernel(kernel_work(shape)) == pytest.approx(
            COSTS.of_kernel(kernel_work(shape)), rel=1e-2
        )


def test_rows_are_fitted_by_themselves() -> None:
    shapes = [Shape(0, (tokens,) * members, rows) for members, tokens, rows in ROWS]
    found = fitted([reading(shape) for shape in (*SHAPES, *shapes)])
    assert found.of_kernel(KernelWork(8, 4000, 4000)) == pytest.approx(
        COSTS.of_kernel(KernelWork(8, 4000, 4000)), rel=1e-2
    )
    for shape in (*shapes, Shape(0, (700, 90), 9)):
        work = kernel_work(shape)
        assert found.rows_ratio(shape.sizes, work) == pytest.approx(
            COSTS.rows_ratio(shape.sizes, work), rel=1e-2
        )


def test_a_machine_whose_speed_changes_between_readings_gives_nearly_the_same_costs() -> None:
    """Half of the readings at 1.6 times the time, as next to a busy neighbour, and paths that
    are wrong by up to 5 %.
    """
    rng = random.Random(1)
    found = fitted([reading(shape, 0.05, rng.choice([1.0, 1.6]), rng) for shape in SHAPES])
    for shape in (
        Shape(512, (64,) * 8),
        Shape(4096, (40,) * 2),
        Shape(4096, (2000,) * 8),
        Shape(1024, (60, 2000, 300, 1200)),
    ):
        expected = COSTS.of_cluster(shape) / COSTS.of_ragged(shape.sizes)
        assert found.of_cluster(shape) / found.of_ragged(shape.sizes) == pytest.approx(
            expected, rel=0.05
        )
        expected = COSTS.of_kernel(kernel_work(shape)) / COSTS.of_ragged(shape.sizes)
        assert found.of_kernel(kernel_work(shape)) / found.of_ragged(shape.sizes) == pytest.approx(
            expected, rel=0.05
        )


def test_costs_are_never_negative() -> None:
    assert least_squares([(1.0, 1.0), (1.0, 2.0), (1.0, 4.0)], [1.0, 3.0, 7.0])[0] == 0.0


def test_a_path_that_was_not_read_is_never_the_cheapest() -> None:
    found = fitted([PathTimes(r.shape, r.seconds, {}) for r in map(reading, SHAPES)])
    assert found.rows_ratio([1], KernelWork(2, 1, 2)) == math.inf
    assert found.of_cluster(Shape(256, (1, 1))) == found.of_kernel(KernelWork(1, 1, 1)) == math.inf


def test_costs_survive_json() -> None:
    assert PathCosts.from_json(json.loads(json.dumps(asdict(COSTS)))) == COSTS


@pytest.mark.parametrize(
    "found",
    [
        None,
        [],
        "costs",
        {},
        {**asdict(COSTS), "shared": ["x"] * 6},
        {**asdict(COSTS), "rows": [1.0, -1.0, 1.0]},
        {**asdict(COSTS), "read": math.nan},
        {**asdict(COSTS), "token": math.inf},
        {**asdict(COSTS), "read": None},
        {**asdict(COSTS), "read": 10**400},
    ],
)
def test_damaged_costs_are_refused(found: Any) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        PathCosts.from_json(found)
