"""Carries prefixes between a prompt store and the prompt-cache files of mlx-lm.

Files of this store are signed, and come back by content, for everybody to share. What another has written is not proven by what
it says of itself, nor by a few tokens that are computed again: one agent alone may go on from it, under a salt of its own.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    ChunkedKVCache,
    KVCache,
    RotatingKVCache,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
)

from .dtypes import ITEM_BYTES
from .errors import StoreError
from .formatting import Report
from .kv.parts import as_stock, leaves_of
from .model_source import Prompt, Source, ids_in, line_of
from .prefix.retention import RetentionPolicy
from .prefix.salts import SHARED, is_of_import, salt_of_import
from .spec import BLOCK_TOKENS, ChunkLayer, FullLayer, LayerSpec, ModelCacheSpec, StateLayer, WindowLayer, blocks_for
from .store.agent_files import Agents
from .store.manifest import shown
from .store.prompt_store import PromptStore
from .store.signing import UNSIGNED, export_key, head_of, is_signed, sign
from .tier.cache import TieredPrefixCache

SUFFIX = ".safetensors"
# Of a file that does not say whose it is, these many tokens are computed and compared ...
COMPARED_TOKENS = 16
# ... and may be so far off, as rounding in bfloat16 is; those of other weights or tokens are off by about 1.
TOLERANCE = 0.05
UNPROVEN = "this store did not sign the file as it is, so that one agent alone can go on from it"


# -- export ------------------------------------------------------------------------------------------------------------


def export(source: Source, prompt: Prompt, file: Path, agent: str | None = None) -> Report:
    """The longest stored prefix of a prompt as a file that mlx-lm's load_prompt_cache reads; `agent`: what that one has of it.

    Raises StoreError if nothing of it is stored, or the file cannot be written.
    """
    tokens = source.tokens(prompt)
    if not tokens:
        raise StoreError("Found no tokens to look for; needed those of a prompt. Give --tokens 1,2,3 or --prompt-file.")
    path = file if file.suffix == SUFFIX else file.with_name(file.name + SUFFIX)
    salt = SHARED if agent is None else Agents(source.root).need(agent).salt
    prefix = source.open(len(tokens))
    try:
        known = prefix.index.trie.match(tokens, salt).tokens
        # A fetch leaves one token to compute: this one, of which nothing is kept.
        fetched = prefix.acquire([*tokens[:known], 0], 0, known, salt)
        hit = fetched.lookup.hit
        if not hit:
            raise StoreError(
                f"Found nothing of these {len(tokens)} tokens in {source.config.folder} under {source.spec.model_id}; needed a "
                "prompt that a server with the same model, adapter and --store-bits has kept."
            )
        metadata = metadata_of(source.name, source.weights, source.config.bits, tokens[:hit])
        _save(path, as_stock(fetched.caches), metadata, None if is_of_import(salt) else export_key(source.root))
        prefix.discard(fetched.caches)
    finally:
        prefix.close()
    return {"file": str(path), "tokens": hit, "given": len(tokens), "bytes": path.stat().st_size}


def metadata_of(model: str, weights: str, bits: int | None, tokens: Sequence[int]) -> dict[str, str]:
    """What mlx-lm's generate needs, and what proves later whose keys and values these are."""
    return {
        "model": model,
        "tokenizer_config": "{}",
        "tokens": ",".join(map(str, tokens)),
        "weights": weights,
        "bits": str(bits or 0),
        "signature": UNSIGNED,
    }


def _save(path: Path, caches: list[Any], metadata: dict[str, str], key: bytes | None) -> None:
    """`key`: None for what came from outside without proof, which is not signed."""
    temporary = path.with_name(f".writing-{os.getpid()}-{path.name}")
    try:
        save_prompt_cache(str(temporary), caches, metadata)
        if key is not None:
            sign(temporary, key)
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:
        temporary.unlink(missing_ok=True)
        raise StoreError(f"Cannot write {path}: {line_of(error)}. Needed a folder with room and the right to write.") from error


