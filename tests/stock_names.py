"""Compares the names of mlx_lm_compat.STOCK with the installed mlx-lm."""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
import types
from collections.abc import Iterator
from typing import Any

from mlx_blockpool.mlx_lm_compat import StockName, installed


def find(path: str) -> Any:
    """The object at a path of STOCK; None for an attribute that only instances have.

    Raises AttributeError if it is gone.
    """
    *parents, name = path.split(".")
    owner: Any = _module_of(parents)
    if not isinstance(owner, type) or hasattr(owner, name):
        return getattr(owner, name)
    if name not in _assigned(owner):
        raise AttributeError(f"{owner.__qualname__} assigns no {name}")
    return None


def problem(path: str, expected: StockName) -> str | None:
    """A sentence about the change of a name in the installed mlx-lm, or None if nothing that
    matters has changed.
    """
    where = f"mlx-lm {installed()}: {path}"
    try:
        found = find(path)
    except (AttributeError, ImportError):
        return f"{where} is gone. It was needed for this: {expected.why}."
    if (
        expected.parameters is not None
        and (parameters := _parameters(found)) != expected.parameters
    ):
        return (
            f"{where} takes {parameters}, and took {expected.parameters}. It is needed for this: "
            f"{expected.why}."
        )
    unread = sorted(set(expected.reads) - set(_names_in(found.__code__))) if expected.reads else []
    if unread:
        return (
            f"{where} does not read {', '.join(unread)} any more. A copy of it replaces them for "
            f"this: {expected.why}."
        )
    return None


def _module_of(parents: list[str]) -> Any:
    """The module or class that `parents` name below mlx_lm."""
    owner: Any = importlib.import_module("mlx_lm")
    for part in parents:
        if isinstance(owner, types.ModuleType) and not isinstance(getattr(owner, part, None), type):
            owner = importlib.import_module(f"{owner.__name__}.{part}")
        else:
            owner = getattr(owner, part)
    return owner


def _assigned(cls: type) -> set[str]:
    """The attributes that a class's own methods assign on self, and its dataclass fields."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    stored = [
        n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)
    ]
    own = {n.attr for n in stored if isinstance(n.value, ast.Name) and n.value.id == "self"}
    return own | set(getattr(cls, "__dataclass_fields__", ()))


def _parameters(function: Any) -> str:
    """The parameters of a function or class, without annotations and defaults."""
    signature = inspect.signature(function)
    bare = [p.replace(annotation=p.empty, default=p.empty) for p in signature.parameters.values()]
    return f"({', '.join(_with_star(bare))})"


def _with_star(parameters: list[inspect.Parameter]) -> Iterator[str]:
    kinds = [p.kind for p in parameters]
    star = inspect.Parameter.VAR_POSITIONAL not in kinds
    for parameter in parameters:
        if star and parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            star = False
            yield "*"
        yield str(parameter)


def _names_in(code: types.CodeType) -> Iterator[str]:
    """The globals and attributes that a function and the functions in it read."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)
