"""A kernel is trusted where its attention is that of the ragged path on this device, and only
there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import Mock

import mlx.core as mx
import pytest
from kernel.emulation import why_not
from kernel.trusted import emulator
from models import make_model
from thorough import only

from mlx_blockpool.config import KVBits, PoolConfig
from mlx_blockpool.kernel.source import KernelText
from mlx_blockpool.kv import decode_policy, kernel_trial
from mlx_blockpool.kv.arena import KVArena
from mlx_blockpool.kv.build import describe, open_pool
from mlx_blockpool.kv.capabilities import RAGGED
from mlx_blockpool.kv.kernel_trial import refused_kernels

MODELS = ["llama", "qwen2", "gemma3_text", "gpt_oss"]
BITS = [None, KVBits(8, 8), KVBits(4, 4, 32), KVBits(8, None), KVBits(None, 4)]
WIDE = {"hidden_size": 128, "head_dim": 32}

emulated = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
Outputs = list[mx.array]


def opened(
    monkeypatch: pytest.MonkeyPatch,
    launch: Any,
    name: str = "llama",
    bits: KVBits | None = None,
    path: str = "auto",
    **more: Any,
) -> KVArena:
    monkeypatch.setattr(decode_policy, "device_launcher", lambda: launch)
    model = make_model(name, **(WIDE if bits else {}), **more)
    return open_pool(model, 60_000_000, PoolConfig(bits=bits, decode_path=path))


def wrong(change: Callable[[KernelText, Outputs], Outputs]) -> Any:
    """A launcher whose results are changed."""
    return lambda text, inputs, grid, group, shapes, dtypes: change(
        text, emulator()(text, inputs, grid, group, shapes, dtypes)
    )


@emulated
@pytest.mark.sampled
@pytest.mark.parametrize("name", only(MODELS, "llama", "gemma3_text"))
@pytest.mark.parametrize("bits", only(BITS, None, KVBits(4, 4, 32)), ids=str)
def test_a_kernel_that_is_right_is_trusted(
    monkeypatch: pytest.MonkeyPatch, name: str, bits: KVBits | None
) -> None:
    arena = opened(monkeypatch, emulator(), name, bits)
    assert (arena.capabilities.kernels, arena.capabilities.no_kernel) == (
        {0, 1} if name in ("gemma3_text", "gpt_oss") else {0},
        {},
    )
    assert arena.decode.path_counts == {}, "what was tried is not counted"


@emulated
@pytest.mark.parametrize("name", only(["llama", "gemma3_text"], "llama"))
@pytest.mark.parametrize("dtype", only([mx.float16, mx.bfloat16], mx.bfloat16))
def test_rounding_of_16_bits_is_no_error(
    monkeypatch: pytest.MonkeyPatch, name: str, dtype: mx.Dtype
) -> None:
    monkeypatch.setattr(decode_policy, "device_launcher", emulator)
    model = make_model(name)
    model.set_dtype(dtype)
    arena = open_pool(model, 60_000_000)
    assert arena.capabilities.kernels == set(range(len(arena.spec.groups)))


def shifted(text: KernelText, outputs: Outputs) -> Outputs:
    """Sums that are a little too large."""
    return [outputs[0] * 1.05, outputs[1]] if "attend" in text.name else outputs


def swapped(text: KernelText, outputs: Outputs) -> Outputs:
    """Results of the wrong rows."""
    return [outputs[0][::-1]] if "merge" in text.name else outputs


def not_a_number(text: KernelText, outputs: Outputs) -> Outputs:
    return [mx.where(mx.arange(outputs[0].shape[-1]) == 3, mx.nan, outputs[0]), *outputs[1:]]


@emulated
@pytest.mark.parametrize("change", [shifted, swapped, not_a_number])
def test_a_kernel_that_is_wrong_is_not_trusted(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    change: Callable[[KernelText, Outputs], Outputs],
) -> None:
    with caplog.at_level(logging.WARNING):
        found = opened(monkeypatch, wrong(change), "gemma3_text").capabilities
    assert found.kernels == set()
    assert set(found.no_kernel) == {0, 1}
    assert all(why.startswith("its results are off by ") for why in found.no_kernel.values())
    (record,) = [each for each in caplog.records if "kernel" in each.getMessage()]
    assert (
        "decodes without the kernel in 2 of 2 layer groups: its results are off by"
        in record.getMessage()
    )


@emulated
def test_a_key_that_is_not_read_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The work list says count, which is the fifth number of an item."""

    def short(text: KernelText, inputs: Sequence[mx.array], *rest: Any) -> Outputs:
        if "attend" in text.name:
            queries, work, *others = inputs
            items = rest[0][0] // 128
            is_count = (mx.arange(work.size) < 12 * items) & (mx.arange(work.size) % 12 == 4)
            inputs = [queries, mx.where(is_count & (work > 1), work - 1, work), *others]
        return emulator()(text, inputs, *rest)

    assert opened(monkeypatch, short).capabilities.kernels == set()


