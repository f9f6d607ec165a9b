"""Ranks that bring records back together: all read what every one of them can, and share what every
one of them has read.

Each rank is a thread with a folder of its own.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prefix.computed import family, look
from prefix.lives import SPECS, Life
from ranks.threads import ThreadRanks, on_ranks
from store.damages import DAMAGES
from store.disks import Disk, GatedDisk
from tier.lives import record_files

from mlx_blockpool.errors import PoolExhaustedError
from mlx_blockpool.ranks.driver import SharedPathFacts
from mlx_blockpool.ranks.facts import BringBack, read, write
from mlx_blockpool.ranks.head import Head
from mlx_blockpool.store.record import BLOCK as RECORD_OF_BLOCK
from mlx_blockpool.store.record import Key
from mlx_blockpool.tier.path_facts import PathFact, name_of
from mlx_blockpool.tier.restore import Rates

BLOCK = 256
PROMPT = list(family(1, 5 * BLOCK + 30))
# A hybrid model can be resumed here, and nowhere between.
MIDDLE = 2 * BLOCK + 100


@pytest.fixture(
    params=["full", "window", "hybrid", pytest.param("composite", marks=pytest.mark.thorough)]
)
def spec(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def filled(folder: Path, spec: str, size: int = 2) -> list[Path]:
    """The folders of ranks that have the records of the same prompt."""
    folders = [folder / str(rank) for rank in range(size)]
    for each in folders:
        life = Life(SPECS[spec], each)
        life.answer(PROMPT[:MIDDLE], kind="user")
        life.answer(PROMPT)
        assert life.prefix.close()
    return folders


def on_lives(
    folders: list[Path],
    spec: str,
    act: Callable[[Life, ThreadRanks], Any],
    disks: dict[int, Disk] | None = None,
    **config: Any,
) -> list[Any]:
    """What `act` returns on each rank."""

    def run(ranks: ThreadRanks) -> Any:
        life = Life(
            SPECS[spec], folders[ranks.rank], (disks or {}).get(ranks.rank), ranks=ranks, **config
        )
        return act(life, ranks)

    return on_ranks(len(folders), run)


def resumed(life: Life) -> int:
    """The hit of the prompt and one more token, of which everything is right."""
    return life.acquired([*PROMPT, 1])


def resident(life: Life) -> list[bool]:
    return [node.in_memory for node in life.prefix.index.trie.match(PROMPT).path]


def test_what_all_have_is_read_after_one_vote(tmp_path: Path, spec: str) -> None:
    def act(life: Life, ranks: ThreadRanks) -> tuple[int, int, int]:
        before = ranks.calls["least"]
        found = resumed(life)
        again = resumed(life)
        return found, again, ranks.calls["least"] - before

    # One vote on what to read, and one on what was read; none where memory has it.
    assert on_lives(filled(tmp_path, spec), spec, act) == [(len(PROMPT), len(PROMPT), 2)] * 2


def put_off(life: Life) -> None:
    """The third block cannot be read for a while."""
    life.store.put_off(Key(RECORD_OF_BLOCK, life.hashes(PROMPT)[2]))


def be_slow(life: Life) -> None:
    life.stored.restores.rates = Rates()
    life.stored.restores.rates.computed(10**9, 1)
    life.stored.restores.rates.restored(1, 1)


def pause(life: Life) -> None:
    life.stored.restores.pause()


@pytest.mark.sampled
@pytest.mark.parametrize("object_", [put_off, be_slow, pause])
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.thorough)])
def test_what_one_rank_is_against_no_rank_reads(
    tmp_path: Path, spec: str, size: int, object_: Callable[[Life], None]
) -> None:
    def act(life: Life, ranks: ThreadRanks) -> tuple[int, list[bool], int]:
        if ranks.rank == 1:
            object_(life)
        return resumed(life), resident(life), life.stored.report()["unread"]

    found = on_lives(filled(tmp_path, spec, size), spec, act)
    assert found == [found[0]] * size
    hit, _, unread = found[0]
    # The blocks before it serve a model without checkpoints.
    assert (hit, unread) == (2 * BLOCK if object_ is put_off and spec == "full" else 0, 0)


@pytest.mark.parametrize("size", [1, 2])
def test_a_block_that_a_prompt_ends_at_the_start_of_is_not_read(tmp_path: Path, size: int) -> None:
    def act(life: Life, ranks: ThreadRanks) -> tuple[int, int]:
        if ranks.rank == size - 1:
            put_off(life)
        # The last token of a prompt is always computed.
        return life.acquired(PROMPT[: 2 * BLOCK + 1]), life.stored.restores.num_arrived

    assert on_lives(filled(tmp_path, "full", size), "full", act) == [(2 * BLOCK, 2)] * size


def test_a_checkpoint_before_a_record_that_one_rank_cannot_read_is_agreed_on(
    tmp_path: Path,
) -> None:
    def act(life: Life, ranks: ThreadRanks) -> int:
        if ranks.rank == 1:
            life.store.put_off(Key(RECORD_OF_BLOCK, life.hashes(PROMPT)[4]))
        return resumed(life)

    assert on_lives(filled(tmp_path, "hybrid"), "hybrid", act) == [MIDDLE, MIDDLE]


@pytest.mark.sampled
@pytest.mark.parametrize("how", ["flip", "delete"])
def test_a_record_that_is_bad_on_one_rank_is_a_miss_on_all(
    tmp_path: Path, spec: str, how: str
) -> None:
    folders = filled(tmp_path, spec)

    def act(life: Life, ranks: ThreadRanks) -> tuple[int, list[bool]]:
        if ranks.rank == 1:
            bad = next(
                path
                for path in record_files(folders[1])
                if path.stem == life.hashes(PROMPT)[2].hex()
            )
            DAMAGES[how](bad, random.Random(3))
        first = resumed(life), resident(life)
        assert life.stored.report()["unread"] == ranks.rank
        # The next request does not try it again.
        assert resumed(life) == first[0]
        assert life.stored.report()["unread"] == ranks.rank
        return first

    found = on_lives(folders, spec, act)
    assert found[0] == found[1]
    hit, kept = found[0]
    assert hit == (2 * BLOCK if spec == "full" else 0)
    assert kept[:3] == [True, True, False]


def test_a_disk_that_hangs_on_one_rank_is_a_miss_on_all(tmp_path: Path, spec: str) -> None:
    disk = GatedDisk()

    def act(life: Life, ranks: ThreadRanks) -> int:
        if ranks.rank == 1:
            disk.reads.clear()
        found = life.prefix.acquire([*PROMPT, 1], 20)
        disk.reads.set()
        look(found.caches, PROMPT, found.lookup.hit)
        life.prefix.discard(found.caches)
        return found.lookup.hit

    assert on_lives(filled(tmp_path, spec), spec, act, {1: disk}, answer_seconds=0.01) == [0, 0]


# -- paths that no request waits for ---------------------------------------------------------------


def brought_back(life: Life, ranks: ThreadRanks) -> list[Any]:
    """Have the prompt's path brought back, over as many turns as it takes.

    Returns what rank 0 is answered.
    """
    acts, answers, restores = SharedPathFacts(life.prefix), list[Any](), life.stored.restores
    path = life.prefix.index.trie.match(PROMPT).detached()
    if ranks.rank == 0:
        acts.propose(BringBack(name_of(path)), answers.append)
    for _ in range(1000):
        number, records, has_failed = restores.restored()
        facts = write([("", fact) for fact in acts.outgoing()])
        sent = ranks.exchange(Head(restore=number, restored=records, failed=has_failed), facts)
        restores.commit([each.head for each in sent])
        for _, fact in (found for each in sent for found in read(each.mail)):
            assert isinstance(fact, PathFact)
            acts.take(fact)
        life.prefix.keep_up()
        if not restores.jobs:
            return answers
    raise AssertionError("the restore does not end")


@pytest.mark.sampled
@pytest.mark.parametrize("is_whole", [True, False])
def test_a_path_comes_back_on_all_ranks_as_far_as_all_have_it(
    tmp_path: Path, spec: str, is_whole: bool
) -> None:
    folders = filled(tmp_path, spec)

    def act(life: Life, ranks: ThreadRanks) -> tuple[list[bool], int, list[int]]:
        be_slow(life)
        if ranks.rank == 1 and not is_whole:
            next(
                path
                for path in record_files(folders[1])
                if path.stem == life.hashes(PROMPT)[2].hex()
            ).unlink()
        answers = brought_back(life, ranks)
        life.check()
        assert {(each.held, each.reserved) for each in life.arena.pool.settle()} == {(0, 0)}
        return (
            resident(life),
            life.prefix.within_reach([*PROMPT, 1]),
            [job.plan.tokens for job in answers],
        )

    (kept, hit, asked), (others, other_hit, no_answers) = on_lives(folders, spec, act)
    assert (kept, hit) == (others, other_hit)
    assert (asked, no_answers) == ([len(PROMPT)], [])
    assert sum(kept) == (len(kept) if is_whole else 2)


def test_a_path_without_room_is_an_error_for_rank_0_alone(tmp_path: Path) -> None:
    def act(life: Life, ranks: ThreadRanks) -> list[str]:
        answers = brought_back(life, ranks)
        return [type(answer).__name__ for answer in answers]

    found = on_lives(filled(tmp_path, "full"), "full", act, pool_bytes=4 * 4096)
    assert found == [[PoolExhaustedError.__name__], []]
