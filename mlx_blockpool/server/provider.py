"""Which model is loaded: mlx-lm's ModelProvider, with its config at hand. Owned by the generation thread."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlx_lm.server import ModelProvider
from mlx_lm.utils import _download, load_config

from ..demo import model_path
from ..errors import BlockpoolError


class BlockpoolModelProvider(ModelProvider):  # type: ignore[misc]
    """mlx-lm's provider; `demo` names the bundled model, and check() finds a model before the old one has to go."""

    def __init__(self, cli_args: Any) -> None:
        super().__init__(cli_args)
        if self.is_distributed:
            raise BlockpoolError("Found a distributed run; the block pool serves one machine. Use mlx_lm.server without it.")
        self.config: dict[str, Any] = {}
        self.folder = Path()
        self._model_map["demo"] = model_path()

    def check(self, wanted: Any) -> None:
        """Raises ValueError or OSError if the model that a request describes cannot be found; changes nothing."""
        model = self._model_map.get(wanted.model, wanted.model)
        if model is None:
            raise ValueError("The request names no model and the server was started without --model.")
        _download(model)
        adapter = self._adapter_map.get(wanted.model, wanted.adapter)
        if adapter is not None and not Path(adapter).exists():
            raise FileNotFoundError(f"Found no adapter at {adapter}.")

    def _load(self, model_path: str, adapter_path: str | None = None, draft_model_path: str | None = None) -> None:
        folder = Path(_download(model_path))
        config = load_config(folder)
        super()._load(model_path, adapter_path, draft_model_path)
        self.config, self.folder = config, folder

    def has(self, wanted: Any) -> bool:
        """Whether the model that a request describes is the one that is loaded."""
        adapter = self._adapter_map.get(wanted.model, wanted.adapter)
        model = self._model_map.get(wanted.model, wanted.model)
        draft = self._draft_model_map.get(wanted.draft, wanted.draft)
        return self.model is not None and bool(self.model_key == (model, adapter, draft))
