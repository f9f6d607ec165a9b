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

from ..config import KVBits
from ..mlx_lm_compat import rebind
from ..ranks.group import ALONE, Ranks
from ..spec import ChunkLayer, ModelCacheSpec, StateLayer
from .alone import Unsettled, takes_back
from .arena import KVArena
from .factory import make_prompt_cache
from .kernel_trial import try_kernel
from .parts import batch_of, begin_rows, commit_rows
from .rounded import rounded
from .rows import Quantised, Rows
from .runs import attend_quantised
from .shards import apart, on_all

log = logging.getLogger(__name__)

# A step of its own needs less; copies of smaller slabs cost nothing that matters.
MEASURABLE_BYTES = 4 * 2**20

NAME = "scaled_dot_product_attention"

# What a model is tried with: prompts, and the tokens that follow each of them.
PROMPTS = [[3, 5, 7, 11, 13, 2, 9], [4, 6, 8]]
NEXT = [[1], [2]]

# The class of a module -> that of attached ones.
_classes: WeakValueDictionary[type, type] = WeakValueDictionary()


def scaled_dot_product_attention(
    queries: mx.array, keys: Rows, values: Rows, cache: Any, scale: float, mask: Any, sinks: Any = None
) -> mx.array:
    """mlx-lm's signature; a pooled cache attends itself."""
    if hasattr(cache, "attend"):
        attended: mx.array = cache.attend(queries, keys, values, scale, mask, sinks)
        return attended
    if isinstance(keys, Quantised) or isinstance(values, Quantised):
        # What another layer's pooled cache returned.
        return attend_quantised(queries, [(keys, values)], scale, mask, sinks)
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


def attach(model: Any, arena: KVArena, ranks: Ranks = ALONE) -> bool:
    """Attach, and keep it if a ragged batch of random tokens gives the logits of single sequences, on all ranks.

    Sets arena.ragged, arena.verifies where several tokens of each sequence in one forward do so too, and the layer groups whose
    kernel is trusted. A model that does not pass is as it was before, and batches through mlx-lm's padded caches, unless the pool
    is quantised: nothing else reads its blocks. Raises PoolExhaustedError where the pool has no room for two short sequences.
    """
    spec = arena.spec
    agrees = False

    def reads_blocks() -> bool:
        batch = _agrees(model, lambda: make_prompt_cache(model, arena), not arena.state_leaves, spec)
        if spec.bits is None:
            return batch
        # What a sequence alone gets of quantised blocks are no arrays, which a model may touch between cache and attention.
        # All ranks try it or none does: parts of layers compute together.
        return on_all(ranks, batch) and _agrees_alone(model, arena)

    arena.ragged = spec.batches
    try:
        agrees = spec.batches and _keep_attached_if(model, arena, reads_blocks, ranks)
        if agrees and ranks.size == 1 and _agrees_by_rows(model, arena):
            arena.verifies = "rows"
        elif agrees:
            verify_alone_if_near(model, arena, ranks)
        arena.ragged = agrees
        try_kernel(model, arena, ranks)
    finally:
        arena.ragged = agrees
        arena.decode.path_counts.clear()
    return agrees


def attach_alone(model: Any, arena: KVArena, ranks: Ranks = ALONE) -> bool:
    """attach() for a model whose sequences run one at a time: keep it if one in two parts gives the logits of mlx-lm's caches."""
    arena.ragged = False
    return _keep_attached_if(model, arena, lambda: _agrees_alone(model, arena), ranks)


def _keep_attached_if(model: Any, arena: KVArena, agrees: Callable[[], bool], ranks: Ranks) -> bool:
    """Attach a model, and detach it again unless it agrees then, on all ranks."""
    # Another pool may have attached it, and relies on that.
    was_attached = any("_attached_from" in type(module).__dict__ for _, module in model.named_modules())
    passed = False
    try:
        # A model without attention has nothing to attach.
        is_bound = bind(model) > 0 or not arena.spec.groups
        with apart(model):
            own = is_bound and (arena.spec.bits is None or may_read_quantised(model)) and agrees()
        passed = on_all(ranks, own)
    finally:
        arena.decode.path_counts.clear()
        if not passed and not was_attached:
            detach(model)
    return passed


