"""Random schedules whose decode steps run on the emulated kernel: replies are stock's, and those
without drafts.
"""

from __future__ import annotations

from typing import Any

import pytest
from engine.engines import assert_nothing_held
from engine.schedules import CROWDS, SCHEDULES, Arrival, Schedule, arrivals
from engine.test_draft_schedules import (
    DRAFTED,
    PARTS,
    Drafted,
    Plain,
    compare,
    without_broken_forms,
)
from hypothesis import given
from hypothesis import strategies as st
from kernel.emulation import why_not
from kernel.trusted import trust
from thorough import tried

from mlx_blockpool.engine import caches as caches_module
from mlx_blockpool.engine.engine import BlockPoolBatchEngine
from mlx_blockpool.tier.cache import TieredPrefixCache

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

PLAIN = ["llama", "gemma3_text", "gpt_oss", "qwen2", "lfm2"]
NAMES = [*PLAIN, "llama K8V8", "gemma3_text K4V4", "gpt_oss K8V4", "llama K16V8"]


class OnKernel(Schedule):
    """All steps of batches take the kernel."""

    def open(self, config: dict[str, Any]) -> tuple[BlockPoolBatchEngine, TieredPrefixCache]:
        engine, prefix = super().open(config)
        trust(prefix.arena)
        return engine, prefix

    def check_step(self) -> None:
        super().check_step()
        assert self.prefix.arena.decode.path_counts.keys() <= {"kernel", "kernel_rows"}


class DraftedOnKernel(OnKernel, Drafted):
    """With drafts too; no slab moves."""


def run(name: str, requests: list[Arrival], promised: int, **more: Any) -> None:
    schedule = OnKernel(name, requests, **more)
    with pytest.MonkeyPatch.context() as patch:
        # The room that a request finds at its start; with little of it, short replies are swapped
        # out too.
        patch.setattr(caches_module, "BLOCK_TOKENS", promised)
        engine, prefix, told = schedule.run()
    schedule.check(told)
    engine.close()
    assert_nothing_held(prefix)


@tried(2, 240)
@given(name=st.sampled_from(NAMES), **SCHEDULES)
def test_replies_of_a_schedule_on_the_kernel_are_those_of_single_stock_sequences(
    name: str, requests: list[Arrival], **more: Any
) -> None:
    run(name, requests, **more)


@tried(2, 80)
@given(name=st.sampled_from(NAMES), **CROWDS)
def test_replies_of_a_swapped_out_crowd_on_the_kernel_are_too(
    name: str, requests: list[Arrival], **more: Any
) -> None:
    run(name, requests, **more)


@tried(2, 100)
@given(
    name=st.sampled_from(PLAIN),
    **{**SCHEDULES, **DRAFTED, "requests": arrivals(**{**PARTS, "schema": st.none()})},
)
def test_replies_with_drafts_on_the_kernel_are_those_without_both(
    name: str, requests: list[Arrival], promised: int, sources: list[str], seed: int, **more: Any
) -> None:
    rest = more["more_blocks"], more["config"], more["swaps"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(caches_module, "BLOCK_TOKENS", promised)
        requests = without_broken_forms(requests)
        plain = Plain(name, requests, *rest)
        _, _, replies = plain.run()
        drafted = DraftedOnKernel(
            name, requests, *rest, replies=replies, sources=sources, seed=seed
        )
        engine, prefix, told = drafted.run()
    for number in [number for numbers in drafted.numbers.values() for number in numbers]:
        compare(number, replies, told, plain.certain(number, replies), number in drafted.cancelled)
    engine.close()
    assert_nothing_held(prefix)
