"""Calls among free text of models that write the marker before them in ordinary tokens."""

from __future__ import annotations

import json

import pytest
from forms.vocabularies import vocabulary_of

from mlx_blockpool.config import FormConfig
from mlx_blockpool.forms.calls import call_grammar
from mlx_blockpool.forms.compiler import Compiler
from mlx_blockpool.forms.output_format import ToolFormat

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
CALL = '<function name="look_up"><param name="city">Oslo</param></function>'


@pytest.mark.parametrize(
    ("text", "is_taken"),
    [
        ("", True),
        ("Plain words, 1 < 2 and <function.", True),
        (CALL, True),
        (f"I look.\n{CALL}", True),
        (f"{CALL}\n{CALL} and text", True),
        ('I look.\n<function name="other">', False),
        ('<function name="look_up"><param name="town">', False),
        (f'{CALL}\n<function name="look_up"></function>', False),
        (CALL[:-3], None),
    ],
)
def test_text_is_free_and_every_call_in_it_is_held(text: str, is_taken: bool | None) -> None:
    vocabulary = vocabulary_of("bpe")
    grammar = call_grammar(
        "minicpm5", [ToolFormat("look_up", json.dumps(CITY), "tools[0]")], vocabulary, extent="text"
    )
    matcher = Compiler(FormConfig()).compile("key", vocabulary, grammar, "tools")
    tokens = vocabulary.ll.tokenize_str(text)
    is_whole = matcher.try_consume_tokens(tokens) == len(tokens)
    # A call that is not complete is not the end of a reply.
    assert (is_whole, matcher.is_accepting()) == (is_taken is not False, is_taken is True)
