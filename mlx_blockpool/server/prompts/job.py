"""The jobs of prompt workers and their results, which are pickled for the pipe.

No tokenizer and no mlx.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np

from ...errors import RequestTooLargeError, TooManyPositionsError
from ...hooks import Message
from ..bodies import Json

# What of each token a job wants as JSON: its number alone, also its string in the vocabulary, or
# also its piece of the text.
Wants: TypeAlias = Literal["", "tokens", "strings", "pieces"]


@dataclass(frozen=True)
class TokenizerSource:
    """The origin of a tokenizer, as mlx-lm's ModelProvider loads it."""

    folder: str
    config: Mapping[str, Any] = field(hash=False)
    use_default_chat_template: bool = False


# Of a job for a model that is still to be found: PromptPreparation.convert() fills it in.
UNKNOWN = TokenizerSource("", {})


@dataclass
class PromptJob:
    """A prompt to render and tokenize.

    options:      arguments for the template other than messages and tools.
    tool_breakpoints: (tools, seconds) of the breakpoints on tools; those on messages are in the
    messages.
    calls, begin: as in ChatRequest.
    holds_calls:  whether calls are held to their tools' parameters, and
                  PreparedPrompt.call_spelling is wanted.
    is_chat_request: whether `calls`, `begin` and breakpoints on whole messages count; mlx-lm's own
    requests have those of parts.
    checkpoints:  whether the ends of the system prompt and of the conversation are wanted.
    capacity, positions: the most tokens of the prompt and its reply in the pool, and in the model;
    None if unknown.
    processor:    mlx-lm's name of the image processor for the images in the messages; None without
                  images.
    image_at:     where the client's first image is.
    only_count:   only the number of tokens is wanted: the result has no images.
    prediction:   text that the client expects in the reply, or "".
    salt:         of the request's prefixes: only prompts with the same one are used for it.
    """

    source: TokenizerSource
    request_type: str
    prompt: str = ""
    messages: list[Message] = field(default_factory=list)
    tools: list[Any] | None = None
    role_mapping: Any = None
    options: Json = field(default_factory=dict)
    tool_breakpoints: list[tuple[int, int]] = field(default_factory=list)
    calls: str = "may"
    begin: str = ""
    holds_calls: bool = False
    is_chat_request: bool = False
    checkpoints: bool = True
    capacity: int | None = None
    positions: int | None = None
    processor: str | None = None
    image_at: str = "messages"
    only_count: bool = False
    prediction: str = ""
    salt: bytes = b""


@dataclass
class TokenizerJob:
    """Work for a tokenizer other than a reply's prompt: text into tokens and back, and chats into
    text.

    parts:     text to tokenize, and tokens that stand among it. tokens: to turn into text.
    messages:  a chat to render, and to tokenize if `tokenizes`.
    options:   arguments for the template other than messages and tools.
    adds_special_tokens, reads_special_tokens: whether the tokenizer puts its own around text, and
    whether text may spell them.
    wants:     what of each token is written as JSON.
    """

    source: TokenizerSource = UNKNOWN
    parts: list[str | int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    tools: list[Any] | None = None
    options: Json = field(default_factory=dict)
    tokenizes: bool = False
    adds_special_tokens: bool = True
    reads_special_tokens: bool = True
    wants: Wants = ""


@dataclass(frozen=True)
class TokenizerResult:
    """`written`: JSON of the text, and of what the job wants of the tokens. Long lists are written
    in the worker: the server's threads would all wait meanwhile.

    template, has_tools, has_thinking: the chat template, and what the model can do by its
    tokenizer.
    """

    tokens: array[int]
    written: Mapping[str, bytes]
    template: str | None
    has_tools: bool
    has_thinking: bool


@dataclass(frozen=True)
class PreparedImages:
    """The fields of mlx-lm's Vision for the images of a prompt, as numpy arrays.

    pixels: of each image; empty once the request has ended. starts: the position of its first
    token. cache_key: the prompt, in which its tokens name its content.
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

    segments:     the lengths of mlx-lm's segments; the first begins with the prompt, the last ends
                  with it.
    breakpoints:  (tokens, seconds) of each of the client's breakpoints.
    checkpoints:  (tokens, kind) of the beginnings that other prompts will share; None if the job
                  does not ask for them.
    call:         what stands before and after a tool call.
    call_spelling: a call with a sample's arguments as the model's template writes it between the
    two; "" if unknown or unused.
    never:        the token that must not be drawn, so that no call begins.
    images:       None for a prompt without.
    prediction:   the tokens of what the client expects in the reply.
    """

    tokens: Sequence[int] = ()
    segments: list[int] = field(default_factory=list)
    types: list[str] = field(default_factory=list)
    initial_state: str = "normal"
    breakpoints: list[tuple[int, int]] = field(default_factory=list)
    checkpoints: list[tuple[int, str]] | None = None
    call: tuple[str, str] = ("", "")
    call_spelling: str = ""
    never: int | None = None
    images: PreparedImages | None = None
    prediction: list[int] = field(default_factory=list)

    def __getstate__(self) -> dict[str, Any]:
        """A list of integers takes ten times as long in the pipe."""
        return vars(self) | {"tokens": array("i", self.tokens)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, tokens=state["tokens"].tolist())


def check_length(needed: int, capacity: int | None, positions: int | None) -> None:
    """Raises TooManyPositionsError or RequestTooLargeError for more tokens than the model or its
    pool takes.
    """
    if positions is not None and needed > positions:
        raise TooManyPositionsError(needed, positions)
    if capacity is not None and needed > capacity:
        raise RequestTooLargeError(needed, capacity)


# What a worker does: a prompt to render, other work for a tokenizer, a tokenizer to load before its
# first prompt, or a request's body, of which it checks that it is JSON which does not take long.
Job: TypeAlias = PromptJob | TokenizerJob | TokenizerSource | bytes
# None for a job that only loads or checks.
Result: TypeAlias = PreparedPrompt | TokenizerResult | None


class OutOfTimeError(BaseException):
    """A job has used up its time. An `except Exception` in a template's code does not catch it."""
