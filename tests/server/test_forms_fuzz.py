"""Forms that are nearly right, explode or are none, over HTTP and beside streams that have to go
on.
"""

from __future__ import annotations

import copy
import http.client
import json
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from models import save_ending
from thorough import is_thorough, many

from server.scripted import TEMPLATE
from server.serving import Client, at_once, blockpool_server

NUM_FORMS = many(24, 2000)
NUM_STREAMS = 8 if is_thorough() else 2
AT_ONCE = 4
# What the compiled forms that are kept may take, and the arrays of the batch.
MOST_BYTES = 1 << 30

NAMES = [
    "a",
    "b",
    "name",
    "",
    "$ref",
    "\u00e9",
    "a b",
    "x" * 300,
    "</tool_call>",
    "<|im_end|>",
    '"',
    "\\",
]
VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    3,
    10**6,
    10**40,
    1e308,
    0.1,
    float("inf"),
    "",
    "a",
    "^a+$",
    "(",
    "[",
    "(a+)+$",
    "(a|b)*a(a|b){24}",
    "a{1,999999}",
    "(?=a)",
    "\\p{L}{3}",
    "date",
    "uuid",
    "regex",
    "#",
    "#/$defs/a",
    "#/$defs/none",
    "http://example.com/s",
    "object",
    "string",
    [],
    {},
    [{}],
    {"type": "string"},
    {"$ref": "#"},
    {"$ref": "#/$defs/a"},
    ["string", "null"],
    [1, "1", None, {"a": []}],
]
KEYWORDS = [
    "type",
    "enum",
    "const",
    "properties",
    "required",
    "additionalProperties",
    "patternProperties",
    "items",
    "prefixItems",
    "minItems",
    "maxItems",
    "minLength",
    "maxLength",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "multipleOf",
    "pattern",
    "format",
    "anyOf",
    "oneOf",
    "allOf",
    "$ref",
    "$defs",
    "definitions",
    "not",
    "if",
    "then",
    "contains",
    "uniqueItems",
    "minProperties",
    "maxProperties",
    "propertyNames",
    "unevaluatedProperties",
    "dependentRequired",
    "$dynamicRef",
    "title",
    "default",
    "x-guidance",
    "$schema",
    "$id",
]
SCHEMAS: list[Any] = [
    {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
        "required": ["a"],
    },
    {
        "type": "array",
        "items": {"$ref": "#/$defs/a"},
        "$defs": {"a": {"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#"}}]}},
    },
    {"type": "string", "pattern": "^[a-z]{2,5}$"},
    {
        "type": "object",
        "additionalProperties": {"type": "number", "multipleOf": 0.5},
        "maxProperties": 3,
    },
    {"anyOf": [{"const": {"k": [1, 2]}}, {"type": "string", "format": "date-time"}]},
]
EXPLODE: list[Any] = [
    {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(5000)}},
    {
        "type": "object",
        "properties": {f"p{i}": {"type": "integer", "minimum": i} for i in range(600)},
        "required": [f"p{i}" for i in range(600)],
    },
    {"enum": [f"value {i} of many" for i in range(50_000)]},
    {"type": "string", "pattern": "(a|b)*a(a|b){24}"},
    {"type": "string", "pattern": "((((a{1,60}){1,60}){1,60}){1,60}){1,60}"},
    {"type": "array", "items": {"type": "string"}, "minItems": 1_000_000},
    {"type": "string", "minLength": 10_000_000},
    {"$ref": "#"},
    {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]},
    {"allOf": [{"type": "string", "pattern": f"(.*{c}.*)+"} for c in "abcdefgh"]},
]
TEXTS = [
    "(a|b)*a(a|b){24}",
    "[a-z]{1,5}",
    "(",
    "a**",
    ".*" * 30,
    "(x+x+)+y",
    "\\",
    "",
    "(?i)abc",
    "a{99999}{99999}",
    "\\1",
    "[^",
    "(?<=a)b",
    "\ud7ff+",
]
GRAMMARS = [
    'start: "a" start | "b"',
    "start: start start | /a/",
    'root ::= "yes" | "no"',
    "start: A\nA: /(a|b)*a(a|b){24}/",
    "start: missing",
    "start:",
    'start: "x"{1,100000}',
    "%json {}",
    'start: %json {"type": "object"',
    "start: <[999999]>",
    "start: a\na: b\nb: a",
    "start: /a/ & ~/b/",
    "",
    "start: " + "(" * 500 + '"a"' + ")" * 500,
    "root ::= " + "[a-z] " * 4000,
]


