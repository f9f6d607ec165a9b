"""Runs mlx-lm's server and ours in this process, and talks HTTP to them."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlx_lm import server
from mlx_lm.models.cache import LRUPromptCache

from mlx_blockpool.server import app, options
from mlx_blockpool.server.access import AccessPolicy
from mlx_blockpool.server.http import BlockpoolHandler
from mlx_blockpool.server.provider import BlockpoolModelProvider


class Client:
    """One running server: its generator, and requests to it."""

    def __init__(self, port: int, generator: Any) -> None:
        self.port = port
        self.generator = generator

    def send(
        self,
        path: str,
        body: Any = None,
        raw: bytes | None = None,
        headers: dict[str, str] | None = None,
    ) -> tuple[int, Any]:
        """(status, decoded JSON) of one request; POST where there is a body."""
        data = raw if raw is not None else None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, headers or {})
        try:
            with urllib.request.urlopen(request, timeout=120) as response:
                return response.status, json.loads(response.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read() or b"null")

    def chat(self, messages: list[dict[str, str]], **options: Any) -> dict[str, Any]:
        status, answer = self.send("/v1/chat/completions", {"messages": messages, **options})
        assert status == 200, answer
        return answer  # type: ignore[no-any-return]

    def capacity(self) -> int:
        """The tokens that the pool has for one request.

        Loads the model if no request has done so yet.
        """
        if self.generator.model is None:
            self.send("/v1/completions", {"prompt": "y", "max_tokens": 1})
        return self.generator.model.capacity()  # type: ignore[no-any-return]

    def settle(self) -> None:
        """Wait until the generation thread has nothing to do, then check every invariant of pool
        and trie.
        """
        generator = self.generator
        while (
            generator.requests.qsize()
            or generator._live
            or generator.registry.queue
            or generator.registry.swap
        ):
            threading.Event().wait(0.02)
        for served in generator.registry.loaded.values():
            prefix = served.prefix
            if prefix is not None:
                prefix.check()
                held = {c.group: c.held for c in prefix.pool.settle()}
                assert not any(held.values()), f"blocks still held: {held}"


def parse(arguments: list[str]) -> Any:
    """The options of our server as its main() parses them.

    A reply whose request names no limit has 512 tokens, as stock's. Nothing is measured unless the
    options say so.
    """
    for option, value in (("--max-tokens", "512"), ("--measure", "off")):
        arguments = arguments if option in arguments else [option, value, *arguments]
    return options.parse(arguments)


@contextmanager
def blockpool_server(model: Path | str, *arguments: str) -> Iterator[Client]:
    stored = [] if "--store-dir" in arguments else ["--no-store"]
    args = parse(["--model", str(model), *stored, *arguments])
    with listening(app.make_generator(BlockpoolModelProvider(args)), BlockpoolHandler) as client:
        yield client


@contextmanager
def stock_server(model: Path | str, *arguments: str) -> Iterator[Client]:
    args = parse(["--model", str(model), *arguments])
    with listening(
        server.ResponseGenerator(server.ModelProvider(args), LRUPromptCache(10)), server.APIHandler
    ) as client:
        yield client


@contextmanager
def listening(generator: Any, handler: Any) -> Iterator[Client]:
    http = app.BlockpoolHTTPServer(
        ("127.0.0.1", 0), lambda *args: handler(generator, *args, system_fingerprint="test")
    )
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield Client(http.server_address[1], generator)
    finally:
        http.shutdown()
        thread.join()
        http.server_close()
        generator.stop_and_join()


def text_of(answer: Any) -> Any:
    """What the reply of a chat says."""
    return answer["choices"][0]["message"]["content"]


def cached_tokens(usage: Any) -> int:
    """The tokens of a prompt that were known."""
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def until(holds: Callable[[], Any]) -> None:
    """Wait until it holds, for as long as the busiest machine may take."""
    end = time.monotonic() + 300
    while not holds():
        if time.monotonic() > end:
            raise TimeoutError("what the test waits for has not come in 300 seconds")
        threading.Event().wait(0.01)


def at_once(jobs: list[Any]) -> list[Any]:
    """Run all jobs at the same time; their results in order."""
    with ThreadPoolExecutor(len(jobs)) as pool:
        return [future.result() for future in [pool.submit(job) for job in jobs]]


@contextmanager
def with_access(server: Client, **changes: Any) -> Iterator[AccessPolicy]:
    """The same server with another access policy."""
    before = server.generator.access
    server.generator.access = AccessPolicy(replace(before.config, **changes))
    try:
        yield server.generator.access
    finally:
        server.generator.access = before
