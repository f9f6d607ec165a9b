"""What the kit takes, and what it says."""

from __future__ import annotations

import copy
import re
from typing import Any

import mlx.core as mx
import pluggy
import pytest
from architectures.configs import CONFIGS
from mlx.utils import tree_flatten, tree_map
from testing.saboteurs import Provider, Unmarked

import mlx_blockpool.testing as kit
from mlx_blockpool.errors import SpecError
from mlx_blockpool.hooks import hookimpl
from mlx_blockpool.kv.proof import distance
from mlx_blockpool.spec import FullLayer, ModelCacheSpec
from mlx_blockpool.testing import (
    CHECKS,
    ConformanceError,
    NotCheckedError,
    Subject,
    conformance,
    run_check,
    tiny_model,
)

LLAMA = CONFIGS["llama"]
FLAT = {**LLAMA, "layer_types": None}


class Misspelt:
    @hookimpl
    def model_cache_specs(self, config: dict[str, Any]) -> None:
        """No hook is called so."""


class OtherArguments:
    @hookimpl
    def model_cache_spec(self, name: str) -> None:
        """The hook has no such argument."""


class WithWeightsOnly(Provider):
    @hookimpl
    def model_cache_spec(self, model: Any, config: dict[str, Any], model_id: str) -> Any:
        if model is None and config.get("model_type") == self.model_type:
            raise SpecError("the shapes are in the weights")
        return super().model_cache_spec(model, config, model_id)


def test_every_public_name_can_be_imported() -> None:
    assert dir(kit) == kit.__all__ == sorted(kit.__all__)
    assert [getattr(kit, name) for name in kit.__all__]
    with pytest.raises(AttributeError, match="has no attribute 'conformence'"):
        _ = kit.conformence


def test_results_come_in_order_and_say_what_was_looked_at() -> None:
    results = list(conformance(CONFIGS["mamba2"]))
    assert [result.check for result in results] == list(CHECKS)
    assert {result.outcome for result in results} == {"passed", "not checked"}
    said = {result.check: str(result) for result in results}
    assert said["spec"] == "spec: passed. 2 state"
    assert said["wrap"] == "wrap: not checked. No layer has a window or a chunk."
    assert said["logits"].startswith(
        "logits: passed. 277 tokens cut at 1, 2, 255, 256, 257, 6 steps; "
    )
    assert (
        said["batch"]
        == "batch: passed. several sequences in one step, whose blocks are read in place"
    )


@pytest.mark.parametrize("given", ["config", "model"])
def test_a_model_comes_as_config_or_model(given: str) -> None:
    subject = Subject(LLAMA if given == "config" else tiny_model(LLAMA))
    assert subject.config["model_type"] == "llama"
    assert subject.sizes == [32]
    assert run_check("spec", subject) == "3 window, 1 full"


@pytest.mark.parametrize(
    ("provider", "found"),
    [(Misspelt(), "unknown hook 'model_cache_specs'"), (OtherArguments(), "'name'")],
)
def test_a_hook_that_there_is_not_is_said(provider: Any, found: str) -> None:
    with pytest.raises(pluggy.PluginValidationError, match=found):
        next(conformance(LLAMA, provider))


def test_a_provider_without_a_hook_is_said() -> None:
    with pytest.raises(ConformanceError, match=r"no hook in .*Mark it with mlx_blockpool.hookimpl"):
        Subject(LLAMA, Unmarked())


@pytest.mark.parametrize("provider", [Unmarked, 7, [], "mine"])
def test_what_is_no_provider_is_said(provider: Any) -> None:
    with pytest.raises(ConformanceError, match=r"no hook in .*Mark it with mlx_blockpool.hookimpl"):
        next(conformance(LLAMA, provider))


@pytest.mark.parametrize("model", [None, 7, "llama", []])
def test_what_is_no_model_is_said(model: Any) -> None:
    with pytest.raises(
        ConformanceError,
        match=r"for a model; expected a loaded mlx-lm model, or the config\.json of one as a dict",
    ):
        next(conformance(model))


