"""The walk of a request from its socket to the model and back: the functions of this package on the
way, in order.

`python tests/walk.py` records one chat and writes the walk into mlx_blockpool/how-it-works.md. For
the walk of a block record_calls() returns the functions that are called while prompts are computed,
evicted, written and restored.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from models import save_model
from server.serving import blockpool_server

DOCUMENT = Path(__file__).parent.parent / "mlx_blockpool/how-it-works.md"
PACKAGE = "mlx_blockpool."
BEGIN, END = "<!-- walk -->\n", "<!-- end of walk -->\n"
COMMAND = ".venv/bin/python tests/walk.py"
# What ends each part of the way, in order: a function of Python or mlx-lm, by its module and name.
TURNS = {
    "on the socket's thread, to the queue of the generation thread": ("queue", "Queue.put"),
    "on the generation thread, to the model": ("mlx_lm.models.llama", "Model.__call__"),
    "on the generation thread, to the queue of the request": ("queue", "Queue.put"),
    "on the socket's thread, to the client": ("socketserver", "_SocketWriter.write"),
}


def record() -> dict[str, list[str]]:
    """For each part of the way the functions that were entered and not left at its end; those of
    parts before are left out.
    """
    with tempfile.TemporaryDirectory() as folder, _stacks() as stacks:
        model = save_model(Path(folder) / "model", "llama")
        with blockpool_server(model, "--pool-bytes", "20MB") as client:
            client.chat([{"role": "user", "content": "hi"}], max_tokens=2)
            stacks.clear()
            client.chat([{"role": "user", "content": "hi there"}], max_tokens=4)
    ends = [(turn, stack) for turn, stack in stacks if stack]
    socket_side = ends[0][1][0]
    walk: dict[str, list[str]] = {}
    passed: set[str] = set()
    for part, turn in TURNS.items():
        on_socket = part.startswith("on the socket")
        # The last time: by then the request has a reply.
        found = [stack for t, stack in ends if t == turn and (stack[0] == socket_side) is on_socket]
        # The workers that have rendered the prompt wait in a queue too.
        found = [stack for stack in found if ".prompts." not in stack[-1]]
        stack = found[0] if part.endswith("generation thread") else found[-1]
        walk[part] = [name for name in stack if name not in passed]
        passed.update(stack)
    return walk


def record_calls() -> set[str]:
    """The functions of this package that a server calls for more prompts than fit into its pool,
    and after a second start.
    """
    called: set[str] = set()

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and (module := frame.f_globals.get("__name__", "")).startswith(PACKAGE):
            called.add(f"{module.removeprefix(PACKAGE)}.{frame.f_code.co_qualname}")

    words = "one two three four five six seven eight " * 30
    with tempfile.TemporaryDirectory() as folder:
        model = save_model(Path(folder) / "model", "llama")
        threading.setprofile(profile)
        try:
            for names in ("abcdef", "a"):
                with blockpool_server(
                    model, "--pool-bytes", "1MB", "--store-dir", f"{folder}/store"
                ) as client:
                    for name in names:
                        client.chat([{"role": "user", "content": name + words}], max_tokens=2)
        finally:
            threading.setprofile(None)  # type: ignore[arg-type]
    return called


@contextmanager
def _stacks() -> Iterator[list[tuple[tuple[str, str], list[str]]]]:
    """Stacks of this package's functions, the outermost first, each time that a thread which
    starts now enters one of TURNS.
    """
    stacks: list[tuple[tuple[str, str], list[str]]] = []
    turns = set(TURNS.values())

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if (
            event == "call"
            and (turn := (frame.f_globals.get("__name__", ""), frame.f_code.co_qualname)) in turns
        ):
            stacks.append((turn, _ours(frame)))

    threading.setprofile(profile)
    try:
        yield stacks
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]


def _ours(frame: FrameType | None) -> list[str]:
    names = []
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith(PACKAGE):
            names.append(f"{module.removeprefix(PACKAGE)}.{frame.f_code.co_qualname}")
        frame = frame.f_back
    return names[::-1]


def render(walk: dict[str, list[str]]) -> str:
    """A numbered list, with a heading for each part of the way."""
    lines, number = [], 0
    for part, names in walk.items():
        lines += ["", f"{part[0].upper()}{part[1:]}:", ""]
        for name in names:
            number += 1
            lines.append(f"{number}. `{name}`")
    return "\n".join(lines) + "\n\n"


def in_document() -> str:
    """The walk that stands in the document."""
    text = DOCUMENT.read_text(encoding="utf-8")
    return text[text.index(BEGIN) + len(BEGIN) : text.index(END)]


def main() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    DOCUMENT.write_text(before + BEGIN + render(record()) + END + after, encoding="utf-8")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
