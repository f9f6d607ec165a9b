"""probe(): finds out what a model can do with the caches of a pool, by computing a few tokens in
several ways.

Logits on pooled caches are compared with those on mlx-lm's own. What does not agree is served a
step more simply.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache as stock_prompt_cache

from ..config import KVBits
from ..errors import PluginError, PoolExhaustedError
from ..hooks import AttentionAdapter
from ..plugins import attention_adapters
from ..ranks.group import ALONE, Ranks
from ..spec import ChunkLayer, ModelCacheSpec, writes_of
from .arena import KVArena
from .attach import bind, classes_of, detached, is_by_member, restore, sources_of
from .capabilities import Capabilities
from .kernel_trial import refused_kernels
from .pending_tokens import PendingTokens, padded_forward, takes_back
from .prompt_cache import batch_of, begin_rows, commit_rows, make_prompt_cache
from .proof import TOO_SMALL, difference_alone, long_prompts, too_small
from .rounded_caches import rounded
from .scratch import pipelined
from .shards import is_stage, on_all, without_collectives

log = logging.getLogger(__name__)

# A step itself needs less, and copies of smaller slabs hardly cost anything.
MEASURABLE_BYTES = 4 * 2**20

# Decode steps by which copies of slabs show.
STEPS = 8

# Prompts that a model is tried with, and the tokens that follow each of them.
PROMPTS = [[3, 5, 7, 11, 13, 2, 9], [4, 6, 8]]
NEXT = [[1], [2]]


def probe(
    model: Any, arena: KVArena, ranks: Ranks = ALONE, *, attaches: bool = True
) -> Capabilities:
    """What a model can do with the caches of `arena`, whose blocks are free again afterwards. All
    ranks call this, or none.

    It stays attached if a ragged batch of random tokens gives the logits of single sequences, on
    all ranks, or if the pool is quantised and one sequence in two parts gives those of mlx-lm's
    caches; else it is as it was before. `attaches=False` leaves it as it is, and tries only what
    mlx-lm's own attention can do. What installed plugins say is also tried with long prompts.
    Raises PoolExhaustedError if the pool cannot hold two short sequences, and PluginError if a
    sequence differs on the caches of a plugin's spec.
    """
    found, own = Capabilities(is_stage=is_stage(model)), _OwnLogits(model, arena.spec)
    if not attaches:
        _need_equal_caches(model, arena, found, ranks)
        return replace(found, pads_states=_leaves_padding_out(own, arena, ranks))
    before, classes = arena.capabilities, classes_of(model)
    # Caches of the pool work as if the model could do what is tried.
    arena.capabilities = found
    try:
        found = arena.capabilities = _probed_batches(own, arena, found, ranks)
        found = arena.capabilities = replace(
            found, pads_states=_leaves_padding_out(own, arena, ranks)
        )
        if arena.spec.bits is not None and not found.is_attached:
            # The model cannot read these blocks.
            return found
        _need_equal_caches(model, arena, found, ranks)
        no_kernel = refused_kernels(model, arena, ranks)
        kernels = frozenset(range(len(arena.spec.groups))) - no_kernel.keys()
        found = replace(
            found, verifies=_verifies(own, arena, ranks), kernels=kernels, no_kernel=no_kernel
        )
        arena.capabilities = found
        return replace(found, synchronous=copies_slabs(model, arena))
    except Exception:
        restore(classes)
        raise
    finally:
        arena.capabilities = before
        arena.decode.path_counts.clear()


def _probed_batches(
    own: _OwnLogits, arena: KVArena, found: Capabilities, ranks: Ranks
) -> Capabilities:
    """`found`, and whether batches are ragged. Attaches the model if it agrees then."""
    model, spec = own.model, arena.spec
    is_quantised = spec.bits is not None

    def reads_blocks() -> str | None:
        for prompts in _prompts(model, arena):
            why = _difference(
                own, lambda: make_prompt_cache(model, arena), not arena.state_leaves, prompts
            )
            if why is not None:
                return why
        # A batch does not try what an adapter computes for one sequence.
        return _difference_long(model, arena) if sources_of(model) else None

    def reads_alone() -> str | None:
        return _difference_alone(own, arena)

    def reads_both() -> str | None:
        # A single sequence gets quantised rows instead of arrays, and a model may compute with them
        # before attention. All ranks try it or none does: parts of layers compute together.
        why = reads_blocks()
        return (why or reads_alone()) if on_all(ranks, why is None) else why

    proofs = [(True, reads_both if is_quantised else reads_blocks)] if spec.batches else []
    if is_quantised:
        proofs.append((False, reads_alone))
    ways = (attention_adapters(), None)
    for ragged, agrees in proofs:
        arena.capabilities = replace(found, ragged=ragged)
        for adapters in ways:
            why = _attach_if(model, arena, agrees, ranks, adapters)
            if why is None:
                return replace(
                    found, ragged=ragged, is_attached=True, by_member=is_by_member(model)
                )
            what = "A batch whose blocks are read in place" if ragged else "One sequence"
            how = ", one member after another" if adapters is None and ragged else ""
            found = replace(found, differs=(*found.differs, f"{what}{how}: {why}."))
    return found


def _need_equal_caches(model: Any, arena: KVArena, found: Capabilities, ranks: Ranks) -> None:
    """Raises PluginError unless a long sequence, and one that is resumed, have the logits of the
    model's own caches. What the bundled provider says is read off these and needs no proof.
    """
    spec = arena.spec
    if spec.source is None:
        return
    with without_collectives(model):
        why = _difference_long(model, arena)
    if not on_all(ranks, why is None):
        why = why or "the part of another rank differs"
        advice = "Correct the plugin; `mlx_blockpool.testing.conformance` shows more."
        raise PluginError(
            f"{spec.model_id}, one sequence on the caches that {spec.source} describes: {why}. "
            f"{'' if why.startswith(TOO_SMALL) else advice}".rstrip()
        )


def _difference_long(model: Any, arena: KVArena) -> str | None:
    """difference_alone() from caches that hold what the blocks of `arena` hold."""
    spec = arena.spec
    tolerance = None if spec.bits is None else _tolerance(True, spec.bits)
    return difference_alone(model, arena, lambda: _stock_caches(model, spec), tolerance)


def _prompts(model: Any, arena: KVArena) -> list[list[list[int]]]:
    """What batches are tried with: for what installed plugins say also long prompts."""
    if arena.spec.source is None and not sources_of(model):
        return [PROMPTS]
    return [PROMPTS, long_prompts(model, arena, _stock_caches(model))]


def _verifies(own: _OwnLogits, arena: KVArena, ranks: Ranks) -> Any:
    """Capabilities.verifies. Groups of ranks do not try."""
    if not ranks.decides:
        return None
    if arena.capabilities.ragged and all(
        _agrees_by_rows(own, arena, prompts) for prompts in _prompts(own.model, arena)
    ):
        return "rows"
    if not takes_back(arena.spec):
        return None
    pads = arena.capabilities.ragged and arena.capabilities.pads_states
    if pads and _agrees_rolled_back(own, arena, PROMPTS):
        return "padded"
    return "alone" if _agrees_rolled_back(own, arena, PROMPTS[:1]) else None


def _attach_if(
    model: Any,
    arena: KVArena,
    agrees: Callable[[], str | None],
    ranks: Ranks,
    adapters: Sequence[AttentionAdapter] | None,
) -> str | None:
    """Attach a model with these adapters; None: member by member. Returns what differs then, on any
    rank, and leaves the model as it was.
    """
    # Another pool may have attached it, and relies on that.
    before = classes_of(model)
    passed, why = False, "its layers have no attention that can be attached"
    try:
        try:
            is_bound = bind(
                model, adapters or (), by_member=adapters is None, writes=writes_of(arena.spec)
            )
        except PluginError as error:
            is_bound, why = 0, str(error)
        sources = sources_of(model)
        # A model without attention has nothing to attach.
        if is_bound or not arena.spec.groups:
            with without_collectives(model):
                why = agrees() or ""
        passed = on_all(ranks, not why)
        if why and sources:
            why = f"with {' and '.join(sources)}, {why}"
            log.warning("A plugin's attention is not used: %s.", why)
    finally:
        if not passed:
            restore(before)
    return None if passed else why or "another rank's part differs"


def _leaves_padding_out(own: _OwnLogits, arena: KVArena, ranks: Ranks) -> bool:
    """Return whether a batch of prompts of several lengths gives the logits of single sequences
    though the model has states. (gear's does, baichuan_m1's does not.)
    """
    if not arena.state_leaves:
        return False
    model, found = own.model, arena.capabilities
    arena.capabilities = replace(found, pads_states=True)
    try:
        with without_collectives(model):
            why = (
                _difference(own, lambda: make_prompt_cache(model, arena), True)
                if found.ragged
                else _difference(_OwnLogits(model), lambda: _stock_caches(model), True)
            )
    finally:
        arena.capabilities = found
    return on_all(ranks, why is None)


def _difference(
    own: _OwnLogits,
    make_caches: Callable[[], list[Any]],
    pads: bool,
    prompts: list[list[int]] = PROMPTS,
) -> str | None:
    """What differs between the logits of a batch and those of single sequences, in words.

    `pads`: prompts are computed together, shorter ones padded.
    """

    def in_a_batch() -> mx.array:
        caches = [make_caches() for _ in prompts]
        if not pads:
            for each, prompt in zip(caches, prompts, strict=True):
                _logits(own.model, [prompt], each)
        batch = [type(layer[0]).merge(list(layer)) for layer in zip(*caches, strict=True)]
        return _batch_logits(own.model, batch, prompts if pads else [])

    return _compared(own, in_a_batch, prompts)


def _agrees_by_rows(own: _OwnLogits, arena: KVArena, prompts: list[list[int]]) -> bool:
    """Return whether tokens that are computed by rows, next to some that are not kept, have the
    logits of single sequences.
    """
    if arena.state_leaves or any(isinstance(leaf, ChunkLayer) for leaf in arena.spec.leaves):
        return False
    model = own.model

    def by_rows() -> mx.array:
        caches = [make_prompt_cache(model, arena) for _ in prompts]
        for each, prompt in zip(caches, prompts, strict=True):
            _logits(model, [prompt], each)
        batch = batch_of(caches)
        # One row of each is kept; then the last row of each is compared.
        begin_rows(batch, [3, 2])
        _logits(model, [NEXT[0], [8], [9], NEXT[0], [6]], batch)
        commit_rows(batch, [1, 1])
        begin_rows(batch, [1, 2])
        logits = _logits(model, [NEXT[1], NEXT[1], [7]], batch)
        commit_rows(batch, [1, 1])
        return logits[:2, -1]

    return _compared(own, by_rows, prompts) is None


def _agrees_rolled_back(own: _OwnLogits, arena: KVArena, prompts: list[list[int]]) -> bool:
    """Return whether sequences of which some tokens are rolled back have the logits of mlx-lm's
    caches.
    """
    model = own.model

    def rolled_back() -> mx.array:
        caches = [make_prompt_cache(model, arena) for _ in prompts]
        for each, prompt in zip(caches, prompts, strict=True):
            _logits(model, [prompt], each)
        more = len(prompts) - 1
        layers = batch_of(caches) if more else caches[0]
        # Of the first sequence some tokens are rejected, and all of the second are kept.
        pending = PendingTokens(model, layers, [[*NEXT[0], 8, 9], *[NEXT[0]] * more])
        held = pending.accept([1] * len(prompts))
        # The rows of the first that are computed again come before its next one.
        again = NEXT[0] * (1 - held[0])
        tokens = [[*again, *NEXT[1], 7], *[NEXT[1]] * more]
        logits = PendingTokens(model, pending.layers, tokens).logits
        return logits[mx.array([len(again), *[len(tokens[0])] * more])]

    return _compared(own, rolled_back, prompts) is None


def _difference_alone(own: _OwnLogits, arena: KVArena) -> str | None:
    """What differs between the logits of a prompt in two parts on pooled caches and on mlx-lm's."""
    model, prompt = own.model, PROMPTS[0]
    parts = [prompt[:4], prompt[4:], *NEXT]
    return _compared(
        own, lambda: _last_logits(model, make_prompt_cache(model, arena), parts), [prompt]
    )


