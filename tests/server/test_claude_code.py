"""A session of Claude Code, twelve turns with sub-agents between them: what a turn reads of what the turn before it has left."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from models import CONFIGS, make_model

from server.anthropic_agents import save_agent
from server.claude_code import BILLING, Window
from server.serving import blockpool_server

POOL = ("--pool-bytes", "60MB")
KEPT = ("--normalise", "bookkeeping")
# What other architectures than llama keep of their beginnings stands at the ends of messages.
SHARES = {"llama": 0.95, "lfm2": 0.90}


def save(folder: Path, name: str) -> Path:
    """A model folder of an architecture with tools in its template."""
    save_agent(folder)
    config: dict[str, Any] = {**CONFIGS[name], "vocab_size": json.loads((folder / "config.json").read_text())["vocab_size"]}
    model = make_model(name, vocab_size=config["vocab_size"])
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def reused(window: Window) -> list[float]:
    """For each turn but the first, the share of the prompt of the turn before it that was read from the cache."""
    return [min(after.read, before.prompt) / before.prompt for before, after in pairwise(window.replies)]


@pytest.mark.parametrize("name", SHARES)
def test_a_session_reads_what_it_has_left(name: str, tmp_path: Path) -> None:
    model = save(tmp_path / name, name)
    with blockpool_server(model, *POOL, *KEPT) as server:
        window = Window(server, str(model))
        window.run()
        shares = reused(window)
        counted = window.count(window.main_body() | {"messages": window.messages[:-1]})
        server.settle()
    assert len(shares) == 11
    assert min(shares) >= SHARES[name], [f"{share:.3f}" for share in shares]
    assert counted == window.replies[-1].prompt
    # Never a wrong answer: a server that knows nothing replies the same.
    with blockpool_server(model, *POOL, *KEPT) as fresh:
        cold = Window(fresh, str(model), messages=window.messages[:-2])
        again = cold.turn(window.messages[-2]["content"], [])
    assert (again.content, again.read) == (window.replies[-1].content, 0)


def test_a_session_whose_system_prompt_changes_reads_nothing_behind_it_and_is_told_which_line(tmp_path: Path) -> None:
    model = save(tmp_path / "llama", "llama")
    before_nonce = BILLING.index("cch=") + len("<|im_start|>system\n")
    with blockpool_server(model, *POOL) as server:
        window = Window(server, str(model), reply_tokens=4)
        window.run(turns=2)
        assert all(reply.read <= before_nonce for reply in window.replies)
        status, told = server.send(f"/v1/cache/explain/{window.replies[-1].id}")
        assert status == 200, told
        assert "x-anthropic-billing-header" in json.dumps(told)
        assert f"cch={window.nonces[-2]}" in json.dumps(told)
        assert "bookkeeping" in json.dumps(told)
