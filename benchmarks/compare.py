"""Two versions of the package measured in turns: each benchmark's own figures, of the other tree
and of this one.

    git worktree add /tmp/before COMMIT
    python benchmarks/compare.py /tmp/before --rounds 9

Every benchmark is run with its own tree's script and package, in a process of its own, the two
trees in turns. Prints one JSON line for each time of each case: the medians of both trees, and the
median of the rounds' ratios, new divided by old. Times of mlx-lm stand beside ours: what they
differ by is noise.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
BENCHMARKS = ("pool", "prefix", "cache", "batch", "engine", "server", "host")
# Figures that are times: of this package, and of mlx-lm beside it.
TIMES = ("ours_", "stock_", "allocate_us", "free_us", "attached_cpu_ms", "ttft_last_s", "wall_s")
UNITS = ("_ms", "_us", "_s")

# One run's figures: (the case, the figure) -> reading.
Figures = dict[tuple[str, str], float]


def measure(tree: Path, bench: str, full: bool) -> Figures:
    """Run one benchmark of `tree`. Returns its times."""
    command = [sys.executable, f"benchmarks/bench_{bench}.py"] + ([] if full else ["--quick"])
    with tempfile.TemporaryDirectory() as plugins:
        # An editable install finds the plugins of its own tree.
        Path(plugins, "mlx_blockpool_plugins").symlink_to(tree / "plugins")
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tree), plugins))}
        output = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, check=True
        ).stdout
    return {
        (line["case"], name): value
        for line in map(json.loads, output.splitlines())
        for name, value in line.items()
        if name.startswith(TIMES) and name.endswith(UNITS)
    }


def compare(before: Path, bench: str, rounds: int, full: bool) -> None:
    readings: dict[Path, list[Figures]] = {before: [], HERE: []}
    for turn in range(rounds):
        for tree in sorted(readings, reverse=bool(turn % 2)):
            readings[tree].append(measure(tree, bench, full))
    # The other tree may lack a case.
    for figure in readings[HERE][0]:
        if figure not in readings[before][0]:
            continue
        pairs = [(old[figure], new[figure]) for old, new in zip(*readings.values(), strict=True)]
        old, new = (statistics.median(side) for side in zip(*pairs, strict=True))
        ratio = statistics.median(b / a for a, b in pairs if a)
        line = {"before": round(old, 4), "after": round(new, 4), "ratio": round(ratio, 3)}
        case, name = figure
        print(json.dumps({"bench": bench, "case": case, "figure": name, **line}), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path, help="a tree of the other version")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--full", action="store_true", help="the benchmarks' full sizes; they take long"
    )
    parser.add_argument("--only", nargs="*", default=BENCHMARKS, choices=BENCHMARKS)
    args = parser.parse_args()
    for bench in args.only:
        compare(args.before.resolve(), bench, args.rounds, args.full)
    return 0


if __name__ == "__main__":
    sys.exit(main())