class _OwnLogits:
    """Logits of prompts alone, on mlx-lm's caches that hold what the blocks of `spec` hold, each
    computed once.
    """

    def __init__(self, model: Any, spec: ModelCacheSpec | None = None) -> None:
        self.model, self.spec = model, spec
        self._known: dict[tuple[int, ...], mx.array] = {}

    def after(self, prompt: list[int]) -> mx.array:
        """[1, vocabulary] after a prompt and NEXT."""
        key, model = tuple(prompt), self.model
        if key not in self._known:
            with detached(model):
                caches = _stock_caches(model, self.spec)
                self._known[key] = _last_logits(model, caches, [prompt, *NEXT])
        return self._known[key]


def _compared(
    own: _OwnLogits, compute: Callable[[], mx.array], prompts: list[list[int]]
) -> str | None:
    """What differs between computed logits and those of each prompt alone; None if nothing does."""
    model, spec = own.model, own.spec
    try:
        found = compute()
        alone = [own.after(prompt) for prompt in prompts]
    except PoolExhaustedError as error:
        if spec is None or max(map(len, prompts)) <= len(PROMPTS[0]):
            raise
        # Short sequences fit, and are served more simply.
        return too_small(error, spec, max(map(len, prompts)))
    except Exception as error:
        # A model that was not made for such a cache, or an adapter of a plugin, may raise anything.
        # Other errors come back on the path that is taken instead.
        log.info("%s does not run this way: %s", type(model).__module__, error)
        return f"{type(error).__name__}: {str(error)[:200]}"
    needed = mx.concatenate(alone).astype(mx.float32)
    tolerance = _tolerance(found.dtype == mx.float32, None if spec is None else spec.bits)
    off = mx.abs(found.astype(mx.float32) - needed).max() / mx.maximum(mx.abs(needed).max(), 1e-30)
    # NaN is no less than anything.
    if (off <= tolerance).item():
        return None
    lengths = " and ".join(str(len(prompt) + len(NEXT)) for prompt in prompts)
    return (
        f"logits after {lengths} tokens differ by {off.item():.2g} of the largest from those of "
        "the model's own caches"
    )


