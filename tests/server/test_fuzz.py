"""Requests that are nearly right, to every endpoint: each is answered, none with a failure of the
server, none hurts the next.

BLOCKPOOL_FUZZ says how many are sent to each endpoint; with it they are others each time.
"""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from thorough import is_thorough, many

from server.fuzzing import Answer, Sent, requests, send
from server.scripted import LOOK_UP
from server.serving import Client, at_once

EXAMPLES = int(os.environ.get("BLOCKPOOL_FUZZ", many(18, 1200)))
AT_ONCE = 6
SETTINGS = settings(
    max_examples=-(-EXAMPLES // AT_ONCE),
    deadline=None,
    database=None,
    derandomize="BLOCKPOOL_FUZZ" not in os.environ and not is_thorough(),
    suppress_health_check=list(HealthCheck),
    # A failure names the request; smaller ones would take minutes.
    phases=[Phase.generate],
)
pytestmark = [
    # A pool of some hundred tokens, so that what asks for very many is soon over.
    pytest.mark.server(
        "--pool-bytes 700KB --max-tokens 3 --log-level CRITICAL", model="agent", is_stored=True
    ),
    *([pytest.mark.thorough] if is_thorough() else []),
]
HELLO = {"messages": [{"role": "user", "content": "Hello, who is there?"}], "max_tokens": 6}

PARAMETERS = {"type": "object", "properties": {"word": {"type": "string"}}}
FUNCTION = {"name": "look_up", "description": "Looks up.", "parameters": PARAMETERS}
CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "look_up", "arguments": '{"word": "pool"}'},
}
EPHEMERAL = {"type": "ephemeral"}
CHAT: dict[str, Any] = {
    "model": "default_model",
    "max_tokens": 2,
    "stream": False,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "seed": 3,
    "stop": ["zz"],
    "logit_bias": {"5": 1.0},
    "logprobs": True,
    "top_logprobs": 2,
    "stream_options": {"include_usage": True},
    "repetition_penalty": 1.1,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "xtc_probability": 0.1,
    "xtc_threshold": 0.1,
    "chat_template_kwargs": {"enable_thinking": False},
    "prompt_cache_key": "fuzz",
    "user": "ann",
    "prompt_cache_retention": "24h",
    "n": 2,
    "cache_salt": "ours",
    "priority": 1,
    "messages": [
        {"role": "system", "content": "Be brief."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "Hello", "cache_control": EPHEMERAL}],
        },
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "found"},
    ],
    "tools": [{"type": "function", "function": FUNCTION}],
}
COMPLETION = {
    name: value
    for name, value in CHAT.items()
    if name not in ("messages", "tools", "chat_template_kwargs")
}
COMPLETION |= {"prompt": "Hello, you"}
MESSAGE: dict[str, Any] = {
    "model": "default_model",
    "max_tokens": 2,
    "stream": False,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "stop_sequences": ["zz"],
    "system": [{"type": "text", "text": "Be brief.", "cache_control": {**EPHEMERAL, "ttl": "1h"}}],
    "tools": [LOOK_UP],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "metadata": {"user_id": "u"},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "output_config": {"effort": "low"},
    "service_tier": "auto",
    "messages": [
        {
            "role": "user",
            "content": [{"type": "text", "text": "Hello", "cache_control": EPHEMERAL}],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                {"type": "tool_use", "id": "t1", "name": "look_up", "input": {"word": "pool"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "t1",
                    "content": [{"type": "text", "text": "found"}],
                    "is_error": False,
                },
                {
                    "type": "document",
                    "title": "A",
                    "source": {"type": "text", "media_type": "text/plain", "data": "B"},
                },
            ],
        },
    ],
}
IMAGE = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": "aGVsbG8="},
}
SEEN = {
    "max_tokens": 2,
    "messages": [{"role": "user", "content": [{"type": "text", "text": "Look."}, IMAGE]}],
}
PLAIN_MESSAGE = {
    "max_tokens": 2,
    "stream": True,
    "messages": [{"role": "user", "content": "Hello"}],
    "system": "Be brief.",
}
RESPONSE: dict[str, Any] = {
    "model": "default_model",
    "max_output_tokens": 2,
    "stream": False,
    "instructions": "Be brief.",
    "temperature": 0.5,
    "top_p": 0.9,
    "tools": [{"type": "function", **FUNCTION, "strict": False}],
    "tool_choice": "auto",
    "store": True,
    "parallel_tool_calls": True,
    "reasoning": {"effort": "low"},
    "text": {"format": {"type": "text"}},
    "metadata": {"a": "b"},
    "user": "ann",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
        {
            "type": "function_call",
            "call_id": "c1",
            "name": "look_up",
            "arguments": '{"word": "pool"}',
        },
        {"type": "function_call_output", "call_id": "c1", "output": "found"},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Yes."}],
        },
        {"type": "message", "role": "user", "content": "And?"},
    ],
}
TOKENS: dict[str, Any] = {
    "model": "default_model",
    "content": ["Hello", 5],
    "add_special": True,
    "with_pieces": True,
    "parse_special": False,
}
TOKENIZED_CHAT = {
    "messages": CHAT["messages"],
    "tools": CHAT["tools"],
    "chat_template_kwargs": {"enable_thinking": False},
    "add_generation_prompt": False,
    "continue_final_message": True,
    "return_token_strs": True,
}
OLLAMA_CHAT: dict[str, Any] = {
    "model": "default_model:latest",
    "stream": False,
    "think": False,
    "keep_alive": "5m",
    "format": "",
    "options": {
        "num_predict": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "seed": 3,
        "stop": ["zz"],
        "repeat_penalty": 1.1,
        "repeat_last_n": 8,
        "presence_penalty": 0.1,
        "num_ctx": 64,
    },
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello", "images": []},
        {
            "role": "assistant",
            "content": "",
            "thinking": "Hm.",
            "tool_calls": [
                {"id": "c", "function": {"name": "look_up", "arguments": {"word": "pool"}}},
            ],
        },
        {"role": "tool", "tool_name": "look_up", "content": "found"},
    ],
    "tools": [{"type": "function", "function": FUNCTION}],
}
EMBEDDED = {"input": ["Hello", "you"], "dimensions": 4, "encoding_format": "float"}
OLLAMA_PROMPT = {
    "prompt": "Hello",
    "system": "Be brief.",
    "raw": False,
    "options": {"num_predict": 2},
    "suffix": "",
}
FORM = {
    "type": "object",
    "$defs": {"word": {"enum": ["a", "b", 3, None]}},
    "required": ["a"],
    "additionalProperties": False,
    "properties": {
        "a": {"$ref": "#/$defs/word"},
        "b": {"type": "string", "maxLength": 3, "pattern": "^[a-z]*$"},
        "c": {
            "items": {"anyOf": [{"type": "integer", "minimum": 3}, {"format": "date"}]},
            "maxItems": 2,
        },
    },
}
STRICT = {**FUNCTION, "strict": True}
LONGER = {"max_tokens": 12}
OPENAI_FORM = {"type": "json_schema", "json_schema": {"name": "f", "schema": FORM, "strict": True}}
OLLAMA_LONGER = {"options": {"num_predict": 12}}
# Bodies that ask for forms, by endpoint.
FORMS: dict[str, tuple[dict[str, Any], ...]] = {
    "chat": (
        {**CHAT, **LONGER, "response_format": OPENAI_FORM},
        {
            **CHAT,
            **LONGER,
            **HELLO,
            "tools": [{"type": "function", "function": STRICT}],
            "tool_choice": "required",
        },
    ),
    "completions": (
        {
            **COMPLETION,
            **LONGER,
            "structured_outputs": {"grammar": 'start: "a" /[0-9]/ | start start'},
            "best_of": 2,
        },
        {
            **COMPLETION,
            **LONGER,
            "guided_choice": ["yes", "no"],
            "guided_regex": None,
            "guided_json": None,
        },
    ),
    "messages": (
        {
            **MESSAGE,
            **LONGER,
            "tools": [{**LOOK_UP, "strict": True}],
            "output_config": {"format": {"type": "json_schema", "schema": FORM}, "effort": "low"},
        },
    ),
    "responses": (
        {
            **RESPONSE,
            "max_output_tokens": 12,
            "tools": [{"type": "function", **STRICT}],
            "text": {
                "format": {"type": "json_schema", "name": "f", "schema": FORM, "strict": True}
            },
        },
    ),
    "ollama": (
        {**OLLAMA_CHAT, **OLLAMA_LONGER, "format": FORM},
        {**OLLAMA_PROMPT, **OLLAMA_LONGER, "format": "json"},
    ),
}
ACTS = ("pin", "unpin", "fork", "save", "restore", "nothing")
AGENTS = (
    "fuzz",
    "ann",
    "scout",
    "%00",
    "..",
    "%2e%2e%2fx",
    "a%20b",
    "%ff",
    "\xe9",
    "x" * 300,
    "chat~3f2a9c0d41e7",
    "",
)

