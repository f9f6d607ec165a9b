"""Sessions of tool calls, made at random: the user names a file, the call must copy its number from
an earlier tool result.

Knows text only: (role, text) messages and what a right call is. Does not know tokens or mlx.
"""

from __future__ import annotations

import json
from random import Random
from typing import Any, NamedTuple

Message = tuple[str, str]

TOOLS = ("print", "delete", "send", "copy", "sign", "check", "pack", "open")
NAMES = """
acorn amber anchor apple arrow autumn bacon badge basket beacon bishop border bottle bridge bronze
bucket butter button cactus camel candle canyon carbon castle cedar cherry circle clover cobalt
comet copper coral cotton dagger daisy delta desert dragon eagle ember engine fabric falcon feather
fiddle forest garden ginger hammer harbor hazel island ivory jacket jungle kettle ladder lemon
magnet maple marble meadow mirror orchid
""".split()  # noqa: SIM905
GROUPS = 4  # of three digits: what a call must copy


class Turn(NamedTuple):
    """What the user writes, the call that answers it, and the tool's result, which names another
    file.
    """

    user: str
    call: str
    result: str


class Session(NamedTuple):
    system: str
    turns: list[Turn]

    def messages(self) -> list[Message]:
        roles = [("user", "user"), ("assistant", "call"), ("tool", "result")]
        return [("system", self.system)] + [
            (role, getattr(turn, part)) for turn in self.turns for role, part in roles
        ]


class Numbers:
    """Names of files with numbers, none twice: groups of three digits, each used once in a
    session.
    """

    def __init__(self, random: Random) -> None:
        self._names = random.sample(NAMES, len(NAMES))
        self._groups = random.sample(range(1000), 1000)

    def file(self) -> str:
        return self._names.pop() + "".join(f"{self._groups.pop():03}" for _ in range(GROUPS))


def call(tool: str, path: str) -> str:
    return json.dumps({"name": tool, "arguments": {"path": path}})


def session(random: Random, turns: int, files: int = 6) -> Session:
    """The system message lists the tools and `files` files; each tool result adds one; each file
    is asked for once at most.
    """
    numbers = Numbers(random)
    known = [numbers.file() for _ in range(files)]
    tools = [
        {"name": tool, "arguments": ["path"]} for tool in random.sample(sorted(TOOLS), len(TOOLS))
    ]
    system = f"Call tools. Tools: {json.dumps(tools)} Files: {json.dumps(known)}"
    made = []
    for _ in range(turns):
        tool, path = random.choice(TOOLS), known.pop(random.randrange(len(known)))
        known.append(numbers.file())
        user = f"{tool.capitalize()} /{path.rstrip('0123456789')}"
        made.append(Turn(user, call(tool, path), json.dumps({"done": True, "next": known[-1]})))
    return Session(system, made)


def listing(random: Random, files: int) -> list[Message]:
    """A list of files and the same files in another order, as training for copies: more of them
    in a text than calls are.
    """
    numbers = Numbers(random)
    paths = [numbers.file() for _ in range(files)]
    again = random.sample(paths, files)
    return [("tool", json.dumps(paths)), ("assistant", json.dumps(again))]


class Verdict(NamedTuple):
    """What is right about a call; each part is so only if those before it are."""

    valid_json: bool
    known_tool: bool
    right: bool


def judge(written: str, expected: str) -> Verdict:
    try:
        read: Any = json.loads(written)
    except ValueError:
        return Verdict(False, False, False)
    known = isinstance(read, dict) and read.get("name") in TOOLS
    return Verdict(True, known, known and read == json.loads(expected))
