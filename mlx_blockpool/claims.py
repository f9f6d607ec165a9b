"""Checks a model's folder before it is loaded: reads within bounds, compares config.json with the weights, and tries it.

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
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

from .errors import BadModelError

# The weights that mlx-lm loads, whatever an index says.
WEIGHTS = "model*.safetensors"
MAX_CONFIG_BYTES = 16 << 20
MAX_INDEX_BYTES = 256 << 20
MAX_HEADER_BYTES = 100_000_000
MAX_TOKENIZER_BYTES = 1 << 30
# The files of a folder that mlx-lm reads.
READ_BY_MLX_LM = ("*.json", "*.jsonl", "*.jinja", "*.txt", "*.tiktoken", "tokenizer.model", "*.safetensors")
# Keys of config.json for the counts that models loop over, and for sizes of their arrays.
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
# No model has as many; for a config without weights to compare with.
MOST_LAYERS = 10_000
LARGEST_SIZE = 1 << 32
# Weights of one bit, in words of 32.
MOST_PACKED = 32
# The memory of a trial, which makes no arrays.
TRIAL_BYTES = 4 << 30
TRIAL = "from mlx_blockpool.claims import build_here; build_here()"


@dataclass(frozen=True)
class Held:
    """The weights of a folder by their headers: the number of tensors, and the elements of the largest."""

    tensors: int
    largest: int


def read_bounded(path: Path, most: int) -> bytes:
    """A regular file of at most `most` bytes, or a link to one. Raises OSError, and ValueError for any other."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise ValueError(f"{path} has {size} bytes; at most {most} are read")
        return file.read(most)


def read_json(path: Path, most: int) -> Any:
    """The content of a JSON file. Raises OSError, and ValueError for a file that is too large, malformed or nested too deeply."""
    try:
        return json.loads(read_bounded(path, most))
    except RecursionError as error:
        raise ValueError(f"{path} is nested too deeply") from error


def read_config(path: Path) -> dict[str, Any]:
    """A model's config.json. Raises BadModelError."""
    try:
        config = read_json(path, MAX_CONFIG_BYTES)
    except (OSError, ValueError) as error:
        raise BadModelError(f"Cannot read {path}: {error}. Give a folder with the config.json of a model.") from error
    if not isinstance(config, dict):
        raise BadModelError(f"{path} is no config.json of a model: it holds no JSON object.")
    return config


def check_config(folder: Path, name: str) -> dict[str, Any]:
    """The config.json of a folder, which agrees with its weights. Raises BadModelError. `name` is for its text."""
    check_folder(folder)
    config = read_config(folder / "config.json")
    check_claims(config, name, held_by(folder) if any(folder.glob(WEIGHTS)) else None)
    return config


def check_model(folder: Path, name: str, build_seconds: float) -> None:
    """check_config() of a folder, and try_to_build() of its model. Raises BadModelError."""
    try_to_build(check_config(folder, name), name, build_seconds)


def check_folder(folder: Path) -> None:
    """Raises BadModelError for a pipe, a device or too large a text among the files that mlx-lm reads."""
    for pattern in READ_BY_MLX_LM:
        for path in folder.glob(pattern):
            try:
                found = path.stat()
            except OSError:
                # The hub's cache keeps links to what it has dropped.
                continue
            if not stat.S_ISREG(found.st_mode):
                raise BadModelError(f"{path} is no regular file.")
            if path.suffix != ".safetensors" and found.st_size > MAX_TOKENIZER_BYTES:
                raise BadModelError(f"{path} has {found.st_size} bytes; at most {MAX_TOKENIZER_BYTES} are read.")


def held_by(folder: Path) -> Held:
    """The sizes of the weights in a folder. Raises BadModelError for files that are not in the safetensors format."""
    sizes = [math.prod(shape) for path in sorted(folder.glob(WEIGHTS)) for shape in _shapes(path)]
    return Held(len(sizes), max(sizes, default=1))


