"""Records of the ranks of a group: all count the same ones as on disk, whatever becomes of the
disk of one of them.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prefix.computed import family, text
from prefix.lives import FULL, STATE, STATED, WINDOW
from ranks.threads import ThreadRanks, on_ranks
from store.clock import Clock
from store.damages import DAMAGES
from store.disks import BrokenDisk
from thorough import only, seeds
from tier.lives import BLOCK, ONE, SPEC, THREE, TWO, WINDOWED, record_files
from tier.members import Member

from mlx_blockpool.config import StoreConfig
from mlx_blockpool.errors import BadRecordError
from mlx_blockpool.kv.shards import agreed
from mlx_blockpool.spec import ModelCacheSpec
from mlx_blockpool.store.paths import FOLDERS
from mlx_blockpool.store.record import BLOCK as RECORD
from mlx_blockpool.store.record import Key, Record
from mlx_blockpool.tier.agreement import AgreedLedger, common
from mlx_blockpool.tier.opening import open_store

SPECS = {"full": SPEC, "windowed": WINDOWED, "hybrid": STATED["hybrid"]}
# Of each rank of a pipeline: with more and fewer layers of the same kinds.
UNLIKE = [
    ModelCacheSpec("m", layers, "float32")
    for layers in (
        (STATE, FULL, WINDOW),
        (FULL, WINDOW, STATE, STATE, FULL, FULL),
        (WINDOW, STATE, FULL),
    )
]


def members(
    folder: Path, act: Callable[[Member], Any], spec: str = "full", size: int = 2, **config: Any
) -> list[Any]:
    """What `act` returns on each rank; settings that begin with `one_` are those of rank 1."""

    def run(ranks: ThreadRanks) -> Any:
        own = {name: value for name, value in config.items() if not name.startswith("one_")}
        if ranks.rank == 1:
            own |= {
                name.removeprefix("one_"): value
                for name, value in config.items()
                if name.startswith("one_")
            }
        alike = SPECS.get(spec) or agreed(lambda: UNLIKE[ranks.rank], ranks)
        member = Member(ranks, folder, alike, **own)
        found = act(member)
        member.store.close()
        return found

    return on_ranks(size, run)


def paths(member: Member) -> list[list[bool]]:
    return [member.on_disk(prompt) for prompt in (ONE, TWO)]


# -- at start --------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", only(SPECS, "windowed"))
def test_a_record_that_one_rank_lacks_is_no_record(tmp_path: Path, spec: str) -> None:
    def write(member: Member) -> tuple[set[str], list[bytes]]:
        for prompt in (ONE, TWO):
            member.ask(prompt, (BLOCK, 3 * BLOCK))
            member.turn(at_once=True)
        hashes = member.hashes(ONE)
        assert member.prefix.close()
        return member.files(), hashes

    (files, hashes), others = members(tmp_path, write, spec, idle_seconds=0)
    assert others == (files, hashes)
    assert members(tmp_path, paths, spec)[0] == [[True] * 6] * 2
    one = next((tmp_path / "rank 1").glob(f"models/*/blocks/*/{hashes[2].hex()}*"))
    one.unlink()
    assert members(tmp_path, paths, spec)[0] == [[True] * 2, [True] * 6]


def test_the_first_budget_of_every_rank_spares_what_rank_0_has_pinned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(member: Member) -> list[bytes]:
        for prompt in (ONE, TWO):
            member.ask(prompt)
            member.turn(at_once=True)
        hashes = member.hashes(ONE)
        assert member.prefix.close()
        return hashes

    hashes, _ = members(tmp_path, write, idle_seconds=0)
    opened = AgreedLedger.open

    def open_pinned(ledger: AgreedLedger) -> list[Record]:
        # As the server does before it opens the store.
        if not ledger._ranks.rank:
            ledger._store.pinned = {Key(kind, digest) for digest in hashes for kind in FOLDERS}
        return opened(ledger)

    monkeypatch.setattr(AgreedLedger, "open", open_pinned)
    n_bytes = sum(path.stat().st_size for path in record_files(tmp_path / "rank 1"))

    def look(member: Member) -> list[list[bool]]:
        member.settle()
        return paths(member)

    found = members(tmp_path, look, store_bytes=n_bytes * 2 // 3)
    assert found == [[[True] * 6, found[0][1]]] * 2
    assert len(found[0][1]) < 6


def test_windows_that_were_cut_elsewhere_are_no_common_records(tmp_path: Path) -> None:
    """Which tokens a record holds decides where a prefix is resumed, and so it is the same on
    all ranks.
    """

    def cut(ranks: ThreadRanks) -> list[Any]:
        records = [
            record(RECORD, 1, ""),
            record("window", 1, "300"),
            record("window", 2, str(400 + ranks.rank)),
        ]
        return [found.key for found in common(ranks, records[:: 1 - 2 * ranks.rank])]

    assert on_ranks(2, cut) == [[Key(RECORD, b"1" * 32), Key("window", b"1" * 32)]] * 2
    assert on_ranks(2, lambda ranks: common(ranks, [])) == [[], []]


def record(kind: str, number: int, cut: str) -> Record:
    return Record(
        kind,
        "n",
        str(number).encode() * 32,
        b"0" * 32,
        0,
        bytes(16),
        (),
        {"cut": cut} if cut else {},
    )


# -- one disk fails --------------------------------------------------------------------------------


def is_full(member: Member, disk: BrokenDisk, is_full: bool) -> None:
    if member.ranks.rank == 1:
        disk.broken = {"write": OSError(errno.ENOSPC, "full")} if is_full else {}


@pytest.mark.parametrize("spec", only(SPECS, "full"))
def test_while_one_disk_is_full_no_rank_writes(tmp_path: Path, clock: Clock, spec: str) -> None:
    disk = BrokenDisk()

    def act(member: Member) -> list[list[bool]]:
        is_full(member, disk, True)
        member.ask(ONE, (BLOCK,))
        member.settle()
        assert member.on_disk(ONE) == [False] * 6
        assert {again for _, again in member.missed} == {True}
        is_full(member, disk, False)
        if member.ranks.rank == 0:
            clock.now += 31
        member.ask(TWO)
        member.settle()
        found = [path[:5] for path in paths(member)]
        assert member.prefix.close()
        return found

    assert members(tmp_path, act, spec, one_disk=disk)[0] == [[True] * 5] * 2
    assert members(tmp_path, paths, spec)[0] == [[True] * 6] * 2


@pytest.mark.parametrize("spec", only(SPECS, "windowed"))
@pytest.mark.parametrize("what", ["store_bytes", "daily_bytes", "queue_bytes"])
def test_what_the_limits_of_one_rank_refuse_no_rank_has(
    tmp_path: Path, clock: Clock, spec: str, what: str
) -> None:
    def act(member: Member) -> tuple[set[str], list[list[bool]]]:
        # A queue of one byte takes one record after the other.
        for prompt in (ONE, TWO, THREE)[: 1 if what == "queue_bytes" else 3]:
            member.ask(prompt, (BLOCK, 2 * BLOCK))
            for _ in range(14 if what == "queue_bytes" else 4):
                member.turn()
        return member.files(), paths(member)

    most = {"store_bytes": 40_000, "daily_bytes": 40_000, "queue_bytes": 1}[what]
    (files, found), (others, _) = members(tmp_path, act, spec, **{f"one_{what}": most})
    if what == "queue_bytes":
        assert found[0][:5] == [True] * 5
    else:
        assert 0 < len(others) < 15
        assert any(map(any, found)) or what == "store_bytes"
    # Records that rank 1 lacks are removed by rank 0, but for what waits to be written again.
    assert files == others or (what == "daily_bytes" and files > others)


def test_what_is_given_up_is_not_tried_again_at_every_turn(tmp_path: Path) -> None:
    def act(member: Member) -> int:
        member.ask(ONE, (BLOCK, 2 * BLOCK))
        for _ in range(20):
            # One record each.
            member.turn(limit=1)
        before = len(member.missed)
        assert before > 0
        member.settle()
        return len(member.missed) - before

    assert members(tmp_path, act, "windowed", one_store_bytes=12_000) == [0, 0]


def test_files_that_go_from_one_rank_go_from_all(tmp_path: Path) -> None:
    def act(member: Member) -> set[str]:
        member.ask(ONE)
        member.ask(TWO)
        member.settle()
        if member.ranks.rank == 1:
            for path in member.folder.glob(f"models/*/blocks/*/{member.hashes(ONE)[2].hex()}*"):
                path.unlink()
            member.store._look()
            assert member.store.flush()
        member.prefix.trim_to(0)
        member.settle()
        assert paths(member) == [[True] * 2, [True] * 5]
        return member.files()

    files, others = members(tmp_path, act)
    assert files == others
    assert len(files) == 7


def test_a_record_that_is_damaged_on_one_rank_is_lost_to_all(tmp_path: Path) -> None:
    def act(member: Member) -> set[str]:
        member.ask(ONE)
        member.settle()
        member.prefix.trim_to(0)
        key = Key(RECORD, member.hashes(ONE)[3])
        if member.ranks.rank == 1:
            member.stored.restores.note_unread(key, BadRecordError("damaged"))
        member.settle()
        assert member.on_disk(ONE) == [True] * 3
        return member.files()

    files, others = members(tmp_path, act)
    assert files == others
    assert len(files) == 3


def test_a_closing_rank_writes_all_it_has_whatever_the_others_take(tmp_path: Path) -> None:
    def act(member: Member) -> set[str]:
        member.ask(ONE)
        member.turn()
        member.ask(TWO)
        member.stored.ledger.agree(False)
        assert member.prefix.close()
        return member.files()

    files, others = members(tmp_path, act, one_queue_bytes=1)
    assert files == others
    assert len(files) == 12


# -- under random requests -------------------------------------------------------------------------


@pytest.mark.parametrize("seed", seeds(1, 40))
def test_ranks_agree_after_every_turn(tmp_path: Path, clock: Clock, seed: int) -> None:
    rng = random.Random(seed)
    spec, size = rng.choice([*SPECS, "unlike"]), rng.choice([2, 2, 3])
    lives = [rng.randrange(1 << 30) for _ in range(2)]
    limits = {
        "store_bytes": rng.choice([60_000, 200_000, 1 << 30]),
        "queue_bytes": rng.choice([30_000, 1 << 30]),
        "one_store_bytes": rng.choice([30_000, 120_000, 1 << 30]),
        "one_queue_bytes": rng.choice([1, 30_000, 1 << 30]),
        "one_daily_bytes": rng.choice([100_000, None, None]),
    }
    for life in lives:
        disks = [BrokenDisk() for _ in range(size)]
        members(
            tmp_path,
            lambda member, life=life, disks=disks: random_life(member, random.Random(life), disks),
            spec,
            size,
            **limits,
        )
        damage(tmp_path, random.Random(life))


def random_life(member: Member, rng: random.Random, disks: list[BrokenDisk]) -> None:
    """The same acts on all ranks, and broken disks on some."""
    member.store._writer.folder._disk = disk = disks[member.ranks.rank]
    for _ in range(20):
        act, which, length = (
            rng.randrange(10),
            rng.randrange(4),
            rng.choice([30, 256, 300, 512, 700, 1000]),
        )
        prompt = [*family(which, length), *text(rng.randrange(3), rng.choice([0, 20, 256]))]
        if act < 5:
            member.ask(prompt, sorted(rng.sample(range(1, len(prompt)), 2)), reads=act < 3)
        elif act == 5:
            member.prefix.trim_to(rng.choice([0, 20_000, 60_000]))
        elif act == 6 and rng.random() < 0.3:
            member.prefix.clear()
        broken, victim = rng.choice(["", "", "write", "read", "unlink"]), rng.randrange(len(disks))
        if act == 7 and victim == member.ranks.rank:
            disk.broken = {broken: OSError(errno.EIO, "broken")} if broken else {}
        member.turn(rng.choice([0.0, 1.0, 40.0]), rng.choice([1, 20_000, 1 << 40]))
        member.prefix.check()
    if rng.random() < 0.5:
        member.prefix.close()


def damage(folder: Path, rng: random.Random) -> None:
    files = sorted(folder.glob("rank */models/*/blocks/*/*.safetensors"))
    for path in rng.sample(files, min(2, len(files))):
        DAMAGES[rng.choice(sorted(DAMAGES))](path, rng)


# -- names -----------------------------------------------------------------------------------------


def test_no_rank_finds_the_records_of_another(tmp_path: Path) -> None:
    """One rank keeps the name that it always had; the ranks of a group have names of their own,
    and a trie in common.
    """

    def names(kind: str, size: int) -> list[tuple[str, str]]:
        def open_one(ranks: ThreadRanks) -> tuple[str, str]:
            weights = f"weights of rank {ranks.rank}"
            store = open_store(StoreConfig(tmp_path), tmp_path, None, SPEC, "m", weights, ranks)
            store.close()
            return store.namespace, store.trie_name

        return on_ranks(size, open_one, kind)

    alone = open_store(StoreConfig(tmp_path), tmp_path, None, SPEC, "m", "weights of rank 0")
    alone.close()
    assert alone.trie_name == alone.namespace == "6d91a47c1e349d47257d87ede0069574"
    groups = [names("tensor", 2), names("tensor", 3), names("pipeline", 2)]
    own = [name for group in groups for name, _ in group]
    assert len({*own, alone.namespace}) == 8
    assert [len({trie for _, trie in group}) for group in groups] == [1, 1, 1]
    assert names("tensor", 2) == groups[0]
    assert on_ranks(3, lambda ranks: ranks.from_first(b"n%d" % ranks.rank)) == [b"n0"] * 3
