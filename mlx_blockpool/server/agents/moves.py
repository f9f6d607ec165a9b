"""What brings an agent's path to disk and back into memory. On the socket's thread, by errands.

Both take long, and go on a little between two steps, so that running replies go on as well.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from ...errors import PoolExhaustedError
from ...formatting import Report
from ...prefix.resume import resumable, standing
from ...prefix.trie import PrefixRef
from ...store.limits import OVER_BUDGET
from ...store.manifest import shown
from ...store.record import BLOCK, Key
from ...tier.cache import TieredPrefixCache
from ...tier.measure import Measure, measure
from ...tier.restore import RestoreJob
from ...tier.write_behind import StoredPrefixes
from ..model import LoadedModel
from .figures import in_words
from .known import Home, KnownAgents, RefusedError, Subject, agents_of

# Records are copied into the pool for so long in one errand; between two of them running replies go on.
RESTORE_SECONDS = 0.02
PAUSE_SECONDS = 0.005


def _measure(known: KnownAgents, home: Home, path: PrefixRef) -> Measure:
    return known.at(home, lambda _, prefix: measure(prefix, path, 0))


def _stored(prefix: TieredPrefixCache) -> StoredPrefixes:
    """Raises RefusedError where nothing is kept on disk."""
    if prefix.stored is None:
        raise RefusedError(503, "Found no store for this model; needed one. Start the server without --no-store.")
    return prefix.stored


# -- save --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Saved:
    """How far a path is on disk, or on its way there. `left`: what waits to be handed over."""

    tokens: int
    resumes: int
    wanted: int
    left: int
    written: int
    refused: int
    problem: str | None

    def is_whole(self, tokens: int) -> bool:
        return self.tokens == tokens and self.resumes >= self.wanted


def save(known: KnownAgents, name: str) -> Report:
    """Its path is on disk when this returns: the end of it too, and what layers that forget hold there. Raises RefusedError."""
    subject, home = known.need_home(name)
    path, start = subject.path, time.monotonic()
    before: _Saved | None = None
    store = known.at(home, lambda _, prefix: _stored(prefix).store)
    refused = known.at(home, lambda _, prefix: _note(prefix, path))
    while True:
        now = known.at(home, lambda _, prefix: _saved(prefix, path))
        if now.problem is not None:
            raise RefusedError(503, f"Cannot write: {now.problem}. Needed a disk that works, with room. Try again later.")
        if now == before:
            break
        before = now
        # Waits for the writer's thread, as any thread may; the next look says what became of it.
        store.flush()
    found = _measure(known, home, path)
    if found.tokens_on_disk < path.tokens or (now.refused > refused and not now.is_whole(path.tokens)):
        raise RefusedError(503, _why_not(found, now, path, store.config.store_bytes, now.refused > refused))
    return {"agent": subject.name, "saved": True, "seconds": since(start), "tokens": path.tokens} | in_words(found)


def _note(prefix: TieredPrefixCache, path: PrefixRef) -> int:
    """What is not on disk yet is to be written. Returns how much was refused until now."""
    stored, match = _stored(prefix), prefix.index.trie.find(path)
    stored.note_path(match.path, match.tokens)
    for node in match.path:
        for checkpoint in node.checkpoints.values():
            stored.placed.note(node, checkpoint)
    return stored.store.counts[OVER_BUDGET]


def _saved(prefix: TieredPrefixCache, path: PrefixRef) -> _Saved:
    stored = _stored(prefix)
    stored.write_behind(at_once=True)
    match = prefix.index.trie.find(path)
    found, report = measure(prefix, path, len(match.path)), stored.report()
    at = standing(prefix.slabs, match.in_memory()).position
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


def restore(known: KnownAgents, name: str) -> Report:
    """Its path is back in memory when this returns. Raises RefusedError."""
    subject, home = known.need_home(name)
    start = time.monotonic()
    before = _measure(known, home, subject.path)
    n_bytes = bring_back(known, home, subject)
    found = _measure(known, home, subject.path)
    if found.tokens_in_memory < max(before.tokens_on_disk, 1) or found.resumes_from_memory < before.resumes_from_disk:
        raise RefusedError(
            503,
            f"Found {found.tokens_in_memory} of {subject.path.tokens} tokens in memory and {found.tokens_on_disk} on disk; "
            "needed those on disk to be readable. The agent's next turn computes what is missing.",
        )
    brought = {"restored_tokens": found.tokens_in_memory - before.tokens_in_memory, "restored_bytes": n_bytes}
    return (
        {"agent": subject.name, "restored": True, "seconds": since(start), "tokens": subject.path.tokens}
        | brought
        | in_words(found)
    )


def bring_back(known: KnownAgents, home: Home, subject: Subject) -> int:
    """Bring back what is on disk only. Returns its bytes."""
    # Here it is only held; what is done with it is done in errands.
    held: list[tuple[RestoreJob, int]] = []
    try:
        known.at(home, lambda _, prefix: held.extend(_begin_restore(prefix, subject.path)))
        while held and not known.at(home, lambda served, _: _advance(served, held[0][0])):
            time.sleep(PAUSE_SECONDS)
        return held[0][1] if held else 0
    except PoolExhaustedError as error:
        raise RefusedError(503, f"No room to bring agent {shown(subject.name)} back: {error}") from error
    finally:
        known.do(lambda: _end_restore(known, home, held, subject))


def _advance(served: LoadedModel, restore: RestoreJob) -> bool:
    is_computing = served.engine is not None and bool(served.engine.live)
    return restore.advance(0.0 if is_computing else RESTORE_SECONDS, RESTORE_SECONDS)


def _begin_restore(prefix: TieredPrefixCache, path: PrefixRef) -> list[tuple[RestoreJob, int]]:
    stored = prefix.stored
    if stored is None:
        return []
    match = prefix.index.trie.find(path)
    have = resumable(prefix.slabs, match.in_memory(), match.tokens)[0]
    wanted = stored.wanted(match, match.tokens, have)
    if wanted is None:
        return []
    keys = [Key(BLOCK, node.hash) for node in wanted.missing]
    keys += [] if wanted.node is None else stored.placed.keys(wanted.node, wanted.position)
    return [(stored.restore(wanted), sum(map(stored.store.size, keys)))]


def _end_restore(known: KnownAgents, home: Home, held: list[tuple[RestoreJob, int]], subject: Subject) -> None:
    while held:
        held.pop()[0].release()
        served, _ = known.served(home)
        if subject.name in agents_of(served).pinned:
            agents_of(served).pin(subject.name, agents_of(served).noted.get(subject.name, subject.noted).path)


def since(start: float) -> float:
    """Seconds since a moment of time.monotonic()."""
    return round(time.monotonic() - start, 3)
