"""`mlx-blockpool doctor`: its options, the order of its checks, and its report."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from ...config import check_port
from ...formatting import client_settings
from . import device, installation, model
from .finding import Finding, looked_at

MARKS = {"ok": "ok", "note": "note", "warning": "WARNING", "problem": "PROBLEM"}
PORT = 8080


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
    findings = examine(args.model, args.port, args.store_dir)
    status = int(any(finding.state == "problem" for finding in findings))
    clients = client_settings(f"http://{installation.HOST}:{args.port}")
    if not args.json:
        return describe(findings, clients), status
    report = {"healthy": not status, "findings": list(map(asdict, findings)), "clients": clients}
    return json.dumps(report, indent=2, default=str), status


def examine(name: str | None, port: int, store_dir: Path | None) -> list[Finding]:
    """All findings, in order.

    Skips the checks that need the device if the installation does not fit.
    """
    findings = looked_at("versions", installation.versions)
    fits = not any(finding.state == "problem" for finding in findings)
    findings += looked_at("patch", installation.patch_state)
    findings += looked_at("store", installation.store_state, store_dir)
    findings += looked_at("port", installation.port_state, port)
    if not fits:
        return [
            *findings,
            Finding("device", "note", "Nothing was measured: fix the installation first."),
        ]
    findings += looked_at("device", device.device)
    findings += looked_at("decode path", device.decode)
    findings += looked_at("disk speed", device.disk, store_dir)
    if name is not None:
        findings += looked_at("model", model.files, name)
        if findings[-1].state != "problem":
            findings += looked_at("against mlx-lm", model.against_stock, name)
    return findings


def describe(findings: list[Finding], clients: dict[str, str]) -> str:
    """A line for each finding, each followed by its advice; the clients' settings; and a
    verdict.
    """
    width = max(len(finding.about) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{MARKS[finding.state]:>7}  {finding.about.ljust(width)}  {finding.text}")
        lines += [f"{'':>7}  {'':<{width}}  -> {finding.advice}"] if finding.advice else []
    lines += [
        "",
        "Settings of clients, to paste:",
        *(f"  {name}: {line}" for name, line in clients.items()),
    ]
    problems = [finding.about for finding in findings if finding.state == "problem"]
    verdict = (
        f"Fix first: {', '.join(problems)}." if problems else "Ready for `mlx-blockpool serve`."
    )
    return "\n".join([*lines, "", verdict])
