"""StoredPrefixes under a budget, and beside others on one folder."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from prefix.computed import answer, family
from store.disks import GatedDisk, WatchedDisk
from store.stores import record_files, temporaries
from thorough import seeds
from tier.lives import BLOCK, FILE, ONE, SPEC, THREE, TWO, WINDOWED, Life, start, wanted

from mlx_blockpool.kv.block_bytes import as_bytes
from mlx_blockpool.prefix.salts import salt_of
from mlx_blockpool.spec import ModelCacheSpec
from mlx_blockpool.store.record import BLOCK as RECORD
from mlx_blockpool.store.record import Key
from mlx_blockpool.tier import checkpoints, write_behind

SPECS = {"full": SPEC, "windowed": WINDOWED}


# -- budget ----------------------------------------------------------------------------------------


def test_the_end_of_the_path_used_longest_ago_goes_first(tmp_path: Path) -> None:
    disk = WatchedDisk(tmp_path)
    life = start(tmp_path, disk, store_bytes=11 * FILE)
    answer(life.prefix, ONE)
    life.write()
    answer(life.prefix, TWO)
    life.write()
    ends = [digest.hex() for digest in life.hashes(ONE)[:5]]
    answer(life.prefix, THREE[: 4 * BLOCK])
    life.write()
    assert disk.unlinked == ends[:1:-1]
    assert life.on_disk(ONE) == [True, True, False, False, False, False]
    assert disk.most <= 11 * FILE


def test_what_the_budget_refuses_is_not_copied_out_of_the_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = start(tmp_path, store_bytes=2 * FILE)
    copied: list[object] = []
    monkeypatch.setattr(
        write_behind, "as_bytes", lambda array: [copied.append(array), as_bytes(array)][1]
    )
    answer(life.prefix, ONE)
    life.write()
    # Two arrays, keys and values, of each layer.
    assert len(copied) == 4 * len(record_files(tmp_path)) > 0
    assert life.store.counts["over budget"] > 0


@pytest.mark.parametrize("how", ["closed", "killed"])
def test_after_a_restart_too(tmp_path: Path, how: str) -> None:
    first = start(tmp_path)
    for prompt in (ONE, TWO):
        answer(first.prefix, prompt)
        first.write()
    assert how == "killed" or first.prefix.close()
    ends = [digest.hex() for digest in first.hashes(ONE)[: 6 if how == "closed" else 5]]
    for age, name in enumerate([*ends, *(digest.hex() for digest in first.hashes(TWO))]):
        for path in tmp_path.rglob(f"{name}.safetensors"):
            # As they were written: a path's beginning first.
            os.utime(path, (1000 + age, 1000 + age))
    disk = WatchedDisk(tmp_path)
    life = start(
        tmp_path,
        disk,
        store_bytes=sum(path.stat().st_size for path in record_files(tmp_path)) - 3 * 8192,
    )
    life.store.flush()
    assert len(disk.unlinked) >= 3
    assert disk.unlinked == ends[: -len(disk.unlinked) - 1 : -1]
    for node in life.prefix.index.trie:
        assert node.parent is not None
        assert node.parent.parent is None or node.parent.on_disk
    assert life.acquired([*TWO, 1]) >= 5 * BLOCK


def test_an_end_that_the_budget_took_is_not_known_again_where_what_followed_it_is_forgotten(
    tmp_path: Path,
) -> None:
    """A prefix that is known as stored, and has no file, would be a hit that cannot be read, and
    would never be written again.
    """
    life = start(tmp_path, store_bytes=2 * FILE)
    answer(life.prefix, end := ONE[:100])
    life.stored.write_tails()
    record = Key(RECORD, life.hashes(end)[0])
    assert record in life.store
    answer(life.prefix, ONE[:150])
    answer(life.prefix, THREE[: 2 * BLOCK])
    life.write()
    assert record not in life.store
    life.prefix.trim_to(0)
    assert life.prefix.look([*end, 1]).matched == 0

    answer(life.prefix, end)
    assert life.prefix.close()
    assert start(tmp_path).acquired([*end, 1]) == len(end)


def test_what_is_being_read_is_spared(tmp_path: Path, gated: GatedDisk) -> None:
    first = start(tmp_path)
    for prompt in (ONE, TWO):
        answer(first.prefix, prompt[: 3 * BLOCK])
        first.write()
    first.prefix.close()
    life = start(tmp_path, gated, store_bytes=7 * FILE)
    gated.reads.clear()
    # ONE was used longest ago.
    restore = life.stored.restores.begin(wanted(life, ONE))
    answer_now(life, THREE[: 4 * BLOCK])
    life.stored.write_behind(1 << 40)
    assert all(Key(RECORD, digest) in life.store for digest in life.hashes(ONE[: 3 * BLOCK]))
    gated.reads.set()
    while not restore.advance(wait=1.0):
        pass
    restore.release()
    assert life.stored.restores.num_unread == 0
    assert life.acquired([*ONE[: 3 * BLOCK], 1]) == 3 * BLOCK


def answer_now(life: Life, tokens: list[int]) -> None:
    """A request that finds nothing and reads nothing."""
    assert life.prefix.look(tokens).matched == 0
    answer(life.prefix, tokens)


def test_a_churn_of_ten_times_the_budget_stays_within_it(tmp_path: Path) -> None:
    budget = 8 * FILE
    disk = WatchedDisk(tmp_path)
    life = start(tmp_path, disk, pool=12 * 8192, store_bytes=budget)
    for n in range(40):
        prompt = list(family(n % 13, 3 * BLOCK + 10 * n))
        life.acquired([*prompt, 1])
        answer(life.prefix, prompt)
        life.stored.write_tails()
        # A record that the budget drops while it is queued is never written: how many are would
        # depend on the disk's speed.
        assert life.store.flush()
        for node in life.prefix.index.trie:
            assert node.parent is not None
            assert not node.on_disk or node.parent.parent is None or node.parent.on_disk
    assert life.prefix.close()
    assert disk.written > 10 * budget
    assert budget // 2 < disk.most <= budget
    assert life.store.report()["bytes"] == sum(
        path.stat().st_size for path in record_files(tmp_path)
    )
    assert life.stored.restores.num_unread == 0


# -- two at once -----------------------------------------------------------------------------------


def test_two_caches_in_one_folder_use_each_others_files_after_a_restart(tmp_path: Path) -> None:
    one, two = start(tmp_path), start(tmp_path)
    for life, own in ((one, ONE), (two, TWO)):
        for prompt in (own, THREE):
            answer(life.prefix, prompt)
            life.stored.write_tails()
    assert one.prefix.close()
    assert two.prefix.close()
    again = start(tmp_path)
    assert [again.acquired([*prompt, 1]) for prompt in (ONE, TWO, THREE)] == [
        len(ONE),
        len(TWO),
        len(THREE),
    ]
    assert again.stored.restores.num_unread == 0


def test_one_that_drops_files_under_the_other_makes_it_miss(tmp_path: Path) -> None:
    one = start(tmp_path)
    answer(one.prefix, ONE)
    one.stored.write_tails()
    assert one.store.flush()
    one.stored.write_behind(0)
    two = start(tmp_path)
    two.prefix.clear()
    two.stored.write_behind()
    assert two.store.flush()
    assert record_files(tmp_path) == []
    one.prefix.trim_to(0)
    assert one.acquired([*ONE, 1]) == 0
    assert one.stored.restores.num_unread == 1
    answer(one.prefix, ONE)
    assert one.prefix.close()
    assert one.store.problem is None
    assert start(tmp_path).acquired([*ONE, 1]) == len(ONE)


def look(life: Life) -> None:
    """See what the other one did, and learn of it."""
    life.store._look()
    for _ in range(3):
        life.write()


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_what_another_one_wrote_is_known_after_a_look(tmp_path: Path, spec: ModelCacheSpec) -> None:
    one, two = start(tmp_path, spec=spec), start(tmp_path, spec=spec)
    answer(two.prefix, ONE[:BLOCK])
    whole = ONE[: 5 * BLOCK]
    for prompt in (whole, TWO):
        answer(one.prefix, prompt)
    one.stored.write_tails()
    assert one.store.flush()
    assert two.acquired([*whole, 1]) <= BLOCK
    look(two)
    assert [two.acquired([*prompt, 1]) for prompt in (whole, TWO)] == [len(whole), len(TWO)]
    before = two.store.counts["written"]
    answer(two.prefix, longer := [*whole, *THREE])
    two.stored.write_tails()
    assert two.store.flush()
    look(one)
    assert one.acquired([*longer, 1]) == len(longer)
    assert two.store.counts["written"] - before <= 2 * 6, "only what was new"
    assert (one.stored.restores.num_unread, two.stored.restores.num_unread) == (0, 0)


def test_what_another_one_wrote_under_a_salt_is_known_under_it(tmp_path: Path) -> None:
    one, two, salt = start(tmp_path), start(tmp_path), salt_of("two")
    answer(one.prefix, ONE, salt)
    one.stored.write_tails()
    assert one.store.flush()
    look(two)
    assert two.prefix.look([*ONE, 1], salt).matched == len(ONE)
    assert two.prefix.look([*ONE, 1]).matched == 0


def test_no_more_is_learned_between_two_steps_than_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "FOLLOW_AT_ONCE", 2)
    one, two = start(tmp_path), start(tmp_path)
    answer(one.prefix, ONE)
    one.write()
    two.store._look()
    assert two.store.flush()
    known = []
    for _ in range(4):
        two.stored.write_behind()
        known.append(len(two.hashes(ONE)))
    assert known == [2, 4, 5, 5]


def test_the_end_of_a_conversation_that_goes_on_here_is_not_given_up_for_a_longer_one(
    tmp_path: Path,
) -> None:
    one, two = start(tmp_path), start(tmp_path)
    answer(two.prefix, ONE[: BLOCK + 100])
    two.write()
    answer(one.prefix, ONE)
    one.stored.write_tails()
    assert one.store.flush()
    look(two)
    assert two.prefix.look([*ONE, 1]).hit == BLOCK + 100
    answer(two.prefix, ONE)
    look(two)
    assert two.acquired([*ONE, 1]) == len(ONE)
    assert two.prefix.close()
    assert one.prefix.close()
    assert start(tmp_path).acquired([*ONE, 1]) == len(ONE)


def test_what_another_one_dropped_is_written_again_if_it_is_used_again(tmp_path: Path) -> None:
    one, two = start(tmp_path), start(tmp_path)
    for prompt in (ONE, TWO):
        answer(one.prefix, prompt)
    one.write()
    look(two)
    two.prefix.clear()
    two.write()
    assert record_files(tmp_path) == []
    look(one)
    assert not any(one.on_disk(ONE) + one.on_disk(TWO))
    assert record_files(tmp_path) == [], "nobody has asked for it"
    answer(one.prefix, [*ONE, *[9] * 300])
    one.write()
    assert all(one.on_disk(ONE)[:5])
    assert len(record_files(tmp_path)) == 6
    assert start(tmp_path).acquired([*ONE, 1]) == len(ONE)


@pytest.mark.sampled
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("seed", seeds(2, 15))
def test_any_history_of_two_on_one_folder_gives_the_right_keys(
    tmp_path: Path, spec: ModelCacheSpec, seed: int
) -> None:
    """A small budget, eviction from memory, looks at any time, kills and clean ends: no wrong
    key, no error, nothing torn.
    """
    rng = random.Random(seed)
    config = {
        "store_bytes": rng.choice([60_000, 200_000, 1 << 30]),
        "look_bytes": rng.choice([1, 30_000]),
    }
    lives = [start(tmp_path, spec=spec, **config) for _ in range(2)]
    hits = 0
    for _ in range(60):
        number = rng.randrange(2)
        life = lives[number]
        prompt = list(family(rng.randrange(3), rng.choice([40, 256, 600, 700, 900])))
        hits += life.acquired([*prompt, 1])
        answer(life.prefix, prompt)
        life.prefix.check()
        what = rng.randrange(8)
        if what < 3:
            life.stored.write_behind(at_once=what == 0)
        elif what == 3:
            look(life)
        elif what == 4:
            life.prefix.trim_to(0)
        elif what == 5:
            assert rng.randrange(2) or life.prefix.close()
            life.store.close()
            lives[number] = start(tmp_path, spec=spec, **config)
        elif what == 6:
            life.prefix.clear()
    assert hits
    for life in lives:
        assert life.store.problem is None
        assert (life.store.counts["failed"], life.store.counts["quarantined"]) == (0, 0)
        assert life.prefix.close()
    assert temporaries(tmp_path) == []
    last = start(tmp_path, spec=spec)
    for number in range(3):
        last.acquired([*family(number, 900), 1])
    assert last.stored.restores.num_unread == 0
