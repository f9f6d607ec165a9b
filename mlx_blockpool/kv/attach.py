"""Lets a model's own attention read blocks where they lie.

attach() gives each attention submodule of one model instance a derived class whose __call__ is mlx-lm's code with
`scaled_dot_product_attention` bound to ours, which lets the cache attend. mlx-lm's modules and classes stay as they are.
"""

from __future__ import annotations

import logging
import types
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import mlx.core as mx
from mlx_lm.models import base
from mlx_lm.models.cache import make_prompt_cache as stock_prompt_cache

from ..mlx_lm_compat import rebind
from ..spec import ModelCacheSpec, StateLayer
from .arena import KVArena
from .factory import make_prompt_cache

log = logging.getLogger(__name__)

# A step of its own needs less; copies of smaller slabs cost nothing that matters.
MEASURABLE_BYTES = 4 * 2**20

NAME = "scaled_dot_product_attention"

# The class of a module -> that of attached ones.
_classes: WeakValueDictionary[type, type] = WeakValueDictionary()


def scaled_dot_product_attention(
    queries: mx.array, keys: mx.array, values: mx.array, cache: Any, scale: float, mask: Any, sinks: Any = None
) -> mx.array:
    """mlx-lm's signature; a pooled cache attends itself."""
    if hasattr(cache, "attend"):
        attended: mx.array = cache.attend(queries, keys, values, scale, mask, sinks)
        return attended
    out: mx.array = base.scaled_dot_product_attention(queries, keys, values, cache, scale=scale, mask=mask, sinks=sinks)
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
        names = {"__call__": call, "__reduce_ex__": _reduce, "_attached_from": cls, "__module__": cls.__module__}
        found = _classes[cls] = type(cls.__name__, (cls,), names)
    return found


def _reduce(module: Any, protocol: Any) -> tuple[Any, ...]:
    """For pickles: derived classes have no name to be found under, so that the class they are derived from is attached again."""
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


def attach(model: Any, arena: KVArena) -> bool:
    """Attach, and keep it if a ragged batch of random tokens gives the logits of single sequences.

    Sets arena.ragged. A model that does not pass is as it was before, and batches through mlx-lm's padded caches. Raises
    PoolExhaustedError where the pool has no room for two short sequences.
    """
    spec = arena.spec
    # Another pool may have attached it, and relies on that.
    was_attached = any("_attached_from" in type(module).__dict__ for _, module in model.named_modules())
    arena.ragged = agrees = False
    try:
        # A model without attention has nothing to attach.
        arena.ragged = spec.batches and (bind(model) > 0 or not spec.groups)
        agrees = arena.ragged and _agrees(
            model, lambda: make_prompt_cache(model, arena), not arena.state_leaves, spec.max_kv_size
        )
    finally:
        arena.ragged = agrees
        arena.decode.path_counts.clear()
        if not agrees and not was_attached:
            detach(model)
    return agrees


def batches_padded(model: Any, spec: ModelCacheSpec | None = None) -> bool:
    """Return whether mlx-lm's own padded batch gives the logits of single sequences. (gemma2's does not run at all.)

    `spec`: of a model whose prompts are computed one at a time where it has states.
    """
    has_states = spec is not None and any(isinstance(leaf, StateLayer) for leaf in spec.leaves)
    size = None if spec is None else spec.max_kv_size
    return (spec is None or spec.batches) and _agrees(model, lambda: stock_prompt_cache(model, size), not has_states, size)


def leaves_padding_out(model: Any) -> bool:
    """Return whether mlx-lm's batch of prompts of several lengths gives the logits of single sequences. (jamba's does not.)"""
    return _agrees(model, lambda: stock_prompt_cache(model), pads=True)


def _calls_attention(cls: type) -> bool:
    call = cls.__call__
    return (
        isinstance(call, types.FunctionType)
        and NAME in call.__code__.co_names
        and call.__globals__.get(NAME) is getattr(base, NAME)
    )


def _agrees(model: Any, make_caches: Callable[[], list[Any]], pads: bool, max_kv_size: int | None = None) -> bool:
    """`pads`: prompts are computed together, the shorter ones padded. `max_kv_size`: of the caches to agree with."""
    prompts = [[3, 5, 7, 11, 13, 2, 9], [4, 6, 8]]
    try:
        caches = [make_caches() for _ in prompts]
        if not pads:
            for own, prompt in zip(caches, prompts, strict=True):
                model(mx.array([prompt]), cache=own)
        batch = [type(layer[0]).merge(list(layer)) for layer in zip(*caches, strict=True)]
        found = _batch_logits(model, batch, prompts if pads else [])
    # Errors of a model that was not made for such a cache; its other errors come back on the padded path.
    except (AttributeError, IndexError, NotImplementedError, TypeError, ValueError) as error:
        log.info("%s does not batch this way: %s", type(model).__module__, error)
        return False
    needed = mx.concatenate([_single_logits(model, prompt, max_kv_size) for prompt in prompts])
    scale = mx.abs(needed).max()
    tolerance = 1e-3 if found.dtype == mx.float32 else 5e-2
    return bool((mx.abs(found.astype(mx.float32) - needed).max() <= tolerance * scale).item())


def _batch_logits(model: Any, batch: list[Any], prompts: list[list[int]]) -> mx.array:
    """Logits [2, vocabulary] after two prompts, which are still to be computed, or none, and two tokens more."""
    if prompts:
        longest = max(map(len, prompts))
        for cache in batch:
            cache.prepare(lengths=[len(p) for p in prompts], right_padding=[longest - len(p) for p in prompts])
        model(mx.array([p + [0] * (longest - len(p)) for p in prompts]), cache=batch)
        for cache in batch:
            cache.finalize()
    for token in (1, 2):
        logits: mx.array = model(mx.array([[token]] * 2), cache=batch)
    return logits[:, -1]


def _single_logits(model: Any, prompt: list[int], max_kv_size: int | None) -> mx.array:
    cache = stock_prompt_cache(model, max_kv_size)
    for tokens in (prompt, [1], [2]):
        logits: mx.array = model(mx.array([tokens]), cache=cache)
    return logits[:, -1].astype(mx.float32)


def step_synchronously_if_copied(model: Any, arena: KVArena, caches: list[Any] | None = None, steps: int = 8) -> bool:
    """Find out whether a decode step that is encoded while the one before still runs copies whole slabs, and forbid it then.

    mlx writes in place only where nothing else reads the buffer; how far it encodes ahead differs by device and model. Sets and
    returns arena.decode.synchronous.
    """
    caches = caches or make_prompt_cache(model, arena)
    token = mx.zeros((1, 1), mx.int32)
    mx.eval(model(token, cache=caches))
    largest = max((a.nbytes for a in arena.arrays()), default=0)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    previous = token
    for _ in range(steps):
        following = mx.argmax(model(previous, cache=caches)[:, -1:], axis=-1)
        mx.async_eval(following)  # type: ignore[no-untyped-call]
        mx.eval(previous)
        previous = following
    mx.eval(previous)
    arena.decode.synchronous = mx.get_peak_memory() - before > max(largest, MEASURABLE_BYTES)
    return arena.decode.synchronous
