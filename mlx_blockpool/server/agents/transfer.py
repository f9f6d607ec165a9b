"""Transfers of one agent's prefix: to disk, back into memory, into a prompt-cache file of mlx-lm, and out of one.

On the socket's thread; what touches memory runs on the generation thread, a little between two decode steps, so that replies in
progress go on. A file is whole on disk before its first byte is sent, so that a client that reads slowly holds no blocks.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx

from ...errors import PoolExhaustedError, StoreError
from ...formatting import Report
from ...kv.parts import leaves_of, sequence_of
from ...prefix.intake import Intake, begin_intake
from ...prefix.resume import lay_out_to_read, pin_of, resumable
from ...prefix.retention import RetentionPolicy
from ...prefix.salts import is_of_import, salt_of_import
from ...prefix.trie import PrefixRef
from ...store.digests import Digests
from ...store.identity import check_unchanged
from ...store.limits import OVER_BUDGET
from ...store.manifest import shown
from ...store.signing import KEY_BYTES, export_key, sign
from ...tier.cache import TieredPrefixCache
from ...tier.measure import Measure, measure
from ...tier.opening import weights_in
from ...tier.restore import RestoreJob
from ...tier.write_behind import StoredPrefixes
from ...transfer.cache_file import CacheFile, CacheFileWriter, metadata_of, name_taken, privacy_report
from ..model import LoadedModel
from ..models.provider import BlockpoolModelProvider
from .by_content import is_by_content
from .listing import in_words
from .service import AgentService, AgentView, Home, RefusedError, agents_of

# Records are copied into the pool for so long between two decode steps.
RESTORE_SECONDS = 0.02
PAUSE_SECONDS = 0.005
# Signs what servers without a store export, as long as they run.
_OWN_KEY = secrets.token_bytes(KEY_BYTES)


def _measure(service: AgentService, home: Home, path: PrefixRef) -> Measure:
    return service.at(home, lambda _, prefix: measure(prefix, path, 0))


def _stored(prefix: TieredPrefixCache) -> StoredPrefixes:
    """The store's side of a model's prefixes. Raises RefusedError if there is no store."""
    if prefix.stored is None:
        raise RefusedError(503, "Found no store for this model; needed one. Start the server without --no-store.")
    return prefix.stored


# -- save --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Saved:
    """How far a path is on disk. `left`: records that wait for the writer; `refused`: records that the budget has rejected."""

    tokens: int
    resumes: int
    wanted: int
    left: int
    written: int
    refused: int
    problem: str | None

    def is_whole(self, tokens: int) -> bool:
        return self.tokens == tokens and self.resumes >= self.wanted


def save(service: AgentService, name: str) -> Report:
    """Write all of an agent's path to disk, with its partial last block, windows and states. Raises RefusedError."""
    view, home = service.need_home(name)
    path, start = view.path, time.monotonic()
    before: _Saved | None = None
    store = service.at(home, lambda _, prefix: _stored(prefix).store)
    refused = service.at(home, lambda _, prefix: _note(prefix, path))
    while True:
        now = service.at(home, lambda _, prefix: _saved(prefix, path))
        if now.problem is not None:
            raise RefusedError(503, f"Cannot write: {now.problem}. Needed a disk that works, with room. Try again later.")
        if now == before:
            break
        before = now
        # Waits for the writer's thread, which any thread may do.
        store.flush()
    found = _measure(service, home, path)
    if found.tokens_on_disk < path.tokens or (now.refused > refused and not now.is_whole(path.tokens)):
        raise RefusedError(503, _why_not(found, now, path, store.config.store_bytes, now.refused > refused))
    return {"agent": view.name, "saved": True, "seconds": _since(start), "tokens": path.tokens} | in_words(found)


def _note(prefix: TieredPrefixCache, path: PrefixRef) -> int:
    """Queue what is not on disk yet. Returns how many records the budget has rejected so far."""
    stored, match = _stored(prefix), prefix.index.trie.find(path)
    stored.note_path(match.path, match.tokens)
    for node in match.path:
        for checkpoint in node.checkpoints.values():
            stored.checkpoints.note(node, checkpoint)
    return stored.store.counts[OVER_BUDGET]


def _saved(prefix: TieredPrefixCache, path: PrefixRef) -> _Saved:
    stored = _stored(prefix)
    stored.write_behind(at_once=True)
    match = prefix.index.trie.find(path)
    found, report = measure(prefix, path, len(match.path)), stored.report()
    at = pin_of(prefix.slabs, match.in_memory()).position
    counts = stored.store.counts
    left = report["pending"] + report["resting"]
    return _Saved(
        found.tokens_on_disk, found.resumes_from_disk, at, left, counts["written"], counts[OVER_BUDGET], stored.store.problem
    )


def _why_not(found: Measure, saved: _Saved, path: PrefixRef, store_bytes: int, is_full: bool) -> str:
    there = f"{found.tokens_on_disk} of {path.tokens} tokens on disk and {found.tokens_in_memory} in memory"
    if is_full:
        return (
            f"Found {there}, and no room in the store's {store_bytes} bytes; needed room for all. Raise --store-bytes or unpin."
        )
    if found.tokens_in_memory < path.tokens:
        return f"Found {there}; needed all in one of them. The agent's next turn computes what is missing."
    return f"Found {there}, {saved.left} records waiting; needed a store that takes them. Try again later."


