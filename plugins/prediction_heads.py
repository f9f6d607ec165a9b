"""Keeps the heads for multi-token prediction that mlx-lm drops when it loads a model.

Their tensors are read from the model's files, and run in a layer of the model's own class. A model
whose files have no head, or one of another shape, is what mlx-lm makes of it.
"""

from __future__ import annotations

import functools
import logging
import re
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_blockpool.errors import UnknownModelTypeError
from mlx_blockpool.hooks import hookimpl
from mlx_blockpool.kv.prediction_head import PredictionHead
from mlx_blockpool.plugins import stock_classes

log = logging.getLogger(__name__)

Weights = dict[str, mx.array]


@dataclass(frozen=True)
class HeadLayout:
    """How the files of a family of models name the parts of a head.

    count:       the field of config.json with the number of heads, of which the first is used.
    prefix:      of the names of its tensors; {n} is the number of the model's layers.
    norms:       of the embedding, of the hidden state, and of the output.
    projection:  of the embedding and the hidden state, side by side.
    layer:       what precedes the names of the decoder layer's tensors.
    chains_norm, array_mask: as in PredictionHead.
    """

    count: str
    prefix: str
    norms: tuple[str, str, str]
    projection: str
    layer: str
    chains_norm: bool
    array_mask: bool = False


QWEN = HeadLayout(
    "mtp_num_hidden_layers",
    r"(?:.*\.)?mtp\.",
    ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"),
    "fc",
    "layers.0.",
    chains_norm=True,
)
DEEPSEEK = HeadLayout(
    "num_nextn_predict_layers",
    r"model\.layers\.{n}\.",
    ("enorm", "hnorm", "shared_head.norm"),
    "eh_proj",
    "",
    chains_norm=False,
)
LAYOUTS = {
    "qwen3_5": QWEN,
    "qwen3_5_moe": QWEN,
    "qwen3_next": QWEN,
    "deepseek_v3": replace(DEEPSEEK, array_mask=True),
    "glm4_moe": DEEPSEEK,
    "glm4_moe_lite": replace(DEEPSEEK, array_mask=True),
}


@hookimpl
def model_classes(config: dict[str, Any]) -> tuple[type, type] | None:
    layout = LAYOUTS.get(str(config.get("model_type")))
    text = config.get("text_config")
    fields = {**config, **(text if isinstance(text, dict) else {})}
    if layout is None or not fields.get(layout.count):
        return None
    try:
        model_class, args_class = stock_classes(config)
    except UnknownModelTypeError:
        return None
    return _reading(model_class), args_class


class _Captured:
    """The hidden states of a model's last forward."""

    hidden: mx.array


@functools.cache
def _reading(base: type) -> type:
    """The class of a model that looks for its head when it reads its weights."""
    return type(
        base.__name__, (_HeadSanitizer, base), {"__module__": base.__module__, "base": base}
    )


class _HeadSanitizer:
    """Comes before mlx-lm's class of a model among its bases."""

    base: type[Any]
    model_type: str

    def sanitize(self, weights: Weights) -> Weights:
        """As mlx-lm does, but the tensors of the head stay if it can be used."""
        layout = LAYOUTS[self.model_type]
        tensors, others = _divided(self, layout, weights)
        own: Weights = self.base.sanitize(self, dict(others))
        try:
            head, found = _read(self, layout, tensors, others)
        except _UnusableHeadError as error:
            level = logging.WARNING if tensors else logging.INFO
            log.log(level, "%s runs without a prediction head: %s", self.base.__module__, error)
            self.__class__ = self.base
            return own
        _add(self, head)
        return {**own, **{f"prediction_head.{name}": value for name, value in found.items()}}


class _WithHead:
    """Comes before mlx-lm's class of a model among its bases."""

    base: type[Any]
    prediction_head: PredictionHead
    captured: _Captured

    def __call__(self, inputs: mx.array, cache: Any = None, **more: Any) -> mx.array:
        # What stands in for a model is of another class, so that super() does not work.
        if cache is None:
            alone: mx.array = self.base.__call__(self, inputs, cache=None, **more)
            return alone
        logits: mx.array = self.base.__call__(self, inputs, cache=cache[:-1], **more)
        self.prediction_head.write(inputs, self.captured.hidden, cache[-1])
        return logits

    def make_cache(self) -> list[Any]:
        """The caches of the model's own layers, and that of the head after them."""
        return [*_own_caches(self), _own_caches(self)[_full_layer(self)]]

    def drop_head(self) -> None:
        """See mlx_blockpool.kv.prediction_head.drop_head()."""
        backbone = _text(self).model
        backbone.__class__ = type(backbone).__bases__[0]
        del self.prediction_head, self.captured
        self.__class__ = self.base


class _UnusableHeadError(Exception):
    """Says why a model's files have no head that can be used."""


def _add(model: Any, head: PredictionHead) -> None:
    """Give a model its head, and let it note the hidden states of each forward."""
    backbone, captured = _text(model).model, _Captured()

    def call(self: Any, *args: Any, **more: Any) -> mx.array:
        captured.hidden = kind.__call__(self, *args, **more)
        return captured.hidden

    kind = type(backbone)
    names = {"__module__": kind.__module__, "__call__": call}
    backbone.__class__ = type(kind.__name__, (kind,), names)
    base = model.base
    names = {"__module__": base.__module__, "base": base}
    model.__class__ = type(base.__name__, (_WithHead, base), names)
    model.captured, model.prediction_head = captured, head


