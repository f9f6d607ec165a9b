"""Prompts in worker processes: the same prompts as mlx-lm's, bounds that hold, and nobody who waits for another's job."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mlx_lm.tokenizer_utils import load as load_tokenizer
from models import save_model

from mlx_blockpool.config import PromptConfig
from mlx_blockpool.errors import PromptError, RequestTooLargeError
from mlx_blockpool.server.bodies import InvalidRequestError
from mlx_blockpool.server.prompts import preparation, worker
from mlx_blockpool.server.prompts.job import (
    Limits,
    PreparedImages,
    PreparedPrompt,
    PromptJob,
    TokenizerSource,
    pack_error,
    unpack,
)
from mlx_blockpool.server.prompts.preparation import Turns
from mlx_blockpool.server.prompts.renderer import PromptRenderer, longest_token
from mlx_blockpool.server.prompts.template_options import Switches, check_template_options
from mlx_blockpool.server.prompts.workers import ForkServer, Lane, PromptWorkers, WorkerEndedError
from mlx_blockpool.server.sequential import tokenized
from server.processes import needs_proc
from server.serving import at_once, blockpool_server

HELLO = [{"role": "user", "content": "Hello"}]
# One token a character, and one for each <|im_start|> and <|im_end|>.
HELLO_TOKENS = len("<user.Hello>.<assistant.")
# Runs for ever, within the limits of jinja's sandbox.
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}"
WIDE = "{{ '%999999999s' % 'x' }}{{ '%999999999s' % 'x' }}{{ '%999999999s' % 'x' }}{{ '%999999999s' % 'x' }}"


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


# -- prompts -----------------------------------------------------------------------------------------------------------


def test_a_worker_prepares_what_mlx_lm_tokenizes(folder: Path, workers: PromptWorkers) -> None:
    messages = [{"role": "system", "content": "Be brief."}, *HELLO]
    prepared = workers.prepare(job(folder, [dict(m) for m in messages]))
    tokenizer = load_tokenizer(folder)
    assert prepared.tokens == tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert tokenized(prepared)[1] == [prepared.tokens[: prepared.segments[0]], prepared.tokens[prepared.segments[0] :]]
    assert prepared.types == ["system", "user"]


def test_what_is_packed_comes_back() -> None:
    prompt = PreparedPrompt([1, 2, 3], [1, 2], ["a", "b"], "normal", [(2, 300)], [(1, "system")], [((7,), "x")], ("<", ">"), 9)
    assert unpack(prompt.pack()) == prompt


def test_images_that_are_packed_come_back() -> None:
    pixels = [np.arange(6, dtype=np.float32).reshape(1, 2, 3), np.arange(100, 104, dtype=np.uint8).reshape(1, 2, 2)]
    found = unpack(PreparedPrompt([1, 2, 3], images=PreparedImages(pixels, [1, 2], [1, -(2**59), 3])).pack())
    assert found.images is not None
    for ours, theirs in zip(found.images.pixels, pixels, strict=True):
        assert (ours.dtype, ours.tolist()) == (theirs.dtype, theirs.tolist())
    assert (found.tokens, found.images.starts, found.images.cache_key) == ([1, 2, 3], [1, 2], [1, -(2**59), 3])


def test_a_tokenizer_is_loaded_before_the_first_prompt_asks_for_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loads, load, limits, tokenizers = [], worker.load_tokenizer_of, Limits(60, 20, 3 << 30), worker.Tokenizers()
    monkeypatch.setattr(worker, "load_tokenizer_of", lambda source: loads.append(source.folder) or load(source))
    assert unpack(worker._result(tokenizers, limits, job(folder).source)) == PreparedPrompt()
    assert loads == [str(folder)]
    assert len(unpack(worker._result(tokenizers, limits, job(folder))).tokens) == HELLO_TOKENS
    assert loads == [str(folder)]


def test_a_server_has_its_tokenizer_loaded_beside_the_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: Queue[str] = Queue()
    monkeypatch.setattr(PromptWorkers, "load", lambda self, source: asked.put(source.folder))
    with blockpool_server(folder) as client:
        assert asked.get(timeout=60) == str(folder)
        assert client.chat(HELLO, max_tokens=2)["choices"]


@pytest.mark.parametrize("error", [ValueError("no such role"), RequestTooLargeError(30, 20)])
def test_an_error_comes_back(error: Exception) -> None:
    with pytest.raises(RequestTooLargeError if isinstance(error, RequestTooLargeError) else PromptError) as raised:
        unpack(pack_error(error))
    assert str(raised.value) == str(error)


def test_segments_that_overlap_are_those_of_mlx_lm() -> None:
    prompt = PreparedPrompt([1, 2, 3, 4], [3, 2], ["system", "assistant"], "reasoning")
    assert tokenized(prompt)[1] == [[1, 2, 3], [3, 4]]


def test_a_tokenizer_whose_files_have_changed_is_loaded_anew(tmp_path: Path, workers: PromptWorkers) -> None:
    model = save_model(tmp_path / "model", "llama")
    before = workers.prepare(job(model)).tokens
    config = model / "tokenizer_config.json"
    written = json.loads(config.read_text())
    config.write_text(json.dumps({**written, "chat_template": "another " + written["chat_template"]}))
    tokenizer = load_tokenizer(model)
    assert tokenizer.decode(workers.prepare(job(model)).tokens) == "another " + tokenizer.decode(before)


def test_a_template_that_refuses_says_why(folder: Path, workers: PromptWorkers) -> None:
    with pytest.raises(PromptError, match="no chats today"):
        workers.prepare(job(folder, options={"chat_template": "{{ raise_exception('no chats today') }}"}))


def test_what_is_too_long_is_refused_by_its_bytes(folder: Path) -> None:
    renderer = PromptRenderer(load_tokenizer(folder))
    assert renderer.longest_token == len("<|im_start|>")
    counted: list[str] = []
    renderer._tokenize = lambda asked: counted.append("tokenized")  # type: ignore[method-assign]
    with pytest.raises(RequestTooLargeError, match="pool holds at most 100 of one"):
        renderer.render(job(folder, [{"role": "user", "content": "x" * 1200}], capacity=100))
    assert not counted


def test_a_tokenizer_with_an_unknown_token_has_no_longest(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", "llama")
    content = json.loads((model / "tokenizer.json").read_text())
    content["pre_tokenizer"] = {"type": "Whitespace"}
    (model / "tokenizer.json").write_text(json.dumps(content))
    assert longest_token(load_tokenizer(model)) is None


# -- bounds ------------------------------------------------------------------------------------------------------------


def test_a_prompt_that_takes_too_long_is_refused_and_the_next_one_rendered(folder: Path, workers: PromptWorkers) -> None:
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
    (worker,) = workers._small._idle
    assert worker._pid is not None
    os.kill(worker._pid, signal.SIGKILL)
    assert workers.prepare(job(folder)).tokens == first
    assert worker not in workers._small._idle


def test_a_worker_that_is_worn_out_takes_no_further_job(folder: Path) -> None:
    workers = PromptWorkers(PromptConfig(small_seconds=60, memory_bytes=1 << 29))
    try:
        wide = "{% set wide = '%100000000s' % 'x' %}hello"
        assert workers.prepare(job(folder, options={"chat_template": wide})).tokens
        assert (workers._small._idle, workers.counts["slow"]) == ([], 0)
        assert workers.prepare(job(folder)).tokens
        assert len(workers._small._idle) == 1
    finally:
        workers.close()


def test_a_job_whose_worker_had_ended_gets_a_fresh_one(folder: Path) -> None:
    config = PromptConfig()
    lane = Lane(2, config.seconds, config)
    for _ in range(2):
        lane.start()
    for idle in lane._idle:
        idle.run(lane.pack(job(folder).source), 600, config.memory_bytes)
        assert idle._pid is not None
        os.kill(idle._pid, signal.SIGKILL)
    try:
        assert lane.run(lane.pack(job(folder)))
    finally:
        lane.close()


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


def test_a_worker_that_has_not_said_hello_yet_takes_no_job_once_it_was_ended(folder: Path) -> None:
    workers = PromptWorkers(PromptConfig())
    lane = Lane(1, 600.0, workers.config)
    with lane._turn(1), lane._worker([]) as worker:
        assert worker._pid is None
        lane.close()
        with pytest.raises(WorkerEndedError):
            worker.run(b"never read", 600, 1 << 30)
    with pytest.raises(RuntimeError, match="shutting down"):
        lane.run(b"")
    workers.close()


def test_a_smaller_job_passes_larger_ones_that_wait() -> None:
    lane, order = Lane(1, 1.0, PromptConfig()), []
    lane._free = 0
    sizes = [3_000_000, 2_000_000, 1000]

    def wait(size: int) -> None:
        with lane._turn(size):
            order.append(size)

    threads = [threading.Thread(target=wait, args=(size,)) for size in sizes]
    for thread in threads:
        thread.start()
    with lane._changed:
        while len(lane._waiting) < len(sizes):
            lane._changed.wait(0.01)
        lane._free = 1
        lane._changed.notify_all()
    for thread in threads:
        thread.join()
    lane.close()
    assert order == sorted(sizes)


@needs_proc
def test_workers_are_forks_of_the_server_with_none_of_its_files_and_end_with_it(folder: Path) -> None:
    code = f"""
