"""A server notes on disk how far its agents have come, and what is pinned of them outlives the
budget.
"""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from store.stores import open_store

from mlx_blockpool.config import ServerConfig, StoreConfig
from mlx_blockpool.prefix.trie import PrefixRef
from mlx_blockpool.ranks.group import ALONE
from mlx_blockpool.server import model as model_module
from mlx_blockpool.server.conversation_id import is_conversation_id
from mlx_blockpool.server.model import LoadedModel
from mlx_blockpool.server.provider import ModelKey
from mlx_blockpool.server.served_agents import ServedAgents
from mlx_blockpool.server.watch.event_log import EventLog
from mlx_blockpool.store.agents import Agent, Agents
from mlx_blockpool.tier.restore import Rates
from server.serving import Client, at_once, blockpool_server, cached_tokens


def serve(model: Path, store: Path, *options: str) -> Any:
    return blockpool_server(model, "--pool-bytes", "30MB", "--store-dir", str(store), *options)


def say(client: Client, agent: str, about: str, length: int = 24) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"{agent} talks about {about}. " * length}]
    answer = client.chat(messages, max_tokens=4, prompt_cache_key=agent)
    client.settle()
    return answer["usage"]  # type: ignore[no-any-return]


def test_each_agent_is_noted_with_its_last_turn(model: Path, tmp_path: Path) -> None:
    with serve(model, tmp_path) as client:
        usages = at_once([lambda a=a: say(client, a, "birds") for a in ("one", "two/..", "drei ✓")])
        usages[0] = say(client, "one", "fish", 36)
        client.chat([{"role": "user", "content": "No name"}], max_tokens=2)
    noted = {
        agent.name: agent for agent in Agents(tmp_path).all() if not is_conversation_id(agent.name)
    }
    assert sorted(noted) == ["drei ✓", "one", "two/.."]
    # The last token is told and may not be computed.
    for name, usage in zip(("one", "two/..", "drei ✓"), usages, strict=True):
        assert 0 <= usage["total_tokens"] - noted[name].tokens <= 1
    with serve(model, tmp_path) as again:
        assert cached_tokens(say(again, "one", "fish", 36)) == usages[0]["prompt_tokens"] - 1


def test_what_is_pinned_outlives_the_budget(model: Path, tmp_path: Path) -> None:
    with serve(model, tmp_path) as client:
        kept = say(client, "kept", "birds")
        say(client, "other", "birds")
    Agents(tmp_path).pin("kept")
    size = sum(file.stat().st_size for file in tmp_path.glob("models/*/*/*/*"))
    with serve(model, tmp_path, "--store-bytes", str(2 * size)) as client:
        for n in range(8):
            say(client, f"agent {n}", f"number {n}")
    with serve(model, tmp_path, "--store-bytes", str(2 * size)) as client:
        # The other one first: what it finds must not be what the pin has kept.
        assert cached_tokens(say(client, "other", "birds")) < 40
        # Under load one of a few measured reads may have been slower than computing.
        client.generator.model.prefix.stored.restores.rates = Rates()
        assert cached_tokens(say(client, "kept", "birds")) == kept["prompt_tokens"] - 1


def test_turns_that_wait_are_noted_in_one_batch_when_a_server_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path)
    agents = ServedAgents("tiny", store)
    calls: Counter[str] = Counter()
    begun, free, note_all = threading.Event(), threading.Event(), Agents.note_all

    def held(files: Agents, turns: list[Agent]) -> list[Agent]:
        begun.set()
        free.wait()
        calls["agents"] += 1
        return note_all(files, turns)

    agents.run(lambda files: files.note("before", store.namespace, "tiny", [], 0))
    monkeypatch.setattr(Agents, "note_all", held)
    agents.note("first", PrefixRef((), 0))
    assert begun.wait(60)
    for turn in range(6):
        for number in range(50):
            agents.note(f"agent {number}", PrefixRef((bytes([turn]) * 32,), turn + 1))
    free.set()
    agents.close(60)
    noted = {agent.name: agent.tokens for agent in Agents(tmp_path).all()}
    assert noted == {"before": 0, "first": 0} | {f"agent {number}": 6 for number in range(50)}
    assert calls["agents"] == 2
    store.close()


def test_a_disk_that_hangs_does_not_hold_up_a_server_that_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(tmp_path)
    agents = ServedAgents("tiny", store)
    free = threading.Event()
    monkeypatch.setattr(Agents, "note_all", lambda *_: free.wait())
    agents.note("one", PrefixRef((), 0))
    agents.close(0.01)
    assert "could not be noted within 0.01 seconds" in caplog.text
    free.set()
    store.close()


@pytest.mark.parametrize(("taken", "left"), [(2.0, 1.0), (5.0, 0.0)])
def test_the_store_and_the_notes_of_a_model_have_one_time_to_be_written(
    taken: float, left: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, given = [100.0], list[float]()
    monkeypatch.setattr(model_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    provider: Any = SimpleNamespace(
        ranks=ALONE, cli_args=SimpleNamespace(prompt_cache_size=10), reset=lambda: None
    )
    events = EventLog().of_model("m")
    loaded = LoadedModel(
        ModelKey("m"), provider, ServerConfig(store=StoreConfig(flush_seconds=3.0)), events, None
    )  # type: ignore[arg-type]
    monkeypatch.setattr(
        loaded, "prefix", SimpleNamespace(close=lambda: now.insert(0, now[0] + taken))
    )
    monkeypatch.setattr(loaded, "agents", SimpleNamespace(close=given.append))
    loaded.close()
    assert given == [left]
