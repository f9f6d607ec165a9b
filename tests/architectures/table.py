"""The table of architectures: how each is served.

`python -m architectures.table` in tests/ writes it into plugins/architectures.md.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from architectures.configs import CONFIGS, NEEDS, RUNNABLE
from architectures.configs_common import wide
from architectures.pooled import POOL, make_model
from mlx_blockpool.config import KVBits
from mlx_blockpool.engine.opening import open_caches
from mlx_blockpool.testing import tiny_model

README = Path(__file__).parents[2] / "plugins/architectures.md"
BEGIN, END = "<!-- architectures -->\n", "<!-- end of architectures -->\n"
HEAD = "| caches | batch | a prefix is resumed | `--kv-bits` | types |\n|---|---|---|---|---|\n"


class Row(NamedTuple):
    """How one type is served: the kinds of its layers, how it batches, where a prefix can be
    resumed, and whether quantised.
    """

    kinds: str
    batch: str
    reuse: str
    bits: str


def row_of(caches: Any, bits: str) -> Row:
    """What the engine's caches of a model say, and quantised() of the model."""
    prefix = getattr(caches, "prefix", None)
    if prefix is None:
        return Row("of its own", "one at a time", "where a conversation ended, in memory", bits)
    kinds = Counter(leaf.kind for leaf in prefix.arena.spec.leaves)
    named = " + ".join(kind for kind in ("full", "window", "chunk", "state") if kinds[kind])
    reuse = "at checkpoints" if prefix.arena.spec.needs_checkpoints else "at any token"
    return Row(named, batch_of(caches), reuse, bits)


def batch_of(caches: Any) -> str:
    return "ragged" if caches.ragged else "one at a time"


def quantised(name: str) -> str:
    """Whether blocks hold the keys and values of a type in 8 bits.

    Bits do not change how it batches.
    """
    prefix = getattr(
        open_caches(tiny_model(wide(CONFIGS[name])), POOL, bits=KVBits()), "prefix", None
    )
    if prefix is not None and not prefix.arena.spec.groups:
        return "nothing to quantise"
    return "no" if prefix is None or prefix.arena.spec.bits is None else "yes"


def render(rows: dict[str, Row]) -> str:
    """Types that are served alike in one line, the largest group first."""
    groups: dict[Row, list[str]] = {}
    for name in sorted(rows):
        groups.setdefault(rows[name], []).append(name)
    lines = [
        f"| {' | '.join(row)} | {', '.join(f'`{name}`' for name in names)} |\n"
        for row, names in sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))
    ]
    missing = ", ".join(f"`{name}` (needs {NEEDS[name]})" for name in sorted(NEEDS))
    return HEAD + "".join(lines) + f"\nNot run here: {missing}.\n"


def in_readme() -> str:
    text = README.read_text()
    return text[text.index(BEGIN) + len(BEGIN) : text.index(END)]


def rows_in(table: str) -> dict[str, Row]:
    found = {}
    for line in table.splitlines()[2:]:
        if line.startswith("|"):
            *row, names = (cell.strip() for cell in line.strip("|").split("|"))
            found |= {name.strip("` "): Row(*row) for name in names.split(",")}
    return found


def main() -> None:
    assert set(RUNNABLE) | set(NEEDS) == set(CONFIGS)
    rows = {name: row_of(open_caches(make_model(name), POOL), quantised(name)) for name in RUNNABLE}
    text = README.read_text()
    before, after = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
    README.write_text(before + render(rows) + after)


if __name__ == "__main__":
    main()
