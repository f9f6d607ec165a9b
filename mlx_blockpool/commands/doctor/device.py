"""Measurements on this device: decode steps, decode paths and the disk; and the memory that it
allows a process.

Imports mlx in the functions that measure, so that the doctor can report on an installation without
it.
"""

from __future__ import annotations

import importlib
import os
import random
import time
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO, Any

from ...formatting import human_bytes
from ...model_files.device import memory_bytes
from ...store.paths import default_folder
from .finding import Finding, State

PREFIX, TAIL, MEMBERS = 1024, 64, 8
STEPS, ROUNDS = 4, 3
PATHS = ("ragged", "shared")
# Another path must be this many times as fast to be worth an option.
CLEARLY = 1.15
DISK_BYTES = 64 << 20
PIECE_BYTES = 4 << 20
# macOS: reads and writes of a file that bypass its cache.
F_NOCACHE = 48


def device() -> list[Finding]:
    """The device and its memory."""
    import mlx.core as mx

    info = {key: value for key, value in mx.device_info().items() if isinstance(value, str | int)}
    name, memory = str(info.get("device_name", mx.default_device())), memory_bytes()
    text = f"{name}: {human_bytes(memory)} for models and pools together."
    recommended = info.get("max_recommended_working_set_size")
    wired = Finding(
        "wired limit", "note", "This device wires no memory: --wired-limit has no effect."
    )
    if mx.metal.is_available() and isinstance(recommended, int):
        wired = Finding(
            "wired limit",
            "ok",
            f"macOS may wire {human_bytes(recommended)}, which --wired-limit auto uses.",
            "Larger models need a larger limit: sudo sysctl iogpu.wired_limit_mb=N. --wired-limit "
            "off after kernel panics.",
            {"recommended_bytes": recommended},
        )
    return [Finding("device", "ok", text, figures={"memory_bytes": memory, **info}), wired]


def decode() -> list[Finding]:
    """Measure whether a step in flight copies slabs, and which decode path is the fastest for
    agents on one shared prefix.

    The kernel is one of the paths if it was tried and is correct.
    """
    import mlx.core as mx

    from ...config import EngineConfig
    from ...engine.engine import BlockPoolBatchEngine
    from ...engine.request import Request, Token

    config = EngineConfig(measures=True, drafts="off")
    engine = BlockPoolBatchEngine.open(_tiny_model(), 200_000_000, config=config)
    arena: Any = engine.caches.prefix.arena  # type: ignore[attr-defined]
    draw = random.Random(0)
    shared = [draw.randrange(1, 500) for _ in range(PREFIX)]
    for i in range(MEMBERS):
        engine.insert(
            Request([*shared, *(draw.randrange(1, 500) for _ in range(TAIL * (i + 1)))], 10_000)
        )
    decoding: set[int] = set()
    while len(decoding) < MEMBERS:
        decoding |= {event.uid for event in engine.next() if isinstance(event, Token)}
    chosen = _chosen(engine, arena)
    paths = PATHS if arena.capabilities.no_kernel else (*PATHS, "kernel")
    times: dict[str, list[float]] = {path: [] for path in paths}
    for _ in range(ROUNDS):
        for path in paths:
            arena.decode.path = path
            engine.next()
            start = time.perf_counter()
            for _ in range(STEPS):
                engine.next()
            times[path].append((time.perf_counter() - start) / STEPS * 1000)
    copies = arena.capabilities.synchronous
    engine.close()
    mx.clear_cache()
    fastest = _fastest({path: min(found) for path, found in times.items()}, chosen)
    return [
        _copies(copies),
        _kernel(arena.capabilities.no_kernel, arena.decode.launch is not None),
        fastest,
    ]


def _tiny_model() -> Any:
    """A model of mlx-lm with random weights, of a size that any device runs."""
    import mlx.core as mx

    llama = importlib.import_module("mlx_lm.models.llama")
    sizes = {
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "intermediate_size": 768,
        "num_attention_heads": 8,
    }
    config = {
        "model_type": "llama",
        **sizes,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5,
        "vocab_size": 512,
    }
    mx.random.seed(0)
    model = llama.Model(llama.ModelArgs.from_dict(config))
    model.set_dtype(mx.float16 if mx.metal.is_available() else mx.float32)
    mx.eval(model.parameters())
    return model.eval()


