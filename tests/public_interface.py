"""The public interface: the names of mlx_blockpool.__all__ and what they return, with their
signatures and public methods.

`python tests/public_interface.py` writes it into public_interface.txt.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx_blockpool
from mlx_blockpool.prefix.cache import Acquired
from mlx_blockpool.tier.cache import TieredPrefixCache

# What PrefixCache.acquire() and open_prefix() return, whose methods and fields scripts use.
RETURNED = (Acquired, TieredPrefixCache)
LISTING = Path(__file__).with_suffix(".txt")
COMMAND = ".venv/bin/python tests/public_interface.py"
WHAT_TO_DO = (
    'A changed signature must be in CHANGELOG.md under "Changed". Write it there, then run '
    f"{COMMAND}; or change it back."
)


class _Written(str):
    """An annotation as its source has it, without quotes."""

    def __repr__(self) -> str:
        return str(self)


def signature(function: Any) -> str:
    """The parameters of a function or class with their types and defaults, and the type of a
    function's result.
    """
    if (
        isinstance(function, type)
        and issubclass(function, Exception)
        and "__init__" not in vars(function)
    ):
        # Built in, as that of exceptions is.
        return "(*args)"
    found = inspect.signature(function)
    parameters = [
        each
        if each.annotation is each.empty
        else each.replace(annotation=_Written(each.annotation))
        for each in found.parameters.values()
    ]
    returned = found.return_annotation
    returned = returned if returned is found.empty else _Written(returned)
    # Some defaults have an address in their text.
    return re.sub(
        r" at 0x[0-9a-f]+",
        "",
        str(found.replace(parameters=parameters, return_annotation=returned)),
    )


def members(kind: type) -> Iterator[str]:
    """The public attributes of a class that this package defines, in alphabetical order, each on
    a line.
    """
    own = [each for each in kind.__mro__ if each.__module__.startswith("mlx_blockpool")]
    found: dict[str, Any] = {
        name: value for each in reversed(own) for name, value in vars(each).items()
    }
    for name, value in sorted(found.items()):
        if name.startswith("_"):
            continue
        if isinstance(value, property):
            yield f"{name}: {signature(value.fget).rpartition(' -> ')[2]}"
        elif isinstance(value, classmethod | staticmethod):
            yield f"{type(value).__name__} {name}{signature(value.__func__)}"
        elif callable(value):
            yield f"{name}{signature(value)}"


def render() -> str:
    """The listing."""
    lines = []
    names = {name: getattr(mlx_blockpool, name) for name in mlx_blockpool.__all__} | {
        each.__name__: each for each in RETURNED
    }
    for name, value in names.items():
        if isinstance(value, type):
            lines += [
                f"class {name}{signature(value)}",
                *(f"    {line}" for line in members(value)),
            ]
        elif inspect.isfunction(value):
            lines.append(f"def {name}{signature(value)}")
        else:
            lines.append(
                f"{name}: {type(value).__name__}{f' = {value}' if isinstance(value, int) else ''}"
            )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    LISTING.write_text(render(), encoding="utf-8")
