"""Origins: which requests come from pages of other sites, as browsers report them, and what those
requests share.

A browser sends the origin of a page with every request by which the page could read or change
something. Pages of this machine, pages of this server, and installed apps and extensions are local;
all others are foreign. Checks only: no sockets.
"""

from __future__ import annotations

import ipaddress
import secrets
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

# Schemes of origins of installed apps and extensions; no page on the web can have one. A downloaded
# page can have `file`.
APPS = ("app", "capacitor", "electron", "ionic", "tauri", "vscode-file", "vscode-webview", "wails")
EXTENSIONS = ("chrome-extension", "moz-extension", "safari-web-extension")
# The origin of sandboxed frames, of local files, and of requests that hide theirs.
OPAQUE = "null"


@dataclass(frozen=True)
class ForeignPage:
    """The page of another site that sends a request.

    nonce: empty for an origin that names one site. Any page can have an opaque origin such as
           `null`: each request of one has a random nonce, and shares nothing with any other.
    """

    origin: str
    nonce: str = ""

    @classmethod
    def of(cls, origin: str) -> ForeignPage:
        """The page with this Origin, which is foreign."""
        names_a_site = origin.startswith(("http://", "https://"))
        return cls(origin) if names_a_site else cls(origin, secrets.token_hex(16))

    @property
    def scope(self) -> str:
        """What requests must have in common to share anything."""
        return self.origin + self.nonce


def sent_origin(headers: Any) -> str | None:
    """The Origin of a request; None for one that no page sends, or a page of this server.

    With an image, a frame or a simple GET a browser sends no Origin, but says in Sec-Fetch-Site
    that another site's page does it. A link that a person follows (Sec-Fetch-Dest: document) shows
    its answer to that person alone.
    """
    origin: str | None = headers.get("Origin")
    if origin is not None:
        return origin
    crosses = (
        headers.get("Sec-Fetch-Site") == "cross-site"
        and headers.get("Sec-Fetch-Dest") != "document"
    )
    return OPAQUE if crosses else None


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


def address_of(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The IP address that a name is, which no other machine's page can be rebound to; or None."""
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def is_loopback_name(name: str) -> bool:
    """Return whether a name or address of a client can only be this machine."""
    address = address_of(name)
    if address is not None:
        return address.is_loopback
    return name == "localhost" or name.endswith(".localhost")


def host_name(host: str) -> str:
    """The name in a Host header, without its port."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].rstrip(".")
