"""Prompts are prepared on the socket's thread: worker processes render and tokenize them before a request is queued.

Prompts with images are the exception: the model's image processor renders them on the generation thread, where it is loaded and
where its arrays live.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from mlx_lm.utils import load_config

from ...config import ImageConfig, RequestConfig
from ...errors import RequestTooLargeError, TooManyPositionsError
from ...modelfile import local_folder
from ..images import has_images, sees, take_images
from ..models.provider import BlockpoolModelProvider, ModelKey
from ..models.registry import ModelRegistry
from ..request import ChatRequest, Rendered
from ..validation import check_bounds
from .job import PreparedPrompt, PromptJob, TokenizerSource
from .renderer import beginning, begun
from .template_options import check_template_options
from .workers import PromptWorkers

# Added to the logit of a token that must not be drawn; every float type has it.
NEVER = -1e4


class Counted(Exception):  # noqa: N818
    """Ends a request that only asked for the length of its prompt: `tokens`."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        super().__init__(f"the prompt has {tokens} tokens, and no more was asked")


class PromptPreparation:
    """Checks requests and fills in their prompts, for the models of `registry`. Any thread may call prepare()."""

    def __init__(self, workers: PromptWorkers, images: ImageConfig, registry: ModelRegistry) -> None:
        self._workers = workers
        self._images = images
        self._registry = registry

    def check(self, request: Any, args: Any) -> None:
        """Raises InvalidRequestError for a request that has too much of something, or asks the template for what it may not."""
        check_bounds(request, args, RequestConfig())
        check_template_options(args.chat_template_kwargs, self._workers.config.template_kwargs)

    def prepare(self, request: Any, args: Any) -> Any:
        """Set `request.prepared`, except for a prompt with images. Returns mlx-lm's arguments, changed where the prompt needs it.

        `args.model` is a ModelKey. Raises Counted for a request that only asks for the length of its prompt, ValueError for what
        requests may not ask for and the model cannot do, and what PromptWorkers.prepare() raises.
        """
        if has_images(request.messages) and self._sees(args.model):
            take_images(request.messages, request.image_at or "messages", self._images)
            return args
        is_chat_request = isinstance(request, ChatRequest)
        if is_chat_request and request.image_at is not None:
            raise ValueError(f"{request.image_at}: this model takes no images")
        prepared = self._rendered(request, args)
        if is_chat_request:
            note_rendered(request, prepared)
        elif prepared.marks:
            request.rendered = Rendered(len(prepared.tokens), prepared.marks)
        request.prepared = prepared
        return args if prepared.never is None else never_drawing(prepared.never, args)

    def _sees(self, key: ModelKey) -> bool:
        """Whether a model takes images, also before it is loaded."""
        served = self._registry.loaded.get(key)
        return sees(load_config(local_folder(key.model))) if served is None else served.provider.processor is not None

    def _rendered(self, request: Any, args: Any) -> PreparedPrompt:
        try:
            return self._workers.prepare(self._job(request, args))
        except RequestTooLargeError as error:
            served = self._registry.loaded.get(args.model)
            if served is not None and served.positions is not None and error.needed > served.positions:
                raise TooManyPositionsError(error.needed, served.positions) from error
            raise

    def _job(self, request: Any, args: Any) -> PromptJob:
        served = self._registry.loaded.get(args.model)
        template = self._registry.template
        folder = local_folder(args.model.model) if served is None else served.provider.folder
        job = PromptJob(
            TokenizerSource(str(folder), template._tokenizer_config, template.cli_args.use_default_chat_template),
            request.request_type,
            request.prompt,
            request.messages,
            request.tools,
            request.role_mapping,
            {**template.cli_args.chat_template_args, **(args.chat_template_kwargs or {})},
        )
        if served is not None:
            limits = [limit for limit in (served.capacity(), served.positions) if limit is not None]
            job.capacity = min(limits, default=None)
            job.checkpoints = served.engine is None or served.engine.caches.needs_marks
        if isinstance(request, ChatRequest):
            job.is_chat_request = True
            job.stop_words = list(args.stop_words)
            job.tool_marks = [(mark.parts or 0, mark.seconds) for mark in request.tool_marks]
            job.calls, job.begin = request.calls, request.begin
            if request.only_count:
                job.capacity, job.checkpoints = None, False
        return job


def note_rendered(request: ChatRequest, prepared: PreparedPrompt) -> None:
    """Fill in what a reply's reader needs of the prompt. Raises Counted for a request that asks for nothing more."""
    rendered = request.rendered
    rendered.prompt_tokens = len(prepared.tokens)
    if request.only_count:
        raise Counted(rendered.prompt_tokens)
    rendered.stops = {tuple(tokens): word for tokens, word in prepared.stops}
    rendered.call = prepared.call
    rendered.marks = prepared.marks


def never_drawing(token: int, args: Any) -> Any:
    """mlx-lm's arguments with a bias against a token."""
    return replace(args, logits=replace(args.logits, logit_bias={**(args.logits.logit_bias or {}), token: NEVER}))


def tokenize_with_images(tokenize: Callable[..., Any], provider: BlockpoolModelProvider, request: Any, args: Any) -> Any:
    """What mlx-lm's `tokenize` returns, for a prompt with images. Runs on the generation thread; may be called again.

    Changes the bias of `args` where the reply must not call tools. Raises ValueError for images that the model cannot take.
    """
    tokenizer, place = provider.tokenizer, request.image_at or "messages"
    if provider.processor is None:
        raise ValueError(f"{place}: this model takes no images")
    begin, never = beginning(tokenizer, request) if isinstance(request, ChatRequest) else ("", None)
    if never is not None:
        args.logits = never_drawing(never, args).logits
    try:
        tokenized = tokenize(tokenizer, request, args)
    except OSError as error:
        raise ValueError(f"{place}: {error}") from error
    if begin:
        tokenized = begun(tokenizer, tokenized, begin, "tool" if request.calls == "must" else "normal")
    if isinstance(request, ChatRequest):
        stops = [(list(tokenizer.encode(word, add_special_tokens=False)), word) for word in args.stop_words]
        call = (tokenizer.tool_call_start, tokenizer.tool_call_end or "") if tokenizer.has_tool_calling else ("", "")
        note_rendered(request, PreparedPrompt(tokenized[0], [], [], tokenized[3], stops=stops, call=call))
    return tokenized


class AgentOrder:
    """Queues the requests of each agent one after the other, in the order of their arrival."""

    def __init__(self) -> None:
        self._last: dict[str, threading.Event] = {}
        self._changing = threading.Lock()

    @contextmanager
    def turn(self, agent: str | None) -> Iterator[threading.Event]:
        """Wait for the agent's earlier requests. Setting the event lets the next one go on before the block ends.

        Requests without an agent are not ordered.
        """
        mine = threading.Event()
        if agent is None:
            yield mine
            return
        with self._changing:
            before, self._last[agent] = self._last.get(agent), mine
        if before is not None:
            before.wait()
        try:
            yield mine
        finally:
            with self._changing:
                if self._last[agent] is mine:
                    del self._last[agent]
            mine.set()
