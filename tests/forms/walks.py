"""Random walks through grammars of tool calls: tokens that a model without any sense might draw,
with texts that hurt parsers.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from llguidance import LLMatcher

from mlx_blockpool.forms.vocabulary import Vocabulary

# Texts that end, begin or escape something in the calls of one parser or another.
NASTY = (
    *(
        "null",
        "5",
        "1e5",
        "true",
        "True",
        "\n",
        " ",
        "\\",
        '"',
        "'",
        ",",
        "{",
        "}",
        "[",
        "]",
        "(",
        ")",
        "=",
        "<",
        "-",
        "\x00",
        "é",
        "🎉",
    ),
    *(
        "</tool_call>",
        "<tool_call>",
        "<|tool_call_end|>",
        "<|tool_call_begin|>",
        "<|tool_calls_section_end|>",
        "<tool_call|>",
        '<|"|>',
    ),
    *(
        "<escape>",
        "<end_function_call>",
        "[ARGS]",
        "[TOOL_CALLS]",
        "f[ARGS]{}",
        "call:f{",
        "a:1,b:2",
        ")]",
        "</think>",
    ),
)
# Characters that end something: they are drawn more often than others, so that walks end.
ENDS = b'"}]>),<'

SCHEMAS: dict[str, dict[str, Any]] = {
    "text": {
        "properties": {"city": {"type": "string"}, "unit": {"enum": ["c", "f"]}},
        "required": ["city"],
    },
    "scalars": {
        "properties": {
            "n": {"type": "integer", "minimum": 3},
            "b": {"type": "boolean"},
            "x": {"type": "number"},
        }
    },
    "unions": {
        "properties": {
            "o": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "u": {"type": ["string", "integer"]},
        },
        "required": ["o", "u"],
    },
    "bounds": {
        "properties": {
            "s": {"type": "string", "minLength": 2, "maxLength": 6},
            "p": {"type": "string", "pattern": "^[a-z]+1$"},
        }
    },
    "values": {
        "properties": {"e": {"enum": ["null", "5", 5, None, "a b", "}", True]}},
        "required": ["e"],
    },
    "none": {"properties": {}},
    "lists": {
        "properties": {"t": {"type": "array", "items": {"type": "string"}, "maxItems": 3}},
        "required": ["t"],
    },
    "deep": {
        "properties": {"tree": {"$ref": "#/$defs/N"}},
        "required": ["tree"],
        "$defs": {
            "N": {
                "type": "object",
                "properties": {
                    "s": {"type": "string"},
                    "kids": {"type": "array", "items": {"$ref": "#/$defs/N"}, "maxItems": 2},
                },
                "required": ["s"],
                "additionalProperties": False,
            }
        },
    },
    "pairs": {
        "properties": {
            "p": {
                "type": "array",
                "prefixItems": [{"type": "string"}, {"type": "integer"}],
                "minItems": 1,
                "maxItems": 3,
            },
            "q": {
                "type": "array",
                "prefixItems": [{"type": "boolean"}],
                "items": False,
                "minItems": 1,
            },
            "r": {
                "type": "array",
                "prefixItems": [{"const": 1}, {"const": 2}],
                "items": {"const": 3},
                "minItems": 3,
            },
            "s": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2},
        },
        "required": ["p", "q", "r", "s"],
    },
    "open": {"properties": {"any": {}, "o": {"type": "object"}}, "required": ["any", "o"]},
}
# Those without lists and objects.
FLAT = ("text", "scalars", "unions", "bounds", "values", "none")
for _schema in SCHEMAS.values():
    _schema.update({"type": "object", "additionalProperties": False})


# Of each vocabulary, by its id: whether a token begins with one of ENDS.
_ENDING: dict[int, list[bool]] = {}


def ending_tokens(vocabulary: Vocabulary) -> list[bool]:
    if id(vocabulary) not in _ENDING:
        tokens = ([token] for token in range(vocabulary.ll.vocab_size))
        _ENDING[id(vocabulary)] = [
            vocabulary.ll.decode_bytes(token).lstrip(b"\xff")[:1] in {bytes([c]) for c in ENDS}
            for token in tokens
        ]
    return _ENDING[id(vocabulary)]


def compiled(vocabulary: Vocabulary, grammar: str) -> LLMatcher:
    matcher = LLMatcher(vocabulary.ll, LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def walk(
    matcher: LLMatcher, vocabulary: Vocabulary, seed: int, limit: int = 120
) -> list[int] | None:
    """The tokens of a reply that ended by itself; None for one of more than `limit` tokens."""
    draw, out, found = random.Random(seed), [], matcher.deep_copy()
    while len(out) < limit:
        open_tokens = np.flatnonzero(np.frombuffer(found.compute_logit_bias(), np.uint8))
        assert not found.is_error(), found.get_error()
        choices = [int(token) for token in open_tokens if token not in vocabulary.eos]
        if (
            found.is_stopped()
            or (len(choices) < len(open_tokens) and draw.random() < 0.7)
            or not choices
        ):
            return out
        if draw.random() < 0.3:
            tokens = spelled(vocabulary, draw.choice(NASTY), draw)
            if found.deep_copy().try_consume_tokens(tokens) == len(tokens):
                assert found.consume_tokens(tokens)
                out += tokens
                continue
        if draw.random() < 0.5:
            choices = [token for token in choices if ending_tokens(vocabulary)[token]] or choices
        out.append(draw.choice(choices))
        assert found.consume_token(out[-1])
    return None


def spelled(vocabulary: Vocabulary, text: str, draw: random.Random) -> list[int]:
    """A text as its tokens or one character after the other."""
    return [
        token
        for part in (text if draw.random() < 0.6 else [text])
        for token in vocabulary.ll.tokenize_str(part)
    ]
