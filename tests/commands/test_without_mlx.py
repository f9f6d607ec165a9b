"""The commands where mlx has no backend, as after an installation on Linux without the extra
`cpu` or `cuda`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_blockpool.demo import model_path
from mlx_blockpool.model_files import device

MISSING = "libmlx.so: cannot open shared object file: No such file or directory"
LINUX = (
    "Install its backend: pip install 'mlx-blockpool[cpu]', or 'mlx-blockpool[cuda]' for an "
    "NVIDIA GPU."
)
MAC = "Reinstall it: pip install --force-reinstall mlx mlx-metal"
ADVICE = MAC if sys.platform == "darwin" else LINUX
DEMO = model_path("demo")


@pytest.fixture
def no_backend(tmp_path: Path) -> dict[str, str]:
    """The environment of a process in which `import mlx.core` fails as it does without the
    package mlx-cpu.
    """
    package = tmp_path / "without" / "mlx"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "core.py").write_text(f"raise ImportError({MISSING!r})\n")
    return {**os.environ, "PYTHONPATH": str(package.parent)}


def run(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mlx_blockpool.cli", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "arguments",
    [
        ["serve", "--model", DEMO],
        ["plan", "--model", DEMO],
        ["store", "export", "--model", DEMO, "--tokens", "1", "out.safetensors"],
        ["store", "import", "--model", DEMO, "in.safetensors"],
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_a_command_that_needs_mlx_says_what_is_missing_and_how_to_install_it(
    no_backend: dict[str, str], arguments: list[str]
) -> None:
    found = run(no_backend, *arguments)
    expected = f"mlx-blockpool: error: mlx has no backend to compute with ({MISSING}). {ADVICE}\n"
    assert (found.returncode, found.stdout, found.stderr) == (2, "", expected)


def test_doctor_finds_the_missing_backend_and_does_not_blame_mlx_lm(
    no_backend: dict[str, str], tmp_path: Path
) -> None:
    found = run(no_backend, "doctor", "--store-dir", str(tmp_path))
    assert found.returncode == 1
    assert found.stderr == ""
    problems = [
        line.split()[1] for line in found.stdout.splitlines() if line.split()[:1] == ["PROBLEM"]
    ]
    assert [problem for problem in problems if problem != "port"] == ["mlx"]
    assert f"-> {ADVICE}" in found.stdout
    assert "mlx-lm lacks" not in found.stdout


def test_a_command_that_needs_no_mlx_runs_without_it(
    no_backend: dict[str, str], tmp_path: Path
) -> None:
    assert run(no_backend, "store", "stats", "--store-dir", str(tmp_path)).returncode == 0


def test_another_failing_import_keeps_its_traceback(tmp_path: Path) -> None:
    (tmp_path / "jinja2.py").write_text("raise ImportError('no template engine')\n")
    found = run({**os.environ, "PYTHONPATH": str(tmp_path)}, "serve", "--model", DEMO)
    assert "ImportError: no template engine" in found.stderr


@pytest.mark.parametrize(("platform", "advice"), [("linux", LINUX), ("darwin", MAC)])
def test_the_advice_is_for_the_system(
    monkeypatch: pytest.MonkeyPatch, platform: str, advice: str
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setitem(sys.modules, "mlx.core", None)
    problem = device.mlx_problem()
    assert problem is not None
    assert problem[1] == advice
