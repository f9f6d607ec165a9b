"""ServerPromptCache: the caches of one loaded model. For the engine, and for mlx-lm's sequential path in place of LRUPromptCache.

Chooses, for its model, between the pool and mlx-lm's own caches. Owned by the generation thread; `report` may be read from any.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from .. import plugins
from ..config import PoolConfig, StoreConfig
from ..engine.caches import PooledCaches
from ..engine.opening import open_pooled
from ..engine.request import Running
from ..engine.stock import GuardedPromptCache, StockCaches
from ..errors import PluginError, SpecError, StoreError
from ..kv.attach import batches_padded
from ..kv.parts import sequence_of
from ..kv.pool import BlockPool
from ..kv.slabs import KVArena, state_share
from ..memory import batch_memory
from ..prefix.lookup import Lookup
from ..prefix.retention import RetentionPolicy
from ..prefix.salts import SHARED
from ..spec import FullLayer, ModelCacheSpec
from ..store.paths import FOLDERS
from ..store.prompt_store import PromptStore
from ..store.record import Key
from ..tier.cache import TieredPrefixCache
from ..tier.opening import digests_of, open_store
from .access import without_folders
from .agents.served import ServedAgents
from .drafted import DraftedPrefix
from .models.hashing import WeightsHash
from .models.provider import BlockpoolModelProvider

log = logging.getLogger(__name__)

# So few checkpoints do not serve even a handful of agents.
FEW = 8


class ServerPromptCache:
    """The caches of one model, from open() to close(). Of `config` counts what is not its bytes: those are given to open().

    `caches`: what the engine takes; None where requests run one by one through mlx-lm. `max_tokens`: the room that the
    next fetch of such a request reserves behind its prompt; `lookup` explains it, and `salt` is what it is kept under.
    """

    def __init__(self, cli_args: Any, config: PoolConfig, store: StoreConfig | None = None) -> None:
        self.config = config
        self.store_config = store
        self.caches: PooledCaches | StockCaches | None = None
        self.prefix: TieredPrefixCache | None = None
        self.lookup: Lookup | None = None
        self.max_tokens = config.max_tokens
        self.salt = SHARED
        self.agents: ServedAgents | None = None
        self.hashing: WeightsHash | None = None
        self.report: dict[str, Any] = {"backend": None}
        self._spec: ModelCacheSpec | None = None
        self._drafted: DraftedPrefix | None = None
        self._alarmed = False
        self._cli_args = cli_args
        self._manager = plugins.make_plugin_manager()
        self._stock = GuardedPromptCache(cli_args.prompt_cache_size)

    # -- models --------------------------------------------------------------------------------------------------------

    def describe(self, provider: BlockpoolModelProvider) -> None:
        """Find out what the caches of a model are, of which no weight has to be read yet."""
        kv_bits = self._cli_args.kv_bits
        self._spec = None if kv_bits is not None else self._describe(provider.model, provider.config, provider.name)

    def check_room(self, pool_bytes: int) -> None:
        """Raises PoolExhaustedError if so many bytes are too few for the model that was described. Takes no memory."""
        if self._spec is not None:
            config = replace(self.config, preallocate=False)
            BlockPool(self._spec, pool_bytes - state_share(self._spec, pool_bytes, config), config)

    def begin_hashing(self, provider: BlockpoolModelProvider) -> None:
        """Begin to hash the weights of the model that was described, in a thread of its own, if there will be a store of it."""
        if self.store_config is not None and self._spec is not None and provider.draft_model is None:
            digests = digests_of(self.store_config)
            self.hashing = WeightsHash(provider.folder, provider.adapter_folder, provider.stamps, digests)

    def open(self, provider: BlockpoolModelProvider, pool_bytes: int) -> None:
        """Make the caches of the model that was described, which the provider has loaded."""
        spec = self._spec
        if spec is not None and provider.draft_model is not None:
            self._open_drafted(provider, spec, pool_bytes)
        elif spec is not None:
            self._open_pooled(provider, spec, pool_bytes)
        if self.prefix is None:
            most = pool_bytes if self.config.pool_bytes is not None else 1 << 63
            self._stock = GuardedPromptCache(self._cli_args.prompt_cache_size, most)
        if spec is None and provider.draft_model is None and self._cli_args.kv_bits is None:
            self.caches = StockCaches(provider.model, provider.model_key, self._stock, batches_padded(provider.model))
        log.info("%s is served with %s", provider.name, self._how())
        self.update_report()

    def close(self) -> None:
        """Let go of the model; what is not on disk yet is written first, within the store's time for it."""
        if self.hashing is not None:
            self.hashing.stop()
            self.hashing = None
        self.note_turns()
        if self.prefix is not None:
            self.prefix.close()
        if self.agents is not None:
            self.agents.close()
        self.agents = None
        self.prefix = self.caches = self.lookup = self._drafted = self._spec = None
        self._stock = GuardedPromptCache()
        self.report = {"backend": None}

    def save(self) -> Iterator[None]:
        """Hand what is not on disk yet to the store's writer, a part at a time, within the store's time for it."""
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
        """Nobody asks for anything: write behind, the ends of conversations too once they have rested."""
        self.note_turns()
        if self.prefix is not None:
            self.prefix.keep_up()
        if self.prefix is not None and self.prefix.stored is not None:
            self.prefix.stored.write_behind()

    def note_ended_turns(self) -> None:
        """note_turns() where a turn has ended since. Cheap."""
        if isinstance(self.caches, PooledCaches) and self.caches.turns:
            self.note_turns()

    def note_turns(self) -> None:
        """Agents whose turn has ended are noted, and what is pinned of them is spared."""
        if self.agents is not None and isinstance(self.caches, PooledCaches):
            turns, self.caches.turns = self.caches.turns, {}
            self.agents.follow(turns)
            if self.prefix is not None and self.prefix.stored is not None:
                self._spare(self.prefix.stored.store)

    def own_tokens(self, agent: str | None) -> list[int]:
        """The tokens of an agent's last turn as far as they are known; none of an agent that has no name."""
        if agent is None or self.agents is None or self.prefix is None:
            return []
        turns = self.caches.turns if isinstance(self.caches, PooledCaches) else {}
        path = turns.get(agent) or self.agents.path_of(agent)
        return [] if path is None else self.prefix.index.trie.find(path).token_ids()

    def _spare(self, store: PromptStore) -> None:
        """No budget takes what agents are pinned with."""
        assert self.agents is not None
        pinned = {Key(kind, digest) for digest in self.agents.pinned_hashes() for kind in FOLDERS}
        if pinned != store.pinned:
            store.pinned = pinned

    def _describe(self, model: Any, config: dict[str, Any], model_id: str) -> ModelCacheSpec | None:
        """The spec of a model; None where nobody can describe it."""
        try:
            return plugins.spec_of_model(model, config, model_id, self._manager)
        except (PluginError, SpecError) as error:
            log.warning("No pool for %s: %s", model_id, error)
            return None

    def _open_store(self, provider: BlockpoolModelProvider, spec: ModelCacheSpec) -> PromptStore | None:
        if self.store_config is None:
            return None
        adapter = provider.adapter_folder
        try:
            provider.weights_name = weights = None if self.hashing is None else self.hashing.result()
            store = open_store(self.store_config, provider.folder, adapter, spec, provider.name, weights)
            # Before the store is opened: what is pinned outlives its budget.
            self.agents = ServedAgents(provider.name, store)
            self._spare(store)
            return store
        except StoreError as error:
            log.warning("Nothing of %s is kept on disk: %s", provider.name, error)
            return None

    def _open_pooled(self, provider: BlockpoolModelProvider, spec: ModelCacheSpec, pool_bytes: int) -> None:
        store = self._open_store(provider, spec)
        try:
            self.caches = open_pooled(provider.model, spec, pool_bytes, self.config, store)
        except Exception:
            # Nobody else knows its threads.
            if store is not None:
                store.close()
            raise
        self.prefix = self.caches.prefix
        self.agents = self.agents or ServedAgents(provider.name, None)
        self.agents.attend(self.prefix)
        self._warn_of_few(self.prefix)

    def _open_drafted(self, provider: BlockpoolModelProvider, spec: ModelCacheSpec, pool_bytes: int) -> None:
        """A pool for the model and one for its draft, by what a block of each takes; mlx-lm's caches if the draft has no spec."""
        draft = self._describe(provider.draft_model, {}, Path(str(provider.model_key[2])).name)
        # What a draft got wrong is taken back, and a state cannot be.
        if draft is None or not all(isinstance(layer, FullLayer) for layer in (*spec.layers, *draft.layers)):
            return
        sizes = [sum(s.bytes_per_block(g) for g in s.groups) for s in (spec, draft)]
        own = pool_bytes * sizes[0] // sum(sizes)
        self.prefix = TieredPrefixCache(KVArena(spec, own, self.config), str(provider.model_key))
        known = TieredPrefixCache(KVArena(draft, pool_bytes - own, self.config), str(provider.model_key))
        self._drafted = DraftedPrefix(self.prefix, known)

    def _warn_of_few(self, prefix: TieredPrefixCache) -> None:
        """Where hardly a checkpoint fits, every turn would begin anew."""
        own, slabs = prefix.slabs.spec.bytes_per_checkpoint(), prefix.slabs
        room = slabs.state_bytes if slabs.state_leaves else prefix.pool.pool_bytes
        if own and room // own < FEW:
            needed = FEW * own * (1 if not slabs.state_leaves or not slabs.spec.groups else 4)
            log.warning(
                "%d checkpoints of %d bytes fit; agents will compute their prompts again. Raise --pool-bytes to %d or more.",
                room // own, own, needed,
            )  # fmt: skip

    def _how(self) -> str:
        if self._drafted is not None:
            return "pooled caches and a draft, one request at a time"
        if self.caches is None:
            return "mlx-lm's own caches, one request at a time"
        whose = "mlx-lm's own caches" if self.prefix is None else "pooled caches"
        return f"{whose}, {'ragged batches' if self.caches.ragged else 'padded batches' if self.caches.merges else 'no batches'}"

    # -- what mlx-lm's sequential path calls ---------------------------------------------------------------------------

    def fetch_nearest_cache(self, model: Any, tokens: list[int]) -> tuple[Any, list[int]]:
        """Layer caches for a prompt and the tokens left to compute, never none. On a miss of the pool: empty pooled caches."""
        if self.prefix is None:
            return self._stock.fetch_nearest_cache((model, self.salt) if self.salt else model, tokens)
        if self._drafted is not None:
            fetched = self._drafted.acquire(tokens, self.max_tokens, self.salt)
        else:
            fetched = self.prefix.acquire(tokens, self.max_tokens, salt=self.salt)
        self.lookup = fetched.lookup
        return fetched.caches, fetched.rest

    def insert_cache(self, model: Any, tokens: list[int], prompt_cache: list[Any], *, cache_type: str = "assistant") -> None:
        """Keep a finished sequence. Its blocks go back to the pool: the caches must not be used again."""
        if self.prefix is None:
            self._stock.insert_cache((model, self.salt) if self.salt else model, tokens, prompt_cache, cache_type=cache_type)
        elif self._drafted is not None:
            self._drafted.release(tokens, prompt_cache, cache_type, RetentionPolicy(salt=self.salt))
        else:
            self.prefix.release(tokens, prompt_cache, cache_type, RetentionPolicy(salt=self.salt))

    def stats_by_type(self) -> dict[str, dict[str, int]]:
        return self._stock.stats_by_type() if self.prefix is None else self.prefix.stats_by_type()

    @property
    def nbytes(self) -> int:
        return self._stock.nbytes if self.prefix is None else self.prefix.nbytes

    def __len__(self) -> int:
        return len(self._stock) if self.prefix is None else len(self.prefix)

    def release_all(self) -> None:
        """After a failure: no cache that was handed out is in use any more."""
        for prefix in (self.prefix, self._drafted.draft if self._drafted else None):
            if prefix is not None:
                prefix.release_all()

    # -- figures -------------------------------------------------------------------------------------------------------

    def capacity(self) -> int | None:
        """The most tokens that one request can have; None: no limit of ours."""
        if self._drafted is not None:
            return self._drafted.capacity()
        return None if self.prefix is None else self.prefix.pool.sequence_capacity()

    def update_report(self, batch: list[Running] | None = None, counts: Mapping[str, int] | None = None) -> None:
        """Figures for GET /v1/cache, replaced as a whole so that other threads may read them."""
        if self.prefix is None:
            report = {"backend": "mlx-lm", "sequences": len(self._stock), "known_bytes": self._stock.nbytes}
        else:
            report = self._pool_report(self.prefix)
        self._tell_alarm(report.get("alarm"))
        self.report = report | {"batch": self._batch_report(batch or []), "engine": dict(counts or {})}

    def _tell_alarm(self, alarm: str | None) -> None:
        if alarm is not None and not self._alarmed:
            log.warning("Almost nothing is reused: %s", alarm)
        self._alarmed = alarm is not None

    def _pool_report(self, prefix: TieredPrefixCache) -> dict[str, Any]:
        pool = prefix.pool
        return {
            "backend": "blockpool",
            "ragged": prefix.slabs.ragged,
            "pool_bytes": pool.pool_bytes,
            "array_bytes": prefix.slabs.nbytes,
            "known_bytes": prefix.nbytes,
            "sequences": len(prefix),
            "lookups": prefix.num_lookups,
            "prompt_tokens": prefix.num_prompt_tokens,
            "cached_tokens": prefix.num_hit_tokens,
            "known_tokens": prefix.num_known_tokens,
            "skipped": prefix.num_skipped,
            "alarm": prefix.alarm,
            "groups": [asdict(c) for c in pool.settle()],
            "fragmentation": [round(pool.fragmentation(g), 3) for g in range(len(prefix.slabs.spec.groups))],
            "decode_paths": dict(prefix.slabs.path_counts),
            "store": None if prefix.stored is None else _without_place(prefix.stored.report()),
            **prefix.retention.report(),
        }

    def _batch_report(self, batch: list[Running]) -> dict[str, Any] | None:
        """The running batch in the pool, and what it would take padded."""
        batch = [running for running in batch if running.caches and running.computed]
        if self.prefix is None or not self.prefix.slabs.ragged or not batch:
            return None
        sequences = [sequence_of(running.caches or []) for running in batch]
        tables = [sequence.tables for sequence in sequences if sequence is not None]
        held = [len({block for own in tables for block in own[g].ids}) for g in range(len(self.prefix.slabs.spec.groups))]
        return batch_memory(self.prefix.slabs.spec, [running.computed for running in batch], held).bytes.as_dict()


def _without_place(report: dict[str, Any]) -> dict[str, Any]:
    """A store's figures for clients, whom its place on this machine does not concern."""
    problem = report["problem"] and without_folders(report["problem"])
    return {name: value for name, value in report.items() if name != "folder"} | {"problem": problem}
