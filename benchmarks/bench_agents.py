"""Ten agents that speak every protocol at once, hang up in mid-stream, and see their server killed.

Run it with python -m benchmarks.bench_agents, from the repository's folder. A real server process
with a store. Each agent writes letters that no other agent uses, and the model says nothing but
what it has read: a letter of somebody else in a reply is a cache that crossed. A share of the
replies is compared with mlx-lm's own. Prints one JSON line; exit status 1 if something did not
hold.
"""

from __future__ import annotations

import argparse
import http.client
import random
import string
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mlx_lm import load, stream_generate

from benchmarks.agents_server import Server
from benchmarks.copying import save
from benchmarks.measure import report
from benchmarks.protocols import PROTOCOLS, CutError, Protocol, rendered

LETTERS = string.ascii_uppercase + string.digits
PER_AGENT = 3
SYSTEM = (
    "you are one of several agents, and all of them begin with this text, which says nothing of "
    "any of them. " * 6
)
LONGEST = 4000
HANG_UP = 0.15
# Seconds.
PATIENCE = 120


class Failed(Exception):  # noqa: N818
    """Something that must not happen; its first argument is the kind."""


class Run:
    """What the agents share."""

    def __init__(
        self,
        server: Server,
        protocols: list[Protocol],
        until: float,
        kills: int = 0,
        samples: int = 0,
    ) -> None:
        self.server = server
        self.protocols = protocols
        self.until = until
        self.kills, self.samples = kills, samples
        self.counts: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.told: list[str] = []
        self.turns: list[tuple[str, int, str]] = []
        self.after_kill: list[tuple[str, int, str]] = []
        self.tokens: Counter[str] = Counter()
        self._changing = threading.Lock()

    def goes_on(self) -> bool:
        """Until the time is over, on a busy machine until there is something to compare, and
        never beyond PATIENCE.
        """
        now = time.monotonic()
        return not self.failures and (
            now < self.until or (now < self.until + PATIENCE and not self._is_enough())
        )

    def _is_enough(self) -> bool:
        is_read = self.tokens["cached_after_kill"] > 0 or not self.kills
        return (
            is_read and self.tokens["own_letters"] > 0 and self.counts["requests"] >= self.samples
        )

    def count(self, counter: Counter[str], **figures: int) -> None:
        with self._changing:
            counter.update(figures)

    def fail(self, kind: str, what: str) -> None:
        with self._changing:
            self.failures[kind] += 1
            self.told.append(f"{kind}: {what}")


class Agent:
    """One conversation after the other, each with letters of its own."""

    def __init__(self, number: int, run: Run) -> None:
        self.letters = LETTERS[PER_AGENT * number : PER_AGENT * (number + 1)]
        self.name = f"agent-{number}"
        self._run = run
        self._rng = random.Random(number)
        self._messages: list[dict[str, str]] = []
        self._known = 0
        self._life = 0

    def work(self) -> None:
        """Until the time is over, or something has gone wrong."""
        while self._run.goes_on():
            if len(rendered(self._messages)) > LONGEST or not self._messages:
                self._messages, self._known = [{"role": "system", "content": SYSTEM}], 0
            asked = [*self._messages, {"role": "user", "content": self._words()}]
            life = self._run.server.life
            try:
                self._turn(asked, life)
            except Failed as error:
                self._run.fail(error.args[0], f"{self.name}: {error.args[1]}")
            except (OSError, http.client.HTTPException, CutError, ValueError) as error:
                if self._run.server.life == life and not self._run.server.gone.is_set():
                    self._run.fail(type(error).__name__, f"{self.name}: {error}")
                self._run.count(self._run.counts, interrupted=1)
                self._run.server.wait_until_back()

    def _words(self) -> str:
        words = [
            "".join(self._rng.choices(self.letters, k=self._rng.randrange(2, 9)))
            for _ in range(self._rng.randrange(4, 30))
        ]
        return f"it is {' '.join(words)}, and again it is {' '.join(words[:3])}"

    def _turn(self, asked: list[dict[str, str]], life: int) -> None:
        protocol = self._rng.choice(self._run.protocols)
        most = self._rng.randrange(4, 40)
        headers = {"X-Agent-Id": self.name} if self._rng.random() < 0.5 else {}
        hang_up = protocol.streams and self._rng.random() < HANG_UP
        lines = self._rng.randrange(9) if hang_up else None
        reply = protocol.ask(self._run.server.port, asked, 400 if hang_up else most, headers, lines)
        if reply is None:
            self._run.count(self._run.counts, hang_ups=1, requests=1)
            return
        self._check(asked, most, reply.text, reply.prompt, protocol)
        self._note(life, reply.prompt, reply.cached, (rendered(asked), most, reply.text))
        self._run.count(self._run.counts, requests=1, **{protocol.name: 1})
        self._messages = [*asked, {"role": "assistant", "content": reply.text}]
        self._known, self._life = reply.prompt, life

    def _check(
        self, asked: list[dict[str, str]], most: int, text: str, prompt: int, protocol: Protocol
    ) -> None:
        expected = len(list(tokens_of(rendered(asked))))
        if prompt != expected:
            raise Failed("other prompt", f"{protocol.name}: {prompt} tokens != {expected}")
        others = set(LETTERS) - set(self.letters)
        if others & set(text):
            raise Failed(
                "secret crossed", f"{protocol.name}: {sorted(others & set(text))} in {text!r}"
            )
        self._run.count(
            self._run.tokens, own_letters=sum(letter in self.letters for letter in text)
        )

    def _note(self, life: int, prompt: int, cached: int, turn: tuple[str, int, str]) -> None:
        self._run.count(self._run.tokens, prompt=prompt, cached=cached)
        self._run.turns.append(turn)
        if life != self._life and self._known:
            self._run.count(
                self._run.tokens,
                known_before_kill=self._known,
                cached_after_kill=min(cached, self._known),
            )
            self._run.after_kill.append(turn)


