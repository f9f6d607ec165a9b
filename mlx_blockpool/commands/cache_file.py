"""`mlx-blockpool store export` and `store import`: prefixes of a store as prompt-cache files of
mlx-lm, and back.

The operator is trusted: of a file is believed what its metadata says.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeAlias

import mlx.core as mx
from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache

from ..config import KVBits, PoolConfig, StoreConfig
from ..demo import model_path
from ..errors import StoreError
from ..formatting import Report, line_of
from ..kv.arena import KVArena
from ..kv.build import quantised
from ..kv.capabilities import RAGGED
from ..kv.prompt_cache import as_stock, leaves_of
from ..model_files.check import check_config
from ..model_files.loading import load
from ..model_files.modelfile import local_folder
from ..plugins import spec_of_model
from ..prefix.retention import RetentionPolicy
from ..prefix.salts import SHARED, mark_of, salt_marked
from ..spec import FullLayer, ModelCacheSpec, blocks_for
from ..store.agents import Agents
from ..store.record import SUFFIX
from ..store.scan import Listing
from ..tier.cache import TieredPrefixCache
from ..tier.opening import open_store
from ..tier.write_behind import StoredPrefixes

# A command waits for the disk as long as it takes.
FLUSH_SECONDS = 3600.0
# In the metadata: the namespace of the records, which stands for the weights, the adapter and the
# bits of keys and values, ...
NAMESPACE = "namespace"
# ... and the mark of the cache_salt under which the prefix was computed, in hexadecimal.
MARK = "cache_salt"
Metadata: TypeAlias = dict[str, str]


class StoredModel:
    """A model, and the store in `root` that has its prefixes. The weights stay on disk.

    `kv`: the bits of the server's pool. `store_bytes` None: the default, or the present size of the
    store if that is more. Raises StoreError for a model that is missing or cannot be loaded, or
    whose blocks cannot have these bits.
    """

    def __init__(
        self,
        model: str,
        root: Path,
        adapter: Path | None = None,
        store_bytes: int | None = None,
        kv: KVBits | None = None,
    ) -> None:
        self.name = model_path(model)
        self.root = root
        self._folder = _model_folder(self.name)
        self._adapter = adapter
        held = sum(file.size for file in Listing(root).records)
        limit = max(StoreConfig().store_bytes, held) if store_bytes is None else store_bytes
        self._config = StoreConfig(root, limit, flush_seconds=FLUSH_SECONDS)
        check_config(self._folder, self.name)
        try:
            self.model, self.tokenizer, config = load(
                str(self._folder),
                adapter_path=None if adapter is None else str(adapter),
                # Code in the folder is not run.
                tokenizer_config={"trust_remote_code": False},
                lazy=True,
                return_config=True,
            )
        except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
            raise StoreError(
                f"Cannot load {self.name}: {line_of(error)}. Give a model folder that mlx-lm loads."
            ) from error
        try:
            self.spec = quantised(spec_of_model(self.model, config, Path(self.name).name), kv)
        except ValueError as error:
            raise StoreError(f"{error} Leave out --kv-bits.") from error

    def open(self, tokens: int) -> TieredPrefixCache:
        """The prefixes in the store, and a pool for one sequence of this many tokens and one
        block more.
        """
        # A window that is resumed needs blocks for two rings, and a state for its copy.
        blocks = max(
            [
                blocks_for(tokens) + 1,
                *(2 * (group.layer.max_blocks or 0) for group in self.spec.groups),
            ]
        )
        states = 4 * self.spec.state_bytes(tokens)
        pool_bytes = (
            blocks * sum(self.spec.bytes_per_block(group) for group in self.spec.groups) + states
        )
        arena = KVArena(self.spec, pool_bytes, PoolConfig(state_bytes=states))
        # Runs are joined when they are saved; no lookup needs to copy them into one.
        arena.capabilities = RAGGED
        store = open_store(
            self._config, self._folder, self._adapter, self.spec, Path(self.name).name
        )
        prefix = TieredPrefixCache(arena, store=store)
        if store.problem is not None:
            store.close()
            raise StoreError(
                f"Cannot use the prompt store: {store.problem}. Give --store-dir a folder that "
                "can be read and written."
            )
        return prefix

    def encode(self, text: str) -> list[int]:
        # As mlx-lm does with a prompt that may start with its special token already.
        bos = self.tokenizer.bos_token
        return list(
            self.tokenizer.encode(text, add_special_tokens=bos is None or not text.startswith(bos))
        )


def _model_folder(name: str) -> Path:
    """A folder, or where the hub's cache has the model of an id."""
    try:
        folder = local_folder(os.path.abspath(name) if os.path.isdir(name) else name)
        if folder.is_dir():
            return folder
    except (OSError, ValueError):
        pass
    raise StoreError(
        f"{name} is not a folder. Give a folder with a model, or the id of a downloaded model."
    )


# -- export ----------------------------------------------------------------------------------------


