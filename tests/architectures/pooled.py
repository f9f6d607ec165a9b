"""Models of every architecture on pooled caches, beside themselves on mlx-lm's own."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import make_prompt_cache as stock_prompt_cache
from mlx_lm.utils import _get_classes
from models import CHAT_TEMPLATE, character_tokenizer, write_model

from architectures.configs import CONFIGS

POOL = 60_000_000


@functools.cache
def make_model(name: str) -> Any:
    """With random weights in which a wrong key would show."""
    model_class, args_class = _get_classes(dict(CONFIGS[name]))
    model = model_class(args_class.from_dict(dict(CONFIGS[name])))
    mx.random.seed(0)
    model.update(tree_map(_random, model.parameters()))
    mx.eval([value for _, value in tree_flatten(model.parameters())])
    model.eval()
    return model


def save_architecture(folder: Path, name: str, template: str = CHAT_TEMPLATE) -> Path:
    """make_model() as a model folder."""
    assert (
        character_tokenizer().get_vocab_size()
        <= CONFIGS[name].get("text_config", CONFIGS[name])["vocab_size"]
    )
    return write_model(folder, make_model(name), CONFIGS[name], template)


def _random(array: Any) -> Any:
    return (
        mx.random.normal(array.shape) * 0.25 if mx.issubdtype(array.dtype, mx.floating) else array
    )


def prompt(seed: int, count: int) -> list[int]:
    mx.random.seed(seed)
    return [int(t) for t in mx.random.randint(1, 120, (count,)).tolist()]


def logits(model: Any, caches: list[Any], chunks: list[list[int]], steps: int) -> list[mx.array]:
    """[vocabulary] behind each chunk, and behind each of `steps` greedy tokens more."""
    found = []
    for chunk in chunks:
        found.append(model(mx.array([chunk]), cache=caches)[0, -1])
        mx.eval([c.state for c in caches], found)
    for _ in range(steps):
        found.append(model(mx.argmax(found[-1]).reshape(1, 1), cache=caches)[0, -1])
        mx.eval(found)
    return found


def distance(one: list[mx.array], two: list[mx.array]) -> float:
    """The largest difference of two lists of logits, in parts of the largest logit."""
    scale = max(float(mx.abs(mx.where(mx.isfinite(a), a, 0)).max()) for a in one)
    return (
        max(
            float(mx.abs(mx.where(mx.isfinite(a), a - b, 0)).max())
            for a, b in zip(one, two, strict=True)
        )
        / scale
    )


def stock(model: Any) -> list[Any]:
    found: list[Any] = stock_prompt_cache(model)
    return found
