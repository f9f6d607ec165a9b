"""Runs the benchmarks, keeps their lines in one file a machine, draws the plots and writes the
figures of the READMEs.

python -m benchmarks                  all of them, into results/, plots/ and the READMEs
python -m benchmarks cache sessions   some of them
python -m benchmarks --quick          small sizes; no file is changed
python -m benchmarks --draw           only the plots and the READMEs' figures, from results/
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import mlx.core as mx

from . import figures
from .plots import draw, latest

FOLDER = Path(__file__).parent
RESULTS, PLOTS = FOLDER / "results", FOLDER / "plots"
# The others run for minutes beside a server and are started by themselves.
NAMES = (
    *(
        "pool",
        "prefix",
        "cache",
        "batch",
        "shared",
        "paths",
        "kernel",
        "quantised",
        "engine",
        "store",
        "server",
        "churn",
    ),
    *(
        "sessions",
        "sessions_http",
        "routers",
        "ranks",
        "aiperf",
        "watching",
        "answers",
        "forms",
        "drafts",
    ),
)


def machine() -> str:
    """This device and its number of cores, as part of a file name."""
    kind, name = mx.default_device().type.name, str(mx.device_info().get("device_name", "")).lower()
    words = [
        word
        for word in re.findall(r"[a-z]+[a-z0-9]*", name)
        if word not in ("r", "tm", "amd", "intel", "processor", "cpu")
    ]
    return "-".join([kind, *words, f"{os.cpu_count()}core"])


def run(name: str, quick: bool, lines: Path) -> bool:
    """One benchmark; its lines are printed and appended to a file.

    Returns whether it ended well.
    """
    command = [
        sys.executable,
        str(FOLDER / f"bench_{name}.py"),
        "--out",
        str(lines),
        *(["--quick"] if quick else []),
    ]
    ran = subprocess.run(command)
    if ran.returncode:
        print(f"bench_{name} ended with status {ran.returncode}.", file=sys.stderr)
    return ran.returncode == 0


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def keep(found: list[dict[str, Any]], path: Path) -> None:
    """Put lines in the place of earlier ones of the same case."""
    lines = latest([*read(path), *found])
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def machines() -> dict[str, list[dict[str, Any]]]:
    """The lines of each machine, those of the figures first."""
    files = sorted(RESULTS.glob("*.jsonl"), key=lambda file: file.stem != figures.MACHINE)
    return {file.stem: read(file) for file in files}


def publish(lines: Path, path: Path) -> None:
    """Put lines into a file of results, and the figures into the READMEs."""
    keep(read(lines), path)
    figures.write(machines())


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "names",
        nargs="*",
        metavar="name",
        help=f"which of {', '.join(NAMES)}; without a name all of them",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="small sizes and few rounds; their lines are only printed",
    )
    parser.add_argument(
        "--draw", action="store_true", help="run nothing; draw the plots and write the figures"
    )
    parser.add_argument(
        "--machine",
        default=machine(),
        help="the name of the file in results/ (default: %(default)s)",
    )
    args = parser.parse_args(arguments)
    if unknown := [name for name in args.names if name not in NAMES]:
        parser.error(f"There is no benchmark {', '.join(unknown)}. Choose from {', '.join(NAMES)}.")
    path, well = RESULTS / f"{args.machine}.jsonl", True
    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder) / "lines.jsonl"
        for name in () if args.draw else args.names or NAMES:
            well &= run(name, args.quick, lines)
        if not args.quick:
            keep(read(lines), path)
    if not args.quick:
        draw(list(machines().values()), PLOTS)
        figures.write(machines())
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
