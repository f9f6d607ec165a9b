"""Random replies under the masks of a form, read as the server reads them: every call and every
content keeps its schema.

There is no model: the next token is drawn from those that the form leaves open.
"""

from __future__ import annotations

import functools
import importlib
import json
import random
from argparse import Namespace
from typing import Any

import numpy as np
import pytest
from forms.vocabularies import DETOKENIZERS, tokenizer_of
from forms.walks import FLAT, NASTY, SCHEMAS, ending_tokens, spelled
from jsonschema import Draft202012Validator
from mlx_lm.generate import make_text_state_machine
from mlx_lm.tokenizer_utils import NaiveStreamingDetokenizer, TokenizerWrapper
from thorough import many

from mlx_blockpool.config import FormConfig
from mlx_blockpool.forms.calls import FAMILIES, Extent, call_grammar
from mlx_blockpool.forms.compiler import Compiler
from mlx_blockpool.forms.exact import exact
from mlx_blockpool.forms.form import Marks, ReplyForm
from mlx_blockpool.forms.output_format import OutputFormat, ToolFormat
from mlx_blockpool.forms.vocabulary import Vocabulary
from mlx_blockpool.server.api.call_stream import Call
from mlx_blockpool.server.api.reply import ReplyParser, Text
from mlx_blockpool.server.prompts.job import PreparedPrompt
from mlx_blockpool.server.request import ChatRequest, ParsedRequest

MARKERS = (
    *(
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
        '<|"|>',
    ),
    *(
        "<minimax:tool_call>",
        "</minimax:tool_call>",
        "<longcat_tool_call>",
        "</longcat_tool_call>",
        "<|tool_call>",
        "<tool_call|>",
    ),
    *(
        "<longcat_arg_key>",
        "</longcat_arg_key>",
        "<longcat_arg_value>",
        "</longcat_arg_value>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "<escape>",
    ),
    *(
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
    ),
    *(
        "<|tool_call_start|>",
        "<|tool_call_end|>",
        "<start_function_call>",
        "<end_function_call>",
        "<|open|>",
        "<|close|>",
        "<|sep|>",
    ),
)
# mlx-lm begins calls of this parser elsewhere, and the server forces none.
UNFORCED = "muse_spark"
CONTENT = {
    "type": "object",
    "properties": {"t": {"type": "string"}},
    "required": ["t"],
    "additionalProperties": False,
}
COMPILER = Compiler(FormConfig())
MODES = ["may", "must", "must once", "content"]
LONGEST = 250


@functools.cache
def tokenizer_for(parser: str, kind: str) -> tuple[Any, Vocabulary]:
    module, plain = (
        importlib.import_module(f"mlx_lm.tool_parsers.{parser}"),
        tokenizer_of(kind, 600, MARKERS),
    )
    start, end = module.tool_call_start, module.tool_call_end
    wrapper = TokenizerWrapper(
        plain._tokenizer,
        DETOKENIZERS.get(kind, NaiveStreamingDetokenizer),
        tool_call_start=start,
        tool_call_end=end,
        tool_parser=module.parse_tool_call,
    )
    return wrapper, Vocabulary.from_tokenizer(wrapper)


