"""The server process of bench_agents: started, watched, killed and started again on the same
port and store.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any


class Server:
    """A running server. `life`: how often it was started; `gone` is set while it is not there."""

    def __init__(self, model: Path, folder: Path, pool_bytes: str, *options: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.life = 0
        self.gone = threading.Event()
        self._log = folder / "server.log"
        self._command = [
            sys.executable,
            "-m",
            "mlx_blockpool.cli",
            "serve",
            "--model",
            str(model),
            "--port",
            str(self.port),
        ]
        self._command += [
            "--pool-bytes",
            pool_bytes,
            "--store-dir",
            str(folder / "store"),
            "--log-level",
            "WARNING",
            *options,
        ]
        self._back = threading.Condition()
        self._resident: list[int] = []
        self._start()

    def __enter__(self) -> Server:
        return self

    @property
    def pid(self) -> int:
        return self._process.pid

    def __exit__(self, *_: Any) -> None:
        self._process.terminate()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=log)
        while not self._healthy():
            assert self._process.poll() is None, (
                f"the server did not start:\n{self._log.read_text()[-2000:]}"
            )
            time.sleep(0.05)
        with self._back:
            self.life += 1
            self._resident = []
            self.gone.clear()
            self._back.notify_all()

    def _healthy(self) -> bool:
        try:
            return bool(self.get("/health")["status"] == "ok")
        except OSError:
            return False

    def kill(self, before_start: Callable[[], None] | None = None) -> None:
        """kill -9, and a new one on what was left."""
        self.gone.set()
        self._process.kill()
        self._process.wait()
        if before_start is not None:
            before_start()
        self._start()

    def stop(self) -> float:
        """SIGTERM, and a new one. Returns the seconds until the old one had ended."""
        self.gone.set()
        start = time.monotonic()
        self._process.terminate()
        self._process.wait(timeout=60)
        took = time.monotonic() - start
        self._start()
        return took

    def wait_until_back(self) -> None:
        with self._back:
            assert self._back.wait_for(lambda: not self.gone.is_set(), 120), (
                "the server did not come back"
            )

    def pin(self) -> bool:
        """Keep the server's workers, this process and its children off the first core: only the
        server's own process may use it.

        Returns whether the system can.
        """
        if (
            not hasattr(os, "sched_setaffinity")
            or len(cores := sorted(os.sched_getaffinity(1))) < 2
        ):
            return False
        _pin_threads(self.pid, cores)
        for process in {os.getpid(), *_descendants(os.getpid())} - {self.pid}:
            _pin_threads(process, cores[1:])
        return True

    def keep_apart(self, goes_on: Callable[[], bool]) -> None:
        """Pin what is started meanwhile too."""
        while goes_on() and self.pin():
            time.sleep(0.2)

    def watch(self, kills: list[float], until: float, goes_on: Callable[[], bool]) -> None:
        """Kill it at these times, and look at its memory meanwhile."""
        left = list(kills)
        while time.monotonic() < until and goes_on():
            if left and time.monotonic() >= left[0]:
                left.pop(0)
                self.kill()
            self._resident.append(self._resident_bytes())
            time.sleep(0.2)

    def thirds(self) -> tuple[int, int]:
        """The most resident bytes in the second and in the last third of its last life."""
        third = max(1, len(self._resident) // 3)
        return max(self._resident[third : 2 * third], default=0), max(
            self._resident[2 * third :], default=0
        )

    def _resident_bytes(self) -> int:
        statm = Path(f"/proc/{self._process.pid}/statm")
        return int(statm.read_text().split()[1]) * 4096 if statm.exists() else 0

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as response:
            return json.loads(response.read())

    def speaks(self, path: str) -> bool:
        """Whether there is such an endpoint: a body that asks for nothing is a bad request
        there, and not found elsewhere.
        """
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", b"{}", timeout=30).close()
        except urllib.error.HTTPError as error:
            return error.code != 404
        return True

    def held(self) -> int:
        """Blocks that are held or promised once everything has ended."""
        for _ in range(100):
            found = sum(
                group["held"] + group["reserved"] for group in self.get("/v1/cache")["groups"]
            )
            if not found:
                break
            time.sleep(0.1)
        return found


def _pin_threads(process: int, cores: list[int]) -> None:
    with suppress(OSError):
        for thread in Path(f"/proc/{process}/task").iterdir():
            os.sched_setaffinity(int(thread.name), cores)


def _descendants(process: int) -> list[int]:
    """The processes that a process has started, and that those have."""
    with suppress(OSError):
        children = [
            int(pid)
            for path in Path(f"/proc/{process}/task").glob("*/children")
            for pid in path.read_text().split()
        ]
        return children + [pid for child in children for pid in _descendants(child)]
    return []
