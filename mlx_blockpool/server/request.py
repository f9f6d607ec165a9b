"""A request on its way to the engine: mlx-lm's CompletionRequest, and what that has no words for.

Messages and tools have the shape of OpenAI's API. A message, or a part of its content, may have a `cache_control`, as parts have
it in both protocols: up to its end the prompt is worth keeping. Templates ignore it.
"""

from __future__ import annotations

import socket
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from ..drafts.draft import Prediction
from ..forms.form import Form
from ..forms.wanted import Wanted, WantedTool
from ..messages import Message
from ..mlx_lm_compat import CompletionRequest, GenerationArguments
from ..prefix.salts import SHARED
from .prompts.job import PreparedPrompt

if TYPE_CHECKING:
    from .explain import Explained
    from .images import HeldPixels

SECONDS = {"5m": 300, "1h": 3600}


@dataclass(frozen=True)
class Breakpoint:
    """A beginning of a chat that is worth keeping for `seconds`.

    It ends after `parts` content parts of message number `message`, after the whole message where `parts` is None, and after
    `parts` tools where `message` is None.
    """

    message: int | None
    parts: int | None
    seconds: int


@dataclass
class RequestOptions:
    """Options of a request.

    id:            names the request in the response's headers, in explanations and in the log.
    agent:         the client's name for itself; requests of one agent run in order.
    conversation:  the name that the chat's content gives it where the client gives none; it orders nothing.
    retention:     where the prompt is kept: "memory" never on disk, "day" for a day since its last use; None: the default.
    priority:      a request with a lower value is served earlier.
    cache_salt:    the client's own salt for its prefixes; None: it has named none.
    salt:          of the request's prefixes; requests with SHARED share theirs.
    owner:         the name of the key that the request has shown; None: keys have no names.
    keep_seconds:  how long its model stays loaded without another request; None: as long as the server's options say.
    """

    id: str = field(default_factory=lambda: f"req_{uuid.uuid4().hex[:24]}")
    agent: str | None = None
    conversation: str | None = None
    retention: str | None = None
    priority: int = 0
    cache_salt: str | None = None
    salt: bytes = SHARED
    owner: str | None = None
    keep_seconds: float | None = None

    @property
    def name(self) -> str | None:
        """The name under which the turn is noted: the agent's, or the conversation's."""
        return self.agent or self.conversation


@dataclass
class PromptRequest(CompletionRequest):  # type: ignore[misc]
    """mlx-lm's request with what the generation thread reads beside the prompt.

    connection:  the client's, watched for hang-ups; None: the request came over none.
    image_at:    where the client's first image is.
    explained:   where the request's use of the cache is written down; None: nowhere.
    pixels:      where the pixels of its images are held; None: no budget bounds them.
    choices:     how many replies are generated for the prompt.
    tokenizer:   of the model that serves it, from the first part of its reply on.
    prepared:    the rendered prompt; empty until PromptPreparation has prepared it.
    form:        the form that the content of the reply keeps; None: it is free.
    prediction:  text that the client expects in the reply; "": none. predictions: its tokens and counts, one for each choice.
    compiled:    this form, or that of the reply's calls, of which each choice follows a copy; None: the reply has none.
    """

    options: RequestOptions = field(default_factory=RequestOptions)
    connection: socket.socket | None = None
    image_at: str | None = None
    explained: Explained | None = None
    pixels: HeldPixels | None = None
    choices: int = 1
    tokenizer: Any = None
    prepared: PreparedPrompt = field(default_factory=PreparedPrompt)
    compiled: Form | None = None
    form: Wanted | None = None
    prediction: str = ""
    predictions: list[Prediction] = field(default_factory=list)


@dataclass
class ChatRequest(PromptRequest):
    """A chat in any of the protocols.

    tool_breakpoints: those on tools; those on messages are in the messages.
    calls:       whether the reply may call tools, must begin with a call, or never calls one.
    begin:       text that the reply begins with; it is part of the prompt.
    only_count:  nothing is generated, only the prompt's tokens are counted.
    held:        the tools to whose schemas calls are held: all that the model sees, or none.
    """

    tool_breakpoints: tuple[Breakpoint, ...] = ()
    calls: Literal["may", "must", "never"] = "may"
    begin: str = ""
    only_count: bool = False
    held: tuple[WantedTool, ...] = ()


@dataclass(frozen=True)
class ParsedRequest:
    """A request's body, parsed. `body`: its model, by which the reply is rendered. `one_call`: a call ends the reply."""

    request: ChatRequest
    arguments: GenerationArguments
    body: Any
    one_call: bool


def message_breakpoints(messages: list[Message]) -> list[Breakpoint]:
    """The breakpoints in messages, in their order."""
    breakpoints = []
    for i, message in enumerate(messages):
        content = message.get("content")
        parts = content if isinstance(content, list) else []
        breakpoints += [
            Breakpoint(i, j, s) for j, part in enumerate(parts, 1) if isinstance(part, dict) and (s := seconds_of(part))
        ]
        if seconds := seconds_of(message):
            breakpoints.append(Breakpoint(i, None, seconds))
    return breakpoints


def seconds_of(marked: Mapping[str, Any]) -> int:
    """Seconds for which a `cache_control` keeps its prefix; 0 without one, and for one of an unknown kind."""
    control = marked.get("cache_control")
    if not isinstance(control, dict):
        return 0
    ttl = control.get("ttl", "5m")
    return SECONDS.get(ttl, 0) if isinstance(ttl, str) else 0
