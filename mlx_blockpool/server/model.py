"""LoadedModel: one model in memory with its pool, its store and its engine, and the requests that run on it.

Owned by the generation thread. Attributes that other threads may read, such as `report`, are replaced as a whole.
"""

from __future__ import annotations

import gc
import logging
import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.generate import StopSequences

from ..config import ServerConfig, StoreConfig
from ..engine.caches import PooledCaches
from ..engine.engine import BlockPoolBatchEngine
from ..engine.opening import open_arena, open_pooled
from ..engine.request import Event, Failed, Progress, Restoring, Started, Token
from ..engine.stock import GuardedPromptCache, StockCaches
from ..errors import StoreError
from ..kv.attach import batches_padded
from ..modelfile import positions_of
from ..prefix.changes import AllCleared
from ..prefix.lookup import Lookup, beside
from ..prefix.salts import SHARED, is_of_one_client
from ..prefix.trie import PrefixRef
from ..spec import ModelCacheSpec
from ..store.paths import FOLDERS
from ..store.prompt_store import PromptStore
from ..store.record import Key
from ..system import trim_memory
from ..tier.cache import TieredPrefixCache
from ..tier.opening import digests_of, open_store
from .agents.served import ServedAgents
from .live.log import ModelEvents
from .live.snapshot import publish
from .models import caches
from .models.provider import BlockpoolModelProvider, ModelKey, WeightsHash
from .replies import Reply
from .request import RequestOptions
from .sequential import DraftedPrefix, SequentialCache

log = logging.getLogger(__name__)


