"""A server of two ranks behaves as one of one rank, and both ranks hold the same at the end.

The ranks are threads here.
"""

from __future__ import annotations

import json
import math
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from models import save_model
from ranks.threads import joined

from mlx_blockpool.config import RankConfig
from mlx_blockpool.errors import BlockpoolError, GroupError
from mlx_blockpool.ranks.driver import GroupDriver
from mlx_blockpool.ranks.head import Head
from mlx_blockpool.server import app
from mlx_blockpool.server.provider import BlockpoolModelProvider, ModelKey
from mlx_blockpool.server.ranked.leader import Leader
from mlx_blockpool.server.ranked.replica import SharedModel, join_group
from server.ranked import Follower, Group, ranked_server
from server.serving import Client, at_once, blockpool_server, cached_tokens, parse

SYSTEM = "You are one of a few agents, and all of them begin with this text. " * 6
FORM = {
    "type": "json_schema",
    "json_schema": {
        "name": "x",
        "schema": {
            "type": "object",
            "properties": {"kind": {"const": "dog"}},
            "required": ["kind"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    return [save_model(folder / "one", "llama"), save_model(folder / "two", "qwen2", seed=2)]


@pytest.fixture(scope="module")
def group(models: list[Path]) -> Iterator[Group]:
    with ranked_server(
        models[0],
        "--pool-bytes",
        "20MB",
        "--allow-models",
        str(models[0].parent),
        "--swap-patience",
        "0.2s",
    ) as found:
        yield found


@pytest.fixture(scope="module")
def alone(models: list[Path]) -> Iterator[Client]:
    with blockpool_server(models[0], "--pool-bytes", "20MB") as client:
        yield client


def talk_of(agent: int, more: str = "") -> list[dict[str, str]]:
    return [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": f"Agent {agent} asks. {more}" + "why? " * agent},
    ]


def texts(answer: dict[str, Any]) -> list[str]:
    return [choice["message"]["content"] for choice in answer["choices"]]


def test_agents_get_the_replies_and_the_cached_tokens_of_one_rank(
    group: Group, alone: Client
) -> None:
    asked = [{"messages": talk_of(agent), "max_tokens": 12} for agent in (1, 2, 1, 3)]
    found, expected = ([client.chat(**each) for each in asked] for client in (group.client, alone))
    assert [texts(each) for each in found] == [texts(each) for each in expected]
    assert [cached_tokens(each["usage"]) for each in found] == [
        cached_tokens(each["usage"]) for each in expected
    ]
    assert cached_tokens(found[2]["usage"]) > cached_tokens(found[1]["usage"]) > 256
    group.settle()


def test_seeds_choices_and_forms_are_drawn_as_by_one_rank(group: Group, alone: Client) -> None:
    asked = [
        {"messages": talk_of(4), "max_tokens": 8, "seed": 3, "temperature": 1.0, "n": 3},
        {"messages": talk_of(5), "max_tokens": 40, "response_format": FORM},
        {
            "messages": talk_of(6),
            "max_tokens": 8,
            "logprobs": True,
            "top_logprobs": 2,
            "repetition_penalty": 1.3,
        },
    ]
    found = at_once([lambda each=each: group.client.chat(**each) for each in asked])
    assert [texts(each) for each in found] == [texts(alone.chat(**each)) for each in asked]
    assert texts(found[1])[0].strip().startswith("{")
    assert len(found[2]["choices"][0]["logprobs"]["content"]) == 8
    group.settle()


def test_a_client_that_hangs_up_ends_its_request_on_all_ranks(group: Group) -> None:
    body = json.dumps(
        {"messages": talk_of(7), "max_tokens": 4000, "stream": True, "logit_bias": {"0": -100}}
    ).encode()
    with urllib.request.urlopen(
        f"http://127.0.0.1:{group.client.port}/v1/chat/completions", body, timeout=60
    ) as stream:
        assert any(line.startswith(b"data: ") for line in stream)
    group.settle()


def test_several_ranks_compute_no_embeddings(group: Group) -> None:
    refused = (
        "input: a server of several ranks computes no embeddings; start one without mlx.launch"
    )
    for path, body in (
        ("/v1/embeddings", {"input": "a"}),
        ("/api/embed", {"model": "default_model", "input": "a"}),
    ):
        status, answer = group.client.send(path, body)
        assert (status, refused in str(answer)) == (400, True), answer


@pytest.mark.thorough
def test_models_are_swapped_on_all_ranks_and_replies_go_on_behind(
    group: Group, models: list[Path], alone: Client
) -> None:
    names = [str(model) for model in models]
    # Replies that run are suspended for the other model at once.
    group.registries[0].queue.drain = 0.0
    asked = [
        {"messages": talk_of(agent), "max_tokens": 90, "model": names[agent % 2]}
        for agent in range(4)
    ]
    found = at_once([lambda each=each: group.client.chat(**each) for each in asked])
    assert [texts(each) for each in found[::2]] == [
        texts(alone.chat(**{**each, "model": "one"})) for each in asked[::2]
    ]
    assert group.client.send("/admin/models")[1]["counts"]["swaps"] >= 1
    group.settle()
    assert [list(registry.loaded) for registry in group.registries[1:]] == [
        list(group.registries[0].loaded)
    ]


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
    assert cached_tokens(again["usage"]) >= 256 > cached_tokens(first["usage"])


@pytest.mark.parametrize(
    ("sizes", "kind"), [(("256", "512"), "tensor"), (("256", "256"), "pipeline")]
)
def test_ranks_with_unlike_options_say_so_and_do_not_serve(
    sizes: tuple[str, str], kind: str, models: list[Path]
) -> None:
    own, other = (
        parse(["--model", str(models[0]), "--no-store", "--prefill-step-size", size])
        for size in sizes
    )
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
    launcher = Mock()
    with pytest.raises(GroupError, match=option):
        join_group(BlockpoolModelProvider(args, joined(2)[0]), launcher)
    assert not launcher.watch.called


class IdleGroup:
    """A leader of ranks without work, whose clock stands still but for their naps, and what it
    has exchanged.
    """

    def __init__(self, are_connected: bool = True) -> None:
        self.now = 100.0
        self.heads: list[Head] = []
        self.num_wakes = 0
        wakes = SimpleNamespace(are_connected=are_connected, wake=self._wake)
        fields: dict[str, Any] = {"agree": Mock(), "rest": Mock(), "run": lambda head: (False, 0)}
        replica: Any = SimpleNamespace(wakes=wakes, exchange=self._exchange, **fields)
        loss: Any = SimpleNamespace(end=None)
        self.turns = Leader(replica, RankConfig(), loss, clock=lambda: self.now)
        self.turns.begin()

    def _exchange(self, head: Head, facts: Any) -> tuple[list[Head], list[Any]]:
        self.heads.append(head)
        # Each nap was ended before.
        assert self.num_wakes == sum(each.nap_ms > 0 for each in self.heads[:-1])
        return [head], []

    def _wake(self) -> None:
        self.num_wakes += 1

    def exchanges_within(self, seconds: float) -> int:
        """How many exchanges there are in this time without work."""
        until, before = self.now + seconds, len(self.heads)
        while self.now < until:
            self.turns.idle([], rests=True)
            self.now += self.turns.nap_seconds
        return len(self.heads) - before


@pytest.mark.parametrize(("are_connected", "longest_ms"), [(True, 1000), (False, 50)])
def test_ranks_without_work_sleep_between_exchanges_longer_and_longer(
    are_connected: bool, longest_ms: int
) -> None:
    """In a collective they would spin. A long nap is one that rank 0 can end."""
    group = IdleGroup(are_connected)
    naps = []
    for seconds in (0.5, 1.5, 2.5, 3.5, 60.0):
        group.now = 100.0 + seconds
        group.turns.idle([], rests=True)
        naps.append(group.turns.nap_seconds)
    group.turns.idle([])
    assert [head.nap_ms for head in group.heads] == [5, 20, 50, longest_ms, longest_ms, 0]
    assert naps == [head.nap_ms / 1000 for head in group.heads[:-1]]


def test_an_idle_group_exchanges_once_a_second() -> None:
    """An exchange takes about 2.5 ms of a processor core on each rank."""
    group = IdleGroup()
    group.exchanges_within(5)
    assert group.exchanges_within(3600) == 3600


def test_work_ends_a_nap_of_the_ranks_and_makes_the_next_one_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = IdleGroup()
    group.exchanges_within(10)
    model: Any = Mock(
        spec=SharedModel, number=1, driver=Mock(spec=GroupDriver, lease_for=lambda *_: 1)
    )
    monkeypatch.setattr(group.turns, "_run", lambda head: (True, 1))
    before = group.num_wakes
    group.turns.step(model)
    group.turns.step(model)
    assert group.num_wakes == before + 1
    group.turns.idle([], rests=True)
    assert group.turns.nap_seconds == 0.005


def test_the_loop_of_an_idle_group_exchanges_once_for_each_nap(models: list[Path]) -> None:
    """The figures that it updates now and then need none."""
    with blockpool_server(models[0]) as client:
        generator = client.generator
    generator.step_driver = turns = Mock()
    generator._reported = -math.inf
    generator._step()
    assert [call.kwargs for call in turns.idle.call_args_list] == [{"rests": True}]
