"""What the page "How it works" says is so: the walks of a request and of a block, and the arrows
between packages.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import walk
from documents import blocks, section

import mlx_blockpool

MOST_STATIONS = 20
PAGE = "mlx_blockpool/how-it-works.md"
# Packages off the serving path: a model to try, and the checks for authors of plugins.
NOT_DRAWN = {"demo", "testing"}
# The group of ranks, which stands below every package.
LOW = {"facts", "group", "head", "watchdog", "wakes"}


def test_the_walk_on_the_page_is_that_of_a_chat() -> None:
    taken = walk.record()
    assert walk.in_document() == walk.render(taken), f"run {walk.COMMAND}"
    assert all(taken.values())
    assert sum(map(len, taken.values())) <= MOST_STATIONS


def test_the_functions_that_a_block_passes_are_called() -> None:
    named = re.findall(r"`([a-z_]+\.[a-z_]+\.[\w.]+)`", section(PAGE, "A block"))
    assert len(named) > 20
    called = walk.record_calls()
    assert [name for name in named if name not in called] == []


def imports() -> Iterator[tuple[str, str]]:
    """Which package imports which, without the modules of ranks in LOW."""
    package = Path(mlx_blockpool.__file__).parent
    for path in package.rglob("*.py"):
        parts = path.relative_to(package).parts
        if len(parts) == 1 or (parts[0] == "ranks" and path.stem in LOW):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom) or node.level != len(parts):
                continue
            names = [node.module] if node.module else [alias.name for alias in node.names]
            for name in names:
                above, _, module = name.partition(".")
                is_low = above == "ranks" and module in LOW
                if (package / above).is_dir() and above != parts[0] and not is_low:
                    yield parts[0], above


def test_the_picture_has_the_arrows_between_the_packages() -> None:
    (picture,) = blocks("mermaid", PAGE)
    arrows = set(re.findall(r"^  (\w+)(?:\[.*\])? --> (\w+)", picture, re.MULTILINE))
    found = {(one, other) for one, other in imports() if not {one, other} & NOT_DRAWN}
    assert arrows - found == set()
    reached = set(arrows)
    while more := {(a, d) for a, b in reached for c, d in reached if b == c} - reached:
        reached |= more
    assert found - reached == set()
    assert not any(one == other for one, other in reached)
