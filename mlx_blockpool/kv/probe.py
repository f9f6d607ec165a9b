"""probe(): finds out what a model can do with the caches of a pool, by computing a few tokens in
several ways.

Logits on pooled caches are compared with those on mlx-lm's own. What does not agree is served a
step more simply.
"""

from __future__ import annotations

import logging
import math
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
from ..spec import ChunkLayer, ModelCacheSpec, StateLayer, writes_of
from .arena import KVArena
from .attach import attached_modules, bind, classes_of, detached, is_by_member, restore, sources_of
from .capabilities import Capabilities
from .kernel_trial import refused_kernels
from .pending_tokens import PendingTokens, first_rows, padded_forward, takes_back
from .pool import BlockPool
from .prompt_cache import (
    batch_of,
    begin_chunks,
    begin_rows,
    commit_rows,
    end_chunks,
    leaves_of,
    make_prompt_cache,
    sequence_of,
    state_caches,
)
from .proof import TOO_SMALL, difference_alone, long_prompts, sizes_of, too_small
from .rounded_caches import rounded
from .scratch import pipelined
from .shards import is_stage, on_all, without_collectives

log = logging.getLogger(__name__)

# A step itself needs less, and copies of smaller slabs hardly cost anything.
MEASURABLE_BYTES = 4 * 2**20

# Blocks that are reserved for a sequence whose slabs are watched, where a quarter of the pool has
# them.
PROBED_BLOCKS = 32
# In a pool of this many nothing is left out for want of blocks.
ENOUGH_BLOCKS = 4 * PROBED_BLOCKS

# Decode steps by which copies of slabs show: the last two begin while another one runs.
STEPS = 3

# Prompts that a model is tried with, the tokens that follow each of them, and the tokens after
# those where the same batch is tried further.
PROMPTS = [[3, 5, 7, 11, 13, 2, 9], [4, 6, 8]]
NEXT = [[1], [2]]
FURTHER = [[5], [3]]
# The largest logits by which a later load recognises a model.
SAMPLED = 8


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
    found = Capabilities(is_stage=is_stage(model))
    # Ranks make the same passes, whatever one of them finds.
    own = _OwnLogits(model, arena.spec, in_one=ranks.decides)
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
        verifies, mixes = _verifies(own, arena, ranks)
        # Its blocks are free for what follows.
        own.batch = None
        no_kernel = refused_kernels(model, arena, ranks)
        kernels = frozenset(range(len(arena.spec.groups))).difference(no_kernel)
        batched = found.ragged and (found.pads_states or not arena.state_leaves)
        with without_collectives(model):
            sample = tuple(map(own.sample, PROMPTS if batched else PROMPTS[:1]))
        found = replace(
            found,
            verifies=verifies,
            mixes=mixes,
            kernels=kernels,
            no_kernel=no_kernel,
            sample=sample,
        )
        arena.capabilities = found
        return replace(found, synchronous=copies_slabs(model, arena))
    except Exception:
        restore(classes)
        raise
    finally:
        arena.capabilities = before
        arena.decode.path_counts.clear()


def confirms(model: Any, arena: KVArena, found: Capabilities) -> bool:
    """Attach a model as a probe() that has `found` this did, and return whether one forward on the
    caches of `arena` gives the logits of that time. If not, the model stays as it was.
    """
    before, classes, spec = arena.capabilities, classes_of(model), arena.spec
    arena.capabilities, prompts = found, PROMPTS[: len(found.sample)]
    try:
        if found.is_attached:
            _, adapters = _ways(spec)[len(found.differs)]
            bind(model, adapters or (), by_member=adapters is None, writes=writes_of(spec))
        rows = []
        if prompts:
            caches = [make_prompt_cache(model, arena) for _ in prompts]
            batch = batch_of(caches) if len(prompts) > 1 else caches[0]
            logits = padded_forward(model, prompts, batch)
            rows = [logits[i, len(prompt) - 1] for i, prompt in enumerate(prompts)]
        tolerance = _tolerance(bool(rows) and rows[0].dtype == mx.float32, spec.bits)
        # What was remembered may be damaged; a token beyond the vocabulary would end the process.
        holds = bool(rows) and all(
            sample
            and all(0 <= token < row.size and math.isfinite(needed) for token, needed in sample)
            and all(
                abs(row[token].item() - needed) <= tolerance * max(abs(each) for _, each in sample)
                for token, needed in sample
            )
            for row, sample in zip(rows, found.sample, strict=True)
        )
    except Exception as error:
        # As in _compared(); remembered capabilities may be of anything.
        log.info("%s is probed again: %s", type(model).__module__, error)
        holds = False
    finally:
        arena.capabilities = before
        arena.decode.path_counts.clear()
    if not holds:
        restore(classes)
    return holds


