"""The layouts that are emulated elsewhere, by the kernels of the GPU of this machine.

Skipped on a CPU.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from kernel.layouts import CASES, ONCE, in_float64, layout

from mlx_blockpool.kernel.launch import device_launcher

# A GPU's powers of two are less exact than a CPU's.
TOLERANCE = {**ONCE, mx.float32: 1e-4}
LAYOUTS = 21


@pytest.mark.skipif(
    mx.default_device() != mx.gpu, reason="no GPU: here the kernels are only emulated"
)
@pytest.mark.parametrize("number", range(len(CASES)))
def test_layouts_have_the_results_of_float64_on_this_device(number: int) -> None:
    launch, dtype = device_launcher(), CASES[number].form.dtype
    assert launch is not None
    for seed in range(LAYOUTS):
        step = layout(CASES[number], 1000 * number + seed)
        found, needed = step.attend(launch), in_float64(step)
        assert (found.dtype, found.shape) == (dtype, needed.shape)
        off = np.abs(np.array(found.astype(mx.float32)) - needed).max() / np.abs(needed).max()
        assert off <= TOLERANCE[dtype], f"layout {seed} is off by {off:.2g} of the largest"
