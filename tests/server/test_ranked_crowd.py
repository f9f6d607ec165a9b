"""Crowds of agents on a server of several ranks: whatever they ask for at once, the ranks hold the
same at the end.

The ranks are threads; requests have two models, seeds, forms, choices and priorities, and some
clients hang up. The pool and the disk have room for a part of them.
"""

from __future__ import annotations

import http.client
import json
import random
from pathlib import Path
from typing import Any

import pytest
from models import save_model
from thorough import seeds

from server.ranked import Group, ranked_server
from server.serving import at_once, text_of

AGENTS, REQUESTS = 5, 6
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [1, 22, 333]}}}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    return [save_model(folder / "one", "llama"), save_model(folder / "two", "qwen2", seed=2)]


class Agent:
    """An agent whose requests are a matter of chance.

    `statuses`: of its responses; it has hung up on the others.
    """

    def __init__(self, number: int, seed: int, group: Group, models: list[Path]) -> None:
        self.rng = random.Random(f"{seed} {number}")
        self.group = group
        self.models = models
        self.headers = {"X-Agent-Id": f"agent-{number}"}
        self.talk = [{"role": "system", "content": "All of us begin with this text. " * 10}]
        self.statuses: list[int] = []

    def run(self) -> list[int]:
        for _ in range(REQUESTS):
            self.talk.append({"role": "user", "content": "why? " * self.rng.randrange(1, 40)})
            if self.rng.random() < 0.25:
                self._hang_up(self._body())
                continue
            status, answer = self.group.client.send(
                "/v1/chat/completions", self._body(), headers=self.headers
            )
            self.statuses.append(status)
            assert status == 200, answer
            self.talk.append({"role": "assistant", "content": text_of(answer)})
        return self.statuses

    def _body(self) -> dict[str, Any]:
        rng, model = self.rng, self.models[self.rng.random() < 0.2]
        body = {
            "model": str(model),
            "messages": self.talk,
            "max_tokens": rng.choice([1, 5, 20]),
            "temperature": 1.0,
        }
        some = [
            {"seed": 7},
            {"n": 2},
            {"response_format": FORM},
            {"priority": -3},
            {"stop": ["e"]},
            {"logit_bias": {"5": 50}},
        ]
        return {**body, **rng.choice([{}, {}, *some])}

    def _hang_up(self, body: dict[str, Any]) -> None:
        """Read a part of a reply, or nothing of it."""
        connection = http.client.HTTPConnection("127.0.0.1", self.group.client.port, timeout=60)
        connection.request(
            "POST", "/v1/chat/completions", json.dumps({**body, "stream": True}), self.headers
        )
        if self.rng.random() < 0.5:
            connection.getresponse().read(1)
        connection.close()


@pytest.mark.thorough
@pytest.mark.parametrize("seed", seeds(0, 4))
def test_ranks_hold_the_same_behind_a_crowd(seed: int, models: list[Path], tmp_path: Path) -> None:
    options = [
        "--pool-bytes",
        "3MB",
        "--store-dir",
        str(tmp_path),
        "--store-bytes",
        "3MB",
        "--swap-patience",
        "0.2s",
    ]
    with ranked_server(
        models[0], *options, "--allow-models", str(models[0].parent), size=2 + seed % 2
    ) as group:
        agents = [Agent(number, seed, group, models) for number in range(AGENTS)]
        found = at_once([agent.run for agent in agents])
        assert sum(map(len, found)) > AGENTS
        group.settle()
        # Idle ranks go on with exchanges.
        assert len({(each.calls["least"], each.calls["draw"]) for each in group.ranks}) == 1