def _tolerance(in_float32: bool, bits: KVBits | None) -> float:
    """How far logits may be apart, in parts of the largest one, for models in float32 or in 16
    bits.
    """
    if bits is None:
        return 1e-3 if in_float32 else 5e-2
    # Sums in another order now and then move a quantised number by a whole step.
    return 0.2 if 4 in (bits.keys, bits.values) and not in_float32 else 5e-2


def _batch_logits(model: Any, batch: list[Any], prompts: list[list[int]]) -> mx.array:
    """Logits [2, vocabulary] after two prompts, which are still to be computed, or none, and two
    tokens more.
    """
    # In two parts: what is padded then continues states, too.
    for part in (slice(2), slice(2, None)) if prompts else ():
        mx.eval(padded_forward(model, [prompt[part] for prompt in prompts], batch))
    for token in NEXT:
        logits = _logits(model, [token] * 2, batch)
    return logits[:, -1]


def _last_logits(model: Any, caches: list[Any], parts: list[list[int]]) -> mx.array:
    """Logits [1, vocabulary] of one sequence after its last part."""
    for tokens in parts:
        logits = _logits(model, [tokens], caches)
    return logits[:, -1]


def _logits(model: Any, tokens: list[list[int]], caches: list[Any]) -> mx.array:
    """The logits of one pass, evaluated: ranks would not order the collectives of two passes in
    one graph alike.
    """
    logits: mx.array = model(mx.array(tokens), cache=caches)
    mx.eval(logits)
    return logits