def describe_export(report: Report) -> str:
    return f"Wrote {report['tokens']:,} of {report['given']:,} tokens to {report['file']}."


# -- import ------------------------------------------------------------------------------------------------------------


def take_in(source: Source, prompt: Prompt, file: Path, agent: str | None = None) -> Report:
    """Put the prefix in a file of mlx-lm's save_prompt_cache into the store: its full blocks, and its tail.

    `agent` goes on from it; a file that this store did not sign is for that one alone. Raises StoreError if it cannot be the
    prefix of this model that it is said to be, could not be stored, or has no agent and needs one.
    """
    caches, metadata = read(file)
    tokens = source.tokens(prompt) or tokens_in(metadata, file)
    check_tokens(tokens, source.vocab_size())
    check_shapes(source.spec, caches, tokens)
    origin = says_origin(source.name, source.weights, source.config.bits, metadata, tokens)
    if not origin:
        compare(source.name, source.model, caches, tokens)
    private = not (origin and is_signed(file, export_key(source.root)))
    salt = salt_of_import() if private else SHARED
    if private:
        _check_agent(source.root, agent)
    prefix = source.open(len(tokens))
    try:
        kept = _keep(prefix, tokens, caches, salt)
        if agent is not None and kept == len(tokens):
            path, namespace = prefix.index.trie.match(tokens, salt).detached(), _store_of(prefix).namespace
            Agents(source.root).note(agent, namespace, source.spec.model_id, path.hashes, path.tokens, salt)
    finally:
        prefix.close()
    if kept < len(tokens):
        assert prefix.stored is not None
        report = prefix.stored.report()
        why = report["problem"] or f"the store holds {report['bytes']} of {report['store_bytes']} bytes"
        raise StoreError(f"Stored {kept} of {len(tokens)} tokens: {why}. Make room on the disk or raise --store-bytes.")
    report = {"file": str(file), "tokens": kept, "blocks": blocks_for(kept), "folder": str(source.config.folder)}
    return report | {"agent": agent} | told_private(private)


def told_private(private: bool) -> Report:
    """What an answer says of who may go on from a file."""
    return {"private": private, "why": UNPROVEN if private else "this store has signed the file, and it is as it was"}


def _check_agent(root: Path, agent: str | None) -> None:
    """Raises StoreError unless this is a name for an agent that nobody has, or that goes on from such a file already."""
    if agent is None:
        raise StoreError(f"Found no agent that is to go on from the file; needed one, for {UNPROVEN}. Give --agent NAME.")
    before = Agents(root).get(agent)
    if before is not None and not is_of_import(before.salt):
        raise StoreError(taken_text(agent))


def taken_text(agent: str) -> str:
    """Why an agent that has computed its path here itself does not go on from somebody else's file."""
    return (
        f"Found an agent {shown(agent)} already; needed a name that is free, for {UNPROVEN}. Import it under another name, or "
        "delete that agent first."
    )


def _store_of(prefix: TieredPrefixCache) -> PromptStore:
    assert prefix.stored is not None
    return prefix.stored.store


def _keep(prefix: TieredPrefixCache, tokens: list[int], caches: list[Any], salt: bytes) -> int:
    """How many tokens are in the store now, from the first on."""
    stored = prefix.stored
    assert stored is not None
    prefix.release(tokens, caches, terms=RetentionPolicy(salt=salt))
    before = -1
    # The store's queue takes a part at a time.
    while stored.store.counts["written"] > before:
        before = stored.store.counts["written"]
        stored.write_tails()
        stored.store.flush()
        stored.write_behind(0)
    path = prefix.index.trie.match(tokens, salt).path
    return sum(node.end - node.start for node in takewhile(lambda node: node.stored, path))


