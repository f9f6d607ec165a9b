"""The access policy: which requests are served, by their keys, hosts, origins and sizes, and what
the owner of a key may see.

Checks only: no sockets. Any thread may call anything here.

With several API keys each has a name, and owns the agents of its requests. Such an agent is noted
under both names, with a character between them that no client can send, so that agents of two
owners never have the same name.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
import socket
import threading
import time
from collections import Counter
from dataclasses import dataclass
from email import errors as email_errors
from typing import Any

from ..config import AccessConfig, RequestConfig
from ..errors import BlockpoolError
from ..store.agents import SEPARATOR
from .bodies import Json, StatusError
from .origins import (
    ForeignPage,
    address_of,
    host_name,
    is_foreign,
    is_loopback_name,
    sent_origin,
)

# The endpoints of mlx-lm's server, with the origins that its documentation promises.
COMPLETIONS = ("/v1/completions", "/v1/chat/completions", "/chat/completions")
STOCK_PATHS = (*COMPLETIONS, "/v1/models", "/health", "/")
# Anthropic's clients send a request here to see whether the server runs.
HELLO = "/api/hello"
# These need no key, and neither does the page: they only show that the server runs.
OPEN = ("/health", HELLO)
# Below this path are the endpoints that change models for all clients. With named keys they need an
# admin's.
ADMIN = "/admin/"
# What belongs to the person who runs the server: agents, figures of the cache, and the loading of
# models.
OPERATION = ("/v1/agents", "/v1/cache", "/metrics", "/admin")
# Requests that tokenize and generate nothing. Their bodies and their jobs have separate bounds.
TOKENIZES = re.compile(
    r"(?:/v1)?/(?:de)?tokenize|/apply-template|/v1/messages/count_tokens|/v1/responses/input_tokens"
    r"|/v1/embeddings|/api/embed|/api/embeddings"
)
# A malformed header line makes the parser drop all headers after it.
NO_HEADERS = (
    email_errors.FirstHeaderLineIsContinuationDefect,
    email_errors.InvalidHeaderDefect,
    email_errors.MisplacedEnvelopeHeaderDefect,
    email_errors.MissingHeaderBodySeparatorDefect,
)
# All but the last part of a path in an error's text. A path after a method is one of the endpoints.
FOLDERS = re.compile(
    r"(?<![\w.:/])(?<!GET )(?<!POST )(?<!DELETE )(?:/[^\s/'\":,;()]+)+/(?=[^\s/'\":,;()])"
)


class AccessPolicy:
    """The checks of one server.

    connections: a semaphore that a connection holds while a request is read and served.
    idle:        the same for the time between two requests.
    event_readers: the slots for connections that read events, shared among the clients.
    bodies:     the memory of all requests' bodies together.
    """

    def __init__(self, config: AccessConfig | None = None) -> None:
        self.config = config = AccessConfig() if config is None else config
        self.is_local = is_loopback(config.host)
        self._keys: list[tuple[str | None, str]] = [*config.api_keys]
        if config.api_key is not None:
            self._keys.append((None, config.api_key))
        self.connections = threading.BoundedSemaphore(config.max_connections)
        self.idle = threading.BoundedSemaphore(config.max_connections)
        self.event_readers = EventReaders(config.event_readers)
        self.bodies = ByteBudget(config.bodies * config.max_body_bytes)

    @property
    def is_open(self) -> bool:
        """Return whether requests need no key."""
        return not self._keys

    def wait_until_empty(self, seconds: float) -> bool:
        """Admit no more requests, and wait for the others to end.

        Returns whether they did within the time.
        """
        until = time.monotonic() + seconds
        return all(
            self.connections.acquire(timeout=max(0.0, until - time.monotonic()))
            for _ in range(self.config.max_connections)
        )

    def check_bind(self) -> None:
        """Raises BlockpoolError for a server without keys that other machines reach."""
        if not self.is_local and not self._keys and not self.config.allow_remote:
            raise BlockpoolError(
                f"--host {self.config.host} lets other machines in, and there is no --api-key: "
                "anyone who reaches the port could "
                "use the models and read prompts. Give --api-key-file FILE or "
                "MLX_BLOCKPOOL_API_KEY, leave --host at 127.0.0.1, "
                "or say --allow-remote if the network is yours alone."
            )

    def check(self, method: str, path: str, headers: Any) -> None:
        """Raises StatusError for a request that is rejected.

        `path` without its query; `headers`: as http.server parses them.
        """
        self._check_headers(headers)
        self._check_host(headers)
        self._check_origin(method, path, headers)
        self._check_key(method, path, headers)
        self._check_admin(method, path, headers)

    def check_body(self, path: str, headers: Any) -> None:
        """Raises StatusError for a request whose body is rejected by its declared length."""
        if headers.get("Transfer-Encoding") is not None:
            raise StatusError(
                411,
                "Transfer-Encoding is not supported. Send the body in one piece with its "
                "Content-Length.",
            )
        found = set(headers.get_all("Content-Length", []))
        if not found:
            return
        length = found.pop()
        if found or not (length.isascii() and length.isdecimal()) or len(length) > 18:
            raise StatusError(400, "Invalid Content-Length header")
        most, advice = self.config.max_body_bytes, "Raise --max-body."
        if self.config.max_tokenizer_bytes < most and TOKENIZES.fullmatch(path):
            most, advice = self.config.max_tokenizer_bytes, f"Send it to {path} in parts."
        if int(length) > most:
            raise StatusError(
                413, f"Request exceeds the maximum size: {length} bytes > {most} maximum. {advice}"
            )

    def _check_headers(self, headers: Any) -> None:
        size = sum(len(name) + len(value) for name, value in headers.items())
        most = self.config.max_header_bytes
        if headers.get_unixfrom() or any(
            isinstance(defect, NO_HEADERS) for defect in headers.defects
        ):
            raise StatusError(
                400,
                "A header line is malformed. Write 'Name: value', with no space before the colon.",
            )
        if size > most:
            raise StatusError(
                431, f"The request has {size} bytes of headers; at most {most} are read."
            )

    def _check_host(self, headers: Any) -> None:
        """Reject DNS rebinding: a page whose name resolves to this machine sends its own name in
        Host.
        """
        allowed = self.config.allowed_hosts
        if not (self.is_local or allowed):
            return
        for host in headers.get_all("Host", []):
            name = host_name(host)
            if name not in (self.config.host.lower(), *allowed) and not is_loopback_name(name):
                advice = "This server answers to localhost. Start it with --allow-hosts NAME."
                raise StatusError(403, f"Host {shown(host)} is not allowed. {advice}")

    def foreign_page(self, headers: Any) -> ForeignPage | None:
        """The page of another site that sends a request.

        None for other clients, and for pages that may name agents.
        """
        origin = sent_origin(headers)
        if origin is None or origin in self.config.allowed_origins or not is_foreign(origin):
            return None
        return None if self._is_own_page(origin, headers) else ForeignPage.of(origin)

    def _check_origin(self, method: str, path: str, headers: Any) -> None:
        """Reject requests of pages of other sites, except for endpoints that are open to these.

        By default the endpoints of mlx-lm's server are. With API keys, or with `*` among the
        allowed origins, so are all others but those of OPERATION. If origins are listed, other
        pages reach nothing.
        """
        page, allowed = self.foreign_page(headers), self.config.allowed_origins
        if page is None or method == "OPTIONS":
            return
        if "*" in allowed or (self._keys and not allowed):
            is_open = not any(path == root or path.startswith(root + "/") for root in OPERATION)
        else:
            is_open = not allowed and (path in STOCK_PATHS or path.startswith("/v1/models/"))
        if is_open:
            return
        advice = (
            "It is a page of another site. Start the server with --allowed-origins ORIGIN to "
            "trust that site."
        )
        raise StatusError(403, f"Origin {shown(page.origin)} is not allowed here. {advice}")

    def _is_own_page(self, origin: str, headers: Any) -> bool:
        """Return whether an Origin is a page of this server.

        Under an address or an allowed name no other page can be here. Under other names one could,
        but would have no key.
        """
        host = headers.get("Host", "").strip().lower()
        if origin.lower() not in (f"http://{host}", f"https://{host}"):
            return False
        name = host_name(host)
        return (
            bool(self._keys)
            or name in (self.config.host.lower(), *self.config.allowed_hosts)
            or address_of(name) is not None
        )

    def _check_key(self, method: str, path: str, headers: Any) -> None:
        is_open = method == "OPTIONS" or (
            method in ("GET", "HEAD") and (path in OPEN or is_page(path))
        )
        if not self._keys or is_open or self._matching(headers):
            return
        fault = "The API key is wrong" if any(_given(headers)) else "The request has no API key"
        raise StatusError(
            401,
            f"{fault}. Send the server's key as 'Authorization: Bearer KEY' or 'x-api-key: KEY'.",
        )

    def _check_admin(self, method: str, path: str, headers: Any) -> None:
        """Reject a named key that is not an admin's where requests act on all clients' models."""
        if not self.config.api_keys or method == "OPTIONS" or not path.startswith(ADMIN):
            return
        admins = self.config.admin_keys or (self.config.api_keys[0][1],)
        if any(name is None or key in admins for name, key in self._matching(headers)):
            return
        advice = (
            "Send an admin's key, or end the line of this key in --api-key-file with ':admin' and "
            "restart the server."
        )
        raise StatusError(403, f"{path} needs the key of an admin. {advice}")

    def owner(self, headers: Any) -> str | None:
        """The name of the key that a request carries. None if keys have no names."""
        return next((name for name, _ in self._matching(headers)), None)

    def _matching(self, headers: Any) -> list[tuple[str | None, str]]:
        given = _given(headers)
        # Every key is compared, so that the time does not depend on which one matches.
        matches = [
            [hmac.compare_digest(_bytes(value), _bytes(key)) for value in given]
            for _, key in self._keys
        ]
        return [named for named, match in zip(self._keys, matches, strict=True) if any(match)]


def _given(headers: Any) -> list[str]:
    """The keys that a request carries."""
    kind, _, token = headers.get("Authorization", "").partition(" ")
    return [headers.get("x-api-key", ""), token.strip() if kind.lower() == "bearer" else ""]


@dataclass(eq=False)
class ReaderPlace:
    """The slot of one reader of events. is_lost: another reader has it now, and this one ends."""

    client: str
    is_lost: bool = False


class EventReaders:
    """The slots of connections that read events. Any thread may call this.

    If no slot is free, a new reader replaces the oldest one of the client that would have the most.
    So a client cannot keep others out, and several clients share the slots.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        # In the order of arrival.
        self._places: list[ReaderPlace] = []
        self._changing = threading.Lock()

    def enter(self, client: str) -> ReaderPlace | None:
        """Take a slot for a reader of `client`.

        Returns None if other clients hold all of them, one each.
        """
        with self._changing:
            place = ReaderPlace(client)
            if len(self._places) >= self._most:
                counts = Counter(each.client for each in [*self._places, place])
                crowding = max(counts, key=lambda name: (counts[name], name == client))
                if counts[crowding] < 2:
                    return None
                oldest = next(each for each in self._places if each.client == crowding)
                oldest.is_lost = True
                self._places.remove(oldest)
            self._places.append(place)
            return place

    def leave(self, place: ReaderPlace) -> None:
        with self._changing:
            if not place.is_lost:
                self._places.remove(place)


