"""Every command and example of the README is run; the hook that it shows is the hook that there is."""

from __future__ import annotations

import inspect
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

from mlx_blockpool import hookspecs

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BIN = Path(sys.executable).parent


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


COMMANDS = [line for block in blocks("sh") for line in block.splitlines()]
EXAMPLES = [block for block in blocks("python") if "import" in block]


def test_ci_runs_the_set_up_and_the_test_command() -> None:
    script = (ROOT / ".ci/run").read_text()
    assert COMMANDS[0] in script
    assert COMMANDS[1] in script
    assert COMMANDS[3] in script
    assert COMMANDS[3] == ".venv/bin/pytest"


def test_every_command_is_one_that_a_test_runs() -> None:
    tested = ("python3 -m venv", ".venv/bin/pip", ".venv/bin/mlx-blockpool", ".venv/bin/pytest", "curl")
    tested += (".venv/bin/mlx_lm.server", ".venv/bin/python benchmarks/bench_")
    assert [c for c in COMMANDS if not c.startswith(tested)] == []


@contextmanager
def serving(command: str, env: dict[str, str] | None = None) -> Iterator[int]:
    """The server that a README command starts, on a free port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([*installed(command), "--port", str(port)], env=env, stderr=subprocess.PIPE, text=True)
    try:
        for _ in range(600):
            assert process.poll() is None, process.stderr.read() if process.stderr else ""
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health")
                break
            except OSError:
                time.sleep(0.05)
        yield port
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0


def installed(command: str) -> list[str]:
    """A README command with the programs of this environment."""
    first, *rest = shlex.split(command.replace(".venv/bin", str(BIN)))
    return [sys.executable, *rest] if first == f"{BIN}/python" else [first, *rest]


def curl(command: str, port: int) -> str:
    return subprocess.run(shlex.split(command.replace("8080", str(port))), capture_output=True, text=True, check=True).stdout


def test_clients_of_the_readme_get_an_answer() -> None:
    examples = blocks("python client")
    assert [example.split()[1] for example in examples] == ["openai", "anthropic"]
    with serving(next(c for c in COMMANDS if " serve " in c)) as port:
        for example in examples:
            ran = subprocess.run([sys.executable, "-c", example.replace("8080", str(port))], capture_output=True, text=True)
            assert "256 tokens" in ran.stdout, ran.stderr


def test_the_server_starts_and_the_requests_are_answered() -> None:
    with serving(next(c for c in COMMANDS if " serve " in c)) as port:
        answers = {command: json.loads(curl(command, port)) for command in COMMANDS if command.startswith("curl")}
    chat, cache, health, ann, agents, save, fork, delete, explain, models, load, unload = answers.values()
    assert "256 tokens" in chat["choices"][0]["message"]["content"]
    assert cache["backend"] == "blockpool"
    assert health["status"] == "ok"
    assert "slab" in ann["choices"][0]["message"]["content"]
    assert "ann" in [agent["name"] for agent in agents["agents"]]
    assert (save["agent"], save["saved"]) == ("ann", True)
    assert (fork["agent"], fork["of"]) == ("bob", "ann")
    assert (delete["agent"], delete["clean"]) == ("bob", True)
    assert [request["agent"] == "ann" for request in explain["requests"]] == [True, False]
    assert [model["state"] for model in models["models"]] == ["loaded"]
    assert (load["state"], unload["state"]) == ("loaded", "available")


@pytest.mark.parametrize("command", [c for c in COMMANDS if "blockpool store" in c])
def test_store_commands_run(command: str, tmp_path: Path) -> None:
    ran = subprocess.run(installed(command), env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)}, capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout


@pytest.fixture
def copied_mlx_lm(tmp_path: Path) -> dict[str, str]:
    """An environment whose mlx-lm is a copy that may be patched."""
    found = find_spec("mlx_lm")
    assert found is not None
    assert found.submodule_search_locations
    folder = Path(found.submodule_search_locations[0])
    shutil.copytree(folder, tmp_path / "mlx_lm", ignore=shutil.ignore_patterns("__pycache__"))
    for info in folder.parent.glob("mlx_lm-*.dist-info"):
        shutil.copytree(info, tmp_path / info.name)
    return {**os.environ, "PYTHONPATH": str(tmp_path)}


def test_patched_mlx_lm_serves_from_the_pool_and_goes_back_to_the_byte(copied_mlx_lm: dict[str, str]) -> None:
    server = Path(copied_mlx_lm["PYTHONPATH"]) / "mlx_lm/server.py"
    before = server.read_bytes()
    status, apply, revert = (installed(c) for c in COMMANDS if "mlx-blockpool patch" in c)
    assert subprocess.run(status, env=copied_mlx_lm, check=True, capture_output=True).stdout
    subprocess.run(apply, env=copied_mlx_lm, check=True)
    assert server.read_bytes() != before
    command = next(c for c in COMMANDS if "--cache-backend" in c)
    module = command.replace(".venv/bin/mlx_lm.server", ".venv/bin/python -m mlx_lm server")
    for start in (command, module):
        with serving(start, copied_mlx_lm) as port:
            assert json.loads(curl("curl -s http://127.0.0.1:8080/v1/cache", port))["backend"] == "blockpool"
    subprocess.run(revert, env=copied_mlx_lm, check=True)
    assert server.read_bytes() == before


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_run(example: str) -> None:
    ran = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, cwd="/")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout
    assert len([line for line in example.splitlines() if line and not re.match("from|import", line)]) <= 10


def test_the_second_run_of_a_script_goes_on_from_the_disk(tmp_path: Path) -> None:
    (example,) = [e for e in EXAMPLES if "open_prefix(" in e]
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    runs = [subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, cwd="/", env=env) for _ in range(2)]
    assert [ran.stderr for ran in runs] == ["", ""]
    hits, replies = zip(*(ran.stdout.split(" of 16 tokens cached", 1) for ran in runs), strict=True)
    assert hits == ("0", "15")
    assert [reply.partition("<|im_start|>")[2] for reply in replies] == [replies[0].partition("<|im_start|>")[2]] * 2
    assert "256 tokens" in replies[1]
    assert list(tmp_path.glob("mlx-blockpool/models/*/blocks/*/*.safetensors"))


@pytest.mark.parametrize("command", [c for c in COMMANDS if "benchmarks" in c])
def test_benchmarks_run(command: str) -> None:
    ran = subprocess.run(installed(command), capture_output=True, text=True, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr
    assert all(json.loads(line)["bench"] for line in ran.stdout.splitlines())


def test_hooks_are_those_of_the_package() -> None:
    shown = [block.strip() for block in blocks("python") if block.startswith("def ")]
    hooks = [f for f in vars(hookspecs).values() if inspect.isfunction(f) and hasattr(f, "mlx_blockpool_spec")]
    assert shown == [f"def {f.__name__}{inspect.signature(f)}".replace("'", "") for f in hooks]
