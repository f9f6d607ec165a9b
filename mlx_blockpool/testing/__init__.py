"""The conformance kit for plugin authors: does the pool work for a model as a plugin describes it?
Importing this imports no mlx.

    for result in conformance(config, my_plugin):
        print(result)

or as a pytest class, see Conformance, or `pytest --blockpool-config config.json`.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "CHECKS": "kit",
    "Conformance": "kit",
    "ConformanceError": "subject",
    "NotCheckedError": "subject",
    "Result": "kit",
    "Subject": "subject",
    "conformance": "kit",
    "run_check": "kit",
    "tiny_model": "subject",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'mlx_blockpool.testing' has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return [*__all__]
