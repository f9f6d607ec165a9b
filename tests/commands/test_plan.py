"""mlx-blockpool plan: models that it refuses, its options, and what it imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands.planning import refusal
from models import CONFIGS
from published import write_config

from mlx_blockpool.cli import main
from mlx_blockpool.formatting import human_bytes


def test_a_model_that_is_not_there_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    advice = (
        "Give --model the path of a model folder or its config.json, the id of a downloaded "
        "model, or demo."
    )
    paths = [(tmp_path / "none", tmp_path / "none"), (tmp_path, tmp_path / "config.json")]
    paths += [(tmp_path / ("long" * 100),) * 2]
    for model, missing in paths:
        found = refusal(capsys, "--model", str(model))
        assert found == f"{missing} does not exist. {advice}"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("{", "Cannot read {path}: "),
        ("[1]", "{path} is not the config.json of a model: it does not hold a JSON object."),
        ({}, "{path}: the config has no model_type. Check {path}"),
        ({"model_type": "unheard_of"}, "{path}: neither mlx-lm "),
        ({"model_type": "llama"}, "{path}: "),
        (
            {**CONFIGS["llama"], "num_hidden_layers": 0},
            "{path}: mlx-lm cannot build a model from this config: ",
        ),
        (
            {**CONFIGS["llama"], "num_key_value_heads": "2"},
            "{path}: mlx-lm cannot build a model from this config: TypeError",
        ),
        (
            {**CONFIGS["gpt_oss"], "sliding_window": 0},
            "{path}, layer 0: sizes must be positive integers (got WindowLayer(",
        ),
        (
            {**CONFIGS["gpt_oss"], "head_dim": -1},
            "{path}: mlx-lm cannot build a model from this config: ",
        ),
        (
            {**CONFIGS["gpt_oss"], "head_dim": 0},
            "{path}: mlx-lm cannot build a model from this config: ZeroDivisionError",
        ),
    ],
)
def test_a_config_that_describes_no_model_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: Any, expected: str
) -> None:
    path = write_config(tmp_path, content)
    found = refusal(capsys, "--model", str(path))
    assert found.startswith(expected.format(path=path))
    assert found.count(str(path)) >= 1 + ("Check" in found)
    assert str(path) in found


def test_bytes_that_are_no_text_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b"\xff\xfe")
    assert refusal(capsys, "--model", str(path)).startswith(f"Cannot read {path}: ")


def test_an_unknown_option_is_argparses_own_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as info:
        main(["plan", "--length-of-all", "3"])
    assert info.value.code == 2
    assert "unrecognized arguments: --length-of-all 3" in capsys.readouterr().err


def test_help_lists_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as info:
        main(["plan", "--help"])
    assert info.value.code == 0
    found = capsys.readouterr().out
    options = ("--model", "--memory", "--context", "--kv-bits", "--json")
    assert all(option in found for option in options)


@pytest.mark.parametrize(
    "module",
    [
        "cli",
        "commands.plan",
        *(f"model_files.{name}" for name in ("calculator", "modelfile", "device")),
    ],
)
def test_importing_it_imports_no_mlx(module: str) -> None:
    code = (
        f"import sys, mlx_blockpool.{module}; print([m for m in sys.modules if "
        "m.partition('.')[0] in ('mlx', 'mlx_lm')])"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "[]\n"
    )


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (999_949, "999.9 kB"),
        (999_950, "1.0 MB"),
        (6_029_312, "6.0 MB"),
        (10**9, "1.0 GB"),
        (2_500 * 10**9, "2.5 TB"),
        (2_500 * 10**12, "2,500.0 TB"),
    ],
)
def test_human_bytes(count: int, text: str) -> None:
    assert human_bytes(count) == text
