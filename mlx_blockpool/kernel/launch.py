"""RaggedKernel: the attention of a step by the kernels of this device, or by another launcher that
runs their source.

Knows arrays and a plan; does not know sequences. Used on the thread that calls the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any, TypeAlias

import mlx.core as mx

from ..spec import Form
from .form import KernelForm
from .plan import KernelPlan, Launch
from .source import ATTEND_THREADS, MERGE_THREADS, KernelText, attend_text, merge_text

# Rows as the model computes them, or packed words, scales, biases and their form.
Rows: TypeAlias = mx.array | tuple[mx.array, mx.array, mx.array, Form]
Size: TypeAlias = tuple[int, int, int]

# mlx passes shorter arrays in another way, which would need another kernel.
LEAST_SIZE = 8


# Runs the source of a kernel. Arguments: the source, inputs in the order of its names, grid and
# threadgroup in threads, and the shapes and dtypes of the outputs.
Launcher: TypeAlias = Callable[
    [KernelText, Sequence[mx.array], Size, Size, Sequence[tuple[int, ...]], Sequence[mx.Dtype]],
    list[mx.array],
]


class RaggedKernel:
    """The attention of layers of one form."""

    def __init__(self, form: KernelForm, launch: Launcher) -> None:
        refusal = form.refusal()
        assert refusal is None, refusal
        self.form, self._launch = form, launch

    def attend(
        self,
        plan: KernelPlan,
        queries: mx.array,
        sources: Sequence[tuple[Rows, ...]],
        scale: float,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """softmax(scale * q k^T) v for queries [rows, heads, key_dim]. Returns [rows, heads,
        value_dim] in their dtype.

        sources: keys and values, with the strides of the plan's sources: whole slabs [1, kv_heads,
        tokens, dim], which are read in place, or a few rows [rows, kv_heads, 1, dim]. sinks:
        [heads].
        """
        assert len(sources) == len(plan.sources), (
            f"{len(sources)} != {len(plan.sources)}: sources of the layer, sources of the plan"
        )
        queries = mx.contiguous(queries)
        launches = plan.launches(self.form.most_sources)
        outputs = [self._partials(plan, launch, queries, sources, scale) for launch in launches]
        sums, stats = (
            outputs[0]
            if len(outputs) == 1
            else [mx.concatenate(list(parts)) for parts in zip(*outputs, strict=True)]
        )
        heads = self.form.kv_heads * self.form.group
        text = merge_text(self.form, sinks is not None)
        inputs = [plan.places, sums, _padded(stats), *([] if sinks is None else [_padded(sinks)])]
        grid, threads = (plan.rows * heads * MERGE_THREADS, 1, 1), (MERGE_THREADS, 1, 1)
        (out,) = self._launch(
            text,
            inputs,
            grid,
            threads,
            [(plan.rows, heads, self.form.value_dim)],
            [self.form.dtype],
        )
        return out

    def _partials(
        self,
        plan: KernelPlan,
        launch: Launch,
        queries: mx.array,
        sources: Sequence[tuple[Rows, ...]],
        scale: float,
    ) -> list[mx.array]:
        """Sums [places, kv_heads, value_dim] and stats [places, kv_heads, 2] of one launch, in
        float32.
        """
        form = self.form
        count = form.rounded_sources(len(launch.sources))
        text = attend_text(form, plan.queries, count)
        arrays = [
            array
            for number in launch.sources
            for rows in sources[number]
            for array in _arrays(rows)
        ]
        arrays += _nothing(form) * (count - len(launch.sources))
        shape = (launch.places, form.kv_heads)
        return self._launch(
            text,
            [queries, launch.work, _params(scale), *arrays],
            (launch.items * ATTEND_THREADS, form.kv_heads, 1),
            (ATTEND_THREADS, 1, 1),
            [(*shape, form.value_dim), (*shape, 2)],
            [mx.float32, mx.float32],
        )


def device_launcher() -> Launcher | None:
    """The launcher of the device that mlx uses; None on a CPU."""
    if mx.default_device().type != mx.gpu:
        return None
    return _launcher(metal_function if mx.metal.is_available() else cuda_function)


@cache
def metal_function(text: KernelText) -> Any:
    """The kernel as mlx compiles it for Metal.

    Copies nothing: kernels read arrays with their strides.
    """
    return mx.fast.metal_kernel(
        text.name, text.inputs, text.outputs, text.metal, text.header, ensure_row_contiguous=False
    )


@cache
def cuda_function(text: KernelText) -> Any:
    """The same for CUDA."""
    return mx.fast.cuda_kernel(
        text.name, text.inputs, text.outputs, text.cuda, text.header, ensure_row_contiguous=False
    )


@cache
def _launcher(function: Callable[[KernelText], Any]) -> Launcher:
    def launch(
        text: KernelText,
        inputs: Sequence[mx.array],
        grid: Size,
        threadgroup: Size,
        output_shapes: Sequence[tuple[int, ...]],
        output_dtypes: Sequence[mx.Dtype],
    ) -> list[mx.array]:
        found: list[mx.array] = function(text)(
            inputs=inputs,
            grid=grid,
            threadgroup=threadgroup,
            output_shapes=output_shapes,
            output_dtypes=output_dtypes,
        )
        return found

    return launch


def _arrays(rows: Rows) -> list[mx.array]:
    """The arrays that hold rows: slabs unchanged, and a few rows, which may be a part of another
    array, made contiguous.
    """
    arrays = list(rows[:3]) if isinstance(rows, tuple) else [rows]
    return (
        arrays
        if arrays[0].shape[0] == 1 and arrays[0].shape[2] > 1
        else [_padded(mx.contiguous(array)) for array in arrays]
    )


@cache
def _nothing(form: KernelForm) -> list[mx.array]:
    """Placeholder arrays for a source that is not read."""
    kinds = [
        [form.dtype] if quantised is None else [mx.uint32, form.dtype, form.dtype]
        for quantised in (form.key_form, form.value_form)
    ]
    arrays = [mx.zeros(LEAST_SIZE, dtype) for dtypes in kinds for dtype in dtypes]
    mx.eval(arrays)
    return arrays


def _padded(array: mx.array) -> mx.array:
    return (
        array
        if array.size >= LEAST_SIZE
        else mx.pad(array.reshape(-1), (0, LEAST_SIZE - array.size))
    )


@lru_cache(maxsize=64)
def _params(scale: float) -> mx.array:
    """The parameters of a layer, evaluated because any thread may read them."""
    params = mx.array([scale] + [0.0] * (LEAST_SIZE - 1))
    mx.eval(params)
    return params
