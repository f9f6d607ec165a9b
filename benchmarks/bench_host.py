"""What a warm turn costs before its first token is computed: from the request's body to the engine.

A chat of which all but the last 500 tokens or so are known, and the same chat the first time, over
HTTP, to a model of full attention and to one with states, which has checkpoints in its prompts. The
time begins when the last byte of the body is sent, and ends where the engine is given the request,
which it refuses there. `--before TREE` also measures the package in another tree, in turns.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import mlx.core as mx
from bench_server import Server
from bench_sessions_http import KINDS
from measure import options_parser, report
from mlx.utils import tree_flatten
from tokenizers import Tokenizer

from mlx_blockpool.demo import model_path
from mlx_blockpool.engine.engine import BlockPoolBatchEngine
from mlx_blockpool.testing import tiny_model

SIZES = (20_000, 100_000, 200_000)
TURNS = 15
HERE = Path(__file__).resolve().parent.parent
SOURCE = HERE / "mlx_blockpool" / "server" / "http.py"


def serve() -> None:
    """The server, in a process whose engine takes no request."""

    def refuse(*_: Any, **__: Any) -> None:
        # All processes have one such clock on Linux and macOS.
        raise ValueError(f"this engine computes nothing since {time.monotonic_ns()} ns")

    BlockPoolBatchEngine.insert = refuse  # type: ignore[method-assign]
    from mlx_blockpool.cli import main

    main(sys.argv[2:])


def make_model(folder: Path, kind: str) -> None:
    """A tiny random model with the demo's tokenizer."""
    shutil.copytree(model_path(), folder, dirs_exist_ok=True)
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    config = {**KINDS[kind], "model_type": kind, "vocab_size": vocab, "eos_token_id": 2}
    config |= {"torch_dtype": "float32", "max_position_embeddings": 1 << 20}
    (folder / "config.json").write_text(json.dumps(config))
    weights = dict(tree_flatten(tiny_model(config).parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})


def start(tree: Path, model: Path, plugins: Path) -> Server:
    """A server of the package in `tree`, with its plugins; `plugins`: a new folder for them."""
    # Without it, Python would take the package that is installed.
    assert (tree / "mlx_blockpool").is_dir(), f"{tree} has no package"
    plugins.mkdir()
    (plugins / "mlx_blockpool_plugins").symlink_to(tree / "plugins")
    os.environ["PYTHONPATH"] = os.pathsep.join((str(tree), str(plugins)))
    command = [sys.executable, __file__, "--serve", "serve", "--no-store", "--pool-bytes", "2GB"]
    return Server(command, model)


class Words:
    """Text of a source file by its length in tokens."""

    def __init__(self, model: Path) -> None:
        self._text = SOURCE.read_text()
        ids = Tokenizer.from_file(str(model / "tokenizer.json")).encode(self._text).ids
        self._size = len(self._text) / len(ids)

    def text(self, tokens: int, begin: int = 0) -> str:
        return self._text[begin : begin + int(tokens * self._size)]


def chat(words: Words, tokens: int) -> list[dict[str, str]]:
    """About this many tokens, in turns of 1,500."""
    messages = [{"role": "system", "content": "You are a coding agent."}]
    for turn in range(tokens // 1500):
        text = words.text(1480, turn * 997 % 3000)
        messages.append({"role": "user", "content": f"File {turn}:\n{text}"})
        messages.append({"role": "assistant", "content": f"I have read file {turn}."})
    return [*messages, {"role": "user", "content": "Which of them opens the socket?"}]


def seconds(server: Server, messages: list[dict[str, str]]) -> float:
    """From the last byte of a request's body to the engine."""
    body = json.dumps({"messages": messages, "max_tokens": 1, "stream": True}).encode()
    connection = HTTPConnection("127.0.0.1", server.port, timeout=600)
    connection.putrequest("POST", "/v1/chat/completions")
    connection.putheader("Content-Length", str(len(body)))
    connection.endheaders(body[:-1])
    # The server reads all that is there.
    time.sleep(0.05)
    begin = time.monotonic_ns()
    connection.send(body[-1:])
    refused = re.search(rb"nothing since (\d+) ns", connection.getresponse().read())
    connection.close()
    if refused is None:
        raise AssertionError("the engine has taken a request")
    return (int(refused[1]) - begin) / 1e9


def bench(args: Any, case: str, size: int, servers: dict[str, Server], words: Words) -> None:
    messages = chat(words, size)
    first = {name: seconds(server, messages) for name, server in servers.items()}
    known: dict[str, list[float]] = {name: [] for name in servers}
    for turn in range(5 if args.quick else TURNS):
        messages += [
            {"role": "assistant", "content": "The third one."},
            {"role": "user", "content": f"And {turn}? {words.text(480)}"},
        ]
        for name in sorted(servers, reverse=bool(turn % 2)):
            known[name].append(seconds(servers[name], messages))
    medians = {name: statistics.median(times) for name, times in known.items()}
    figures = {f"{name}_first_ms": round(1000 * first[name], 2) for name in servers}
    figures |= {f"{name}_known_ms": round(1000 * medians[name], 2) for name in servers}
    if "before" in servers:
        pairs = zip(known["ours"], known["before"], strict=True)
        figures["ratio"] = round(statistics.median(ours / before for ours, before in pairs), 4)
    report(args, "host", case, **figures)


def main() -> None:
    parser = options_parser(__doc__ or "")
    parser.add_argument("--before", type=Path, help="a tree of another version")
    args = parser.parse_args()
    trees = {"ours": HERE} | ({} if args.before is None else {"before": args.before.resolve()})
    for kind in ("llama", "lfm2"):
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            model, servers = Path(folder, "model"), dict[str, Server]()
            make_model(model, kind)
            for name, tree in trees.items():
                servers[name] = start(tree, model, Path(folder, name))
                stack.callback(servers[name].stop)
            for size in SIZES[:1] if args.quick else SIZES:
                bench(args, f"{size} tokens, {kind}", size, servers, Words(model))


if __name__ == "__main__":
    serve() if "--serve" in sys.argv else main()
