"""Two servers on one folder under load, one of which is killed: no error, no other token than
stock's, nothing torn.
"""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from models import save_model

from mlx_blockpool.cli import main
from server.processes import needs_proc, process, send, turn, written
from server.serving import at_once, cached_tokens, stock_server

AGENTS = 3
TURNS = 5
SYSTEM = "You are one of six agents on two servers, and all of them begin with this text. " * 11
# A record of llama, at most.
BLOCK_BYTES = 256 * 2 * 2 * 2 * 16 * 4 + 3000
ROOMY = 20 * 10**9


@contextmanager
def sampled(store: Path) -> Iterator[list[int]]:
    """Bytes of all records, again and again."""
    sizes: list[int] = []
    ends = threading.Event()

    def sample() -> None:
        while not ends.wait(0.01):
            total = 0
            for path in store.glob("models/*/*/*/*.safetensors"):
                with suppress(FileNotFoundError):
                    total += path.stat().st_size
            sizes.append(total)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield sizes
    finally:
        ends.set()
        thread.join()


@pytest.fixture
def talks() -> list[list[dict[str, str]]]:
    return [[{"role": "system", "content": SYSTEM}] for _ in range(2 * AGENTS)]


def all_at_once(ports: list[int], talks: list[list[dict[str, str]]]) -> list[dict[str, Any]]:
    """A turn of each agent; the first half of them at the first of two servers."""
    return at_once(
        [
            lambda a=a: turn(ports[a * len(ports) // len(talks)], talks[a], a)
            for a in range(len(talks))
        ]
    )


def dies(server: Any, talks: list[list[dict[str, str]]], port: int, agent: int) -> None:
    """A turn of an agent whose server is killed meanwhile."""
    threading.Timer(0.05, server.kill).start()
    with suppress(OSError, ValueError):
        turn(port, talks[agent], agent)


@pytest.mark.parametrize(
    ("name", "store_bytes"),
    [("llama", ROOMY), ("llama", 5 * BLOCK_BYTES), ("gemma3_text", ROOMY)],
)
@pytest.mark.thorough
@needs_proc
def test_two_servers_share_a_folder_and_one_is_killed(
    tmp_path: Path,
    talks: list[list[dict[str, str]]],
    name: str,
    store_bytes: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, store = save_model(tmp_path / name, name), tmp_path / "store"
    expected = [list(talk) for talk in talks]
    with stock_server(model) as stock:
        for _ in range(TURNS):
            all_at_once([stock.port], expected)
    options = ("--store-bytes", str(store_bytes))
    with sampled(store) as sizes, process(model, store, *options) as (second, stays):
        with process(model, store, *options) as (first, server):
            for _ in range(3):
                all_at_once([first, second], talks)
            written(first)
            at_once(
                [
                    *(lambda a=a: dies(server, talks, first, a) for a in range(AGENTS)),
                    *(lambda a=a: turn(second, talks[a], a) for a in range(AGENTS, 2 * AGENTS)),
                ]
            )
            assert server.wait(timeout=60) == -signal.SIGKILL
        with process(model, store, *options) as (again, restarted):
            usage = all_at_once([again, second], talks)
            reports = [send(port, "/v1/cache")["store"] for port in (again, second)]
            for ending in (restarted, stays):
                ending.send_signal(signal.SIGTERM)
                assert ending.wait(timeout=60) == 0
    assert [
        talk
        for talk, stock_talk in zip(talks, expected, strict=True)
        if talk != stock_talk[: len(talk)]
    ] == []
    assert {len(talk) for talk in talks[AGENTS:]} == {1 + 2 * TURNS}
    assert [
        (report["problem"], report.get("failed", 0), report.get("quarantined", 0))
        for report in reports
    ] == [(None, 0, 0)] * 2
    if store_bytes > 10**9:
        # Those that were killed go on from what was on disk.
        assert all(cached_tokens(u) >= 768 for u in usage)
    else:
        # A record is larger than what is written between two looks: one of it, one beside the look,
        # and one being replaced.
        assert max(sizes) <= store_bytes + store_bytes // 32 + 3 * BLOCK_BYTES
    status = main(["store", "scrub", "--store-dir", str(store), "--json"])
    scrubbed = json.loads(capsys.readouterr().out)
    assert scrubbed["records"] > 0
    assert scrubbed["bad"] == scrubbed["leftovers"] == scrubbed["foreign"] == []
    # Of two that make room at the same time, one may take what the other has just built on; age
    # takes the rest.
    assert status == 0 or (scrubbed["orphans"] and store_bytes != ROOMY)
