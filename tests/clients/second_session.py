"""What a new session of a client costs that has run before, in another folder and after restarts:
python -m clients.second_session NAME BINARIES FOLDER.

Run in a network namespace, like clients.session. Prints (prompt, cached) of the first request of
each session.
"""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

from clients.programs import PROGRAMS
from clients.session import PORT, QUESTIONS, SERVER_PORT, ask, prepare, raise_loopback, serving
from clients.wire import Exchange, noted


def main(name: str, binaries: Path, folder: Path) -> None:
    raise_loopback()
    home = folder / "home"
    home.mkdir(parents=True)
    works = [prepare(folder / name) for name in ("one", "another", "third")]

    def show(what: str, work: Path, question: int, exchanges: list[Exchange]) -> None:
        before = len(exchanges)
        ask(PROGRAMS[name], binaries, home, work, QUESTIONS[question], question == 0, False)
        # Titles and the like are shorter.
        first = next(e for e in exchanges[before:] if e.is_reply and (e.prompt or 0) > 2000)
        print(f"{name}: {what}: {first.cached} of {first.prompt} tokens cached", flush=True)

    with noted(PORT, SERVER_PORT) as exchanges:
        with serving(folder, signal.SIGKILL):
            show("first session", works[0], 0, exchanges)
            show("second session, another folder", works[1], 0, exchanges)
            time.sleep(3)
        with serving(folder):
            show("the same session after kill -9", works[1], 1, exchanges)
        with serving(folder):
            show("the same session after SIGTERM", works[1], 2, exchanges)
            show("third session, another folder", works[2], 0, exchanges)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
