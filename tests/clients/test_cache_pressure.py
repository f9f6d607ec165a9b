"""cache-pressure's simulated agents find what was computed: a main context after its sub-agents,
and a prompt with its thinking after the client has hung up.

Only with --clients; it is installed from a package registry.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from models import without
from server.scripted import SPECIAL, TEMPLATE, save_agent
from server.serving import blockpool_server

from clients.programs import install

PACKAGE = "cache-pressure==0.6.3"
# Its 4 characters a token are 4 tokens of this model.
PROGRAMS = {
    "agent-sim": "--sessions 3 --main-tokens 2000 --step-tokens 250 --sub-tokens 500 "
    "--finalize-tokens 100 --no-viz",
    "abort-sim": "--context-tokens 2000 --thinking-tokens 500 --max-tokens 4000",
}


@pytest.fixture(scope="session")
def binaries(installed: Path) -> Path:
    # Its programs have the syntax of Python 3.12.
    python = shutil.which("python3.12")
    if python is None:
        pytest.skip("needs python3.12 on the search path")
    return install(PACKAGE, installed / "cache-pressure", python)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", PROGRAMS)
def test_its_agents_find_what_was_computed(name: str, binaries: Path, tmp_path: Path) -> None:
    """The model thinks on, and its replies end only at their limits."""
    thinks = "{% if not enable_thinking %}"
    template = TEMPLATE.replace(thinks, "{% if enable_thinking %}<think>\n{% else %}")
    model = save_agent(tmp_path, template, max_position_embeddings=32768)
    without(model, "<|im_start|>", "<|im_end|>", *SPECIAL)
    with blockpool_server(model, "--pool-bytes", "100MB") as server:
        url = f"http://127.0.0.1:{server.port}/v1"
        command = [str(binaries / name), "--base-url", url, *PROGRAMS[name].split()]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=800)
        server.settle()
    assert ran.returncode == 0, ran.stdout + ran.stderr
