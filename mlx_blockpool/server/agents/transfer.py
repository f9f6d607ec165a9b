"""What takes an agent's path into a prompt-cache file of mlx-lm, and out of one. On the socket's thread, by errands.

No more than a part of a layer is copied between two steps, and in memory beside the pool. A file is whole on disk before its
first byte is sent, so that a client that reads slowly holds no blocks.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx

from ...errors import StoreError
from ...formatting import Report
from ...kv.parts import leaves_of, sequence_of
from ...prefix.intake import Intake, begin_intake
from ...prefix.resume import lay_out_to_read, resumable
from ...prefix.retention import RetentionPolicy
from ...prefix.salts import is_of_import, salt_of_import
from ...prefix.trie import PrefixRef
from ...store.digests import Digests
from ...store.identity import check_unchanged
from ...store.manifest import shown
from ...store.signing import KEY_BYTES, export_key, sign
from ...tier.cache import TieredPrefixCache
from ...tier.measure import measure
from ...tier.opening import weights_in
from ...transfer.cache_file import CacheFile, CacheFileWriter, metadata_of, name_taken, privacy_report
from ..model import LoadedModel
from ..models.provider import BlockpoolModelProvider
from .by_content import is_by_content
from .figures import in_words
from .known import Home, KnownAgents, RefusedError, Subject, agents_of
from .moves import bring_back, since

# -- out ------------------------------------------------------------------------------------------------------------


# Signs what servers without a store export, as long as they run.
_OWN_KEY = secrets.token_bytes(KEY_BYTES)


@contextmanager
def export(known: KnownAgents, name: str) -> Iterator[Path]:
    """The prompt-cache file of mlx-lm with as much of an agent's path as can be resumed. It is there until the block ends.

    Raises RefusedError, StoreError and OSError.
    """
    subject, home = known.need_home(name)
    bring_back(known, home, subject)
    provider = known.at(home, lambda served, _: served.provider)
    weights = _weights(known, provider)
    held: list[tuple[CacheFileWriter, list[Any]]] = []
    try:
        known.at(home, lambda served, prefix: held.append(_begin_export(served, prefix, subject, weights)))
        with known.spool.file(held[0][0].nbytes) as file:
            with file.open("wb") as out:
                for piece in _pieces(known, home, held):
                    out.write(piece)
            known.do(lambda: _end_export(held))
            if not is_of_import(subject.path.salt):
                sign(file, _key(known))
            yield file
    finally:
        known.do(lambda: _end_export(held))


def _key(known: KnownAgents) -> bytes:
    return _OWN_KEY if known.root is None else export_key(known.root)


def _begin_export(
    served: LoadedModel, prefix: TieredPrefixCache, subject: Subject, weights: str
) -> tuple[CacheFileWriter, list[Any]]:
    match = prefix.index.trie.find(subject.path).in_memory()
    hit, checkpoint = resumable(prefix.slabs, match, match.tokens)
    if not hit:
        raise RefusedError(409, f"Found nothing of agent {shown(subject.name)} in memory or on disk; needed some of its path.")
    caches = lay_out_to_read(prefix.slabs, match, hit, checkpoint)
    bits = None if prefix.stored is None else prefix.stored.bits
    metadata = metadata_of(served.provider.public_name, weights, bits, match.token_ids()[:hit])
    return CacheFileWriter(caches, metadata), caches


def _pieces(known: KnownAgents, home: Home, held: list[tuple[CacheFileWriter, list[Any]]]) -> Iterator[bytes]:
    yield held[0][0].head
    for index in range(held[0][0].count):
        yield known.do(partial(_piece, known, home, held, index))


def _piece(known: KnownAgents, home: Home, held: list[tuple[CacheFileWriter, list[Any]]], index: int) -> bytes:
    known.served(home)
    return held[0][0].piece(index)


def _end_export(held: list[tuple[CacheFileWriter, list[Any]]]) -> None:
    while held:
        sequence = sequence_of(held.pop()[1])
        if sequence is not None:
            sequence.release()


def _weights(known: KnownAgents, provider: BlockpoolModelProvider) -> str:
    """The name of the weights that are loaded. Where there is no store, the first who needs it hashes them, and others wait."""
    with provider.naming:
        if provider.weights_name is None:
            folders = provider.folder, provider.adapter_folder
            name = weights_in(*folders, Digests(known.root))
            check_unchanged(*folders, provider.stamps)
            provider.weights_name = name
        return provider.weights_name


# -- import ------------------------------------------------------------------------------------------------------------


def import_file(known: KnownAgents, name: str, path: Path) -> Report:
    """Make an agent of what a prompt-cache file of mlx-lm holds, in the memory of the loaded model that it is of.

    Others share it if this store has signed it; else it is known to this agent alone. Raises RefusedError, and StoreError for a
    file that is not one.
    """
    start = time.monotonic()
    known.do(lambda: known.refuse_if_busy(name))
    found = CacheFile.read(path)
    home, names_weights = _home_of(known, found)
    private = found.is_private(names_weights, _key(known))
    if private:
        _check_free(known, name)
    salt = salt_of_import() if private else known.salt
    held: list[Intake] = []
    try:
        known.at(home, lambda _, prefix: held.append(_begin_import(prefix, found.caches)))
        leaves = leaves_of(found.caches)[::-1]
        found.caches.clear()
        while leaves:
            # Read from the file here: what is evaluated may cross threads.
            mx.eval(leaves.pop().state)
            known.at(home, lambda *_: held[0].advance())
        noted = known.at(home, lambda served, prefix: _end_import(served, prefix, found.tokens, held[0], name, salt))
    finally:
        known.do(lambda: _give_back(held))
    measured = known.at(home, lambda _, prefix: measure(prefix, noted, 0))
    report = {"agent": name, "imported": True, "seconds": since(start), "tokens": noted.tokens}
    return report | privacy_report(private) | in_words(measured)


def _check_free(known: KnownAgents, name: str) -> None:
    """Raises RefusedError where others' keys and values would take the place of what an agent has had computed here."""
    before = known.look().get(name)
    if is_by_content(name) or (before is not None and not is_of_import(before.path.salt)):
        raise RefusedError(409, name_taken(name))


def _home_of(known: KnownAgents, file: CacheFile) -> tuple[Home, bool]:
    """The loaded model whose weights a file names, and True; where it names none, one that it fits. Raises RefusedError."""
    homes = known.homes()
    refusals = []
    for home in homes:
        provider, spec, bits = known.at(home, lambda served, prefix: (served.provider, prefix.slabs.spec, _bits(prefix)))
        try:
            file.check(spec, known.at(home, lambda served, _: served.vocab_size))
            names_weights = file.names_weights(provider.name, _weights(known, provider), bits)
            if not names_weights:
                mx.eval([leaf.state for leaf in leaves_of(file.caches)])
                known.at(home, lambda served, _: file.compare(served.provider.name, served.provider.model))
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
        # It has had a turn since it was looked for.
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
