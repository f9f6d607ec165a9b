"""HTTP: mlx-lm's handler behind the access policy, with the endpoints that mlx-lm does not have.

A request is read whole, within its limits and times, before any endpoint reads it. Connections are kept for further requests.
Every error is JSON in the shape of the protocol that the request speaks. Runs on the socket's thread, without caches.
"""

from __future__ import annotations

import io
import json
import logging
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from email.message import Message
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qs, urlsplit

from ..errors import BlockpoolError, FormError, ModelNotFoundError, PromptError, UnavailableError
from ..mlx_lm_compat import APIHandler
from .access import COMPLETIONS, FILES, HELLO, AccessPolicy, BudgetShare, Rejected, cause_of, is_model, own_figures, shown
from .agents.http import PATH as AGENTS
from .agents.http import AgentsEndpoint
from .api.anthropic import MESSAGES, MessagesEndpoint, is_models
from .api.completions import CompletionsEndpoint
from .api.embeddings import EMBEDDINGS, EmbeddingsEndpoint
from .api.endpoint import Endpoint
from .api.errors import anthropic_error, in_shape, is_below, is_openai, openai_error, openai_status, unknown_path
from .api.ollama import OLLAMA, RUNNING, OllamaEndpoint
from .api.responses import RESPONSES, ResponsesEndpoint
from .api.tokenizer import PATHS as TOKENIZER_PATHS
from .api.tokenizer import TokenizerEndpoint
from .explain import answer_about, is_explain
from .generator import BlockpoolGenerator
from .live.http import PATHS as LIVE
from .live.http import answer_live
from .models.http import COMMANDS, ModelsEndpoint, cache_report
from .page import FIGURES, send_page
from .page import PATHS as PAGE
from .page.cache_map import PATH as MAP
from .page.hour import PATH as HOUR
from .scope import RequestScope
from .wire import OnlyHeaders, Outgoing, TimedReader, WireBody, buffer_body, drain, drop_vanished, file_deadline

log = logging.getLogger(__name__)

# How long a request is read that can only be rejected, because there are too many connections.
CROWDED_SECONDS = 1.0
# Endpoints that answer every method below their path, and those that a POST to their path alone reaches.
ROOTS: dict[str, type[Endpoint]] = {
    MESSAGES: MessagesEndpoint,
    RESPONSES: ResponsesEndpoint,
    AGENTS: AgentsEndpoint,
    OLLAMA: OllamaEndpoint,
}
POSTS: dict[str, type[Endpoint]] = {
    **dict.fromkeys(COMPLETIONS, CompletionsEndpoint),
    **dict.fromkeys(TOKENIZER_PATHS, TokenizerEndpoint),
    EMBEDDINGS: EmbeddingsEndpoint,
}


