"""`mlx-blockpool doctor`: its options, the order of its checks, and its words."""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path

from ...clients import settings
from ...errors import BlockpoolError
from ...formatting import Report
from . import bench, device, drafts, installation, model
from .finding import Check, Finding, looked_at, status_of

MARKS = {"ok": "ok", "note": "note", "warning": "WARNING", "problem": "PROBLEM"}
PORT = 8080


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `mlx-blockpool doctor`."""
    parser.add_argument("--model", help="also check this model's files, load it and compare its replies with mlx-lm's")
    parser.add_argument("--port", type=int, default=PORT, metavar="N", help=f"the port of the server (default: {PORT})")
    parser.add_argument("--store-dir", type=Path, metavar="DIR", help="where the store is (default: the user's cache folder)")
    parser.add_argument("--json", action="store_true", help="everything as JSON")
    bench_file = "also run the project's benchmarks, which takes up to an hour, and write everything to this file"
    parser.add_argument("--bench", type=Path, metavar="FILE", help=bench_file)
    seconds = f"what each run of a benchmark may take (default: {bench.SECONDS:g})"
    parser.add_argument("--bench-seconds", type=float, default=bench.SECONDS, metavar="N", help=seconds)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> tuple[str, int]:
    if not 0 < args.port < 65536:
        raise BlockpoolError(f"--port {args.port} is no port. Give a number from 1 to 65535.")
    if args.bench is not None:
        bench.check_file(args.bench)
    findings = examine(args.model, args.port, args.store_dir)
    status, clients = status_of(findings), _clients(args.port, findings)
    report: Report = {"healthy": not status, "findings": [finding.as_dict() for finding in findings], "clients": clients}
    text = describe(findings, clients)
    if args.bench is not None:
        report["benchmarks"] = bench.measure(bench.BENCHMARKS, args.bench_seconds)
        bench.write(args.bench, report["findings"], report["benchmarks"])
        text += f"\n\n{bench.describe(args.bench, report['benchmarks'])}"
    return json.dumps(report, indent=2, default=str) if args.json else text, status


def examine(name: str | None, port: int, store_dir: Path | None) -> list[Finding]:
    """All findings, in order. What needs the device is left out where the installation does not fit."""
    checks: list[tuple[str, Check]] = [
        ("versions", installation.versions),
        ("patch", installation.patch_state),
        ("store", partial(installation.store_state, store_dir)),
        ("port", partial(installation.port_state, port)),
    ]
    findings = [finding for about, check in checks for finding in looked_at(about, check)]
    if any(finding.about == "versions" and finding.state == "problem" for finding in findings):
        text = "Nothing was measured: the installation comes first."
        return [*findings, Finding("device", "note", text)]
    measured: list[tuple[str, Check]] = [
        ("device", device.device),
        ("decode path", device.decode),
        (drafts.ABOUT, partial(drafts.remembered, store_dir)),
        ("disk speed", partial(device.disk, store_dir)),
    ]
    findings += [finding for about, check in measured for finding in looked_at(about, check)]
    if name is not None:
        findings += looked_at("model", partial(model.files, name))
    if name is not None and findings[-1].state != "problem":
        findings += looked_at("against mlx-lm", partial(model.against_stock, name))
    return findings


def _clients(port: int, findings: list[Finding]) -> dict[str, str]:
    context = next((finding.figures.get("context") for finding in findings if finding.about == "model"), None)
    return settings(f"http://{installation.HOST}:{port}", context)


def describe(findings: list[Finding], clients: dict[str, str]) -> str:
    """A line for each finding with what to do below it, the clients' settings, and a verdict."""
    width = max(len(finding.about) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{MARKS[finding.state]:>7}  {finding.about.ljust(width)}  {finding.text}")
        lines += [f"{'':>7}  {'':<{width}}  -> {finding.advice}"] if finding.advice else []
    lines += ["", "Settings of clients, to paste:", *(f"  {name}: {line}" for name, line in clients.items())]
    problems = [finding.about for finding in findings if finding.state == "problem"]
    verdict = "Nothing is in the way of `mlx-blockpool serve`." if not problems else f"To be mended first: {', '.join(problems)}."
    return "\n".join([*lines, "", verdict])