def _ways(spec: ModelCacheSpec) -> list[tuple[bool, Sequence[AttentionAdapter] | None]]:
    """The ways in which a model may attend through the caches of a pool, in the order in which
    they are tried: whether in ragged batches, and with which adapters; None: member by member.
    """
    kinds = [True] * spec.batches + [False] * (spec.bits is not None)
    return [(ragged, adapters) for ragged in kinds for adapters in (attention_adapters(), None)]


def _probed_batches(
    own: _OwnLogits, arena: KVArena, found: Capabilities, ranks: Ranks
) -> Capabilities:
    """`found`, and whether batches are ragged. Attaches the model if it agrees then."""
    model, spec = own.model, arena.spec
    is_quantised = spec.bits is not None

    def reads_blocks() -> str | None:
        joins = bool(arena.state_leaves) and own.in_one
        if joins:
            arena.capabilities = replace(arena.capabilities, pads_states=True)
            why = _difference_joined(own, arena)
            if why is None or own.grows:
                own.pads = why is None
                return why
            arena.capabilities = replace(arena.capabilities, pads_states=False)
        for prompts in _prompts(model, arena):
            why = _difference(
                own, lambda: make_prompt_cache(model, arena), not arena.state_leaves, prompts
            )
            if why is not None:
                return why
        if joins and own.in_one:
            # The logits that the padded batch did not have are right.
            own.pads = False
        # A batch does not try what an adapter computes for one sequence.
        return _difference_long(model, arena) if sources_of(model) else None

    def reads_alone() -> str | None:
        return _difference_alone(own, arena)

    def reads_both() -> str | None:
        # A single sequence gets quantised rows instead of arrays, and a model may compute with them
        # before attention. All ranks try it or none does: parts of layers compute together.
        why = reads_blocks()
        return (why or reads_alone()) if on_all(ranks, why is None) else why

    for ragged, adapters in _ways(spec):
        arena.capabilities = replace(found, ragged=ragged)
        agrees = reads_alone if not ragged else reads_both if is_quantised else reads_blocks
        why = _attach_if(model, arena, agrees, ranks, adapters)
        if why is None:
            return replace(found, ragged=ragged, is_attached=True, by_member=is_by_member(model))
        own.batch = own.pads = None
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


