"""Models that cannot be loaded: the request that names one gets an error that says why, and the
others get their replies.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from models import save_model
from test_plugins import manager_with

from mlx_blockpool import plugins
from mlx_blockpool.errors import BadModelError, SpecError
from mlx_blockpool.hooks import hookimpl
from mlx_blockpool.server import options
from mlx_blockpool.server.model import LoadedModel
from mlx_blockpool.server.models.registry import ModelRegistry, ModelSwap
from mlx_blockpool.server.provider import BlockpoolModelProvider
from server.serving import Client, at_once, blockpool_server, cached_tokens, parse, text_of, until

HELLO = [
    {"role": "system", "content": "This is known. " * 40},
    {"role": "user", "content": "Hello"},
]


def change(name: str, edit: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        (folder / name).write_bytes(edit((folder / name).read_bytes()))

    return apply


def config(**changes: Any) -> Callable[[Path], None]:
    return change("config.json", lambda text: json.dumps({**json.loads(text), **changes}).encode())


def no_tokenizer(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def huge(folder: Path) -> None:
    """A file with a hole in it that is larger than any machine."""
    with (folder / "model-2.safetensors").open("wb") as file:
        header = (
            b'{"a": {"dtype": "U8", "shape": [4398046511104], "data_offsets": [0, 4398046511104]}}'
        )
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 2**42)


# What is done to a model's folder, the status, and what the error says.
BROKEN: dict[str, tuple[Callable[[Path], None], int, str]] = {
    "no folder": (shutil.rmtree, 404, "There is no model"),
    "no config": (lambda folder: (folder / "config.json").unlink(), 404, "There is no model"),
    "config is no JSON": (change("config.json", lambda text: text[:-9]), 400, "config.json"),
    "unknown type": (config(model_type="perpetuum"), 400, "perpetuum"),
    "a type whose module ends the process": (config(model_type="olmo"), 400, "olmo"),
    "type is no text": (config(model_type=["llama"]), 400, "llama"),
    "code of its own": (config(model_file="own.py"), 400, "--trust-remote-code"),
    "a million layers": (config(num_hidden_layers=10**6), 400, "tensors"),
    "a pipe": (lambda folder: os.mkfifo(folder / "generation_config.json"), 400, "regular file"),
    "no weights": (no_weights, 400, "safetensors"),
    "cut weights": (
        change("model.safetensors", lambda data: data[: len(data) // 2]),
        400,
        "cut off",
    ),
    "weights are no safetensors": (
        change("model.safetensors", lambda data: b"\0" * 64),
        400,
        "safetensors",
    ),
    "no tokenizer": (no_tokenizer, 400, "tokenizer"),
    "more than fits": (huge, 400, "this machine has"),
    # These are found out by mlx-lm, with the old model still there.
    "shapes of another config": (config(hidden_size=96), 400, "shape"),
    "larger than any machine": (config(hidden_size=10**9, vocab_size=10**9), 400, "Cannot load"),
    "a size of 400 digits": (config(intermediate_size=10**400), 400, "Cannot load"),
    "layers that are not there": (config(num_hidden_layers=3), 400, "parameters"),
    "a config that says too little": (config(num_attention_heads=None), 400, "Cannot load"),
    "tokenizer is no JSON": (change("tokenizer.json", lambda text: text[:40]), 400, "Cannot load"),
}


# What the process that makes tokens of the prompt has found out before.
FOUND_FIRST = {
    "a config that says too little": "num_attention_heads",
    "tokenizer is no JSON": "tokenizer.json",
}


@pytest.fixture(scope="module")
def allowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("allowed")


@pytest.fixture(scope="module")
def allowing(model: Path, allowed: Path) -> Iterator[Client]:
    with blockpool_server(model, "--allow-models", str(allowed), "--pool-bytes", "30MB") as running:
        yield running


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_model_leaves_the_old_one_with_all_that_it_knows(
    what: str, allowing: Client, allowed: Path
) -> None:
    damage, status, said = BROKEN[what]
    broken = save_model(allowed / what, "llama", seed=4)
    damage(broken)
    before = allowing.chat(HELLO, max_tokens=6)
    loads = allowing.send("/admin/models")[1]["counts"]["loads"]
    bad = {"messages": HELLO, "max_tokens": 6, "model": str(broken)}
    answers = at_once(
        [
            lambda b=b: allowing.send("/v1/chat/completions", b)
            for b in ({"messages": HELLO, "max_tokens": 6}, bad)
        ]
    )
    ordered = allowing.send("/admin/load", {"model": str(broken)})
    after = allowing.chat(HELLO, max_tokens=6)
    assert (answers[0][0], answers[1][0], ordered[0]) == (200, status, status)
    assert FOUND_FIRST.get(what, said) in answers[1][1]["error"]["message"]
    assert said in ordered[1]["error"]
    assert text_of(before) == text_of(answers[0][1]) == text_of(after)
    assert cached_tokens(after["usage"]) == after["usage"]["prompt_tokens"] - 1
    assert allowing.send("/admin/models")[1]["counts"]["loads"] == loads, (
        "the old one was never away"
    )
    allowing.settle()


@pytest.mark.parametrize(
    "error", [SpecError("no heads in /home/ann/notes"), BaseException("panic in /home/ann/notes")]
)
def test_what_a_plugin_raises_for_a_model_is_said_without_paths(
    error: BaseException, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Raising:
        @hookimpl
        def model_classes(self, config: dict[str, Any]) -> None:
            raise error

    monkeypatch.setattr(plugins, "make_plugin_manager", lambda: manager_with(Raising()))
    args = parse(["--model", str(model), "--no-store"])
    registry = ModelRegistry(BlockpoolModelProvider(args), options.server_config(args))
    assert registry.catalog.default is not None
    with pytest.raises(BadModelError) as info:
        registry.check_files(registry.catalog.default)
    assert "in notes. " in str(info.value)
    assert "Raising, test_registry_failures.py)" in str(info.value)
    assert "/" not in str(info.value)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "error",
    [MemoryError("no more of it"), RuntimeError("[malloc] Unable to allocate"), SystemExit("bye")],
)
@pytest.mark.parametrize("stage", ["read", "open"])
def test_a_load_that_fails_late_brings_the_old_model_back(
    stage: str, error: BaseException, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = save_model(tmp_path / "bad", "llama", seed=5)
    owner: Any = BlockpoolModelProvider if stage == "read" else LoadedModel
    original = getattr(owner, stage)

    def failing(self: Any, *args: Any) -> Any:
        provider = self if stage == "read" else self.provider
        if provider.model_key[0] == str(bad):
            raise error
        return original(self, *args)

    monkeypatch.setattr(owner, stage, failing)
    stored = ("--pool-bytes", "30MB", "--store-dir", str(tmp_path / "store"))
    body = {"messages": HELLO, "max_tokens": 6}
    with blockpool_server(model, "--allow-models", str(bad), *stored) as ours:
        before = ours.chat(HELLO, max_tokens=6)
        jobs = [
            lambda b=b: ours.send("/v1/chat/completions", b)
            for b in (body, {**body, "model": str(bad)}, body)
        ]
        answers = at_once(jobs)
        assert [status for status, _ in answers] == [200, 503, 200]
        assert str(error) in answers[1][1]["error"]["message"]
        assert [text_of(answer) for status, answer in answers if status == 200] == [
            text_of(before)
        ] * 2
        # It is not tried again at once: whoever asks would cost the others a swap.
        status, answer = ours.send("/v1/chat/completions", {**body, "model": str(bad)})
        assert (status, "not tried again" in answer["error"]["message"]) == (503, True)
        after = ours.chat(HELLO, max_tokens=6)
        assert (text_of(after), cached_tokens(after["usage"])) == (
            text_of(before),
            after["usage"]["prompt_tokens"] - 1,
        )
        # Nobody has to ask for the old one.
        assert ours.send("/admin/load", {"model": str(bad)})[0] == 503
        assert ours.send(f"/v1/models/{model.name}")[1]["mlx_blockpool"]["state"] == "loaded"
        figures = ours.send("/admin/models")[1]
        assert figures["counts"] == {"loads": 3, "unloads": 2, "swaps": 0, "failures": 2}
        assert {m["id"]: m["failure"] is None for m in figures["models"]} == {
            model.name: True,
            bad.name: False,
        }
        # An order tries at once, and clears it.
        monkeypatch.undo()
        assert ours.send("/admin/load", {"model": str(bad)})[0] == 200
        assert ours.send("/v1/chat/completions", {**body, "model": str(bad)})[0] == 200
        ours.settle()


def test_where_not_even_the_old_model_comes_back_it_is_loaded_on_demand(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = save_model(tmp_path / "bad", "llama", seed=5)

    def failing(self: Any, piece_bytes: int) -> Any:
        raise MemoryError("nothing can be had")

    with blockpool_server(model, "--allow-models", str(bad), "--pool-bytes", "30MB") as ours:
        before = ours.chat(HELLO, max_tokens=6)
        monkeypatch.setattr(BlockpoolModelProvider, "read", failing)
        assert ours.send("/v1/chat/completions", {"messages": HELLO, "model": str(bad)})[0] == 503
        assert ours.send("/v1/chat/completions", {"messages": HELLO})[0] == 503
        assert ours.send("/health")[0] == 200
        monkeypatch.undo()
        assert ours.send("/admin/load", {"model": str(model)})[0] == 200
        assert text_of(ours.chat(HELLO, max_tokens=6)) == text_of(before)


def test_a_pool_that_is_too_small_for_the_new_model_is_said_before_the_old_one_goes(
    model: Path, tmp_path: Path
) -> None:
    large = save_model(tmp_path / "large", "llama", seed=6, num_hidden_layers=40)
    with blockpool_server(model, "--allow-models", str(large), "--pool-bytes", "1MB") as ours:
        before = ours.chat(HELLO[1:], max_tokens=6)
        status, answer = ours.send(
            "/v1/chat/completions", {"messages": HELLO[1:], "model": str(large)}
        )
        assert (status, "Raise --pool-bytes" in answer["error"]["message"]) == (503, True)
        assert ours.send("/admin/models")[1]["counts"]["unloads"] == 0
        assert text_of(ours.chat(HELLO[1:], max_tokens=6)) == text_of(before)


def test_a_server_that_stops_while_a_model_is_loaded_stops(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights never end; whoever waits for them is told."""
    endless = save_model(tmp_path / "endless", "llama", seed=7)

    def reading(self: Any, piece_bytes: int) -> Any:
        while True:
            yield 0

    entered: list[str] = []
    enter = ModelSwap._enter
    with blockpool_server(model, "--allow-models", str(endless), "--pool-bytes", "30MB") as ours:
        ours.chat(HELLO, max_tokens=2)
        monkeypatch.setattr(BlockpoolModelProvider, "read", reading)
        monkeypatch.setattr(
            ModelSwap, "_enter", lambda self, stage: (entered.append(stage), enter(self, stage))
        )

        def stop() -> None:
            until(lambda: "loading" in entered)
            ours.generator.stop_and_join()

        (status, answer), _ = at_once(
            [lambda: ours.send("/v1/completions", {"prompt": "x", "model": str(endless)}), stop]
        )
    assert (status, answer["error"]["message"]) == (503, "The server is shutting down.")


