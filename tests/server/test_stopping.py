"""A server that stops answers the requests that run or wait, and logs one line for each of them."""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import threading
from pathlib import Path
from typing import Any

import pytest

from mlx_blockpool.server.bodies import UNCHECKED_BYTES
from mlx_blockpool.server.generator import STOPS
from server.serving import Client, blockpool_server, until

pytestmark = pytest.mark.server(model="endless")

CHAT = [{"role": "user", "content": "all"}]
# The endpoints that generate, and bodies that ask for a reply without an end.
BODIES: dict[str, dict[str, Any]] = {
    "/v1/messages": {"messages": CHAT, "max_tokens": 30_000},
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 30_000},
    "/v1/completions": {"prompt": "all", "max_tokens": 30_000},
    "/v1/responses": {"input": "all", "max_output_tokens": 30_000},
    "/api/chat": {"messages": CHAT, "options": {"num_predict": 30_000}},
}


class Asked(threading.Thread):
    """A client that reads all that it gets. `begun`: it has the beginning of its reply."""

    def __init__(self, client: Client, path: str, body: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self.begun = threading.Event()
        self.status, self.text = 0, ""
        self._connection = http.client.HTTPConnection("127.0.0.1", client.port, timeout=60)
        self._connection.request("POST", path, json.dumps({"model": "default_model", **body}))
        self.start()

    def run(self) -> None:
        with contextlib.closing(self._connection) as connection:
            response = connection.getresponse()
            self.status = response.status
            for line in response:
                self.text += line.decode()
                self.begun.set()


def lines_about_the_stop(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> list[str]:
    """What was logged about requests that the server has ended.

    There is no traceback, and nothing is an error.
    """
    assert "Traceback" not in capsys.readouterr().err
    for record in caplog.records:
        assert record.levelno <= logging.WARNING, record.getMessage()
        assert not record.exc_info, record.getMessage()
    return [record.getMessage() for record in caplog.records if STOPS in record.getMessage()]


def check_told(asked: list[Asked]) -> None:
    for each in asked:
        each.join(60)
        assert not each.is_alive()
        assert STOPS in each.text, each.text


def test_replies_in_progress_end_with_an_error_and_one_line_each(
    model: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO)
    with blockpool_server(model, "--pool-bytes", "60MB") as client:
        streamed = [Asked(client, path, {**body, "stream": True}) for path, body in BODIES.items()]
        whole = [Asked(client, path, {**body, "stream": False}) for path, body in BODIES.items()]
        for each in streamed:
            assert each.begun.wait(60)
        until(lambda: len(client.generator._live) >= 2 * len(BODIES))
        client.generator.stop_and_join()
        check_told([*streamed, *whole])
    assert [each.status for each in streamed] == [200] * len(BODIES)
    assert [each.status for each in whole] == [503] * len(BODIES)
    assert len(lines_about_the_stop(caplog, capsys)) == 2 * len(BODIES)


def test_prompts_that_wait_for_a_worker_are_refused_with_one_line_each(
    model: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a prompt that waits to be rendered, a text to be tokenized, and a body that is checked
    before it is read.
    """
    caplog.set_level(logging.INFO)
    with blockpool_server(model, "--pool-bytes", "60MB") as client:
        prompts = client.generator.prompts
        lanes, size = (prompts._large, prompts._tokenizing[1]), prompts.config.small_bytes
        assert size < UNCHECKED_BYTES
        for lane in lanes:
            for _ in lane.workers:
                lane._idle.get()
        asked = [
            Asked(client, "/v1/completions", {"prompt": "a" * size}),
            Asked(
                client,
                "/v1/chat/completions",
                {"messages": [{"role": "user", "content": "a" * size}], "stream": True},
            ),
            Asked(client, "/tokenize", {"content": "a" * size}),
            Asked(client, "/v1/completions", {"prompt": "a" * UNCHECKED_BYTES}),
        ]
        until(lambda: sum(len(lane._idle.not_empty._waiters) for lane in lanes) >= len(asked))
        client.generator.stop_and_join()
        check_told(asked)
    assert [each.status for each in asked] == [503] * len(asked)
    assert len(lines_about_the_stop(caplog, capsys)) == len(asked)
