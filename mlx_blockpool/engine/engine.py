"""BlockPoolBatchEngine: prefill and decode of many requests over one pool.

next() is one step:

    _schedule()      admit waiting sequences; choose a chunk of prompts, or reserve the next blocks of the decoding batch,
                     preempting the youngest sequence until there is room
    chunk.run() or   one forward pass of the model
    steps.run()
    _postprocess_    cache what was computed, emit events, let sequences join or leave the batch
    _jump()          append the tokens that forms force, in one more pass

caches.py knows the pool, prefill.py and decode.py call the model. Not thread-safe: one thread owns it.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any

import mlx.core as mx
from mlx_lm.generate_utils import BatchCounters, BatchCountersSnapshot, BatchStats

from ..config import EngineConfig, KVBits
from ..errors import PoolExhaustedError
from ..kv.parts import tokens_held
from ..ranks.group import ALONE, Ranks
from ..spec import BLOCK_TOKENS
from ..system import WiredLimit
from .caches import Caches, Opened
from .decode import DecodeBatch
from .masks import Forced
from .measuring import measured
from .opening import open_caches
from .order import first_of_agents, giver, go_behind, in_turn, last, line_up
from .prefill import Chunk, Turns, prefill_ahead
from .request import KIND, Event, Failed, Progress, Request, Started, Swapped, Token
from .sequence import Sequence
from .steps import DecodeSteps
from .verify import Emitted

log = logging.getLogger(__name__)

# As mlx-lm does, and behind each chunk of prompts: buffers of sizes that do not come again would pile up.
CLEAR_STEPS = 512

# Layer caches, and the tokens that they hold.
Extracted = tuple[list[Any], list[int]]


class BlockPoolBatchEngine:
    """In place of mlx-lm's BatchGenerator: insert() requests, call next() until they are through.

    `counts`: chunks, prompt_tokens, decode_steps, tokens, of them forced_tokens, jumps, swapped_out, swapped_in, and shared: the
    requests that waited for a prefix in prefill; and those of DecodeSteps. `clock`: seconds, by which requests are due.
    """

    def __init__(
        self,
        model: Any,
        caches: Caches,
        config: EngineConfig | None = None,
        ranks: Ranks = ALONE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model = model
        self.caches = caches
        self.config = config or EngineConfig()
        self.ranks = ranks
        self.clock = clock
        self.counts: Counter[str] = Counter()
        self._work = BatchCounters()
        self._uids = 0
        self.waiting: list[Sequence] = []
        self._prefilling: list[Sequence] = []
        self.steps = DecodeSteps(self.config, caches, ranks, self.counts)
        self._batch = DecodeBatch(model, caches.merges, ranks)
        self._events: list[Event] = []
        self._may_admit = True
        self._turns = Turns(self.config)
        self._wired_limit = WiredLimit(self.config.wired_bytes)

    @classmethod
    def open(
        cls,
        model: Any,
        pool_bytes: int | None = None,
        config: EngineConfig | None = None,
        max_kv_size: int | None = None,
        bits: KVBits | None = None,
    ) -> BlockPoolBatchEngine:
        """An engine for a loaded model over a new pool: `pool_bytes`, `max_kv_size` and `bits` as in open_caches()."""
        return cls(model, measured(model, open_caches(model, pool_bytes, max_kv_size, bits), config), config)

    # -- requests ------------------------------------------------------------------------------------------------------

    def insert(self, request: Request, caches: list[Any] | None = None) -> int:
        """Take a request in. Returns its uid.

        `caches` may hold the beginning of its prompt: it is shared as a known prefix, and the caches stay the caller's. Raises
        ValueError for an empty prompt, or for caches that hold none or all of it, and RequestTooLargeError for one that does not
        fit even alone.
        """
        return self.insert_all([request], None if caches is None else [caches])[0]

    def insert_all(self, requests: Collection[Request], caches: Collection[list[Any] | None] | None = None) -> list[int]:
        """insert() of several requests: all of them, or none where one raises."""
        given = [None] * len(requests) if caches is None else list(caches)
        if len(given) != len(requests):
            raise ValueError(f"There are caches for {len(given)} requests. Give an entry, or None, for each of {len(requests)}.")
        for request, own in zip(requests, given, strict=True):
            request.check(self.caches.capacity())
            if own is not None and not 0 < (held := tokens_held(own)) < len(request.tokens):
                raise ValueError(f"The caches hold {held} of {len(request.tokens)} prompt tokens. Give the first ones, not all.")
        inserted = [Sequence(self._uids + i, request, self.clock()) for i, request in enumerate(requests, 1)]
        for sequence, own in zip(inserted, given, strict=True):
            if own is not None:
                self.caches.take_in(sequence, own)
        self._uids += len(inserted)
        self._wait(inserted)
        return [sequence.uid for sequence in inserted]

    def _wait(self, sequences: Collection[Sequence]) -> None:
        line_up(self.waiting, sequences)
        self._may_admit = True

    def cancel(self, uid: int) -> None:
        """End a request. What it computed stays cached."""
        for sequence in [each for each in self.sequences if each.uid == uid]:
            self._withdraw(sequence)
            self.waiting = [r for r in self.waiting if r is not sequence]

    def remove(self, uids: Collection[int], return_prompt_caches: bool = False) -> dict[int, Extracted]:
        """cancel() of several requests, also within a prompt. Returns extract_cache() if `return_prompt_caches`."""
        extracted = self.extract_cache(uids) if return_prompt_caches else {}
        for uid in uids:
            self.cancel(uid)
        return extracted

    def extract_cache(self, uids: Collection[int]) -> dict[int, Extracted]:
        """Copies of these requests' caches, and the tokens that they hold; empty for requests that wait."""
        waiting: dict[int, Extracted] = {each.uid: ([], []) for each in self.waiting if each.uid in uids}
        live = [each for each in self.live if each.uid in uids]
        return waiting | {each.uid: (self._batch.extract(each), each.tokens[: each.computed]) for each in live}

    @contextmanager
    def stats(self) -> Iterator[BatchStats]:
        """mlx-lm's figures of the work while the block runs."""
        stats = BatchStats()
        start = BatchCountersSnapshot(**asdict(self._work))
        try:
            yield stats
        finally:
            stats += BatchCountersSnapshot.between(start, BatchCountersSnapshot(**asdict(self._work)))

    def suspend(self) -> list[Sequence]:
        """Take all requests out, in the order of their arrival. What they computed stays cached.

        resume() takes them in again, here or in a later engine of the same model; no token is emitted twice.
        """
        suspended = sorted(self.sequences, key=lambda sequence: sequence.uid)
        for sequence in self.live:
            self._preempt(sequence)
        for sequence in self.waiting:
            self.caches.abandon(sequence)
        for sequence in suspended:
            sequence.suspend()
        self.waiting = []
        return suspended

    def resume(self, sequence: Sequence) -> int:
        """Take in a request that suspend() took out. Returns its new uid."""
        sequence.uid = self._uids = self._uids + 1
        self._wait([sequence])
        return sequence.uid

    @property
    def live(self) -> list[Sequence]:
        """The requests that have caches."""
        return [*self._prefilling, *self._batch.members]

    @property
    def sequences(self) -> list[Sequence]:
        """The requests that have not ended."""
        return [*self.live, *self.waiting]

    def __len__(self) -> int:
        return len(self.waiting) + len(self._prefilling) + len(self._batch)

    @property
    def is_blocked(self) -> bool:
        """True if next() has nothing to do before something arrives, such as a request or a record from disk."""
        return not (self.live or (self.waiting and self._may_admit) or self.caches.is_restoring)

    @property
    def progress(self) -> int:
        """Grows with all that is computed and all that comes from disk."""
        return self.counts["chunks"] + self.counts["decode_steps"] + self.caches.num_arrived

    def reset(self) -> list[int]:
        """After next() has raised: drop the live requests, whose caches cannot be trusted, and the events not returned yet.

        Where none was live, the waiting requests would meet the same error, and are dropped too. Returns all dropped uids.
        """
        lost = {event.uid for event in self._events if not isinstance(event, Swapped)}
        dropped = sorted({sequence.uid for sequence in self.live} | lost)
        if not dropped:
            dropped = [sequence.uid for sequence in self.waiting]
        self.waiting = [sequence for sequence in self.waiting if sequence.uid not in dropped]
        self._prefilling = []
        self._batch = DecodeBatch(self.model, self.caches.merges, self.ranks)
        self._events = []
        self._may_admit = True
        self.caches.release_all()
        return dropped

    def close(self) -> None:
        """Drop everything and give the wired limit back."""
        self.reset()
        self.waiting = []
        self._wired_limit.restore()

    # -- one step ------------------------------------------------------------------------------------------------------

    def next(self) -> list[Event]:
        """One step: schedule, run and postprocess a chunk of prompts, or a token of each decoding sequence.

        Returns the events of the step. Raises what the model raised: call reset() then.
        """
        chunk = self._schedule()
        start = time.perf_counter()
        if chunk is not None:
            self._postprocess_chunk(chunk, chunk.run(self.model, self.caches.ragged), time.perf_counter() - start)
        elif self._batch.members:
            emitted, failed, forced = self.steps.run(self._batch)
            self._postprocess_tokens(emitted, failed, time.perf_counter() - start)
            self._jump(forced)
        self._account(chunk is not None, time.perf_counter() - start)
        events, self._events = [*self.caches.restoring(), *self._events], []
        return events

    def _account(self, is_prefill: bool, seconds: float) -> None:
        self._turns.account(is_prefill, seconds, bool(self._prefilling and len(self._batch)))

    def _schedule(self) -> Chunk | None:
        """Admit sequences. Returns the next chunk of prompts; None: it is decode's turn, and every next token has room."""
        self._may_admit |= self.caches.advance(idle=not self.live)
        self._admit()
        decode_is_due = len(self._batch) and (self._turns.is_for_decode or self._batch.has_first_token_pending)
        if self._prefilling and not decode_is_due:
            return self._turns.next_chunk(self._prefilling, self.caches.pads_prompts)
        self._ensure_next_blocks()
        return None

    def _postprocess_chunk(self, chunk: Chunk, tokens: int, seconds: float) -> None:
        """Cache what the chunk has computed, and let the sequences whose prompts are complete join the batch."""
        mx.clear_cache()
        self.counts.update(chunks=1, prompt_tokens=tokens)
        self._work.prompt_tokens += tokens
        self._work.prompt_time += seconds
        self.caches.computed(tokens, seconds)
        for sequence, _ in chunk.rows:
            kind = sequence.breakpoints.pop(sequence.computed, None)
            if kind is not None or (self.caches.keeps_chunks and sequence.in_prefill):
                self.caches.insert(sequence, kind or KIND, sequence.computed)
                self._may_admit = True
            # The last token of a prompt is computed by the first decode step.
            self._events.append(Progress(sequence.uid, sequence.computed + (not sequence.in_prefill), len(sequence.tokens)))
            if not sequence.in_prefill:
                self._prefilling.remove(sequence)
                self._join(sequence)

    def _postprocess_tokens(self, emitted: list[Emitted], failed: dict[Sequence, Exception], seconds: float) -> None:
        """Emit tokens, and let the sequences that have ended leave the batch."""
        self.counts["decode_steps"] += 1
        self._work.decode_time += seconds
        self._work.generation_steps += 1
        if self.counts["decode_steps"] % CLEAR_STEPS == 0:
            mx.clear_cache()
        ended: list[Sequence] = list(failed)
        for sequence, token, logprobs in emitted:
            if self._emit(sequence, token, logprobs):
                ended.append(sequence)
            elif self.caches.keeps_chunks and sequence.emitted % BLOCK_TOKENS == 0:
                self.caches.insert(sequence, "assistant", sequence.emitted)
        self._batch.leave(ended)
        for sequence in ended:
            self._end(sequence, failed.get(sequence))

    def _emit(self, sequence: Sequence, token: int, logprobs: mx.array | None) -> bool:
        """Emit a token of a reply. Returns whether it is the last one."""
        reason = sequence.append_token(token)
        self._events.append(Token(sequence.uid, token, logprobs, reason))
        self.counts["tokens"] += 1
        if logprobs is None:
            self.counts["forced_tokens"] += 1
        self._work.generation_tokens += 1
        return reason is not None

    def _jump(self, forced: Forced) -> None:
        """Emit runs of forced tokens and compute them in one pass."""
        runs = self.steps.jumps(self._batch, forced)
        if not runs:
            return
        start = time.perf_counter()
        # Of a run no token is emitted behind the last one of the reply.
        ended = [sequence for sequence, run in runs.items() if any(self._emit(sequence, token, None) for token in run)]
        self._batch.leave(ended)
        for sequence in ended:
            self._end(sequence, None)
        self._batch.append({s: run for s, run in runs.items() if s not in ended}, self.caches.pads_prompts)
        self.counts["jumps"] += len(runs)
        self._work.decode_time += time.perf_counter() - start

    # -- room ----------------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Start waiting sequences in turn; one that waits for its agent or for a prefix lets others pass."""
        if not self._may_admit:
            return
        self._may_admit = False
        first = first_of_agents(self.sequences)
        for sequence in in_turn(self.waiting, self.live):
            ahead = first.get(sequence.request.agent, sequence)
            if ahead is not sequence and not sequence.is_choice_beside(ahead):
                continue
            if self._is_full and giver(sequence, self.live) is None:
                break
            if self._wait_for_prefix(sequence) or not self.caches.is_ready(sequence):
                continue
            if not self._start(sequence):
                break

    def _wait_for_prefix(self, sequence: Sequence) -> bool:
        """Mark the place up to which a live prefill is about to compute this prompt. Returns whether there is such a one."""
        found = prefill_ahead(sequence, self._prefilling, self.config.shared_tokens, self.caches.cached_tokens)
        if found is None:
            return False
        other, shared = found
        other.breakpoints.setdefault(shared, KIND)
        self.counts["shared"] += not sequence.has_waited
        sequence.has_waited = True
        return True

    def _start(self, sequence: Sequence) -> bool:
        """Give a request its caches. Returns False if it has to wait for room."""
        try:
            opened = self._open(sequence)
        except PoolExhaustedError as error:
            if self.live or self.caches.is_room_coming:
                return False
            self._fail(sequence, error)
            return True
        self.waiting.remove(sequence)
        sequence.start(opened.caches, opened.cached)
        self.steps.start(sequence)
        if sequence.preemptions:
            self.counts["swapped_in"] += 1
            self._events.append(Swapped(sequence.uid, is_in=True))
        else:
            self._events.append(Started(sequence.uid, opened.cached, opened.lookup))
        if sequence.in_prefill:
            self._prefilling.append(sequence)
        else:
            self._join(sequence)
        return True

    def _open(self, sequence: Sequence) -> Opened:
        """Caches for a sequence, for which requests with more live sequences give some up. Raises PoolExhaustedError."""
        while (giving := giver(sequence, self.live)) is not None:
            with suppress(PoolExhaustedError):
                if not self._is_full:
                    return self.caches.open(sequence, self.live)
            self._preempt(giving)
        return self.caches.open(sequence, self.live)

    @property
    def _is_full(self) -> bool:
        return len(self._prefilling) + len(self._batch) >= (self.config.max_members if self.caches.merges else 1)

    def _join(self, sequence: Sequence) -> None:
        self._batch.join(sequence)
        if not self.caches.ragged and self.caches.merges:
            # The batch has copied them.
            self.caches.discard(sequence)

    def _ensure_next_blocks(self) -> None:
        """Reserve every sequence's next block, preempting the youngest until the pool has room."""
        while self._batch.members:
            try:
                self.caches.ensure_next_blocks(self._batch.members)
                return
            except PoolExhaustedError:
                if self.caches.stop_restoring():
                    continue
                # Beside a padded batch, sequences in prefill hold no blocks that it could use.
                live = self.live if self.caches.ragged else self._batch.members
                # Also the last one: when it starts again, its own checkpoints may be evicted.
                self._preempt(last(live))

    def _preempt(self, sequence: Sequence) -> None:
        """Take its caches back and queue it in its old place. Its blocks stay cached until the pool needs them."""
        self._withdraw(sequence)
        sequence.preemptions += 1
        sequence.computed = 0
        line_up(self.waiting, [sequence])
        self.counts["swapped_out"] += 1
        self._events.append(Swapped(sequence.uid, is_in=False))

    def _withdraw(self, sequence: Sequence) -> None:
        """Take a request out of prefill or batch; what it computed stays cached."""
        if sequence in self._prefilling:
            self._prefilling.remove(sequence)
        elif sequence in self._batch.members:
            self._batch.suspend(sequence)
        self.caches.abandon(sequence)
        if sequence.caches is not None:
            self._keep(sequence)
        self._may_admit = True

    def _end(self, sequence: Sequence, error: Exception | None) -> None:
        """Finish a sequence that has left the batch."""
        self._may_admit = True
        go_behind(self.waiting, sequence, self.clock())
        if error is None:
            self.steps.end(sequence)
            self._keep(sequence)
        else:
            self.caches.discard(sequence)
            self._fail(sequence, error)

    def _keep(self, sequence: Sequence) -> None:
        """Cache what a sequence has computed and take its caches back. A failure is logged and fails no request."""
        try:
            self.caches.release(sequence, "assistant")
        except Exception:
            # The code of models and the prefix cache may raise anything, and the reply does not depend on it.
            log.exception("request %d could not be kept", sequence.uid)
            self.caches.discard(sequence)

    def _fail(self, sequence: Sequence, error: Exception) -> None:
        # Without its traceback, whose frames hold caches and with them blocks.
        self._events.append(Failed(sequence.uid, error.with_traceback(None)))
        self._may_admit = True
        self.waiting = [r for r in self.waiting if r is not sequence]
