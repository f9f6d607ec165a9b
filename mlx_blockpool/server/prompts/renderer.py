"""Renders and tokenizes one prompt: mlx-lm's own tokenization, how a reply has to begin, and the
positions of breakpoints.

Runs in a worker process. Does not know about pipes and limits.
"""

from __future__ import annotations

import copy
import functools
import logging
import types
from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError
from mlx_lm.processors import PROCESSORS
from mlx_lm.utils import load_config

from ...hooks import Message
from ...mlx_lm_compat import CompletionRequest, ResponseGenerator, process_message_content, rebind
from .breakpoints import (
    Breakpoint,
    breakpoint_positions,
    checkpoint_positions,
    message_breakpoints,
    without_reminders,
)
from .encoding import ReusingTokenizer
from .job import PreparedImages, PreparedPrompt, PromptJob, check_length
from .replay import KnownPieces, Replay
from .templates import Template, sample_call, without_later_system

log = logging.getLogger(__name__)


class PromptRenderer:
    """Renders jobs with one tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = ReusingTokenizer(tokenizer)
        self._pieces = KnownPieces()

    def render(self, job: PromptJob) -> PreparedPrompt:
        """Raises ValueError for what the model cannot do, RequestTooLargeError, and what
        templates and tokenizers raise.
        """
        self.tokenizer.scope = job.salt
        if job.request_type == "text":
            return self._prepared(job, self._tokenize(job))
        begin, never = beginning(self.tokenizer, job) if job.is_chat_request else ("", None)
        if job.processor is not None:
            # mlx-lm's path for images neither replays earlier replies nor has checkpoints.
            try:
                return self._prepared(job, self._tokenize(job), begin, never)
            except OSError as error:
                raise ValueError(f"{job.image_at}: {error}") from error
        if job.is_chat_request and not self.tokenizer.has_chat_template:
            process_message_content(job.messages)
        original = _copied(job.messages)
        so_far = without_reminders(original)
        try:
            tokenized = self._tokenize(job)
        except TemplateError as error:
            lowered = without_later_system(original)
            if not job.is_chat_request or lowered == original:
                raise
            log.debug("system messages inside of the conversation become the user's: %s", error)
            job.messages, original = lowered, _copied(lowered)
            so_far = without_later_system(so_far)
            tokenized = self._tokenize(job)
        replayed = Replay(self._template(job), job.messages, self._pieces, job.salt).tokens(so_far)
        if replayed is not None:
            tokenized = replayed[0], [replayed[0]], ["assistant"], *tokenized[3:]
        prepared = self._prepared(job, tokenized, begin, never)
        self._find_breakpoints(job, original, so_far, prepared)
        if replayed is not None and prepared.checkpoints is not None:
            # The template's own rendering of the chat parts from the prompt at its first reply.
            prepared.checkpoints = sorted((dict(prepared.checkpoints) | replayed[1]).items())
        return prepared

    def _tokenize(self, job: PromptJob) -> Any:
        """mlx-lm's tokenization, which only needs the processor and the options of its
        generator.
        """
        processor = (
            None if job.processor is None else image_processor(job.processor, job.source.folder)
        )
        options = types.SimpleNamespace(chat_template_args=job.options)
        generator = types.SimpleNamespace(
            model_provider=types.SimpleNamespace(processor=processor, cli_args=options)
        )
        request = CompletionRequest(
            job.request_type, job.prompt, job.messages, job.tools, job.role_mapping
        )
        arguments = types.SimpleNamespace(chat_template_kwargs=None)
        return ResponseGenerator._tokenize(generator, self.tokenizer, request, arguments)

    def _prepared(
        self, job: PromptJob, tokenized: Any, begin: str = "", never: int | None = None
    ) -> PreparedPrompt:
        if begin:
            tokenized = begun(
                self.tokenizer, tokenized, begin, "tool" if job.calls == "must" else "normal"
            )
        prompt, segments, kinds, initial_state, vision = tokenized
        check_length(len(prompt) + 1, job.capacity, job.positions)
        encode = self.tokenizer.encode
        prepared = PreparedPrompt(
            array("i", prompt),
            [len(segment) for segment in segments],
            list(kinds),
            initial_state,
            never=never,
        )
        if vision is not None and not job.only_count:
            prepared.images = PreparedImages(vision.pixel_values, vision.starts, vision.cache_key)
        prepared.prediction = (
            list(encode(job.prediction, add_special_tokens=False)) if job.prediction else []
        )
        if self.tokenizer.has_tool_calling:
            prepared.call = self.tokenizer.tool_call_start, self.tokenizer.tool_call_end or ""
        if job.holds_calls:
            prepared.call_spelling = self._call_spelling
        return prepared

    @functools.cached_property
    def _call_spelling(self) -> str:
        return sample_call(self.tokenizer)

    def _find_breakpoints(
        self,
        job: PromptJob,
        original: list[Message],
        so_far: list[Message],
        prepared: PreparedPrompt,
    ) -> None:
        breakpoints: list[Breakpoint] = [
            *(Breakpoint(None, tools, seconds) for tools, seconds in job.tool_breakpoints),
            *message_breakpoints(original),
        ]
        template, prompt = self._template(job), array("i", prepared.tokens)
        if breakpoints and self.tokenizer.has_chat_template:
            prepared.breakpoints = breakpoint_positions(template, prompt, original, breakpoints)
        if job.checkpoints:
            prepared.checkpoints = checkpoint_positions(template, prompt, original, so_far)

    def _template(self, job: PromptJob) -> Template:
        return Template(self.tokenizer, job.tools, job.options)


def _copied(messages: list[Message]) -> list[Message]:
    """Deep copies, which take long: most messages have nothing but texts."""
    return [
        dict(message) if {*map(type, message.values())} == {str} else copy.deepcopy(message)
        for message in messages
    ]


def image_processor(name: str, folder: str) -> Any:
    """mlx-lm's image processor of this name, for the model in `folder`.

    Its pixels stay numpy arrays: a worker has no device.
    """
    stock: Any = PROCESSORS[name]
    on_numpy = rebind(stock.preprocess_image, mx=types.SimpleNamespace(array=np.ascontiguousarray))
    ours: Any = type(stock.__name__, (stock,), {"preprocess_image": on_numpy})
    return ours.from_config(load_config(Path(folder)))


def beginning(tokenizer: Any, job: PromptJob) -> tuple[str, int | None]:
    """(the text that the reply has to begin with, the token that must not be drawn so that no call
    begins).

    The job's tools are taken out where that is the only way to have no calls.
    Raises ValueError where a call is needed and the model cannot be made to begin one.
    """
    never = None
    if job.calls == "never" and job.tools:
        start: Sequence[int] = list(tokenizer.tool_call_start_tokens or ())
        if len(start) == 1:
            # The tools stay in the prompt: its cached beginning has them.
            never = start[0]
        else:
            job.tools = None
    if job.calls != "must":
        return job.begin, never
    goes_elsewhere = any(
        dst == "tool" for edges in tokenizer.response_transitions.values() for _, dst in edges
    )
    if not tokenizer.has_tool_calling or goes_elsewhere:
        raise ValueError(
            "tool_choice: this model cannot be made to call a tool; 'auto' and 'none' are supported"
        )
    return f"{job.begin}{tokenizer.tool_call_start}", never


def begun(tokenizer: Any, tokenized: Any, begin: str, state: str) -> Any:
    """The tokenized prompt with the beginning of the reply after it; what the template has begun
    to think ends first.
    """
    prompt, segments, kinds, initial_state, vision = tokenized
    if initial_state == "reasoning":
        begin = f"{tokenizer.think_end}\n\n{begin}"
    elif initial_state != "normal" and state == "normal":
        state = initial_state
    added = tokenizer.encode(begin, add_special_tokens=False)
    if vision is not None:
        vision = replace(vision, cache_key=[*vision.cache_key, *added])
    return prompt + added, [*segments[:-1], segments[-1] + added], kinds, state, vision
