"""The jobs of prompt workers and their results, and how both cross the pipe. No tokenizer and no mlx."""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from struct import Struct
from typing import Any, Literal, TypeAlias

import numpy as np

from ...errors import PromptError, RequestTooLargeError
from ...messages import Message

# A result crosses the pipe in pieces: a header of JSON and after it the tokens (32-bit integers), then the pixels of each image.
Pieces: TypeAlias = Sequence[bytes | memoryview]
# So many bytes say how long the header is.
HEADER_BYTES = 4
# What of each token a job wants as JSON: its number alone, also its string in the vocabulary, or also its piece of the text.
Wants: TypeAlias = Literal["", "tokens", "strings", "pieces"]
# The result of a job that has used up its time.
OUT_OF_TIME: Pieces = ()
# Before the pieces: whether they are the last that this worker sends, and how many they are.
_SENT = Struct("<?I")


@dataclass(frozen=True)
class Limits:
    """Limits of a job: processor time for loading its tokenizer and for the prompt, and bytes beside those of a fresh worker."""

    load_seconds: float
    seconds: float
    memory_bytes: int


@dataclass(frozen=True)
class TokenizerSource:
    """The origin of a tokenizer, as mlx-lm's ModelProvider loads it."""

    folder: str
    config: Mapping[str, Any]
    use_default_chat_template: bool = False


# Of a job for a model that is still to be found: PromptPreparation.convert() fills it in.
UNKNOWN = TokenizerSource("", {})


@dataclass
class PromptJob:
    """A prompt to render and tokenize.

    options:      arguments for the template beside messages and tools.
    stop_words:   their tokens are wanted too.
    tool_breakpoints: (tools, seconds) of the breakpoints on tools; those on messages are in the messages.
    calls, begin: as in ChatRequest.
    holds_calls:  whether calls are held to their tools' parameters, and PreparedPrompt.call_spelling is wanted.
    is_chat_request: whether `calls`, `begin` and breakpoints on whole messages count; mlx-lm's own requests have those of parts.
    checkpoints:  whether the ends of the system prompt and of the conversation are wanted.
    capacity:     the most tokens that the prompt may have; None: not known.
    processor:    mlx-lm's name of the image processor for the images in the messages; None: they have none.
    image_at:     where the client's first image is.
    only_count:   only the number of tokens is wanted: the result has no images.
    prediction:   text that the client expects in the reply; "": none.
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
    holds_calls: bool = False
    is_chat_request: bool = False
    checkpoints: bool = True
    capacity: int | None = None
    processor: str | None = None
    image_at: str = "messages"
    only_count: bool = False
    prediction: str = ""


@dataclass
class TokenizerJob:
    """Work for a tokenizer beside the prompts of replies: text into tokens and back, and chats into text.

    parts:     text to tokenize, and tokens that stand among it. tokens: to turn into text.
    messages:  a chat to render, and to tokenize if `tokenizes`; options: arguments for the template beside messages and tools.
    adds_special_tokens, reads_special_tokens: whether the tokenizer puts its own around text, and whether text may spell them.
    wants:     what of each token is written as JSON.
    """

    source: TokenizerSource = UNKNOWN
    parts: list[str | int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    tools: list[Any] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    tokenizes: bool = False
    adds_special_tokens: bool = True
    reads_special_tokens: bool = True
    wants: Wants = ""


@dataclass(frozen=True)
class TokenizerResult:
    """`written`: JSON of the text, and of what the job wants of the tokens. Long lists are written in the worker: the server's
    threads would all wait meanwhile.

    template, has_tools, has_thinking: the chat template, and what the model can do by its tokenizer.
    """

    tokens: array[int]
    written: Mapping[str, bytes]
    template: str | None
    has_tools: bool
    has_thinking: bool

    def pack(self) -> Pieces:
        """Pack the result for the pipe."""
        header = {**vars(self), "tokens": len(self.tokens), "written": list(self.written)}
        return _packed({"tokenizer": header}, self.tokens.tobytes()), *self.written.values()


@dataclass(frozen=True)
class PreparedImages:
    """The fields of mlx-lm's Vision for the images of a prompt, as numpy arrays.

    pixels: of each image; empty once the request has ended. starts: the position of its first token. cache_key: the prompt, in
    which its tokens name its content.
    """

    pixels: list[np.ndarray]
    starts: list[int]
    cache_key: list[int]

    @property
    def nbytes(self) -> int:
        return sum(pixels.nbytes for pixels in self.pixels)


@dataclass
class PreparedPrompt:
    """A prompt that was rendered and tokenized.

    segments:     the lengths of mlx-lm's segments; the first begins with the prompt, the last ends with it.
    breakpoints:  (tokens, seconds) of each of the client's breakpoints.
    checkpoints:  (tokens, kind) of the beginnings that other prompts will have too; None: not wanted.
    stops:        the tokens of each stop word.
    call:         what stands before and after a tool call.
    call_spelling: a call with a sample's arguments as the model's template writes it between the two; "": unknown or not wanted.
    never:        the token that must not be drawn, so that no call begins.
    images:       None for a prompt without.
    prediction:   the tokens of what the client expects in the reply.
    """

    tokens: list[int] = field(default_factory=list)
    segments: list[int] = field(default_factory=list)
    types: list[str] = field(default_factory=list)
    initial_state: str = "normal"
    breakpoints: list[tuple[int, int]] = field(default_factory=list)
    checkpoints: list[tuple[int, str]] | None = None
    stops: list[tuple[tuple[int, ...], str]] = field(default_factory=list)
    call: tuple[str, str] = ("", "")
    call_spelling: str = ""
    never: int | None = None
    images: PreparedImages | None = None
    prediction: list[int] = field(default_factory=list)

    def pack(self) -> Pieces:
        """Pack the prompt for the pipe. The pixels are not copied."""
        header, pixels = {**vars(self), "tokens": len(self.tokens)}, []
        if self.images is not None:
            shapes = [(each.dtype.str, each.shape) for each in self.images.pixels]
            header["images"] = {**vars(self.images), "pixels": shapes}
            pixels = [np.ascontiguousarray(each).reshape(-1).view(np.uint8).data for each in self.images.pixels]
        return _packed(header, array("i", self.tokens).tobytes()), *pixels


# What a worker does: a prompt to render, other work for a tokenizer, a tokenizer to load before its first prompt, or a request's
# body, of which it checks that it is JSON which does not take long.
Job: TypeAlias = PromptJob | TokenizerJob | TokenizerSource | bytes
Result: TypeAlias = PreparedPrompt | TokenizerResult


def pack_error(error: BaseException) -> Pieces:
    """A job's failure, for the pipe."""
    if isinstance(error, RequestTooLargeError):
        return (_packed({"too_large": [error.needed, error.capacity]}),)
    return (_packed({"error": str(error) or type(error).__name__}),)


