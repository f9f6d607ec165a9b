"""Five servers, one trained model: this one, mlx_lm.server, vllm-mlx, Rapid-MLX, llama.cpp's.

Installs each of them, starts them in turns and sends them the same requests over the OpenAI
protocol. `again`: tokens of prompts that were computed although an earlier prompt or reply had
them; `own`: what the distinct tokens and the replies cost this server when it computes them alone,
in seconds, and `ratio` the time to it, so that caches and schedulers are compared and not matrix
kernels. `different`: replies that are not those of mlx_lm.server to the same messages.

A full run puts its lines into results/ and writes peers.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from signal import SIGKILL, SIGTERM
from typing import Any

import smollm2
from measure import options_parser, report
from mlx_lm.utils import load_tokenizer
from peers import PEERS, Peer, Server, Stream
from sessions import recorded

ROOT = Path(__file__).parent.parent
Messages = list[dict[str, str]]
REPLY, TIMEOUT = 8, 600.0
# Two recorded coding sessions that share tools and system text, with all lengths divided.
SESSIONS, DIVISOR, REQUESTS = (10, 11), 256, 6
# The client that gives up waits for this part of what its prompt costs, this many times.
PATIENCE, TRIES = 0.4, 3
# Seconds between a reply and a restart.
PAUSE = 2.0
TOOLS = [
    {"name": name, "description": text, "parameters": {"path": "string", "text": "string"}}
    for name, text in (("read", "Reads a file."), ("write", "Writes a file."))
]


class Talk:
    """What a workload needs: text, and a server whose replies are recorded."""

    def __init__(self, server: Server, tokenizer: Any, quick: bool) -> None:
        self.server, self._tokenizer, self.quick = server, tokenizer, quick
        self._text = tokenizer.encode((ROOT / "LICENSE").read_text())
        self.token_s = self.step_s = 0.0
        self._earlier: list[list[int]] = []
        self.begin()

    def begin(self) -> None:
        """Begin a workload. `before`: tokens computed before it; `away_s`: time in restarts."""
        self.sent: list[tuple[Messages, int, Stream]] = []
        self.before, self.away_s = self.server.computed(), 0.0

    def size(self, tokens: int) -> int:
        return tokens // 4 if self.quick else tokens

    def prose(self, tokens: int, number: int) -> str:
        """A passage of English; no two numbers have the same beginning."""
        start = number * 97 % len(self._text)
        words = (self._text * 2)[start : start + self.size(tokens)]
        return f"Number {number}. {self._tokenizer.decode(words)}"

    def chat(self, messages: Messages, max_tokens: int = REPLY, **more: Any) -> Stream:
        stream = more.setdefault("stream", Stream())
        self.sent.append((list(messages), max_tokens, stream))
        return self.server.chat(messages, max_tokens, **more)

    def turns(self, system: str, questions: list[str], max_tokens: int = REPLY) -> Messages:
        """A conversation. Returns its messages."""
        messages = [{"role": "system", "content": system}]
        for question in questions:
            self.turn(messages, question, max_tokens)
        return messages

    def turn(self, messages: Messages, question: str, max_tokens: int = REPLY) -> None:
        messages.append({"role": "user", "content": question})
        reply = self.chat(messages, max_tokens).text
        messages.append({"role": "assistant", "content": reply})

    def restart(self, how: Any) -> None:
        begin, before = time.perf_counter(), self.server.computed()
        time.sleep(PAUSE)
        self.server.stop(how)
        self.server.start()
        self.away_s += time.perf_counter() - begin
        self.before += self.server.computed() - before

    def calibrate(self) -> None:
        """Seconds for a token of a prompt, and for one of a reply, of this server alone."""
        stream = self.chat([{"role": "user", "content": self.prose(300, 0)}], 16)
        self.token_s = stream.first / stream.usage["prompt_tokens"]
        self.step_s = statistics.median(stream.gaps)

    def ids(self, messages: Messages, reply: str = "") -> list[int]:
        found = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        return found + self._tokenizer.encode(reply, add_special_tokens=False)

    def distinct(self) -> int:
        """Tokens of the workload's prompts without those that earlier prompts began with, and
        their replies.
        """
        total = 0
        for messages, _, stream in self.sent:
            prompt = self.ids(messages)
            total += len(prompt) - max((common(prompt, old) for old in self._earlier), default=0)
            self._earlier.append(self.ids(messages, stream.text))
        return total


def common(one: list[int], other: list[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))


def together(talk: Talk, jobs: list[Callable[[], Any]]) -> None:
    with ThreadPoolExecutor(len(jobs)) as threads:
        for done in [threads.submit(job) for job in jobs]:
            done.result()


def agents(talk: Talk) -> None:
    system = talk.prose(240, 1)
    questions = [[talk.prose(24, 10 * agent + turn) for turn in range(3)] for agent in range(1, 6)]
    together(talk, [lambda each=each: talk.turns(system, each) for each in questions])  # type: ignore[misc]


def conversation(talk: Talk) -> None:
    talk.turns(talk.prose(100, 2), [talk.prose(24, 70 + turn) for turn in range(8)])


def second_session(talk: Talk) -> None:
    system = talk.prose(300, 3) + json.dumps(TOOLS)
    for session in range(2):
        talk.turns(system, [talk.prose(24, 80 + 2 * session + turn) for turn in range(2)])


def long_prompt(talk: Talk) -> None:
    streams = [Stream() for _ in range(4)]
    short = [[{"role": "user", "content": talk.prose(24, 90 + n)}] for n in range(4)]

    def long() -> None:
        while not all(stream.times or stream.error for stream in streams):
            time.sleep(0.01)
        talk.chat([{"role": "user", "content": talk.prose(400, 94)}])

    jobs = [
        lambda each=each, stream=stream: talk.chat(each, talk.size(40), stream=stream)
        for each, stream in zip(short, streams, strict=True)
    ]
    together(talk, [*jobs, long])


def joins(talk: Talk) -> None:
    def join(number: int) -> None:
        time.sleep(number * 0.5)
        talk.chat([{"role": "user", "content": talk.prose(32, 100 + number)}], 4 + 3 * number)

    together(talk, [lambda number=number: join(number) for number in range(8)])  # type: ignore[misc]


def retries(talk: Talk) -> None:
    prompt = [{"role": "user", "content": talk.prose(300, 110)}]
    patience = PATIENCE * talk.token_s * len(talk.ids(prompt))
    for timeout in [patience] * TRIES + [TIMEOUT]:
        talk.begin()
        if not talk.chat(prompt, timeout=timeout).error:
            break


def sessions(talk: Talk) -> None:
    names = [f" {word}" for word in dict.fromkeys((ROOT / "LICENSE").read_text().split())]
    words = [name for name in names if len(talk._tokenizer.encode(name)) == 1]
    requests = list(recorded(SESSIONS, DIVISOR * (4 if talk.quick else 1), len(words)))

    def replay(session: int) -> None:
        for request in [each for each in requests if each.session == session][:REQUESTS]:
            text = "".join(words[number] for number in request.prompt)
            talk.chat([{"role": "user", "content": text}], min(REPLY, len(request.output)))

    together(talk, [lambda session=session: replay(session) for session in SESSIONS])  # type: ignore[misc]


def restarted(talk: Talk, how: Any, number: int) -> None:
    messages = talk.turns(talk.prose(400, number), [talk.prose(24, number + 1)])
    talk.restart(how)
    talk.turn(messages, talk.prose(24, number + 2))


def memory(talk: Talk) -> None:
    three = [
        [{"role": "system", "content": talk.prose(tokens, 130 + n)}]
        for n, tokens in enumerate((200, 380, 380))
    ]
    for turn in range(2):
        for n, messages in enumerate(three):
            talk.turn(messages, talk.prose(8, 140 + 3 * turn + n), 4)


# Memory for 1.2 agents of 430 tokens; a token of SmolLM2 has 46,080 bytes in float32.
SMALL = {"tokens": 516, "bytes": 516 * 46_080, "megabytes": 24}
WORKLOADS: dict[str, tuple[str, Callable[[Talk], None]]] = {
    "agents": ("five agents with one system prompt, three turns, at once", agents),
    "conversation": ("one conversation of eight turns", conversation),
    "second": ("a second session with the same system prompt and tools", second_session),
    "long": ("a long prompt while four replies run", long_prompt),
    "joins": ("eight requests join and leave", joins),
    "retries": ("a client that gives up and tries again", retries),
    "sessions": ("two recorded coding sessions", sessions),
    "term": ("the next turn after SIGTERM", lambda talk: restarted(talk, SIGTERM, 112)),
    "kill": ("the next turn after kill -9", lambda talk: restarted(talk, SIGKILL, 116)),
    "memory": ("three agents take turns in memory for 1.2", memory),
}


def measured(talk: Talk, name: str) -> dict[str, Any]:
    """The figures of one workload on one server."""
    talk.begin()
    talk.server.peak_mb()
    begin = time.perf_counter()
    WORKLOADS[name][1](talk)
    wall = time.perf_counter() - begin - talk.away_s
    replied = [stream for _, _, stream in talk.sent if not stream.error]
    prompts, written = (
        sum(stream.usage[f"{kind}_tokens"] for stream in replied)
        for kind in ("prompt", "completion")
    )
    computed = prompts - sum(stream.cached for stream in replied)
    if talk.server.peer.computed:
        computed = talk.server.computed() - talk.before
    distinct = talk.distinct()
    own = distinct * talk.token_s + written * talk.step_s
    return {
        "wall_s": wall,
        "first_s": statistics.median(stream.first for stream in replied) if replied else None,
        "gap_s": max((gap for stream in replied for gap in stream.gaps), default=None),
        # What the attempts that were given up have computed is not counted anywhere.
        "again": None if name == "retries" else computed - distinct,
        "reused": prompts - computed,
        "distinct": distinct,
        "peak_mb": talk.server.peak_mb(),
        "own_s": own,
        "ratio": wall / own,
        "failed": sum(bool(stream.error) for _, _, stream in talk.sent),
    }


def replies(talk: Talk) -> dict[str, str]:
    return {
        json.dumps([messages, max_tokens]): stream.text
        for messages, max_tokens, stream in talk.sent
        if not stream.error
    }


class Run:
    """Figures and replies of one server and workload, one of each repeat."""

    def __init__(self) -> None:
        self.figures: list[dict[str, Any]] = []
        self.replies: list[dict[str, str]] = []

    def summary(self, stock: dict[str, str]) -> dict[str, Any]:
        """Medians, the least and the most of the wall time, and the replies that are not stock's
        to the same messages.
        """
        found: dict[str, Any] = {}
        for key in self.figures[0]:
            values = [figures[key] for figures in self.figures if figures[key] is not None]
            found[key] = rounded(statistics.median(values)) if values else None
        if "wall_s" in found:
            walls = [figures["wall_s"] for figures in self.figures]
            pairs = [pair for each in self.replies for pair in each.items() if pair[0] in stock]
            found |= {
                "wall_least_s": rounded(min(walls)),
                "wall_most_s": rounded(max(walls)),
                "compared": len(pairs),
                "different": sum(stock[key] != text for key, text in pairs),
            }
        return found


def rounded(value: float) -> float:
    return round(value, 2 if value < 100 else None)


def run(peer: Peer, names: list[str], model: Path, quick: bool, found: dict[Any, Run]) -> None:
    """Every workload on one server, which is started for them, and again with little memory."""
    tokenizer = load_tokenizer(model)
    little = [name for name in names if name == "memory"]
    for chosen, limit in (([name for name in names if name not in little], None), (little, SMALL)):
        if chosen:
            with closing(Server(peer, model, limit)) as server:
                talk = Talk(server, tokenizer, quick)
                talk.calibrate()
                costs = {"token_ms": 1e3 * talk.token_s, "step_ms": 1e3 * talk.step_s}
                start = {"start_s": server.started_s, **costs}
                talk.distinct()
                found.setdefault((peer, "start"), Run()).figures.append(start)
                for name in chosen:
                    each = found.setdefault((peer, name), Run())
                    each.figures.append(measured(talk, name))
                    each.replies.append(replies(talk))
                    print(peer.name, name, each.figures[-1], file=sys.stderr, flush=True)


def main() -> None:
    parser = options_parser(__doc__ or "")
    parser.add_argument("--model", type=Path, help="an mlx-lm folder; MODEL.gguf for llama.cpp")
    parser.add_argument("--repeat", type=int, help="rounds (default: 3, with --quick 1)")
    parser.add_argument(
        "--only", default="/", metavar="SERVER/WORKLOAD", help="names, divided by commas"
    )
    args = parser.parse_args()
    chosen = [part.split(",") if part else [] for part in args.only.partition("/")[::2]]
    if wrong := {*chosen[0]} - {p.name for p in PEERS} | {*chosen[1]} - {*WORKLOADS}:
        parser.error(
            f"--only has unknown names: {', '.join(sorted(wrong))}. Servers: "
            f"{', '.join(peer.name for peer in PEERS)}; workloads: {', '.join(WORKLOADS)}"
        )
    model = (args.model or smollm2.MODEL).resolve()
    if args.model is None:
        smollm2.make()
    peers = [peer for peer in PEERS if not chosen[0] or peer.name in chosen[0]]
    if not smollm2.gguf_of(model).exists():
        peers = [peer for peer in peers if peer.name != "llama.cpp"]
    names = [name for name in WORKLOADS if not chosen[1] or name in chosen[1]]
    whole = args.only == "/" and args.model is None and not args.quick
    if whole and not args.out:
        args.out = tempfile.mkstemp(suffix=".jsonl")[1]
    found: dict[Any, Run] = {}
    load: list[float] = []
    for repeat in range(args.repeat or (1 if args.quick else 3)):
        for peer in peers[repeat:] + peers[:repeat]:
            load.append(os.getloadavg()[0])
            run(peer, names, model, args.quick, found)
        write(args, peers, names, found, load)
        if whole:
            sys.path.insert(0, str(ROOT))
            from benchmarks import __main__ as results

            results.publish(Path(args.out), results.RESULTS / f"{results.machine()}.jsonl")


def write(
    args: argparse.Namespace,
    peers: list[Peer],
    names: list[str],
    found: dict[Any, Run],
    load: list[float],
) -> None:
    """The lines, of all rounds so far: one of the servers, and one of each workload."""
    for name in ["start", *names]:
        runs = {peer: found[peer, name] for peer in peers}
        stock: dict[str, str] = {}
        for peer, each in runs.items():
            for texts in each.replies if peer.name == "stock" else ():
                stock = texts | stock
        figures = {
            f"{peer.key}_{key}": value
            for peer, each in runs.items()
            for key, value in each.summary(stock).items()
        }
        if name == "start":
            for peer in peers:
                names = {"name": peer.name, "version": peer.version, "settings": peer.settings}
                figures |= {f"{peer.key}_{key}": value for key, value in names.items()}
            figures["load"] = rounded(statistics.median(load))
        what = "starts" if name == "start" else WORKLOADS[name][0]
        report(args, "peers", what, repeat=len(next(iter(runs.values())).figures), **figures)


if __name__ == "__main__":
    main()
