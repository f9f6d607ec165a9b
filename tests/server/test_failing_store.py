"""A --store-dir that cannot be used: the server does not start with it, and says so once if it
fails later.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from forks import server_forks
from models import save_model

from mlx_blockpool.config import StoreConfig
from mlx_blockpool.server import options, served_agents
from mlx_blockpool.store import paths
from mlx_blockpool.store.agents import Agents
from server.serving import Client, blockpool_server, until

COMMAND = "import sys; from mlx_blockpool.cli import main; sys.exit(main())"


def a_file(folder: Path) -> Path:
    (folder / "file").touch()
    return folder / "file"


def below_a_file(folder: Path) -> Path:
    return a_file(folder) / "store"


def with_a_file_for_models(folder: Path) -> Path:
    (folder / "models").touch()
    return folder


@pytest.mark.parametrize("unusable", [a_file, below_a_file, with_a_file_for_models])
def test_a_server_does_not_start_with_it_and_says_what_to_do(
    tmp_path: Path, unusable: Callable[[Path], Path]
) -> None:
    root = unusable(tmp_path)
    arguments = ["serve", "--model", "demo", "--port", "0", "--store-dir", str(root)]
    with server_forks().start(COMMAND, *arguments).ended() as process:
        assert process.wait(timeout=60) == 2
        assert process.stderr is not None
        errors = process.stderr.read()
    last = errors.splitlines()[-1]
    assert last.startswith(
        f"mlx-blockpool: error: The store cannot use {root}: no file can be made in "
    )
    assert last.endswith(
        "(Not a directory). Give another folder with --store-dir DIR, or serve without a store: "
        "--no-store."
    )
    assert "Traceback" not in errors


def test_a_server_without_a_store_needs_no_folder(tmp_path: Path) -> None:
    arguments = [
        "serve",
        "--model",
        "demo",
        "--port",
        "0",
        "--measure",
        "off",
        "--no-store",
        "--store-dir",
        str(a_file(tmp_path)),
    ]
    with server_forks().start(COMMAND, *arguments).ended() as process:
        process.read_until("The server is ready.")
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0


def test_a_full_disk_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**_: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(paths.tempfile, "mkstemp", full)
    paths.check_usable(tmp_path)


def test_the_check_leaves_nothing_behind(tmp_path: Path) -> None:
    paths.check_usable(tmp_path / "not" / "there")
    assert list(tmp_path.iterdir()) == []


def is_written(client: Client) -> bool:
    store = client.send("/v1/cache")[1]["store"]
    return not any(store[what] for what in ("pending", "resting", "queued_bytes"))


def test_one_that_fails_later_is_logged_once_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, root, aside = (
        save_model(tmp_path / "model", "llama"),
        tmp_path / "store",
        tmp_path / "aside",
    )
    looks, read = [0], Agents.all

    def counted(agents: Agents) -> object:
        looks[0] += 1
        return read(agents)

    def look_often() -> None:
        before = looks[0]
        until(lambda: looks[0] > before + 5)

    monkeypatch.setattr(Agents, "all", counted)
    monkeypatch.setattr(served_agents, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(
        options,
        "store_config",
        lambda args: StoreConfig(args.store_dir, args.store_bytes, idle_seconds=0.0),
    )
    with (
        blockpool_server(model, "--pool-bytes", "20MB", "--store-dir", str(root)) as client,
        caplog.at_level(logging.INFO),
    ):
        client.chat([{"role": "user", "content": "before"}], max_tokens=2)
        until(lambda: is_written(client))
        assert client.send("/health")[1] == {"status": "ok"}
        caplog.clear()
        root.rename(aside)
        root.touch()
        look_often()
        for turn in range(3):
            client.chat([{"role": "user", "content": f"while it fails {turn}"}], max_tokens=2)
        look_often()
        until(lambda: "store" in client.send("/health")[1])
        status, health = client.send("/health")
        assert (status, health["status"]) == (200, "ok")
        assert "Not a directory" in health["store"]
        assert (
            client.send("/v1/cache")[1]["store"]["problem"]
            == client.send("/v1/cache")[1]["health"]["store"]
        )
        assert str(tmp_path) not in health["store"]
        warnings = [
            record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING
        ]
        assert len(warnings) == 1, warnings
        root.unlink()
        aside.rename(root)
        look_often()
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1


def test_without_a_store_health_says_nothing_of_one(tmp_path: Path) -> None:
    with blockpool_server(
        save_model(tmp_path / "model", "llama"), "--pool-bytes", "20MB"
    ) as client:
        assert "store" not in client.send("/health")[1]
