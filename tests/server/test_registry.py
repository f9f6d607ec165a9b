"""Several models behind one server: swapped under load, kept side by side, unloaded when idle.

Stock's replies are the oracle.
"""

from __future__ import annotations

import json
import math
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm import load
from mlx_lm.tuner.utils import linear_to_lora_layers
from models import save_model

from mlx_blockpool.config import ModelsConfig, ServerConfig
from mlx_blockpool.server.generator import BlockpoolGenerator
from mlx_blockpool.server.health import Health
from mlx_blockpool.server.model import LoadedModel
from mlx_blockpool.server.models.registry import ModelRegistry
from mlx_blockpool.server.provider import ModelKey
from mlx_blockpool.server.step_driver import StepDriver
from server.serving import (
    Client,
    at_once,
    blockpool_server,
    cached_tokens,
    stock_server,
    text_of,
    until,
)

AGENTS, TURNS, REPLY = 3, 3, 12
SYSTEM = "You are one of three agents, and all of them begin with this text. " * 9
Talk = list[dict[str, str]]


def new_talks() -> list[Talk]:
    return [[{"role": "system", "content": SYSTEM}] for _ in range(AGENTS)]


def turn(client: Client, talk: Talk, agent: int, model: Path | None = None) -> dict[str, Any]:
    """One turn of an agent; the answer joins its messages. Returns the usage."""
    talk.append(
        {
            "role": "user",
            "content": f"Agent {agent} asks for the {len(talk)}th time. " + "why? " * (3 * agent),
        }
    )
    answer = client.chat(talk, max_tokens=REPLY, **({} if model is None else {"model": str(model)}))
    talk.append({"role": "assistant", "content": text_of(answer)})
    return answer["usage"]  # type: ignore[no-any-return]


def alone(model: Path) -> list[Talk]:
    """What each agent has heard from stock mlx-lm with this model, one after the other."""
    talks = new_talks()
    with stock_server(model) as stock:
        for _ in range(TURNS):
            for agent, talk in enumerate(talks):
                turn(stock, talk, agent)
    return talks


def counts(client: Client) -> dict[str, int]:
    return client.send("/admin/models")[1]["counts"]  # type: ignore[no-any-return]


def states(client: Client) -> dict[str, str]:
    return {
        model["id"]: model["mlx_blockpool"]["state"]
        for model in client.send("/v1/models")[1]["data"]
    }


def beside(models: Sequence[Path]) -> tuple[str, str]:
    """The option that lets requests name the models in a folder."""
    return "--allow-models", str(models[0].parent)


def cached(answer: dict[str, Any]) -> int:
    usage = answer.get("usage", answer)
    return cached_tokens(usage)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    return save_model(folder / "one", "llama"), save_model(folder / "two", "qwen2", seed=2)


@pytest.fixture(scope="module")
def expected(two: tuple[Path, Path]) -> list[list[Talk]]:
    return [alone(model) for model in two]


@pytest.mark.thorough
def test_agents_of_two_models_take_turns_under_load(
    two: tuple[Path, Path], expected: list[list[Talk]], tmp_path: Path
) -> None:
    """Each round all six ask at once, so that each round swaps: A, B; B, A; A, B."""
    talks = [new_talks() for _ in two]
    pairs = [(m, a) for a in range(AGENTS) for m in range(2)]
    with blockpool_server(
        two[0], *beside(two), "--pool-bytes", "60MB", "--store-dir", str(tmp_path)
    ) as ours:
        before: dict[tuple[int, int], int] = {}
        for _ in range(TURNS):
            usages = at_once(
                [lambda m=m, a=a: turn(ours, talks[m][a], a, two[m]) for m, a in pairs]
            )
            for pair, usage in zip(pairs, usages, strict=True):
                # What was known before the model went is there again.
                assert cached(usage) >= before.get(pair, 0) - 2
                before[pair] = usage["total_tokens"]
        ours.settle()
        assert 3 <= counts(ours)["swaps"] <= 2 * TURNS
        report = ours.send("/v1/cache")[1]
    assert talks == expected
    assert report["store"]["restored_tokens"] > 0
    assert report["store"].get("quarantined", 0) == 0


def test_waiting_requests_are_grouped_by_model(two: tuple[Path, Path]) -> None:
    """Twelve at once, A and B in turn: nobody is swapped for more than once."""
    with blockpool_server(two[0], *beside(two), "--pool-bytes", "60MB") as ours:
        jobs = [
            lambda n=n: ours.chat(
                [{"role": "user", "content": f"Number {n}"}], max_tokens=8, model=str(two[n % 2])
            )
            for n in range(12)
        ]
        answers = at_once(jobs)
        ours.settle()
        assert counts(ours)["swaps"] <= 2
    assert all(answer["choices"] for answer in answers)


