"""A llama whose attention reads what its cache saves. mlx-lm's caches have that, a batch in blocks
does not, so that the model cannot be attached.

models.py makes it importable as mlx_lm.models.unattachable.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models import llama

ModelArgs = llama.ModelArgs


class Attention(llama.Attention):  # type: ignore[misc]
    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        batch, n, _ = x.shape
        queries, keys, values = (
            projection(x).reshape(batch, n, heads, -1).transpose(0, 2, 1, 3)
            for projection, heads in (
                (self.q_proj, self.n_heads),
                (self.k_proj, self.n_kv_heads),
                (self.v_proj, self.n_kv_heads),
            )
        )
        offset = 0 if cache is None else cache.offset
        queries, keys = (self.rope(rows, offset=offset) for rows in (queries, keys))
        if cache is not None:
            cache.update_and_fetch(keys, values)
            keys, values = (rows[:, :, : cache.size()] for rows in cache.state[:2])
        out = mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=self.scale, mask=mask
        )
        return self.o_proj(out.transpose(0, 2, 1, 3).reshape(batch, n, -1))


class Model(llama.Model):  # type: ignore[misc]
    def __init__(self, args: Any) -> None:
        super().__init__(args)
        for layer in self.layers:
            layer.self_attn = Attention(args)
