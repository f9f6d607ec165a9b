"""Forms that clients demand end by themselves on both demo models, with whatever prompt and
temperature.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from thorough import only

from benchmarks.demo.agent import FOLDER
from mlx_blockpool.demo import model_path
from server.serving import Client, at_once, blockpool_server

# Texts and lists of any length.
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "pets": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"name": {"type": "string"}},
                "required": ["name"],
            },
        },
    },
    "required": ["name", "age", "pets"],
}
# What instructor's mode JSON writes before the messages.
SYSTEM = f"""
As a genius expert, your task is to understand the content and provide
the parsed objects in json that match the following json_schema:

{json.dumps(SCHEMA)}

Make sure to return an instance of the JSON, not the schema itself
"""
# As instructor's mode TOOLS sends them.
TOOL = {
    "type": "function",
    "function": {
        "name": "Person",
        "description": "Correctly extracted `Person`",
        "parameters": SCHEMA,
    },
}
CHAT_FORMS: dict[str, dict[str, Any]] = {
    "json": {"response_format": {"type": "json_object"}},
    "json_schema": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "Person", "schema": SCHEMA},
        }
    },
    "tools": {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "Person"}}},
}
QUESTIONS = [
    "What is a block?",
    "Extract: Ann is 31 years old.",
    "Hello",
    "Give me a recipe.",
    "Jason is 25 years old. He lives in Paris with his two cats.",
]
LIMIT = 500


@pytest.fixture(scope="module", params=[Path(model_path()), FOLDER], ids=["demo", "agent"])
def each_server(request: pytest.FixtureRequest) -> Iterator[Client]:
    with blockpool_server(request.param, "--pool-bytes", "20MB", "--no-store") as running:
        yield running
        running.settle()


def chats(system: str | None) -> list[list[dict[str, str]]]:
    before = [] if system is None else [{"role": "system", "content": system}]
    return [[*before, {"role": "user", "content": question}] for question in QUESTIONS]


def assert_person(found: Any) -> None:
    assert list(found) == list(SCHEMA["properties"])
    assert (type(found["name"]), type(found["age"]), type(found["pets"])) == (str, int, list)


@pytest.mark.sampled
@pytest.mark.parametrize("temperature", [0, 0.7, 1])
@pytest.mark.parametrize("system", [None, SYSTEM], ids=["bare", "instructed"])
@pytest.mark.parametrize("form", CHAT_FORMS)
def test_chat_ends(each_server: Client, form: str, system: str | None, temperature: float) -> None:
    options = {**CHAT_FORMS[form], "temperature": temperature, "seed": 1, "max_tokens": LIMIT}
    answers = at_once(
        [partial(each_server.chat, messages, **options) for messages in chats(system)]
    )
    for choice in (answer["choices"][0] for answer in answers):
        if form == "tools":
            assert choice["finish_reason"] == "tool_calls"
            for call in choice["message"]["tool_calls"]:
                assert call["function"]["name"] == "Person"
                assert_person(json.loads(call["function"]["arguments"]))
            continue
        assert choice["finish_reason"] == "stop"
        found = json.loads(choice["message"]["content"])
        if form == "json":
            assert isinstance(found, dict)
        else:
            assert_person(found)


@pytest.mark.sampled
@pytest.mark.parametrize("temperature", only([0, 1], 1))
@pytest.mark.parametrize("form", ["json", SCHEMA], ids=["json", "schema"])
def test_ollama_format_ends(each_server: Client, form: Any, temperature: float) -> None:
    options = {"temperature": temperature, "seed": 1, "num_predict": LIMIT}
    bodies = [
        {
            "model": "default_model",
            "messages": messages,
            "format": form,
            "stream": False,
            "options": options,
        }
        for messages in chats(None)
    ]
    for status, answer in at_once(
        [partial(each_server.send, "/api/chat", body) for body in bodies]
    ):
        assert (status, answer.get("done_reason")) == (200, "stop"), answer
        found = json.loads(answer["message"]["content"])
        if form == "json":
            assert isinstance(found, dict)
        else:
            assert_person(found)
