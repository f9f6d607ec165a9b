"""Prompts in worker processes: the same prompts as mlx-lm's, bounds that hold, and nobody who
waits for another's job.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from functools import lru_cache
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mlx_lm.tokenizer_utils import load as load_tokenizer
from models import save_model

from mlx_blockpool.config import PromptConfig
from mlx_blockpool.errors import PromptError, RequestTooLargeError, UnavailableError
from mlx_blockpool.server import preparation
from mlx_blockpool.server.bodies import InvalidRequestError
from mlx_blockpool.server.preparation import KeyedLock
from mlx_blockpool.server.prompts import worker
from mlx_blockpool.server.prompts import workers as workers_module
from mlx_blockpool.server.prompts.job import (
    OutOfTimeError,
    PreparedImages,
    PreparedPrompt,
    PromptJob,
    TokenizerSource,
)
from mlx_blockpool.server.prompts.workers import (
    ForkServer,
    Lane,
    PromptWorker,
    PromptWorkers,
    packed,
)
from mlx_blockpool.server.sequential import tokenized
from mlx_blockpool.server.validation import Switches, check_template_options
from server.processes import needs_proc
from server.serving import at_once, blockpool_server

HELLO = [{"role": "user", "content": "Hello"}]
# One token a character, and one for each <|im_start|> and <|im_end|>.
HELLO_TOKENS = len("<user.Hello>.<assistant.")
# Runs for ever, within the limits of jinja's sandbox.
LOOPS = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor "
    "%}{% endfor %}{% endfor %}"
)
# A process that does not exist.
NOBODY = 1 << 30
WIDE = (
    "{{ '%999999999s' % 'x' }}{{ '%999999999s' % 'x' }}{{ '%999999999s' % 'x' }}{{ '%999999999s' "
    "% 'x' }}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture
def workers() -> Any:
    started = PromptWorkers(PromptConfig(small_seconds=0.2, seconds=0.4, memory_bytes=1 << 30))
    yield started
    started.close()


def job(folder: Path, messages: list[Any] = HELLO, **fields: Any) -> PromptJob:
    return PromptJob(TokenizerSource(str(folder), {}), "chat", messages=messages, **fields)


# -- prompts ---------------------------------------------------------------------------------------


def test_a_worker_prepares_what_mlx_lm_tokenizes(folder: Path, workers: PromptWorkers) -> None:
    messages = [{"role": "system", "content": "Be brief."}, *HELLO]
    prepared = workers.prepare(job(folder, [dict(m) for m in messages]))
    tokenizer = load_tokenizer(folder)
    assert prepared.tokens == tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert tokenized(prepared)[1] == [
        prepared.tokens[: prepared.segments[0]],
        prepared.tokens[prepared.segments[0] :],
    ]
    assert prepared.types == ["system", "user"]


def test_a_tokenizer_is_loaded_before_the_first_prompt_asks_for_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads, load, config = [], worker.load_tokenizer_of, PromptConfig()
    monkeypatch.setattr(
        worker, "load_tokenizer_of", lambda source: loads.append(source.folder) or load(source)
    )
    renderers = lru_cache(1)(worker.renderer_of)
    assert worker._result(renderers, config, 20, job(folder).source) is None
    assert loads == [str(folder)]
    prepared = worker._result(renderers, config, 20, job(folder))
    assert isinstance(prepared, PreparedPrompt)
    assert len(prepared.tokens) == HELLO_TOKENS
    assert loads == [str(folder)]


def test_a_server_has_its_tokenizer_loaded_beside_the_model(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: Queue[str] = Queue()
    monkeypatch.setattr(PromptWorkers, "load", lambda self, source: asked.put(source.folder))
    with blockpool_server(folder) as client:
        assert asked.get(timeout=60) == str(folder)
        assert client.chat(HELLO, max_tokens=2)["choices"]


def test_a_prompt_that_is_too_large_for_the_pool_comes_back_with_its_figures(
    folder: Path, workers: PromptWorkers
) -> None:
    with pytest.raises(RequestTooLargeError) as raised:
        workers.prepare(job(folder, capacity=20))
    assert (raised.value.needed, raised.value.capacity) == (HELLO_TOKENS + 1, 20)


def test_segments_that_overlap_are_those_of_mlx_lm() -> None:
    prompt = PreparedPrompt([1, 2, 3, 4], [3, 2], ["system", "assistant"], "reasoning")
    assert tokenized(prompt)[1] == [[1, 2, 3], [3, 4]]


def test_a_tokenizer_whose_files_have_changed_is_loaded_anew(
    tmp_path: Path, workers: PromptWorkers
) -> None:
    model = save_model(tmp_path / "model", "llama")
    before = workers.prepare(job(model)).tokens
    config = model / "tokenizer_config.json"
    written = json.loads(config.read_text())
    config.write_text(
        json.dumps({**written, "chat_template": "another " + written["chat_template"]})
    )
    tokenizer = load_tokenizer(model)
    assert tokenizer.decode(workers.prepare(job(model)).tokens) == "another " + tokenizer.decode(
        before
    )


def test_a_template_that_refuses_says_why(folder: Path, workers: PromptWorkers) -> None:
    with pytest.raises(PromptError, match="no chats today"):
        workers.prepare(
            job(folder, options={"chat_template": "{{ raise_exception('no chats today') }}"})
        )


# -- bounds ----------------------------------------------------------------------------------------


def test_a_prompt_that_takes_too_long_is_refused_and_the_next_one_rendered(
    folder: Path, workers: PromptWorkers
) -> None:
    with pytest.raises(PromptError, match=r"takes more than 0.4 seconds"):
        workers.prepare(job(folder, options={"chat_template": LOOPS}))
    assert workers.counts["slow"] == 2
    assert workers.prepare(job(folder)).tokens


def test_a_prompt_that_takes_too_much_memory_is_refused(folder: Path) -> None:
    workers = PromptWorkers(PromptConfig(small_seconds=60, memory_bytes=1 << 28))
    with pytest.raises(PromptError, match=r"more than .* of memory"):
        workers.prepare(job(folder, options={"chat_template": WIDE}))
    assert workers.prepare(job(folder)).tokens
    workers.close()


def test_a_worker_that_was_ended_is_replaced(folder: Path, workers: PromptWorkers) -> None:
    first = workers.prepare(job(folder)).tokens
    (worker,) = workers._small.workers
    ended = worker._pid
    assert ended is not None
    os.kill(ended, signal.SIGKILL)
    assert workers.prepare(job(folder)).tokens == first
    assert worker._pid != ended


def test_a_worker_that_is_worn_out_takes_no_further_job(folder: Path) -> None:
    workers = PromptWorkers(PromptConfig(small_seconds=60, memory_bytes=1 << 29))
    (worker,) = workers._small.workers
    try:
        wide = "{% set wide = '%100000000s' % 'x' %}hello"
        assert workers.prepare(job(folder, options={"chat_template": wide})).tokens
        worn = worker._pid
        assert workers.prepare(job(folder)).tokens
        fresh = worker._pid
        assert workers.prepare(job(folder)).tokens
        assert (worker._pid, workers.counts["slow"]) == (fresh, 0)
        assert fresh != worn
    finally:
        workers.close()


def test_small_prompts_pass_one_that_takes_its_time(folder: Path) -> None:
    workers = PromptWorkers(PromptConfig(small_seconds=0.1, seconds=60, large_workers=1))
    failed: list[str] = []

    def loop() -> None:
        try:
            workers.prepare(job(folder, options={"chat_template": LOOPS}))
        except (PromptError, RuntimeError) as error:
            failed.append(str(error))

    slow = threading.Thread(target=loop)
    slow.start()
    try:
        for _ in range(3):
            assert workers.prepare(job(folder)).tokens
        assert not failed
    finally:
        workers.close()
        slow.join()
    assert failed == ["The server is shutting down."]


@pytest.mark.parametrize("limit", ["time", "memory"])
def test_the_result_of_a_job_that_was_ended_is_not_that_of_the_next_one(
    monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    """A job that ends just before its process is killed has sent what nobody waits for."""
    prompt_worker, config = PromptWorker(), PromptConfig(load_seconds=0 if limit == "time" else 60)
    prompt_worker._connection, theirs = Pipe()
    prompt_worker._pid = NOBODY
    monkeypatch.setattr(
        workers_module, "resident_bytes", lambda _: 0 if limit == "time" else 1 << 60
    )
    monkeypatch.setattr(prompt_worker, "kill", lambda: theirs.send(PreparedPrompt([1, 2, 3])))
    with pytest.raises(OutOfTimeError if limit == "time" else PromptError):
        prompt_worker.run(packed(b"[1]"), 0 if limit == "time" else 60, config)
    monkeypatch.undo()
    try:
        assert prompt_worker.run(packed(b"[1]"), 60, PromptConfig()) is None
    finally:
        prompt_worker.close()
        theirs.close()


def test_images_come_back_through_a_workers_pipe_whole() -> None:
    """They are larger than any pipe's buffer."""
    pixels = [
        np.arange(3 << 20, dtype=np.float32).reshape(3, 1024, 1024),
        np.arange(100, 104, dtype=np.uint8).reshape(1, 2, 2),
    ]
    sent = PreparedPrompt([1, 2, 3], images=PreparedImages(pixels, [1, 2], [1, -(2**59), 3]))
    prompt_worker = PromptWorker()
    prompt_worker._connection, theirs = Pipe()
    prompt_worker._pid = NOBODY

    def serve() -> None:
        theirs.recv()
        assert theirs.recv() == b"[1]"
        theirs.send(sent)

    thread = threading.Thread(target=serve)
    thread.start()
    found = prompt_worker.run(packed(b"[1]"), 60, PromptConfig())
    thread.join()
    prompt_worker.close()
    theirs.close()
    assert isinstance(found, PreparedPrompt)
    assert found.images is not None
    for ours, original in zip(found.images.pixels, pixels, strict=True):
        assert ours.dtype == original.dtype
        assert np.array_equal(ours, original)
    assert (found.tokens, found.images.starts, found.images.cache_key) == (
        [1, 2, 3],
        [1, 2],
        [1, -(2**59), 3],
    )


