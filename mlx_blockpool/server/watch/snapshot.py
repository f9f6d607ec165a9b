"""What the caches of the loaded models hold and which requests they serve, as plain values: for the
page and readers of events.

Read on the generation thread in slices between its steps, while the caches keep changing. What
changes meanwhile may be seen before or after its change. For readers of events the log makes it
exact: the events since before the first slice, applied after it, decide whether an edge is there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from itertools import islice
from operator import itemgetter
from typing import Any, NamedTuple

from ...engine.sequence import Sequence
from ...kv.prompt_cache import sequence_of
from ...prefix.changes import BlocksStored
from ...prefix.trie import Node
from ...tier.cache import TieredPrefixCache
from ..jobs import Steps, between_steps
from ..model import LoadedModel
from ..models.registry import ModelRegistry
from ..replies import Reply
from ..served_agents import path_of
from .event_log import BLOCK_KINDS, changes_of, fields_of, packet

# Edges and blocks that are read between two looks at the clock.
EDGES_AT_ONCE, BLOCKS_AT_ONCE = 50, 500
# The most edges that the page is sent of those on disk only: a folder may hold a hundred thousand.
MOST_STORED = 5000
# From one snapshot for readers of events to the next: at least this long, and this many times as
# long as a snapshot takes.
LEAST_SECONDS = 0.25
REST = 100


# -- for readers of events -------------------------------------------------------------------------


@dataclass(frozen=True)
class BlocksSnapshot:
    """All blocks as of the event `number` or later.

    `parts`: its events as bytes, each with the salt of its blocks.
    """

    number: int
    time: float
    parts: tuple[tuple[bytes, bytes], ...]


class BlocksSnapshots:
    """The last snapshot of a server's blocks.

    Any thread may take it; those that come while it is made wait for it.
    """

    def __init__(self, generator: Any) -> None:
        self._generator = generator
        self._making = threading.Lock()
        self._last: BlocksSnapshot | None = None
        self._due = 0.0

    def take(self) -> BlocksSnapshot:
        """A snapshot that the events in the log complete.

        Raises UnavailableError if the generation thread has ended.
        """
        log = self._generator.registry.log
        with self._making:
            last, start = self._last, time.monotonic()
            if last is not None and start < self._due and log.oldest <= last.number + 1:
                return last
            number, now, kind = log.end - 1, time.time(), BLOCK_KINDS[BlocksStored]
            stored = stored_blocks(self._generator)
            parts = (
                (each.salt, packet(number, kind, fields_of(each), model, now))
                for model, each in stored
            )
            self._last = last = BlocksSnapshot(number, now, tuple(parts))
            end = time.monotonic()
            self._due = end + max(LEAST_SECONDS, REST * (end - start))
            return last


def stored_blocks(generator: Any) -> Iterator[tuple[str, BlocksStored]]:
    """Yield what the loaded models of a generator hold, each by its id.

    For other threads than the generation thread.
    """
    for served in list(generator.registry.loaded.values()):
        found: list[BlocksStored] = []
        between_steps(generator, read_blocks(served, found))
        yield from ((served.events.model, change) for change in found)


def read_blocks(served: LoadedModel, found: list[BlocksStored]) -> Steps[None]:
    """Read the blocks of a loaded model into `found`, some at a time."""
    # Only nodes: a reference to the index would keep the pool's memory while the model is unloaded.
    roots = [] if served.prefix is None else served.prefix.index.trie.roots()
    nodes = _nodes([child for root in roots for child in root.children])
    while some := list(islice(nodes, BLOCKS_AT_ONCE)):
        found += changes_of(some)
        yield None


def _nodes(stack: list[Node]) -> Iterator[Node]:
    """These nodes and all below them, each after its parent, without those that leave the trie
    meanwhile.
    """
    while stack:
        node = stack.pop()
        stack += node.children
        if node.is_in_trie:
            yield node


# -- for the page ----------------------------------------------------------------------------------


class Edge(NamedTuple):
    """One edge of the trie.

    `parent`: the index of the edge before it, which comes earlier; -1: it is a first one.
    """

    parent: int
    start: int
    end: int
    in_memory: bool
    on_disk: bool
    owner: str | None


class BlockState(NamedTuple):
    id: int
    ref_count: int
    cached_refs: int
    pins: int


@dataclass
class GroupSnapshot:
    """One layer group.

    `edges`: by block id the index of the edge that it holds, or the first of those.
    """

    name: str
    bytes_per_block: int
    blocks: list[BlockState] = field(default_factory=list)
    edges: dict[int, int] = field(default_factory=dict)


class RequestState(NamedTuple):
    """One request that has not ended. `name`: of its agent.

    state:      waiting, restoring, prefill, decode or preempted.
    done:       tokens of the prompt that are in the caches, the `cached` ones included.
    generated:  tokens of the reply, of at most `most`.
    tables:     the ids of its blocks by layer group; None while it waits.
    """

    name: str | None
    model: str
    state: str
    prompt: int
    cached: int | None
    done: int
    generated: int
    most: int
    seconds: float | None
    tables: list[list[int]] | None = None


@dataclass
class ModelSnapshot:
    """A loaded model at one moment.

    ends:      by agent the index of the last cached edge of its path. pinned: agents that have a
               pin.
    tokens:    by agent those of its last turn, as in GET /v1/agents, whether they are still cached
               or not.
    running:   the requests that have caches. left_out: edges on disk that were not read.
    """

    model: str
    groups: list[GroupSnapshot] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    ends: dict[str, int] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    pinned: frozenset[str] = frozenset()
    running: list[RequestState] = field(default_factory=list)
    left_out: int = 0


def read_model(served: LoadedModel, found: ModelSnapshot) -> Generator[None]:
    """Read a model into `found`, some at a time."""
    prefix = served.prefix
    if prefix is None:
        return
    pool = prefix.pool
    found.groups = [GroupSnapshot(counts.group, counts.bytes_per_block) for counts in pool.settle()]
    numbers: dict[Node, int] = {}
    yield from _read_edges(prefix, found, numbers)
    agents = [] if served.agents is None else served.agents.known()
    found.pinned = frozenset(() if served.agents is None else served.agents.pinned)
    found.tokens = {agent.name: agent.tokens for agent in agents}
    for agent in agents:
        path = prefix.index.trie.find(path_of(agent)).path
        if path and path[-1] in numbers:
            found.ends[agent.name] = numbers[path[-1]]
        yield
    for number, group in enumerate(found.groups):
        blocks = iter(sorted(pool.groups[number].blocks.items(), key=itemgetter(0)))
        while some := list(islice(blocks, BLOCKS_AT_ONCE)):
            group.blocks += [
                BlockState(id, block.ref_count, block.cached_refs, block.pins) for id, block in some
            ]
            yield


def _read_edges(
    prefix: TieredPrefixCache, found: ModelSnapshot, numbers: dict[Node, int]
) -> Generator[None]:
    edges, stored = found.edges, 0
    stack = [(child, -1) for root in prefix.index.trie.roots() for child in root.children]
    while stack:
        node, parent = stack.pop()
        in_memory = bool(node.blocks or node.checkpoints)
        if not in_memory and (stored := stored + 1) > MOST_STORED:
            found.left_out += 1
            continue
        number = numbers[node] = len(edges)
        edges.append(Edge(parent, node.start, node.end, in_memory, node.on_disk, node.owner))
        for group, block in node.blocks:
            found.groups[group].edges[block] = number
        for group, block in node.ring_blocks if node.checkpoints else ():
            found.groups[group].edges.setdefault(block, number)
        stack += [(child, number) for child in node.children]
        if number % EDGES_AT_ONCE == 0:
            yield


def requests_of(registry: ModelRegistry) -> list[RequestState]:
    """The running requests of all loaded models, those that wait for space, and those that wait
    for a model.
    """
    found = []
    for served in registry.loaded.values():
        if (engine := served.engine) is not None:
            waiting = list(engine.scheduler.waiting)
            found += [
                _of_sequence(served, sequence, sequence in waiting)
                for sequence in [*engine.live, *waiting]
            ]
    for entry in registry.queue:
        if isinstance(entry.item, Reply):
            request = entry.item.request
            found.append(
                RequestState(
                    request.options.name,
                    registry.catalog.id_of(entry.key.model),
                    "waiting" if entry.item.sequence is None else "preempted",
                    len(request.prepared.tokens),
                    None,
                    0,
                    0,
                    entry.item.args.max_tokens,
                    _explained(entry.item)[1],
                )
            )
    return found


def _of_sequence(served: LoadedModel, sequence: Sequence, waits: bool) -> RequestState:
    prompt = len(sequence.request.tokens)
    explained, seconds = _explained(served.live.get(sequence.uid))
    state = "prefill" if sequence.in_prefill and sequence.is_new else "decode"
    if waits:
        is_restoring = explained is not None and explained.state == "restoring"
        state = "preempted" if sequence.preemptions else "restoring" if is_restoring else "waiting"
    blocks = None if sequence.caches is None else sequence_of(sequence.caches)
    tables = [] if blocks is None else [list(table.ids) for table in blocks.tables]
    return RequestState(
        sequence.request.name,
        served.events.model,
        state,
        prompt,
        None if explained is None else explained.cached_tokens,
        min(sequence.computed, prompt),
        len(sequence.tokens) - prompt,
        sequence.request.max_tokens,
        seconds,
        None if waits else tables,
    )


def _explained(reply: Reply | None) -> tuple[Any, float | None]:
    """The explanation of a request, and for how many seconds it has been here; None for one that
    is not explained.
    """
    if reply is None or reply.request.explained is None:
        return None, None
    now = reply.request.explained.now
    return now, round(time.time() - now.time, 1)
