"""`mlx-blockpool store`: the options, work and reports of path, stats, check, scrub and clear.

Imports no mlx. Works while servers use the same files.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import StoreError
from ..formatting import Report, count, human_bytes, table
from ..spec import DTYPE_BYTES
from ..store import fsck, headers
from ..store.agents import Agents
from ..store.fs import safe_name
from ..store.fsck import Judged
from ..store.paths import MODEL_FILE, default_folder, folder_of
from ..store.scan import File, Listing
from ..tier.agent_records import StoredPaths, utc

# The most paths that a report as text lists one by one.
SHOWN = 20
Actions = Any  # argparse._SubParsersAction

# -- options ---------------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> Actions:
    """Add the actions of this module.

    Returns the group, to which agents.py and transfer.py add theirs.
    """
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    add_action(
        actions,
        "path",
        "print the folder of the store",
        lambda args: {"folder": str(args.store_dir or default_folder())},
        lambda report: str(report["folder"]),
    )
    add_action(
        actions,
        "stats",
        "show what is stored for each model",
        lambda args: stats(folder_at(args.store_dir)),
        describe_stats,
    )
    fix = (
        "move bad records and those of an older format to quarantine; remove leftovers and "
        "unreachable records"
    )
    for name, what in (
        ("check", "the name, length and header of every record"),
        ("scrub", "every record to its last byte"),
    ):
        action = add_action(
            actions,
            name,
            f"check {what}; status 1 if something is wrong",
            lambda args: check(folder_at(args.store_dir), args.action == "scrub", args.fix),
            describe_check,
        )
        action.add_argument("--fix", action="store_true", help=fix)
    clearing = add_action(
        actions,
        "clear",
        "remove records",
        lambda args: clear(folder_at(args.store_dir), args.model, args.yes),
        lambda report: f"Removed {records_text(report)} from {report['folder']}.",
    )
    clearing.add_argument(
        "--model",
        metavar="ID",
        help="only those of this model, by its id or namespace (default: all)",
    )
    clearing.add_argument("--yes", action="store_true", help="do not ask for confirmation")
    return actions


def add_action(
    actions: Actions,
    name: str,
    text: str,
    run: Callable[[argparse.Namespace], Report],
    describe: Callable[[Report], str],
) -> argparse.ArgumentParser:
    """Add one action with --store-dir and --json. Returns its parser, to which callers add further
    options.

    `describe`: turns the report of `run` into text. The exit status is 1 if the report is not
    `clean`.
    """

    def printed(args: argparse.Namespace) -> tuple[str, int]:
        report = run(args)
        return json.dumps(report, indent=2) if args.json else describe(report), int(
            not report.get("clean", True)
        )

    action: argparse.ArgumentParser = actions.add_parser(
        name, help=text, description=f"{text[0].upper()}{text[1:]}."
    )
    action.add_argument(
        "--store-dir",
        type=Path,
        metavar="DIR",
        help="where the store is (default: the user's cache folder)",
    )
    action.add_argument("--json", action="store_true", help="everything as JSON")
    action.set_defaults(run=printed)
    return action


# -- the files -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoreFiles:
    """Every file of a store: its records as judged, and those without a parent (orphans)."""

    listing: Listing
    judged: list[Judged]
    orphans: list[File]

    @property
    def bad(self) -> list[Judged]:
        return [judged for judged in self.judged if judged.problem is not None]


def folder_at(store_dir: Path | None) -> Path:
    """The folder of a prompt store, by default this user's, which may not exist yet.

    Raises StoreError if another is missing.
    """
    root = default_folder() if store_dir is None else store_dir
    if store_dir is not None and not root.is_dir():
        raise StoreError(f"{root} is not a folder. Give --store-dir the path of a prompt store.")
    return root


def survey(root: Path, with_data: bool = False, noted: bool = False) -> StoreFiles:
    """Read the header of every record, or every byte of it.

    `noted`: headers in the store's database are enough.
    """
    listing, judged, later = fsck.judge_all(root, with_data, noted)
    lost, seen = [], {file.name for file in listing.records}
    for namespace in listing.namespaces:
        lost += StoredPaths(j for j in judged + later if j.file.namespace == namespace).orphans
    return StoreFiles(listing, judged, [file for file in lost if file.name in seen])


# -- stats -----------------------------------------------------------------------------------------


def stats(root: Path) -> Report:
    """Figures of every model and of the whole folder; sizes in bytes, times in UTC."""
    found = survey(root, noted=True)
    listing = found.listing
    models = [
        {"namespace": namespace, "model": about, **_figures(found, namespace)}
        for namespace, about in sorted(listing.models.items())
    ]
    return {
        "folder": str(root),
        "models": models,
        "total": _figures(found),
        "agents": sorted(safe_name(agent.name) for agent in Agents(root).all()),
        "quarantine": _sizes(file for file in listing.quarantined if file.path.suffix != ".txt"),
        "leftovers": _sizes(listing.leftovers),
        "foreign": [str(path) for path in listing.foreign],
        "unreadable": _reasons(listing.unreadable),
    }


def _figures(found: StoreFiles, namespace: str | None = None) -> Report:
    """Figures of the records of one model, or of all."""

    def of_model(files: Iterable[File]) -> list[File]:
        return [file for file in files if namespace is None or file.namespace == namespace]

    files = of_model(found.listing.records)
    headers = {judged.file: judged.header for judged in found.judged if judged.header is not None}
    times = [file.used for file in files]
    return {
        "records": len(files),
        "bytes": sum(file.size for file in files),
        "tokens": sum(headers[file].end - headers[file].start for file in of_model(headers)),
        "orphans": len(of_model(found.orphans)),
        "bad": len(of_model(judged.file for judged in found.bad)),
        "oldest_use": utc(min(times)) if times else None,
        "newest_use": utc(max(times)) if times else None,
    }


def _sizes(files: Iterable[File]) -> Report:
    sizes = [file.size for file in files]
    return {"files": len(sizes), "bytes": sum(sizes)}


def describe_stats(report: Report) -> str:
    """The figures as a table and a closing line."""
    lines = [f"{report['folder']}: {records_text(report['total'])}", ""]
    if report["models"]:
        rows = [
            [
                "model",
                "namespace",
                "bits",
                "records",
                "tokens",
                "size",
                "oldest use (UTC)",
                "newest use (UTC)",
                "orphans",
            ]
        ]
        rows += [
            [_name_and_ranks(model), model["namespace"], _bits(model), *_cells(model)]
            for model in report["models"]
        ]
        rows += [["all", "", "", *_cells(report["total"])]]
        lines += [*table(rows, left=3), ""]
    parts = [
        f"{name}: {count(report[name.lower()]['files'], 'file')} "
        f"({human_bytes(report[name.lower()]['bytes'])})"
        for name in ("Quarantine", "leftovers")
    ]
    lines.append(f"{'; '.join(parts)}; {count(len(report['agents']), 'agent')}.")
    if (
        report["total"]["bad"]
        or report["total"]["orphans"]
        or report["leftovers"]["files"]
        or report["unreadable"]
    ):
        lines.append("Some files cannot be used; `mlx-blockpool store check` lists them.")
    return "\n".join(lines)


def _name(model: Report) -> str:
    return str((model["model"] or {}).get("model_id", "unknown"))


def _name_and_ranks(model: Report) -> str:
    """The name of a model, with the ranks whose records these are if several ranks share it."""
    ranks = (model["model"] or {}).get("ranks")
    return f"{_name(model)} ({ranks})" if ranks else _name(model)


def _bits(model: Report) -> str:
    """The bits of the keys and values in a model's records; empty if unknown."""
    about = model["model"] or {}
    own, pool = 8 * DTYPE_BYTES.get(str(about.get("dtype")), 0), about.get("kv_bits")
    keys, values = ((isinstance(pool, dict) and pool.get(of)) or own for of in ("keys", "values"))
    return "" if not own else f"{keys}" if keys == values else f"keys {keys}, values {values}"


