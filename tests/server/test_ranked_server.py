"""A server of two ranks behaves as one of one rank, and both ranks hold the same at the end. The ranks are threads here."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from models import save_model
from ranks.threads import joined

from mlx_blockpool.config import RankConfig
from mlx_blockpool.errors import BlockpoolError, GroupError
from mlx_blockpool.ranks.head import Head
from mlx_blockpool.server import app
from mlx_blockpool.server.models.provider import BlockpoolModelProvider, ModelKey
from mlx_blockpool.server.ranked import leader
from server.ranked import Follower, Group, ranked_server
from server.serving import Client, at_once, blockpool_server, parse

SYSTEM = "You are one of a few agents, and all of them begin with this text. " * 6
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", "properties": {"kind": {"const": "dog"}}, "required": ["kind"], "additionalProperties": False}}}  # fmt: skip  # noqa: E501


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    return [save_model(folder / "one", "llama"), save_model(folder / "two", "qwen2", seed=2)]


@pytest.fixture(scope="module")
def group(models: list[Path]) -> Iterator[Group]:
    with ranked_server(
        models[0], "--pool-bytes", "20MB", "--allow-models", str(models[0].parent), "--swap-patience", "0.2s"
    ) as found:
        yield found


@pytest.fixture(scope="module")
def alone(models: list[Path]) -> Iterator[Client]:
    with blockpool_server(models[0], "--pool-bytes", "20MB") as client:
        yield client


def talk_of(agent: int, more: str = "") -> list[dict[str, str]]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"Agent {agent} asks. {more}" + "why? " * agent}]


def texts(answer: dict[str, Any]) -> list[str]:
    return [choice["message"]["content"] for choice in answer["choices"]]


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_agents_get_the_replies_and_the_cached_tokens_of_one_rank(group: Group, alone: Client) -> None:
    asked = [{"messages": talk_of(agent), "max_tokens": 12} for agent in (1, 2, 1, 3)]
    found, expected = ([client.chat(**each) for each in asked] for client in (group.client, alone))
    assert [texts(each) for each in found] == [texts(each) for each in expected]
    assert [cached(each) for each in found] == [cached(each) for each in expected]
    assert cached(found[2]) > cached(found[1]) > 256
    group.settle()


def test_seeds_choices_and_forms_are_drawn_as_by_one_rank(group: Group, alone: Client) -> None:
    asked = [
        {"messages": talk_of(4), "max_tokens": 8, "seed": 3, "temperature": 1.0, "n": 3},
        {"messages": talk_of(5), "max_tokens": 40, "response_format": FORM},
        {"messages": talk_of(6), "max_tokens": 8, "logprobs": True, "top_logprobs": 2, "repetition_penalty": 1.3},
    ]
    found = at_once([lambda each=each: group.client.chat(**each) for each in asked])
    assert [texts(each) for each in found] == [texts(alone.chat(**each)) for each in asked]
    assert texts(found[1])[0].strip().startswith("{")
    assert len(found[2]["choices"][0]["logprobs"]["content"]) == 8
    group.settle()


def test_a_client_that_hangs_up_ends_its_request_on_all_ranks(group: Group) -> None:
    body = json.dumps({"messages": talk_of(7), "max_tokens": 4000, "stream": True, "logit_bias": {"0": -100}}).encode()
    with urllib.request.urlopen(f"http://127.0.0.1:{group.client.port}/v1/chat/completions", body, timeout=60) as stream:
        assert any(line.startswith(b"data: ") for line in stream)
    group.settle()


def test_several_ranks_compute_no_embeddings(group: Group) -> None:
    refused = "input: a server of several ranks computes no embeddings; start one without mlx.launch"
    for path, body in (("/v1/embeddings", {"input": "a"}), ("/api/embed", {"model": "default_model", "input": "a"})):
        status, answer = group.client.send(path, body)
        assert (status, refused in str(answer)) == (400, True), answer


@pytest.mark.thorough
def test_models_are_swapped_on_all_ranks_and_replies_go_on_behind(group: Group, models: list[Path], alone: Client) -> None:
    names = [str(model) for model in models]
    # Replies that run are suspended for the other model at once.
    group.registries[0].queue.drain = 0.0
    asked = [{"messages": talk_of(agent), "max_tokens": 90, "model": names[agent % 2]} for agent in range(4)]
    found = at_once([lambda each=each: group.client.chat(**each) for each in asked])
    assert [texts(each) for each in found[::2]] == [texts(alone.chat(**{**each, "model": "one"})) for each in asked[::2]]
    assert group.client.send("/admin/models")[1]["counts"]["swaps"] >= 1
    group.settle()
    assert [list(registry.loaded) for registry in group.registries[1:]] == [list(group.registries[0].loaded)]


@pytest.mark.thorough
def test_a_model_that_one_rank_cannot_load_is_refused_by_all_and_the_old_one_serves(
    group: Group, models: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    load_share = BlockpoolModelProvider.load_share

    def failing(provider: BlockpoolModelProvider, key: ModelKey) -> None:
        if provider.ranks.rank and key.model == str(models[1]):
            raise OSError("the disk of this rank cannot be read")
        load_share(provider, key)

    one, two = ({"messages": talk_of(1), "max_tokens": 3, "model": str(model)} for model in models)
    assert len(texts(group.client.chat(**one))) == 1
    monkeypatch.setattr(BlockpoolModelProvider, "load_share", failing)
    status, answer = group.client.send("/v1/chat/completions", two)
    assert status == 503
    assert "another rank could not load it" in answer["error"]["message"]
    assert len(texts(group.client.chat(**one))) == 1
    group.settle()


@pytest.mark.thorough
def test_a_restart_finds_what_both_ranks_have_on_disk(models: list[Path], tmp_path: Path) -> None:
    options = ["--pool-bytes", "20MB", "--store-dir", str(tmp_path)]
    with ranked_server(models[0], *options) as group:
        first = group.client.chat(talk_of(1), max_tokens=12)
    with ranked_server(models[0], *options) as group:
        again = group.client.chat(talk_of(1), max_tokens=12)
        group.settle()
    assert texts(again) == texts(first)
    assert cached(again) >= 256 > cached(first)


@pytest.mark.parametrize(("sizes", "kind"), [(("256", "512"), "tensor"), (("256", "256"), "pipeline")])
def test_ranks_with_unlike_options_say_so_and_do_not_serve(sizes: tuple[str, str], kind: str, models: list[Path]) -> None:
    own, other = (parse(["--model", str(models[0]), "--no-store", "--prefill-step-size", size]) for size in sizes)
    ranks = joined(2)
    ranks[1].kind = kind
    follower = Follower(other, ranks[1])
    follower.start()
    generator = app.make_generator(BlockpoolModelProvider(own, ranks[0]))
    with pytest.raises(BlockpoolError, match="The ranks have different options or versions"):
        generator.wait_until_loaded()
    follower.join()
    assert "different options" in str(follower.error)


@pytest.mark.parametrize("option", ["--adapter-path", "--draft-model"])
def test_adapters_and_drafts_are_refused_at_the_start(models: list[Path], option: str) -> None:
    args = parse(["--model", str(models[0]), option, str(models[1])])
    with pytest.raises(GroupError, match=option):
        BlockpoolModelProvider(args, joined(2)[0])


def test_ranks_without_work_sleep_between_exchanges_longer_and_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a collective they would spin."""
    now, heads = [100.0], list[Head]()
    monkeypatch.setattr(leader, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def exchange(head: Head, facts: Any) -> tuple[list[Head], list[Any]]:
        heads.append(head)
        return [head], []

    replica: Any = SimpleNamespace(agree=lambda: None, exchange=exchange, run=lambda head: (False, 0), rest=lambda: None)
    turns = leader.Leader(replica, RankConfig(), loss=SimpleNamespace(end=None))  # type: ignore[arg-type]
    turns.begin()
    naps = []
    for seconds in (0.5, 1.5, 2.5, 60.0):
        now[0] = 100.0 + seconds
        turns.idle([], rests=True)
        naps.append(turns.nap_seconds)
    turns.idle([])
    assert [head.nap_ms for head in heads] == [5, 20, 50, 50, 0]
    assert naps == [0.005, 0.02, 0.05, 0.05]
