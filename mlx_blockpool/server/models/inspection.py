"""Checks the files of a model before another model is unloaded for it.

Runs on any thread and makes no arrays.
"""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, snapshot_download
from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS

from ...config import ModelsConfig
from ...errors import BadModelError, BlockpoolError, ModelNotFoundError, StoreError
from ...formatting import line_of
from ...model_files import check, device, modelfile
from ...plugins import model_classes, plugin_classes
from ...store.identity import check_weights
from ..provider import ModelKey
from .catalog import Catalog, is_downloaded, is_folder

log = logging.getLogger(__name__)

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "*.tiktoken", "tokenizer_config.json")


def inspect(
    key: ModelKey, catalog: Catalog, config: ModelsConfig, trusts_code: bool = False
) -> int:
    """Bytes of the weights of a model with its draft and adapter. A hub id is downloaded first if
    it may be.

    Raises ModelNotFoundError if it does not exist, and BadModelError if mlx-lm cannot load its
    files or they do not fit.
    """
    folders = [
        folder_of(name, catalog, config.download_seconds)
        for name in (key.model, key.draft)
        if name is not None
    ]
    adapter = None if key.adapter is None else Path(key.adapter)
    if adapter is not None:
        if not adapter.is_dir():
            raise ModelNotFoundError(f"There is no adapter at {adapter}.")
        check.check_folder(adapter)
    size = sum(_weights(folder, trusts_code) for folder in folders)
    try:
        for folder in folders:
            check_weights(folder, adapter if folder is folders[0] else None)
    except StoreError as error:
        raise BadModelError(str(error)) from error
    # A process may exceed what the device recommends, but not the machine's memory.
    total = max(device.memory_bytes(), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    if size > total:
        raise BadModelError(
            f"The weights of {key.model} take {size} bytes; this machine has {total}."
        )
    return size


def folder_of(model: str, catalog: Catalog, seconds: float) -> Path:
    """The folder of a model, downloaded if it is not on disk and may be.

    Raises ModelNotFoundError.
    """
    if is_folder(model) or is_downloaded(model):
        folder = modelfile.local_folder(model)
    elif catalog.may_download(model):
        modelfile.check_form(model)
        folder = _download(model, seconds)
    else:
        raise ModelNotFoundError(
            f"{model} is not downloaded. Download it, or start the server with --allow-downloads."
        )
    if not (folder / "config.json").is_file():
        modelfile.check_form(model)
        if not folder.exists():
            raise ModelNotFoundError(f"{folder} does not exist.")
        raise ModelNotFoundError(f"{folder} is not the folder of a model: it has no config.json.")
    return folder


def _download(model: str, seconds: float) -> Path:
    """Download a model from the hub, which has to answer within `seconds`: on a dead network a
    client would wait for minutes.
    """
    if constants.HF_HUB_OFFLINE:
        raise ModelNotFoundError(
            f"{model} is not downloaded, and HF_HUB_OFFLINE is set. Download it first."
        )
    _ask_hub(model, seconds)
    log.info("downloading %s", model)
    try:
        return Path(snapshot_download(model, allow_patterns=DEFAULT_ALLOW_PATTERNS))
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelNotFoundError(f"Cannot download {model}: {line_of(error)}.") from error


def _ask_hub(model: str, seconds: float) -> None:
    """Raises ModelNotFoundError unless the hub answers in time that it has the model."""
    failure: list[Exception] = [TimeoutError(f"it did not answer within {seconds:g} seconds")]

    def ask() -> None:
        try:
            HfApi().model_info(model, timeout=seconds)
            failure.clear()
        except Exception as error:
            # The top of a thread, and any error of an HTTP library.
            failure[:] = [error]

    # The system's lookup of host names takes no time limit.
    thread = threading.Thread(target=ask, name="hub", daemon=True)
    thread.start()
    thread.join(seconds)
    if failure:
        raise ModelNotFoundError(
            f"{model} is neither a folder nor a model on the hub: {line_of(failure[0])}. Check the "
            "spelling and the network, or name the folder of a model."
        )


def _weights(folder: Path, trusts_code: bool) -> int:
    """Bytes of the weights in a folder, whose files are checked. Raises BadModelError."""
    config = check.check_config(folder, folder.name)
    _check_type(folder, config, trusts_code)
    if not any(any(folder.glob(pattern)) for pattern in TOKENIZERS):
        raise BadModelError(
            f"{folder} has no tokenizer: it needs one of the files {', '.join(TOKENIZERS)}. Copy "
            "it from the model's repository."
        )
    return sum(path.stat().st_size for path in folder.glob(check.WEIGHTS))


def _check_type(folder: Path, config: dict[str, Any], trusts_code: bool) -> None:
    own_code = config.get("model_file")
    try:
        if own_code is None:
            model_classes(config)
        elif trusts_code or plugin_classes(config) is not None:
            own_code = None
    except BlockpoolError as error:
        # Plugins raise any of them.
        raise BadModelError(f"{folder}: {error}") from error
    if own_code is not None:
        raise BadModelError(
            f"{folder} brings its own code ({own_code!r}), which only runs with "
            f"--trust-remote-code, and no installed plugin has model_type "
            f"{config.get('model_type')!r}."
        )
