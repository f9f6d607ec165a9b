"""Forms on mlx-lm's own path: alone, and with draft models whose tokens are taken back."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import mlx.core as mx
import pytest
from engine.engines import stock_model, words
from engine.forms import EOS, PERSON, form_of, text_of
from mlx_lm.generate import generate_step, speculative_generate_step
from models import make_model

from mlx_blockpool.engine.sampling import MOST_TAKEN_BACK, FormProcessor
from mlx_blockpool.errors import FormError
from mlx_blockpool.forms.form import ReplyForm

PROMPT = mx.array(words(3, 40))
MOST = 150


def reply(found: Any) -> list[int]:
    """Tokens up to the end of a reply."""
    tokens: list[int] = []
    for step in found:
        tokens.append(int(step[0]))
        if tokens[-1] == EOS:
            break
    return tokens


@functools.cache
def alone() -> list[int]:
    processors = [FormProcessor(form_of(PERSON))]
    return reply(
        generate_step(PROMPT, stock_model("llama"), max_tokens=MOST, logits_processors=processors)
    )


def test_a_reply_keeps_its_form_alone() -> None:
    jsonschema.validate(json.loads(text_of(alone())), PERSON)
    assert alone()[-1] == EOS


@pytest.mark.parametrize(("draft", "count"), [("same", 1), ("other", 4)])
def test_drafts_change_no_token_of_a_reply_in_a_form(draft: str, count: int) -> None:
    model = stock_model("llama")
    small = model if draft == "same" else make_model("llama", seed=5)
    accepted: list[bool] = []

    def steps() -> Iterator[tuple[int, Any]]:
        processors = [FormProcessor(form_of(PERSON))]
        for token, logprobs, is_drafted in speculative_generate_step(
            PROMPT,
            model,
            small,
            num_draft_tokens=count,
            max_tokens=MOST,
            logits_processors=processors,
        ):
            accepted.append(is_drafted)
            yield token, logprobs

    assert reply(steps()) == alone()
    # Drafts are accepted where the form leaves no choice at least, and some are taken back.
    assert 0 < sum(accepted) < len(accepted)


def test_tokens_may_be_taken_back_to_the_first() -> None:
    expected, processor = alone(), FormProcessor(form_of(PERSON))
    logits = mx.zeros((1, 131))

    def open_behind(count: int, held: FormProcessor) -> list[bool]:
        found: list[bool] = mx.isinf(held(mx.array([1, 2, *expected[:count]]), logits))[0].tolist()
        return found

    order = [0, len(expected) - 2, 3, 0, 4, 40, 35, 66, 50, 70, 64, 33, 0]
    fresh = [FormProcessor(form_of(PERSON)) for _ in order]
    for held in fresh:
        held(mx.array([1, 2]), logits)
    assert [open_behind(count, processor) for count in order] == [
        open_behind(count, held) for count, held in zip(order, fresh, strict=True)
    ]


def test_a_reply_that_only_grows_copies_its_form_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy costs more the longer the reply is."""
    copies: list[ReplyForm] = []
    copy = ReplyForm.copy
    monkeypatch.setattr(ReplyForm, "copy", lambda form: copies.append(form) or copy(form))
    expected = list(alone())
    copies.clear()
    processor = FormProcessor(form_of(PERSON))
    for count in range(len(expected)):
        processor(mx.array([1, 2, *expected[:count]]), mx.zeros((1, 131)))
    assert len(expected) > 64
    assert len(copies) == 1 + (len(expected) - 1) // MOST_TAKEN_BACK


def test_tokens_that_break_the_form_are_an_error() -> None:
    processor = FormProcessor(form_of(PERSON))
    processor(mx.array([1]), mx.zeros((1, 131)))
    with pytest.raises(FormError):
        processor(mx.array([1, EOS]), mx.zeros((1, 131)))
