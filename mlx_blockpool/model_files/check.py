"""Checks a model's folder before it is loaded: reads bounded regular files, and compares
config.json with the weights.

The files come from anywhere. None of their code is run, and no arrays are made.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import BadModelError

# The weights that mlx-lm loads, whatever an index says.
WEIGHTS = "model*.safetensors"
MAX_CONFIG_BYTES = 16 << 20
MAX_INDEX_BYTES = 256 << 20
MAX_HEADER_BYTES = 100_000_000
MAX_TOKENIZER_BYTES = 1 << 30
# The files of a folder that mlx-lm reads.
READ_BY_MLX_LM = (
    "*.json",
    "*.jsonl",
    "*.jinja",
    "*.txt",
    "*.tiktoken",
    "tokenizer.model",
    "*.safetensors",
)
# Keys of config.json for the number of layers, which models loop over when they are built.
LAYERS = ("num_hidden_layers", "n_layers", "n_layer", "num_layers", "num_decoder_layers")
# For a config without weights to compare with; models have fewer.
MOST_LAYERS = 10_000


def read_bounded(path: Path, most: int) -> bytes:
    """A regular file of at most `most` bytes, or a link to one.

    Raises OSError, and ValueError for any other.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise ValueError(f"{path} has {size} bytes; at most {most} are read")
        return file.read(most)


def read_json(path: Path, most: int) -> Any:
    """The content of a JSON file.

    Raises OSError, and ValueError for a file that is too large, malformed or nested too deeply.
    """
    try:
        return json.loads(read_bounded(path, most))
    except RecursionError as error:
        raise ValueError(f"{path} is nested too deeply") from error


def read_config(path: Path) -> dict[str, Any]:
    """A model's config.json. Raises BadModelError."""
    try:
        config = read_json(path, MAX_CONFIG_BYTES)
    except (OSError, ValueError) as error:
        raise BadModelError(
            f"Cannot read {path}: {error}. Give a folder with the config.json of a model."
        ) from error
    if not isinstance(config, dict):
        raise BadModelError(
            f"{path} is not the config.json of a model: it does not hold a JSON object."
        )
    return config


def check_config(folder: Path, name: str) -> dict[str, Any]:
    """The config.json of a folder whose files are safe to read, with no more layers than its
    weights have tensors.

    Raises BadModelError with `name` in its message.
    """
    check_folder(folder)
    config = read_config(folder / "config.json")
    check_layers(config, name, count_tensors(folder) if any(folder.glob(WEIGHTS)) else None)
    return config


def check_folder(folder: Path) -> None:
    """Raises BadModelError if a file that mlx-lm reads is a pipe, a device, or a text that is
    too large.
    """
    for pattern in READ_BY_MLX_LM:
        for path in folder.glob(pattern):
            try:
                found = path.stat()
            except OSError:
                # The hub's cache retains links to files that it has deleted.
                continue
            if not stat.S_ISREG(found.st_mode):
                raise BadModelError(f"{path} is not a regular file.")
            if path.suffix != ".safetensors" and found.st_size > MAX_TOKENIZER_BYTES:
                raise BadModelError(
                    f"{path} has {found.st_size} bytes; at most {MAX_TOKENIZER_BYTES} are read."
                )


def count_tensors(folder: Path) -> int:
    """The number of tensors in the weights of a folder.

    Raises BadModelError for files that are not in the safetensors format.
    """
    count = 0
    for path in sorted(folder.glob(WEIGHTS)):
        try:
            count += len(read_header(path).tensors)
        except (OSError, ValueError, RecursionError) as error:
            raise BadModelError(f"Cannot read {path} as a safetensors file: {error}.") from error
    return count


def check_layers(config: dict[str, Any], name: str, tensors: int | None = None) -> None:
    """Compare the numbers of layers in config.json with `tensors`, the number of tensors in the
    weights; None without weights.

    A model of a million layers takes minutes to build, and no step of other models runs meanwhile.
    Raises BadModelError.
    """
    most = MOST_LAYERS if tensors is None else tensors
    for part in _parts(config):
        for key in LAYERS:
            found = part.get(key)
            if isinstance(found, int) and found > most:
                limit = (
                    f"at most {most} are possible"
                    if tensors is None
                    else f"its weights have {most} tensors"
                )
                raise BadModelError(
                    f"{name}: config.json says {key} {str(found)[:40]}, but {limit}. Check "
                    "config.json."
                )


@dataclass(frozen=True)
class Header:
    """The header of a safetensors file of `size` bytes: what it says of each tensor, and where
    their data begin.
    """

    tensors: dict[str, Any]
    start: int
    size: int


def read_header(path: Path) -> Header:
    """Raises OSError, ValueError or RecursionError for a file without one."""
    with open_regular(path) as file:
        head, size = head_of(file), os.fstat(file.fileno()).st_size
    header = json.loads(head[8:])
    if not isinstance(header, dict):
        raise ValueError("its header is not a JSON object")
    return Header(
        {name: about for name, about in header.items() if name != "__metadata__"}, len(head), size
    )


def head_of(file: BinaryIO) -> bytes:
    """The header of an open safetensors file, after the 8 bytes of its length.

    Raises ValueError for a file without one.
    """
    length = file.read(8)
    size = int.from_bytes(length, "little")
    if len(length) < 8 or size > min(MAX_HEADER_BYTES, os.fstat(file.fileno()).st_size):
        raise ValueError(f"its header would have {size} bytes")
    return length + file.read(size)


def open_regular(path: Path) -> BufferedReader:
    """A regular file, or a link to one, as the hub's folders have them.

    Raises OSError, and ValueError for any other.
    """
    # Opening a device can have side effects, and a pipe would block.
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