def test_a_worker_that_is_closed_before_it_has_started_takes_no_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompt_worker = PromptWorker()

    def connected(handle: int) -> Connection:
        prompt_worker.close()
        return Connection(handle)

    monkeypatch.setattr(workers_module, "Connection", connected)
    with pytest.raises(UnavailableError, match="shutting down"):
        prompt_worker.run(packed(b"[1]"), 60, PromptConfig())
    assert prompt_worker._connection is None, "its process ends with its connection"


def test_a_job_whose_worker_is_closed_during_its_second_attempt_is_told_that_the_server_stops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompt_worker, attempts = PromptWorker(), []

    def result(*_: Any) -> None:
        attempts.append("attempt")
        if len(attempts) == 2:
            prompt_worker.close()
        raise EOFError

    monkeypatch.setattr(prompt_worker, "_result", result)
    with pytest.raises(UnavailableError, match="shutting down"):
        prompt_worker.run(packed(b"[1]"), 60, PromptConfig())
    assert len(attempts) == 2


def test_a_fork_server_is_replaced_by_one_thread_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    class Watched(ForkServer):
        def __setattr__(self, name: str, value: Any) -> None:
            assert name != "_control" or not hasattr(self, name) or self._changing.locked()
            super().__setattr__(name, value)

    started: list[socket.socket] = []

    def start(_: str) -> socket.socket:
        ours, theirs = socket.socketpair()
        started.append(theirs)
        if len(started) == 1:
            # It was ended from outside.
            theirs.close()
        return ours

    monkeypatch.setattr(workers_module, "_start", start)
    fork_server = Watched()
    connection = fork_server.connect()
    assert len(started) == 2
    _, (handle,), _, _ = socket.recv_fds(started[1], 1, 1)
    with connection, Connection(handle) as worker_end:
        worker_end.send("hello")
        assert connection.recv() == "hello"
    assert fork_server._control is not None
    fork_server._control.close()
    started[1].close()


