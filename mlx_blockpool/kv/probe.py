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
from typing import Any, Literal

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

# Prompts that a model is tried with, and the tokens that follow each of them.
PROMPTS = [[3, 5, 7, 11, 13, 2, 9], [4, 6, 8]]
NEXT = FIRST, SECOND = [[1], [2]]
# Where prompts that are computed together are cut: both parts are padded.
CUTS = (3, 1)
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
    before, classes = arena.capabilities, classes_of(model)
    # Caches of the pool work as if the model could do what is tried.
    arena.capabilities = Capabilities(is_stage=is_stage(model))
    try:
        with without_collectives(model):
            return _Trials(model, arena, ranks).run(attaches)
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
            _bind(model, spec, _ways(spec)[len(found.differs)][1])
        holds = bool(prompts)
        if holds:
            _, logits = _computed(model, arena, prompts)
            tolerance = _tolerance(logits.dtype == mx.float32, spec.bits)
            holds = all(
                _has_sample(logits[i, len(prompt) - 1], sample, tolerance)
                for i, (prompt, sample) in enumerate(zip(prompts, found.sample, strict=True))
            )
    except Exception as error:
        # As in _Trials.differs(); remembered capabilities may be of anything.
        log.info("%s is probed again: %s", type(model).__module__, error)
        holds = False
    finally:
        arena.capabilities = before
        arena.decode.path_counts.clear()
    if not holds:
        restore(classes)
    return holds


def _has_sample(row: mx.array, sample: Sequence[tuple[int, float]], tolerance: float) -> bool:
    """Return whether logits are those of a sample. What was remembered may be damaged; a token
    beyond the vocabulary would end the process.
    """
    largest = max(abs(needed) for _, needed in sample)
    return math.isfinite(largest) and all(
        0 <= token < row.size and abs(row[token].item() - needed) <= tolerance * largest
        for token, needed in sample
    )


def _ways(spec: ModelCacheSpec) -> list[tuple[bool, Sequence[AttentionAdapter] | None]]:
    """The ways in which a model may attend through the caches of a pool, in the order in which
    they are tried: whether in ragged batches, and with which adapters; None: member by member.
    """
    kinds = [True] * spec.batches + [False] * (spec.bits is not None)
    return [(ragged, adapters) for ragged in kinds for adapters in (attention_adapters(), None)]


def _bind(model: Any, spec: ModelCacheSpec, adapters: Sequence[AttentionAdapter] | None) -> int:
    return bind(model, adapters or (), by_member=adapters is None, writes=writes_of(spec))


def _new_caches(model: Any, arena: KVArena, count: int) -> list[Any]:
    """Pooled caches of one sequence, or of several side by side."""
    caches = [make_prompt_cache(model, arena) for _ in range(count)]
    return batch_of(caches) if count > 1 else caches[0]


def _computed(
    model: Any, arena: KVArena, prompts: Sequence[list[int]]
) -> tuple[list[Any], mx.array]:
    """Pooled caches of prompts that are computed in one forward, and its logits."""
    layers = _new_caches(model, arena, len(prompts))
    logits = padded_forward(model, prompts, layers)
    mx.eval(logits)
    return layers, logits


