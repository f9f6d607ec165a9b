"""mlx-blockpool store agents and agent, called as a user calls them."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from models import save_model
from store.chains import file_of, hashes_of, keep, note, path_of
from store.stores import NAMESPACE, record_files
from test_cli_store import fill, open_prefix

from mlx_blockpool.cli import main
from mlx_blockpool.commands import agents as room
from mlx_blockpool.config import StoreConfig
from mlx_blockpool.store import db
from mlx_blockpool.store.agents import Agents
from mlx_blockpool.store.fs import safe_name
from mlx_blockpool.store.scan import Listing
from mlx_blockpool.tier.agent_records import AgentRecords

SYSTEM = list(range(512))
FIRST = [*SYSTEM, *range(1000, 1300)]
SECOND = [*SYSTEM, *range(2000, 2100)]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two agents on five records, two of which they share."""
    root = tmp_path / "store"
    keep(root, FIRST, SECOND)
    note(root, "writer", FIRST)
    note(root, "Planner", SECOND)
    return root


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def run(capsys: pytest.CaptureFixture[str], root: Path, *arguments: str, status: int = 0) -> Any:
    """What an action reports."""
    capsys.readouterr()
    assert (
        main(["store", *arguments[:2], "--store-dir", str(root), "--json", *arguments[2:]])
        == status
    )
    return json.loads(capsys.readouterr().out)


def said(capsys: pytest.CaptureFixture[str], root: Path, *arguments: str, status: int = 0) -> str:
    capsys.readouterr()
    assert main(["store", *arguments[:2], "--store-dir", str(root), *arguments[2:]]) == status
    return capsys.readouterr().out


