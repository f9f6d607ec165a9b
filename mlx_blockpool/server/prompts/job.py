"""The jobs of prompt workers and their results, and how both cross the pipe. No tokenizer and no mlx."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from ...errors import PromptError, RequestTooLargeError
from ...messages import Message

# Tokens (32-bit integers) and pixels cross the pipe behind a header of JSON; so many bytes say how long the header is.
HEADER_BYTES = 4
# The result of a job that has used up its time.
OUT_OF_TIME = b""


@dataclass(frozen=True)
class Limits:
    """Of one job: processor time for loading its tokenizer and for the prompt, and bytes beside those of a fresh worker."""

    load_seconds: float
    seconds: float
    memory_bytes: int


@dataclass(frozen=True)
class TokenizerSource:
    """Where a tokenizer comes from, as mlx-lm's ModelProvider loads it."""

    folder: str
    config: Mapping[str, Any]
    use_default_chat_template: bool = False


@dataclass
class PromptJob:
    """A prompt to render and tokenize.

    options:      arguments for the template beside messages and tools.
    stop_words:   their tokens are wanted too.
    tool_breakpoints: (tools, seconds) of the breakpoints on tools; those on messages are in the messages.
    calls, begin: as in ChatRequest.
    is_chat_request: whether `calls`, `begin` and breakpoints on whole messages count; mlx-lm's own requests have those of parts.
    checkpoints:  whether the ends of the system prompt and of the conversation are wanted.
    capacity:     the most tokens that the prompt may have; None: not known.
    processor:    mlx-lm's name of the image processor for the images in the messages; None: they have none.
    image_at:     where the client's first image is.
    """

    source: TokenizerSource
    request_type: str
    prompt: str = ""
    messages: list[Message] = field(default_factory=list)
    tools: list[Any] | None = None
    role_mapping: Any = None
    options: dict[str, Any] = field(default_factory=dict)
    stop_words: list[str] = field(default_factory=list)
    tool_breakpoints: list[tuple[int, int]] = field(default_factory=list)
    calls: str = "may"
    begin: str = ""
    is_chat_request: bool = False
    checkpoints: bool = True
    capacity: int | None = None
    processor: str | None = None
    image_at: str = "messages"


@dataclass(frozen=True)
class PreparedImages:
    """What mlx-lm's Vision has of the images of a prompt, as numpy arrays.

    pixels: of each image. starts: the position of its first token. cache_key: the prompt, in which its tokens name its content.
    """

    pixels: list[np.ndarray]
    starts: list[int]
    cache_key: list[int]


@dataclass
class PreparedPrompt:
    """A prompt that was rendered and tokenized.

    segments:     the lengths of mlx-lm's segments; the first begins with the prompt, the last ends with it.
    breakpoints:  (tokens, seconds) of each of the client's breakpoints.
    checkpoints:  (tokens, kind) of the beginnings that other prompts will have too; None: not wanted.
    stops:        the tokens of each stop word.
    call:         what stands before and behind a tool call.
    never:        the token that must not be drawn, so that no call begins.
    images:       None for a prompt without.
    """

    tokens: list[int] = field(default_factory=list)
    segments: list[int] = field(default_factory=list)
    types: list[str] = field(default_factory=list)
    initial_state: str = "normal"
    breakpoints: list[tuple[int, int]] = field(default_factory=list)
    checkpoints: list[tuple[int, str]] | None = None
    stops: list[tuple[tuple[int, ...], str]] = field(default_factory=list)
    call: tuple[str, str] = ("", "")
    never: int | None = None
    images: PreparedImages | None = None

    def pack(self) -> bytes:
        """For the pipe."""
        header = {**vars(self), "tokens": len(self.tokens)}
        blobs = [array("i", self.tokens).tobytes()]
        if self.images is not None:
            shapes = [(pixels.dtype.str, pixels.shape) for pixels in self.images.pixels]
            header["images"] = {**vars(self.images), "pixels": shapes}
            blobs += [pixels.tobytes() for pixels in self.images.pixels]
        return _pack(header, *blobs)


# What a worker does: a prompt to render, a tokenizer to load before its first prompt, or a request's body, of which it checks
# that it is JSON which does not take long.
Job: TypeAlias = PromptJob | TokenizerSource | bytes


def pack_error(error: BaseException) -> bytes:
    """A job's failure, for the pipe."""
    if isinstance(error, RequestTooLargeError):
        return _pack({"too_large": [error.needed, error.capacity]})
    return _pack({"error": str(error) or type(error).__name__})


def unpack(data: bytes) -> PreparedPrompt:
    """The result that a worker has packed. Raises PromptError and RequestTooLargeError if the job has failed."""
    length = int.from_bytes(data[:HEADER_BYTES], "little")
    header = json.loads(data[HEADER_BYTES : HEADER_BYTES + length])
    if "too_large" in header:
        raise RequestTooLargeError(*header["too_large"])
    if "error" in header:
        raise PromptError(header["error"])
    rest, tokens = memoryview(data)[HEADER_BYTES + length :], array("i")
    end = header["tokens"] * tokens.itemsize
    tokens.frombytes(rest[:end])
    header["tokens"], header["call"] = tokens.tolist(), tuple(header["call"])
    header["stops"] = [(tuple(ids), word) for ids, word in header["stops"]]
    for name in ("breakpoints", "checkpoints"):
        header[name] = None if header[name] is None else [tuple(pair) for pair in header[name]]
    if header["images"] is not None:
        pixels = []
        for kind, shape in header["images"]["pixels"]:
            pixels.append(np.frombuffer(rest, kind, math.prod(shape), end).reshape(shape))
            end += pixels[-1].nbytes
        header["images"] = PreparedImages(**{**header["images"], "pixels": pixels})
    return PreparedPrompt(**header)


def _pack(header: dict[str, Any], *blobs: bytes) -> bytes:
    written = json.dumps(header).encode()
    return b"".join((len(written).to_bytes(HEADER_BYTES, "little"), written, *blobs))
