"""PendingTokens: verification of sequences one by one, for models whose caches cannot verify rows
of a batch: states and chunks.

The tokens of a sequence go through the model as [1, q], on its own caches. Layers in blocks are
trimmed by the rejected tokens. A state holds no tokens: each pass replaces its arrays, so the ones
from before are retained by reference and put back, and the accepted tokens are computed again.
Knows no requests and draws nothing. Owned by the generation thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..spec import ModelCacheSpec, WindowLayer
from .layer_caches import PooledLayer
from .other_caches import PooledArraysCache
from .prompt_cache import batch_of, leaves_of, member_of, sequence_of


def takes_back(spec: ModelCacheSpec) -> bool:
    """Return whether a sequence of this model can be verified alone.

    A full window cannot take tokens back.
    """
    return not any(isinstance(leaf, WindowLayer) for leaf in spec.leaves)


class PendingTokens:
    """The next tokens of one sequence, computed; accept() keeps the first of them. Nothing else is
    done with it before that.

    logits: [q, vocabulary]; row j follows tokens[j].
    """

    def __init__(self, model: Any, caches: list[Any], tokens: list[int]) -> None:
        """`caches` are the sequence's own, not those of a batch, with blocks reserved for all
        tokens.
        """
        self._model = model
        self._caches = caches
        self._tokens = tokens
        self._states = [
            (leaf, list(leaf.cache))
            for leaf in leaves_of(caches)
            if isinstance(leaf, PooledArraysCache)
        ]
        self.logits: mx.array = model(mx.array([tokens]), cache=caches)[0]
        # Another pass waits for this one before it writes: a slab that is still to be read then
        # would be copied.
        mx.async_eval(self.logits)  # type: ignore[no-untyped-call]

    def accept(self, count: int) -> None:
        """Keep the first `count` tokens, one at least, and take the others back.

        The caches are evaluated then.
        """
        computed = len(self._tokens)
        assert 1 <= count <= computed, f"{count} tokens kept of {computed}"
        mx.eval(self.logits)
        if count < computed:
            self._take_back(computed if self._states else computed - count)
            if self._states:
                self._model(mx.array([self._tokens[:count]]), cache=self._caches)
        mx.eval(self._arrays())

    def _take_back(self, count: int) -> None:
        for leaf in leaves_of(self._caches):
            if isinstance(leaf, PooledLayer):
                trimmed = leaf.trim(count)
                assert trimmed == count, (
                    f"{trimmed} tokens taken back of {count} by a {type(leaf).__name__}"
                )
        for state, arrays in self._states:
            state.cache = arrays

    def _arrays(self) -> list[mx.array]:
        sequence = sequence_of(self._caches)
        assert sequence is not None, "mlx-lm's own caches"
        return sequence.arena.arrays() + [
            array for state, _ in self._states for array in state.cache if array is not None
        ]


class PendingBatch:
    """The next tokens of each sequence of a batch, computed: those with several tokens one by one,
    the others in one batch.

    logits: [rows, vocabulary], a row for each token, those of one sequence next to each other and
    in their order.
    """

    def __init__(
        self, model: Any, batch: list[Any], tokens: Sequence[list[int]], merges: bool
    ) -> None:
        """`batch` is given up for the one that accept() returns.

        `merges`: its caches were merged as their classes do it.
        """
        self._merges = merges
        self._caches = [member_of(batch, i) for i in range(len(tokens))] if merges else [batch]
        logits: dict[int, mx.array] = {}
        together = [i for i, own in enumerate(tokens) if len(own) == 1]
        if together:
            layers = batch_of([self._caches[i] for i in together]) if merges else batch
            found = model(mx.array([tokens[i] for i in together]), cache=layers)[:, -1]
            mx.async_eval(found)  # type: ignore[no-untyped-call]
            for row, i in enumerate(together):
                logits[i] = found[row : row + 1]
                self._caches[i] = member_of(layers, row) if merges else batch
        self._alone = {
            i: PendingTokens(model, self._caches[i], own)
            for i, own in enumerate(tokens)
            if len(own) > 1
        }
        logits |= {i: pending.logits for i, pending in self._alone.items()}
        self.logits = mx.concatenate([logits[i] for i in range(len(tokens))])

    def accept(self, kept: Sequence[int]) -> list[Any]:
        """Keep the first kept[i] tokens of sequence i, one at least.

        Returns the batch, with the sequences in the same order.
        """
        for i, pending in self._alone.items():
            pending.accept(kept[i])
        return batch_of(self._caches) if self._merges else self._caches[0]
