"""The small configs cover mlx-lm's models, and the default provider describes each as it is."""

from __future__ import annotations

import ast
import copy
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import mlx.core as mx
import mlx_lm.models
import pytest
from mlx_blockpool_plugins import default
from mlx_lm.models import cache as upstream
from mlx_lm.utils import _get_classes
from thorough import only

from architectures.configs import CONFIGS, NEEDS, QUICK, RUNNABLE, runs_here
from mlx_blockpool import plugins
from mlx_blockpool.errors import SpecError
from mlx_blockpool.spec import CompositeLayer, LayerSpec, StateLayer

ALWAYS = [name for name in QUICK if name in RUNNABLE]
STATES_ONLY = ("deepseek_v41", "mamba", "mamba2", "rwkv7")


def build(name: str) -> Any:
    config = copy.deepcopy(CONFIGS[name])  # mlx-lm's ModelArgs write into it
    model_class, args_class = _get_classes(config)
    model = model_class(args_class.from_dict(config))
    model.eval()
    return model


def run(model: Any, tokens: list[int]) -> list[Any]:
    """The caches that mlx-lm makes, after these tokens went through the model."""
    caches: list[Any] = upstream.make_prompt_cache(model)
    mx.eval(model(mx.array([tokens]), cache=caches))
    return caches


def names_of(path: Path) -> set[str]:
    """Classes that a module defines or imports by name."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    imported = {
        a.asname or a.name for node in body if isinstance(node, ast.ImportFrom) for a in node.names
    }
    return imported | {node.name for node in body if isinstance(node, ast.ClassDef)}


def seen(cache: Any) -> tuple[Any, ...]:
    """What a layer spec has to say of this cache: its kind, then what it holds."""
    kind = type(cache).__name__
    if kind == "CacheList":
        return "composite", *map(seen, cache.caches)
    if kind == "ArraysCache":
        return "state", *(
            (tuple(a.shape), str(a.dtype).removeprefix("mlx.core.")) for a in cache.cache
        )
    if kind == "LayerCache":
        # As many bytes as its adapter saves, and where it grows those that do not.
        return "state", ((1, ANY), "uint8")
    dims = (
        (0, 0, 0)
        if cache.keys is None
        else (cache.keys.shape[1], cache.keys.shape[3], cache.values.shape[3])
    )
    more: tuple[Any, ...] = ()
    own = {"RotatingKVCache": ("max_size", "keep"), "ChunkedKVCache": ("chunk_size",)}.get(kind, ())
    kinds = {"KVCache": "full", "RotatingKVCache": "window", "ChunkedKVCache": "chunk"}
    return kinds[kind], *dims, more, *(getattr(cache, name) for name in own)


def told(layer: LayerSpec) -> tuple[Any, ...]:
    """The same of a layer spec."""
    if isinstance(layer, CompositeLayer):
        return layer.kind, *map(told, layer.parts)
    if isinstance(layer, StateLayer):
        return layer.kind, *layer.arrays
    return layer.kind, *(of for name, of in vars(layer).items() if name != "names")


def test_the_table_has_every_model_type_of_mlx_lm() -> None:
    files = Path(mlx_lm.models.__path__[0]).glob("*.py")
    assert {p.stem for p in files if {"Model", "ModelArgs"} <= names_of(p)} == set(CONFIGS)


def test_a_config_is_of_the_type_that_it_is_listed_under() -> None:
    assert {name: config["model_type"] for name, config in CONFIGS.items()} == {
        name: name for name in CONFIGS
    }


@pytest.mark.parametrize("name", sorted(set(CONFIGS) - set(RUNNABLE)))
def test_what_does_not_run_here_needs_something_that_is_not_here(name: str) -> None:
    assert not runs_here(name)
    if NEEDS[name] == "hf_olmo":
        with pytest.raises(SystemExit):
            build(name)
    else:
        with pytest.raises(RuntimeError, match="No Metal back-end"):
            run(build(name), [3])


@pytest.mark.parametrize("name", only(RUNNABLE, *ALWAYS))
def test_the_spec_is_what_the_model_makes(name: str) -> None:
    spec = plugins.spec_from_config(CONFIGS[name], name)
    model = build(name)
    caches = run(model, [3, 5, 7])
    assert [told(layer) for layer in spec.layers] == [seen(cache) for cache in caches]
    assert plugins.check_spec(spec, model).layers == spec.layers


@pytest.mark.parametrize(
    "name", only([n for n in RUNNABLE if n not in STATES_ONLY], *(set(ALWAYS) - set(STATES_ONLY)))
)
def test_the_dtype_is_the_models_own(name: str) -> None:
    model = build(name)
    assert (
        plugins.spec_of_model(model, {**CONFIGS[name], "torch_dtype": "bfloat16"}, name).dtype
        == "float32"
    )


def test_a_cache_class_of_the_models_own_without_an_adapter_has_no_layer_kind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(default, "cache_adapters", list)
    with pytest.raises(SpecError, match="LayerCache"):
        plugins.spec_from_config(CONFIGS["deepseek_v41"], "deepseek_v41")
