"""What is done to one agent: pin, unpin, rename, fork and delete, in memory and on disk. On the socket's thread, by errands."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...errors import StoreError
from ...formatting import Report
from ...prefix.ref import Freed, SharedPaths, forget, kept_hashes
from ...store import fsck
from ...store.agent_files import Agents
from ...store.agent_records import AgentRecords
from ...store.manifest import shown
from ...store.paths import KINDS
from ...store.prompt_store import PromptStore
from ...store.reachability import Share
from ...store.record import Key
from ...store.scan import File
from ...tier.cache import TieredPrefixCache
from ..model import LoadedModel
from .by_content import is_by_content
from .known import Home, KnownAgents, RefusedError, Subject, agents_of, shared_with
from .served import bound_notes

LONGEST_NAME = 256


def checked_name(name: Any) -> str:
    """Raises RefusedError for what cannot be the name of an agent."""
    if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME or not name.isprintable():
        raise RefusedError(400, f"Found {str(name)[:40]!r} as a name; needed 1 to {LONGEST_NAME} printable characters.")
    return name


# -- names and pins ----------------------------------------------------------------------------------------------------


def pin(known: KnownAgents, name: str) -> Report:
    """Nothing of its path goes, from memory as far as half of the pool allows, and from disk."""
    subject = known.need(name)
    _change_file(known, subject, lambda files: files.pin(subject.name))
    in_memory = False
    if subject.home is not None:
        in_memory = known.at(subject.home, lambda served, _: _pin(served, subject))
    return {"agent": subject.name, "pinned": True, "pinned_in_memory": in_memory, "pinned_on_disk": subject.file is not None}


def _pin(served: LoadedModel, subject: Subject) -> bool:
    agents = agents_of(served)
    # It may have gone on since it was looked for.
    noted = agents.noted.get(subject.name, subject.noted)
    pinned = agents.pin(subject.name, noted.path)
    served.note_turns()
    return pinned


def unpin(known: KnownAgents, name: str) -> Report:
    """It may go like any other."""
    subject = known.need(name)
    _change_file(known, subject, lambda files: files.unpin(subject.name))
    if subject.home is not None:
        known.at(subject.home, lambda served, _: _unpin(served, subject.name))
    return {"agent": subject.name, "pinned": False}


def _unpin(served: LoadedModel, name: str) -> None:
    agents_of(served).unpin(name)
    served.note_turns()


def rename(known: KnownAgents, name: str, new: str) -> Report:
    """The same agent under a name that is free."""
    subject = known.need(name)
    _need_free(known, new)
    known.do(lambda: known.refuse_if_busy(subject.name))
    _change_file(known, subject, lambda files: files.rename(subject.name, new))
    if subject.home is not None:
        known.at(subject.home, lambda served, _: agents_of(served).rename(subject.name, new))
    return {"agent": new, "was": subject.name}


def fork(known: KnownAgents, name: str, new: str) -> Report:
    """A second agent that goes on from where this one is."""
    subject = known.need(name)
    _need_free(known, new)
    _change_file(known, subject, lambda files: files.fork(subject.name, new))
    if subject.home is not None:
        known.at(subject.home, lambda served, _: agents_of(served).fork(new, subject.path))
    return {"agent": new, "of": subject.name, "tokens": subject.path.tokens}


def _need_free(known: KnownAgents, new: str) -> None:
    if is_by_content(new):
        raise RefusedError(400, f"Found {new} as a name; needed another one: names like this are made of what a chat says.")
    if new in known.look():
        raise RefusedError(409, f"Found an agent {shown(new)} already; needed a name that is free.")


def _change_file(known: KnownAgents, subject: Subject, act: Callable[[Agents], object]) -> None:
    """Where the agent has a file. What goes on in memory is noted there first. Raises RefusedError and OSError."""
    if subject.file is None or known.files is None:
        return
    try:
        if subject.home is not None:
            subject.home.agents.run(act)
        else:
            act(known.files)
            bound_notes(known.files, known.config, {})
    except StoreError as error:
        raise RefusedError(409, str(error)) from error


# -- delete ------------------------------------------------------------------------------------------------------------


def delete(known: KnownAgents, name: str) -> Report:
    """Its name, and the records and blocks that only its path stands on; then another look proves that they are gone.

    Raises RefusedError while it has requests, StoreError and OSError.
    """
    subjects = known.look()
    subject = known.need_in(subjects, name)
    on_disk = subject.file is not None and known.root is not None
    if subject.home is None:
        assert known.root is not None
        assert known.records is not None
        known.do(lambda: known.refuse_if_busy(subject.name))
        deleted = known.records.delete(subject.name, known.records.share(subject.name))
        return _below(known.root, {name: value for name, value in deleted.items() if name != "folder"})
    # What its files stand on is known by their names as long as the agent is.
    share = known.records.share(subject.name) if on_disk and known.records is not None else Share([], [])
    shared = shared_with(subject.home, subjects)
    freed, kept = known.at(subject.home, lambda served, prefix: _forget(known, served, prefix, subject, shared))
    report: Report = {
        "agent": subject.name,
        "deleted": True,
        "memory": {"blocks": freed.blocks, "bytes": freed.bytes, "kept": freed.kept},
        "clean": known.at(subject.home, lambda _, prefix: len(prefix.index.trie.find(subject.path).path) <= freed.kept),
    }
    if on_disk and known.records is not None:
        mine = [file for file in share.own if _hash_of(file) not in kept]
        disk = _remove(known, subject, subject.home, known.records, Share(mine, share.stays))
        report |= disk | {"clean": report["clean"] and disk["clean"]}
    return _below(known.root, report)


def _below(root: Path | None, report: Report) -> Report:
    """A report without the place of the store's folder in it."""
    text = json.dumps(report)
    return report if root is None else dict(json.loads(text.replace(json.dumps(f"{root}/")[1:-1], "")))


def _forget(
    known: KnownAgents, served: LoadedModel, prefix: TieredPrefixCache, subject: Subject, shared: SharedPaths
) -> tuple[Freed, set[bytes]]:
    """On the generation thread: forget the path in memory, as far as nobody else needs it, and name what somebody does."""
    known.refuse_if_busy(subject.name)
    agents_of(served).forget(subject.name)
    freed = forget(prefix.index, subject.path, known.own_from(served, prefix, subject, shared))
    if prefix.stored is not None:
        prefix.stored.write_behind(0)
    return freed, kept_hashes(prefix.index, subject.path)


def _remove(known: KnownAgents, subject: Subject, home: Home, records: AgentRecords, share: Share) -> Report:
    """The records that are left of an agent, then its name."""
    keys = [Key(KINDS[file.path.parents[1].name], _hash_of(file)) for file in share.own]

    def forgotten(_: LoadedModel, prefix: TieredPrefixCache) -> PromptStore:
        assert prefix.stored is not None
        prefix.stored.store.forget(keys)
        return prefix.stored.store

    # Waits for the writer's thread, as any thread may.
    known.at(home, forgotten).flush()
    # What another process has written is not known to the store.
    fsck.remove(share.own)
    home.agents.run(lambda files: files.remove(subject.name))
    proof = records.proof(share)
    return {"removed": proof["gone"]} | proof


def _hash_of(file: File) -> bytes:
    return bytes.fromhex(file.path.stem)
