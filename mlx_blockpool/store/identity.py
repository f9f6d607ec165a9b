"""The identity of a model's weights, adapter and config, by their content. Knows files; no arrays.

Two copies of a model in different folders have the same identity; a fine-tune of the same shape has another.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from ..claims import WEIGHTS, read_header
from ..errors import StoreError
from .digests import Digests, FileStamp, stamp_of

# Keys of a config that change no key or value: names, versions, and those that only generation or the tokenizer reads.
INSTANCE_KEYS = {
    "_name_or_path",
    "architectures",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "transformers_version",
    "use_cache",
}
ADAPTER_FILES = "adapters.safetensors"

# The stamps of files, by their paths.
Stamps: TypeAlias = dict[Path, FileStamp]


def identity(model: Path, adapter: Path | None = None, digests: Digests | None = None) -> str:
    """A name of the weights in a model folder and an adapter folder: of every byte of their files, and of config.json.

    Reads all files but those with remembered digests. Raises StoreError for a folder without weights or with files that cannot be
    read, and once `digests` are stopped.
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
    """Check configs and headers alone: some kilobytes a file. Raises StoreError as identity() does."""
    for _, folder, files in _files(model, adapter):
        with _named(folder):
            _config(folder)
            for path in files:
                _check_tensors(path)


def stamps_of(model: Path, adapter: Path | None = None) -> Stamps:
    """The stamps of the files of the weights. Raises OSError."""
    files = [*model.glob(WEIGHTS), *([] if adapter is None else adapter.glob(ADAPTER_FILES))]
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
    """config.json and adapter_config.json, without INSTANCE_KEYS."""
    config: dict[str, Any] = {}
    for name in ("config.json", "adapter_config.json"):
        path = folder / name
        if path.exists():
            config[name] = {k: v for k, v in json.loads(path.read_text()).items() if k not in INSTANCE_KEYS}
    return json.dumps(config, sort_keys=True).encode()


def _files(model: Path, adapter: Path | None) -> Iterator[tuple[str, Path, list[Path]]]:
    """The files that mlx-lm loads of each folder; a training leaves others beside them. Raises StoreError if there are none."""
    for pattern, folder in ((WEIGHTS, model), (ADAPTER_FILES, adapter)):
        if folder is None:
            continue
        files = sorted(folder.glob(pattern))
        if not files:
            raise StoreError(f"Found no {pattern} in {folder}; needed the weights, to tell their keys and values apart.")
        yield pattern, folder, files


@contextmanager
def _named(folder: Path) -> Iterator[None]:
    """Raise errors of a folder's files as a StoreError that names the folder."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        found = f"{type(error).__name__} ({error})"
        raise StoreError(f"{folder}: found {found}; needed config.json and safetensors files that mlx-lm loads.") from error


def _check_tensors(path: Path) -> None:
    """Raises StoreError for a file without a safetensors header, or with fewer bytes than its tensors take."""
    header = read_header(path)
    for name, tensor in header.tensors.items():
        _, end = tensor["data_offsets"]
        if header.start + end > header.size:
            raise StoreError(f"{path.name} is cut off: {name} would end at byte {header.start + end} of {header.size}.")
