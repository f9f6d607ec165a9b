"""Which records an agent stands on: small cases by hand, and random trees against an oracle that
knows tokens, no hashes.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest
from store.chains import file_of, hashes_of, keep, note, path_of, place
from store.stores import NAMESPACE, record_files
from thorough import seeds

from mlx_blockpool.commands.agents import delete
from mlx_blockpool.store.agents import Agents
from mlx_blockpool.store.fs import Disk
from mlx_blockpool.store.fsck import judge
from mlx_blockpool.store.reader import read
from mlx_blockpool.store.record import BLOCK, STATE, WINDOW, Expected, Record
from mlx_blockpool.store.scan import Listing
from mlx_blockpool.tier.agent_records import PathRecords, StoredPaths

SYSTEM = list(range(512))
FIRST = [*SYSTEM, *range(1000, 1300)]
SECOND = [*SYSTEM, *range(2000, 2100)]


def sharing(root: Path) -> StoredPaths:
    return StoredPaths(judge(Listing(root).records), Agents(root).all())


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
    assert [(stay.file.path, stay.agents, stay.following) for stay in found.stays] == [
        (file_of(tmp_path, path[1]), ("b",), 1),
        (file_of(tmp_path, path[0]), ("b",), 1),
    ]


def test_what_leads_on_to_a_conversation_without_a_name_stays(tmp_path: Path) -> None:
    keep(tmp_path, FIRST, SECOND)
    note(tmp_path, "a", FIRST)
    found = share(tmp_path, "a")
    assert [file.path for file in found.own] == files(tmp_path, path_of(FIRST)[:1:-1])
    assert [(stay.agents, stay.following) for stay in found.stays] == [((), 1), ((), 1)]


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
    found = StoredPaths(judge(Listing(tmp_path).records), here)
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
    assert set(own(tmp_path, "a")) == {
        *files(tmp_path, path_of(FIRST)[2:]),
        file_of(tmp_path, path_of(FIRST[:600])[-1]),
    }
    # A tail that only begins alike is another's.
    assert [stay.file.path for stay in found.stays] == stays[1:]


@pytest.mark.parametrize("kind", [WINDOW, STATE])
def test_checkpoints_go_and_stay_with_the_tokens_that_they_stand_behind(
    tmp_path: Path, kind: str
) -> None:
    keep(tmp_path, FIRST, SECOND)
    note(tmp_path, "a", FIRST)
    note(tmp_path, "b", SECOND)
    shared = [replace(path_of(FIRST[:n])[-1], kind=kind) for n in (100, 256, 512)]
    mine = [replace(path_of(FIRST[:n])[-1], kind=kind) for n in (600, 768, 812)]
    place(tmp_path, [*shared, *mine])
    assert set(own(tmp_path, "a")) == set(files(tmp_path, [*path_of(FIRST)[2:], *mine]))
    others = {stay.file.path: stay.agents for stay in share(tmp_path, "a").stays}
    assert others == dict.fromkeys(files(tmp_path, [*path_of(FIRST)[:2], *shared]), ("b",))


@pytest.mark.parametrize("kind", [WINDOW, STATE])
def test_a_checkpoint_inside_of_a_block_stays_for_another_block_that_begins_with_its_tokens(
    tmp_path: Path, kind: str
) -> None:
    system = SYSTEM[:300]
    first, second = [*system, *range(1000, 1080)], [*system, *range(2000, 2080)]
    keep(tmp_path, first, second)
    note(tmp_path, "a", first)
    note(tmp_path, "b", second)
    shared, mine, theirs = (
        replace(path_of(t)[-1], kind=kind) for t in (system, first[:301], second[:301])
    )
    place(tmp_path, [shared, mine, theirs])
    assert set(own(tmp_path, "a")) == set(files(tmp_path, [path_of(first)[1], mine]))
    assert set(own(tmp_path, "b")) == set(files(tmp_path, [path_of(second)[1], theirs]))
    # It is listed for the one whose edge it is noted at.
    stays = [
        (name, stay)
        for name in "ab"
        for stay in share(tmp_path, name).stays
        if stay.file.path == file_of(tmp_path, shared)
    ]
    ((name, stay),) = stays
    assert (stay.agents, stay.following) == (("b",) if name == "a" else ("a",), 1)
    delete(tmp_path, "b", yes=True)
    assert set(own(tmp_path, "a")) == set(files(tmp_path, [*path_of(first), shared, mine]))


def test_a_checkpoint_at_a_tail_that_was_taken_over_does_not_hide_the_fuller_block(
    tmp_path: Path,
) -> None:
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


# -- random trees ----------------------------------------------------------------------------------


class Tree:
    """Conversations that branch anywhere, some of them agents'; tails that were taken over may
    be gone or left behind.
    """

    def __init__(self, seed: int, root: Path) -> None:
        rng = random.Random(seed)
        self.agents: dict[str, tuple[int, ...]] = {}
        self.records: dict[tuple[str, tuple[int, ...]], Record] = {}
        lines: list[list[int]] = [[]]
        for number in range(rng.randrange(3, 9)):
            line = rng.choice(lines)
            line = line[
                : rng.choice([len(line), rng.randrange(len(line) + 1), len(line) // 256 * 256])
            ]
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
            self.records[BLOCK, tuple(line[: record.end])] = record
        for kind in (WINDOW, STATE):
            if rng.random() < 0.4:
                end = rng.randrange(1, len(line) + 1)
                self.records[kind, tuple(line[:end])] = replace(path_of(line[:end])[-1], kind=kind)

    def _drop(self, rng: random.Random) -> None:
        """Most tails that a fuller block covers, and a few others, as the budget does."""
        blocks = [tokens for kind, tokens in self.records if kind == BLOCK]
        covered = [
            key
            for key in self.records
            if key[0] == BLOCK and any(_covers(other, key[1]) for other in blocks)
        ]
        gone = [key for key in covered if rng.random() < 0.7] + [
            key for key in self.records if rng.random() < 0.05
        ]
        for key in set(gone):
            del self.records[key]

    def edges(self) -> set[tuple[int, ...]]:
        """The blocks that a chain of whole blocks leads to, without those that are the beginning of
        another one.

        An agent's end is one of them all the same.
        """
        blocks = {tokens for kind, tokens in self.records if kind == BLOCK and tokens}
        reached = {t for t in blocks if all(t[:end] in blocks for end in range(256, len(t), 256))}
        ends = set(self.agents.values())
        return {t for t in reached if t in ends or not any(_covers(other, t) for other in reached)}

    def path(self, name: str) -> list[tuple[int, ...]]:
        """The edges of an agent: whole blocks, and the first one that its end is the beginning
        of.
        """
        tokens, found = self.agents[name], list[tuple[int, ...]]()
        for start in range(0, len(tokens), 256):
            end = tokens[: start + 256]
            at = sorted(edge for edge in self.edges() if edge == end or _covers(edge, end))
            if not at:
                break
            found.append(at[0])
        return found

    def needs(self, name: str) -> set[tuple[int, ...]]:
        """The edges that an agent may continue from: its end alone where that is there."""
        tokens, edges = self.agents[name], self.edges()
        ends = {tokens[: start + 256] for start in range(0, len(tokens), 256)}
        return {
            edge
            for edge in edges
            for end in ends
            if edge == end or (_covers(edge, end) and end not in edges)
        }

    def own(self, name: str) -> set[tuple[str, tuple[int, ...]]]:
        """The records of the edges that only this agent needs and nothing follows, and what
        nothing leads to.
        """
        tokens, path, edges = self.agents[name], self.path(name), self.edges()
        others = set().union(*(self.needs(other) for other in self.agents if other != name))
        own = set[tuple[int, ...]]()
        for edge in reversed(path):
            followed = any(
                len(edge) % 256 == 0 and other[: len(edge)] == edge
                for other in edges - own - {edge}
            )
            if edge in others or followed or len(edge) > len(tokens):
                break
            own.add(edge)
        found = set()
        for kind, t in self.records:
            over = {edge for edge in edges if edge == t or _covers(edge, t)}
            # A block goes with one that has its tokens and more, and a checkpoint with the last one
            # that begins with its tokens.
            goes = (
                t in own
                if kind == BLOCK and t in edges
                else bool(over & own)
                if kind == BLOCK
                else over and over <= own
            )
            if goes:
                found.add((kind, t))
        ends = [tokens[: start + 256] for start in range(0, len(tokens), 256)]
        theirs = {
            t[: start + 256]
            for other, t in self.agents.items()
            if other != name
            for start in range(0, len(t), 256)
        }
        lost = {end for end in ends[len(path) :] if end not in theirs}
        return found | {key for key in self.records if key[1] in lost}


def _covers(whole: tuple[int, ...], part: tuple[int, ...]) -> bool:
    """Whether a block has the tokens of a shorter one and more."""
    return (
        len(whole) > len(part) > 0
        and (len(whole) - 1) // 256 == (len(part) - 1) // 256
        and whole[: len(part)] == part
    )


@pytest.mark.parametrize("seed", seeds(8, 120))
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
    assert (report["removed"]["records"], report["removed"]["bytes"]) == (
        len(going),
        sum(len(before[p]) for p in going),
    )
    assert report["clean"]
    assert report["gone"] == report["removed"]
    assert report["whole"]["records"] == len(report["stays"])
    # The others have what they had, and only the name has gone.
    del figures[name]
    assert {
        agent.name: on_disk(tmp_path, agent.name) for agent in Agents(tmp_path).all()
    } == figures
    for record in tree.records.values():
        if file_of(tmp_path, record) in after:
            read(Disk(), file_of(tmp_path, record), Expected(NAMESPACE, record.kind))


def test_the_random_trees_have_what_they_are_for(tmp_path: Path) -> None:
    """Some agents share, some stand on fuller blocks, some have checkpoints of their own, some
    nothing.
    """
    seen = {"own": 0, "shared": 0, "fuller": 0, "checkpoints": 0, "nothing": 0}
    for seed in range(40):
        tree = Tree(seed, tmp_path / str(seed))
        for name in tree.agents:
            mine, path = tree.own(name), tree.path(name)
            seen["own"] += bool(mine)
            seen["shared"] += any((BLOCK, edge) not in mine for edge in path)
            seen["fuller"] += bool(path) and len(path[-1]) > len(tree.agents[name])
            seen["checkpoints"] += any(kind != BLOCK for kind, _ in mine)
            seen["nothing"] += not mine
    assert min(seen.values()) > 5, seen


@pytest.mark.parametrize("order", list(permutations("abc")))
def test_agents_deleted_one_after_the_other_leave_only_what_has_no_name(
    tmp_path: Path, order: tuple[str, ...]
) -> None:
    # The end of c has its own record, and is in a block of the others.
    keep(tmp_path, FIRST, SECOND, FIRST[:300])
    for name, tokens in (("a", FIRST), ("b", SECOND), ("c", FIRST[:300])):
        note(tmp_path, name, tokens)
    for name in order:
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
