"""Samplers of requests: those of mlx-lm, with a separate random state for a request with a seed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm import sample_utils

from .. import mlx_lm_compat
from ..engine.request import Sampler
from ..engine.sampling import reset_random_state
from ..mlx_lm_compat import rebind


def make_sampler(args: Any, tokenizer: Any) -> Any:
    """The sampler that mlx-lm's server makes.

    With a seed it draws the same in any batch as mlx-lm draws alone.
    """
    if args.seed is None:
        return mlx_lm_compat.make_sampler(args, tokenizer)
    own = OwnRandomness(args.seed)
    make = rebind(
        sample_utils.make_sampler, categorical_sampling=own.categorical, apply_xtc=own.xtc
    )
    draw = rebind(mlx_lm_compat.make_sampler, make_sampler=make)(args, tokenizer)
    if draw is sample_utils.greedy_sampler:
        return draw
    return SeededSampler(draw, own, keys=2 if args.sampling.xtc_probability > 0 else 1)


def check_sampling(args: Any, tokenizer: Any, vocab_size: int) -> None:
    """Try the request's sampler and processors on made-up logits: an error of theirs must not fail
    a whole batch.

    Raises ValueError.
    """
    outside = [i for i in args.logits.logit_bias or {} if not 0 <= i < vocab_size]
    if outside:
        raise ValueError(
            f"logit_bias has token ids {outside[:5]}. Give ids from 0 to {vocab_size - 1}."
        )
    if args.top_logprobs > vocab_size:
        raise ValueError(
            f"top_logprobs is {args.top_logprobs}; the vocabulary has {vocab_size} tokens."
        )
    try:
        draw = make_sampler(args, tokenizer)
        processors = mlx_lm_compat.make_logits_processors(args)
        if draw is sample_utils.greedy_sampler and not processors:
            return
        logits, tokens = mx.zeros((1, vocab_size)), mx.array([0])
        for process in processors:
            logits = process(tokens, logits)
        mx.eval(draw(logits))
    except Exception:
        reset_random_state()
        raise


class OwnRandomness:
    """mlx's global random state after mx.random.seed(seed), for one request: every draw splits
    the key once.
    """

    def __init__(self, seed: int) -> None:
        self._key = mx.random.key(seed)

    def categorical(self, logits: mx.array, temp: float) -> mx.array:
        return mx.random.categorical(logits * (1.0 / temp), key=self._next())

    def xtc(
        self, logits: mx.array, probability: float, threshold: float, special_tokens: list[int]
    ) -> mx.array:
        """apply_xtc with its own throw; at probability 1.0 mlx-lm's own always applies."""
        applied = sample_utils.apply_xtc(logits, 1.0, threshold, special_tokens)
        return mx.where(mx.random.uniform(0, 1, key=self._next()) > probability, logits, applied)

    def skip(self, keys: int) -> None:
        """Skip this many keys."""
        for _ in range(keys):
            self._next()

    def _next(self) -> mx.array:
        self._key, drawn = mx.random.split(self._key)
        return drawn


@dataclass(eq=False)
class SeededSampler:
    """mlx-lm's sampler over a separate random state, of which every draw takes `keys` keys."""

    draw: Sampler
    randomness: OwnRandomness
    keys: int

    def __call__(self, logprobs: mx.array) -> mx.array:
        return self.draw(logprobs)

    def skip(self, draws: int) -> None:
        """Continue as if this many draws had been made."""
        self.randomness.skip(draws * self.keys)