def _cells(figures: Report) -> list[str]:
    uses = [
        str(figures[key] or "never")[:16].replace("T", " ") for key in ("oldest_use", "newest_use")
    ]
    return [
        f"{figures['records']:,}",
        f"{figures['tokens']:,}",
        human_bytes(figures["bytes"]),
        *uses,
        f"{figures['orphans']:,}",
    ]


# -- check -----------------------------------------------------------------------------------------


def check(root: Path, with_data: bool = False, fix: bool = False) -> Report:
    """The problems of the store; `clean` if none is left. `fix` moves bad records to quarantine and
    removes leftovers, unreachable records and empty folders.
    """
    found = survey(root, with_data)
    listing = found.listing
    problems = [*found.bad, *listing.leftovers, *found.orphans, *listing.unreadable]
    failed = _reasons([*listing.unreadable, *(_fix(root, found) if fix else ())])
    return {
        "folder": str(root),
        "records": len(found.judged),
        "bytes": sum(judged.file.size for judged in found.judged),
        "with_data": with_data,
        "bad": _reasons((judged.file.path, judged.problem) for judged in found.bad),
        "orphans": [str(file.path) for file in found.orphans],
        "leftovers": [str(file.path) for file in listing.leftovers],
        "foreign": [str(path) for path in listing.foreign],
        "failed": failed,
        "fixed": fix,
        "clean": not problems or (fix and not failed),
    }


