"""aiperf, a load generator made for other servers, against mlx-blockpool and mlx_lm.server: what a
foreign client measures.

Several conversations at a time with synthetic text, the same for both servers, which run as real
processes, in turns. All figures are aiperf's own; the cached tokens must be those that the pool has
counted. Needs the extra `bench`.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench_server import COMMANDS, Server, make_model
from measure import options, report

# aiperf's names, and the statistics of each that are kept.
FIGURES = {
    "time_to_first_token": {"p50": "ttft_ms", "p95": "ttft_p95_ms"},
    "inter_token_latency": {"p50": "token_ms"},
    "benchmark_duration": {"avg": "duration_s"},
    "total_usage_prompt_tokens": {"avg": "prompt_tokens"},
    "total_usage_prompt_cache_read_tokens": {"avg": "cached_tokens"},
    "error_request_count": {"avg": "errors"},
}


def program() -> str:
    """The path of aiperf: beside this Python, or on the search path."""
    found = shutil.which("aiperf", path=str(Path(sys.executable).parent)) or shutil.which("aiperf")
    assert found, "aiperf is not installed. Install it with: pip install -e '.[bench]'"
    return found


def profile(name: str, model: Path, conversations: int, turns: int, tokens: int) -> dict[str, Any]:
    """aiperf's figures of one server. The pool has counted the same cached tokens."""
    server = Server(COMMANDS[name], model)
    command = [
        program(),
        "profile",
        "--model",
        "default_model",
        "--tokenizer",
        str(model),
        "--url",
        f"127.0.0.1:{server.port}",
    ]
    command += [
        "--endpoint-type",
        "chat",
        "--streaming",
        "--use-server-token-count",
        "--random-seed",
        "1",
        "--ui",
        "none",
    ]
    command += [
        "--concurrency",
        str(conversations),
        "--num-sessions",
        str(conversations),
        "--session-turns-mean",
        str(turns),
    ]
    command += ["--synthetic-input-tokens-mean", str(tokens), "--output-tokens-mean", "24"]
    command += ["--request-count", str(conversations * turns)]
    try:
        with tempfile.TemporaryDirectory() as folder:
            ran = subprocess.run(
                [*command, "--artifact-dir", folder], capture_output=True, text=True, timeout=600
            )
            assert ran.returncode == 0, (
                f"aiperf ended with status {ran.returncode}:\n{(ran.stdout + ran.stderr)[-2000:]}"
            )
            (path,) = Path(folder).rglob("profile_export_aiperf.json")
            exported = json.loads(path.read_text())
        counted = server.get("/v1/cache") if name == "ours" else {}
    finally:
        server.stop()
    kept = [
        (metric, *each)
        for metric, names in FIGURES.items()
        if metric in exported
        for each in names.items()
    ]
    figures = {label: round(exported[metric][statistic], 2) for metric, statistic, label in kept}
    if name == "ours":
        assert figures["cached_tokens"] == counted["cached_tokens"], (
            f"the pool has counted {counted['cached_tokens']} tokens"
        )
    return {**figures, "version": exported["aiperf_version"]}


def main() -> None:
    args = options(__doc__ or "")
    conversations, turns, tokens = (2, 2, 50) if args.quick else (5, 4, 300)
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        found = {
            name: profile(name, Path(folder), conversations, turns, tokens)
            for name in ("stock", "ours")
        }
    version = {system.pop("version") for system in found.values()}.pop()
    figures = {
        f"{name}_{key}": value for name, system in found.items() for key, value in system.items()
    }
    ratio = round(figures["stock_ttft_p95_ms"] / figures["ours_ttft_p95_ms"], 2)
    case = f"{conversations} conversations of {turns} turns with {tokens} tokens each"
    report(args, "aiperf", case, aiperf=version, **figures, ratio_ttft_p95=ratio)


if __name__ == "__main__":
    main()
