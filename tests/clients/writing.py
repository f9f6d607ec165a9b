"""A client has a file of 4,000 tokens written at 20 tokens a second: python -m clients.writing NAME
BINARIES FOLDER.

Run in a network namespace, like clients.session. Prints as JSON how the turn ended, and for how
long and for how many tokens there was no text and no part of a call on the client's connection once
the reply had begun.
"""

from __future__ import annotations

import gc
import json
import os
import re
import sys
import time
from bisect import bisect_left
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
from server.serving import blockpool_server

from clients import session
from clients.programs import PROGRAMS
from clients.wire import Exchange, noted
from mlx_blockpool.server.replies import Reply

TOKENS, RATE = 4000, 20
QUESTION = "Write numbers.py."
# The tools that write files: the name, and the arguments with the path and the text to fill in.
TOOLS: dict[str, tuple[str, dict[str, str]]] = {
    "claude-code": ("Write", {"file_path": "PATH", "content": "TEXT"}),
    "codex": ("exec_command", {"cmd": "cat > PATH <<'END'\nTEXTEND"}),
    "opencode": ("write", {"filePath": "PATH", "content": "TEXT"}),
    "qwen-code": ("write_file", {"file_path": "PATH", "content": "TEXT"}),
}
FIRST = {"claude-code": "-p {} --allowedTools Write"}


class Writer:
    """What the model says, at `RATE` tokens a second: a call that writes the file, and after it an
    answer. `drawn`: the time of each token.
    """

    def __init__(self, name: str, path: Path) -> None:
        self.text, self.calls = "", 0
        self.drawn: list[float] = []
        self._tool, self._arguments = TOOLS[name]
        self._path = path

    def start(self, reply: Reply, tokenizer: Any, *rest: Any) -> Any:
        said = self._reply(reply.request, tokenizer)
        tokens = iter(tokenizer.encode(said, add_special_tokens=False))
        due = 0.0

        def draw(logprobs: mx.array) -> mx.array:
            nonlocal due
            due = due + 1 / RATE if due else time.monotonic()
            time.sleep(max(0.0, due - time.monotonic()))
            self.drawn.append(time.monotonic())
            return mx.array([next(tokens, tokenizer.eos_token_id)])

        return replace(START(reply, tokenizer, *rest), sampler=draw, form=None)

    def _reply(self, request: Any, tokenizer: Any) -> str:
        if not any(tool["function"]["name"] == self._tool for tool in request.tools or ()):
            return "Numbers"
        if any(message["role"] == "tool" for message in request.messages):
            return "It is written."
        self.calls += 1
        self.text, written = "", 0
        while written < TOKENS:
            line = f'value_{written} = compute({written}, "{"x" * (written % 9)}")\n'
            self.text += line
            written += len(tokenizer.encode(json.dumps(line)[1:-1], add_special_tokens=False))
        arguments = {
            key: value.replace("PATH", str(self._path)).replace("TEXT", self.text)
            for key, value in self._arguments.items()
        }
        call = json.dumps({"name": self._tool, "arguments": arguments})
        return f"I write it.\n<tool_call>\n{call}\n</tool_call>"


START = Reply.start


def is_content(data: str) -> bool:
    """Whether an event has text or a part of a call."""
    event = {} if data == "[DONE]" else json.loads(data)
    if choices := event.get("choices"):
        return bool(choices[0]["delta"].get("content") or choices[0]["delta"].get("tool_calls"))
    return str(event.get("type")).endswith(("content_block_delta", ".delta"))


def content_times(exchange: Exchange) -> list[float]:
    """When each event with content was there, and when the answer had ended."""
    times, sizes = zip(*exchange.arrivals, strict=True)
    answer = exchange.answer.encode()
    return [
        *(
            times[bisect_left(sizes, event.end())]
            for event in re.finditer(rb"^data: (.*)\n", answer, re.MULTILINE)
            if is_content(event[1].decode())
        ),
        times[-1],
    ]


def main(name: str, binaries: Path, folder: Path) -> None:
    session.raise_loopback()
    home, work = folder / "home", session.prepare(folder)
    home.mkdir()
    path = work / "numbers.py"
    writer = Writer(name, path)
    program = replace(PROGRAMS[name], first=FIRST.get(name, PROGRAMS[name].first))
    options = ["--max-tokens", "16384", "--pool-bytes", "500MB"]
    with (
        patch.object(Reply, "start", lambda *given: writer.start(*given)),
        blockpool_server(session.AGENT, *options) as server,
        noted(session.PORT, server.port) as exchanges,
    ):
        # As the server's own process does.
        gc.freeze()
        ran = session.ask(program, binaries, home, work, QUESTION, True, False)
    times = content_times(max(exchanges, key=lambda exchange: len(exchange.arrivals)))
    tokens = (
        bisect_left(writer.drawn, after) - bisect_left(writer.drawn, before)
        for before, after in pairwise(times)
    )
    found = {
        "status": ran.returncode,
        "said": ran.stdout + ran.stderr,
        "requests": [(e.method, e.path, e.status) for e in exchanges],
        "calls": writer.calls,
        "is_complete": path.exists() and path.read_text() == writer.text,
        "events": len(times) - 1,
        "seconds": round(times[-1] - times[0], 1),
        "most_tokens": max(tokens),
        "longest_gap": round(max(after - before for before, after in pairwise(times)), 3),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
    # As the server's own process does, too: threads of mlx may outlive the interpreter.
    sys.stdout.flush()
    os._exit(0)
