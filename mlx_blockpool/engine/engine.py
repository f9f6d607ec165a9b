"""BlockPoolBatchEngine: prefill and decode of many requests over one pool.

Decides who starts, whose blocks make room for whom, and what is computed next; caches.py knows the pool, prefill.py and decode.py
call the model. Not thread-safe: one thread owns it.
"""

from __future__ import annotations

import copy
import logging
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import mlx.core as mx
from mlx_lm.generate_utils import BatchCounters, BatchCountersSnapshot, BatchStats
from mlx_lm.utils import maybe_set_recommended_wired_limit

from ..config import EngineConfig
from ..errors import PoolExhaustedError, RequestTooLargeError
from ..kv.parts import tokens_held
from ..spec import BLOCK_TOKENS
from .caches import PooledCaches
from .decode import DecodeBatch
from .opening import open_caches
from .prefill import choose, chunk_end, compute, still_shared
from .request import KIND, Event, Failed, Progress, Request, Running, Started, Token
from .stock import StockCaches

log = logging.getLogger(__name__)

# As mlx-lm does: buffers of sizes that do not come again would pile up.
CLEAR_STEPS = 512

# Layer caches, and the tokens that they hold.
Extracted = tuple[list[Any], list[int]]


def _wire(n_bytes: int | None) -> int | None:
    """Let Metal wire so many bytes; None: what the device recommends, as mlx-lm does, 0: leave the limit alone.

    Returns the limit before, for whoever sets it back; None: nothing was set.
    """
    if n_bytes is None:
        previous: int | None = maybe_set_recommended_wired_limit()
        return previous
    if n_bytes == 0 or not mx.metal.is_available():
        return None
    return int(mx.set_wired_limit(n_bytes))


