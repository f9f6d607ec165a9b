"""Shells complete commands and options, as argcomplete lets them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("argcomplete")


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("mlx-blockpool pl", {"plan", "plugin"}),
        ("mlx-blockpool plan --con", {"--context"}),
        ("mlx-blockpool serve --pool", {"--pool-bytes"}),
        ("mlx-blockpool serve --kv-bits ", {"8", "4"}),
        ("mlx-blockpool store ag", {"agent", "agents"}),
    ],
)
def test_a_command_line_is_completed(line: str, found: set[str], tmp_path: Path) -> None:
    answer = tmp_path / "answer"
    environment = {
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(answer),
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
    }
    subprocess.run(
        [sys.executable, "-m", "mlx_blockpool.cli"],
        env=os.environ | environment,
        check=True,
        timeout=60,
    )
    assert {word.strip() for word in answer.read_text().split("\v")} == found
