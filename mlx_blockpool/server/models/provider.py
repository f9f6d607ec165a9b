"""One model's files in memory: mlx-lm's ModelProvider in two steps, so that the old model goes only for one that loads.

Owned by the generation thread.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.utils import load_config

from ...demo import NAMES, model_path
from ...errors import BlockpoolError
from ...mlx_lm_compat import ModelProvider, load, rebind
from ...modelfile import local_folder
from ...store.identity import Stamps, stamps_of


class ModelKey(NamedTuple):
    """What is loaded together: folder or id of the model, folder of its adapter, folder or id of its draft model."""

    model: str
    adapter: str | None = None
    draft: str | None = None


class BlockpoolModelProvider(ModelProvider):  # type: ignore[misc]
    """mlx-lm's provider for one model; the bundled ones go by their names (demo.NAMES)."""

    def __init__(self, cli_args: Any) -> None:
        super().__init__(cli_args)
        if self.is_distributed:
            raise BlockpoolError("Found a distributed run; the block pool serves one machine. Use mlx_lm.server without it.")
        self.config: dict[str, Any] = {}
        self.folder = Path()
        self.stamps: Stamps = {}
        # The name of the weights that are loaded, once somebody has needed it; made by one thread at a time.
        self.weights_name: str | None = None
        self.naming = threading.Lock()
        self._model_map |= {name: model_path(name) for name in NAMES}

    @property
    def name(self) -> str:
        """The model's name, for people."""
        return Path(str(self.model_key[0])).name

    def another(self) -> BlockpoolModelProvider:
        """One with the same options and no model."""
        return BlockpoolModelProvider(self.cli_args)

    @property
    def public_name(self) -> str:
        """What clients and files that leave this machine may see of it: the hub's id, or the folder's name."""
        return self.name if Path(str(self.model_key[0])).is_absolute() else str(self.model_key[0])

    @property
    def adapter_folder(self) -> Path | None:
        adapter = self.model_key[1]
        return Path(adapter) if adapter else None

    def default_key(self) -> ModelKey | None:
        """The model that the server was started with; None: it was started without."""
        model, adapter, draft = self._model_map["default_model"], self.cli_args.adapter_path, self.cli_args.draft_model
        if model is None:
            return None
        return ModelKey(canonical(self._model_map.get(model, model)), adapter and canonical(adapter), draft and canonical(draft))

    def prepare(self, key: ModelKey) -> None:
        """Everything but the weights themselves: config, tokenizer, and the model with all arrays checked and not yet read.

        Raises whatever mlx-lm and the model's files raise.
        """
        folder = local_folder(key.model)
        config = load_config(folder)
        # Before mlx-lm opens the files: what replaces one of them later is known by it.
        self.stamps = stamps_of(folder, Path(key.adapter) if key.adapter else None)
        rebind(ModelProvider._load, load=_load_lazily)(self, *key)
        self.config, self.folder = config, folder

    def weights(self) -> list[mx.array]:
        models = [model for model in (self.model, self.draft_model) if model is not None]
        return [array for model in models for _, array in tree_flatten(model.parameters())]

    def read(self, piece_bytes: int) -> Iterator[int]:
        """Read the weights of a prepared model, about `piece_bytes` at a time. Yields the bytes read so far."""
        done = told = 0
        piece: list[mx.array] = []
        for array in self.weights():
            piece.append(array)
            done += array.nbytes
            if done - told >= piece_bytes:
                mx.eval(piece)
                piece.clear()
                told = done
                yield done
        mx.eval(piece)
        yield done


def _load_lazily(name: str, **options: Any) -> Any:
    # mlx-lm loads drafts without options; code in their folders is not to be run either.
    options.setdefault("tokenizer_config", {"trust_remote_code": False})
    return load(str(local_folder(name)), lazy=True, **options)


def canonical(name: str) -> str:
    """A folder's one path; a hub id as it is."""
    path = Path(name)
    return str(path.resolve()) if path.exists() else name