def tokens_of(text: str) -> Iterator[str]:
    """A token for each character, but for those that a template writes."""
    while text:
        length = next(
            (len(word) for word in ("<|im_start|>", "<|im_end|>") if text.startswith(word)), 1
        )
        yield text[:length]
        text = text[length:]


def different(model: Path, turns: list[tuple[str, int, str]]) -> list[str]:
    """Replies that are not those of mlx-lm alone, of this share of the turns."""
    loaded, tokenizer, *_ = load(str(model))
    found = []
    for prompt, most, text in turns:
        expected = "".join(
            part.text for part in stream_generate(loaded, tokenizer, prompt, max_tokens=most)
        )
        # A message of Anthropic's has no text that is white space alone.
        if text != expected and (text or expected.strip()):
            found.append(f"{text!r} != {expected!r}")
    return found


def drive(args: argparse.Namespace, model: Path, folder: Path) -> tuple[dict[str, Any], list[str]]:
    """The figures, and what did not hold."""
    with Server(model, folder, args.pool_bytes) as server:
        spoken = [protocol for protocol in PROTOCOLS if server.speaks(protocol.path)]
        begin = time.monotonic()
        run = Run(server, spoken, begin + args.seconds, args.kills, args.samples)
        # All kills are in the first half, so that the last life is long enough to see memory grow.
        kills = [begin + args.seconds * (n + 1) / (2 * args.kills + 2) for n in range(args.kills)]
        with ThreadPoolExecutor(args.agents + 1) as pool:
            jobs = [pool.submit(Agent(number, run).work) for number in range(args.agents)]
            jobs.append(pool.submit(server.watch, kills, run.until, lambda: not run.failures))
            for job in jobs:
                job.result()
        held, health = server.held(), server.get("/health")
    sample = run.after_kill + random.Random(0).sample(run.turns, min(args.samples, len(run.turns)))
    other = different(model, sample)
    before, after = server.thirds()
    figures = {
        **run.counts,
        "kills": len(kills),
        "failures": dict(run.failures),
        "held": held,
        "secrets_crossed": run.failures["secret crossed"],
        "own_letters_told": run.tokens["own_letters"],
        "cached_share": share(run.tokens, "cached", "prompt"),
        "cached_share_after_kill": share(run.tokens, "cached_after_kill", "known_before_kill"),
        "replies_compared": len(sample),
        "replies_different": len(other),
        "resident_mb_second_third": round(before / 1e6),
        "resident_mb_last_third": round(after / 1e6),
    }
    wrong = [*run.told[:5], *other[:5]]
    wrong += [f"{held} blocks are held"] if held else []
    wrong += (
        [f"the generation thread began anew: {health}"]
        if health.get("restarts") or health["status"] != "ok"
        else []
    )
    wrong += (
        ["the model tells no secret: nothing was tested"] if not run.tokens["own_letters"] else []
    )
    wrong += (
        ["nothing was read after a kill"] if kills and not run.tokens["cached_after_kill"] else []
    )
    wrong += (
        [f"resident memory grew from {before} to {after} bytes"]
        if after > 1.1 * before and args.seconds >= 300
        else []
    )
    return figures, wrong


def share(tokens: Counter[str], part: str, whole: str) -> float:
    return round(tokens[part] / max(1, tokens[whole]), 3)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument(
        "--agents", type=int, default=10, choices=range(1, len(LETTERS) // PER_AGENT + 1)
    )
    parser.add_argument("--kills", type=int, default=3)
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
        args, "agents", f"{args.agents} agents, {args.seconds:.0f} s, {args.kills} kills", **figures
    )
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
