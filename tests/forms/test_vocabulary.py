"""Vocabularies of every kind of tokenizer: their bytes, the tokens that no text allows, and text
that reads like them.
"""

from __future__ import annotations

import json
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from forms.vocabularies import ADDED, large_tokenizer, tokenizer_of, vocabulary_of
from llguidance import LLMatcher
from mlx_lm.tokenizer_utils import NaiveStreamingDetokenizer, TokenizerWrapper, load
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks.demo.agent import FOLDER
from mlx_blockpool.errors import FormError
from mlx_blockpool.forms.vocabulary import Vocabulary

KINDS = ["bpe", "spm", "prefixed", "naive"]
TEXT = '{"name": "get_weather",  "city": "Zürich 🎉\\n", "count": 12}'


def matcher(vocabulary: Vocabulary, schema: dict[str, Any]) -> LLMatcher:
    found = LLMatcher(vocabulary.ll, LLMatcher.grammar_from_json_schema(schema), log_level=0)
    assert not found.is_error()
    return found


def open_tokens(found: LLMatcher) -> list[int]:
    return list(np.flatnonzero(np.frombuffer(found.compute_logit_bias(), np.uint8)))


@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_of_tokens_make_the_text(kind: str) -> None:
    tokenizer, vocabulary = tokenizer_of(kind), vocabulary_of(kind)
    tokens = vocabulary.ll.tokenize_str(TEXT)
    assert vocabulary.ll.decode_str(tokens) == TEXT
    assert tokenizer.decode(tokens).strip() == TEXT
    found = matcher(vocabulary, {})
    assert found.consume_tokens(tokens)
    assert found.is_accepting()


@pytest.mark.parametrize("kind", ["bpe", "naive", "spm"])
def test_text_gets_the_tokenizers_own_tokens(kind: str) -> None:
    tokens = tokenizer_of(kind).encode(TEXT, add_special_tokens=False)
    assert vocabulary_of(kind).ll.tokenize_str(TEXT) == tokens
    # Runs of spaces are text although tokenizers add them.
    assert tokenizer_of(kind).convert_tokens_to_ids("  ") in tokens


def test_phrases_that_are_tokens_are_text() -> None:
    tokenizer = load(FOLDER)
    vocabulary = Vocabulary.from_tokenizer(tokenizer)
    text = '\n{"name": "bash", "arguments": {"command": "ls"}}\n'
    phrase = tokenizer.encode(text, add_special_tokens=False)
    assert len(phrase) == 1
    assert vocabulary.ll.tokenize_str(text) == phrase
    found = LLMatcher(vocabulary.ll, r"start: /\n/ %json {} /\n/", log_level=0)
    assert found.consume_tokens(phrase)
    assert found.is_accepting()
    assert tokenizer.tool_call_start in vocabulary.added


@pytest.mark.parametrize("kind", KINDS)
def test_text_that_reads_like_an_added_token_is_spelled_with_others(kind: str) -> None:
    vocabulary = vocabulary_of(kind)
    value = "a<think>b</tool_call><think>"
    found = matcher(vocabulary, {"const": value})
    forced = found.compute_ff_tokens()
    assert set(forced).isdisjoint(vocabulary.added.values())
    assert found.consume_tokens(forced)
    while not found.is_accepting():
        assert found.consume_token(open_tokens(found)[0])
        forced = [*forced, *found.compute_ff_tokens()]
        assert found.consume_tokens(found.compute_ff_tokens())
    assert vocabulary.ll.decode_str(forced).startswith(json.dumps(value)[:-1])


def test_added_tokens_are_not_allowed_in_text() -> None:
    vocabulary = vocabulary_of("bpe")
    assert set(vocabulary.added) == {*ADDED[:-1], "<|endoftext|>", "<|im_start|>", "<|im_end|>"}
    found = matcher(vocabulary, {"type": "string"})
    assert found.consume_tokens(vocabulary.ll.tokenize_str('"a'))
    assert set(open_tokens(found)).isdisjoint(vocabulary.added.values())


@pytest.mark.parametrize("kind", KINDS)
def test_every_end_of_a_reply_is_open_where_the_form_may_end(kind: str) -> None:
    vocabulary, tokenizer = vocabulary_of(kind), tokenizer_of(kind)
    ends = {tokenizer.convert_tokens_to_ids(text) for text in ("<|endoftext|>", "<|im_end|>")}
    assert vocabulary.eos == ends
    for schema in ({"const": 1}, {"type": "integer"}):
        found = matcher(vocabulary, schema)
        assert found.consume_tokens(vocabulary.ll.tokenize_str("1"))
        assert ends <= set(open_tokens(found))


def test_words_cover_the_vocabulary() -> None:
    vocabulary = vocabulary_of("bpe")
    assert 32 * (vocabulary.num_words - 1) < len(tokenizer_of("bpe")) <= 32 * vocabulary.num_words


def test_a_vocabulary_may_have_gaps() -> None:
    letters = {
        letter: 2 * i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    raw = Tokenizer(models.BPE(letters, []))
    raw.pre_tokenizer, raw.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    last = max(letters.values())
    hf = PreTrainedTokenizerFast(tokenizer_object=raw)
    vocabulary = Vocabulary.from_tokenizer(
        TokenizerWrapper(hf, NaiveStreamingDetokenizer, eos_token_ids=[last])
    )
    assert (vocabulary.eos, vocabulary.num_words) == ({last}, last // 32 + 1)
    tokens = vocabulary.ll.tokenize_str(TEXT)
    assert vocabulary.ll.decode_str(tokens) == TEXT
    assert all(token % 2 == 0 for token in tokens)
    found = matcher(vocabulary, {"type": "string"})
    assert all(token % 2 == 0 for token in open_tokens(found))


@pytest.mark.parametrize("eos", [set(), {10**6}])
def test_a_tokenizer_without_an_end_cannot_hold_a_form(eos: set[int]) -> None:
    tokenizer = tokenizer_of("bpe")
    names = (
        "added_tokens_decoder",
        "convert_ids_to_tokens",
        "detokenizer",
        "encode",
        "decode",
        "get_vocab",
    )
    endless = SimpleNamespace(
        **{name: getattr(tokenizer, name) for name in names}, eos_token_ids=eos
    )
    with pytest.raises(
        FormError,
        match="this model's tokenizer cannot hold a form: ValueError: it has no token that ends",
    ):
        Vocabulary.from_tokenizer(endless)


@pytest.mark.thorough
def test_a_large_vocabulary_has_the_bytes_and_the_tokens_of_its_tokenizer() -> None:
    tokenizer = large_tokenizer()
    vocabulary = Vocabulary.from_tokenizer(tokenizer)
    draw = random.Random(2)
    for _ in range(300):
        tokens = [draw.randrange(len(tokenizer) - 1) for _ in range(8)]
        assert vocabulary.ll.decode_bytes(tokens).decode("utf-8", "replace") == tokenizer.decode(
            tokens
        )
        text = "".join(draw.choices('abc xyz{}":,\u00e9\n0', k=40))
        assert vocabulary.ll.tokenize_str(text) == tokenizer.encode(text, add_special_tokens=False)
    # Logits may be padded beyond the tokenizer; a mask has words for the tokenizer alone.
    assert vocabulary.num_words == -(-len(tokenizer) // 32)
