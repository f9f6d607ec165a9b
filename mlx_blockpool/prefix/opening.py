"""Opens the prompt store of a model: the one place that says under which name its records are kept.

Server and command line both come here, so that one finds what the other wrote.
"""

from __future__ import annotations

from pathlib import Path

from .. import __version__
from ..config import StoreConfig
from ..errors import StoreError
from ..spec import ModelCacheSpec
from ..store.identity import identity, namespace
from ..store.record import VERSION
from ..store.store import PromptStore
from .stored import naming


def open_store(
    config: StoreConfig, model_folder: Path, adapter_folder: Path | None, spec: ModelCacheSpec, model_id: str
) -> PromptStore:
    """The store of the weights in a model folder, with an adapter or without. `model_id` is for people to read.

    Raises StoreError if the weights cannot be told from others.
    """
    weights = weights_in(model_folder, adapter_folder)
    bits = config.bits or 0
    about = {
        "model_id": model_id,
        "adapter": None if adapter_folder is None else adapter_folder.name,
        "weights": weights,
        "spec": spec.fingerprint(),
        "dtype": spec.dtype,
        "bits": bits,
        "format": VERSION,
        "created_by": f"mlx-blockpool {__version__}",
    }
    name = namespace(weights, spec.fingerprint(), spec.dtype, f"bits {bits}", f"format {VERSION}")
    return PromptStore(config, name, naming, about)


def weights_in(model_folder: Path, adapter_folder: Path | None) -> str:
    """The name of the weights in a model folder with an adapter or without. Raises StoreError."""
    try:
        return identity(model_folder, adapter_folder)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        folders = model_folder if adapter_folder is None else f"{model_folder} and {adapter_folder}"
        raise StoreError(
            f"Cannot read the weights in {folders}: {error}. Needed safetensors files and a config.json that mlx-lm loads."
        ) from error
