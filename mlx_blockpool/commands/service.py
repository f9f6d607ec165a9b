"""`mlx-blockpool service`: the server as a service of the user, from login on: a launchd agent on
macOS, a systemd user unit on Linux. Imports no mlx.
"""

from __future__ import annotations

import argparse
import os
import plistlib
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from platformdirs import user_log_path

from ..config import user_config_folder
from ..errors import BlockpoolError

NAME = "mlx-blockpool"
LAST_LINES = 50
PLACES = ("HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the actions of `mlx-blockpool service`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    install = actions.add_parser("install", help="start it now and at each login")
    install.epilog = "What follows -- are options of serve."
    install.add_argument("--print", action="store_true", help="print the service's file")
    install.set_defaults(run=lambda args: _install(args.rest, args.print))
    actions.add_parser("status", help="whether it runs").set_defaults(run=lambda args: _status())
    logs = actions.add_parser("logs", help="the end of its log")
    logs.set_defaults(run=lambda args: _logs())
    remove = actions.add_parser("remove", help="stop it and remove its file")
    remove.set_defaults(run=lambda args: _remove())


def log_file() -> Path:
    """Where a server writes that runs in the background."""
    return user_log_path(NAME, appauthor=False) / "server.log"


@dataclass(frozen=True)
class Manager:
    """What runs the services of a user.

    file:    the service's file. start, stop, status: commands, run in their order.
    """

    file: Path
    start: Sequence[Sequence[str]]
    stop: Sequence[Sequence[str]]
    status: Sequence[str]


def manager() -> Manager:
    """That of this system."""
    if sys.platform == "darwin":
        file = Path.home() / f"Library/LaunchAgents/{NAME}.plist"
        domain = f"gui/{os.getuid()}"
        return Manager(
            file,
            [["launchctl", "bootstrap", domain, str(file)]],
            [["launchctl", "bootout", f"{domain}/{NAME}"]],
            ["launchctl", "print", f"{domain}/{NAME}"],
        )
    unit, control = f"{NAME}.service", ["systemctl", "--user"]
    return Manager(
        user_config_folder().parent / "systemd/user" / unit,
        [[*control, "daemon-reload"], [*control, "enable", "--now", unit]],
        [[*control, "disable", "--now", unit]],
        [*control, "status", "--no-pager", unit],
    )


def text_of(command: Sequence[str], log: Path) -> str:
    """The file of a service that runs a command, and runs it again when it has failed."""
    if sys.platform == "darwin":
        about = {
            "Label": NAME,
            "ProgramArguments": list(command),
            "WorkingDirectory": os.getcwd(),
            "EnvironmentVariables": _environment(),
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "StandardOutPath": str(log),
            "StandardErrorPath": str(log),
        }
        return plistlib.dumps(about).decode()
    # In a command, but not in a variable, a $ begins the name of one.
    words = " ".join(_quoted(word.replace("$", "$$")) for word in command)
    variables = "".join(f"Environment={_quoted(f'{n}={v}')}\n" for n, v in _environment().items())
    return (
        "[Unit]\nDescription=mlx-lm's server on a block pool\n"
        "StartLimitIntervalSec=300\nStartLimitBurst=5\n\n"
        f"[Service]\nExecStart={words}\nRestart=on-failure\nRestartSec=5\n"
        f"WorkingDirectory={_escaped(os.getcwd())}\n{variables}"
        f"StandardOutput=append:{_escaped(str(log))}\nStandardError=inherit\n\n"
        "[Install]\nWantedBy=default.target\n"
    )


def _environment() -> dict[str, str]:
    """Variables of this shell that say where settings, models and the store are."""
    return {name: os.environ[name] for name in PLACES if name in os.environ}


def _escaped(word: str) -> str:
    return word.replace("%", "%%")


def _quoted(word: str) -> str:
    """A word of a unit, in which systemd reads escapes and specifiers."""
    word = word.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{_escaped(word)}"'


def _install(options: Sequence[str], prints: bool) -> str:
    command = [sys.executable, "-m", "mlx_blockpool.cli", "serve", *options]
    log, found = log_file(), manager()
    text = text_of(command, log)
    if prints:
        return f"{found.file}:\n{text}"
    log.parent.mkdir(parents=True, exist_ok=True)
    before = found.file.read_text(encoding="utf-8") if found.file.exists() else None
    if before is not None:
        for stop in found.stop:
            _run(stop)
    found.file.parent.mkdir(parents=True, exist_ok=True)
    found.file.write_text(text, encoding="utf-8")
    try:
        for start in found.start:
            _need(start)
    except BlockpoolError:
        for stop in found.stop:
            _run(stop)
        if before is None:
            found.file.unlink()
        else:
            found.file.write_text(before, encoding="utf-8")
        raise
    return f"The service runs {shlex.join(command)}\nfile  {found.file}\nlog   {log}"


def _status() -> tuple[str, int]:
    found = manager()
    if not found.file.exists():
        return f"No service is installed: {found.file} is missing.", 1
    ran = _run(found.status)
    return (ran.stdout or ran.stderr).strip(), ran.returncode


def _logs() -> str:
    log = log_file()
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise BlockpoolError(f"The service has written no log yet: {error}") from error
    return "\n".join([f"{log}:", *lines[-LAST_LINES:]])


def _remove() -> str:
    found = manager()
    if not found.file.exists():
        raise BlockpoolError(f"No service is installed: {found.file} is missing.")
    for stop in found.stop:
        # It may be stopped already.
        _run(stop)
    found.file.unlink()
    return f"The service is stopped and {found.file} removed."


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    if shutil.which(command[0]) is None:
        raise BlockpoolError(
            f"This system has no {command[0]}, which runs the services of a user. Start "
            "`mlx-blockpool serve` by other means."
        )
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _need(command: Sequence[str]) -> None:
    ran = _run(command)
    if ran.returncode:
        raise BlockpoolError(f"{shlex.join(command)} failed: {(ran.stderr or ran.stdout).strip()}")
