"""Five agents talk to servers of two and three ranks that share one model, and hear and reuse
what they do on one rank.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from models import save_model

from server.processes import turn
from server.ranked import ring_server
from server.serving import at_once, blockpool_server, cached_tokens

pytestmark = [pytest.mark.thorough, pytest.mark.xdist_group("ranks"), pytest.mark.timeout(180)]

AGENTS, TURNS = 5, 3
SYSTEM = "You are one of five agents, and all of them begin with this text. " * 7
# Heads that three ranks can divide, and layers of which each of three stages has some.
THREE = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3}
SHARED = {
    "tensor of two": ("llama", {}, 2, []),
    "tensor of three": ("llama", THREE, 3, []),
    "pipeline of two": ("qwen2", {"num_hidden_layers": 4}, 2, ["--pipeline"]),
    "pipeline of three": ("qwen2", {"num_hidden_layers": 4}, 3, ["--pipeline"]),
}


def conversations(port: int) -> tuple[list[list[dict[str, str]]], list[list[int]]]:
    """What the agents say and hear, all at once in each turn, and the cached tokens of each
    turn.
    """
    talks: list[list[dict[str, str]]] = [
        [{"role": "system", "content": SYSTEM}] for _ in range(AGENTS)
    ]
    cached: list[list[int]] = []
    for _ in range(TURNS):
        usages: list[Any] = at_once(
            [lambda n=n: turn(port, talks[n], n, temperature=0) for n in range(AGENTS)]
        )
        # Who computes the common beginning depends on who comes first.
        cached.append(sorted(cached_tokens(usage) for usage in usages))
    return talks, cached


@pytest.mark.parametrize("how", SHARED)
def test_five_agents_hear_what_one_rank_says(how: str, tmp_path: Path) -> None:
    name, changes, size, options = SHARED[how]
    model = save_model(tmp_path / "model", name, **changes)
    # A stage loads only the files with its layers.
    weights = dict.fromkeys(mx.load(str(model / "model.safetensors")), "model.safetensors")
    (model / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weights})
    )
    with blockpool_server(model, "--pool-bytes", "60MB") as alone:
        expected = conversations(alone.port)
    with ring_server(model, *options, size=size) as (port, _):
        found = conversations(port)
    assert found[0] == expected[0]
    assert found[1][1:] == expected[1][1:]
    # One computes the common beginning. Whether the others wait for it or come later decides where
    # it ends.
    for first in (found[1][0], expected[1][0]):
        assert first[0] == 0 < 470 < first[1]