FIGURES = (
    "/v1/cache",
    "/v1/cache/explain",
    "/v1/cache/explain/req_0",
    "/v1/cache/explain/%ff%00",
    "/v1/models",
    "/v1/models/x",
)
FIGURES += (
    "/api/tags",
    "/api/ps",
    "/api/version",
    "/api/x",
    "/health",
    "/",
    "/v1/responses/resp_0",
    "/v1/nothing",
    "*",
    "//",
    "/../..",
    "/v1/models/" + "y" * 3000,
)

LOAD = {"model": "default_model", "wait": True}
POST = ("POST",) * 12 + ("GET", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH")
GET = ("GET",) * 6 + ("HEAD", "POST", "DELETE", "OPTIONS")
ENDPOINTS: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[dict[str, Any], ...]]] = {
    "chat": (
        POST,
        ("/v1/chat/completions", "/chat/completions"),
        (CHAT, {**CHAT, "stream": True, "tools": None}),
    ),
    "completions": (POST, ("/v1/completions",), (COMPLETION, {**COMPLETION, "stream": True})),
    "messages": (
        POST,
        ("/v1/messages",),
        (MESSAGE, PLAIN_MESSAGE, {**MESSAGE, "stream": True}, SEEN),
    ),
    "count_tokens": (POST, ("/v1/messages/count_tokens",), (MESSAGE, PLAIN_MESSAGE)),
    "responses": (
        POST,
        ("/v1/responses",),
        (RESPONSE, {**RESPONSE, "stream": True}, {"input": "Hello", "max_output_tokens": 2}),
    ),
    "tokenizer": (
        POST,
        ("/tokenize", "/detokenize", "/apply-template"),
        (
            TOKENS,
            {"prompt": "Hello", "add_special_tokens": False},
            {"tokens": [1, 2, 3]},
            TOKENIZED_CHAT,
        ),
    ),
    "ollama": (
        POST,
        ("/api/chat", "/api/generate", "/api/show", "/api/embed", "/v1/embeddings"),
        (
            OLLAMA_CHAT,
            EMBEDDED,
            {**OLLAMA_CHAT, "stream": True, "tools": None},
            OLLAMA_PROMPT,
            {"name": "default_model"},
        ),
    ),
    "agents": (
        ("POST", "POST", "POST", "GET", "DELETE", "HEAD"),
        (
            "/v1/agents",
            *(f"/v1/agents/{name}" for name in AGENTS),
            *(f"/v1/agents/{n}/{act}" for n in AGENTS for act in ACTS),
        ),
        ({"to": "scout"}, {"to": "fuzz", "more": [1, 2]}),
    ),
    "admin": (POST, ("/admin/load", "/admin/models"), (LOAD, {"model": "x/y", "adapters": "z"})),
    "figures": (GET, FIGURES, ()),
}