@pytest.mark.parametrize("model_type", ["mamba3", "cache", None])
def test_a_model_type_that_mlx_lm_lacks_is_said(model_type: str | None) -> None:
    for config in (
        {**LLAMA, "model_type": model_type},
        {} if model_type is None else {"model_type": model_type},
    ):
        with pytest.raises(
            ConformanceError,
            match=f"model_type {model_type!r}; expected a type that mlx-lm .* or a plugin has.",
        ):
            next(conformance(config))


def test_a_model_that_is_not_tiny_is_refused_before_it_has_weights() -> None:
    with pytest.raises(
        ConformanceError, match="parameters; expected a tiny one, at most 50,000,000"
    ):
        tiny_model({**LLAMA, "hidden_size": 65_536})


def test_a_config_is_left_as_it_is() -> None:
    config = copy.deepcopy(LLAMA)
    assert Subject(config).config == LLAMA
    assert config == LLAMA


def test_models_run_in_float32_whatever_they_are_published_in() -> None:
    config = {**CONFIGS["jamba"], "torch_dtype": "bfloat16"}
    subject = Subject(config)
    assert {value.dtype for _, value in tree_flatten(subject.model.parameters())} == {mx.float32}
    assert (subject.spec.dtype, config["torch_dtype"]) == ("float32", "bfloat16")
    assert run_check("config", subject) == "the same spec without the model"
    model = tiny_model(CONFIGS["jamba"])
    model.set_dtype(mx.bfloat16)
    assert run_check("spec", Subject(model)) == "2 state, 2 full"


def test_weights_are_the_same_every_time() -> None:
    first, second = (dict(tree_flatten(tiny_model(LLAMA).parameters())) for _ in range(2))
    assert all(mx.array_equal(first[name], second[name]) for name in first)


def test_weights_under_which_nothing_shows_are_refused() -> None:
    model = tiny_model(LLAMA)
    model.update(tree_map(mx.zeros_like, model.parameters()))
    with pytest.raises(
        ConformanceError, match="logits that do not depend on the token before the last"
    ):
        run_check("logits", Subject(model))


def test_windows_that_are_too_long_are_not_gone_beyond() -> None:
    with pytest.raises(
        NotCheckedError, match=r"Windows and chunks of \[2000\] tokens; at most 1100"
    ):
        run_check("wrap", Subject({**LLAMA, "sliding_window": 2000}))


def test_longer_windows_beside_short_ones_are_said() -> None:
    subject = Subject(LLAMA)
    subject.sizes = [32, 5000]
    assert (
        run_check("wrap", subject)
        == "beyond 32 tokens; exact; not beyond [5000], which are longer than 1100"
    )


def test_a_provider_may_need_weights() -> None:
    text = run_check("config", Subject(FLAT, WithWeightsOnly("llama")))
    said = (
        r"the model cannot be described without weights: the shapes are in the weights. Raised by "
        r"provider .*WithWeightsOnly"
    )
    assert re.match(said, text)


def test_all_plugins_are_asked_where_no_provider_is_given() -> None:
    subject = Subject(FLAT)
    mine = ModelCacheSpec("mine", (FullLayer(7, 7, 7),))
    subject.manager.register(Provider("llama", lambda _: mine))
    assert subject.spec is mine


def test_check_names_are_those_of_the_class() -> None:
    from mlx_blockpool.testing import Conformance

    assert [name for name in vars(Conformance) if name.startswith("test_")] == [
        f"test_{check}" for check in CHECKS
    ]


@pytest.mark.parametrize(
    ("found", "gap"),
    [
        ([1.0, 2.0, float("-inf")], 0.0),
        ([1.0, 2.5, float("-inf")], 0.25),
        ([1.0, 2.0, 3.0], float("inf")),
        ([1.0, float("nan"), float("-inf")], float("inf")),
        ([1.0, 2.0], float("inf")),
    ],
)
def test_distance_is_in_parts_of_the_largest_finite_logit(found: list[float], gap: float) -> None:
    assert distance([mx.array([1.0, 2.0, float("-inf")])], [mx.array(found)]) == [gap]


def test_what_stock_computes_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    subject, made = Subject(LLAMA), []
    stock = subject.stock
    monkeypatch.setattr(subject, "stock", lambda *bits: made.append(bits) or stock(*bits))
    run_check("warm", subject)
    assert made
    made.clear()
    run_check("warm", subject)
    assert made == []
