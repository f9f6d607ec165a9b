"""Agents in the database: what is retained of a turn, hostile names, forks, and other processes."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from store import children
from store.faults import NEW_HASHES, OLD_HASHES
from thorough import tried

from mlx_blockpool.config import StoreConfig
from mlx_blockpool.errors import StoreError
from mlx_blockpool.store.agents import Agent, Agents, shown, turn_of
from mlx_blockpool.store.db import DATABASE_FILES

ANY_TEXT = st.text(st.characters(), max_size=320) | st.text(
    st.characters(categories=["Cs"]), max_size=4
)
HOSTILE = [
    "",
    ".",
    "..",
    "/",
    "../../etc/passwd",
    "a/b",
    "\\",
    "a\0b",
    "nul",
    "CON",
    "com1.txt",
    "~",
    ".hidden",
    ".writing-1-2",
    "-rf",
    "A",
    "a",
    "x" * 300,
    "é",
    "e\u0301",
    "ß",
    "ss",
    "İ",
    "\ud800",
    "\ud83d\ude00",
    "\U0001f600",
    "a.json",
    "a ",
    "a\n",
    "\x1b[31m",
]


@pytest.fixture
def agents(tmp_path: Path) -> Agents:
    return Agents(tmp_path / "store")


def one(
    agents: Agents, name: str = "Old", hashes: list[bytes] = OLD_HASHES, tokens: int = 700
) -> Agent:
    return agents.note(name, "model", "tiny", hashes, tokens)


# -- what is kept ----------------------------------------------------------------------------------


def test_a_noted_agent_is_there_again(agents: Agents, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 5000.5)
    found = one(agents)
    assert found == Agent(
        "Old", "model", "tiny", tuple(OLD_HASHES), 700, created=5000, used=5000, pinned=False
    )
    assert Agents(agents.root).get("Old") == found
    assert agents.all() == [found]
    assert found.hashes[-1] == OLD_HASHES[-1]
    assert {path.name for path in agents.root.iterdir()} == set(DATABASE_FILES)
    assert {path.stat().st_mode & 0o777 for path in agents.root.iterdir()} == {0o600}
    assert agents.root.stat().st_mode & 0o777 == 0o700


def test_a_later_turn_keeps_when_it_was_created_and_the_pin(
    agents: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.time", lambda: 5000.0)
    one(agents)
    agents.pin("Old")
    monkeypatch.setattr("time.time", lambda: 6000.0)
    found = agents.note("Old", "other", "big", NEW_HASHES, 1000)
    assert found == Agent(
        "Old", "other", "big", tuple(NEW_HASHES), 1000, created=5000, used=6000, pinned=True
    )
    assert agents.get("Old") == found
    assert agents.unpin("Old") == replace(found, pinned=False) == agents.get("Old")


def test_a_turn_that_changes_nothing_is_written_once_a_minute(
    agents: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    for now, used in ((5000, 5000), (5059, 5000), (5060, 5060), (5119, 5060), (5000, 5000)):
        monkeypatch.setattr("time.time", lambda now=now: float(now))
        one(agents)
        assert Agents(agents.root).need("Old").used == used
    monkeypatch.setattr("time.time", lambda: 5001.0)
    one(agents, tokens=701)
    assert (agents.need("Old").used, agents.need("Old").tokens) == (5001, 701)


def test_several_turns_are_noted_together_or_not_at_all(agents: Agents) -> None:
    one(agents, "pinned")
    agents.pin("pinned")
    names = ["pinned", *(f"agent {number}" for number in range(40))]
    turns = [turn_of(name, "other", "big", NEW_HASHES, 1000) for name in names]
    noted = agents.note_all(turns)
    assert [agent.name for agent in noted] == names
    assert Agents(agents.root).all() == sorted(noted, key=lambda agent: agent.name)
    assert [agent.name for agent in noted if agent.pinned] == ["pinned"]
    with pytest.raises(OverflowError):
        agents.note_all([turn_of("new", "other", "big", [], 0), replace(turns[0], used=1 << 70)])
    assert agents.all() == sorted(noted, key=lambda agent: agent.name)


def test_those_used_last_stay_and_of_one_time_those_written_last(
    agents: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.time", lambda: 5000.0)
    for name in ("c", "other", "b", "pinned", "a"):
        one(agents, name)
    agents.pin("pinned")
    agents.bound(2, lambda name: name != "other", {"c": 5001})
    assert [agent.name for agent in agents.all()] == ["a", "c", "other", "pinned"]


def test_an_agent_that_has_nothing_yet(agents: Agents) -> None:
    found = one(agents, "new", [], 0)
    assert agents.get("new") == found
    assert found.hashes == ()


def test_hashes_that_do_not_cover_the_tokens_are_our_own_bug(agents: Agents) -> None:
    with pytest.raises(AssertionError, match="3 hashes for 769 tokens; needed 4"):
        one(agents, tokens=769)


def test_nothing_there_is_none(agents: Agents) -> None:
    assert agents.get("Old") is None
    assert agents.all() == []
    assert not agents.root.exists()


# -- names -----------------------------------------------------------------------------------------


@tried(40, 500)
@given(st.lists(ANY_TEXT | st.sampled_from(HOSTILE), min_size=1, max_size=4, unique=True))
def test_any_names_come_back_and_never_leave_the_folder(names: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        outer = Path(folder)
        agents = Agents(outer / "store")
        for tokens, name in enumerate(names, 513):
            one(agents, name, tokens=tokens)
        assert {agent.name: agent.tokens for agent in agents.all()} == {
            name: n for n, name in enumerate(names, 513)
        }
        assert [agents.need(name).name for name in names] == names
        assert sorted(outer.rglob("*")) == sorted(
            [outer / "store", *(outer / "store" / name for name in DATABASE_FILES)]
        )


def test_every_hostile_name_can_be_forked_into_the_next(agents: Agents) -> None:
    one(agents, HOSTILE[0])
    for old, new in pairwise(HOSTILE):
        assert agents.fork(old, new).name == new
    assert [agent.name for agent in agents.all()] == sorted(HOSTILE)
    for name in HOSTILE:
        agents.remove(name)
    assert agents.all() == []


@pytest.mark.parametrize(
    ("name", "word"), [("writer", "writer"), ("Planner 2", "Planner 2"), ("père", "père")]
)
def test_a_plain_name_is_shown_as_it_is(name: str, word: str) -> None:
    assert shown(name) == word


@pytest.mark.parametrize("name", ["\x1b[31m", "a\nb", "\u202eabc", "X" * 41, "", " a", "\ud800"])
def test_a_name_that_could_deceive_a_terminal_is_shown_as_its_file(name: str) -> None:
    assert "~" in shown(name)
    assert shown(name).isascii()
    assert shown(name).isprintable()


# -- fork, remove ----------------------------------------------------------------------------------


def test_a_fork_has_the_same_path_and_a_life_of_its_own(
    agents: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.time", lambda: 5000.0)
    one(agents)
    before = agents.pin("Old")
    monkeypatch.setattr("time.time", lambda: 9000.0)
    assert agents.fork("Old", "New") == replace(
        before, name="New", created=9000, used=9000, pinned=False
    )
    one(agents, "New", NEW_HASHES, 1000)
    assert agents.get("Old") == before


def test_a_name_that_is_taken_is_refused(agents: Agents) -> None:
    before = [one(agents, "New", NEW_HASHES, 1000), one(agents)]
    for new in ("New", "Old"):
        with pytest.raises(
            StoreError, match=f"An agent {new} exists in .* already. Choose another name."
        ):
            agents.fork("Old", new)
    assert agents.all() == before


@pytest.mark.parametrize("change", ["pin", "unpin", "fork", "remove"])
def test_a_name_that_is_not_there_is_refused(agents: Agents, change: str) -> None:
    names = ("x", "y") if change == "fork" else ("x",)
    with pytest.raises(
        StoreError, match=r"There is no agent x in .*store\. The agents are: none\."
    ):
        getattr(agents, change)(*names)
    assert not agents.root.exists()
    one(agents)
    with pytest.raises(StoreError, match=r"There is no agent x in .*store\. The agents are: Old\."):
        getattr(agents, change)(*names)


def test_remove_takes_the_name_away(agents: Agents) -> None:
    before = one(agents)
    assert agents.remove("Old") == before
    assert agents.all() == []


@pytest.mark.parametrize(
    "change",
    [
        "name = x'ff'",
        "model_id = NULL",
        "hashes = x'00'",
        "tokens = -1",
        "tokens = 'many'",
        "used = NULL",
        "salt = 3.5",
    ],
)
def test_a_damaged_row_is_not_an_agent_and_hurts_no_other(agents: Agents, change: str) -> None:
    one(agents)
    other = one(agents, "other")
    with agents._database.transaction() as connection:
        connection.execute(f"UPDATE agents SET {change} WHERE name = ?", (b"Old",))
    assert agents.all() == [other]
    assert agents.get("Old") is None
    agents.bound(5, lambda _: True, {})
    if not change.startswith("name"):
        assert agents.fork("other", "Old").hashes == other.hashes
    one(agents)
    assert [agent.name for agent in agents.all()] == ["Old", "other"]


# -- other processes -------------------------------------------------------------------------------


def test_a_store_that_cannot_be_made_is_an_error_for_the_caller_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    agents = Agents(tmp_path / "file")
    with pytest.raises(NotADirectoryError):
        one(agents)
    with pytest.raises(NotADirectoryError):
        agents.all()


def test_two_processes_note_one_agent_and_a_third_pins_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StoreConfig, "lock_seconds", 60)
    agents = Agents(tmp_path)
    created = one(agents, "shared").created
    processes = [
        subprocess.Popen([sys.executable, children.__file__, "note", str(tmp_path), str(n), "60"])
        for n in (1, 2)
    ]
    pinned = 0
    while any(child.poll() is None for child in processes):
        (agent,) = agents.all()
        assert agent.pinned == bool(pinned % 2)
        assert agent.created == created
        assert len(set(agent.hashes)) == 1 or agent.hashes == tuple(OLD_HASHES)
        (agents.unpin if pinned % 2 else agents.pin)("shared")
        pinned += 1
    assert [child.wait() for child in processes] == [0, 0]
    assert pinned
