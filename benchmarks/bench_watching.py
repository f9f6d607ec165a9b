"""The decode step of eight streams while the page, Prometheus and a reader of events watch the server, beside the same unwatched.

The server is a process of its own. Watched and unwatched turns alternate while the same streams run. A step is the time between
two tokens of a stream as its client sees it; the processor time of the server for each token counts all its threads. The
watchers send what a browser with the page open sends, and scrape the metrics every three seconds instead of every ten.
"""

from __future__ import annotations

import http.client
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from agents_server import Server
from bench_interference import STREAMS, Stream
from bench_server import make_model
from measure import options, report

# What the page asks for while requests run, and how often, in seconds.
OFTEN = ("/v1/cache/map", "/v1/cache")
SELDOM = ("/v1/agents", "/admin/models", "/v1/cache/explain", "/v1/cache/hour", "/health")
PAGE = ((OFTEN, 0.5), (SELDOM, 0.7))
PROMETHEUS = ((("/metrics",), 3.0),)
CASES = {"events and metrics": PROMETHEUS, "events, metrics and the page": (*PAGE, *PROMETHEUS)}
TICKS = os.sysconf("SC_CLK_TCK")


class Watchers:
    """What watches a server, from start() to stop(): a reader of events, and threads that ask for `paths` every so many seconds.

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
        self._threads = [threading.Thread(target=self._ask, args=each, daemon=True) for each in self._paths]
        self._stream = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        self._stream.request("GET", "/v1/cache/events")
        self._threads.append(threading.Thread(target=self._read, args=[self._stream.getresponse()], daemon=True))
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
        while line := response.readline():
            self.counts["events"] += line.startswith(b"event: ")


def processor_seconds(pid: int) -> float:
    """What a process has used until now, its threads together."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def turn(server: Server, streams: list[Stream], watchers: Watchers | None, seconds: float) -> dict[str, float]:
    """The median step and the processor time for each token, in ms, of some seconds."""
    if watchers is not None:
        watchers.start()
    before, used = [len(stream.gaps) for stream in streams], processor_seconds(server.pid)
    time.sleep(seconds)
    used = processor_seconds(server.pid) - used
    gaps = [gap for stream, start in zip(streams, before, strict=True) for gap in stream.gaps[start:]]
    if watchers is not None:
        watchers.stop()
    return {"step": statistics.median(gaps) * 1000, "processor": used / len(gaps) * 1000, "tokens": len(gaps)}


def begin(server: Server) -> list[Stream]:
    """Streams that outlast the benchmark."""
    streams = [Stream(server.port, number, 40_000) for number in range(STREAMS)]
    for stream in streams:
        stream.start()
    for stream in streams:
        stream.started.wait()
        stream.watched = True
    return streams


def run(server: Server, streams: list[Stream], watchers: Watchers, turns: int, seconds: float) -> dict[str, Any]:
    """Figures of `turns` watched and unwatched turns, and the medians of the ratios of neighbours."""
    found: dict[str, list[dict[str, float]]] = {"watched": [], "unwatched": []}
    turn(server, streams, watchers, seconds)
    for number in range(turns):
        for name in ("watched", "unwatched") if number % 2 else ("unwatched", "watched"):
            found[name].append(turn(server, streams, watchers if name == "watched" else None, seconds))
    pairs = list(zip(found["watched"], found["unwatched"], strict=True))
    figures: dict[str, Any] = {}
    for what in ("step", "processor"):
        for name, readings in found.items():
            figures[f"{what}_{name}_ms"] = round(statistics.median(reading[what] for reading in readings), 3)
        figures[f"{what}_ratio"] = round(statistics.median(on[what] / off[what] for on, off in pairs), 4)
    return {**figures, "tokens": sum(int(on["tokens"] + off["tokens"]) for on, off in pairs), **watchers.counts}


def main() -> None:
    args = options(__doc__ or "")
    turns, seconds = (2, 4.0) if args.quick else (20, 4.0)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        make_model(model)
        with Server(model, Path(folder), "1600MB", "--max-tokens", "40000") as server:
            pinned = server.pin()
            streams = begin(server)
            for name, paths in CASES.items():
                figures = run(server, streams, Watchers(server.port, paths), turns, seconds)
                report(args, "watching", name, streams=STREAMS, **figures, turns=turns, pinned=pinned)
            # The streams go on; nobody needs the rest of them.
            os.kill(server.pid, 9)


if __name__ == "__main__":
    main()