import os, signal
from pathlib import Path
from mlx_blockpool.config import PromptConfig
from mlx_blockpool.server.prompts.job import PromptJob, TokenizerSource
from mlx_blockpool.server.prompts.workers import PromptWorkers, fork_server

def prepared():
    workers = PromptWorkers(PromptConfig())
    job = PromptJob(TokenizerSource({str(folder)!r}, {{}}), "chat", messages=[{{"role": "user", "content": "x"}}])
    return workers, len(workers.prepare(job).tokens)

held = open("/etc/hosts")
fork_server().start_here()
workers, before = prepared()
proc = Path(f"/proc/{{workers._small._idle[0]._pid}}")
parent = Path("/proc") / proc.joinpath("stat").read_text().rpartition(")")[2].split()[1]
files = [{{fd.readlink().as_posix() for fd in each.joinpath("fd").iterdir() if int(fd.name) > 2}} for each in (proc, parent)]
is_fork = parent.joinpath("cmdline").read_bytes() == Path("/proc/self/cmdline").read_bytes()
os.kill(int(parent.name), signal.SIGKILL)
others, after = prepared()
print(is_fork, [all(name.startswith("socket:") for name in names) for names in files], after == before, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    # The workers have our pipe as their own output: it is at its end when the last of them has ended, or the time runs out.
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout) == (-signal.SIGKILL, "True [True, True] True\n"), ended.stderr


