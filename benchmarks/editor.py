"""A llama that edits: it copies a file from its prompt token by token, one name in it replaced as
the prompt says.

Its weights are set by hand: each layer's attention is one step of an induction circuit. A prompt is
`BOS, RENAME, old, new, *header, *file, END, *header`, and the reply is the file with `new` for
`old`, then END. The header has at least SPAN tokens, and several tokens may be renamed. The MLPs
compute as in any llama; what they compute is multiplied by zero.

1. Beside each token the one before it is written, and a mark behind RENAME.
2. A token that is `old` finds `new` at that mark and becomes it.
3. The last SPAN tokens of each place become its signature.
4. The place is found whose signature, without its own token, is that of now. Its token comes next.

In Hybrid the token before is written by a convolution with a state instead.

So two places with the same SPAN tokens before them must have the same next token: edits.py takes
such files.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import lfm2, llama
from mlx_lm.models.base import create_attention_mask, create_ssm_mask
from mlx_lm.models.cache import ArraysCache, KVCache

HIDDEN, LAYERS, HEADS, KV_HEADS, DIM = 512, 4, 16, 4, 64
# Tokens of a signature, one for each head.
SPAN = HEADS
BOS, RENAME, END, NUM_SPECIAL = 0, 1, 2, 3
# Tokens have codes of +1 and -1, of which two agree in at most 30 of 40 places.
CODE, NUM_CODES, MOST_ALIKE = 40, 2048, 20
# Radians by which rope turns a token further: the fastest pair, and each next one against the one
# before. The first pairs tell distances; those from SLOW on hardly turn over a prompt, and compare
# codes.
TURN, SLOWER, FAST, SLOW = 2.5, 0.3, 8, 10
CONSTANT, IS_RENAME, IS_BOS, MARK = range(4)
OWN, BEFORE, NOW, KEY, QUERY, NEXT = (slice(64 * i, 64 * i + CODE) for i in range(1, 7))
KEY_SIZE, NEXT_SIZE = 16.0, 128.0
# Scores of a distance, of `old`, and of a signature. In bfloat16 they are rounded to 2 at most.
NEAREST, RENAMED, FOUND = 80.0, 56.0, 480.0


def new_model(dtype: mx.Dtype = mx.bfloat16, bits: int | None = None) -> Any:
    """The model, in `bits` a weight with scales of `dtype`. Tokens from NUM_CODES on are read as
    those NUM_CODES below, and are never written.
    """
    mx.random.seed(0)
    model = llama.Model(llama.ModelArgs.from_dict(_config()))
    draw = np.random.default_rng(0)
    codes = _codes(draw)
    _embed(model, codes)
    orders = [draw.permutation(CODE) for _ in range(SPAN)]
    for layer, projections in zip(
        model.layers, (_look_back(), _rename(), _sign(orders), _find(orders)), strict=True
    ):
        for name, weight in projections.items():
            layer.self_attn[f"{name}_proj"].weight = mx.array(weight.astype(np.float32))
        layer.mlp.down_proj.weight = mx.zeros_like(layer.mlp.down_proj.weight)
    model.set_dtype(dtype)
    if bits:
        nn.quantize(model, bits=bits)
    mx.eval(model.parameters())
    return model.eval()


class Hybrid(nn.Module):
    """The model, with a convolution of LFM2 before its layers, whose state is the last tokens."""

    def __init__(self, dtype: mx.Dtype) -> None:
        super().__init__()
        self.args = llama.ModelArgs.from_dict(_config())
        self.conv = lfm2.ShortConv(
            SimpleNamespace(hidden_size=HIDDEN, conv_L_cache=3, conv_bias=False), 0
        )
        self.llama = new_model(dtype)
        # [3 * HIDDEN, HIDDEN]: of each token two gates, which are 1, and what is convolved.
        read = np.zeros((3, HIDDEN, HIDDEN))
        read[:2, :, CONSTANT] = 1
        read[2, OWN, OWN] = np.eye(CODE)
        kernel, write = np.zeros((HIDDEN, 3, 1)), np.zeros((HIDDEN, HIDDEN))
        kernel[:, 1] = 1
        write[BEFORE, OWN] = np.eye(CODE)
        look_back = self.llama.layers[0].self_attn
        weights = _look_back(is_before_written=True)
        for name, weight in weights.items():
            look_back[f"{name}_proj"].weight = mx.array(weight.astype(np.float32))
        for module, weight in (
            (self.conv.in_proj, read.reshape(-1, HIDDEN)),
            (self.conv.conv, kernel),
            (self.conv.out_proj, write),
        ):
            module.weight = mx.array(weight.astype(np.float32))
        # As in the other model, BOS comes after itself.
        embedded = self.llama.model.embed_tokens
        embedded.weight[BOS, BEFORE] = embedded.weight[BOS, OWN]
        self.set_dtype(dtype)
        mx.eval(self.parameters())
        self.eval()

    def __call__(self, inputs: mx.array, cache: list[Any] | None = None) -> mx.array:
        state, *rest = [None] * len(self.layers) if cache is None else cache
        h = self.llama.model.embed_tokens(inputs)
        mask = create_attention_mask(h, rest[0])
        h = h + self.conv(h, create_ssm_mask(h, state), state)
        for layer, own in zip(self.llama.layers, rest, strict=True):
            h = layer(h, mask, own)
        logits: mx.array = self.llama.lm_head(self.llama.model.norm(h))
        return logits

    @property
    def layers(self) -> list[Any]:
        return [self.conv, *self.llama.layers]

    def make_cache(self) -> list[Any]:
        return [ArraysCache(size=1), *(KVCache() for _ in self.llama.layers)]


def _config() -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "intermediate_size": 3 * HIDDEN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": DIM,
        "rms_norm_eps": 1e-5,
        "vocab_size": 2 * NUM_CODES,
        "rope_theta": SLOWER ** -(DIM // 2),
        "rope_scaling": {"type": "linear", "factor": 1 / TURN},
        "tie_word_embeddings": False,
    }


def _codes(draw: np.random.Generator) -> np.ndarray:
    """Codes [NUM_CODES, CODE], of which no two agree in more places than MOST_ALIKE more than they
    differ in.

    That of BOS agrees with each other one in half of the places.
    """
    codes = np.zeros((NUM_CODES, CODE))
    num = 0
    while num < NUM_CODES:
        code = draw.choice([-1.0, 1.0], CODE)
        alike = codes[:num] @ code
        if alike.max(initial=0) <= MOST_ALIKE and (num == BOS or alike[BOS] == 0):
            codes[num] = code
            num += 1
    return codes


def _embed(model: Any, codes: np.ndarray) -> None:
    tokens = np.zeros((NUM_CODES, HIDDEN))
    tokens[:, OWN] = tokens[:, NOW] = codes
    tokens[:, CONSTANT] = 1
    tokens[RENAME, IS_RENAME] = tokens[BOS, IS_BOS] = 1
    model.model.embed_tokens.weight = mx.array(np.concatenate([tokens, tokens]).astype(np.float32))
    written = np.zeros((2 * NUM_CODES, HIDDEN))
    # A logit of about 40 for the token that comes next, and at most 20 for any other.
    written[:NUM_CODES, NEXT] = 0.3 * codes
    model.lm_head.weight = mx.array(written.astype(np.float32))


def _norm(*parts: float) -> float:
    """What rms_norm divides by, where the squares of the hidden vector add up to `parts`."""
    return math.sqrt(sum(parts) / HIDDEN)


def _projections() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Zero weights q [HEADS, DIM, HIDDEN], k and v [DIM, HIDDEN], the same for all heads, and o
    [HEADS, HIDDEN, DIM].
    """
    return (
        np.zeros((HEADS, DIM, HIDDEN)),
        np.zeros((DIM, HIDDEN)),
        np.zeros((DIM, HIDDEN)),
        np.zeros((HEADS, HIDDEN, DIM)),
    )


