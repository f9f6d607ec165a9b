"""What is evicted first: superseded checkpoints, then what nothing resumes from, then by the
last use, ends before beginnings.
"""

from __future__ import annotations

import pytest
from prefix.computed import text
from prefix.lives import SPECS, Life

from mlx_blockpool.prefix.eviction import FIRST_RANGE_TOKENS, evict, eviction_order, length_range
from mlx_blockpool.prefix.trie import Checkpoint

FULL_GROUP, WINDOW_GROUP = 1, 0


def checkpoints(life: Life, tokens: list[int]) -> dict[int, Checkpoint]:
    path = life.prefix.match(tokens).path
    return {position: found for node in path for position, found in node.checkpoints.items()}


def superseded(life: Life, tokens: list[int]) -> list[int]:
    return sorted(
        position for position, found in checkpoints(life, tokens).items() if found.superseded
    )


def test_the_last_checkpoint_of_each_octave_stays() -> None:
    assert [length_range(n * FIRST_RANGE_TOKENS) for n in (0, 1, 2, 3, 4, 7, 8)] == [
        0,
        1,
        2,
        2,
        3,
        3,
        4,
    ]
    life = Life(SPECS["hybrid"])
    prompt = text(1, 6000)
    life.answer(prompt, places=[500, 1500, 2500, 4500], kind="user")
    # Those at 1,500 and 2,500 are the last before 2,048 and 4,096.
    assert superseded(life, prompt) == [500, 4500]


def test_a_conversation_that_goes_on_supersedes_its_last_checkpoint_and_no_other_kind() -> None:
    life = Life(SPECS["window"])
    prompt = text(1, 100)
    life.answer(prompt, kind="system")
    ends = []
    for turn in range(3):
        prompt = [*prompt, *text(10 + turn, 400)]
        life.answer(prompt, places=[len(prompt) - 8])
        ends.append(len(prompt))
    assert superseded(life, prompt) == [ends[0] - 8, ends[0], ends[1] - 8, ends[1]]
    # Resumed again, it is not any more.
    life.answer([*prompt[: ends[0]], *text(99, 50)])
    assert ends[0] not in superseded(life, prompt)


def test_no_checkpoint_is_superseded_where_another_conversation_began_behind_it() -> None:
    life = Life(SPECS["hybrid"])
    prompt = text(1, 512)
    life.answer(prompt)
    life.answer([*prompt, *text(2, 300)])
    life.answer([*prompt, *text(3, 300)])
    longer = [*prompt, *text(2, 300), *text(4, 200)]
    life.answer(longer)
    assert superseded(life, longer) == [812]


@pytest.mark.parametrize("name", ["window", "hybrid"])
def test_a_checkpoint_is_the_last_again_when_the_later_one_goes_with_its_edge(name: str) -> None:
    life = Life(SPECS[name])
    prompt = text(1, 600)
    life.answer(prompt)
    longer = [*prompt, *text(2, 300)]
    life.answer(longer)
    assert superseded(life, longer) == [600]
    # Memory pressure: the end of the conversation goes, with the checkpoint there.
    life.prefix.index.evict(life.prefix.match(longer).path[-1])
    assert list(checkpoints(life, longer)) == [600]
    assert superseded(life, longer) == []
    for group, block in checkpoints(life, longer)[600].ring_blocks:
        assert block not in life.arena.pool.groups[group].demoted
    life.check()


def test_ring_blocks_of_a_checkpoint_that_is_the_last_again_are_not_evicted_first() -> None:
    life = Life(SPECS["window"])
    prompt = text(1, 600)
    life.answer(prompt)
    longer = [*prompt, *text(2, 300)]
    life.answer(longer)
    found = checkpoints(life, longer)
    life.prefix.index.remove_checkpoint(found[900])
    assert superseded(life, longer) == []
    assert not set(life.arena.pool.groups[WINDOW_GROUP].demoted) & {
        block for _, block in found[600].ring_blocks
    }
    life.check()


@pytest.mark.parametrize("name", ["window", "hybrid"])
def test_superseded_checkpoints_are_evicted_before_the_last_one_of_an_older_conversation(
    name: str,
) -> None:
    life = Life(SPECS[name])
    old, prompt = text(1, 600), text(2, 600)
    life.answer(old)
    for turn in range(3):
        prompt = [*prompt, *text(10 + turn, 300)]
        life.answer(prompt)
    first, second, last = sorted(checkpoints(life, prompt))
    if name == "hybrid":
        assert life.prefix.index.evict_state()
    else:
        ring = checkpoints(life, prompt)[first].ring_blocks
        assert eviction_order(life.arena.pool, WINDOW_GROUP)[: len(ring)] == [
            block for _, block in ring
        ]
        life.prefix.index.remove_evicted(evict(life.arena.pool, WINDOW_GROUP, 1))
    assert sorted(checkpoints(life, prompt)) == [second, last]
    assert life.acquired([*old, 1]) == 600
    assert life.acquired([*prompt, 1]) == last


def test_blocks_that_nothing_resumes_from_are_evicted_first() -> None:
    life = Life(SPECS["window"])
    old, prompt = text(1, 512), text(2, 1536)
    life.answer(old)
    life.answer(prompt, places=[512])
    path = life.prefix.match(prompt).path
    life.prefix.index.remove_checkpoint(path[-1].checkpoints[1536])
    behind = [node.blocks[0][1] for node in path[:1:-1]]
    assert eviction_order(life.arena.pool, FULL_GROUP)[: len(behind)] == behind
    life.check()
    assert life.acquired([*prompt, 1]) == 512
    assert life.acquired([*old, 1]) == 512


def test_in_a_full_model_the_end_of_the_conversation_used_longest_ago_goes_first() -> None:
    life = Life(SPECS["full"])
    old, new = text(1, 768), text(2, 768)
    life.answer(old)
    life.answer(new)
    life.answer([*old[:256], *text(3, 256)])
    paths = [life.prefix.match(tokens).path for tokens in (old, new)]
    expected = [node.blocks[0][1] for node in (*paths[0][:0:-1], *paths[1][::-1])]
    assert eviction_order(life.arena.pool, 0)[: len(expected)] == expected
