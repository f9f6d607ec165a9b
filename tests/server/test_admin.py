"""Models over HTTP: what is listed, what may be loaded, and loading and unloading by hand."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from models import save_model

from mlx_blockpool.config import ModelsConfig
from mlx_blockpool.server.model import LoadedModel
from mlx_blockpool.server.models.http import ModelsEndpoint
from mlx_blockpool.server.models.registry import ModelSwap
from mlx_blockpool.server.provider import BlockpoolModelProvider, ModelKey
from server.serving import Client, at_once, blockpool_server, text_of, until

HELLO = [{"role": "user", "content": "Hello"}]
POOL = ("--pool-bytes", "40MB")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    return [save_model(folder / str(seed), "llama", seed) for seed in range(3)]


@pytest.fixture(scope="module")
def unchanged(models: list[Path]) -> Iterator[Client]:
    """For orders that change nothing."""
    with blockpool_server(models[0], "--allow-models", str(models[0].parent), *POOL) as running:
        yield running


@pytest.fixture
def fresh_server(models: list[Path]) -> Iterator[Client]:
    with blockpool_server(models[0], "--allow-models", str(models[0].parent), *POOL) as running:
        running.chat(HELLO, max_tokens=2)
        yield running


def ask(client: Client, model: Any, **fields: Any) -> tuple[int, Any]:
    return client.send(
        "/v1/chat/completions", {"messages": HELLO, "max_tokens": 2, "model": str(model), **fields}
    )


class EndingSwap:
    """A swap whose models have come and gone when somebody looks for the second time."""

    load = unload = None
    stage, began, since = "loading", 0.0, 0.0

    def __init__(self, model: Any) -> None:
        self._first = {"coming": model, "leaving": model}

    @property
    def coming(self) -> Any:
        return self._first.pop("coming", None)

    @property
    def leaving(self) -> Any:
        return self._first.pop("leaving", None)


@pytest.mark.parametrize(
    "look", [lambda endpoint: endpoint.models(0), lambda endpoint: endpoint.figures()]
)
def test_models_are_listed_while_a_swap_ends(look: Callable[[ModelsEndpoint], Any]) -> None:
    model = SimpleNamespace(key=ModelKey("m"), weights_bytes=1, read_bytes=1, hashing=None)
    catalog = SimpleNamespace(
        default=None,
        listed=lambda: ["m"],
        ids=lambda: {"m": "m"},
        id_of=str,
        allowed_models=lambda: ["m"],
    )
    registry = SimpleNamespace(
        swap=EndingSwap(model),
        plan=None,
        catalog=catalog,
        config=ModelsConfig(),
        loaded={},
        queue=[],
        failures={},
        sizes={},
        counts={},
    )
    assert look(ModelsEndpoint(SimpleNamespace(registry=registry)))


def test_models_are_listed_in_openais_shape_with_their_states(models: list[Path]) -> None:
    one, two, _ = map(str, models)
    with blockpool_server(one, "--allow-models", two, *POOL) as client:
        client.chat(HELLO, max_tokens=2)
        status, listed = client.send("/v1/models")
        assert (status, listed["object"]) == (200, "list")
        assert [
            (m["id"], m["object"], m["owned_by"], m["mlx_blockpool"]) for m in listed["data"]
        ] == [
            ("0", "model", "mlx-blockpool", {"state": "loaded", "default": True}),
            ("1", "model", "mlx-blockpool", {"state": "available", "default": False}),
            ("default_model", "model", "mlx-blockpool", {"state": "loaded", "default": True}),
        ]
        assert all(isinstance(model["created"], int) for model in listed["data"])
        for model in listed["data"][1:]:
            # As in mlx-lm, "created" is the time of the request.
            found = client.send(f"/v1/models/{model['id']}")
            assert found == (200, {**model, "created": found[1]["created"]})
        status, answer = client.send("/v1/models/no/such")
        assert status == 404
        assert "the models are 0, 1, default_model" in answer["error"]["message"]


def test_the_list_says_how_long_a_prompt_and_its_reply_may_be(
    models: list[Path], tmp_path: Path
) -> None:
    other = save_model(tmp_path / "other", "llama", 1)
    with blockpool_server(models[0], "--allow-models", str(other), *POOL) as client:
        client.chat(HELLO, max_tokens=2)
        limits = [model.get("max_model_len") for model in client.send("/v1/models")[1]["data"]]
        assert limits == [limits[0], None, limits[0]], "the config.json of the other has no limit"
        long = [{"role": "user", "content": "word " * limits[0]}]
        status, answer = client.send("/v1/chat/completions", {"messages": long})
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert f"at most {limits[0]} " in answer["error"]["message"]
        config = json.loads((other / "config.json").read_text())
        (other / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 4096}))
        assert client.send("/v1/models/other")[1]["max_model_len"] == 4096
        for text in ("[]", "null", "[" * 100_000):
            (other / "config.json").write_text(text)
            status, listed = client.send("/v1/models")
            assert (status, len(listed["data"])) == (200, 3)


def test_only_allowed_models_are_loaded_and_the_error_says_which(
    models: list[Path], tmp_path: Path
) -> None:
    one, two, three = models
    (tmp_path / "link").symlink_to(two)
    with blockpool_server(one, "--allow-models", f"{two},some/hub-id", *POOL) as client:
        for name in ("default_model", one, two, tmp_path / "link", f"{three}/../1"):
            assert ask(client, name)[0] == 200, name
        for name in (
            three,
            f"{two}/../2",
            "demo",
            "some/other-id",
            "../../../etc",
            "\0",
            "x" * 5000,
        ):
            status, answer = ask(client, name)
            assert status == 404, name
            assert "There is no model" in answer["error"]["message"]
        assert client.send("/admin/load", {"model": str(three)})[0] == 404
        # Nor is anything else that a request names loaded.
        assert ask(client, one, draft_model=str(three))[0] == 404
        assert ask(client, one, adapters=str(three))[0] == 404
        assert {m["id"] for m in client.send("/admin/models")[1]["models"]} == {
            one.name,
            two.name,
            "some/hub-id",
        }
        assert client.send("/admin/models")[1]["counts"]["loads"] == 2, (
            "nothing was loaded for those that were refused"
        )


def test_a_model_is_loaded_and_unloaded_by_hand(fresh_server: Client, models: list[Path]) -> None:
    one, two, _ = map(str, models)
    status, answer = fresh_server.send("/admin/load", {"model": two})
    one, two = "0", "1"
    assert (status, answer["model"], answer["state"]) == (200, two, "loaded")
    found = {m["id"]: m for m in fresh_server.send("/admin/models")[1]["models"]}
    assert {name: model["state"] for name, model in found.items()} == {
        one: "available",
        two: "loaded",
        "2": "available",
    }
    assert found[two]["weights_bytes"] > 0
    assert found[two]["pool_bytes"] == 40_000_000
    assert fresh_server.send("/admin/load", {"model": two})[1]["state"] == "loaded", "it is already"
    for _ in range(2):
        status, answer = fresh_server.send("/admin/unload", {"model": two})
        assert (status, answer["state"]) == (200, "available")
    assert fresh_server.send("/v1/cache")[1]["backend"] is None
    assert ask(fresh_server, two)[0] == 200
    assert fresh_server.send("/admin/models")[1]["counts"] == {
        "loads": 3,
        "unloads": 2,
        "swaps": 1,
        "failures": 0,
    }


def test_unloading_lets_live_requests_end_and_serves_those_that_come_later(
    fresh_server: Client, models: list[Path]
) -> None:
    body = {"messages": HELLO, "max_tokens": 60}
    jobs: list[Any] = [lambda: fresh_server.send("/v1/chat/completions", body)] * 3
    jobs.append(lambda: fresh_server.send("/admin/unload", {"model": str(models[0])}))
    jobs += [lambda: fresh_server.send("/v1/chat/completions", body)] * 3
    answers = at_once(jobs)
    assert [status for status, _ in answers] == [200] * 7
    replies = [text_of(answer) for _, answer in answers if "choices" in answer]
    assert replies == [replies[0]] * 6
    assert fresh_server.send("/admin/models")[1]["counts"]["unloads"] == 1
    fresh_server.settle()


def test_an_order_that_is_not_waited_for_is_accepted(
    fresh_server: Client, models: list[Path]
) -> None:
    status, answer = fresh_server.send("/admin/load", {"model": str(models[1]), "wait": False})
    assert (status, answer) == (202, {"model": "1", "accepted": "load"})
    until(
        lambda: (
            fresh_server.send("/v1/models/1")[1].get("mlx_blockpool", {}).get("state") == "loaded"
        )
    )


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b"{}", b'{"model": 7}', b'{"model": "x", "wait": 1}', b"\xff"]
)
@pytest.mark.parametrize("path", ["/admin/load", "/admin/unload"])
def test_a_bad_order_is_refused(unchanged: Client, path: str, raw: bytes) -> None:
    status, answer = unchanged.send(path, raw=raw)
    assert status == 400
    assert answer["error"]


def test_an_order_for_a_model_that_is_not_there_is_a_404(unchanged: Client) -> None:
    for path in ("/admin/load", "/admin/unload"):
        assert unchanged.send(path, {"model": "/no/such/folder"})[0] == 404


class Held:
    """Holds the generation thread where a change enters a stage, until release()."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
        self.entered, self._released = threading.Event(), threading.Event()
        enter = ModelSwap._enter

        def entering(change: ModelSwap, name: str) -> None:
            enter(change, name)
            if name == stage:
                self.entered.set()
                assert self._released.wait(30)

        monkeypatch.setattr(ModelSwap, "_enter", entering)

    def release(self) -> None:
        self._released.set()


