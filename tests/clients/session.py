"""A conversation of a real client with the server, alone on a machine: python -m clients.session
NAME BINARIES FOLDER [--launch].

Run in a network namespace of its own (unshare --net), whose only interface is loopback. The client
gets an empty environment, a home in FOLDER, a made-up key, and the settings of its section in
clients.md, or is started by `mlx-blockpool launch`. Writes FOLDER/wire.json.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
import signal
import socket
import struct
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from clients.programs import PROGRAMS, Program
from clients.wire import noted

ROOT = Path(__file__).parent.parent.parent
CLIENTS = ROOT / "mlx_blockpool/server/clients.md"
AGENT = ROOT / "benchmarks/demo/agent_model"
QUESTIONS = [
    "What is in this folder?",
    "How many lines has the README?",
    "Has anything changed?",
    "How does the README begin?",
]
# The port of the documents, and the one after it.
PORT, SERVER_PORT = 8080, 18080
TURN_SECONDS = 600


def raise_loopback() -> None:
    """Bring the interface up that a new network namespace has down."""
    up = struct.pack("16sh14x", b"lo", 0x1 | 0x40)
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, 0x8914, up)


def settings(heading: str) -> tuple[dict[str, str], list[str], str]:
    """Files below the home, lines of shell, and the command of a client's section."""
    section = re.search(
        rf"^### {re.escape(heading)}\n(.*?)(?=^##)",
        CLIENTS.read_text(encoding="utf-8"),
        re.DOTALL | re.MULTILINE,
    )
    assert section, f"{CLIENTS} has no section {heading}"
    found = re.findall(r"^```(\S+) (\S+)\n(.*?)^```", section[1], re.DOTALL | re.MULTILINE)
    files = {path.removeprefix("~/"): text for _, path, text in found if path.startswith("~/")}
    *lines, command = next(
        text for language, path, text in found if language == "sh" and not path.startswith("~/")
    ).splitlines()
    return files, lines, command


@contextmanager
def serving(
    folder: Path, end: signal.Signals = signal.SIGTERM, model: Path = AGENT
) -> Iterator[None]:
    command = [
        sys.executable,
        "-m",
        "mlx_blockpool.cli",
        "serve",
        "--model",
        str(model),
        "--port",
        str(SERVER_PORT),
    ]
    with (folder / "server.log").open("ab") as log:
        process = subprocess.Popen(
            [*command, "--store-dir", str(folder / "store")], stdout=log, stderr=log
        )
    try:
        while True:
            assert process.poll() is None, (folder / "server.log").read_text()
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{SERVER_PORT}/health")
                break
            except OSError:
                time.sleep(0.05)
        yield
    finally:
        process.send_signal(end)
        process.wait(30)


def prepare(folder: Path) -> Path:
    """A folder for the client to work in: a repository with a README."""
    work = folder / "work"
    work.mkdir(parents=True)
    (work / "README.md").write_text("# Pool\n\nA pool of blocks.\nEach has 256 tokens.\n")
    author = ["-c", "user.name=Ann", "-c", "user.email=ann@example.org"]
    for arguments in (["init", "-q"], ["add", "."], [*author, "commit", "-qm", "Begin"]):
        subprocess.run(["git", *arguments], cwd=work, check=True)
    return work


def ask(
    program: Program,
    binaries: Path,
    home: Path,
    work: Path,
    question: str,
    is_first: bool,
    launches: bool,
) -> subprocess.CompletedProcess[str]:
    files, lines, command = settings(program.heading)
    if launches:
        files, lines = {}, []
        command = f"{sys.executable} -m mlx_blockpool.cli launch {program.launched} --"
    for path, text in files.items():
        (home / path).parent.mkdir(parents=True, exist_ok=True)
        (home / path).write_text(text)
    arguments = (program.first if is_first else program.later).replace("{}", shlex.quote(question))
    script = "\n".join([*lines, f"exec {command} {arguments}"])
    paths = f"{binaries}:{os.environ['PATH']}"
    return subprocess.run(
        ["env", "-i", f"HOME={home}", f"PATH={paths}", "bash", "-c", script],
        cwd=work, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TURN_SECONDS,
    )  # fmt: skip


def main(name: str, binaries: Path, folder: Path, launches: bool) -> None:
    raise_loopback()
    work, home = prepare(folder), folder / "home"
    home.mkdir()
    turns = []
    with serving(folder), noted(PORT, SERVER_PORT) as exchanges:
        for number, question in enumerate(QUESTIONS):
            before = len(exchanges)
            ran = ask(PROGRAMS[name], binaries, home, work, question, number == 0, launches)
            asked = [exchange.as_dict() for exchange in exchanges[before:]]
            turns.append(
                {
                    "question": question,
                    "status": ran.returncode,
                    "said": ran.stdout + ran.stderr,
                    "exchanges": asked,
                }
            )
    (folder / "wire.json").write_text(json.dumps(turns, indent=1))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), "--launch" in sys.argv)
