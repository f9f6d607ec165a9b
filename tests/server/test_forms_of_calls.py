"""The forms of requests with tools, by how a model writes calls: markers in text, and schemas
that do not compile.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from forms.vocabularies import tokenizer_of, vocabulary_of

from mlx_blockpool.config import FormConfig
from mlx_blockpool.errors import FormError
from mlx_blockpool.forms.form import Marks, ReplyForm
from mlx_blockpool.forms.output_format import OutputFormat, ToolFormat
from mlx_blockpool.server.forms import Forms, FormTokens
from mlx_blockpool.server.prompts.job import PreparedPrompt
from mlx_blockpool.server.provider import ModelKey
from mlx_blockpool.server.request import ChatRequest

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
# llguidance does not tell these two apart.
EITHER = {
    "type": "object",
    "properties": {"n": {"oneOf": [{"type": "integer"}, {"minimum": 3}]}},
    "required": ["n"],
}
VOCABULARY = vocabulary_of("bpe")


def form_of(
    parser: str, tools: list[ToolFormat], has_marks: bool = True, state: str = "normal", **more: Any
) -> ReplyForm:
    """`state`: where the template leaves the reply."""
    marks = (
        Marks.from_tokenizer(tokenizer_of("bpe"), VOCABULARY)
        if has_marks
        else Marks(eos=VOCABULARY.eos)
    )
    request = ChatRequest("chat", "", [], [{}], None, held=tuple(tools), **more)
    request.prepared = PreparedPrompt([1], [1], ["user"], state)
    form = Forms(FormConfig()).form_for(
        request, ModelKey("model"), FormTokens(VOCABULARY, marks, parser)
    )
    assert form is not None
    return form


def tokens_of(*parts: str) -> list[int]:
    return [
        t
        for part in parts
        for t in (
            [VOCABULARY.added[part]]
            if part in VOCABULARY.added
            else VOCABULARY.ll.tokenize_str(part)
        )
    ]


def test_calls_are_held_where_their_marker_is_text() -> None:
    tool = ToolFormat("look_up", json.dumps(CITY), "tools[0].function.parameters")
    call = '<function name="look_up"><param name="city">Oslo</param></function>'
    form = form_of("minicpm5", [tool], has_marks=False)
    form.copy().follow([*tokens_of(f"I look.\n{call}\nand {call}"), max(VOCABULARY.eos)])
    for wrong in (
        call.replace("city", "town"),
        call.replace("look_up", "remove"),
        f"I look. {call[:40]}",
    ):
        with pytest.raises(FormError, match="has left its form"):
            form.copy().follow([*tokens_of(wrong), max(VOCABULARY.eos)])


def test_content_is_all_of_a_reply_where_the_marker_of_calls_is_text() -> None:
    tool = ToolFormat("look_up", json.dumps(CITY), "tools[0].function.parameters")
    form = form_of(
        "minicpm5",
        [tool],
        has_marks=False,
        form=OutputFormat("json", json.dumps(CITY), "response_format"),
    )
    form.copy().follow(tokens_of('{"city": "Oslo"}'))
    with pytest.raises(FormError, match="cannot begin the reply"):
        form.copy().follow(tokens_of("<function"))


def test_schemas_of_tools_that_are_not_strict_are_left_out_where_they_do_not_compile() -> None:
    either, strict = (
        ToolFormat("either", json.dumps(EITHER), None),
        ToolFormat("look_up", json.dumps(CITY), "tools[1]"),
    )
    form = form_of("json_tools", [either, strict])
    form.copy().follow(
        tokens_of(
            "<tool_call>", '{"name": "either", "arguments": {"n": "any"}}', "</tool_call>", "done"
        )
    )
    with pytest.raises(FormError, match="has left its form"):
        form.copy().follow(
            tokens_of(
                "<tool_call>", '{"name": "look_up", "arguments": {"town": 1}}', "</tool_call>"
            )
        )
    with pytest.raises(FormError, match="oneOf"):
        form_of("json_tools", [ToolFormat("either", json.dumps(EITHER), "tools[0]")])


@pytest.mark.parametrize(("parser", "has_marks"), [("json_tools", True), ("minicpm5", False)])
def test_thinking_that_the_template_has_begun_is_free(parser: str, has_marks: bool) -> None:
    tool = ToolFormat("look_up", json.dumps(CITY), "tools[0].function.parameters")
    content = OutputFormat("json", json.dumps(CITY), "response_format")
    for held, wanted in (([tool], None), ([], content), ([tool], content)):
        form = form_of(parser, held, has_marks, state="reasoning", form=wanted)
        assert form.state == "thinking"
        form.follow(tokens_of("Let me think."))
    # The prompt ends the thinking where a call has to be made.
    assert form_of(parser, [tool], has_marks, state="tool", calls="must").state == "form"


def test_several_calls_may_stand_in_place_of_content() -> None:
    content = OutputFormat("json", json.dumps({"type": "array"}), "response_format")
    form = form_of("json_tools", [ToolFormat("look_up", json.dumps(CITY), None)], form=content)
    call = '{"name": "look_up", "arguments": {"city": "Oslo"}}'
    form.follow(
        [
            *tokens_of(
                "<tool_call>", call, "</tool_call>", "\n", "<tool_call>", call, "</tool_call>"
            ),
            max(VOCABULARY.eos),
        ]
    )
    assert form.state == "done"


def test_no_thinking_comes_behind_a_beginning_that_the_client_gives() -> None:
    wanted = OutputFormat("json", json.dumps(CITY), "response_format")
    form = form_of("json_tools", [], form=wanted, begin='{"city": ')
    with pytest.raises(FormError, match="has left its form"):
        form.copy().follow(tokens_of("<think>"))
    form.follow(tokens_of('"Oslo"}'))
