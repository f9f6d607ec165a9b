"""Conversations to train on, put together from topics and sentences of system messages.

Knows text only: (role, text) messages. Does not know tokens or mlx.
"""

from __future__ import annotations

import json
from random import Random
from typing import Any

from mlx_blockpool.demo.five_agents import load_json

Message = tuple[str, str]

_OPENINGS = [
    "Please: ",
    "Hello. ",
    "Hi, ",
    "One question: ",
    "Can you tell me: ",
    "And ",
    "So, ",
    "Ok. ",
    "Thanks. ",
]
_FILLERS = [
    "exactly",
    "here",
    "really",
    "now",
    "actually",
    "please",
    "just",
    "in simple words",
    "so",
    "very much",
    "then",
]
_GENERAL_SYSTEMS = 6
# Of the questions, those whose reply is a JSON object with some of these properties.
_JSON_SHARE = 0.05
_PROPERTIES = [
    "answer",
    "name",
    "title",
    "city",
    "age",
    "count",
    "text",
    "id",
    "date",
    "tags",
    "price",
    "done",
    "note",
    "summary",
]
_WORDS = [
    "block",
    "pool",
    "Ann",
    "Ben",
    "agent",
    "prefix",
    "disk",
    "Paris",
    "token",
    "2026-01-31",
    "slab",
    "page",
    "yes",
]
_JSON_REQUESTS = [
    "Reply in JSON. ",
    "Answer with a JSON object. ",
    "Return a JSON object that matches this JSON schema: {schema} ",
    "Parse the text into JSON that matches the following json_schema:\n\n{schema}\n\nReturn an "
    "instance of it, not the schema. ",
]


class Conversations:
    """Training conversations, drawn at random.

    trained, held_out: all (question, answer) pairs; the last question of each topic is held out.
    """

    def __init__(self, random: Random) -> None:
        self._random = random
        self._topics: list[dict[str, Any]] = load_json("questions.json")
        self._systems: list[str] = load_json("systems.json")
        self.trained = [
            (q, topic["answer"]) for topic in self._topics for q in topic["questions"][:-1]
        ]
        self._words = [
            word for question, _ in self.trained for word in question.rstrip("?.!").split(" ")
        ]
        self.held_out = [(topic["questions"][-1], topic["answer"]) for topic in self._topics]

    def texts(self) -> list[str]:
        """All text that the tokenizer should know well."""
        questions = [question for question, _ in self.trained]
        answers = [topic["answer"] for topic in self._topics]
        return (
            questions
            + [question.lower() for question in questions]
            + answers * 8
            + self._systems * 4
        )

    def draw(self, kind: str) -> list[Message]:
        """One conversation: "single" (one turn), "turns" (up to 4), "long" (system message of
        some hundred tokens).
        """
        if kind == "single":
            return self._turns(1)
        if kind == "turns":
            return self._system(0.6, 1, 5) + self._turns(self._random.randint(1, 4))
        return self._system(1.0, 8, 36) + self._turns(self._random.randint(1, 4))

    def _system(self, share: float, fewest: int, most: int) -> list[Message]:
        if self._random.random() >= share:
            return []
        sentences = [self._random.choice(self._systems[:_GENERAL_SYSTEMS])]
        for _ in range(self._random.randint(fewest, most) - 1):
            if self._random.random() < 0.2:
                sentences.append(self._random.choice(self._topics)["answer"])
            else:
                sentences.append(self._random.choice(self._systems))
        return [("system", self._random.choice([" ", "\n"]).join(sentences))]

    def _turns(self, count: int) -> list[Message]:
        messages: list[Message] = []
        for _ in range(count):
            topic = self._random.choice(self._topics)
            question = self._random.choice(topic["questions"][:-1])
            asked, answer = self._reworded(question), str(topic["answer"])
            if self._random.random() < _JSON_SHARE:
                asked, answer = self._as_json(asked, answer)
            messages += [("user", asked), ("assistant", answer)]
        return messages

    def _as_json(self, question: str, answer: str) -> Message:
        """A question for a JSON object, or one that does not mention it, and the object: what a
        form forces must end too.
        """
        draw = self._random
        names = draw.sample(_PROPERTIES, draw.randint(1, 4))
        reply = {name: self._value(answer) for name in names}
        schema = json.dumps(
            {
                "type": "object",
                "properties": {name: _schema_of(reply[name]) for name in names},
                "required": names,
            }
        )
        request = draw.choice(["", *_JSON_REQUESTS]).replace("{schema}", schema)
        return request + question, json.dumps(reply, ensure_ascii=False)

    def _value(self, answer: str) -> Any:
        draw = self._random
        word = draw.choice(_WORDS)
        return draw.choice(
            [
                answer,
                word,
                word,
                f"{word} {draw.choice(_WORDS)}",
                draw.randint(0, 300),
                True,
                [word],
                [],
            ]
        )

    def _reworded(self, question: str) -> str:
        """The same question as another person might type it: words added, lost or mistaken, no
        capitals or no mark.
        """
        chance = self._random.random
        words = question.split(" ")
        if chance() < 0.25:
            words.insert(self._random.randint(0, len(words)), self._random.choice(_FILLERS))
        if len(words) > 3 and chance() < 0.2:
            del words[self._random.randrange(len(words))]
        if len(words) > 4 and chance() < 0.1:
            words[self._random.randrange(len(words))] = self._random.choice(self._words)
        text = " ".join(words)
        if chance() < 0.2:
            text = self._random.choice(_OPENINGS) + text[0].lower() + text[1:]
        if chance() < 0.3:
            text = text.rstrip("?.!")
        return text.lower() if chance() < 0.3 else text


def _schema_of(value: Any) -> dict[str, Any]:
    kinds = {str: "string", int: "integer", bool: "boolean", list: "array"}
    return {"type": kinds[type(value)]}
