"""A model at hand for its tokenizer, shapes and identity, and its prefixes in a prompt store. Its weights stay on disk."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import mlx.core as mx
from mlx_lm.utils import load

from .. import claims
from ..config import KVBits, ModelsConfig, PoolConfig, StoreConfig
from ..demo import model_path
from ..errors import BadModelError, StoreError
from ..formatting import line_of
from ..kv.arena import KVArena
from ..kv.factory import quantised
from ..modelfile import local_folder
from ..plugins import spec_of_model
from ..spec import blocks_for
from ..store.identity import identity
from ..store.scan import Listing
from ..tier.cache import TieredPrefixCache
from ..tier.opening import digests_of, open_store
from .cache_file import ids_in

# A command waits for the disk as long as it takes.
FLUSH_SECONDS = 3600.0

# Token ids, or the text that the model's tokenizer makes them of; None: those in a file's metadata.
Prompt: TypeAlias = Sequence[int] | str | None


class Source:
    """A model, and the store in `root` that has its prefixes.

    `bits`, `kv`: of the server's store and of its pool. `store_bytes` None: the default, or what the store holds already if that
    is more. Raises StoreError for a model that is not there or cannot be loaded, or whose blocks cannot be in these bits.
    """

    def __init__(
        self,
        model: str,
        root: Path,
        adapter: Path | None = None,
        bits: int | None = None,
        store_bytes: int | None = None,
        kv: KVBits | None = None,
    ) -> None:
        self.name = model_path(model)
        self.folder = _model_folder(self.name)
        self.root = root
        self.adapter = adapter
        self._check()
        held = sum(file.size for file in Listing(root).records)
        limit = max(StoreConfig.store_bytes, held) if store_bytes is None else store_bytes
        self.config = StoreConfig(root, limit, bits, flush_seconds=FLUSH_SECONDS)
        self.weights = identity(self.folder, adapter, digests_of(self.config))
        self.model, self.tokenizer, config = self._load()
        try:
            self.spec = quantised(spec_of_model(self.model, config, Path(self.name).name), kv)
        except ValueError as error:
            raise StoreError(f"{error} Leave out --kv-bits.") from error

    def open(self, tokens: int) -> TieredPrefixCache:
        """The prefixes in the store, and a pool for one sequence of this many tokens and one block more."""
        # A window that is resumed needs room for two rings, and a state for its copy.
        blocks = max([blocks_for(tokens) + 1, *(2 * (group.layer.max_blocks or 0) for group in self.spec.groups)])
        states = 4 * self.spec.fixed_bytes_per_agent()
        pool_bytes = blocks * sum(self.spec.bytes_per_block(group) for group in self.spec.groups) + states
        arena = KVArena(self.spec, pool_bytes, PoolConfig(slabs=1, slab_blocks=blocks, state_bytes=states))
        # Runs are joined when they are saved; no lookup needs to copy them into one.
        arena.ragged = True
        store = open_store(self.config, self.folder, self.adapter, self.spec, Path(self.name).name, self.weights)
        prefix = TieredPrefixCache(arena, store=store)
        if store.problem is not None:
            store.close()
            raise StoreError(
                f"Cannot use the prompt store: {store.problem}. Give --store-dir a folder that can be read and written."
            )
        return prefix

    def vocab_size(self) -> int:
        """How many tokens the model has words for. Nothing is computed."""
        return int(self.model(mx.zeros((1, 1), mx.int32)).shape[-1])

    def tokens(self, prompt: Prompt) -> list[int] | None:
        if not isinstance(prompt, str):
            return None if prompt is None else list(prompt)
        # As mlx-lm does it with a prompt that may have its first special token already.
        bos = self.tokenizer.bos_token
        return list(self.tokenizer.encode(prompt, add_special_tokens=bos is None or not prompt.startswith(bos)))

    def _check(self) -> None:
        """Raises StoreError for files that mlx-lm cannot load. identity() and load() name a missing config.json."""
        try:
            if (self.folder / "config.json").exists():
                claims.check_model(self.folder, self.name, ModelsConfig.build_seconds)
        except (BadModelError, OSError, ValueError) as error:
            raise self._cannot_load(error) from error

    def _load(self) -> tuple[Any, Any, dict[str, Any]]:
        try:
            return load(  # type: ignore[no-any-return]
                str(self.folder),
                adapter_path=None if self.adapter is None else str(self.adapter),
                # Code in the folder is not run.
                tokenizer_config={"trust_remote_code": False},
                lazy=True,
                return_config=True,
            )
        except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
            raise self._cannot_load(error) from error

    def _cannot_load(self, error: Exception) -> StoreError:
        return StoreError(f"Cannot load {self.name}: {line_of(error)}. Give a model folder that mlx-lm loads.")


def prompt_of(ids: str | None, file: Path | None) -> Prompt:
    """From '1,2,3' or a text file. Raises StoreError."""
    if ids is not None:
        try:
            return ids_in(ids)
        except ValueError as error:
            raise StoreError(f"{ids!r} are no token ids. Write whole numbers such as --tokens 1,2,3.") from error
    try:
        return None if file is None else file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise StoreError(f"Cannot read {file}: {line_of(error)}. Give --prompt-file a text file.") from error


def _model_folder(name: str) -> Path:
    """A folder, or where the hub's cache has the model of an id."""
    try:
        folder = local_folder(os.path.abspath(name) if os.path.isdir(name) else name)
        if folder.is_dir():
            return folder
    except (OSError, ValueError):
        pass
    raise StoreError(f"There is no folder {name}. Give one with a model, or the id of a downloaded model.")
