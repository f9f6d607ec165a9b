"""Transfers of one agent's prefix: to disk, back into memory, into a prompt-cache file of mlx-lm, and out of one.

On the socket's thread; what touches memory runs on the generation thread, a little between two decode steps, so that replies in
progress continue. A file is whole on disk before its first byte is sent, so that a client that reads slowly holds no blocks.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

import mlx.core as mx

from ...errors import PoolExhaustedError, StoreError
from ...formatting import Report
from ...kv.intake import Intake
from ...kv.parts import leaves_of
from ...prefix.resume import in_memory, pin_of, resumable
from ...prefix.retention import RetentionPolicy
from ...prefix.salts import SHARED, is_of_import, salt_marked, salt_of_import
from ...prefix.trie import PrefixRef
from ...ranks.facts import BringBack, Gather, GatherEnd, GatherPart, Save, WriteOut
from ...spec import ModelCacheSpec
from ...store.agent_files import shown
from ...store.identity import Digests, check_unchanged, identity
from ...store.limits import OVER_BUDGET
from ...store.prompt_store import PromptStore
from ...store.signing import KEY_BYTES, export_key, sign
from ...tier.cache import Measure, TieredPrefixCache
from ...tier.path_acts import PathFact, name_of
from ...tier.restore import RestoreJob
from ...tier.write_behind import StoredPrefixes
from ...transfer.cache_file import CacheFile, CacheFileWriter, check_agent, privacy_report
from ..api.errors import StatusError
from ..model import LoadedModel
from ..models.provider import BlockpoolModelProvider
from .conversation_id import is_conversation_id
from .served import path_of
from .service import AgentService, AgentView, Home, acts_of, agents_of

# Records are copied into the pool for this long between two decode steps.
RESTORE_SECONDS = 0.02
PAUSE_SECONDS = 0.005
# Signs what servers without a store export, as long as they run.
_OWN_KEY = secrets.token_bytes(KEY_BYTES)
# Of exports.
_numbers = count(1)


def _measure(service: AgentService, home: Home, path: PrefixRef) -> Measure:
    return service.at(home, lambda _, prefix: prefix.measure(path, 0))


def _refuse_on_several_ranks(service: AgentService, home: Home, why: str) -> None:
    """Raise StatusError with a reason if several ranks share the model, of which each has a part of every cache."""
    if service.at(home, lambda served, _: acts_of(served).ranks.size) > 1:
        raise StatusError(400, f"Several ranks share {shown(home.model)}: {why}")


def _agreed(service: AgentService, home: Home, fact: PathFact) -> Any:
    """What all ranks make of a fact."""
    return service.agree(home, lambda served, _, then: acts_of(served).propose(fact, then))


def _stored(prefix: TieredPrefixCache) -> StoredPrefixes:
    """The store's side of a model's prefixes. Raises StatusError if there is no store."""
    if prefix.stored is None:
        raise StatusError(503, "This server has no store for the model. Start it without --no-store.")
    return prefix.stored


# -- save --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Saved:
    """The part of a path that is on disk.

    position:  of the last checkpoint that is in memory.
    left:      records that wait for the writer, or for a rest.
    written, refused: how many records the store has written so far, and how many its budget has rejected.
    """

    measure: Measure
    position: int
    left: int
    written: int
    refused: int


def save(service: AgentService, name: str) -> Report:
    """Write all of an agent's path to disk, with its partial last block, windows and states. Raises StatusError."""
    view, home = service.need_home(name)
    path, start = view.path, time.monotonic()
    store, refused = service.at(home, lambda _, prefix: _store_of(prefix))
    _agreed(service, home, Save(name_of(path)))
    before, now = None, _saved(service, home, path)
    while now != before:
        if store.problem is not None:
            raise StatusError(503, f"The store cannot write: {store.problem}. Free some space or repair the disk, and try again.")
        # Waits for the writer's thread, which any thread may do.
        store.flush()
        before, now = now, _saved(service, home, path)
    found, is_full = now.measure, now.refused > refused
    is_whole = found.tokens_on_disk == path.tokens
    if not is_whole or (is_full and found.resumes_from_disk < now.position):
        raise StatusError(503, _why_not(now, path, store.config.store_bytes if is_full else None))
    return {"agent": view.name, "saved": True, "seconds": _since(start), "tokens": path.tokens} | asdict(found)


