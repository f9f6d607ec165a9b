"""What Codex sends once its context is longer than its limit: python -m clients.compaction
codex BINARIES FOLDER.

Run in a network namespace, like clients.session. Prints the path and status of each request of the
second turn, whether it asks for a summary, and what the turn said.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

from clients.programs import PROGRAMS
from clients.session import PORT, QUESTIONS, SERVER_PORT, ask, prepare, raise_loopback, serving
from clients.wire import noted

# Codex's instructions and tools have 13,000 tokens, and the README that it reads 2,000.
LIMIT = 14500
LINES = 200


def main(name: str, binaries: Path, folder: Path) -> None:
    raise_loopback()
    home, work = folder / "home", prepare(folder)
    home.mkdir()
    readme = work / "README.md"
    short, codex = readme.read_text(), PROGRAMS[name]
    limit = f"resume -c model_auto_compact_token_limit={LIMIT}"
    later = replace(codex, later=codex.later.replace("resume", limit))
    with serving(folder), noted(PORT, SERVER_PORT) as exchanges:
        readme.write_text("A pool of blocks of 256 tokens.\n" * LINES)
        ask(codex, binaries, home, work, QUESTIONS[0], True, False)
        readme.write_text(short)
        before = len(exchanges)
        ran = ask(later, binaries, home, work, QUESTIONS[1], False, False)
        asked = [
            (e.method, e.path, e.status, "CONTEXT CHECKPOINT COMPACTION" in e.body)
            for e in exchanges[before:]
        ]
    print(json.dumps({"requests": asked, "said": ran.stdout}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
