"""A client whose prompt comes from disk hears of it, as of a prefill; whoever looks sees it."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from models import save_model

from mlx_blockpool.config import EngineConfig
from mlx_blockpool.engine import caches as caches_module
from mlx_blockpool.engine.request import Restoring
from mlx_blockpool.server import model as model_module
from server.serving import Client, blockpool_server, cached_tokens

MESSAGES = [
    {"role": "system", "content": "One of many agents. " * 100},
    {"role": "user", "content": "Who are you?"},
]


def streamed(server: Client) -> tuple[list[tuple[int, int]], dict[str, Any]]:
    """What a streaming client is told before the first token, (done, total), and the usage at
    the end.
    """
    body = {
        "messages": MESSAGES,
        "max_tokens": 4,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}/v1/chat/completions", json.dumps(body).encode()
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        lines = response.read().decode().splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("data: "))
    told = [
        line.removeprefix(": keepalive ").split("/")
        for line in lines[:first]
        if line.startswith(": keepalive ")
    ]
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return [(int(done), int(total)) for done, total in told], next(
        c["usage"] for c in chunks if c.get("usage")
    )


def test_a_streaming_client_is_told_while_its_prompt_comes_from_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_model(tmp_path / "model", "llama")
    stored = ("--pool-bytes", "60MB", "--store-dir", str(tmp_path / "store"))
    with blockpool_server(folder, *stored) as server:
        computed, usage = streamed(server)
        length = usage["prompt_tokens"]
        server.settle()
    assert computed[-1] == (length, length)
    monkeypatch.setattr(EngineConfig, "restore_seconds", 0)
    monkeypatch.setattr(caches_module, "REPORT_SECONDS", 0)
    shown = []
    tell = model_module.LoadedModel.deliver

    def told(served: Any, event: Any) -> None:
        if isinstance(event, Restoring):
            shown.append(served.prefix.stored.report()["restoring"])
        tell(served, event)

    monkeypatch.setattr(model_module.LoadedModel, "deliver", told)
    with blockpool_server(folder, *stored) as server:
        found, usage = streamed(server)
        server.settle()
        assert server.send("/v1/cache")[1]["store"]["restoring"] == []
    cached = cached_tokens(usage)
    assert cached >= length - 1
    assert [total for _, total in found] == [cached] * len(found)
    assert [[{"tokens": cached, "done": done}] for done, _ in found] == shown
    assert [done for done, _ in found] == sorted({done for done, _ in found})
    assert len(found) >= length // 256 - 2