def fuzzed_schema(rng: random.Random) -> Any:
    """A schema with up to four keywords or values changed, added, removed or nested."""
    schema = copy.deepcopy(rng.choice(SCHEMAS))
    for _ in range(rng.randrange(5)):
        inside = [schema]
        for value in inside:
            inside += [
                v
                for v in (value.values() if isinstance(value, dict) else value)
                if isinstance(v, dict | list) and v
            ]
        at = rng.choice(inside)
        kind = rng.randrange(5)
        if kind == 0 and isinstance(at, dict) and at:
            del at[rng.choice(list(at))]
        elif kind == 1 and isinstance(at, dict):
            at[rng.choice(KEYWORDS)] = copy.deepcopy(rng.choice([*VALUES, *SCHEMAS]))
        elif kind == 2 and isinstance(at, dict) and at:
            at[rng.choice(list(at))] = copy.deepcopy(rng.choice(VALUES))
        elif kind == 3 and isinstance(at, dict):
            at.setdefault("properties", {})
            if isinstance(at["properties"], dict):
                at["properties"][rng.choice(NAMES)] = fuzzed_schema(rng)
        else:
            for _ in range(rng.choice([1, 5, 70])):
                schema = {
                    rng.choice(["items", "not", "additionalProperties"]): schema,
                    "type": rng.choice(["array", "object"]),
                }
    return schema


def fuzzed(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """The path and body of a request for a few tokens in a form."""
    schema = copy.deepcopy(rng.choice(EXPLODE)) if rng.random() < 0.05 else fuzzed_schema(rng)
    text, grammar = rng.choice(TEXTS), rng.choice(GRAMMARS)
    if rng.random() < 0.5:
        at = rng.randrange(1 + len(text))
        text = text[:at] + rng.choice([*TEXTS, *NAMES])[:40] + text[at + rng.randrange(3) :]
        at = rng.randrange(1 + len(grammar))
        grammar = (
            grammar[:at]
            + rng.choice(["|", "(", ")", "{", '"', "/", "&", "~", "\n", "start", "[x]"])
            + grammar[at + 1 :]
        )
    few = {"temperature": 1.0, "stream": rng.random() < 0.3}
    say = {"messages": [{"role": "user", "content": "Say."}], "model": "default_model", **few}
    # Templates write tools into the prompt, which is not to take long.
    shown = schema if len(json.dumps(schema)) < 2000 else rng.choice(SCHEMAS)
    function = {"name": rng.choice(NAMES), "strict": rng.random() < 0.8, "parameters": shown}
    tool = {"type": "function", "function": function}
    kinds: list[tuple[str, dict[str, Any]]] = [
        (
            "/v1/chat/completions",
            {
                **say,
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": schema},
                },
            },
        ),
        (
            "/v1/chat/completions",
            {
                **say,
                "tools": [tool] * rng.choice([1, 2]),
                "tool_choice": rng.choice(["auto", "required"]),
            },
        ),
        ("/v1/completions", {**few, "prompt": "p", "structured_outputs": {"regex": text}}),
        ("/v1/completions", {**few, "prompt": "p", "structured_outputs": {"grammar": grammar}}),
        (
            "/v1/completions",
            {
                **few,
                "prompt": "p",
                "guided_choice": [text, grammar[:50], *NAMES[: rng.randrange(9)]],
            },
        ),
        (
            "/v1/messages",
            {**say, "output_config": {"format": {"type": "json_schema", "schema": schema}}},
        ),
        ("/v1/messages", {**say, "tools": [{"name": "n", "strict": True, "input_schema": shown}]}),
        (
            "/v1/responses",
            {
                "model": "m",
                "input": "i",
                **few,
                "text": {"format": {"type": "json_schema", "name": "n", "schema": schema}},
            },
        ),
        ("/api/chat", {**say, "format": schema}),
    ]
    path, body = rng.choice([*kinds[:1] * 4, *kinds])
    body[{"/v1/responses": "max_output_tokens"}.get(path, "max_tokens")] = 6
    if path == "/api/chat":
        del body["max_tokens"]
        body["options"] = {"num_predict": 6}
    if path == "/v1/responses":
        body["model"] = "default_model"
    return path, body


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    model = save_ending(tmp_path_factory.mktemp("model") / "ending", TEMPLATE)
    with blockpool_server(model, "--pool-bytes", "60MB") as running:
        assert running.send("/v1/completions", {"prompt": "p", "max_tokens": 1})[0] == 200
        yield running


