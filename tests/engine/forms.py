"""Forms over the tokens of the small models, and replies that mlx-lm alone gives with its logits
masked.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any

import llguidance
import mlx.core as mx
import numpy as np
from engine.engines import VOCABULARY, StockReply, stock_caches, stock_model
from llguidance import LLMatcher, LLTokenizer
from mlx_lm.generate import StopSequences

from mlx_blockpool.forms.form import Marks, ReplyForm

EOS = VOCABULARY - 1
# ASCII, with words in place of control characters that JSON has no use for.
WORDS = {
    1: b'{"',
    2: b'":',
    3: b"true",
    4: b"false",
    5: b'", "',
    6: b"alpha",
    7: b"12",
    8: b'"}',
    128: b"long",
    129: b"est",
}
TOKENS = [WORDS.get(i, bytes([i])) for i in range(EOS)]
STOP = StopSequences([(EOS,)])

PERSON: Any = {
    "type": "object",
    "properties": {
        "a_long_name": {"enum": ["yes, it is", "no, it is not"]},
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
        "k": {"const": "a constant of more tokens than a jump has"},
    },
    "required": ["a_long_name", "n", "k"],
    "additionalProperties": False,
}
# All of it is forced.
SAYING: Any = {"const": "of several tokens"}
FLAGS: Any = {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4}


class _Words:
    """As llguidance takes a vocabulary."""

    def __init__(self) -> None:
        self.eos_token_id = EOS
        self.bos_token_id = None
        self.tokens = [*TOKENS, b"\xff<|end|>"]
        self.special_token_ids = [EOS]

    def __call__(self, text: Any) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


@functools.cache
def vocabulary() -> LLTokenizer:
    return LLTokenizer(llguidance.TokenizerWrapper(_Words()))


@functools.cache
def matcher(schema: str) -> LLMatcher:
    grammar = LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": " ?"})
    return LLMatcher(vocabulary(), grammar, log_level=0)


def form_of(schema: Any) -> ReplyForm:
    """A form that no token has come to."""
    return ReplyForm(
        Marks(eos=frozenset({EOS})),
        -(-VOCABULARY // 32),
        matcher(json.dumps(schema)).deep_copy(),
        state="form",
    )


def text_of(tokens: Sequence[int]) -> str:
    return b"".join(TOKENS[token] for token in tokens if token != EOS).decode()


class StockForm:
    """A logits processor: closes what a form does not allow, by comparing token by token."""

    def __init__(self, schema: Any, max_tokens: int) -> None:
        self.form = form_of(schema)
        self.form.max_tokens = max_tokens
        self._prompt: int | None = None

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        if self._prompt is None:
            self._prompt = len(tokens)
        self.form.follow(tokens.tolist()[self._prompt :])
        words = np.zeros(self.form.num_words, np.int32)
        self.form.fill(words)
        is_open = [bool(words[i // 32] >> i % 32 & 1) for i in range(logits.shape[-1])]
        return mx.where(mx.array(is_open), logits, -mx.inf)


@functools.cache
def _stock_reply(name: str, prompt: tuple[int, ...], schema: str, max_tokens: int) -> StockReply:
    form = StockForm(json.loads(schema), max_tokens)
    return StockReply(stock_model(name), prompt, stock_caches(name), [form])


def assert_stock_form(
    name: str, prompt: Sequence[int], schema: Any, found: Sequence[int], max_tokens: int
) -> None:
    """`found` is what mlx-lm says in that form, as far as it goes."""
    expected = _stock_reply(name, tuple(prompt), json.dumps(schema), max_tokens).certain(len(found))
    assert list(expected) == list(found[: len(expected)])
