"""A model's files before it is loaded: config.json, the spec that it describes, and the size of the
weights.

Reads config.json, the index of the weights and the first 8 bytes of their files.
"""

from __future__ import annotations

import importlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import mlx_lm_compat
from ..demo import NAME, model_path
from ..errors import (
    BadModelError,
    BlockpoolError,
    PluginError,
    SpecError,
    UnknownModelTypeError,
)
from ..formatting import line_of, nearest
from ..plugins import spec_from_config
from ..spec import FullLayer, ModelCacheSpec, figures_of, leaves_of
from .calculator import Weights
from .check import MAX_INDEX_BYTES, WEIGHTS, check_layers, read_config, read_json

# mlx-lm's server lists a downloaded model that has these files.
HUB_FILES = {"config.json", "model.safetensors.index.json", "tokenizer_config.json"}
INDEX = "model.safetensors.index.json"
# The keys of configs for the number of positions, and for the scaling of rope.
POSITIONS = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_sequence_length",
    "max_seq_len",
    "seq_length",
    "max_seq_length",
)
SCALINGS = ("rope_scaling", "rope_parameters")
# Beyond any real factor.
MOST_SCALING = 10_000


@dataclass(frozen=True)
class ModelFile:
    """`name` as the user gave it, `path` of the config.json, and its content."""

    name: str
    path: Path
    config: dict[str, Any]

    @property
    def model_type(self) -> str:
        return str(self.config.get("model_type", ""))

    @property
    def longest_context(self) -> int | None:
        """The longest context according to config.json, or None."""
        return positions_of(self.config)


def positions_of(config: dict[str, Any]) -> int | None:
    """The most positions of a model by its config.json, with rope scaling. Returns None if
    config.json has no limit.

    If a scaling can be read in two ways, the larger limit counts: a lower one would reject requests
    that the model can serve.
    """
    text = config.get("text_config")
    for part in (text if isinstance(text, dict) else {}, config):
        for key in POSITIONS:
            if (positions := _count(part.get(key))) is not None:
                return _scaled(part, positions, str(config.get("model_type", "")))
    return None


def _scaled(config: dict[str, Any], positions: int, model_type: str) -> int:
    scaling = next((part for key in SCALINGS if isinstance(part := config.get(key), dict)), {})
    kind = scaling.get("rope_type", scaling.get("type"))
    original = _count(
        scaling.get(
            "original_max_position_embeddings", config.get("original_max_position_embeddings")
        )
    )
    factor = scaling.get("factor")
    if (
        not isinstance(factor, int | float)
        or isinstance(factor, bool)
        or not 1 <= factor <= MOST_SCALING
    ):
        return positions
    if original is not None:
        return max(positions, int(original * factor))
    # Without the original number, these kinds multiply the config's number; Gemma 3, llama3 and
    # longrope have multiplied it.
    multiplies = kind in ("linear", "dynamic", "yarn") and not model_type.startswith("gemma3")
    return int(positions * factor) if multiplies else positions


def _count(found: Any) -> int | None:
    return found if type(found) is int and found > 0 else None


def find(model: str) -> ModelFile:
    """`demo`, a model folder, a config.json or the id of a downloaded model.

    Raises BlockpoolError if there is none.
    """
    path = _config_path(model)
    return ModelFile(model, path, read_config(path))


def spec_of(found: ModelFile) -> ModelCacheSpec:
    """The spec by config.json.

    Raises SpecError if it says too little, or no plugin knows the model.
    """
    try:
        check_layers(found.config, found.name)
        return _checked(spec_from_config(found.config, found.name))
    except UnknownModelTypeError:
        raise
    except (SpecError, PluginError, BadModelError) as error:
        raise SpecError(
            f"{line_of(error)}. Check {found.path}, or install a plugin that describes the model."
        ) from error


def weights_of(found: ModelFile) -> Weights:
    """The size of the weights from the files if they are complete, else from their index, else
    an estimate.
    """
    if found.path.name == "config.json":
        folder = found.path.parent
        index = _read_index(folder / INDEX)
        files = {
            path.name: size
            for path in folder.glob(WEIGHTS)
            if (size := _data_bytes(path)) is not None
        }
        if files and set(index["weight_map"].values() if index else files) <= set(files):
            return Weights(sum(files.values()), "files")
        total = index["metadata"].get("total_size") if index else None
        if isinstance(total, int | float) and total > 0:
            return Weights(int(total), "index")
    return _estimate(found.config)