@pytest.fixture(scope="module")
def expected(server: Client) -> str:
    return reply(server)


def reply(server: Client) -> str:
    status, answer = server.send("/v1/chat/completions", HELLO)
    assert status == 200, answer
    return str(answer["choices"][0]["message"].get("content"))


def check(sent: Sent, answer: Answer | None) -> None:
    assert answer is not None, f"no answer to {sent}"
    text = answer.body.decode(errors="replace")
    assert 200 <= answer.status < 600
    assert answer.status not in (500, 502, 504), f"{answer.status} {text[:500]}\nto {sent}"
    for failure in ("Traceback", "The batch failed", "The generation thread failed"):
        assert failure not in text, f"{text[:500]}\nto {sent}"
    assert '.py"' not in text, text
    if answer.status >= 400 and sent.method != "HEAD":
        said = json.loads(text)["error"] if answer.type.startswith("application/json") else text
        message = said if isinstance(said, str) else said["message"]
        assert message.strip(), f"{answer.status} without a word, to {sent}"


@pytest.mark.parametrize("name", ENDPOINTS)
def test_nothing_that_is_nearly_right_hurts(name: str, server: Client, expected: str) -> None:
    methods, paths, bodies = ENDPOINTS[name]

    @SETTINGS
    @given(
        st.lists(
            requests(methods, paths, bodies + FORMS.get(name, ())),
            min_size=AT_ONCE,
            max_size=AT_ONCE,
        )
    )
    def all_are_answered(several: list[Sent]) -> None:
        for sent, answer in zip(
            several, at_once([lambda s=s: send(server.port, s) for s in several]), strict=True
        ):
            check(sent, answer)

    all_are_answered()
    server.settle()
    status, health = server.send("/health")
    assert (status, health["status"], health.get("restarts")) == (200, "ok", None)
    assert reply(server) == expected
    server.settle()