@emulated
def test_a_mask_that_is_not_kept_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def sees_all(text: KernelText, inputs: Sequence[mx.array], *rest: Any) -> Outputs:
        if "attend" in text.name:
            queries, work, *others = inputs
            items = rest[0][0] // 128
            is_mask = (mx.arange(work.size) < 12 * items) & (mx.arange(work.size) % 12 == 8)
            inputs = [queries, mx.where(is_mask, -1, work), *others]
        return emulator()(text, inputs, *rest)

    assert opened(monkeypatch, sees_all, "gpt_oss").capabilities.kernels == set()


def test_a_kernel_that_raises_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = opened(monkeypatch, Mock(side_effect=RuntimeError("no such function")))
    assert arena.capabilities.no_kernel == {0: "it failed: RuntimeError: no such function"}
    assert arena.capabilities.kernels == set()
    assert arena.capabilities.ragged


def test_a_model_whose_queries_cannot_be_captured_is_loaded_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        kernel_trial, "capture_attention_inputs", Mock(side_effect=RuntimeError("out of memory"))
    )
    arena = opened(monkeypatch, Mock(side_effect=AssertionError))
    assert arena.capabilities.no_kernel == {
        0: "a decode step of the model failed: RuntimeError: out of memory"
    }
    assert arena.capabilities.kernels == set()
    assert arena.capabilities.ragged


def test_nothing_is_tried_where_another_path_is_set(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        found = opened(monkeypatch, Mock(side_effect=AssertionError), path="ragged").capabilities
    assert (found.kernels, found.no_kernel) == (set(), {0: "the decode path is set to ragged"})
    assert "kernel" not in caplog.text


def test_dims_without_a_kernel_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = opened(monkeypatch, Mock(side_effect=AssertionError), head_dim=20)
    assert arena.capabilities.no_kernel == {0: "rows of 20 elements; supported are 8, 16, .. 256"}


def test_batches_that_are_not_ragged_have_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_policy, "device_launcher", lambda: Mock(side_effect=AssertionError))
    arena = open_pool(make_model("unattachable"), 60_000_000)
    assert not arena.capabilities.ragged
    assert set(arena.capabilities.no_kernel.values()) == {"batches of this model are not ragged"}


def test_several_ranks_have_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("llama")
    monkeypatch.setattr(decode_policy, "device_launcher", lambda: Mock(side_effect=AssertionError))
    arena = KVArena(describe(model), 60_000_000)
    arena.capabilities = RAGGED
    found = refused_kernels(model, arena, Mock(decides=False))
    assert found == {0: "several ranks compute together, whose kernels are not tried"}


@pytest.mark.parametrize(("path", "warned"), [("kernel", 1), ("auto", 0)])
def test_a_device_without_a_kernel_is_ragged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, path: str, warned: int
) -> None:
    with caplog.at_level(logging.WARNING):
        decode = opened(monkeypatch, None, path=path).decode
    assert decode.choose(0, [300, 300], []) == "ragged"
    assert (
        len(
            [each for each in caplog.records if "without the kernel in 1 of 1" in each.getMessage()]
        )
        == warned
    )


@emulated
def test_what_is_tried_leaves_random_numbers_and_the_pool_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mx.random.seed(7)
    arena = opened(monkeypatch, emulator(), "gpt_oss")
    drawn = mx.random.uniform()
    mx.random.seed(7)
    opened(monkeypatch, None, "gpt_oss")
    assert drawn.item() == mx.random.uniform().item()
    assert all(counts.held == 0 for counts in arena.pool.settle())
