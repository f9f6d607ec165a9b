"""The servers that bench_peers compares: how each is installed and started, and what its log says.

Each one is installed into its own environment in CACHE. Knows no workloads.
"""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse
from importlib import metadata
from pathlib import Path
from typing import Any

from smollm2 import CACHE, gguf_of

# A llama.cpp server for eight agents with one buffer of keys and values.
LLAMA = """
import sys, threading, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.port = sys.argv[1], int(sys.argv[2])
params.hostnames, params.n_parallel, params.kv_unified = ["127.0.0.1"], 8, True
params.n_ctx, params.cache_ram_mib = int(sys.argv[3]), int(sys.argv[4])
server = xllamacpp.Server(params)
threading.Event().wait()
"""
# The BLAS of mlx's wheels for Linux computes 2 GFLOP/s on one core; MKL stands in for it, on one
# core too, for every server that runs on mlx.
BLAS = "mkl==2026.2.0"
START_TIMEOUT, STOP_TIMEOUT = 180.0, 30.0


@dataclass(frozen=True)
class Peer:
    """A server.

    `command`: with {bin}, the folder of its programs, {model}, {gguf}, {port} and {home}.
    `usual`, `small`: more of it, the latter for a memory of {bytes}, {megabytes} or {tokens}.
    `settings`: the command as the page shows it. `computed`: the pattern of its log with the
    number of tokens of a prompt that are computed; without one its usage fields say it.
    """

    name: str
    package: str
    command: tuple[str, ...]
    settings: str
    small: tuple[str, ...]
    usual: tuple[str, ...] = ()
    computed: str = ""

    @property
    def key(self) -> str:
        return re.sub(r"\W", "_", self.name)

    @property
    def version(self) -> str:
        return self.package.partition("==")[2] or metadata.version(self.package)


HERE = ("--model", "{model}", "--port", "{port}")
PEERS = (
    Peer(
        "ours",
        "mlx-blockpool",
        (sys.executable, "-m", "mlx_blockpool.cli", "serve", *HERE),
        "mlx-blockpool serve",
        ("--pool-bytes", "{bytes}"),
    ),
    Peer(
        "stock",
        "mlx-lm",
        (sys.executable, "-m", "mlx_lm", "server", *HERE),
        "mlx_lm.server",
        ("--prompt-cache-bytes", "{bytes}"),
    ),
    Peer(
        "vllm-mlx",
        "vllm-mlx==0.6.0",
        (
            *("{bin}/vllm-mlx", "serve", "{model}", "--host", "127.0.0.1", "--port", "{port}"),
            *("--continuous-batching", "--ssd-cache-dir", "{home}/ssd", "--offline"),
        ),
        "vllm-mlx serve --continuous-batching --ssd-cache-dir DIR",
        ("--cache-memory-mb", "{megabytes}"),
        computed=r"\[schedule\] .*tokens_to_prefill=(\d+)",
    ),
    Peer(
        "rapid-mlx",
        "rapid-mlx==0.16.10",
        (
            *("{bin}/rapid-mlx", "serve", "{model}", "--host", "127.0.0.1", "--port", "{port}"),
            *("--shared-prefix-wait-tokens", "64"),
        ),
        "rapid-mlx serve --shared-prefix-wait-tokens 64",
        ("--cache-memory-mb", "{megabytes}"),
    ),
    Peer(
        "llama.cpp",
        "xllamacpp==2026.10.11549",
        ("{bin}/python", "-c", LLAMA, "{gguf}", "{port}"),
        "xllamacpp.Server with n_parallel=8, kv_unified=True, n_ctx=8192",
        ("{tokens}", "0"),
        ("8192", "8192"),
    ),
)


def environment_of(package: str) -> Path:
    """The programs of a package: in this environment, or in one in CACHE that is made for it."""
    if "==" not in package:
        return Path(sys.executable).parent
    folder = CACHE / package
    if not (folder / "complete").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        backend = ["mlx[cpu]"] if "mlx" in package and platform.system() == "Linux" else []
        pip = [str(folder / "bin/python"), "-m", "pip", "install", "-q", package, *backend]
        subprocess.run(pip, check=True)
        (folder / "complete").touch()
    return folder / "bin"