def reader_client(owner: str | None, address: str) -> str:
    """The client as which a reader of events shares slots: the name of its key, or without names
    its machine.

    All addresses of this machine are one client, and so are those of a network of IPv6, where a
    machine has many.
    """
    if owner is not None:
        return f"key {owner}"
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        found = found.ipv4_mapped or found
    if found.is_loopback:
        return "this machine"
    return str(ipaddress.ip_network((found, 64), strict=False) if found.version == 6 else found)


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


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches a server on `host`.

    Raises OSError for a name that does not resolve.
    """
    found = socket.getaddrinfo(host or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return all(
        ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback for *_, address in found
    )


def checked_text(what: str, value: str, most: int = RequestConfig.name_characters) -> str:
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


# -- owners ----------------------------------------------------------------------------------------


def noted_name(owner: str | None, agent: str) -> str:
    """The name that an agent of an owner is noted under."""
    return agent if owner is None else f"{owner}{SEPARATOR}{agent}"


def own_name(name: str) -> str:
    """The owner's name for the agent that is noted under `name`."""
    return name.rpartition(SEPARATOR)[2]


def belongs(name: str, owner: str | None) -> bool:
    """Return whether an agent is one of this owner's; without owners every agent is every
    client's.
    """
    return owner is None or name.startswith(f"{owner}{SEPARATOR}")


def own_figures(owner: str | None, report: Json) -> Json:
    """The figures of GET /v1/cache with the owner's agents alone."""
    if owner is None:
        return report
    found = report.copy()
    if "agents" in report:
        agents = (report["agents"] or {}).items()
        found["agents"] = {
            own_name(name): figures for name, figures in agents if belongs(name, owner)
        }
    if report.get("models"):
        found["models"] = {
            name: own_figures(owner, model) for name, model in report["models"].items()
        }
    return found
