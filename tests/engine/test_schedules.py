"""Random schedules of requests: whatever arrives, waits, is swapped out or hangs up, replies are
those of single sequences.
"""

from __future__ import annotations

from typing import Any

import pytest
from engine.engines import assert_nothing_held
from engine.schedules import CROWD, CROWDS, IN_FORMS, SCHEDULES, Arrival, Schedule, arrivals
from hypothesis import given
from thorough import only, tried

from mlx_blockpool.engine import caches as caches_module

PLAIN = ["llama", "gemma3_text", "gpt_oss", "qwen2", "lfm2", "qwen3_5"]
QUANTISED = [f"{name} K8V8" for name in PLAIN[:5]] + [
    "gemma3_text K4V4",
    "gpt_oss K8V4",
    "llama K16V8",
]

# Types whose attention is not a plain call of mlx-lm's function, or reads another layer's keys.
# plamo3 and phi3small depend in mlx-lm itself on where a prompt is cut.
OTHERS = [
    *("gemma2", "gemma3n", "gemma4", "gemma4_text", "iquestloopcoder", "minimax_m3_vl", "plamo"),
    *("deepseek_v3", "glm4_moe_lite", "kimi_k25", "kimi_vl", "longcat_flash", "mistral4"),
    *("deepseek_v32", "glm_moe_dsa", "phi", "phixtral", "stablelm", "afm7", "gpt_bigcode"),
    *("bailing_hybrid", "bailing_moe_v3", "kimi_k3", "kimi_linear", "longcat_flash_ngram"),
    "plamo2",
]
QUICK = ("gemma2", "gemma4", "deepseek_v32", "kimi_linear")


def run(name: str, *schedule_of: Any, promised: int, **more: Any) -> None:
    schedule = Schedule(name, *schedule_of, **more)
    with pytest.MonkeyPatch.context() as patch:
        # The room that a request finds at its start; with little of it, short replies are swapped
        # out too.
        patch.setattr(caches_module, "BLOCK_TOKENS", promised)
        engine, prefix, told = schedule.run()
    schedule.check(told)
    engine.close()
    assert_nothing_held(prefix)


@pytest.mark.parametrize("name", only(PLAIN, "gemma3_text", "lfm2"))
@tried(3, 300)
@given(**SCHEDULES)
def test_replies_of_a_schedule_are_those_of_single_stock_sequences(
    name: str, requests: list[Arrival], **more: Any
) -> None:
    run(name, requests, **more)


@pytest.mark.parametrize("name", only(OTHERS, *QUICK))
@tried(1, 100)
@given(**SCHEDULES)
def test_replies_of_a_schedule_with_attention_of_any_kind_are_too(
    name: str, requests: list[Arrival], **more: Any
) -> None:
    run(name, requests, **more)


@pytest.mark.parametrize("name", only([f"{name} K8V8" for name in OTHERS], "gemma2 K8V8"))
@tried(1, 40)
@given(**SCHEDULES)
def test_replies_of_a_schedule_over_quantised_blocks_of_any_kind_are_too(
    name: str, requests: list[Arrival], **more: Any
) -> None:
    run(name, requests, **more)


@pytest.mark.parametrize("name", only(QUANTISED, "gemma3_text K8V8"))
@tried(2, 120)
@given(**SCHEDULES)
def test_replies_of_a_schedule_over_quantised_blocks_are_too(
    name: str, requests: list[Arrival], **more: Any
) -> None:
    run(name, requests, **more)


@pytest.mark.parametrize("name", only(PLAIN, "gpt_oss", "lfm2"))
@tried(2, 150)
@given(**CROWDS)
def test_replies_of_a_crowd_that_is_swapped_out_are_those_of_single_stock_sequences(
    name: str, requests: list[Arrival], **more: Any
) -> None:
    run(name, requests, **more)


@pytest.mark.parametrize("name", only(QUANTISED, "gemma3_text K8V8"))
@tried(2, 60)
@given(**CROWDS)
def test_replies_of_a_swapped_out_crowd_over_quantised_blocks_are_too(
    name: str, requests: list[Arrival], **more: Any
) -> None:
    run(name, requests, **more)


@pytest.mark.parametrize(
    "name", only(["llama", "gemma3_text", "qwen2", "lfm2", "gemma3_text K8V8"])
)
@tried(3, 120)
@given(**{**SCHEDULES, "requests": arrivals(**IN_FORMS)})
def test_replies_of_a_schedule_with_forms_are_those_of_single_stock_sequences(
    name: str, requests: list[Arrival], **more: Any
) -> None:
    run(name, requests, **more)


@pytest.mark.parametrize(
    "name", only(["llama", "gemma3_text", "qwen2", "lfm2", "gemma3_text K8V8"])
)
@tried(3, 60)
@given(**{**CROWDS, "requests": arrivals(**{**CROWD, **IN_FORMS})})
def test_replies_of_a_swapped_out_crowd_with_forms_are_too(
    name: str, requests: list[Arrival], **more: Any
) -> None:
    run(name, requests, **more)
