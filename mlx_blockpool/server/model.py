"""LoadedModel: one model in memory with its pool, its store and its engine, and the requests that run on it.

Owned by the generation thread. Attributes that other threads may read, such as `report`, are replaced as a whole.
"""

from __future__ import annotations

import gc
import logging
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.generate import StopSequences

from ..config import ServerConfig, StoreConfig
from ..engine.caches import PooledCaches
from ..engine.engine import BlockPoolBatchEngine
from ..engine.opening import open_arena, open_pooled
from ..engine.ranked import RankedEngine
from ..engine.request import Event, Failed, Progress, Restoring, Started, Token
from ..engine.sequence import Sequence as Suspended
from ..engine.stock import GuardedPromptCache, StockCaches
from ..errors import FormError
from ..kv.attach import batches_padded
from ..modelfile import positions_of
from ..prefix.changes import AllCleared
from ..prefix.lookup import Lookup
from ..prefix.salts import SHARED
from ..prefix.trie import PrefixRef
from ..ranks.head import TurnClock
from ..spec import ModelCacheSpec
from ..system import trim_memory
from ..tier.cache import TieredPrefixCache
from ..tier.opening import digests_of
from ..tier.path_acts import PathActs
from .agents.served import ServedAgents
from .explain import explain_hit
from .forms import FormTokens, tokens_of
from .live.log import ModelEvents
from .live.snapshot import publish
from .models import caches
from .models.provider import BlockpoolModelProvider, ModelKey, WeightsHash
from .models.speeds import ModelSpeeds
from .replies import Reply
from .request import RequestOptions
from .sequential import DraftedPrefix, SequentialCache

log = logging.getLogger(__name__)


