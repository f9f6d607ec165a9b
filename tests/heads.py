"""Tiny models with a head for multi-token prediction, trained on texts in which each token has one
successor.
"""

from __future__ import annotations

import functools
import re
import tempfile
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from architectures.configs import CONFIGS as ARCHITECTURES
from architectures.configs_common import wide
from mlx.utils import tree_flatten
from mlx_blockpool_plugins import prediction_heads
from models import CONFIGS as MODELS
from models import write_model

from mlx_blockpool.kv.prediction_head import PredictionHead
from mlx_blockpool.model_files.loading import load_model
from mlx_blockpool.plugins import stock_classes

VOCABULARY = 131
WIDE = "-wide"
NAMES = ["deepseek_v3", "glm4_moe", "qwen3_5"]
# With these a head is right most of the time, and not always.
STEPS = {"deepseek_v3": 9, "glm4_moe": 11, "qwen3_5": 10}


def base_of(name: str) -> str:
    """The type of a model; one with WIDE in its name has rows that can be quantised."""
    return name.removesuffix(WIDE)


def config_of(name: str) -> dict[str, Any]:
    """The config of a type, with a head."""
    base = base_of(name)
    given = {**MODELS.get(base, ARCHITECTURES[base])}
    if base != name:
        given = wide(ARCHITECTURES[base])
    count = {prediction_heads.LAYOUTS[base].count: 1}
    if "text_config" in given:
        return {**given, "text_config": {**given["text_config"], **count}}
    return {**given, **count}


def successors() -> mx.array:
    """The token after each."""
    return mx.random.permutation(VOCABULARY, key=mx.random.key(7))


@functools.cache
def trained(name: str) -> tuple[Any, PredictionHead]:
    """A model of mlx-lm's class and its head."""
    mx.random.seed(0)
    config = config_of(name)
    model_class, args_class = stock_classes(config)
    model: Any = model_class(args_class.from_dict(config))
    layout, text = prediction_heads.LAYOUTS[base_of(name)], prediction_heads._text(model)
    head = prediction_heads._head(text, layout, prediction_heads._full_layer(model))
    both = nn.Module()
    both.model, both.head = model, head
    both.train()

    def loss(both: Any, tokens: mx.array) -> mx.array:
        hidden = text.model(tokens)
        before = mx.concatenate([mx.zeros_like(hidden[:, :1]), hidden[:, :-1]], axis=1)
        guessed = head.norm(head._layer(tokens, mx.stop_gradient(before), None))
        return sum(
            nn.losses.cross_entropy(head._logits(each)[:, :-1], tokens[:, 1:]).mean()
            for each in (hidden, guessed)
        )

    step, optimiser, order = nn.value_and_grad(both, loss), optim.Adam(3e-3), successors()
    for _ in range(STEPS[base_of(name)]):
        tokens = [mx.random.randint(0, VOCABULARY, (16, 1))]
        for _ in range(23):
            tokens.append(order[tokens[-1]])
        _, gradients = step(both, mx.concatenate(tokens, axis=1))
        optimiser.update(both, gradients)
        mx.eval(both.parameters(), optimiser.state)
    both.eval()
    return model, head


def tensors_of(name: str) -> dict[str, mx.array]:
    """The tensors of a trained head by the names that the files of such models have."""
    model, head = trained(name)
    layout = prediction_heads.LAYOUTS[base_of(name)]
    num_layers = len(prediction_heads._text(model).model.layers)
    prefix = "mtp." if layout.layer else f"model.layers.{num_layers}."
    embedding, hidden, norm = layout.norms
    names = {
        r"embedding_norm\.": f"{embedding}.",
        r"hidden_norm\.": f"{hidden}.",
        r"projection\.": f"{layout.projection}.",
        r"layer\.": layout.layer,
        r"norm\.": f"{norm}.",
    }
    found = {}
    for own, value in tree_flatten(head.parameters()):
        pattern = next(p for p in names if re.match(p, own))
        found[prefix + re.sub(pattern, names[pattern], own, count=1)] = value
    return found


def save(folder: Path, name: str, **changes: mx.array | None) -> Path:
    """The folder of a trained model and its head; `changes` to the head's tensors by their names,
    None removes one.
    """
    write_model(folder, trained(name)[0], config_of(name))
    own = mx.load(str(folder / "model.safetensors"))
    own |= {**tensors_of(name), **changes}
    kept = {key: value for key, value in own.items() if value is not None}
    mx.save_safetensors(str(folder / "model.safetensors"), kept, {"format": "mlx"})
    return folder


def load(name: str) -> Any:
    """A trained model with its head, as a server loads it."""
    with tempfile.TemporaryDirectory() as folder:
        model, _ = load_model(save(Path(folder), name))
    return model
