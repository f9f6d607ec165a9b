"""benchmarks/gpu.sh with stand-ins for the programs of a machine with a GPU, and what it says of
the figures.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from documents import ROOT

BENCHMARKS = ROOT / "benchmarks"
TOOLS = ("bash", "cat", "dirname", "grep", "mktemp", "sed", "tee", "touch")
SMI = """case "$*" in -L) echo "GPU 0: a card";;
*) echo "| Driver Version: 580.1   CUDA Version: {cuda}.2 |";; esac"""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.gpu")


class Machine:
    """A folder that is all of PATH, with a few tools and stand-ins."""

    def __init__(self, folder: Path, system: str = "Linux x86_64") -> None:
        self.folder, self.log = folder, folder / "log"
        self.variables = {"PYTHON": sys.executable, "VENV": str(folder / "venv")}
        self.log.touch()
        for tool in TOOLS:
            (folder / tool).symlink_to(str(shutil.which(tool)))
        kind, _, processor = system.partition(" ")
        self.add("uname", f'if [ "$1" = -s ]; then echo {kind}; else echo {processor}; fi')

    def add(self, name: str, script: str) -> None:
        path = self.folder / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(f"#!{shutil.which('bash')}\n{script}\n")
        path.chmod(0o755)

    def add_venv(self, otherwise: str = ":") -> None:
        """A Python that notes what it is to run, and runs only what sums up."""
        summary = f'case "$2" in benchmarks.gpu) exec {sys.executable} "$@";; esac'
        self.add("venv/bin/python", f'echo "$@" >>{self.log}\n{otherwise}\n{summary}')

    def run(self, *options: str) -> subprocess.CompletedProcess[str]:
        environment = {
            "PATH": str(self.folder),
            "TMPDIR": str(self.folder),
            "HOME": os.environ["HOME"],
            **self.variables,
        }
        command = [str(self.folder / "bash"), str(BENCHMARKS / "gpu.sh"), *options]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_without_a_gpu_it_says_what_it_needs(machine: Machine) -> None:
    found = machine.run()
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr == (
        "gpu.sh: No nvidia-smi: this needs an NVIDIA GPU and its driver, or a Mac with Apple "
        "silicon.\n"
    )


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo 'no devices were found'; exit 6", "nvidia-smi lists no GPU: no devices were found"),
        (SMI.format(cuda=11), "The driver has CUDA 11. mlx needs a driver for CUDA 12 or 13."),
        (SMI.format(cuda="N/A"), "The driver has CUDA of an unknown version."),
    ],
)
def test_a_driver_that_does_not_fit(machine: Machine, script: str, words: str) -> None:
    machine.add("nvidia-smi", script)
    found = machine.run()
    assert found.returncode == 2
    assert words in found.stderr


@pytest.mark.parametrize(
    ("system", "words"),
    [("Darwin x86_64", "This Mac has no Apple silicon"), ("FreeBSD amd64", "not on FreeBSD")],
)
def test_another_system(tmp_path: Path, system: str, words: str) -> None:
    found = Machine(tmp_path, system).run()
    assert found.returncode == 2
    assert words in found.stderr


def test_a_python_that_is_none(machine: Machine) -> None:
    machine.add("nvidia-smi", SMI.format(cuda=13))
    machine.variables["PYTHON"] = "/bin/false"
    assert "No Python 3.11 or newer: /bin/false is none." in machine.run().stderr
    del machine.variables["PYTHON"]
    assert "No Python 3.11 or newer. Name one with PYTHON=..." in machine.run().stderr


def test_an_mlx_that_computes_on_a_cpu_is_not_measured(machine: Machine) -> None:
    machine.add("nvidia-smi", SMI.format(cuda=13))
    machine.add_venv('if [ "$1" = -c ]; then exit 1; fi')
    machine.variables["INSTALL"] = "no"
    found = machine.run("--quick")
    assert found.returncode == 2
    assert f"mlx computes on a CPU in {machine.folder}/venv." in found.stderr
    assert [line.split()[0] for line in machine.log.read_text().splitlines()] == ["-c"]


@pytest.mark.parametrize(
    ("system", "cuda", "installed"),
    [
        ("Linux x86_64", 13, ".[cuda,test]"),
        pytest.param("Linux aarch64", 12, ".[test] mlx[cuda12]", marks=pytest.mark.thorough),
        pytest.param("Darwin arm64", None, ".[test]", marks=pytest.mark.thorough),
    ],
)
def test_all_steps_run_in_the_environment_that_it_makes(
    tmp_path: Path, system: str, cuda: int | None, installed: str
) -> None:
    machine = Machine(tmp_path, system)
    if cuda is not None:
        machine.add("nvidia-smi", SMI.format(cuda=cuda))
    machine.add_venv()
    found = machine.run("--quick")
    assert found.returncode == 0, found.stderr
    ran = [line.replace(str(tmp_path), "T") for line in machine.log.read_text().splitlines()]
    assert ran[0] == f"-m pip install --quiet --editable {installed}"
    assert re.match(r"-m mlx_blockpool.cli doctor --model demo --port \d+ --store-dir T", ran[2])
    assert ran[3] == "-m pytest -n 0 tests/kernel/test_on_device.py"
    assert [line.split()[0] for line in ran[4:7]] == [
        f"benchmarks/bench_{name}.py" for name in ("kernel", "paths", "drafts")
    ]
    assert all(line.endswith("--quick") for line in ran[4:])
    assert "tests: ended well after" in found.stdout
    for name in ("kernel", "paths", "drafts"):
        assert (BENCHMARKS / f"bench_{name}.py").exists()


def test_a_step_that_fails_is_told_and_the_others_run(machine: Machine) -> None:
    machine.add("nvidia-smi", SMI.format(cuda=13))
    machine.add_venv('case "$*" in "-m pytest"*) echo "1 failed"; exit 3;; esac')
    machine.variables["INSTALL"] = "no"
    found = machine.run("--quick")
    assert found.returncode == 1
    assert "1 failed" in found.stdout
    assert "tests: failed after" in found.stdout
    assert "drafts: ended well after" in found.stdout


def lines(status: int, worst: float, share: float) -> list[dict[str, Any]]:
    return [
        {"bench": "gpu", "case": "tests", "status": status, "seconds": 4},
        {"bench": "paths", "case": "30 kinds of batches", "worst_share": worst},
        {
            "bench": "kernel",
            "case": "attention",
            "kernel_share": share,
            "needed": {"kernel_share": 0.7},
        },
        {"bench": "kernel", "case": "step", "kernel_ms": 0.5, "ratio_stock": 0.1},
        {"bench": "drafts", "case": "x", "quick": True, "needed": {"no": 1}},
    ]


@pytest.mark.parametrize(
    ("figures", "well"),
    [
        ((0, 0.97, 0.7), True),
        ((1, 0.97, 0.7), False),
        ((0, 0.96, 0.7), False),
        ((0, 0.97, 0.69), False),
    ],
)
def test_all_figures_have_to_be_what_they_are_needed_to_be(
    gpu: ModuleType, figures: Any, well: bool
) -> None:
    words, found = gpu.summary(lines(*figures))
    assert found == well
    assert words.count("DOES NOT HOLD") == (figures[1] < 0.97) + (figures[2] < 0.7)
    assert f"kernel, attention: kernel_share {figures[2]:g}, needed 0.7" in words
    assert "step: kernel_ms 0.5, ratio_stock 0.1\n" in words
    assert not gpu.summary([])[1]


def test_figures_are_kept_with_those_of_their_machine(
    gpu: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    written: list[Any] = []
    monkeypatch.setattr(gpu, "RESULTS", tmp_path)
    monkeypatch.setattr(gpu, "machine", lambda: "gpu-a-card")
    monkeypatch.setattr(gpu.figures, "write", written.append)
    file = tmp_path / "lines"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines(0, 1.0, 1.0)))
    assert gpu.main([str(file), "--quick"]) == 0
    assert not written
    assert gpu.main([str(file)]) == 0
    assert [line["bench"] for line in gpu.read(tmp_path / "gpu-a-card.jsonl")] == [
        "drafts",
        "gpu",
        "paths",
        "kernel",
        "kernel",
    ]
    assert list(written[0]) == ["gpu-a-card"]
    assert "gpu-a-card.jsonl" in capsys.readouterr().out


def test_the_tables_show_what_a_gpu_has_measured(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    cases = [
        f"{work}, {case.name}"
        for case in importlib.import_module("bench_kernel").CASES
        for work in ("attention", "step")
    ]
    line = {
        "bench": "kernel",
        "device": "a card",
        "kernel_ms": 0.25,
        "kernel_share": 0.8,
        "stock_ms": 1.0,
    }
    measured = [{**line, "case": case, "ratio_stock": 4.0, "ratio_ragged": 2.0} for case in cases]
    attention, step = (
        gpu.figures.Figures({"gpu": measured}).row(row)
        for row in gpu.figures.ROWS
        if row.bench == "kernel"
    )
    ratio = "4.0x (2.0x of a call for each member)"
    assert attention[0].endswith("; part of the bandwidth (a card)")
    assert attention[1:] == [
        "0.250 ms (80%) / 0.250 ms (80%)",
        "1.000 ms / 1.000 ms",
        f"{ratio} / {ratio}",
    ]
    assert step[1:] == ["0.25 ms / 0.25 ms", "1.00 ms / 1.00 ms", f"{ratio} / {ratio}"]


def test_small_sizes_take_the_place_of_no_figure(
    gpu: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    measure = importlib.import_module("benchmarks.measure")
    full, quick = (
        argparse.Namespace(quick=False, out=None),
        argparse.Namespace(quick=True, out=None),
    )
    measure.report(full, "b", "x", ms=1)
    measure.report(quick, "b", "x", ms=2)
    measure.report(quick, "b", "y", ms=3)
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    kept = importlib.import_module("benchmarks.plots").latest(found)
    assert {(line["case"], line["ms"]) for line in kept} == {("x", 1), ("y", 3)}
    figures = gpu.figures.Figures({gpu.figures.MACHINE: found})
    assert [figures.row(gpu.figures.Row("w", "b", (case,), "{ms}")) for case in "xy"] == [
        ["w", "1", "", ""],
        [],
    ]
