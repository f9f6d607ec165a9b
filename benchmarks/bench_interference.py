"""The longest decode step of eight streams while hostile requests arrive, beside the median step
and a quiet run.

The server is a process of its own; a step is the time between two tokens of a stream as its client
sees it. Where the system can, one core is the server process's alone, and its workers and the
clients share the others: what is longer then, the server's process did itself. The counters of the
server prove that prompts and large bodies went to its workers.
"""

from __future__ import annotations

import http.client
import json
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from agents_server import Server
from bench_server import make_model
from measure import options, report

STREAMS = 8
# A client without a pause takes the processor that others compute on; what one request holds up is
# seen with one.
PAUSE_SECONDS = 0.25
USER = "user"


def chat(text: str, **fields: Any) -> bytes:
    return json.dumps(
        {"messages": [{"role": USER, "content": text}], "max_tokens": 4, **fields}
    ).encode()


def cases(scale: int) -> dict[str, tuple[str, bytes]]:
    """(path, body) of what arrives, by name."""
    megabyte = scale * 100_000
    completions, counting = "/v1/chat/completions", "/v1/messages/count_tokens"
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    return {
        "quiet": ("", b""),
        "a template that loops": (
            completions,
            chat("x", chat_template_kwargs={"chat_template": loop}),
        ),
        "a padded prompt": (
            completions,
            chat("x", chat_template_kwargs={"padding": "max_length", "max_length": 10**9}),
        ),
        "a stop string of a megabyte": (completions, chat("x", stop="x" * megabyte)),
        "10,000 stop strings": (completions, chat("x", stop=[f"stop {i}" for i in range(10_000)])),
        "a message of five megabytes": (completions, chat("word " * megabyte)),
        "tokens of five megabytes": (counting, chat("word " * megabyte)),
        "64k tokens counted": (counting, chat("word " * 65_536)),
        "64k tokens, too long for the model": (completions, chat("word " * 65_536)),
        "a body of numbers": (completions, b'{"messages": [' + b"1," * (7 * megabyte) + b"1]}"),
        "a body of empty lists": (
            completions,
            b'{"messages": [' + b"[]," * (5 * megabyte) + b"1]}",
        ),
        "an integer of a megabyte": (completions, b'{"max_tokens": ' + b"1" * megabyte + b"}"),
        "a nested body": (completions, b"[" * megabyte),
        "a date that is none": (completions, chat("date" + " " * (megabyte // 4) + "x")),
        "a system prompt of lines": (
            completions,
            json.dumps(
                {"messages": [{"role": "system", "content": "x\n" * megabyte}], "max_tokens": 4}
            ).encode(),
        ),
        "10,000 messages": (
            completions,
            json.dumps(
                {"messages": [{"role": USER, "content": "x"}] * 10_000, "max_tokens": 4}
            ).encode(),
        ),
    }


class Stream(threading.Thread):
    """One reply that is read token by token; `gaps` are the seconds between them."""

    def __init__(self, port: int, number: int, tokens: int) -> None:
        super().__init__(daemon=True)
        self.gaps: list[float] = []
        # Whether gaps count: the first steps of a stream stand beside the prefill of others.
        self.watched = False
        self.started = threading.Event()
        self._port, self._tokens = port, tokens
        self._body = chat(
            f"Stream {number} counts.",
            stream=True,
            max_tokens=tokens,
            stop=None,
            temperature=1.0,
            seed=number,
        )

    def run(self) -> None:
        body = {**json.loads(self._body), "max_tokens": self._tokens, "logit_bias": {}}
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=600)
        connection.request("POST", "/v1/chat/completions", json.dumps(body))
        response, last = connection.getresponse(), 0.0
        while line := response.readline():
            if line.startswith(b"data: {"):
                now = time.perf_counter()
                if last and self.watched:
                    self.gaps.append(now - last)
                last = now
                self.started.set()
        self.started.set()


def attack(port: int, path: str, body: bytes, stop: threading.Event) -> list[int]:
    """Send a request every PAUSE_SECONDS, and read its answers; their statuses."""
    statuses = []
    while not stop.wait(PAUSE_SECONDS):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
        try:
            connection.request("POST", path, body)
            statuses.append(connection.getresponse().status)
        except OSError:
            statuses.append(0)
        finally:
            connection.close()
    return statuses


def run(server: Server, path: str, body: bytes, tokens: int, attackers: int) -> dict[str, Any]:
    """Steps of the streams, in ms, while `attackers` clients ask."""
    streams = [Stream(server.port, number, tokens) for number in range(STREAMS)]
    for stream in streams:
        stream.start()
    for stream in streams:
        stream.started.wait()
    for stream in streams:
        stream.watched = True
    stop, statuses = threading.Event(), []
    threads = [
        threading.Thread(target=lambda: statuses.extend(attack(server.port, path, body, stop)))
        for _ in range(attackers if path else 0)
    ]
    for thread in threads:
        thread.start()
    for stream in streams:
        stream.join()
    stop.set()
    for thread in threads:
        thread.join()
    gaps = sorted(gap * 1000 for stream in streams for gap in stream.gaps)
    return {
        "median_ms": round(statistics.median(gaps), 2),
        "p99_ms": round(gaps[int(len(gaps) * 0.99)], 2),
        "longest_ms": round(gaps[-1], 2),
        "tokens": len(gaps),
        "requests": len(statuses),
        "statuses": sorted(set(statuses)),
    }


def main() -> None:
    args = options(__doc__ or "")
    scale, tokens, attackers = (1, 60, 1) if args.quick else (10, 300, 1)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        make_model(model)
        with Server(model, Path(folder), "400MB") as server:
            pinned = server.pin()
            for name, (path, body) in cases(scale).items():
                figures = run(server, path, body, tokens, attackers)
                report(
                    args,
                    "interference",
                    name,
                    **figures,
                    pinned=pinned,
                    prompts=server.get("/v1/cache").get("prompts"),
                )


if __name__ == "__main__":
    main()
