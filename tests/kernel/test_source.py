"""The texts: what depends on what, and what mlx makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import mlx.core as mx
import pytest
from kernel.emulation import check_buffers, printed
from kernel.layouts import BF16, CASES, EIGHT, F16, F32, FOUR, SCALE, Layout, layout
from thorough import only

from mlx_blockpool.kernel.form import KernelForm
from mlx_blockpool.kernel.launch import Launcher, metal_function
from mlx_blockpool.kernel.plan import QUERIES
from mlx_blockpool.kernel.source import KernelText, attend_text, merge_text


class Recorder:
    """A launcher that computes nothing: what it was called with."""

    def __init__(self) -> None:
        self.texts: list[KernelText] = []
        self.inputs: list[list[mx.array]] = []

    def __call__(
        self,
        text: KernelText,
        inputs: Sequence[mx.array],
        grid: Any,
        threadgroup: Any,
        shapes: Any,
        dtypes: Any,
    ) -> Any:
        self.texts.append(text)
        self.inputs.append(list(inputs))
        return [mx.zeros(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]


def inputs_of(form: KernelForm, sources: int, tokens: int) -> list[mx.array]:
    """Queries, work list, params and slabs, as a launch has them."""
    arrays = [
        mx.zeros((1, form.kv_heads * form.group, form.key_dim), form.dtype),
        mx.zeros(tokens, mx.int32),
        mx.zeros(8),
    ]
    for _ in range(sources):
        for dim, quantised in ((form.key_dim, form.key_form), (form.value_dim, form.value_form)):
            kinds = [(dim, form.dtype)]
            if quantised is not None:
                groups = (dim // quantised.group_size, form.dtype)
                kinds = [(dim * quantised.bits // 32, mx.uint32), groups, groups]
            arrays += [
                mx.zeros((1, form.kv_heads, tokens, columns), dtype) for columns, dtype in kinds
            ]
    return arrays


@pytest.mark.parametrize("number", only(range(len(CASES)), 0, 3, 10))
def test_all_buffers_have_their_places_on_metal(number: int) -> None:
    form = CASES[number].form
    for queries in QUERIES:
        for sources in {form.rounded_sources(n) for n in range(1, form.most_sources + 1)}:
            text = attend_text(form, queries, sources)
            found = printed(text, inputs_of(form, sources, 40), [mx.float32] * 2)
            check_buffers(text, found)
            assert found.attributes == (
                "simdgroup_index_in_threadgroup",
                "thread_index_in_simdgroup",
                "threadgroup_position_in_grid",
            )
    sums = [
        mx.zeros(40, mx.int32),
        mx.zeros((4, form.kv_heads, form.value_dim)),
        mx.zeros((4, form.kv_heads, 2)),
    ]
    for sinks in ([], [mx.zeros(8, form.dtype)]):
        text = merge_text(form, bool(sinks))
        check_buffers(text, printed(text, sums + sinks, [form.dtype]))


def test_as_many_sources_as_metal_has_places_for() -> None:
    forms = [
        KernelForm(F32, 64, 64, 1, 1),
        KernelForm(F32, 64, 64, 1, 1, EIGHT, FOUR),
        KernelForm(F32, 64, 64, 1, 1, None, FOUR),
    ]
    assert [form.most_sources for form in forms] == [13, 4, 6]
    assert [
        [form.rounded_sources(n) for n in range(1, form.most_sources + 1)] for form in forms
    ] == [
        [1, 2, 4, 4, 8, 8, 8, 8, 13, 13, 13, 13, 13],
        [1, 2, 4, 4],
        [1, 2, 4, 4, 6, 6],
    ]
    assert len(attend_text(forms[0], 1, 13).inputs) + 2 == 31


def test_what_is_compiled_does_not_depend_on_lengths() -> None:
    """Nor on how many rows and pieces there are, on scale and on fill."""
    form = CASES[3].form
    for queries in QUERIES:
        text = attend_text(form, queries, 2)
        first, second = (
            printed(text, inputs_of(form, 2, tokens), [mx.float32] * 2) for tokens in (24, 1001)
        )
        assert first == second
    texts: dict[int, set[KernelText]] = {}
    for seed in range(30):
        step = layout(CASES[3], seed)
        recorder = Recorder()
        step.attend(recorder)
        for text in recorder.texts:
            texts.setdefault(len(text.inputs), set()).add(text)
    # One for each number of vectors that a simdgroup holds, and with and without sinks.
    assert sum(map(len, texts.values())) <= len(QUERIES) + 2
    assert all(
        str(SCALE) not in text.header + text.metal + text.cuda
        for found in texts.values()
        for text in found
    )


def test_different_texts_have_different_names() -> None:
    forms = [case.form for case in CASES]
    texts = {
        attend_text(form, queries, sources)
        for form in forms
        for queries in QUERIES
        for sources in (1, 2)
    }
    texts |= {merge_text(form, has_sinks) for form in forms for has_sinks in (False, True)}
    assert len({text.name for text in texts}) == len(texts) == len(forms) * 8
    one, *others = (
        attend_text(KernelForm(F32, 64, 64, 2, 2, key, value), 1, 1)
        for key in (None, FOUR)
        for value in (None, FOUR)
    )
    assert one.name not in [text.name for text in others]


def slab_arrays(step: Layout) -> list[mx.array]:
    slabs = step.sources[: step.case.slabs]
    return [
        array
        for source in slabs
        for rows in source
        for array in (rows[:3] if isinstance(rows, tuple) else [rows])
    ]


@pytest.mark.parametrize("number", range(len(CASES)))
def test_slabs_are_passed_as_they_are_and_once(number: int) -> None:
    recorder: Launcher = Recorder()
    step = layout(CASES[number], 7)
    step.attend(recorder)
    passed = [id(array) for inputs in recorder.inputs for array in inputs]
    read = {piece.source for piece in step.pieces}
    counts = [passed.count(id(array)) for array in slab_arrays(step)]
    assert max(counts) == 1
    assert sum(counts) * step.case.slabs >= len(counts) * len(read & set(range(step.case.slabs)))


def test_the_graph_of_a_launch_is_the_kernel_alone() -> None:
    """mlx would otherwise make slabs contiguous before it runs the kernel."""
    form = CASES[0].form
    nodes: list[Any] = []
    text = attend_text(form, 4, 2)

    def call(*arrays: mx.array) -> Any:
        shapes = [(8, 2, 64), (8, 2, 2)]
        return metal_function(text)(
            inputs=arrays,
            grid=(128, 2, 1),
            threadgroup=(128, 1, 1),
            output_shapes=shapes,
            output_dtypes=[mx.float32] * 2,
        )

    mx.export_function(nodes.append, call, *inputs_of(form, 2, 90))
    (given,) = (node["inputs"] for node in nodes if node["type"] == "inputs")
    (kernel,) = (node for node in nodes if node["type"] == "primitive")
    assert kernel["name"] == "CustomKernel"
    assert kernel["inputs"] == given
    assert len({name for name, _, _ in given}) == 7
    # ensure_row_contiguous follows the sizes and the use of shapes.
    assert kernel["arguments"][2:10] == [128, 2, 1, 128, 1, 1, [(False, False, False)] * 7, False]


def test_the_body_is_part_of_the_package() -> None:
    assert attend_text(CASES[0].form, 1, 1).header.endswith(
        files("mlx_blockpool.kernel").joinpath("attention.h").read_text("utf-8")
    )


@pytest.mark.parametrize(
    ("form", "words"),
    [
        (
            KernelForm(mx.float64, 64, 64, 1, 1),
            "mlx.core.float64 is neither float32, float16 nor bfloat16",
        ),
        (KernelForm(F32, 100, 64, 1, 1), "rows of 100 elements; supported are 8, 16, .. 256"),
        (KernelForm(F16, 64, 264, 1, 1), "rows of 264 elements; supported are 8, 16, .. 256"),
        (KernelForm(BF16, 64, 0, 1, 1), "rows of 0 elements; supported are 8, 16, .. 256"),
        (
            KernelForm(F32, 64, 64, 1, 1, EIGHT._replace(bits=6)),
            "6 bits in groups of 64; supported are 4 and 8 bits in groups of 32, 64 or 128",
        ),
        (
            KernelForm(F32, 64, 96, 1, 1, None, EIGHT),
            "rows of 96 elements do not divide into groups of 64",
        ),
    ],
)
def test_what_has_no_kernel_says_why(form: KernelForm, words: str) -> None:
    assert form.refusal() == words


def test_the_cases_have_kernels() -> None:
    assert [case.form.refusal() for case in CASES] == [None] * len(CASES)
