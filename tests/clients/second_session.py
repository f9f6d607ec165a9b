"""What a new session of a client costs that has run before, in another folder and after restarts:
python -m clients.second_session NAME BINARIES FOLDER [KIND SHELL].

Run like clients.session, with the repository in PYTHONPATH. Prints (prompt, cached) of the first
request of each session. With a KIND of models, also how much three more turns of the first session
reuse of what is known; SHELL is the client's tool for commands.
"""

from __future__ import annotations

import json
import signal
import sys
import time
import urllib.request
from pathlib import Path

from clients.kinds import save_kind
from clients.programs import PROGRAMS
from clients.session import (
    AGENT,
    PORT,
    QUESTIONS,
    SERVER_PORT,
    ask,
    prepare,
    raise_loopback,
    serving,
)
from clients.wire import Exchange, noted


def main(name: str, binaries: Path, folder: Path, kind: str = "", shell: str = "") -> None:
    raise_loopback()
    home = folder / "home"
    home.mkdir(parents=True)
    works = [prepare(folder / name) for name in ("one", "another", "third")]
    model = save_kind(folder / kind, kind, shell) if kind else AGENT

    def show(what: str, work: Path, question: int, exchanges: list[Exchange]) -> None:
        before = len(exchanges)
        ask(PROGRAMS[name], binaries, home, work, QUESTIONS[question], question == 0, False)
        # Titles and the like are shorter.
        first = next(e for e in exchanges[before:] if e.is_reply and (e.prompt or 0) > 2000)
        print(f"{name}: {what}: {first.cached} of {first.prompt} tokens cached", flush=True)

    def figures() -> dict[str, int]:
        with urllib.request.urlopen(f"http://127.0.0.1:{SERVER_PORT}/v1/cache") as answer:
            found: dict[str, int] = json.load(answer)
        return found

    with noted(PORT, SERVER_PORT) as exchanges:
        with serving(folder, signal.SIGKILL, model):
            show("first session", works[0], 0, exchanges)
            if kind:
                before = figures()
                for question in range(1, len(QUESTIONS)):
                    show(f"its turn {question + 1}", works[0], question, exchanges)
                known, cached = (
                    figures()[key] - before[key] for key in ("known_tokens", "cached_tokens")
                )
                print(
                    f"{name}: known tokens of later turns: {cached} of {known} cached", flush=True
                )
            show("second session, another folder", works[1], 0, exchanges)
            time.sleep(3)
        with serving(folder, model=model):
            show("the same session after kill -9", works[1], 1, exchanges)
        with serving(folder, model=model):
            show("the same session after SIGTERM", works[1], 2, exchanges)
            show("third session, another folder", works[2], 0, exchanges)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:])
