"""Ranks as processes of a ring on this machine, as mlx.launch starts them; it would end all of them
once one has ended.

One process of tests at a time has rings: the ranks of a ring keep as many cores busy while they
wait for each other.
"""

from __future__ import annotations

import contextlib
import fcntl
import inspect
import json
import pickle
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from forks import Program, server_forks

from mlx_blockpool.ranks.group import Ranks

T = TypeVar("T")
TESTS = Path(__file__).parent.parent
LOCK = Path(tempfile.gettempdir()) / "mlx-blockpool-rings.lock"
# How long a program of on_ring() may take.
SECONDS = 60.0

JOIN = """
import os, sys
os.environ.update(MLX_RANK="{rank}", MLX_HOSTFILE={hosts!r})
"""
ACT = """
sys.path.append({tests!r})
import pickle
import mlx.core as mx
from mlx_blockpool.ranks.group import ranks_of
from mlx_blockpool.ranks.head import Head
from {module} import {name} as act
ranks = ranks_of(mx.distributed.init(strict=True, backend="ring"), {kind!r})
found = act(ranks)
with open({file!r}, "wb") as file:
    pickle.dump(found, file)
if not ranks.is_lost:
    mx.synchronize()
    # One that ends while another still computes would be lost for it.
    ranks.exchange(Head())
"""


class _Turn:
    """This process's turn to have rings, which it may nest."""

    def __init__(self) -> None:
        self._users = 0
        self._changing = threading.Lock()

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        with self._changing:
            if not self._users:
                self._file = LOCK.open("w")
                fcntl.flock(self._file, fcntl.LOCK_EX)
            self._users += 1
        try:
            yield
        finally:
            with self._changing:
                self._users -= 1
                if not self._users:
                    self._file.close()


TURN = _Turn()


def free_ports(count: int) -> list[int]:
    """Ports of this machine that are free now."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@contextlib.contextmanager
def ring(code: str, *arguments: str, size: int = 2) -> Iterator[list[Program]]:
    """Processes that all run `code`, as the ranks of one ring; behind the block they have ended."""
    with contextlib.ExitStack() as started:
        started.enter_context(TURN.taken())
        hosts = started.enter_context(tempfile.NamedTemporaryFile("w", suffix=".json"))
        json.dump([[f"127.0.0.1:{port}"] for port in free_ports(size)], hosts)
        hosts.flush()
        programs = [
            JOIN.format(rank=rank, hosts=hosts.name) + code.replace("{rank}", str(rank))
            for rank in range(size)
        ]
        yield [
            started.enter_context(server_forks().start(program, *arguments).ended())
            for program in programs
        ]


def on_ring(
    act: Callable[[Ranks], T], size: int = 2, kind: str = "tensor", ends: Sequence[int] = ()
) -> list[T | None]:
    """What `act`, a function of a module of tests, returns on each rank of a ring.

    `ends`: the status that each rank ends with, 0 where it is left out; one with another status
    than 0 returns nothing.
    """
    module = ".".join(Path(inspect.getfile(act)).relative_to(TESTS).with_suffix("").parts)
    with tempfile.TemporaryDirectory() as folder:
        fields: dict[str, Any] = {
            "tests": str(TESTS),
            "module": module,
            "name": act.__name__,
            "kind": kind,
        }
        with ring(ACT.format(**fields, file=f"{folder}/{{rank}}"), size=size) as ranks:
            # One whose output nobody reads would wait.
            texts = [_read(rank) for rank in ranks]
            statuses = [rank.wait(SECONDS) for rank in ranks]
            wanted = [*ends, *[0] * size][:size]
            assert statuses == wanted, "\n".join(
                f"rank {rank}: {text()}" for rank, text in enumerate(texts)
            )
        files = [Path(folder) / str(rank) for rank in range(size)]
        return [pickle.loads(file.read_bytes()) if file.exists() else None for file in files]


def _read(program: Program) -> Callable[[], str]:
    """Read what a program prints, from now on; the result waits for its end."""
    lines: list[str] = []
    assert program.stderr is not None
    reading = threading.Thread(target=lines.extend, args=[program.stderr], daemon=True)
    reading.start()

    def text() -> str:
        reading.join()
        return "".join(lines)

    return text
