"""Whole calls: the results of simple layouts by the emulated kernels."""

from __future__ import annotations

import mlx.core as mx
import pytest
from kernel.emulation import Emulator, why_not

from mlx_blockpool.kernel.form import KernelForm
from mlx_blockpool.kernel.launch import RaggedKernel, device_launcher
from mlx_blockpool.kernel.plan import Piece, Source, plan_of

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


def random(*shape: int, seed: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


@pytest.mark.skipif(mx.default_device().type == mx.gpu, reason="there is a GPU")
def test_a_cpu_has_no_launcher() -> None:
    assert device_launcher() is None


def test_members_read_their_parts_of_a_slab() -> None:
    keys, values = random(1, 2, 600, 16, seed=0), random(1, 2, 600, 16, seed=1)
    queries = random(3, 4, 16, seed=2)
    starts, counts = [0, 100, 340], [100, 240, 260]
    pieces = [
        Piece(0, start, count, (i,), None)
        for i, (start, count) in enumerate(zip(starts, counts, strict=True))
    ]
    emulator = Emulator()
    found = RaggedKernel(KernelForm(mx.float32, 16, 16, 2, 2), emulator).attend(
        plan_of(pieces, [Source(600, 1)], 3, 2, 2, 64), queries, [(keys, values)], 0.25
    )
    for i, (start, count) in enumerate(zip(starts, counts, strict=True)):
        mine = (slice(None), slice(None), slice(start, start + count))
        needed = mx.fast.scaled_dot_product_attention(
            queries[i][None, :, None], keys[mine], values[mine], scale=0.25
        )
        assert mx.allclose(found[i], needed[0, :, 0], rtol=0, atol=1e-5)
    assert list(emulator.calls.values()) == [1, 1]
