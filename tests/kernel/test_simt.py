"""The shim that stands for a device: it rounds as devices do, and notices what they would not
forgive.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from kernel.emulation import LIBRARY, Emulator, Programs, compiled, why_not
from kernel.layouts import CASES, Case, Layout, assert_right, layout
from thorough import only

from mlx_blockpool.kernel.form import KernelForm
from mlx_blockpool.kernel.launch import Launcher
from mlx_blockpool.kernel.plan import Piece, Source
from mlx_blockpool.kernel.source import KernelText

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

CONVERSIONS = """
#define ELEMENT 1
#include "simt.h"
extern "C" void widen(const uint16_t *half, float *out, int count) {
  for (int i = 0; i < count; i++) out[i] = simt::half_to_float(half[i]);
}
extern "C" void narrow(const float *in, uint16_t *half, uint16_t *bfloat, int count) {
  for (int i = 0; i < count; i++) {
    half[i] = simt::float_to_half(in[i]);
    bfloat[i] = simt::float_to_bfloat(in[i]);
  }
}
"""


def small() -> Layout:
    return layout(CASES[6], 4)


def whole() -> Layout:
    """Four query heads that read one run, so that each simdgroup has a stripe of the keys and
    finishes one of the heads.
    """
    form = KernelForm(mx.float32, 16, 16, 2, 4)
    arrays = [
        mx.random.normal(shape, key=mx.random.key(i))
        for i, shape in enumerate([(1, 2, 900, 16)] * 2 + [(1, 8, 16)])
    ]
    return Layout(
        Case(form, 1, False),
        [1],
        [Piece(0, 0, 900, (0,))],
        [Source(900, 1)],
        [(arrays[0], arrays[1])],
        arrays[2],
        None,
        1,
    )


def edited(launch: Launcher, old: str, new: str) -> Launcher:
    """A launcher that changes the text."""

    def call(text: KernelText, inputs: Sequence[mx.array], *rest: Any) -> list[mx.array]:
        assert old in text.header
        return launch(text._replace(header=text.header.replace(old, new)), inputs, *rest)

    return call


@pytest.mark.parametrize("turn", only([0, 1, 5], 5))
def test_without_its_barrier_the_results_are_wrong(turn: int) -> None:
    step = whole()
    assert_right(step, step.attend(Emulator(turn)))
    wrong = step.attend(edited(Emulator(turn), "  barrier();\n", ""))
    assert not mx.allclose(wrong, step.attend(Emulator()), rtol=0, atol=0.01).item()


def test_a_barrier_that_some_threads_do_not_reach_ends_the_program(tmp_path: Path) -> None:
    launch = edited(Programs(tmp_path, ("-O1",)), "  barrier();\n", "  if (lane != 7) barrier();\n")
    with pytest.raises(AssertionError, match="lanes wait for lanes that do something else"):
        small().attend(launch)


def test_fibers_that_the_c_library_switches_give_the_same() -> None:
    step = small()
    assert (
        (step.attend(Emulator(flags=("-DSIMT_BY_LIBRARY",))) == step.attend(Emulator()))
        .all()
        .item()
    )


def test_what_no_thread_writes_is_not_a_number() -> None:
    step = small()
    assert mx.isnan(step.attend(edited(Emulator(), "to[3] = ", "Element unused = "))).any().item()


def test_16_bits_are_rounded_to_the_nearest_even() -> None:
    library = ctypes.PyDLL(str(compiled(CONVERSIONS, LIBRARY, ".so")))
    halves = np.arange(65536, dtype=np.uint16)
    floats = np.empty(65536, np.float32)
    library.widen(
        halves.ctypes.data_as(ctypes.c_void_p), floats.ctypes.data_as(ctypes.c_void_p), 65536
    )
    assert np.array_equal(floats, halves.view(np.float16).astype(np.float32), equal_nan=True)
    rng = np.random.default_rng(0)
    # Ties of both types, subnormal numbers, overflows, infinities.
    bits = np.concatenate(
        [rng.integers(0, 2**32, 200_000), np.arange(2**16) << 16, (np.arange(2**16) << 16) + 2**15]
    )
    bits = np.concatenate(
        [bits, (np.arange(2**18) << 13) + 2**12, np.arange(0x33000000, 0x38900000, 4096)]
    )
    values = bits.astype(np.uint32).view(np.float32)
    values = values[~np.isnan(values)]
    found = np.empty((2, len(values)), np.uint16)
    addresses = [a.ctypes.data_as(ctypes.c_void_p) for a in (values, found[0], found[1])]
    library.narrow(*addresses, len(values))
    with np.errstate(over="ignore"):
        assert np.array_equal(found[0], values.astype(np.float16).view(np.uint16))
    assert np.array_equal(found[1], np.array(mx.array(values).astype(mx.bfloat16).view(mx.uint16)))
