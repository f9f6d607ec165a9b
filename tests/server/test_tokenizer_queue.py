"""Requests that only tokenize have lanes of workers apart from those of prompts, with a bound on
what waits and on each body.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from email.message import Message
from queue import Queue
from typing import Any

import pytest

from mlx_blockpool.config import AccessConfig, PromptConfig
from mlx_blockpool.errors import TooManyRequestsError
from mlx_blockpool.server.access import AccessPolicy
from mlx_blockpool.server.bodies import StatusError
from mlx_blockpool.server.prompts.job import PromptJob, TokenizerJob
from mlx_blockpool.server.prompts.workers import Lane, PromptWorker
from server.serving import Client

pytestmark = pytest.mark.server("--pool-bytes 8MB", model="llama")

HELLO = [{"role": "user", "content": "Hello"}]
LONG = "word " * 60_000
PATHS = ("/tokenize", "/detokenize", "/apply-template", "/v1/tokenize", "/v1/detokenize")
COUNTS = {
    "/tokenize": {"prompt": LONG},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": LONG}]},
    "/v1/responses/input_tokens": {"input": LONG},
    "/apply-template": {"messages": [{"role": "user", "content": LONG}]},
    "/detokenize": {"tokens": [1] * 150_000},
}


class HeldJobs:
    """Holds the worker of each large job that only tokenizes, as if the job took long, until
    release().

    `bodies`: of each large body instead that names no `max_tokens`.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, bodies: bool = False) -> None:
        self.entered: Queue[None] = Queue()
        self._released = threading.Event()
        run = PromptWorker.run

        def held(worker: PromptWorker, data: bytes, seconds: float, config: PromptConfig) -> Any:
            job = pickle.loads(data)
            is_body = isinstance(job, bytes) and b"max_tokens" not in job
            only_tokenizes = isinstance(job, TokenizerJob) or (
                isinstance(job, PromptJob) and job.only_count
            )
            if len(data) > PromptConfig.small_bytes and (is_body if bodies else only_tokenizes):
                self.entered.put(None)
                assert self._released.wait(30)
            return run(worker, data, seconds, config)

        monkeypatch.setattr(PromptWorker, "run", held)

    def release(self) -> None:
        self._released.set()


@pytest.fixture
def one_large(server: Client) -> Iterator[Client]:
    """The server with one worker for large prompts."""
    lane = server.generator.prompts._large
    held = [lane._idle.get() for _ in lane.workers[1:]]
    yield server
    for worker in held:
        lane._idle.put(worker)


@pytest.mark.sampled
@pytest.mark.parametrize("bodies", [False, True])
@pytest.mark.parametrize("path", COUNTS)
def test_a_long_prompt_does_not_wait_for_requests_that_only_tokenize(
    one_large: Client, monkeypatch: pytest.MonkeyPatch, path: str, bodies: bool
) -> None:
    held, answers = HeldJobs(monkeypatch, bodies), Queue[int]()
    tokenizing = threading.Thread(target=lambda: answers.put(one_large.send(path, COUNTS[path])[0]))
    tokenizing.start()
    held.entered.get(timeout=30)
    # It is rendered, and then rejected because it does not fit into the pool.
    status, answer = one_large.send("/v1/completions", {"prompt": LONG, "max_tokens": 1})
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert one_large.send("/v1/messages/count_tokens", {"messages": HELLO})[0] == 200, (
        "a small count waits for a large one"
    )
    assert answers.empty(), "the long prompt has waited"
    held.release()
    tokenizing.join()
    assert answers.get(timeout=60) == 200


def test_requests_that_only_tokenize_are_rejected_while_too_many_bytes_of_them_wait(
    server: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, answers = HeldJobs(monkeypatch), Queue[int]()
    _, large = server.generator.prompts._tokenizing
    monkeypatch.setattr(large, "_most_bytes", 500_000)
    first = threading.Thread(
        target=lambda: answers.put(server.send("/tokenize", {"prompt": LONG})[0])
    )
    first.start()
    held.entered.get(timeout=30)
    for path, body in COUNTS.items():
        status, answer = server.send(path, body)
        kind, message = answer["error"]["type"], answer["error"]["message"]
        assert (status, kind, "of at most 500,000 bytes" in message) == (
            429,
            "rate_limit_error",
            True,
        ), (path, answer)
        assert "Try again in some seconds, or send less at a time." in message
    held.release()
    first.join()
    assert answers.get(timeout=60) == 200
    assert server.send("/tokenize", {"prompt": LONG})[0] == 200, "the queue is empty again"


def test_a_job_larger_than_the_queue_is_admitted_alone_and_gives_its_bytes_back() -> None:
    lane = Lane(1, 1.0, PromptConfig(), most_bytes=10)
    for _ in range(2):
        with lane._admitted(11), pytest.raises(TooManyRequestsError), lane._admitted(1):
            pass
    with (
        lane._admitted(4),
        lane._admitted(6),
        pytest.raises(TooManyRequestsError),
        lane._admitted(1),
    ):
        pass
    assert lane._bytes == 0


@pytest.mark.parametrize(
    "path", [*PATHS, *COUNTS, "/v1/embeddings", "/api/embed", "/api/embeddings"]
)
def test_the_body_of_a_request_that_only_tokenizes_has_a_bound(path: str) -> None:
    def check(length: int, **config: Any) -> None:
        headers = Message()
        headers["Content-Length"] = str(length)
        AccessPolicy(AccessConfig(**config)).check_body(path, headers)

    most = AccessConfig.max_tokenizer_bytes
    check(most)
    with pytest.raises(StatusError, match=f"Send it to {path} in parts") as info:
        check(most + 1)
    assert info.value.status == 413
    with pytest.raises(StatusError, match="Raise --max-body"):
        check(1001, max_body_bytes=1000)
