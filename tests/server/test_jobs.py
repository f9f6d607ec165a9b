"""Errands run on the generation thread between two steps: idle, beside replies, while models change; and they hold nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from models import save_model

from mlx_blockpool.errors import GroupLostError, PoolExhaustedError
from mlx_blockpool.server.agents.service import AgentService
from mlx_blockpool.server.api.errors import StatusError
from mlx_blockpool.server.jobs import Job, run_on_generation_thread
from mlx_blockpool.server.scope import RequestScope
from server.serving import Client, blockpool_server


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[Client]:
    with blockpool_server(save_model(folder / "one", "llama"), "--allow-models", str(folder), "--pool-bytes", "20MB") as running:
        yield running


def test_they_run_on_the_thread_that_owns_the_caches(client: Client) -> None:
    assert (
        run_on_generation_thread(client.generator, threading.get_ident)
        == client.generator._generation_thread.ident
        != threading.get_ident()
    )


def test_what_mlx_raises_for_a_lost_rank_is_its_loss(client: Client) -> None:
    def fail() -> None:
        raise RuntimeError("[ring] connection to a peer was lost")

    with pytest.raises(GroupLostError, match="A rank was lost"):
        run_on_generation_thread(client.generator, fail)


def test_what_they_raise_is_for_who_asked_and_refers_to_no_frames(client: Client) -> None:
    def fail() -> None:
        try:
            raise KeyError("a cause")
        except KeyError as error:
            raise PoolExhaustedError(3, 1, 1, "full") from error

    with pytest.raises(PoolExhaustedError, match="3 blocks") as caught:
        run_on_generation_thread(client.generator, fail)
    assert (caught.value.__cause__, caught.value.__context__) == (None, None)
    assert "fail" not in {entry.name for entry in caught.traceback}
    assert client.chat([{"role": "user", "content": "go on"}], max_tokens=2)["choices"]


def test_jobs_that_follow_each_other_hold_up_no_request(client: Client) -> None:
    has_ended, requests = threading.Event(), client.generator.requests

    def follow() -> None:
        if not has_ended.is_set():
            requests.put(Job(follow))

    requests.put(Job(follow))
    timer = threading.Timer(60, has_ended.set)
    timer.start()
    client.chat([{"role": "user", "content": "Is there a turn for me?"}], max_tokens=4)
    assert not has_ended.is_set()
    has_ended.set()
    timer.cancel()


def test_they_run_while_a_model_is_loaded_and_fail_for_one_that_has_gone(client: Client, folder: Path) -> None:
    client.chat([{"role": "user", "content": "Are you there?"}], max_tokens=2, prompt_cache_key="one")
    service, registry = AgentService(RequestScope(client.generator)), client.generator.registry
    (home,) = service.homes()
    assert service.at(home, lambda served, _: served.key) == home.key
    registry.piece_bytes = 1
    other = str(save_model(folder / "two", "qwen2"))
    assert client.send("/admin/load", {"model": other, "wait": False})[0] == 202
    stages = set()
    while other not in {key.model for key in registry.loaded}:
        stages.add(run_on_generation_thread(client.generator, lambda: registry.swap and registry.swap.stage))
    assert "loading" in stages
    with pytest.raises(StatusError, match="was unloaded in the meantime") as caught:
        service.at(home, lambda served, _: served.key)
    assert caught.value.status == 409
    # Without a store an agent goes with its model.
    assert client.send("/v1/agents/one")[0] == 404


def test_nobody_waits_for_a_thread_that_has_ended(folder: Path) -> None:
    with blockpool_server(save_model(folder / "three", "llama"), "--pool-bytes", "20MB") as client:
        generator = client.generator
    with pytest.raises(RuntimeError, match="shutting down"):
        run_on_generation_thread(generator, lambda: 1)


def test_what_waits_for_a_thread_that_hangs_can_be_failed_by_another(tmp_path: Path) -> None:
    with blockpool_server(save_model(tmp_path, "llama"), "--pool-bytes", "20MB") as server:
        hangs, ends = threading.Event(), threading.Event()
        generator, waiting = server.generator, Job(threading.get_ident)
        generator.requests.put(Job(lambda: (hangs.set(), ends.wait(30))))
        assert hangs.wait(30)
        answers: list[tuple[int, object]] = []
        body = {"messages": [{"role": "user", "content": "go on"}]}
        client = threading.Thread(target=lambda: answers.append(server.send("/v1/chat/completions", body)))
        client.start()
        while not generator.requests.qsize():
            pass
        generator.requests.put(waiting)
        generator.give_up(GroupLostError(1))
        client.join()
        ends.set()
        assert answers[0][0] == 503
        assert "Rank 1 was lost" in str(answers[0][1])
        assert str(waiting.results.get()[1]).startswith("Rank 1 was lost")
