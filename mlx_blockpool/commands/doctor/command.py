"""`mlx-blockpool doctor`: its options, the order of its checks, and its report."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from ...config import check_port
from ...formatting import client_settings
from . import device, installation, model
from .finding import Finding, looked_at

MARKS = {"ok": "ok", "note": "note", "warning": "WARNING", "problem": "PROBLEM"}
PORT = 8080
# Of the longest name of a check.
WIDTH = len("steps in flight")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `mlx-blockpool doctor`."""
    parser.add_argument(
        "--model",
        help="also check this model's files, load it and compare its replies with mlx-lm's",
    )
    parser.add_argument(
        "--port",
        type=int,
        default=PORT,
        metavar="N",
        help=f"the port of the server (default: {PORT})",
    )
    parser.add_argument(
        "--store-dir",
        type=Path,
        metavar="DIR",
        help="where the store is (default: the user's cache folder)",
    )
    parser.add_argument("--json", action="store_true", help="everything as JSON")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> tuple[str, int]:
    check_port(args.port)
    findings = []
    for finding in examine(args.model, args.port, args.store_dir):
        findings.append(finding)
        if not args.json:
            print(line(finding), flush=True)
    status = int(any(finding.state == "problem" for finding in findings))
    clients = client_settings(f"http://{installation.HOST}:{args.port}")
    if not args.json:
        return verdict(findings, clients), status
    report = {"healthy": not status, "findings": list(map(asdict, findings)), "clients": clients}
    return json.dumps(report, indent=2, default=str), status


def examine(name: str | None, port: int, store_dir: Path | None) -> Iterator[Finding]:
    """All findings, in order, each as soon as it is made.

    Skips the checks that need the device if the installation does not fit.
    """
    versions = looked_at("versions", installation.versions)
    yield from versions
    yield from looked_at("patch", installation.patch_state)
    yield from looked_at("store", installation.store_state, store_dir)
    yield from looked_at("port", installation.port_state, port)
    if any(finding.state == "problem" for finding in versions):
        yield Finding("device", "note", "Nothing was measured: fix the installation first.")
        return
    files = [] if name is None else looked_at("model", model.files, name)
    yield from files
    yield from looked_at("device", device.device)
    yield from looked_at("decode path", device.decode)
    yield from looked_at("disk speed", device.disk, store_dir)
    if files and files[-1].state != "problem":
        yield from looked_at("against mlx-lm", model.against_stock, name)


def line(finding: Finding) -> str:
    """A finding on a line, and its advice on the next."""
    text = f"{MARKS[finding.state]:>7}  {finding.about:<{WIDTH}}  {finding.text}"
    return text + (f"\n{'':>7}  {'':<{WIDTH}}  -> {finding.advice}" if finding.advice else "")


def verdict(findings: list[Finding], clients: dict[str, str]) -> str:
    """The clients' settings, and what is to be fixed."""
    lines = [
        "",
        "Settings of clients, to paste:",
        *(f"  {name}: {line}" for name, line in clients.items()),
    ]
    problems = [finding.about for finding in findings if finding.state == "problem"]
    last = f"Fix first: {', '.join(problems)}." if problems else "Ready for `mlx-blockpool serve`."
    return "\n".join([*lines, "", last])
