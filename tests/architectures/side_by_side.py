"""Several sequences in one engine, with blocks as the model computes them and in 8 bits,
compared with each by itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlx_blockpool.config import EngineConfig, KVBits, PoolConfig
from mlx_blockpool.engine.caches import PooledCaches
from mlx_blockpool.engine.engine import BlockPoolBatchEngine
from mlx_blockpool.engine.opening import wrap
from mlx_blockpool.engine.request import Failed, Request, Started, Token
from mlx_blockpool.kv.attach import detach
from mlx_blockpool.kv.build import open_served
from mlx_blockpool.kv.proof import cut, distance
from mlx_blockpool.testing import ConformanceError, NotCheckedError, Subject
from mlx_blockpool.testing.runs import HINT, allowed, cold

CHUNK = 64
# Attention over several runs of blocks sums in another order.
TOLERANCE = 1e-4
# Sums in another order now and then move a quantised number by a whole step.
QUANTISED_TOLERANCE = 1e-2
BITS = KVBits()
AROUND = 64


def side_by_side(subject: Subject, bits: KVBits | None = None) -> str:
    """Sequences of several lengths decode together as each does by itself; one joins late,
    others leave, one is resumed.
    """
    n_bytes = 2 * subject.pool_bytes
    arena = open_served(subject.model, subject.spec, n_bytes, PoolConfig(bits=bits))
    if arena.spec.bits != bits:
        detach(subject.model)
        raise NotCheckedError(
            "The model's attention does not read quantised blocks: the server stores its keys and "
            "values unquantised."
        )
    caches = wrap(arena)
    engine = BlockPoolBatchEngine(subject.model, caches, EngineConfig(prefill_tokens=CHUNK))
    try:
        reach = max([AROUND, *subject.short_sizes])
        requests = _Requests(subject, engine, bits)
        requests.insert(subject.tokens(1, reach + 13), 16)
        requests.insert(subject.tokens(2, 9), 5)
        requests.insert(subject.tokens(3, reach - 3), 11)
        leaves = requests.insert(subject.tokens(4, 30), 40)
        requests.step(until=leaves, count=4)
        requests.insert(subject.tokens(5, 41), 8)
        requests.step(until=leaves, count=7)
        engine.cancel(leaves)
        known = [*requests.prompts[leaves], *(token for token, _ in requests.emitted[leaves])]
        back = requests.insert([*known, *subject.tokens(6, 12)], 6)
        requests.step()
        if requests.cached[back] < len(known) - 1:
            found = f"{requests.cached[back]} cached tokens of a cancelled request"
            raise ConformanceError(found, f"at least {len(known) - 1}", HINT)
        gap = max(map(requests.compare, requests.prompts))
    finally:
        engine.close()
        detach(subject.model)
    return (
        f"{len(requests.prompts)} sequences, {_how(caches)}; within {gap:.0e} of the largest "
        "logprob"
    )


class _Requests:
    """Requests in an engine over blocks of `bits`, by uid, with the events that it emitted for
    them.
    """

    def __init__(self, subject: Subject, engine: BlockPoolBatchEngine, bits: KVBits | None) -> None:
        self.subject = subject
        self.engine = engine
        self.bits = bits
        self.prompts: dict[int, list[int]] = {}
        self.emitted: dict[int, list[tuple[int, mx.array]]] = {}
        self.cached: dict[int, int] = {}

    def insert(self, tokens: Sequence[int], count: int) -> int:
        uid = self.engine.insert(Request(list(tokens), count))
        self.prompts[uid], self.emitted[uid] = list(tokens), []
        return uid

    def step(self, until: int | None = None, count: int = 0) -> None:
        """Step until the request `until` has received `count` tokens, or until all requests have
        ended.
        """
        while len(self.engine) and (until is None or len(self.emitted[until]) < count):
            for event in self.engine.next():
                if isinstance(event, Failed):
                    raise event.error
                if isinstance(event, Token):
                    assert event.logprobs is not None, (
                        "a request without a form has a token that was not drawn"
                    )
                    self.emitted[event.uid].append((event.token, event.logprobs))
                elif isinstance(event, Started):
                    self.cached[event.uid] = event.cached

    def compare(self, uid: int) -> float:
        """The distance of a request's logprobs from those that it gets by itself on mlx-lm's
        caches. Raises ConformanceError.
        """
        prompt, emitted = self.prompts[uid], self.emitted[uid]
        ends = [self.cached[uid], *range(CHUNK, len(prompt) - 1, CHUNK)]
        parts = [*cut(prompt[:-1], ends), prompt[-1:], *([token] for token, _ in emitted[:-1])]
        tolerance = TOLERANCE if self.bits is None else QUANTISED_TOLERANCE
        tolerance = allowed(self.subject, cut(prompt, [*ends, len(prompt) - 1]), tolerance)
        alone = cold(self.subject, parts, self.bits)[len(parts) - len(emitted) :]
        needed = [row - mx.logsumexp(row) for row in alone]
        apart = distance(needed, [row.astype(mx.float32) for _, row in emitted])
        for step, gap in enumerate(apart):
            if not gap <= tolerance:
                found = (
                    f"logprobs of step {step} after a prompt of {len(prompt)} tokens that differ "
                    f"by {gap:.1e}"
                )
                raise ConformanceError(
                    f"{found} in a batch",
                    f"at most {tolerance:.0e} from those of the sequence alone",
                    HINT,
                )
        return max(apart)


def _how(caches: PooledCaches) -> str:
    return "ragged" if caches.ragged else "one at a time, because the model's batches are wrong"
