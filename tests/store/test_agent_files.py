"""Agents as files: hostile names, crashes, other processes, disks that fail, and files that are not what they should be."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import subprocess
import sys
import tempfile
import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from forks import Forks
from hypothesis import given
from hypothesis import strategies as st
from store import children
from store.children import NEW_HASHES, OLD_HASHES, act
from store.disks import COMMIT, BrokenDisk, CountedDisk, CutDisk, FailingDisk, PowerCut, QuickDisk
from store.stores import temporaries
from thorough import tried

from mlx_blockpool.errors import BadRecordError, StoreError
from mlx_blockpool.store import agent_files as agents_module
from mlx_blockpool.store.agent_files import Agent, Agents, decode, encode, shown, turn_of
from mlx_blockpool.store.fs import Buffer, Disk, sweep

LONG_AGO = 1_000_000_000
ANY_TEXT = st.text(st.characters(), max_size=320) | st.text(st.characters(categories=["Cs"]), max_size=4)
HOSTILE = [
    "", ".", "..", "/", "../../etc/passwd", "a/b", "\\", "a\0b", "nul", "CON", "com1.txt", "~", ".hidden", ".writing-1-2", "-rf",
    "A", "a", "x" * 300, "é", "e\u0301", "ß", "ss", "İ", "\ud800", "\ud83d\ude00", "\U0001f600", "a.json", "a ", "a\n",
    "\x1b[31m",
]  # fmt: skip


@pytest.fixture
def agents(tmp_path: Path) -> Agents:
    return Agents(tmp_path, QuickDisk())


def one(agents: Agents, name: str = "Old", hashes: list[bytes] = OLD_HASHES, tokens: int = 700) -> Agent:
    return agents.note(name, "model", "tiny", hashes, tokens)


def files(agents: Agents) -> list[Path]:
    return sorted(agents.folder.iterdir())


def age(agents: Agents) -> None:
    """As if nobody had changed a file for long."""
    for path in files(agents):
        os.utime(path, (LONG_AGO, LONG_AGO))


# -- what is kept --------------------------------------------------------------------------------------------------------


def test_a_noted_agent_is_there_again(agents: Agents, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 5000.5)
    found = one(agents)
    assert found == Agent("Old", "model", "tiny", tuple(OLD_HASHES), 700, created=5000, used=5000, pinned=False)
    assert Agents(agents.folder.parent).get("Old") == found
    assert agents.all() == [found]
    assert found.last_hash == OLD_HASHES[-1]
    (path,) = files(agents)
    assert path.stat().st_mode & 0o777 == 0o600
    assert agents.folder.stat().st_mode & 0o777 == 0o700


def test_a_later_turn_keeps_when_it_was_created_and_the_pin(agents: Agents, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 5000.0)
    one(agents)
    agents.pin("Old")
    monkeypatch.setattr("time.time", lambda: 6000.0)
    found = agents.note("Old", "other", "big", NEW_HASHES, 1000)
    assert found == Agent("Old", "other", "big", tuple(NEW_HASHES), 1000, created=5000, used=6000, pinned=True)
    assert agents.get("Old") == found
    assert agents.unpin("Old") == replace(found, pinned=False) == agents.get("Old")


def test_a_turn_that_changes_nothing_is_written_once_a_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = BrokenDisk()
    agents = Agents(tmp_path, disk)
    for now, writes in ((5000, 1), (5059, 1), (5060, 2), (5119, 2), (5000, 3)):
        monkeypatch.setattr("time.time", lambda now=now: float(now))
        one(agents)
        assert disk.calls.count("rename") == writes
    one(agents, tokens=701)
    assert disk.calls.count("rename") == 4


def test_several_turns_are_noted_with_one_sync_of_the_folder(tmp_path: Path) -> None:
    one(Agents(tmp_path), "pinned")
    Agents(tmp_path).pin("pinned")
    disk = CountedDisk()
    names = ["pinned", *(f"agent {number}" for number in range(40))]
    turns = [turn_of(name, "other", "big", NEW_HASHES, 1000) for name in names]
    noted, failed = Agents(tmp_path, disk).note_all(turns)
    assert ([agent.name for agent in noted], failed) == (names, [])
    assert Agents(tmp_path).all() == sorted(noted, key=lambda agent: agent.name)
    assert [agent.name for agent in noted if agent.pinned] == ["pinned"]
    assert disk.calls.count("rename") == 41
    # The folder is synced last, by the same call as a file.
    assert disk.calls.count("sync") == 42
    assert disk.calls[-2:] == ["sync_directory", "sync"]
    assert disk.calls.count("sync_directory") == 1


def test_of_several_turns_those_that_fail_fail_alone(tmp_path: Path) -> None:
    class Full(Disk):
        def rename(self, old: Path, new: Path) -> None:
            if new.name.startswith("agent-1"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            super().rename(old, new)

        def write(self, fd: int, buffers: Iterable[Buffer]) -> None:
            if any(b"agent-2" in bytes(buffer) for buffer in buffers):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            super().write(fd, buffers)

    noted, failed = Agents(tmp_path, Full()).note_all([turn_of(f"agent-{n}", "m", "tiny", NEW_HASHES, 1000) for n in range(5)])
    assert [agent.name for agent in noted] == ["agent-0", "agent-3", "agent-4"] == [a.name for a in Agents(tmp_path).all()]
    assert sorted(error.errno or 0 for error in failed) == [errno.EIO, errno.ENOSPC]
    assert temporaries(tmp_path) == []


def test_an_agent_that_has_nothing_yet(agents: Agents) -> None:
    found = one(agents, "new", [], 0)
    assert agents.get("new") == found
    assert found.last_hash is None


def test_hashes_that_do_not_cover_the_tokens_are_our_own_bug(agents: Agents) -> None:
    with pytest.raises(AssertionError, match="3 hashes for 769 tokens; needed 4"):
        one(agents, tokens=769)


def test_nothing_there_is_none(agents: Agents) -> None:
    assert agents.get("Old") is None
    assert agents.all() == []
    assert not agents.folder.exists()


# -- names ---------------------------------------------------------------------------------------------------------------


@tried(40, 500)
@given(st.lists(ANY_TEXT | st.sampled_from(HOSTILE), min_size=1, max_size=4, unique=True))
def test_any_names_come_back_and_never_leave_the_folder(names: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        outer = Path(folder)
        agents = Agents(outer / "store", QuickDisk())
        for tokens, name in enumerate(names, 513):
            one(agents, name, tokens=tokens)
        found = agents.look()
        assert found.bad == []
        assert {agent.name: agent.tokens for agent in found.agents} == {name: n for n, name in enumerate(names, 513)}
        assert [agents.get(name).name for name in names] == names  # type: ignore[union-attr]
        assert sorted(outer.rglob("*")) == sorted([outer / "store", agents.folder, *files(agents)])
        assert len({unicodedata.normalize("NFKD", path.name).casefold() for path in files(agents)}) == len(names)


def test_every_hostile_name_can_be_renamed_and_forked_into_every_other(agents: Agents) -> None:
    one(agents, HOSTILE[0])
    for old, new in pairwise(HOSTILE):
        assert agents.rename(old, new).name == new
        assert [agent.name for agent in agents.all()] == [new]
    for name in HOSTILE[:-1]:
        agents.fork(HOSTILE[-1], name)
    assert [agent.name for agent in agents.all()] == sorted(HOSTILE)
    for name in HOSTILE:
        agents.remove(name)
    assert files(agents) == []


@pytest.mark.parametrize(("name", "word"), [("writer", "writer"), ("Planner 2", "Planner 2"), ("père", "père")])
def test_a_plain_name_is_shown_as_it_is(name: str, word: str) -> None:
    assert shown(name) == word


@pytest.mark.parametrize("name", ["\x1b[31m", "a\nb", "\u202eabc", "X" * 41, "", " a", "\ud800"])
def test_a_name_that_could_deceive_a_terminal_is_shown_as_its_file(name: str) -> None:
    assert "~" in shown(name)
    assert shown(name).isascii()
    assert shown(name).isprintable()


# -- rename, fork, remove --------------------------------------------------------------------------------------------------


def test_a_rename_changes_the_name_alone(agents: Agents) -> None:
    one(agents)
    before = agents.pin("Old")
    assert agents.rename("Old", "New") == replace(before, name="New")
    assert agents.get("Old") is None
    assert agents.get("New") == replace(before, name="New")
    # Nothing is left of the old name: it can be taken, and the file copied.
    assert b"Old" not in files(agents)[0].read_bytes()


def test_a_rename_whose_last_step_fails_is_done(tmp_path: Path) -> None:
    before = one(Agents(tmp_path, QuickDisk()))
    disk = FailingDisk(len(COMMIT) + 3, errno.ENOSPC)
    assert Agents(tmp_path, disk).rename("Old", "New").name == "New"
    assert disk.calls[disk.k] == "create"
    assert Agents(tmp_path).all() == [replace(before, name="New")]


def test_a_fork_has_the_same_path_and_a_life_of_its_own(agents: Agents, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 5000.0)
    one(agents)
    before = agents.pin("Old")
    monkeypatch.setattr("time.time", lambda: 9000.0)
    assert agents.fork("Old", "New") == replace(before, name="New", created=9000, used=9000, pinned=False)
    one(agents, "New", NEW_HASHES, 1000)
    assert agents.get("Old") == before


@pytest.mark.parametrize("change", [Agents.rename, Agents.fork])
def test_a_name_that_is_taken_is_refused(agents: Agents, change: Callable[..., Agent]) -> None:
    before = [one(agents, "New", NEW_HASHES, 1000), one(agents)]
    for new in ("New", "Old"):
        with pytest.raises(StoreError, match=f"An agent {new} exists in .* already. Choose another name."):
            change(agents, "Old", new)
    assert agents.all() == before
    # What cannot be read may be somebody's.
    files(agents)[0].write_bytes(b"torn")
    bad = "New" if agents.get("New") is None else "Old"
    with pytest.raises(StoreError, match="already"):
        change(agents, "Old" if bad == "New" else "New", bad)


@pytest.mark.parametrize("change", ["pin", "unpin", "rename", "fork", "remove"])
def test_a_name_that_is_not_there_is_refused(agents: Agents, change: str) -> None:
    names = ("x", "y") if change in ("rename", "fork") else ("x",)
    with pytest.raises(StoreError, match=r"There is no agent x in .*agents\. The agents are: none\."):
        getattr(agents, change)(*names)
    assert not agents.folder.exists()
    one(agents)
    with pytest.raises(StoreError, match=r"There is no agent x in .*agents\. The agents are: Old\."):
        getattr(agents, change)(*names)


def test_remove_takes_the_name_away(agents: Agents) -> None:
    before = one(agents)
    assert agents.remove("Old") == before
    assert files(agents) == []


# -- pins ------------------------------------------------------------------------------------------------------------------


def test_files_that_did_not_change_are_not_read_again(tmp_path: Path) -> None:
    disk = BrokenDisk()
    agents, elsewhere = Agents(tmp_path, disk), Agents(tmp_path, QuickDisk())
    for name in ("a", "b"):
        one(elsewhere, name)
    elsewhere.pin("a")
    age(elsewhere)
    for reads in (2, 0):
        disk.calls.clear()
        assert [(a.name, a.pinned) for a in agents.all()] == [("a", True), ("b", False)]
        assert disk.calls.count("read") == reads
    # A young file may change once more within the same tick of the clock.
    elsewhere.note("a", "model", "tiny", NEW_HASHES, 1000)
    for _ in range(2):
        disk.calls.clear()
        assert [list(agent.hashes) for agent in agents.all()] == [NEW_HASHES, OLD_HASHES]
        assert disk.calls.count("read") == 1
    elsewhere.unpin("a")
    assert not any(agent.pinned for agent in agents.all())


# -- crashes ---------------------------------------------------------------------------------------------------------------

ACTIONS = ["note", "pin", "fork", "rename"]
CALLS = dict.fromkeys(ACTIONS, COMMIT) | {"rename": [*COMMIT, "rename", "sync_directory", "sync", *COMMIT]}


def run_child(processes: Forks, folder: Path, k: int, action: str) -> subprocess.CompletedProcess[str]:
    return processes.run(children.PROGRAM, "change", str(folder), str(k), action)


def states(action: str, before: Agent) -> tuple[list[Agent], list[Agent]]:
    """All agents before and after an action, times aside."""
    after = {
        "note": [replace(before, hashes=tuple(NEW_HASHES), tokens=1000)],
        "pin": [replace(before, pinned=True)],
        "fork": [replace(before, name="New"), before],
        "rename": [replace(before, name="New")],
    }
    return [before], after[action]


def timeless(found: list[Agent], before: Agent) -> list[Agent]:
    return [replace(agent, created=before.created, used=before.used) for agent in found]


@pytest.mark.parametrize("action", ACTIONS)
def test_a_change_is_these_calls(tmp_path: Path, processes: Forks, action: str) -> None:
    before = one(Agents(tmp_path, QuickDisk()))
    child = run_child(processes, tmp_path, 100, action)
    assert child.stdout.split() == CALLS[action], child.stderr
    assert timeless(Agents(tmp_path).all(), before) == states(action, before)[1]


@pytest.mark.sampled
@pytest.mark.parametrize(("action", "k"), [(action, k) for action in ACTIONS for k in range(len(CALLS[action]))])
def test_a_process_that_dies_leaves_the_old_state_or_the_new(tmp_path: Path, processes: Forks, action: str, k: int) -> None:
    agents = Agents(tmp_path, QuickDisk())
    before = one(agents)
    child = run_child(processes, tmp_path, k, action)
    assert child.returncode == 77, child.stderr

    found = agents.look()
    assert found.bad == []
    # In a rename the first commit only prepares.
    turning = CALLS[action].index("rename", COMMIT.index("rename") + 1) if action == "rename" else COMMIT.index("rename")
    old, new = states(action, before)
    assert timeless(found.agents, before) == (new if k > turning else old)
    assert len(sweep(Disk(), agents.folder, older_than=float("inf"))) <= 1
    assert [path.name for path in files(agents)] == sorted(path.name for path in files(agents) if path.suffix == ".json")
    # The next one can do it, and the agent goes on.
    if k <= turning:
        act(agents, action)
    assert timeless(agents.all(), before) == new
    agents.note(new[0].name, "model", "tiny", OLD_HASHES[:1], 200)


class ReadableCutDisk(CutDisk):
    """A disk in memory whose power goes, and that can be read before."""

    def read(self, path: Path, start: int = 0, size: int | None = None) -> bytes:
        file = self.names.get(path)
        if file is None:
            raise FileNotFoundError(path)
        return self.contents[file][start : None if size is None else start + size]


@pytest.mark.parametrize("action", [*ACTIONS, "first"])
def test_a_power_cut_leaves_the_old_state_or_the_new(action: str) -> None:
    root = Path("/no-disk-of-this-machine")

    def opened(k: int | None = None) -> tuple[ReadableCutDisk, Agents]:
        disk = ReadableCutDisk()
        agents = Agents(root, disk)
        if action != "first":
            one(agents)
        disk.calls.clear()
        disk.k = k
        return disk, agents

    def change(agents: Agents) -> None:
        act(agents, "note" if action == "first" else action)

    def remains(disk: ReadableCutDisk) -> set[tuple[tuple[str, int, bool], ...]]:
        """Which agents may be found, each by name, tokens and pin; a torn one fails here."""
        found = set()
        for still in disk.after_power_cut():
            agents = [decode(still.files[path], path.stem) for path in sorted(still.files) if path.suffix == ".json"]
            found.add(tuple((agent.name, agent.tokens, agent.pinned) for agent in agents))
        return found

    whole, agents = opened()
    (old,) = remains(whole)
    change(agents)
    (new,) = remains(whole)
    assert new != old
    for k in range(len(whole.calls)):
        disk, agents = opened(k)
        with pytest.raises(PowerCut):
            change(agents)
        assert remains(disk) <= {old, new}


# -- disks that fail, and other processes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("for_good", [False, True])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_disk_that_fails_is_an_error_for_the_caller_alone(tmp_path: Path, code: int, for_good: bool) -> None:
    before = one(Agents(tmp_path, QuickDisk()))
    for action in ACTIONS:
        for k in range(COMMIT.index("sync_directory")):
            disk = FailingDisk(k, code, for_good)
            with pytest.raises(OSError, match=os.strerror(code)) as caught:
                act(Agents(tmp_path, disk), action)
            assert caught.value.errno == code
            assert Agents(tmp_path).look() == ([before], [])
            assert for_good or temporaries(tmp_path) == []
    sweep(Disk(), tmp_path / "agents", older_than=float("inf"))


def test_a_store_that_cannot_be_made_is_an_error_for_the_caller_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    agents = Agents(tmp_path / "file")
    with pytest.raises(NotADirectoryError):
        one(agents)
    with pytest.raises(OSError, match="Not a directory"):
        agents.all()


def test_a_folder_that_vanished_is_made_again(agents: Agents) -> None:
    one(agents)
    for path in files(agents):
        path.unlink()
    agents.folder.rmdir()
    assert agents.all() == []
    one(agents)
    assert len(agents.all()) == 1


def test_two_processes_note_one_agent_and_a_third_pins_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents_module, "LOCK_SECONDS", 60)
    agents = Agents(tmp_path, QuickDisk())
    created = one(agents, "shared").created
    processes = [subprocess.Popen([sys.executable, children.__file__, "note", str(tmp_path), str(n), "60"]) for n in (1, 2)]
    pinned = 0
    while any(child.poll() is None for child in processes):
        found = agents.look()
        assert found.bad == []
        (agent,) = found.agents
        assert agent.pinned == bool(pinned % 2)
        assert agent.created == created
        assert len(set(agent.hashes)) == 1 or agent.hashes == tuple(OLD_HASHES)
        (agents.unpin if pinned % 2 else agents.pin)("shared")
        pinned += 1
    assert [child.wait() for child in processes] == [0, 0]
    assert pinned
    assert [path.name for path in files(agents)] == ["shared.json"]


def test_nobody_waits_for_ever_for_another_process(agents: Agents, monkeypatch: pytest.MonkeyPatch) -> None:
    before = one(agents)
    monkeypatch.setattr(agents_module, "LOCK_SECONDS", 0.02)
    fd = os.open(agents.folder, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with pytest.raises(TimeoutError, match="another process has kept the lock"):
        agents.pin("Old")
    assert agents.get("Old") == before
    os.close(fd)
    assert agents.pin("Old").pinned


def test_a_file_system_without_locks_is_written_all_the_same(agents: Agents, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert one(agents) == agents.get("Old")


# -- files that are not what they should be ---------------------------------------------------------------------------------


def test_a_file_with_any_change_is_bad_and_named(agents: Agents) -> None:
    rng = random.Random(0)
    one(agents)
    (path,) = files(agents)
    data = path.read_bytes()
    for _ in range(300):
        changed = bytearray(data)
        changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(changed)
        ((bad, reason),) = agents.look().bad
        assert (bad, agents.get("Old")) == (path, None)
        assert reason.startswith((f"{path}: The file of an agent ", f"{path}: This is not the file of an agent: "))
        with pytest.raises(BadRecordError):
            agents.need("Old")
    for size in range(0, len(data), 7):
        path.write_bytes(data[:size])
        assert len(agents.look().bad) == 1
    # The next turn writes it anew.
    one(agents)
    assert agents.look().bad == []


TEXTS = [b"", b"[]", b"{}", b"null", b'"x"', b"\x00", b"\xff\xfe", b"[" * 100_000, b'{"format":' * 5000, b"9" * 5000]


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_a_file_of_something_else_is_bad(agents: Agents, text: bytes) -> None:
    agents.folder.mkdir()
    (agents.folder / "a.json").write_bytes(text)
    assert [path.name for path, _ in agents.look().bad] == ["a.json"]


PROPER = Agent("a", "model", "tiny", tuple(OLD_HASHES), 700, 1, 2)


@pytest.mark.parametrize(
    "agent",
    [
        replace(PROPER, tokens=769),
        replace(PROPER, tokens=-1, hashes=()),
        replace(PROPER, tokens=1 << 60, hashes=()),
        replace(PROPER, used=-1),
        replace(PROPER, created=1 << 50),
        replace(PROPER, created=float("nan")),  # type: ignore[arg-type]
        replace(PROPER, used=2.0),  # type: ignore[arg-type]
        replace(PROPER, pinned=1),  # type: ignore[arg-type]
        replace(PROPER, namespace=None),  # type: ignore[arg-type]
        replace(PROPER, model_id=[]),  # type: ignore[arg-type]
        replace(PROPER, hashes=(b"short",) * 3),
        replace(PROPER, name="b"),
    ],
)
def test_a_sealed_file_that_no_agent_makes_is_bad(agent: Agent) -> None:
    with pytest.raises(BadRecordError):
        decode(encode(agent), "a")
    assert decode(encode(PROPER), "a") == PROPER


def test_a_file_of_another_version_is_bad_and_says_so(agents: Agents) -> None:
    one(agents)
    (path,) = files(agents)
    path.write_bytes(path.read_bytes().replace(b'"version": 1', b'"version": 2'))
    assert "has format ('mlx-blockpool agent', 2); this version reads" in agents.look().bad[0][1]


def test_a_file_under_another_name_is_bad(agents: Agents) -> None:
    one(agents)
    (path,) = files(agents)
    path.rename(path.with_name("mine.json"))
    assert "is called mine; by the agent's name it is old~" in agents.look().bad[0][1]


def test_links_pipes_folders_and_temporaries_are_no_agents(agents: Agents, tmp_path: Path) -> None:
    one(agents)
    (path,) = files(agents)
    (agents.folder / "link.json").symlink_to(path)
    os.mkfifo(agents.folder / "pipe.json")
    (agents.folder / "folder.json").mkdir()
    (agents.folder / ".writing-1-2.json").write_text("x")
    (agents.folder / "notes.txt").write_text("x")
    found = agents.look()
    assert ([agent.name for agent in found.agents], found.bad) == (["Old"], [])


def test_a_file_that_goes_away_while_they_are_listed_is_no_agent(tmp_path: Path) -> None:
    class Vanishing(QuickDisk):
        def read(self, path: Path, start: int = 0, size: int | None = None) -> bytes:
            path.unlink(missing_ok=True)
            return super().read(path, start, size)

    one(Agents(tmp_path, QuickDisk()))
    assert Agents(tmp_path, Vanishing()).look() == ([], [])
