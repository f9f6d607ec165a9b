"""Lets a model's own attention read blocks where they lie.

bind() gives each attention submodule of one model instance a derived class that computes one of
three: what a plugin's adapter does; its own code with `scaled_dot_product_attention` bound to ours,
which lets the cache attend; or its own code for one member of a batch after another.
mlx-lm's modules and classes stay as they are. Whether the model computes the same that way is found
out by probe.py.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import mlx.core as mx
from mlx_lm.models import base

from ..errors import PluginError
from ..hooks import AttentionAdapter
from ..mlx_lm_compat import rebind
from ..spec import STOCK_NAMES
from .attention import attend_quantised
from .batch_cache import PooledBatchCache
from .by_member import attend_by_member
from .quantised import Quantised

NAME = "scaled_dot_product_attention"
PARAMETERS = list(inspect.signature(base.scaled_dot_product_attention).parameters)
# How modules attend that call mlx-lm's function.
PLAIN = "plain"

# The class of a module and the way in which it attends -> the class of attached ones.
_classes: WeakValueDictionary[tuple[type, Any], type] = WeakValueDictionary()


def scaled_dot_product_attention(
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: Any = None,
    *,
    own: Callable[..., mx.array] = base.scaled_dot_product_attention,
) -> mx.array:
    """mlx-lm's signature; a pooled cache attends itself. own: the function that the module calls,
    for other caches.
    """
    if type(keys) is PooledBatchCache:
        # Also for a layer without a cache, which attends to what another layer's returned.
        return keys.attend(queries, keys, values, scale, mask, sinks)
    if hasattr(cache, "attend"):
        attended: mx.array = cache.attend(queries, keys, values, scale, mask, sinks)
        return attended
    if isinstance(keys, Quantised) or isinstance(values, Quantised):
        # What another layer's pooled cache returned.
        return attend_quantised(queries, [(keys, values)], scale, mask, sinks)
    return own(queries, keys, values, cache, scale=scale, mask=mask, sinks=sinks)


def bind(
    model: Any,
    adapters: Sequence[AttentionAdapter] = (),
    *,
    by_member: bool = False,
    writes: Set[str] = frozenset(STOCK_NAMES[:1]),
) -> int:
    """Attach one model instance; returns how many submodules attend through their cache now.

    The last adapter that applies to a module's class is used; raises PluginError for one that
    raises. by_member: no adapter is used, and all modules that have a cache compute one member
    after another. writes: the methods by which modules append to their caches.
    """
    attached = 0
    for _, module in model.named_modules():
        cls = type(module).__dict__.get("_attached_from", type(module))
        adapter = None if by_member else _adapter_of(cls, adapters)
        way = adapter or _own_way(cls, by_member, writes)
        if way is not None:
            module.__class__ = _derived(cls, way)
            attached += 1
    return attached


def _adapter_of(cls: type, adapters: Sequence[AttentionAdapter]) -> AttentionAdapter | None:
    for adapter in reversed(adapters):
        try:
            if adapter.applies(cls):
                return adapter
        except Exception as error:
            # Code from anywhere may raise anything.
            raise PluginError(
                f"adapter {adapter.name} of {adapter.source} raised {type(error).__name__}: {error}"
            ) from error
    return None


def _own_way(cls: type, by_member: bool, appends: Set[str]) -> Any:
    """How modules of a class without an adapter attend: as PLAIN, or by a function as
    AttentionAdapter.attend; None if they have no cache.
    """
    methods = _methods(cls)
    calls = [name for name, method in methods.items() if _calls_attention(method)]
    writes = [
        name for name, method in methods.items() if not appends.isdisjoint(method.__code__.co_names)
    ]
    # What a method writes and passes to no attention is read in another way.
    if calls and not (by_member and writes) and set(writes) <= set(calls):
        return PLAIN
    return attend_by_member if writes else None


def _methods(cls: type) -> dict[str, types.FunctionType]:
    return {
        name: value
        for base in reversed(cls.__mro__)
        for name, value in vars(base).items()
        if isinstance(value, types.FunctionType)
    }


def _calls_attention(method: types.FunctionType) -> bool:
    """Return whether a method calls mlx-lm's function, or one of another package that takes the
    same (mlx-vlm has a copy).
    """
    found = method.__globals__.get(NAME) if NAME in method.__code__.co_names else None
    return (
        isinstance(found, types.FunctionType)
        and list(inspect.signature(found).parameters) == PARAMETERS
    )


def _derived(cls: type, way: Any) -> type:
    """The class of attached modules of a class that attend in one way, which is an adapter or what
    _own_way() returns: one for all models.
    """
    found = _classes.get((cls, way))
    if found is None:
        attend = _attend_of(way)
        if attend == PLAIN:
            methods = {
                name: _attending(method)
                for name, method in _methods(cls).items()
                if _calls_attention(method)
            }
        else:
            own: Any = cls.__call__

            def call(module: Any, *args: Any, **kwargs: Any) -> Any:
                return attend(module, own, *args, **kwargs)

            methods = {"__call__": call}
        names = {
            **methods,
            "__reduce_ex__": _reduce,
            "_attached_from": cls,
            "_way": staticmethod(way),
            "__module__": cls.__module__,
        }
        found = _classes[cls, way] = type(cls.__name__, (cls,), names)
    return found


def _attend_of(way: Any) -> Any:
    return way.attend if isinstance(way, AttentionAdapter) else way


def _attending(method: types.FunctionType) -> Callable[..., Any]:
    """A method whose attention is ours."""
    ours = partial(scaled_dot_product_attention, own=method.__globals__[NAME])
    return rebind(method, **{NAME: ours})


def _reduce(module: Any, protocol: Any) -> tuple[Any, ...]:
    """For pickles: derived classes have no name to be found under, so that the class they are
    derived from is attached again.
    """
    cls = type(module)._attached_from
    _, _, *content = cls.__reduce_ex__(module, protocol)
    return _attached, (cls, type(module)._way), *content


def _attached(cls: type, way: Any) -> Any:
    derived: Any = _derived(cls, way)
    return derived.__new__(derived)


def classes_of(model: Any) -> list[tuple[Any, type]]:
    """The submodules of a model and their classes, for restore()."""
    return [(module, type(module)) for _, module in model.named_modules()]


def restore(classes: Iterable[tuple[Any, type]]) -> None:
    """Undo what bind() has changed since classes_of()."""
    for module, cls in classes:
        if type(module) is not cls:
            module.__class__ = cls


def detach(model: Any) -> None:
    """Undo attach() and bind()."""
    for module in attached_modules(model):
        module.__class__ = type(module)._attached_from


@contextmanager
def counting(model: Any) -> Iterator[list[None]]:
    """Within this context, the list has an item for each forward pass of the model."""
    cls, passes = type(model), list[None]()

    def call(self: Any, *args: Any, **given: Any) -> Any:
        passes.append(None)
        return cls.__call__(self, *args, **given)

    counted = type(cls.__name__, (cls,), {"__call__": call, "__module__": cls.__module__})
    model.__class__ = counted
    try:
        yield passes
    finally:
        # A model that is an attention itself may have been attached.
        if type(model) is counted:
            model.__class__ = cls


@contextmanager
def detached(model: Any) -> Iterator[None]:
    """The model as mlx-lm has it, and then as it was: what attached modules compute from other
    caches may be an adapter's too.
    """
    before = classes_of(model)
    detach(model)
    try:
        yield
    finally:
        restore(before)


def is_by_member(model: Any) -> bool:
    """Return whether some module of an attached model computes one member after another."""
    return any(_attend_of(way) is attend_by_member for way in _ways(model))


def _ways(model: Any) -> Iterator[Any]:
    for _, module in model.named_modules():
        yield getattr(type(module), "_way", None)


def sources_of(model: Any) -> list[str]:
    """The attention adapters of installed plugins that an attached model computes with, in
    words.
    """
    return list(
        dict.fromkeys(
            f"adapter {way.name} of {way.source}"
            for way in _ways(model)
            if isinstance(way, AttentionAdapter) and way.source
        )
    )


def attached_modules(model: Any) -> list[Any]:
    """The submodules that bind() has attached."""
    return [m for _, m in model.named_modules() if "_attached_from" in type(m).__dict__]
