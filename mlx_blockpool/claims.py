"""What a model's folder claims, before anything is made of it: bounded reading, config.json against weights, a trial.

These files come from anywhere. Nothing of them is run. Knows no arrays; builds models only in a process of its own.
"""

from __future__ import annotations

import json
import math
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from .errors import BadModelError

MAX_CONFIG_BYTES = 16 << 20
MAX_INDEX_BYTES = 256 << 20
MAX_HEADER_BYTES = 100_000_000
MAX_TOKENIZER_BYTES = 1 << 30
# The files of a folder that mlx-lm reads.
READ_BY_MLX_LM = ("*.json", "*.jsonl", "*.jinja", "*.txt", "*.tiktoken", "tokenizer.model", "*.safetensors")
# The counts that models loop over, and sizes of their arrays.
LAYERS = ("num_hidden_layers", "n_layers", "n_layer", "num_layers", "num_decoder_layers")
SIZES = (
    "hidden_size",
    "vocab_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_intermediate_size",
    "n_embd",
    "d_model",
)
# Without weights to compare with: no model has as many.
MOST_LAYERS = 10_000
LARGEST_SIZE = 1 << 32
# Weights of one bit, in words of 32.
MOST_PACKED = 32
# What a trial may take, beside its seconds; a model whose arrays are not made takes little.
TRIAL_BYTES = 4 << 30
TRIAL = "from mlx_blockpool.claims import build_here; build_here()"


@dataclass(frozen=True)
class Held:
    """What the weights of a folder hold, by their headers: how many tensors, and the elements of the largest."""

    tensors: int
    largest: int


def read_bounded(path: Path, most: int) -> bytes:
    """A regular file of at most `most` bytes, which may be linked to. Raises OSError, and ValueError for any other."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_size > most:
            what = f"{found.st_size} bytes" if stat.S_ISREG(found.st_mode) else "no regular file"
            raise ValueError(f"found {what} in {path}; needed a file of at most {most} bytes")
        return file.read(most)


def read_json(path: Path, most: int) -> Any:
    """The content of a JSON file. Raises OSError, and ValueError for a file that is too large, no JSON or nested too deeply."""
    try:
        return json.loads(read_bounded(path, most))
    except RecursionError as error:
        raise ValueError(f"{path} is nested too deeply") from error


def check_folder(folder: Path) -> None:
    """Raises BadModelError for a folder with a pipe, device or endless file where mlx-lm would read one, or too large a text."""
    for pattern in READ_BY_MLX_LM:
        for path in folder.glob(pattern):
            try:
                found = path.stat()
            except OSError:
                # The hub's cache keeps links to what it has dropped.
                continue
            if not stat.S_ISREG(found.st_mode):
                raise BadModelError(f"Found no regular file at {path}; needed a model's folder with files only.")
            if path.suffix != ".safetensors" and found.st_size > MAX_TOKENIZER_BYTES:
                raise BadModelError(f"Found {found.st_size} bytes in {path}; needed at most {MAX_TOKENIZER_BYTES}.")


def held_by(folder: Path) -> Held:
    """The sizes of the weights that mlx-lm loads from a folder. Raises BadModelError for files that are no safetensors."""
    tensors, largest = 0, 1
    for path in sorted(folder.glob("model*.safetensors")):
        for shape in _shapes(path):
            tensors += 1
            largest = max(largest, math.prod(shape))
    return Held(tensors, largest)


def check_claims(config: dict[str, Any], name: str, held: Held | None = None) -> None:
    """Compare what config.json counts with what the weights hold; None: there are none to compare with.

    Raises BadModelError for more layers than tensors, and for sizes that no tensor has, however it is packed.
    """
    most_layers = MOST_LAYERS if held is None else held.tensors
    most_size = LARGEST_SIZE if held is None else held.largest * MOST_PACKED
    for part in _parts(config):
        for keys, most, what in ((LAYERS, most_layers, "tensors"), (SIZES, most_size, "elements")):
            for key in keys:
                found = part.get(key)
                for count in found if isinstance(found, list) else [found]:
                    if isinstance(count, int) and count > most:
                        limit = "no model has" if held is None else f"the weights of {name} have {most} {what}, too few for"
                        raise BadModelError(f"{name}: config.json says {key} {str(count)[:40]}; {limit} so many.")


def try_to_build(config: dict[str, Any], name: str, seconds: float) -> None:
    """Build the model's layers in a separate process, which is killed when it takes too long or too much memory.

    Raises BadModelError then. Other errors of mlx-lm are left to the load itself.
    """
    problem = _trial(json.dumps(config, sort_keys=True), seconds)
    if problem is not None:
        raise BadModelError(f"{name}: setting up the layers of its config.json {problem}. Needed the config of a model.")


@lru_cache(maxsize=64)
def _trial(config: str, seconds: float) -> str | None:
    """Why a model of this config cannot be built, or None."""
    command = [sys.executable, "-c", TRIAL, str(seconds)]
    try:
        ended = subprocess.run(command, input=config.encode(), capture_output=True, timeout=2 * seconds, check=False)
    except subprocess.TimeoutExpired:
        return f"took more than {seconds:g} seconds"
    if ended.returncode == -signal.SIGALRM:
        return f"took more than {seconds:g} seconds"
    return None if ended.returncode in (0, 1) else "took more memory than a model can have"


def build_here() -> None:
    """The process of a trial: ends with status 0, 1 for a config that mlx-lm has no model for, or is killed."""
    # Whoever has started it may be gone by then.
    signal.setitimer(signal.ITIMER_REAL, float(sys.argv[1]))
    _limit_memory()
    config = json.loads(sys.stdin.buffer.read())
    try:
        _build(config)
    except MemoryError:
        os._exit(2)
    except Exception:
        # Anybody's config in anybody's code: mlx-lm will say more about it.
        os._exit(1)
    os._exit(0)


def _build(config: dict[str, Any]) -> None:
    import importlib

    mlx: Any = importlib.import_module("mlx.core")
    mlx.set_default_device(mlx.cpu)
    importlib.import_module("mlx_blockpool_plugins.shapes").build(config)


def _limit_memory() -> None:
    import resource

    if hasattr(resource, "RLIMIT_DATA"):
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        if hard == resource.RLIM_INFINITY or hard > TRIAL_BYTES:
            resource.setrlimit(resource.RLIMIT_DATA, (TRIAL_BYTES, hard))


def _shapes(path: Path) -> Iterator[list[int]]:
    """The shape of each tensor in a safetensors file."""
    try:
        tensors = _header(path)
    except (OSError, ValueError, RecursionError) as error:
        raise BadModelError(f"Cannot read {path}: {error}. Needed a safetensors file.") from error
    for tensor, about in tensors.items():
        shape = about.get("shape") if isinstance(about, dict) else None
        if tensor == "__metadata__":
            continue
        if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
            raise BadModelError(f"Found no shape of {tensor[:80]!r} in {path}; needed a safetensors file.")
        yield shape


def _header(path: Path) -> dict[str, Any]:
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("it is no regular file")
        length = int.from_bytes(file.read(8), "little")
        if length > min(found.st_size, MAX_HEADER_BYTES):
            raise ValueError(f"found a header of {length} bytes in a file of {found.st_size}")
        header = json.loads(file.read(length))
    if not isinstance(header, dict):
        raise ValueError(f"found a {type(header).__name__} as its header")
    return header


def _parts(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The config and the objects in it, however deep."""
    left: list[Any] = [config]
    while left:
        part = left.pop()
        if isinstance(part, dict):
            yield part
            left.extend(part.values())
        elif isinstance(part, list):
            left.extend(part)
