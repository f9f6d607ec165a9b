"""Forms in batches of a random model: replies that ended by themselves are valid, and the others
are those without forms.

The model draws at temperature 1 with a seed, and would keep none of the schemas by chance.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from forms.schemas import errors_of
from forms.test_schema_suite import KEPT, SUITE, schemas_of_hypothesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from mlx_lm.generate import StopSequences
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper
from models import byte_tokenizer, make_ending
from thorough import is_thorough, many
from transformers import PreTrainedTokenizerFast

from mlx_blockpool.config import FormConfig
from mlx_blockpool.engine.engine import BlockPoolBatchEngine
from mlx_blockpool.engine.request import Request, Token
from mlx_blockpool.errors import FormError
from mlx_blockpool.forms.compiler import Compiler
from mlx_blockpool.forms.exact import exact
from mlx_blockpool.forms.form import Marks, ReplyForm
from mlx_blockpool.forms.output_format import OutputFormat
from mlx_blockpool.forms.vocabulary import Vocabulary
from mlx_blockpool.server.sampling import OwnRandomness

FORMED = NEIGHBOURS = 4
LIMIT = 120 if is_thorough() else 60
RANDOM, SUITES = 300, KEPT - 4
# Of the replies in a form. The others write a number or a text until they are cut off.
ENDED_SHARE = 0.5


@dataclass
class Written:
    """The tokens of a reply, and why it ended."""

    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None


class Writer:
    """The random model, its vocabulary, and an engine."""

    def __init__(self) -> None:
        tokenizer = byte_tokenizer()
        fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
        self.tokenizer = TokenizerWrapper(fast, BPEStreamingDetokenizer)
        self.vocabulary = Vocabulary.from_tokenizer(self.tokenizer)
        self.compiler = Compiler(FormConfig())
        self.engine = BlockPoolBatchEngine.open(make_ending(tokenizer), pool_bytes=8_000_000)

    def form(self, schema: Any) -> ReplyForm | None:
        """None: the schema is refused."""
        try:
            wanted = OutputFormat("json", json.dumps(exact(schema, "schema")), "schema")
            matcher = self.compiler.compile("writer", self.vocabulary, wanted.grammar, wanted.place)
        except FormError:
            return None
        return ReplyForm(
            Marks.from_tokenizer(self.tokenizer, self.vocabulary),
            self.vocabulary.num_words,
            content=matcher,
            state="form",
        )

    def write(self, forms: Sequence[ReplyForm | None], first: int = 0) -> list[Written]:
        """Replies in one batch: in the forms, and of neighbours that do not stop."""
        stop = StopSequences([(token,) for token in self.vocabulary.eos])
        requests = [
            Request([40 + first % 50, 9, n], LIMIT, drawn(first + n), form=form, stop=stop)
            for n, form in enumerate(forms)
        ]
        requests += [Request([60, 7, n], LIMIT, drawn(1000 + n)) for n in range(NEIGHBOURS)]
        found = {self.engine.insert(request): Written() for request in requests}
        while len(self.engine):
            for event in self.engine.next():
                if isinstance(event, Token):
                    found[event.uid].tokens.append(event.token)
                    found[event.uid].finish_reason = event.finish_reason
        return list(found.values())


def drawn(number: int) -> Any:
    """A sampler at temperature 1 with a random state of its own."""
    own = OwnRandomness(number)
    return lambda logprobs: own.categorical(logprobs, 1.0)


def random_schemas(count: int) -> list[Any]:
    """Drawn by hypothesis-jsonschema; a third of them at least are not refused."""
    found: list[Any] = []

    @seed(count)
    @settings(
        max_examples=count,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(schemas_of_hypothesis(2))
    def draw(schema: Any) -> None:
        found.append(schema)

    draw()
    return found


def suite_schemas() -> list[Any]:
    """Those of the JSON Schema Test Suite, but for classes of characters that jsonschema's
    regular expressions do not know.
    """
    found = [
        group["schema"]
        for path in sorted(SUITE.rglob("*.json"))
        for group in json.loads(path.read_text())
    ]
    return [schema for schema in found if r"\\p{" not in json.dumps(schema)]


@pytest.fixture(scope="module")
def writer() -> Writer:
    return Writer()


def check(writer: Writer, drawn_from: Sequence[Any], wanted: int) -> None:
    """Write replies in so many schemas that are not refused, and compare the neighbours with
    those of a batch without forms.
    """
    formed = [(schema, form) for schema in drawn_from if (form := writer.form(schema))][:wanted]
    assert len(formed) == wanted
    alone = [reply.tokens for reply in writer.write([None] * FORMED)[FORMED:]]
    assert all(len(tokens) == LIMIT for tokens in alone)
    ended = 0
    for first in range(0, len(formed), FORMED):
        batch = formed[first : first + FORMED]
        replies = writer.write([form for _, form in batch], first)
        assert [reply.tokens for reply in replies[len(batch) :]] == alone
        for (schema, _), reply in zip(batch, replies, strict=False):
            if reply.finish_reason == "stop":
                assert not errors_of(schema, writer.tokenizer.decode(reply.tokens[:-1])), schema
                ended += 1
    assert ended >= ENDED_SHARE * len(formed)


def test_random_schemas_are_kept(writer: Writer) -> None:
    wanted = many(FORMED, RANDOM)
    check(writer, random_schemas(3 * wanted), wanted)


@pytest.mark.thorough
def test_schemas_of_the_suite_are_kept(writer: Writer) -> None:
    check(writer, suite_schemas(), SUITES)
