"""ServedModel: one loaded model with its pool, caches and engine, and the requests that run on it.

Owned by the generation thread; what other threads may read is replaced as a whole.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx

from ..config import EngineConfig
from ..engine.engine import BlockPoolBatchEngine
from ..engine.request import KIND, Event, Failed, Progress, Request, Restoring, Started, Token
from ..mlx_lm_compat import GenerationContext, make_logits_processors
from ..modelfile import positions_of
from ..prefix.lookup import Lookup, beside
from ..prefix.salts import SHARED
from .breakpoints import pins_of
from .explained import Explained
from .models.provider import BlockpoolModelProvider, ModelKey
from .prompt_cache import ServerPromptCache
from .request import RequestOptions
from .requests import Live, Suspended, Waiting, marks_of
from .sampling import make_sampler

log = logging.getLogger(__name__)


class ServedModel:
    """A model from prepare() to close().

    `weights_bytes` of arrays, of which `read_bytes` are in memory; `pool_bytes`: what its pool may take. `engine`: None where
    requests run one by one through mlx-lm. `ready`, `used`: when it was loaded, and when a request of it started or ended last,
    in seconds of time.monotonic(). `spent`: seconds of the generation thread that its requests took, for their turns.
    """

    def __init__(
        self, key: ModelKey, provider: BlockpoolModelProvider, prompt_cache: ServerPromptCache, config: EngineConfig
    ) -> None:
        self.key = key
        self.provider = provider
        self.prompt_cache = prompt_cache
        self.engine: BlockPoolBatchEngine | None = None
        self.live: dict[int, Live] = {}
        self.vocab_size = 0
        self.weights_bytes = self.read_bytes = self.pool_bytes = 0
        self.ready = self.used = time.monotonic()
        self.spent = 0.0
        self._config = config

    # -- coming and going ----------------------------------------------------------------------------------------------

    def prepare(self, pool_bytes: int | None) -> None:
        """All that can be done before memory is taken. Raises what the model's files, mlx-lm and the pool raise."""
        self.provider.prepare(self.key)
        self.weights_bytes = sum(array.nbytes for array in self.provider.weights())
        self.prompt_cache.describe(self.provider)
        if pool_bytes is not None:
            self.prompt_cache.check_room(pool_bytes)

    def read(self, piece_bytes: int) -> Iterator[None]:
        """Take the weights into memory, a piece at a time."""
        for done in self.provider.read(piece_bytes):
            self.read_bytes = done
            yield

    def begin_hashing(self) -> None:
        """Begin to hash the weights, if the model has a store, in a thread of its own. close() stops it."""
        self.prompt_cache.begin_hashing(self.provider)

    @property
    def is_hashed(self) -> bool:
        hashing = self.prompt_cache.hashing
        return hashing is None or hashing.is_done

    @property
    def hashed_bytes(self) -> int:
        hashing = self.prompt_cache.hashing
        return 0 if hashing is None else hashing.read_bytes

    def wait_for_hash(self, seconds: float) -> None:
        """Return when the weights are hashed, or after so many seconds."""
        if self.prompt_cache.hashing is not None:
            self.prompt_cache.hashing.wait(seconds)

    def open(self, pool_bytes: int) -> None:
        """Give the model its pool and its engine: from now on it serves."""
        self.pool_bytes = pool_bytes
        self.prompt_cache.open(self.provider, pool_bytes)
        self.vocab_size = self.provider.model(mx.zeros((1, 1), mx.int32)).shape[-1]
        self.open_engine()
        mx.clear_cache()
        _trim()
        self.ready = self.used = time.monotonic()

    def open_engine(self) -> None:
        """An engine, if the model is to have one and has none."""
        caches = self.prompt_cache.caches
        if self.engine is None and caches is not None:
            self.engine = BlockPoolBatchEngine(self.provider.model, caches, self._config)

    def close_engine(self) -> None:
        if self.engine is not None:
            self.engine.close()
            self.engine = None

    def close(self) -> None:
        """Write what is not on disk yet, within the store's time for it, and give all memory back. No caches are in use."""
        self.close_engine()
        self.prompt_cache.close()
        self.provider.reset()
        # The model's classes and its layers refer to each other.
        gc.collect()
        mx.clear_cache()
        _trim()

    @property
    def positions(self) -> int | None:
        """The most tokens of a prompt and its reply that the model can place; None: no limit that is known."""
        given = self._config.max_positions
        return positions_of(self.provider.config) if given is None else given or None

    @property
    def array_bytes(self) -> int:
        """What of its pool is taken."""
        return int(self.prompt_cache.report.get("array_bytes", 0))

    # -- requests ------------------------------------------------------------------------------------------------------

    def join(self, others: Sequence[ServedModel]) -> None:
        """Take turns with those that have requests: what was not used while there were none here is gone."""
        if not self.live:
            self.spent = max(self.spent, min((other.spent for other in others if other.live), default=0.0))

    def insert(self, waiting: Waiting, machine: tuple[Any, Any]) -> None:
        """Start a request; `machine`: its stop sequences and what takes its text apart."""
        assert waiting.tokenized is not None
        assert self.engine is not None
        prompt, _, _, initial_state, _ = waiting.tokenized
        args, tokenizer = waiting.args, self.provider.tokenizer
        stop_sequences, text_sm = machine
        context = GenerationContext(
            has_tool_calling=tokenizer.has_tool_calling,
            has_thinking=tokenizer.has_thinking,
            tool_parser=tokenizer.tool_parser,
            text_sm=text_sm,
            initial_state=initial_state,
            prompt=prompt,
        )
        options = waiting.request.options
        request = Request(
            prompt,
            args.max_tokens,
            make_sampler(args, tokenizer),
            make_logits_processors(args),
            stop_sequences,
            self._marks(waiting),
            options.agent,
            noted_as=options.conversation,
            pins=pins_of(waiting.request),
            retention=options.retention,
            salt=self.salt_of(options),
        )
        uid = self.engine.insert(request)
        explained = waiting.request.explained
        if explained is not None:
            explained.salt = request.salt
        self.live[uid] = Live(waiting.queue, context, tokenizer, tokenizer.detokenizer, args.top_logprobs, explained)

    def salt_of(self, options: RequestOptions) -> bytes:
        """What a request's prefixes are known under: what its agent has imported, or else what the request says."""
        agents = self.prompt_cache.agents
        imported = SHARED if agents is None or options.agent is None else agents.salt_of_import(options.agent)
        return imported or options.salt

    def _marks(self, waiting: Waiting) -> list[tuple[int, str]]:
        """(tokens, kind) of the beginnings of a prompt that are worth a checkpoint."""
        assert waiting.tokenized is not None
        assert self.engine is not None
        _, segments, types, *_ = waiting.tokenized
        if not self.engine.caches.needs_marks:
            return marks_of(segments, types)
        pinned = {end: KIND for end, _ in pins_of(waiting.request)}
        return sorted({**pinned, **dict(waiting.request.prepared.checkpoints or ())}.items())

    def suspend(self) -> list[Suspended]:
        """Take all requests out: the model has to go."""
        running = [] if self.engine is None else self.engine.suspend()
        suspended = [Suspended(each, self.live.pop(each.uid)) for each in running if each.uid in self.live]
        assert not self.live, f"{len(self.live)} requests are not in the engine"
        return suspended

    def resume(self, suspended: Suspended) -> None:
        """Go on with a request that suspend() took out."""
        assert self.engine is not None
        self.live[self.engine.resume(suspended.running)] = suspended.live

    @property
    def is_blocked(self) -> bool:
        """Whether a step has nothing to compute before something arrives from disk."""
        return self.engine is not None and self.engine.is_blocked

    def step(self) -> bool:
        """A step of the engine, and what it says to those whom it concerns. Raises what the model raised: see fail().

        Returns whether it made progress: something was computed or read, or a request has started or ended.
        """
        engine, start = self.engine, time.perf_counter()
        assert engine is not None
        before, live = engine.progress, len(self.live)
        events = engine.next()
        for event in events:
            if event.uid not in self.live:
                # It has failed at an earlier event of this step.
                continue
            try:
                self._tell(event)
            except Exception as error:
                # A reply that cannot be put into words is one request's failure, not the batch's.
                log.exception("request %d failed", event.uid)
                self.live.pop(event.uid).fail(error)
                engine.cancel(event.uid)
        for uid in [uid for uid, live in self.live.items() if live.is_left]:
            engine.cancel(uid)
            del self.live[uid]
        self.spent += time.perf_counter() - start
        if not self.live:
            self.used = time.monotonic()
        self._note_turns()
        has_started = any(isinstance(event, Started) for event in events)
        return engine.progress != before or len(self.live) != live or has_started

    def _note_turns(self) -> None:
        """Note the turns that have ended with this step, also while other requests run."""
        try:
            self.prompt_cache.note_ended_turns()
        except Exception:
            # A turn that cannot be noted fails neither its own request, which has ended, nor the others.
            log.exception("turns of agents could not be noted")

    def _tell(self, event: Event) -> None:
        live = self.live[event.uid]
        if isinstance(event, Token):
            live.tell(event)
            if event.finish_reason is not None:
                del self.live[event.uid]
        elif isinstance(event, Progress):
            live.queue.put((event.done, event.total))
        elif isinstance(event, Started):
            self.explain(live.explained, live.context.prompt, event.cached, event.why)
            live.begin(event.cached)
        elif isinstance(event, Restoring):
            if not live.is_begun:
                # It will be so many, unless the disk fails. A client that hears nothing would give up.
                if live.explained is not None:
                    live.explained.restore(self.provider.name, len(live.context.prompt), event.total)
                live.begin(event.total)
            live.queue.put((event.done, event.total))
        elif isinstance(event, Failed):
            self.live.pop(event.uid).fail(event.error)

    def explain(self, explained: Explained | None, prompt: Sequence[int], cached: int, lookup: Lookup | None) -> None:
        """A request has its caches: why it has not more."""
        if explained is None:
            return
        agents, is_own = self.prompt_cache.agents, bool(explained.salt)
        if lookup is not None and lookup.expected and not is_own:
            lookup, is_own = beside(lookup, prompt, self.prompt_cache.own_tokens(explained.account))
        namespace = None if agents is None else agents.namespace
        explained.start(self.provider.name, namespace, self.provider.tokenizer, prompt, cached, lookup, is_own)

    def explain_alone(self, waiting: Waiting, context: GenerationContext) -> None:
        """The same for a request that mlx-lm serves."""
        explained = waiting.request.explained
        if explained is not None:
            explained.salt = self.prompt_cache.salt
        self.explain(explained, context.prompt, context.prompt_cache_count, self.prompt_cache.lookup)

    def fail(self, error: Exception) -> None:
        """Fail those whose caches cannot be trusted after an error: all that had any."""
        uids = self.engine.reset() if self.engine is not None else list(self.live)
        for live in [self.live.pop(uid) for uid in uids if uid in self.live]:
            live.fail(error)
        self.prompt_cache.release_all()
        self.report()

    def fail_all(self, error: Exception) -> None:
        """Fail all, and go on with a new engine."""
        self.close_engine()
        for live in self.live.values():
            live.fail(error)
        self.live.clear()
        self.prompt_cache.release_all()
        self.report()

    def report(self) -> None:
        """Figures for GET /v1/cache."""
        if self.engine is None:
            self.prompt_cache.update_report()
        else:
            self.prompt_cache.update_report(self.engine.live, self.engine.counts)


def _trim() -> None:
    """Give freed memory back to the system: glibc keeps arrays that are smaller than the largest freed before."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
