"""The bundled provider on tiny and on published configs, and which plugin overrides another."""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pluggy
import pytest
from mlx_blockpool_plugins import default
from models import CONFIGS, make_model
from published import GEMMA_12B, GPT_OSS_20B, LLAMA_8B, QWEN_14B

from mlx_blockpool.config import KVBits
from mlx_blockpool.errors import PluginError, SpecError, UnknownModelTypeError
from mlx_blockpool.hooks import hookimpl
from mlx_blockpool.plugins import (
    check_spec,
    empty_plugin_manager,
    make_plugin_manager,
    model_classes,
    spec_from_config,
    spec_of_model,
    versions,
)
from mlx_blockpool.spec import CompositeLayer, FullLayer, ModelCacheSpec, WindowLayer

GEMMA_12B_TEXT = {
    "model_type": "gemma3_text",
    "head_dim": 256,
    "hidden_size": 3840,
    "intermediate_size": 15360,
    "num_attention_heads": 16,
    "num_hidden_layers": 48,
    "num_key_value_heads": 8,
    "query_pre_attn_scalar": 256,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
    "vocab_size": 262208,
}
GEMMA_4B = {
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
}
TINY_LLAMA = CONFIGS["llama"]
SLIDING = ["sliding_attention", "sliding_attention", "full_attention"]
SLIDING_LLAMA = {
    **TINY_LLAMA,
    "num_hidden_layers": 3,
    "layer_types": SLIDING,
    "sliding_window": 300,
}
GEMMA3_SIX = {"model_type": "gemma3_text", "num_hidden_layers": 6}

