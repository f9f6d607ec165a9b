"""Random schedules on several ranks: after every step their block tables and evictions are
equal, replies those of one rank.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from engine.engines import Told, assert_nothing_held
from engine.ranked_engines import Plan, make_rank, run_ranked
from engine.schedules import CROWD, CROWDS, IN_FORMS, SCHEDULES, Arrival, Schedule, arrivals
from hypothesis import given
from hypothesis import strategies as st
from thorough import only, tried

from mlx_blockpool.config import EngineConfig
from mlx_blockpool.engine import caches as caches_module
from mlx_blockpool.engine.sequence import Sequence
from mlx_blockpool.ranks.driver import GroupDriver

NAMES = ["llama", "gemma3_text", "lfm2", "gpt_oss"]


class RankedSchedule(Schedule, Plan):
    """A schedule whose steps are turns: exchanges, each with one step or several."""

    def open(self, config: dict[str, Any]) -> Any:
        self.config = EngineConfig(**{"prefill_tokens": 128, **config})
        return None, None

    def come(self, driver: GroupDriver, turn: int) -> bool:
        self.engine, self.driver, self.step = driver.engine, driver, turn
        self.come_and_go()
        return len(self.numbers) < len(self.requests)

    def take(self, told: Told, events: list[Any]) -> None:
        told.take(
            [
                replace(event, uid=self.by_uid[event.uid])
                for event in events
                if self.by_uid[event.uid] not in self.cancelled
            ]
        )
        self.check_turns()

    def resume(self, driver: GroupDriver, suspended: list[Sequence]) -> None:
        numbers = [self.by_uid[sequence.uid] for sequence in suspended]
        self.by_uid = dict(zip(map(driver.resume, suspended), numbers, strict=True))


def run(size: int, name: str, *schedule_of: Any, promised: int, **more: Any) -> None:
    schedule = RankedSchedule(name, *schedule_of, **more)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(caches_module, "BLOCK_TOKENS", promised)
        found = run_ranked(
            size, schedule, lambda ranks: make_rank(ranks, name, schedule.n_bytes, schedule.config)
        )
    schedule.check(found[0].told)
    for rank in found:
        rank.engine.close()
        assert_nothing_held(rank.prefix)


SIZES = st.sampled_from([2, 2, 3])
# The pins end within a schedule, and samplers are on rank 0 alone.
MORE: dict[str, Any] = {
    "pinned": st.sampled_from([None, 0.05, 0.5, 60.0]),
    "breaks": st.sampled_from([None, None, None, 0, 2, 7]),
}


@pytest.mark.parametrize("name", only(NAMES, "gemma3_text"))
@tried(1, 5)
@given(size=SIZES, **{**SCHEDULES, "requests": arrivals(**MORE)})
def test_ranks_stay_alike_in_a_schedule(
    size: int, name: str, requests: list[Arrival], **more: Any
) -> None:
    run(size, name, requests, **more)


@pytest.mark.parametrize("name", only(NAMES))
@tried(1, 5)
@given(size=SIZES, **{**CROWDS, "requests": arrivals(**{**CROWD, **MORE})})
def test_ranks_stay_alike_in_a_crowd_that_is_swapped_out(
    size: int, name: str, requests: list[Arrival], **more: Any
) -> None:
    run(size, name, requests, **more)


@pytest.mark.parametrize("name", only(["llama", "gemma3_text"], "llama"))
@tried(1, 5)
@given(size=SIZES, **{**SCHEDULES, "requests": arrivals(**{**MORE, **IN_FORMS})})
def test_ranks_stay_alike_where_forms_are_kept(
    size: int, name: str, requests: list[Arrival], **more: Any
) -> None:
    run(size, name, requests, **more)


@pytest.mark.parametrize("name", only(["llama", "gemma3_text"]))
@tried(1, 5)
@given(size=SIZES, **{**CROWDS, "requests": arrivals(**{**CROWD, **IN_FORMS})})
def test_ranks_stay_alike_in_a_swapped_out_crowd_with_forms(
    size: int, name: str, requests: list[Arrival], **more: Any
) -> None:
    run(size, name, requests, **more)
