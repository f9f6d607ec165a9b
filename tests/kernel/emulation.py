"""The kernels on a CPU: the text that mlx prints for Metal, compiled as C++ and run by fibers.

An Emulator is a launcher as mlx_blockpool/kernel/launch.py wants one. Compiled texts stay in a
folder that all processes share.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from mlx_blockpool.kernel.launch import LEAST_SIZE, Size, metal_function
from mlx_blockpool.kernel.source import KernelText

HERE = Path(__file__).parent
FLAGS = ("-std=c++17", "-w", "-fno-strict-aliasing", f"-I{HERE}")
LIBRARY = ("-O2", "-fPIC", "-shared")
# Elements of results that no thread has written are these.
GARBAGE = {
    mx.float32: (np.float32, np.nan),
    mx.float16: (np.float16, np.nan),
    mx.bfloat16: (np.uint16, 0x7FC0),
}
# Fibers have separate stacks. Memory that a program does not free goes with its process.
ENVIRONMENT = {
    **os.environ,
    "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}
# What a fiber knows of itself, by Metal's names.
ATTRIBUTES = {
    "threadgroup_position_in_grid": "position.group",
    "simdgroup_index_in_threadgroup": "position.thread / 32",
    "thread_index_in_simdgroup": "position.thread % 32",
}
# Two threads must not print at a time, nor compile the same text.
_lock = threading.RLock()


class Buffer(NamedTuple):
    """One parameter of a kernel in Metal."""

    number: int
    space: str
    type: str
    name: str
    is_const: bool


class Printed(NamedTuple):
    """What mlx would compile for Metal."""

    text: str
    function: str
    buffers: tuple[Buffer, ...]
    attributes: tuple[str, ...]


def compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "g++"))


def why_not() -> str | None:
    """Why nothing can be emulated here, in words; None if it can."""
    return (
        None
        if compiler()
        else "no C++ compiler: the kernels' text is not compiled, and nothing of it is tested here"
    )


def printed(text: KernelText, inputs: Sequence[mx.array], outputs: Sequence[mx.Dtype]) -> Printed:
    """The source that mlx makes of a text for such inputs: it prints it while it exports a
    function that calls the kernel.
    """

    def call(*arrays: mx.array) -> Any:
        return metal_function(text)(
            inputs=arrays,
            grid=(32, 1, 1),
            threadgroup=(32, 1, 1),
            output_shapes=[(8,)] * len(outputs),
            output_dtypes=outputs,
            verbose=True,
        )

    with _lock:
        out = _output_of(lambda: mx.export_function(lambda *_: None, call, *inputs))
    source = out.partition("```\n")[2].rpartition("\n```")[0]
    found = re.search(r"\[\[kernel\]\] void (\w+)\(\n(.*?)\) \{\n", source, re.S)
    assert found, f"mlx printed no kernel: {out[:300]}"
    buffers, attributes = [], []
    for line in found[2].split(",\n"):
        if buffer := re.fullmatch(
            r"  (const )?(device|constant) (\w+)([*&]) (\w+) \[\[buffer\((\d+)\)\]\]", line
        ):
            assert buffer[4] == "*", line
            buffers.append(Buffer(int(buffer[6]), buffer[2], buffer[3], buffer[5], bool(buffer[1])))
        else:
            attribute = re.fullmatch(r"  (uint3?) (\w+) \[\[(\w+)\]\]", line)
            assert attribute, line
            assert attribute[2] == attribute[3]
            attributes.append(attribute[2])
    return Printed(source, found[1], tuple(buffers), tuple(attributes))


def _output_of(function: Callable[[], Any]) -> str:
    """What `function` writes to the process's standard output."""
    sys.stdout.flush()
    kept = os.dup(1)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 1)
        try:
            function()
        finally:
            os.dup2(kept, 1)
            os.close(kept)
        file.seek(0)
        return file.read().decode()


