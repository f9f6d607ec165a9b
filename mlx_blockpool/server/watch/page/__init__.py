"""The live page at /: its files, and the headers that they are sent with. Its figures come from the
endpoints that clients use.

The files hold no figures and need no key. Their headers forbid a browser to load anything from
elsewhere and to run text as code.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

from ...routes import Route

ICON = "icon.svg"
TYPES = {
    "index.html": "text/html; charset=utf-8",
    "style.css": "text/css; charset=utf-8",
    ICON: "image/svg+xml",
    **dict.fromkeys(
        ("app.js", "api.js", "dom.js", "blocks.js", "tree.js", "panels.js", "acts.js", "chat.js"),
        "text/javascript; charset=utf-8",
    ),
}
PATHS = {
    "/": "index.html",
    "/favicon.ico": ICON,
    **{f"/page/{name}": name for name in TYPES if name != "index.html"},
}
# What app.js and `mlx-blockpool top` read again and again.
FIGURES = (
    "/v1/cache",
    "/v1/cache/map",
    "/v1/cache/hour",
    "/v1/cache/explain",
    "/v1/agents",
    "/admin/models",
    "/health",
)
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cache-Control": "no-cache",
}


def send_page(handler: Any) -> None:
    """Answer a request for one of PATHS."""
    name = PATHS[handler.route]
    data = read(name)
    handler.start_response(200, {"Content-Type": TYPES[name], **HEADERS}, len(data), cors=False)
    handler.wfile.write(data)


@cache
def read(name: str) -> bytes:
    """A file of the page."""
    return (files(__name__) / name).read_bytes()


ROUTES = tuple(Route(path, send_page) for path in PATHS if path != "/")
