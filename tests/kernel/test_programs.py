"""The text as programs of their own: under sanitizers, and with every branch counted."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kernel.emulation import Programs, why_not
from kernel.layouts import CASES, assert_right, layout

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

SANITIZED = (
    "-O1",
    "-g",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
    "-DSIMT_ALIGNED",
)
COUNTED = ("-O0", "--coverage", "-fno-exceptions")
BODY = Path(__file__).parents[2] / "mlx_blockpool/kernel/attention.h"


@pytest.mark.thorough
@pytest.mark.parametrize("number", [0, 2, 3, 5, 6, 8, 11, 14, 17, 19, 22])
def test_nothing_is_read_or_written_outside_of_the_arrays(number: int, tmp_path: Path) -> None:
    launch = Programs(tmp_path, SANITIZED, parts=1 + number % 2)
    for seed in range(2):
        step = layout(CASES[number], 1000 * number + 100 + seed)
        assert_right(step, step.attend(launch))


@pytest.mark.thorough
def test_every_branch_of_the_body_is_taken(tmp_path: Path) -> None:
    """By the layouts of a few cases together.

    A line is counted with all instances of its template.
    """
    for number in (0, 1, 2, 3, 5, 6, 11, 12, 18):
        launch = Programs(tmp_path / str(number), COUNTED, parts=1 + number % 2)
        for seed in range(4):
            layout(CASES[number], 1000 * number + seed).attend(launch)
    lines: dict[int, int] = {}
    branches: dict[tuple[int, int, int], int] = {}
    for line in counted(tmp_path):
        number = line["line_number"]
        lines[number] = lines.get(number, 0) + line["count"]
        for i, branch in enumerate(line["branches"]):
            key = (number, len(line["branches"]), i)
            branches[key] = branches.get(key, 0) + branch["count"]
    text = BODY.read_text(encoding="utf-8").splitlines()
    assert len(lines) > 150
    assert len(branches) > 60
    assert {number: text[number - 1] for number, count in lines.items() if not count} == {}
    assert {key: text[key[0] - 1] for key, count in branches.items() if not count} == {}


def counted(folder: Path) -> Iterator[Any]:
    """Every line of the body as gcov counted it, once for each instance."""
    for found in folder.rglob("*.gcda"):
        command = ["gcov", "-b", "--json-format", "--stdout", found.name]
        done = subprocess.run(command, cwd=found.parent, capture_output=True, text=True, check=True)
        for file in json.loads(done.stdout)["files"]:
            yield from file["lines"] if file["file"] == BODY.name else ()
