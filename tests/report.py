"""Prints what the package consists of: syntax nodes by package, the longest modules and functions,
names and words to avoid.

A report and not a test: no module is cut to stay under a number. `python tests/report.py [ROOT]`,
from anywhere.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

from constants import constants, possible_settings

# What STYLE forbids in code and documents, as whole words or phrases. `behind` is counted for every
# sense of the word.
WORDS = ("behind", "beside", "so many", "mend", "mended", "room", "house", "is no", "are no")
LONGEST = 12


def functions(tree: ast.AST) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, (node.end_lineno or 0) - node.lineno + 1


def main(root: Path) -> None:
    files = sorted(
        f for folder in ("mlx_blockpool", "plugins") for f in (root / folder).rglob("*.py")
    )
    texts = {str(f.relative_to(root)): f.read_text(encoding="utf-8") for f in files}
    trees = {name: ast.parse(text) for name, text in texts.items()}
    sizes = {name: sum(1 for _ in ast.walk(tree)) for name, tree in trees.items()}
    packages: Counter[str] = Counter()
    for name, size in sizes.items():
        packages[name.rpartition("/")[0]] += size
    print(
        f"{sum(sizes.values()):,} syntax nodes, {sum(t.count(chr(10)) for t in texts.values()):,} "
        f"lines, {len(texts)} modules"
    )
    for package, size in packages.most_common():
        print(f"  {size:8,} {package}")
    print(
        "largest modules:",
        *(f"\n  {size:8,} {name}" for name, size in Counter(sizes).most_common(LONGEST)),
    )
    longest = sorted(
        ((size, f"{name}: {f}") for name, tree in trees.items() for f, size in functions(tree)),
        reverse=True,
    )
    print("longest functions:", *(f"\n  {size:8} {name}" for size, name in longest[:LONGEST]))
    classes: dict[str, list[str]] = defaultdict(list)
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes[node.name].append(name)
    twice = {name: found for name, found in classes.items() if len(found) > 1}
    print(
        f"{len(twice)} class names used more than once:",
        *(f"\n  {name}: {', '.join(found)}" for name, found in twice.items()),
    )
    package = root / "mlx_blockpool"
    settings = possible_settings(package)
    print(
        f"{len(constants(package))} numeric constants outside config.py; {len(settings)} could be "
        "settings:",
        *settings,
    )
    documents = {
        str(f.relative_to(root)): f.read_text(encoding="utf-8")
        for f in root.rglob("*.md")
        if ".venv" not in f.parts
    }
    for kind, found in (("modules", texts), ("documents", documents)):
        words = {
            word: sum(
                len(re.findall(rf"\b{word}\b", text, re.IGNORECASE)) for text in found.values()
            )
            for word in WORDS
        }
        print(f"words in {kind}:", ", ".join(f"{word} {count}" for word, count in words.items()))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent.parent)
