"""The map of the modules: each module with the first sentence of its docstring, package by package.

`python tests/module_map.py` writes it into the package's README.
"""

from __future__ import annotations

import ast
import os
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOCUMENT = ROOT / "mlx_blockpool/README.md"
FOLDERS = ("mlx_blockpool", "plugins", "patches")
BEGIN, END = "<!-- map -->\n", "<!-- end of map -->\n"
COMMAND = ".venv/bin/python tests/module_map.py"


def first_sentence(path: Path) -> str:
    """The first sentence of a module's docstring, on one line."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return re.split(r"(?<=[.?])\s", " ".join(docstring.partition("\n\n")[0].split()), maxsplit=1)[0]


def packages() -> list[Path]:
    """The folders with modules, in the order of the import contract, upper layers first."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"][
        "importlinter"
    ]["contracts"]
    layers = [
        re.split(r"\W*\|\W*", layer)
        for layer in next(c for c in contracts if c["type"] == "layers")["layers"]
    ]
    # A package whose modules are in several layers stands where its highest module does.
    levels = {
        ".".join(name.strip("() ").split(".")[:2]): level
        for level, names in [*enumerate(layers)][::-1]
        for name in names
    }

    def order(package: Path) -> tuple[int, int, str]:
        parts = package.relative_to(ROOT).parts
        level = levels.get(".".join(parts[:2]), len(layers))
        return FOLDERS.index(parts[0]), level if len(parts) > 1 else -1, package.as_posix()

    return sorted(
        {
            file.parent
            for folder in FOLDERS
            for file in (ROOT / folder).rglob("*.py")
            if "plugin_template" not in file.parts
        },
        key=order,
    )


def render() -> str:
    """A heading for each package, its own sentence, and a list of its modules."""
    sections = []
    for package in packages():
        name = package.relative_to(ROOT).as_posix() + "/"
        files = [file for file in sorted(package.glob("*.py")) if file.name != "__init__.py"]
        lines = [
            f"- [{file.name}]({os.path.relpath(file, DOCUMENT.parent)}): {first_sentence(file)}\n"
            for file in files
        ]
        own = package / "__init__.py"
        about = [f"{first_sentence(own)}\n"] if own.exists() else []
        sections.append("\n".join([f"### {name}\n", *about, *(["".join(lines)] if lines else [])]))
    return "\n" + "\n".join(sections) + "\n"


def in_document() -> str:
    """The map in the document."""
    text = DOCUMENT.read_text(encoding="utf-8")
    return text[text.index(BEGIN) + len(BEGIN) : text.index(END)]


def main() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    before, after = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
    DOCUMENT.write_text(before + render() + after, encoding="utf-8")


if __name__ == "__main__":
    main()
