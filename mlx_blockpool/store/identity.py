"""What keys and values were computed with: weights, adapter and config, by their content. Knows no arrays and no paths.

Two copies of a model in different folders are the same; a fine-tune of the same shape is another.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from ..errors import StoreError

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
# Of each tensor these many bytes are read at the beginning, in the middle and at the end.
SAMPLE_BYTES = 256
MAX_HEADER_BYTES = 100_000_000


def identity(model: Path, adapter: Path | None = None) -> str:
    """A name of the weights in a model folder and an adapter folder: headers, sizes and sampled bytes of every tensor.

    Reads some kilobytes a tensor file and looks at every tensor. Raises StoreError for a folder without weights, or with such
    as cannot be read.
    """
    digest = hashlib.blake2b(digest_size=32)
    # The files that mlx-lm loads; a training leaves others beside them.
    for pattern, folder in (("model*.safetensors", model), ("adapters.safetensors", adapter)):
        if folder is None:
            continue
        files = sorted(folder.glob(pattern))
        if not files:
            raise StoreError(f"Found no {pattern} in {folder}; needed the weights, to tell their keys and values apart.")
        try:
            digest.update(pattern.encode() + _config(folder))
            for path in files:
                _add_tensors(digest, path)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            found = f"{type(error).__name__} ({error})"
            raise StoreError(f"{folder}: found {found}; needed config.json and safetensors files that mlx-lm loads.") from error
    return digest.hexdigest()


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


def _add_tensors(digest: Any, path: Path) -> None:
    """The header of a safetensors file, its size, and a sample of each tensor: a change anywhere in most weights is seen."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if length > min(size, MAX_HEADER_BYTES):
            raise StoreError(f"{path.name}: found a header of {length} bytes in a file of {size}; needed a safetensors file.")
        tensors = {name: t for name, t in sorted(json.loads(file.read(length)).items()) if name != "__metadata__"}
        digest.update(size.to_bytes(8, "little") + json.dumps(tensors, sort_keys=True).encode())
        for name, tensor in tensors.items():
            start, end = tensor["data_offsets"]
            if 8 + length + end > size:
                raise StoreError(f"{path.name}: found {size} bytes; needed {8 + length + end} for {name}. The file is cut off.")
            for at in sorted({start, (start + end) // 2, max(start, end - SAMPLE_BYTES)}):
                file.seek(8 + length + at)
                digest.update(file.read(min(SAMPLE_BYTES, end - at)))