def _weights(q: np.ndarray, k: np.ndarray, v: np.ndarray, o: np.ndarray) -> dict[str, np.ndarray]:
    repeated = {"k": np.tile(k, (KV_HEADS, 1)), "v": np.tile(v, (KV_HEADS, 1))}
    return {"q": q.reshape(-1, HIDDEN), **repeated, "o": o.transpose(1, 0, 2).reshape(HIDDEN, -1)}


def _at_distance(q: np.ndarray, k: np.ndarray, distances: list[int], norm: float) -> None:
    """Let head i read the token `distances[i]` before its own."""
    turns = TURN * SLOWER ** np.arange(FAST)
    size = norm * math.sqrt(NEAREST / FAST * math.sqrt(DIM))
    k[:FAST, CONSTANT] = size
    for head, distance in enumerate(distances):
        q[head, :FAST, CONSTANT] = size * np.cos(distance * turns)
        q[head, DIM // 2 : DIM // 2 + FAST, CONSTANT] = -size * np.sin(distance * turns)


def _compared(slot: slice, size: float, order: np.ndarray | None = None) -> np.ndarray:
    """Rows [DIM, HIDDEN] that read a code into the dimensions that hardly turn."""
    rows = np.zeros((DIM, HIDDEN))
    half = CODE // 2
    dims = [*range(SLOW, SLOW + half), *range(DIM // 2 + SLOW, DIM // 2 + SLOW + half)]
    rows[dims, np.arange(slot.start, slot.stop)[np.arange(CODE) if order is None else order]] = size
    return rows


def _look_back(is_before_written: bool = False) -> dict[str, np.ndarray]:
    q, k, v, o = _projections()
    codes = (3 if is_before_written else 2) * CODE
    norm = _norm(codes, 1)
    _at_distance(q, k, [1, 2], norm)
    v[:CODE, OWN] = np.eye(CODE)
    v[CODE, IS_RENAME] = 1
    if not is_before_written:
        o[0, BEFORE, :CODE] = norm * np.eye(CODE)
    o[1, MARK, CODE] = _norm(codes, 2)
    return _weights(q, k, v, o)


def _rename() -> dict[str, np.ndarray]:
    q, k, v, o = _projections()
    norm = _norm(3 * CODE, 1)
    alike = math.sqrt(RENAMED * math.sqrt(DIM) / CODE)
    q[0] = _compared(NOW, norm * alike)
    k[:] = _compared(BEFORE, norm * alike)
    # BOS is read by tokens that are not renamed; it has nothing to add. All others but the marked
    # one are out of reach.
    gate = DIM // 2 - 1
    q[0, gate, CONSTANT] = norm * math.sqrt(DIM)
    k[gate, [CONSTANT, MARK, IS_BOS]] = norm * np.array([-RENAMED, RENAMED, 1.75 * RENAMED])
    v[:CODE, OWN], v[:CODE, BEFORE] = np.eye(CODE), -np.eye(CODE)
    o[0, NOW, :CODE] = _norm(3 * CODE, 2) * np.eye(CODE)
    return _weights(q, k, v, o)


def _sign(orders: list[np.ndarray]) -> dict[str, np.ndarray]:
    """A signature is the sum of codes, each in an order of its own by its distance.

    Keys are so large beside the rest that the next norm makes them equally long.
    """
    q, k, v, o = _projections()
    norm = _norm(3 * CODE, 1)
    _at_distance(q, k, list(range(1, SPAN + 1)), norm)
    v[:CODE, NOW] = np.eye(CODE)
    for head, order in enumerate(orders):
        o[head, KEY, :CODE] = KEY_SIZE * norm * np.eye(CODE)[order]
        if head + 1 < SPAN:
            o[head, QUERY, :CODE] = norm * np.eye(CODE)[orders[head + 1]]
    return _weights(q, k, v, o)


def _find(orders: list[np.ndarray]) -> dict[str, np.ndarray]:
    q, k, v, o = _projections()
    alike = math.sqrt(FOUND * math.sqrt(DIM) / HIDDEN)
    q[0] = _compared(QUERY, KEY_SIZE * alike)
    q[0] += _compared(NOW, KEY_SIZE * alike, orders[0])
    k[:] = _compared(KEY, alike)
    v[:CODE, NOW] = np.eye(CODE)
    key = KEY_SIZE**2 * SPAN * CODE
    o[0, NEXT, :CODE] = NEXT_SIZE * _norm(key) * np.eye(CODE)
    return _weights(q, k, v, o)
