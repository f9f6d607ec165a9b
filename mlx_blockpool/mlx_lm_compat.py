"""Which mlx-lm this works with, and how its functions are given other names without being changed.

Imports neither mlx nor mlx-lm.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from importlib import metadata
from typing import Any, TypeVar

from .errors import UnsupportedVersionError

T = TypeVar("T")
SUPPORTED = ((0, 32, 2), (0, 33))


def check_version(version: str | None = None) -> None:
    """Raises UnsupportedVersionError unless the installed mlx-lm (or `version`) is in the supported range."""
    if version is None:
        try:
            version = metadata.version("mlx-lm")
        except metadata.PackageNotFoundError:
            version = "none"
    numbers = tuple(int(n) for n in version.split(".")[:3] if n.isdigit())
    low, high = SUPPORTED
    if not low <= numbers < high:
        raise UnsupportedVersionError(
            f"Found mlx-lm {version}; needed {_text(low)} or newer and older than {_text(high)}. "
            f"Install one: pip install 'mlx-lm>={_text(low)},<{_text(high)}'."
        )


def saved_as(stock: type) -> Callable[[type[T]], type[T]]:
    """The decorated class has the name of mlx-lm's: save_prompt_cache writes it, and load_prompt_cache looks it up in mlx-lm."""

    def rename(cls: type[T]) -> type[T]:
        cls.__name__ = stock.__name__
        return cls

    return rename


def rebind(function: Callable[..., Any], **names: Any) -> Callable[..., Any]:
    """A copy of `function` that sees `names` in place of its module's globals. The original and its module stay as they are."""
    assert isinstance(function, types.FunctionType), f"{function!r} is not a Python function"
    unknown = [name for name in names if name not in function.__globals__]
    assert not unknown, f"{function.__module__} has no {unknown}"
    copy = types.FunctionType(
        function.__code__,
        {**function.__globals__, **names},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