@pytest.mark.parametrize(
    ("stage", "old", "new"),
    [
        ("saving", "loaded", "loading"),
        ("loading", "available", "loading"),
        ("warming", "available", "loading"),
    ],
)
def test_progress_is_told_while_the_generation_thread_is_busy(
    fresh_server: Client,
    models: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    stage: str,
    old: str,
    new: str,
) -> None:
    two = str(models[1])
    held = Held(monkeypatch, stage)
    loading = threading.Thread(target=fresh_server.send, args=("/admin/load", {"model": two}))
    loading.start()
    assert held.entered.wait(30)
    change = fresh_server.send("/admin/models")[1]["change"]
    listed = {
        m["id"]: m["mlx_blockpool"]["state"] for m in fresh_server.send("/v1/models")[1]["data"]
    }
    doing = fresh_server.send("/health")
    held.release()
    loading.join()
    assert (change["load"], change["unload"], change["stage"]) == ("1", "0", stage)
    assert change["weights_bytes"] == 4 * parameters(models[1])
    assert change["read_bytes"] == (change["weights_bytes"] if stage == "warming" else 0)
    assert 0 <= change["stage_seconds"] <= change["seconds"]
    assert (listed["0"], listed["1"]) == (old, new)
    assert (doing[0], doing[1]["doing"]) == (200, "loading a model")
    assert fresh_server.send("/admin/models")[1]["change"] is None


