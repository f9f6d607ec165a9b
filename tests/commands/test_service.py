"""`mlx-blockpool service`: the files for systemd and launchd, and the commands that are run."""

from __future__ import annotations

import plistlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_blockpool.cli import main
from mlx_blockpool.commands import service

ODD = ["/a folder/python", "-m", "serve", "--model", 'a "b" $HOME 50% \\n']


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home, and programs that write down their arguments."""
    binaries = tmp_path / "bin"
    binaries.mkdir()
    for name in ("systemctl", "launchctl"):
        (binaries / name).write_text(f'#!/bin/sh\necho "{name} $*" >> {tmp_path}/ran\n')
        (binaries / name).chmod(0o755)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(binaries))
    monkeypatch.delenv("XDG_CONFIG_HOME")
    return tmp_path


def test_it_is_installed_and_removed(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["service", "status"]) == 1
    assert main(["service", "install", "--", "--model", "m"]) == 0
    unit = home / ".config/systemd/user/mlx-blockpool.service"
    assert f'ExecStart="{sys.executable}" "-m" "mlx_blockpool.cli" "serve" "--model" "m"' in (
        unit.read_text()
    )
    assert str(service.log_file()) in unit.read_text()
    assert main(["service", "status"]) == 0
    assert main(["service", "remove"]) == 0
    assert not unit.exists()
    assert (home / "ran").read_text().splitlines() == [
        "systemctl --user daemon-reload",
        "systemctl --user enable --now mlx-blockpool.service",
        "systemctl --user status --no-pager mlx-blockpool.service",
        "systemctl --user disable --now mlx-blockpool.service",
    ]
    assert main(["service", "remove"]) == 2
    assert "No service is installed" in capsys.readouterr().err


def test_it_runs_where_it_was_installed(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative paths and the folders of models are those of the shell."""
    (home / "a place").mkdir()
    monkeypatch.chdir(home / "a place")
    monkeypatch.setenv("HF_HOME", "/models 5% $x")
    text = service.text_of(["serve"], home / "log")
    assert f"WorkingDirectory={home}/a place\n" in text
    assert 'Environment="HF_HOME=/models 5%% $x"\n' in text
    monkeypatch.setattr(sys, "platform", "darwin")
    found = plistlib.loads(service.text_of(["serve"], home / "log").encode())
    assert found["WorkingDirectory"] == f"{home}/a place"
    assert found["EnvironmentVariables"]["HF_HOME"] == "/models 5% $x"


def test_a_service_that_does_not_start_leaves_the_one_before(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unit = home / ".config/systemd/user/mlx-blockpool.service"
    assert main(["service", "install"]) == 0
    before = unit.read_text()
    (home / "bin/systemctl").write_text("#!/bin/sh\nexit 1\n")
    assert main(["service", "install", "--", "--model", "m"]) == 2
    assert unit.read_text() == before
    assert main(["service", "remove"]) == 0, "a stopped one is removed too"
    assert not unit.exists()


def test_a_service_that_does_not_start_leaves_no_file(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "bin/systemctl").write_text("#!/bin/sh\necho no bus >&2\nexit 1\n")
    assert main(["service", "install"]) == 2
    assert "no bus" in capsys.readouterr().err
    assert not (home / ".config/systemd/user/mlx-blockpool.service").exists()


def test_a_system_without_systemd_is_an_error(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["service", "install"]) == 2
    assert "This system has no systemctl" in capsys.readouterr().err


def test_the_log_is_shown(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["service", "logs"]) == 2
    service.log_file().parent.mkdir(parents=True)
    service.log_file().write_text("".join(f"line {i}\n" for i in range(100)))
    assert main(["service", "logs"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[1:] == [f"line {i}" for i in range(50, 100)]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "mlx-blockpool.service"
    command = [sys.executable, *ODD[1:]]
    unit.write_text(service.text_of(command, tmp_path / "a log 5%"))
    ran = subprocess.run(
        ["systemd-analyze", "--user", "verify", str(unit)],
        capture_output=True,
        text=True,
        check=False,
        env={"XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
    )
    assert (ran.returncode, ran.stderr) == (0, "")


def test_launchd_takes_the_list(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert main(["service", "install", "--", *ODD[3:]]) == 0
    found = plistlib.loads((home / "Library/LaunchAgents/mlx-blockpool.plist").read_bytes())
    assert found["ProgramArguments"][1:] == ["-m", "mlx_blockpool.cli", "serve", *ODD[3:]]
    assert found["KeepAlive"] == {"SuccessfulExit": False}
    assert main(["service", "remove"]) == 0
    assert [line.split()[:2] for line in (home / "ran").read_text().splitlines()] == [
        ["launchctl", "bootstrap"],
        ["launchctl", "bootout"],
    ]
