"""Survey: the blocks, cached prefixes and requests of one loaded model at one moment, as plain values for other threads.

Read on the generation thread, a little between two decode steps. What changes meanwhile may be seen before or after its change.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple

from ...engine.sequence import Sequence
from ...kv.parts import sequence_of
from ...prefix.trie import Node
from ...tier.cache import TieredPrefixCache
from ..agents.served import path_of
from ..model import LoadedModel
from ..models.registry import ModelRegistry
from ..replies import Reply

# Edges and blocks that are read between two looks at the clock.
EDGES_AT_ONCE, BLOCKS_AT_ONCE = 50, 500
# The most edges that are read of those on disk only: a folder may hold a hundred thousand.
MOST_STORED = 5000


class Edge(NamedTuple):
    """One edge of the trie. `parent`: the index of the edge before it, which comes earlier; -1: it is a first one."""

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


@dataclass(frozen=True)
class Running:
    """A sequence in the engine: the name of its agent, and the ids of its blocks by layer group."""

    name: str | None
    tables: list[list[int]]


@dataclass
class Group:
    """One layer group. `edges`: by block id the index of the edge that it holds, or the first of those."""

    name: str
    bytes_per_block: int
    blocks: list[BlockState] = field(default_factory=list)
    edges: dict[int, int] = field(default_factory=dict)


@dataclass
class Survey:
    """A model at one moment.

    ends:      by agent the index of the last cached edge of its path. pinned: agents that have a pin.
    left_out:  edges on disk that were not read.
    """

    model: str
    groups: list[Group] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    ends: dict[str, int] = field(default_factory=dict)
    pinned: frozenset[str] = frozenset()
    running: list[Running] = field(default_factory=list)
    left_out: int = 0


def survey(served: LoadedModel, found: Survey) -> Iterator[None]:
    """Read a model into `found`, a piece at a time."""
    prefix = served.prefix
    if prefix is None:
        return
    pool = prefix.pool
    found.groups = [Group(counts.group, counts.bytes_per_block) for counts in pool.settle()]
    numbers: dict[Node, int] = {}
    yield from _read_trie(prefix, found, numbers)
    agents = [] if served.agents is None else served.agents.known()
    found.pinned = frozenset(served.agents.pinned if served.agents is not None else ())
    for count, agent in enumerate(agents):
        node = prefix.index.trie.deepest(path_of(agent))
        if node in numbers:
            found.ends[agent.name] = numbers[node]
        if count % EDGES_AT_ONCE == 0:
            yield
    for number, group in enumerate(found.groups):
        blocks = sorted(pool.groups[number].blocks.items(), key=itemgetter(0))
        for first in range(0, len(blocks), BLOCKS_AT_ONCE):
            part = blocks[first : first + BLOCKS_AT_ONCE]
            group.blocks += [BlockState(id, block.ref_count, block.cached_refs, block.pins) for id, block in part]
            yield
    found.running = [_running(sequence) for sequence in ([] if served.engine is None else served.engine.live)]


def _read_trie(prefix: TieredPrefixCache, found: Survey, numbers: dict[Node, int]) -> Iterator[None]:
    full_groups, edges, stored = prefix.index.full_groups, found.edges, 0
    stack = [(child, -1) for root in prefix.index.trie.roots() for child in root.children]
    while stack:
        node, parent = stack.pop()
        residency = node.residency
        in_memory = bool(residency.blocks or residency.checkpoints)
        if not in_memory and (stored := stored + 1) > MOST_STORED:
            found.left_out += 1
            continue
        number = numbers[node] = len(edges)
        edges.append(Edge(parent, node.start, node.end, in_memory, residency.on_disk, residency.owner))
        for group, block in zip(full_groups, residency.blocks, strict=False):
            found.groups[group].edges[block] = number
        for group, block in residency.ring_blocks if residency.checkpoints else ():
            found.groups[group].edges.setdefault(block, number)
        stack += [(child, number) for child in node.children]
        if number % EDGES_AT_ONCE == 0:
            yield


def _running(sequence: Sequence) -> Running:
    blocks = None if sequence.caches is None else sequence_of(sequence.caches)
    tables = [] if blocks is None else [list(table.ids) for table in blocks.tables]
    return Running(sequence.request.name, tables)


# -- requests ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RequestView:
    """One request that has not ended.

    state:      waiting, restoring, prefill, decode or preempted.
    done:       tokens of the prompt that are in the caches, the `cached` ones included.
    generated:  tokens of the reply, of at most `most`.
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


def requests_of(registry: ModelRegistry) -> list[RequestView]:
    """The running requests of all loaded models, those that wait for room, and those that wait for a model."""
    found = []
    for served in registry.loaded.values():
        engine = served.engine
        sequences = [] if engine is None else engine.sequences
        waiting = set() if engine is None else {sequence.uid for sequence in engine.waiting}
        for sequence in sequences:
            reply = served.live.get(sequence.uid)
            found.append(_of_sequence(sequence, reply, registry.catalog.id_of(served.key.model), sequence.uid in waiting))
    for entry in list(registry.queue):
        if isinstance(entry.item, Reply):
            found.append(_of_reply(entry.item, registry.catalog.id_of(entry.key.model)))
    return found


def _of_sequence(sequence: Sequence, reply: Reply | None, model: str, waits: bool) -> RequestView:
    prompt, explained = len(sequence.request.tokens), _explained(reply)
    state = "prefill" if sequence.in_prefill and sequence.is_new else "decode"
    if waits:
        is_restoring = explained is not None and explained.state == "restoring"
        state = "preempted" if sequence.preemptions else "restoring" if is_restoring else "waiting"
    return RequestView(
        sequence.request.name,
        model,
        state,
        prompt,
        None if explained is None else explained.cached_tokens,
        min(sequence.computed, prompt),
        len(sequence.tokens) - prompt,
        sequence.request.max_tokens,
        None if explained is None else time.time() - explained.time,
    )


def _of_reply(reply: Reply, model: str) -> RequestView:
    explained, options = _explained(reply), reply.request.options
    seconds = None if explained is None else time.time() - explained.time
    state, prompt = "waiting" if reply.sequence is None else "preempted", len(reply.request.prepared.tokens)
    return RequestView(options.name, model, state, prompt, None, 0, 0, reply.args.max_tokens, seconds)


def _explained(reply: Reply | None) -> Any:
    explained = None if reply is None else reply.request.explained
    return None if explained is None else explained.now
