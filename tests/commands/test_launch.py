"""`mlx-blockpool launch`: what each client is started with, with programs that write down what they
are given; and the server that is started where none runs.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from forks import server_forks
from models import save_model
from server.serving import Client, blockpool_server

from mlx_blockpool.commands.launch import CLIENTS
from mlx_blockpool.demo import model_path

# Writes down how it was started, as one line of JSON.
PROGRAM = f"""#!{sys.executable}
import json, os, sys
with open(os.environ["NOTES"], "a") as notes:
    print(json.dumps([sys.argv[1:], dict(os.environ)]), file=notes)
"""
# Runs the command in an environment that is its first argument.
LAUNCH = """
import json, os, sys
environment = json.loads(sys.argv.pop(1))
os.environ.clear()
os.environ.update(environment)
from mlx_blockpool.cli import main
raise SystemExit(main())
"""


def has_ended(process: int) -> bool:
    """Whether a process has, if nothing has read its status too."""
    stat = Path(f"/proc/{process}/stat")
    return not stat.exists() or stat.read_text().split()[2] == "Z"


def wait_for_end(process: int) -> None:
    until = time.monotonic() + 30
    while not has_ended(process):
        assert time.monotonic() < until, f"process {process} runs on"
        time.sleep(0.05)


class Home:
    """An empty home with a folder of programs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "home"
        self.folder.mkdir()
        self.notes = folder / "notes"
        binaries = folder / "bin"
        binaries.mkdir()
        for client in CLIENTS.values():
            (binaries / client.program).write_text(PROGRAM)
            (binaries / client.program).chmod(0o755)
        self.environment = {
            "HOME": str(self.folder),
            "PATH": f"{binaries}:{os.environ['PATH']}",
            "NOTES": str(self.notes),
            "HF_HUB_OFFLINE": "1",
        }

    def launch(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        given = json.dumps({**self.environment, **environment})
        return server_forks().run(LAUNCH, given, "launch", *arguments, timeout=600)

    def started(self) -> list[tuple[list[str], dict[str, str]]]:
        """The arguments and the environment of each start."""
        found = [json.loads(line) for line in self.notes.read_text().splitlines()]
        self.notes.unlink()
        return [(arguments, environment) for arguments, environment in found]

    def files(self) -> set[str]:
        return {str(p.relative_to(self.folder)) for p in self.folder.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    model = save_model(tmp_path_factory.mktemp("models") / "m", "llama")
    with blockpool_server(model, "--pool-bytes", "20MB") as running:
        running.chat([{"role": "user", "content": "Hello"}], max_tokens=1)
        yield running


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


@pytest.fixture
def url(server: Client) -> str:
    return f"http://127.0.0.1:{server.port}"


def test_each_client_is_pointed_at_the_server_that_runs(home: Home, url: str) -> None:
    for name in CLIENTS:
        ran = home.launch(name, "--url", url, "--", "--flag", "a b")
        assert (ran.returncode, ran.stderr) == (0, "")
        *before, (arguments, environment) = home.started()
        assert arguments[-2:] == ["--flag", "a b"]
        private = home.folder / ".config/mlx-blockpool/clients" / name
        given = " ".join([*environment.values(), *arguments, *(" ".join(b[0]) for b in before)])
        given += " ".join(file.read_text() for file in private.rglob("*") if file.is_file())
        assert url in given, name
        assert "default_model" in given, name
    assert home.files() == {".config/mlx-blockpool/clients/llm/extra-openai-models.yaml"}


def test_the_context_is_the_one_of_the_server(home: Home, url: str, server: Client) -> None:
    models = server.send("/v1/models")[1]["data"]
    limit = next(m["max_model_len"] for m in models if m["id"] == "default_model")
    home.launch("claude", "--url", url)
    ((_, environment),) = home.started()
    assert environment["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == str(limit)
    home.launch("opencode", "--url", url)
    ((_, environment),) = home.started()
    config: Any = json.loads(environment["OPENCODE_CONFIG_CONTENT"])
    model = config["provider"]["blockpool"]["models"]["default_model"]
    assert model["limit"]["context"] == limit


@pytest.mark.parametrize("name", CLIENTS)
def test_print_shows_commands_that_do_the_same(home: Home, url: str, name: str) -> None:
    shown = home.launch(name, "--url", url, "--print", "--", "--flag", "a b")
    assert shown.returncode == 0
    assert not home.notes.exists()
    assert home.files() == set()
    subprocess.run(["sh", "-ec", shown.stdout], env=home.environment, check=True)
    by_hand, files = home.started(), home.files()
    shutil.rmtree(home.folder)
    home.launch(name, "--url", url, "--", "--flag", "a b")
    launched = home.started()
    assert home.files() == files
    assert [arguments for arguments, _ in launched] == [arguments for arguments, _ in by_hand]
    assert {**launched[-1][1], "PWD": "", "_": "", "OLDPWD": "", "SHLVL": ""} == {
        **by_hand[-1][1],
        "PWD": "",
        "_": "",
        "OLDPWD": "",
        "SHLVL": "",
    }


def test_a_key_is_passed_on(home: Home, url: str) -> None:
    home.launch("qwen", "--url", url, MLX_BLOCKPOOL_API_KEY="secret")
    ((_, environment),) = home.started()
    assert environment["OPENAI_API_KEY"] == "secret"


def test_of_several_keys_a_client_gets_none_of_an_admin(
    home: Home, url: str, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("ann:aaa:admin\nbob:bbb\n")
    home.launch("qwen", "--url", url, "--api-key-file", str(keys))
    ((_, environment),) = home.started()
    assert environment["OPENAI_API_KEY"] == "bbb"


@pytest.mark.parametrize(
    ("url", "host", "port"),
    [("http://[::1]:9", "::1", "9"), ("localhost", "localhost", "80")],
)
def test_the_server_listens_where_the_url_says(home: Home, url: str, host: str, port: str) -> None:
    shown = home.launch("aider", "--url", url, "--model", "demo", "--print").stdout
    assert f"serve --host {host} --port {port}" in shown


@pytest.mark.parametrize("url", ["https://localhost:9", "ftp://127.0.0.1:9"])
def test_a_url_of_no_local_server_starts_none(home: Home, url: str) -> None:
    ran = home.launch("aider", "--url", url)
    assert ran.returncode == 2
    assert "A server starts" not in ran.stderr


def test_a_program_that_is_not_there_is_named_with_how_to_install_it(home: Home, url: str) -> None:
    ran = home.launch("codex", "--url", url, PATH="/nowhere")
    assert ran.returncode == 2
    assert "npm install -g @openai/codex" in ran.stderr


def test_a_server_of_another_machine_is_not_started(home: Home) -> None:
    ran = home.launch("codex", "--url", "http://192.0.2.1:8080")
    assert ran.returncode == 2
    assert "No server runs at http://192.0.2.1:8080" in ran.stderr


def test_a_server_is_started_where_none_runs_and_goes_on(home: Home) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    key = home.folder.parent / "key"
    key.write_text("secret")
    url = f"http://127.0.0.1:{port}"
    given = ["--url", url, "--model", model_path(), "--api-key-file", str(key)]
    ran = home.launch("claude", *given)
    process = int(ran.stderr.partition("process ")[2].partition(",")[0])
    try:
        assert ran.returncode == 0, ran.stderr
        assert len(home.started()) == 1
        with pytest.raises(HTTPError, match="401"):  # the server needs the key of the file
            urlopen(f"{url}/v1/models")
        again = home.launch("claude", *given)
        assert (again.returncode, again.stderr) == (0, "")
        assert "The server is ready" in next(home.folder.rglob("server.log")).read_text()
    finally:
        os.kill(process, signal.SIGTERM)
    wait_for_end(process)


def free_url() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


@pytest.mark.thorough
def test_printed_commands_start_a_server_and_wait_for_it(home: Home) -> None:
    url = free_url()
    shown = home.launch("claude", "--url", url, "--model", model_path(), "--print").stdout
    script = f"{shown}\ncurl -sf {url}/health\nkill $!"
    ran = subprocess.run(
        ["sh", "-ec", script], env=home.environment, capture_output=True, check=True, timeout=120
    )
    assert ran.stdout
    assert len(home.started()) == 1
    assert "The server is ready" in next(home.folder.rglob("server.log")).read_text()


@pytest.mark.parametrize("options", [(), ("--print",)])
def test_no_server_is_started_without_a_model(home: Home, options: tuple[str, ...]) -> None:
    ran = home.launch("claude", "--url", free_url(), *options)
    assert ran.returncode == 2
    assert "one that is started needs a model" in ran.stderr
    assert str(home.folder / ".config/mlx-blockpool/config.toml") in ran.stderr
    assert not home.notes.exists()


def test_a_server_that_does_not_start_says_why(home: Home) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ran = home.launch("claude", "--url", f"http://127.0.0.1:{port}", "--model", "/no/such/model")
    assert ran.returncode == 2
    assert "The server did not start" in ran.stderr
    assert "/no/such/model" in ran.stderr
