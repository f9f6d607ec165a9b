"""Export and import without a server: between a prompt store's folder and a prompt-cache file of mlx-lm."""

from __future__ import annotations

import os
from itertools import takewhile
from pathlib import Path
from typing import Any

from ..errors import StoreError
from ..formatting import Report
from ..prefix.retention import RetentionPolicy
from ..prefix.salts import SHARED, is_of_import, salt_of_import
from ..spec import blocks_for
from ..store.agent_files import Agents
from ..store.prompt_store import PromptStore
from ..store.signing import export_key, sign
from ..tier.cache import TieredPrefixCache
from .cache_file import UNPROVEN, CacheFile, CacheFileWriter, line_of, metadata_of, name_taken, privacy_report
from .model_source import Prompt, Source

SUFFIX = ".safetensors"


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
        _save(path, CacheFileWriter(fetched.caches, metadata), None if is_of_import(salt) else export_key(source.root))
        prefix.discard(fetched.caches)
    finally:
        prefix.close()
    return {"file": str(path), "tokens": hit, "given": len(tokens), "bytes": path.stat().st_size}


def _save(path: Path, written: CacheFileWriter, key: bytes | None) -> None:
    """`key`: None for what was imported without proof, which is not signed."""
    temporary = path.with_name(f".writing-{os.getpid()}-{path.name}")
    try:
        with temporary.open("wb") as out:
            out.writelines(written)
        if key is not None:
            sign(temporary, key)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise StoreError(f"Cannot write {path}: {line_of(error)}. Needed a folder with room and the right to write.") from error


def import_file(source: Source, prompt: Prompt, file: Path, agent: str | None = None) -> Report:
    """Put the prefix in a file of mlx-lm's save_prompt_cache into the store: its full blocks, and its tail.

    `agent` goes on from it; a file that this store did not sign is for that one alone. Raises StoreError if it cannot be the
    prefix of this model that it is said to be, could not be stored, or has no agent and needs one.
    """
    found = CacheFile.read(file, source.tokens(prompt))
    found.check(source.spec, source.vocab_size())
    names_weights = found.names_weights(source.name, source.weights, source.config.bits)
    if not names_weights:
        found.compare(source.name, source.model)
    private = found.is_private(names_weights, export_key(source.root))
    salt = salt_of_import() if private else SHARED
    if private:
        _check_agent(source.root, agent)
    tokens = found.tokens
    prefix = source.open(len(tokens))
    try:
        kept = _keep(prefix, tokens, found.caches, salt)
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
    return report | {"agent": agent} | privacy_report(private)


def _check_agent(root: Path, agent: str | None) -> None:
    """Raises StoreError unless this is a name for an agent that nobody has, or that goes on from such a file already."""
    if agent is None:
        raise StoreError(f"Found no agent that is to go on from the file; needed one, for {UNPROVEN}. Give --agent NAME.")
    before = Agents(root).get(agent)
    if before is not None and not is_of_import(before.salt):
        raise StoreError(name_taken(agent))


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
