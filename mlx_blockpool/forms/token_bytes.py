"""The bytes of a tokenizer's tokens, each by itself. A token may be a part of a character."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, SPMStreamingDetokenizer

# How vocabularies of SentencePiece's kind write one byte, and a space.
BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
SPACE = "\u2581"


def any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """A pattern of any of these texts, the longest first."""
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def bytes_of(tokenizer: Any, tokens: Sequence[int]) -> list[bytes]:
    """The bytes of tokens of mlx-lm's tokenizer; none for numbers of a padded vocabulary, and
    where they cannot be known.
    """
    spelled = _spelling(tokenizer)
    written = tokenizer.convert_ids_to_tokens(list(tokens))
    pairs = zip(tokens, written, strict=True)
    if spelled is not None:
        return [spelled(string) if isinstance(string, str) else b"" for string in written]
    return [
        _decoded(tokenizer, token, string) if isinstance(string, str) else b""
        for token, string in pairs
    ]


def _spelling(tokenizer: Any) -> Callable[[str], bytes] | None:
    """How the vocabulary writes bytes; None where only the tokenizer knows."""
    kind = type(tokenizer.detokenizer)
    decoder = str(getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", ""))
    if issubclass(kind, BPEStreamingDetokenizer) or "ByteLevel" in decoder:
        return lettered_bytes
    if (
        issubclass(kind, SPMStreamingDetokenizer)
        or "ByteFallback" in decoder
        or "Metaspace" in decoder
    ):
        return spelled_bytes
    return None


def _decoded(tokenizer: Any, token: int, string: str) -> bytes:
    text = str(tokenizer.decode([token]))
    if "\ufffd" not in text:
        return text.encode()
    # A part of a character: its bytes are known where the vocabulary writes them in letters.
    return lettered_bytes(string) if all(letter in byte_letters() for letter in string) else b""


def lettered_bytes(string: str) -> bytes:
    """The bytes of a token of a byte-level vocabulary.

    Letters that stand for no byte stand for themselves.
    """
    letters = byte_letters()
    return b"".join(
        bytes([letters[letter]]) if letter in letters else letter.encode() for letter in string
    )


def spelled_bytes(string: str) -> bytes:
    """The bytes of a token of SentencePiece's kind."""
    if (byte := BYTE.fullmatch(string)) is not None:
        return bytes.fromhex(byte[1])
    return string.replace(SPACE, " ").encode()


@functools.cache
def byte_letters() -> dict[str, int]:
    """The byte for each letter of a byte-level vocabulary: printable ones stand for themselves,
    as in GPT-2's.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + i): byte for i, byte in enumerate(others)
    }
