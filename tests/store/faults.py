"""Actions on the database in processes of which each dies, or whose disk fails, one system call
later than the one before.

faults.py folder action how for_good: prints one JSON list, of how each process ended and of what
was there then.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
from store.chains import chain, file_of, place
from store.stores import NAMESPACE

from mlx_blockpool.store.agents import Agents
from mlx_blockpool.store.headers import Headers
from mlx_blockpool.store.scan import Listing

OLD_HASHES = [bytes([n]) * 32 for n in range(1, 4)]
NEW_HASHES = [bytes([n]) * 32 for n in range(5, 9)]
RECORDS = chain(1, 5)
KILLED, TORN = 0, 1


def _note(root: Path, *numbers: int) -> None:
    """Note the headers of these records."""
    headers = Headers(root, NAMESPACE)
    stamps = {file.name: file.stamp for file in Listing(root).records}
    for number in numbers:
        name = file_of(root, RECORDS[number]).relative_to(root).as_posix()
        stamp = stamps[name]
        assert stamp is not None
        headers.add(RECORDS[number], name, stamp)
    headers.write()
    headers.close()


def _fork(root: Path) -> None:
    # Again if a process that died has done it.
    agents = Agents(root)
    if agents.get("New") is None:
        agents.fork("Old", "New")


def _remove(root: Path) -> None:
    if Agents(root).get("Old") is not None:
        Agents(root).remove("Old")


ACTIONS: dict[str, Callable[[Path], object]] = {
    "first": lambda root: Agents(root).note("Old", "model", "tiny", OLD_HASHES, 700),
    "note": lambda root: Agents(root).note("Old", "model", "tiny", NEW_HASHES, 1000),
    "pin": lambda root: Agents(root).pin("Old"),
    "fork": _fork,
    "remove": _remove,
    "headers": lambda root: _note(root, 2, 3, 4),
}


def prepare(root: Path, action: str) -> None:
    root.mkdir()
    place(root, RECORDS)
    if action != "first":
        ACTIONS["first"](root)
        _note(root, 0, 1)


def state(root: Path) -> list[Any]:
    """The agents by name, tokens and pin, and how many headers are noted."""
    stamps = {file.name: file.stamp for file in Listing(root).records if file.stamp is not None}
    agents = [
        (agent.name, agent.tokens, len(agent.hashes), agent.pinned) for agent in Agents(root).all()
    ]
    return [agents, len(Headers(root, NAMESPACE).load(stamps))]


def each_call(folder: Path, action: str, how: int, for_good: bool) -> list[dict[str, Any]]:
    library = ctypes.CDLL(None)
    found: list[dict[str, Any]] = []
    while True:
        root, k = folder / str(len(found)), len(found)
        prepare(root, action)
        before = state(root)
        child = os.fork()
        if child == 0:
            library.arm(k, how, int(for_good))
            try:
                ACTIONS[action](root)
                error = 0
            except OSError as failed:
                error = failed.errno or 1
            os._exit(0 if library.counted() <= k else 200 if error == 0 else error)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        then = state(root)
        ACTIONS[action](root)
        found.append({"status": status, "before": before, "then": then, "again": state(root)})
        found[-1]["left"] = sorted(path.name for path in root.iterdir() if path.name != "models")
        shutil.rmtree(root)
        if status == 0:
            return found


def run(folder: Path, action: str, how: int, for_good: bool = False) -> list[dict[str, Any]]:
    """each_call() in a process of its own.

    The last one is that of an action that nothing happened to.
    """
    library = folder / "faults.so"
    if not library.exists():
        source = Path(__file__).with_suffix(".c")
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    command = [sys.executable, __file__, str(folder), action, str(how), str(int(for_good))]
    done = subprocess.run(
        command,
        env=os.environ | {"LD_PRELOAD": str(library)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    print(
        json.dumps(each_call(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4] == "1"))
    )