def test_a_process_with_threads_is_not_forked() -> None:
    ended, server = threading.Event(), ForkServer()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    server.start_here()
    ended.set()
    thread.join()
    assert server._control is None


# -- what a request may change -----------------------------------------------------------------------------------------


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
    values = {"enable_thinking": True, "thinking": "on", "reasoning_effort": "high", "thinking_budget": 5, "documents": [{}]}
    check_template_options({**values, "controls": {"a": 1}}, ())
    check_template_options({"thinking": False}, ())
    check_template_options(dict.fromkeys(Switches.model_fields), ())
    check_template_options(None, ())


def test_a_request_with_a_template_of_its_own_is_refused_unless_the_server_allows_it(folder: Path) -> None:
    body = {"messages": HELLO, "max_tokens": 2, "chat_template_kwargs": {"chat_template": "{{ messages[0].content }}"}}
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
        answers = at_once([lambda: client.send("/v1/chat/completions", stuck), lambda: client.chat(HELLO, max_tokens=2)])
        assert answers[0][0] == 400
        assert answers[1]["usage"]["prompt_tokens"] == HELLO_TOKENS
        client.settle()


# -- the generator -----------------------------------------------------------------------------------------------------


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
    order, went = Turns(), []
    inside, go_on = threading.Event(), threading.Event()

    def first() -> None:
        with order.turn("ann"):
            inside.set()
            go_on.wait()
            went.append("first")

    def second() -> None:
        with order.turn("ann"):
            went.append("second")

    threads = [threading.Thread(target=first)]
    threads[0].start()
    inside.wait()
    threads.append(threading.Thread(target=second))
    threads[1].start()
    with order.turn("bob"), order.turn(None):
        went.append("others")
    go_on.set()
    for thread in threads:
        thread.join()
    assert went == ["others", "first", "second"]
    assert not order._last


def test_one_that_takes_turn_after_turn_passes_no_one_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = threading.Event()

    class Watched(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.set()
            return super().wait(timeout)

    monkeypatch.setattr(preparation, "threading", SimpleNamespace(Event=Watched, Lock=threading.Lock))
    order, went = Turns(), []

    def other() -> None:
        with order.turn("text"):
            went.append("other")

    thread = threading.Thread(target=other)
    for number in range(3):
        with order.turn("text"):
            went.append(str(number))
            if number == 0:
                thread.start()
                waits.wait()
    thread.join()
    assert went == ["0", "other", "1", "2"]