def check_claims(config: dict[str, Any], name: str, held: Held | None = None) -> None:
    """Compare the counts in config.json with the weights; None: without weights, with what no model has.

    Raises BadModelError for more layers than tensors, and for sizes that no tensor has even if it is packed.
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
    """Build the model's layers in a separate process, which is killed if it takes too long or too much memory.

    Raises BadModelError then. Other errors are mlx-lm's to raise when it loads the model. Code in the model's folder is not run.
    """
    if config.get("model_file") is not None:
        return
    problem = _trial(json.dumps(config, sort_keys=True), seconds)
    if problem is not None:
        raise BadModelError(f"{name}: building the layers of its config.json {problem}.")


@lru_cache(maxsize=64)
def _trial(config: str, seconds: float) -> str | None:
    """What building a model of this config took too much of, or None."""
    command = [sys.executable, "-c", TRIAL, str(seconds)]
    try:
        status = subprocess.run(command, input=config.encode(), capture_output=True, timeout=2 * seconds, check=False).returncode
    except subprocess.TimeoutExpired:
        status = -signal.SIGALRM
    if status == -signal.SIGALRM:
        return f"took more than {seconds:g} seconds"
    return None if status in (0, 1) else "took more memory than a model can have"


def build_here() -> None:
    """The process of a trial: ends with status 0, or 1 for a config that mlx-lm cannot build, or is killed."""
    # The parent may have ended by then.
    signal.setitimer(signal.ITIMER_REAL, float(sys.argv[1]))
    _limit_memory()
    config = json.loads(sys.stdin.buffer.read())
    try:
        _build(config)
    except MemoryError:
        os._exit(2)
    except Exception:
        # A config and code from anywhere: mlx-lm raises it again when it loads the model.
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
    """The shape of each tensor in a safetensors file. Raises BadModelError."""
    try:
        tensors = read_header(path).tensors
    except (OSError, ValueError, RecursionError) as error:
        raise BadModelError(f"Cannot read {path} as a safetensors file: {error}.") from error
    for tensor, about in tensors.items():
        shape = about.get("shape") if isinstance(about, dict) else None
        if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
            raise BadModelError(f"{path} is not a safetensors file: {tensor[:80]!r} has no shape.")
        yield shape


@dataclass(frozen=True)
class Header:
    """The header of a safetensors file of `size` bytes: what it says of each tensor, and where their data begin."""

    tensors: dict[str, Any]
    start: int
    size: int


def read_header(path: Path) -> Header:
    """Raises OSError, ValueError or RecursionError for a file without one."""
    with open_regular(path) as file:
        head, size = head_of(file), os.fstat(file.fileno()).st_size
    header = json.loads(head[8:])
    if not isinstance(header, dict):
        raise ValueError("its header is no JSON object")
    return Header({name: about for name, about in header.items() if name != "__metadata__"}, len(head), size)


def head_of(file: BinaryIO) -> bytes:
    """The header of an open safetensors file, after the 8 bytes of its length. Raises ValueError for a file without one."""
    length = file.read(8)
    size = int.from_bytes(length, "little")
    if len(length) < 8 or size > min(MAX_HEADER_BYTES, os.fstat(file.fileno()).st_size):
        raise ValueError(f"a header of {size} bytes")
    return length + file.read(size)


def open_regular(path: Path) -> BufferedReader:
    """A regular file, or a link to one, as the hub's folders have them. Raises OSError, and ValueError for any other."""
    # Opening a device can have effects of its own, and a pipe would block.
    if stat.S_ISREG(os.stat(path).st_mode):
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        if stat.S_ISREG(os.fstat(fd).st_mode):
            return open(fd, "rb")
        os.close(fd)
    raise ValueError(f"{path} is not a regular file")


def _parts(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The config and all objects in it."""
    left: list[Any] = [config]
    while left:
        part = left.pop()
        if isinstance(part, dict):
            yield part
            left.extend(part.values())
        elif isinstance(part, list):
            left.extend(part)
