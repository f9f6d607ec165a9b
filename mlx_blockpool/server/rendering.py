"""Requests on their way to the generation thread: worker processes render and tokenize their prompts.

A ChatGenerator's generate() runs on the thread of the socket. What has images is rendered by mlx-lm on the generation thread,
where the image processor of the model is.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from mlx_lm.utils import load_config

from ..config import ImageConfig, PromptConfig, RequestConfig
from ..errors import RequestTooLargeError, TooManyPositionsError
from .bounds import check_bounds
from .generation import BlockpoolGenerator
from .images import has_images, sees, take_images
from .models.provider import ModelKey, local_folder
from .prompts.job import PreparedPrompt, PromptJob, TokenizerSource
from .prompts.renderer import beginning, begun
from .prompts.template_options import check_template_options
from .prompts.workers import PromptWorkers
from .request import ChatRequest, Rendered

# Added to the logit of a token that must not be drawn; every float type has it.
NEVER = -1e4


class Counted(Exception):  # noqa: N818
    """Ends a request that only asked how long its prompt is: `tokens`."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        super().__init__(f"the prompt has {tokens} tokens, and no more was asked")


class ChatGenerator(BlockpoolGenerator):
    """The generation thread of a server that speaks more than one protocol, with the workers that prepare its prompts."""

    def __init__(self, *args: Any, prompts: PromptConfig | None = None, images: ImageConfig | None = None, **kwargs: Any) -> None:
        self.prompts = PromptWorkers(prompts or PromptConfig())
        self._images = images or ImageConfig()
        self._order = AgentOrder()
        super().__init__(*args, **kwargs)

    def generate(self, request: Any, generation_args: Any, progress_callback: Any = None) -> Any:
        """The generator's own, with the prompt prepared. Requests of one agent are handed on in the order of their arrival.

        Raises Counted for a request that only asked how long its prompt is; what ModelRegistry.find() and PromptWorkers.prepare()
        raise; ValueError for what requests may not ask and the model cannot do.
        """
        check_bounds(request, generation_args, RequestConfig())
        check_template_options(generation_args.chat_template_kwargs, self.prompts.config.template_kwargs)
        args = replace(generation_args, model=self.registry.find(generation_args.model))
        with self._order.turn(request.options.agent) as turn:
            if has_images(request.messages) and self._sees(args.model):
                take_images(request.messages, request.image_at or "messages", self._images)
            else:
                args = self._prepare(request, args)
            request.turn = turn
            return super().generate(request, args, progress_callback)

    def stop_and_join(self) -> None:
        self.prompts.close()
        super().stop_and_join()

    def _arrive(self, item: Any) -> None:
        if isinstance(item, tuple) and (turn := item[1].turn) is not None:
            turn.set()
        super()._arrive(item)

    def _sees(self, key: ModelKey) -> bool:
        """Whether a model takes images, also before it is loaded."""
        served = self.registry.loaded.get(key)
        return sees(load_config(local_folder(key.model))) if served is None else served.provider.processor is not None

    def _prepare(self, request: Any, args: Any) -> Any:
        """Fill in the request's prompt, and what is known of it. Returns the arguments as they are with it."""
        is_chat_request = isinstance(request, ChatRequest)
        if is_chat_request and request.image_at is not None:
            raise ValueError(f"{request.image_at}: this model takes no images")
        try:
            prepared = self.prompts.prepare(self._job(request, args))
        except RequestTooLargeError as error:
            served = self.registry.loaded.get(args.model)
            if served is not None and served.positions is not None and error.needed > served.positions:
                raise TooManyPositionsError(error.needed, served.positions) from error
            raise
        if is_chat_request:
            self._note(request, prepared)
        elif prepared.marks:
            request.rendered = Rendered(len(prepared.tokens), prepared.marks)
        request.prepared = prepared
        if prepared.never is None:
            return args
        bias = {**(args.logits.logit_bias or {}), prepared.never: NEVER}
        return replace(args, logits=replace(args.logits, logit_bias=bias))

    def _job(self, request: Any, args: Any) -> PromptJob:
        served = self.registry.loaded.get(args.model)
        template, cli_args = self.registry.template, self.cli_args
        folder = local_folder(args.model.model) if served is None else served.provider.folder
        job = PromptJob(
            TokenizerSource(str(folder), template._tokenizer_config, cli_args.use_default_chat_template),
            request.request_type,
            request.prompt,
            request.messages,
            request.tools,
            request.role_mapping,
            {**cli_args.chat_template_args, **(args.chat_template_kwargs or {})},
        )
        if served is not None:
            limits = [limit for limit in (served.prompt_cache.capacity(), served.positions) if limit is not None]
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

    def _note(self, request: ChatRequest, prepared: PreparedPrompt) -> None:
        """What a reply's reader needs to know."""
        rendered = request.rendered
        rendered.prompt_tokens = len(prepared.tokens)
        if request.only_count:
            raise Counted(rendered.prompt_tokens)
        rendered.stops = {tuple(tokens): word for tokens, word in prepared.stops}
        rendered.call = prepared.call
        rendered.marks = prepared.marks

    def _tokenize(self, tokenizer: Any, request: Any, args: Any) -> Any:
        """The prepared prompt; on the generation thread mlx-lm's own for what has images. May be called again."""
        prepared: PreparedPrompt | None = request.prepared
        if prepared is not None:
            return prepared.tokenized()
        place = request.image_at or "messages"
        if self.model_provider.processor is None:
            raise ValueError(f"{place}: this model takes no images")
        begin, never = beginning(tokenizer, request) if isinstance(request, ChatRequest) else ("", None)
        if never is not None:
            args.logits = replace(args.logits, logit_bias={**(args.logits.logit_bias or {}), never: NEVER})
        try:
            tokenized = super()._tokenize(tokenizer, request, args)
        except OSError as error:
            raise ValueError(f"{place}: {error}") from error
        if begin:
            tokenized = begun(tokenizer, tokenized, begin, "tool" if request.calls == "must" else "normal")
        if isinstance(request, ChatRequest):
            stops = [(list(tokenizer.encode(word, add_special_tokens=False)), word) for word in args.stop_words]
            call = (tokenizer.tool_call_start, tokenizer.tool_call_end or "") if tokenizer.has_tool_calling else ("", "")
            self._note(request, PreparedPrompt(tokenized[0], [], [], tokenized[3], stops=stops, call=call))
        return tokenized


class AgentOrder:
    """Lets the requests of an agent go on one after the other, in the order in which they came."""

    def __init__(self) -> None:
        self._last: dict[str, threading.Event] = {}
        self._changing = threading.Lock()

    @contextmanager
    def turn(self, agent: str | None) -> Iterator[threading.Event]:
        """Wait for those of the agent that came before. Setting the event lets the next one go on before the block ends.

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
