"""The table of architectures: how each is served. `python -m architectures.table` in tests/ writes it into plugins/README.md."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from architectures.configs import CONFIGS, NEEDS, RUNNABLE

README = Path(__file__).parents[2] / "plugins/README.md"
BEGIN, END = "<!-- architectures -->\n", "<!-- end of architectures -->\n"
HEAD = "| caches | batch | a prefix is resumed | types |\n|---|---|---|---|\n"


class Row(NamedTuple):
    """How one type is served: the kinds of its layers, how it batches, and where a prefix can be resumed."""

    kinds: str
    batch: str
    reuse: str


def row_of(caches: Any) -> Row:
    """What the engine's caches of a model say."""
    prefix = getattr(caches, "prefix", None)
    if prefix is None:
        return Row("of its own", "one at a time", "where a conversation ended, in memory")
    kinds = Counter(leaf.kind for leaf in prefix.arena.spec.leaves)
    named = " + ".join(kind for kind in ("full", "window", "chunk", "state") if kinds[kind])
    batch = "ragged" if caches.ragged else "padded" if caches.merges else "one at a time"
    return Row(named, batch, "at checkpoints" if prefix.arena.spec.needs_checkpoints else "at any token")


def render(rows: dict[str, Row]) -> str:
    """Types that are served alike in one line, the largest group first."""
    groups: dict[Row, list[str]] = {}
    for name in sorted(rows):
        groups.setdefault(rows[name], []).append(name)
    lines = [
        f"| {row.kinds} | {row.batch} | {row.reuse} | {', '.join(f'`{name}`' for name in names)} |\n"
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
            kinds, batch, reuse, names = (cell.strip() for cell in line.strip("|").split("|"))
            found |= {name.strip("` "): Row(kinds, batch, reuse) for name in names.split(",")}
    return found


def main() -> None:
    from architectures.pooled import POOL, make_model
    from mlx_blockpool.engine.opening import open_caches

    assert set(RUNNABLE) | set(NEEDS) == set(CONFIGS)
    rows = {name: row_of(open_caches(make_model(name), POOL)) for name in RUNNABLE}
    text = README.read_text()
    before, after = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
    README.write_text(before + render(rows) + after)


if __name__ == "__main__":
    main()
