"""The room of `mlx-blockpool store`: looks at the files of a prompt store, mends or clears them, and words the reports.

Does not know argparse or mlx; cli.py says which options there are and prints, exchange.py carries prefixes in and out.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from .errors import BadRecordError, StoreError
from .formatting import count, human_bytes, table
from .prefix.trie import encode, name_of
from .store import manifest, offline
from .store.fs import Disk
from .store.offline import File, Judged, Listing
from .store.paths import HEADERS_FILE, MODEL_FILE, default_folder

Report = dict[str, Any]
T = TypeVar("T")
# Paths that a report for people names one by one.
SHOWN = 20


@dataclass(frozen=True)
class Survey:
    """Every file, what is known of each record, those that nothing leads to, and the agents that cannot be read."""

    listing: Listing
    judged: list[Judged]
    orphans: list[File]
    bad_agents: list[Judged]

    @property
    def bad(self) -> list[Judged]:
        return [judged for judged in self.judged if judged.problem is not None]


def folder_at(store_dir: Path | None) -> Path:
    """The folder of a prompt store; None: this user's, which need not be there yet. Raises StoreError if another is missing."""
    root = default_folder() if store_dir is None else store_dir
    if store_dir is not None and not root.is_dir():
        raise StoreError(f"Found no folder {root}; needed the one of a prompt store. Give --store-dir the path that it has.")
    return root


def naming(parent: bytes, tokens: tuple[int, ...]) -> bytes:
    """The trie's rule for the hash of a prefix."""
    return name_of(parent, encode(tokens))


def survey(root: Path, with_data: bool = False, noted: bool = False) -> Survey:
    """Read the header of every record, or every byte of it; `noted`: what a server has noted of headers will do."""
    listing = Listing(root)
    doing = "checksums" if with_data else "headers"
    found = offline.seen(root, listing.records, naming) if noted else offline.judge(listing.records, naming, with_data)
    judged = list(watched(found, len(listing.records), doing))
    # A server may have written parents after their folder was listed: only a second look proves that there are none.
    seen = {file.path for file in listing.records}
    later = list(offline.judge([file for file in Listing(root).records if file.path not in seen], naming))
    lost = []
    for namespace in listing.models:
        lost += offline.orphans(j for j in [*judged, *later] if j.file.namespace == namespace)
    return Survey(listing, judged, [file for file in lost if file.path in seen], list(_bad_agents(listing.agents)))


def _bad_agents(files: Iterable[File]) -> Iterator[Judged]:
    for file in files:
        try:
            manifest.read(Disk(), file.path)
        except FileNotFoundError:
            continue
        except (BadRecordError, OSError) as error:
            yield Judged(file, problem=str(error))


