"""Ten agents of every protocol for some seconds, with hang-ups and a kill -9 in between: the
short run of a benchmark.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from server.processes import needs_proc

ROOT = Path(__file__).parents[2]


@needs_proc
@pytest.mark.thorough
def test_ten_agents_with_hang_ups_and_a_kill() -> None:
    arguments = [
        sys.executable,
        "-m",
        "benchmarks.bench_agents",
        "--seconds",
        "7",
        "--kills",
        "1",
        "--samples",
        "20",
    ]
    ran = subprocess.run(arguments, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert ran.returncode == 0, ran.stderr
    figures = json.loads(ran.stdout.splitlines()[-1])
    assert (
        figures["failures"],
        figures["held"],
        figures["secrets_crossed"],
        figures["replies_different"],
    ) == ({}, 0, 0, 0)
    assert figures["own_letters_told"] > 0, "the model could have told a secret"
    assert figures["requests"] >= 20
    assert figures["cached_share_after_kill"] > 0
