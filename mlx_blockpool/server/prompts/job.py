"""The jobs of prompt workers and their results, and how both cross the pipe. No tokenizer and no mlx."""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ...errors import PromptError, RequestTooLargeError
from ...messages import Message

# Tokens cross the pipe as 32-bit integers behind a header of JSON; so many bytes say how long the header is.
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


@dataclass(frozen=True)
class BodyJob:
    """A request's body to check before it is parsed: that it is JSON which does not take long."""

    data: bytes


@dataclass
class PromptJob:
    """A prompt to render and tokenize.

    options:      arguments for the template beside messages and tools.
    stop_words:   their tokens are wanted too.
    tool_marks:   (tools, seconds) of the marks on tools; those on messages are in the messages.
    calls, begin: as in ChatRequest.
    is_chat_request: whether `calls`, `begin` and marks on whole messages count; mlx-lm's own requests have parts with marks only.
    checkpoints:  whether the ends of the system prompt and of the conversation are wanted.
    capacity:     the most tokens that the prompt may have; None: not known.
    """

    source: TokenizerSource
    request_type: str
    prompt: str = ""
    messages: list[Message] = field(default_factory=list)
    tools: list[Any] | None = None
    role_mapping: Any = None
    options: dict[str, Any] = field(default_factory=dict)
    stop_words: list[str] = field(default_factory=list)
    tool_marks: list[tuple[int, int]] = field(default_factory=list)
    calls: str = "may"
    begin: str = ""
    is_chat_request: bool = False
    checkpoints: bool = True
    capacity: int | None = None


@dataclass
class PreparedPrompt:
    """A prompt that was rendered and tokenized.

    segments:     the lengths of mlx-lm's segments; the first begins with the prompt, the last ends with it.
    marks:        (tokens, seconds) of each beginning that the client has marked.
    checkpoints:  (tokens, kind) of the beginnings that other prompts will have too; None: not asked for.
    stops:        the tokens of each stop word.
    call:         what stands before and behind a tool call.
    never:        the token that must not be drawn, so that no call begins.
    """

    tokens: list[int]
    segments: list[int]
    types: list[str]
    initial_state: str
    marks: list[tuple[int, int]] = field(default_factory=list)
    checkpoints: list[tuple[int, str]] | None = None
    stops: list[tuple[list[int], str]] = field(default_factory=list)
    call: tuple[str, str] = ("", "")
    never: int | None = None

    def tokenized(self) -> tuple[list[int], list[list[int]], list[str], str, None]:
        """What mlx-lm's ResponseGenerator._tokenize() returns."""
        segments, start = [], 0
        for number, length in enumerate(self.segments):
            if number == len(self.segments) - 1:
                start = len(self.tokens) - length
            segments.append(self.tokens[start : start + length])
            start += length
        return list(self.tokens), segments, list(self.types), self.initial_state, None

    @classmethod
    def empty(cls) -> PreparedPrompt:
        """The result of a job that was not for a prompt."""
        return cls([], [], [], "normal")

    def pack(self) -> bytes:
        """For the pipe."""
        return _pack({**asdict(self), "tokens": []}, array("i", self.tokens).tobytes())


def pack_error(error: BaseException) -> bytes:
    """A job's failure, for the pipe."""
    if isinstance(error, RequestTooLargeError):
        return _pack({"too_large": [error.needed, error.capacity]}, b"")
    return _pack({"error": str(error) or type(error).__name__}, b"")


def unpack(data: bytes) -> PreparedPrompt:
    """The result that a worker has packed. Raises PromptError and RequestTooLargeError if the job has failed."""
    length = int.from_bytes(data[:HEADER_BYTES], "little")
    header = json.loads(data[HEADER_BYTES : HEADER_BYTES + length])
    if "too_large" in header:
        raise RequestTooLargeError(*header["too_large"])
    if "error" in header:
        raise PromptError(header["error"])
    tokens = array("i")
    tokens.frombytes(memoryview(data)[HEADER_BYTES + length :])
    header["tokens"] = tokens.tolist()
    for name in ("marks", "checkpoints", "stops"):
        header[name] = None if header[name] is None else [tuple(pair) for pair in header[name]]
    return PreparedPrompt(**{**header, "call": tuple(header["call"])})


def _pack(header: dict[str, Any], tokens: bytes) -> bytes:
    written = json.dumps(header).encode()
    return len(written).to_bytes(HEADER_BYTES, "little") + written + tokens