def _store_of(prefix: TieredPrefixCache) -> tuple[PromptStore, int]:
    """The store, and how many records its budget has rejected so far."""
    store = _stored(prefix).store
    return store, store.counts[OVER_BUDGET]


def _saved(service: AgentService, home: Home, path: PrefixRef) -> _Saved:
    """Write what is queued, and look how far the path is on disk."""
    _agreed(service, home, WriteOut())
    return service.at(home, lambda _, prefix: _look(prefix, path))


def _look(prefix: TieredPrefixCache, path: PrefixRef) -> _Saved:
    stored = _stored(prefix)
    position = pin_of(prefix.arena, in_memory(prefix.index.trie.find(path))).position
    report, counts = stored.report(), stored.store.counts
    return _Saved(
        prefix.measure(path, 0), position, report["pending"] + report["resting"], counts["written"], counts[OVER_BUDGET]
    )


def _why_not(saved: _Saved, path: PrefixRef, full: int | None) -> str:
    """Explain why a path is not whole on disk. `full`: the bytes of a store that has no room."""
    found = saved.measure
    there = f"{found.tokens_on_disk} of {path.tokens} tokens are on disk and {found.tokens_in_memory} in memory"
    if full is not None:
        return f"{there}, and the store's {full} bytes have no room for the rest. Raise --store-bytes or unpin agents."
    if found.tokens_in_memory < path.tokens:
        return f"{there}. The agent's next turn computes the missing ones."
    return f"{there}, and {saved.left} records still wait for the disk. Try again later."


# -- restore -----------------------------------------------------------------------------------------------------------


def restore(service: AgentService, name: str) -> Report:
    """Bring all of an agent's path on disk back into memory. Raises StatusError."""
    view, home = service.need_home(name)
    start = time.monotonic()
    before = _measure(service, home, view.path)
    n_bytes = bring_back(service, home, view)
    found = _measure(service, home, view.path)
    if found.tokens_in_memory < max(before.tokens_on_disk, 1) or found.resumes_from_memory < before.resumes_from_disk:
        raise StatusError(
            503,
            f"Only {found.tokens_in_memory} of {view.path.tokens} tokens are in memory and {found.tokens_on_disk} on disk: "
            "some records cannot be read. The agent's next turn computes the missing tokens.",
        )
    brought = {"restored_tokens": found.tokens_in_memory - before.tokens_in_memory, "restored_bytes": n_bytes}
    report = {"agent": view.name, "restored": True, "seconds": _since(start), "tokens": view.path.tokens}
    return report | brought | asdict(found)


def bring_back(service: AgentService, home: Home, view: AgentView) -> int:
    """Bring records that are only on disk into memory. Returns their bytes."""
    begun = _agreed(service, home, BringBack(name_of(view.path)))
    if isinstance(begun, PoolExhaustedError):
        raise StatusError(503, f"No room to bring agent {shown(view.name)} back: {begun}") from begun
    if not isinstance(begun, RestoreJob):
        return 0
    try:
        while not service.at(home, lambda served, _: _advance(served, begun)):
            time.sleep(PAUSE_SECONDS)
    finally:
        service.do(lambda: _end_restore(service, home, view, begun))
    return begun.n_bytes


def _advance(served: LoadedModel, job: RestoreJob) -> bool:
    is_computing = served.engine is not None and bool(served.engine.live)
    return job.advance(0.0 if is_computing else RESTORE_SECONDS, RESTORE_SECONDS)