def _stock_caches(model: Any, spec: ModelCacheSpec | None = None) -> list[Any]:
    """mlx-lm's caches of one sequence, rounded as the blocks of this spec are."""
    caches: list[Any] = stock_prompt_cache(model, None if spec is None else spec.max_kv_size)
    return caches if spec is None or spec.bits is None else rounded(caches, spec)


def copies_slabs(model: Any, arena: KVArena, caches: list[Any] | None = None) -> bool:
    """Return whether a decode step that is encoded while the one before still runs copies whole
    slabs.

    mlx writes in place only if no other array reads the buffer; how far it encodes ahead differs by
    device and model.
    """
    assert not arena.capabilities.synchronous, "steps that wait for each other copy nothing"
    caches = caches or make_prompt_cache(model, arena)
    with without_collectives(model):
        token = mx.zeros((1, 1), mx.int32)
        mx.eval(model(token, cache=caches))
        largest = max((a.nbytes for a in arena.arrays()), default=0)
        mx.reset_peak_memory()
        before = mx.get_active_memory()

        def step() -> mx.array:
            nonlocal token
            token = mx.argmax(model(token, cache=caches)[:, -1:], axis=-1)
            return token

        pipelined(step, STEPS)
    return mx.get_peak_memory() - before > max(largest, MEASURABLE_BYTES)
