"""Train the model of bench_answers that calls tools: python benchmarks/train_caller.py --out DIR
[--minutes 50].

A llama of mlx-lm with heads of 64. Copies over a distance take many more steps to begin than to
learn, so two layers start as an induction head: the first writes beside each token the one before
it, the second finds what followed a token before. Training moves all of it, on calls of tools and
on lists of files that are repeated in another order.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from demo.numpy_math import numpy_math
from demo.tokenizer import END_OF_TEXT, IM_END, IM_START
from demo.train import batch, loss, new_model, save
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tool_calls import listing, session
from tqdm import tqdm

SEED = 0
LEARNING_RATE = 1e-3
# Of a batch, at the beginning and at the end.
BATCH_TOKENS = 3000, 6000
MOST_TURNS, MOST_FILES = 20, 50
MINUTES = 50
# Of the numbers of an embedding at the beginning.
TOKEN_SIZE = 0.08


def make_tokenizer() -> Tokenizer:
    """Byte-level BPE that takes digits by threes, as Llama 3 does: each group is one token."""
    draw = random.Random(SEED)
    texts = [text for _ in range(3000) for _, text in session(draw, 6).messages()]
    texts += [f"{role}\n" for role in ("system", "user", "assistant", "tool")] * 1000
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("[0-9]{3}"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1792,
        special_tokens=[END_OF_TEXT, IM_START, IM_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def model_config(tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 128,
        "num_hidden_layers": 3,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "vocab_size": 1792,
        "max_position_embeddings": 4096,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "float16",
        "eos_token_id": tokenizer.token_to_id(IM_END),
    }


def first_tokens(config: dict[str, Any], draw: np.random.Generator) -> np.ndarray:
    """Embeddings: what a token is in the first half, little in the second, and a last number
    that all have in common.
    """
    tokens = TOKEN_SIZE * draw.normal(size=(config["vocab_size"], config["hidden_size"]))
    half = config["hidden_size"] // 2
    tokens[:, half:] *= 0.25
    tokens[:, -1] = TOKEN_SIZE * math.sqrt(half)
    return tokens


def first_layers(
    config: dict[str, Any], tokens: np.ndarray, draw: np.random.Generator
) -> list[dict[str, Any]]:
    """The attention of an induction head, which finds about two thirds of what it looks for.

    The first layer's queries and keys are made from what all tokens have in common, so that they
    depend on the distance alone; it writes the token before into the second half. The second layer
    compares what a token is with what was before another, at the frequencies that turn little over
    the whole context.
    """
    hidden, dim = config["hidden_size"], config["head_dim"]
    heads, kv_heads, half = (
        config["num_attention_heads"],
        config["num_key_value_heads"],
        hidden // 2,
    )
    sharpness, match, copied = 30.0, 60.0, 8.0
    normed = math.sqrt(hidden) * TOKEN_SIZE / np.linalg.norm(tokens, axis=1).mean()
    own, before, common = np.eye(hidden)[:half], np.eye(hidden)[half:], np.eye(hidden)[-1]
    before[-1] = 0
    turns = config["rope_theta"] ** (-np.arange(dim // 2) / (dim // 2))
    fast, slow = 1.0 * (np.arange(dim // 2) < 10), np.tile(np.arange(dim // 2) >= 12, 2)[:, None]
    scale = math.sqrt(sharpness * math.sqrt(dim)) / (normed * math.sqrt(half))
    nearest = scale * np.concatenate([fast * np.cos(turns), -fast * np.sin(turns)])
    here = scale * np.concatenate([fast, 0 * fast])
    likeness = (
        math.sqrt(match * math.sqrt(dim) / (half * slow.mean()))
        * slow
        * np.linalg.qr(draw.normal(size=(half, half)))[0]
    )
    queries, keys = np.outer(nearest, common), np.outer(here, common)
    written = [before * TOKEN_SIZE / normed / heads, own * copied * TOKEN_SIZE / heads]
    return [
        {
            "q_proj": [q] * heads,
            "k_proj": [k] * kv_heads,
            "v_proj": [own] * kv_heads,
            "o_proj": [o] * heads,
        }
        for q, k, o in (
            (queries, keys, written[0]),
            (likeness @ own, likeness @ before, written[1]),
        )
    ]


def begin(model: Any, config: dict[str, Any]) -> None:
    draw = np.random.default_rng(SEED)
    tokens = first_tokens(config, draw)
    model.model.embed_tokens.weight = mx.array(tokens.astype(np.float32))
    for layer, projections in zip(
        model.model.layers, first_layers(config, tokens, draw), strict=False
    ):
        for name, parts in projections.items():
            weight = np.concatenate(parts).T if name == "o_proj" else np.concatenate(parts)
            weight = weight + 0.002 * draw.normal(size=weight.shape)
            getattr(layer.self_attn, name).weight = mx.array(weight.astype(np.float32))
    for layer in model.model.layers:
        layer.mlp.down_proj.weight = layer.mlp.down_proj.weight * 0.1


def draw_batch(draw: random.Random, tokenizer: Tokenizer, progress: float) -> tuple[Any, Any]:
    """Lists of files at first, then mostly sessions.

    Both grow until half of the time has passed.
    """
    tokens = BATCH_TOKENS[0] + (BATCH_TOKENS[1] - BATCH_TOKENS[0]) * progress
    growth = min(1, 2 * progress)
    if draw.random() < max(0.15, 0.6 - 1.2 * progress):
        files = draw.randint(3, round(8 + (MOST_FILES - 8) * growth))
        rows = max(1, int(tokens) // (14 * files + 12))
        return batch(tokenizer, [listing(draw, files) for _ in range(rows)])
    turns = draw.randint(2, round(3 + (MOST_TURNS - 3) * growth))
    rows = max(1, int(tokens) // (170 + 55 * turns))
    return batch(tokenizer, [session(draw, turns).messages() for _ in range(rows)])


def fit(model: Any, tokenizer: Tokenizer, seconds: float, rate: float = LEARNING_RATE) -> None:
    draw = random.Random(SEED)
    optimizer = optim.AdamW(rate, betas=[0.9, 0.98], weight_decay=0.02)
    gradients = nn.value_and_grad(model, loss)
    started, steps = time.monotonic(), 0
    bar = tqdm(total=round(seconds), desc="train", unit="s", mininterval=5)
    while (progress := (time.monotonic() - started) / seconds) < 1:
        steps += 1
        optimizer.learning_rate = (
            rate * min(1, steps / 60) * (0.5 + 0.5 * math.cos(math.pi * progress))
        )
        value, grads = gradients(model, *draw_batch(draw, tokenizer, progress))
        grads, _ = optim.clip_grad_norm(grads, 1.0)
        optimizer.update(model, grads)
        mx.eval(value, model.parameters(), optimizer.state)
        bar.set_postfix(steps=steps, loss=f"{value.item():.4f}", refresh=False)
        bar.update(round(progress * seconds) - bar.n)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Train the model of bench_answers that calls tools."
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument(
        "--minutes", type=float, default=MINUTES, help="how long to train (default: %(default)s)"
    )
    args = parser.parse_args()
    mx.random.seed(SEED)
    tokenizer = make_tokenizer()
    config = model_config(tokenizer)
    model = new_model(config)
    begin(model, config)
    with numpy_math():
        fit(model, tokenizer, 60 * args.minutes)
    save(model, tokenizer, config, args.out)


if __name__ == "__main__":
    main()
