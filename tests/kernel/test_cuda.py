"""The text for CUDA, compiled by nvcc: it is C++ for a GPU, and what a thread holds fits into
its registers.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from kernel.emulation import Buffer, printed
from kernel.layouts import BF16, EIGHT, F16, F32
from kernel.test_source import inputs_of
from thorough import only

from mlx_blockpool.kernel.form import KernelForm
from mlx_blockpool.kernel.source import KernelText, attend_text, merge_text
from mlx_blockpool.spec import Form

NVCC = shutil.which("nvcc")
pytestmark = pytest.mark.skipif(
    NVCC is None, reason="no nvcc: the text for CUDA is not compiled here"
)

FORMS = {
    "bf16 128": KernelForm(BF16, 128, 128, 8, 4),
    "bf16 64": KernelForm(BF16, 64, 64, 8, 8),
    "bf16 256": KernelForm(BF16, 256, 256, 4, 2),
    "f16 192 128": KernelForm(F16, 192, 128, 16, 1),
    "f32 128": KernelForm(F32, 128, 128, 8, 4),
    "8 bits": KernelForm(BF16, 128, 128, 8, 4, EIGHT, EIGHT),
    "4 bits": KernelForm(BF16, 128, 128, 8, 4, Form(4, 64), Form(4, 64)),
    "8 and 4 bits": KernelForm(F16, 256, 256, 2, 8, Form(8, 32), Form(4, 32)),
}
TYPES = {"float16_t": "__half", "bfloat16_t": "__nv_bfloat16"}


def cuda_source(text: KernelText, buffers: tuple[Buffer, ...]) -> str:
    """What mlx compiles, without its own header, of which the text needs nothing."""
    parameters = [
        f"    {'const ' if b.is_const else ''}{TYPES.get(b.type, b.type)}* {b.name}"
        for b in buffers
    ]
    return (
        f"#include <cooperative_groups.h>\n{text.header}\nnamespace mlx::core::cu {{\n\nnamespace "
        "cg = cooperative_groups;\n\n"
        f"__global__ void custom_kernel_{text.name}(\n"
        + ",\n".join(parameters)
        + f") {{\n{text.cuda}\n}}\n\n}}\n"
    )


def resources(source: str, folder: Path, architecture: str) -> tuple[int, int, int, int]:
    """Registers of a thread, bytes of memory of a threadgroup, bytes of the stack, and bytes of
    spilled registers.
    """
    (folder / "kernel.cu").write_text(source, encoding="utf-8")
    command = [
        str(NVCC),
        "-std=c++17",
        "-cubin",
        "-Xptxas",
        "-v",
        "-arch",
        architecture,
        "kernel.cu",
        "-o",
        "kernel.cubin",
    ]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:4000]
    assert "warning" not in done.stderr, done.stderr[:4000]
    frame = re.search(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", done.stderr
    )
    used = re.search(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?", done.stderr)
    assert frame
    assert used
    return int(used[1]), int(used[2] or 0), int(frame[1]), int(frame[2]) + int(frame[3])


@pytest.mark.parametrize("queries", only([1, 2, 4], 4))
@pytest.mark.parametrize("name", only(FORMS, "bf16 128"))
def test_vectors_stay_in_registers(name: str, queries: int, tmp_path: Path) -> None:
    form = FORMS[name]
    text = attend_text(form, queries, 2)
    buffers = printed(text, inputs_of(form, 2, 40), [F32, F32]).buffers
    architecture = "sm_80" if queries == 2 else "sm_90"
    registers, memory, stack, spilled = resources(
        cuda_source(text, buffers), tmp_path, architecture
    )
    assert (stack, spilled) == (0, 0)
    # Two threadgroups of 128 threads on a core of 65,536 registers at least; four of one vector.
    assert registers <= (255 if queries > 1 else 128)
    assert memory <= 17_000


@pytest.mark.thorough
@pytest.mark.parametrize("has_sinks", [False, True])
def test_the_merge_is_compiled(has_sinks: bool, tmp_path: Path) -> None:
    form = FORMS["bf16 128"]
    text = merge_text(form, has_sinks)
    buffers = [
        Buffer(0, "", t, n, True)
        for t, n in zip(["int", "float", "float", "bfloat16_t"], text.inputs, strict=False)
    ]
    buffers.append(Buffer(0, "", "bfloat16_t", "out", False))
    registers, _, stack, spilled = resources(cuda_source(text, tuple(buffers)), tmp_path, "sm_90")
    assert (stack, spilled) == (0, 0)
    assert registers <= 64
