"""The engine through its real door: seeds, order of an agent's requests, drafts, health, and a
thread that does not stay dead.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Iterator
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
from models import save_model
from thorough import only

from mlx_blockpool.config import EngineConfig
from mlx_blockpool.engine.engine import BlockPoolBatchEngine
from mlx_blockpool.server import generator as generator_module
from mlx_blockpool.server.generator import BlockpoolGenerator
from mlx_blockpool.server.model import LoadedModel
from mlx_blockpool.server.replies import Reply
from mlx_blockpool.server.step_driver import StepDriver
from server.serving import (
    Client,
    at_once,
    blockpool_server,
    cached_tokens,
    stock_server,
    text_of,
    until,
)


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("llama"), "llama", head_dim=32)


@pytest.fixture
def fresh_server(wide_model: Path) -> Iterator[Client]:
    with blockpool_server(
        wide_model, "--pool-bytes", "20MB", "--prefill-step-size", "128"
    ) as running:
        yield running


SAMPLED: list[dict[str, Any]] = [
    {"seed": 3, "temperature": 1.0},
    {"seed": 4, "temperature": 0.8, "top_p": 0.9},
    {"seed": 5, "temperature": 1.0, "top_k": 20, "min_p": 0.01},
    {"seed": 6, "temperature": 1.0, "xtc_probability": 0.5, "xtc_threshold": 0.001},
    {"seed": 7, "temperature": 0.0},
]


def test_seeded_requests_in_one_batch_answer_as_stock_alone(
    fresh_server: Client, wide_model: Path
) -> None:
    messages = [{"role": "user", "content": "throw the dice " * 12}]
    with stock_server(wide_model) as stock:
        expected = [text_of(stock.chat(messages, max_tokens=24, **options)) for options in SAMPLED]
    jobs = [
        lambda o=o: text_of(fresh_server.chat(messages, max_tokens=24, **o)) for o in SAMPLED * 2
    ]
    assert at_once(jobs) == expected * 2
    fresh_server.settle()
    counts = fresh_server.send("/v1/cache")[1]["engine"]
    assert counts["tokens"] > counts["decode_steps"], "they did not run together"


def test_requests_of_one_agent_run_in_order_and_others_pass(
    fresh_server: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of agent a and one without a name wait while nothing starts; then a's second starts
    after its first has ended.
    """
    together: list[set[str | None]] = []
    step = BlockPoolBatchEngine.next

    def watching(self: BlockPoolBatchEngine) -> Any:
        together.append({running.request.agent for running in self.live})
        assert len([r for r in self.live if r.request.agent == "a"]) <= 1
        return step(self)

    monkeypatch.setattr(BlockPoolBatchEngine, "next", watching)
    body = {"messages": [{"role": "user", "content": "one after the other"}], "max_tokens": 30}
    bodies = [
        {**body, "prompt_cache_key": "a"},
        {**body, "prompt_cache_key": "a"},
        {**body, "prompt_cache_key": "b"},
        body,
    ]
    answers = at_once([lambda b=b: fresh_server.send("/v1/chat/completions", b) for b in bodies])
    assert len({text_of(answer) for _, answer in answers}) == 1
    assert {"a", "b"} <= set().union(*together)


def test_an_agents_name_must_be_text(fresh_server: Client) -> None:
    status, answer = fresh_server.send("/v1/completions", {"prompt": "x", "prompt_cache_key": 7})
    assert status == 400
    assert "prompt_cache_key" in answer["error"]["message"]


