"""A server process that goes from one model to another and back while all agents ask: nothing is
lost, nothing forgotten.
"""

from __future__ import annotations

import json
import urllib.request
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from models import save_model

from server.processes import needs_proc, process, send
from server.serving import at_once, cached_tokens, stock_server

AGENTS, WAVES = 3, 8
SYSTEM = "You are one of three agents of this model, and all of them begin with this text. " * 10
Talk = list[dict[str, str]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    return [save_model(folder / "A", "llama"), save_model(folder / "B", "lfm2", seed=2)]


def next_of(talk: Talk, agent: int) -> Talk:
    return [
        *talk,
        {
            "role": "user",
            "content": f"Agent {agent} asks for the {len(talk)}th time. " + "why? " * (4 * agent),
        },
    ]


def streamed(port: int, messages: Talk, model: Path) -> tuple[str, dict[str, Any]]:
    """A reply and its usage, from a stream that must end as it should."""
    asked = {"messages": messages, "max_tokens": 160, "model": str(model)}
    body = {**asked, "stream": True, "stream_options": {"include_usage": True}}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(body).encode()
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        lines = [line.decode().strip() for line in response]
    assert "data: [DONE]" in lines
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    text = "".join(
        choice["delta"].get("content") or "" for event in events for choice in event["choices"]
    )
    assert any(choice["finish_reason"] for event in events for choice in event["choices"])
    return text, next(event["usage"] for event in events if event.get("usage"))


def turn(port: int, talk: Talk, agent: int, model: Path) -> dict[str, Any]:
    messages = next_of(talk, agent)
    text, usage = streamed(port, messages, model)
    talk[:] = [*messages, {"role": "assistant", "content": text}]
    return usage


def new_talks() -> list[Talk]:
    return [[{"role": "system", "content": SYSTEM}] for _ in range(AGENTS)]


def alone(model: Path, turns: int) -> list[Talk]:
    """What the agents hear from stock mlx-lm with this model alone."""
    talks = new_talks()
    with stock_server(model) as stock:
        for _ in range(turns):
            for agent, talk in enumerate(talks):
                turn(stock.port, talk, agent, model)
    return talks


@pytest.mark.thorough
@needs_proc
def test_from_one_model_to_another_and_back_under_load(models: list[Path], tmp_path: Path) -> None:
    """Each wave begins while the replies of the one before it still run: A, B, A, B, each agent
    without a pause.
    """
    talks = {model: new_talks() for model in models}
    usages: dict[tuple[Path, int], list[dict[str, Any]]] = {
        (model, agent): [] for model in models for agent in range(AGENTS)
    }

    def agent(port: int, model: Path, number: int) -> None:
        for _ in range(1 + WAVES):
            usages[model, number].append(turn(port, talks[model][number], number, model))

    with process(
        models[0], tmp_path, "--allow-models", ",".join(map(str, models)), "--swap-patience", "0.3s"
    ) as (port, server):
        at_once([lambda m=m, n=n: agent(port, m, n) for n in range(AGENTS) for m in models])
        found = send(port, "/admin/models")
        health = send(port, "/health")
        store = send(port, "/v1/cache")["store"]
        server.terminate()
        assert server.wait(timeout=60) == 0
    assert talks == {model: alone(model, 1 + WAVES) for model in models}, (
        "another reply than without a swap"
    )
    assert found["counts"]["swaps"] >= 2, "away, and back"
    assert (found["counts"]["failures"], health.get("restarts")) == (0, None)
    assert store["restored_tokens"] > 0
    for turns in usages.values():
        for before, after in pairwise(turns):
            # All but the reply's last token, and where states are kept at ends of messages, the
            # reply.
            assert cached_tokens(after) >= before["prompt_tokens"] - 161