def test_a_load_that_hangs_is_told_and_does_not_keep_the_server(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever hangs in a model's files: health says so, and the server ends without it."""
    hanging = save_model(tmp_path / "hanging", "llama", seed=8)
    entered, goes_on = threading.Event(), threading.Event()
    prepare = BlockpoolModelProvider.prepare

    def hang(self: Any, key: Any) -> None:
        if key.model == str(hanging):
            entered.set()
            goes_on.wait()
        prepare(self, key)

    with blockpool_server(model, "--allow-models", str(hanging), "--pool-bytes", "30MB") as ours:
        ours.chat(HELLO, max_tokens=2)
        monkeypatch.setattr(BlockpoolModelProvider, "prepare", hang)
        asking = threading.Thread(
            target=ours.send, args=("/v1/completions", {"prompt": "x", "model": "hanging"})
        )
        asking.start()
        assert entered.wait(30)
        ours.generator.health.stall_seconds = 0.0
        status, health = ours.send("/health")
        assert (status, health["status"], health["doing"]) == (503, "stalled", "loading a model")
        ours.generator._config = replace(ours.generator._config, stop_seconds=0.0)
        ours.generator.stop_and_join()
        assert ours.generator._generation_thread.is_alive(), "it hangs"
        goes_on.set()
        asking.join()
