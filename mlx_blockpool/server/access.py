"""The access policy: which requests are served, by their keys, hosts, origins and sizes. Checks only: no sockets.

Any thread may call anything here.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from email import errors as email_errors
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ..config import GuardConfig, parse_bytes
from ..errors import BlockpoolError

# The endpoints of mlx-lm's server, with the origins that its documentation promises.
STOCK_PATHS = ("/v1/completions", "/v1/chat/completions", "/chat/completions", "/v1/models", "/health", "/")
# Anthropic's clients send a request here to see whether the server runs.
HELLO = "/api/hello"
# These need no key: they show that the server runs, and no more.
OPEN = (("GET", "/health"), ("HEAD", "/health"), ("HEAD", "/"), ("GET", HELLO), ("HEAD", HELLO))
# The body of such a request is a file, which its endpoint reads from the wire and bounds.
FILES = re.compile(r"/v1/agents/[^/]+/import")
# Origins with these schemes belong to apps and extensions that a user has installed; no page on the web can have one.
# `file` is no such scheme: a page that a browser has downloaded can have it.
APPS = ("app", "capacitor", "electron", "ionic", "tauri", "vscode-file", "vscode-webview", "wails")
EXTENSIONS = ("chrome-extension", "moz-extension", "safari-web-extension")
LONGEST_AGENT = 256
KEY_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
LONGEST_NAME = 1024
# A malformed header line makes the parser drop all headers behind it.
NO_HEADERS = (
    email_errors.FirstHeaderLineIsContinuationDefect,
    email_errors.InvalidHeaderDefect,
    email_errors.MisplacedEnvelopeHeaderDefect,
    email_errors.MissingHeaderBodySeparatorDefect,
)
# A path in an error's text, all but its last part.
FOLDERS = re.compile(r"(?<![\w.:/])(?:/[^\s/'\":,;()]+)+/(?=[^\s/'\":,;()])")


@dataclass(frozen=True)
class Rejected:
    """Why the policy rejects a request: an HTTP status, and a message for the client."""

    status: int
    message: str


class AccessPolicy:
    """The checks of one server.

    `room`: a connection takes a place in it while a request of it is read and served, and one in `idle` between two requests.
    `bodies`: what the bodies of all requests may have in memory together.
    """

    def __init__(self, config: GuardConfig | None = None) -> None:
        self.config = config = GuardConfig() if config is None else config
        self.is_local = is_loopback(config.host)
        self._keys: list[tuple[str | None, str]] = [
            *config.api_keys,
            *([] if config.api_key is None else [(None, config.api_key)]),
        ]
        self.room = threading.BoundedSemaphore(config.max_connections)
        self.idle = threading.BoundedSemaphore(config.max_connections)
        self.bodies = ByteBudget(config.bodies * config.max_body_bytes)

    def wait_until_empty(self, seconds: float) -> bool:
        """Admit no more requests and wait for those that are served. Returns whether all have ended within the time."""
        until = time.monotonic() + seconds
        return all(self.room.acquire(timeout=max(0.0, until - time.monotonic())) for _ in range(self.config.max_connections))

    def check_bind(self) -> None:
        """Raises BlockpoolError for a server without keys that other machines can reach."""
        if not self.is_local and not self._keys and not self.config.allow_remote:
            raise BlockpoolError(
                f"--host {self.config.host} lets other machines in, and there is no --api-key: anyone who reaches the port could "
                "use the models and read prompts. Give --api-key-file FILE or MLX_BLOCKPOOL_API_KEY, leave --host at 127.0.0.1, "
                "or say --allow-remote if the network is yours alone."
            )

    def check(self, method: str, path: str, headers: Any) -> Rejected | None:
        """Why a request is rejected, or None. `path` without its query; `headers`: as http.server parses them."""
        return (
            self._check_headers(headers)
            or self._check_host(headers)
            or self._check_origin(method, path, headers)
            or self._check_key(method, path, headers)
        )

    def check_body(self, path: str, headers: Any) -> Rejected | None:
        """Why the body of a request is rejected, by its declared length, or None."""
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
                return Rejected(
                    403,
                    f"Host {shown(host)} is not allowed: this server answers to localhost. Start it with --allow-hosts NAME.",
                )
        return None

    def _check_origin(self, method: str, path: str, headers: Any) -> Rejected | None:
        """Which pages in a browser may send requests. Other clients send no Origin.

        By default mlx-lm answers pages from anywhere; endpoints that only this server has, such as explanations, do not.
        """
        origin, allowed = headers.get("Origin"), self.config.allowed_origins
        if origin is None or method == "OPTIONS" or origin in allowed or "*" in allowed or not is_foreign(origin):
            return None
        is_stock = path in STOCK_PATHS or is_model(path)
        if not allowed and (is_stock or self._keys):
            return None
        return Rejected(403, f"Origin {shown(origin)} is not allowed: it is a page from elsewhere. Add it to --allowed-origins.")

    def _check_key(self, method: str, path: str, headers: Any) -> Rejected | None:
        if not self._keys or method == "OPTIONS" or (method, path) in OPEN or self._matching(headers):
            return None
        fault = "The API key is wrong" if any(_given(headers)) else "The request has no API key"
        return Rejected(401, f"{fault}. Send the server's key as 'Authorization: Bearer KEY' or 'x-api-key: KEY'.")

    def owner(self, headers: Any) -> str | None:
        """The name of the key that a request has shown; None: keys have no names."""
        return next((name for name, _ in self._matching(headers)), None)

    def _matching(self, headers: Any) -> list[tuple[str | None, str]]:
        given = _given(headers)
        # Every key is compared, so that the time does not depend on which one matches.
        matches = [[hmac.compare_digest(_bytes(value), _bytes(key)) for value in given] for _, key in self._keys]
        return [named for named, match in zip(self._keys, matches, strict=True) if any(match)]


def _given(headers: Any) -> list[str]:
    """The keys that a request shows."""
    kind, _, token = headers.get("Authorization", "").partition(" ")
    return [headers.get("x-api-key", ""), token.strip() if kind.lower() == "bearer" else ""]


class ByteBudget:
    """Bytes that the bodies of all requests may have in memory together. Nobody waits for bytes; any thread may call this."""

    def __init__(self, left: int) -> None:
        self.left = left
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


def is_model(path: str) -> bool:
    """Whether a path names one model."""
    return path.startswith("/v1/models/")


def is_loopback(host: str) -> bool:
    """Whether a server on `host` is reached from this machine only. Raises OSError for a name that does not resolve."""
    found = socket.getaddrinfo(host or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return all(ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback for *_, address in found)


def is_loopback_name(name: str) -> bool:
    """Whether a name or address, as a client writes it, can be nothing but this machine."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def is_foreign(origin: str) -> bool:
    """Whether an Origin is anything but a page of this machine, or an app or extension on it."""
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
    """An unexpected error for a client: in one line, and without our folders."""
    first = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {without_folders(first)[:300]}"


