"""Asks a server through Ollama's package for JSON, and prints how each reply ended and what it is:
python ask_ollama.py PORT.

Runs in an environment of its own, without the project.
"""

from __future__ import annotations

import json
import sys

import ollama
from pydantic import BaseModel


class Pet(BaseModel):
    name: str


class Person(BaseModel):
    name: str
    age: int
    pets: list[Pet]


QUESTIONS = (
    "How is it?",
    "Extract: Ann is 31 years old.",
    "Jason is 25. He lives in Paris with his two cats.",
    "Hello",
)


def main(port: int) -> None:
    client = ollama.Client(host=f"http://127.0.0.1:{port}")
    found: dict[str, list[tuple[str | None, object]]] = {"json": [], "schema": []}
    for name, form in (("json", "json"), ("schema", Person.model_json_schema())):
        for question in QUESTIONS:
            messages = [{"role": "user", "content": question}]
            options = {"temperature": 1, "num_predict": 300}
            reply = client.chat(
                model="default_model", messages=messages, format=form, options=options
            )
            found[name].append((reply.done_reason, json.loads(reply.message.content or "")))
    for _, person in found["schema"]:
        Person.model_validate(person)
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]))