def read(file: Path) -> tuple[list[Any], dict[str, Any]]:
    """The caches in a file, not evaluated, and its metadata. Raises StoreError."""
    if not file.is_file():
        raise StoreError(f"Found no file {file}; needed one of mlx-lm's save_prompt_cache.")
    _check_header(file)
    try:
        caches, metadata = load_prompt_cache(str(file), return_metadata=True)
    except (RuntimeError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise StoreError(f"Cannot read {file}: {line_of(error)}. Needed a file of mlx-lm's save_prompt_cache.") from error
    return caches, metadata if isinstance(metadata, dict) else {}


def _check_header(file: Path) -> None:
    """Raises StoreError unless each array lies in the file and is as long as its shape says, and every text is one.

    mlx makes lists as long as a number in a name is large: a few bytes could ask for all memory.
    """
    try:
        with file.open("rb") as opened:
            head = head_of(opened)
            left = os.fstat(opened.fileno()).st_size - len(head)
        header = dict(json.loads(head[8:]))
        texts = header.pop("__metadata__", {})
        if not (isinstance(texts, dict) and all(isinstance(text, str) for text in texts.values())):
            raise ValueError("metadata that is no object of texts")
        for name, entry in header.items():
            _check_entry(name, entry, left)
        _check_names([*header, *texts])
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise StoreError(f"Cannot read {file}: found {line_of(error)}. Needed a file of mlx-lm's save_prompt_cache.") from error


def _check_entry(name: str, entry: Any, left: int) -> None:
    """Raises ValueError, KeyError and TypeError."""
    (start, end), shape = entry["data_offsets"], entry["shape"]
    if not all(type(number) is int and 0 <= number <= left for number in (start, end, *shape)):
        raise ValueError(f"{name[:40]!r} outside of the file")
    if end - start != ITEM_BYTES[entry["dtype"]] * math.prod(shape):
        raise ValueError(f"{name[:40]!r} of {end - start} bytes, not those of its shape")


def _check_names(names: list[str]) -> None:
    """Raises KeyError."""
    for part in {part for name in names for part in name.split(".")}:
        with suppress(ValueError):
            if int(part) > len(names):
                raise KeyError(f"the number {part[:20]} in one of {len(names)} names")


def check_tokens(tokens: list[int], vocab_size: int) -> None:
    """Raises StoreError unless the model has a word for each of them, or it is a piece of an image, whose ids are negative."""
    highest = max(tokens, default=0)
    if highest >= vocab_size:
        raise StoreError(f"Found token {highest} in the file; needed those of the model, which end with {vocab_size - 1}.")


def tokens_in(metadata: dict[str, Any], file: Path) -> list[int]:
    """The token ids that the metadata names. Raises StoreError."""
    try:
        return list(ids_in(metadata["tokens"]))
    except (KeyError, ValueError, AttributeError) as error:
        raise StoreError(
            f"Found no token ids in the metadata of {file}; needed those of its prompt. Give --tokens 1,2,3 or --prompt-file."
        ) from error


def check_shapes(spec: ModelCacheSpec, caches: list[Any], tokens: list[int]) -> None:
    """Raises StoreError unless these can be caches of so many tokens of the model."""
    if len(caches) != len(spec.layers):
        raise StoreError(f"Found a file of {len(caches)} layers; needed {len(spec.layers)} as {spec.model_id} has.")
    leaves = leaves_of(caches)
    if len(leaves) != len(spec.leaves):
        raise StoreError(f"Found a file of {len(leaves)} caches; needed {len(spec.leaves)} as {spec.model_id} has.")
    for index, (cache, leaf) in enumerate(zip(leaves, spec.leaves, strict=True)):
        wanted, found = _class_of(leaf).__name__, type(cache).__name__
        holds = isinstance(leaf, FullLayer) and leaf.values_per_token > 0
        if found != wanted or (holds and cache.keys is None):
            raise StoreError(f"Layer {index}: found {found} in the file; needed a {wanted} that is not empty.")
        if isinstance(leaf, StateLayer) and len(cache.cache) != len(leaf.arrays):
            raise StoreError(f"Layer {index}: found {len(cache.cache)} state arrays in the file; needed {len(leaf.arrays)}.")
        if isinstance(leaf, FullLayer) and holds:
            _check_keys(spec, index, cache, leaf, len(tokens))


def _class_of(leaf: LayerSpec) -> type:
    found: type = KVCache
    for kind, cache in ((StateLayer, ArraysCache), (WindowLayer, RotatingKVCache), (ChunkLayer, ChunkedKVCache)):
        found = cache if isinstance(leaf, kind) else found
    return found


def _check_keys(spec: ModelCacheSpec, index: int, cache: Any, leaf: FullLayer, tokens: int) -> None:
    if cache.offset != tokens:
        raise StoreError(f"Layer {index}: found {cache.offset} tokens in the file and were told of {tokens}; needed as many.")
    if getattr(cache, "start_position", 0):
        raise StoreError(f"Layer {index}: found a chunk from token {cache.start_position} on in the file; needed all tokens.")
    held = min(tokens, leaf.max_size) if isinstance(leaf, WindowLayer) else tokens
    for array, dim in ((cache.keys, leaf.key_dim), (cache.values, leaf.value_dim)):
        found = (str(array.dtype).rpartition(".")[2], *array.shape)
        needed = (spec.dtype, 1, leaf.kv_heads, held, dim)
        long_enough = array.ndim == 4 and array.shape[2] >= held
        if not long_enough or (*found[:3], found[4]) != (*needed[:3], needed[4]):
            raise StoreError(f"Layer {index}: found {found} in the file; needed {needed} as {spec.model_id} has.")


def says_origin(name: str, weights: str, bits: int | None, metadata: dict[str, Any], tokens: list[int]) -> bool:
    """Whether a file says that it is of these weights and tokens; if it says nothing, compare() it.

    Keys and values of other weights would give wrong replies: raises StoreError where it says that it is of others.
    """
    found = str(metadata.get("bits", "0"))
    if found not in ("0", str(bits or 0)):
        raise StoreError(
            f"Found keys and values that were stored in {found} bits; needed the same store. Give --store-bits {found}."
        )
    if "weights" in metadata and metadata["weights"] != weights:
        raise StoreError(f"Found a file of other weights ({metadata.get('model')}); needed one of {name}.")
    return "weights" in metadata and metadata.get("tokens") == ",".join(map(str, tokens))


def compare(name: str, model: Any, caches: list[Any], tokens: list[int]) -> None:
    """Compute the first tokens with a model. Raises StoreError unless the caches hold the same."""
    count = min(len(tokens), COMPARED_TOKENS)
    fresh = make_prompt_cache(model)
    model(mx.array([tokens[:count]]), cache=fresh)
    pairs = [(i, mine, theirs) for i, (mine, theirs) in enumerate(zip(leaves_of(fresh), leaves_of(caches), strict=True))]
    compared = [pair for pair in pairs if type(pair[1]) is KVCache and pair[1].keys is not None]
    if not compared:
        raise StoreError("Found a file that does not say whose it is, of layers that forget; needed one that store export wrote.")
    for index, mine, theirs in compared:
        for needed, found in ((mine.keys, theirs.keys), (mine.values, theirs.values)):
            needed, found = (array[..., :count, :].astype(mx.float32) for array in (needed, found))
            off: Any = mx.sqrt(mx.mean((needed - found) ** 2) / mx.mean(needed**2)).item()
            if not off <= TOLERANCE:
                raise StoreError(
                    f"Layer {index}: found keys and values that are off by {off:.0%} from those of {name} for the first "
                    f"{count} tokens; needed a file of the same weights and tokens."
                )


def describe_import(report: Report) -> str:
    blocks = f"{report['blocks']:,} blocks of at most {BLOCK_TOKENS} tokens"
    whose = f" Only agent {shown(report['agent'])} goes on from them: {report['why']}." if report["private"] else ""
    return f"Stored {report['tokens']:,} tokens from {report['file']} in {report['folder']}, {blocks}.{whose}"
