"""A request on its way to the engine: mlx-lm's CompletionRequest with further fields.

Messages and tools have the shape of OpenAI's API. A message, or a part of its content, may have a
`cache_control`, as parts have it in both protocols: up to its end the prompt is worth keeping.
Templates ignore it.
"""

from __future__ import annotations

import socket
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from ..drafts.draft import Prediction
from ..forms.form import ReplyForm
from ..forms.output_format import OutputFormat, ToolFormat
from ..mlx_lm_compat import CompletionRequest, GenerationArguments
from ..prefix.salts import SHARED
from .prompts.breakpoints import Breakpoint
from .prompts.job import PreparedPrompt

if TYPE_CHECKING:
    from .images import HeldPixels
    from .watch.explain import Explained


@dataclass
class RequestOptions:
    """Options of a request.

    id:            names the request in the response's headers, in explanations and in the log.
    agent:         the client's name for itself; requests of one agent run in order.
    conversation:  the name that the chat's content gives it where the client gives none; it orders
                   nothing.
    retention:     where the prompt is kept: "memory" never on disk, "day" for a day since its last
                   use; None for the default.
    priority:      a request with a lower value is served earlier.
    cache_salt:    the salt that the client has given for its prefixes, if any.
    salt:          of the request's prefixes; requests with SHARED share theirs.
    owner:         the name of the request's key; None if keys have no names.
    may_pin:       whether its breakpoints pin prefixes.
    may_load:      whether it may have its model loaded while others are.
    keep_seconds:  how long its model stays loaded without another request; None for the time of the
                   server's options.
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
    may_pin: bool = True
    may_load: bool = True

    @property
    def name(self) -> str | None:
        """The name under which the turn is noted: the agent's, or the conversation's."""
        return self.agent or self.conversation


@dataclass
class PromptRequest(CompletionRequest):  # type: ignore[misc]
    """mlx-lm's request with what the generation thread needs in addition to the prompt.

    connection:  the client's, watched for hang-ups; None if the request came over none.
    image_at:    where the client's first image is.
    explained:   where the request's use of the cache is explained; None if it is not.
    pixels:      counts the pixels of its images; None without a budget for them.
    choices:     how many replies are generated for the prompt.
    tokenizer:   of the model that serves it, from the first part of its reply on.
    prepared:    the rendered prompt; empty until PromptPreparation has prepared it.
    form:        the form that the content of the reply must have, if any.
    prediction:  text that the client expects in the reply, or "". predictions: its tokens and
                 counts, one for each choice.
    compiled:    this form, or that of the reply's calls, of which each choice follows a copy; None
                 if the reply has neither.
    """

    options: RequestOptions = field(default_factory=RequestOptions)
    connection: socket.socket | None = None
    image_at: str | None = None
    explained: Explained | None = None
    pixels: HeldPixels | None = None
    choices: int = 1
    tokenizer: Any = None
    prepared: PreparedPrompt = field(default_factory=PreparedPrompt)
    compiled: ReplyForm | None = None
    form: OutputFormat | None = None
    prediction: str = ""
    predictions: list[Prediction] = field(default_factory=list)

    @property
    def forms(self) -> list[OutputFormat | ToolFormat]:
        """Those that the reply is held to: of its content and of its calls."""
        return [] if self.form is None else [self.form]


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
    held: tuple[ToolFormat, ...] = ()

    @property
    def forms(self) -> list[OutputFormat | ToolFormat]:
        return [*super().forms, *self.held]

    @property
    def is_strict(self) -> bool:
        """Whether the client wants the exact parameters of one of the tools."""
        return any(tool.place is not None for tool in self.held)


@dataclass(frozen=True)
class ParsedRequest:
    """A request's body, parsed.

    `body`: its model, by which the reply is rendered. `one_call`: a call ends the reply.
    """

    request: ChatRequest
    arguments: GenerationArguments
    body: Any
    one_call: bool