def refusal(capsys: pytest.CaptureFixture[str], root: Path, *arguments: str) -> str:
    """The one line of an error."""
    capsys.readouterr()
    assert main(["store", *arguments[:2], "--store-dir", str(root), *arguments[2:]]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("mlx-blockpool: error: ")
    assert captured.err.count("\n") == 1
    return captured.err.removeprefix("mlx-blockpool: error: ")


def size(*paths: Path) -> int:
    return sum(path.stat().st_size for path in paths)


def names(root: Path) -> list[str]:
    return [agent.name for agent in Agents(root).all()]


# -- agents ----------------------------------------------------------------------------------------


def test_agents_lists_what_each_has_on_disk(capsys: pytest.CaptureFixture[str], root: Path) -> None:
    Agents(root).pin("writer")
    found = run(capsys, root, "agents")
    assert found["folder"] == str(root)
    planner, writer = found["agents"]
    files = [file_of(root, record) for record in path_of(FIRST)]
    assert {
        key: writer[key]
        for key in ("name", "model", "namespace", "tokens", "tokens_on_disk", "pinned")
    } == {
        "name": "writer",
        "model": "tiny",
        "namespace": NAMESPACE,
        "tokens": 812,
        "tokens_on_disk": 812,
        "pinned": True,
    }
    assert writer["own"] == {"records": 2, "bytes": size(*files[2:])}
    assert writer["shared"] == {"records": 2, "bytes": size(*files[:2])} == planner["shared"]
    assert writer["last_hash"] == hashes_of(FIRST)[-1].hex()
    assert writer["created"] == writer["used"]
    assert writer["used"].endswith("Z")
    assert planner["pinned"] is False


def test_agents_for_people(capsys: pytest.CaptureFixture[str], root: Path) -> None:
    Agents(root).pin("writer")
    for record in path_of(SECOND):
        file_of(root, record).unlink()
    lines = said(capsys, root, "agents").splitlines()
    assert lines[0] == f"{root}: 2 agents"
    assert (
        " ".join(lines[2].split()) == "agent model tokens on disk own shared last used (UTC) pinned"
    )
    assert [line.split()[:5] for line in lines[3:]] == [
        ["Planner", "tiny", "0", "of", "612"],
        ["writer", "tiny", "0", "of", "812"],
    ]
    assert [line.endswith("yes") for line in lines[3:]] == [False, True]


def test_a_store_without_agents(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(capsys, tmp_path, "agents") == {"folder": str(tmp_path), "agents": []}
    assert said(capsys, tmp_path, "agents") == f"{tmp_path}: 0 agents\n"
    assert refusal(capsys, tmp_path / "none", "agents").startswith(
        f"{tmp_path / 'none'} is not a folder"
    )
    assert list(tmp_path.iterdir()) == []


# -- names and pins --------------------------------------------------------------------------------


def test_pin_and_unpin(capsys: pytest.CaptureFixture[str], root: Path) -> None:
    assert run(capsys, root, "agent", "pin", "writer")["agent"]["pinned"] is True
    assert [agent.name for agent in Agents(root).all() if agent.pinned] == ["writer"]
    assert said(capsys, root, "agent", "pin", "writer") == (
        "writer is pinned: its records on disk stay when others are removed.\n"
    )
    assert said(capsys, root, "agent", "unpin", "writer") == "writer is no longer pinned.\n"
    assert not any(agent.pinned for agent in Agents(root).all())


def test_fork(capsys: pytest.CaptureFixture[str], root: Path) -> None:
    assert (
        said(capsys, root, "agent", "fork", "writer", "Author")
        == "Author continues from the same point as writer: 812 tokens.\n"
    )
    assert names(root) == ["Author", "Planner", "writer"]
    assert run(capsys, root, "agent", "fork", "writer", "x")["agent"]["tokens"] == 812
    assert refusal(capsys, root, "agent", "fork", "writer", "Planner") == (
        f"An agent Planner exists in {root} already. Choose another name.\n"
    )


@pytest.mark.parametrize("act", ["pin", "unpin", "fork", "delete"])
def test_a_name_that_is_not_there_is_refused(
    capsys: pytest.CaptureFixture[str], root: Path, act: str
) -> None:
    more = ["new"] if act == "fork" else []
    assert refusal(capsys, root, "agent", act, "coder", *more) == (
        f"There is no agent coder in {root}. The agents are: Planner, writer. `store agents` "
        "lists them.\n"
    )


def test_a_name_that_nobody_can_type_is_known_by_its_file(
    capsys: pytest.CaptureFixture[str], root: Path
) -> None:
    for name in ("\x1b[2J\n\ud800", "-v"):
        Agents(root).fork("writer", name)
        shown = next(
            agent["shown"]
            for agent in run(capsys, root, "agents")["agents"]
            if agent["name"] == name
        )
        assert shown in said(capsys, root, "agents")
        assert "\x1b" not in said(capsys, root, "agents")
        assert shown in said(capsys, root, "agent", "pin", "--", shown)
        assert run(capsys, root, "agent", "delete", "--yes", "--", shown)["agent"] == shown
    # Its own name comes before the name of another's file.
    Agents(root).fork("Planner", safe_name("Planner"))
    run(capsys, root, "agent", "pin", safe_name("Planner"))
    assert [
        (agent.name, agent.pinned) for agent in Agents(root).all() if agent.name != "writer"
    ] == [
        ("Planner", False),
        (safe_name("Planner"), True),
    ]


@pytest.mark.parametrize("act", ["pin", "fork", "delete"])
def test_a_disk_that_does_not_let_us_is_an_error_of_one_line(
    capsys: pytest.CaptureFixture[str], root: Path, act: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied", "there")

    monkeypatch.setattr("os.unlink", fail)
    monkeypatch.setattr(db.Database, "transaction", fail)
    more = ["new"] if act == "fork" else ["--yes"] if act == "delete" else []
    assert refusal(capsys, root, "agent", act, "writer", *more).startswith("Cannot continue at ")


# -- delete ----------------------------------------------------------------------------------------


def test_delete_removes_what_only_the_agent_stood_on_and_proves_it(
    capsys: pytest.CaptureFixture[str], root: Path
) -> None:
    mine = [file_of(root, record) for record in path_of(FIRST)[2:]]
    shared = [file_of(root, record) for record in path_of(FIRST)[:2]]
    figures = {"records": 2, "bytes": size(*mine)}
    found = run(capsys, root, "agent", "delete", "writer", "--yes")
    assert (found["deleted"], found["clean"], found["removed"], found["gone"]) == (
        True,
        True,
        figures,
        figures,
    )
    assert (found["still_there"], found["bad"]) == ([], [])
    assert found["whole"] == {"records": 2, "bytes": size(*shared)}
    assert {stay["path"]: (stay["agents"], stay["behind"]) for stay in found["stays"]} == {
        str(path): (["Planner"], 1) for path in shared
    }
    assert names(root) == ["Planner"]
    assert set(record_files(root)) == {file_of(root, record) for record in path_of(SECOND)}
    assert run(capsys, root, "scrub")["clean"] is True


def test_delete_for_people(capsys: pytest.CaptureFixture[str], root: Path) -> None:
    text = said(capsys, root, "agent", "delete", "writer", "--yes")
    assert text.splitlines() == [
        "Removed agent writer and 2 records (3.1 kB) that only it used.",
        "Kept 2 records (3.6 kB) for Planner.",
        "Checked: 2 of 2 are gone, and 2 of 2 are complete.",
    ]
    keep(root, FIRST)
    text = said(capsys, root, "agent", "delete", "Planner", "--yes")
    assert text.splitlines()[1] == "Kept 2 records (3.6 kB) for unnamed conversations."


def test_delete_names_unnamed_conversations_next_to_agents(
    capsys: pytest.CaptureFixture[str], root: Path
) -> None:
    # The third block is for a conversation without a name, the first two are for Planner too.
    keep(root, [*FIRST[:768], *range(7000, 7100)])
    text = said(capsys, root, "agent", "delete", "writer", "--yes")
    assert text.splitlines()[1] == "Kept 3 records (5.7 kB) for Planner, unnamed conversations."


def test_delete_without_a_terminal_needs_yes(
    capsys: pytest.CaptureFixture[str], root: Path
) -> None:
    assert refusal(capsys, root, "agent", "delete", "writer") == (
        f"Refusing to remove agent writer and 2 records (3.1 kB) from {root} "
        "without confirmation: stdin is not a terminal. Pass --yes.\n"
    )
    assert len(record_files(root)) == 5


@pytest.mark.parametrize(("answer", "left"), [("y\n", 3), ("n\n", 5), ("", 5)])
def test_delete_asks_on_a_terminal(
    capsys: pytest.CaptureFixture[str],
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    answer: str,
    left: int,
) -> None:
    asked = Terminal()
    monkeypatch.setattr("sys.stdin", Terminal(answer))
    monkeypatch.setattr("sys.stderr", asked)
    text = said(capsys, root, "agent", "delete", "writer")
    assert f"Remove agent writer and 2 records (3.1 kB) from {root}? [y/N] " in asked.getvalue()
    assert len(record_files(root)) == left
    assert text.startswith("Removed agent writer" if left == 3 else "Agent writer stays.")
    assert names(root) == (["Planner"] if left == 3 else ["Planner", "writer"])


def test_what_another_agent_comes_to_need_while_somebody_is_asked_stays(
    capsys: pytest.CaptureFixture[str], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def agreed(what: str) -> bool:
        Agents(root).fork("writer", "late")
        return True

    monkeypatch.setattr(room, "confirm", agreed)
    found = run(capsys, root, "agent", "delete", "writer")
    assert found["removed"]["records"] == 0
    assert len(record_files(root)) == 5
    assert names(root) == ["Planner", "late"]


def test_a_shared_record_that_is_not_whole_is_named(
    capsys: pytest.CaptureFixture[str], root: Path
) -> None:
    path = file_of(root, path_of(FIRST)[0])
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    found = run(capsys, root, "agent", "delete", "writer", "--yes", status=1)
    assert (found["clean"], [item["path"] for item in found["bad"]]) == (False, [str(path)])
    assert found["whole"]["records"] == 1
    note(root, "writer", FIRST)
    text = said(capsys, root, "agent", "delete", "writer", "--yes", status=1)
    assert f"bad: {path}: Checksum of" in text
    assert text.endswith("Checked: 0 of 0 are gone, and 1 of 2 are complete.\n")


def test_a_record_that_is_there_again_is_named(
    capsys: pytest.CaptureFixture[str], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = file_of(root, path_of(FIRST)[-1])
    data = last.read_bytes()
    looked = AgentRecords.proof

    def proof(*arguments: Any) -> Any:
        last.write_bytes(data)
        return looked(*arguments)

    monkeypatch.setattr(AgentRecords, "proof", proof)
    found = run(capsys, root, "agent", "delete", "writer", "--yes", status=1)
    assert (found["still_there"], found["gone"]["records"], found["clean"]) == (
        [str(last)],
        1,
        False,
    )


def test_files_come_and_go_while_agents_are_looked_at(
    capsys: pytest.CaptureFixture[str], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that writes and drops the records of both agents, and notes them, all the while."""
    # A thread that makes no pause may keep others waiting.
    monkeypatch.setattr(StoreConfig, "lock_seconds", 60)
    done = threading.Event()
    data = {path: path.read_bytes() for path in record_files(root)}

    def serve() -> None:
        turn = 0
        while not done.is_set():
            turn += 1
            for path in data:
                path.unlink(missing_ok=True)
            note(root, "writer", FIRST[: 700 + turn % 100])
            for path, whole in data.items():
                path.with_name(".writing-1-2").write_bytes(whole)
                os.replace(path.with_name(".writing-1-2"), path)

    server = threading.Thread(target=serve)
    server.start()
    try:
        for _ in range(20):
            found = run(capsys, root, "agents")
            assert {agent["name"] for agent in found["agents"]} <= {"Planner", "writer"}
            note(root, "passing", FIRST[:400])
            report = room.delete(root, "passing", yes=True)
            assert (report["deleted"], report["bad"]) == (True, [])
    finally:
        done.set()
        server.join()


@pytest.mark.parametrize("architecture", ["llama", "gpt_oss"])
def test_who_stays_goes_on_where_it_was(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, architecture: str
) -> None:
    folder, root = save_model(tmp_path / "model", architecture), tmp_path / "store"
    system = [n % 90 for n in range(512)]
    prompts = {"writer": [*system, *range(80)], "Planner": [*system, *range(89, 9, -1)] * 2}
    fill(root, folder, *prompts.values())

    def hits(namespace: str = "") -> dict[str, int]:
        """Known tokens of each prompt at a start; noted where a namespace is given."""
        _, prefix = open_prefix(root, folder)
        for name, tokens in prompts.items() if namespace else ():
            match = prefix.index.trie.match(tokens)
            note = (name, namespace, "tiny", [node.hash for node in match.path], match.tokens)
            Agents(root).note(*note)
        found = {
            name: prefix.acquire([*tokens, 7], 1).lookup.hit for name, tokens in prompts.items()
        }
        assert prefix.close()
        return found

    before = hits(next((root / "models").iterdir()).name)
    assert before == {name: len(tokens) for name, tokens in prompts.items()}
    assert [agent["tokens_on_disk"] for agent in run(capsys, root, "agents")["agents"]] == [
        before["Planner"],
        before["writer"],
    ]
    found = run(capsys, root, "agent", "delete", "writer", "--yes")
    assert (found["clean"], found["removed"]["records"] > 0) == (True, True)
    assert hits()["Planner"] == before["Planner"]
    assert hits()["writer"] <= 512
    assert run(capsys, root, "scrub")["clean"] is True


# -- the command -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ["agent"],
        ["agent", "pin"],
        ["agent", "fork", "a"],
        ["agent", "pin", "a", "b"],
        ["agent", "pin", "a", "--yes"],
    ],
)
def test_a_wrong_shape_is_refused(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["store", *arguments])
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("mlx-blockpool store agent")


@pytest.mark.parametrize(
    "module", ["cli", "commands.agents", "commands.transfer", "store.agents", "tier.agent_records"]
)
def test_importing_it_imports_no_mlx(module: str) -> None:
    code = (
        f"import sys, mlx_blockpool.{module}; print([m for m in sys.modules if "
        "m.partition('.')[0] in ('mlx', 'mlx_lm')])"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "[]\n"
    )


def test_the_command_works_in_a_process_of_its_own(root: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "mlx_blockpool.cli",
        "store",
        "agent",
        "delete",
        "writer",
        "--yes",
        "--store-dir",
        str(root),
    ]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Removed agent writer")
    assert len(Listing(root).records) == 3