def _fix(root: Path, found: StoreFiles) -> list[tuple[Path, OSError]]:
    """Returns what could not be done, and why."""
    problems = {judged.file: str(judged.problem) for judged in found.bad}
    failed = []
    for file in [*problems, *found.orphans, *found.listing.leftovers]:
        try:
            if file in problems:
                fsck.set_aside(root, file.path, problems[file])
            else:
                fsck.remove([file])
        except OSError as error:
            failed.append((file.path, error))
    fsck.remove_empty(found.listing.folders)
    return failed


def _reasons(found: Iterable[tuple[Path, Any]]) -> list[dict[str, str]]:
    return [{"path": str(path), "reason": str(reason)} for path, reason in found]


def describe_check(report: Report) -> str:
    """One line for each problem, and a summary."""
    lines = [f"bad: {item['reason']}" for item in report["bad"]]
    lines += [f"orphan: {path}" for path in report["orphans"]] + [
        f"leftover: {path}" for path in report["leftovers"]
    ]
    lines += [f"not the store's, left alone: {path}" for path in report["foreign"]]
    if len(lines) > SHOWN:
        lines[SHOWN:] = [f"... and {len(lines) - SHOWN:,} more; --json lists all"]
    lines += [f"failed: {item['path']}: {item['reason']}" for item in report["failed"]]
    how = "to the last byte" if report["with_data"] else "by name, length and header"
    checked = f"Checked {records_text(report)} {how}: "
    kinds = {"bad": "bad record", "orphans": "orphan", "leftovers": "leftover"}
    counts = ", ".join(count(len(report[key]), word) for key, word in kinds.items())
    if not any(report[key] for key in (*kinds, "failed")):
        end = "no problems."
    elif not report["fixed"]:
        end = f"{counts}. --fix moves bad records to quarantine and removes the others."
    elif report["clean"]:
        end = f"{counts}. Fixed."
    else:
        end = f"{counts}. {count(len(report['failed']), 'problem')} could not be fixed."
    return "\n".join([*lines, f"{checked}{end}"])


# -- clear -----------------------------------------------------------------------------------------


def clear(root: Path, model: str | None = None, yes: bool = False) -> Report:
    """Remove the records of one model, by its namespace or id, or all records and the quarantine.
    Asks unless `yes`.

    Raises StoreError if the store lacks the model, or if there is no terminal for the question.
    """
    listing = Listing(root)
    names = _namespaces(listing, model)
    records = [file for name in names for file in listing.of(name)]
    others = [file for file in listing.leftovers if model is None or file.namespace in names]
    others += listing.quarantined if model is None else []
    what = (
        f"{records_text({'records': len(records), 'bytes': sum(file.size for file in records)})} "
        f"from {root}"
    )
    if (records or others) and not (yes or confirm(what)):
        return {"folder": str(root), "models": names, "records": 0, "bytes": 0}
    try:
        gone = fsck.remove(records)
        fsck.remove(others)
        left = Listing(root)
        headers.forget(root, names)
        files = [f"{folder_of(name)}/{MODEL_FILE}" for name in names if not left.of(name)]
        fsck.remove(File(root, name) for name in files)
    except OSError as error:
        raise StoreError(
            f"Cannot remove {error.filename}: {error.strerror}. Run as a user who may write there."
        ) from error
    own = [root / "models" / name for name in names]
    fsck.remove_empty(
        f for f in listing.folders if model is None or any(f.is_relative_to(o) for o in own)
    )
    return {"folder": str(root), "models": names, **_sizes(gone), "records": len(gone)}


def _namespaces(listing: Listing, model: str | None) -> list[str]:
    if model is None:
        return sorted(listing.models)
    found = [
        name
        for name, about in sorted(listing.models.items())
        if model in (name, (about or {}).get("model_id"))
    ]
    if not found:
        known = sorted({_name({"model": about}) for about in listing.models.values()})
        there = f"those of {', '.join(known)}" if known else "none"
        raise StoreError(
            f"The store has no records of {model!r}, but {there}. Give --model an id or a "
            "namespace that `store stats` shows."
        )
    return found


def confirm(what: str) -> bool:
    """Ask on the terminal whether to remove `what`. Raises StoreError without a terminal."""
    for name, stream in (("stdin", sys.stdin), ("stderr", sys.stderr)):
        if not stream.isatty():
            raise StoreError(
                f"Refusing to remove {what} without confirmation: {name} is not a terminal. Pass "
                "--yes."
            )
    print(f"Remove {what}? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def records_text(figures: Report) -> str:
    return f"{count(figures['records'], 'record')} ({human_bytes(figures['bytes'])})"
