"""A model that answers right by itself writes the same tokens with and without a form, also where
forced ones are not drawn.

The model is the benchmarks' caller, trained to call tools with numbers that it copies; mlx-lm alone
says what it writes.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import jsonschema
import mlx_lm
import pytest
from documents import ROOT
from mlx_lm.generate import StopSequences, stream_generate
from test_benchmarks import imported
from thorough import many, only

from mlx_blockpool.config import EngineConfig, FormConfig
from mlx_blockpool.engine.engine import BlockPoolBatchEngine
from mlx_blockpool.engine.request import Request, Token
from mlx_blockpool.forms.compiler import Compiler
from mlx_blockpool.forms.form import Marks, ReplyForm
from mlx_blockpool.forms.output_format import OutputFormat
from mlx_blockpool.forms.vocabulary import Vocabulary

CALLER = ROOT / "benchmarks/data/caller"
CALLS = many(2, 24)
LIMIT = 60


class Caller:
    """The model, prompts that end where it calls, and the tokens that it generates in mlx-lm."""

    def __init__(self) -> None:
        made = imported("tool_calls", ROOT / "benchmarks")
        self.model, self.tokenizer = mlx_lm.load(str(CALLER))[:2]
        self.vocabulary = Vocabulary.from_tokenizer(self.tokenizer)
        self.compiler = Compiler(FormConfig())
        self.prompts = [self._prompt(made.session(random.Random(seed), 1)) for seed in range(CALLS)]
        self.written = [self._alone(prompt) for prompt in self.prompts]
        self.schema = {
            "type": "object",
            "properties": {
                "name": {"enum": list(made.TOOLS)},
                "arguments": {
                    "type": "object",
                    "properties": {"path": {"type": "string"}},
                    "required": ["path"],
                    "additionalProperties": False,
                },
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }

    def _prompt(self, session: Any) -> list[int]:
        messages = [{"role": role, "content": text} for role, text in session.messages()[:2]]
        tokens: list[int] = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        return tokens

    def _alone(self, prompt: Sequence[int]) -> list[int]:
        return [
            part.token
            for part in stream_generate(self.model, self.tokenizer, list(prompt), max_tokens=LIMIT)
        ]

    def form(self) -> ReplyForm:
        wanted = OutputFormat("json", json.dumps(self.schema), "schema")
        matcher = self.compiler.compile("caller", self.vocabulary, wanted.grammar, wanted.place)
        return ReplyForm(
            Marks.from_tokenizer(self.tokenizer, self.vocabulary),
            self.vocabulary.num_words,
            content=matcher,
            state="form",
        )


@pytest.fixture(scope="module")
def caller() -> Caller:
    return Caller()


# How many run together, and how long a run of forced tokens has to be to be computed at once.
@pytest.mark.parametrize(
    "case", only([(CALLS, 4), (CALLS, 10**9), (1, 10**9), (1, 1)], (1, 1)), ids=str
)
def test_greedy_tokens_are_those_without_a_form(caller: Caller, case: tuple[int, int]) -> None:
    together, least_forced = case
    config = EngineConfig(forced_tokens=least_forced)
    engine = BlockPoolBatchEngine.open(caller.model, pool_bytes=40_000_000, config=config)
    stop = StopSequences([(token,) for token in caller.tokenizer.eos_token_ids])
    for begin in range(0, CALLS, together):
        prompts, expected = (
            found[begin : begin + together] for found in (caller.prompts, caller.written)
        )
        written: dict[int, list[int]] = {
            engine.insert(Request(prompt, LIMIT, form=caller.form(), stop=stop)): []
            for prompt in prompts
        }
        while len(engine):
            for event in engine.next():
                if isinstance(event, Token):
                    written[event.uid].append(event.token)
        assert list(written.values()) == expected
    # A run of forced tokens is shorter than the batch, and so drawn token by token; alone it is
    # computed at once.
    assert bool(engine.counts["forced_tokens"]) == (least_forced == 1)


def test_the_model_is_right_by_itself(caller: Caller) -> None:
    calls = [json.loads(caller.tokenizer.decode(tokens[:-1])) for tokens in caller.written]
    jsonschema.validate(calls, {"type": "array", "items": caller.schema})
