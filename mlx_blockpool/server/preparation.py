"""Prompts are prepared on the socket's thread: worker processes render and tokenize them before
a request is queued.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from mlx_lm.utils import load_config

from ..config import ImageConfig
from ..errors import BlockpoolError
from ..mlx_lm_compat import image_parts
from ..model_files.modelfile import local_folder, positions_of
from .bodies import Json
from .forms import Forms, FormTokens
from .images import check_images, processor_of
from .models.registry import ModelRegistry
from .prompts.job import PromptJob, TokenizerJob, TokenizerResult, TokenizerSource
from .prompts.workers import PromptWorkers
from .provider import ModelKey
from .request import ChatRequest, PromptRequest

log = logging.getLogger(__name__)

# Added to the logit of a token that must not be drawn; every float type has it.
NEVER = -1e4


class PromptCounted(Exception):  # noqa: N818
    """Ends a request for the length of its prompt alone: `tokens`."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        super().__init__(f"the prompt has {tokens} tokens")


@dataclass
class PromptPreparation:
    """Checks requests and fills in their prompts, for the models of `registry`.

    Any thread may call prepare().
    """

    workers: PromptWorkers
    images: ImageConfig
    registry: ModelRegistry
    forms: Forms

    def check(self, request: Any, args: Any) -> None:
        """Raises InvalidRequestError for a request that has too much of something, or gives the
        template a forbidden argument.
        """
        # A request needs pydantic, and the start of a server does not.
        from .validation import check_bounds, check_template_options

        check_bounds(request, args)
        check_template_options(args.chat_template_kwargs, self.workers.config.template_kwargs)

    def prepare(self, request: Any, args: Any) -> Any:
        """Set `request.prepared` and `request.compiled`. Returns mlx-lm's arguments, changed where
        the prompt needs it.

        `args.model` is a ModelKey. Raises PromptCounted for a request that only asks for the length
        of its prompt, ValueError for what requests may not ask for and the model cannot do,
        FormError, and what PromptWorkers.prepare() and HeldPixels.hold() raise.
        """
        job = self._job(request, args)
        is_chat_request = isinstance(request, ChatRequest)
        if any(image_parts(request.messages)):
            job.processor = processor_of(self._config(args.model))
        if job.processor is not None:
            job.image_at = request.image_at or "messages"
            self.registry.need_one_rank(job.image_at, "images")
            check_images(job.messages, job.image_at, self.images)
        elif is_chat_request and request.image_at is not None:
            raise ValueError(f"{request.image_at}: this model takes no images")
        prepared = self.workers.prepare(job)
        if job.only_count:
            raise PromptCounted(len(prepared.tokens))
        if prepared.images is not None and request.pixels is not None:
            request.pixels.hold(prepared.images, job.image_at)
        request.prepared = prepared
        if isinstance(request, PromptRequest) and request.forms:
            request.compiled = self.forms.form_for(
                request, args.model, self._form_tokens(args.model)
            )
            if request.compiled is not None:
                # A long run of forced tokens is found here, and not while other replies wait.
                request.compiled.forced()
        if prepared.never is None:
            return args
        biases = {**(args.logits.logit_bias or {}), prepared.never: NEVER}
        return replace(args, logits=replace(args.logits, logit_bias=biases))

    def convert(self, job: TokenizerJob, model: Any) -> TokenizerResult:
        """Other work for the tokenizer of the model that a request describes; `job.source` is
        filled in here.

        Raises what ModelRegistry.find() and PromptWorkers.convert() raise.
        """
        return self.workers.convert(replace(job, source=self._source(self.registry.find(model))))

    def positions(self, model: Any) -> int | None:
        """The most positions of the model that a request describes; None if no limit is known.

        Raises as ModelRegistry.find().
        """
        key = self.registry.find(model)
        served = self.registry.loaded.get(key)
        return positions_of(self._config(key)) if served is None else served.positions

    def load(self, key: ModelKey) -> None:
        """Have a worker load a model's tokenizer while the model itself is loaded."""
        try:
            self.workers.load(self._source(key))
        except (BlockpoolError, OSError, ValueError, RuntimeError) as error:
            log.debug("the tokenizer of %s is loaded with its first prompt: %s", key.model, error)

    def _form_tokens(self, key: ModelKey) -> FormTokens | None:
        served = self.registry.loaded.get(key)
        return (
            self.forms.tokens_before(key, self._source(key))
            if served is None
            else served.form_tokens
        )

    def _config(self, key: ModelKey) -> Json:
        """A model's config.json, also before the model is loaded."""
        served = self.registry.loaded.get(key)
        return load_config(local_folder(key.model)) if served is None else served.provider.config

    def _source(self, key: ModelKey) -> TokenizerSource:
        served, template = self.registry.loaded.get(key), self.registry.template
        folder = local_folder(key.model) if served is None else served.provider.folder
        return TokenizerSource(
            str(folder), template._tokenizer_config, template.cli_args.use_default_chat_template
        )

    def _job(self, request: Any, args: Any) -> PromptJob:
        served = self.registry.loaded.get(args.model)
        options = self.registry.template.cli_args.chat_template_args
        job = PromptJob(
            self._source(args.model),
            request.request_type,
            request.prompt,
            request.messages,
            request.tools,
            request.role_mapping,
            {**options, **(args.chat_template_kwargs or {})},
        )
        if served is not None:
            job.capacity, job.positions = served.capacity(), served.positions
            job.checkpoints = served.engine is None or served.engine.caches.needs_checkpoints
        if isinstance(request, PromptRequest):
            job.salt = request.options.salt
        if isinstance(request, ChatRequest):
            job.is_chat_request = True
            job.prediction = request.prediction
            job.tool_breakpoints = [
                (point.parts or 0, point.seconds) for point in request.tool_breakpoints
            ]
            job.calls, job.begin, job.holds_calls = request.calls, request.begin, bool(request.held)
            if request.only_count:
                job.capacity = job.positions = None
                job.checkpoints, job.only_count = False, True
        return job


class KeyedLock:
    """A lock for each key, which callers acquire in the order of their calls. For any thread."""

    def __init__(self) -> None:
        self._last: dict[str, threading.Event] = {}
        self._changing = threading.Lock()

    @contextmanager
    def hold(self, key: str | None) -> Iterator[None]:
        """Hold the lock of `key` once all earlier callers have released it.

        Without a key there is nothing to wait for.
        """
        if key is None:
            yield
            return
        own = threading.Event()
        with self._changing:
            before, self._last[key] = self._last.get(key), own
        if before is not None:
            before.wait()
        try:
            yield
        finally:
            with self._changing:
                if self._last[key] is own:
                    del self._last[key]
            own.set()
