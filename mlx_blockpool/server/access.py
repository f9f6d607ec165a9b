"""The access policy: which requests are served, by their keys, hosts, origins and sizes, and what the owner of a key may see.

Checks only: no sockets. Any thread may call anything here.

With several API keys each has a name, and owns the agents of its requests. Such an agent is noted under both names, with a
character between them that no client can send, so that agents of two owners never have the same name.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import re
import socket
import threading
import time
from dataclasses import dataclass
from email import errors as email_errors
from typing import Any
from urllib.parse import urlsplit

from ..config import AccessConfig
from ..errors import BlockpoolError
from ..store.agent_files import SEPARATOR

# The endpoints of mlx-lm's server, with the origins that its documentation promises.
COMPLETIONS = ("/v1/completions", "/v1/chat/completions", "/chat/completions")
STOCK_PATHS = (*COMPLETIONS, "/v1/models", "/health", "/")
# Anthropic's clients send a request here to see whether the server runs.
HELLO = "/api/hello"
# These need no key, and neither does the page: they only show that the server runs.
OPEN = ("/health", HELLO)
# The body of these requests is a file, which the endpoint reads from the wire and bounds.
FILES = re.compile(r"/v1/agents/[^/]+/import")
# Schemes of origins of installed apps and extensions; no page on the web can have one. A downloaded page can have `file`.
APPS = ("app", "capacitor", "electron", "ionic", "tauri", "vscode-file", "vscode-webview", "wails")
EXTENSIONS = ("chrome-extension", "moz-extension", "safari-web-extension")
LONGEST_AGENT = 256
LONGEST_NAME = 1024
# A malformed header line makes the parser drop all headers after it.
NO_HEADERS = (
    email_errors.FirstHeaderLineIsContinuationDefect,
    email_errors.InvalidHeaderDefect,
    email_errors.MisplacedEnvelopeHeaderDefect,
    email_errors.MissingHeaderBodySeparatorDefect,
)
# All but the last part of a path in an error's text. A path after a method is one of the endpoints.
FOLDERS = re.compile(r"(?<![\w.:/])(?<!GET )(?<!POST )(?<!DELETE )(?:/[^\s/'\":,;()]+)+/(?=[^\s/'\":,;()])")


@dataclass(frozen=True)
class Rejected:
    """The reason for which the policy rejects a request: an HTTP status, and a message for the client."""

    status: int
    message: str


class AccessPolicy:
    """The checks of one server.

    room, idle: a connection holds a place in `room` while a request is read and served, and in `idle` between two requests.
    event_readers: a place for each connection that reads events.
    bodies:     the memory of all requests' bodies together.
    """

    def __init__(self, config: AccessConfig | None = None) -> None:
        self.config = config = AccessConfig() if config is None else config
        self.is_local = is_loopback(config.host)
        self._keys: list[tuple[str | None, str]] = [*config.api_keys]
        if config.api_key is not None:
            self._keys.append((None, config.api_key))
        self.room = threading.BoundedSemaphore(config.max_connections)
        self.idle = threading.BoundedSemaphore(config.max_connections)
        self.event_readers = threading.BoundedSemaphore(config.event_readers)
        self.bodies = ByteBudget(config.bodies * config.max_body_bytes)

    @property
    def is_open(self) -> bool:
        """Return whether requests need no key."""
        return not self._keys

    def wait_until_empty(self, seconds: float) -> bool:
        """Admit no more requests, and wait for the others to end. Returns whether they did within the time."""
        until = time.monotonic() + seconds
        return all(self.room.acquire(timeout=max(0.0, until - time.monotonic())) for _ in range(self.config.max_connections))

    def check_bind(self) -> None:
        """Raises BlockpoolError for a server without keys that other machines reach."""
        if not self.is_local and not self._keys and not self.config.allow_remote:
            raise BlockpoolError(
                f"--host {self.config.host} lets other machines in, and there is no --api-key: anyone who reaches the port could "
                "use the models and read prompts. Give --api-key-file FILE or MLX_BLOCKPOOL_API_KEY, leave --host at 127.0.0.1, "
                "or say --allow-remote if the network is yours alone."
            )

    def check(self, method: str, path: str, headers: Any) -> Rejected | None:
        """Return why a request is rejected, or None. `path` without its query; `headers`: as http.server parses them."""
        return (
            self._check_headers(headers)
            or self._check_host(headers)
            or self._check_origin(method, path, headers)
            or self._check_key(method, path, headers)
        )

    def check_body(self, path: str, headers: Any) -> Rejected | None:
        """Return why the body of a request is rejected, by its declared length, or None."""
        if headers.get("Transfer-Encoding") is not None:
            return Rejected(411, "Transfer-Encoding is not supported. Send the body in one piece with its Content-Length.")
        found = set(headers.get_all("Content-Length", []))
        if not found:
            return None
        length = found.pop()
        if found or not (length.isascii() and length.isdecimal()) or len(length) > 18:
            return Rejected(400, "Invalid Content-Length header")
        most = self.config.max_body_bytes
        if int(length) > most and not FILES.fullmatch(path):
            return Rejected(413, f"Request exceeds the maximum size: {length} bytes > {most} maximum. Raise --max-body.")
        return None

    def _check_headers(self, headers: Any) -> Rejected | None:
        size, most = sum(len(name) + len(value) for name, value in headers.items()), self.config.max_header_bytes
        if headers.get_unixfrom() or any(isinstance(defect, NO_HEADERS) for defect in headers.defects):
            return Rejected(400, "A header line is malformed. Write 'Name: value', with no space before the colon.")
        if len(headers) > self.config.max_headers:
            return Rejected(431, f"The request has {len(headers)} headers; at most {self.config.max_headers} are read.")
        return Rejected(431, f"The request has {size} bytes of headers; at most {most} are read.") if size > most else None

    def _check_host(self, headers: Any) -> Rejected | None:
        """Reject DNS rebinding: a page whose name resolves to this machine sends its own name in Host."""
        allowed = self.config.allowed_hosts
        if not (self.is_local or allowed):
            return None
        for host in headers.get_all("Host", []):
            name = host_name(host)
            if name not in (self.config.host.lower(), *allowed) and not is_loopback_name(name):
                advice = "This server answers to localhost. Start it with --allow-hosts NAME."
                return Rejected(403, f"Host {shown(host)} is not allowed. {advice}")
        return None

    def _check_origin(self, method: str, path: str, headers: Any) -> Rejected | None:
        """Reject pages in a browser; other clients send no Origin.

        By default the endpoints of mlx-lm answer pages from anywhere, and those that only this server has do not.
        """
        origin, allowed = headers.get("Origin"), self.config.allowed_origins
        if origin is None or method == "OPTIONS" or origin in allowed or "*" in allowed or not is_foreign(origin):
            return None
        if self._is_own_page(origin, headers):
            return None
        if not allowed and (path in STOCK_PATHS or is_model(path) or self._keys):
            return None
        return Rejected(403, f"Origin {shown(origin)} is not allowed: it is a page from elsewhere. Add it to --allowed-origins.")

    def _is_own_page(self, origin: str, headers: Any) -> bool:
        """Return whether an Origin is a page of this server, under an address or an allowed name, which no other page has."""
        host = headers.get("Host", "").strip().lower()
        if origin.lower() not in (f"http://{host}", f"https://{host}"):
            return False
        name = host_name(host)
        return name in (self.config.host.lower(), *self.config.allowed_hosts) or is_address(name)

    def _check_key(self, method: str, path: str, headers: Any) -> Rejected | None:
        is_open = method == "OPTIONS" or (method in ("GET", "HEAD") and (path in OPEN or is_page(path)))
        if not self._keys or is_open or self._matching(headers):
            return None
        fault = "The API key is wrong" if any(_given(headers)) else "The request has no API key"
        return Rejected(401, f"{fault}. Send the server's key as 'Authorization: Bearer KEY' or 'x-api-key: KEY'.")

    def owner(self, headers: Any) -> str | None:
        """The name of the key that a request carries; None: keys have no names."""
        return next((name for name, _ in self._matching(headers)), None)

    def _matching(self, headers: Any) -> list[tuple[str | None, str]]:
        given = _given(headers)
        # Every key is compared, so that the time does not depend on which one matches.
        matches = [[hmac.compare_digest(_bytes(value), _bytes(key)) for value in given] for _, key in self._keys]
        return [named for named, match in zip(self._keys, matches, strict=True) if any(match)]


def _given(headers: Any) -> list[str]:
    """The keys that a request carries."""
    kind, _, token = headers.get("Authorization", "").partition(" ")
    return [headers.get("x-api-key", ""), token.strip() if kind.lower() == "bearer" else ""]


class ByteBudget:
    """Bytes that all requests share. No request waits for them; any thread may call this."""

    def __init__(self, size: int) -> None:
        self.size = self.left = size
        self._changing = threading.Lock()

    def acquire(self, count: int) -> bool:
        """Take `count` bytes from the budget. False if fewer are left."""
        with self._changing:
            if count > self.left:
                return False
            self.left -= count
            return True

    def release(self, count: int) -> None:
        with self._changing:
            self.left += count


class BudgetShare:
    """The bytes of a ByteBudget that one request holds."""

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self._held = 0

    def grow(self, count: int) -> bool:
        """Acquire `count` more bytes. False if the budget has fewer left."""
        if not self._budget.acquire(count):
            return False
        self._held += count
        return True

    def release(self) -> None:
        self._budget.release(self._held)
        self._held = 0


def is_page(path: str) -> bool:
    """Return whether a path is that of the page or one of its files, which hold no data."""
    return path in ("/", "/favicon.ico") or path.startswith("/page/")


def is_model(path: str) -> bool:
    """Return whether a path names one model."""
    return path.startswith("/v1/models/")


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches a server on `host`. Raises OSError for a name that does not resolve."""
    found = socket.getaddrinfo(host or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return all(ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback for *_, address in found)


def is_loopback_name(name: str) -> bool:
    """Return whether a name or address of a client can only be this machine."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def is_address(name: str) -> bool:
    """Return whether a name is an IP address, which no other machine's page can be rebound to."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_foreign(origin: str) -> bool:
    """Return whether an Origin is neither a page of this machine nor an app or extension on it."""
    try:
        parts = urlsplit(origin)
        name = parts.hostname or ""
    except ValueError:
        return True
    if parts.scheme in ("http", "https"):
        return not is_loopback_name(name)
    return parts.scheme not in (*APPS, *EXTENSIONS) or not name


def host_name(host: str) -> str:
    """The name in a Host header, without its port."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].rstrip(".")


def checked_text(what: str, value: str, most: int = LONGEST_NAME) -> str:
    """Return `value`. Raises ValueError for more than `most` characters, or unprintable ones."""
    if len(value) > most:
        raise ValueError(f"{what} has {len(value)} characters; at most {most} are allowed")
    if not value.isprintable():
        raise ValueError(f"{what} has unprintable characters")
    return value


def header_text(value: str) -> str:
    """A header's value: http.server decodes bytes as Latin-1, and most clients write UTF-8."""
    try:
        return value.encode("latin-1").decode()
    except UnicodeError:
        return value


def cause_of(error: Exception) -> str:
    """An unexpected error for a client, in one line and without folders."""
    first = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {without_folders(first)[:300]}"


def without_folders(text: str) -> str:
    """A text for clients, with only the last part of each path."""
    return FOLDERS.sub("", text)


def shown(text: str, most: int = 80) -> str:
    """The beginning of a client's text, for a response."""
    return repr(text if len(text) <= most else f"{text[:most]}...")


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


# -- owners ------------------------------------------------------------------------------------------------------------


def noted_name(owner: str | None, agent: str) -> str:
    """The name that an agent of an owner is noted under."""
    return agent if owner is None else f"{owner}{SEPARATOR}{agent}"


def own_name(name: str) -> str:
    """The owner's name for the agent that is noted under `name`."""
    return name.rpartition(SEPARATOR)[2]


def belongs(name: str, owner: str | None) -> bool:
    """Return whether an agent is one of this owner's; without owners every agent is every client's."""
    return owner is None or name.startswith(f"{owner}{SEPARATOR}")


def as_owner_sees(owner: str | None, report: Any) -> Any:
    """A report with the names of the owner's agents as the owner knows them."""
    if owner is None:
        return report
    own = json.loads(json.dumps(report).replace(json.dumps(f"{owner}{SEPARATOR}")[1:-1], ""))
    return _without_others(owner, own)


def _without_others(owner: str, report: Any) -> Any:
    """A report whose names are shown with their owner's, with only this owner's names and without the prefix."""
    if isinstance(report, list):
        return [_without_others(owner, item) for item in report]
    if not isinstance(report, dict):
        return report
    found = {name: _without_others(owner, item) for name, item in report.items()}
    if "shown" in found:
        found["shown"] = found["shown"].removeprefix(f"{owner}/")
    if "behind" in found and isinstance(found.get("agents"), list):
        found["agents"] = [name.removeprefix(f"{owner}/") for name in found["agents"] if name.startswith(f"{owner}/")]
    return found


def own_figures(owner: str | None, report: dict[str, Any]) -> dict[str, Any]:
    """The figures of GET /v1/cache with the owner's agents alone."""
    if owner is None:
        return report
    own = {own_name(name): figures for name, figures in (report.get("agents") or {}).items() if belongs(name, owner)}
    models = {name: own_figures(owner, model) for name, model in (report.get("models") or {}).items()}
    return report | ({"agents": own} if "agents" in report else {}) | ({"models": models} if models else {})
