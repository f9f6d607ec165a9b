"""Requests near right ones: bodies with something wrong in them, odd headers and paths, sent
byte by byte as they are.
"""

from __future__ import annotations

import copy
import http.client
import json
import socket
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

ODD: list[Any] = [
    None,
    True,
    False,
    -1,
    0,
    1,
    10**30,
    10**400,
    -(10**30),
    1.5,
    -0.0,
    1e308,
    float("nan"),
    float("inf"),
    float("-inf"),
    "",
    " ",
    "text",
    "\0",
    "\ud800",
    "\U0001f469\u200d\U0001f680" * 30,
    "\u202e\u0301",
    "user",
    "auto",
    "../../etc/passwd",
    "x" * 9000,
    [],
    [None],
    [[]],
    {},
    {"": ""},
    {"type": "text"},
    {"type": None},
    {"a": {"b": [1, {"c": None}]}},
    "<|im_start|>" * 9,
    "{{ 7 * 7 }}",
    "%s%n",
    "content",
    {"role": "user"},
    ["text"] * 400,
]
JSON = st.recursive(
    st.sampled_from(ODD[:-1]) | st.text(max_size=20) | st.integers() | st.floats(),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=6,
)
Path = tuple[Any, ...]


@dataclass(frozen=True)
class Sent:
    """One request as it is written on the socket."""

    method: str
    path: str
    headers: tuple[tuple[str, str], ...]
    body: bytes

    @property
    def raw(self) -> bytes:
        lines = [
            f"{self.method} {self.path} HTTP/1.1",
            *(f"{name}: {value}" for name, value in self.headers),
        ]
        return "\r\n".join(lines).encode("latin-1", "replace") + b"\r\n\r\n" + self.body

    @property
    def is_whole(self) -> bool:
        return ("Content-Length", str(len(self.body))) in self.headers


def places(value: Any, at: Path = ()) -> list[Path]:
    """Where something stands in a JSON value."""
    found = [at] if at else []
    if len(at) > 9:
        return found
    inside = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for name, part in inside:
        found += places(part, (*at, name))
    return found


def nested(depth: int) -> Any:
    value: Any = "deep"
    for _ in range(depth):
        value = [value]
    return value


@st.composite
def mutated(draw: st.DrawFn, valid: dict[str, Any]) -> dict[str, Any]:
    """A right body with up to three things changed, taken out, added or put in another's place."""
    body = copy.deepcopy(valid)
    for _ in range(draw(st.integers(0, 3))):
        known = places(body)
        if not known:
            break
        *way, last = draw(st.sampled_from(known))
        parent = body
        for name in way:
            parent = parent[name]
        kind = draw(
            st.sampled_from(["odd", "odd", "json", "gone", "more", "other", "twice", "deep"])
        )
        if kind == "gone":
            del parent[last]
        elif kind == "more" and isinstance(parent, dict):
            parent[draw(st.text(max_size=12))] = copy.deepcopy(draw(JSON))
        elif kind == "twice" and isinstance(parent, list):
            parent.extend(copy.deepcopy(parent[last]) for _ in range(draw(st.integers(1, 40))))
        elif kind == "other":
            other: Any = body
            for name in draw(st.sampled_from(known)):
                other = (
                    other[name]
                    if isinstance(other, dict) or (isinstance(other, list) and name < len(other))
                    else None
                )
                if other is None:
                    break
            parent[last] = copy.deepcopy(other)
        elif kind == "deep":
            parent[last] = nested(draw(st.sampled_from([3, 90, 400])))
        else:
            # A copy: what comes later may change it.
            parent[last] = copy.deepcopy(draw(JSON if kind == "json" else st.sampled_from(ODD)))
    return body


