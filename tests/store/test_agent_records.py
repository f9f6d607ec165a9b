"""Which records an agent stands on: small cases by hand, and random trees against an oracle that knows tokens, no hashes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from store.chains import file_of, hashes_of, keep, note, path_of, place
from store.stores import NAMESPACE, record_files
from thorough import seeds

from mlx_blockpool.commands.agents import delete
from mlx_blockpool.store.agent_files import Agents
from mlx_blockpool.store.agent_records import PathRecords, Sharing
from mlx_blockpool.store.fs import Disk
from mlx_blockpool.store.fsck import judge
from mlx_blockpool.store.reader import read
from mlx_blockpool.store.record import BLOCK, STATE, WINDOW, Expected, Record
from mlx_blockpool.store.scan import Listing

SYSTEM = list(range(512))
FIRST = [*SYSTEM, *range(1000, 1300)]
SECOND = [*SYSTEM, *range(2000, 2100)]


def sharing(root: Path) -> Sharing:
    return Sharing(judge(Listing(root).records), Agents(root).all())


def share(root: Path, name: str) -> PathRecords:
    return sharing(root).share(Agents(root).need(name))


def on_disk(root: Path, name: str) -> int:
    return sharing(root).tokens_on_disk(Agents(root).need(name))


def starts(records: Sequence[Record]) -> list[int]:
    return [record.start for record in records]


def own(root: Path, name: str) -> list[Path]:
    return [file.path for file in share(root, name).own]


def files(root: Path, records: Sequence[Record]) -> list[Path]:
    return [file_of(root, record) for record in records]


def test_what_two_agents_share_stays_and_ends_go_first(tmp_path: Path) -> None:
    keep(tmp_path, FIRST, SECOND)
    note(tmp_path, "a", FIRST)
    note(tmp_path, "b", SECOND)
    found = share(tmp_path, "a")
    path = path_of(FIRST)
    assert [file.path for file in found.own] == files(tmp_path, path[:1:-1])
    assert [(stay.file.path, stay.agents, stay.behind) for stay in found.stays] == [
        (file_of(tmp_path, path[1]), ("b",), 1),
        (file_of(tmp_path, path[0]), ("b",), 1),
    ]


def test_what_leads_on_to_a_conversation_without_a_name_stays(tmp_path: Path) -> None:
    keep(tmp_path, FIRST, SECOND)
    note(tmp_path, "a", FIRST)
    found = share(tmp_path, "a")
    assert [file.path for file in found.own] == files(tmp_path, path_of(FIRST)[:1:-1])
    assert [(stay.agents, stay.behind) for stay in found.stays] == [((), 1), ((), 1)]


def test_a_path_alone_goes_as_a_whole(tmp_path: Path) -> None:
    keep(tmp_path, FIRST)
    note(tmp_path, "a", FIRST)
    assert own(tmp_path, "a") == files(tmp_path, path_of(FIRST)[::-1])
    assert share(tmp_path, "a").stays == []
    assert on_disk(tmp_path, "a") == 812


def test_an_agent_of_another_namespace_shares_nothing(tmp_path: Path) -> None:
    keep(tmp_path, FIRST)
    note(tmp_path, "a", FIRST)
    note(tmp_path, "b", FIRST, "other")
    here = [agent for agent in Agents(tmp_path).all() if agent.namespace == NAMESPACE]
    found = Sharing(judge(Listing(tmp_path).records), here)
    assert len(found.share(here[0]).own) == 4


def test_an_agent_inside_of_anothers_path_keeps_what_it_stands_on(tmp_path: Path) -> None:
    keep(tmp_path, FIRST)
    note(tmp_path, "a", FIRST)
    # Its end is inside of a block that the other has whole.
    Agents(tmp_path).note("b", NAMESPACE, "tiny", hashes_of(FIRST)[:3], 600)
    assert own(tmp_path, "a") == files(tmp_path, path_of(FIRST)[3:])
    assert own(tmp_path, "b") == []
    assert on_disk(tmp_path, "b") == 600


@pytest.mark.parametrize("tokens", [1, 100, 255])
def test_a_tail_that_a_fuller_block_took_over_is_still_on_disk(tmp_path: Path, tokens: int) -> None:
    keep(tmp_path, FIRST)
    note(tmp_path, "a", FIRST)
    note(tmp_path, "b", FIRST[: 512 + tokens])
    assert not file_of(tmp_path, path_of(FIRST[: 512 + tokens])[-1]).exists()
    assert on_disk(tmp_path, "b") == 512 + tokens
    # Without the first agent the block is what the second one stands on.
    assert own(tmp_path, "a") == files(tmp_path, path_of(FIRST)[3:])
    # It has more than the second one's path and may be anybody's.
    assert own(tmp_path, "b") == []


def test_a_tail_in_the_first_block_is_found_in_a_fuller_one(tmp_path: Path) -> None:
    keep(tmp_path, FIRST)
    note(tmp_path, "a", FIRST[:9])
    note(tmp_path, "b", [7, *FIRST[:9]])
    assert on_disk(tmp_path, "a") == 9
    assert on_disk(tmp_path, "b") == 0


def test_an_end_inside_of_a_tail_that_was_taken_over_is_found(tmp_path: Path) -> None:
    keep(tmp_path, FIRST)
    Agents(tmp_path).note("b", NAMESPACE, "tiny", hashes_of(FIRST[:700]), 600)
    assert on_disk(tmp_path, "b") == 600


def test_what_was_dropped_ends_what_is_on_disk(tmp_path: Path) -> None:
    keep(tmp_path, FIRST)
    note(tmp_path, "a", FIRST)
    path = path_of(FIRST)
    for end, left in ((3, 768), (1, 256), (0, 0)):
        file_of(tmp_path, path[end]).unlink()
        assert on_disk(tmp_path, "a") == left
    # What nothing leads to goes with the agent all the same.
    assert own(tmp_path, "a") == files(tmp_path, path[2:3])


def test_an_agent_that_has_nothing_yet_has_nothing_on_disk(tmp_path: Path) -> None:
    keep(tmp_path, FIRST)
    note(tmp_path, "a", [])
    assert on_disk(tmp_path, "a") == 0
    assert share(tmp_path, "a") == PathRecords([], [])


def test_what_an_earlier_end_left_behind_goes_along(tmp_path: Path) -> None:
    keep(tmp_path, FIRST, FIRST[:600], [*FIRST[:600], 9])
    note(tmp_path, "a", FIRST)
    stays = files(tmp_path, [path_of([*FIRST[:600], 9])[-1], *path_of(FIRST)[1::-1]])
    found = share(tmp_path, "a")
    assert set(own(tmp_path, "a")) == {*files(tmp_path, path_of(FIRST)[2:]), file_of(tmp_path, path_of(FIRST[:600])[-1])}
    # A tail that only begins alike is another's.
    assert [stay.file.path for stay in found.stays] == stays[1:]


@pytest.mark.parametrize("kind", [WINDOW, STATE])
def test_checkpoints_go_and_stay_with_the_tokens_that_they_stand_behind(tmp_path: Path, kind: str) -> None:
    keep(tmp_path, FIRST, SECOND)
    note(tmp_path, "a", FIRST)
    note(tmp_path, "b", SECOND)
    shared = [replace(path_of(FIRST[:n])[-1], kind=kind) for n in (100, 256, 512)]
    mine = [replace(path_of(FIRST[:n])[-1], kind=kind) for n in (600, 768, 812)]
    place(tmp_path, [*shared, *mine])
    assert set(own(tmp_path, "a")) == set(files(tmp_path, [*path_of(FIRST)[2:], *mine]))
    others = {stay.file.path: stay.agents for stay in share(tmp_path, "a").stays}
    assert others == dict.fromkeys(files(tmp_path, [*path_of(FIRST)[:2], *shared]), ("b",))


def test_a_checkpoint_at_a_tail_that_was_taken_over_does_not_hide_the_fuller_block(tmp_path: Path) -> None:
    keep(tmp_path, FIRST)
    note(tmp_path, "a", FIRST)
    note(tmp_path, "b", FIRST[:600])
    place(tmp_path, [replace(path_of(FIRST[:600])[-1], kind=WINDOW)])
    assert on_disk(tmp_path, "b") == 600
    assert own(tmp_path, "a") == files(tmp_path, path_of(FIRST)[3:])


def test_a_bad_record_is_nobodys(tmp_path: Path) -> None:
    keep(tmp_path, FIRST)
    note(tmp_path, "a", FIRST)
    bad = file_of(tmp_path, path_of(FIRST)[3])
    bad.write_bytes(b"short")
    assert on_disk(tmp_path, "a") == 768
    assert own(tmp_path, "a") == files(tmp_path, path_of(FIRST)[2::-1])


# -- random trees --------------------------------------------------------------------------------------------------------


class Tree:
    """Conversations that branch anywhere, some of them agents'; tails that were taken over may be gone or left behind."""

    def __init__(self, seed: int, root: Path) -> None:
        rng = random.Random(seed)
        self.agents: dict[str, tuple[int, ...]] = {}
        self.records: dict[tuple[str, tuple[int, ...]], Record] = {}
        lines: list[list[int]] = [[]]
        for number in range(rng.randrange(3, 9)):
            line = rng.choice(lines)
            line = line[: rng.choice([len(line), rng.randrange(len(line) + 1), len(line) // 256 * 256])]
            line = line + [rng.randrange(2) for _ in range(rng.choice([3, 100, 256, 400]))]
            lines.append(line)
            self._add(line, rng)
            if rng.random() < 0.6:
                self.agents[f"agent {number}"] = tuple(line)
        self._drop(rng)
        place(root, self.records.values())
        for name, tokens in self.agents.items():
            note(root, name, tokens)

    def _add(self, line: list[int], rng: random.Random) -> None:
        for record in path_of(line):
            self.records[BLOCK, tuple(line[: record.start + len(record.tokens)])] = record
        for kind in (WINDOW, STATE):
            if rng.random() < 0.4:
                end = rng.randrange(1, len(line) + 1)
                self.records[kind, tuple(line[:end])] = replace(path_of(line[:end])[-1], kind=kind)

    def _drop(self, rng: random.Random) -> None:
        """Most tails that a fuller block covers, and a few others, as the budget does."""
        covered = [key for key in self.records if key[0] == BLOCK and any(_covers(other, key) for other in self.records)]
        gone = [key for key in covered if rng.random() < 0.7] + [key for key in self.records if rng.random() < 0.05]
        for key in set(gone):
            del self.records[key]

    def stands_on(self, name: str) -> tuple[set[tuple[str, tuple[int, ...]]], set[tuple[str, tuple[int, ...]]]]:
        """The records that hold a beginning of an agent's tokens, and those around the fuller block its end is in."""
        tokens = self.agents[name]
        ends = {key[1] for key in self.records}
        alike = {key for key in self.records if key[1] == tokens[: len(key[1])]}
        # Of a block without any record at its own end nobody can tell what its tokens were.
        path = {key for key in alike if tokens[: -(-len(key[1]) // 256) * 256] in ends}
        fuller = {key for key in self.records if _covers(key, (BLOCK, tokens))} if (BLOCK, tokens) not in self.records else set()
        around = {k for k in self.records for f in fuller if _same_block(k, f) and k[1] == f[1][: len(k[1])]}
        return path, around - path

    def own(self, name: str) -> set[tuple[str, tuple[int, ...]]]:
        """The largest part of a path that nobody else stands on and nothing else is behind."""
        others = [self.stands_on(other) for other in self.agents if other != name]
        taken = set().union(*(path | around for path, around in others))
        mine = self.stands_on(name)[0]
        held = {key[1] for key in taken}
        found = {key for key in mine if key[1] not in held}
        while True:
            ends = {key[1] for key in found}
            behind = {key for key in self.records if len(key[1]) and key[1] not in ends}
            parents = {key[1][: (len(key[1]) - 1) // 256 * 256] for key in behind}
            kept = {key for key in found if key[1] not in parents}
            if kept == found:
                return found
            found = kept


def _same_block(a: tuple[str, tuple[int, ...]], b: tuple[str, tuple[int, ...]]) -> bool:
    return (len(a[1]) - 1) // 256 == (len(b[1]) - 1) // 256


def _covers(whole: tuple[str, tuple[int, ...]], part: tuple[str, tuple[int, ...]]) -> bool:
    """Whether a block has the tokens of a shorter one and more."""
    longer = len(whole[1]) > len(part[1]) > 0
    return whole[0] == BLOCK and longer and _same_block(whole, part) and whole[1][: len(part[1])] == part[1]


@pytest.mark.parametrize("seed", seeds(20, 120))
def test_delete_removes_exactly_what_the_oracle_says(tmp_path: Path, seed: int) -> None:
    tree = Tree(seed, tmp_path)
    if not tree.agents:
        return
    name = random.Random(seed).choice(sorted(tree.agents))
    going = {file_of(tmp_path, tree.records[key]) for key in tree.own(name)}
    before = {path: path.read_bytes() for path in Path(tmp_path / "models").rglob("*.safetensors")}
    assert set(before) == {file_of(tmp_path, record) for record in tree.records.values()}

    figures = {agent.name: on_disk(tmp_path, agent.name) for agent in Agents(tmp_path).all()}
    report = delete(tmp_path, name, yes=True)
    after = {path: path.read_bytes() for path in Path(tmp_path / "models").rglob("*.safetensors")}
    assert after == {path: data for path, data in before.items() if path not in going}
    assert (report["removed"]["records"], report["removed"]["bytes"]) == (len(going), sum(len(before[p]) for p in going))
    assert report["clean"]
    assert report["gone"] == report["removed"]
    assert report["whole"]["records"] == len(report["stays"])
    # The others have what they had, and only the name has gone.
    del figures[name]
    assert {agent.name: on_disk(tmp_path, agent.name) for agent in Agents(tmp_path).all()} == figures
    for record in tree.records.values():
        if file_of(tmp_path, record) in after:
            read(Disk(), file_of(tmp_path, record), Expected(NAMESPACE, record.kind, record.hash))


def test_the_random_trees_have_what_they_are_for(tmp_path: Path) -> None:
    """Some agents share, some stand on fuller blocks, some have checkpoints of their own, some nothing."""
    seen = {"own": 0, "shared": 0, "fuller": 0, "checkpoints": 0, "nothing": 0}
    for seed in range(120):
        tree = Tree(seed, tmp_path / str(seed))
        for name in tree.agents:
            mine, (path, around) = tree.own(name), tree.stands_on(name)
            seen["own"] += bool(mine)
            seen["shared"] += bool(path - mine)
            seen["fuller"] += bool(around)
            seen["checkpoints"] += any(kind != BLOCK for kind, _ in mine)
            seen["nothing"] += not mine
    assert min(seen.values()) > 20, seen


def test_agents_deleted_one_after_the_other_leave_only_what_has_no_name(tmp_path: Path) -> None:
    keep(tmp_path, FIRST, SECOND, FIRST[:300])
    for name, tokens in (("a", FIRST), ("b", SECOND), ("c", FIRST[:300])):
        note(tmp_path, name, tokens)
    for name in ("b", "a", "c"):
        delete(tmp_path, name, yes=True)
    assert record_files(tmp_path) == []
    assert Agents(tmp_path).all() == []


def test_a_fork_stands_on_all_that_the_first_one_does(tmp_path: Path) -> None:
    keep(tmp_path, FIRST)
    note(tmp_path, "a", FIRST)
    Agents(tmp_path).fork("a", "b")
    assert own(tmp_path, "a") == own(tmp_path, "b") == []
    delete(tmp_path, "a", yes=True)
    assert len(own(tmp_path, "b")) == 4
