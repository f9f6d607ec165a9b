"""`mlx-blockpool demo`: five agents talk to the bundled model, and to compare also on mlx-lm's own
server. Imports no mlx.
"""

from __future__ import annotations

import argparse
import http.client
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

from ..config import check_url
from ..demo import NAME, model_path
from ..demo.five_agents import saved, talk_all
from ..errors import BlockpoolError
from ..formatting import table
from .top import HEALTH, Server

ADVICE = "Give --url a server of this project that needs no key, or leave it out"
FAILURES = (OSError, http.client.HTTPException, ValueError, LookupError)
TURNS = 6
START_SECONDS = 120.0
# Without the settings of the user's own server.
SERVE = (sys.executable, "-m", "mlx_blockpool.cli", "serve", NAME)
OWN = (*SERVE, "--no-store", "--config", os.devnull)
STOCK = (sys.executable, "-m", "mlx_lm.server", "--model", model_path())


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `mlx-blockpool demo`."""
    parser.add_argument("--url", help="a server that runs (default: one runs during the demo)")
    turns = "questions of each agent (default: %(default)s)"
    parser.add_argument("--turns", type=int, default=TURNS, metavar="N", help=turns)
    compare = "the same conversations on mlx-lm's own server afterwards"
    parser.add_argument("--compare", action="store_true", help=compare)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> str:
    if args.turns < 1:
        raise BlockpoolError(f"--turns must be at least 1 (got {args.turns})")
    rows = [["server", "seconds", "tokens of prompts", "computed"]]
    with nullcontext(check_url(args.url)) if args.url is not None else _server(OWN) as url:
        before = _saved(url)
        rows.append(_row("mlx-blockpool", url, args.turns))
        seconds = _saved(url) - before
    if args.compare:
        with _server(STOCK) as url:
            rows.append(_row("mlx_lm.server", url, args.turns))
    return "\n".join(["", *table(rows), "", f"Reuse has saved {seconds:.1f} s of prefill here."])


def _saved(url: str) -> float:
    """saved(). Raises BlockpoolError for a server that does not say it."""
    try:
        return saved(url)
    except FAILURES as error:
        raise _unusable(url, error) from error


def _row(name: str, url: str, turns: int) -> list[str]:
    began = time.monotonic()
    try:
        replies = talk_all(url, turns)
    except FAILURES as error:
        raise _unusable(url, error) from error
    tokens = sum(total for total, _ in replies)
    computed = tokens - sum(cached for _, cached in replies)
    return [name, f"{time.monotonic() - began:.1f}", f"{tokens:,}", f"{computed:,}"]


def _unusable(url: str, error: Exception) -> BlockpoolError:
    is_answer = isinstance(error, urllib.error.HTTPError)
    what = f"answers {error}" if is_answer else f"does not answer: {error}"
    return BlockpoolError(f"{url} {what}. {ADVICE}.")


@contextmanager
def _server(command: Sequence[str]) -> Iterator[str]:
    """The URL of a server that runs in the block. Raises BlockpoolError if it does not start."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryFile("w+") as log:
        without_key = {k: v for k, v in os.environ.items() if k != "MLX_BLOCKPOOL_API_KEY"}
        process = subprocess.Popen(
            [*command, "--port", str(port)], stdout=log, stderr=log, env=without_key
        )
        try:
            server = Server(f"http://127.0.0.1:{port}", None)
            until = time.monotonic() + START_SECONDS
            while not _answers(server):
                if process.poll() is not None or time.monotonic() > until:
                    log.seek(0)
                    raise BlockpoolError(f"The server did not start: {log.read().strip()[-500:]}")
                time.sleep(0.2)
            yield server.url
        finally:
            process.terminate()
            process.wait()


def _answers(server: Server) -> bool:
    try:
        return server.get(HEALTH, 5.0) is not None
    except BlockpoolError:
        return False