def batches_padded(model: Any, spec: ModelCacheSpec | None = None, ranks: Ranks = ALONE) -> bool:
    """Return whether mlx-lm's own padded batch gives the logits of single sequences, on all ranks. (gemma2's does not run.)

    `spec`: of a model whose prompts are computed one at a time where it has states.
    """
    has_states = spec is not None and any(isinstance(leaf, StateLayer) for leaf in spec.leaves)
    with apart(model):
        agrees = (spec is None or spec.batches) and _agrees(model, lambda: _stock_caches(model, spec), not has_states, spec)
    return on_all(ranks, agrees)


def leaves_padding_out(model: Any, ranks: Ranks = ALONE) -> bool:
    """Return whether mlx-lm's batch of prompts of several lengths gives the logits of single sequences. (jamba's does not.)"""
    with apart(model):
        agrees = _agrees(model, lambda: _stock_caches(model), pads=True)
    return on_all(ranks, agrees)


def _calls_attention(cls: type) -> bool:
    call = cls.__call__
    return (
        isinstance(call, types.FunctionType)
        and NAME in call.__code__.co_names
        and call.__globals__.get(NAME) is getattr(base, NAME)
    )


def may_read_quantised(model: Any) -> bool:
    """Return whether attach() may find that a model's attention reads quantised blocks. Nothing is computed.

    It does not where keys of a cache may go elsewhere than into attention, as an indexer's do in prompts too long to be tried.
    """
    classes = {cls for _, module in model.named_modules() for cls in type(module).__mro__}
    functions = [value for cls in classes for value in vars(cls).values() if isinstance(value, types.FunctionType)]
    with_cache = [f.__code__.co_names for f in functions if "update_and_fetch" in f.__code__.co_names]
    return all(NAME in names for names in with_cache)


def _agrees(model: Any, make_caches: Callable[[], list[Any]], pads: bool, spec: ModelCacheSpec | None = None) -> bool:
    """Return whether a batch gives the logits of single sequences. `pads`: prompts are computed together, shorter ones padded."""

    def in_a_batch() -> mx.array:
        caches = [make_caches() for _ in PROMPTS]
        if not pads:
            for own, prompt in zip(caches, PROMPTS, strict=True):
                _logits(model, [prompt], own)
        batch = [type(layer[0]).merge(list(layer)) for layer in zip(*caches, strict=True)]
        return _batch_logits(model, batch, PROMPTS if pads else [])

    return _is_near(model, in_a_batch, PROMPTS, spec)


def _agrees_by_rows(model: Any, arena: KVArena) -> bool:
    """Return whether tokens that are computed by rows, beside some that are not kept, have the logits of single sequences."""
    if arena.state_leaves or any(isinstance(leaf, ChunkLayer) for leaf in arena.spec.leaves):
        return False

    def by_rows() -> mx.array:
        caches = [make_prompt_cache(model, arena) for _ in PROMPTS]
        for own, prompt in zip(caches, PROMPTS, strict=True):
            _logits(model, [prompt], own)
        batch = batch_of(caches)
        # One of each is kept; then the last row of each is looked at.
        begin_rows(batch, [3, 2])
        _logits(model, [NEXT[0], [8], [9], NEXT[0], [6]], batch)
        commit_rows(batch, [1, 1])
        begin_rows(batch, [1, 2])
        logits = _logits(model, [NEXT[1], NEXT[1], [7]], batch)
        commit_rows(batch, [1, 1])
        return logits[:2, -1]

    return _is_near(model, by_rows, PROMPTS, arena.spec)


def verify_alone_if_near(model: Any, arena: KVArena, ranks: Ranks = ALONE) -> None:
    """Set arena.verifies if a sequence that takes tokens back has the logits of mlx-lm's caches. Groups of ranks do not try."""

    def alone() -> mx.array:
        caches = make_prompt_cache(model, arena)
        _logits(model, [PROMPTS[0]], caches)
        Unsettled(model, caches, [*NEXT[0], 8, 9]).settle(1)
        return Unsettled(model, caches, [*NEXT[1], 7]).logits[:1]

    if ranks.size == 1 and takes_back(arena.spec) and _is_near(model, alone, PROMPTS[:1], arena.spec):
        arena.verifies = "alone"


