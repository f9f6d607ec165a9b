"""Prompts of chat requests, on the generation thread: how a reply has to begin, where marks stand, how long a prompt is.

A BlockpoolGenerator that knows ChatRequests. Everything else is left to mlx-lm's tokenization, which this stands around.
"""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from typing import Any

from jinja2 import TemplateError
from mlx_lm.server import process_message_content

from ..messages import Message
from .chat import ChatRequest, Mark, Rendered, message_marks
from .generation import BlockpoolGenerator
from .mark_positions import mark_positions

log = logging.getLogger(__name__)

# Added to the logit of a token that must not be drawn; every float type has it.
NEVER = -1e4


class Counted(Exception):  # noqa: N818
    """Ends a request that only asked how long its prompt is: `tokens`."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        super().__init__(f"the prompt has {tokens} tokens, and no more was asked")


class ChatGenerator(BlockpoolGenerator):
    """The generation thread of a server that speaks more than one protocol."""

    def _tokenize(self, tokenizer: Any, request: Any, args: Any) -> Any:
        """mlx-lm's, for a ChatRequest with the beginning of its reply; fills in request.rendered. May be called again.

        Raises Counted for a request that only asked how long its prompt is, and ValueError for what the model cannot do.
        """
        if not isinstance(request, ChatRequest):
            return self._tokenize_plain(tokenizer, request, args)
        if request.image_at is not None and self.model_provider.processor is None:
            raise ValueError(f"{request.image_at}: this model takes no images")
        begin = _beginning(tokenizer, request, args)
        if not tokenizer.has_chat_template:
            process_message_content(request.messages)
        messages = copy.deepcopy(request.messages)
        try:
            tokenized = super()._tokenize(tokenizer, request, args)
        except OSError as error:
            raise ValueError(f"{request.image_at}: {error}") from error
        except TemplateError as error:
            lowered = without_later_system(messages)
            if lowered == messages:
                raise
            log.debug("system messages inside of the conversation become the user's: %s", error)
            request.messages, messages = lowered, copy.deepcopy(lowered)
            tokenized = super()._tokenize(tokenizer, request, args)
        if begin:
            tokenized = _begun(tokenizer, tokenized, begin, "tool" if request.calls == "must" else "normal")
        request.rendered.prompt_tokens = len(tokenized[0])
        if request.only_count:
            raise Counted(request.rendered.prompt_tokens)
        self._note(tokenizer, tokenized, messages, request, args)
        return tokenized

    def _tokenize_plain(self, tokenizer: Any, request: Any, args: Any) -> Any:
        """mlx-lm's, for its own requests. Whose messages have marks gets `rendered` too, with where they stand."""
        marks = message_marks(request.messages) if request.request_type == "chat" else []
        messages = copy.deepcopy(request.messages) if marks else []
        tokenized = super()._tokenize(tokenizer, request, args)
        if marks:
            found = self._positions(tokenizer, tokenized, messages, request.tools, marks, args)
            request.rendered = Rendered(len(tokenized[0]), found)
        return tokenized

    def _positions(
        self, tokenizer: Any, tokenized: Any, messages: list[Message], tools: Any, marks: list[Mark], args: Any
    ) -> list[tuple[int, int]]:
        """(tokens, seconds) of the marks; of a prompt with images, or without a template, none can be found."""
        if tokenized[4] is not None or not tokenizer.has_chat_template or not marks:
            return []
        options = {**self.model_provider.cli_args.chat_template_args, **(args.chat_template_kwargs or {})}
        return mark_positions(tokenizer, tokenized[0], messages, tools, marks, options)

    def _note(self, tokenizer: Any, tokenized: Any, messages: list[Message], request: ChatRequest, args: Any) -> None:
        rendered = request.rendered
        rendered.stops = {tuple(tokenizer.encode(word, add_special_tokens=False)): word for word in args.stop_words}
        if tokenizer.has_tool_calling:
            rendered.call = tokenizer.tool_call_start, tokenizer.tool_call_end or ""
        if rendered.marks is None:
            marks: list[Mark] = [*request.tool_marks, *message_marks(messages)]
            rendered.marks = self._positions(tokenizer, tokenized, messages, request.tools, marks, args)


def without_later_system(messages: list[Message]) -> list[Message]:
    """The same chat for a template that takes a system message at the beginning only: others join the user's text before them."""
    lowered: list[Message] = []
    for message in messages:
        last = lowered[-1]["role"] if lowered else None
        if message["role"] == "system" and last not in (None, "system"):
            message = {**message, "role": "user"}
        if message["role"] == last and last in ("user", "system"):
            before, added = (parts_of(m["content"]) for m in (lowered[-1], message))
            lowered[-1] = {**lowered[-1], **message, "content": [*before, {"type": "text", "text": "\n\n"}, *added]}
        else:
            lowered.append(message)
    return lowered


def parts_of(content: Any) -> list[dict[str, Any]]:
    """The content of a message in parts."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content or ())


def _beginning(tokenizer: Any, request: ChatRequest, args: Any) -> str:
    """The text that the reply has to begin with. Where calls are forbidden, sees to it that none begins.

    Raises ValueError where a call is needed and the model cannot be made to begin one.
    """
    if request.calls == "never" and request.tools:
        start = list(tokenizer.tool_call_start_tokens or ())
        if len(start) == 1:
            # The tools stay in the prompt, whose beginning is known with them.
            args.logits = replace(args.logits, logit_bias={**(args.logits.logit_bias or {}), start[0]: NEVER})
        else:
            request.tools = None
    if request.calls != "must":
        return request.begin
    goes_elsewhere = any(dst == "tool" for edges in tokenizer.response_transitions.values() for _, dst in edges)
    if not tokenizer.has_tool_calling or goes_elsewhere:
        raise ValueError("tool_choice: this model cannot be made to call a tool; 'auto' and 'none' are supported")
    return f"{request.begin}{tokenizer.tool_call_start}"


def _begun(tokenizer: Any, tokenized: Any, begin: str, state: str) -> Any:
    """The tokenized prompt with the beginning of the reply behind it; what the template has begun to think ends first."""
    prompt, segments, types, initial_state, vision = tokenized
    if initial_state == "reasoning":
        begin = f"{tokenizer.think_end}\n\n{begin}"
    elif initial_state != "normal" and state == "normal":
        state = initial_state
    added = list(tokenizer.encode(begin, add_special_tokens=False))
    if vision is not None:
        vision = replace(vision, cache_key=[*vision.cache_key, *added])
    return [*prompt, *added], [*segments[:-1], [*segments[-1], *added]], types, state, vision