def _chosen(engine: Any, arena: Any) -> str:
    """The path that the server chooses for this batch by its measurements at the start."""
    arena.decode.path_counts.clear()
    engine.next()
    ((path, _),) = arena.decode.path_counts.most_common(1)
    return str(path)


def _copies(copies: bool) -> Finding:
    text = "Decode steps overlap and copy no slab."
    if copies:
        text = (
            "A decode step that is encoded while another runs would copy slabs: steps run one at "
            "a time here."
        )
    state: State = "note" if copies else "ok"
    return Finding("steps in flight", state, text, figures={"copies": copies})


def _kernel(refusals: dict[int, str], has_kernels: bool) -> Finding:
    """Report whether the kernel of this device is correct."""
    if not refusals:
        text = (
            "The kernel for decode steps gives the results of mlx's own operations here. A server "
            "uses it where it is faster."
        )
        return Finding("kernel", "ok", text, figures={"trusted": True})
    text = f"Decode steps do not use the kernel: {'; '.join(sorted(set(refusals.values())))}."
    figures = {"trusted": False, "why": sorted(set(refusals.values()))}
    if not has_kernels:
        return Finding("kernel", "note", text, figures=figures)
    advice = "Replies are correct without it. Report this line, with the versions above."
    return Finding("kernel", "warning", text, advice, figures)


def _fastest(milliseconds: dict[str, float], chosen: str) -> Finding:
    best = min(milliseconds, key=lambda path: milliseconds[path])
    shown = ", ".join(f"{path} {value:.1f} ms" for path, value in milliseconds.items())
    figures: dict[str, Any] = {
        "milliseconds": {p: round(v, 2) for p, v in milliseconds.items()},
        "chosen": chosen,
        "best": best,
    }
    text = (
        f"A step of {MEMBERS} sequences on a prefix of {PREFIX:,} tokens: {shown}. The server "
        f"uses {chosen}."
    )
    if milliseconds[chosen] <= CLEARLY * milliseconds[best]:
        return Finding("decode path", "ok", text, figures=figures)
    advice = (
        f"Try serve --decode-path {best}, and report this line: the server has measured otherwise."
    )
    return Finding("decode path", "warning", text, advice, figures)


def disk(folder: Path | None) -> list[Finding]:
    """Measure how fast the store's disk is, with a temporary file."""
    root = folder or default_folder()
    existing = next(path for path in (root, *root.parents) if path.is_dir())
    try:
        with NamedTemporaryFile(dir=existing, prefix=".doctor-") as file:
            written = DISK_BYTES / _write(file, os.urandom(PIECE_BYTES))
            read = DISK_BYTES / _read(Path(file.name))
    except OSError as error:
        text = (
            f"The store cannot be written: no file can be created in {existing} ({error.strerror})."
        )
        return [
            Finding(
                "disk speed", "warning", text, "Give --store-dir a folder that you can write to."
            )
        ]
    text = (
        f"The store's disk writes {human_bytes(int(written))} and reads {human_bytes(int(read))} "
        "per second."
    )
    figures = {"write_bytes_per_s": round(written), "read_bytes_per_s": round(read)}
    return [Finding("disk speed", "ok", text, figures=figures)]


def _write(file: IO[bytes], data: bytes) -> float:
    """Seconds to write and sync DISK_BYTES of a file."""
    start = time.perf_counter()
    for _ in range(DISK_BYTES // len(data)):
        file.write(data)
    file.flush()
    os.fsync(file.fileno())
    return time.perf_counter() - start


def _read(path: Path) -> float:
    """Seconds to read the file, bypassing the system's cache where the system allows it."""
    with path.open("rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        else:
            import fcntl

            fcntl.fcntl(file.fileno(), F_NOCACHE, 1)
        start = time.perf_counter()
        while file.read(PIECE_BYTES):
            pass
        return time.perf_counter() - start
