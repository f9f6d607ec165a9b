"""The emulated kernels on random layouts, against float64 and against the path that every device has."""

from __future__ import annotations

import pytest
from kernel.emulation import Emulator, why_not
from kernel.layouts import CASES, assert_right, layout
from thorough import only

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

# With 24 cases more than 500 layouts in all.
SEEDS = [range(7), range(7, 14), range(14, 21)]
QUICK = [1, 2, 3, 5, 6]


@pytest.mark.parametrize(
    "part",
    only([(number, part) for number in range(len(CASES)) for part in range(len(SEEDS))], *[(number, 0) for number in QUICK]),
)
def test_layouts_have_the_results_of_float64_and_of_the_portable_path(part: tuple[int, int]) -> None:
    launch, number = Emulator(), part[0]
    for seed in SEEDS[part[1]]:
        step = layout(CASES[number], 1000 * number + seed)
        assert_right(step, step.attend(launch))


@pytest.mark.parametrize(("number", "seed"), [(3, 2), (6, 4)])
def test_the_order_of_threads_does_not_matter(number: int, seed: int) -> None:
    step = layout(CASES[number], seed)
    needed = step.attend(Emulator())
    for turn in (1, 2, 3):
        assert (step.attend(Emulator(turn)) == needed).all().item()


@pytest.mark.parametrize("number", only(range(len(CASES)), 3))
def test_sixteen_elements_of_a_row_in_a_lane(number: int) -> None:
    """As the text has them for CUDA."""
    launch = Emulator(parts=2)
    for seed in range(3):
        step = layout(CASES[number], 1000 * number + seed)
        assert_right(step, step.attend(launch))