def blas() -> dict[str, str]:
    """Environment variables that make mlx use a fast BLAS, on machines whose wheels lack one."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return {}
    library = next((environment_of(BLAS).parent / "lib").glob("libmkl_rt.so*"))
    return {
        "LD_PRELOAD": str(library),
        "LD_LIBRARY_PATH": str(library.parent),
        "MKL_THREADING_LAYER": "SEQUENTIAL",
    }


class Stream:
    """One reply as it arrives. `times`: of each event with text. `error`: why none arrived."""

    def __init__(self) -> None:
        self.sent = time.perf_counter()
        self.times: list[float] = []
        self.text, self.error = "", ""
        self.usage: dict[str, Any] = {}

    @property
    def first(self) -> float:
        return self.times[0] - self.sent

    @property
    def gaps(self) -> list[float]:
        """Seconds between two events."""
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]

    @property
    def cached(self) -> int:
        return (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0

    def add(self, event: dict[str, Any]) -> None:
        self.usage = event.get("usage") or self.usage
        for choice in event["choices"]:
            if text := choice["delta"].get("content"):
                self.times.append(time.perf_counter())
                self.text += text


class Server:
    """A running server, whose home is a temporary folder that restarts leave as it is."""

    def __init__(self, peer: Peer, model: Path, memory: dict[str, int] | None = None) -> None:
        self.peer, self.model, self._memory = peer, model, memory
        self.home = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self.log = Path(self.home.name) / "log"
        self.start()

    def start(self) -> None:
        """Start, and wait for the first reply. `started_s`: how long that takes."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        values = {
            "bin": environment_of(self.peer.package),
            "model": self.model,
            "gguf": gguf_of(self.model),
            "port": self.port,
            "home": self.home.name,
            **(self._memory or {}),
        }
        more = self.peer.small if self._memory else self.peer.usual
        command = [part.format(**values) for part in self.peer.command]
        command += [part.format(**values) for part in more]
        private = {"HOME": self.home.name, "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
        own = {name: value for name, value in os.environ.items() if not name.startswith("XDG_")}
        fast = {} if self.peer.name == "llama.cpp" else blas()
        begin = time.perf_counter()
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                command, env=own | private | fast, stdout=log, stderr=log
            )
        hello = [{"role": "user", "content": "Hello"}]
        while self.chat(hello, 1).error:
            late = time.perf_counter() - begin > START_TIMEOUT
            if late or self.process.poll() is not None:
                self.stop()
                raise RuntimeError(f"{self.peer.name} did not start: {self.log_text()[-2000:]}")
            time.sleep(0.1)
        self.started_s = time.perf_counter() - begin

    def chat(
        self,
        messages: list[dict[str, str]],
        max_tokens: int,
        timeout: float = 600.0,
        stream: Stream | None = None,
    ) -> Stream:
        """A greedy reply. The client hangs up after `timeout` seconds."""
        body = {
            "model": str(self.model),
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        found = stream or Stream()
        http = HTTPConnection("127.0.0.1", self.port)
        try:
            http.connect()
            hang_up = threading.Timer(timeout, http.sock.shutdown, [socket.SHUT_RDWR])
            hang_up.start()
            try:
                headers = {"Content-Type": "application/json"}
                http.request("POST", "/v1/chat/completions", json.dumps(body), headers)
                self._read(http.getresponse(), found)
            finally:
                hang_up.cancel()
        except (OSError, HTTPException) as error:
            found.error = repr(error)
        finally:
            http.close()
        return found

    def _read(self, response: HTTPResponse, found: Stream) -> None:
        if response.status != 200:
            found.error = f"{response.status}: {response.read(500)!r}"
            return
        for line in response:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if "choices" not in event:
                    found.error = str(event)
                    return
                found.add(event)
        if not found.times or not found.usage:
            found.error = "The reply has no text, or no end."

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        self.process.send_signal(how)
        try:
            self.process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def close(self) -> None:
        self.stop()
        self.home.cleanup()

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")

    def computed(self) -> int:
        """The tokens of prompts that were computed, as far as the log says it."""
        pattern = self.peer.computed
        return sum(map(int, re.findall(pattern, self.log_text()))) if pattern else 0

    def peak_mb(self) -> float | None:
        """The most resident memory since the last call (Linux)."""
        process = Path(f"/proc/{self.process.pid}")
        if not process.exists():
            return None
        found = re.search(r"VmHWM:\s+(\d+) kB", (process / "status").read_text())
        (process / "clear_refs").write_text("5")
        return int(found.group(1)) / 1e3 if found else None
