"""`mlx-blockpool demo` and `models` with the bundled model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mlx_blockpool.cli import main


@pytest.mark.thorough
def test_the_demo_compares_with_mlx_lms_own_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--turns", "1", "--compare"]) == 0
    shown = capsys.readouterr().out
    found = {
        name: (int(tokens.replace(",", "")), int(computed.replace(",", "")))
        for name, tokens, computed in re.findall(
            r"^(\S+) +[\d.]+ +([\d,]+) +([\d,]+)$", shown, re.MULTILINE
        )
    }
    assert found["mlx-blockpool"][0] == found["mlx_lm.server"][0]
    assert 2 * found["mlx-blockpool"][1] < found["mlx_lm.server"][1]
    assert re.search(r"Reuse has saved [\d.]+ s of prefill here\.\n$", shown)


def test_the_bundled_model_is_listed_where_none_is_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert main(["models"]) == 0
    title, demo, *_ = capsys.readouterr().out.splitlines()
    assert title.split() == ["model", "weights", "agents", "tokens", "of", "each"]
    assert demo.split()[0] == "demo"
    assert int(demo.split()[-2].replace(",", "")) > 10