def without_folders(text: str) -> str:
    """A text for clients: of each path in it only the last part."""
    return FOLDERS.sub("", text)


def shown(text: str, most: int = 80) -> str:
    """A client's text, cut, for a response to it."""
    return repr(text if len(text) <= most else f"{text[:most]}...")


def api_key(given: str | None, file: Any, environment: str | None) -> str | None:
    """The key from the first of these that is given; a file's content is its key. Raises BlockpoolError, without the key."""
    key = given
    if key is None and file is not None:
        key = text_of(file)
    key = environment or None if key is None else key
    if key is not None:
        _check_plain(key)
    return key


def named_keys(text: str) -> tuple[tuple[str, str], ...]:
    """The (name, key) of each line `name:key`; none for a text that is one key. Raises BlockpoolError, whose text has no key."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    found = [line.partition(":")[::2] for line in lines]
    if len(lines) < 2 and not all(KEY_NAME.fullmatch(name) and key for name, key in found):
        return ()
    for number, (name, key) in enumerate(found, 1):
        if not KEY_NAME.fullmatch(name):
            raise BlockpoolError(
                f"Key {number} of --api-key-file has no name. Write name:key, the name in letters, digits, . _ -"
            )
        _check_plain(key)
    if len({key for _, key in found}) < len(found):
        raise BlockpoolError("Two keys of --api-key-file are the same. Give each name a key of its own.")
    return tuple(found)


def text_of(file: Any) -> str:
    try:
        return str(file.read_text(encoding="utf-8").strip())
    except (OSError, UnicodeError) as error:
        raise BlockpoolError(
            f"--api-key-file {file} cannot be read: {type(error).__name__}. Give a text file with a key."
        ) from None


def _check_plain(key: str) -> None:
    if not (key.isascii() and key.isprintable() and key.strip() == key and key):
        raise BlockpoolError(
            "The API key is empty or has spaces around it or other than plain ASCII characters. Choose another one."
        )


def names_in(text: str) -> Sequence[str]:
    """Hosts of --allow-hosts."""
    return tuple(host_name(name) for name in text.split(",") if name.strip())


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


# mlx-lm's default of --allowed-origins, which is no list: a user's own `*` is one.
ANY_ORIGIN = ("*",)


def add_safety_options(add: Callable[..., Any]) -> None:
    """Add them to a parser's group."""
    _add_key_options(add)
    add("--allow-remote", action="store_true", help="Listen on other addresses than this machine's own without a key")
    add(
        "--allow-hosts",
        type=names_in,
        default=(),
        metavar="NAMES",
        help="Names under which clients reach this server, separated by commas (default: localhost, where --host is that)",
    )
    add(
        "--max-body",
        type=parse_bytes,
        default=GuardConfig.max_body_bytes,
        metavar="SIZE",
        help="The largest request that is read, such as 64MB (default: 16 MiB)",
    )
    add(
        "--allow-template-kwargs",
        type=lambda text: None if text.strip() == "any" else tuple(name.strip() for name in text.split(",")),
        default=(),
        metavar="NAMES",
        help="What a request's chat_template_kwargs may hold beside the switches that templates are known to read, separated by "
        "commas, or any; chat_template lets requests bring templates of their own (default: none)",
    )
    add(
        "--allow-image-hosts",
        type=names_in,
        default=(),
        metavar="NAMES",
        help="Hosts from which images that requests name are fetched, separated by commas, for models that take images "
        "(default: none; images come as data URLs)",
    )


