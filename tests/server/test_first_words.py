"""The server's first words."""

from __future__ import annotations

import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlx_blockpool.config import StoreConfig
from mlx_blockpool.server.app import first_words
from server.serving import Client, blockpool_server

pytestmark = pytest.mark.server("--pool-bytes 20MB --prefill-step-size 128", model="agent")


@pytest.fixture(scope="module")
def stored(agent: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    store = str(tmp_path_factory.mktemp("store"))
    with blockpool_server(
        agent, "--pool-bytes", "20MB", "--store-bytes", "1GB", "--store-dir", store
    ) as running:
        running.generator.wait_until_loaded()
        yield running


def test_the_first_words_say_what_is_served_and_how_it_is_reached(stored: Client) -> None:
    generator = stored.generator
    model, pool, store, address, *clients = first_words(generator, "0.0.0.0", 1234).splitlines()[1:]
    assert model.endswith("of weights, with pooled caches, ragged batches")
    assert generator.registry.catalog.listed()[0] in model
    assert pool == "  pool   20.0 MB for keys and values"
    assert store.endswith("1.0 GB at most; it has nothing of this model")
    assert address == "  open   http://127.0.0.1:1234/"
    assert [client.partition(":")[0].strip() for client in clients] == [
        "Claude Code",
        "Codex",
        "OpenAI's SDKs",
    ]
    assert all("http://127.0.0.1:1234" in client for client in clients)


def test_they_count_what_is_on_disk(stored: Client) -> None:
    generator = stored.generator
    generator.agent_files.note("ann", generator.model.agents.namespace, "x", [b"x" * 32], 40)
    generator.agent_files.note("bob", generator.model.agents.namespace, "x", [b"y" * 32], 50)
    generator.agent_files.note("of another model", "0" * 32, "x", [b"x" * 32], 60)
    words = first_words(generator, "::1", 1)
    assert "; on it 2 agents with 90 tokens" in words
    assert "http://[::1]:1/v1" in words


def test_without_a_store_or_a_model_they_say_so(server: Client) -> None:
    assert "  store  none: cached prefixes end with the server" in first_words(
        server.generator, "127.0.0.1", 1
    )
    empty: Any = types.SimpleNamespace(
        model=None, store_config=StoreConfig(), agent_files=types.SimpleNamespace(all=list)
    )
    empty.access = types.SimpleNamespace(is_open=False)
    catalog = types.SimpleNamespace(choices=lambda: "Requests name one of these: org/one; more.")
    empty.registry = types.SimpleNamespace(catalog=catalog)
    words = first_words(empty, "127.0.0.1", 1)
    assert "none yet. Requests name one of these: org/one; more." in words
    assert "OPENAI_API_KEY=KEY" in words
