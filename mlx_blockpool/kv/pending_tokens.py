"""PendingRows, PendingTokens: verification of several next tokens of each sequence in one forward,
the latter for models whose caches cannot verify rows of a batch: states and chunks.

Their tokens go through the model as chunks of prompts do, [sequences, tokens], shorter ones padded
on the right. Layers in blocks are trimmed by the rejected tokens. A state holds no tokens: each
forward replaces its arrays, so a sequence with rejected tokens is rolled back to before the
forward. Its accepted tokens are computed again by the next one, with what is drafted next. (A
second forward for them would cost more: most devices read the weights for it once more.) Knows no
requests and draws nothing. Owned by the generation thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..spec import ModelCacheSpec, StateLayer, WindowLayer
from .batch_cache import PooledBatchCache
from .layer_caches import PooledLayer
from .other_caches import PooledArraysCache, StateBatch
from .prediction_head import states_of
from .prompt_cache import begin_rows, commit_rows, leaves_of
from .quantised import concatenated


def takes_back(spec: ModelCacheSpec) -> bool:
    """Return whether a sequence of this model can be rolled back.

    A full window cannot take tokens back, nor does a state of a class that mlx-lm does not have.
    """
    return not any(
        isinstance(leaf, WindowLayer) or (isinstance(leaf, StateLayer) and leaf.own is not None)
        for leaf in spec.leaves
    )


class _FirstRows:
    """A model, or a part of it, that returns the first rows of a batch alone: they are taken before
    its head, which would cost most of all for a large vocabulary.
    """

    def __init__(self, module: Any, count: int) -> None:
        self._module, self._count = module, count

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        if name == "language_model":
            return _FirstRows(found, self._count)
        return _Backbone(found, self._count) if name in ("model", "transformer") else found

    def __call__(self, *args: Any, **more: Any) -> mx.array:
        logits: mx.array = type(self._module).__call__(self, *args, **more)
        return logits


class _Backbone:
    """What is below a model's head, as mlx-lm's models call it."""

    def __init__(self, module: Any, count: int) -> None:
        self._module, self._count = module, count

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def __call__(self, *args: Any, **more: Any) -> mx.array:
        hidden: mx.array = self._module(*args, **more)
        return hidden[: self._count]


def first_rows(model: Any, tokens: mx.array, caches: list[Any], count: int) -> mx.array:
    """The logits [count, 1, vocabulary] of the first rows of tokens [rows, 1]. All are computed,
    but without their logits.
    """
    # What stands in for a model has no parts.
    called = _FirstRows(model, count) if isinstance(model, nn.Module) else model
    logits: mx.array = called(tokens, cache=caches)
    # The part below a head may have another name.
    return logits[:count]


def padded_forward(model: Any, tokens: Sequence[list[int]], layers: list[Any]) -> mx.array:
    """The logits [sequences, most tokens, vocabulary] of the next tokens of each sequence of a
    batch. Shorter ones are padded on the right, and caches leave the padding out.
    """
    lengths = [len(own) for own in tokens]
    padding = [max(lengths) - length for length in lengths]
    if any(padding):
        for layer in layers:
            layer.prepare(lengths=lengths, right_padding=padding)
    logits: mx.array = model(
        mx.array([own + [0] * pad for own, pad in zip(tokens, padding, strict=True)]), cache=layers
    )
    if any(padding):
        for layer in layers:
            layer.finalize()
    return logits


class PendingTokens:
    """The next tokens of each sequence of a batch, computed; accept() keeps the first of each.
    Nothing else is done with the batch before that.

    before:  what a prediction head reads: hidden states [sequences, n, dim], the first before the
             forward, and after accept() before each token that follows; None without a head.
    logits:  [rows, vocabulary], a row for each token, those of one sequence next to each other and
             in their order.
    """

    def __init__(
        self,
        model: Any,
        layers: list[Any],
        tokens: Sequence[list[int]],
        before: mx.array | None = None,
    ) -> None:
        """`layers`: a batch, or the caches of one sequence. Blocks are reserved for all tokens.
        Where padding would reach a state, all sequences have the same number of tokens.
        """
        self._head = states_of(model)
        self.before = self._head.stack([None] * len(tokens)) if before is None else before
        self._head.begin(self.before)
        self._counts = [len(own) for own in tokens]
        leaves = leaves_of(layers)
        self._states = [
            (leaf, list(leaf.cache))
            for leaf in leaves
            if isinstance(leaf, StateBatch | PooledArraysCache)
        ]
        # The layer caches in blocks of each sequence.
        self._in_blocks: list[list[PooledLayer]] = [
            [
                leaf.members[i] if isinstance(leaf, PooledBatchCache) else leaf
                for leaf in leaves
                if isinstance(leaf, PooledBatchCache | PooledLayer)
            ]
            for i in range(len(tokens))
        ]
        logits = padded_forward(model, tokens, layers)
        self._hidden = self._head.last
        self.logits = concatenated([logits[i, :count] for i, count in enumerate(self._counts)])

    def accept(self, kept: Sequence[int]) -> list[int]:
        """Keep the first kept[i] tokens of sequence i, one at least, and roll back the others.

        Returns how many of each the caches hold: kept[i], or none where a state was rolled back.
        The caches are evaluated then.
        """
        mx.eval(self.logits)
        held = []
        for own, computed, count in zip(self._in_blocks, self._counts, kept, strict=True):
            assert 1 <= count <= computed, f"{count} tokens kept of {computed}"
            held.append(0 if self._states and count < computed else count)
            for leaf in own if held[-1] < computed else []:
                trimmed = leaf.trim(computed - held[-1])
                assert trimmed == computed - held[-1], (
                    f"{trimmed} tokens taken back of {computed - held[-1]} by a "
                    f"{type(leaf).__name__}"
                )
        if self._hidden is not None and self.before is not None:
            first = self.before[:, :1].astype(self._hidden.dtype)
            states = mx.concatenate([first, self._hidden], axis=1)
            pairs = enumerate(zip(held, kept, strict=True))
            self.before = self._head.stack(states[i : i + 1, h : k + 1] for i, (h, k) in pairs)
        if not all(held):
            is_held = mx.array(held) > 0
            for state, before in self._states:
                state.cache = [
                    _chosen(is_held, after, old)
                    for after, old in zip(state.cache, before, strict=True)
                ]
        mx.eval([leaf.sequence.arena.arrays() for own in self._in_blocks for leaf in own[:1]])
        mx.eval([state.cache for state, _ in self._states], self.before)
        return held


class PendingRows:
    """PendingTokens of a ragged batch that computes them by rows. Caches hold what is kept.

    forward: computes the rows of inputs [rows], counts[i] of sequence i. Returns their logits and,
    of a model with a head, their hidden states.
    """

    def __init__(
        self,
        layers: list[Any],
        tokens: Sequence[list[int]],
        forward: Callable[[mx.array, list[int]], tuple[mx.array, mx.array | None]],
    ) -> None:
        self._layers, self._counts = layers, [len(own) for own in tokens]
        begin_rows(layers, self._counts)
        inputs = mx.array([token for own in tokens for token in own], mx.uint32)
        self.logits, self.before = forward(inputs, self._counts)

    def accept(self, kept: Sequence[int]) -> Sequence[int]:
        mx.eval(self.logits)
        if self.before is not None:
            ends = zip(accumulate(self._counts, initial=-1), kept, strict=False)
            self.before = self.before[mx.array([start + count for start, count in ends])]
        commit_rows(self._layers, kept)
        return kept


def _chosen(is_held: mx.array, after: mx.array, before: mx.array | None) -> mx.array | None:
    """The state after a forward of the sequences whose tokens are held, and that from before of
    the others.
    """
    if is_held.size == 1:
        return before
    mask = is_held.reshape(-1, *[1] * (after.ndim - 1))
    return mx.where(mask, after, mx.zeros_like(after) if before is None else before)
