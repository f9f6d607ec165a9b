"""What a client and the server say to each other, noted on its way through."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

GENERATES = ("/v1/messages", "/v1/chat/completions", "/v1/responses", "/v1/completions")


@dataclass(frozen=True)
class Exchange:
    """A request and its answer.

    `cached` of `prompt` tokens were known, where it was about a prompt.
    arrivals: (time, bytes of the answer so far) of each part.
    """

    method: str
    path: str
    body: str
    status: int
    answer: str
    cached: int | None = None
    prompt: int | None = None
    arrivals: Sequence[tuple[float, int]] = ()

    @property
    def is_reply(self) -> bool:
        return self.path.partition("?")[0] in GENERATES and self.prompt is not None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@contextmanager
def noted(port: int, target: int) -> Iterator[list[Exchange]]:
    """Pass what comes to `port` on to `target`; the list grows with each exchange."""
    exchanges: list[Exchange] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def pass_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            connection = http.client.HTTPConnection("127.0.0.1", target, timeout=600)
            kept = {
                name: value
                for name, value in self.headers.items()
                if name.lower() not in ("connection", "accept-encoding")
            }
            connection.request(self.command, self.path, body or None, kept)
            response = connection.getresponse()
            self.send_response_only(response.status)
            for name, value in response.getheaders():
                if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                    self.send_header(name, value)
            self.send_header("Connection", "close")
            self.end_headers()
            self.close_connection = True
            answer, arrivals = b"", []
            for part in self._sent(response):
                answer += part
                arrivals.append((time.monotonic(), len(answer)))
            tokens = response.headers.get("X-Cache-Tokens", "").partition("/")
            known = tuple(
                int(part) if part.isdecimal() else None for part in (tokens[0], tokens[2])
            )
            connection.close()
            texts = body.decode(errors="replace"), answer.decode(errors="replace")
            exchanges.append(
                Exchange(
                    self.command, self.path, texts[0], response.status, texts[1], *known, arrivals
                )
            )

        def _sent(self, response: http.client.HTTPResponse) -> Iterator[bytes]:
            while part := response.read1(1 << 16):
                yield part
                with suppress(OSError):
                    self.wfile.write(part)

        do_GET = do_POST = do_HEAD = do_DELETE = pass_on  # noqa: N815

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield exchanges
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