def _end_restore(service: AgentService, home: Home, view: AgentView, job: RestoreJob) -> None:
    """Let the blocks go, which a pinned agent keeps in memory from now on."""
    job.let_go()
    agents = agents_of(service.served(home)[0])
    if view.name in agents.pinned:
        agents.pin(view.name, path_of(agents.noted.get(view.name, view.agent)))


# -- export ------------------------------------------------------------------------------------------------------------


@contextmanager
def export(service: AgentService, name: str) -> Iterator[Path]:
    """A prompt-cache file of mlx-lm with an agent's longest prefix that can be resumed; it is gone after the block.

    Of several ranks each has some heads of every layer, which are put together.
    """
    view, home = service.need_home(name)
    service.at(home, _check_heads)
    bring_back(service, home, view)
    weights = _weights(service, service.at(home, lambda served, _: served.provider))
    number = next(_numbers)
    try:
        writer = _begin_export(service, home, view, number, weights)
        with service.scope.generator.spool.file(writer.nbytes) as file:
            with file.open("wb") as out:
                out.write(writer.head)
                for place in writer.places:
                    part = GatherPart(number, place.name, place.head)
                    for rank, piece in enumerate(_agreed(service, home, part)):
                        out.seek(place.offset(rank))
                        out.write(piece)
            _end_export(service, home, number)
            if not is_of_import(view.agent.salt):
                sign(file, _key(service))
            yield file
    finally:
        _end_export(service, home, number)


def _check_heads(served: LoadedModel, prefix: TieredPrefixCache) -> None:
    """Raise StatusError unless the ranks, if there are several, have parts of equal layers that can be put together."""
    ranks, arena = acts_of(served).ranks, prefix.arena
    if ranks.size > 1 and (ranks.kind != "tensor" or not arena.ragged or arena.state_leaves):
        why = "are stages of a pipeline" if ranks.kind == "pipeline" else "share layers whose caches cannot be put together"
        raise StatusError(400, f"The ranks {why}. Export from a server of one rank.")


def _begin_export(service: AgentService, home: Home, view: AgentView, number: int, weights: str) -> CacheFileWriter:
    found = _agreed(service, home, Gather(number, name_of(view.path)))
    if found is False:
        raise StatusError(409, f"Nothing of agent {shown(view.name)} is in memory or on disk. Its next turn computes it again.")
    pieces, hit = found

    def begin(served: LoadedModel, prefix: TieredPrefixCache) -> CacheFileWriter:
        name, spec, tokens = served.provider.public_name, prefix.arena.spec, prefix.index.trie.find(view.path).token_ids()[:hit]
        return CacheFileWriter(pieces, name, weights, spec, _bits(prefix), tokens, view.agent.salt, acts_of(served).ranks.size)

    return service.at(home, begin)


def _end_export(service: AgentService, home: Home, number: int) -> None:
    with suppress(StatusError):
        # A model that was unloaded holds nothing any more.
        _agreed(service, home, GatherEnd(number))


def _key(service: AgentService) -> bytes:
    return _OWN_KEY if service.root is None else export_key(service.root)


def _bits(prefix: TieredPrefixCache) -> int | None:
    return None if prefix.stored is None else prefix.stored.bits


def _weights(service: AgentService, provider: BlockpoolModelProvider) -> str:
    """The name of the loaded weights. Without a store the first request that needs it hashes them; others wait."""
    with provider.naming:
        if provider.weights_name is None:
            folders = provider.folder, provider.adapter_folder
            name = identity(*folders, Digests(service.root))
            check_unchanged(*folders, provider.stamps)
            provider.weights_name = name
        return provider.weights_name


# -- import ------------------------------------------------------------------------------------------------------------


