"""Drafts with a smaller model that has the tokenizer of the one that is served."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm import load
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache
from mlx_lm.utils import common_prefix_len

from mlx_blockpool.drafts.draft import Guess, SourceFactory

PREFILL_TOKENS = 512


class DraftModel:
    """Continues the tokens of one request greedily, on a cache of its own."""

    name = "draft-model"

    def __init__(self, model: Any, prompt: Sequence[int]) -> None:
        self.model = model
        self.tokens = list(prompt)
        self.cache = make_prompt_cache(model)
        self.computed: list[int] = []

    def observe(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens

    def guess(self, next_tokens: Sequence[int], at_most: int) -> Guess:
        known = [*self.tokens, *next_tokens]
        common = min(common_prefix_len(self.computed, known), len(known) - 1)
        num_wrong = len(self.computed) - common
        if trim_prompt_cache(self.cache, num_wrong) != num_wrong:
            raise ValueError("windows and states of the draft model cannot take tokens back")
        while len(known) - common > PREFILL_TOKENS:
            self.model(mx.array([known[common : common + PREFILL_TOKENS]]), cache=self.cache)
            mx.eval([layer.state for layer in self.cache])
            common += PREFILL_TOKENS
        guessed = [mx.array(known[common:])]
        for _ in range(at_most):
            logits = self.model(guessed[-1][None], cache=self.cache)
            guessed.append(mx.argmax(logits[0, -1:], axis=-1))
        tokens: list[int] = mx.concatenate(guessed[1:]).tolist()
        self.computed = known + tokens[:-1]
        return Guess(tokens)


def sources_with(path: str, config: dict[str, Any]) -> list[SourceFactory]:
    model, _, own = load(path, return_config=True)
    # Tokens that it does not have are not looked up in its embeddings.
    return [lambda prompt: DraftModel(model, prompt)] if own["vocab_size"] >= config["vocab_size"] else []
