"""LoadedModel: one model in memory with its pool, its store and its engine, and the requests that
run on it.

Owned by the generation thread. Attributes that other threads may read, such as `report`, are
replaced as a whole.
"""

from __future__ import annotations

import gc
import logging
import math
import time
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx_lm.generate import StopSequences

from ..config import ServerConfig, StoreConfig
from ..engine.caches import PooledCaches
from ..engine.engine import BlockPoolBatchEngine
from ..engine.measuring import measured, remembering
from ..engine.opening import wrap
from ..engine.request import Event, Failed, Progress, Restoring, Started, Token
from ..engine.stock import GuardedPromptCache, StockCaches
from ..errors import FormError, MeasuringStoppedError, PluginError, StoreError
from ..kv.attach import counting
from ..kv.build import Probe, open_served
from ..kv.prediction_head import drop_head, head_of
from ..kv.probe import probe
from ..model_files.device import trim_memory
from ..model_files.modelfile import positions_of
from ..prefix.changes import AllCleared
from ..prefix.trie import PrefixRef
from ..ranks.driver import GroupDriver
from ..spec import ModelCacheSpec
from ..store.measurements import Measurements
from ..store.prompt_store import PromptStore
from ..tier.cache import TieredPrefixCache
from ..tier.opening import digests_of, open_store
from ..tier.path_facts import PathFacts
from . import model_caches as caches
from .forms import FormTokens, tokens_of
from .provider import BlockpoolModelProvider, ModelKey, WeightsHash
from .replies import Reply
from .sequential import DraftedPrefix, SequentialCache
from .served_agents import ServedAgents
from .watch.event_log import ModelEvents, publish

log = logging.getLogger(__name__)