def import_file(service: AgentService, name: str, path: Path) -> Report:
    """Make an agent of a prompt-cache file of mlx-lm, in the memory of the loaded model whose caches the file holds.

    All agents share a prefix that this store has signed; any other is this agent's alone. Raises StatusError, and StoreError for
    a file or a key that cannot be read.
    """
    start = time.monotonic()
    service.do(lambda: service.refuse_if_busy(name))
    found = CacheFile.read(path)
    home, names_weights, spec = _home_of(service, found)
    why = found.why_private(names_weights, _key(service), spec)
    if why is not None:
        before = service.look().get(name)
        # Names that chats get by their content are never free.
        _refuse_overwriting(name, SHARED if is_conversation_id(name) else None if before is None else before.agent.salt, why)
    salt = salt_of_import() if why is not None else salt_marked(found.mark, service.scope.private_key)
    intake = service.at(home, lambda _, prefix: _begin_import(prefix, found.caches))
    try:
        leaves = leaves_of(found.caches)[::-1]
        found.caches.clear()
        while leaves:
            # Read from the file here: what is evaluated may cross threads.
            mx.eval(leaves.pop().state)
            service.at(home, lambda *_: intake.advance())
        noted = service.at(home, lambda served, prefix: _end_import(served, prefix, found.tokens, intake, name, salt, why))
    finally:
        service.do(intake.sequence.release)
    report = {"agent": name, "imported": True, "seconds": _since(start), "tokens": noted.tokens}
    return report | privacy_report(why) | asdict(_measure(service, home, noted))


def _refuse_overwriting(name: str, salt: bytes | None, why: str) -> None:
    """check_agent(), as a StatusError: the agent is in the way, and nothing is wrong with the file."""
    try:
        check_agent(name, salt, why)
    except StoreError as error:
        raise StatusError(409, str(error)) from error


def _home_of(service: AgentService, file: CacheFile) -> tuple[Home, bool, ModelCacheSpec]:
    """The loaded model that a file is of, whether the file names its weights, and its spec. Raises StatusError."""
    homes = service.homes()
    refusals = []
    for home in homes:
        _refuse_on_several_ranks(service, home, "each takes a part of every cache. Import into a server of one rank.")
        provider, vocab_size = service.at(home, lambda served, _: (served.provider, served.vocab_size))
        spec, bits = service.at(home, lambda _, prefix: (prefix.arena.spec, _bits(prefix)))
        try:
            file.check(spec, vocab_size)
            names_weights = file.names_weights(provider.name, _weights(service, provider), bits)
            if not names_weights:
                mx.eval([leaf.state for leaf in leaves_of(file.caches)])
                service.at(
                    home, lambda served, prefix: file.compare(served.provider.name, served.provider.model, prefix.arena.spec)
                )
            return home, names_weights, spec
        except StoreError as error:
            refusals.append(str(error))
    raise StatusError(409 if homes else 503, " ".join(refusals) or "No model with a pool is loaded. Load the file's model first.")


def _begin_import(prefix: TieredPrefixCache, caches: list[Any]) -> Intake:
    intake = prefix.admission.admit_import(caches)
    if intake is None:
        raise StatusError(503, f"The pool's {prefix.pool.pool_bytes} bytes have no room for the file now. Try again later.")
    return intake


def _end_import(
    served: LoadedModel, prefix: TieredPrefixCache, tokens: list[int], intake: Intake, name: str, salt: bytes, why: str | None
) -> PrefixRef:
    before = agents_of(served).path_of(name)
    if why is not None and before is not None:
        # It may have had a turn since import_file() has looked.
        _refuse_overwriting(name, before.salt, why)
    prefix.release(tokens, intake.pooled, policy=RetentionPolicy(salt=salt))
    path = prefix.index.trie.match(tokens, salt).detached()
    hit = resumable(prefix.arena, in_memory(prefix.index.trie.find(path)), path.tokens)[0]
    if hit < len(tokens):
        raise StatusError(503, f"The pool has room for {hit} of the file's {len(tokens)} tokens. Raise --pool-bytes or unpin.")
    agents_of(served).note(name, path)
    return path


def _since(start: float) -> float:
    """Seconds since a moment of time.monotonic()."""
    return round(time.monotonic() - start, 3)
