"""mlx-blockpool doctor: what it finds, what it advises."""

from __future__ import annotations

import errno
import json
import socket
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import IO, Any, ClassVar
from unittest.mock import Mock

import pytest
from kernel.emulation import why_not
from kernel.trusted import emulator
from models import make_model

from mlx_blockpool.cli import main
from mlx_blockpool.commands import patch
from mlx_blockpool.commands.doctor import command, device, installation, model
from mlx_blockpool.commands.doctor.finding import Finding, looked_at
from mlx_blockpool.engine import measuring as engine_measuring
from mlx_blockpool.errors import BlockpoolError
from mlx_blockpool.formatting import client_settings
from mlx_blockpool.kv import decode_policy, measuring


@pytest.fixture
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small sizes of everything that is measured."""
    for name, size in (
        ("PREFIX", 256),
        ("TAIL", 8),
        ("MEMBERS", 2),
        ("STEPS", 1),
        ("ROUNDS", 1),
        ("DISK_BYTES", 4 << 20),
    ):
        monkeypatch.setattr(device, name, size)
    monkeypatch.setattr(measuring, "ROUNDS", 1)
    monkeypatch.setattr(measuring, "ROWS", (1, 2))


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def only(findings: list[Finding], about: str) -> Finding:
    (found,) = (finding for finding in findings if finding.about == about)
    return found


@pytest.mark.usefixtures("quickly")
def test_a_whole_examination(port: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            [
                "doctor",
                "--json",
                "--model",
                "demo",
                "--port",
                str(port),
                "--store-dir",
                str(tmp_path),
            ]
        )
        == 0
    )
    report = json.loads(capsys.readouterr().out)
    assert report["healthy"]
    found = {finding["about"]: finding for finding in report["findings"]}
    order = [
        "versions",
        "mlx-lm",
        "patch",
        "store",
        "disk",
        "port",
        "model",
        "device",
        "wired",
        "steps",
        "kernel",
        "decode",
        "disk",
        "against",
    ]
    assert [finding["about"].split()[0] for finding in report["findings"]] == order
    assert found["against mlx-lm"]["figures"]["equal_tokens"] == 48
    assert found["against mlx-lm"]["figures"]["served"] == "in ragged batches"
    assert set(found["decode path"]["figures"]["milliseconds"]) == {"ragged", "shared"}
    assert found["kernel"]["state"] == "note"
    assert (
        found["kernel"]["text"]
        == "Decode steps do not use the kernel: mlx computes on the CPU, which has no kernel."
    )
    assert found["disk speed"]["figures"]["write_bytes_per_s"] > 0
    assert not any(tmp_path.iterdir())
    assert report["clients"]["Codex"] == (
        f"mlx-blockpool launch codex --url http://127.0.0.1:{port}"
    )


def test_the_words_name_what_is_to_be_mended() -> None:
    findings = [
        Finding("port", "problem", "Port 1 is used.", "Give --port 2."),
        Finding("store", "ok", "Empty."),
    ]
    words = "\n".join(map(command.line, findings))
    assert words.splitlines()[:3] == [
        "PROBLEM  port             Port 1 is used.",
        "                          -> Give --port 2.",
        "     ok  store            Empty.",
    ]
    clients = client_settings("http://h")
    assert command.verdict(findings, clients).endswith("Fix first: port.")
    assert command.verdict(findings[1:], {}).endswith("Ready for `mlx-blockpool serve`.")


def test_a_check_that_fails_is_a_finding() -> None:
    def fails() -> list[Finding]:
        raise ZeroDivisionError("by nothing")

    def refuses() -> list[Finding]:
        raise BlockpoolError("No model. Give one.")

    assert looked_at("x", fails)[0].text == "The check failed: ZeroDivisionError: by nothing"
    assert looked_at("x", refuses) == [Finding("x", "problem", "No model. Give one.")]


def test_a_version_that_does_not_fit_comes_first(
    monkeypatch: pytest.MonkeyPatch, port: int
) -> None:
    real = installation.metadata.version
    monkeypatch.setattr(
        installation.metadata, "version", lambda name: "0.30.0" if name == "mlx-lm" else real(name)
    )
    findings = list(command.examine(None, port, None))
    versions = only(findings, "versions")
    assert versions.state == "problem"
    assert "mlx-lm 0.30.0, needed" in versions.text
    assert versions.advice.startswith("pip install 'mlx-lm")
    assert only(findings, "device").text.startswith("Nothing was measured")


def test_a_changed_mlx_lm_is_a_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = patch.PatchStatus("0.32.2", tmp_path, "changed", {"server.py": "changed"})
    monkeypatch.setattr(patch, "status", lambda: found)
    (finding,) = installation.patch_state()
    assert (finding.state, "Reinstall mlx-lm" in finding.advice) == ("problem", True)


def test_a_bad_store_is_a_warning(tmp_path: Path) -> None:
    folder = tmp_path / "models" / ("0" * 32) / "blocks" / "ab"
    folder.mkdir(parents=True)
    (folder / f"{'ab' * 32}.safetensors").write_bytes(b"nothing")
    store, space = installation.store_state(tmp_path)
    assert (store.state, store.advice) == ("warning", "mlx-blockpool store check --fix")
    assert space.figures == {} or space.state == "ok"
    missing, _ = installation.store_state(tmp_path / "none")
    assert (missing.state, missing.figures["folder"]) == ("ok", str(tmp_path / "none"))


def test_a_store_that_serve_would_refuse_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (finding,) = looked_at("store", lambda: installation.store_state(tmp_path / "file"))
    assert (finding.state, "--no-store" in finding.text) == ("problem", True)


class Health(BaseHTTPRequestHandler):
    answer: ClassVar[Any] = {"status": "ok"}
    request_id: ClassVar[str] = "req_1"

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("X-Request-Id", self.request_id)
        self.end_headers()
        self.wfile.write(json.dumps(self.answer).encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def answering() -> Iterator[HTTPServer]:
    with HTTPServer(("127.0.0.1", 0), Health) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_folder_that_cannot_be_written_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: IO[bytes], data: bytes) -> float:
        file.write(data)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(device, "_write", full)
    [found] = device.disk(tmp_path / "store")
    assert (found.state, f"no file can be created in {tmp_path} (No space left" in found.text) == (
        "warning",
        True,
    )
    assert "--store-dir" in found.advice
    assert list(tmp_path.iterdir()) == []


def test_a_number_that_is_not_a_port_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--port", "99999"]) == 2
    assert (
        capsys.readouterr().err
        == "mlx-blockpool: error: --port must be between 1 and 65535 (got 99999)\n"
    )


def test_the_port_of_a_server_of_ours_and_of_another(
    answering: HTTPServer, monkeypatch: pytest.MonkeyPatch, port: int
) -> None:
    taken = answering.server_address[1]
    (ours,) = installation.port_state(taken)
    assert (ours.state, ours.text) == (
        "note",
        f"A server of mlx-blockpool answers on port {taken}.",
    )
    for name, others in (("request_id", ""), ("answer", ["something else"])):
        with monkeypatch.context() as patch:
            patch.setattr(Health, name, others)
            (other,) = installation.port_state(taken)
        assert (other.state, other.advice) == (
            "problem",
            f"Give serve another one: --port {taken + 1}",
        )
    assert installation.port_state(port)[0].state == "ok"


@pytest.mark.usefixtures("quickly")
def test_a_kernel_that_is_right_is_among_the_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    if why_not():
        pytest.skip(str(why_not()))
    monkeypatch.setattr(decode_policy, "device_launcher", emulator)
    monkeypatch.setattr(device, "_tiny_model", lambda: make_model("llama"))
    monkeypatch.setattr(engine_measuring, "measure_paths", lambda *_, **__: {})
    found = device.decode()
    assert only(found, "kernel").state == "ok"
    assert set(only(found, "decode path").figures["milliseconds"]) == {"ragged", "shared", "kernel"}


@pytest.mark.usefixtures("quickly")
def test_a_kernel_that_fails_is_a_warning_and_no_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        decode_policy, "device_launcher", lambda: Mock(side_effect=RuntimeError("no such function"))
    )
    monkeypatch.setattr(device, "_tiny_model", lambda: make_model("llama"))
    measure_curve = Mock()
    monkeypatch.setattr(measuring, "measure_curve", measure_curve)
    found = device.decode()
    assert not measure_curve.called, "steps are timed without drafts"
    assert only(found, "kernel").state == "warning"
    assert (
        only(found, "kernel").text
        == "Decode steps do not use the kernel: it failed: RuntimeError: no such function."
    )
    assert set(only(found, "decode path").figures["milliseconds"]) == {"ragged", "shared"}


def test_a_slower_path_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = device._fastest({"ragged": 10.0, "shared": 14.0}, "shared")
    assert (slow.state, "--decode-path ragged" in slow.advice, slow.figures["best"]) == (
        "warning",
        True,
        "ragged",
    )
    assert device._fastest({"ragged": 13.0, "shared": 14.0}, "shared").state == "ok"


@pytest.mark.parametrize(
    ("ours", "state", "equal"),
    [
        ([(5, -1.0), (6, -1.0)], "ok", 2),
        ([(5, -1.0), (7, -1.0)], "note", 1),
        ([(5, -1.0), (7, -2.0)], "problem", 1),
    ],
)
def test_tokens_that_differ_are_a_near_tie_or_a_problem(
    ours: list[model.Drawn], state: str, equal: int
) -> None:
    finding = model._compared([[(5, -1.0), (6, -1.0)]], [ours], "in ragged batches", model.EXACT)
    assert (finding.state, finding.figures["equal_tokens"]) == (state, equal)


def test_a_model_that_is_not_there_is_a_problem_and_not_loaded(
    port: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("device", "decode", "disk"):
        monkeypatch.setattr(device, name, lambda *_: [])
    findings = list(command.examine(str(tmp_path / "none"), port, tmp_path))
    assert findings[-1].about == "model"
    assert (findings[-1].state, "does not exist" in findings[-1].text) == ("problem", True)
