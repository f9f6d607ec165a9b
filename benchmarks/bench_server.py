"""Five agents on one system prompt over HTTP, against mlx_lm.server: both as real processes, taking
turns.

Prints time to first token, wall time, tokens reported as cached, and resident memory; the replies
of both must be equal.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
from measure import llama, options_parser, report
from mlx.utils import tree_flatten

from mlx_blockpool.demo import model_path

MARKS = ("system prompt", "agents share it", "each asks in turn", "none of them waits for long")
COMMANDS = {
    "ours": [
        sys.executable,
        "-m",
        "mlx_blockpool.cli",
        "serve",
        "--pool-bytes",
        "1GB",
        "--no-store",
    ],
    "stock": [sys.executable, "-m", "mlx_lm", "server"],
}


def make_model(folder: Path) -> None:
    """A random llama with the demo's tokenizer: text in, text out, nothing sensible."""
    config = json.loads((Path(model_path()) / "config.json").read_text())
    model = llama(256, 4, 4, 2, vocab=config["vocab_size"])
    shutil.copytree(model_path(), folder, dirs_exist_ok=True)
    changes = {
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    changes |= {"intermediate_size": 768, "head_dim": 64, "max_position_embeddings": 65536}
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    weights = {k: v * 3 if v.ndim > 1 else v for k, v in tree_flatten(model.parameters())}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})


class Server:
    """One running server process."""

    def __init__(self, command: list[str], model: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        arguments = ["--model", str(model), "--port", str(self.port), "--log-level", "ERROR"]
        # Installed packages have bytecode, and so has a checkout from its second start on.
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        self.process = subprocess.Popen(
            [*command, *arguments],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
        while not self._healthy():
            time.sleep(0.1)

    def _healthy(self) -> bool:
        assert self.process.poll() is None, "the server did not start"
        try:
            return bool(self.get("/health")["status"] == "ok")
        except OSError:
            return False

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as response:
            return json.loads(response.read())

    def chat(
        self, messages: list[dict[str, str]], max_tokens: int, timeout: float = 600.0
    ) -> tuple[str, float, dict[str, Any]]:
        """Reply, seconds to its first token, usage."""
        body = {
            "messages": messages,
            "max_tokens": max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/chat/completions", json.dumps(body).encode()
        )
        start, first, text, usage = time.perf_counter(), 0.0, "", {}
        with urllib.request.urlopen(request, timeout=timeout) as response:
            for line in response:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    first = first or time.perf_counter() - start
                    text += choice["delta"].get("content") or ""
        return text, first, usage

    def resident_bytes(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status")
        found = re.search(r"VmRSS:\s+(\d+) kB", status.read_text()) if status.exists() else None
        return int(found.group(1)) * 1024 if found else 0

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()


def converse(server: Server, agent: int, system: str, turns: int) -> list[tuple[str, float, int]]:
    """(reply, seconds to first token, cached tokens) of each turn."""
    messages = [{"role": "system", "content": system}]
    results = []
    for turn in range(turns):
        messages.append(
            {
                "role": "user",
                "content": f"Agent {agent}, turn {turn}: " + f"{MARKS[turn % 4]} " * (4 + agent),
            }
        )
        reply, first, usage = server.chat(list(messages), 24)
        messages.append({"role": "assistant", "content": reply})
        results.append((reply, first, usage["prompt_tokens_details"]["cached_tokens"]))
    return results


def run(name: str, model: Path, agents: int, turns: int, system: str) -> dict[str, Any]:
    server = Server(COMMANDS[name], model)
    try:
        server.chat([{"role": "user", "content": "warm up"}], 2)
        start = time.perf_counter()
        with ThreadPoolExecutor(agents) as pool:
            conversations = list(
                pool.map(lambda agent: converse(server, agent, system, turns), range(agents))
            )
        wall = time.perf_counter() - start
        first = sorted(seconds for turn in conversations for _, seconds, _ in turn)
        later = sorted(seconds for turn in conversations for _, seconds, _ in turn[1:])
        return {
            "wall_s": round(wall, 2),
            "ttft_p95_s": round(first[int(0.95 * (len(first) - 1))], 3),
            "ttft_later_turns_s": round(statistics.median(later), 3),
            "cached_tokens": sum(cached for turn in conversations for _, _, cached in turn),
            "resident_mb": round(server.resident_bytes() / 1e6),
            "replies": [[reply for reply, _, _ in turn] for turn in conversations],
            "cache": server.get("/v1/cache") if name == "ours" else None,
        }
    finally:
        server.stop()


if __name__ == "__main__":
    parser = options_parser(__doc__ or "")
    parser.add_argument("--model", type=Path, help="a folder in place of a random model")
    args = parser.parse_args()
    agents, turns, repeats, rounds = (3, 2, 12, 1) if args.quick else (5, 3, 90, 3)
    system = (
        "You are a helpful assistant that answers questions about blocks, slabs and prefixes. "
        * repeats
    )
    with tempfile.TemporaryDirectory() as folder:
        if args.model is None:
            make_model(Path(folder))
        found: dict[str, list[dict[str, Any]]] = {"ours": [], "stock": []}
        for _ in range(rounds):
            for name in found:
                found[name].append(run(name, args.model or Path(folder), agents, turns, system))
    assert found["ours"][0]["replies"] == found["stock"][0]["replies"], "the replies differ"
    figures: dict[str, Any] = {}
    for key in ("wall_s", "ttft_p95_s", "ttft_later_turns_s", "cached_tokens", "resident_mb"):
        figures |= {
            f"{name}_{key}": statistics.median(r[key] for r in found[name]) for name in found
        }
    cache = found["ours"][0]["cache"]
    ratio = round(figures["stock_wall_s"] / figures["ours_wall_s"], 2)
    report(
        args,
        "server",
        f"{agents} agents, {turns} turns, one system prompt",
        **figures,
        ratio_wall=ratio,
        equal_replies=True,
        ragged=cache["ragged"],
        known_bytes=cache["known_bytes"],
    )