def bodies(valid: dict[str, Any]) -> st.SearchStrategy[bytes]:
    """Mostly JSON; some of it cut, some no JSON at all."""
    written = mutated(valid).map(lambda body: json.dumps(body).encode())
    cut = st.tuples(written, st.integers(0, 400)).map(lambda both: both[0][: both[1]])
    odd = st.sampled_from(
        [
            b"",
            b"{",
            b"[]",
            b"null",
            b"7",
            b'"text"',
            b"\xff\xfe",
            b"[" * 5000,
            b'{"a":' * 5000,
            b'{"model": 1e999}',
        ]
    )
    return st.one_of(written, written, written, written, written, cut, odd, st.binary(max_size=60))


NAMES = [
    "X-Agent-Id",
    "X-Normalise",
    "X-Explain",
    "anthropic-version",
    "anthropic-beta",
    "Authorization",
    "x-api-key",
    "Content-Type",
]
NAMES += [
    "Accept",
    "Origin",
    "Cookie",
    "Expect",
    "X-Request-Id",
    "request-id",
    "Accept-Encoding",
    "Range",
    "Transfer-Encoding",
]
VALUES = [
    "",
    "1",
    "true",
    "none",
    "bookkeeping,date",
    "no such",
    "chunked",
    "100-continue",
    "bytes=0-1",
    "Bearer x",
    "\x00",
    "\xff\xfe",
]
VALUES += [
    "a" * 300,
    "a" * 70_000,
    "2023-06-01",
    "../x",
    "http://evil.example",
    "gzip",
    "%00",
    "; DROP",
    "chat~3f2a9c0d41e7",
]
LENGTHS = ["-1", "x", "1e3", "", "99999999999", "0", "+5", "\xb2", "5, 5"]


@st.composite
def headers(draw: st.DrawFn, length: int) -> tuple[tuple[str, str], ...]:
    """Right ones most of the time, with some odd ones among them."""
    said = [
        (
            "Host",
            draw(
                st.sampled_from(
                    ["127.0.0.1"] * 40 + ["localhost:1", "evil.example", "[::1]", "", "a b"]
                )
            ),
        )
    ]
    odd_length = draw(st.integers(0, 24)) == 7
    said.append(("Content-Length", draw(st.sampled_from(LENGTHS)) if odd_length else str(length)))
    for _ in range(draw(st.sampled_from([0] * 20 + [1] * 6 + [2] * 3 + [150]))):
        said.append((draw(st.sampled_from(NAMES)), draw(st.sampled_from(VALUES))))
    return (*said, ("Connection", "close"))


@st.composite
def requests(
    draw: st.DrawFn,
    methods: tuple[str, ...],
    paths: tuple[str, ...],
    valid: tuple[dict[str, Any], ...],
) -> Sent:
    """A request to one of these paths, now and then with an odd query or end."""
    path = draw(st.sampled_from(paths))
    path += draw(
        st.sampled_from(
            [""] * 9
            + [
                "?",
                "?beta=true",
                "/",
                "//",
                "?limit=-1&after_id=%ff",
                "/x",
                "%2e%2e",
                "?" + "a" * 3000,
            ]
        )
    )
    body = draw(bodies(draw(st.sampled_from(valid)))) if valid else b""
    return Sent(draw(st.sampled_from(methods)), path, draw(headers(len(body))), body)


@dataclass(frozen=True)
class Answer:
    status: int
    type: str
    body: bytes


def send(port: int, sent: Sent) -> Answer | None:
    """The answer; None: the server has hung up without one."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        # What is refused by its headers is answered before it is read to its end.
        with suppress(OSError):
            connection.sendall(sent.raw)
            if not sent.is_whole:
                # Nobody waits for the rest. After a whole request the end would mean that nobody
                # waits for the answer.
                connection.shutdown(socket.SHUT_WR)
        response = http.client.HTTPResponse(connection, method=sent.method)
        try:
            response.begin()
            body = response.read()
        except (http.client.HTTPException, ConnectionError):
            return None
        return Answer(response.status, response.headers.get("Content-Type", ""), body)