def _agrees_alone(model: Any, arena: KVArena) -> bool:
    """Return whether a prompt in two parts, on pooled caches, gives the logits of mlx-lm's."""
    prompt = PROMPTS[0]
    parts = [prompt[:4], prompt[4:], *NEXT]
    return _is_near(model, lambda: _last_logits(model, make_prompt_cache(model, arena), parts), [prompt], arena.spec)


def _is_near(model: Any, compute: Callable[[], mx.array], prompts: list[list[int]], spec: ModelCacheSpec | None) -> bool:
    """Return whether computed logits are those of each prompt alone, on mlx-lm's caches that hold what the spec's blocks hold."""
    try:
        found = compute()
    # Errors of a model that was not made for such a cache; its other errors come back on the path that is taken instead.
    except (AttributeError, IndexError, NotImplementedError, TypeError, ValueError) as error:
        log.info("%s does not run this way: %s", type(model).__module__, error)
        return False
    alone = [_last_logits(model, _stock_caches(model, spec), [prompt, *NEXT]) for prompt in prompts]
    needed = mx.concatenate(alone).astype(mx.float32)
    tolerance = _tolerance(found.dtype == mx.float32, None if spec is None else spec.bits)
    return bool((mx.abs(found.astype(mx.float32) - needed).max() <= tolerance * mx.abs(needed).max()).item())


def _tolerance(in_float32: bool, bits: KVBits | None) -> float:
    """How far logits may be apart, in parts of the largest one, for models in float32 or in 16 bits."""
    if bits is None:
        return 1e-3 if in_float32 else 5e-2
    # Sums in another order now and then move a quantised number by a whole step.
    return 0.2 if 4 in (bits.keys, bits.values) and not in_float32 else 5e-2


def _batch_logits(model: Any, batch: list[Any], prompts: list[list[int]]) -> mx.array:
    """Logits [2, vocabulary] after two prompts, which are still to be computed, or none, and two tokens more."""
    if prompts:
        longest = max(map(len, prompts))
        for cache in batch:
            cache.prepare(lengths=[len(p) for p in prompts], right_padding=[longest - len(p) for p in prompts])
        _logits(model, [p + [0] * (longest - len(p)) for p in prompts], batch)
        for cache in batch:
            cache.finalize()
    for token in NEXT:
        logits = _logits(model, [token] * 2, batch)
    return logits[:, -1]


def _last_logits(model: Any, caches: list[Any], parts: list[list[int]]) -> mx.array:
    """Logits [1, vocabulary] of one sequence after its last part."""
    for tokens in parts:
        logits = _logits(model, [tokens], caches)
    return logits[:, -1]


def _logits(model: Any, tokens: list[list[int]], caches: list[Any]) -> mx.array:
    """The logits of one pass, evaluated: ranks would not order the collectives of two passes in one graph alike."""
    logits: mx.array = model(mx.array(tokens), cache=caches)
    mx.eval(logits)
    return logits


def _stock_caches(model: Any, spec: ModelCacheSpec | None = None) -> list[Any]:
    """mlx-lm's caches of one sequence, rounded as the blocks of this spec are."""
    caches: list[Any] = stock_prompt_cache(model, None if spec is None else spec.max_kv_size)
    return caches if spec is None or spec.bits is None else rounded(caches, spec)


def step_synchronously_if_copied(model: Any, arena: KVArena, caches: list[Any] | None = None, steps: int = 8) -> bool:
    """Find out whether a decode step that is encoded while the one before still runs copies whole slabs, and forbid it then.

    mlx writes in place only where nothing else reads the buffer; how far it encodes ahead differs by device and model. Sets and
    returns arena.decode.synchronous.
    """
    caches = caches or make_prompt_cache(model, arena)
    with apart(model):
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
