"""BlockPoolBatchEngine: prefill and decode of many requests over one pool.

next() is one step:

    schedule()       admit waiting sequences; choose a chunk of prompts, or reserve the next blocks
                     of the decoding batch
    compute_chunk()  one forward pass of the model
    or steps.run()   with the chunk in it where the model mixes them
    _postprocess_    cache what was computed, emit events, let sequences join or leave the batch
    append_forced()  append the tokens that forms force, in one more pass

scheduler.py decides, decode.py calls the model, caches.py has the caches. Not thread-safe: one
thread owns it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import mlx.core as mx
from mlx_lm.generate_utils import BatchCounters, BatchCountersSnapshot, BatchStats

from ..config import EngineConfig, KVBits
from ..kv.prediction_head import head_of
from ..kv.prompt_cache import tokens_held
from ..model_files.device import WiredLimit
from ..spec import BLOCK_TOKENS
from .caches import Caches
from .decode import Chunk, DecodeBatch, DecodeSteps, compute_chunk
from .measuring import measured
from .opening import open_caches
from .request import KIND, Event, Progress, Request, Swapped, Token
from .sampling import Draw, Forced, draw
from .scheduler import Scheduler
from .sequence import Sequence
from .verify import Decoded

# as mlx-lm does, and after each chunk of prompts: buffers of sizes that are not used again would
# pile up
CLEAR_STEPS = 512

# Layer caches, and the tokens that they hold.
Extracted = tuple[list[Any], list[int]]


class BlockPoolBatchEngine:
    """In place of mlx-lm's BatchGenerator: insert() requests, call next() until they have ended.

    counts:        chunks, of them mixed, prompt_tokens, decode_steps, tokens, of them
                   forced_tokens, jumps, swapped_out, swapped_in, and shared:
                   the requests that waited for a prefix in prefill; and those of DecodeSteps.
    clock:         seconds, by which requests are due.
    step_seconds:  how long the last step took, by which prompts and replies share the time.
    """

    def __init__(
        self,
        model: Any,
        caches: Caches,
        config: EngineConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
        draw: Draw = draw,
    ) -> None:
        self.model = model
        self.caches = caches
        self.config = config or EngineConfig()
        self.clock = clock
        self.counts: Counter[str] = Counter()
        self.step_seconds = 0.0
        self.steps = DecodeSteps(self.config, caches, self.counts, head_of(model) is not None)
        self.scheduler = Scheduler(
            self.config, caches, DecodeBatch(model, caches.ragged, draw), self.counts, clock
        )
        self._draw = draw
        self._work = BatchCounters()
        self._uids = 0
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
        """An engine for a loaded model over a new pool: `pool_bytes`, `max_kv_size` and `bits`
        as in open_caches().
        """
        return cls(
            model,
            measured(model, open_caches(model, pool_bytes, max_kv_size, bits), config),
            config,
        )

    # -- requests ----------------------------------------------------------------------------------

    def insert(self, request: Request, caches: list[Any] | None = None) -> int:
        """Add a request. Returns its uid.

        `caches` may hold the beginning of its prompt: it is shared as a cached prefix, and the
        caches stay the caller's. Raises ValueError for an empty prompt, or for caches that hold
        none or all of it, and RequestTooLargeError for one that does not fit even alone.
        """
        return self.insert_all([request], None if caches is None else [caches])[0]

    def insert_all(
        self, requests: Collection[Request], caches: Collection[list[Any] | None] | None = None
    ) -> list[int]:
        """insert() of several requests: all of them, or none where one raises."""
        given = [None] * len(requests) if caches is None else list(caches)
        if len(given) != len(requests):
            raise ValueError(
                f"There are caches for {len(given)} requests. Give an entry, or None, for each of "
                f"{len(requests)}."
            )
        for request, own in zip(requests, given, strict=True):
            request.check(self.caches.capacity())
            if own is not None and not 0 < (held := tokens_held(own)) < len(request.tokens):
                raise ValueError(
                    f"The caches hold {held} of {len(request.tokens)} prompt tokens. Give the "
                    "first ones, not all."
                )
        inserted = [
            Sequence(self._uids + i, request, self.clock()) for i, request in enumerate(requests, 1)
        ]
        for sequence, own in zip(inserted, given, strict=True):
            if own is not None:
                self.caches.insert_given(sequence, own)
        self._uids += len(inserted)
        self.scheduler.add(inserted)
        return [sequence.uid for sequence in inserted]

    def cancel(self, uid: int) -> None:
        """End a request. What it computed stays cached."""
        for sequence in [each for each in self.sequences if each.uid == uid]:
            self.scheduler.withdraw(sequence)

    def remove(
        self, uids: Collection[int], return_prompt_caches: bool = False
    ) -> dict[int, Extracted]:
        """cancel() of several requests, also within a prompt.

        Returns extract_cache() if `return_prompt_caches`.
        """
        extracted = self.extract_cache(uids) if return_prompt_caches else {}
        for uid in uids:
            self.cancel(uid)
        return extracted

    def extract_cache(self, uids: Collection[int]) -> dict[int, Extracted]:
        """Copies of these requests' caches, and the tokens that they hold; empty for requests
        that wait.
        """
        waiting: dict[int, Extracted] = {
            each.uid: ([], []) for each in self.scheduler.waiting if each.uid in uids
        }
        live, batch = [each for each in self.live if each.uid in uids], self.scheduler.batch
        return waiting | {
            each.uid: (batch.extract(each), each.tokens[: each.computed]) for each in live
        }

    @contextmanager
    def stats(self) -> Iterator[BatchStats]:
        """mlx-lm's figures of the work while the block runs."""
        stats = BatchStats()
        start = BatchCountersSnapshot(**asdict(self._work))
        try:
            yield stats
        finally:
            stats += BatchCountersSnapshot.between(
                start, BatchCountersSnapshot(**asdict(self._work))
            )

    def suspend(self) -> list[Sequence]:
        """Remove all requests, in the order of their arrival. What they computed stays cached.

        resume() adds them again, here or to a later engine of the same model; no token is emitted
        twice.
        """
        suspended = sorted(self.sequences, key=lambda sequence: sequence.uid)
        for sequence in self.live:
            self.scheduler.preempt(sequence)
        for sequence in suspended:
            self.scheduler.withdraw(sequence)
            sequence.suspend()
        return suspended

    def resume(self, sequence: Sequence) -> int:
        """Add a request that suspend() removed. Returns its new uid."""
        sequence.uid = self._uids = self._uids + 1
        self.scheduler.add([sequence])
        return sequence.uid

    @property
    def live(self) -> list[Sequence]:
        """The requests that have caches."""
        return self.scheduler.live

    @property
    def sequences(self) -> list[Sequence]:
        """The requests that have not ended."""
        return self.scheduler.sequences

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def is_blocked(self) -> bool:
        """True if next() has nothing to do before something arrives, such as a request or a
        record from disk.
        """
        scheduler = self.scheduler
        return not (
            self.live or (scheduler.waiting and scheduler.may_admit) or self.caches.is_restoring
        )

    @property
    def progress(self) -> int:
        """Grows with all that is computed and all that comes from disk."""
        return self.counts["chunks"] + self.counts["decode_steps"] + self.caches.num_arrived

    def reset(self) -> list[int]:
        """After next() has raised: drop the live requests, whose caches cannot be trusted, and the
        events not returned yet.

        Where none was live, the waiting requests would meet the same error, and are dropped too.
        Returns all dropped uids.
        """
        scheduler = self.scheduler
        lost = {event.uid for event in scheduler.take_events() if not isinstance(event, Swapped)}
        dropped = sorted({sequence.uid for sequence in self.live} | lost)
        if not dropped:
            dropped = [sequence.uid for sequence in scheduler.waiting]
        scheduler.waiting = [
            sequence for sequence in scheduler.waiting if sequence.uid not in dropped
        ]
        scheduler.prefilling = []
        scheduler.last_steps = (0, False), (0, False)
        scheduler.batch = DecodeBatch(self.model, self.caches.ragged, self._draw)
        scheduler.may_admit = True
        self.caches.release_all()
        return dropped

    def close(self) -> None:
        """Drop everything and restore the wired limit."""
        self.reset()
        self.scheduler.waiting = []
        self._wired_limit.restore()

    # -- one step ----------------------------------------------------------------------------------

    def next(self) -> list[Event]:
        """One step: schedule, run and postprocess a chunk of prompts, or a token of each decoding
        sequence.

        Returns the events of the step. Raises what the model raised: call reset() then.
        """
        chunk = self.scheduler.schedule(self.step_seconds)
        start, batch = time.perf_counter(), self.scheduler.batch
        if chunk and not self.scheduler.mixes:
            tokens = compute_chunk(self.model, chunk, self.caches.ragged)
            self._postprocess_chunk(chunk, tokens, time.perf_counter() - start)
        elif batch.members:
            rows, tokens = len(batch.members), 0
            if chunk:
                tokens = sum(end - row.computed for row, end in chunk)
            decoded = self.steps.run(batch, chunk)
            # By rows, of which those of drafts count as decode.
            seconds = (time.perf_counter() - start) / (rows + tokens)
            self._postprocess_tokens(decoded, seconds * rows)
            if decoded.forced:
                self.append_forced(decoded.forced)
            if chunk:
                self.counts["mixed"] += 1
                self._postprocess_chunk(chunk, tokens, seconds * tokens)
        self.step_seconds = time.perf_counter() - start
        return [*self.caches.take_restore_events(), *self.scheduler.take_events()]

    def _postprocess_chunk(self, chunk: Chunk, tokens: int, seconds: float) -> None:
        """Cache what the chunk has computed, and let the sequences whose prompts are complete
        join the batch.
        """
        grid = self.config.prefill_tokens
        if any(row.computed % grid == 0 or not row.in_prefill for row, _ in chunk):
            mx.clear_cache()
        self.counts.update(chunks=1, prompt_tokens=tokens)
        self._work.prompt_tokens += tokens
        self._work.prompt_time += seconds
        self.caches.note_prefill(tokens, seconds)
        for sequence, _ in chunk:
            kind = sequence.breakpoints.pop(sequence.computed, None)
            if kind is not None or (
                self.caches.caches_chunks and sequence.in_prefill and sequence.computed % grid == 0
            ):
                self.caches.insert(sequence, kind or KIND, sequence.computed)
                self.scheduler.may_admit = True
            # The last token of a prompt is computed by the first decode step.
            self.scheduler.events.append(
                Progress(
                    sequence.uid,
                    sequence.computed + (not sequence.in_prefill),
                    len(sequence.tokens),
                )
            )
            if not sequence.in_prefill:
                self.scheduler.join(sequence)

    def _postprocess_tokens(self, decoded: Decoded, seconds: float) -> None:
        """Emit tokens, and let the sequences that have ended leave the batch."""
        self.counts["decode_steps"] += 1
        self.steps.account(seconds)
        self._work.decode_time += seconds
        self._work.generation_steps += 1
        if self.counts["decode_steps"] % CLEAR_STEPS == 0:
            mx.clear_cache()
        ended, caches_chunks = list(decoded.failed), self.caches.caches_chunks
        for sequence, token, logprobs in decoded.emitted:
            if self._emit(sequence, token, logprobs):
                ended.append(sequence)
            elif caches_chunks and sequence.emitted % BLOCK_TOKENS == 0:
                self.caches.insert(sequence, "assistant", sequence.emitted)
        if ended:
            self._finish(ended, decoded.failed)

    def _finish(self, ended: Collection[Sequence], failed: Mapping[Sequence, Exception]) -> None:
        if not ended:
            return
        for sequence in ended:
            if sequence not in failed:
                self.steps.remember_reply(sequence)
        self.scheduler.finish(ended, failed)

    def _emit(self, sequence: Sequence, token: int, logprobs: mx.array | None) -> bool:
        """Emit a token of a reply. Returns whether it is the last one."""
        reason = sequence.append_token(token)
        self.scheduler.events.append(Token(sequence.uid, token, logprobs, reason))
        self.counts["tokens"] += 1
        if logprobs is None:
            self.counts["forced_tokens"] += 1
        self._work.generation_tokens += 1
        return reason is not None

    def append_forced(self, forced: Forced) -> None:
        """Emit runs of forced tokens of members and compute them in one pass, where that pays."""
        batch = self.scheduler.batch
        runs = self.steps.jumps(batch, forced, bool(self.scheduler.prefilling))
        if not runs:
            return
        start, others_wait = time.perf_counter(), len(runs) < len(batch)
        # Stop emitting a run at the reply's last token.
        ended = [
            sequence
            for sequence, run in runs.items()
            if any(self._emit(sequence, token, None) for token in run)
        ]
        self._finish(ended, {})
        batch.append(
            {s: run for s, run in runs.items() if s not in ended}, self.caches.pads_prompts
        )
        self.counts["jumps"] += len(runs)
        self._work.decode_time += (seconds := time.perf_counter() - start)
        self.steps.account(seconds, others_wait)