def check_buffers(text: KernelText, found: Printed) -> None:
    """Metal has 31 places for buffers; none is taken by a shape or a stride, and none is passed
    as a constant.
    """
    assert [b.name for b in found.buffers] == [*text.inputs, *text.outputs]
    assert [b.number for b in found.buffers] == list(range(len(found.buffers)))
    assert len(found.buffers) <= 31, f"{len(found.buffers)} > 31 buffers"
    assert {b.space for b in found.buffers} == {"device"}
    assert [b.is_const for b in found.buffers] == [True] * len(text.inputs) + [False] * len(
        text.outputs
    )


def program(found: Printed) -> str:
    """The printed text, and a function that calls it for one fiber."""
    buffers = [
        f"({'const ' if b.is_const else ''}{b.type} *)buffers[{b.number}]" for b in found.buffers
    ]
    arguments = ", ".join(buffers + [ATTRIBUTES[name] for name in found.attributes])
    return (
        f"{found.text}\n"
        f"static void call(void **buffers, simt::Position position) {{ "
        f"{found.function}({arguments}); }}\n"
        'extern "C" void run(void **buffers, int width, int height, int threads, int turn) {\n'
        "  simt::run_threadgroups(call, buffers, width, height, threads, turn);\n}\n"
    )


@cache
def folder() -> Path:
    """Where compiled texts are, for all processes of this user."""
    path = Path(tempfile.gettempdir()) / f"mlx-blockpool-kernels-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    assert path.stat().st_uid == os.getuid(), f"{path} belongs to another user"
    return path


@cache
def _shim() -> str:
    version = subprocess.run(
        [str(compiler()), "--version"], capture_output=True, text=True, check=True
    ).stdout
    return version + (HERE / "simt.h").read_text(encoding="utf-8")


def compiled(source: str, flags: Sequence[str], suffix: str) -> Path:
    """The file that the compiler makes of a source, from the folder if it is there."""
    key = hashlib.sha256("\0".join((source, _shim(), *FLAGS, *flags)).encode()).hexdigest()[:24]
    path = folder() / (key + suffix)
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=folder()) as made:
            compile_source(source, Path(made), flags)
            os.replace(Path(made) / "made", path)
    return path


def compile_source(source: str, folder: Path, flags: Sequence[str]) -> None:
    """Makes the file `made` in a folder. Raises AssertionError with what the compiler says."""
    (folder / "kernel.cpp").write_text(source, encoding="utf-8")
    command = [str(compiler()), *FLAGS, *flags, "kernel.cpp", "-o", "made"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:4000]


class Emulator:
    """Runs kernels as soon as they are called.

    turn:  in which order threads run: 0 forward, 1 backward, else a seed.
    parts: how many times eight elements of a row a lane has at most: 1 on Metal, 2 on CUDA.
    calls: how often each text has run.
    """

    def __init__(self, turn: int = 0, parts: int = 1, flags: Sequence[str] = ()) -> None:
        self.turn, self.flags = turn, (*LIBRARY, f"-DMOST_PARTS={parts}", *flags)
        self.calls: dict[str, int] = {}
        self._runs: dict[Any, Any] = {}

    def __call__(
        self,
        text: KernelText,
        inputs: Sequence[mx.array],
        grid: Size,
        threadgroup: Size,
        output_shapes: Sequence[tuple[int, ...]],
        output_dtypes: Sequence[mx.Dtype],
    ) -> list[mx.array]:
        mx.eval(*inputs)
        run = self._run_of(text, inputs, output_dtypes)
        results = [
            np.full(shape, GARBAGE[t][1], GARBAGE[t][0])
            for shape, t in zip(output_shapes, output_dtypes, strict=True)
        ]
        held = [array.__dlpack__() for array in inputs]
        addresses = [_address(capsule, array) for capsule, array in zip(held, inputs, strict=True)]
        addresses += [result.ctypes.data for result in results]
        assert grid[2] == threadgroup[1] == threadgroup[2] == 1
        run(
            (ctypes.c_void_p * len(addresses))(*addresses),
            grid[0],
            grid[1],
            threadgroup[0],
            self.turn,
        )
        self.calls[text.name] = self.calls.get(text.name, 0) + 1
        arrays = [mx.array(result) for result in results]
        return [
            a.view(t) if t == mx.bfloat16 else a for a, t in zip(arrays, output_dtypes, strict=True)
        ]

    def _run_of(
        self, text: KernelText, inputs: Sequence[mx.array], outputs: Sequence[mx.Dtype]
    ) -> Any:
        key = (text, *[(array.dtype, array.size >= LEAST_SIZE) for array in inputs])
        if key not in self._runs:
            found = printed(text, inputs, outputs)
            check_buffers(text, found)
            # Calls hold the interpreter's lock: fibers and the threadgroup's memory are the
            # library's, for one thread.
            self._runs[key] = ctypes.PyDLL(str(compiled(program(found), self.flags, ".so"))).run
        return self._runs[key]


