"""Vocabulary: the bytes of every token of a tokenizer, as llguidance takes them."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

from llguidance import LLTokenizer, TokenizerWrapper

from ..errors import FormError
from .token_bytes import BYTE, SPACE, any_of, bytes_of

# llguidance's mark of tokens that no text allows.
SPECIAL = b"\xff"
# Text before which tokenizers put their leading space, and which is one token by itself in most of
# them.
BEGINNING = "\n"


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer's tokens by their bytes.

    ll:         llguidance's form of it, for the compiler.
    added:      the added tokens by their text, but for those that are space, one byte or a phrase.
                No text of a form allows them; literals in Lark write them as `<[id]>`.
    num_words:  of 32 tokens each in a mask.
    space:      the tokens that are space alone.
    eos:        the tokens that end a reply.
    letters:    the tokens of single ASCII characters.
    """

    ll: LLTokenizer
    added: dict[str, int]
    num_words: int
    space: frozenset[int]
    eos: frozenset[int]
    letters: dict[str, int] = field(default_factory=dict)

    @classmethod
    def from_tokenizer(cls, tokenizer: Any) -> Vocabulary:
        """Of mlx-lm's tokenizer.

        Holds the GIL for half a second with 128k tokens. Raises FormError for one without bytes.
        """
        try:
            return cls._read(tokenizer)
        except Exception as error:
            # Tokenizers are the models' own code.
            raise FormError(
                f"this model's tokenizer cannot hold a form: {type(error).__name__}: {error}"
            ) from error

    @classmethod
    def _read(cls, tokenizer: Any) -> Vocabulary:
        phrases = {
            str(text): token
            for token, text in tokenizer.added_tokens_decoder.items()
            if is_phrase(text)
        }
        added = added_of(tokenizer)
        # The numbers of a vocabulary may have gaps, so that its length says nothing of the last
        # one.
        tokens = bytes_of(tokenizer, range(1 + max(tokenizer.get_vocab().values())))
        for text, token in phrases.items():
            tokens[token] = text.encode()
        for text, token in added.items():
            tokens[token] = SPECIAL + text.encode()
        eos = frozenset(token for token in tokenizer.eos_token_ids if token < len(tokens))
        if not eos:
            raise ValueError("it has no token that ends a reply")
        wrapper = TokenizerWrapper(_Tokens(tokenizer, tokens, added, min(eos)))
        ll = LLTokenizer(wrapper, eos_token=sorted(eos))
        space = frozenset(token for token, written in enumerate(tokens) if written.isspace())
        letters = {
            written.decode(): token
            for token, written in enumerate(tokens)
            if len(written) == 1 and written.isascii()
        }
        return cls(ll, added, (ll.vocab_size + 31) // 32, space, eos, letters)


def added_of(tokenizer: Any) -> dict[str, int]:
    """The added tokens of mlx-lm's tokenizer by their text, but for those that are space, one
    byte or a phrase.
    """
    every = tokenizer.added_tokens_decoder.items()
    return {
        str(text): token for token, text in every if not is_phrase(text) and not is_space(str(text))
    }


def is_space(added: str) -> bool:
    """Return whether an added token is a run of spaces or lines, or a single byte, in the
    letters of the vocabulary.
    """
    return bool(BYTE.fullmatch(added)) or added.replace(SPACE, " ").isspace()


def is_phrase(added: Any) -> bool:
    """Return whether an added token is ordinary text of several words, unlike a mark such as
    `<tool_call>`.
    """
    text = str(added)
    return (
        not added.special
        and " " in text.strip()
        and not (text.startswith("<") and text.endswith(">"))
    )


class _Tokens:
    """What llguidance reads of a tokenizer.

    Called with text, it returns tokens that spell it without added ones.
    """

    bos_token_id = None

    def __init__(
        self, tokenizer: Any, tokens: list[bytes], added: dict[str, int], eos: int
    ) -> None:
        self.tokens = tokens
        self.special_token_ids = sorted(added.values())
        self.eos_token_id = eos
        self._tokenizer = tokenizer
        self._added = any_of(added)

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):
            raise TypeError("tokenizers take text, not bytes")
        # An added token's text is cut after its first character: neither part reads like it.
        ends = [match.start() + 1 for match in self._added.finditer(text)]
        parts = [text[start:end] for start, end in zip([0, *ends], [*ends, len(text)], strict=True)]
        return [token for part in parts if part for token in self._spelled(part)]

    def _spelled(self, text: str) -> list[int]:
        """Tokens with the bytes of `text`: the tokenizer's own, or the longest ones where it
        adds spaces.
        """
        before = self._encoded(BEGINNING)
        for tokens in (self._encoded(text), self._encoded(BEGINNING + text)[len(before) :]):
            if b"".join(self.tokens[token] for token in tokens) == text.encode():
                return tokens
        return self._longest(text.encode())

    def _longest(self, text: bytes) -> list[int]:
        tokens: list[int] = []
        while text:
            sizes = range(min(len(text), self._longest_bytes), 0, -1)
            size = next((size for size in sizes if text[:size] in self._by_bytes), 0)
            if not size:
                break
            tokens.append(self._by_bytes[text[:size]])
            text = text[size:]
        return tokens

    @functools.cached_property
    def _by_bytes(self) -> dict[bytes, int]:
        return {
            written: token
            for token, written in enumerate(self.tokens)
            if written and not written.startswith(SPECIAL)
        }

    @functools.cached_property
    def _longest_bytes(self) -> int:
        return max(map(len, self._by_bytes))

    def _encoded(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))
