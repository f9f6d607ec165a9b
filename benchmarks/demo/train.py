"""Train the demo model: python -m benchmarks.demo.train [--out DIR] [--start DIR].

Writes a folder that mlx_lm.load takes, then measures it: the share of questions answered word for
word, greedily.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import mlx_lm
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models import llama
from tokenizers import AddedToken, Tokenizer
from tqdm import tqdm  # type: ignore[import-untyped]

from mlx_blockpool.demo import model_path

from .conversations import Conversations, Message
from .numpy_math import numpy_math
from .tokenizer import CALL, CALL_END, END_OF_TEXT, IM_END, encode, save_tokenizer, train_tokenizer

SEED = 0
VOCAB_SIZE = 1536
LEARNING_RATE = 4e-3
# Conversations per batch, and how often a batch is of that kind: short ones teach most per second,
# long ones distance.
BATCHES = {"single": 48, "turns": 14, "long": 5}
SHARES = {"single": 0.5, "turns": 0.35, "long": 0.15}


def make_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Byte-level BPE, with the markers of tool calls whole: no conversation has them, but a form
    can force them.
    """
    tokenizer = train_tokenizer(texts, VOCAB_SIZE)
    tokenizer.add_tokens([AddedToken(marker, normalized=False) for marker in (CALL, CALL_END)])
    return tokenizer


def model_config(tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "intermediate_size": 352,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": tokenizer.get_vocab_size(),
        "max_position_embeddings": 8192,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "float16",
        "eos_token_id": tokenizer.token_to_id(IM_END),
    }


def new_model(config: dict[str, Any]) -> Any:
    model = llama.Model(llama.ModelArgs.from_dict(config))
    matrices = {
        name: weight for name, weight in tree_flatten(model.parameters()) if weight.ndim == 2
    }
    model.update(
        tree_unflatten([(name, 0.04 * mx.random.normal(w.shape)) for name, w in matrices.items()])
    )
    return model


def batch(tokenizer: Tokenizer, conversations: Iterable[Iterable[Message]]) -> tuple[Any, Any]:
    """Tokens [conversations, longest], padded on the right, and the flat positions whose next
    token is learned.
    """
    rows = [encode(tokenizer, messages) for messages in conversations]
    longest = max(len(tokens) for tokens, _ in rows)
    inputs = np.full((len(rows), longest), tokenizer.token_to_id(END_OF_TEXT), dtype=np.int32)
    learned = np.zeros((len(rows), longest), dtype=bool)
    for row, (tokens, flags) in enumerate(rows):
        inputs[row, : len(tokens)] = tokens
        learned[row, : len(tokens)] = flags
    return mx.array(inputs), mx.array(np.flatnonzero(learned[:, 1:]))


def answer_logits(model: Any, tokens: Any, positions: Any) -> tuple[Any, Any]:
    """Logits at the learned positions [positions, vocabulary] and the tokens that belong there."""
    hidden = model.model(tokens[:, :-1])
    logits = model.model.embed_tokens.as_linear(hidden.reshape(-1, hidden.shape[-1])[positions])
    return logits, tokens[:, 1:].reshape(-1)[positions]


def loss(model: Any, tokens: Any, positions: Any) -> Any:
    return nn.losses.cross_entropy(*answer_logits(model, tokens, positions), reduction="mean")


def fit(
    model: Any,
    tokenizer: Tokenizer,
    conversations: Conversations,
    draw: random.Random,
    steps: int,
    rate: float = LEARNING_RATE,
) -> None:
    """`rate`: the highest learning rate, after a twentieth of the steps."""
    warmup = steps // 20
    schedule = optim.join_schedules(
        [optim.linear_schedule(0.0, rate, warmup), optim.cosine_decay(rate, steps - warmup)],
        [warmup],
    )
    optimizer = optim.AdamW(schedule, betas=[0.9, 0.98], weight_decay=0.05)
    gradients = nn.value_and_grad(model, loss)
    progress = tqdm(range(steps), desc="train", unit="step", mininterval=5)
    smooth = 0.0
    for step in progress:
        kind = draw.choices(list(SHARES), list(SHARES.values()))[0]
        tokens, positions = batch(
            tokenizer, [conversations.draw(kind) for _ in range(BATCHES[kind])]
        )
        value, grads = gradients(model, tokens, positions)
        grads, _ = optim.clip_grad_norm(grads, 1.0)
        optimizer.update(model, grads)
        mx.eval(value, model.parameters(), optimizer.state)
        smooth = value.item() if step == 0 else 0.95 * smooth + 0.05 * value.item()
        progress.set_postfix(loss=f"{smooth:.4f}", refresh=False)


def share_right(model: Any, tokenizer: Tokenizer, pairs: list[tuple[str, str]]) -> float:
    """The share of questions whose whole answer the model would write greedily."""
    right = 0
    for question, answer in tqdm(pairs, desc="check", mininterval=5):
        tokens, positions = batch(tokenizer, [[("user", question), ("assistant", answer)]])
        logits, expected = answer_logits(model, tokens, positions)
        right += bool(mx.array_equal(mx.argmax(logits, axis=-1), expected))
    return right / len(pairs)


def save(model: Any, tokenizer: Tokenizer, config: dict[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: weight.astype(mx.float16) for name, weight in tree_flatten(model.parameters())}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    save_tokenizer(tokenizer, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo model.")
    parser.add_argument("--out", type=Path, default=Path(model_path()), help="folder to write")
    parser.add_argument(
        "--start",
        type=Path,
        help="folder of a model trained before, whose training goes on at half the rate",
    )
    parser.add_argument("--steps", type=int, default=1600, help="training steps")
    arguments = parser.parse_args()
    started = time.perf_counter()
    goes_on = arguments.start is not None
    mx.random.seed(SEED)
    draw = random.Random(SEED + goes_on)
    conversations = Conversations(draw)
    # Weights that were trained before belong to their tokens.
    tokenizer = (
        Tokenizer.from_file(str(arguments.start / "tokenizer.json"))
        if goes_on
        else make_tokenizer(conversations.texts())
    )
    config = model_config(tokenizer)
    model = new_model(config)
    if goes_on:
        weights: Any = mx.load(str(arguments.start / "model.safetensors"))
        model.load_weights([(name, weight.astype(mx.float32)) for name, weight in weights.items()])
    on_cpu = mx.default_device() == mx.Device(mx.cpu)
    with numpy_math() if on_cpu else nullcontext():
        fit(model, tokenizer, conversations, draw, arguments.steps, LEARNING_RATE / (1 + goes_on))
    save(model, tokenizer, config, arguments.out)
    print(f"Trained in {time.perf_counter() - started:.0f} s; wrote {arguments.out}.")
    loaded = mlx_lm.load(str(arguments.out))[0]
    for name, pairs in (("trained", conversations.trained), ("held-out", conversations.held_out)):
        print(
            f"{name} questions answered right: {share_right(loaded, tokenizer, pairs):.1%} of "
            f"{len(pairs)}"
        )


if __name__ == "__main__":
    main()
