"""What is wrong fails: every wrong provider and every broken cache, in the check that is named
after it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from architectures.configs import CONFIGS
from architectures.configs_common import wide
from architectures.side_by_side import BITS, side_by_side
from testing import saboteurs as wrong
from thorough import only

from mlx_blockpool.config import KVBits
from mlx_blockpool.errors import ReleasedCacheError, SpecError
from mlx_blockpool.testing import CHECKS, ConformanceError, Subject, conformance, run_check
from mlx_blockpool.testing.kit import result_of

ModelSwap = Callable[[Any], Any]

SPECS: dict[str, tuple[str, ModelSwap, str]] = {
    "wrong heads": (
        "llama",
        wrong.layers_with(wrong.wrong_heads),
        r"layer 0: the spec says .*kv_heads=3.*makes .*kv_heads=2",
    ),
    "wrong kind": (
        "gemma3_text",
        wrong.layers_with(wrong.wrong_kind),
        r"spec says FullLayer.*; the model makes WindowLayer",
    ),
    "window one too small": (
        "gpt_oss",
        wrong.layers_with(wrong.one_too_small),
        r"max_size=31.*max_size=32",
    ),
    "state forgotten": (
        "qwen3_next",
        wrong.layers_with(wrong.without_state),
        r"says FullLayer.*; the model makes StateLayer",
    ),
    "layers swapped": (
        "jamba",
        wrong.swapped,
        r"layer 0: the spec says FullLayer.*; the model makes StateLayer",
    ),
    "a layer too few": (
        "deepseek_v3",
        wrong.one_less,
        r"the spec has 2 layers and the model makes 3 caches",
    ),
    "parts of a composite swapped": (
        "falcon_h1",
        wrong.layers_with(lambda layer: type(layer)(layer.parts[::-1])),  # type: ignore[union-attr, call-arg]
        r"layer 0: the spec says CompositeLayer\(parts=\(FullLayer",
    ),
}

PROVIDERS: dict[str, tuple[str, Any, str]] = {
    "returns None": (
        "provider",
        wrong.Provider("gemma"),
        "Got None for a model of type 'llama'; expected a ModelCacheSpec",
    ),
    "returns nonsense": (
        "provider",
        wrong.Provider("llama", lambda spec: {"layers": 4}),
        r"provider .*saboteurs.* returned dict instead",
    ),
    "has nonsense in its spec": (
        "provider",
        wrong.Provider("llama", wrong.layers_with(lambda _: 7)),  # type: ignore[arg-type, return-value]
        "returned a spec with 7 for a layer",
    ),
    "raises": (
        "provider",
        wrong.Raising("llama"),
        r"saboteurs\.Raising, .*saboteurs\.py\).* raised KeyError: 'a_key_of_its_own'",
    ),
    "writes into the config": (
        "provider",
        wrong.Scribbling("llama"),
        "a config with other head_dim_of_mine afterwards",
    ),
    "claims every model": (
        "others",
        wrong.Claiming("llama"),
        "Got a spec for config {}; expected None",
    ),
    "raises for others": (
        "others",
        wrong.RaisingForOthers("llama"),
        "with config {}: .*KeyError: 'num_hidden_layers'",
    ),
    "says something else without the model": (
        "config",
        wrong.WithoutModel("llama", wrong.layers_with(wrong.wrong_heads)),
        r"kv_heads=3.* in layer 0 without the model; expected .*kv_heads=2",
    ),
    "has fewer layers without the model": (
        "config",
        wrong.WithoutModel("llama", wrong.one_less),
        "3 layers without the model",
    ),
    "raises without the model": (
        "config",
        wrong.WithoutModel("llama", wrong.explode),
        "with model=None: .*KeyError: 'weights'",
    ),
}

BROKEN: dict[str, tuple[str, Callable[[Any], None], str, str]] = {
    "a cache that forgets a token": (
        "deepseek_v3",
        wrong.forgets_a_token,
        "logits",
        r"prompt in two parts, cut at \d+: logits",
    ),
    "a ring that wraps late": (
        "gpt_oss",
        wrong.wraps_a_token_late,
        "wrap",
        "beyond 32 tokens one by one: logits after token",
    ),
    "states that are not resumed": (
        "mamba2",
        wrong.forgets_states,
        "warm",
        "resumed at 270: logits after token 271",
    ),
    "checkpoints that are not kept": (
        "lfm2",
        wrong.resumes_without_checkpoint,
        "warm",
        "resumed at 0; expected 270",
    ),
    "keys that are not there": (
        "qwen2",
        wrong.resumes_a_token_late,
        "warm",
        "resumed at 280: logits after token 281",
    ),
    "records of other bits": (
        "falcon_h1",
        wrong.writes_other_bits,
        "restart",
        "resumed at 300: logits after token",
    ),
}
TOGETHER: dict[str, tuple[str, Callable[[Any], None], str, KVBits | None]] = {
    "a batch that lets another go": ("nemotron-nas", wrong.takes_another_out, "release", None),
    "a batch that mixes states": (
        "lfm2",
        wrong.mixes_states,
        "logprobs of step .* in a batch",
        None,
    ),
    "words without their biases": (
        "qwen3",
        wrong.loses_biases,
        "logprobs of step .* in a batch",
        BITS,
    ),
}


@pytest.mark.parametrize("name", SPECS)
def test_a_wrong_spec_fails_the_check_spec_and_nothing_else_is_run(name: str) -> None:
    model_type, change, message = SPECS[name]
    results = {
        r.check: r for r in conformance(CONFIGS[model_type], wrong.Provider(model_type, change))
    }
    assert [check for check, result in results.items() if result.outcome == "FAILED"] == ["spec"]
    with pytest.raises(ConformanceError, match=message):
        raise ConformanceError(results["spec"].text, "", "")
    assert {results[check].outcome for check in ("logits", "warm", "batch", "restart")} == {
        "not checked"
    }
    assert "Needs a correct spec first" in results["warm"].text


@pytest.mark.parametrize(
    ("name", "check"),
    [("window one too small", "wrap"), ("state forgotten", "logits"), ("wrong heads", "batch")],
)
def test_a_wrong_spec_is_also_seen_in_what_the_model_says(name: str, check: str) -> None:
    model_type, change, _ = SPECS[name]
    subject = Subject(CONFIGS[model_type], wrong.Provider(model_type, change))
    with pytest.raises((ConformanceError, SpecError, TypeError)):
        CHECKS[check](subject)


@pytest.mark.parametrize("name", PROVIDERS)
def test_a_wrong_provider_fails_the_check_that_says_so(name: str) -> None:
    check, provider, message = PROVIDERS[name]
    with pytest.raises(ConformanceError, match=message):
        run_check(check, Subject(CONFIGS["llama"], provider))


@pytest.mark.parametrize(
    "name",
    only(
        BROKEN, "keys that are not there", "checkpoints that are not kept", "a ring that wraps late"
    ),
)
def test_a_broken_cache_fails_the_check_that_says_so(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_type, sabotage, check, message = BROKEN[name]
    subject = Subject(CONFIGS[model_type])
    assert result_of(check, subject).outcome == "passed"
    sabotage(monkeypatch)
    with pytest.raises(ConformanceError, match=message):
        run_check(check, subject)


@pytest.mark.parametrize(
    "name", only(TOGETHER, *(name for name in TOGETHER if TOGETHER[name][3] is None))
)
def test_a_broken_batch_is_seen_where_sequences_decode_together(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_type, sabotage, message, bits = TOGETHER[name]
    subject = Subject(wide(CONFIGS[model_type]) if bits else CONFIGS[model_type])
    side_by_side(subject, bits)
    sabotage(monkeypatch)
    with pytest.raises((ConformanceError, ReleasedCacheError), match=message):
        side_by_side(subject, bits)