class Reply:
    """One random reply. `schema`: of the first of two tools."""

    def __init__(
        self, parser: str, kind: str, mode: str, schema: dict[str, Any], draw: random.Random
    ) -> None:
        self.parser, self.mode, self.draw = parser, mode, draw
        self.tokenizer, self.vocabulary = tokenizer_for(parser, kind)
        self.key, self.tokens = (parser, kind), list[int]()
        self.schemas = {"get_x": schema, "none": SCHEMAS["none"]}
        self.words = np.zeros(self.vocabulary.num_words, np.int32)
        self.form = self._form()
        tools = [
            {"type": "function", "function": {"name": name, "parameters": each}}
            for name, each in self.schemas.items()
        ]
        must = mode.startswith("must")
        request = ChatRequest("chat", "", [], tools, None, calls="must" if must else "may")
        request.compiled, request.tokenizer = self.form, self.tokenizer
        request.prepared = PreparedPrompt(
            call=(self.tokenizer.tool_call_start, self.tokenizer.tool_call_end)
        )
        request.form = (
            OutputFormat("json", json.dumps(CONTENT), "here") if mode == "content" else None
        )
        machine = make_text_state_machine(self.tokenizer)
        context = Namespace(
            text_sm=machine,
            initial_state="tool" if must else "normal",
            tool_parser=self.tokenizer.tool_parser,
        )
        arguments: Any = Namespace(stop_words=[], max_tokens=LONGEST)
        self.reader = ReplyParser(
            ParsedRequest(request, arguments, None, one_call=mode == "must once"), context
        )

    def run(self) -> list[Any]:
        """The pieces of the reply, which ends by itself or is cut."""
        detokenizer, pieces = self.tokenizer.detokenizer, list[Any]()
        while self.reader.reason is None:
            self.form.follow(self.tokens)
            for token in self._next():
                self.tokens.append(token)
                reason = (
                    "stop"
                    if token in self.vocabulary.eos
                    else "length"
                    if len(self.tokens) == LONGEST
                    else None
                )
                if reason != "stop":
                    detokenizer.add_token(token)
                if reason:
                    detokenizer.finalize()
                response = Namespace(
                    text=detokenizer.last_segment, token=token, finish_reason=reason
                )
                pieces += self.reader.parse(response)
                if self.reader.reason is not None:
                    break
        return pieces

    def _grammar(self, extent: Extent) -> Any:
        tools = [
            ToolFormat(name, json.dumps(exact(each, "")), name)
            for name, each in self.schemas.items()
        ]
        return COMPILER.compile(
            self.key,
            self.vocabulary,
            call_grammar(self.parser, tools, self.vocabulary, extent=extent),
            "tools",
        )

    def _form(self) -> ReplyForm:
        marks, size = (
            Marks.from_tokenizer(self.tokenizer, self.vocabulary),
            self.vocabulary.num_words,
        )
        if self.mode.startswith("must"):
            return ReplyForm(
                marks, size, self._grammar("reply" if self.mode == "must" else "call"), state="form"
            )
        if self.mode == "content":
            wanted = OutputFormat("json", json.dumps(exact(CONTENT, "")), "here")
            content = COMPILER.compile(self.key, self.vocabulary, wanted.grammar, wanted.place)
            return ReplyForm(marks, size, content, self._grammar("reply"))
        if not marks.call_start:
            return ReplyForm(marks, size, self._grammar("text"), state="form")
        return ReplyForm(marks, size, calls=self._grammar("block"), state="free")

    def _next(self) -> list[int]:
        """What comes next: a nasty text, a marker, or any token, where the form allows it."""
        draw, start = self.draw, list(self.tokenizer.tool_call_start_tokens)
        if not self.form.fill(self.words):
            thinking = [
                list(self.tokenizer.think_start_tokens),
                list(self.tokenizer.think_end_tokens),
            ]
            end = [draw.choice(sorted(self.vocabulary.eos))]
            return draw.choice(
                [start, *thinking, end, end, self._nasty(), self._nasty(), [draw.randrange(300)]]
            )
        bits = np.unpackbits(self.words.view(np.uint8), bitorder="little")[
            : self.vocabulary.ll.vocab_size
        ]
        allowed = [int(token) for token in np.flatnonzero(bits)]
        ends = [token for token in allowed if token in self.vocabulary.eos]
        if ends and draw.random() < 0.5:
            return [draw.choice(ends)]
        for tokens in (start, self._nasty()):
            if draw.random() < 0.2 and self._takes(tokens):
                return tokens
        added = [token for token in allowed if token in self.vocabulary.added.values()]
        if added and draw.random() < 0.5:
            return [draw.choice(added)]
        quick = [token for token in allowed if ending_tokens(self.vocabulary)[token]]
        return [draw.choice(quick if quick and draw.random() < 0.5 else allowed)]

    def _nasty(self) -> list[int]:
        return spelled(self.vocabulary, self.draw.choice(NASTY), self.draw)

    def _takes(self, tokens: list[int]) -> bool:
        copy, words = self.form.copy(), self.words.copy()
        for number, token in enumerate(tokens, 1):
            if copy.fill(words) and not words[token >> 5] >> (token & 31) & 1:
                return False
            copy.follow([*self.tokens, *tokens[:number]])
        return True


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["bpe", "spm", "naive"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("parser", sorted(FAMILIES))
def test_calls_and_content_keep_their_schemas(
    parser: str, mode: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    if (parser == UNFORCED and mode != "may") or (parser == "minicpm5" and mode == "content"):
        pytest.skip("the server makes no such reply")
    ended = calls = 0
    for seed in range(many(2, 8)):
        draw = random.Random(seed)
        name = draw.choice([name for name in SCHEMAS if parser != "function_gemma" or name in FLAT])
        reply = Reply(parser, kind, mode, SCHEMAS[name], draw)
        caplog.clear()
        pieces = reply.run()
        found = [piece for piece in pieces if isinstance(piece, Call)]
        for call in found:
            Draft202012Validator(reply.schemas[call.name]).validate(call.arguments)
        calls += len(found)
        if reply.reader.reason is not None and reply.reader.reason.is_cut:
            continue
        ended += 1
        assert "a malformed tool call" not in caplog.text
        text = "".join(piece.text for piece in pieces if isinstance(piece, Text)).strip()
        if mode == "content" and not found:
            Draft202012Validator(CONTENT).validate(json.loads(text))
        elif mode != "may":
            assert found
            assert not text
        assert len(found) <= 1 or mode != "must once"
    assert ended
    assert calls or mode in ("may", "content")
