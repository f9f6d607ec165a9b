"""The hooks that a plugin may implement."""

from __future__ import annotations

from typing import Any

import pluggy

from .messages import Normaliser
from .spec import ModelCacheSpec

hookspec = pluggy.HookspecMarker("mlx_blockpool")
hookimpl = pluggy.HookimplMarker("mlx_blockpool")


@hookspec(firstresult=True)
def model_cache_spec(model: Any, config: dict[str, Any], model_id: str) -> ModelCacheSpec | None:
    """Describe the caches of one model, or return None to leave it to another provider.

    `model` is the loaded mlx-lm model, or None where only its config is at hand; `config` is its config.json.
    The last plugin registered is asked first: an installed plugin overrides a bundled one.
    """


@hookspec
def prompt_normalisers() -> list[Normaliser]:  # type: ignore[empty-body]
    """Ways to keep the volatile parts of a prompt the same; each is off unless a user asks for it by name or it is_default."""
