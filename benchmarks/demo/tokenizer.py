"""The demo model's tokenizer: byte-level BPE and a ChatML template.

Knows text and token ids. Does not know mlx or where the text comes from.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

IM_START, IM_END, END_OF_TEXT = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
CALL, CALL_END = "<tool_call>", "</tool_call>"

# Content may be a text, a list of parts (OpenAI), or None next to tool calls. A system message is
# added for tools only, and has their names: schemas would fill the short context of the demo model.
CHAT_TEMPLATE = """\
{%- if tools -%}
{{- '<|im_start|>system\\n# Tools\\n' -}}
{%- for tool in tools -%}{{- (tool.function or tool).name ~ '\\n' -}}{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] or [] -%}{{- part['text'] -}}{%- endfor -%}
{%- endif -%}
{%- for tool_call in message['tool_calls'] or [] -%}
{%- set tool_call = tool_call.function or tool_call -%}
{{- '\\n' if loop.first and message['content'] or not loop.first -}}
{{- '<tool_call>\\n{"name": "' ~ tool_call.name ~ '", "arguments": ' ~ tool_call.arguments | tojson ~ '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""  # noqa: E501


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, IM_START, IM_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(
    tokenizer: Tokenizer, messages: Iterable[tuple[str, str]]
) -> tuple[list[int], list[bool]]:
    """Token ids of a whole conversation of (role, text), and which of them the model is to learn
    to write.
    """
    tokens: list[int] = []
    learned: list[bool] = []
    for role, text in messages:
        head = tokenizer.encode(f"{IM_START}{role}\n").ids
        body = tokenizer.encode(f"{text}{IM_END}").ids
        tail = tokenizer.encode("\n").ids
        tokens += head + body + tail
        learned += [False] * len(head) + [role == "assistant"] * len(body) + [False] * len(tail)
    return tokens, learned


def save_tokenizer(
    tokenizer: Tokenizer, folder: Path, template: str = CHAT_TEMPLATE, longest: int = 8192
) -> None:
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": IM_END,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": [IM_START],
        "clean_up_tokenization_spaces": False,
        "model_max_length": longest,
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config, indent=1) + "\n", encoding="utf-8"
    )