def _add_key_options(add: Callable[..., Any]) -> None:
    add(
        "--api-key",
        metavar="KEY",
        help="Answer only requests with this key as a bearer token or x-api-key; other users of this machine may see it in the "
        "list of processes, unlike that of --api-key-file and of MLX_BLOCKPOOL_API_KEY",
    )
    add("--api-key-file", type=Path, metavar="FILE", help="A file that holds the key, or several keys as lines name:key")
    add(
        "--private-prefixes",
        action="store_true",
        help="Share no prefixes between the names of --api-key-file: neither times nor cached tokens tell of others' prompts",
    )


def guard_config(args: Any) -> GuardConfig:
    """The policy of these options. Raises BlockpoolError for an invalid key."""
    # A list is the user's; a tuple is the default.
    origins = () if args.allowed_origins is ANY_ORIGIN else tuple(args.allowed_origins)
    keys = () if args.api_key is not None or args.api_key_file is None else named_keys(text_of(args.api_key_file))
    key = None if keys else api_key(args.api_key, args.api_key_file, os.environ.get("MLX_BLOCKPOOL_API_KEY"))
    if args.private_prefixes and not keys:
        raise BlockpoolError("--private-prefixes needs keys with names. Give --api-key-file a file with lines name:key.")
    config = GuardConfig(args.host, key, keys, args.private_prefixes)
    return replace(
        config,
        allow_remote=args.allow_remote,
        allowed_hosts=args.allow_hosts,
        allowed_origins=origins,
        max_body_bytes=args.max_body,
    )
