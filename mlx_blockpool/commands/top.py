"""`mlx-blockpool top`: a running server's facts in a terminal. Reads them over HTTP; imports no mlx."""

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
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import BlockpoolError
from ..formatting import Report, plain
from . import top_screen

URL = "http://127.0.0.1:8080"
SECONDS = 1.0
MOST_OFTEN_SECONDS = 0.1
# Of one answer, which may wait for a chunk of a prompt; the events' connection is kept by a comment every 15 seconds.
ANSWER_SECONDS, SILENT_SECONDS = 30.0, 40.0
# An event stream that has ended is opened again after this time.
RETRY_SECONDS = 2.0
# What the answers of another program raise where they are used.
FOREIGN = (AttributeError, LookupError, TypeError, ValueError, ArithmeticError, RecursionError)
PATHS = {
    "health": "/health",
    "cache": "/v1/cache",
    "agents": "/v1/agents",
    "models": "/admin/models",
    "hour": "/v1/cache/hour",
    "last": "/v1/cache/explain",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `mlx-blockpool top`."""
    parser.add_argument("--url", default=URL, help=f"where the server is (default: {URL})")
    key = "a file with the server's key; MLX_BLOCKPOOL_API_KEY does the same"
    parser.add_argument("--api-key-file", type=Path, metavar="FILE", help=key)
    parser.add_argument("--seconds", type=float, default=SECONDS, metavar="N", help="how often the facts are read (default: 1)")
    parser.add_argument("--once", action="store_true", help="print the facts once")
    parser.add_argument("--json", action="store_true", help="print the facts once, as JSON")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> str:
    server = Server(args.url, api_key(args.api_key_file))
    server.read()
    if args.json:
        return json.dumps(server.facts, indent=2)
    if args.once or not sys.stdout.isatty():
        with _as_expected(server.url):
            return top_screen.text(server.facts, args.url)
    _watch(server, max(args.seconds, MOST_OFTEN_SECONDS))
    with _as_expected(server.url):
        return f"{args.url}: {top_screen.summary(server.facts)}"


@contextmanager
def _as_expected(url: str) -> Iterator[None]:
    """Raises BlockpoolError where the block fails because a server's facts are not those of this version."""
    try:
        yield
    except FOREIGN as error:
        what = f"{url} does not answer as this version of mlx-blockpool does ({type(error).__name__}: {plain(str(error))})"
        raise BlockpoolError(f"{what}. Give --url another server.") from error


def api_key(file: Path | None) -> str | None:
    """The key in a file, which may be the first of several with names; else the environment's."""
    if file is None:
        return os.environ.get("MLX_BLOCKPOOL_API_KEY") or None
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise BlockpoolError(f"Cannot read --api-key-file {file}: {error}. Give a text file with the server's key.") from error
    first = next((line for line in lines if line and not line.startswith("#")), "")
    if not first:
        raise BlockpoolError(f"--api-key-file {file} is empty. Give a text file with the server's key.")
    return first.partition(":")[2] or first


@dataclass
class Requests:
    """The requests that run or wait, by their ids, kept up to date by a server's events."""

    running: dict[str, Report] = field(default_factory=dict)

    def apply(self, event: Report) -> None:
        kind, id = event["kind"], event.get("id", "")
        if kind == "request_begun":
            state = {"id": id, "agent": event.get("agent"), "model": event["model"], "state": "waiting", "since": event["time"]}
            self.running[id] = {**state, "done": 0, "total": event["prompt_tokens"]}
        elif kind == "request_ended":
            self.running.pop(id, None)
        elif kind == "gap":
            # What ended meanwhile is not known.
            self.running.clear()
        elif id in self.running:
            self.running[id] |= _change(kind, event, self.running[id])


def _change(kind: str, event: Report, before: Report) -> Report:
    if kind == "request_started":
        cached = event["cached_tokens"]
        # The first step of the reply computes the last token, and nothing else of a prompt that is cached.
        return {"state": "reply" if cached >= before["total"] - 1 else "prefill", "done": cached, "cached": cached}
    if kind == "request_progress":
        done, total = event["done"], event["total"]
        return {"done": done, "total": total, "state": "reply" if done >= total else "prefill"}
    states = {"restore_begun": "from disk", "restore_ended": "prefill", "swapped_out": "swapped out"}
    states["swapped_in"] = "reply" if before["done"] >= before["total"] else "prefill"
    return {"state": states[kind]} if kind in states else {}


class Server:
    """A server at `url`, which takes `key`.

    latest:    each fact as it was read last. problems: why a fact could not be read again.
    """

    def __init__(self, url: str, key: str | None) -> None:
        self.url = url.rstrip("/")
        self.requests = Requests()
        self.latest: Report = {}
        self.problems: dict[str, str] = {}
        self._key = key
        # No proxy stands between a terminal and its server.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def read(self) -> None:
        """Read everything once. What an older server does not have is None. Raises BlockpoolError."""
        for name in PATHS:
            self.latest[name] = self._get(PATHS[name])
        if self.latest["cache"] is None:
            raise BlockpoolError(f"{self.url} is no server of mlx-blockpool: it has no /v1/cache. Give --url another one.")

    @property
    def facts(self) -> Report:
        """Everything that the screen shows."""
        return self.latest | {"requests": list(self.requests.running.values())}

    def watch(self, seconds: float) -> None:
        """Keep everything up to date, for as long as the process runs. A fact that is slow holds up no other."""
        for name in PATHS:
            threading.Thread(target=self._poll, args=[name, seconds], name=name, daemon=True).start()
        threading.Thread(target=self._follow, name="events", daemon=True).start()

    def _poll(self, name: str, seconds: float) -> None:
        while True:
            time.sleep(seconds)
            try:
                self.latest[name] = self._get(PATHS[name]) or self.latest[name]
                self.problems.pop(name, None)
            except BlockpoolError as error:
                self.problems[name] = str(error)

    def _follow(self) -> None:
        while True:
            try:
                with self._open("/v1/cache/events", SILENT_SECONDS) as stream:
                    for event in events(stream):
                        self.requests.apply(event)
            except (BlockpoolError, OSError, http.client.HTTPException, *FOREIGN):
                pass
            self.requests.running.clear()
            time.sleep(RETRY_SECONDS)

    def _get(self, path: str) -> Any:
        try:
            found = self._read(path)
            if not isinstance(found, dict | None):
                raise ValueError("the answer is no JSON object")
            return found
        except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
            what = f"Cannot read {self.url}{path}: {plain(str(getattr(error, 'reason', error)))}"
            raise BlockpoolError(f"{what}. Start the server, or give --url another one.") from error

    def _read(self, path: str) -> Any:
        try:
            with self._open(path, ANSWER_SECONDS) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            # A server that is not well says so with a 503.
            return json.load(error) if path == PATHS["health"] else None

    def _open(self, path: str, seconds: float) -> Any:
        headers = {} if self._key is None else {"Authorization": f"Bearer {self._key}"}
        try:
            return self._opener.open(urllib.request.Request(self.url + path, headers=headers), timeout=seconds)
        except urllib.error.HTTPError as error:
            if error.code == http.HTTPStatus.UNAUTHORIZED:
                advice = "Give --api-key-file or MLX_BLOCKPOOL_API_KEY the server's key"
                raise BlockpoolError(f"{self.url} rejects the key. {advice}.") from error
            raise
        except ValueError as error:
            raise BlockpoolError(f"{self.url} is no URL: {error}. Give --url something like {URL}.") from error


def events(lines: Iterable[bytes]) -> Iterator[Report]:
    """The JSON objects of a stream of server-sent events."""
    for line in lines:
        if line.startswith(b"data: "):
            yield json.loads(line.removeprefix(b"data: "))


# -- the terminal ------------------------------------------------------------------------------------------------------


def _watch(server: Server, seconds: float) -> None:
    """Draw the facts until the person types q or ends the process."""
    from rich.live import Live

    server.watch(seconds)
    try:
        with _keys() as has_quit, Live(screen=True, auto_refresh=False) as live:
            while True:
                problem = next(iter(server.problems.values()), "")
                with _as_expected(server.url):
                    screen = top_screen.screen(server.facts, server.url, live.console.size, problem)
                live.update(screen, refresh=True)
                if has_quit(seconds):
                    return
    except KeyboardInterrupt:
        return


@contextmanager
def _keys() -> Iterator[Any]:
    """A function that waits so many seconds for the key q, and returns whether it was typed."""
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
