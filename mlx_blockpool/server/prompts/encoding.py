"""A tokenizer that encodes of a prompt only what is new since an earlier one."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ...config import PromptConfig
from ...prefix.trie import common_prefix

# What a class must not override, so that a text's tokens are those of the tokenizers library.
METHODS = ("__call__", "encode", "_encode_plus", "apply_chat_template")


@dataclass(frozen=True, eq=False)
class _Encoded:
    """A text and its tokens. starts: (character, token) of each added token that splits it."""

    scope: bytes
    text: str
    tokens: array[int]
    starts: list[tuple[int, int]]

    @property
    def size(self) -> int:
        return len(self.text) + len(self.tokens) + len(self.starts)


class ReusingTokenizer:
    """An mlx-lm tokenizer that takes the beginnings of prompts from earlier ones.

    A text is encoded from the last added token on that it shares with an earlier text, such as
    `<|im_start|>`: the tokenizers library splits text at such a token before anything else, and the
    text on one side does not change the tokens on the other. Tokens that take the whitespace around
    them or are searched for in normalised text do not count. Tokenizers that have no others, that
    have one that must be a whole word, which depends on the text after it, or that do not leave
    encoding to that library, encode whole texts. Tokens are arrays of 32-bit integers: a list of a
    long prompt takes longer than all else.

    whole:       the tokenizer, which encodes whole texts.
    scope:       only texts of the same scope are used, so that the time a prompt takes shows
                 nothing of another scope's.
    num_encoded: characters that were encoded.
    """

    def __init__(self, tokenizer: Any, config: type[PromptConfig] = PromptConfig) -> None:
        self.whole, self._config = tokenizer, config
        self._earlier: list[_Encoded] = []  # the one used last is the last
        self._splitting = splitting_tokens(tokenizer._tokenizer)
        self._longest = max(map(len, tokenizer.get_added_vocab()), default=0)
        self.scope = b""
        self.num_encoded = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.whole, name)

    def apply_chat_template(self, *args: Any, tokenize: bool = True, **options: Any) -> Any:
        if tokenize and not self._splitting:
            return array("i", self.whole.apply_chat_template(*args, tokenize=True, **options))
        text = self.whole.apply_chat_template(*args, tokenize=False, **options)
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def rfind_think_start(self, tokens: array[int], start: int = 0) -> int:
        """Like the tokenizer's method, which looks at one token after the other."""
        return _rfind(tokens, self.whole.think_start_tokens, start)

    def rfind_think_end(self, tokens: array[int]) -> int:
        """Like the tokenizer's method."""
        return _rfind(tokens, self.whole.think_end_tokens)

    def encode(self, text: str, **options: Any) -> array[int]:
        """Like the tokenizer's method."""
        if not self._splitting or options != {"add_special_tokens": False}:
            self.num_encoded += len(text)
            return array("i", self.whole.encode(text, **options))
        earlier, (place, count) = self._beginning(text)
        self.num_encoded += len(text) - place
        if earlier is not None and place == len(text):
            self._earlier.remove(earlier)
            self._earlier.append(earlier)
            return earlier.tokens[:count]
        backend = self.whole._tokenizer.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        # transformers leaves it set after a text whose special tokens are none.
        backend.encode_special_tokens = False
        found = backend.encode(text[place:], add_special_tokens=False)
        ids, offsets = found.ids, found.offsets
        tokens = array("i") if earlier is None else earlier.tokens[:count]
        tokens.extend(ids)
        if len(text) - place > self._longest:
            starts = [] if earlier is None else [s for s in earlier.starts if s[0] < place]
            for i, token in enumerate(ids):
                if token in self._splitting:
                    begin, end = (place + at for at in offsets[i])
                    if text[begin:end] == self._splitting[token]:
                        starts.append((begin, count + i))
            self._remember(_Encoded(self.scope, text, tokens[:], starts), earlier)
        return tokens

    def _beginning(self, text: str) -> tuple[_Encoded | None, tuple[int, int]]:
        """The earlier text to begin with, and the characters and tokens to take from it."""
        best: tuple[_Encoded | None, tuple[int, int]] = None, (0, 0)
        for earlier in self._earlier:
            if earlier.scope == self.scope:
                shared = common_prefix(text, earlier.text)
                # In one of the two a longer added token may begin where they still agree, unless
                # one begins where this text ends.
                for most in (shared - self._longest, shared):
                    at = bisect_right(earlier.starts, most, key=lambda start: start[0]) - 1
                    start = earlier.starts[at] if at >= 0 else (0, 0)
                    if start > best[1] and (most < shared or start[0] == len(text)):
                        best = earlier, start
        return best

    def _remember(self, encoded: _Encoded, earlier: _Encoded | None) -> None:
        if earlier is not None:
            self._earlier.remove(earlier)
            if not encoded.text.startswith(earlier.text):
                self._earlier.append(earlier)
        self._earlier.append(encoded)
        while (
            len(self._earlier) > self._config.earlier_texts
            or sum(each.size for each in self._earlier) > self._config.earlier_size
        ):
            del self._earlier[0]


def _rfind(tokens: array[int], sequence: Sequence[int], start: int = 0) -> int:
    """The last place of a sequence in tokens, from `start` on; -1 without one."""
    start, found = max(start, 0), array("i", sequence)
    places = start + np.flatnonzero(np.frombuffer(tokens[start:], np.int32) == found[0])
    return next((int(at) for at in places[::-1] if tokens[at : at + len(found)] == found), -1)


def splitting_tokens(tokenizer: Any) -> dict[int, str]:
    """The added tokens at which a transformers tokenizer splits any text in two, by number; none
    if it does not leave encoding to the tokenizers library.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if (
        not isinstance(backend, Tokenizer)
        or backend.encode_special_tokens
        or any(token.single_word for token in backend.get_added_tokens_decoder().values())
        or any(
            getattr(type(tokenizer), name)
            not in (getattr(PreTrainedTokenizerFast, name), getattr(PreTrainedTokenizerBase, name))
            for name in METHODS
        )
    ):
        return {}
    return {
        number: token.content
        for number, token in backend.get_added_tokens_decoder().items()
        if not (token.lstrip or token.rstrip or token.normalized)
    }