CASES = {
    "tiny llama": TINY_LLAMA,
    "llama without kv heads": {k: v for k, v in TINY_LLAMA.items() if k != "num_key_value_heads"},
    "llama with head_dim": {**TINY_LLAMA, "head_dim": 24},
    "llama with windows": SLIDING_LLAMA,
    "llama with a window that no layer uses": {**TINY_LLAMA, "sliding_window": 300},
    "llama in float16": {**TINY_LLAMA, "torch_dtype": "float16"},
    "llama with dtype": {
        **{k: v for k, v in TINY_LLAMA.items() if k != "torch_dtype"},
        "dtype": "float16",
    },
    "llama without dtype": {k: v for k, v in TINY_LLAMA.items() if k != "torch_dtype"},
    "tiny qwen2": CONFIGS["qwen2"],
    "qwen2 with a window": {**CONFIGS["qwen2"], "sliding_window": 64, "use_sliding_window": True},
    "tiny gemma3_text": CONFIGS["gemma3_text"],
    "gemma3_text with layer types": {
        **CONFIGS["gemma3_text"],
        "layer_types": ["full_attention"] * 4,
    },
    "tiny gemma3": {
        "model_type": "gemma3",
        "text_config": CONFIGS["gemma3_text"],
        "torch_dtype": "float32",
    },
    "gemma3 with dtype": {"model_type": "gemma3", "text_config": GEMMA3_SIX, "dtype": "float16"},
    "tiny gpt_oss": CONFIGS["gpt_oss"],
    "gpt_oss full first": {
        **CONFIGS["gpt_oss"],
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "Gemma 3 12B, text": GEMMA_12B_TEXT,
    "Gemma 3 12B": GEMMA_12B,
    "Gemma 3 4B": GEMMA_4B,
    "GPT-OSS 20B": GPT_OSS_20B,
    "GPT-OSS 20B without layer types": {k: v for k, v in GPT_OSS_20B.items() if k != "layer_types"},
    "Qwen 2.5 14B": QWEN_14B,
    "Llama 3.1 8B": LLAMA_8B,
}


class Fixed:
    """A plugin that describes every model alike."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    @hookimpl
    def model_cache_spec(self, config: dict[str, Any], model_id: str) -> Any:
        return self.answer


def manager_with(plugin: Any) -> pluggy.PluginManager:
    manager = make_plugin_manager()
    manager.register(plugin)
    return manager


def install(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    code: str,
    name: str = "mine",
    module: str = "fake_plugin",
) -> None:
    """An installed distribution whose entry point `name` is a module with this code."""
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[mlx_blockpool]\n{name} = {module}\n")
    (folder / f"{module}.py").write_text(code)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, module, raising=False)


OVERRIDE = """
from mlx_blockpool.hooks import hookimpl
from mlx_blockpool.spec import FullLayer, ModelCacheSpec

@hookimpl
def model_cache_spec(config, model_id):
    if config["model_type"] == "llama":
        return ModelCacheSpec(model_id, (FullLayer(7, 7, 7),))
"""


@pytest.mark.parametrize("config", [GEMMA_12B, GEMMA_12B_TEXT])
def test_gemma_12b_has_8_full_layers_and_40_windows_of_1024(config: dict[str, Any]) -> None:
    spec = spec_from_config(config, "gemma-3-12b")
    full, window = FullLayer(8, 256, 256), WindowLayer(8, 256, 256, 1024)
    assert spec.layers == ((window,) * 5 + (full,)) * 8
    assert spec.dtype == "bfloat16"


def test_gpt_oss_20b_slides_first() -> None:
    spec = spec_from_config(GPT_OSS_20B, "gpt-oss-20b")
    assert spec.layers == (WindowLayer(8, 64, 64, 128), FullLayer(8, 64, 64)) * 12


def test_qwen_14b_and_llama_8b_are_full_layers_only() -> None:
    assert spec_from_config(QWEN_14B, "m").layers == (FullLayer(8, 128, 128),) * 48
    assert spec_from_config(LLAMA_8B, "m").layers == (FullLayer(8, 128, 128),) * 32


@pytest.mark.parametrize("case", CASES)
def test_the_config_is_left_as_it_is(case: str) -> None:
    config = copy.deepcopy(CASES[case])
    spec_from_config(config, "m")
    default.model_cache_spec(model=None, config=config, model_id="m")
    assert config == CASES[case]


def test_a_model_is_described_by_its_trace() -> None:
    spec = spec_from_config(CONFIGS["gemma2"], "gemma")
    assert spec == ModelCacheSpec("gemma", (FullLayer(2, 16, 16),) * 2, "float32")


def test_a_plugin_registered_later_overrides_a_bundled_one() -> None:
    mine = ModelCacheSpec("mine", (FullLayer(7, 7, 7),))
    assert spec_from_config(TINY_LLAMA, "m", manager_with(Fixed(mine))) is mine


def test_a_plugin_that_returns_none_leaves_it_to_the_bundled_ones() -> None:
    assert spec_from_config(TINY_LLAMA, "m", manager_with(Fixed(None))) == spec_from_config(
        TINY_LLAMA, "m"
    )


def test_an_installed_plugin_overrides_a_bundled_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, OVERRIDE)
    assert spec_from_config(TINY_LLAMA, "m").layers == (FullLayer(7, 7, 7),)
    assert spec_from_config(CONFIGS["qwen2"], "m").layers == (FullLayer(2, 16, 16),) * 2


def test_an_installed_plugin_may_have_the_name_of_the_bundled_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, OVERRIDE, name="llama")
    assert spec_from_config(TINY_LLAMA, "m").layers == (FullLayer(7, 7, 7),)


def test_without_installed_plugins_metadata_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(pluggy.PluginManager, "load_setuptools_entrypoints")
    assert make_plugin_manager().list_plugin_distinfo() == []


def test_a_misspelt_hook_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(
        tmp_path, monkeypatch, OVERRIDE.replace("def model_cache_spec", "def model_cache_specs")
    )
    with pytest.raises(
        PluginError, match=r"entry-point group mlx_blockpool does not load: .*model_cache_specs"
    ):
        make_plugin_manager()


def test_a_hook_with_an_argument_that_does_not_exist_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, OVERRIDE.replace("(config, model_id)", "(config, name)"))
    with pytest.raises(PluginError, match="name"):
        make_plugin_manager()


def test_a_plugin_that_cannot_be_imported_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, "import a_module_that_is_not_there")
    with pytest.raises(PluginError, match=r"a_module_that_is_not_there.*Fix or uninstall it"):
        make_plugin_manager()


@pytest.mark.parametrize("nonsense", [{"layers": 3}, "full", 7])
def test_nonsense_from_a_plugin_is_a_plugin_error(nonsense: Any) -> None:
    with pytest.raises(
        PluginError, match=f"m: .* returned {type(nonsense).__name__} instead of a ModelCacheSpec"
    ):
        spec_from_config(TINY_LLAMA, "m", manager_with(Fixed(nonsense)))


def test_a_plugin_that_raises_is_a_plugin_error() -> None:
    class Raises:
        @hookimpl
        def model_cache_spec(self, config: dict[str, Any]) -> None:
            raise KeyError("hidden_dimension")

    with pytest.raises(PluginError, match="hidden_dimension"):
        spec_from_config(TINY_LLAMA, "m", manager_with(Raises()))


def test_nonsense_from_a_plugin_names_the_one_whose_answer_counts() -> None:
    manager = manager_with(Fixed("nonsense"))
    manager.register(Fixed(None))
    with pytest.raises(
        PluginError,
        match=r"m: provider \(.*test_plugins\.Fixed, .*test_plugins\.py\) returned str instead",
    ):
        spec_from_config(TINY_LLAMA, "m", manager)


@pytest.mark.parametrize(
    ("layers", "found"),
    [
        ((FullLayer(1, 2, 2), 7), "a spec with 7 for a layer"),
        ((CompositeLayer((FullLayer(1, 2, 2), None)),), "a spec with None for a layer"),  # type: ignore[arg-type]
        ([FullLayer(1, 2, 2)], "a spec whose layers are a list, not a tuple"),
        (
            (CompositeLayer(FullLayer(1, 2, 2)),),
            r"a spec with a composite layer whose parts are FullLayer\(.*\), not a tuple",
        ),  # type: ignore[arg-type]
        (
            (CompositeLayer(None),),
            "a spec with a composite layer whose parts are None, not a tuple",
        ),  # type: ignore[arg-type]
        (
            (CompositeLayer([FullLayer(1, 2, 2)]),),
            r"a spec with a composite layer whose parts are \[.*\], not a tuple",
        ),  # type: ignore[arg-type]
        (
            (CompositeLayer((CompositeLayer(7),)),),
            "a spec with a composite layer whose parts are 7, not a tuple",
        ),  # type: ignore[arg-type]
    ],
)
def test_a_spec_of_nonsense_is_a_plugin_error(layers: Any, found: str) -> None:
    with pytest.raises(PluginError, match=f"m: provider .*Fixed.* returned {found} instead"):
        spec_from_config(TINY_LLAMA, "m", manager_with(Fixed(ModelCacheSpec("m", layers))))


class NewWrapper:
    """A plugin that changes what the others say."""

    @hookimpl(wrapper=True)
    def model_cache_spec(
        self, config: dict[str, Any]
    ) -> Generator[None, ModelCacheSpec, ModelCacheSpec]:
        return replace((yield), batches=False)


class OldWrapper:
    """The same as pluggy had it first."""

    @hookimpl(hookwrapper=True)
    def model_cache_spec(self, config: dict[str, Any]) -> Generator[None, Any, None]:
        outcome = yield
        outcome.force_result(replace(outcome.get_result(), batches=False))


@pytest.mark.parametrize("wrapper", [NewWrapper(), OldWrapper()])
def test_a_hook_wrapper_changes_what_a_provider_says(wrapper: Any) -> None:
    spec = spec_from_config(TINY_LLAMA, "m")
    assert (
        spec_from_config(TINY_LLAMA, "m", manager_with(wrapper))
        == replace(spec, batches=False)
        != spec
    )


@pytest.mark.filterwarnings("ignore::pluggy.PluggyTeardownRaisedWarning")
@pytest.mark.parametrize("wrapper", [NewWrapper(), OldWrapper()])
def test_errors_name_the_provider_and_the_wrappers_around_it(wrapper: Any) -> None:
    manager = manager_with(Fixed(7))
    manager.register(wrapper)
    said = (
        r"m: provider \(.*test_plugins\.Fixed, .*\), wrapped by provider "
        rf"\(.*test_plugins\.{type(wrapper).__name__}, .*\) raised"
    )
    with pytest.raises(PluginError, match=said):
        spec_from_config(TINY_LLAMA, "m", manager)


def test_a_provider_leaves_the_bits_to_the_pool() -> None:
    spec = spec_from_config(TINY_LLAMA, "m")
    with pytest.raises(
        PluginError,
        match=r"returned a spec of quantised blocks \(leave out bits=: pools choose them\) instead",
    ):
        spec_from_config(TINY_LLAMA, "m", manager_with(Fixed(replace(spec, bits=KVBits()))))


def test_a_plugin_is_named_where_a_library_that_it_calls_has_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(
        tmp_path,
        monkeypatch,
        OVERRIDE.replace("    if config", "    import json; json.loads('{')\n    if config"),
    )
    said = (
        rf"m: plugin fake_plugin 1\.0 \(fake_plugin, {tmp_path}/fake_plugin\.py\) raised "
        r"JSONDecodeError"
    )
    with pytest.raises(PluginError, match=said):
        spec_from_config(TINY_LLAMA, "m")


def test_a_spec_error_of_an_installed_plugin_names_it_and_a_bundled_one_is_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SpecError, match=r"^m: the config has no model_type\.$"):
        spec_from_config({}, "m")
    install(
        tmp_path,
        monkeypatch,
        OVERRIDE.replace("FullLayer(7, 7, 7),)", "FullLayer(7, 7, 7),), 'int4'"),
    )
    with pytest.raises(
        SpecError,
        match=r"m: dtype must be one of .* \(got 'int4'\)\. Raised by plugin fake_plugin 1\.0 "
        r"\(fake_plugin, ",
    ):
        spec_from_config(TINY_LLAMA, "m")


def test_a_model_that_nobody_says_anything_of_is_a_spec_error() -> None:
    with pytest.raises(SpecError, match="m: no provider describes this model"):
        spec_from_config(TINY_LLAMA, "m", empty_plugin_manager())


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("def f(:", "SyntaxError"),
        ("raise SystemExit('no licence')", "SystemExit"),
        ("raise BaseException('panic')", "BaseException"),
    ],
)
def test_a_plugin_that_raises_while_it_loads_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, error: str
) -> None:
    install(tmp_path, monkeypatch, code)
    said = (
        r"fake_plugin 1\.0: entry point mine = fake_plugin in group mlx_blockpool does not load: "
        rf"{error}: .*Fix or uninstall it"
    )
    with pytest.raises(PluginError, match=said):
        make_plugin_manager()


def test_a_config_without_model_type_is_a_spec_error() -> None:
    with pytest.raises(SpecError, match="m: the config has no model_type"):
        spec_from_config({}, "m")


def test_a_model_type_that_nobody_knows_is_a_spec_error() -> None:
    with pytest.raises(SpecError, match="unheard_of"):
        spec_from_config({"model_type": "unheard_of"}, "m")


@pytest.mark.parametrize("name", CONFIGS)
def test_check_spec_accepts_what_the_model_does_and_returns_its_dtype(name: str) -> None:
    model = make_model(name)
    spec = spec_from_config(CONFIGS[name], "m")
    assert check_spec(spec, model) == spec
    assert check_spec(spec.with_dtype("float16"), model).dtype == "float32"
    assert (
        spec_of_model(model, {**CONFIGS[name], "torch_dtype": "bfloat16"}, "m").dtype == "float32"
    )


@pytest.mark.parametrize(
    "different",
    [FullLayer(2, 16, 16), WindowLayer(2, 16, 16, 256), WindowLayer(2, 16, 16, 300, keep=4)],
)
def test_check_spec_names_the_layer_that_differs(different: FullLayer) -> None:
    model = make_model("gemma3_text")
    spec = spec_from_config(CONFIGS["gemma3_text"], "m")
    wrong = replace(spec, layers=(*spec.layers[:2], different, *spec.layers[3:]))
    with pytest.raises(
        PluginError, match=r"m, layer 2: the spec says .*; the model makes .*max_size=300, keep=0"
    ) as info:
        check_spec(wrong, model)
    assert repr(different) in str(info.value)


def test_check_spec_counts_the_layers() -> None:
    spec = spec_from_config(TINY_LLAMA, "m")
    with pytest.raises(PluginError, match="m: the spec has 3 layers and the model makes 2 caches"):
        check_spec(replace(spec, layers=(*spec.layers, spec.layers[0])), make_model("llama"))


def test_the_spec_of_a_plugin_is_taken_as_it_is_with_the_dtype_of_the_model() -> None:
    mine = ModelCacheSpec("m", (FullLayer(2, 16, 16), FullLayer(2, 16, 8)), "float16")
    found = spec_of_model(make_model("llama"), TINY_LLAMA, "m", manager_with(Fixed(mine)))
    assert found == mine.with_dtype("float32")
    assert found.source is not None
    assert "test_plugins.Fixed" in found.source


@pytest.mark.parametrize("wrapper", [NewWrapper(), OldWrapper()])
def test_the_source_of_a_spec_names_the_wrappers_of_plugins(wrapper: Any) -> None:
    found = spec_of_model(make_model("llama"), TINY_LLAMA, "m", manager_with(wrapper))
    assert found.source is not None
    assert f"test_plugins.{type(wrapper).__name__}, " in found.source.partition("wrapped by")[2]


def test_what_the_bundled_provider_says_has_no_source() -> None:
    manager = manager_with(Fixed(None))
    assert spec_of_model(make_model("llama"), TINY_LLAMA, "m", manager).source is None


def test_a_cache_class_without_layer_kind_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = importlib.import_module("mlx_lm.models.cache")

    class OddCache(cache.KVCache):  # type: ignore[misc, name-defined]
        pass

    model = make_model("llama")
    monkeypatch.setattr(
        type(model), "make_cache", lambda self: [OddCache(), OddCache()], raising=False
    )
    with pytest.raises(SpecError, match=r"no layer kind has the cache class .*OddCache"):
        default.trace(model, "m")


CLASSES = """
from mlx_lm.models import llama
from mlx_blockpool.hooks import hookimpl

class Model(llama.Model):
    pass

@hookimpl
def model_classes(config):
    if config.get("model_type") == "sketch":
        return Model, llama.ModelArgs
"""


class Classes:
    """A plugin that returns the same classes for every model, or raises."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    @hookimpl
    def model_classes(self, config: dict[str, Any]) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def test_a_plugin_brings_the_classes_of_a_type_that_mlx_lm_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {**CONFIGS["llama"], "model_type": "sketch"}
    with pytest.raises(
        UnknownModelTypeError, match=r"m: neither mlx-lm .* has model_type 'sketch'"
    ):
        spec_from_config(config, "m")
    install(tmp_path, monkeypatch, CLASSES)
    assert model_classes(config)[0].__module__ == "fake_plugin"
    assert spec_from_config(config, "m").layers == (FullLayer(2, 16, 16),) * 2
    # Other models are mlx-lm's.
    assert model_classes(dict(CONFIGS["qwen2"]))[0].__module__ == "mlx_lm.models.qwen2"


def test_the_classes_of_a_plugin_replace_those_of_mlx_lm() -> None:
    mine = (type("Model", (), {}), type("ModelArgs", (), {}))
    assert model_classes(dict(CONFIGS["llama"]), manager_with(Classes(mine))) == mine


@pytest.mark.parametrize("answer", [7, (int,), (int, 7), [int, str], KeyError("heads")])
def test_a_plugin_without_a_pair_of_classes_is_a_plugin_error(answer: Any) -> None:
    with pytest.raises(PluginError, match=r"test_plugins\.Classes, .*(returned|raised KeyError)"):
        model_classes(dict(CONFIGS["llama"]), manager_with(Classes(answer)))


def test_a_plugin_says_why_it_cannot_serve_a_type() -> None:
    refusing = Classes(UnknownModelTypeError("sketch needs images"))
    with pytest.raises(SpecError, match=r"sketch needs images\. Raised by provider"):
        model_classes({"model_type": "sketch"}, manager_with(refusing))


@pytest.mark.parametrize(
    "model_type", [None, 7, ["llama"], "cache", "base", "perpetuum", "a" + ".a" * 5000]
)
def test_a_type_without_classes_is_said(model_type: Any) -> None:
    with pytest.raises(UnknownModelTypeError) as info:
        model_classes({"model_type": model_type, "model_file": "own.py"})
    assert f"has model_type {model_type!r}. Correct it, or install a plugin" in str(info.value)
    assert "names 'own.py' as the code of the model, which runs only with --trust" in str(
        info.value
    )


@pytest.mark.parametrize(
    ("returned", "adapters"),
    [
        ("return [AttentionAdapter('mine', callable, print)]", ["adapter mine"]),
        ("raise KeyError('heads')", []),
        ("raise SystemExit('no licence')", []),
    ],
)
def test_versions_are_of_installed_plugins_and_their_adapters(
    returned: str, adapters: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert versions() == []
    code = f"""
from mlx_blockpool.hooks import AttentionAdapter, hookimpl

@hookimpl
def attention_adapters():
    {returned}
"""
    install(tmp_path, monkeypatch, code)
    assert versions() == ["fake_plugin 1.0", *adapters]
