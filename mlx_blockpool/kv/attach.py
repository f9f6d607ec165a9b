"""Lets a model's own attention read blocks where they lie.

bind() gives each attention submodule of one model instance a derived class whose __call__ is
mlx-lm's code with `scaled_dot_product_attention` bound to ours, which lets the cache attend.
mlx-lm's modules and classes stay as they are. Whether the model computes the same that way is found
out by probe.py.
"""

from __future__ import annotations

import types
from typing import Any
from weakref import WeakValueDictionary

import mlx.core as mx
from mlx_lm.models import base

from ..mlx_lm_compat import rebind
from .attention import attend_quantised
from .quantised import Quantised, Rows

NAME = "scaled_dot_product_attention"

# The class of a module -> that of attached ones.
_classes: WeakValueDictionary[type, type] = WeakValueDictionary()


def scaled_dot_product_attention(
    queries: mx.array,
    keys: Rows,
    values: Rows,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: Any = None,
) -> mx.array:
    """mlx-lm's signature; a pooled cache attends itself."""
    if hasattr(cache, "attend"):
        attended: mx.array = cache.attend(queries, keys, values, scale, mask, sinks)
        return attended
    if isinstance(keys, Quantised) or isinstance(values, Quantised):
        # What another layer's pooled cache returned.
        return attend_quantised(queries, [(keys, values)], scale, mask, sinks)
    out: mx.array = base.scaled_dot_product_attention(
        queries, keys, values, cache, scale=scale, mask=mask, sinks=sinks
    )
    return out


def bind(model: Any) -> int:
    """Attach one model instance; returns how many submodules attend through their cache now."""
    attached = 0
    for _, module in model.named_modules():
        cls = type(module)
        attached += "_attached_from" in cls.__dict__
        if not _calls_attention(cls):
            continue
        module.__class__ = _derived(cls)
        attached += 1
    return attached


def _derived(cls: type) -> type:
    """The class of attached modules of a class: one for all models."""
    found = _classes.get(cls)
    if found is None:
        call = rebind(cls.__call__, **{NAME: scaled_dot_product_attention})
        names = {
            "__call__": call,
            "__reduce_ex__": _reduce,
            "_attached_from": cls,
            "__module__": cls.__module__,
        }
        found = _classes[cls] = type(cls.__name__, (cls,), names)
    return found


def _reduce(module: Any, protocol: Any) -> tuple[Any, ...]:
    """For pickles: derived classes have no name to be found under, so that the class they are
    derived from is attached again.
    """
    cls = type(module)._attached_from
    _, _, *content = cls.__reduce_ex__(module, protocol)
    return _attached, (cls,), *content


def _attached(cls: type) -> Any:
    derived: Any = _derived(cls)
    return derived.__new__(derived)


def detach(model: Any) -> None:
    """Undo attach() and bind()."""
    for _, module in model.named_modules():
        if "_attached_from" in type(module).__dict__:
            module.__class__ = type(module)._attached_from


def is_attached(model: Any) -> bool:
    """Return whether bind() has attached a model."""
    return any("_attached_from" in type(module).__dict__ for _, module in model.named_modules())


def _calls_attention(cls: type) -> bool:
    call = cls.__call__
    return (
        isinstance(call, types.FunctionType)
        and NAME in call.__code__.co_names
        and call.__globals__.get(NAME) is getattr(base, NAME)
    )