def test_a_closed_worker_takes_no_job(folder: Path) -> None:
    lane = Lane(1, 600.0, PromptConfig())
    lane.run(packed(job(folder).source))
    lane.close()
    with pytest.raises(UnavailableError, match="shutting down"):
        lane.run(packed(job(folder)))


@needs_proc
def test_workers_have_none_of_the_servers_files_and_end_with_it(folder: Path) -> None:
    code = f"""
import os, signal
from pathlib import Path
from mlx_blockpool.config import PromptConfig
from mlx_blockpool.server.prompts.job import PromptJob, TokenizerSource
from mlx_blockpool.server.prompts.workers import PromptWorkers

def prepared():
    workers = PromptWorkers(PromptConfig())
    messages = [{{"role": "user", "content": "x"}}]
    job = PromptJob(TokenizerSource({str(folder)!r}, {{}}), "chat", messages=messages)
    return workers, len(workers.prepare(job).tokens)

held = open("/etc/hosts")
workers, before = prepared()
proc = Path(f"/proc/{{workers._small.workers[0]._pid}}")
parent = Path("/proc") / proc.joinpath("stat").read_text().rpartition(")")[2].split()[1]
files = [
    {{fd.readlink().as_posix() for fd in each.joinpath("fd").iterdir() if int(fd.name) > 2}}
    for each in (proc, parent)
]
os.kill(int(parent.name), signal.SIGKILL)
others, after = prepared()
are_sockets = [all(name.startswith("socket:") for name in names) for names in files]
print(are_sockets, after == before, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    # The workers have our pipe as their own output: it is at its end when the last of them has
    # ended, or the time runs out.
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert (ended.returncode, ended.stdout) == (-signal.SIGKILL, "[True, True] True\n"), (
        ended.stderr
    )


# -- what a request may change ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "place"),
    [
        ({"chat_template": "x"}, "chat_template_kwargs.chat_template"),
        ({"padding": "max_length"}, "chat_template_kwargs.padding"),
        ({"max_length": 10**9}, "chat_template_kwargs.max_length"),
        ({"tokenize": False}, "chat_template_kwargs.tokenize"),
        ({"enable_thinking": 1}, "chat_template_kwargs.enable_thinking"),
        ({"thinking_budget": True}, "chat_template_kwargs.thinking_budget"),
        ({"thinking_budget": 10**400}, "chat_template_kwargs.thinking_budget"),
        ({"reasoning_effort": "x" * 5000}, "chat_template_kwargs.reasoning_effort"),
        ({"thinking": 1}, "chat_template_kwargs.thinking"),
    ],
)
def test_what_requests_may_not_give_to_templates(options: dict[str, Any], place: str) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        check_template_options(options, ())
    assert raised.value.place == place
    check_template_options(options, None)
    check_template_options(options, tuple(options))


def test_known_switches_are_given_to_templates() -> None:
    values = {
        "enable_thinking": True,
        "thinking": "on",
        "reasoning_effort": "high",
        "thinking_budget": 5,
        "documents": [{}],
    }
    check_template_options({**values, "controls": {"a": 1}}, ())
    check_template_options({"thinking": False}, ())
    check_template_options(dict.fromkeys(Switches.model_fields), ())
    check_template_options(None, ())


def test_a_request_with_a_template_of_its_own_is_refused_unless_the_server_allows_it(
    folder: Path,
) -> None:
    body = {
        "messages": HELLO,
        "max_tokens": 2,
        "chat_template_kwargs": {"chat_template": "{{ messages[0].content }}"},
    }
    with blockpool_server(folder) as client:
        status, answer = client.send("/v1/chat/completions", body)
        assert status == 400
        assert "chat_template_kwargs.chat_template" in answer["error"]["message"]
        assert "--allow-template-kwargs chat_template" in answer["error"]["message"]
    with blockpool_server(folder, "--allow-template-kwargs", "chat_template") as client:
        status, answer = client.send("/v1/chat/completions", body)
        assert (status, answer["usage"]["prompt_tokens"]) == (200, len("Hello"))
        # What loops for ever is one client's affair.
        client.generator.prompts.config = PromptConfig(seconds=0.2, template_kwargs=None)
        client.generator.prompts._small.seconds = client.generator.prompts._large.seconds = 0.2
        stuck = {**body, "chat_template_kwargs": {"chat_template": LOOPS}}
        answers = at_once(
            [
                lambda: client.send("/v1/chat/completions", stuck),
                lambda: client.chat(HELLO, max_tokens=2),
            ]
        )
        assert answers[0][0] == 400
        assert answers[1]["usage"]["prompt_tokens"] == HELLO_TOKENS
        client.settle()


# -- the generator ---------------------------------------------------------------------------------


def test_the_generation_thread_tokenizes_nothing(folder: Path) -> None:
    with blockpool_server(folder) as client:
        client.generator.wait_until_loaded()
        before = client.generator.prompts.counts["prompts"]
        (served,) = client.generator.registry.loaded.values()
        tokenizer = served.provider.tokenizer
        called: list[str] = []
        tokenizer._tokenizer.apply_chat_template = lambda *_, **__: called.append("rendered")
        client.chat(HELLO, max_tokens=2)
        status, answer = client.send("/v1/messages/count_tokens", {"messages": HELLO})
        assert (status, answer["input_tokens"]) == (200, HELLO_TOKENS)
        assert (client.generator.prompts.counts["prompts"], called) == (before + 2, [])


def test_requests_of_an_agent_keep_their_order() -> None:
    order, went = KeyedLock(), []
    inside, go_on = threading.Event(), threading.Event()

    def first() -> None:
        with order.hold("ann"):
            inside.set()
            go_on.wait()
            went.append("first")

    def second() -> None:
        with order.hold("ann"):
            went.append("second")

    threads = [threading.Thread(target=first)]
    threads[0].start()
    inside.wait()
    threads.append(threading.Thread(target=second))
    threads[1].start()
    with order.hold("bob"), order.hold(None):
        went.append("others")
    go_on.set()
    for thread in threads:
        thread.join()
    assert went == ["others", "first", "second"]
    assert not order._last


def test_one_that_takes_turn_after_turn_passes_no_one_who_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits = threading.Event()

    class Watched(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.set()
            return super().wait(timeout)

    monkeypatch.setattr(
        preparation, "threading", SimpleNamespace(Event=Watched, Lock=threading.Lock)
    )
    order, went = KeyedLock(), []

    def other() -> None:
        with order.hold("text"):
            went.append("other")

    thread = threading.Thread(target=other)
    for number in range(3):
        with order.hold("text"):
            went.append(str(number))
            if number == 0:
                thread.start()
                waits.wait()
    thread.join()
    assert went == ["0", "other", "1", "2"]