class Programs:
    """A launcher that runs each call in a process of its own, from files: for sanitizers, and to
    count what is run.

    Every input and output is a piece of the heap of exactly its size. folder: where programs are
    made and kept.
    """

    def __init__(self, folder: Path, flags: Sequence[str], parts: int = 1) -> None:
        self.folder, self.flags = folder, (*flags, f"-DMOST_PARTS={parts}")
        self._made: dict[Any, Path] = {}

    def __call__(
        self,
        text: KernelText,
        inputs: Sequence[mx.array],
        grid: Size,
        threadgroup: Size,
        output_shapes: Sequence[tuple[int, ...]],
        output_dtypes: Sequence[mx.Dtype],
    ) -> list[mx.array]:
        mx.eval(*inputs)
        made = self._program_of(text, inputs, output_dtypes)
        sizes = [
            math.prod(shape) * t.size for shape, t in zip(output_shapes, output_dtypes, strict=True)
        ]
        raw = [bytes(memoryview(array.view(mx.uint8))) for array in inputs]
        numbers = np.array(
            [grid[0], grid[1], threadgroup[0], 2, len(raw), len(sizes), *map(len, raw), *sizes],
            np.int64,
        )
        (made / "in").write_bytes(numbers.tobytes() + b"".join(raw))
        done = subprocess.run(
            [made / "made", "in", "out"],
            cwd=made,
            capture_output=True,
            text=True,
            check=False,
            env=ENVIRONMENT,
        )
        assert done.returncode == 0, done.stderr[:4000]
        out, results, start = (made / "out").read_bytes(), [], 0
        for shape, dtype, size in zip(output_shapes, output_dtypes, sizes, strict=True):
            results.append(
                mx.array(np.frombuffer(out, np.uint8, size, start)).view(dtype).reshape(shape)
            )
            start += size
        return results

    def _program_of(
        self, text: KernelText, inputs: Sequence[mx.array], outputs: Sequence[mx.Dtype]
    ) -> Path:
        key = (text, *[(array.dtype, array.size >= LEAST_SIZE) for array in inputs])
        if key not in self._made:
            found = printed(text, inputs, outputs)
            body = text.header[text.header.index("// Attention of") :]
            # Lines are counted as those of the file.
            source = program(found).replace(
                body, f'#line 1 "attention.h"\n{body}\n#line 1 "call.cpp"\n'
            )
            made = self.folder / str(len(self._made))
            made.mkdir(parents=True)
            compile_source(
                source + (HERE / "main.cpp").read_text(encoding="utf-8"), made, self.flags
            )
            self._made[key] = made
        return self._made[key]


class _Tensor(ctypes.Structure):
    """The beginning of a DLTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("dtype", ctypes.c_uint8 * 4),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)


def _address(capsule: Any, array: mx.array) -> int:
    """Where an array lies in memory, which is row after row: kernels know nothing of strides."""
    tensor = _Tensor.from_address(_pointer(capsule, b"dltensor"))
    stride = 1
    for axis in reversed(range(tensor.ndim)):
        if tensor.strides and tensor.shape[axis] > 1:
            assert tensor.strides[axis] == stride, (
                f"an array {array.shape} that does not lie row after row"
            )
        stride *= tensor.shape[axis]
    return int(tensor.data) + int(tensor.byte_offset)
