"""The decode step of eight streams while the page, Prometheus and a reader of events watch the
server, beside the same unwatched.

The server is a process of its own. Watched and unwatched turns alternate while the same streams
run. A step is the time between two tokens of a stream as its client sees it, and varies with all
that runs. `share` does not: it is the processor time of the server's threads that answer the
watchers, of the time that has passed, which is the most that they can take from the steps. The
watchers send what a browser with the page open sends, and scrape the metrics every three seconds
instead of every ten.
"""

from __future__ import annotations

import http.client
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from agents_server import Server
from bench_interference import STREAMS, Stream
from bench_server import make_model
from measure import options, report

# What the page asks for while requests run and none begins or ends, and how often, in seconds: the
# constants of app.js.
UNCHANGED = ("/v1/agents", "/v1/cache/explain", "/v1/cache/hour", "/admin/models")
PAGE = ((("/v1/cache/map",), 0.5), (("/v1/cache",), 0.8), (UNCHANGED, 5.0))
PROMETHEUS = ((("/metrics",), 3.0),)
CASES = {"events and metrics": PROMETHEUS, "events, metrics and the page": (*PAGE, *PROMETHEUS)}


class Watchers:
    """What watches a server, from start() to stop(): a reader of events, and threads that ask for
    `paths` every so many seconds.

    counts: responses, and events.
    """

    def __init__(self, port: int, paths: Iterable[tuple[Sequence[str], float]]) -> None:
        self._paths = paths
        self.counts = {"responses": 0, "events": 0}
        self._port = port
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._stream: http.client.HTTPConnection | None = None

    def start(self) -> None:
        self._stop.clear()
        self._threads = [
            threading.Thread(target=self._ask, args=each, daemon=True) for each in self._paths
        ]
        self._stream = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        self._stream.request("GET", "/v1/cache/events")
        self._threads.append(
            threading.Thread(target=self._read, args=[self._stream.getresponse()], daemon=True)
        )
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        assert self._stream is not None
        self._stop.set()
        self._stream.sock.shutdown(2)
        for thread in self._threads:
            thread.join()
        self._stream.close()

    def _ask(self, paths: Sequence[str], seconds: float) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        while not self._stop.wait(seconds):
            for path in paths:
                connection.request("GET", path)
                response = connection.getresponse()
                assert response.status == 200, f"{path}: {response.status}"
                response.read()
                self.counts["responses"] += 1
        connection.close()

    def _read(self, response: http.client.HTTPResponse) -> None:
        with suppress(ConnectionError):
            while line := response.readline():
                self.counts["events"] += line.startswith(b"event: ")


def threads_of(pid: int) -> dict[str, float]:
    """The processor time of each thread of a process until now, in seconds."""
    found = {}
    for path in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):
            found[path.name] = int((path / "schedstat").read_text().split()[0]) / 1e9
    return found


def turn(
    server: Server, streams: list[Stream], watchers: Watchers | None, seconds: float
) -> dict[str, float]:
    """The median step in ms, and the share of the time that the threads of the watchers have
    used.
    """
    others = threads_of(server.pid)
    if watchers is not None:
        watchers.start()
    before, start = [len(stream.gaps) for stream in streams], time.monotonic()
    time.sleep(seconds)
    passed, used = time.monotonic() - start, threads_of(server.pid)
    gaps = [
        gap for stream, first in zip(streams, before, strict=True) for gap in stream.gaps[first:]
    ]
    if watchers is not None:
        watchers.stop()
    own = sum(spent for thread, spent in used.items() if thread not in others)
    return {"step": statistics.median(gaps) * 1000, "share": own / passed, "tokens": len(gaps)}


class Endless(Stream):
    """A stream that begins again when its reply has ended."""

    def run(self) -> None:
        with suppress(OSError, http.client.HTTPException):
            while True:
                super().run()


def begin(server: Server) -> list[Stream]:
    """Streams that outlast the benchmark."""
    streams: list[Stream] = [Endless(server.port, number, 40_000) for number in range(STREAMS)]
    for stream in streams:
        stream.start()
    for stream in streams:
        stream.started.wait()
        stream.watched = True
    return streams


def run(
    server: Server, streams: list[Stream], watchers: Watchers, turns: int, seconds: float
) -> dict[str, Any]:
    """Figures of `turns` watched and unwatched turns, and the medians of the ratios of
    neighbours.
    """
    found: dict[str, list[dict[str, float]]] = {"watched": [], "unwatched": []}
    turn(server, streams, watchers, seconds)
    for number in range(turns):
        for name in ("watched", "unwatched") if number % 2 else ("unwatched", "watched"):
            found[name].append(
                turn(server, streams, watchers if name == "watched" else None, seconds)
            )
    pairs = list(zip(found["watched"], found["unwatched"], strict=True))
    steps = {name: [reading["step"] for reading in readings] for name, readings in found.items()}
    figures: dict[str, Any] = {
        f"step_{name}_ms": round(statistics.median(each), 3) for name, each in steps.items()
    }
    figures["step_ratio"] = round(
        statistics.median(on["step"] / off["step"] for on, off in pairs), 4
    )
    figures["share"] = round(statistics.median(reading["share"] for reading in found["watched"]), 5)
    return {
        **figures,
        "tokens": sum(int(on["tokens"] + off["tokens"]) for on, off in pairs),
        **watchers.counts,
    }


def main() -> None:
    args = options(__doc__ or "")
    turns, seconds = (2, 4.0) if args.quick else (12, 4.0)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        make_model(model)
        with Server(model, Path(folder), "1600MB", "--max-tokens", "40000") as server:
            pinned = server.pin()
            streams = begin(server)
            for name, paths in CASES.items():
                figures = run(server, streams, Watchers(server.port, paths), turns, seconds)
                report(
                    args, "watching", name, streams=STREAMS, **figures, turns=turns, pinned=pinned
                )
            # The streams go on; nobody needs the rest of them.
            os.kill(server.pid, 9)


if __name__ == "__main__":
    main()
