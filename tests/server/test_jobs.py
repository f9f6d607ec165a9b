"""Errands run on the generation thread between two steps: idle, beside replies, while models
change; and they hold nothing.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest
from models import save_model

from mlx_blockpool.errors import GroupLostError, PoolExhaustedError, UnavailableError
from mlx_blockpool.server import jobs
from mlx_blockpool.server.agents.service import AgentService
from mlx_blockpool.server.bodies import StatusError
from mlx_blockpool.server.jobs import Job, Steps, between_steps
from mlx_blockpool.server.scope import RequestScope
from server.serving import Client, blockpool_server


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[Client]:
    with blockpool_server(
        save_model(folder / "one", "llama"), "--allow-models", str(folder), "--pool-bytes", "20MB"
    ) as running:
        yield running


def test_they_run_on_the_thread_that_owns_the_caches(client: Client) -> None:
    assert (
        between_steps(client.generator, threading.get_ident)
        == client.generator._generation_thread.ident
        != threading.get_ident()
    )


def test_what_mlx_raises_for_a_lost_rank_is_its_loss(client: Client) -> None:
    def fail() -> None:
        raise RuntimeError("[ring] connection to a peer was lost")

    with pytest.raises(GroupLostError, match="A rank was lost"):
        between_steps(client.generator, fail)


def test_what_they_raise_is_for_who_asked_and_refers_to_no_frames(client: Client) -> None:
    def fail() -> None:
        try:
            raise KeyError("a cause")
        except KeyError as error:
            raise PoolExhaustedError(3, 1, 1, "full") from error

    with pytest.raises(PoolExhaustedError, match="3 blocks") as caught:
        between_steps(client.generator, fail)
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


@pytest.mark.parametrize("fails", [False, True])
def test_sliced_work_runs_to_its_end_on_the_thread_in_many_slices(
    client: Client, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    monkeypatch.setattr(jobs, "SLICE_SECONDS", -1.0)
    threads = []

    def steps() -> Steps[None]:
        for _ in range(5):
            threads.append(threading.get_ident())
            yield None
        if fails:
            raise PoolExhaustedError(3, 1, 1, "full") from KeyError("a cause")

    put, starts = client.generator.requests.put, []
    job = Job(steps())
    monkeypatch.setattr(
        client.generator.requests, "put", lambda item: (starts.append(item), put(item))
    )
    client.generator.requests.put(job)
    result, error = job.results.get(timeout=60)
    assert (starts, set(threads)) == ([job] * 6, {client.generator._generation_thread.ident})
    assert (result, type(error)) == (None, PoolExhaustedError if fails else type(None))
    assert error is None or (error.__cause__, error.__traceback__) == (None, None)


def test_sliced_work_is_stopped_once_it_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "SLICE_SECONDS", -1.0)
    done: list[str] = []

    def steps() -> Steps[None]:
        try:
            yield None
            yield None
            done.append("all")
        finally:
            done.append("closed")

    requests: Queue[Job[None]] = Queue()
    job = Job(steps())
    job.stop()
    job.run(requests)
    assert done == []
    job.stop()
    assert done == ["closed"]
    requests.get().run(requests)
    assert (done, job.results.get(), requests.empty()) == (["closed"], (None, None), True)


def test_a_job_that_pauses_continues_and_one_whose_client_has_gone_is_stopped(
    client: Client,
) -> None:
    done: list[str] = []

    def steps(pauses: int) -> Steps[int]:
        try:
            for _ in range(pauses):
                yield 0.0
            return pauses
        finally:
            done.append("closed")

    assert between_steps(client.generator, steps(3)) == 3
    ours, theirs = socket.socketpair()
    theirs.close()
    with ours, pytest.raises(ConnectionAbortedError):
        between_steps(client.generator, steps(10**9), ours)
    between_steps(client.generator, lambda: None)
    assert done == ["closed"] * 2


def test_a_job_that_pauses_while_the_server_stops_is_closed_by_the_generation_thread() -> None:
    requests: Queue[Job[None]] = Queue()
    closed: list[str] = []

    def steps() -> Steps[None]:
        try:
            while True:
                yield 0.0
        finally:
            closed.append(threading.current_thread().name)

    def receive(results: Queue[Any], _: Any) -> Any:
        requests.get().run(requests)
        raise UnavailableError("The server is shutting down.")

    def ask() -> None:
        with pytest.raises(UnavailableError):
            between_steps(SimpleNamespace(requests=requests, receive=receive), steps())

    asking = threading.Thread(target=ask, name="socket")
    asking.start()
    asking.join()
    assert closed == []
    requests.get().run(requests)
    assert closed == [threading.current_thread().name]


def test_they_run_while_a_model_is_loaded_and_fail_for_one_that_has_gone(
    client: Client, folder: Path
) -> None:
    client.chat(
        [{"role": "user", "content": "Are you there?"}], max_tokens=2, prompt_cache_key="one"
    )
    service, registry = AgentService(RequestScope(client.generator)), client.generator.registry
    (loaded,) = between_steps(client.generator, service._loaded_models)
    assert service.run_with(loaded, lambda served, _: served.key) == loaded.key
    registry.piece_bytes = 1
    other = str(save_model(folder / "two", "qwen2"))
    assert client.send("/admin/load", {"model": other, "wait": False})[0] == 202
    stages = set()
    while other not in {key.model for key in registry.loaded}:
        stages.add(between_steps(client.generator, lambda: registry.swap and registry.swap.stage))
    assert "loading" in stages
    with pytest.raises(StatusError, match="was unloaded in the meantime") as caught:
        service.run_with(loaded, lambda served, _: served.key)
    assert caught.value.status == 409
    # Without a store an agent goes with its model.
    assert client.send("/v1/agents/one")[0] == 404


def test_nobody_waits_for_a_thread_that_has_ended(folder: Path) -> None:
    with blockpool_server(save_model(folder / "three", "llama"), "--pool-bytes", "20MB") as client:
        generator = client.generator
    with pytest.raises(RuntimeError, match="shutting down"):
        between_steps(generator, lambda: 1)


def test_what_waits_for_a_thread_that_hangs_can_be_failed_by_another(tmp_path: Path) -> None:
    with blockpool_server(save_model(tmp_path, "llama"), "--pool-bytes", "20MB") as server:
        hangs, ends = threading.Event(), threading.Event()
        generator, waiting = server.generator, Job(threading.get_ident)
        generator.requests.put(Job(lambda: (hangs.set(), ends.wait(30))))
        assert hangs.wait(30)
        answers: list[tuple[int, object]] = []
        body = {"messages": [{"role": "user", "content": "go on"}]}
        client = threading.Thread(
            target=lambda: answers.append(server.send("/v1/chat/completions", body))
        )
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
