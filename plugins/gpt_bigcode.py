"""gpt_bigcode: the positions of a batch, which mlx-lm's model computes for one sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from mlx_blockpool.hooks import AttentionAdapter, hookimpl


@hookimpl
def attention_adapters() -> list[AttentionAdapter]:
    return [AttentionAdapter("gpt_bigcode", _is_model, _compute)]


def _is_model(cls: type) -> bool:
    return (cls.__module__, cls.__name__) == ("mlx_lm.models.gpt_bigcode", "GPTBigCodeModel")


def _compute(
    module: Any, call: Callable[..., Any], inputs: mx.array, cache: list[Any] | None = None
) -> Any:
    """The hidden states [batch, n, dim] of tokens [batch, n], each sequence from its offset."""
    if cache is None or not isinstance(cache[0].offset, mx.array):
        return call(module, inputs, cache)
    positions = cache[0].offset[:, None] + mx.arange(inputs.shape[1])
    # Padding may lie after the last position that there is.
    hidden = module.wte(inputs) + module.wpe(mx.minimum(positions, module.args.n_positions - 1))
    mask = cache[0].make_mask(inputs.shape[1])
    for layer, own in zip(module.h, cache, strict=True):
        hidden = layer(hidden, mask, cache=own)
    return module.ln_f(hidden)
