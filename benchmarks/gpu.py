"""What gpu.sh has measured: kept in results/, written into the READMEs, and summed up beside what
is asked for.

python -m benchmarks.gpu LINES [--quick]

Exit status: 0 if every step ended well and every figure is what it has to be. With --quick no file
is changed and no figure is judged.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from . import figures
from .__main__ import RESULTS, keep, machine, read
from .plots import Line

# What the summary has of each case of bench_kernel, where it has that.
SHOWN = (
    "kernel_ms",
    "ragged_ms",
    "stock_ms",
    "kernel_share",
    "ratio_ragged",
    "ratio_shared",
    "ratio_stock",
)
# The part of the best path's speed that the chosen one has to reach for all kinds of batches.
LEAST_SHARE = 0.97


class Verdict(NamedTuple):
    what: str
    found: float
    needed: float

    @property
    def holds(self) -> bool:
        return self.found >= self.needed


def verdicts(lines: Iterable[Line]) -> list[Verdict]:
    """The figures of which something is asked."""
    found = []
    for line in lines:
        needed = dict(line.get("needed", {})) if line["bench"] == "kernel" else {}
        if line["bench"] == "paths" and "worst_share" in line:
            needed["worst_share"] = LEAST_SHARE
        found += [
            Verdict(f"{line['bench']}, {line['case']}: {name}", line[name], least)
            for name, least in needed.items()
        ]
    return found


def summary(lines: list[Line]) -> tuple[str, bool]:
    """What each step ended with, the kernel's figures, those of which something is asked beside
    that, and whether all is well.
    """
    steps = [line for line in lines if line["bench"] == "gpu"]
    judged = verdicts(line for line in lines if not line.get("quick"))
    words = [
        f"{line['case']}: {'ended well' if not line['status'] else 'failed'} after "
        f"{line['seconds']} s"
        for line in steps
    ]
    words += [
        f"{line['case']}: " + ", ".join(f"{name} {line[name]:g}" for name in SHOWN if name in line)
        for line in lines
        if line["bench"] == "kernel"
    ]
    words += [
        f"{v.what} {v.found:g}, needed {v.needed:g}: {'holds' if v.holds else 'DOES NOT HOLD'}"
        for v in judged
    ]
    well = (
        bool(steps)
        and not any(line["status"] for line in steps)
        and all(verdict.holds for verdict in judged)
    )
    return "\n".join(words), well


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("lines", type=Path, help="the JSON lines of the steps")
    parser.add_argument("--quick", action="store_true", help="only print the summary")
    args = parser.parse_args(arguments)
    found = read(args.lines)
    words, well = summary(found)
    print(words)
    if not args.quick:
        path = RESULTS / f"{machine()}.jsonl"
        keep(found, path)
        figures.write({file.stem: read(file) for file in sorted(RESULTS.glob("*.jsonl"))})
        print(
            f"The figures are in {path} and in the tables of the READMEs. Commit both, or attach "
            "the file to a report."
        )
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
