"""Tiny models that can think and call tools, of which a test says what they reply, and the SDKs'
clients for a server of ours.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anthropic
import openai
from models import CONFIGS, character_tokenizer, make_model, write_model

from server.serving import Client

SPECIAL = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
# As Qwen's: system text before the tools, thinking off by closing it, nothing else than a first
# system message.
TEMPLATE = (
    "{% if tools or messages[0].role == 'system' %}<|im_start|>system\n"
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}\n{% endif %}"
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('System message must be at "
    "the beginning.') }}{% endif %}"
    "{% if m.role != 'system' %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ "
    "m.content }}"
    "{% for call in m.tool_calls or [] %}{% set tool_call = call.function %}{{ '\n' }}<tool_call>\n"
    '{"name": "{{ tool_call.name }}", "arguments": {{ tool_call.arguments | tojson '
    "}}}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
LOOK_UP: Any = {
    "name": "look_up",
    "description": "Looks a word up.",
    "input_schema": {
        "type": "object",
        "properties": {"word": {"type": "string"}},
        "required": ["word"],
    },
}
SYSTEM = "You are an agent that looks things up before it answers. " * 6
CALL = '<tool_call>\n{"name": "look_up", "arguments": {"word": "pool"}}\n</tool_call>'
ADD: Any = {
    "name": "add",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}},
}


def save_agent(folder: Path, template: str = TEMPLATE, name: str = "llama", **changes: Any) -> Path:
    """A model folder with the tokens that thinking and tools need, of single characters
    otherwise.
    """
    tokenizer = character_tokenizer()
    tokenizer.add_special_tokens(SPECIAL)
    changes = {"vocab_size": tokenizer.get_vocab_size(), **changes}
    return write_model(
        folder, make_model(name, **changes), {**CONFIGS[name], **changes}, template, tokenizer
    )


# say(text, ...): what the model generates from now on, one text a request; then it ends its turn.
# The last text stays.
Say = Callable[..., None]


def anthropic_client(server: Client) -> anthropic.Anthropic:
    # Reading certificates takes longer than most replies.
    http = anthropic.DefaultHttpxClient(verify=False)
    return anthropic.Anthropic(
        base_url=f"http://127.0.0.1:{server.port}",
        api_key="any",
        max_retries=0,
        timeout=60,
        http_client=http,
    )


def openai_client(server: Client) -> openai.OpenAI:
    http = openai.DefaultHttpxClient(verify=False)
    return openai.OpenAI(
        base_url=f"http://127.0.0.1:{server.port}/v1",
        api_key="any",
        max_retries=0,
        timeout=60,
        http_client=http,
    )


def raw_events(server: Client, path: str, **body: Any) -> list[dict[str, Any]]:
    """What a stream has on the wire, each event under its own name."""
    data = json.dumps({"stream": True, **body}).encode()
    with urllib.request.urlopen(
        urllib.request.Request(f"http://127.0.0.1:{server.port}{path}", data)
    ) as answer:
        assert answer.headers["Content-type"] == "text/event-stream"
        blocks = [
            block
            for block in answer.read().decode().strip().split("\n\n")
            if not block.startswith(":")
        ]
    found = []
    for block in blocks:
        name, written = block.split("\n")
        found.append(json.loads(written.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def content(message: Any) -> list[dict[str, Any]]:
    """The blocks of a message without what differs each time."""
    blocks = [block.to_dict() for block in message.content]
    return [
        {name: value for name, value in block.items() if name not in ("id", "signature")}
        for block in blocks
    ]


def total(usage: Any) -> int:
    """All tokens of a prompt."""
    return int(
        usage.input_tokens + usage.cache_creation_input_tokens + usage.cache_read_input_tokens
    )