class BlockPoolBatchEngine:
    """In place of mlx-lm's BatchGenerator: insert() requests, call next() until they are through.

    `counts` says what happened: chunks, prompt_tokens, decode_steps, tokens, swapped_out, swapped_in, and shared: the requests
    that waited for a prefix in prefill.
    """

    def __init__(self, model: Any, caches: PooledCaches | StockCaches, config: EngineConfig | None = None) -> None:
        self.model = model
        self.caches = caches
        self.config = config or EngineConfig()
        self.counts: Counter[str] = Counter()
        self._work = BatchCounters()
        self._uids = 0
        self._waiting: list[Running] = []
        self._prefilling: list[Running] = []
        self._batch = DecodeBatch(model, caches.merges)
        self._events: list[Event] = []
        self._may_admit = True
        self._owed_to_decode = 0.0
        self._long_first = False
        self._wired_limit = _wire(self.config.wired_bytes)

    @classmethod
    def open(
        cls, model: Any, pool_bytes: int | None = None, config: EngineConfig | None = None, max_kv_size: int | None = None
    ) -> BlockPoolBatchEngine:
        """An engine for a loaded model over a new pool, `pool_bytes` at most (default: half of what the model leaves free).

        `max_kv_size`: what mlx-lm's BatchGenerator means by it.
        """
        return cls(model, open_caches(model, pool_bytes, max_kv_size), config)

    # -- requests ------------------------------------------------------------------------------------------------------

    def insert(self, request: Request, caches: list[Any] | None = None) -> int:
        """Take a request in. Returns its uid.

        `caches` may hold the beginning of its prompt: it is shared as a known prefix, and the caches stay the caller's. Raises
        ValueError for an empty prompt, or for caches that hold none or all of it, and RequestTooLargeError for one that does not
        fit even alone.
        """
        return self.insert_all([request], None if caches is None else [caches])[0]

    def insert_all(self, requests: Sequence[Request], caches: Sequence[list[Any] | None] | None = None) -> list[int]:
        """insert() of several requests: all of them, or none where one raises."""
        given = [None] * len(requests) if caches is None else list(caches)
        if len(given) != len(requests):
            raise ValueError(f"Found caches for {len(given)} requests; needed one entry for each of {len(requests)}, or None.")
        for request, own in zip(requests, given, strict=True):
            self._check(request, own)
        inserted = [Running(self._uids + i, request) for i, request in enumerate(requests, 1)]
        for running, own in zip(inserted, given, strict=True):
            if own is not None:
                self.caches.take_in(running, own)
        self._uids += len(inserted)
        self._waiting += inserted
        self._may_admit = True
        return [running.uid for running in inserted]

    def _check(self, request: Request, caches: list[Any] | None) -> None:
        capacity = self.caches.capacity()
        if not request.tokens or request.max_tokens < 1:
            found = f"{len(request.tokens)} prompt tokens and max_tokens {request.max_tokens}"
            raise ValueError(f"Found {found}; needed at least one of each.")
        if capacity is not None and len(request.tokens) + request.max_tokens > capacity:
            raise RequestTooLargeError(len(request.tokens) + request.max_tokens, capacity)
        held = 1 if caches is None else tokens_held(caches)
        if caches is not None and not 0 < held < len(request.tokens):
            total = len(request.tokens)
            raise ValueError(f"The given caches hold {held} tokens; needed the first of the {total} prompt tokens and not all.")

    def cancel(self, uid: int) -> None:
        """End a request. What was computed of it stays known."""
        for running in [r for r in (*self._waiting, *self.live) if r.uid == uid]:
            self._withdraw(running)
            self._waiting = [r for r in self._waiting if r is not running]

    def remove(self, uids: Collection[int], return_prompt_caches: bool = False) -> dict[int, Extracted]:
        """cancel() of several requests, also in the middle of a prompt. Returns what extract_cache() does, if it is asked for."""
        extracted = self.extract_cache(uids) if return_prompt_caches else {}
        for uid in uids:
            self.cancel(uid)
        return extracted

    def extract_cache(self, uids: Collection[int]) -> dict[int, Extracted]:
        """Caches of these requests, which go on by themselves, and the tokens that they hold; none of those that wait."""
        found: dict[int, Extracted] = {running.uid: ([], []) for running in self._waiting}
        for running in self.live:
            if running.uid in uids:
                in_batch = running in self._batch.members
                caches = self._batch.extract(running) if in_batch else copy.deepcopy(running.caches or [])
                found[running.uid] = (caches, running.tokens[: running.computed])
        return {uid: extracted for uid, extracted in found.items() if uid in uids}

    @contextmanager
    def stats(self) -> Iterator[BatchStats]:
        """mlx-lm's figures of the work while the block runs."""
        stats = BatchStats()
        start = BatchCountersSnapshot(**asdict(self._work))
        try:
            yield stats
        finally:
            stats += BatchCountersSnapshot.between(start, BatchCountersSnapshot(**asdict(self._work)))

    def suspend(self) -> list[Running]:
        """Take all requests out, in the order of their arrival. What was computed of them stays known.

        resume() takes them in again, here or in a later engine of the same model; nothing is told twice.
        """
        suspended = sorted([*self._waiting, *self.live], key=lambda running: running.uid)
        for running in self.live:
            self._swap_out(running)
        for running in self._waiting:
            self.caches.abandon(running)
        self._waiting = []
        return suspended

    def resume(self, running: Running) -> int:
        """Take in a request that suspend() took out. Returns its new uid."""
        self._uids += 1
        running.uid = self._uids
        self._waiting.append(running)
        self._may_admit = True
        return running.uid

    @property
    def live(self) -> list[Running]:
        """The requests that have caches."""
        return [*self._prefilling, *self._batch.members]

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def __len__(self) -> int:
        """Requests that have not ended."""
        return len(self._waiting) + len(self._prefilling) + len(self._batch)

    @property
    def is_blocked(self) -> bool:
        """Whether next() has nothing to do before something arrives from elsewhere, such as what others bring back from disk."""
        return not (self.live or (self._waiting and self._may_admit) or self.caches.is_restoring)

    @property
    def progress(self) -> int:
        """Grows with all that is computed and all that comes from disk."""
        return self.counts["chunks"] + self.counts["decode_steps"] + self.caches.num_arrived

    def reset(self) -> list[int]:
        """After next() has raised: drop the live requests, whose caches cannot be trusted, and what was not told yet.

        Where none was live, those that wait would meet the same error, and go too. Returns the uids of all that have ended.
        """
        dropped = sorted({running.uid for running in self.live} | {event.uid for event in self._events})
        if not dropped:
            dropped = [running.uid for running in self._waiting]
        self._waiting = [running for running in self._waiting if running.uid not in dropped]
        self._prefilling = []
        self._batch = DecodeBatch(self.model, self.caches.merges)
        self._events = []
        self._may_admit = True
        self.caches.release_all()
        return dropped

    def close(self) -> None:
        """Drop everything and give the wired limit back."""
        self.reset()
        self._waiting = []
        if self._wired_limit is not None:
            mx.synchronize()
            mx.set_wired_limit(self._wired_limit)
            self._wired_limit = None

    # -- one step ------------------------------------------------------------------------------------------------------

    def next(self) -> list[Event]:
        """Start whom there is room for, then compute one chunk of a prefill or one token of each sequence.

        Where both wait, decode gets `decode_share` of the time. Returns what there is to tell; raises what the model raised.
        """
        self._may_admit |= self.caches.advance(idle=not self.live)
        self._admit()
        start = time.perf_counter()
        share = self.config.decode_share
        if self._prefilling and not (len(self._batch) and (self._owed_to_decode > 0 or self._batch.has_new)):
            self._prefill()
            if len(self._batch):
                self._owed_to_decode += (time.perf_counter() - start) * share / (1 - share)
        elif len(self._batch):
            self._decode()
            self._owed_to_decode -= time.perf_counter() - start
        if not (self._prefilling and len(self._batch)):
            self._owed_to_decode = 0.0
        events, self._events = [*self._events, *self.caches.restoring()], []
        return events

    def _prefill(self) -> None:
        config = self.config
        rows = config.prefill_rows if self.caches.pads_prompts else 1
        chosen = choose(self._prefilling, config.prefill_tokens, rows, self._long_first)
        ends = [chunk_end(running, config.prefill_tokens) for running in chosen]
        self._long_first = len(chosen) > 1 or ends[0] == chosen[0].prefill_end
        tokens, seconds = compute(self.model, chosen, ends, self.caches.ragged)
        self.counts.update(chunks=1, prompt_tokens=tokens)
        self._work.prompt_tokens += tokens
        self._work.prompt_time += seconds
        self.caches.computed(tokens, seconds)
        for running in chosen:
            kind = running.marks.pop(running.computed, None)
            if kind is not None or (self.caches.keeps_chunks and running.in_prefill):
                self.caches.insert(running, kind or KIND)
                self._may_admit = True
            self._events.append(Progress(running.uid, running.computed + (not running.in_prefill), len(running.tokens)))
            if not running.in_prefill:
                self._prefilling.remove(running)
                self._join(running)

    def _decode(self) -> None:
        self._ensure_next_blocks()
        if not self._batch.members:
            return
        start = time.perf_counter()
        stepped = self._batch.step()
        self._work.decode_time += time.perf_counter() - start
        self._work.generation_steps += 1
        self._work.generation_tokens += len(stepped.told)
        self.counts["decode_steps"] += 1
        self.counts["tokens"] += len(stepped.told)
        if self.counts["decode_steps"] % CLEAR_STEPS == 0:
            mx.clear_cache()
        failed = {running.uid: error for running, error in stepped.failed}
        ended = [running for running, _ in stepped.failed]
        for running, token, logprobs in stepped.told:
            if running.uid in failed:
                continue
            reason = running.tell(token)
            self._events.append(Token(running.uid, token, logprobs, reason))
            if reason is not None:
                ended.append(running)
            elif self.caches.keeps_chunks and running.computed % BLOCK_TOKENS == 0:
                self.caches.insert(running, "assistant")
        self._batch.leave(ended)
        for running in ended:
            self._end(running, failed.get(running.uid))

    # -- room ----------------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Start waiting requests, first come first served; who waits for its agent or for a prefix lets others pass."""
        if not self._may_admit:
            return
        self._may_admit = False
        busy = {running.request.agent for running in self.live} - {None}
        most = self.config.max_members if self.caches.merges else 1
        for running in list(self._waiting):
            if len(self._prefilling) + len(self._batch) >= most:
                break
            agent = running.request.agent
            if agent in busy:
                continue
            if agent is not None:
                busy.add(agent)
            if self._waits_for_prefix(running) or not self.caches.is_ready(running):
                continue
            if not self._start(running):
                break

    def _waits_for_prefix(self, running: Running) -> bool:
        """Whether a live prefill is about to compute much of this prompt; that one is to keep it where they part."""
        least = self.config.shared_tokens
        ahead = [(still_shared(running, other), other) for other in self._prefilling]
        for shared, other in ahead:
            if shared >= least and (
                shared in other.marks or shared - self.caches.known(running.tokens, running.terms.salt) >= least
            ):
                other.marks.setdefault(shared, KIND)
                self.counts["shared"] += not running.has_waited
                running.has_waited = True
                return True
        return False

    def _start(self, running: Running) -> bool:
        """Give a request its caches. Returns False if it has to wait for room."""
        try:
            opened = self.caches.open(running, self.live)
        except PoolExhaustedError as error:
            if self.live or self.caches.is_room_coming:
                return False
            self._fail(running, error)
            return True
        self._waiting.remove(running)
        running.caches, running.computed = opened.caches, opened.cached
        if running.swaps:
            self.counts["swapped_in"] += 1
        else:
            self._events.append(Started(running.uid, opened.cached, opened.lookup))
        if running.in_prefill:
            self._prefilling.append(running)
        else:
            self._join(running)
        return True

    def _join(self, running: Running) -> None:
        self._batch.join(running)
        if not self.caches.ragged and self.caches.merges:
            # The batch has copied them.
            self.caches.discard(running)

    def _ensure_next_blocks(self) -> None:
        """Blocks for the next token of everybody: of the youngest, where there are not enough."""
        while self._batch.members:
            try:
                self.caches.ensure_next_blocks(self._batch.members)
                return
            except PoolExhaustedError:
                # A padded batch has nothing from those that are not in it.
                live = self.live if self.caches.ragged else self._batch.members
                # Also the only one: it may find room where it starts anew, as bytes in its own checkpoints.
                if not self.caches.stop_restoring():
                    self._swap_out(max(live, key=lambda running: running.uid))

    def _swap_out(self, running: Running) -> None:
        """Its blocks stay known as long as nobody needs them; the request waits in its old place."""
        self._withdraw(running)
        running.swaps += 1
        running.computed = 0
        self._waiting.append(running)
        self._waiting.sort(key=lambda waiting: waiting.uid)
        self.counts["swapped_out"] += 1

    def _withdraw(self, running: Running) -> None:
        """Take a request out of prefill or batch; what was computed of it stays known."""
        if running in self._prefilling:
            self._prefilling.remove(running)
        elif running in self._batch.members:
            self._batch.suspend(running)
        self.caches.abandon(running)
        if running.caches is not None:
            self._keep(running)
        self._may_admit = True

    def _end(self, running: Running, error: Exception | None) -> None:
        """A request that has left the batch is through."""
        self._may_admit = True
        if error is not None:
            self.caches.discard(running)
            self._fail(running, error)
            return
        self._keep(running)

    def _keep(self, running: Running) -> None:
        """Take the caches of a request back, with what was computed. If it cannot be kept, no request fails for that."""
        try:
            self.caches.release(running, "assistant")
        except Exception:
            # The code of models and the prefix cache may raise anything, and the reply does not depend on it.
            log.exception("request %d could not be kept", running.uid)
            self.caches.discard(running)

    def _fail(self, running: Running, error: Exception) -> None:
        # Without its traceback, whose frames hold caches and with them blocks.
        self._events.append(Failed(running.uid, error.with_traceback(None)))
        self._may_admit = True
        self._waiting = [r for r in self._waiting if r is not running]
