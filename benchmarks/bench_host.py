"""What a warm turn costs before its first token is computed: from the request's body to the engine.

A chat of which all but the last 500 tokens or so are known, and the same chat the first time, over
HTTP. The server's engine refuses each request where it would compute, so that nothing else is
timed. `python benchmarks/compare.py` runs it for two versions.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from bench_server import Server, make_model
from measure import options, report

from mlx_blockpool.engine.engine import BlockPoolBatchEngine

SIZES = (20_000, 100_000, 200_000)
SOURCE = Path(__file__).resolve().parent.parent / "mlx_blockpool" / "server" / "http.py"


def serve() -> None:
    """The server, in a process whose engine takes no request."""

    def refuse(*_: Any, **__: Any) -> None:
        raise ValueError("this engine computes nothing")

    BlockPoolBatchEngine.insert = refuse  # type: ignore[method-assign]
    from mlx_blockpool.cli import main

    main(sys.argv[2:])


def chat(tokens: int) -> list[dict[str, str]]:
    """About this many tokens, in turns of 1,500."""
    text = SOURCE.read_text()
    messages = [{"role": "system", "content": "You are a coding agent."}]
    for turn in range(tokens // 1500):
        start = turn * 997 % 3000
        messages.append({"role": "user", "content": f"File {turn}:\n{text[start : start + 5000]}"})
        messages.append({"role": "assistant", "content": f"I have read file {turn}."})
    return [*messages, {"role": "user", "content": "Which of them opens the socket?"}]


def seconds(server: Server, messages: list[dict[str, str]]) -> float:
    """Until the engine has refused a request."""
    begin = time.perf_counter()
    try:
        server.chat(messages, 1)
    except urllib.error.HTTPError as error:
        if b"computes nothing" not in error.read():
            raise
        return time.perf_counter() - begin
    raise AssertionError("the engine has taken a request")


def main() -> None:
    args = options(__doc__ or "")
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        config = Path(folder, "config.json")
        config.write_text(config.read_text().replace("65536", str(1 << 20)))
        command = [sys.executable, __file__, "--serve", "serve", "--no-store"]
        server = Server([*command, "--pool-bytes", "2GB"], Path(folder))
        try:
            for size in SIZES[:1] if args.quick else SIZES:
                messages = chat(size)
                first, known = seconds(server, messages), []
                for turn in range(5):
                    messages += [
                        {"role": "assistant", "content": "The third one."},
                        {"role": "user", "content": f"And {turn}? {SOURCE.read_text()[:1500]}"},
                    ]
                    known.append(seconds(server, messages))
                known_s = statistics.median(known)
                report(
                    args,
                    "host",
                    f"{size} tokens",
                    ours_first_ms=1000 * first,
                    ours_known_ms=1000 * known_s,
                    share=known_s / first,
                )
        finally:
            server.stop()


if __name__ == "__main__":
    serve() if "--serve" in sys.argv else main()