def _verifies(own: _OwnLogits, arena: KVArena, ranks: Ranks) -> tuple[Any, bool]:
    """Capabilities.verifies and mixes. Groups of ranks do not try."""
    if not ranks.decides:
        return None, False
    # A model that computes member by member for want of another way takes no chunk. Layers that
    # read the keys of others are never evaluated for a chunk alone, which therefore costs less.
    reads_others = len(attached_modules(own.model)) > len(arena.places)
    ways = (False,) if arena.capabilities.differs or reads_others else (True, False)
    for mixes in ways if arena.capabilities.ragged else ():
        found = _prompts(own.model, arena)
        try:
            if all(_agrees_by_rows(own, arena, prompts, mixes) for prompts in found):
                return "rows", mixes
        except PoolExhaustedError:
            # Two sequences fit, and the one that is mixed with them does not.
            if not mixes:
                raise
    if not takes_back(arena.spec):
        return None, False
    pads = arena.capabilities.ragged and arena.capabilities.pads_states
    if pads and _agrees_rolled_back(own, arena, PROMPTS):
        return "padded", False
    return "alone" if _agrees_rolled_back(own, arena, PROMPTS[:1]) else None, False


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
    if not arena.state_leaves or own.grows:
        return False
    model, found = own.model, arena.capabilities
    arena.capabilities = replace(found, pads_states=True)
    try:
        with without_collectives(model):
            why = (
                (None if own.pads else "a padded batch differs")
                if own.pads is not None
                else _difference(own, lambda: make_prompt_cache(model, arena), True)
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

    def in_a_batch() -> list[Any]:
        caches = [make_caches() for _ in prompts]
        if not pads:
            # What was not tried by _difference_joined() is seen after the first token.
            first = 0 if own.in_one else 1
            for each, prompt in zip(caches, prompts, strict=True):
                if first:
                    _logits(own.model, [prompt[:first]], each)
                    own.need_states_of_one_size(each)
                _logits(own.model, [prompt[first:]], each)
        batch = [type(layer[0]).merge(list(layer)) for layer in zip(*caches, strict=True)]
        # In two parts: what is padded then continues states, too.
        for part in (slice(2), slice(2, None)) if pads else ():
            mx.eval(padded_forward(own.model, [prompt[part] for prompt in prompts], batch))
        return batch

    return _batch_compared(own, in_a_batch, prompts)


def _difference_joined(own: _OwnLogits, arena: KVArena) -> str | None:
    """What differs between the logits of a batch with padding and those of single sequences, in
    words. One sequence joins with states, and the other one is padded without and with some.
    """
    model, (long, short) = own.model, PROMPTS

    def in_a_batch() -> list[Any]:
        caches = [make_prompt_cache(model, arena) for _ in PROMPTS]
        _logits(model, [long[:1]], caches[0])
        own.need_states_of_one_size(caches[0])
        batch = batch_of(caches)
        for tokens in ([long[1:3], short[:1]], [long[3:], short[1:]]):
            mx.eval(padded_forward(model, tokens, batch))
        return batch

    return _batch_compared(own, in_a_batch, PROMPTS, is_last=False)


def _batch_compared(
    own: _OwnLogits,
    begin: Callable[[], list[Any]],
    prompts: list[list[int]],
    is_last: bool = True,
) -> str | None:
    """_compared() of a batch that begin() returns after its prompts. What agrees is tried further,
    unless long prompts need its blocks.
    """
    own.batch = None
    batch: list[Any] = []

    def in_a_batch() -> mx.array:
        batch[:] = begin()
        return _last_logits(own.model, batch, [[token] * 2 for token in NEXT])

    why = _compared(own, in_a_batch, prompts, is_last=is_last)
    if why is None and own.in_one and not sources_of(own.model):
        own.batch = batch
    return why


def _agrees_by_rows(own: _OwnLogits, arena: KVArena, prompts: list[list[int]], mixes: bool) -> bool:
    """Return whether tokens that are computed by rows, next to some that are not kept, have the
    logits of single sequences; `mixes`: and a prompt that is computed in the same forwards.
    """
    if arena.state_leaves or any(isinstance(leaf, ChunkLayer) for leaf in arena.spec.leaves):
        return False
    model, (begun, (first, second), count) = own.model, own.take_batch()
    *others, last = [*NEXT, *FURTHER][:count]
    prompt = [[token] for token in prompts[0]] + others

    def by_rows() -> mx.array:
        batch = begun or batch_of(_begun(model, arena, prompts))
        chunk = batch_of([make_prompt_cache(model, arena)])
        parts = (prompt[:-2], prompt[-2:]) if mixes else ([], [])
        # One row of each is kept; then the last row of each is compared.
        for counts, rows, part in (
            ([3, 2], [first, [8], [9], first, [6]], parts[0]),
            ([1, 2], [second, second, [7]], parts[1]),
        ):
            begin_rows(batch, counts)
            begin_chunks(batch, [chunk] * mixes, [len(part)] * mixes)
            try:
                logits = (
                    first_rows(model, mx.array([*rows, *part]), batch, len(rows))
                    if mixes
                    else _logits(model, [*rows, *part], batch)
                )
                mx.eval(logits, [layer.state for layer in batch])
            except Exception:
                end_chunks(batch)
                commit_rows(batch, [0, 0])
                if part == parts[0]:
                    # It holds what it held, and can be tried without a chunk.
                    own.batch = begun
                raise
            end_chunks(batch)
            commit_rows(batch, [1, 1])
        found = [logits[:2, -1]]
        if mixes:
            found.append(_logits(model, [last], chunk)[:, -1])
        return mx.concatenate(found)

    return _compared(own, by_rows, prompts + prompts[:1] * mixes, count) is None


def _agrees_rolled_back(own: _OwnLogits, arena: KVArena, prompts: list[list[int]]) -> bool:
    """Return whether sequences of which some tokens are rolled back have the logits of mlx-lm's
    caches.
    """
    model, (begun, (first, second), count) = own.model, own.take_batch()

    def rolled_back() -> mx.array:
        more, layers, kept = len(prompts) - 1, begun, first
        if layers is None and more + len(arena.state_leaves) == 0:
            # Blocks of one sequence: its prompt is kept together with its next token.
            layers, kept = make_prompt_cache(model, arena), [*prompts[0], *first]
        elif layers is None:
            caches = _begun(model, arena, prompts)
            layers = batch_of(caches) if more else caches[0]
        # Of the first sequence some tokens are rejected, and all of the second are kept.
        pending = PendingTokens(model, layers, [[*kept, 8, 9], *[first] * more])
        held = pending.accept([len(kept), *[1] * more])
        # The rows of the first that are computed again come before its next one.
        again = kept[held[0] :]
        tokens = [[*again, *second, 7], *[second] * more]
        logits = PendingTokens(model, layers, tokens).logits
        return logits[mx.array([len(again), *[len(tokens[0])] * more])]

    return _compared(own, rolled_back, prompts, count) is None


def _begun(model: Any, arena: KVArena, prompts: list[list[int]]) -> list[list[Any]]:
    """Pooled caches of each prompt, computed alone."""
    caches = [make_prompt_cache(model, arena) for _ in prompts]
    for each, prompt in zip(caches, prompts, strict=True):
        _logits(model, [prompt], each)
    return caches


def _difference_alone(own: _OwnLogits, arena: KVArena) -> str | None:
    """What differs between the logits of a prompt in two parts on pooled caches and on mlx-lm's."""
    model, prompt = own.model, PROMPTS[0]
    parts = [[part] for part in (prompt[:4], prompt[4:], *NEXT)]
    return _compared(
        own, lambda: _last_logits(model, make_prompt_cache(model, arena), parts), [prompt]
    )


class _OwnLogits:
    """Logits of prompts alone, on mlx-lm's caches that hold what the blocks of `spec` hold, each
    computed once.

    in_one: whether a prompt and what follows it are computed in one forward. Caches of plugins and
            quantised ones may hold other numbers of what they have just computed with.
    batch:  PROMPTS on pooled caches after NEXT, which agreed and can be tried further.
    pads:   whether a batch with padding has agreed; None if that was not tried.
    grows:  whether states have another size after one token than the spec says.
    agrees: whether anything had these logits while they were computed in one forward.
    """

    def __init__(
        self, model: Any, spec: ModelCacheSpec | None = None, in_one: bool = False
    ) -> None:
        self.model, self.spec, self.decides = model, spec, in_one
        self.in_one = in_one and spec is not None and spec.bits is None and spec.source is None
        self.batch: list[Any] | None = None
        self.pads: bool | None = None
        self.grows = self.agrees = False
        self._known: dict[tuple[int, ...], mx.array] = {}

    def take_batch(self) -> tuple[list[Any] | None, list[list[int]], int]:
        """`batch`, for one use; the two tokens that follow it, or else a prompt; and how many of
        NEXT and FURTHER those end.
        """
        batch, self.batch = self.batch, None
        if batch is None:
            return None, NEXT, len(NEXT)
        return batch, FURTHER, len(NEXT + FURTHER)

    def after(self, prompt: list[int], count: int = len(NEXT)) -> mx.array:
        """[1, vocabulary] after a prompt and `count` of NEXT and FURTHER."""
        key, model, following = tuple(prompt), self.model, [*NEXT, *FURTHER]
        if key not in self._known or len(self._known[key]) <= count:
            parts = [prompt, *following[:count]]
            if self.in_one:
                parts = [[*prompt, *(token for (token,) in following)]]
            with detached(model):
                caches = _stock_caches(model, self.spec)
                rows = mx.concatenate([_logits(model, [part], caches)[0] for part in parts])
            self._known[key] = rows[len(prompt) - 1 :]
        return self._known[key][count : count + 1]

    def compute_apart(self) -> bool:
        """Compute what follows a prompt token by token from now on. Returns whether it was not, and
        might have other logits: only windows and chunks make some differ after others agreed.
        """
        has_sizes = self.spec is not None and bool(sizes_of(*self.spec.leaves))
        if not self.in_one or (self.agrees and not has_sizes):
            return False
        self.in_one = False
        self._known.clear()
        return True

    def need_states_of_one_size(self, caches: list[Any]) -> None:
        """Raises NotImplementedError if states grow with the first tokens: those of sequences that
        have begun at other times cannot be rows of one batch (longcat_flash_ngram).
        """
        assert self.spec is not None, "states of pooled caches"
        for i, cache in state_caches(leaves_of(caches)).items():
            leaf = self.spec.leaves[i]
            assert isinstance(leaf, StateLayer), "a state of another layer"
            found = [tuple(array.shape) for array in cache.saved_arrays() if array is not None]
            self.grows |= found != [shape for shape, _ in leaf.arrays]
        if self.grows:
            raise NotImplementedError("states that grow with the first tokens cannot be batched")

    def sample(self, prompt: list[int]) -> tuple[tuple[int, float], ...]:
        """The tokens with the largest logits after a prompt, and these."""
        if not self.agrees:
            self.compute_apart()
        row = self.after(prompt, 0)[0].astype(mx.float32)
        values: Any = mx.where(mx.isfinite(row), row, 0).tolist()
        tokens = sorted(range(len(values)), key=lambda token: -abs(values[token]))[:SAMPLED]
        return tuple((token, values[token]) for token in tokens)


def _compared(
    own: _OwnLogits,
    compute: Callable[[], mx.array],
    prompts: list[list[int]],
    count: int = len(NEXT),
    is_last: bool = True,
) -> str | None:
    """What differs between computed logits and those of each prompt alone after `count` tokens
    more; None if nothing does. `is_last`: no fallback will be tried after
    this one.
    """
    model, spec = own.model, own.spec
    try:
        found = compute()
        tolerance = _tolerance(found.dtype == mx.float32, None if spec is None else spec.bits)
        off = _apart(own, found, prompts, count, tolerance)
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
    # NaN compares as false. Some models compute several tokens of one forward otherwise, and
    # a ring with first tokens that stay shows them more.
    if not off <= tolerance and is_last and own.compute_apart():
        off = _apart(own, found, prompts, count, tolerance)
    if off <= tolerance:
        own.agrees |= own.in_one
        return None
    lengths = " and ".join(str(len(prompt) + count) for prompt in prompts)
    return (
        f"logits after {lengths} tokens differ by {off:.2g} of the largest from those of "
        "the model's own caches"
    )


def _apart(
    own: _OwnLogits, found: mx.array, prompts: list[list[int]], count: int, tolerance: float
) -> float:
    """The largest difference from each prompt's own logits, in parts of the largest logit, up to
    the first prompt that is beyond `tolerance`: where no other rank computes the same, those of the
    others are left out.
    """
    needed: list[mx.array] = []
    off = math.inf
    for prompt in prompts:
        needed.append(own.after(prompt, count))
        rows = mx.concatenate(needed).astype(mx.float32)
        apart: Any = mx.abs(found[: len(needed)].astype(mx.float32) - rows).max()
        off = float((apart / mx.maximum(mx.abs(rows).max(), 1e-30)).item())
        if own.decides and not off <= tolerance:
            break
    return off


def _tolerance(in_float32: bool, bits: KVBits | None) -> float:
    """How far logits may be apart, in parts of the largest one, for models in float32 or in 16
    bits.
    """
    if bits is None:
        return 1e-3 if in_float32 else 5e-2
    # Sums in another order now and then move a quantised number by a whole step.
    return 0.2 if 4 in (bits.keys, bits.values) and not in_float32 else 5e-2


def _last_logits(model: Any, caches: list[Any], parts: list[list[list[int]]]) -> mx.array:
    """Logits [sequences, vocabulary] after the last part of the tokens of each."""
    for tokens in parts:
        logits = _logits(model, tokens, caches)
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
    if caches is None:
        caches = make_prompt_cache(model, arena)
        _enlarge_slabs(caches, arena.pool)
    with without_collectives(model):
        token = mx.zeros((1, 1), mx.int32)
        # Slabs are zeros until then, and would count as copies.
        arena.sync()
        mx.eval(arena.arrays())
        largest = max((a.nbytes for a in arena.arrays()), default=0)
        mx.reset_peak_memory()
        before = mx.get_active_memory()

        def step() -> mx.array:
            nonlocal token
            token = mx.argmax(model(token, cache=caches)[:, -1:], axis=-1)
            return token

        pipelined(step, STEPS)
    return mx.get_peak_memory() - before > max(largest, MEASURABLE_BYTES)


def _enlarge_slabs(caches: list[Any], pool: BlockPool) -> None:
    """Reserve blocks for new caches: copies of their slabs show then."""
    sequence = sequence_of(caches)
    for table in () if sequence is None else sequence.tables:
        size = 4 * len(pool.groups) * pool.groups[table.group].bytes_per_block
        pool.reserve([table], [min(PROBED_BLOCKS, pool.bytes_left // size)])
