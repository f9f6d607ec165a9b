"""Parses the part of PromQL that the dashboard uses, and says which metrics and labels a query
reads.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

FUNCTIONS = {"rate", "increase", "histogram_quantile", "label_values"}
AGGREGATIONS = {"sum", "max", "min", "avg", "count"}
TOKEN = re.compile(r'\s*("[^"]*"|\$?[a-zA-Z_:][\w:]*|\d+(?:\.\d+)?|=~|!~|!=|[-+*/(){}\[\],=])')


class Query:
    """`metrics`: the names that it reads, each with the labels that it matches or groups by.

    Raises ValueError for bad ones.
    """

    def __init__(self, text: str) -> None:
        self.metrics: dict[str, set[str]] = {}
        self._tokens = list(self._split(text))
        self._at = 0
        self._expression(set())
        if self._at < len(self._tokens):
            raise ValueError(f"{text}: {self._tokens[self._at]} is too much")

    def _split(self, text: str) -> Iterator[str]:
        at = 0
        while at < len(text):
            found = TOKEN.match(text, at)
            if found is None:
                raise ValueError(f"{text}: bad character {text[at]!r}")
            at = found.end()
            yield found[1]

    def _next(self, *expected: str) -> str:
        token = self._tokens[self._at] if self._at < len(self._tokens) else "the end"
        if expected and token not in expected:
            raise ValueError(f"found {token}, expected {' or '.join(expected)}")
        self._at += 1
        return token

    def _peek(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def _expression(self, labels: set[str]) -> None:
        self._term(labels)
        while self._peek() in ("+", "-", "*", "/"):
            self._next()
            self._term(labels)

    def _term(self, labels: set[str]) -> None:
        token = self._next()
        if token == "(":
            self._expression(labels)
            self._next(")")
        elif token in AGGREGATIONS:
            grouped = self._names() if self._peek() == "by" and self._next() else set()
            self._next("(")
            self._expression(labels | grouped)
            self._next(")")
        elif token in FUNCTIONS:
            self._next("(")
            self._expression(labels)
            while self._next(",", ")") == ",":
                self._expression(labels)
        elif re.fullmatch(r"[a-zA-Z_:][\w:]*", token):
            self._selector(token, labels)
        elif not re.fullmatch(r"[\d.]+", token):
            raise ValueError(f"found {token}, expected a metric or a number")

    def _names(self) -> set[str]:
        self._next("(")
        names = {self._next()}
        while self._next(",", ")") == ",":
            names.add(self._next())
        return names

    def _selector(self, metric: str, labels: set[str]) -> None:
        used = set(labels)
        if self._peek() == "{":
            self._next()
            used.add(self._next())
            self._next("=", "=~", "!=", "!~")
            self._next()
            self._next("}")
        if self._peek() == "[":
            self._next()
            self._next()
            self._next("]")
        self.metrics.setdefault(metric, set()).update(used)