def test_what_ends_the_thread_is_told_and_the_next_request_is_served(
    fresh_server: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Fatal(BaseException):
        pass

    def dying(self: Any) -> None:
        raise Fatal("no one catches this")

    monkeypatch.setattr(BlockPoolBatchEngine, "next", dying)
    status, answer = fresh_server.send("/v1/completions", {"prompt": "doomed", "max_tokens": 3})
    assert status == 503
    assert "no one catches this" in answer["error"]["message"]
    monkeypatch.undo()
    assert (
        fresh_server.send("/v1/completions", {"prompt": "doomed no more", "max_tokens": 3})[0]
        == 200
    )
    status, health = fresh_server.send("/health")
    assert (status, health["status"], health["restarts"]) == (200, "ok", 1)
    fresh_server.settle()


def taking_arrivals(preparing: set[str]) -> tuple[threading.Thread, Queue[str], list[str]]:
    """A thread that takes arrivals once, its queue, and what it has taken."""
    arrived: list[str] = []
    generator = types.SimpleNamespace(
        _live={},
        _models=[],
        _config=EngineConfig(join_seconds=5),
        _arrive=arrived.append,
        _preparing=preparing,
        registry=types.SimpleNamespace(queue=(), swap=None),
        requests=Queue(),
        step_driver=StepDriver(),
    )
    generator.requests.put("first")
    watch = threading.Thread(
        target=BlockpoolGenerator._take_arrivals, args=(generator,), daemon=True
    )
    watch.start()
    return watch, generator.requests, arrived


def test_a_request_starts_with_those_that_are_being_prepared() -> None:
    preparing = {"second", "third"}
    watch, requests, arrived = taking_arrivals(preparing)
    until(lambda: arrived == ["first"])
    preparing.remove("second")
    requests.put("second")
    until(lambda: arrived == ["first", "second"])
    assert watch.is_alive(), "it still waits for the third"
    preparing.remove("third")
    requests.put("third")
    watch.join(timeout=4)
    assert not watch.is_alive(), "it waits for others than those"
    assert arrived == ["first", "second", "third"]


def test_a_request_is_being_prepared_until_it_is_queued(
    fresh_server: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else an idle engine starts another one without it."""
    generator, preparing = fresh_server.generator, []

    def put(item: Any) -> None:
        if isinstance(item, Reply):
            preparing.append(len(generator._preparing))
        Queue.put(generator.requests, item)

    monkeypatch.setattr(generator.requests, "put", put)
    body = {"prompt": "abc", "max_tokens": 2, "n": 2}
    assert fresh_server.send("/v1/completions", body)[0] == 200
    assert preparing == [1, 1]
    assert not generator._preparing


def test_a_request_alone_starts_at_once() -> None:
    watch, _, arrived = taking_arrivals(set())
    watch.join(timeout=4)
    assert not watch.is_alive()
    assert arrived == ["first"]


def test_a_draft_runs_on_pooled_caches_and_changes_no_reply(
    wide_model: Path, tmp_path: Path
) -> None:
    draft = save_model(tmp_path / "draft", "llama", seed=1, num_hidden_layers=1)
    messages = [
        {"role": "system", "content": "Common to all. " * 30},
        {"role": "user", "content": "Go on. "},
    ]
    with stock_server(wide_model) as stock:
        first = text_of(stock.chat(messages, max_tokens=20))
        longer = [
            *messages,
            {"role": "assistant", "content": first},
            {"role": "user", "content": "And then?"},
        ]
        second = text_of(stock.chat(longer, max_tokens=20))
    with blockpool_server(wide_model, "--pool-bytes", "20MB", "--draft-model", str(draft)) as ours:
        assert text_of(ours.chat(messages, max_tokens=20)) == first
        answer = ours.chat(longer, max_tokens=20)
        assert text_of(answer) == second
        assert cached_tokens(answer["usage"]) > 400
        assert [text_of(ours.chat(messages, max_tokens=20)) for _ in range(2)] == [first] * 2
        ours.settle()
        assert ours.send("/v1/cache")[1]["backend"] == "blockpool"
        known = ours.generator.model._drafted.draft
        known.check()
        assert not any(c.held for c in known.pool.settle())


def test_the_report_counts_what_the_running_batch_shares(
    wide_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three prompts with one beginning that come together and are all computed before any goes on,
    so that they decode as one batch.
    """
    reports: list[dict[str, Any]] = []
    prompts = ["a" * 600 + letter * 300 for letter in "bcd"]
    step = BlockPoolBatchEngine.next

    def reporting(self: BlockPoolBatchEngine) -> Any:
        if not reports and len(self) < len(prompts):
            return []
        events = step(self)
        client.generator._report()
        reports.append(client.generator.model.report)
        return events

    monkeypatch.setattr(BlockPoolBatchEngine, "next", reporting)
    with blockpool_server(
        wide_model, "--pool-bytes", "20MB", "--prefill-step-size", "128", "--decode-share", "0"
    ) as client:
        at_once(
            [
                lambda p=p: client.send("/v1/completions", {"prompt": p, "max_tokens": 12})
                for p in prompts
            ]
        )
        widest = max(
            (r["batch"] for r in reports if r["batch"]), key=lambda batch: batch["unshared_bytes"]
        )
        # Each has 4 blocks, and the first two are those of all.
        assert widest["unshared_bytes"] * 8 == widest["bytes"] * 12
        assert reports[-1]["engine"]["decode_steps"] > 0
        client.settle()
        assert client.send("/v1/cache")[1]["batch"] is None


@pytest.mark.parametrize("name", only(["llama", "gemma3_text", "gpt_oss"], "gemma3_text"))
def test_figures_may_be_taken_at_any_step(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a prompt caches hold less than its tokens."""
    monkeypatch.setattr(generator_module, "REPORT_SECONDS", -1)
    told: list[Any] = []
    with blockpool_server(
        save_model(tmp_path / "model", name), "--prefill-step-size", "64"
    ) as server:
        report = LoadedModel.update_report

        def reporting(self: LoadedModel, *figures: Any) -> None:
            report(self, *figures)
            told.append(self.report.get("batch"))

        monkeypatch.setattr(LoadedModel, "update_report", reporting)
        jobs = [
            lambda n=n: server.chat(
                [{"role": "user", "content": chr(65 + n) * 400 * n}], max_tokens=8
            )
            for n in (1, 2, 3)
        ]
        at_once(jobs)
    assert len([batch for batch in told if batch is not None]) > 10
