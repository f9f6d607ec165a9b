"""The demo agent, which calls tools right by itself, with strict tools: its replies are those
that it gives without.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.demo.agent import FOLDER, load_script
from server.serving import Client, blockpool_server

SCRIPT = load_script()
SHELLS: dict[str, dict[str, Any]] = SCRIPT["shells"]
TYPES = {str: "string", bool: "boolean"}


@pytest.fixture(scope="module")
def server() -> Iterator[Client]:
    with blockpool_server(FOLDER, "--pool-bytes", "20MB") as running:
        yield running
        running.settle()


def tool_of(shell: str, strict: bool) -> dict[str, Any]:
    """A shell with the schema of the arguments that the script gives it."""
    properties = {
        name: {"type": "array", "items": {"type": "string"}}
        if isinstance(value, list)
        else {"type": TYPES[type(value)]}
        for name, value in SHELLS[shell].items()
    }
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {
        "type": "function",
        "function": {"name": shell, "parameters": parameters, "strict": strict},
    }


def talk(server: Client, shell: str, strict: bool) -> list[dict[str, Any]]:
    """What the agent says in each step: text, or text and a call."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "What is here?"}]
    said = []
    for _ in SCRIPT["steps"]:
        message = server.chat(messages, tools=[tool_of(shell, strict)], temperature=0)["choices"][
            0
        ]["message"]
        calls = [call["function"] for call in message.get("tool_calls") or []]
        said.append({"content": message["content"], "calls": calls})
        back = (
            {"role": "tool", "content": "README.md"}
            if calls
            else {"role": "user", "content": "Go on."}
        )
        messages += [
            {
                key: value
                for key, value in message.items()
                if key in ("role", "content", "tool_calls")
            },
            back,
        ]
    return said


@pytest.mark.thorough
@pytest.mark.parametrize("shell", SHELLS)
def test_strict_tools_change_no_reply(server: Client, shell: str) -> None:
    before = server.send("/v1/cache")[1]["forms"]
    free, held = (talk(server, shell, strict) for strict in (False, True))
    assert held == free
    written = [json.loads(call["arguments"]) for said in held for call in said["calls"]]
    expected = [
        json.loads(json.dumps(SHELLS[shell]).replace("$", step["run"]))
        for step in SCRIPT["steps"]
        if "run" in step
    ]
    assert written == expected
    after = server.send("/v1/cache")[1]["forms"]
    assert (after["compiled"] + after["cached"]) - (before["compiled"] + before["cached"]) == len(
        SCRIPT["steps"]
    )
