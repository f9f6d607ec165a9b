"""The emulated kernels on random layouts, against float64 and against the path that every device
has.
"""

from __future__ import annotations

import pytest
from kernel.emulation import Emulator, why_not
from kernel.layouts import CASES, Case, assert_right, layout
from thorough import many, only

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

# With 24 cases more than 500 layouts in all.
SEEDS = many(3, 21)
QUICK = [CASES[number] for number in (1, 2, 3)]


@pytest.mark.parametrize("case", only(CASES, *QUICK))
def test_layouts_have_the_results_of_float64_and_of_the_portable_path(case: Case) -> None:
    launch, number = Emulator(), CASES.index(case)
    for seed in range(SEEDS):
        step = layout(case, 1000 * number + seed)
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