class LoadedModel:
    """A model from prepare() to close().

    engine:        None if requests run one by one through mlx-lm, with `sequential` as their prompt cache.
    prefix:        None without a pool. acts: what is done to its paths beside requests; None without agents.
    weights_bytes: of arrays, of which `read_bytes` are in memory. pool_bytes: the limit of its pool.
    ready, used:   when it was loaded, and when a request of it last started or ended, by time.monotonic().
    idle_seconds:  how long it stays loaded without a request.
    ranks, number: those that share the model, and its number among their loads. `suspended`: requests from before an unload.
    num_embedding: how many requests for embeddings it serves; `live` has the others.
    spent:         seconds of the generation thread that its requests took, which decide which model steps next.
    report:        the figures for GET /v1/cache.
    events:        the server's log of events.
    form_tokens:   what forms need of its tokenizer; None: its replies keep no forms.
    has_met_limits: whether a reply has met the limits of its form, since the generator has last set it back.
    """

    def __init__(
        self, key: ModelKey, provider: BlockpoolModelProvider, config: ServerConfig, events: ModelEvents, speeds: ModelSpeeds
    ) -> None:
        self.key = key
        self.provider = provider
        self.ranks, self.number, self.clock = provider.ranks, -1, TurnClock()
        self.suspended: dict[int, Suspended] = {}
        self.events = events
        self.engine: BlockPoolBatchEngine | None = None
        self.caches: PooledCaches | StockCaches | None = None
        self.prefix: TieredPrefixCache | None = None
        self.sequential = SequentialCache(GuardedPromptCache(provider.cli_args.prompt_cache_size))
        self.agents: ServedAgents | None = None
        self.acts: PathActs | None = None
        self.live: dict[int, Reply] = {}
        self.num_embedding = 0
        self.vocab_size = 0
        self.weights_bytes = self.read_bytes = self.pool_bytes = 0
        self.ready = self.used = time.monotonic()
        self.idle_seconds = math.inf
        self.spent = 0.0
        self.report: dict[str, Any] = {"backend": None}
        self.form_tokens: FormTokens | None = None
        self.has_met_limits = False
        self._config, self._speeds = config, speeds
        self._spec: ModelCacheSpec | None = None
        self._drafted: DraftedPrefix | None = None
        self.hashing: WeightsHash | None = None
        self._alarmed = False

    # -- coming and going ----------------------------------------------------------------------------------------------

    def prepare(self, pool_bytes: int | None) -> None:
        """Take the steps that need no memory. Raises what the model's files and mlx-lm raise.

        Raises PoolExhaustedError if `pool_bytes` are too few for a model that one rank has to itself.
        """
        provider = self.provider
        provider.prepare(self.key)
        if self.ranks.size > 1:
            return
        self._spec = caches.describe(provider.model, provider.config, provider.name)
        caches.leave_out_draft(provider, self._spec)
        self.weights_bytes = sum(array.nbytes for array in provider.weights())
        if pool_bytes is not None and self._spec is not None:
            caches.need_room(provider, self._spec, pool_bytes, self._config.pool)

    def read(self, piece_bytes: int) -> Iterator[None]:
        """Read the weights into memory, a piece at a time."""
        for done in self.provider.read(piece_bytes):
            self.read_bytes = done
            yield

    def load_share(self) -> None:
        """Load this rank's share of the model, by itself. Raises what the model's files and mlx-lm raise."""
        self.provider.load_share(self.key)
        self.weights_bytes = self.read_bytes = sum(array.nbytes for array in self.provider.weights())

    def begin_hashing(self) -> WeightsHash | None:
        """Begin to hash the weights in a thread, if the model will have a store. close() stops it."""
        provider, config = self.provider, self._config.store
        if config is not None and (self._spec is not None or self.ranks.size > 1) and provider.draft_model is None:
            adapter = None if self.key.adapter is None else Path(self.key.adapter)
            self.hashing = WeightsHash(provider.folder, adapter, provider.stamps, digests_of(config))
        return self.hashing

    def open(self, pool_bytes: int) -> None:
        """Open the pool and the engine: from now on the model serves."""
        self.pool_bytes = pool_bytes
        if self.ranks.size > 1:
            self._spec = caches.describe_share(self.provider.model, self.ranks)
        self._open_caches(pool_bytes)
        log.info("%s is served with %s", self.provider.name, self.how)
        self.vocab_size = self.provider.model(mx.zeros((1, 1), mx.int32)).shape[-1]
        self.form_tokens = tokens_of(self.provider.tokenizer, self.provider.name)
        self.open_engine()
        if self.prefix is not None:
            publish(self.prefix.index, self.events)
            self.events.tally.paths = self.prefix.arena.decode.path_counts
        self.update_report()
        mx.clear_cache()
        trim_memory()
        self.ready = self.used = time.monotonic()

    def _open_caches(self, pool_bytes: int) -> None:
        provider, spec, config = self.provider, self._spec, self._config.pool
        stock = self.sequential.stock
        if spec is not None and provider.draft_model is not None:
            self._drafted = caches.open_drafted(provider, spec, pool_bytes, config)
            self.prefix = None if self._drafted is None else self._drafted.prefix
        elif spec is not None:
            self._open_pooled(spec, pool_bytes)
        if self.prefix is None:
            most = pool_bytes if config.pool_bytes is not None else 1 << 63
            stock = GuardedPromptCache(provider.cli_args.prompt_cache_size, most)
        if config.bits is not None and (spec is None or provider.draft_model is not None):
            why = "it has no pool" if spec is None else "it runs with a draft model"
            log.warning("%s: %s. Keys and values stay as the model computes them, and --kv-bits is not used.", provider.name, why)
        if spec is None and provider.draft_model is None:
            self.caches = StockCaches(provider.model, provider.model_key, stock, batches_padded(provider.model))
        self.sequential = SequentialCache(stock, self._drafted or self.prefix, config.max_tokens)

    def _open_pooled(self, spec: ModelCacheSpec, pool_bytes: int) -> None:
        arena = open_arena(self.provider.model, spec, pool_bytes, self._config.pool, self.ranks)
        store = caches.store_of(self.provider, self._config.store, arena.spec, self.hashing)
        if self.ranks.rank == 0:
            # Before the store is opened, so that its budget spares the records of pinned agents.
            self.agents = ServedAgents(self.provider.name, store)
        try:
            opened = open_pooled(self.provider.model, arena, pool_bytes, self._config.pool, store, self.ranks)
            self.caches = self._speeds.at_load(self, opened)
        except Exception:
            # Nothing else refers to the store's threads.
            if store is not None:
                store.close()
            raise
        self.caches.sources = caches.draft_sources(self.provider, self._config.engine)
        self.prefix = self.caches.prefix
        self.acts = PathActs(self.prefix, self.ranks)
        if self.agents is not None:
            self.agents.attend(self.acts)
        caches.warn_of_few_checkpoints(self.prefix)

    @property
    def how(self) -> str:
        """How the model is served, in words."""
        if self._drafted is not None:
            return "pooled caches and a draft, one request at a time"
        if self.caches is None:
            return "mlx-lm's own caches, one request at a time"
        bits = None if self.prefix is None else self.prefix.arena.spec.bits
        whose = "mlx-lm's own caches" if self.prefix is None else "pooled caches" if bits is None else f"pooled caches, {bits}"
        return f"{whose}, {'ragged batches' if self.caches.ragged else 'padded batches' if self.caches.merges else 'no batches'}"

    def open_engine(self) -> None:
        """Open an engine, if the model runs with one and has none."""
        if self.engine is None and self.caches is not None:
            model, config = self.provider.model, self._config.engine
            if self.ranks.size == 1 or isinstance(self.caches, StockCaches):
                self.engine = BlockPoolBatchEngine(model, self.caches, config)
            else:
                self.engine = RankedEngine(model, self.caches, config, self.ranks, self.clock, self.suspended)

    def close_engine(self) -> None:
        if self.engine is not None:
            self.engine.close()
            self.engine = None

    def close(self) -> None:
        """Write all that is not on disk yet, within the store's time to flush, and free all memory. No caches are in use."""
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
        if self.acts is not None:
            self.acts.close()
        self.acts = self.agents = self.prefix = self.caches = self._drafted = self._spec = None
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

    @property
    def positions(self) -> int | None:
        """The most positions of a prompt and its reply; None: no known limit."""
        given = self._config.engine.max_positions
        return positions_of(self.provider.config) if given is None else given or None

    def capacity(self) -> int | None:
        """The most tokens of one request in the pool; None without a pool."""
        if self._drafted is not None:
            return self._drafted.capacity()
        return None if self.prefix is None else self.prefix.pool.sequence_capacity()

    @property
    def array_bytes(self) -> int:
        """Bytes that the pool has allocated."""
        return int(self.report.get("array_bytes", 0))

    # -- the store and the agents --------------------------------------------------------------------------------------

    def save(self) -> Iterator[None]:
        """Queue what is not on disk yet for the store's writer, a part at a time, within the store's time to flush."""
        stored = None if self.prefix is None else self.prefix.stored
        if stored is None:
            return
        self.note_turns()
        until = time.monotonic() + stored.store.config.flush_seconds
        while any(stored.report()[what] for what in ("pending", "resting", "queued_bytes")) and time.monotonic() < until:
            if stored.store.problem is not None:
                return
            stored.write_behind(at_once=True)
            yield

    def idle(self) -> None:
        """Write behind while no request runs, after a while also the partial blocks at the ends of conversations."""
        self.note_turns()
        if self.prefix is not None:
            self.prefix.keep_up()
            if self.prefix.stored is not None:
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
        """The path of an agent's last turn; None of an agent without a name."""
        if agent is None or self.agents is None or self.prefix is None:
            return None
        turns = self.caches.turns if isinstance(self.caches, PooledCaches) else {}
        return turns.get(agent) or self.agents.path_of(agent)

    # -- requests ------------------------------------------------------------------------------------------------------

    def join(self, others: Sequence[LoadedModel]) -> None:
        """Take turns with the busy models from now on; an idle model saves up no turns."""
        if not self.live:
            self.spent = max(self.spent, min((other.spent for other in others if other.live), default=0.0))

    def insert(self, reply: Reply, stop: StopSequences, text_sm: Any) -> None:
        """Start a request. `text_sm`: mlx-lm's state machine for the parts of its reply."""
        assert self.engine is not None
        salt = self.salt_of(reply.request.options)
        request = reply.start(self.provider.tokenizer, text_sm, stop, self.engine.caches.needs_checkpoints, salt)
        self.live[self.engine.insert(request)] = reply
        if reply.explained is not None:
            reply.explained.salt = salt

    def salt_of(self, options: RequestOptions) -> bytes:
        """The salt of a request's prefixes: the one that the client has named, that of its agent's import, or else its key's."""
        if options.cache_salt is not None:
            return options.salt
        agents = self.agents
        imported = SHARED if agents is None or options.agent is None else agents.salt_of_import(options.agent)
        return imported or options.salt

    def suspend(self) -> list[Reply]:
        """Remove all requests, because the model is unloaded."""
        suspended = []
        for sequence in [] if self.engine is None else self.engine.suspend():
            if sequence.uid in self.live:
                suspended.append(self.live.pop(sequence.uid))
                suspended[-1].sequence = sequence
                suspended[-1].watch.suspended()
        assert not self.live, f"{len(self.live)} requests are not in the engine"
        return suspended

    def resume(self, reply: Reply) -> None:
        """Continue a request that suspend() removed."""
        assert self.engine is not None
        assert reply.sequence is not None
        self.live[self.engine.resume(reply.sequence)] = reply
        reply.sequence = None

    @property
    def is_blocked(self) -> bool:
        """Return whether a step can compute nothing before a read from disk ends."""
        return self.engine is not None and self.engine.is_blocked

    def step(self) -> bool:
        """Run a step of the engine and deliver its events. Raises what the model raised: call fail() then.

        Returns whether it made progress: something was computed or read, or a request has started or ended.
        """
        engine, start = self.engine, time.perf_counter()
        assert engine is not None
        before, live = engine.progress, len(self.live)
        events = engine.next()
        for event in events:
            self.deliver(event)
        for uid in [uid for uid, live in self.live.items() if live.is_left]:
            engine.cancel(uid)
            self.live.pop(uid).leave()
        seconds = time.perf_counter() - start
        self.spent += seconds
        self.events.tally.stepped(engine.counts, seconds)
        if not self.live:
            self.used = time.monotonic()
        self._note_ended_turns()
        has_started = any(isinstance(event, Started) for event in events)
        return engine.progress != before or len(self.live) != live or has_started

    def deliver(self, event: Event) -> None:
        """Put an event of the engine on the queue of its request, if that has not failed with an earlier one."""
        if event.uid not in self.live:
            return
        try:
            reply = self.live[event.uid]
            if isinstance(event, Token):
                reply.emit(event)
                if event.finish_reason is not None:
                    del self.live[event.uid]
            elif isinstance(event, Progress):
                reply.put((event.done, event.total))
            elif isinstance(event, Started):
                self.explain(reply, event.cached, event.why)
                reply.begin(event.cached)
            elif isinstance(event, Restoring):
                if not reply.is_begun:
                    # So many tokens unless the disk fails. A client that receives nothing would give up.
                    if reply.explained is not None:
                        tokens = len(reply.request.prepared.tokens)
                        reply.explained.restore(self.provider.name, tokens, event.total)
                    reply.begin(event.total)
                reply.put((event.done, event.total))
            elif isinstance(event, Failed):
                self.has_met_limits |= isinstance(event.error, FormError)
                self.live.pop(event.uid).fail(event.error)
            reply.watch.follow(event)
        except Exception as error:
            # A reply whose text cannot be made fails one request, not the batch.
            log.exception("request %d failed", event.uid)
            if self.engine is not None:
                self.engine.cancel(event.uid)
            self.live.pop(event.uid).fail(error)

    def explain(self, reply: Reply, cached: int, lookup: Lookup | None) -> None:
        """Explain the cached tokens of a request that has its caches."""
        if reply.explained is not None:
            explain_hit(self, reply.explained, reply.request.prepared.tokens, cached, lookup)

    def fail(self, error: Exception) -> None:
        """Fail the requests that have caches, which cannot be trusted after an error; without an engine all requests."""
        uids = self.engine.reset() if self.engine is not None else list(self.live)
        for live in [self.live.pop(uid) for uid in uids if uid in self.live]:
            live.fail(error)
        for prefix in (self.prefix, self._drafted.draft if self._drafted else None):
            if prefix is not None:
                prefix.release_all()
        self.update_report()

    def fail_all(self, error: Exception) -> None:
        """Fail all requests; the next one opens a new engine, or has that of all ranks, which cancel these."""
        if self.ranks.size > 1 and self.engine is not None:
            for uid in list(self.live):
                self.engine.cancel(uid)
                self.live.pop(uid).fail(error)
            return
        self.close_engine()
        self.fail(error)

    def update_report(self) -> None:
        """Replace the figures for GET /v1/cache."""
        self.report = caches.report(self.prefix, self.sequential.stock, self.engine)
        alarm = self.report.get("alarm")
        if alarm is not None and not self._alarmed:
            log.warning("Almost nothing is reused: %s", alarm)
        self._alarmed = alarm is not None
