"""Checks of cached prefixes: in memory, after a restart, and over damaged records."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import mlx.core as mx

from ..config import StoreConfig
from ..spec import BLOCK_TOKENS, WindowLayer
from ..store.fs import Disk
from ..store.paths import FOLDERS
from ..store.prompt_store import PromptStore
from ..store.record import BLOCK, STATE, SUFFIX, WINDOW
from ..tier.cache import TieredPrefixCache
from .outcome import ConformanceError, NotCheckedError
from .runs import allowed, cold, content, cut, exactly, run, same
from .subject import Subject

# Of each kind: this many records, and in each a bit of the header, one in the middle and one of the last byte.
RECORDS = 3
ROOM = 16
HINT = "A layer whose spec is right may have a cache class that keeps more than its arrays; describe it with another kind."


class Unsynced(Disk):
    """A disk without syncs: its folder is deleted after the check, so it need not survive a power loss."""

    def sync(self, fd: int) -> None:
        """Does nothing."""


class Life:
    """What a server does with its prefix cache from start to stop, without the server."""

    def __init__(self, subject: Subject, folder: Path | None = None) -> None:
        self.subject = subject
        store = None
        if folder is not None:
            config = StoreConfig(folder=folder, min_free_bytes=0)
            store = PromptStore(config, "conformance", {"model_id": subject.model_id}, Unsynced())
        self.prefix = TieredPrefixCache(subject.arena(), store=store)

    def serve(self, tokens: Sequence[int], places: Iterable[int] = ()) -> tuple[int, list[mx.array]]:
        """Resume from the longest cached prefix, and insert the prompt at `places` and at its end.

        Returns the hit, and the logits after the first token beyond it, each place and the prompt.
        """
        acquired = self.prefix.acquire(list(tokens), ROOM)
        hit = done = acquired.lookup.hit
        found = []
        for part in cut(acquired.rest, (place - hit for place in (hit + 1, *places))):
            found += run(self.subject.model, acquired.caches, [part])
            done += len(part)
            if done in places:
                self.prefix.insert(list(tokens[:done]), acquired.caches, "system")
        self.prefix.release(list(tokens), acquired.caches)
        self.prefix.check()
        return hit, found

    def find(self, tokens: Sequence[int], at_most: int | None = None) -> tuple[int, list[bytes]]:
        """Look a prompt up; its hit, and the content of the caches that it receives."""
        acquired = self.prefix.acquire(list(tokens), ROOM, at_most)
        found = acquired.lookup.hit, content(acquired.caches)
        self.prefix.discard(acquired.caches)
        return found


class Conversation:
    """A prompt whose beginning is kept by itself, at `system` tokens, and where one that has it in common can be resumed."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.system = max([BLOCK_TOKENS, *subject.short_sizes]) + 14
        self.tokens = subject.tokens(11, self.system + 30)
        self.forked = [*self.tokens[: self.system + 10], *subject.tokens(12, 7)]
        self.longer = [*self.tokens, *subject.tokens(13, 9)]

    def resumed_at(self, known: int, places: Sequence[int]) -> int:
        """The token at which a prompt with `known` common tokens is resumed by its spec: any, or one with a checkpoint."""
        spec = self.subject.spec
        windows = [leaf.max_size for leaf in spec.leaves if isinstance(leaf, WindowLayer)]
        later = [place for place in places if place >= known]
        unwrapped = not self.subject.has_states and bool(later) and min(later) < min(windows, default=0)
        if not spec.needs_checkpoints or unwrapped:
            return known
        return max((place for place in places if place <= known), default=0)


# -- the checks --------------------------------------------------------------------------------------------------------


def check_warm(subject: Subject) -> str:
    """A prompt that extends a cached one gives the logits of a cold run, and is resumed as far as its layers allow."""
    chat, life = Conversation(subject), Life(subject)
    places = [chat.system]
    gap = _continue(life, chat.tokens, 0, places)
    places.append(len(chat.tokens))
    fork = chat.resumed_at(chat.system + 10, places)
    gap = max(gap, _continue(life, chat.forked, fork))
    gap = max(gap, _continue(life, chat.longer, len(chat.tokens)))
    places.append(len(chat.longer))
    again = chat.resumed_at(len(chat.tokens) - 1, places)
    gap = max(gap, _continue(life, chat.tokens, again))
    gap = max(gap, _continue(life, [chat.tokens[1], chat.tokens[0], *chat.tokens], 0))
    return f"resumed at {len(chat.tokens)}, {fork} and {again} of {len(chat.longer)} tokens; {exactly(gap)}"


def check_restart(subject: Subject) -> str:
    """Records are restored bit for bit, at the same positions, and give the logits of a cold run."""
    _must_be_storable(subject)
    chat = Conversation(subject)
    with _written(subject, chat) as (folder, before):
        life = Life(subject, folder)
        hits = []
        for prompt in (chat.longer, chat.forked):
            needed, found = before.find(prompt), life.find(prompt)
            if needed != found:
                what = f"{found[0]} tokens" if needed[0] != found[0] else f"other bits in {_differing(needed[1], found[1])}"
                raise ConformanceError(f"{what} after a restart", f"the {needed[0]} that were known before, bit for bit", HINT)
            hits.append(found[0])
        gap = _continue(life, chat.longer, hits[0])
        _close(life)
    return f"{hits[0]} and {hits[1]} tokens, bit for bit; {exactly(gap)}"


