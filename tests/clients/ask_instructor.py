"""Asks a server through instructor, as its users do, and prints what it has parsed: python
ask_instructor.py PORT TYPES.

TYPES: "bounded", which end with any model, or "free", which a model has to end. instructor needs
older releases of libraries than the tests do, so this runs in an environment of its own, without
the project.
"""

from __future__ import annotations

import json
import sys
from typing import Literal

import instructor
from instructor import Mode
from openai import OpenAI
from pydantic import BaseModel, Field


class Bounded(BaseModel):
    name: str = Field(min_length=2, max_length=8, pattern="^[a-z]+$")
    days: int = Field(ge=1, le=7)
    tags: list[Literal["warm", "wet"]] = Field(max_length=2)


class Pet(BaseModel):
    name: str


class Person(BaseModel):
    name: str
    age: int
    pets: list[Pet]


class Noted(BaseModel):
    """Any object: the schema is only part of the prompt in mode JSON."""

    note: object = None


TYPES: dict[str, dict[Mode, type[BaseModel]]] = {
    "bounded": dict.fromkeys(
        (Mode.JSON_SCHEMA, Mode.TOOLS, Mode.TOOLS_STRICT, Mode.RESPONSES_TOOLS), Bounded
    ),
    "free": {Mode.JSON: Noted, Mode.JSON_SCHEMA: Person, Mode.TOOLS: Person},
}
QUESTIONS = (
    "How is it?",
    "Extract: Ann is 31 years old.",
    "Jason is 25. He lives in Paris with his two cats.",
    "Hello",
)


def main(port: int, types: str) -> None:
    found = {}
    for mode, kind in TYPES[types].items():
        client = instructor.from_openai(
            OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="any"), mode=mode
        )
        parsed = [
            client.chat.completions.create(
                model="default_model",
                messages=[{"role": "user", "content": question}],
                response_model=kind,
                max_retries=0,
                max_tokens=300,
                temperature=1,
            ).model_dump()
            for question in QUESTIONS
        ]
        found[mode.value] = parsed
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