def watched(items: Iterable[T], total: int, doing: str) -> Iterator[T]:
    """The items, counted on a bar where somebody looks."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    # disable=None: only where somebody watches.
    yield from tqdm(items, desc=doing, total=total, unit=" records", file=sys.stderr, disable=None, leave=False)


# -- stats -------------------------------------------------------------------------------------------------------------


def stats(root: Path) -> Report:
    """Figures of every model and of the whole folder; sizes in bytes, times in UTC."""
    found = survey(root, noted=True)
    listing = found.listing
    models = [_model_stats(found, namespace) for namespace in sorted(listing.models)]
    totals = {key: sum(model[key] for model in models) for key in ("records", "bytes", "tokens", "orphans", "bad")}
    return {
        "folder": str(root),
        "models": models,
        "total": totals | _uses(listing.records),
        "agents": sorted(file.path.stem for file in listing.agents),
        "quarantine": _sizes(file for file in listing.quarantined if file.path.suffix != ".txt"),
        "leftovers": _sizes(listing.leftovers),
        "foreign": [str(path) for path in listing.foreign],
        "unreadable": [{"path": str(path), "reason": reason} for path, reason in listing.unreadable],
    }


def _model_stats(found: Survey, namespace: str) -> Report:
    files = found.listing.of(namespace)
    headers = [j.header for j in found.judged if j.file.namespace == namespace and j.header is not None]
    return {
        "namespace": namespace,
        "model": found.listing.models[namespace],
        "records": len(files),
        "bytes": sum(file.size for file in files),
        "tokens": sum(header.end - header.start for header in headers),
        "orphans": sum(file.namespace == namespace for file in found.orphans),
        "bad": sum(judged.file.namespace == namespace for judged in found.bad),
        **_uses(files),
    }


def _uses(files: Iterable[File]) -> Report:
    times = [file.used for file in files]
    if not times:
        return {"oldest_use": None, "newest_use": None}
    return {key: f"{_utc(pick(times))}Z" for key, pick in (("oldest_use", min), ("newest_use", max))}


def _utc(moment: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(moment))


def _sizes(files: Iterable[File]) -> Report:
    sizes = [file.size for file in files]
    return {"files": len(sizes), "bytes": sum(sizes)}


def describe_stats(report: Report) -> str:
    """The figures as a table and a closing line."""
    lines = [f"{report['folder']}: {_records(report['total'])}", ""]
    if report["models"]:
        rows = [["model", "namespace", "records", "tokens", "size", "oldest use (UTC)", "newest use (UTC)", "orphans"]]
        rows += [[_name(model), model["namespace"], *_cells(model)] for model in report["models"]]
        rows += [["all", "", *_cells(report["total"])]]
        lines += [*table(rows, left=2), ""]
    parts = [f"{name}: {count(report[key]['files'], 'file')} ({human_bytes(report[key]['bytes'])})" for key, name in _ASIDE]
    lines.append(f"{'; '.join(parts)}; {count(len(report['agents']), 'agent')}.")
    if report["total"]["bad"] or report["total"]["orphans"] or report["leftovers"]["files"] or report["unreadable"]:
        lines.append("Some of it is of no use; `mlx-blockpool store check` says what.")
    return "\n".join(lines)


_ASIDE = (("quarantine", "Quarantine"), ("leftovers", "leftovers"))


def _name(model: Report) -> str:
    return str((model["model"] or {}).get("model_id", "unknown"))


def _cells(figures: Report) -> list[str]:
    uses = [str(figures[key] or "never")[:16].replace("T", " ") for key in ("oldest_use", "newest_use")]
    return [f"{figures['records']:,}", f"{figures['tokens']:,}", human_bytes(figures["bytes"]), *uses, f"{figures['orphans']:,}"]


# -- check -------------------------------------------------------------------------------------------------------------


def check(root: Path, with_data: bool = False, fix: bool = False) -> Report:
    """What is wrong with the store, and whether it is still so: `clean`. `fix` puts bad records and agents into quarantine
    and removes leftovers, records that nothing leads to and empty folders.
    """
    found = survey(root, with_data)
    listing = found.listing
    problems = [*found.bad, *listing.leftovers, *found.orphans, *found.bad_agents, *listing.unreadable]
    failed = [{"path": str(path), "reason": reason} for path, reason in listing.unreadable]
    if fix:
        failed += _fix(root, found)
    return {
        "folder": str(root),
        "records": len(found.judged),
        "bytes": sum(judged.file.size for judged in found.judged),
        "with_data": with_data,
        "bad": [{"path": str(judged.file.path), "reason": judged.problem} for judged in found.bad],
        "bad_agents": [{"path": str(judged.file.path), "reason": judged.problem} for judged in found.bad_agents],
        "orphans": [str(file.path) for file in found.orphans],
        "leftovers": [str(file.path) for file in listing.leftovers],
        "foreign": [str(path) for path in listing.foreign],
        "failed": failed,
        "fixed": fix,
        "clean": not problems or (fix and not failed),
    }


def _fix(root: Path, found: Survey) -> list[dict[str, str]]:
    """Returns what could not be done, and why."""
    failed = []
    # A server may have written an agent anew meanwhile.
    for judged in [*found.bad, *_bad_agents(judged.file for judged in found.bad_agents)]:
        try:
            offline.set_aside(root, judged)
        except OSError as error:
            failed.append({"path": str(judged.file.path), "reason": str(error)})
    for file in [*found.orphans, *found.listing.leftovers]:
        try:
            offline.remove([file])
        except OSError as error:
            failed.append({"path": str(file.path), "reason": str(error)})
    offline.remove_empty(found.listing.folders)
    return failed


def describe_check(report: Report) -> str:
    """One line for each thing that is wrong, and a closing sentence."""
    lines = [f"bad: {item['reason']}" for item in [*report["bad"], *report["bad_agents"]]]
    lines += [f"orphan: {path}" for path in report["orphans"]] + [f"leftover: {path}" for path in report["leftovers"]]
    lines += [f"not the store's, left alone: {path}" for path in report["foreign"]]
    if len(lines) > SHOWN:
        lines[SHOWN:] = [f"... and {len(lines) - SHOWN:,} more; --json lists all"]
    lines += [f"failed: {item['path']}: {item['reason']}" for item in report["failed"]]
    how = "to the last byte" if report["with_data"] else "by name, length and header"
    checked = f"Checked {_records(report)} {how}: "
    kinds = [("bad", "bad record"), ("orphans", "orphan"), ("leftovers", "leftover")]
    kinds += [("bad_agents", "bad agent")] if report["bad_agents"] else []
    counts = ", ".join(count(len(report[key]), word) for key, word in kinds)
    if not any(report[key] for key in ("bad", "orphans", "leftovers", "bad_agents", "failed")):
        return "\n".join([*lines, checked + "no problems."])
    if not report["fixed"]:
        return "\n".join([*lines, f"{checked}{counts}. With --fix bad ones go to quarantine and the others are removed."])
    end = "Mended." if report["clean"] else f"{count(len(report['failed']), 'problem')} could not be mended."
    return "\n".join([*lines, f"{checked}{counts}. {end}"])


# -- clear -------------------------------------------------------------------------------------------------------------


def clear(root: Path, model: str | None = None, yes: bool = False) -> Report:
    """Remove the records of one model, by its namespace or id, or of all with what is in quarantine. Asks unless `yes`.

    Raises StoreError if there is no such model or nobody to ask.
    """
    listing = Listing(root)
    names = _namespaces(listing, model)
    records = [file for name in names for file in listing.of(name)]
    others = [file for file in listing.leftovers if model is None or file.namespace in names]
    others += listing.quarantined if model is None else []
    what = f"{_records({'records': len(records), 'bytes': sum(file.size for file in records)})} from {root}"
    if (records or others) and not (yes or agreed(what)):
        return {"folder": str(root), "models": names, "records": 0, "bytes": 0}
    try:
        gone = offline.remove(records)
        offline.remove(others)
        left = Listing(root)
        files = [root / "models" / name / HEADERS_FILE for name in names]
        files += [root / "models" / name / MODEL_FILE for name in names if not left.of(name)]
        offline.remove(File(path, path.parent.name, 0, 0.0) for path in files)
    except OSError as error:
        raise StoreError(f"Cannot remove {error.filename}: {error.strerror}. Needed the right to write there.") from error
    own = [root / "models" / name for name in names]
    offline.remove_empty(f for f in listing.folders if model is None or any(f.is_relative_to(o) for o in own))
    return {"folder": str(root), "models": names, **_sizes(gone), "records": len(gone)}


def _namespaces(listing: Listing, model: str | None) -> list[str]:
    if model is None:
        return sorted(listing.models)
    found = [name for name, about in sorted(listing.models.items()) if model in (name, (about or {}).get("model_id"))]
    if not found:
        known = sorted({_name({"model": about}) for about in listing.models.values()})
        there = f"those of {', '.join(known)}" if known else "none"
        raise StoreError(
            f"Found no records of {model!r}, but {there}. Give --model an id or a namespace that `store stats` shows."
        )
    return found


def agreed(what: str) -> bool:
    """Whether a person on the terminal lets it be removed. Raises StoreError if there is none."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise StoreError(f"Found no terminal to ask on; needed a yes to remove {what}. Give --yes.")
    print(f"Remove {what}? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def describe_clear(report: Report) -> str:
    return f"Removed {_records(report)} from {report['folder']}."


def _records(figures: Report) -> str:
    return f"{count(figures['records'], 'record')} ({human_bytes(figures['bytes'])})"
