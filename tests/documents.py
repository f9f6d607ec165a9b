"""The documents of the project, which are all Markdown files except two journals, and the
commands and examples in them.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("benchmarks", "mlx_blockpool", "patches", "plugins")
# The changelog and the log of benchmarks tell of files and commands that may be gone.
JOURNALS = {ROOT / "CHANGELOG.md", ROOT / "benchmarks/LOG.md"}
FOUND = [
    path
    for folder in FOLDERS
    for path in sorted((ROOT / folder).rglob("*.md"))
    if path not in JOURNALS
]
PATHS = [ROOT / "README.md", *FOUND]
# By the path below ROOT, the project's own first.
TEXTS = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in PATHS}


def blocks(language: str, *documents: str) -> list[str]:
    """The code of the fences that open with `language`, in `documents` or in all of them."""
    fence = re.compile(rf"^( *)```{re.escape(language)}\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
    return [
        textwrap.dedent(code)
        for name in documents or TEXTS
        for _, code in fence.findall(TEXTS[name])
    ]


def commands(*documents: str) -> list[str]:
    """The lines of shell in `documents`, or in all of them.

    Settings of clients are not among them.
    """
    return [line for block in blocks("sh", *documents) for line in block.splitlines()]


def section(document: str, heading: str) -> str:
    """The text between a heading of the second level and the next one."""
    text = TEXTS[document].partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    assert text, f"{document} has no section {heading}"
    return text
