"""The programs that people point at the server: how each is installed, and how it is asked a
question without a screen.

How each finds the server is read from mlx_blockpool/server/clients.md.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Program:
    """A client.

    heading:   of its section there, whose last command starts it.
    package:   what to install, with the version that was tried last.
    first, later: arguments, as a shell reads them, that ask the question {} in a new conversation
    and in the last one.
    has_tools: it offers the model a shell, and runs what the model calls.
    appends:   what it sends is what it sent before, with more behind it; so all of that has to be
               known.
    writes:    beginnings of the paths in the home that it writes when it is launched.
    launched:  its name for `mlx-blockpool launch`, "" if that does not know it.
    """

    heading: str
    package: str
    first: str
    later: str
    has_tools: bool = True
    appends: bool = True
    launched: str = ""
    writes: Sequence[str] = ()


def install(package: str, folder: Path, python: str = sys.executable) -> Path:
    """The folder with the programs of a package (of Python, if it is named with ==), which is
    installed unless it is there.
    """
    is_python = "==" in package
    binaries = folder / ("bin" if is_python else "node_modules/.bin")
    if binaries.is_dir():
        return binaries
    folder.mkdir(parents=True, exist_ok=True)
    if is_python:
        subprocess.run([python, "-m", "venv", str(folder)], check=True)
        command = [str(folder / "bin/pip"), "install", "-q", package]
    else:
        command = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), package]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=900)
    return binaries


_AIDER = (
    "--message {} --yes-always --no-check-update --analytics-disable --no-show-model-warnings "
    "--restore-chat-history"
)
_CODEX = "--skip-git-repo-check --dangerously-bypass-approvals-and-sandbox"

PROGRAMS = {
    "claude-code": Program(
        "Claude Code",
        "@anthropic-ai/claude-code@2.1.330",
        "-p {} --allowedTools Bash",
        "-p --continue {} --allowedTools Bash",
        launched="claude",
        writes=(".claude.json", ".claude/"),
    ),
    "codex": Program(
        "Codex",
        "@openai/codex@0.169.0",
        f"exec {_CODEX} {{}}",
        f"exec resume {_CODEX} --last {{}}",
        launched="codex",
        writes=(".codex/",),
    ),
    "opencode": Program(
        "opencode",
        "opencode-ai@1.18.33",
        "run {}",
        "run --continue {}",
        launched="opencode",
        writes=(
            *(".config/opencode/", ".local/share/opencode/", ".local/state/opencode/"),
            ".cache/opencode/",
        ),
    ),
    "qwen-code": Program(
        "qwen-code",
        "@qwen-code/qwen-code@0.15.10",
        "--yolo {}",
        "--yolo --continue {}",
        launched="qwen",
        writes=(".qwen/",),
    ),
    "continue": Program(
        "Continue", "@continuedev/cli@1.5.47", "--auto -p {}", "--auto --resume -p {}"
    ),
    # Without a terminal it begins each conversation anew.
    "cline": Program("Cline", "cline@3.0.65", "{}", "{}", appends=False, launched="cline"),
    # Its list of files and its reminders move to the end of each prompt, and it offers no tools.
    "aider": Program(
        "aider",
        "aider-chat==0.86.2",
        _AIDER,
        _AIDER,
        has_tools=False,
        appends=False,
        launched="aider",
        writes=(".aider/",),
    ),
    # With nothing queued it asks the model again and again whether it has finished, until the model
    # calls its tool `complete`.
    "gptme": Program(
        "gptme",
        "gptme==0.35.1",
        "--non-interactive {} - /exit",
        "--non-interactive --resume {} - /exit",
    ),
    "llm": Program("llm", "llm==0.36", "{}", "-c {}", has_tools=False, launched="llm"),
}
