"""mlx-blockpool plan, called as a user calls it."""

from __future__ import annotations

import pytest

from mlx_blockpool.cli import main


def output(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["plan", *arguments]) == 0
    found = capsys.readouterr()
    assert found.err == ""
    return found.out


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that a refused plan leaves."""
    assert main(["plan", *arguments]) == 2
    found = capsys.readouterr()
    assert found.out == ""
    assert found.err.startswith("mlx-blockpool: error: ")
    assert found.err.count("\n") == 1
    return found.err.removeprefix("mlx-blockpool: error: ").rstrip()
