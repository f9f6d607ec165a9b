"""Asks a server through instructor, as its users do, and prints what it has parsed: python ask_instructor.py PORT.

instructor needs older releases of libraries than the tests do, so this runs in an environment of its own, without the project.
"""

from __future__ import annotations

import json
import sys
from typing import Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel, ConfigDict, Field


class Bounded(BaseModel):
    # Without other properties, so that a random model comes to an end.
    model_config = ConfigDict(extra="forbid")

    name: str = Field(min_length=2, max_length=8, pattern="^[a-z]+$")
    days: int = Field(ge=1, le=7)
    tags: list[Literal["warm", "wet"]] = Field(max_length=2)


MODES = (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.RESPONSES_TOOLS)


def main(port: int) -> None:
    found = {}
    for mode in MODES:
        client = instructor.from_openai(OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="any"), mode=mode)
        parsed = [
            client.chat.completions.create(
                model="default_model", messages=[{"role": "user", "content": "How is it?"}], response_model=Bounded,
                max_retries=0, max_tokens=300, temperature=1,
            ).model_dump()
            for _ in range(4)
        ]  # fmt: skip
        found[mode.value] = parsed
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]))
