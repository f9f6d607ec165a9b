"""Tokenizers of every kind that mlx-lm has a detokenizer for, trained on a few lines, and their
vocabularies.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Iterator
from typing import Any

from mlx_lm.tokenizer_utils import (
    BPEStreamingDetokenizer,
    NaiveStreamingDetokenizer,
    SPMStreamingDetokenizer,
    TokenizerWrapper,
)
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from mlx_blockpool.forms.vocabulary import Vocabulary

DETOKENIZERS = {
    "bpe": BPEStreamingDetokenizer,
    "spm": SPMStreamingDetokenizer,
    "prefixed": SPMStreamingDetokenizer,
}
# Added tokens that are not special ones in their tokenizers, as those of tool calls in most models;
# the last one is space.
ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "  ")
WORDS = [
    "name",
    "city",
    "unit",
    "weather",
    "get",
    "path",
    "value",
    "query",
    "items",
    "count",
    "user",
    "file",
    "list",
    "true",
    "null",
]


def lines(count: int = 200) -> Iterator[str]:
    """JSON and words, the same each time."""
    draw = random.Random(1)
    for _ in range(count):
        value: Any = draw.choice(
            [
                draw.choice(WORDS),
                draw.randint(0, 99),
                [draw.choice(WORDS)],
                {draw.choice(WORDS): None},
            ]
        )
        yield json.dumps(
            {draw.choice(WORDS): value, draw.choice(WORDS): "a text of some words, é"},
            ensure_ascii=False,
        )


def _bpe(size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        lines(),
        trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False),
    )
    return tokenizer


def _spm(size: int, prefixes: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    spaces = normalizers.Replace(" ", "\u2581")
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend("\u2581"), spaces]) if prefixes else spaces
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    known = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=known, show_progress=False, max_token_length=16
    )
    tokenizer.train_from_iterator(lines(), trainer)
    return tokenizer


@functools.cache
def tokenizer_of(kind: str, size: int = 600, added: tuple[str, ...] = ADDED) -> TokenizerWrapper:
    """mlx-lm's tokenizer: "bpe", "spm", "prefixed" (spm, with a space before all text) or
    "naive". Two tokens end replies.
    """
    raw = _spm(size, kind == "prefixed") if kind in ("spm", "prefixed") else _bpe(size)
    raw.add_special_tokens(
        [AddedToken(text, special=True) for text in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")]
    )
    raw.add_tokens([AddedToken(text, special=False, normalized=False) for text in added])
    hf = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>")
    wrapper = TokenizerWrapper(
        hf,
        DETOKENIZERS.get(kind, NaiveStreamingDetokenizer),
        tool_call_start="<tool_call>",
        tool_call_end="</tool_call>",
    )
    wrapper.add_eos_token("<|endoftext|>")
    return wrapper


@functools.cache
def large_tokenizer(size: int = 128_000) -> TokenizerWrapper:
    """A byte-level tokenizer of `size` random words, and one end of replies."""
    draw, letters = random.Random(0), sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate(letters)}
    parts, merges = (
        [
            letter
            for letter in letters
            if letter == "\u0120" or (letter.isascii() and letter.isalpha())
        ],
        [],
    )
    while len(vocabulary) < size:
        first, second = draw.choice(parts), draw.choice(parts)
        word = first + second
        if len(word) <= 10 and word not in vocabulary:
            vocabulary[word] = len(vocabulary)
            merges.append((first, second))
            if len(word) <= 5:
                parts.append(word)
    raw = Tokenizer(models.BPE(vocabulary, merges))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken("<|im_end|>", special=True)])
    return TokenizerWrapper(
        PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>"),
        BPEStreamingDetokenizer,
    )


@functools.cache
def vocabulary_of(kind: str, size: int = 600, added: tuple[str, ...] = ADDED) -> Vocabulary:
    return Vocabulary.from_tokenizer(tokenizer_of(kind, size, added))
