"""Ten agents work while everything else goes wrong: kills, a damaged store, bad requests, bursts,
slow readers, foreign pages.

Run it with python -m benchmarks.bench_hostile, from the repository's folder. The agents are those
of bench_agents, with its
checks: no reply with another's letters, every prompt counted right, replies equal to mlx-lm's.
Beside them a process of its own reads one stream: the attackers rest in every other window of a few
seconds, and the longest time between two of its tokens with attacks may be STALL_SECONDS more than
without, where only the agents' own prefill chunks stand between them. Where the system can, one
core is the server process's alone. Prefill chunks are small, so that 50 ms would show. Prints one
JSON line; exit status 1 if something did not hold.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.agents_server import Server
from benchmarks.bench_agents import Agent, Run, different, share
from benchmarks.copying import save
from benchmarks.measure import report
from benchmarks.protocols import PROTOCOLS

BURST = 128
STOP_SECONDS = 5.0
STALL_SECONDS = 0.05
# Attackers rest in every other window. An attack that was sent at a window's end may be answered in
# the next: gaps of its first second are left out.
WINDOW_SECONDS = 6.0
MARGIN_SECONDS = 1.0
HELLO = [{"role": "user", "content": "Hello"}]


def hostile_bodies() -> list[tuple[str, dict[str, Any]]]:
    """(path, body) of requests that are meant to hurt.

    Each has to be answered, whatever the answer is.
    """
    chat, messages, responses, completions = (
        "/v1/chat/completions",
        "/v1/messages",
        "/v1/responses",
        "/v1/completions",
    )
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}"
    deep: Any = "deep"
    for _ in range(900):
        deep = [deep]
    return [
        (chat, {"messages": HELLO, "chat_template_kwargs": {"chat_template": loops}}),
        (
            chat,
            {
                "messages": HELLO,
                "chat_template_kwargs": {"chat_template": "{{ '%999999999d' % 1 }}"},
            },
        ),
        (
            chat,
            {
                "messages": HELLO,
                "chat_template_kwargs": {"padding": "max_length", "max_length": 10**9},
            },
        ),
        (chat, {"messages": HELLO, "chat_template_kwargs": {"tokenize": False}}),
        (chat, {"messages": HELLO, "model": "no-such/model"}),
        (chat, {"messages": HELLO, "model": "/proc/self/root"}),
        (chat, {"messages": HELLO, "model": ".."}),
        (chat, {"messages": HELLO, "stop": "s" * 1_000_000}),
        (chat, {"messages": HELLO, "stop": [f"stop {n}" for n in range(10_000)]}),
        (chat, {"messages": HELLO, "max_tokens": 10**4999}),
        (chat, {"messages": HELLO, "logit_bias": {str(n): 1 for n in range(100_000)}}),
        (chat, {"messages": HELLO, "seed": -1, "top_k": 10**9, "temperature": 1e308}),
        (chat, {"messages": [{"role": "user", "content": "word " * 1_000_000}]}),
        (
            chat,
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x"}}
                        ],
                    }
                ]
            },
        ),
        (chat, {"messages": [{"role": "user", "content": deep}]}),
        (chat, {"messages": HELLO * 20_000}),
        (
            chat,
            {
                "messages": HELLO,
                "tools": [
                    {"type": "function", "function": {"name": f"t{n}"}} for n in range(20_000)
                ],
            },
        ),
        (
            messages,
            {"model": "m", "max_tokens": 1, "messages": HELLO, "stop_sequences": ["x" * 1_000_000]},
        ),
        (
            messages,
            {
                "model": "m",
                "max_tokens": 1,
                "messages": [{"role": "user", "content": "word " * 1_000_000}],
            },
        ),
        (
            "/v1/messages/count_tokens",
            {"model": "m", "messages": [{"role": "user", "content": "word " * 1_000_000}]},
        ),
        (responses, {"model": "default_model", "input": "word " * 1_000_000}),
        (
            responses,
            {"model": "default_model", "input": HELLO, "previous_response_id": "resp_guess"},
        ),
        (completions, {"prompt": "a" * 5_000_000, "max_tokens": 1}),
        ("/v1/agents/agent-0/import", {"not": "safetensors"}),
        ("/v1/agents/agent-0/fork", {"to": "x" * 100_000}),
        ("/admin/load", {"model": "/dev/zero"}),
    ]


class Windows:
    """Windows of WINDOW_SECONDS from `begin`, the second, fourth, ... with attacks."""

    def __init__(self, begin: float) -> None:
        self._begin = begin

    def attacked(self, at: float) -> bool:
        return int((at - self._begin) // WINDOW_SECONDS) % 2 == 1

    def counts(self, at: float) -> bool:
        """Whether a gap that ended then belongs to its window alone."""
        return at >= self._begin and (at - self._begin) % WINDOW_SECONDS > MARGIN_SECONDS


class Attackers:
    """What is done to the server of `run`.

    `counts` says how often; `wrong` what it has let through.
    """

    def __init__(self, run: Run, store: Path, windows: Windows) -> None:
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.stops: list[float] = []
        self._run = run
        self._store = store
        self._windows = windows
        self._rng = random.Random(0)
        self._bodies = hostile_bodies()

    def repeat(self, attack: Callable[[], None]) -> None:
        """Until the time is over; a server that is away is waited for."""
        while self._run.goes_on():
            if not self._windows.attacked(time.monotonic()):
                time.sleep(0.05)
                continue
            life = self._run.server.life
            try:
                attack()
            except (OSError, http.client.HTTPException) as error:
                if self._run.server.life == life and not self._run.server.gone.is_set():
                    self.counts[f"hung up: {type(error).__name__}"] += 1
                self._run.server.wait_until_back()

    def send_bad_body(self) -> None:
        """Every answer has a reason, and none is our failure."""
        time.sleep(0.1)
        path, body = self._bodies[self.counts["bad_bodies"] % len(self._bodies)]
        status, answer = self._post(path, body, {})
        self.counts["bad_bodies"] += 1
        if status == 500:
            self.wrong.append(f"{path} answers 500: {answer[:200]!r}")

    def burst(self) -> None:
        """So many connections at once, each with a question."""
        life = self._run.server.life
        with ThreadPoolExecutor(BURST) as pool:
            answers = list(pool.map(lambda _: self._asks_health(), range(BURST)))
        self.counts["bursts"] += 1
        if not self._run.server.gone.is_set() and self._run.server.life == life:
            self.counts["burst_requests_refused"] += answers.count(False)
        time.sleep(1)

    def _asks_health(self) -> bool:
        try:
            with socket.create_connection(
                ("127.0.0.1", self._run.server.port), timeout=30
            ) as connection:
                connection.sendall(
                    b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
                )
                return connection.recv(12).startswith(b"HTTP/1.1 200")
        except OSError:
            return False

    def read_slowly(self) -> None:
        """Ask for a long stream and take hardly anything of it; hang up later."""
        body = json.dumps({"messages": HELLO, "max_tokens": 400, "stream": True}).encode()
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: "
            f"{len(body)}\r\n\r\n"
        )
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            connection.connect(("127.0.0.1", self._run.server.port))
            connection.sendall(head.encode() + body[:10])
            time.sleep(0.3)
            connection.sendall(body[10:])
            for _ in range(10):
                connection.recv(1)
                time.sleep(0.1)
        self.counts["slow_readers"] += 1

    def ask_from_a_foreign_page(self) -> None:
        """What only this server has is not for pages from elsewhere."""
        for path in ("/v1/cache/explain", "/v1/agents", "/v1/messages", "/admin/models"):
            connection = http.client.HTTPConnection("127.0.0.1", self._run.server.port, timeout=60)
            connection.request("GET", path, headers={"Origin": "http://evil.example"})
            response = connection.getresponse()
            response.read()
            connection.close()
            if response.status != 403:
                self.wrong.append(f"a foreign page gets {response.status} from {path}")
            self.counts["foreign_pages"] += 1
        time.sleep(0.2)

    def kill(self, times: list[float], stop_every: int) -> None:
        """At these times: kill -9 and damage the store, or now and then SIGTERM, which has to
        end it soon.
        """
        for number, at in enumerate(times):
            while time.monotonic() < at and not self._run.failures:
                time.sleep(0.05)
            if self._run.failures:
                return
            if number % stop_every == stop_every - 1:
                self.stops.append(self._run.server.stop())
            else:
                self._run.server.kill(self._damage)
                self.counts["kills"] += 1

    def _damage(self) -> None:
        files = [
            path for path in self._store.rglob("*") if path.is_file() and not path.is_symlink()
        ]
        for path in self._rng.sample(files, min(10, len(files))):
            kind = self._rng.choice(list(DAMAGES))
            with suppress(OSError):
                DAMAGES[kind](path, self._rng)
                self.counts["damages"] += 1

    def _post(self, path: str, body: Any, headers: dict[str, str]) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self._run.server.port, timeout=120)
        try:
            connection.request(
                "POST", path, _written(body), {"Content-Type": "application/json", **headers}
            )
            response = connection.getresponse()
            return response.status, response.read()
        except ConnectionError:
            # A body that is refused by its length alone may not be read to its end.
            return 0, b""
        finally:
            connection.close()


def _written(body: Any) -> bytes:
    """JSON; Python refuses to write integers of that many digits."""
    numbers = {
        name: value for name, value in body.items() if isinstance(value, int) and value > 10**400
    }
    text = json.dumps({name: value for name, value in body.items() if name not in numbers})
    return (text[:-1] + "".join(f', "{name}": 1{"0" * 4999}' for name in numbers) + "}").encode()


def _replace(path: Path, make: Callable[[Path], Any]) -> None:
    path.unlink()
    make(path)


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(64 << 30)


DAMAGES: dict[str, Callable[[Path, random.Random], None]] = {
    "flip": lambda path, rng: path.write_bytes(_flipped(path.read_bytes(), rng)),
    "cut": lambda path, rng: path.write_bytes(
        path.read_bytes()[: rng.randrange(1 + path.stat().st_size)]
    ),
    "delete": lambda path, rng: path.unlink(),
    "noise": lambda path, rng: path.write_bytes(rng.randbytes(rng.randrange(5000))),
    "fifo": lambda path, rng: _replace(path, lambda p: os.mkfifo(p)),
    "endless": lambda path, rng: _replace(path, lambda p: p.symlink_to("/dev/zero")),
    "sparse": lambda path, rng: _replace(path, _sparse),
    "folder": lambda path, rng: _replace(path, lambda p: p.mkdir()),
}


def _flipped(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data or b"-")
    changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


class Watched:
    """A stream whose tokens are timed by another process.

    `quiet`, `attacked`: seconds between tokens.
    """

    def __init__(self, port: int, windows: Windows) -> None:
        self.quiet: list[float] = []
        self.attacked: list[float] = []
        self._windows = windows
        command = [sys.executable, "-m", "benchmarks.watched", str(port)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def work(self) -> None:
        """Until the process ends."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if not line.endswith("\n"):
                break
            at, gap = map(float, line.split())
            if self._windows.counts(at):
                (self.attacked if self._windows.attacked(at) else self.quiet).append(gap)

    def stop(self) -> None:
        self._process.terminate()

    def figures(self) -> dict[str, Any]:
        """Milliseconds."""

        def of(gaps: list[float]) -> dict[str, float]:
            ordered = sorted(gaps) or [0.0]
            at = {
                "median": statistics.median(ordered),
                "p99": ordered[int(len(ordered) * 0.99) - 1],
                "longest": ordered[-1],
            }
            return {name: round(1000 * gap, 1) for name, gap in at.items()} | {"tokens": len(gaps)}

        return {"gap_ms_quiet": of(self.quiet), "gap_ms_attacked": of(self.attacked)}