class Neighbours:
    """Streams of tokens beside the forms: how many tokens each has had, and the longest step
    between two of them.
    """

    def __init__(self, client: Client, count: int) -> None:
        self.client = client
        self.tokens = [0] * count
        self.gaps = [0.0] * count
        self.is_over = False
        end = client.generator.model.provider.tokenizer.eos_token_id
        self._endless = {str(end): -100.0}
        self._threads = [
            threading.Thread(target=self._read, args=[index]) for index in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def _read(self, index: int) -> None:
        body = {
            "prompt": f"stream {index}",
            "max_tokens": 100_000,
            "stream": True,
            "logit_bias": self._endless,
        }
        while not self.is_over:
            connection = http.client.HTTPConnection("127.0.0.1", self.client.port, timeout=120)
            connection.request(
                "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
            )
            response, last = connection.getresponse(), 0.0
            assert response.status == 200, response.read()
            while not self.is_over and (line := response.readline()):
                if line.startswith(b"data: {"):
                    now = time.monotonic()
                    self.tokens[index] += 1
                    self.gaps[index] = max(self.gaps[index], now - last if last else 0.0)
                    last = now
            response.close()
            connection.close()

    def end(self) -> None:
        self.is_over = True
        for thread in self._threads:
            thread.join()


def send(client: Client, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", client.port, timeout=120)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def resident() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


def test_no_form_hurts_the_server_or_those_beside_it(client: Client) -> None:
    seed = random.randrange(10**6) if is_thorough() else 1
    neighbours, statuses, begun = Neighbours(client, NUM_STREAMS), [0] * 600, resident()

    def worker(number: int) -> None:
        rng = random.Random(seed * AT_ONCE + number)
        for _ in range(NUM_FORMS // AT_ONCE):
            path, body = fuzzed(rng)
            before = sum(neighbours.tokens)
            status, answer = send(client, path, body)
            assert status in (200, 400), (seed, path, str(body)[:2000], answer[:2000])
            assert b"Traceback" not in answer
            statuses[status] += 1
            assert client.generator.generation_available(), (seed, path, str(body)[:2000])
            # Those beside it have gone on meanwhile, or did nothing because it took no step.
            assert sum(neighbours.tokens) >= before

    try:
        at_once([lambda number=number: worker(number) for number in range(AT_ONCE)])
    finally:
        neighbours.end()
    client.settle()
    kept = client.send("/v1/cache")[1]
    print(
        f"seed {seed}: {statuses[200]} kept, {statuses[400]} refused, {kept['forms']}, longest "
        f"gap {max(neighbours.gaps):.2f} s,"
    )
    print(f"{(resident() - begun) >> 20} MB more, {sum(neighbours.tokens)} tokens beside")
    assert min(statuses[200], statuses[400]) > NUM_FORMS // 10
    assert all(neighbours.tokens)
    assert "restarts" not in client.send("/health")[1]
    if is_thorough():
        assert resident() - begun < MOST_BYTES
