"""Ranks stay alike in memory and on disk, whatever their disks do, and reply as one rank does."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from ranks.stored_ranks import Schedule

from mlx_blockpool.spec import BLOCK_TOKENS

# Partial blocks are written soon, and a disk that has failed is tried again soon.
HASTY = {"idle_seconds": 0.1, "retry_seconds": 0.02, "answer_seconds": 0.5}


def test_a_second_life_reads_what_both_ranks_have(tmp_path: Path) -> None:
    first, second = Schedule(2, requests=3, lives=2, store=HASTY).run(tmp_path)
    assert second["restored"] > BLOCK_TOKENS
    assert second["hits"] > first["hits"]
    # Each request has voted once at most.
    assert second["least"] <= 3


@pytest.mark.thorough
@pytest.mark.parametrize(
    "schedule",
    [
        Schedule(1, "llama", blocks=1, lives=2, store=HASTY, fails=(0.0, 0.1)),
        Schedule(
            3,
            "gemma3_text",
            blocks=1,
            lives=2,
            store=HASTY,
            fails=(0.03, 0.1),
            rank_1={"store_bytes": 300_000},
        ),
        Schedule(1, "lfm2", blocks=1, lives=2, store=HASTY, fails=(0.03, 0.1)),
        Schedule(
            4, "llama", size=3, blocks=1, lives=2, requests=6, store=HASTY, fails=(0.0, 0.05, 0.05)
        ),
    ],
    ids=["one flaky disk", "windows, little room", "states", "three ranks"],
)
def test_ranks_stay_alike_whatever_their_disks_do(schedule: Schedule, tmp_path: Path) -> None:
    counts = sum(schedule.run(tmp_path), Counter[str]())
    assert min(counts[what] for what in ("tokens", "evicted", "least")) > 0
