"""JSON schemas compiled over a vocabulary of bytes, random replies that keep them, and
jsonschema with numbers as written.
"""

from __future__ import annotations

import decimal
import functools
import json
import random
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import jsonschema
import llguidance
from llguidance import LLMatcher, LLTokenizer

from mlx_blockpool.config import FormConfig
from mlx_blockpool.errors import FormError
from mlx_blockpool.forms.compiler import Compiler
from mlx_blockpool.forms.exact import exact
from mlx_blockpool.forms.output_format import OutputFormat
from mlx_blockpool.forms.vocabulary import Vocabulary

EOS = 256
# Half of the random bytes are among those that bring JSON to its end.
ENDING = frozenset(b'"}],:0123456789')
SPACE = frozenset(b" \t\r\n")
EXACT = decimal.Context(prec=1_000)


class _Bytes:
    eos_token_id = EOS
    bos_token_id = None
    special_token_ids = (EOS,)
    tokens = (*(bytes([byte]) for byte in range(EOS)), b"\xff<end>")

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


@functools.cache
def vocabulary_of_bytes() -> Vocabulary:
    ll = LLTokenizer(llguidance.TokenizerWrapper(_Bytes()))
    return Vocabulary(
        ll=ll,
        added={"<end>": EOS},
        num_words=9,
        space=frozenset({9, 10, 13, 32}),
        eos=frozenset({EOS}),
    )


def compiled(schema: Any) -> LLMatcher:
    """A matcher of replies that satisfy a schema. Raises FormError as the server does."""
    return compiled_as("json", json.dumps(exact(schema, "schema")), "schema")


def compiled_as(kind: Any, text: str, place: str) -> LLMatcher:
    grammar = OutputFormat(kind, text, place).grammar
    return Compiler(FormConfig()).compile("bytes", vocabulary_of_bytes(), grammar, place)


def refusal(schema: Any) -> str | None:
    """Why a schema is refused, with its place."""
    try:
        compiled(schema)
    except FormError as error:
        return str(error)
    return None


def accepts(matcher: LLMatcher, text: str) -> bool:
    copy, tokens = matcher.deep_copy(), list(text.encode())
    return bool(copy.try_consume_tokens(tokens) == len(tokens) and copy.is_accepting())


def reply(matcher: LLMatcher, draw: random.Random, most: int = 100) -> bytes | None:
    """Random bytes that a matcher allows; None if they had not ended after `most` of them."""
    matcher, found = matcher.deep_copy(), bytearray()
    while len(found) < most:
        mask = matcher.compute_logit_bias()
        assert not matcher.is_error(), matcher.get_error()
        allowed = [token for token in range(EOS + 1) if mask[token]]
        ending = [token for token in allowed if token in ENDING or token == EOS]
        rest = [token for token in allowed if token not in SPACE] or allowed
        token = draw.choice(ending if ending and draw.random() < 0.6 else rest)
        if token == EOS:
            return bytes(found)
        found.append(token)
        assert matcher.consume_token(token)
        if matcher.is_stopped() and matcher.is_accepting():
            return bytes(found)
    return None


def errors_of(schema: Any, text: str | bytes) -> list[str]:
    """What jsonschema finds wrong with JSON, whose numbers are read as they are written."""
    with decimal.localcontext(EXACT):
        validator = _Validator(json.loads(json.dumps(schema), parse_float=Decimal))
        return [
            error.message for error in validator.iter_errors(json.loads(text, parse_float=_decimal))
        ]


def _decimal(text: str) -> Decimal:
    """A number; 0.5 in place of one with a large exponent, which only numbers without bounds
    have.
    """
    try:
        value = Decimal(text)
    except decimal.InvalidOperation:
        return Decimal("0.5")
    return value if abs(value.adjusted()) < 400 else Decimal("0.5")


def _multiple_of(
    validator: Any, divisor: Any, value: Any, schema: Any
) -> Iterator[jsonschema.ValidationError]:
    if validator.is_type(value, "number") and Decimal(value) % Decimal(divisor):
        yield jsonschema.ValidationError(f"{value} is not a multiple of {divisor}")


def _is_integer(checker: Any, value: Any) -> bool:
    return isinstance(value, int | Decimal) and not isinstance(value, bool) and value % 1 == 0


_Validator = jsonschema.validators.extend(
    jsonschema.Draft202012Validator,
    {"multipleOf": _multiple_of},
    type_checker=jsonschema.Draft202012Validator.TYPE_CHECKER.redefine("integer", _is_integer),
)