def unpack(pieces: Pieces) -> Result:
    """The result that a worker has packed. Raises PromptError and RequestTooLargeError if the job has failed."""
    data, *blobs = pieces
    length = int.from_bytes(data[:HEADER_BYTES], "little")
    header = json.loads(bytes(data[HEADER_BYTES : HEADER_BYTES + length]))
    if "too_large" in header:
        raise RequestTooLargeError(*header["too_large"])
    if "error" in header:
        raise PromptError(header["error"])
    tokens = array("i")
    tokens.frombytes(memoryview(data)[HEADER_BYTES + length :])
    if "tokenizer" in header:
        found = header["tokenizer"]
        return TokenizerResult(
            **{**found, "tokens": tokens, "written": dict(zip(found["written"], map(bytes, blobs), strict=True))}
        )
    header["tokens"], header["call"] = tokens.tolist(), tuple(header["call"])
    header["stops"] = [(tuple(ids), word) for ids, word in header["stops"]]
    for name in ("breakpoints", "checkpoints"):
        header[name] = None if header[name] is None else [tuple(pair) for pair in header[name]]
    if header["images"] is not None:
        shapes = header["images"]["pixels"]
        pixels = [np.frombuffer(blob, kind).reshape(shape) for blob, (kind, shape) in zip(blobs, shapes, strict=True)]
        header["images"] = PreparedImages(**{**header["images"], "pixels": pixels})
    return PreparedPrompt(**header)


def _packed(header: dict[str, Any], tokens: bytes = b"") -> bytes:
    written = json.dumps(header).encode()
    return b"".join((len(written).to_bytes(HEADER_BYTES, "little"), written, tokens))


def send(connection: Connection, pieces: Pieces, is_last: bool) -> None:
    """Send a result, and before it whether it is the worker's last."""
    connection.send_bytes(_SENT.pack(is_last, len(pieces)))
    for piece in pieces:
        connection.send_bytes(piece)


def receive(connection: Connection) -> tuple[Pieces, bool]:
    """A result, and whether the worker ends after it. Raises EOFError and OSError where it has ended before."""
    is_last, count = _SENT.unpack(connection.recv_bytes(_SENT.size))
    return tuple(connection.recv_bytes() for _ in range(count)), is_last
