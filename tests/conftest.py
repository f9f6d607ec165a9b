"""Fixtures of the tests of several packages."""

from __future__ import annotations

import functools
import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from compiler import compile_header_once
from forks import fork_prompt_workers, share_forks
from hypothesis import HealthCheck, settings
from store.clock import Clock
from thorough import TRIES, choose, mark_samples

# Tests of the store wait for syncs for longer than they compute.
MEMORY = Path("/dev/shm")
if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 4 * 10**9:
    tempfile.tempdir = os.environ["TMPDIR"] = str(MEMORY)
# No test may look for a model or a cache outside of what it made.
os.environ["HF_HUB_OFFLINE"] = "1"
CACHES = tempfile.TemporaryDirectory(prefix="mlx-blockpool-tests-")
os.environ["XDG_CACHE_HOME"] = os.environ["XDG_CONFIG_HOME"] = CACHES.name
# Without bytecode on disk each process would compile what it imports, and each run would rewrite
# the tests' asserts.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Whoever runs the tests in the background or under nohup has these ignored, and all programs of the
# tests would ignore them too.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# mlx hands each operation on the CPU to a thread of its own.
# A run takes less processor time where a woken thread does not interrupt the one that runs.
if hasattr(os, "SCHED_BATCH"):
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

# How fast a shared machine is at the moment says nothing about the code.
settings.register_profile(
    "shared machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("shared machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--clients",
        action="store_true",
        help="Run real clients from package registries against the server.",
    )
    tries = parser.getgroup("general")
    tries.addoption(
        "--thorough",
        dest="tries",
        action="store_const",
        const="thorough",
        help="Try a fourth of all there is.",
    )
    tries.addoption(
        "--exhaustive",
        dest="tries",
        action="store_const",
        const="exhaustive",
        help="Try all there is.",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "thorough: what runs only, or tries more, in runs that are not quick."
    )
    config.addinivalue_line("markers", "sampled: in a quick run a few of the cases are enough.")
    config.addinivalue_line(
        "markers",
        "server(options, ...): what the fixture `server` runs: see tests/server/conftest.py.",
    )
    if tries := config.getoption("tries"):
        # How much a property is tried is decided where its test is defined, before any fixture: see
        # thorough.py.
        os.environ[TRIES] = tries
    if not hasattr(config, "workerinput"):
        compile_header_once(Path(CACHES.name, "compiler"))
    if config.getoption("tx", None):
        # The processes that run the tests have it in common.
        share_forks()


def pytest_xdist_auto_num_workers() -> int:
    """Two more than there are cores: some tests wait for what a server or a disk does."""
    return (
        len(os.sched_getaffinity(0)) + 2
        if hasattr(os, "sched_getaffinity")
        else (os.cpu_count() or 1) + 2
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mark_samples(items)
    chosen = choose(items)
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]
    for item in items:
        if item.get_closest_marker("thorough") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(1800))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    # Next to nothing that an import makes is garbage.
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        leave_out_of_collections()
        fork_prompt_workers_of_servers()
        find_plugins_once()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    yield
    if nextitem is None or nextitem.path != item.path:
        leave_out_of_collections()


def leave_out_of_collections() -> None:
    """Exclude what exists now from collections of garbage: a server makes one whenever it loads
    or unloads a model.
    """
    gc.collect()
    gc.freeze()


def fork_prompt_workers_of_servers() -> None:
    """Servers in this process start their prompt workers without another import of everything."""
    workers = sys.modules.get("mlx_blockpool.server.prompts.workers")
    if workers is not None and workers.FORKS:
        start = workers._start
        workers._start = lambda mode: fork_prompt_workers() if mode == "fork" else start(mode)


def find_plugins_once() -> None:
    """Each of the thousands of models would read the metadata of all installed packages."""
    plugins = sys.modules.get("mlx_blockpool.plugins")
    if plugins is not None:
        found = functools.cache(lambda path, group: entry_points(group=group))
        plugins.entry_points = lambda group: found(tuple(sys.path), group)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The time of the prompt store."""
    return Clock(monkeypatch)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Workers cannot send lone surrogates, which tests of escapes have in their failures."""
    report = yield
    report.sections = [(name, _sendable(text)) for name, text in report.sections]
    if report.longrepr is not None and (text := str(report.longrepr)) != _sendable(text):
        report.longrepr = _sendable(text)
    report.user_properties = [(name, _sendable(str(v))) for name, v in report.user_properties]
    return report


def _sendable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()