class BlockpoolHandler(APIHandler):  # type: ignore[misc]
    """Serves the requests of one connection, one after the other.

    A connection takes one of the policy's places while a request of it is read and served, and none while it waits for the next
    one. `route`: the request's path without query and last slash. `answered`: the response's headers are written.
    """

    protocol_version = "HTTP/1.1"
    # Headers and body are separate writes: without this the second waits for the client's delayed acknowledgement.
    disable_nagle_algorithm = True

    response_generator: Any
    wfile: Any
    rfile: Any
    headers: Any
    request_version: str

    def setup(self) -> None:
        super().setup()
        self._generator: BlockpoolGenerator = self.response_generator
        self.rfile.close()
        self._incoming = TimedReader(self.connection, 0.0, 0.0)
        self._reader = io.BufferedReader(self._incoming)
        self._outgoing = Outgoing(self.wfile)
        self._crowded, self._is_new = False, True
        drop_vanished(self.connection, 2 * self._generator.access.config.send_seconds)
        self._begin_request()

    def _begin_request(self) -> None:
        """Forget the previous request."""
        self.response_generator = self.scope = RequestScope(self._generator, self.connection)
        self.access: AccessPolicy = self._generator.access
        config = self.access.config
        self._incoming.stall, self._incoming.until = config.stall_seconds, time.monotonic() + config.request_seconds
        self.rfile, self.wfile = self._reader, self._outgoing
        self._body: WireBody | None = None
        self._share = BudgetShare(self.access.bodies)
        self._outgoing.begin()
        self.headers, self.path, self.route = Message(), "", ""
        self.command, self.request_version, self._expects_continue = "", "HTTP/1.0", False
        self._headers_buffer: list[bytes] = []
        self.created = int(time.time())
        self.stream = self.answered = False

    def handle_one_request(self) -> None:
        """Serve the connection's next request with a place of the policy's, or reject it."""
        if not self._has_next():
            self.close_connection = True
            return
        self._begin_request()
        room = self.access.room
        self._crowded = not room.acquire(blocking=False)
        if self._crowded:
            self._incoming.until = time.monotonic() + CROWDED_SECONDS
        try:
            super().handle_one_request()
            self._end_request()
        except ConnectionError:
            self.close_connection = True
            self.log_message("the client hung up")
        finally:
            self._share.release()
            self.scope.pixels.release()
            if not self._crowded:
                room.release()
        self._is_new = False

    def _end_request(self) -> None:
        """End the response, and the connection if the next request would begin within the rest of this one."""
        self._outgoing.finish()
        if not self._outgoing.is_whole:
            self.close_connection = True
        elif self._body is not None and self._body.left:
            self._drain()

    def _has_next(self) -> bool:
        """Return whether another request comes before the connection has been idle for too long."""
        access, is_new = self.access, self._is_new
        is_idle = access.idle.acquire(blocking=False)
        if not (is_idle or is_new):
            return False
        seconds = access.config.stall_seconds if is_new else access.config.keep_alive_seconds
        self._incoming.stall = seconds if is_idle else CROWDED_SECONDS
        self._incoming.until = math.inf
        try:
            return bool(self._reader.peek(1))
        except (TimeoutError, OSError):
            return False
        finally:
            if is_idle:
                access.idle.release()

    # -- the request ---------------------------------------------------------------------------------------------------

    def handle_expect_100(self) -> bool:
        """The client waits for leave to send its body, which it gets once its headers are checked."""
        self._expects_continue = True
        return True

    def parse_request(self) -> bool:
        """http.server's, the access policy's checks, and the body, which is in `rfile` afterwards."""
        try:
            if not super().parse_request():
                return False
            rejected = self._check() or self._read_body()
        except TimeoutError:
            config = self.access.config
            limits = f"at most {config.stall_seconds:g} seconds without a byte, and {config.request_seconds:g} in all"
            rejected = Rejected(408, f"The request did not arrive in time: {limits}.")
        if rejected is not None:
            self._reject(rejected)
        self.connection.settimeout(self.access.config.send_seconds)
        return rejected is None

    def _check(self) -> Rejected | None:
        try:
            self.route = self.scope.path = urlsplit(self.path).path.rstrip("/") or "/"
        except ValueError as error:
            return Rejected(400, f"Bad path: {error}")
        if self._crowded:
            most = self.access.config.max_connections
            return Rejected(503, f"The server already has {most} connections. Try again when one of them has ended.")
        rejected = self.access.check(self.command, self.route, self.headers)
        self.scope.owner = self.access.owner(self.headers)
        return rejected or self.access.check_body(self.route, self.headers)

    def _read_body(self) -> Rejected | None:
        """Read the body, so that endpoints do not wait for it. A file stays on the wire."""
        length = int(self.headers.get("Content-Length", 0))
        if self._expects_continue and length:
            self._outgoing.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if FILES.fullmatch(self.route):
            self._incoming.until = file_deadline(self.access.config.request_seconds, length)
            self._body = WireBody(self._reader, length)
            self.rfile = io.BufferedReader(self._body)
            return None
        body = buffer_body(self._reader, length, self._share)
        if isinstance(body, Rejected):
            return body
        self.rfile = io.BytesIO(body)
        try:
            self._generator.prompts.check_body(body)
        except PromptError as error:
            return Rejected(400, str(error))
        return None

    def _reject(self, rejected: Rejected) -> None:
        """Answer a request that the policy does not let in, and close the connection."""
        self.close_connection = True
        if self.request_version == "HTTP/0.9":
            # http.server could not read the version, and would send a response without a status.
            self.request_version = "HTTP/1.0"
        self.connection.settimeout(self.access.config.send_seconds)
        if is_below(self.route, MESSAGES) or "anthropic-version" in self.headers:
            content = anthropic_error(rejected.status, rejected.message, self.scope.options.id)
        elif is_below(self.route, OLLAMA):
            content = {"error": rejected.message}
        else:
            content = openai_error(rejected.status, rejected.message)
        challenge = {"WWW-Authenticate": "Bearer"} if rejected.status == HTTPStatus.UNAUTHORIZED else {}
        self.send_json(rejected.status, content, challenge)
        self._outgoing.finish()
        if rejected.status != HTTPStatus.REQUEST_TIMEOUT:
            self._drain()

    def _drain(self) -> None:
        declared = self.headers.get("Content-Length")
        length = int(declared) if declared and declared.isdecimal() and len(declared) < 19 else 0
        if length or self.command not in ("GET", "HEAD", "OPTIONS"):
            drain(self.connection, self._reader, self._incoming, length, self.access.config.max_body_bytes)

    # -- endpoints -----------------------------------------------------------------------------------------------------

    def do_GET(self) -> None:  # noqa: N802
        with self._failures_answered():
            scope, generator = self.scope, self._generator
            if self.route == "/" and "text/html" not in self.headers.get("Accept", ""):
                # It is no browser.
                self.send_body(200, "text/plain", RUNNING)
            elif self.route in PAGE:
                send_page(self)
            elif self.route == "/v1/cache":
                report = own_figures(scope.owner, cache_report(generator.registry, generator.report))
                counts = {"prompts": generator.prompts.counts, "forms": generator.forms.report}
                self.send_json(200, {**report, **counts, "health": self._health()[1]})
            elif self.route in LIVE:
                answer_live(self)
            elif self.route == MAP:
                model = parse_qs(urlsplit(self.path).query).get("model", [None])[0]
                self.send_json(200, generator.maps.answer(scope.owner, model))
            elif self.route == HOUR:
                self.send_json(200, generator.hour.answer(scope.owner))
            elif is_explain(self.route):
                self.send_json(*answer_about(self.route, generator.explanations, scope.asker(self.headers)))
            elif self.route == "/admin/models":
                self.send_json(200, ModelsEndpoint(generator).figures())
            elif is_models(self.route, self.headers):
                MessagesEndpoint(self).answer()
            elif self.route == "/v1/models" or is_model(self.route):
                self._models()
            elif self.route == HELLO:
                self.send_json(200, {"message": "hello"})
            elif self.route == "/health":
                self.send_json(*self._health())
            else:
                self._answer_below()

    def do_HEAD(self) -> None:  # noqa: N802
        """The headers of do_GET; clients send HEAD / to see whether the server runs."""
        self.wfile = OnlyHeaders(self.wfile)
        self.do_GET()

    def do_DELETE(self) -> None:  # noqa: N802
        with self._failures_answered():
            self._answer_below()

    def do_POST(self) -> None:  # noqa: N802
        with self._failures_answered():
            if self.route in COMMANDS:
                self._load_command()
            elif (endpoint := POSTS.get(self.route)) is not None:
                endpoint(self).answer()
            else:
                self._answer_below()

    def _answer_below(self) -> None:
        """Answer a request for something below one of ROOTS."""
        endpoint = next((kind for root, kind in ROOTS.items() if is_below(self.route, root)), None)
        if endpoint is None:
            self.send_json(404, {"error": unknown_path(self.route)})
        else:
            endpoint(self).answer()

    @contextmanager
    def _failures_answered(self) -> Iterator[None]:
        """The top of the request's thread: whatever an endpoint raises is this request's failure."""
        try:
            yield
        except ConnectionError as error:
            log.info("%s: the client hung up: %s", shown(self.path), error)
        except Exception as error:
            status, content = self._failure_of(error)
            if not self.answered:
                self.send_json(status, content)
            elif self.stream:
                self.wfile.write(f"data: {json.dumps(in_shape(status, content))}\n\n".encode())

    def _failure_of(self, error: Exception) -> tuple[int, dict[str, str]]:
        if isinstance(error, UnavailableError):
            log.warning("%s: %s", shown(self.path), error)
            return 503, {"error": str(error)}
        if isinstance(error, FormError):
            return 400, {"error": str(error)}
        log.exception("%s failed", shown(self.path))
        return 500, {"error": cause_of(error)}

    def _health(self) -> tuple[int, dict[str, Any]]:
        generator = self._generator
        status, body = generator.health.report(generator.is_healthy, generator.has_waiting)
        return status, body | generator.turns.condition.report()

    def _models(self) -> None:
        try:
            self.send_json(200, ModelsEndpoint(self._generator).find(self.route, self.created))
        except ModelNotFoundError as error:
            self.send_json(404, {"error": str(error)})

    def _load_command(self) -> None:
        """Have a model loaded or unloaded."""
        try:
            answer = ModelsEndpoint(self._generator).command(self.route, self.rfile.read())
        except (BlockpoolError, ValueError, RuntimeError) as error:
            answer = openai_status(error), {"error": str(error)}
        self.send_json(*answer)

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """http.server's, without the figures that a page in a browser reads again and again."""
        if not (code == HTTPStatus.OK and self.command == "GET" and self.route in FIGURES):
            super().log_request(code, size)

    # -- the response --------------------------------------------------------------------------------------------------

    def send_json(self, status: int, content: Any, headers: Mapping[str, str] | None = None) -> None:
        """Write JSON; an error of OpenAI's endpoints in its shape."""
        body = json.dumps(in_shape(status, content) if status >= 400 and is_openai(self.route) else content).encode()
        self.send_body(status, "application/json", body, headers)

    def send_body(self, status: int, content_type: str, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        """Write a whole response."""
        self._headers_buffer = []
        self.send_response(status)
        self.send_header("Content-type", content_type)
        self._set_cors_headers()
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def start_stream(self, content_type: str) -> None:
        """Write the headers of a stream."""
        self.send_response(200)
        self.send_header("Content-type", content_type)
        self.send_header("Cache-Control", "no-cache")
        self._set_cors_headers()
        self.end_headers()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer what http.server rejects, as JSON."""
        self._reject(Rejected(int(code), ". ".join(part for part in (message or HTTPStatus(code).phrase, explain) if part)))

    def end_headers(self) -> None:
        """Add what explains the request, and how its body ends, which mlx-lm leaves to the end of the connection."""
        self.answered = True
        status, sent = self._status_and_headers()
        for name, value in self.scope.headers(self.headers.get("X-Explain")).items():
            if name.lower().encode() not in sent:
                self.send_header(name, value)
        self._add_framing(status, sent.get(b"content-length"))

    def _add_framing(self, status: int, length: bytes | None) -> None:
        has_body = self.command != "HEAD" and status not in (204, 304)
        chunked = has_body and length is None and self.request_version >= "HTTP/1.1"
        if chunked:
            self.send_header("Transfer-Encoding", "chunked")
        elif has_body and length is None:
            self.close_connection = True
        if self._body is not None and self._body.left:
            self.close_connection = True
        if self.close_connection:
            self.send_header("Connection", "close")
        else:
            self.send_header("Connection", "keep-alive")
            self.send_header("Keep-Alive", f"timeout={int(self.access.config.keep_alive_seconds)}")
        super().end_headers()
        self._outgoing.begin_body(0 if not has_body else None if length is None else int(length), chunked)

    def _status_and_headers(self) -> tuple[int, dict[bytes, bytes]]:
        """The status and headers of the response in progress, with names in lower case."""
        status, *lines = b"".join(self._headers_buffer).split(b"\r\n")
        split = (line.partition(b":") for line in lines)
        return int((status.split() or [b"", b"0"])[1]), {name.lower(): value.strip() for name, _, value in split}