# -- restore -----------------------------------------------------------------------------------------------------------


def restore(service: AgentService, name: str) -> Report:
    """Bring all of an agent's path on disk back into memory. Raises RefusedError."""
    view, home = service.need_home(name)
    start = time.monotonic()
    before = _measure(service, home, view.path)
    n_bytes = bring_back(service, home, view)
    found = _measure(service, home, view.path)
    if found.tokens_in_memory < max(before.tokens_on_disk, 1) or found.resumes_from_memory < before.resumes_from_disk:
        raise RefusedError(
            503,
            f"Found {found.tokens_in_memory} of {view.path.tokens} tokens in memory and {found.tokens_on_disk} on disk; "
            "needed those on disk to be readable. The agent's next turn computes what is missing.",
        )
    brought = {"restored_tokens": found.tokens_in_memory - before.tokens_in_memory, "restored_bytes": n_bytes}
    return (
        {"agent": view.name, "restored": True, "seconds": _since(start), "tokens": view.path.tokens} | brought | in_words(found)
    )


def bring_back(service: AgentService, home: Home, view: AgentView) -> int:
    """Bring records that are only on disk into memory. Returns their bytes."""
    # Held here for the finally clause; used on the generation thread alone.
    held: list[tuple[RestoreJob, int]] = []
    try:
        service.at(home, lambda _, prefix: held.extend(_begin_restore(prefix, view.path)))
        while held and not service.at(home, lambda served, _: _advance(served, held[0][0])):
            time.sleep(PAUSE_SECONDS)
        return held[0][1] if held else 0
    except PoolExhaustedError as error:
        raise RefusedError(503, f"No room to bring agent {shown(view.name)} back: {error}") from error
    finally:
        service.do(lambda: _end_restore(service, home, held, view))


def _advance(served: LoadedModel, restore: RestoreJob) -> bool:
    is_computing = served.engine is not None and bool(served.engine.live)
    return restore.advance(0.0 if is_computing else RESTORE_SECONDS, RESTORE_SECONDS)


def _begin_restore(prefix: TieredPrefixCache, path: PrefixRef) -> list[tuple[RestoreJob, int]]:
    stored = prefix.stored
    if stored is None:
        return []
    match = prefix.index.trie.find(path)
    have = resumable(prefix.slabs, match.in_memory(), match.tokens)[0]
    wanted = stored.plan_restore(match, match.tokens, have)
    if wanted is None:
        return []
    return [(stored.restore(wanted), stored.size_of(wanted))]


def _end_restore(service: AgentService, home: Home, held: list[tuple[RestoreJob, int]], view: AgentView) -> None:
    while held:
        held.pop()[0].release()
        served, _ = service.served(home)
        if view.name in agents_of(served).pinned:
            agents_of(served).pin(view.name, agents_of(served).noted.get(view.name, view.noted).path)


# -- export ------------------------------------------------------------------------------------------------------------


@contextmanager
def export(service: AgentService, name: str) -> Iterator[Path]:
    """A prompt-cache file of mlx-lm with as much of an agent's path as can be resumed. It is removed when the block ends.

    Raises RefusedError, StoreError and OSError.
    """
    view, home = service.need_home(name)
    bring_back(service, home, view)
    provider = service.at(home, lambda served, _: served.provider)
    weights = _weights(service, provider)
    held: list[tuple[CacheFileWriter, list[Any]]] = []
    try:
        service.at(home, lambda served, prefix: held.append(_begin_export(served, prefix, view, weights)))
        with service.spool.file(held[0][0].nbytes) as file:
            with file.open("wb") as out:
                for piece in _pieces(service, home, held):
                    out.write(piece)
            service.do(lambda: _end_export(held))
            if not is_of_import(view.path.salt):
                sign(file, _key(service))
            yield file
    finally:
        service.do(lambda: _end_export(held))


def _key(service: AgentService) -> bytes:
    return _OWN_KEY if service.root is None else export_key(service.root)


def _begin_export(
    served: LoadedModel, prefix: TieredPrefixCache, view: AgentView, weights: str
) -> tuple[CacheFileWriter, list[Any]]:
    match = prefix.index.trie.find(view.path).in_memory()
    hit, checkpoint = resumable(prefix.slabs, match, match.tokens)
    if not hit:
        raise RefusedError(409, f"Found nothing of agent {shown(view.name)} in memory or on disk; needed some of its path.")
    caches = lay_out_to_read(prefix.slabs, match, hit, checkpoint)
    bits = None if prefix.stored is None else prefix.stored.bits
    metadata = metadata_of(served.provider.public_name, weights, bits, match.token_ids()[:hit])
    return CacheFileWriter(caches, metadata), caches


def _pieces(service: AgentService, home: Home, held: list[tuple[CacheFileWriter, list[Any]]]) -> Iterator[bytes]:
    yield held[0][0].head
    for index in range(held[0][0].count):
        yield service.do(partial(_piece, service, home, held, index))


