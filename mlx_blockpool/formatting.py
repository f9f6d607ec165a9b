"""Figures, tables and progress bars for people to read, and what is wrong with a command line."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn, TypeVar

# The JSON of a command or an endpoint.
Report = dict[str, Any]
T = TypeVar("T")


class Parser(argparse.ArgumentParser):
    """Says in one line what is wrong, with the nearest of the options and choices, and has
    `examples` at the end of its help.
    """

    def __init__(self, *args: Any, examples: str = "", **options: Any) -> None:
        options["formatter_class"] = argparse.RawDescriptionHelpFormatter
        super().__init__(*args, **options)
        self.epilog = examples and f"examples:\n{examples}"

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return found, rest

    def error(self, message: str) -> NoReturn:
        wrong = re.search(r"(?:invalid choice: |arguments: )'?([^\s'=]+)", message)
        known = (
            str(name)
            for action in self._actions
            if action.help != argparse.SUPPRESS
            for name in (*action.option_strings, *(action.choices or ()))
        )
        advice = nearest(wrong[1], known) if wrong else ""
        advice = advice or f"See `{self.prog} --help`."
        self.exit(2, f"{self.prog}: error: {message.rstrip('.')}. {advice}\n")


def nearest(name: str, known: Iterable[str]) -> str:
    """'Is it NAME?' with the known name that is most like this one, or empty if none is."""
    near = difflib.get_close_matches(name, list(known), 1)
    return f"Is it {near[0]}?" if near else ""


def count(number: int, noun: str) -> str:
    """1 record, 2,000 records."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def table(rows: list[list[str]], left: int = 1) -> list[str]:
    """The rows as lines, with the first `left` columns aligned to the left and the others to the
    right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            c.ljust(w) if i < left else c.rjust(w)
            for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def plain(text: str) -> str:
    """The text on one line, with escapes for characters that are not printable."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def line_of(error: BaseException) -> str:
    """An error's message on one line, without its full stop."""
    return " ".join(str(error).split()).rstrip(".")


def human_bytes(count: int) -> str:
    """`count` bytes with the unit that fits: '6.0 MB', decimal as config.parse_bytes reads it."""
    size, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 999.95:
            break
        size, unit = size / 1000, larger
    return f"{size:,.0f} {unit}" if unit == "B" else f"{size:,.1f} {unit}"


def progress(
    items: Iterable[T],
    total: int,
    doing: str,
    unit: str = " records",
    size: Callable[[T], int] = lambda _: 1,
) -> Iterator[T]:
    """Yield the items, with a progress bar if stderr is a terminal.

    `size`: the units of an item, of which there are `total`.
    """
    from tqdm import tqdm  # type: ignore[import-untyped]

    is_bytes = unit == "B"
    # disable=None: only on a terminal.
    with tqdm(
        desc=doing,
        total=total,
        unit=unit,
        unit_scale=is_bytes,
        file=sys.stderr,
        disable=None,
        leave=False,
    ) as bar:
        for item in items:
            yield item
            bar.update(size(item))


def client_settings(url: str, key: str = "any") -> dict[str, str]:
    """One line for a shell for each of the clients that are used most.

    url: the server's, such as http://127.0.0.1:8080.
    """
    return {
        "Claude Code": f"mlx-blockpool launch claude --url {url}",
        "Codex": f"mlx-blockpool launch codex --url {url}",
        "OpenAI's SDKs": f"export OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY={key} "
        "OPENAI_MODEL=default_model",
    }
