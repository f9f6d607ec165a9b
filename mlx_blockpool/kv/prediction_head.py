"""PredictionHead: a layer after those of a model that guesses the token after the next one, as
models for multi-token prediction have it.

Its input at a token is that token and the model's hidden state at the token before, so that its
keys and values depend on no later token: they are cached, shared and stored like those of the other
layers. Knows no requests. Owned by the generation thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask

from .batch_cache import PooledBatchCache
from .layer_caches import PooledLayer


class HiddenStates:
    """What a head reads of one forward in the next: hidden states [n, 1, dim], one of each
    sequence. This base class is for models without a head.

    last: the hidden states [rows, tokens, dim] of the last forward; None without a head.
    """

    last: mx.array | None = None

    def begin(self, previous: mx.array | None, counts: Sequence[int] | None = None) -> None:
        """Before a forward: the states of its sequences at the token before, in their order.

        counts: how many rows of the forward each sequence has; None: each row is a sequence.
        """

    def stack(self, states: Iterable[mx.array | None]) -> mx.array | None:
        """States [n, m, dim] of several sequences as one array. None stands for those of a sequence
        that are not known.
        """
        return None

    def at(self, tokens: Sequence[int]) -> mx.array | None:
        """The states [n, 1, dim] at some tokens of the last forward, counted through its rows."""
        return None


class CarriedStates(HiddenStates):
    """HiddenStates of a model with a head. Zeros stand for states that are not known: at the
    beginning of a text, and of what follows a cached prefix.
    """

    def __init__(self, dim: int) -> None:
        self._dim = dim
        self._previous: mx.array | None = None
        self._counts: Sequence[int] | None = None

    def begin(self, previous: mx.array | None, counts: Sequence[int] | None = None) -> None:
        self._previous, self._counts = previous, counts

    def stack(self, states: Iterable[mx.array | None]) -> mx.array | None:
        found = [mx.zeros((1, 1, self._dim)) if state is None else state for state in states]
        most = max(state.shape[1] for state in found)
        padded = [mx.pad(s, [(0, 0), (0, most - s.shape[1]), (0, 0)]) for s in found]
        return mx.concatenate(padded)

    def at(self, tokens: Sequence[int]) -> mx.array | None:
        assert self.last is not None, "no forward has run"
        return self.last.reshape(-1, 1, self._dim)[mx.array(list(tokens))]

    def shift(self, hidden: mx.array) -> mx.array:
        """The state at the token before each, for a forward with these states
        [rows, tokens, dim].
        """
        self.last = hidden
        previous, counts = self._previous, self._counts
        self._previous = self._counts = None
        num = hidden.shape[0] if counts is None else len(counts)
        if previous is None or previous.shape[0] != num:
            previous = mx.zeros((num, 1, self._dim))
        previous = previous[:, :1].astype(hidden.dtype)
        if counts is None:
            return mx.concatenate([previous, hidden[:, :-1]], axis=1)
        order: list[int] = []
        start = num
        for i, count in enumerate(counts):
            order += [i, *range(start, start + count - 1)]
            start += count
        return mx.concatenate([previous, hidden])[mx.array(order)]


class PredictionHead(nn.Module):  # type: ignore[misc]
    """A head that drafts tokens for speculative decoding. It shares the embeddings and the output
    layer of its model.

    layer:       a decoder layer of the model's own class with full attention: self_attn(x, mask,
                 cache) after input_layernorm.
    embed:       tokens [rows, n] -> [rows, n, dim]. logits: [rows, n, dim] -> vocabulary.
    chains_norm: whether a further guess continues from the normed output of the one before.
    array_mask:  whether the layer takes its mask as an array.
    states:      what it reads of the forward before.
    """

    def __init__(
        self,
        layer: nn.Module,
        dim: int,
        eps: float,
        embed: Callable[[mx.array], mx.array],
        logits: Callable[[mx.array], mx.array],
        *,
        chains_norm: bool,
        array_mask: bool,
    ) -> None:
        super().__init__()
        self.embedding_norm = nn.RMSNorm(dim, eps)
        self.hidden_norm = nn.RMSNorm(dim, eps)
        self.projection = nn.Linear(2 * dim, dim, bias=False)
        self.layer = layer
        self.norm = nn.RMSNorm(dim, eps)
        self._embed, self._logits = embed, logits
        self._chains_norm, self._array_mask = chains_norm, array_mask
        self.states = CarriedStates(dim)

    def write(self, tokens: mx.array, hidden: mx.array, cache: Any) -> None:
        """Append the keys and values of a forward over `tokens` [rows, n] with the model's hidden
        states [rows, n, dim]. What the layer's attention returns is not computed.
        """
        _evaluate_writes(cache)
        x = self._inputs(tokens, self.states.shift(hidden))
        self.layer.self_attn(self.layer.input_layernorm(x), self._mask(x, cache), cache)

    def guess(
        self, tokens: Sequence[list[int]], before: mx.array, count: int, cache: Any
    ) -> list[list[int]]:
        """The `count` likeliest tokens after the last ones of each sequence, each if those before
        it are right. `cache` is as before when this returns.

        tokens: those of each sequence after what `cache` holds, at least one. before: the hidden
        state at the token before each, [sequences, n, dim].
        """
        lengths = [len(own) for own in tokens]
        padding = [max(lengths) - length for length in lengths]
        if any(padding):
            cache.prepare(lengths=lengths, right_padding=padding)
        rows = mx.array([own + [0] * pad for own, pad in zip(tokens, padding, strict=True)])
        # Zeros in place of states that are not known have made all of them float32.
        before = before.astype(self.embedding_norm.weight.dtype)
        out = self._layer(rows, before[:, : max(lengths)], cache)
        if any(padding):
            cache.finalize()
        out = out[mx.arange(len(lengths)), mx.array(lengths) - 1][:, None]
        found: list[mx.array] = []
        while True:
            normed = self.norm(out)
            found.append(mx.argmax(self._logits(normed), axis=-1))
            if len(found) == count:
                break
            out = self._layer(found[-1], normed if self._chains_norm else out, cache)
        guessed = mx.concatenate(found, axis=1)
        mx.eval(guessed)
        members = cache.members if isinstance(cache, PooledBatchCache) else [cache]
        for member, length in zip(members, lengths, strict=True):
            member.trim(length + count - 1)
        rows_of_tokens: Any = guessed.tolist()
        return list(rows_of_tokens)

    def _layer(self, tokens: mx.array, before: mx.array, cache: Any) -> mx.array:
        x = self._inputs(tokens, before)
        out: mx.array = self.layer(x, self._mask(x, cache), cache)
        return out

    def _inputs(self, tokens: mx.array, before: mx.array) -> mx.array:
        parts = [self.embedding_norm(self._embed(tokens)), self.hidden_norm(before)]
        found: mx.array = self.projection(mx.concatenate(parts, axis=-1))
        return found

    def _mask(self, x: mx.array, cache: Any) -> Any:
        return create_attention_mask(x, cache, return_array=self._array_mask)


def _evaluate_writes(cache: Any) -> None:
    """Evaluate what was written before: no attention may have read it, and the graph would grow
    with each step.
    """
    leaf = cache.members[0] if isinstance(cache, PooledBatchCache) else cache
    if isinstance(leaf, PooledLayer):
        leaf.sequence.arena.evaluate_writes(leaf.place)
    elif not leaf.empty():
        mx.async_eval(leaf.state)  # type: ignore[no-untyped-call]


NO_STATES = HiddenStates()


def head_of(model: Any) -> PredictionHead | None:
    """The head of a model; None: it has none."""
    found = getattr(model, "prediction_head", None)
    return found if isinstance(found, PredictionHead) else None


def drop_head(model: Any) -> None:
    """Make of a model what mlx-lm makes of it, where nothing is drafted from its head."""
    if head_of(model) is not None:
        model.drop_head()


def states_of(model: Any) -> HiddenStates:
    """What the head of a model reads of one forward in the next."""
    head = head_of(model)
    return NO_STATES if head is None else head.states
