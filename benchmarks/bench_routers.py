"""A simulation: recorded coding sessions on several servers behind a router, without a model.

Every machine is a server of its own, with the same pool. Requests go to the machines in turns, by
their session, or by their
prefix: that router knows only the block events that the servers publish. A request follows the one
that its prompt continues as in the recording, but not before that one's reply has ended. The prefix
cache of each machine is the package's own; times are counted from PREFILL and DECODE.
"""

from __future__ import annotations

import heapq
import statistics
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from bench_sessions import SPECS, breakpoints_of, caches_of, run
from measure import options, report
from sessions import Blocks, Recorded, Row, recorded, rows

from mlx_blockpool.engine import sequence
from mlx_blockpool.engine.caches import PooledCaches
from mlx_blockpool.engine.request import Request
from mlx_blockpool.prefix.changes import BlocksRemoved, BlocksStored, Change
from mlx_blockpool.server.watch import kv_events
from mlx_blockpool.spec import BLOCK_TOKENS, blocks_for
from mlx_blockpool.store.hashing import EDGE_BYTES, encode

SPEC = SPECS["full"]
MACHINES = (1, 2, 4, 8)
# The pool of one machine, in % of the peak working set of all sessions: the longest prompt just
# fits.
BUDGET = 33
# Tokens in a second: of prompts, one after the other, and of each reply.
PREFILL, DECODE = 1000, 50
QUICK_SESSIONS = (10, 11)


class Machine:
    """A server: its prefix cache, and the time when it has computed all prompts that it has.

    cached, computed:  tokens of all prompts that it had, and that it had not.
    """

    def __init__(self, caches: PooledCaches) -> None:
        self.caches = caches
        self.free_at = 0.0
        self.cached = self.computed = 0

    def serve(self, request: Recorded, now: float) -> float:
        """Run one request. Returns the seconds to its first token."""
        prompt = request.prompt.tolist()
        running = sequence.Sequence(
            0, Request(prompt, len(request.output), breakpoints=breakpoints_of(request)), 0.0
        )
        opened = self.caches.open(running, ())
        running.caches, running.computed = opened.caches, opened.cached
        self.cached += opened.cached
        self.computed += len(prompt) - opened.cached
        self.free_at = max(self.free_at, now) + (len(prompt) - opened.cached) / PREFILL
        run(running, request.output.tolist(), self.caches)
        return self.free_at - now


class InTurns:
    """The next request goes to the next machine."""

    def __init__(self, machines: Sequence[Machine]) -> None:
        self._machines = machines
        self._number = 0

    def choose(self, request: Recorded, now: float) -> int:
        """The number of the machine for a request that comes now."""
        self._number += 1
        return (self._number - 1) % len(self._machines)


class BySession(InTurns):
    """A session stays on its machine, as with a hash of the header that names its agent."""

    def choose(self, request: Recorded, now: float) -> int:
        return request.session % len(self._machines)


