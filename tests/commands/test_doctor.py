"""mlx-blockpool doctor: what it finds, what it advises, and the file of its benchmarks."""

from __future__ import annotations

import errno
import json
import socket
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import Mock

import pytest
from kernel.emulation import why_not
from kernel.trusted import emulator
from models import make_model

from mlx_blockpool.cli import main
from mlx_blockpool.clients import settings
from mlx_blockpool.commands import patch
from mlx_blockpool.commands.doctor import bench, command, device, drafts, installation, model
from mlx_blockpool.commands.doctor.finding import Finding, looked_at, status_of
from mlx_blockpool.drafts.curve import CostCurve
from mlx_blockpool.engine import measuring as engine_measuring
from mlx_blockpool.engine.measuring import device_name
from mlx_blockpool.errors import BlockpoolError, UnmeasurableError
from mlx_blockpool.kv import decode_policy, measuring
from mlx_blockpool.kv.factory import open_pool
from mlx_blockpool.store.measurements import MeasuredOn, Measurements


@pytest.fixture
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small sizes of everything that is measured."""
    for name, size in (("PREFIX", 256), ("TAIL", 8), ("MEMBERS", 2), ("STEPS", 1), ("ROUNDS", 1), ("DISK_BYTES", 4 << 20)):
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
    assert main(["doctor", "--json", "--model", "demo", "--port", str(port), "--store-dir", str(tmp_path)]) == 0
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
        "device",
        "wired",
        "steps",
        "kernel",
        "decode",
        "disk",
        "model",
        "against",
        "drafts",
    ]
    assert [finding["about"].split()[0] for finding in report["findings"]] == order
    assert found["against mlx-lm"]["figures"]["equal_tokens"] == 48
    assert found["against mlx-lm"]["figures"]["served"] == "in ragged batches"
    assert set(found["decode path"]["figures"]["milliseconds"]) == {"ragged", "shared", "padded"}
    assert found["kernel"]["state"] == "note"
    assert found["kernel"]["text"] == "Decode steps do without the kernel: mlx computes on the CPU, which has no kernel."
    assert found["disk speed"]["figures"]["write_bytes_per_s"] > 0
    assert not any(tmp_path.iterdir())
    assert f"http://127.0.0.1:{port}/v1" in report["clients"]["Codex"]
    assert f"CLAUDE_CODE_MAX_CONTEXT_TOKENS={found['model']['figures']['context']}" in report["clients"]["Claude Code"]


CURVE = CostCurve.of({1: 0.01, 2: 0.012, 4: 0.02, 8: 0.04, 16: 0.16}, {1: 0.01})


def test_the_curve_says_what_drafts_bring_at_each_acceptance() -> None:
    found = drafts.described(CURVE, "This model")
    assert found.text == (
        "This model: against a forward of 1 row (10.0 ms) 2 rows 1.2, 4 rows 2.0, 8 rows 4.0, 16 rows 16.0. "
        "Drafts bring 1.2x at an acceptance of 0.5 (1 token), 1.5x at an acceptance of 0.8 (2 tokens), "
        "1.9x at an acceptance of 0.95 (3 tokens)."
    )
    assert {share: len(found) for share, found in found.figures["speed_up"].items()} == {"0.5": 16, "0.8": 16, "0.95": 16}
    assert found.figures["speed_up"]["0.5"][0] == 1.25
    steep = drafts.described(CostCurve.of({1: 0.01, 2: 0.1}), "This model")
    assert steep.text.endswith("Drafts bring nothing at 0.5, nothing at 0.8, nothing at 0.95.")


def test_curves_that_servers_have_measured_on_this_device_are_shown(tmp_path: Path) -> None:
    here, other = MeasuredOn(device_name(), "v", "s", "w"), MeasuredOn("another device", "v", "s", "w")
    for name, on, figures in (
        ("tiny", here, {"curve": CURVE.to_json()}),
        ("elsewhere", other, {"curve": CURVE.to_json()}),
        ("bad", here._replace(weights="x"), {"curve": []}),
    ):
        Measurements(tmp_path).save(on, name, figures)
    (found,) = drafts.remembered(tmp_path)
    assert found.text.startswith("tiny, as measured 20")
    assert (found.figures["device"], found.figures["curve"]) == (device_name(), CURVE.to_json())


def test_a_model_that_cannot_take_tokens_back_has_no_drafts() -> None:
    model_, arena = object(), SimpleNamespace(verifies=None)
    (found,) = drafts.measured(model_, arena)
    assert (found.state, found.text) == ("note", "Nothing is drafted for this model: its caches cannot take tokens back.")


def test_a_pool_without_room_is_not_a_model_that_cannot_take_tokens_back() -> None:
    network = make_model("llama")
    arena = open_pool(network, 20_000_000)
    table = arena.pool.open_table(0)
    arena.pool.reserve([table], [arena.pool.pool_bytes // arena.pool.groups[0].bytes_per_block])
    (found,) = drafts.measured(network, arena)
    assert (found.state, found.text) == (
        "note",
        "What drafts bring was not measured: a pool of 20.0 MB has no room for a sequence.",
    )


def test_a_model_that_is_too_slow_to_measure_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_measuring, "measure_curve", Mock(side_effect=UnmeasurableError("a forward takes 9 seconds")))
    network = make_model("llama")
    (found,) = drafts.measured(network, open_pool(network, 20_000_000))
    assert (found.state, found.text) == ("note", "What drafts bring was not measured: a forward takes 9 seconds.")


def test_the_words_name_what_is_to_be_mended() -> None:
    findings = [Finding("port", "problem", "Port 1 is used.", "Give --port 2."), Finding("store", "ok", "Empty.")]
    words = command.describe(findings, settings("http://h"))
    assert words.splitlines()[:3] == [
        "PROBLEM  port   Port 1 is used.",
        "                -> Give --port 2.",
        "     ok  store  Empty.",
    ]
    assert words.endswith("To be mended first: port.")
    assert (status_of(findings), status_of(findings[1:])) == (1, 0)
    assert command.describe(findings[1:], {}).endswith("Nothing is in the way of `mlx-blockpool serve`.")


def test_a_check_that_fails_is_a_finding() -> None:
    def fails() -> list[Finding]:
        raise ZeroDivisionError("by nothing")

    def refuses() -> list[Finding]:
        raise BlockpoolError("No model. Give one.")

    assert looked_at("x", fails)[0].text == "The check failed: ZeroDivisionError: by nothing"
    assert looked_at("x", refuses) == [Finding("x", "problem", "No model. Give one.")]


def test_a_version_that_does_not_fit_comes_first(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    real = installation.metadata.version
    monkeypatch.setattr(installation.metadata, "version", lambda name: "0.30.0" if name == "mlx-lm" else real(name))
    findings = command.examine(None, port, None)
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


class Health(BaseHTTPRequestHandler):
    answer: ClassVar[Any] = {"status": "ok", "doing": "nothing", "restarts": 0}

    def do_GET(self) -> None:
        self.send_response(200)
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


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, data: bytes) -> float:
        path.write_bytes(data)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(device, "_write", full)
    [found] = device.disk(tmp_path / "store")
    assert (found.state, f"{tmp_path} cannot be written (No space left" in found.text) == ("warning", True)
    assert "--store-dir" in found.advice
    assert list(tmp_path.iterdir()) == []


def test_a_number_that_is_no_port_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--port", "99999"]) == 1
    assert "--port 99999 is no port. Give a number from 1 to 65535." in capsys.readouterr().err


def test_the_port_of_a_server_of_ours_and_of_another(answering: HTTPServer, monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    taken = answering.server_address[1]
    (ours,) = installation.port_state(taken)
    assert (ours.state, ours.text) == ("note", f"A server of mlx-blockpool answers on port {taken}.")
    monkeypatch.setattr(Health, "answer", ["something else"])
    (other,) = installation.port_state(taken)
    assert (other.state, other.advice) == ("problem", f"Give serve another one: --port {taken + 1}")
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
    assert set(only(found, "decode path").figures["milliseconds"]) == {"ragged", "shared", "padded", "kernel"}


@pytest.mark.usefixtures("quickly")
def test_a_kernel_that_fails_is_a_warning_and_no_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_policy, "device_launcher", lambda: Mock(side_effect=RuntimeError("no such function")))
    monkeypatch.setattr(device, "_tiny_model", lambda: make_model("llama"))
    measure_curve = Mock()
    monkeypatch.setattr(engine_measuring, "measure_curve", measure_curve)
    found = device.decode()
    assert not measure_curve.called, "steps are timed without drafts"
    assert only(found, "kernel").state == "warning"
    assert only(found, "kernel").text == "Decode steps do without the kernel: it failed: RuntimeError: no such function."
    assert set(only(found, "decode path").figures["milliseconds"]) == {"ragged", "shared", "padded"}


def test_a_slower_path_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = device._fastest({"ragged": 10.0, "shared": 14.0, "padded": 30.0}, "shared")
    assert (slow.state, "--decode-path ragged" in slow.advice, slow.figures["best"]) == ("warning", True, "ragged")
    assert device._fastest({"ragged": 13.0, "shared": 14.0, "padded": 30.0}, "shared").state == "ok"


@pytest.mark.parametrize(
    ("ours", "state", "equal"),
    [([(5, -1.0), (6, -1.0)], "ok", 2), ([(5, -1.0), (7, -1.0)], "note", 1), ([(5, -1.0), (7, -2.0)], "problem", 1)],
)
def test_tokens_that_differ_are_a_near_tie_or_a_problem(ours: list[model.Drawn], state: str, equal: int) -> None:
    finding = model._compared([[(5, -1.0), (6, -1.0)]], [ours], "in ragged batches", model.EXACT)
    assert (finding.state, finding.figures["equal_tokens"]) == (state, equal)


def test_a_model_that_is_not_there_is_a_problem_and_not_loaded(
    port: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("device", "decode", "disk"):
        monkeypatch.setattr(device, name, lambda *_: [])
    findings = command.examine(str(tmp_path / "none"), port, tmp_path)
    assert findings[-1].about == "model"
    assert (findings[-1].state, "does not exist" in findings[-1].text) == ("problem", True)


@pytest.mark.usefixtures("quickly")
def test_benchmarks_go_into_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    write = "import json, sys\nopen(sys.argv[-1], 'a').write(json.dumps({'sizes': sys.argv[1]}) + '\\n')\n"
    texts = {"pool": write, "broken": "raise SystemExit('no device')", "slow": f"{write}\nimport time\ntime.sleep(60)"}
    for name, text in texts.items():
        (scripts / f"bench_{name}.py").write_text(text)
    monkeypatch.setattr(bench, "benchmarks_folder", lambda: scripts)
    monkeypatch.setattr(bench, "BENCHMARKS", ("pool", "broken"))
    monkeypatch.setattr(command, "examine", lambda *_: [Finding("store", "ok", f"{Path.home()}/cache: Empty.")])
    out = tmp_path / "figures.json"
    assert main(["doctor", "--bench", str(out)]) == 0
    report = json.loads(out.read_text())
    assert report["findings"][0]["text"] == "~/cache: Empty."
    runs = report["benchmarks"]
    assert [runs["pool"][size]["ended"] for size in ("quick", "full")] == ["whole", "whole"]
    assert runs["pool"]["quick"]["cases"] == [{"sizes": "--quick"}]
    assert list(runs["broken"]) == ["quick"]
    assert (runs["broken"]["quick"]["ended"], runs["broken"]["quick"]["cases"]) == ("with an error: no device", [])
    assert bench._run(scripts / "bench_slow.py", [], 0.3)["ended"] == "after 0.3 seconds"
    assert str(out) in capsys.readouterr().out


def test_the_benchmarks_are_found_and_the_file_is_tried_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in bench.BENCHMARKS:
        assert (bench.benchmarks_folder() / f"bench_{name}.py").is_file()
    assert main(["doctor", "--bench", str(tmp_path / "no" / "file")]) == 1
    assert "Give --bench another file" in capsys.readouterr().err