def test_two_models_side_by_side_are_never_swapped(
    two: tuple[Path, Path], expected: list[list[Talk]], tmp_path: Path
) -> None:
    talks = [new_talks() for _ in two]
    pairs = [(m, a) for a in range(AGENTS) for m in range(2)]
    stored = ("--pool-bytes", "60MB", "--store-dir", str(tmp_path))
    with blockpool_server(two[0], *beside(two), "--max-models", "2", *stored) as ours:
        for _ in range(TURNS):
            at_once([lambda m=m, a=a: turn(ours, talks[m][a], a, two[m]) for m, a in pairs])
        ours.settle()
        assert counts(ours) == {"loads": 2, "unloads": 0, "swaps": 0, "failures": 0}
        assert [states(ours)[name] for name in ("one", "two", "default_model")] == ["loaded"] * 3
        report = ours.send("/v1/cache")[1]
    assert talks == expected
    assert [own["pool_bytes"] for own in report["models"].values()] == [30_000_000, 30_000_000]
    assert all(own["cached_tokens"] > 0 for own in report["models"].values())


def test_the_third_model_takes_the_place_of_the_one_used_longest_ago(
    two: tuple[Path, Path], tmp_path: Path
) -> None:
    third = save_model(tmp_path / "third", "llama", seed=3)
    one, other = two
    with blockpool_server(
        one, "--allow-models", f"{one},{other},{third}", "--max-models", "2", "--pool-bytes", "60MB"
    ) as ours:
        for model in (one, other, one, third):
            ours.chat([{"role": "user", "content": "Hello"}], max_tokens=2, model=str(model))
        found = states(ours)
        assert {found[m.name] for m in (one, third)} == {"loaded"}
        assert found[other.name] == "available"


def test_a_folder_is_one_model_however_it_is_written(two: tuple[Path, Path]) -> None:
    with blockpool_server(two[0], *beside(two), "--pool-bytes", "60MB") as ours:
        for name in (f"{two[0]}/", f"{two[1]}/../one", "default_model", str(two[0])):
            ours.chat([{"role": "user", "content": "Hello"}], max_tokens=2, model=name)
        assert counts(ours)["loads"] == 1


def test_an_idle_model_is_unloaded_and_loaded_again_on_demand(
    two: tuple[Path, Path], expected: list[list[Talk]], tmp_path: Path
) -> None:
    talk = new_talks()[0]
    stored = ("--pool-bytes", "60MB", "--store-dir", str(tmp_path))
    with blockpool_server(two[0], "--idle-unload", "0.2s", *stored) as ours:
        usages = []
        for number in range(TURNS):
            usages.append(turn(ours, talk, 0))
            # On a slow machine the model may have been unloaded once more before its turn.
            until(lambda: set(states(ours).values()) == {"available"})
            assert counts(ours)["unloads"] > number
            assert ours.send("/v1/cache")[1]["backend"] is None
        assert counts(ours)["swaps"] == 0
    assert talk == expected[0][0]
    assert cached(usages[-1]) >= usages[-2]["total_tokens"] - 2


def test_models_take_turns_by_the_time_that_their_steps_take() -> None:
    """Steps of the second take three times as long; the third joins late, and gets no more than
    the others from then on.
    """
    taken = []

    def model(name: str, seconds: float) -> Any:
        def step() -> None:
            taken.append(name)
            served.spent += seconds

        served = types.SimpleNamespace(
            live={1: None}, spent=0.0, step=step, is_blocked=False, has_met_limits=False
        )
        return served

    models = [model("short", 1.0), model("long", 3.0)]
    thread = types.SimpleNamespace(
        _models=models, _reported=math.inf, health=Health(10), step_driver=StepDriver()
    )
    for _ in range(40):
        BlockpoolGenerator._step(thread)  # type: ignore[arg-type]
    assert taken.count("short") == 3 * taken.count("long") == 30
    models.append(model("late", 1.0))
    models[2].live = {}
    LoadedModel.join(models[2], models)
    models[2].live = {1: None}
    taken.clear()
    for _ in range(70):
        BlockpoolGenerator._step(thread)  # type: ignore[arg-type]
    assert [taken.count(name) for name in ("short", "long", "late")] == [30, 10, 30]


