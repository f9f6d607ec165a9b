"""Random load on a real server process: ten agents, hang-ups, bad bodies, seeds, stop words, prompts that do not fit.

Fails on a dead or stalled thread, a server error without a cause, a repeated request with another reply, blocks that are held
when nobody asks any more, or memory that grows. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from bench_server import Server, make_model
from measure import report

WORDS = ["block", "slab", "prefix", "agent", "pool", "token", "window", "ring", "table", "run", "shared", "evict", "hold", "pin"]
FAMILIES = [f"You are agent family {n}. " + " ".join(WORDS) * (8 + 6 * n) for n in range(3)]
BAD = [b"", b"{", b"[]", b"\xff\xfe", b'{"messages": 1}', b'{"messages": [], "max_tokens": 3}', b'{"prompt": 7}']


class Load:
    """What all agents share: the server, what was answered to what, and what went wrong."""

    def __init__(self, server: Server, until: float) -> None:
        self.server = server
        self.until = until
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self.replies: dict[str, str] = {}
        self.lock = threading.Lock()

    def agent(self, number: int) -> None:
        rng = random.Random(number)
        messages: list[dict[str, str]] = []
        while time.monotonic() < self.until and not self.problems:
            try:
                messages = self.turn(rng, number, messages)
            except (OSError, http.client.HTTPException, ValueError) as error:
                self.problems.append(f"agent {number}: {type(error).__name__}: {error}")

    def turn(self, rng: random.Random, number: int, messages: list[dict[str, str]]) -> list[dict[str, str]]:
        """One request of a random kind; returns the conversation as it stands after it."""
        if not messages or len(messages) > 9 or rng.random() < 0.1:
            messages = [{"role": "system", "content": rng.choice(FAMILIES)}]
        asked = [*messages, {"role": "user", "content": " ".join(rng.choices(WORDS, k=rng.randrange(1, 40)))}]
        body: dict[str, Any] = {"messages": asked, "max_tokens": rng.randrange(1, 40)}
        kind = rng.choices(["greedy", "seed", "stop", "hang up", "bad", "too long"], [50, 15, 10, 15, 8, 2])[0]
        headers = {"X-Agent-Id": f"agent-{number}"} if number % 2 else {}
        self.counts[kind] += 1
        if kind == "bad":
            self.expect(self.post(rng.choice(BAD), headers), 400)
        elif kind == "too long":
            body["messages"] = [{"role": "user", "content": "token " * 60_000}]
            self.expect(self.post(json.dumps(body).encode(), headers), 400)
        elif kind == "hang up":
            self.hang_up(json.dumps({**body, "stream": True, "max_tokens": 200}).encode(), rng.randrange(6))
        else:
            body |= {"seed": {"seed": number, "temperature": 1.0}, "stop": {"stop": rng.choices(WORDS, k=2)}}.get(kind, {})
            return [*asked, {"role": "assistant", "content": self.reply(body, headers, repeats=rng.random() < 0.2)}]
        return messages

    def reply(self, body: dict[str, Any], headers: dict[str, str], repeats: bool) -> str:
        """The reply to one request; the same request always has the same one."""
        text = ""
        for _ in range(2 if repeats else 1):
            status, answer = self.post(json.dumps(body).encode(), headers)
            self.expect((status, answer), 200)
            text = answer["choices"][0]["message"].get("content") or ""
            with self.lock:
                before = self.replies.setdefault(json.dumps(body), text)
            self.counts["compared"] += before is not text
            if before != text:
                self.problems.append(f"another reply to the same request: {before!r} != {text!r}")
        return text

    def post(self, body: bytes, headers: dict[str, str]) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=300)
        connection.request("POST", "/v1/chat/completions", body, headers)
        response = connection.getresponse()
        answer = json.loads(response.read() or b"null")
        connection.close()
        return response.status, answer

    def hang_up(self, body: bytes, events: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=300)
        connection.request("POST", "/v1/chat/completions", body)
        response = connection.getresponse()
        for _ in range(events):
            response.readline()
        connection.close()

    def expect(self, answer: tuple[int, Any], status: int) -> None:
        if answer[0] != status:
            self.problems.append(f"status {answer[0]} != {status}: {answer[1]}")


def watch(load: Load, resident: list[int]) -> None:
    """Health and memory, every five seconds."""
    while time.monotonic() < load.until and not load.problems:
        health = load.server.get("/health")
        if health["status"] != "ok" or health["restarts"]:
            load.problems.append(f"health: {health}")
        resident.append(load.server.resident_bytes())
        time.sleep(5)


def held(server: Server) -> dict[str, int]:
    """Blocks that are held or promised once everything has ended."""
    for _ in range(100):
        groups = server.get("/v1/cache")["groups"]
        found = {group["group"]: group["held"] + group["reserved"] for group in groups}
        if not any(found.values()):
            break
        time.sleep(0.1)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--agents", type=int, default=10)
    parser.add_argument("--pool-bytes", default="24MB")
    parser.add_argument("--out", help="append the JSON line to this file too")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        command = [sys.executable, "-m", "mlx_blockpool.cli", "serve", "--pool-bytes", args.pool_bytes, "--no-store"]
        server = Server(command, Path(folder))
        load = Load(server, time.monotonic() + 60 * args.minutes)
        resident: list[int] = []
        threads = [threading.Thread(target=load.agent, args=(n,)) for n in range(args.agents)]
        threads.append(threading.Thread(target=watch, args=(load, resident)))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not load.problems, load.problems[:3]
        left = held(server)
        cache = server.get("/v1/cache")
        server.stop()
    assert not any(left.values()), f"blocks still held: {left}"
    third = max(1, len(resident) // 3)
    early, late = max(resident[third : 2 * third]), max(resident[2 * third :])
    assert late < 1.1 * early, f"resident memory grew from {early} to {late} bytes"
    report(
        args, "soak", f"{args.agents} agents, {args.minutes} minutes", requests=load.counts.total() - load.counts["compared"],
        **load.counts, engine=cache["engine"], cached_tokens=cache["cached_tokens"], prompt_tokens=cache["prompt_tokens"],
        resident_mb_early=round(early / 1e6), resident_mb_late=round(late / 1e6), held=0,
    )  # fmt: skip