def _divided(model: Any, layout: HeadLayout, weights: Weights) -> tuple[Weights, Weights]:
    """The tensors of the head, by what follows its prefix, and all others."""
    pattern = re.compile(layout.prefix.format(n=len(_text(model).model.layers)))
    tensors, others = Weights(), Weights()
    for name, value in weights.items():
        found = pattern.match(name)
        if found is None:
            others[name] = value
        else:
            tensors[name[found.end() :]] = value
    return tensors, others


def _read(
    model: Any, layout: HeadLayout, tensors: Weights, others: Weights
) -> tuple[PredictionHead, Weights]:
    """The head of a model, and its tensors by their names in it. Raises _UnusableHeadError."""
    if not tensors:
        raise _UnusableHeadError("its files have none")
    at = _full_layer(model)
    head = _head(_text(model), layout, at)
    found = _tensors(model, layout, at, tensors, others)
    needed = dict(tree_flatten(head.parameters()))
    is_quantised = any(name.endswith(".scales") for name in others)
    packed = {
        f"{path}.{kind}"
        for path, module in head.named_modules()
        if is_quantised and hasattr(module, "to_quantized")
        for kind in ("scales", "biases")
    }
    for name, value in needed.items():
        path = name.rpartition(".")[0]
        if name not in found:
            raise _UnusableHeadError(f"its files have no {name} of it")
        # Rows of quantised weights are packed, and as many.
        few = 1 if f"{path}.scales" in found else None
        if found[name].shape[:few] != value.shape[:few]:
            raise _UnusableHeadError(
                f"{name} of it has the shape {found[name].shape}, and {value.shape} is needed"
            )
    modules = {name.rpartition(".")[0] for name in needed}
    found = {n: value for n, value in found.items() if n.rpartition(".")[0] in modules}
    for name in found.keys() - needed.keys() - packed:
        raise _UnusableHeadError(f"mlx-lm's layer has no {name}")
    return head, found


def _tensors(model: Any, layout: HeadLayout, at: int, tensors: Weights, others: Weights) -> Weights:
    """The tensors of a head by their names in it, as mlx-lm makes those of the layer `at`: they
    take the place of that layer's.
    """
    ending = f"layers.{at}.input_layernorm.weight"
    names = [name for name in others if name.endswith(ending)]
    if len(names) != 1:
        raise _UnusableHeadError(f"{len(names)} tensors are named {ending}")
    root, stem = names[0].removesuffix(ending), names[0].removesuffix("input_layernorm.weight")
    embedding, hidden, norm = layout.norms
    for name in layout.norms:
        if f"{name}.weight" not in tensors:
            raise _UnusableHeadError(f"its files have no {name}.weight of it")
        if tensors[f"{name}.weight"].shape != _text(model).model.norm.weight.shape:
            shape = tensors[f"{name}.weight"].shape
            raise _UnusableHeadError(f"{name}.weight of it has the shape {shape}")
    given = {name: value for name, value in others.items() if not name.startswith(stem)}
    given |= {
        stem + name.removeprefix(layout.layer): value
        for name, value in tensors.items()
        if name.startswith(layout.layer)
    }
    given[f"{root}norm.weight"] = tensors[f"{norm}.weight"]
    try:
        made: Weights = model.base.sanitize(model, given)
    except Exception as error:
        # mlx-lm's code raises anything for tensors that are missing or of another shape.
        raise _UnusableHeadError(f"mlx-lm cannot read its layer ({error!r})") from error
    (name,) = (name for name in made if name.endswith(ending))
    stem, root = name.removesuffix("input_layernorm.weight"), name.removesuffix(ending)
    found = {
        f"layer.{name.removeprefix(stem)}": value
        for name, value in made.items()
        if name.startswith(stem)
    }
    found["norm.weight"] = made[f"{root}norm.weight"]
    # Some files have the weights of norms less one.
    added = found["norm.weight"] - tensors[f"{norm}.weight"]
    found["embedding_norm.weight"] = tensors[f"{embedding}.weight"] + added
    found["hidden_norm.weight"] = tensors[f"{hidden}.weight"] + added
    return found | {
        name.replace(layout.projection, "projection", 1): value
        for name, value in tensors.items()
        if name.startswith(f"{layout.projection}.")
    }


def _head(text: Any, layout: HeadLayout, at: int) -> PredictionHead:
    backbone = text.model

    def embed(tokens: mx.array) -> mx.array:
        found: mx.array = backbone.embed_tokens(tokens)
        return found

    def logits(hidden: mx.array) -> mx.array:
        found: mx.array = (
            text.lm_head(hidden) if "lm_head" in text else backbone.embed_tokens.as_linear(hidden)
        )
        return found

    layer: nn.Module = type(backbone.layers[at])(text.args, at)
    norm = backbone.norm
    return PredictionHead(
        layer,
        norm.weight.size,
        norm.eps,
        embed,
        logits,
        chains_norm=layout.chains_norm,
        array_mask=layout.array_mask,
    )


def _text(model: Any) -> Any:
    """The language model in a model."""
    return getattr(model, "language_model", model)


def _full_layer(model: Any) -> int:
    """The last layer with full attention."""
    layers = _text(model).model.layers
    return max(i for i, layer in enumerate(layers) if not getattr(layer, "is_linear", False))


def _own_caches(model: Any) -> list[Any]:
    if hasattr(model.base, "make_cache"):
        own: list[Any] = model.base.make_cache(model)
        return own
    from mlx_lm.models.cache import KVCache

    return [KVCache() for _ in model.layers]