def check_damage(subject: Subject) -> str:
    """A flipped bit in a record of any kind is a miss: never a wrong key, a wrong state or a crash."""
    _must_be_storable(subject)
    chat = Conversation(subject)
    with _written(subject, chat) as (folder, before), _quiet():
        _close(before)
        truth = Life(subject, folder)
        found = {kind: sorted(folder.glob(f"models/*/{name}/*/*{SUFFIX}")) for kind, name in FOLDERS.items()}
        kinds = {kind: records for kind, records in found.items() if records}
        missing = _needed_kinds(subject) - set(kinds)
        if missing:
            raise ConformanceError(f"no {' and no '.join(sorted(missing))} records on disk", "some of each kind", HINT)
        trials = 0
        for records in kinds.values():
            for record in records[:RECORDS]:
                size = record.stat().st_size
                for place in (16, size // 2, size - 1):
                    _survives(chat, folder, [record], place, truth)
                    trials += 1
            hit = _survives(chat, folder, records, -1, truth)
            if hit >= len(chat.tokens):
                needed = "less: none of them proves itself"
                raise ConformanceError(f"{hit} tokens over records that each have a bit flipped", needed, HINT)
        _close(truth)
    return f"{trials} flipped bits in {', '.join(kinds)} records"


def _continue(life: Life, prompt: Sequence[int], hit: int, places: Sequence[int] = ()) -> float:
    """Serve a prompt and return the distance of its logits from a cold run in the same parts."""
    found, logits = life.serve(prompt, places)
    if found != hit:
        raise ConformanceError(
            f"a prompt of {len(prompt)} tokens resumed at {found}", f"{hit}, where its layers can be resumed", HINT
        )
    parts = cut(prompt, [hit, hit + 1, *places])
    needed = cold(life.subject, parts)[len(parts) - len(logits) :]
    behind = [prompt[: hit + 1], *parts[len(parts) - len(logits) + 1 :]]
    return same(needed, logits, behind, f"resumed at {hit}", allowed(life.subject, parts))


@contextmanager
def _written(subject: Subject, chat: Conversation) -> Iterator[tuple[Path, Life]]:
    """A folder with the records of a conversation, and the life that has written them and still has them in memory."""
    with TemporaryDirectory(prefix="mlx-blockpool-conformance-") as name:
        folder = Path(name, "whole")
        life = Life(subject, folder)
        life.serve(chat.tokens, [chat.system])
        life.serve(chat.tokens[: chat.system])
        if not life.prefix.close():
            raise ConformanceError(f"records that could not be written to {folder}", "a folder that takes them", "Set TMPDIR.")
        yield folder, life


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the store's warnings, which these checks provoke."""
    log = logging.getLogger(__name__.partition(".")[0])
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


def _survives(chat: Conversation, folder: Path, records: Sequence[Path], place: int, truth: Life) -> int:
    """Flip one bit in each of `records` in a copy of the folder, and serve prompts from it. Returns the hit of the longer one."""
    copy = folder.with_name("flipped")
    shutil.copytree(folder, copy)
    for record in records:
        path = copy / record.relative_to(folder)
        data = bytearray(path.read_bytes())
        data[place] ^= 1 << 4
        path.write_bytes(data)
    life = Life(chat.subject, copy)
    hits = []
    for prompt in (chat.longer, chat.forked):
        hit, held = life.find(prompt)
        hits.append(hit)
        if hit and (hit, held) != truth.find(prompt, hit):
            names = f"{records[0].relative_to(folder)}" + (f" and {len(records) - 1} more" if records[1:] else "")
            raise ConformanceError(f"other bits at token {hit} where a bit of {names} was flipped", "a miss", HINT)
    _close(life)
    shutil.rmtree(copy)
    return hits[0]


def _close(life: Life) -> None:
    assert life.prefix.stored is not None
    life.prefix.stored.store.close()


def _needed_kinds(subject: Subject) -> set[str]:
    windows = {WINDOW} if any(isinstance(leaf, WindowLayer) for leaf in subject.spec.leaves) else set()
    return {BLOCK} | windows | ({STATE} if subject.has_states else set())


def _must_be_storable(subject: Subject) -> None:
    if any(isinstance(leaf, WindowLayer) and leaf.keep for leaf in subject.spec.leaves):
        raise NotCheckedError("Windows that keep their first tokens are not written to disk.")


def _differing(needed: Sequence[bytes], found: Sequence[bytes]) -> str:
    if len(needed) != len(found):
        return f"{len(found)} arrays where there were {len(needed)}"
    return "arrays " + ", ".join(str(i) for i, (a, b) in enumerate(zip(needed, found, strict=True)) if a != b)
