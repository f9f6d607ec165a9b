"""What keys and values were computed with: weights, adapter and config, by their content. Knows files; no arrays.

Two copies of a model in different folders are the same; a fine-tune of the same shape is another.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from ..errors import StoreError
from .digests import Digests, FileStamp, stamp_of

# What does not change a key or value: names, versions, and what only generation or the tokenizer reads.
INSTANCE_KEYS = {
    "_name_or_path",
    "architectures",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "transformers_version",
    "use_cache",
}
MODEL_FILES = "model*.safetensors"
ADAPTER_FILES = "adapters.safetensors"
MAX_HEADER_BYTES = 100_000_000

# The stamps of files, by their paths.
Stamps: TypeAlias = dict[Path, FileStamp]


def identity(model: Path, adapter: Path | None = None, digests: Digests | None = None) -> str:
    """A name of the weights in a model folder and an adapter folder: of every byte of their files, and of what config.json says.

    Reads all of them, but for the files whose digests are remembered. Raises StoreError for a folder without weights, for such as
    cannot be read, and where `digests` are stopped.
    """
    digests = digests or Digests(None)
    name = hashlib.blake2b(digest_size=32)
    for pattern, folder, files in _files(model, adapter):
        with _named(folder):
            name.update(pattern.encode() + _config(folder))
            for digest in digests.of(files, _check_tensors):
                name.update(digest)
    return name.hexdigest()


def check_weights(model: Path, adapter: Path | None = None) -> None:
    """Look at configs and headers alone: some kilobytes a file. Raises StoreError as identity() does."""
    for _, folder, files in _files(model, adapter):
        with _named(folder):
            _config(folder)
            for path in files:
                _check_tensors(path)


def stamps_of(model: Path, adapter: Path | None = None) -> Stamps:
    """By what the files of the weights are known again that nobody has changed. Raises OSError."""
    files = [*model.glob(MODEL_FILES), *([] if adapter is None else adapter.glob(ADAPTER_FILES))]
    return {path: stamp_of(os.stat(path)) for path in files}


def check_unchanged(model: Path, adapter: Path | None, stamps: Stamps) -> None:
    """Raises StoreError unless the files are still those that had these stamps."""
    try:
        now = stamps_of(model, adapter)
    except OSError:
        now = {}
    if now != stamps:
        raise StoreError(f"The weights in {model} changed after they were loaded. Load the model again.")


def namespace(weights: str, *parts: str) -> str:
    """The name under which records of these weights are kept; `parts` say how keys and values look (spec, dtype, bits)."""
    return hashlib.blake2b("\n".join((weights, *parts)).encode(), digest_size=16).hexdigest()


def _config(folder: Path) -> bytes:
    """config.json or adapter_config.json, without what changes no key or value."""
    config: dict[str, Any] = {}
    for name in ("config.json", "adapter_config.json"):
        path = folder / name
        if path.exists():
            config[name] = {k: v for k, v in json.loads(path.read_text()).items() if k not in INSTANCE_KEYS}
    return json.dumps(config, sort_keys=True).encode()


def _files(model: Path, adapter: Path | None) -> Iterator[tuple[str, Path, list[Path]]]:
    """The files that mlx-lm loads of each folder; a training leaves others beside them. Raises StoreError if there are none."""
    for pattern, folder in ((MODEL_FILES, model), (ADAPTER_FILES, adapter)):
        if folder is None:
            continue
        files = sorted(folder.glob(pattern))
        if not files:
            raise StoreError(f"Found no {pattern} in {folder}; needed the weights, to tell their keys and values apart.")
        yield pattern, folder, files


@contextmanager
def _named(folder: Path) -> Iterator[None]:
    """What a folder's files raise, as one error that names the folder."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        found = f"{type(error).__name__} ({error})"
        raise StoreError(f"{folder}: found {found}; needed config.json and safetensors files that mlx-lm loads.") from error


def _check_tensors(path: Path) -> None:
    """Raises StoreError for a file without a safetensors header, or with fewer bytes than its tensors take."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if length > min(size, MAX_HEADER_BYTES):
            raise StoreError(f"{path.name}: found a header of {length} bytes in a file of {size}; needed a safetensors file.")
        for name, tensor in json.loads(file.read(length)).items():
            if name == "__metadata__":
                continue
            _, end = tensor["data_offsets"]
            if 8 + length + end > size:
                raise StoreError(f"{path.name}: found {size} bytes; needed {8 + length + end} for {name}. The file is cut off.")