def parameters(model: Path) -> int:
    with (model / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    sizes = [tensor["data_offsets"] for name, tensor in header.items() if name != "__metadata__"]
    return sum(end - start for start, end in sizes) // 4


def test_draining_is_told(
    fresh_server: Client, models: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reply that goes on holds the model that is to go."""
    steps, goes_on = threading.Event(), threading.Event()
    step = LoadedModel.step

    def slow(self: LoadedModel) -> None:
        steps.set()
        goes_on.wait(0.05)
        step(self)

    monkeypatch.setattr(LoadedModel, "step", slow)
    monkeypatch.setattr(fresh_server.generator.registry.queue, "patience", 0.0)
    two = str(models[1])
    body = {"messages": HELLO, "max_tokens": 200}
    threads = [
        threading.Thread(target=fresh_server.send, args=("/v1/chat/completions", body)),
        threading.Thread(target=fresh_server.send, args=("/admin/load", {"model": two})),
    ]
    threads[0].start()
    assert steps.wait(30)
    threads[1].start()
    while (change := fresh_server.send("/admin/models")[1]["change"]) is None:
        threading.Event().wait(0.01)
    goes_on.set()
    for thread in threads:
        thread.join()
    assert change == {"load": "1", "unload": "0", "stage": "draining"}


def test_other_models_go_on_while_weights_are_read(
    models: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights of the second never end before the first has answered."""
    answered = threading.Event()
    read = BlockpoolModelProvider.read

    def reading(self: BlockpoolModelProvider, piece_bytes: int) -> Iterator[int]:
        while not answered.is_set():
            yield 0
        yield from read(self, piece_bytes)

    with blockpool_server(
        models[0], "--allow-models", str(models[1]), "--max-models", "2", *POOL
    ) as client:
        client.chat(HELLO, max_tokens=2)
        monkeypatch.setattr(BlockpoolModelProvider, "read", reading)
        second = threading.Thread(target=ask, args=(client, models[1]))
        second.start()
        until(lambda: client.send("/admin/models")[1]["change"] is not None)
        assert client.chat(HELLO, max_tokens=20)["choices"]
        answered.set()
        second.join()
        assert client.send("/admin/models")[1]["counts"]["loads"] == 2
