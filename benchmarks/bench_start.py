"""Processor time from the command to `/health`, with child processes, and the first request's
seconds, of mlx_lm.server and ours, in turns: the demo model, with a store that has seen it before,
and without a store. Linux only.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from bench_server import COMMANDS, Server
from measure import options, report

from mlx_blockpool.demo import model_path

SERVE = [sys.executable, "-m", "mlx_blockpool.cli", "serve"]


def processor_seconds(root: int) -> tuple[float, float]:
    """Processor time of a process so far, and of it with all its descendants."""
    parents, seconds, tree = {}, {}, {root}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        pid = int(folder.name)
        parents[pid] = int(fields[1])
        seconds[pid] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    while more := {pid for pid, parent in parents.items() if parent in tree} - tree:
        tree |= more
    return seconds[root], sum(seconds[pid] for pid in tree)


def started(command: list[str]) -> tuple[float, float, float]:
    """processor_seconds(), and the seconds of the first request."""
    server = Server(command, Path(model_path()))
    try:
        spent = processor_seconds(server.process.pid)
        began = time.perf_counter()
        server.chat([{"role": "user", "content": "What is a block?"}], 8)
        return *spent, time.perf_counter() - began
    finally:
        server.stop()
        server.process.wait()


if __name__ == "__main__":
    args = options(__doc__ or "")
    with tempfile.TemporaryDirectory() as folder:
        commands = {
            "stock": COMMANDS["stock"],
            "later start": [*SERVE, "--store-dir", folder],
            "without a store": [*SERVE, "--no-store"],
        }
        first = started(commands["later start"])
        readings: dict[str, list[tuple[float, ...]]] = {name: [] for name in commands}
        for _ in range(2 if args.quick else 5):
            for name, command in commands.items():
                readings[name].append(started(command))
    found = {
        name: [statistics.median(seconds) for seconds in zip(*taken, strict=True)]
        for name, taken in readings.items()
    }
    for name, (own, whole, reply) in {"first start": first, **found}.items():
        figures = {"seconds": round(own, 2), "with_children_seconds": round(whole, 2)}
        figures |= {"first_request_seconds": round(reply, 2)}
        ratio = round(whole / found["stock"][1], 2)
        report(args, "start", name, **figures, ratio=ratio)