class _Trials:
    """The trials of one probe(). What one of them compares with are the logits of prompts alone,
    on mlx-lm's caches that hold what the blocks of the pool hold, each computed once.

    in_one: whether a prompt and what follows it are computed in one forward. Caches of plugins and
            quantised ones may hold other numbers of what they have just computed with, and ranks
            make the same passes, whatever one of them finds.
    grows:  whether states have another size after one token than the spec says.
    agrees: whether anything had these logits while they were computed in one forward.
    """

    def __init__(self, model: Any, arena: KVArena, ranks: Ranks) -> None:
        self.model, self.arena, self.ranks, self.spec = model, arena, ranks, arena.spec
        self.in_one = ranks.decides and self.spec.bits is None and self.spec.source is None
        self.grows = self.agrees = False
        self._known: dict[tuple[int, ...], mx.array] = {}

    def run(self, attaches: bool) -> Capabilities:
        arena, has_states = self.arena, bool(self.arena.state_leaves)
        if attaches:
            self._attach()
        if attaches and self.spec.bits is not None and not arena.capabilities.is_attached:
            # The model cannot read these blocks.
            return arena.capabilities
        if not arena.capabilities.ragged:
            # gear's states leave padding out, baichuan_m1's do not.
            self._now(pads_states=has_states and self.spec.bits is None and self._pads_alone())
        self._need_equal_caches()
        if not attaches:
            return arena.capabilities
        verifies, mixes = self._verifies()
        no_kernel = refused_kernels(self.model, arena, self.ranks)
        kernels = frozenset(range(len(arena.spec.groups))).difference(no_kernel)
        found = arena.capabilities
        batched = found.ragged and (found.pads_states or not has_states)
        sample = tuple(map(self._sample, PROMPTS if batched else PROMPTS[:1]))
        self._now(
            verifies=verifies, mixes=mixes, kernels=kernels, no_kernel=no_kernel, sample=sample
        )
        return replace(arena.capabilities, synchronous=copies_slabs(self.model, arena))

    def _now(self, **found: Any) -> None:
        """Note what was found, or is tried now."""
        self.arena.capabilities = replace(self.arena.capabilities, **found)

    # -- attention ---------------------------------------------------------------------------------

    def _attach(self) -> None:
        """Attach the model in the first way that agrees, and note what differs in those before."""
        for ragged, adapters in _ways(self.spec):
            self._now(ragged=ragged)
            why = self._difference_attached(ragged, adapters)
            if why is None:
                self._now(is_attached=True, by_member=is_by_member(self.model))
                return
            what = "A batch whose blocks are read in place" if ragged else "One sequence"
            how = ", one member after another" if adapters is None and ragged else ""
            differs = (*self.arena.capabilities.differs, f"{what}{how}: {why}.")
            self._now(ragged=False, pads_states=False, differs=differs)

    def _difference_attached(
        self, ragged: bool, adapters: Sequence[AttentionAdapter] | None
    ) -> str | None:
        """Attach the model with these adapters; None: member by member. Returns what differs then,
        on any rank, and leaves the model as it was.
        """
        # Another pool may have attached it, and relies on that.
        before, why = classes_of(self.model), None
        try:
            # A model without attention has nothing to attach.
            is_bound = bool(_bind(self.model, self.spec, adapters)) or not self.spec.groups
            if not is_bound:
                why = "its layers have no attention that can be attached"
        except PluginError as error:
            why = str(error)
        why = self._on_all(why)
        if why is None and ragged:
            why = self._difference_together()
        if why is None and self.spec.bits is not None:
            # A single sequence gets quantised rows instead of arrays, and a model may compute with
            # them before attention.
            why = self._difference_alone()
        if why is not None:
            if sources := sources_of(self.model):
                why = f"with {' and '.join(sources)}, {why}"
                log.warning("A plugin's attention is not used: %s.", why)
            restore(before)
        return why

    def _difference_together(self) -> str | None:
        """What differs in a ragged batch, in words. Notes whether its states leave padding out."""
        has_states = bool(self.arena.state_leaves)
        ways = (True, False) if has_states else (True,)
        for prompts in self._prompts():
            for pads in ways:
                self._now(pads_states=pads and has_states)
                why = self.differs(
                    lambda prompts=prompts, pads=pads: self._read_together(  # type: ignore[misc]
                        lambda: make_prompt_cache(self.model, self.arena), prompts, pads
                    ),
                    prompts,
                    is_last=not (pads and has_states),
                )
                if why is None or self.grows:
                    break
            if why is not None:
                return why
            ways = (pads,)
        # A batch does not try what an adapter computes for one sequence.
        return self._on_all(self._difference_long()) if sources_of(self.model) else None

    def _pads_alone(self) -> bool:
        """Return whether a batch of mlx-lm's caches gives the logits of single sequences though it
        is padded.
        """

        def in_a_batch() -> mx.array:
            return self._read_together(lambda: _stock_caches(self.model, self.spec), PROMPTS, True)

        return not self.grows and self.differs(in_a_batch, PROMPTS) is None

    def _read_together(
        self, make_caches: Callable[[], list[Any]], prompts: list[list[int]], pads: bool
    ) -> mx.array:
        """Logits [prompts, vocabulary] of a batch after NEXT.

        `pads`: prompts are computed together, shorter ones padded. Then one sequence joins with
        states, and the other one is padded without and with some.
        """
        model, caches = self.model, [make_caches() for _ in prompts]
        alone = [len(prompt) for prompt in prompts]
        if pads:
            alone = [int(bool(self.arena.state_leaves)), *[0] * (len(prompts) - 1)]
        for each, prompt, count in zip(caches, prompts, alone, strict=True):
            if count:
                _logits(model, [prompt[:count]], each)
            if count == 1:
                self._need_states_of_one_size(each)
        batch = [type(layer[0]).merge(list(layer)) for layer in zip(*caches, strict=True)]
        if pads:
            pairs = list(zip(prompts, alone, CUTS, strict=True))
            for tokens in (
                [prompt[count:cut] for prompt, count, cut in pairs],
                [prompt[cut:] for prompt, _, cut in pairs],
            ):
                mx.eval(padded_forward(model, tokens, batch))
        return _last_logits(model, batch, [[token] * len(prompts) for token in NEXT])

    def _difference_alone(self) -> str | None:
        """What differs between the logits of a prompt in two parts on pooled caches and on
        mlx-lm's.
        """
        prompt = PROMPTS[0]
        parts = [[part] for part in (prompt[:4], prompt[4:], *NEXT)]
        return self.differs(
            lambda: _last_logits(self.model, make_prompt_cache(self.model, self.arena), parts),
            [prompt],
        )

    def _need_states_of_one_size(self, caches: list[Any]) -> None:
        """Raises NotImplementedError if states grow with the first tokens: those of sequences that
        have begun at other times cannot be rows of one batch (longcat_flash_ngram).
        """
        for i, cache in state_caches(leaves_of(caches)).items():
            leaf = self.spec.leaves[i]
            assert isinstance(leaf, StateLayer), "a state of another layer"
            found = [tuple(array.shape) for array in cache.saved_arrays() if array is not None]
            self.grows |= found != [shape for shape, _ in leaf.arrays]
        if self.grows:
            raise NotImplementedError("states that grow with the first tokens cannot be batched")

    # -- what plugins say --------------------------------------------------------------------------

    def _need_equal_caches(self) -> None:
        """Raises PluginError unless a long sequence, and one that is resumed, have the logits of
        the model's own caches. What the bundled provider says is read off these and needs no proof.
        """
        spec = self.spec
        if spec.source is None:
            return
        why = self._on_all(self._difference_long())
        if why is not None:
            advice = "Correct the plugin; `mlx_blockpool.testing.conformance` shows more."
            raise PluginError(
                f"{spec.model_id}, one sequence on the caches that {spec.source} describes: {why}. "
                f"{'' if why.startswith(TOO_SMALL) else advice}".rstrip()
            )

    def _difference_long(self) -> str | None:
        """difference_alone() from caches that hold what the blocks of the pool hold."""
        model, spec = self.model, self.spec
        tolerance = None if spec.bits is None else _tolerance(True, spec.bits)
        return difference_alone(model, self.arena, lambda: _stock_caches(model, spec), tolerance)

    def _prompts(self) -> list[list[list[int]]]:
        """What batches are tried with: for what installed plugins say also long prompts."""
        if self.spec.source is None and not sources_of(self.model):
            return [PROMPTS]
        return [PROMPTS, long_prompts(self.model, self.arena, _stock_caches(self.model))]

    # -- verification ------------------------------------------------------------------------------

    def _verifies(self) -> tuple[Literal["rows", "padded", "alone"] | None, bool]:
        """Capabilities.verifies and mixes. Groups of ranks do not try."""
        arena, found = self.arena, self.arena.capabilities
        if not self.ranks.decides:
            return None, False
        # A model that computes member by member for want of another way takes no chunk. Layers that
        # read the keys of others are never evaluated for a chunk alone, which therefore costs less.
        reads_others = len(attached_modules(self.model)) > len(arena.places)
        ways = (False,) if found.differs or reads_others else (True, False)
        has_rows = found.ragged and not (
            arena.state_leaves or any(isinstance(leaf, ChunkLayer) for leaf in self.spec.leaves)
        )
        for mixes in ways if has_rows else ():
            try:
                if all(self._agrees_by_rows(prompts, mixes) for prompts in self._prompts()):
                    return "rows", mixes
            except PoolExhaustedError:
                # Two sequences fit, and the one that is mixed with them does not.
                if not mixes:
                    raise
        if not takes_back(self.spec):
            return None, False
        pads = found.pads_states or not arena.state_leaves
        if found.ragged and pads and self._agrees_rolled_back(PROMPTS):
            return "padded", False
        return "alone" if self._agrees_rolled_back(PROMPTS[:1]) else None, False

    def _agrees_by_rows(self, prompts: list[list[int]], mixes: bool) -> bool:
        """Return whether tokens that are computed by rows, next to some that are not kept, have the
        logits of single sequences; `mixes`: and a prompt that is computed in the same forwards.
        """
        model, prompt = self.model, [[token] for token in (*prompts[0], *FIRST)]

        def by_rows() -> mx.array:
            batch = _new_caches(model, self.arena, len(prompts))
            chunk = batch_of([make_prompt_cache(model, self.arena)])
            # What follows the kept rows of each is rejected; then the last kept rows are compared.
            wrong = ([8, 9], [6])
            begun = [[*own, *FIRST, *more] for own, more in zip(prompts, wrong, strict=True)]
            for tokens, kept, part in (
                (begun, [len(own) + 1 for own in prompts], prompt[:-2]),
                ([SECOND, [*SECOND, 7]], [1, 1], prompt[-2:]),
            ):
                rows = [[token] for own in tokens for token in own]
                begin_rows(batch, [len(own) for own in tokens])
                begin_chunks(batch, [chunk] * mixes, [len(part)] * mixes)
                logits = (
                    first_rows(model, mx.array([*rows, *part]), batch, len(rows))
                    if mixes
                    else model(mx.array(rows), cache=batch)
                )
                mx.eval(logits, [layer.state for layer in batch])
                end_chunks(batch)
                commit_rows(batch, kept)
            found = [logits[:2, -1]]
            if mixes:
                found.append(_logits(model, [SECOND], chunk)[:, -1])
            return mx.concatenate(found)

        return self.differs(by_rows, prompts + prompts[:1] * mixes) is None

    def _agrees_rolled_back(self, prompts: list[list[int]]) -> bool:
        """Return whether sequences of which some tokens are rolled back have the logits of mlx-lm's
        caches.
        """

        def rolled_back() -> mx.array:
            model, kept = self.model, [FIRST for _ in prompts]
            if self.arena.state_leaves:
                layers, _ = _computed(model, self.arena, prompts)
            else:
                layers = _new_caches(model, self.arena, len(prompts))
                kept = [[*own, *FIRST] for own in prompts]
            # Of the first sequence some tokens are rejected, and all of the second are kept.
            pending = PendingTokens(model, layers, [[*kept[0], 8, 9], *kept[1:]])
            held = pending.accept([*map(len, kept)])
            # The rows of the first that are computed again come before its next one.
            again = kept[0][held[0] :]
            tokens = [[*again, *SECOND, 7], *[SECOND for _ in kept[1:]]]
            logits = PendingTokens(model, layers, tokens).logits
            return logits[mx.array([len(again), len(tokens[0])][: len(prompts)])]

        return self.differs(rolled_back, prompts) is None

    # -- the model's own logits --------------------------------------------------------------------

    def differs(
        self, compute: Callable[[], mx.array], prompts: list[list[int]], is_last: bool = True
    ) -> str | None:
        """What differs between computed logits and those of each prompt alone after NEXT, on any
        rank; None if nothing does. `is_last`: no fallback will be tried after this one.
        """
        return self._on_all(self._difference(compute, prompts, is_last))

    def _on_all(self, why: str | None) -> str | None:
        """The same on all ranks: what differs on this one, or that the part of another does."""
        return None if on_all(self.ranks, why is None) else why or "another rank's part differs"

    def _difference(
        self, compute: Callable[[], mx.array], prompts: list[list[int]], is_last: bool
    ) -> str | None:
        longest = max(map(len, prompts))
        try:
            found = compute()
            tolerance = _tolerance(found.dtype == mx.float32, self.spec.bits)
            off = self._distance(found, prompts, tolerance)
        except PoolExhaustedError as error:
            if longest <= len(PROMPTS[0]):
                raise
            # Short sequences fit, and are served more simply.
            return too_small(error, self.spec, longest)
        except Exception as error:
            # A model that was not made for such a cache, or an adapter of a plugin, may raise
            # anything. Other errors come back on the path that is taken instead.
            log.info("%s does not run this way: %s", type(self.model).__module__, error)
            return f"{type(error).__name__}: {str(error)[:200]}"
        # NaN compares as false. Some models compute several tokens of one forward otherwise, and
        # a ring with first tokens that stay shows them more.
        if not off <= tolerance and is_last and self._compute_apart():
            off = self._distance(found, prompts, tolerance)
        if off <= tolerance:
            self.agrees |= self.in_one
            return None
        lengths = " and ".join(str(len(prompt) + len(NEXT)) for prompt in prompts)
        return (
            f"logits after {lengths} tokens differ by {off:.2g} of the largest from those of "
            "the model's own caches"
        )

    def _distance(self, found: mx.array, prompts: list[list[int]], tolerance: float) -> float:
        """The largest difference from each prompt's own logits, in parts of the largest logit, up
        to the first prompt that is beyond `tolerance`: where no other rank computes the same, those
        of the others are left out.
        """
        needed: list[mx.array] = []
        off = math.inf
        for prompt in prompts:
            needed.append(self._after(prompt, len(NEXT)))
            rows = mx.stack(needed)
            apart: Any = mx.abs(found[: len(needed)].astype(mx.float32) - rows).max()
            off = float((apart / mx.maximum(mx.abs(rows).max(), 1e-30)).item())
            if self.ranks.decides and not off <= tolerance:
                break
        return off

    def _after(self, prompt: list[int], count: int) -> mx.array:
        """[vocabulary] after a prompt and `count` of NEXT."""
        key, model = tuple(prompt), self.model
        if key not in self._known:
            parts = [sum(NEXT, prompt)] if self.in_one else [prompt, *NEXT]
            with detached(model):
                caches = _stock_caches(model, self.spec)
                rows = mx.concatenate([_logits(model, [part], caches)[0] for part in parts])
            self._known[key] = rows[len(prompt) - 1 :]
        return self._known[key][count].astype(mx.float32)

    def _compute_apart(self) -> bool:
        """Compute what follows a prompt token by token from now on. Returns whether it was not, and
        might have other logits: only windows and chunks make some differ after others agreed.
        """
        if not self.in_one or (self.agrees and not sizes_of(*self.spec.leaves)):
            return False
        self.in_one = False
        self._known.clear()
        return True

    def _sample(self, prompt: list[int]) -> tuple[tuple[int, float], ...]:
        """The tokens with the largest logits after a prompt, and these."""
        if not self.agrees:
            self._compute_apart()
        row = self._after(prompt, 0)
        values: Any = mx.where(mx.isfinite(row), row, 0).tolist()
        tokens = sorted(range(len(values)), key=lambda token: -abs(values[token]))[:SAMPLED]
        return tuple((token, values[token]) for token in tokens)


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