def _estimate(config: dict[str, Any]) -> Weights:
    shapes = importlib.import_module("mlx_blockpool_plugins.shapes")
    try:
        size, parameters, bits = shapes.weight_bytes(json.loads(json.dumps(config)))
    except Exception:
        # A plugin may describe the caches of a model that mlx-lm cannot build: the plan has no
        # weights then.
        return Weights()
    return Weights(size, "estimate", parameters, bits)


def _data_bytes(path: Path) -> int | None:
    """Bytes of the arrays in a safetensors file; None for another file, such as a pointer of
    git-lfs.
    """
    try:
        if not path.is_file():
            return None
        with open(path, "rb") as file:
            header = int.from_bytes(file.read(8), "little")
        size = os.path.getsize(path) - 8 - header
    except OSError:
        # The hub's cache retains links to files that it has deleted.
        return None
    return size if size > 0 else None


def _read_index(path: Path) -> dict[str, Any]:
    """The metadata and weight_map of an index; empty if it lacks them."""
    try:
        found = read_json(path, MAX_INDEX_BYTES)
    except (OSError, ValueError):
        return {}
    parts = (
        {key: found.get(key) for key in ("metadata", "weight_map")}
        if isinstance(found, dict)
        else {}
    )
    return parts if parts and all(isinstance(part, dict) for part in parts.values()) else {}


def local_folder(name: str) -> Path:
    """A model's folder: an absolute path as it is, or the folder of an id in the hub's cache.
    Downloads nothing.

    A relative path is an id, even if such a folder exists. Raises OSError or ValueError for a model
    that the cache lacks.
    """
    path = Path(name)
    return path if path.is_absolute() else Path(mlx_lm_compat.hf_repo_to_path(name))


def downloaded() -> list[str]:
    """Ids of the models in the hub's cache that mlx-lm's server would list."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir().repos
    except CacheNotFound:
        return []
    return sorted(
        repo.repo_id
        for repo in repos
        if repo.repo_type == "model"
        and "main" in repo.refs
        and {file.file_path.name for file in repo.refs["main"].files} >= HUB_FILES
    )


def check_form(model: str) -> None:
    """Raises BadModelError for the name of a GGUF file or of a repository of such files."""
    if re.search(r"[-_./]gguf$", model, re.IGNORECASE):
        raise BadModelError(
            f"{model} has weights in the form GGUF, which mlx-lm does not read. Give a model in "
            "the form safetensors, such as its namesake of mlx-community on the hub."
        )


def _config_path(model: str) -> Path:
    path = Path(model_path(model))
    path = path / "config.json" if os.path.isdir(path) else path
    if os.path.isfile(path):
        check_form(str(path))
        return path
    check_form(model)
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", model) and not os.path.isdir(path.parent):
        return _downloaded(model)
    advice = (
        "Give --model the path of a model folder or its config.json, the id of a downloaded "
        "model, or demo."
    )
    near = nearest(model, [NAME, *downloaded()]) if "/" not in model else ""
    raise BlockpoolError(f"{path} does not exist. {near or advice}")


def _downloaded(model: str) -> Path:
    """The config.json of a model in the hub's cache, which may lack the model's other files."""
    from huggingface_hub import try_to_load_from_cache

    try:
        path = try_to_load_from_cache(model, "config.json")
    except ValueError:
        # The name is not a valid id.
        path = None
    if not isinstance(path, str):
        raise BlockpoolError(
            f"{model} is neither a folder nor the id of a downloaded model. "
            f"To plan before the download, get its config.json: hf download {model} config.json"
        )
    return Path(path)


def _checked(spec: ModelCacheSpec) -> ModelCacheSpec:
    """The spec. Raises SpecError if its sizes are invalid: providers copy them from config.json."""
    for index, layer in enumerate(spec.layers):
        for leaf in leaves_of(layer):
            figures = figures_of(leaf) if isinstance(leaf, FullLayer) else {}
            # TokenArrays have checked their own.
            figures.pop("more", None)
            positive = figures.get("max_size", 1), figures.get("chunk_size", 1)
            if not all(type(n) is int and n >= 0 for n in figures.values()) or 0 in positive:
                raise SpecError(
                    f"{spec.model_id}, layer {index}: sizes must be positive integers (got {leaf})"
                )
    return spec
