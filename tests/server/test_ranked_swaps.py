"""Random requests for two models on a server of several ranks, which swaps them under load: the
ranks stay alike.
"""

from __future__ import annotations

import json
import random
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from models import save_model

from server.ranked import Group, ranked_server
from server.serving import at_once
from server.test_ranked_server import talk_of, texts

pytestmark = pytest.mark.thorough
CLIENTS, REQUESTS = 3, 3


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    return [save_model(folder / "one", "llama"), save_model(folder / "two", "gemma3_text", seed=2)]


def bodies(seed: int, models: list[Path]) -> list[dict[str, Any]]:
    draw = random.Random(seed)
    return [
        {
            "messages": talk_of(draw.randrange(4), "more " * draw.randrange(30)),
            "max_tokens": draw.randrange(1, 60),
            "model": str(draw.choice(models)),
            "n": draw.choice([1, 1, 2]),
            "priority": draw.randrange(-1, 2),
            **({"seed": draw.randrange(9), "temperature": 1.0} if draw.random() < 0.5 else {}),
        }
        for _ in range(REQUESTS)
    ]


def hang_up(group: Group, body: dict[str, Any]) -> None:
    """Read the beginning of a stream and leave."""
    data = json.dumps({**body, "stream": True, "max_tokens": 2000}).encode()
    with urllib.request.urlopen(
        f"http://127.0.0.1:{group.client.port}/v1/chat/completions", data, timeout=60
    ) as stream:
        stream.readline()


@pytest.mark.parametrize("seed", range(5))
def test_ranks_stay_alike_whatever_is_swapped(
    seed: int, models: list[Path], tmp_path: Path
) -> None:
    options = [
        "--allow-models",
        str(models[0].parent),
        "--swap-patience",
        "0.3s",
        "--pool-bytes",
        "1MB",
    ]
    store = ["--store-dir", str(tmp_path)] if seed % 2 else []
    with ranked_server(models[0], *options, *store, size=2 + seed % 2) as group:
        # Replies that run are suspended for the other model at once.
        group.registries[0].queue.drain = 0.0

        def client(number: int) -> list[list[str]]:
            found = []
            for index, body in enumerate(bodies(10 * seed + number, models)):
                if index == number:
                    hang_up(group, body)
                else:
                    found.append(texts(group.client.chat(**body)))
            return found

        found = at_once([lambda n=n: client(n) for n in range(CLIENTS)])
        assert all(len(each) == REQUESTS - (number < REQUESTS) for number, each in enumerate(found))
        assert group.client.send("/admin/models")[1]["counts"]["swaps"] >= 2
        group.settle()
