"""Tiny models that can think and call tools, replies that are said for them, and Anthropic's client for a server of ours."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anthropic
import mlx.core as mx
import pytest
from mlx_lm import server
from models import CONFIGS, character_tokenizer, make_model, write_model

from server.serving import Client

SPECIAL = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
# As Qwen's: system text before the tools, thinking off by closing it, nothing else than a first system message.
TEMPLATE = (
    "{% if tools or messages[0].role == 'system' %}<|im_start|>system\n"
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}\n{% endif %}"
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "{% if m.role != 'system' %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{% set tool_call = call.function %}{{ '\n' }}<tool_call>\n"
    '{"name": "{{ tool_call.name }}", "arguments": {{ tool_call.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
LOOK_UP: Any = {
    "name": "look_up",
    "description": "Looks a word up.",
    "input_schema": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
}
ADD: Any = {"name": "add", "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}


def save_agent(folder: Path, template: str = TEMPLATE, name: str = "llama", **changes: Any) -> Path:
    """A model folder with the tokens that thinking and tools need, of single characters otherwise."""
    tokenizer = character_tokenizer()
    tokenizer.add_special_tokens(SPECIAL)
    changes = {"vocab_size": tokenizer.get_vocab_size(), **changes}
    return write_model(folder, make_model(name, **changes), {**CONFIGS[name], **changes}, template, tokenizer)


Say = Callable[..., None]


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch) -> Say:
    """say(text, ...): what the model generates from now on, one text a request; then it ends its turn. The last text stays."""

    def says(*texts: str) -> None:
        left = list(texts)
        # Samplers are tried before they are used; a request's own object stays the same until then.
        said: dict[int, tuple[Any, str]] = {}

        def make_sampler(args: Any, tokenizer: Any) -> Any:
            if id(args.sampling) not in said:
                said[id(args.sampling)] = args.sampling, left.pop(0) if len(left) > 1 else left[0]
            tokens = iter(tokenizer.encode(said[id(args.sampling)][1], add_special_tokens=False))
            return lambda logprobs: mx.array([next(tokens, tokenizer.eos_token_id)])

        monkeypatch.setattr(server, "_make_sampler", make_sampler)

    return says


def anthropic_client(server: Client) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=f"http://127.0.0.1:{server.port}", api_key="any", max_retries=0, timeout=60)


def content(message: Any) -> list[dict[str, Any]]:
    """The blocks of a message without what differs each time."""
    blocks = [block.to_dict() for block in message.content]
    return [{name: value for name, value in block.items() if name not in ("id", "signature")} for block in blocks]


def total(usage: Any) -> int:
    """All tokens of a prompt."""
    return int(usage.input_tokens + usage.cache_creation_input_tokens + usage.cache_read_input_tokens)
