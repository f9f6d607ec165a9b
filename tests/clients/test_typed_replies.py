"""instructor and Ollama's package ask for types, each in an environment of its own.

Only with --clients.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from server.serving import Client, blockpool_server

from benchmarks.demo.agent import FOLDER
from clients.forms import Bounded
from clients.programs import install
from mlx_blockpool.demo import model_path

INSTRUCTOR, OLLAMA = "instructor==1.17.0", "ollama==0.6.3"
HERE = Path(__file__).parent


@pytest.fixture(scope="module", params=[Path(model_path()), FOLDER], ids=["demo", "agent"])
def demo(request: pytest.FixtureRequest) -> Iterator[Client]:
    with blockpool_server(request.param, "--pool-bytes", "20MB") as running:
        yield running
        running.settle()


def printed(python: Path, script: str, *arguments: str) -> Any:
    ran = subprocess.run(
        [str(python), str(HERE / script), *arguments], capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def test_instructor_with_bounded_types(server: Client, installed: Path) -> None:
    python = install(INSTRUCTOR, installed / "instructor") / "python"
    found = printed(python, "ask_instructor.py", str(server.port), "bounded")
    assert len(found) == 4
    for replies in found.values():
        assert [Bounded.model_validate(reply).model_dump() for reply in replies] == replies


def test_instructor_with_free_types_on_the_demo_models(demo: Client, installed: Path) -> None:
    python = install(INSTRUCTOR, installed / "instructor") / "python"
    found = printed(python, "ask_instructor.py", str(demo.port), "free")
    assert {mode: len(replies) for mode, replies in found.items()} == {
        "json_mode": 4,
        "json_schema_mode": 4,
        "tool_call": 4,
    }


def test_format_of_ollama_on_the_demo_models(demo: Client, installed: Path) -> None:
    python = install(OLLAMA, installed / "ollama") / "python"
    found = printed(python, "ask_ollama.py", str(demo.port))
    assert [reason for replies in found.values() for reason, _ in replies] == ["stop"] * 8
    assert all(isinstance(reply, dict) for replies in found.values() for _, reply in replies)