def test_requests_go_on_after_the_thread_has_failed_beside_two_models(
    two: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Fatal(BaseException):
        pass

    def dying(self: Any) -> None:
        raise Fatal("no one catches this")

    hello = [{"role": "user", "content": "Hello"}]
    with blockpool_server(
        two[0], *beside(two), "--max-models", "2", "--pool-bytes", "60MB"
    ) as ours:
        replies = [text_of(ours.chat(hello, max_tokens=4, model=str(m))) for m in two]
        monkeypatch.setattr(LoadedModel, "step", dying)
        status, answer = ours.send("/v1/chat/completions", {"messages": hello, "max_tokens": 4})
        assert (status, "no one catches this" in answer["error"]["message"]) == (503, True)
        monkeypatch.undo()
        again = [text_of(ours.chat(hello, max_tokens=4, model=str(m))) for m in two]
        ours.settle()
        assert counts(ours)["loads"] == 2
    assert again == replies


def test_a_model_without_a_pool_is_swapped_like_any_other(
    two: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No plugin describes it, so that nothing is in blocks; with a draft its requests run one by
    one.
    """
    monkeypatch.setattr("mlx_blockpool.server.model_caches.describe", lambda *_: (None, ""))
    arguments = (
        "--draft-model",
        str(save_model(two[0].parent / "draft", "llama", num_hidden_layers=1)),
    )
    hello = [{"role": "user", "content": "Hello, you"}]
    models = [save_model(two[0].parent / f"other {seed}", "llama", seed) for seed in (4, 5)]
    expected = []
    for model in models:
        with stock_server(model, *arguments) as stock:
            expected.append(text_of(stock.chat(hello, max_tokens=8)))
    with blockpool_server(models[0], *beside(models), *arguments) as ours:
        jobs = [
            lambda n=n: ours.chat(hello, max_tokens=8, model=str(models[n % 2])) for n in range(6)
        ]
        found = [text_of(answer) for answer in at_once(jobs)]
        assert ours.send("/v1/cache")[1]["backend"] == "mlx-lm"
    assert found == expected * 3


def test_an_adapter_makes_another_model_of_the_same_folder(
    two: tuple[Path, Path], tmp_path: Path
) -> None:
    model = load(str(two[0]))[0]
    lora = {"rank": 4, "scale": 20.0, "dropout": 0.0}
    linear_to_lora_layers(model, 2, lora)
    weights = {
        name: mx.random.normal(a.shape)
        for name, a in tree_flatten(model.trainable_parameters())
        if "lora" in name
    }
    mx.save_safetensors(str(tmp_path / "adapters.safetensors"), weights)
    (tmp_path / "adapter_config.json").write_text(
        json.dumps({"num_layers": 2, "lora_parameters": lora})
    )
    hello = [{"role": "user", "content": "Hello"}]

    def replies(client: Client) -> list[str]:
        answers = [
            client.chat(hello, max_tokens=8, **({"adapters": str(tmp_path)} if n % 2 else {}))
            for n in range(2)
        ]
        named = client.chat(hello, max_tokens=8, model=str(two[0]), adapters=str(tmp_path))
        return [text_of(answer) for answer in (*answers, named)]

    with stock_server(two[0]) as stock:
        expected = replies(stock)
    with blockpool_server(two[0], "--allow-models", str(tmp_path), "--pool-bytes", "60MB") as ours:
        assert replies(ours) == expected
        assert (
            ours.send(
                "/v1/chat/completions",
                {"messages": hello, "model": str(two[0]), "adapters": "/no/such"},
            )[0]
            == 404
        )
    assert expected[0] != expected[2]


def test_pools_are_shares_of_what_is_free_where_no_size_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 100, the first model takes 20: its pool may take a quarter of the rest, the second's
    half of what that leaves.
    """
    template: Any = types.SimpleNamespace(
        default_key=lambda: None, cli_args=types.SimpleNamespace(draft_model=None)
    )
    registry = ModelRegistry(template, ServerConfig(models=ModelsConfig(max_models=2)))  # type: ignore[arg-type]
    active = [20]
    monkeypatch.setattr(
        "mlx_blockpool.server.models.registry.default_pool_bytes", lambda: (100 - active[0]) // 2
    )
    assert registry.share() == 20
    first: Any = types.SimpleNamespace(pool_bytes=20, array_bytes=4)
    registry.loaded = {ModelKey("a"): first}
    active[0] = 20 + 4 + 30
    assert registry.share() == (100 - 54 - 16) // 2
