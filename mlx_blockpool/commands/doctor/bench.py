"""`mlx-blockpool doctor --bench FILE`: the project's benchmarks as processes of their own, and their figures in one file.

Each benchmark runs in its quick sizes, and then in its full ones if it ends within its time.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ...errors import BlockpoolError
from ...formatting import Report

# Those that compare with mlx-lm, or whose figures decide rules of the server; the others take longer by design.
BENCHMARKS = ("pool", "prefix", "cache", "batch", "shared", "paths", "kernel", "quantised", "engine", "store", "churn", "server")
SECONDS = 300.0


def check_file(path: Path) -> None:
    """Raises BlockpoolError for a file that cannot be written: the figures take minutes."""
    try:
        with path.open("a"):
            pass
    except OSError as error:
        raise BlockpoolError(f"Cannot write {path}: {error.strerror}. Give --bench another file.") from error


def benchmarks_folder() -> Path:
    """The scripts: the checkout's that the package runs from, or the installed ones. Raises BlockpoolError without them."""
    checkout = Path(__file__).parents[3] / "benchmarks"
    if (checkout / "measure.py").is_file():
        return checkout
    spec = importlib.util.find_spec("mlx_blockpool_benchmarks")
    if spec is None or not spec.submodule_search_locations:
        raise BlockpoolError("The benchmarks are not installed. Reinstall mlx-blockpool, or run the doctor from a checkout.")
    return Path(spec.submodule_search_locations[0])


def measure(names: tuple[str, ...], seconds: float) -> Report:
    """For each benchmark its cases as it printed them, in quick and in full sizes. `seconds`: for each run."""
    folder, found = benchmarks_folder(), {}
    for i, name in enumerate(names, 1):
        print(f"benchmark {i} of {len(names)}: {name}", file=sys.stderr, flush=True)
        script = folder / f"bench_{name}.py"
        found[name] = {"quick": _run(script, ["--quick"], seconds)}
        if found[name]["quick"]["ended"] == "whole":
            found[name]["full"] = _run(script, [], seconds)
    return found


def _run(script: Path, options: list[str], seconds: float) -> Report:
    """One run: its cases, its seconds, and how it `ended`: whole, after its time, or with an error."""
    with tempfile.TemporaryDirectory(prefix="mlx-blockpool-bench-") as folder:
        out, start = Path(folder) / "cases", time.monotonic()
        command = [sys.executable, str(script), *options, "--out", str(out)]
        # A group of its own: some start servers.
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd=script.parent, start_new_session=True
        )
        ended, errors = "whole", b""
        try:
            _, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            ended = f"after {seconds:g} seconds"
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if process.returncode > 0:
            ended = f"with an error: {(errors.decode(errors='replace').strip().splitlines() or ['no message'])[-1]}"
        cases = [json.loads(line) for line in out.read_text().splitlines()] if out.is_file() else []
        return {"ended": ended, "seconds": round(time.monotonic() - start, 1), "cases": cases}


def write(path: Path, findings: list[dict[str, Any]], benchmarks: Report) -> None:
    """Write the file: what the doctor found and what was measured, without the name of the user's folder."""
    report = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "findings": findings, "benchmarks": benchmarks}
    path.write_text(json.dumps(report, indent=1, default=str).replace(str(Path.home()), "~") + "\n")


def describe(path: Path, benchmarks: Report) -> str:
    """What was measured, and what to do with the file."""
    lines = []
    for name, runs in benchmarks.items():
        ends = ", ".join(f"{size} {run['ended']} ({run['seconds']:g} s)" for size, run in runs.items())
        lines.append(f"  {name}: {ends}")
    return "\n".join(["Benchmarks:", *lines, f"All figures are in {path}. Attach it to a report about this device."])