def export(
    source: StoredModel, tokens: Sequence[int], file: Path, agent: str | None = None
) -> Report:
    """Write the longest stored prefix of a prompt's tokens as a file that mlx-lm's
    load_prompt_cache reads.

    `agent`: the agent whose prefix it is, if it is not shared. Raises StoreError if nothing of the
    prompt is stored or the file cannot be written.
    """
    path = file if file.suffix == SUFFIX else file.with_name(file.name + SUFFIX)
    salt = SHARED if agent is None else Agents(source.root).need(agent).salt
    prefix = source.open(len(tokens))
    stored = prefix.stored
    assert isinstance(stored, StoredPrefixes)
    try:
        known = list(tokens[: prefix.index.trie.match(tokens, salt).tokens])
        # A hit leaves one token to compute: this one, which is not part of the file.
        hit = prefix.acquire([*known, 0], 0, len(known), salt)
        held = hit.lookup.hit
        if not held:
            raise StoreError(
                f"{source.root} has no prefix of these {len(tokens)} tokens for "
                f"{source.spec.model_id}. Give a prompt "
                "that a server with the same model, adapter and --kv-bits has stored."
            )
        # mlx-lm's generate reads the first two entries.
        metadata = {
            "model": source.name,
            "tokenizer_config": "{}",
            "tokens": ",".join(map(str, known[:held])),
            NAMESPACE: stored.store.namespace,
            MARK: mark_of(salt).hex(),
        }
        _write(hit.caches, metadata, path)
    finally:
        prefix.close()
    return {"file": str(path), "tokens": held, "given": len(tokens), "bytes": path.stat().st_size}


def _write(caches: list[Any], metadata: Metadata, path: Path) -> None:
    """Write a file of pooled caches atomically. Raises StoreError."""
    temporary = path.with_name(f".writing-{os.getpid()}-{path.name}")
    try:
        try:
            stock = as_stock(caches)
        except ValueError as error:
            raise StoreError(f"A prompt-cache file cannot hold this prefix: {error}") from error
        save_prompt_cache(str(temporary), stock, metadata)
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:
        temporary.unlink(missing_ok=True)
        raise StoreError(
            f"Cannot write {path}: {line_of(error)}. Choose a folder that you may write to and "
            "that has enough space."
        ) from error


# -- import ----------------------------------------------------------------------------------------


def import_file(source: StoredModel, file: Path, agent: str | None = None) -> Report:
    """Put the prefix in a file of export() into the store: its full blocks, and its tail. `agent`,
    if given, continues from it.

    Raises StoreError for the file of another model, and if the store has too little space.
    """
    caches, metadata, tokens, salt = _load(file)
    if loses_words(source.spec):
        raise StoreError(
            "mlx-lm's files cannot hold the quantised keys and values of this model, and "
            "quantising them again changes them. "
            "Import into a store of a server without --kv-bits."
        )
    prefix = source.open(len(tokens))
    stored = prefix.stored
    assert isinstance(stored, StoredPrefixes)
    try:
        if metadata[NAMESPACE] != stored.store.namespace:
            what = (
                f"{file} is of {metadata['model']}, with other weights, another adapter or other "
                "bits than given here"
            )
            raise StoreError(
                f"{what}. Give the model, adapter and --kv-bits that it was made with."
            )
        kept = _keep(prefix, tokens, caches, salt)
        if agent is not None and kept == len(tokens):
            path = prefix.index.trie.match(tokens, salt)
            Agents(source.root).note(
                agent, stored.store.namespace, source.spec.model_id, path.hashes, path.tokens, salt
            )
    finally:
        prefix.close()
    if kept < len(tokens):
        figures = stored.report()
        why = (
            figures["problem"]
            or f"the store holds {figures['bytes']} of {figures['store_bytes']} bytes"
        )
        raise StoreError(
            f"Stored {kept} of {len(tokens)} tokens: {why}. Free some space on the disk or raise "
            "--store-bytes."
        )
    return {
        "file": str(file),
        "tokens": kept,
        "blocks": blocks_for(kept),
        "folder": str(source.root),
        "agent": agent,
    }


def _load(path: Path) -> tuple[list[Any], Metadata, list[int], bytes]:
    """The caches, metadata, token ids and salt of a file of export().

    Raises StoreError for another one.
    """
    try:
        caches, metadata = load_prompt_cache(str(path), return_metadata=True)
        mx.eval([leaf.state for leaf in leaves_of(caches)])
        if NAMESPACE not in metadata:
            raise ValueError("its metadata does not name its model and tokens")
        tokens, salt = ids_in(metadata["tokens"]), salt_marked(bytes.fromhex(metadata[MARK]))
    except (
        OSError,
        RuntimeError,
        ValueError,
        KeyError,
        IndexError,
        TypeError,
        AttributeError,
    ) as error:
        raise StoreError(
            f"Cannot read {path}: {line_of(error)}. Give a file that `store export` has written."
        ) from error
    return caches, metadata, tokens, salt


def ids_in(text: str) -> list[int]:
    """'1,2,3' as token ids. Raises ValueError."""
    ids = [int(part) for part in text.split(",")]
    if not all(-(1 << 63) <= token < 1 << 63 for token in ids):
        raise ValueError("a token id has more than 64 bits")
    return ids


def loses_words(spec: ModelCacheSpec) -> bool:
    """Return whether mlx-lm lacks a cache for the quantised keys and values of some layer: its
    files hold them dequantised then.

    It lacks one for windows, for keys and values in different bits, and for further arrays.
    """
    for leaf in spec.leaves:
        forms = spec.forms(leaf) if isinstance(leaf, FullLayer) else ()
        if any(forms) and (type(leaf) is not FullLayer or leaf.more or len(set(forms)) > 1):
            return True
    return False


def _keep(prefix: TieredPrefixCache, tokens: list[int], caches: list[Any], salt: bytes) -> int:
    """Store a prefix.

    Returns how many of its tokens, counted from the first, are in the store now.
    """
    stored = prefix.stored
    assert isinstance(stored, StoredPrefixes)
    prefix.release(tokens, caches, policy=RetentionPolicy(salt=salt))
    # The store's queue holds only a part at a time.
    for _ in stored.write_out():
        stored.store.flush()
    stored.write_behind(0)
    path = prefix.index.trie.match(tokens, salt).path
    return sum(node.end - node.start for node in takewhile(lambda node: node.on_disk, path))
