"""Real clients, each for four turns against the demo agent: every request is served, and what was
known is known again.

Only with --clients: they are installed from package registries, into BLOCKPOOL_CLIENTS or a folder
that goes afterwards.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.demo.agent import load_script
from clients.kinds import KINDS
from clients.programs import PROGRAMS, install
from clients.session import CLIENTS, settings
from clients.wire import Exchange
from clients.writing import RATE, TOOLS

TESTS = Path(__file__).parent.parent
NAMES = list(PROGRAMS)
# Nothing but loopback; and what a client leaves running ends with the session.
ALONE = ["--net", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc"]
# Of the tokens that earlier requests of the conversation have brought.
KNOWN_SHARE = 0.99
# Of the prompt of a session in another folder.
SECOND_SHARE = 0.9
# What the clients call their tool for commands.
SHELLS = {
    "claude-code": "Bash",
    "codex": "exec_command",
    "opencode": "bash",
    "qwen-code": "run_shell_command",
}
SETTINGS = ("settings.json", "config.toml", "opencode.json")
ANSWERS = ["".join(step["answer"]) for step in load_script()["steps"] if "answer" in step]


@pytest.mark.parametrize("name", NAMES)
def test_the_page_says_how_to_point_it_here(name: str) -> None:
    files, lines, command = settings(PROGRAMS[name].heading)
    assert "http://127.0.0.1:8080" in "".join([*files.values(), *lines])
    assert command


def test_the_page_has_all_clients() -> None:
    section = (
        CLIENTS.read_text(encoding="utf-8").partition("\n## Clients\n")[2].partition("\n## ")[0]
    )
    headings = [
        line.removeprefix("### ") for line in section.splitlines() if line.startswith("### ")
    ]
    assert {program.heading for program in PROGRAMS.values()} <= set(headings)


def run_alone(module: str, name: str, installed: Path, folder: Path, *options: str) -> str:
    """What clients.MODULE prints that runs a program in a network namespace."""
    binaries = install(PROGRAMS[name].package, installed / name)
    command = [sys.executable, "-m", f"clients.{module}", name, str(binaries), str(folder)]
    ran = subprocess.run(
        ["unshare", *ALONE, *command, *options],
        cwd=TESTS, env={**os.environ, "PYTHONPATH": str(TESTS.parent)},
        capture_output=True, text=True, timeout=1500,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def turns_of(
    name: str, installed: Path, folder: Path, launches: bool = False
) -> list[dict[str, Any]]:
    run_alone("session", name, installed, folder, *["--launch"] * launches)
    turns: list[dict[str, Any]] = json.loads((folder / "wire.json").read_text())
    return turns


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SHELLS)
def test_a_second_session(name: str, kind: str, installed: Path, tmp_path: Path) -> None:
    """Later turns of the first one read what is known, and those after a restart too."""
    printed = run_alone("second_session", name, installed, tmp_path, kind, SHELLS[name])
    found = re.findall(r": ([^:]+): (\d+) of (\d+) ", printed)
    read = {what: (int(cached), int(whole)) for what, cached, whole in found}
    cached, known = read["known tokens of later turns"]
    assert cached >= (KNOWN_SHARE if kind == "llama" else 0.97) * known
    for what in ("second session, another folder", "third session, another folder"):
        cached, prompt = read[what]
        assert cached >= SECOND_SHARE * prompt, what
    computed = {what: prompt - cached for what, (cached, prompt) in read.items()}
    # With the new message; other architectures than llama resume where a prompt has ended.
    assert computed["the same session after kill -9"] < 256 + computed["its turn 2"]
    assert computed["the same session after SIGTERM"] <= computed["its turn 3"] + 1


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("name", "launches"),
    [(name, False) for name in NAMES] + [(n, True) for n, p in PROGRAMS.items() if p.launched],
)
def test_four_turns(name: str, launches: bool, installed: Path, tmp_path: Path) -> None:
    """With the settings of the page, or started by `mlx-blockpool launch`."""
    turns = turns_of(name, installed, tmp_path, launches)
    exchanges = [[Exchange(**exchange) for exchange in turn["exchanges"]] for turn in turns]
    assert [turn["said"] for turn in turns if turn["status"] != 0] == []
    assert [
        (e.method, e.path, e.status, e.answer)
        for turn in exchanges
        for e in turn
        if e.status >= 400
    ] == []
    replies = [[e for e in turn if e.is_reply] for turn in exchanges]
    assert all(replies), "a turn that asked nothing"
    if PROGRAMS[name].has_tools:
        said = " ".join(" ".join(turn["said"] for turn in turns).split())
        assert [
            answer
            for answer in (ANSWERS if PROGRAMS[name].appends else ANSWERS[:1])
            if answer not in said
        ] == []
    if PROGRAMS[name].appends:
        assert lost(replies) == []
    if launches:
        assert foreign_files(name, tmp_path / "home") == []


@pytest.mark.timeout(900)
def test_codex_compacts_by_an_ordinary_reply(installed: Path, tmp_path: Path) -> None:
    """It calls no /v1/responses/compact, which this server does not have."""
    found = json.loads(run_alone("compaction", "codex", installed, tmp_path))
    assert {tuple(asked[:3]) for asked in found["requests"]} == {("POST", "/v1/responses", 200)}
    assert [asks_for_summary for *_, asks_for_summary in found["requests"]][:2] == [True, False]
    assert ANSWERS[0] in found["said"]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", TOOLS)
def test_a_long_file_is_written_without_silence(name: str, installed: Path, tmp_path: Path) -> None:
    """4,000 tokens at 20 a second: the client waits to the end, and the file is whole. The tokens
    without an event take less than a second.
    """
    found = json.loads(run_alone("writing", name, installed, tmp_path))
    assert [request for request in found["requests"] if request[2] != 200] == []
    assert (found["status"], found["calls"], found["is_complete"]) == (0, 1, True), found["said"]
    assert found["most_tokens"] < RATE


def foreign_files(name: str, home: Path) -> list[str]:
    """Files in a home that neither the client wrote nor launch into the folder that only it
    uses; and settings of the client itself.
    """
    program = PROGRAMS[name]
    private = f".config/mlx-blockpool/clients/{program.launched}/"
    files = [str(path.relative_to(home)) for path in home.rglob("*") if path.is_file()]
    return [
        file
        for file in files
        if not file.startswith((private, *program.writes)) or Path(file).name in SETTINGS
    ]


def lost(turns: list[list[Exchange]]) -> list[tuple[int, int, int]]:
    """(turn, cached, known) of each request from turn two on that found less than it had to, of
    what the one before it had.
    """
    found = []
    known = max(e.prompt or 0 for e in turns[0])
    for number, turn in enumerate(turns[1:], start=2):
        for exchange in turn:
            # Titles and the like are not the conversation.
            if (exchange.prompt or 0) < known:
                continue
            if (exchange.cached or 0) < KNOWN_SHARE * known:
                found.append((number, exchange.cached or 0, known))
            known = exchange.prompt or 0
    return found
