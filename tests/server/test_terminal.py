"""The server's first words, and its bars for long work on a terminal."""

from __future__ import annotations

import io
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlx_blockpool.config import StoreConfig
from mlx_blockpool.server.terminal import LONG_SECONDS, LOOK_SECONDS, Bars, Work, first_words, works
from mlx_blockpool.store.fs import Disk
from mlx_blockpool.store.spool import Spool
from server.serving import Client, blockpool_server


@pytest.fixture(scope="module")
def stored(agent: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    store = str(tmp_path_factory.mktemp("store"))
    with blockpool_server(agent, "--pool-bytes", "20MB", "--store-bytes", "1GB", "--store-dir", store) as running:
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
    assert [client.partition(":")[0].strip() for client in clients] == ["Claude Code", "Codex", "OpenAI's SDKs"]
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
    assert "  store  none: cached prefixes end with the server" in first_words(server.generator, "127.0.0.1", 1)
    empty: Any = types.SimpleNamespace(model=None, store_config=StoreConfig(), agent_files=types.SimpleNamespace(all=list))
    empty.access = types.SimpleNamespace(is_open=False)
    words = first_words(empty, "127.0.0.1", 1)
    assert "none yet: requests name one" in words
    assert "OPENAI_API_KEY=KEY" in words


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def generator_with(**parts: Any) -> Any:
    """A generator without work, but for `parts`."""
    parts = {"swap": None, "warm_up": None, "loaded": {}, "files": [], **parts}
    registry = types.SimpleNamespace(swap=parts["swap"], loaded=parts["loaded"])
    spool = types.SimpleNamespace(progress=lambda: parts["files"])
    return types.SimpleNamespace(registry=registry, warm_up=parts["warm_up"], spool=spool)


def test_work_is_read_from_figures() -> None:
    assert works(generator_with()) == []
    coming = types.SimpleNamespace(read_bytes=10, weights_bytes=40, hashing=types.SimpleNamespace(read_bytes=30))
    swap = types.SimpleNamespace(stage="loading", coming=coming)
    assert works(generator_with(swap=swap)) == [Work("loading", 10, 40, "B")]
    swap.stage = "hashing"
    assert works(generator_with(swap=swap)) == [Work("hashing", 30, 40, "B")]
    swap.stage, swap.coming = "saving", None
    assert works(generator_with(swap=swap)) == [Work("saving prefixes", 0, None, "")]
    report = {"done": 2, "failed": 1, "prompts": 7, "running": True}
    warm_up = types.SimpleNamespace(report=lambda: report)
    assert works(generator_with(warm_up=warm_up)) == [Work("warm-up", 3, 7, "prompts")]
    report["running"] = False
    assert works(generator_with(warm_up=warm_up)) == []
    restoring = [{"tokens": 512, "done": 256}, {"tokens": 256, "done": 0}]
    loaded = {"m": types.SimpleNamespace(report={"store": {"restoring": restoring}}), "n": types.SimpleNamespace(report={})}
    assert works(generator_with(loaded=loaded)) == [Work("restoring", 256, 768, "tokens")]
    assert works(generator_with(files=[(5, 9)])) == [Work("file 1", 5, 9, "B")]


def test_bars_are_drawn_for_long_work_and_taken_away() -> None:
    out = Terminal()
    bars = Bars(generator_with(), out)
    for _ in range(int(LONG_SECONDS / LOOK_SECONDS)):
        bars.update([Work("loading", 1000, 4000, "B")])
    assert out.getvalue() == ""
    bars.update([Work("loading", 2000, 4000, "B")])
    assert "loading:  50%" in out.getvalue()
    assert "2.00k/4.00k" in out.getvalue()
    bars.update([])
    drawn = out.getvalue()
    assert drawn.endswith("\r")
    bars.update([])
    assert out.getvalue() == drawn


def test_without_a_terminal_nothing_is_drawn() -> None:
    out = io.StringIO()
    bars = Bars(generator_with(files=[(1, 2)]), out)
    bars.start()
    bars.stop()
    assert out.getvalue() == ""


def test_a_file_on_its_way_is_seen(tmp_path: Path) -> None:
    spool = Spool(tmp_path, 0, Disk())
    with spool.file(100) as path:
        path.write_bytes(b"x" * 40)
        assert spool.progress() == [(40, 100)]
        path.write_bytes(b"x" * 100)
        assert spool.progress() == []
    assert spool.progress() == []
