"""What can be told of a model from its files, before anything has to go for it. Runs on any thread and makes no arrays."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, snapshot_download
from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS

from ... import claims, modelfile, system
from ...config import ModelsConfig
from ...errors import BadModelError, BlockpoolError, ModelNotFoundError, StoreError
from ...mlx_lm_compat import get_classes
from ...store.identity import check_weights
from .catalog import Catalog, is_downloaded, is_folder
from .provider import ModelKey

log = logging.getLogger(__name__)

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "*.tiktoken", "tokenizer_config.json")


def inspect(key: ModelKey, catalog: Catalog, config: ModelsConfig, trusts_code: bool = False) -> int:
    """Bytes of the weights of a model with its draft and adapter. A hub id is downloaded first, where it is not yet and may be.

    Raises ModelNotFoundError if there is none, BadModelError if its files are not what mlx-lm loads, or more than fits.
    """
    names = [key.model] if key.draft is None else [key.model, key.draft]
    folders = [folder_of(name, catalog, config.download_seconds) for name in names]
    adapter = None if key.adapter is None else Path(key.adapter)
    if adapter is not None and not adapter.is_dir():
        raise ModelNotFoundError(f"Found no adapter at {adapter}.")
    if adapter is not None:
        claims.check_folder(adapter)
    size = sum(_weights(folder, config.build_seconds, trusts_code) for folder in folders)
    try:
        for folder in folders:
            check_weights(folder, adapter if folder is folders[0] else None)
    except StoreError as error:
        raise BadModelError(str(error)) from error
    # What a device recommends may be exceeded, at a price; what there is may not.
    total = max(system.memory_bytes(), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    if size > total:
        raise BadModelError(f"The weights of {key.model} take {size} bytes; this machine has {total}.")
    return size


def folder_of(model: str, catalog: Catalog, seconds: float) -> Path:
    """Where a model is: what is on disk first, and the hub where that is allowed. Raises ModelNotFoundError."""
    if is_folder(model) or is_downloaded(model):
        folder = modelfile.local_folder(model)
    elif catalog.may_download(model):
        folder = _download(model, seconds)
    else:
        raise ModelNotFoundError(f"Found no downloaded model {model}. Download it, or start the server with --allow-downloads.")
    if not (folder / "config.json").is_file():
        raise ModelNotFoundError(f"Found no config.json in {folder}; needed a model's folder.")
    return folder


def _download(model: str, seconds: float) -> Path:
    """Fetch a model from the hub, which has to answer within `seconds` first: a dead network would hold a client for minutes."""
    if constants.HF_HUB_OFFLINE:
        raise ModelNotFoundError(f"Found no downloaded model {model}, and HF_HUB_OFFLINE is set. Download it first.")
    _ask_hub(model, seconds)
    log.info("downloading %s", model)
    try:
        return Path(snapshot_download(model, allow_patterns=DEFAULT_ALLOW_PATTERNS))
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelNotFoundError(f"Cannot download {model}: {_line(error)}") from error


def _ask_hub(model: str, seconds: float) -> None:
    """Raises ModelNotFoundError unless the hub knows the model, and says so in time."""
    failure: list[Exception] = [TimeoutError(f"it did not answer within {seconds:g} seconds")]

    def ask() -> None:
        try:
            HfApi().model_info(model, timeout=seconds)
            failure.clear()
        except Exception as error:
            # The top of a thread: whatever an HTTP library raises.
            failure[:] = [error]

    # Names are looked up by the system, which knows no time limit.
    thread = threading.Thread(target=ask, name="hub", daemon=True)
    thread.start()
    thread.join(seconds)
    if failure:
        raise ModelNotFoundError(f"Found no model {model}: neither a folder nor a model on the hub. {_line(failure[0])}")


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def _weights(folder: Path, build_seconds: float, trusts_code: bool) -> int:
    """Bytes of the weights in a folder that has all that mlx-lm asks for. Raises BadModelError."""
    claims.check_folder(folder)
    try:
        config = modelfile.find(str(folder)).config
    except BlockpoolError as error:
        raise BadModelError(str(error)) from error
    _check_type(folder, config, trusts_code)
    if not any(any(folder.glob(pattern)) for pattern in TOKENIZERS):
        raise BadModelError(f"Found no tokenizer in {folder}; needed one of {', '.join(TOKENIZERS)}.")
    # Those that mlx-lm loads, whatever an index says.
    files = list(folder.glob("model*.safetensors"))
    if files:
        claims.check_claims(config, folder.name, claims.held_by(folder))
    if config.get("model_file") is None:
        claims.try_to_build(config, folder.name, build_seconds)
    return sum(path.stat().st_size for path in files)


def _check_type(folder: Path, config: dict[str, Any], trusts_code: bool) -> None:
    if config.get("model_file") is not None:
        if not trusts_code:
            raise BadModelError(f"{folder} brings code of its own; needed --trust-remote-code to run it.")
        return
    try:
        get_classes(config)
    except (KeyError, TypeError, ValueError, AttributeError, SystemExit) as error:
        # Some model files call exit() where a package is missing.
        raise BadModelError(f"{folder}: mlx-lm knows no model of type {config.get('model_type')!r}: {error}") from error
