"""Text into tokens and back, and chats into text, for clients that count or render prompts
themselves.

Runs in a worker process, like the renderer of prompts.
"""

from __future__ import annotations

import json
from array import array
from typing import Any

from jinja2 import TemplateError

from ...config import RequestConfig
from ...forms.token_bytes import byte_letters, spelled_bytes
from ...mlx_lm_compat import convert_chat
from .job import TokenizerJob, TokenizerResult
from .renderer import PromptRenderer
from .templates import Template, without_later_system


def convert(renderer: PromptRenderer, job: TokenizerJob) -> TokenizerResult:
    """Run a job.

    Raises ValueError for unknown and for too many tokens, and what templates and tokenizers raise.
    """
    tokenizer, text, tokens = renderer.tokenizer.whole, "", list(job.tokens)
    if job.messages:
        text = _rendered(tokenizer, job)
        tokens = _tokenized(tokenizer, text, job) if job.tokenizes else []
    elif job.tokens:
        _strings(tokenizer, job.tokens)
        text = str(tokenizer.decode(job.tokens, clean_up_tokenization_spaces=False))
    else:
        tokens = _joined(tokenizer, job)
    if len(tokens) > RequestConfig.tokenized:
        raise ValueError(
            f"The text has {len(tokens):,} tokens; at most {RequestConfig.tokenized:,} are "
            "returned. Send it in parts."
        )
    template = getattr(tokenizer, "chat_template", None)
    return TokenizerResult(
        array("i", tokens),
        {
            name: json.dumps(value).encode()
            for name, value in {"text": text, **_wanted(tokenizer, tokens, job)}.items()
        },
        template if isinstance(template, str) else None,
        bool(tokenizer.has_tool_calling),
        bool(tokenizer.has_thinking),
    )


def _wanted(tokenizer: Any, tokens: list[int], job: TokenizerJob) -> dict[str, Any]:
    """The members of the answer that a job wants for its tokens."""
    if job.wants == "pieces":
        pairs = zip(tokens, _pieces(tokenizer, tokens), strict=True)
        return {"tokens": [{"id": token, "piece": piece} for token, piece in pairs]}
    listed = {"tokens": tokens} if job.wants else {}
    return listed | ({"token_strs": _strings(tokenizer, tokens)} if job.wants == "strings" else {})


def _tokenized(tokenizer: Any, text: str, job: TokenizerJob, is_first: bool = True) -> list[int]:
    adds = job.adds_special_tokens and is_first
    reads = {} if job.reads_special_tokens else {"split_special_tokens": True}
    return list(tokenizer.encode(text, add_special_tokens=adds, **reads))


def _joined(tokenizer: Any, job: TokenizerJob) -> list[int]:
    """The tokens of all parts, one part after the other."""
    _strings(tokenizer, [part for part in job.parts if isinstance(part, int)])
    tokens: list[int] = []
    for i, part in enumerate(job.parts):
        tokens += (
            [part] if isinstance(part, int) else _tokenized(tokenizer, part, job, is_first=i == 0)
        )
    return tokens


def _rendered(tokenizer: Any, job: TokenizerJob) -> str:
    """The chat as text.

    As for replies, a template that rejects a later system message receives it as the user's.
    """
    if not tokenizer.has_chat_template:
        return str(convert_chat(job.messages, None))
    template, lowered = (
        Template(tokenizer, job.tools, job.options),
        without_later_system(job.messages),
    )
    try:
        return template.text(job.messages)
    except TemplateError:
        if lowered == job.messages:
            raise
        return template.text(lowered)


def _strings(tokenizer: Any, tokens: list[int]) -> list[Any]:
    """Each token as the vocabulary has it. Raises ValueError for a token that it lacks."""
    strings = tokenizer.convert_ids_to_tokens(tokens)
    for i, (token, string) in enumerate(zip(tokens, strings, strict=True)):
        if string is None:
            raise ValueError(f"tokens[{i}]: the model's vocabulary has no token {token}")
    return list(strings)


def _pieces(tokenizer: Any, tokens: list[int]) -> list[Any]:
    """The text of each token, with its spaces; its bytes where they are not UTF-8 by themselves."""
    added, letters = tokenizer.get_added_vocab(), {}
    if "ByteLevel" in str(tokenizer.backend_tokenizer.decoder):
        letters = byte_letters()
    pieces: list[str | list[int]] = []
    for string in _strings(tokenizer, tokens):
        data = string.encode() if string in added else _bytes_of(string, letters)
        try:
            pieces.append(data.decode())
        except UnicodeDecodeError:
            pieces.append(list(data))
    return pieces


def _bytes_of(string: str, letters: dict[str, int]) -> bytes:
    return (
        bytes(letters[letter] for letter in string if letter in letters)
        if letters
        else spelled_bytes(string)
    )
