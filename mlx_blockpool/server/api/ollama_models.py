"""The models of a server as Ollama's clients see them: names, sizes and what each can do.

Reads configs and file sizes; the model need not be loaded. Runs on the socket's thread.
"""

from __future__ import annotations

import hashlib
import time
from datetime import UTC, datetime
from typing import Any

from ...errors import BlockpoolError
from ...mlx_lm_compat import ModelDescription
from ...model_files.modelfile import ModelFile, find, local_folder, positions_of, weights_of
from ...spec import SAFETENSORS, bytes_of
from ..bodies import Json
from ..images import processor_of
from ..models.catalog import DEFAULT
from ..models.http import ModelsEndpoint
from ..prompts.job import TokenizerJob

# When a model that stays loaded is said to expire, in seconds from now.
NEVER_SECONDS = 100 * 365 * 86400.0
FIGURES = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
}


def tags(generator: Any) -> Json:
    """All models that requests may name. One whose files cannot be read is left out."""
    known = generator.registry.catalog.ids()
    ids = [model["id"] for model in ModelsEndpoint(generator).models(0) if model["id"] != DEFAULT]
    found = ((id, _file(known.get(id, id))) for id in ids)
    return {"models": [_entry(id, file) for id, file in found if file is not None]}


def loaded(generator: Any) -> Json:
    """The models in memory."""
    entries = []
    for key, model in list(generator.registry.loaded.items()):
        file = _file(key.model)
        left = max(model.idle_seconds - (time.monotonic() - model.used), 0.0)
        size = model.weights_bytes + model.array_bytes
        id = generator.registry.catalog.id_of(key.model)
        entries.append(
            {
                **({} if file is None else _entry(id, file)),
                "size": size,
                "size_vram": size,
                "expires_at": written_now(time.time() + min(left, NEVER_SECONDS)),
                "context_length": model.positions or 0,
            }
        )
    return {"models": entries}


def show(generator: Any, name: str) -> Json:
    """Everything about one model.

    Raises as ModelRegistry.find(), and for files that cannot be read.
    """
    wanted = ModelDescription(name, DEFAULT, None)
    key = generator.registry.find(wanted)
    file = find(str(local_folder(key.model)))
    tokenizer = generator.preparation.convert(TokenizerJob(), wanted)
    can = {
        "tools": tokenizer.has_tools,
        "thinking": tokenizer.has_thinking,
        "vision": processor_of(file.config) is not None,
    }
    entry = _entry(name, file)
    return {
        "modelfile": f"FROM {generator.registry.catalog.id_of(key.model)}",
        "parameters": "",
        "template": tokenizer.template or "",
        "license": "",
        "details": entry["details"],
        "model_info": _info(file),
        "capabilities": ["completion", *(name for name, has in can.items() if has)],
        "modified_at": entry["modified_at"],
    }


def _file(model: str) -> ModelFile | None:
    try:
        return find(str(local_folder(model)))
    except (BlockpoolError, OSError, ValueError):
        return None


def _entry(id: str, file: ModelFile) -> Json:
    """A model in a list. The digest is another one once a file of the model has changed."""
    stamps = sorted(
        (path.name, path.stat().st_size, path.stat().st_mtime_ns)
        for path in file.path.parent.iterdir()
        if path.is_file()
    )
    return {
        "name": id,
        "model": id,
        "modified_at": written_now(max(stamp[2] for stamp in stamps) / 1e9),
        "size": sum(size for _, size, _ in stamps),
        "digest": hashlib.sha256(repr(stamps).encode()).hexdigest(),
        "details": _details(file),
    }


def _details(file: ModelFile) -> Json:
    count, level = _parameters(file)
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": file.model_type,
        "families": [file.model_type],
        "parameter_size": _short(count),
        "quantization_level": level,
    }


def _parameters(file: ModelFile) -> tuple[int, str]:
    """About how many parameters the weights have, by their bytes; and their quantisation."""
    text = _text_part(file)
    quantised: Any = file.config.get("quantization")
    size = weights_of(file).bytes or 0
    if isinstance(quantised, dict) and isinstance(bits := quantised.get("bits"), int) and bits > 0:
        group = quantised.get("group_size")
        # A scale and a bias of 16 bits for each group.
        return int(
            size * 8 / (bits + (32 / group if isinstance(group, int) and group > 0 else 0))
        ), f"{bits}-bit"
    name = SAFETENSORS.get(str(text.get("torch_dtype", text.get("dtype", ""))), "BF16")
    return size // bytes_of(name), name


def _short(count: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if count >= size:
            return f"{count / size:.1f}{unit}"
    return str(count)


def _text_part(file: ModelFile) -> Json:
    """The part of a config that describes the language model."""
    text = file.config.get("text_config")
    return file.config | text if isinstance(text, dict) else file.config


def _info(file: ModelFile) -> Json:
    """The figures of a config under the names that Ollama's clients read."""
    kind, text = file.model_type, _text_part(file)
    figures = {name: text.get(key) for name, key in FIGURES.items()} | {
        "context_length": positions_of(file.config)
    }
    return {
        "general.architecture": kind,
        "general.parameter_count": _parameters(file)[0],
        **{f"{kind}.{name}": value for name, value in figures.items() if isinstance(value, int)},
    }


def written_now(seconds: float | None = None) -> str:
    """A time as Ollama writes it: now, or `seconds` after 1970."""
    moment = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return moment.isoformat().replace("+00:00", "Z")