def drive(args: argparse.Namespace, model: Path, folder: Path) -> tuple[dict[str, Any], list[str]]:
    """The figures, and what did not hold."""
    with Server(model, folder, args.pool_bytes, "--prefill-step-size", "64") as server:
        begin = time.monotonic()
        run, windows = Run(server, PROTOCOLS, begin + args.seconds), Windows(begin)
        attackers, watched = (
            Attackers(run, folder / "store", windows),
            Watched(server.port, windows),
        )
        times = [begin + args.seconds * (n + 1) / (args.kills + 2) for n in range(args.kills)]
        attacks = [attackers.send_bad_body] * 2 + [
            attackers.burst,
            attackers.read_slowly,
            attackers.ask_from_a_foreign_page,
        ]
        with ThreadPoolExecutor(args.agents + len(attacks) + 3) as pool:
            jobs = [pool.submit(Agent(number, run).work) for number in range(args.agents)]
            jobs += [pool.submit(attackers.repeat, attack) for attack in attacks]
            jobs += [
                pool.submit(attackers.kill, times, args.stop_every),
                pool.submit(server.keep_apart, run.goes_on),
            ]
            watching = pool.submit(watched.work)
            for job in jobs:
                job.result()
            watched.stop()
            watching.result()
        held, health = server.held(), server.get("/health")
        attackers.stops.append(server.stop())
    sample = run.after_kill[: args.samples] + random.Random(0).sample(
        run.turns, min(args.samples, len(run.turns))
    )
    other = different(model, sample)
    figures = {
        **run.counts,
        **attackers.counts,
        **watched.figures(),
        "failures": dict(run.failures),
        "held": held,
        "longest_stop_seconds": round(max(attackers.stops), 2),
        "stops": len(attackers.stops),
        "own_letters_told": run.tokens["own_letters"],
        "replies_compared": len(sample),
        "replies_different": len(other),
        "cached_share_after_kill": share(run.tokens, "cached_after_kill", "known_before_kill"),
    }
    wrong = [*run.told[:5], *attackers.wrong[:5], *other[:5]]
    wrong += [f"{held} blocks are held"] if held else []
    wrong += (
        [f"the generation thread began anew: {health}"]
        if health["restarts"] or health["status"] != "ok"
        else []
    )
    wrong += (
        [f"SIGTERM took {max(attackers.stops):.1f} s"]
        if max(attackers.stops) > STOP_SECONDS
        else []
    )
    stalled = max(watched.attacked, default=0.0) - max(watched.quiet, default=0.0)
    wrong += (
        [f"a stream was stalled {1000 * stalled:.0f} ms longer than without attacks"]
        if stalled > STALL_SECONDS
        else []
    )
    wrong += (
        [f"{figures.get('burst_requests_refused')} requests of bursts refused"]
        if figures.get("burst_requests_refused")
        else []
    )
    return figures, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--agents", type=int, default=6)
    parser.add_argument(
        "--kills", type=int, default=36, help="how often the server is ended, by kill -9 or SIGTERM"
    )
    parser.add_argument(
        "--stop-every", type=int, default=6, help="every so many ends are a SIGTERM"
    )
    parser.add_argument(
        "--samples", type=int, default=100, help="replies to compare with mlx-lm's own"
    )
    parser.add_argument("--pool-bytes", default="40MB")
    parser.add_argument("--out", help="append the JSON line to this file too")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder) / "model")
        figures, wrong = drive(args, Path(folder) / "model", Path(folder))
    report(
        args, "hostile", f"{args.agents} agents, {args.seconds:.0f} s, {args.kills} ends", **figures
    )
    for line in wrong:
        print(line, file=sys.stderr)
    # Threads of agents that wait for a server that is gone would hold the process.
    assert threading.active_count() == 1, threading.enumerate()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
