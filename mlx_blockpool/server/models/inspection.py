"""What can be told of a model from its files, before anything has to go for it. Runs on any thread and makes no arrays."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from mlx_lm.utils import _download, _get_classes

from ... import machine, modelfile
from ...errors import BadModelError, BlockpoolError, ModelNotFoundError, StoreError
from ...prefix.opening import weights_in
from .provider import ModelKey

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "*.tiktoken", "tokenizer_config.json")


def inspect(key: ModelKey, trusts_code: bool = False) -> int:
    """Bytes of the weights of a model with its draft and adapter. A hub id is downloaded first, where it is not yet.

    Raises ModelNotFoundError if there is none, BadModelError if its files are not what mlx-lm loads, or more than fits.
    """
    folders = [folder_of(key.model)] if key.draft is None else [folder_of(key.model), folder_of(key.draft)]
    adapter = None if key.adapter is None else Path(key.adapter)
    if adapter is not None and not adapter.is_dir():
        raise ModelNotFoundError(f"Found no adapter at {adapter}.")
    size = sum(_weights(folder, trusts_code) for folder in folders)
    try:
        for folder in folders:
            weights_in(folder, adapter if folder is folders[0] else None)
    except StoreError as error:
        raise BadModelError(str(error)) from error
    # What a device recommends may be exceeded, at a price; what there is may not.
    total = max(machine.memory_bytes(), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    if size > total:
        raise BadModelError(f"The weights of {key.model} take {size} bytes; this machine has {total}.")
    return size


def folder_of(model: str) -> Path:
    """Raises ModelNotFoundError."""
    try:
        folder = Path(_download(model))
    except (OSError, ValueError) as error:
        said = " ".join(str(error).split())
        raise ModelNotFoundError(f"Found no model {model}: neither a folder nor a model on the hub. {said}") from error
    if not (folder / "config.json").is_file():
        raise ModelNotFoundError(f"Found no config.json in {folder}; needed a model's folder.")
    return folder


def _weights(folder: Path, trusts_code: bool) -> int:
    """Bytes of the weights in a folder that has all that mlx-lm asks for. Raises BadModelError."""
    try:
        found = modelfile.find(str(folder))
    except BlockpoolError as error:
        raise BadModelError(str(error)) from error
    _check_type(folder, found.config, trusts_code)
    if not any(any(folder.glob(pattern)) for pattern in TOKENIZERS):
        raise BadModelError(f"Found no tokenizer in {folder}; needed one of {', '.join(TOKENIZERS)}.")
    # Those that mlx-lm loads, whatever an index says.
    return sum(path.stat().st_size for path in folder.glob("model*.safetensors"))


def _check_type(folder: Path, config: dict[str, Any], trusts_code: bool) -> None:
    if config.get("model_file") is not None:
        if not trusts_code:
            raise BadModelError(f"{folder} brings code of its own; needed --trust-remote-code to run it.")
        return
    try:
        _get_classes(config)
    except (KeyError, TypeError, ValueError, AttributeError, SystemExit) as error:
        # Some model files call exit() where a package is missing.
        raise BadModelError(f"{folder}: mlx-lm knows no model of type {config.get('model_type')!r}: {error}") from error
