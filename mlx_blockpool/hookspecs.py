"""The hooks that a plugin may implement."""

from __future__ import annotations

from typing import Any

import pluggy

from .drafts.draft import SourceFactory
from .messages import Normaliser
from .spec import ModelCacheSpec

hookspec = pluggy.HookspecMarker("mlx_blockpool")
hookimpl = pluggy.HookimplMarker("mlx_blockpool")


@hookspec(firstresult=True)
def model_cache_spec(model: Any, config: dict[str, Any], model_id: str) -> ModelCacheSpec | None:
    """Describe the caches of one model, or return None to leave it to another provider.

    `config` is the model's config.json, and `model` the loaded mlx-lm model, or None if only its config.json is available.
    The last registered plugin is called first: an installed plugin overrides a bundled one.
    """


@hookspec
def prompt_normalisers() -> list[Normaliser]:  # type: ignore[empty-body]
    """Normalisers for volatile parts of prompts; each is off unless a user names it or it is_default."""


@hookspec
def draft_sources(model: Any, config: dict[str, Any]) -> list[SourceFactory]:  # type: ignore[empty-body]
    """Functions that make a draft source for each request from its prompt, or None; called once for each loaded model.

    `model` is the loaded mlx-lm model, and `config` its config.json. The functions and their sources are called between the steps
    of all requests: slow ones are given up once their call returns, and one that never returns holds up the server.
    """