class LoadedModel:
    """A model from prepare() to close(), with its requests.

    engine:        None if requests run one by one through mlx-lm, with `sequential` as their prompt
                   cache. driver: what its requests and steps go through: the engine itself, or what
                   shares them with other ranks.
    prefix:        None without a pool. path_facts: changes cached paths outside of requests; None
                   without agents.
    weights_bytes: of arrays, of which `read_bytes` are in memory. pool_bytes: the limit of its
    pool.
    ready, used:   when it was loaded, and when a request of it last started or ended, by
                   time.monotonic().
    idle_seconds:  how long it stays loaded without a request: the longest time in `keeps`, which
                   has one for each owner.
    ranks:         those that share the model.
    num_forwards:  of open(), which took `proof_seconds` to find out what it can do with a pool.
    num_embedding: how many requests for embeddings it serves. All other requests are in `live`.
    spent:         seconds of the generation thread that its requests took, which decide which model
                   steps next.
    report:        the figures for GET /v1/cache.
    events:        the server's log of events.
    has_met_limits: whether a reply has exceeded the limits of its grammar since the generator last
    reset this.
    measurements:  what is remembered of its speed and of what it was proven to do.
    """

    path_facts_type = PathFacts

    def __init__(
        self,
        key: ModelKey,
        provider: BlockpoolModelProvider,
        config: ServerConfig,
        events: ModelEvents,
        measurements: Measurements,
    ) -> None:
        self.key = key
        self.provider = provider
        self.ranks = provider.ranks
        self.events = events
        self.engine: BlockPoolBatchEngine | None = None
        self.driver: BlockPoolBatchEngine | GroupDriver | None = None
        self.caches: PooledCaches | StockCaches | None = None
        self.prefix: TieredPrefixCache | None = None
        self.sequential = SequentialCache(GuardedPromptCache(provider.cli_args.prompt_cache_size))
        self.agents: ServedAgents | None = None
        self.path_facts: PathFacts | None = None
        self.live: dict[int, Reply] = {}
        self.num_embedding = 0
        self.weights_bytes = self.read_bytes = self.pool_bytes = 0
        self.ready = self.used = time.monotonic()
        self.num_forwards, self.proof_seconds = 0, 0.0
        self.keeps: dict[str | None, float] = {}
        self.idle_seconds = math.inf
        self.spent = 0.0
        self.report: dict[str, Any] = {"backend": None}
        self.has_met_limits = False
        self._config, self._measurements = config, measurements
        self._spec: ModelCacheSpec | None = None
        self._no_pool = ""
        self._drafted: DraftedPrefix | None = None
        self.hashing: WeightsHash | None = None
        self._alarmed = False

    # -- coming and going --------------------------------------------------------------------------

    def prepare(self, pool_bytes: int | None) -> None:
        """Take the steps that need no memory. Raises what the model's files and mlx-lm raise.

        Raises PoolExhaustedError if `pool_bytes` are too few.
        """
        provider = self.provider
        provider.prepare(self.key)
        if self._config.engine.drafts == "off" or provider.draft_model is not None:
            drop_head(provider.model)
        self._spec, self._no_pool = caches.describe(provider.model, provider.config, provider.name)
        if self._spec is None:
            drop_head(provider.model)
        caches.leave_out_draft(provider, self._spec)
        self.weights_bytes = sum(array.nbytes for array in provider.weights())
        if pool_bytes is not None and self._spec is not None:
            caches.need_room(provider, self._spec, pool_bytes, self._config.pool)

    def read(self, piece_bytes: int) -> Iterator[None]:
        """Read the weights into memory, a piece at a time."""
        for done in self.provider.read(piece_bytes):
            self.read_bytes = done
            yield

    @property
    def may_have_pool(self) -> bool:
        return self._spec is not None

    def begin_hashing(self) -> WeightsHash | None:
        """Begin to hash the weights in a thread, if the model will have a store. close() stops
        it.
        """
        provider, config = self.provider, self._config.store
        if config is not None and self.may_have_pool and provider.draft_model is None:
            adapter = None if self.key.adapter is None else Path(self.key.adapter)
            self.hashing = WeightsHash(
                provider.folder, adapter, provider.stamps, digests_of(config)
            )
        return self.hashing

    def open(self, pool_bytes: int) -> None:
        """Open the pool and the engine: from now on the model serves."""
        self.pool_bytes = pool_bytes
        with counting(self.provider.model) as passes:
            self._open_caches(pool_bytes)
        self.num_forwards = len(passes)
        log.info("%s is served with %s", self.provider.name, self.how)
        self.open_engine()
        if self.prefix is not None:
            publish(self.prefix.index, self.events)
            self.events.counts.paths = self.prefix.arena.decode.path_counts
        self.update_report()
        mx.clear_cache()
        trim_memory()
        self.ready = self.used = time.monotonic()

    def _open_caches(self, pool_bytes: int) -> None:
        provider, spec, config = self.provider, self._spec, self._config.pool
        stock, no_pool = self.sequential.stock, self._no_pool
        if spec is not None and provider.draft_model is not None:
            self._drafted = caches.open_drafted(provider, spec, pool_bytes, config)
            self.prefix = None if self._drafted is None else self._drafted.prefix
        elif spec is not None:
            try:
                self._open_pooled(spec, pool_bytes)
            except PluginError as error:
                log.warning("No pool for %s: %s", provider.name, error)
                spec, no_pool = None, str(error)
        if self.prefix is None:
            most = pool_bytes if config.pool_bytes is not None else 1 << 63
            stock = GuardedPromptCache(provider.cli_args.prompt_cache_size, most)
        if config.bits is not None and (spec is None or provider.draft_model is not None):
            why = "it has no pool" if spec is None else "it runs with a draft model"
            log.warning(
                "%s: %s. Keys and values stay as the model computes them, and --kv-bits is not "
                "used.",
                provider.name,
                why,
            )
        if spec is None and provider.draft_model is None:
            self.caches = StockCaches(provider.model, provider.model_key, stock, no_pool)
        self.sequential = SequentialCache(stock, self._drafted or self.prefix, config.max_tokens)

    def _open_pooled(self, spec: ModelCacheSpec, pool_bytes: int) -> None:
        provider, ranks, config = self.provider, self.ranks, self._config.store
        weights, found = "", cast(Probe, probe)
        if self.hashing is not None:
            try:
                weights = self.hashing.result()
            except StoreError as error:
                log.warning("%s is served without a prompt store: %s", provider.name, error)
        if weights and ranks.decides:
            found = remembering(self._measurements, weights, self.provider.name)
        start = time.monotonic()
        arena = open_served(
            self.provider.model, spec, pool_bytes, self._config.pool, self.ranks, found
        )
        self.proof_seconds = time.monotonic() - start
        store = None
        if config is not None and ranks.least([bool(weights)])[0]:
            adapter, spec = provider.adapter_folder, arena.spec
            store = open_store(
                config, provider.folder, adapter, spec, provider.name, weights, ranks
            )
        # Before the store is opened, so that its budget spares the records of pinned agents.
        self._open_agents(store)
        try:
            opened = wrap(arena, self._config.pool, store, self.ranks)
            self.caches = self._with_costs(opened)
        except Exception:
            # Nothing else refers to the store's threads.
            if store is not None:
                store.close()
            raise
        self.prefix = self.caches.prefix
        self.path_facts = self.path_facts_type(self.prefix)
        if self.agents is not None:
            self.agents.attend(self.path_facts)
        caches.warn_of_few_checkpoints(self.prefix)

    def _with_costs(self, caches: PooledCaches) -> PooledCaches:
        """The caches with the figures that are remembered: nothing is measured here."""
        provider, config = self.provider, self._config.engine
        return measured(
            provider.model, caches, config, self._measurements, provider.name, _stop_measuring
        )

    def _open_agents(self, store: PromptStore | None) -> None:
        self.agents = ServedAgents(self.provider.name, store)

    @property
    def how(self) -> str:
        """How the model is served, for the log."""
        if self._drafted is not None:
            return "pooled caches and a draft, one request at a time"
        if self.caches is None:
            return "mlx-lm's own caches, one request at a time"
        bits = None if self.prefix is None else self.prefix.arena.spec.bits
        whose = (
            "mlx-lm's own caches"
            if self.prefix is None
            else "pooled caches"
            if bits is None
            else f"pooled caches, {bits}"
        )
        head = "" if head_of(self.provider.model) is None else ", a prediction head"
        batches = "ragged batches" if self.caches.ragged else "one request at a time"
        return f"{whose}, {batches}{head}"

    def open_engine(self) -> None:
        """Open an engine, unless one is open or the model runs without."""
        if self.engine is None and self.caches is not None:
            self.driver = self.engine = BlockPoolBatchEngine(
                self.provider.model, self.caches, self._config.engine
            )

    def close_engine(self) -> None:
        if self.engine is not None:
            self.engine.close()
            self.engine = self.driver = None

    def close(self) -> None:
        """Write all that is not on disk yet, within the store's time to flush, and free all memory.

        No caches are in use.
        """
        config = self._config.store or StoreConfig()
        until = time.monotonic() + config.flush_seconds
        self.close_engine()
        if self.hashing is not None:
            self.hashing.stop()
            self.hashing = None
        self.note_turns()
        if self.prefix is not None:
            self.prefix.close()
            self.events.append(AllCleared())
        if self.agents is not None:
            self.agents.close(max(0.0, until - time.monotonic()))
        if self.path_facts is not None:
            self.path_facts.close()
        self.path_facts = self.agents = self.prefix = self.caches = self._drafted = self._spec = (
            None
        )
        self.sequential.close()
        self.report = {"backend": None}
        self.provider.reset()
        # The model's classes and its layers refer to each other.
        gc.collect()
        mx.clear_cache()
        trim_memory()

    @property
    def is_busy(self) -> bool:
        """Return whether it serves requests."""
        return bool(self.live or self.num_embedding)

    @cached_property
    def vocab_size(self) -> int:
        """The tokens that the model has logits of, by a forward pass that is not evaluated."""
        return int(self.provider.model(mx.zeros((1, 1), mx.int32)).shape[-1])

    @cached_property
    def form_tokens(self) -> FormTokens | None:
        """What structured outputs need of its tokenizer, read for the first request with a form,
        on its socket's thread; None if it supports none.
        """
        return tokens_of(self.provider.tokenizer, self.provider.name)

    @property
    def positions(self) -> int | None:
        """The most positions of a prompt and its reply. None if no limit is known."""
        given = self._config.engine.max_positions
        return positions_of(self.provider.config) if given is None else given or None

    def capacity(self) -> int | None:
        """The most tokens of one request in the pool; None without a pool."""
        if self._drafted is not None:
            return self._drafted.capacity()
        return None if self.prefix is None else self.prefix.pool.sequence_capacity()

    @property
    def max_tokens(self) -> int | None:
        """The most tokens of one request, by its positions and the pool; None without a limit."""
        limits = [limit for limit in (self.capacity(), self.positions) if limit is not None]
        return min(limits, default=None)

    @property
    def array_bytes(self) -> int:
        """Bytes that the pool has allocated."""
        return int(self.report.get("array_bytes", 0))

    # -- the store and the agents ------------------------------------------------------------------

    def save(self) -> Iterator[None]:
        """Queue what is not on disk yet for the store's writer, a part at a time, within the
        store's time to flush.
        """
        if self.prefix is not None:
            self.note_turns()
            yield from self.prefix.stored.write_out()

    def idle(self) -> None:
        """Write to disk while no request runs, after some time also the partial blocks at the
        ends of conversations.
        """
        self.note_turns()
        if self.prefix is not None:
            self.prefix.keep_up()
            self.prefix.stored.write_behind()

    def note_turns(self) -> None:
        """Note the agents whose turns have ended."""
        if isinstance(self.caches, PooledCaches):
            turns, self.caches.turns = self.caches.turns, {}
            if self.agents is not None:
                self.agents.follow(turns)

    def _note_ended_turns(self) -> None:
        """Note the turns that have ended with this step, also while other requests run."""
        try:
            if isinstance(self.caches, PooledCaches) and self.caches.turns:
                self.note_turns()
        except Exception:
            # The turn's own request has ended, and the others continue.
            log.exception("turns of agents could not be noted")

    def last_turn(self, agent: str | None) -> PrefixRef | None:
        """The path of an agent's last turn. None for an agent without a name."""
        if agent is None or self.agents is None or self.prefix is None:
            return None
        turns = self.caches.turns if isinstance(self.caches, PooledCaches) else {}
        return turns.get(agent) or self.agents.path_of(agent)

    # -- requests ----------------------------------------------------------------------------------

    def join(self, others: Sequence[LoadedModel]) -> None:
        """Share the thread with the busy models from now on.

        Time in which the model was idle does not count in its favour.
        """
        if not self.live:
            self.spent = max(
                self.spent, min((other.spent for other in others if other.live), default=0.0)
            )

    def insert(self, reply: Reply, stop: StopSequences, text_sm: Any) -> None:
        """Start a request. `text_sm`: mlx-lm's state machine for the parts of its reply."""
        assert self.driver is not None
        assert self.caches is not None
        salt = reply.request.options.salt
        request = reply.start(
            self.provider.tokenizer, text_sm, stop, self.caches.needs_checkpoints, salt
        )
        self.live[self.driver.insert(request)] = reply

    def suspend(self) -> list[Reply]:
        """Remove all requests, because the model is unloaded."""
        suspended = []
        for sequence in [] if self.driver is None else self.driver.suspend():
            if sequence.uid in self.live:
                suspended.append(self.live.pop(sequence.uid))
                suspended[-1].sequence = sequence
                suspended[-1].watch.suspended()
        assert not self.live, f"{len(self.live)} requests are not in the engine"
        return suspended

    def resume(self, reply: Reply) -> None:
        """Continue a request that suspend() removed."""
        assert self.driver is not None
        assert reply.sequence is not None
        self.live[self.driver.resume(reply.sequence)] = reply
        reply.sequence = None

    @property
    def is_blocked(self) -> bool:
        """Return whether a step can compute nothing before a read from disk ends."""
        return self.driver is not None and self.driver.is_blocked

    def step(self) -> bool:
        """Run a step of the engine and deliver its events. Raises what the model raised: call
        fail() then.

        Returns whether it made progress: something was computed or read, or a request has started
        or ended.
        """
        engine, driver, start = self.engine, self.driver, time.perf_counter()
        assert engine is not None
        assert driver is not None
        before, live = engine.progress, len(self.live)
        events = driver.next()
        for event in events:
            self.deliver(event)
        for uid in [uid for uid, live in self.live.items() if live.is_left]:
            driver.cancel(uid)
            self.live.pop(uid).leave()
        seconds = time.perf_counter() - start
        self.spent += seconds
        self.events.counts.count_step(engine.counts, seconds)
        if not self.live:
            self.used = time.monotonic()
        self._note_ended_turns()
        has_started = any(isinstance(event, Started) for event in events)
        return engine.progress != before or len(self.live) != live or has_started

    def deliver(self, event: Event) -> None:
        """Put an event of the engine on the queue of its request, if that has not failed with an
        earlier one.
        """
        if event.uid not in self.live:
            return
        reply = self.live[event.uid]
        try:
            if isinstance(event, Token):
                if event.finish_reason is not None:
                    del self.live[event.uid]  # before its client may see the end
                reply.emit(event)
                reply.watch.token(event.finish_reason, is_forced=event.logprobs is None)
            elif isinstance(event, Progress):
                reply.put((event.done, event.total))
                reply.watch.progress(event.done, event.total)
            elif isinstance(event, Started):
                reply.started(self, event.cached, event.why)
            elif isinstance(event, Restoring):
                if not reply.is_begun:
                    # event.total tokens unless the disk fails. A client that receives nothing would
                    # give up.
                    if reply.explained is not None:
                        tokens = len(reply.request.prepared.tokens)
                        reply.explained.restore(self.provider.name, tokens, event.total)
                    reply.begin(event.total)
                reply.put((event.done, event.total))
            elif isinstance(event, Failed):
                self.has_met_limits |= isinstance(event.error, FormError)
                del self.live[event.uid]
                reply.fail(event.error)
            else:
                reply.watch.follow(event)
        except Exception as error:
            # A reply that cannot be detokenized fails its request, and not the batch.
            log.exception("request %d failed", event.uid)
            if self.driver is not None:
                self.driver.cancel(event.uid)
            self.live.pop(event.uid, None)
            reply.fail(error)

    def fail(self, error: Exception) -> None:
        """Fail the requests that have caches, which cannot be trusted after an error; without an
        engine all requests.
        """
        uids = self.driver.reset() if self.driver is not None else list(self.live)
        for live in [self.live.pop(uid) for uid in uids if uid in self.live]:
            live.fail(error)
        for prefix in (self.prefix, self._drafted.draft if self._drafted else None):
            if prefix is not None:
                prefix.release_all()
        self.update_report()

    def fail_all(self, error: Exception) -> None:
        """Fail all requests; the next one opens a new engine."""
        self.close_engine()
        self.fail(error)

    def update_report(self) -> None:
        """Replace the figures for GET /v1/cache."""
        differs = [] if self.caches is None else list(self.caches.capabilities.differs)
        self.report = caches.report(self.prefix, self.sequential.stock, self.engine)
        self.report["differs"] = differs
        alarm = self.report.get("alarm")
        if alarm is not None and not self._alarmed:
            log.warning("Almost nothing is reused: %s", alarm)
        self._alarmed = alarm is not None


def _stop_measuring() -> None:
    raise MeasuringStoppedError