class LoadedModel:
    """A model from prepare() to close().

    engine:        None if requests run one by one through mlx-lm, with `sequential` as their prompt cache.
    prefix:        None without a pool.
    weights_bytes: of arrays, of which `read_bytes` are in memory. pool_bytes: the limit of its pool.
    ready, used:   when it was loaded, and when a request of it last started or ended, by time.monotonic().
    idle_seconds:  how long it stays loaded without a request.
    num_embedding: how many requests for embeddings it serves; `live` has the others.
    spent:         seconds of the generation thread that its requests took, which decide which model steps next.
    report:        the figures for GET /v1/cache.
    events:        the server's log of events.
    """

    def __init__(self, key: ModelKey, provider: BlockpoolModelProvider, config: ServerConfig, events: ModelEvents) -> None:
        self.key = key
        self.provider = provider
        self.events = events
        self.engine: BlockPoolBatchEngine | None = None
        self.caches: PooledCaches | StockCaches | None = None
        self.prefix: TieredPrefixCache | None = None
        self.sequential = SequentialCache(GuardedPromptCache(provider.cli_args.prompt_cache_size))
        self.agents: ServedAgents | None = None
        self.live: dict[int, Reply] = {}
        self.num_embedding = 0
        self.vocab_size = 0
        self.weights_bytes = self.read_bytes = self.pool_bytes = 0
        self.ready = self.used = time.monotonic()
        self.idle_seconds = math.inf
        self.spent = 0.0
        self.report: dict[str, Any] = {"backend": None}
        self._config = config
        self._spec: ModelCacheSpec | None = None
        self._drafted: DraftedPrefix | None = None
        self.hashing: WeightsHash | None = None
        self._alarmed = False

    # -- coming and going ----------------------------------------------------------------------------------------------

    def prepare(self, pool_bytes: int | None) -> None:
        """Take the steps that need no memory. Raises what the model's files and mlx-lm raise.

        Raises PoolExhaustedError if `pool_bytes` are too few for this model.
        """
        provider = self.provider
        provider.prepare(self.key)
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

    def begin_hashing(self) -> WeightsHash | None:
        """Begin to hash the weights in a thread, if the model will have a store. close() stops it."""
        provider, config = self.provider, self._config.store
        if config is not None and self._spec is not None and provider.draft_model is None:
            self.hashing = WeightsHash(provider.folder, provider.adapter_folder, provider.stamps, digests_of(config))
        return self.hashing

    def open(self, pool_bytes: int) -> None:
        """Open the pool and the engine: from now on the model serves."""
        self.pool_bytes = pool_bytes
        self._open_caches(pool_bytes)
        log.info("%s is served with %s", self.provider.name, self.how)
        self.vocab_size = self.provider.model(mx.zeros((1, 1), mx.int32)).shape[-1]
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
        arena = open_arena(self.provider.model, spec, pool_bytes, self._config.pool)
        store = self._open_store(arena.spec)
        try:
            self.caches = open_pooled(self.provider.model, arena, pool_bytes, self._config.pool, store)
        except Exception:
            # Nothing else refers to the store's threads.
            if store is not None:
                store.close()
            raise
        self.prefix = self.caches.prefix
        self.agents = self.agents or ServedAgents(self.provider.name, None)
        self.agents.attend(self.prefix)
        caches.warn_of_few_checkpoints(self.prefix)

    def _open_store(self, spec: ModelCacheSpec) -> PromptStore | None:
        provider = self.provider
        if self._config.store is None:
            return None
        try:
            provider.weights_name = weights = None if self.hashing is None else self.hashing.result()
            store = open_store(self._config.store, provider.folder, provider.adapter_folder, spec, provider.name, weights)
            # Before the store is opened, so that its budget spares pinned records.
            self.agents = ServedAgents(provider.name, store)
            self._spare_pinned(store)
            return store
        except StoreError as error:
            log.warning("Nothing of %s is kept on disk: %s", provider.name, error)
            return None

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
            self.engine = BlockPoolBatchEngine(self.provider.model, self.caches, self._config.engine)

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
        self.agents = self.prefix = self.caches = self._drafted = self._spec = None
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
        """Note the agents whose turns have ended, and have the store spare their pinned records."""
        if self.agents is not None and isinstance(self.caches, PooledCaches):
            turns, self.caches.turns = self.caches.turns, {}
            self.agents.follow(turns)
            if self.prefix is not None and self.prefix.stored is not None:
                self._spare_pinned(self.prefix.stored.store)

    def _note_ended_turns(self) -> None:
        """Note the turns that have ended with this step, also while other requests run."""
        try:
            if isinstance(self.caches, PooledCaches) and self.caches.turns:
                self.note_turns()
        except Exception:
            # The turn's own request has ended, and the others continue.
            log.exception("turns of agents could not be noted")

    def _spare_pinned(self, store: PromptStore) -> None:
        """Have the store's budget spare the records of pinned agents."""
        assert self.agents is not None
        pinned = {Key(kind, digest) for digest in self.agents.pinned_hashes() for kind in FOLDERS}
        if pinned != store.pinned:
            store.pinned = pinned

    def _last_turn(self, agent: str | None) -> PrefixRef | None:
        """The path of an agent's last turn; None of an agent without a name."""
        if agent is None or self.agents is None or self.prefix is None:
            return None
        turns = self.caches.turns if isinstance(self.caches, PooledCaches) else {}
        return turns.get(agent) or self.agents.path_of(agent)

    def _tokens_of(self, path: PrefixRef) -> list[int]:
        """The cached tokens of a path."""
        return [] if self.prefix is None else self.prefix.index.trie.find(path).token_ids()

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
            if event.uid not in self.live:
                # It has failed with an earlier event of this step.
                continue
            try:
                self._deliver(event)
            except Exception as error:
                # A reply whose text cannot be made fails one request, not the batch.
                log.exception("request %d failed", event.uid)
                engine.cancel(event.uid)
                self.live.pop(event.uid).fail(error)
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

    def _deliver(self, event: Event) -> None:
        """Put an event of the engine on the queue of its request."""
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
            self.live.pop(event.uid).fail(event.error)
        reply.watch.follow(event)

    def explain(self, reply: Reply, cached: int, lookup: Lookup | None) -> None:
        """Explain the cached tokens of a request that has its caches."""
        explained, prompt = reply.explained, reply.request.prepared.tokens
        if explained is None:
            return
        agents, is_own, last = self.agents, is_of_one_client(explained.salt), self._last_turn(explained.noted_as)
        explained.is_salted_anew = last is not None and last.salt != explained.salt
        if lookup is not None and lookup.expected and not is_own:
            own = [] if last is None or explained.is_salted_anew else self._tokens_of(last)
            lookup, is_own = beside(lookup, prompt, own)
        namespace = None if agents is None else agents.namespace
        explained.start(self.provider.name, namespace, self.provider.tokenizer, prompt, cached, lookup, is_own)

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
        """Fail all requests; the next one opens a new engine."""
        self.close_engine()
        self.fail(error)

    def update_report(self) -> None:
        """Replace the figures for GET /v1/cache."""
        stock, engine = self.sequential.stock, self.engine
        if self.prefix is None:
            report: dict[str, Any] = {"backend": "mlx-lm", "sequences": len(stock), "known_bytes": stock.nbytes}
        else:
            report = caches.pool_report(self.prefix)
        alarm = report.get("alarm")
        if alarm is not None and not self._alarmed:
            log.warning("Almost nothing is reused: %s", alarm)
        self._alarmed = alarm is not None
        live, counts = ([], Counter[str]()) if engine is None else (engine.live, engine.counts)
        self.report = report | {"batch": caches.batch_report(self.prefix, live), "engine": dict(counts)}
