"""Checks of cached prefixes: in memory, after a restart, and over damaged records."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from ..spec import WindowLayer
from ..store.paths import FOLDERS
from ..store.record import BLOCK, STATE, SUFFIX, WINDOW
from .lives import Conversation, Life
from .outcome import ConformanceError, NotCheckedError
from .runs import allowed, cold, cut, exactly, same
from .subject import Subject

# Of each kind: so many records, and in each a bit of the header, one in the middle and one of the last byte.
RECORDS = 3
HINT = "A layer whose spec is right may have a cache class that keeps more than its arrays; describe it with another kind."


def check_warm(subject: Subject) -> str:
    """A prompt that extends a cached one gives the logits of a cold run, and is resumed as far as its layers allow."""
    told, life = Conversation(subject), Life(subject)
    places = [told.system]
    gap = _goes_on(life, told.tokens, 0, places)
    places.append(len(told.tokens))
    fork = told.resumed_at(told.system + 10, places)
    gap = max(gap, _goes_on(life, told.forked, fork))
    gap = max(gap, _goes_on(life, told.longer, len(told.tokens)))
    places.append(len(told.longer))
    again = told.resumed_at(len(told.tokens) - 1, places)
    gap = max(gap, _goes_on(life, told.tokens, again))
    gap = max(gap, _goes_on(life, [told.tokens[1], told.tokens[0], *told.tokens], 0))
    return f"resumed at {len(told.tokens)}, {fork} and {again} of {len(told.longer)} tokens; {exactly(gap)}"


def check_restart(subject: Subject) -> str:
    """Records are restored bit for bit, at the same positions, and give the logits of a cold run."""
    _must_be_storable(subject)
    told = Conversation(subject)
    with _written(subject, told) as (folder, before):
        life = Life(subject, folder)
        hits = []
        for prompt in (told.longer, told.forked):
            needed, found = before.find(prompt), life.find(prompt)
            if needed != found:
                what = f"{found[0]} tokens" if needed[0] != found[0] else f"other bits in {_differing(needed[1], found[1])}"
                raise ConformanceError(f"{what} after a restart", f"the {needed[0]} that were known before, bit for bit", HINT)
            hits.append(found[0])
        gap = _goes_on(life, told.longer, hits[0])
        _close(life)
    return f"{hits[0]} and {hits[1]} tokens, bit for bit; {exactly(gap)}"


def check_damage(subject: Subject) -> str:
    """A flipped bit in a record of any kind is a miss: never a wrong key, a wrong state or a crash."""
    _must_be_storable(subject)
    told = Conversation(subject)
    with _written(subject, told) as (folder, before), _quiet():
        _close(before)
        truth = Life(subject, folder)
        kinds = {kind: records for kind in FOLDERS if (records := _records(folder, kind))}
        missing = _needed_kinds(subject) - set(kinds)
        if missing:
            raise ConformanceError(f"no {' and no '.join(sorted(missing))} records on disk", "some of each kind", HINT)
        trials = 0
        for records in kinds.values():
            for record in records[:RECORDS]:
                for place in (lambda n: 16, lambda n: n // 2, lambda n: n - 1):
                    _survives(subject, told, folder, [record], place, truth)
                    trials += 1
            hit = _survives(subject, told, folder, records, lambda n: n - 1, truth)
            if hit >= len(told.tokens):
                needed = "less: none of them proves itself"
                raise ConformanceError(f"{hit} tokens over records that each have a bit flipped", needed, HINT)
        _close(truth)
    return f"{trials} flipped bits in {', '.join(kinds)} records"


def _goes_on(life: Life, prompt: Sequence[int], hit: int, places: Sequence[int] = ()) -> float:
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
def _written(subject: Subject, told: Conversation) -> Iterator[tuple[Path, Life]]:
    """A folder with the records of a conversation, and the life that has written them and still has them in memory."""
    with TemporaryDirectory(prefix="mlx-blockpool-conformance-") as name:
        folder = Path(name, "whole")
        life = Life(subject, folder)
        life.serve(told.tokens, [told.system])
        life.serve(told.tokens[: told.system])
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


def _survives(
    subject: Subject, told: Conversation, folder: Path, records: Sequence[Path], place: Callable[[int], int], truth: Life
) -> int:
    """Flip one bit in each of `records` in a copy of the folder, and serve prompts from it. Returns the hit of the longer one."""
    copy = folder.with_name("flipped")
    shutil.copytree(folder, copy)
    for record in records:
        path = copy / record.relative_to(folder)
        data = bytearray(path.read_bytes())
        data[place(len(data))] ^= 1 << 4
        path.write_bytes(data)
    life = Life(subject, copy)
    hits = []
    for prompt in (told.longer, told.forked):
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


def _records(folder: Path, kind: str) -> list[Path]:
    return sorted(folder.glob(f"models/*/{FOLDERS[kind]}/*/*{SUFFIX}"))


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
