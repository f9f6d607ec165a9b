"""Weights are hashed while their model is loaded: others decode meanwhile, a stop ends it, a
second start reads nothing.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from models import save_model

from mlx_blockpool.server import app
from mlx_blockpool.server.provider import BlockpoolModelProvider
from mlx_blockpool.store import identity as identity_module
from mlx_blockpool.store.identity import Digests
from server.serving import Client, blockpool_server, cached_tokens, parse

HELLO = [{"role": "user", "content": "Hello, you " * 120}]


class Held:
    """The hashing of the weights in one folder waits for release() or for its end.

    `hashed`: names of folders, in order.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path | None = None) -> None:
        self.entered, self.stopped, self._released = (
            threading.Event(),
            threading.Event(),
            threading.Event(),
        )
        self.hashed: list[str] = []
        original = Digests._hash

        def hashing(digests: Digests, path: Path) -> Any:
            self.hashed.append(path.parent.name)
            if path.parent == folder:
                self.entered.set()
                while not self._released.wait(0.01):
                    if digests._stopped.is_set():
                        self.stopped.set()
                        break
            return original(digests, path)

        monkeypatch.setattr(Digests, "_hash", hashing)

    def release(self) -> None:
        self._released.set()


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    return save_model(folder / "one", "llama"), save_model(folder / "two", "qwen2", seed=2)


@pytest.fixture
def stored(tmp_path: Path) -> tuple[str, ...]:
    return "--pool-bytes", "60MB", "--store-dir", str(tmp_path / "store")


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(identity_module, "SETTLED_SECONDS", -60.0)
    return


def change_at(client: Client, stage: str) -> dict[str, Any]:
    while (change := client.send("/admin/models")[1]["change"]) is None or change["stage"] != stage:
        threading.Event().wait(0.01)
    return change  # type: ignore[no-any-return]


def test_others_are_served_while_the_weights_of_a_model_are_hashed(
    two: tuple[Path, Path], stored: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(monkeypatch, two[1])
    with blockpool_server(
        two[0], "--allow-models", str(two[1]), "--max-models", "2", *stored
    ) as ours:
        before = ours.chat(HELLO, max_tokens=8)
        loading = threading.Thread(target=ours.send, args=("/admin/load", {"model": str(two[1])}))
        loading.start()
        assert held.entered.wait(30)
        change = change_at(ours, "hashing")
        assert change["read_bytes"] == change["weights_bytes"]
        assert change["hashed_bytes"] == 0
        # The whole reply is made meanwhile.
        during = ours.chat(HELLO, max_tokens=8)
        assert ours.send("/admin/models")[1]["change"]["stage"] == "hashing"
        held.release()
        loading.join()
        assert ours.chat(HELLO, max_tokens=8, model=str(two[1]))["choices"]
        ours.settle()
        namespaces = {served.agents.namespace for served in ours.generator.registry.loaded.values()}  # type: ignore[union-attr]
    assert during["choices"] == before["choices"]
    assert len(namespaces) == 2


def test_a_second_start_reads_nothing_of_the_weights_and_finds_what_was_kept(
    two: tuple[Path, Path], stored: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, settled: None
) -> None:
    held = Held(monkeypatch)
    replies, hashed = [], []
    for _ in range(2):
        with blockpool_server(two[0], *stored) as ours:
            replies.append(ours.chat(HELLO, max_tokens=8))
            ours.settle()
        hashed.append(list(held.hashed))
        held.hashed.clear()
    assert hashed == [["one"], []]
    assert replies[0]["choices"] == replies[1]["choices"]
    assert cached_tokens(replies[1]["usage"]) > 256


def test_without_a_store_nothing_is_hashed(
    two: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(monkeypatch)
    with blockpool_server(two[0], "--pool-bytes", "60MB") as ours:
        ours.chat(HELLO, max_tokens=2)
    assert held.hashed == []


def test_a_first_start_that_is_stopped_while_it_hashes_ends(
    two: tuple[Path, Path], stored: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(monkeypatch, two[0])
    generator = app.make_generator(BlockpoolModelProvider(parse(["--model", str(two[0]), *stored])))
    assert held.entered.wait(30)
    generator.stop_and_join()
    assert not generator._generation_thread.is_alive()
    assert held.stopped.wait(30)


def test_a_server_that_stops_while_another_model_is_hashed_stops(
    two: tuple[Path, Path], stored: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    held, answers = Held(monkeypatch, two[1]), []
    with blockpool_server(
        two[0], "--allow-models", str(two[1]), "--max-models", "2", *stored
    ) as ours:
        body = {"prompt": "x", "model": str(two[1])}
        asking = threading.Thread(target=lambda: answers.append(ours.send("/v1/completions", body)))
        asking.start()
        assert held.entered.wait(30)
        ours.generator.stop_and_join()
        assert not ours.generator._generation_thread.is_alive()
        asking.join()
    assert held.stopped.wait(30)
    assert (answers[0][0], answers[0][1]["error"]["message"]) == (
        503,
        "The server is shutting down.",
    )


def test_weights_that_change_while_they_are_loaded_are_served_and_not_kept_on_disk(
    tmp_path: Path,
    stored: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = save_model(tmp_path / "model", "llama")
    held = Held(monkeypatch, model)
    changing = threading.Thread(
        target=lambda: held.entered.wait(30) and (touch(model), held.release())
    )
    changing.start()
    with blockpool_server(model, *stored) as ours:
        changing.join()
        assert ours.chat(HELLO, max_tokens=2)["choices"]
        assert ours.send("/v1/cache")[1]["store"] is None
    assert "changed" in caplog.text


def touch(model: Path) -> None:
    os.utime(model / "model.safetensors", (1, 1))
