"""How much of a prefix path is in memory and on disk, and what it takes there. Owned by the generation thread."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile

from ..prefix.resume import in_memory, resumable
from ..prefix.trie import Node, PrefixRef
from ..prefix.uncache import records_of
from .cache import TieredPrefixCache


@dataclass(frozen=True)
class Size:
    """Bytes of what only one path stands on, and of what others need as well."""

    own_bytes: int
    shared_bytes: int


@dataclass(frozen=True)
class Measure:
    """How much of a path is where: tokens without a gap from the first on, and how far a prompt would be resumed from there."""

    tokens_in_memory: int
    tokens_on_disk: int
    resumes_from_memory: int
    resumes_from_disk: int
    memory: Size
    disk: Size


def measure(prefix: TieredPrefixCache, path: PrefixRef, own: int, sizes: dict[Node, tuple[int, int]] | None = None) -> Measure:
    """Figures of a path whose edges from `own` on are its own. `sizes` keeps those of edges for other paths."""
    match, stored = prefix.index.trie.find(path), prefix.stored
    nodes = match.path
    here = takewhile(lambda node: node.residency.in_memory, nodes)
    on_disk = takewhile(lambda node: node.residency.on_disk, nodes)
    sizes = {} if sizes is None else sizes
    for node in nodes:
        if node not in sizes:
            sizes[node] = _memory_bytes(prefix, node), _disk_bytes(prefix, node)
    memory, disk = [sizes[node][0] for node in nodes], [sizes[node][1] for node in nodes]
    return Measure(
        tokens_in_memory=min(match.tokens, sum(node.end - node.start for node in here)),
        tokens_on_disk=0 if stored is None else min(match.tokens, sum(node.end - node.start for node in on_disk)),
        resumes_from_memory=resumable(prefix.arena, in_memory(match), match.tokens)[0],
        resumes_from_disk=resumes_from_disk(prefix, match),
        memory=Size(sum(memory[own:]), sum(memory[:own])),
        disk=Size(sum(disk[own:]), sum(disk[:own])),
    )


def resumes_from_disk(prefix: TieredPrefixCache, match: PrefixRef) -> int:
    """How many tokens of a match a restart would find, and could go on from."""
    stored = prefix.stored
    if stored is None:
        return 0
    whole = list(takewhile(lambda node: node.residency.on_disk, match.path))
    tokens = min(match.tokens, sum(node.end - node.start for node in whole))
    if not prefix.arena.spec.needs_checkpoints or not whole:
        return tokens
    found = stored.checkpoints.find(whole, tokens)
    return 0 if found is None else found[1]


def _memory_bytes(prefix: TieredPrefixCache, node: Node) -> int:
    spec = prefix.arena.spec
    sizes = [spec.bytes_per_block(group) for group in spec.groups]
    blocks = sum(sizes[group] for group, _ in set(prefix.index.blocks_of(node)))
    return blocks + sum(checkpoint.nbytes for checkpoint in node.residency.checkpoints.values())


def _disk_bytes(prefix: TieredPrefixCache, node: Node) -> int:
    return 0 if prefix.stored is None else sum(map(prefix.stored.store.size, records_of(prefix.index, node)))
