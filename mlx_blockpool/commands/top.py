"""`mlx-blockpool top`: a running server's facts in a terminal. Reads them over HTTP; imports no
mlx.

The main thread draws, and another one reads.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import select
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..config import ADMIN_MARK, check_url
from ..errors import BlockpoolError
from ..formatting import Report, plain
from . import top_screen

URL = "http://127.0.0.1:8080"
SECONDS = 1.0
MOST_OFTEN_SECONDS = 0.1
# An answer may wait for a chunk of a prompt.
ANSWER_SECONDS = 30.0
# On the screen the next answer may come sooner.
POLL_ANSWER_SECONDS = 5.0
# The errors that the answers of another program can cause where they are used.
FOREIGN = (AttributeError, LookupError, TypeError, ValueError, ArithmeticError, RecursionError)
HEALTH = "/health"
PATHS = {
    "health": HEALTH,
    "cache": "/v1/cache",
    "agents": "/v1/agents",
    "models": "/admin/models",
    "hour": "/v1/cache/hour",
    "last": "/v1/cache/explain",
    "requests": "/v1/cache/map",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `mlx-blockpool top`."""
    parser.add_argument("--url", default=URL, help=f"the URL of the server (default: {URL})")
    key = "a file with the server's key (default: the variable MLX_BLOCKPOOL_API_KEY)"
    parser.add_argument("--api-key-file", type=Path, metavar="FILE", help=key)
    parser.add_argument(
        "--seconds",
        type=float,
        default=SECONDS,
        metavar="N",
        help="how often the facts are read (default: 1)",
    )
    parser.add_argument("--once", action="store_true", help="print the facts once")
    parser.add_argument("--json", action="store_true", help="print the facts once, as JSON")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> str:
    args.url = check_url(args.url)
    server = Server(args.url, api_key(args.api_key_file))
    server.read()
    if args.json:
        return json.dumps(server.facts, indent=2)
    try:
        if args.once or not sys.stdout.isatty():
            return top_screen.text(server.facts, args.url)
        _watch(server, max(args.seconds, MOST_OFTEN_SECONDS))
        return f"{args.url}: {top_screen.summary(server.facts)}"
    except FOREIGN as error:
        what = (
            f"{server.url} does not answer as this version of mlx-blockpool does "
            f"({type(error).__name__}: {plain(str(error))})"
        )
        raise BlockpoolError(f"{what}. Give --url another server.") from error


def api_key(file: Path | None, admins: bool = True) -> str | None:
    """The key in a file, of several the first one of an admin, or the first one that is not, by
    `admins`; without a file the one in the environment.
    """
    if file is None:
        return os.environ.get("MLX_BLOCKPOOL_API_KEY") or None
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise BlockpoolError(
            f"Cannot read --api-key-file {file}: {error}. Give a text file with the server's key."
        ) from error
    keys = [line.partition(":")[2] or line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise BlockpoolError(
            f"--api-key-file {file} is empty. Give a text file with the server's key."
        )
    of_kind = (key for key in keys if key.endswith(ADMIN_MARK) == admins)
    return next(of_kind, keys[0]).removesuffix(ADMIN_MARK)


class Server:
    """A server at `url`, with its API key.

    facts: what the screen shows, as last read. problem: why they could not be read again, if that
    failed.
    """

    def __init__(self, url: str, key: str | None) -> None:
        self.url = url.rstrip("/")
        self.facts: Report = {}
        self.problem = ""
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        # Never through a proxy: the server is local or given by its address.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def read(self, seconds: float = ANSWER_SECONDS) -> None:
        """Read all facts once, each within `seconds`.

        A fact that an older server lacks is None. Raises BlockpoolError.
        """
        facts = {name: self.get(path, seconds) for name, path in PATHS.items()}
        if facts["cache"] is None:
            raise BlockpoolError(
                f"{self.url} is not a server of mlx-blockpool: it has no /v1/cache. Give --url "
                "another one."
            )
        # The rest of the map is for the page.
        self.facts = facts | {"requests": (facts["requests"] or {}).get("requests")}

    def poll(self, seconds: float) -> None:
        """Read the facts again and again, until the process ends."""
        while True:
            time.sleep(seconds)
            try:
                self.read(POLL_ANSWER_SECONDS)
                self.problem = ""
            except BlockpoolError as error:
                self.problem = str(error)

    def get(self, path: str, seconds: float) -> Any:
        """The JSON object at a path, or None if the server does not serve it.

        Raises BlockpoolError.
        """
        try:
            request = urllib.request.Request(self.url + path, headers=self._headers)
        except ValueError as error:
            raise BlockpoolError(
                f"{self.url} is not a URL: {error}. Give --url something like {URL}."
            ) from error
        try:
            try:
                answer = self._opener.open(request, timeout=seconds)
            except urllib.error.HTTPError as error:
                if error.code == http.HTTPStatus.UNAUTHORIZED:
                    advice = "Give --api-key-file or MLX_BLOCKPOOL_API_KEY the server's key"
                    raise BlockpoolError(f"{self.url} rejects the key. {advice}.") from error
                if path != HEALTH:
                    return None
                # An unhealthy server answers 503 with its state.
                answer = error
            with answer:
                found = json.load(answer)
            if not isinstance(found, dict):
                raise ValueError("the answer is not a JSON object")
            return found
        except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
            what = f"Cannot read {self.url}{path}: {plain(str(getattr(error, 'reason', error)))}"
            raise BlockpoolError(f"{what}. Start the server, or give --url another one.") from error


# -- the terminal ----------------------------------------------------------------------------------


def _watch(server: Server, seconds: float) -> None:
    """Draw the facts until the person types q or ends the process."""
    from rich.live import Live

    threading.Thread(target=server.poll, args=[seconds], daemon=True).start()
    try:
        with _keys() as has_quit, Live(screen=True, auto_refresh=False) as live:
            while True:
                screen = top_screen.screen(
                    server.facts, server.url, *live.console.size, server.problem
                )
                live.update(screen, refresh=True)
                if has_quit(seconds):
                    return
    except KeyboardInterrupt:
        return


@contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """A function that waits at most the given seconds for the key q, and returns whether it was
    typed.
    """
    import termios
    import tty

    if not sys.stdin.isatty():
        yield threading.Event().wait
        return
    before = termios.tcgetattr(sys.stdin)

    def has_quit(seconds: float) -> bool:
        ready, _, _ = select.select([sys.stdin], [], [], seconds)
        return bool(ready) and os.read(sys.stdin.fileno(), 16) in (b"q", b"Q", b"\x04")

    try:
        tty.setcbreak(sys.stdin)
        yield has_quit
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