def _piece(service: AgentService, home: Home, held: list[tuple[CacheFileWriter, list[Any]]], index: int) -> bytes:
    service.served(home)
    return held[0][0].piece(index)


def _end_export(held: list[tuple[CacheFileWriter, list[Any]]]) -> None:
    while held:
        sequence = sequence_of(held.pop()[1])
        if sequence is not None:
            sequence.release()


def _weights(service: AgentService, provider: BlockpoolModelProvider) -> str:
    """The name of the loaded weights. Without a store the first request that needs it hashes them; others wait."""
    with provider.naming:
        if provider.weights_name is None:
            folders = provider.folder, provider.adapter_folder
            name = weights_in(*folders, Digests(service.root))
            check_unchanged(*folders, provider.stamps)
            provider.weights_name = name
        return provider.weights_name


# -- import ------------------------------------------------------------------------------------------------------------


def import_file(service: AgentService, name: str, path: Path) -> Report:
    """Make an agent of a prompt-cache file of mlx-lm, in the memory of the loaded model whose caches the file holds.

    All agents share a prefix that this store has signed; any other is this agent's alone. Raises RefusedError, and StoreError for
    a file of another format.
    """
    start = time.monotonic()
    service.do(lambda: service.refuse_if_busy(name))
    found = CacheFile.read(path)
    home, names_weights = _home_of(service, found)
    private = found.is_private(names_weights, _key(service))
    if private:
        _check_free(service, name)
    salt = salt_of_import() if private else service.salt
    held: list[Intake] = []
    try:
        service.at(home, lambda _, prefix: held.append(_begin_import(prefix, found.caches)))
        leaves = leaves_of(found.caches)[::-1]
        found.caches.clear()
        while leaves:
            # Read from the file here: what is evaluated may cross threads.
            mx.eval(leaves.pop().state)
            service.at(home, lambda *_: held[0].advance())
        noted = service.at(home, lambda served, prefix: _end_import(served, prefix, found.tokens, held[0], name, salt))
    finally:
        service.do(lambda: _give_back(held))
    measured = service.at(home, lambda _, prefix: measure(prefix, noted, 0))
    report = {"agent": name, "imported": True, "seconds": _since(start), "tokens": noted.tokens}
    return report | privacy_report(private) | in_words(measured)


def _check_free(service: AgentService, name: str) -> None:
    """Raise RefusedError if unproven keys and values would replace a path that was computed here."""
    before = service.look().get(name)
    if is_by_content(name) or (before is not None and not is_of_import(before.path.salt)):
        raise RefusedError(409, name_taken(name))


def _home_of(service: AgentService, file: CacheFile) -> tuple[Home, bool]:
    """The loaded model that a file is of, and whether the file names its weights. Raises RefusedError."""
    homes = service.homes()
    refusals = []
    for home in homes:
        provider, spec, bits = service.at(home, lambda served, prefix: (served.provider, prefix.slabs.spec, _bits(prefix)))
        try:
            file.check(spec, service.at(home, lambda served, _: served.vocab_size))
            names_weights = file.names_weights(provider.name, _weights(service, provider), bits)
            if not names_weights:
                mx.eval([leaf.state for leaf in leaves_of(file.caches)])
                service.at(home, lambda served, _: file.compare(served.provider.name, served.provider.model))
            return home, names_weights
        except StoreError as error:
            refusals.append(str(error))
    raise RefusedError(
        409 if homes else 503, " ".join(refusals) or "Found no loaded model with a pool; needed the file's. Load it."
    )


def _bits(prefix: TieredPrefixCache) -> int | None:
    return None if prefix.stored is None else prefix.stored.bits


def _begin_import(prefix: TieredPrefixCache, caches: list[Any]) -> Intake:
    intake = begin_intake(prefix.slabs, prefix.admission, caches)
    if intake is None:
        pool = prefix.pool
        raise RefusedError(
            503, f"Found no room for the file in the pool's {pool.pool_bytes} bytes; needed some. Try again later."
        )
    return intake


def _end_import(
    served: LoadedModel, prefix: TieredPrefixCache, tokens: list[int], intake: Intake, name: str, salt: bytes
) -> PrefixRef:
    before = agents_of(served).path_of(name)
    if is_of_import(salt) and before is not None and not is_of_import(before.salt):
        # It has had a turn since _check_free().
        raise RefusedError(409, name_taken(name))
    prefix.release(tokens, intake.pooled, terms=RetentionPolicy(salt=salt))
    path = prefix.index.trie.match(tokens, salt).detached()
    hit = resumable(prefix.slabs, prefix.index.trie.find(path).in_memory(), path.tokens)[0]
    if hit < len(tokens):
        raise RefusedError(503, f"Found room for {hit} of {len(tokens)} tokens; needed all. Raise --pool-bytes or unpin agents.")
    agents_of(served).note(name, path)
    return path


def _give_back(held: list[Intake]) -> None:
    while held:
        held.pop().sequence.release()


def _since(start: float) -> float:
    """Seconds since a moment of time.monotonic()."""
    return round(time.monotonic() - start, 3)
