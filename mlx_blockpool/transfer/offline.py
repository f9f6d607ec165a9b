"""Export and import without a server: between a prompt store's folder and a prompt-cache file of mlx-lm."""

from __future__ import annotations

import os
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

from ..errors import PoolExhaustedError, StoreError
from ..formatting import Report, line_of, progress
from ..prefix.retention import RetentionPolicy
from ..prefix.salts import SHARED, is_of_import, salt_marked, salt_of_import
from ..spec import blocks_for
from ..store.agent_files import Agents
from ..store.record import SUFFIX
from ..store.signing import export_key, sign
from ..tier.cache import TieredPrefixCache
from ..tier.pieces import CachePieces
from .cache_file import CacheFile, CacheFileWriter, check_agent, loses_words, privacy_report
from .model_source import Prompt, Source


def export(source: Source, prompt: Prompt, file: Path, agent: str | None = None) -> Report:
    """Write the longest stored prefix of a prompt as a file that mlx-lm's load_prompt_cache reads.

    `agent`: whose prefix it is, where it is not shared. Raises StoreError if nothing of it is stored, or for a file that cannot
    be written.
    """
    tokens = source.tokens(prompt)
    if not tokens:
        raise StoreError("The prompt has no tokens. Give --tokens 1,2,3 or --prompt-file.")
    path = file if file.suffix == SUFFIX else file.with_name(file.name + SUFFIX)
    salt = SHARED if agent is None else Agents(source.root).need(agent).salt
    prefix = source.open(len(tokens))
    try:
        known = prefix.index.trie.match(tokens, salt).tokens
        _read(prefix, tokens[:known], salt)
        # A hit leaves one token to compute: this one, of which nothing is kept.
        hit = prefix.acquire([*tokens[:known], 0], 0, known, salt)
        held = hit.lookup.hit
        if not held:
            raise StoreError(
                f"{source.config.folder} has nothing of these {len(tokens)} tokens under {source.spec.model_id}. Give a prompt "
                "that a server with the same model, adapter, --kv-bits and --store-bits has kept."
            )
        pieces = CachePieces(hit.caches, loses_words(source.spec))
        writer = CacheFileWriter(pieces, source.name, source.weights, source.spec, source.config.bits, tokens[:held], salt)
        _write(writer, path, None if is_of_import(salt) else export_key(source.root))
        writer.close()
    finally:
        prefix.close()
    return {"file": str(path), "tokens": held, "given": len(tokens), "bytes": path.stat().st_size}


def _read(prefix: TieredPrefixCache, tokens: list[int], salt: bytes) -> None:
    """Bring a prefix into memory as far as there is room, with a progress bar."""
    plan = prefix.plan_restore(prefix.match(tokens, salt), len(tokens))
    if plan is not None and prefix.stored is not None:
        with suppress(PoolExhaustedError):
            for _ in progress(prefix.stored.restores.run(plan), plan.tokens, "reading", " tokens", int):
                pass


def _write(writer: CacheFileWriter, path: Path, key: bytes | None) -> None:
    """`key`: None for what was imported without proof, which is not signed."""
    temporary = path.with_name(f".writing-{os.getpid()}-{path.name}")
    try:
        with temporary.open("wb") as out:
            for piece in progress(writer, writer.nbytes, "writing", "B", len):
                out.write(piece)
        if key is not None:
            sign(temporary, key)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise StoreError(f"Cannot write {path}: {line_of(error)}. Choose a folder with room that you may write to.") from error


def import_file(source: Source, prompt: Prompt, file: Path, agent: str | None = None) -> Report:
    """Put the prefix in a file of mlx-lm's save_prompt_cache into the store: its full blocks, and its tail.

    `agent` continues from it; a file that this store did not sign is for that one alone. Raises StoreError for a file that cannot
    be of this model and prompt, or needs an agent and has none, and if the store has no room.
    """
    found = CacheFile.read(file, source.tokens(prompt))
    found.check(source.spec, source.vocab_size())
    names_weights = found.names_weights(source.name, source.weights, source.config.bits)
    if not names_weights:
        found.compare(source.name, source.model, source.spec)
    why, agents = found.why_private(names_weights, export_key(source.root), source.spec), Agents(source.root)
    if why is not None:
        if agent is None:
            raise StoreError(f"The file needs an agent that continues from it, for {why}. Give --agent NAME.")
        before = agents.get(agent)
        check_agent(agent, None if before is None else before.salt, why)
    salt = salt_of_import() if why is not None else salt_marked(found.mark)
    tokens = found.tokens
    prefix = source.open(len(tokens))
    stored = prefix.stored
    assert stored is not None
    try:
        kept = _keep(prefix, tokens, found.caches, salt)
        if agent is not None and kept == len(tokens):
            path = prefix.index.trie.match(tokens, salt)
            agents.note(agent, stored.store.namespace, source.spec.model_id, path.hashes, path.tokens, salt)
    finally:
        prefix.close()
    if kept < len(tokens):
        figures = stored.report()
        why = figures["problem"] or f"the store holds {figures['bytes']} of {figures['store_bytes']} bytes"
        raise StoreError(f"Stored {kept} of {len(tokens)} tokens: {why}. Make room on the disk or raise --store-bytes.")
    report = {"file": str(file), "tokens": kept, "blocks": blocks_for(kept), "folder": str(source.config.folder), "agent": agent}
    return report | privacy_report(why)


def _keep(prefix: TieredPrefixCache, tokens: list[int], caches: list[Any], salt: bytes) -> int:
    """How many tokens are in the store now, from the first on."""
    stored = prefix.stored
    assert stored is not None
    prefix.release(tokens, caches, policy=RetentionPolicy(salt=salt))
    before = -1
    # The store's queue takes a part at a time.
    while stored.store.counts["written"] > before:
        before = stored.store.counts["written"]
        stored.write_tails()
        stored.store.flush()
        stored.write_behind(0)
    path = prefix.index.trie.match(tokens, salt).path
    return sum(node.end - node.start for node in takewhile(lambda node: node.residency.on_disk, path))
