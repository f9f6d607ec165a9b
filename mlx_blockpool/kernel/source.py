"""The source of the two kernels of a form: constants, attention.h, and the lines that call it on
each kind of device.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import NamedTuple

from ..spec import Form
from .form import ELEMENTS, KernelForm

# Threads of a threadgroup that attends, and of one that merges.
ATTEND_THREADS, MERGE_THREADS = 128, 32


class KernelText(NamedTuple):
    """The source of one kernel, as mx.fast.metal_kernel() and mx.fast.cuda_kernel() take it.

    header:  precedes the function; the same for both.
    metal, cuda: the lines inside the function.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    header: str
    metal: str
    cuda: str


@cache
def attend_text(form: KernelForm, queries: int, sources: int) -> KernelText:
    """The kernel that computes partial sums: `queries` vectors of a simdgroup, items of `sources`
    sources.

    Inputs are queries, work list and params, and the arrays of each source, keys first.
    """
    names = [
        _arrays(kind, number, is_of) for number in range(sources) for kind, is_of in _kinds(form)
    ]
    choose = "\n".join(
        f"    case {number}: keys = ragged::rows_of({', '.join(names[2 * number])}); "
        f"values = ragged::rows_of({', '.join(names[2 * number + 1])}); break;"
        for number in range(1, sources)
    )
    return KernelText(
        name=f"ragged_attend_{form.name}_{queries}_{sources}",
        inputs=("queries", "work", "params", *(name for arrays in names for name in arrays)),
        outputs=("sums", "stats"),
        header=_header(form, queries),
        metal=_attend_lines(
            names,
            choose,
            "threadgroup_position_in_grid",
            "simdgroup_index_in_threadgroup",
            "thread_index_in_simdgroup",
        ),
        cuda=_attend_lines(names, choose, "blockIdx", "threadIdx.x / 32", "threadIdx.x % 32"),
    )


@cache
def merge_text(form: KernelForm, has_sinks: bool) -> KernelText:
    """The kernel that merges partial sums into results.

    Inputs are places, sums, stats, and sinks if there are any.
    """
    return KernelText(
        name=f"ragged_merge_{form.name}_{'sinks' if has_sinks else 'plain'}",
        inputs=("places", "sums", "stats", *(["sinks"] if has_sinks else [])),
        outputs=("out",),
        header=_header(form, 1, has_sinks),
        metal=_merge_lines(
            form, has_sinks, "threadgroup_position_in_grid.x", "thread_index_in_simdgroup"
        ),
        cuda=_merge_lines(form, has_sinks, "blockIdx.x", "threadIdx.x"),
    )


def _kinds(form: KernelForm) -> tuple[tuple[str, Form | None], tuple[str, Form | None]]:
    return ("keys", form.key_form), ("values", form.value_form)


def _arrays(kind: str, number: int, form: Form | None) -> list[str]:
    """The names of the arrays that hold the keys or the values of a source."""
    return (
        [f"{kind}{number}"]
        if form is None
        else [f"{kind}{number}{part}" for part in ("_words", "_scales", "_biases")]
    )


def _attend_lines(
    names: list[list[str]], choose: str, position: str, simdgroup: str, lane: str
) -> str:
    choice = (
        f"  switch (work[{position}.x * ragged::ITEM_INTS]) {{\n{choose}\n    default: break;\n  "
        f"}}\n"
        if choose
        else ""
    )
    return (
        "  SHARED float memory[MEMORY];\n"
        f"  ragged::Rows keys = ragged::rows_of({', '.join(names[0])});\n"
        f"  ragged::Rows values = ragged::rows_of({', '.join(names[1])});\n"
        f"{choice}"
        "  ragged::attend(work, params, queries, keys, values, sums, stats, memory,\n"
        f"                 {position}.x, {position}.y, {simdgroup}, {lane});\n"
    )


def _merge_lines(form: KernelForm, has_sinks: bool, number: str, lane: str) -> str:
    sink = (
        f"float(sinks[{number} % {form.kv_heads * form.group}]) * LOG2_E" if has_sinks else "LOWEST"
    )
    return f"  ragged::merge(places, sums, stats, {sink}, out, {number}, {lane});\n"


def _header(form: KernelForm, queries: int, has_sinks: bool = False) -> str:
    constants = {
        "ELEMENT": ELEMENTS[form.dtype],
        "KEY_DIM": form.key_dim,
        "VALUE_DIM": form.value_dim,
        "KV_HEADS": form.kv_heads,
        "GROUP": form.group,
        "EIGHTS": form.eights,
        "QUERIES": queries,
        "HAS_SINKS": int(has_sinks),
    }
    for name, quantised in (("KEY", form.key_form), ("VALUE", form.value_form)):
        constants[f"{name}_BITS"] = form.dtype.size * 8 if quantised is None else quantised.bits
        constants[f"{name}_GROUP_SIZE"] = 8 if quantised is None else quantised.group_size
    return (
        "".join(f"#define {name} {value}\n" for name, value in constants.items()) + "\n" + _body()
    )


@cache
def _body() -> str:
    return files(__package__).joinpath("attention.h").read_text(encoding="utf-8")
