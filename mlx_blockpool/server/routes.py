"""Route: which function answers the requests to which path. Knows no protocol; any thread may read
one.

Every module of the packages agents, api and watch adds its endpoints with a tuple `ROUTES`, which
http.py finds. So a new endpoint takes three files: such a module, its row in the table of endpoints
of server/README.md, and its test. By default it needs the API key if the server has one, and pages
of other sites do not reach it; access.py lists the exceptions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Route:
    """The endpoint at `path`, and below it if the path ends with "/*".

    respond: answers one request of the handler that it is called with, on the socket's thread.
    methods: those that it answers. A route for GET also answers HEAD, of which only the headers are
    sent.
    header:  the route is for requests with this header alone, and goes before other routes with its
             path.
    is_explained: its requests generate, and /v1/cache/explain explains them.
    """

    path: str
    respond: Callable[[Any], None]
    methods: tuple[str, ...] = ("GET",)
    header: str | None = None
    is_explained: bool = False

    def rank(self, method: str, path: str, headers: Any) -> tuple[int, bool, bool]:
        """How well the route fits: a longer path first, then one for a header, then an exact path.

        Zeros if it does not fit.
        """
        root = self.path.removesuffix("/*")
        is_below = self.path.endswith("/*") and path.startswith(root + "/")
        fits = (path == root or is_below) and method.replace("HEAD", "GET") in self.methods
        if not fits or (self.header is not None and self.header not in headers):
            return 0, False, False
        return len(root), self.header is not None, not self.path.endswith("/*")
