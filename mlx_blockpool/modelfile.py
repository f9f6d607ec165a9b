"""A model's config.json, its spec and what its weights take in memory, before anything of it is loaded.

Reads config.json, the index of the weights and the first 8 bytes of their files. Does not know what is planned with it.
"""

from __future__ import annotations

import importlib
import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from . import mlx_lm_compat
from .calculator import Weights
from .claims import MAX_CONFIG_BYTES, MAX_INDEX_BYTES, check_claims, read_json
from .demo import model_path
from .errors import BadModelError, BlockpoolError, PluginError, SpecError
from .plugins import spec_from_config
from .spec import FullLayer, ModelCacheSpec, leaves_of

INDEX = "model.safetensors.index.json"
# Where configs say how many positions a model has, and how its rope is scaled.
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
    """`name` as it was given; `path` of its config.json, and what is in it."""

    name: str
    path: Path
    config: dict[str, Any]

    @property
    def model_type(self) -> str:
        return str(self.config.get("model_type", ""))

    @property
    def longest_context(self) -> int | None:
        """The tokens that config.json says the model is made for, where it does."""
        return positions_of(self.config)


def positions_of(config: dict[str, Any]) -> int | None:
    """The most positions that a model has by its config.json, its rope scaling included; None: it names no limit.

    Where a scaled model may be meant, the larger reading counts: a limit that is too low would refuse what the model can do.
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
    original = _count(scaling.get("original_max_position_embeddings", config.get("original_max_position_embeddings")))
    factor = scaling.get("factor")
    if not isinstance(factor, int | float) or isinstance(factor, bool) or not 1 <= factor <= MOST_SCALING:
        return positions
    if original is not None:
        return max(positions, int(original * factor))
    # Without the original one, these multiply what the config says; Gemma 3, llama3 and longrope say it multiplied already.
    multiplies = kind in ("linear", "dynamic", "yarn") and not model_type.startswith("gemma3")
    return int(positions * factor) if multiplies else positions


def _count(found: Any) -> int | None:
    return found if type(found) is int and found > 0 else None


def find(model: str) -> ModelFile:
    """`demo`, a model folder, a config.json or the id of a downloaded model. Raises BlockpoolError if there is none."""
    path = _config_path(model)
    return ModelFile(model, path, _read_config(path))


def spec_of(found: ModelFile) -> ModelCacheSpec:
    """Raises SpecError if config.json says too little, or nobody knows the model."""
    try:
        check_claims(found.config, found.name)
        return _checked(spec_from_config(found.config, found.name))
    except (SpecError, PluginError, BadModelError) as error:
        # mlx-lm's own messages may have several lines.
        said = " ".join(str(error).split()).rstrip(".")
        raise SpecError(
            f"{said}. Needed a config.json that describes an mlx-lm model; check {found.path} or install a plugin for it."
        ) from error


def weights_of(found: ModelFile) -> Weights:
    """From the files if they are all there, else from their index, else an estimate from config.json."""
    if found.path.name == "config.json":
        folder = found.path.parent
        index = _read_index(folder / INDEX)
        files = {path.name: size for path in folder.glob("model*.safetensors") if (size := _data_bytes(path)) is not None}
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
        # Of a model that mlx-lm does not build a plugin may still know the caches: the plan goes on without its weights.
        return Weights()
    return Weights(size, "estimate", parameters, bits)


def _data_bytes(path: Path) -> int | None:
    """Bytes of the arrays in a safetensors file; None if it is none, such as a pointer that git-lfs left."""
    try:
        if not path.is_file():
            return None
        with open(path, "rb") as file:
            header = int.from_bytes(file.read(8), "little")
        size = os.path.getsize(path) - 8 - header
    except OSError:
        # The hub's cache keeps links to what it has dropped.
        return None
    return size if size > 0 else None


def _read_index(path: Path) -> dict[str, Any]:
    """Its metadata and weight_map; empty if they are not there."""
    try:
        found = read_json(path, MAX_INDEX_BYTES)
    except (OSError, ValueError):
        return {}
    parts = {key: found.get(key) for key in ("metadata", "weight_map")} if isinstance(found, dict) else {}
    return parts if parts and all(isinstance(part, dict) for part in parts.values()) else {}


def local_folder(name: str) -> Path:
    """A model's folder: a whole path as it is, or where the hub's cache has the model of an id. Nothing is downloaded.

    What is no whole path is an id, also where a folder of that name exists. Raises OSError or ValueError for a model that the
    cache lacks.
    """
    path = Path(name)
    return path if path.is_absolute() else Path(mlx_lm_compat.hf_repo_to_path(name))


def _config_path(model: str) -> Path:
    path = Path(model_path(model))
    path = path / "config.json" if os.path.isdir(path) else path
    if os.path.isfile(path):
        return path
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", model) and not os.path.isdir(path.parent):
        return _downloaded(model)
    raise BlockpoolError(
        f"Found no file {path}; needed a model folder or its config.json. Give --model the path of one, "
        "the id of a downloaded model, or demo."
    )


def _downloaded(model: str) -> Path:
    """Where the hub's cache keeps the config.json of a model, of which the rest need not be there."""
    from huggingface_hub import try_to_load_from_cache

    try:
        path = try_to_load_from_cache(model, "config.json")
    except ValueError:
        # Not even an id.
        path = None
    if not isinstance(path, str):
        raise BlockpoolError(
            f"Found neither a folder {model} nor a downloaded model of that id; needed its config.json. "
            f"To plan before the download get that alone: hf download {model} config.json"
        )
    return Path(path)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = read_json(path, MAX_CONFIG_BYTES)
    except (OSError, ValueError) as error:
        raise BlockpoolError(f"Cannot read {path}: {error}. Needed the config.json of a model.") from error
    if not isinstance(config, dict):
        raise BlockpoolError(f"Found a {type(config).__name__} in {path}; needed the config.json of a model, a JSON object.")
    return config


def _checked(spec: ModelCacheSpec) -> ModelCacheSpec:
    """Providers copy figures from config.json as they are."""
    for index, layer in enumerate(spec.layers):
        for leaf in leaves_of(layer):
            figures = asdict(leaf) if isinstance(leaf, FullLayer) else {}
            positive = figures.get("max_size", 1), figures.get("chunk_size", 1)
            if not all(type(n) is int and n >= 0 for n in figures.values()) or 0 in positive:
                raise SpecError(f"{spec.model_id}: found {leaf} as layer {index}, whose figures are no sizes")
    return spec
