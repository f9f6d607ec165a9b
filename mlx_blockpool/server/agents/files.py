"""What takes an agent's path into a prompt-cache file of mlx-lm, and out of one. On the socket's thread, by errands.

No more than a part of a layer is copied between two steps, and in memory beside the pool.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx

from ... import exchange
from ...cache.outgoing import Outgoing
from ...cache.parts import leaves_of, sequence_of
from ...errors import StoreError
from ...prefix.cache import PrefixCache
from ...prefix.intake import Intake, begin_intake
from ...prefix.noted import NotedPath, find, measure, path_of, tokens_of
from ...prefix.opening import weights_in
from ...prefix.resume import lay_out_to_read, resumable
from ...store.manifest import shown
from ...storing import Report
from ..models.provider import BlockpoolModelProvider
from ..served import ServedModel
from .figures import in_words
from .known import Home, KnownAgents, RefusedError, Subject, agents_of
from .moves import bring_back, since

# -- out ------------------------------------------------------------------------------------------------------------


@contextmanager
def export(known: KnownAgents, name: str) -> Iterator[tuple[int, Iterator[bytes]]]:
    """The prompt-cache file of mlx-lm with as much of an agent's path as can be resumed: its length, and its bytes bit by bit.

    Its blocks are held meanwhile. Raises RefusedError.
    """
    subject, home = known.need_home(name)
    bring_back(known, home, subject)
    provider = known.at(home, lambda served, _: served.provider)
    weights = _weights(provider)
    held: list[tuple[Outgoing, list[Any]]] = []
    try:
        known.at(home, lambda served, prefix: held.append(_begin_export(served, prefix, subject, weights)))
        yield held[0][0].nbytes, _pieces(known, home, held)
    finally:
        known.do(lambda: _end_export(held))


def _begin_export(served: ServedModel, prefix: PrefixCache, subject: Subject, weights: str) -> tuple[Outgoing, list[Any]]:
    match = find(prefix.known.trie, subject.path).in_memory()
    hit, checkpoint = resumable(prefix.slabs, match, match.tokens)
    if not hit:
        raise RefusedError(409, f"Found nothing of agent {shown(subject.name)} in memory or on disk; needed some of its path.")
    caches = lay_out_to_read(prefix.slabs, match, hit, checkpoint)
    bits = None if prefix.stored is None else prefix.stored.bits
    metadata = exchange.metadata_of(served.provider.public_name, weights, bits, tokens_of(match)[:hit])
    return Outgoing(caches, metadata), caches


def _pieces(known: KnownAgents, home: Home, held: list[tuple[Outgoing, list[Any]]]) -> Iterator[bytes]:
    yield held[0][0].head
    for index in range(held[0][0].count):
        yield known.do(partial(_piece, known, home, held, index))


def _piece(known: KnownAgents, home: Home, held: list[tuple[Outgoing, list[Any]]], index: int) -> bytes:
    known.served(home)
    return held[0][0].piece(index)


def _end_export(held: list[tuple[Outgoing, list[Any]]]) -> None:
    while held:
        sequence = sequence_of(held.pop()[1])
        if sequence is not None:
            sequence.release()


def _weights(provider: BlockpoolModelProvider) -> str:
    adapter = provider.model_key[1]
    return weights_in(provider.folder, Path(adapter) if adapter else None)


# -- import ------------------------------------------------------------------------------------------------------------


def take_in(known: KnownAgents, name: str, file: Path) -> Report:
    """Make an agent of what a prompt-cache file of mlx-lm holds, in the memory of the loaded model that it is of.

    Raises RefusedError, and StoreError for a file that is not one.
    """
    start = time.monotonic()
    known.do(lambda: known.refuse_if_busy(name))
    caches, metadata = exchange.read(file)
    tokens = exchange.tokens_in(metadata, file)
    home = _home_of(known, caches, metadata, tokens)
    held: list[Intake] = []
    try:
        known.at(home, lambda _, prefix: held.append(_begin_import(prefix, caches)))
        leaves = leaves_of(caches)[::-1]
        caches.clear()
        while leaves:
            # Read from the file here: what is evaluated may cross threads.
            mx.eval(leaves.pop().state)
            known.at(home, lambda *_: held[0].advance())
        path = known.at(home, lambda served, prefix: _end_import(served, prefix, tokens, held[0], name))
    finally:
        known.do(lambda: _give_back(held))
    found = known.at(home, lambda _, prefix: measure(prefix, path, 0))
    return {"agent": name, "imported": True, "seconds": since(start), "tokens": path.tokens} | in_words(found)


def _home_of(known: KnownAgents, caches: list[Any], metadata: dict[str, Any], tokens: list[int]) -> Home:
    """The loaded model whose weights a file names; where it names none, one that it fits. Raises RefusedError."""
    homes = known.homes()
    refusals = []
    for home in homes:
        provider, spec, bits = known.at(home, lambda served, prefix: (served.provider, prefix.slabs.spec, _bits(prefix)))
        try:
            exchange.check_shapes(spec, caches, tokens)
            if not exchange.says_origin(provider.name, _weights(provider), bits, metadata, tokens):
                mx.eval([leaf.state for leaf in leaves_of(caches)])
                known.at(home, lambda served, _: exchange.compare(served.provider.name, served.provider.model, caches, tokens))
            return home
        except StoreError as error:
            refusals.append(str(error))
    raise RefusedError(
        409 if homes else 503, " ".join(refusals) or "Found no loaded model with a pool; needed the file's. Load it."
    )


def _bits(prefix: PrefixCache) -> int | None:
    return None if prefix.stored is None else prefix.stored.bits


def _begin_import(prefix: PrefixCache, caches: list[Any]) -> Intake:
    intake = begin_intake(prefix.slabs, prefix.room, caches)
    if intake is None:
        pool = prefix.pool
        raise RefusedError(
            503, f"Found no room for the file in the pool's {pool.pool_bytes} bytes; needed some. Try again later."
        )
    return intake


def _end_import(served: ServedModel, prefix: PrefixCache, tokens: list[int], intake: Intake, name: str) -> NotedPath:
    prefix.finish(tokens, intake.pooled)
    path = path_of(prefix.known.trie, tokens)
    hit = resumable(prefix.slabs, find(prefix.known.trie, path).in_memory(), path.tokens)[0]
    if hit < len(tokens):
        raise RefusedError(503, f"Found room for {hit} of {len(tokens)} tokens; needed all. Raise --pool-bytes or unpin agents.")
    agents_of(served).note(name, path)
    return path


def _give_back(held: list[Intake]) -> None:
    while held:
        held.pop().sequence.release()