class ByPrefix(InTurns):
    """Where the first token comes first: after the prompts that wait there, and what of this one
    is not cached there.
    """

    def __init__(self, machines: Sequence[Machine]) -> None:
        super().__init__(machines)
        # The hash of a block by the one before it and its tokens; the machines that have a block,
        # by its hash.
        self._hashes: dict[tuple[int | None, bytes], int] = {}
        self._holders: dict[int, set[int]] = defaultdict(set)
        self._changes: list[deque[Change]] = [deque() for _ in machines]
        for machine, changes in zip(machines, self._changes, strict=True):
            machine.caches.prefix.index.changes = changes
        self._published = [kv_events.PublishedBlocks("kv") for _ in machines]

    def choose(self, request: Recorded, now: float) -> int:
        self._receive()
        cached = self.cached(encode(request.prompt.tolist()))
        waits = [
            max(0.0, machine.free_at - now) * PREFILL - had
            for machine, had in zip(self._machines, cached, strict=True)
        ]
        return min(range(len(waits)), key=lambda at: (waits[at], self._machines[at].computed))

    def _receive(self) -> None:
        """Apply what the machines have published since the last request."""
        for at, (changes, blocks) in enumerate(zip(self._changes, self._published, strict=True)):
            while changes:
                change = changes.popleft()
                if isinstance(change, BlocksStored):
                    for event in blocks.fields_of(change):
                        self._store(at, event)
                elif isinstance(change, BlocksRemoved):
                    for event in blocks.fields_of(change):
                        for block in event["block_hashes"]:
                            self._holders[block].discard(at)

    def _store(self, machine: int, event: dict[str, Any]) -> None:
        parent, size = event["parent_block_hash"], event["block_size"]
        for at, block in enumerate(event["block_hashes"]):
            self._hashes[parent, encode(event["token_ids"][at * size : (at + 1) * size])] = block
            self._holders[block].add(machine)
            parent = block

    def cached(self, prompt: bytes) -> list[int]:
        """For each machine, how many tokens of a prompt it has by its events."""
        found, having, parent = [0] * len(self._machines), set(range(len(self._machines))), None
        for start in range(0, len(prompt) - EDGE_BYTES, EDGE_BYTES):
            parent = self._hashes.get((parent, prompt[start : start + EDGE_BYTES]))
            having &= self._holders[parent] if parent is not None else set()
            if not having:
                break
            for machine in having:
                found[machine] += BLOCK_TOKENS
        return found


ROUTERS = {"in turns": InTurns, "by session": BySession, "by prefix": ByPrefix}


@contextmanager
def machines_of(number: int, pool_bytes: int) -> Iterator[list[Machine]]:
    """So many servers, each with a pool of so many bytes."""
    with ExitStack() as stack:
        yield [
            Machine(stack.enter_context(caches_of(SPEC, pool_bytes, None))) for _ in range(number)
        ]


def simulate(
    chosen: list[Row], requests: list[Recorded], machines: list[Machine], router: InTurns
) -> list[float]:
    """Send every request. Returns the seconds to each first token."""
    places = {row.key: place for place, row in enumerate(chosen)}
    children, first_tokens = defaultdict(list), []
    for place, row in enumerate(chosen):
        if row.parent_key in places:
            children[row.parent_key].append(place)
    due = [(row.at, place) for place, row in enumerate(chosen) if row.parent_key not in places]
    heapq.heapify(due)
    while due:
        now, place = heapq.heappop(due)
        row, request = chosen[place], requests[place]
        first_tokens.append(machines[router.choose(request, now)].serve(request, now))
        ended = now + first_tokens[-1] + len(request.output) / DECODE
        for child in children[row.key]:
            heapq.heappush(due, (max(ended, now + chosen[child].at - row.at), child))
    return first_tokens


def bench(args: Any, number: int, name: str, chosen: list[Row], requests: list[Recorded]) -> None:
    blocks = Blocks(requests)
    longest = max(len(request.prompt) + len(request.output) for request in requests)
    room = max(blocks.working_set * BUDGET // 100, blocks_for(longest))
    with machines_of(number, room * SPEC.bytes_per_block(SPEC.groups[0])) as machines:
        first_tokens = simulate(chosen, requests, machines, ROUTERS[name](machines))
    computed = [machine.computed for machine in machines]
    figures = {
        "reused": round(sum(machine.cached for machine in machines) / blocks.known, 4),
        "computed_tokens": sum(computed),
        "busiest": round(max(computed) / statistics.mean(computed), 2),
        "ttft_mean_s": round(statistics.mean(first_tokens), 1),
        "ttft_p95_s": round(statistics.quantiles(first_tokens, n=20)[-1], 1),
    }
    report(
        args,
        "routers",
        f"{number} machines, {name}",
        **figures,
        requests=len(requests),
        blocks=room,
    )


if __name__ == "__main__":
    args = options(__doc__ or "")
    sessions, numbers = (QUICK_SESSIONS, (2,)) if args.quick else (None, MACHINES)
    chosen, requests = rows(sessions=sessions), list(recorded(sessions))
    for number in numbers:
        for name in ROUTERS if number > 1 else ("in turns",):
            bench(args, number, name, chosen, requests)
