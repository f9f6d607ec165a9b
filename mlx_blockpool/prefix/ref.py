"""A path that was noted by its hashes, found again among known prefixes: where it is, and what only it stands on.

Knows hashes and nodes; no names. Owned by the generation thread.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TypeAlias

from ..spec import BLOCK_TOKENS
from ..store.record import BLOCK, STATE, WINDOW, Key
from .cache import PrefixCache
from .residency import KVIndex
from .resume import resumable
from .salts import SHARED
from .trie import Match, Node, Trie, decode

# Token ids, and the salt that they are looked up under.
Prompt: TypeAlias = tuple[Sequence[int], bytes]


@dataclass(frozen=True)
class NotedPath:
    """The hashes of the blocks that `tokens` tokens lie in, from the first on; the last one may name a part of a block.

    `salt`: what they are known under.
    """

    hashes: tuple[bytes, ...]
    tokens: int
    salt: bytes = SHARED


@dataclass(frozen=True)
class Measure:
    """How much of a path is where: tokens without a gap from the first on, and how far a prompt would be resumed from there.

    Bytes are of what only this path stands on, and of what others need as well.
    """

    tokens_in_memory: int
    tokens_on_disk: int
    resumes_from_memory: int
    resumes_from_disk: int
    own_bytes: int
    shared_bytes: int
    own_disk_bytes: int
    shared_disk_bytes: int


@dataclass(frozen=True)
class Freed:
    """What was forgotten: edges of the trie, blocks of the pool and bytes. `kept`: edges of the path that others need."""

    nodes: int
    blocks: int
    bytes: int
    kept: int


# -- finding -----------------------------------------------------------------------------------------------------------


def path_of(trie: Trie, tokens: Sequence[int], salt: bytes = SHARED) -> NotedPath:
    """The path of as much of `tokens` as is known under a salt."""
    match = trie.match(tokens, salt)
    last = [] if match.partial is None else [match.partial.hash_at(match.tokens)]
    return NotedPath((*(node.hash for node in match.nodes), *last), match.tokens, salt)


def find(trie: Trie, path: NotedPath) -> Match:
    """As much of a path as is known."""
    root = trie.begin(path.salt)
    nodes: list[Node] = []
    for index, digest in enumerate(path.hashes):
        size = min(BLOCK_TOKENS, path.tokens - index * BLOCK_TOKENS)
        parent = nodes[-1] if nodes else root
        child = trie.named(parent, digest)
        if child is None and size < BLOCK_TOKENS:
            child = next((child for child in parent.children if _begins_with(child, digest, size)), None)
        if child is None or child.end - child.start < size:
            break
        if size < BLOCK_TOKENS:
            return Match(nodes, child, size)
        nodes.append(child)
    return Match(nodes, None, 0)


def tokens_of(match: Match) -> list[int]:
    """The token ids of a match."""
    return [token for node in match.path for token in decode(node.tokens)][: match.tokens]


def _begins_with(node: Node, digest: bytes, size: int) -> bool:
    """Whether the first `size` tokens of an edge are those that end in the prefix `digest`."""
    if node.end - node.start < size:
        return False
    return node.hash_at(node.start + size) == digest


# -- what only one path stands on --------------------------------------------------------------------------------------


class SharedPaths:
    """Noted paths, and how far two of them stand on the same edges: made once, and then cheap to ask of each of them."""

    def __init__(self, paths: Iterable[NotedPath]) -> None:
        self._users: Counter[bytes] = Counter()
        # Ends within a block: by the hash before them, and by their tokens in that block.
        self._ends: dict[bytes, dict[int, set[bytes]]] = {}
        for path in paths:
            self._users.update(path.hashes)
            if path.tokens % BLOCK_TOKENS:
                before = path.hashes[-2] if len(path.hashes) > 1 else b""
                self._ends.setdefault(before, {}).setdefault(path.tokens % BLOCK_TOKENS, set()).add(path.hashes[-1])

    def stood_on(self, nodes: Sequence[Node], path: NotedPath) -> int:
        """How many of the edges of one of these paths another one stands on."""
        # A hash names all tokens before it: those that others have too come first.
        count = bisect_left(path.hashes, True, key=lambda digest: self._users[digest] < 2)
        if count >= len(nodes):
            return count
        own, node = path.hashes[count], nodes[count]
        ends = self._ends.get(path.hashes[count - 1] if count else b"", {})
        within = ((node.hash_at(node.start + size), digests) for size, digests in ends.items() if size <= node.end - node.start)
        return count + any(digest != own and digest in digests for digest, digests in within)


def own_from(known: KVIndex, path: NotedPath, shared: SharedPaths, in_use: Iterable[Prompt] = ()) -> int:
    """From which edge of a path on nobody else needs it: no other path of `shared`, which has this one too, no prompt `in_use`,
    and nothing known behind it.
    """
    match = find(known.trie, path)
    nodes = match.path
    first = shared.stood_on(nodes, path)
    for tokens, salt in in_use:
        first = max(first, _common(nodes, known.trie.match(tokens, salt).path))
    own = len(nodes)
    while own > first and nodes[own - 1].end <= path.tokens and not set(nodes[own - 1].children) - set(nodes[own : own + 1]):
        own -= 1
    return own


def _common(one: Sequence[object], other: Sequence[object]) -> int:
    """How many are the same from the first on."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[:middle] == other[:middle] else (low, middle - 1)
    return low


def forget(known: KVIndex, path: NotedPath, first: int) -> Freed:
    """Take the edges of a path from `first` on out of the trie, and with them their blocks and records."""
    nodes = find(known.trie, path).path
    blocks, n_bytes = _evictable(known), known.nbytes
    if first < len(nodes):
        top, parent = nodes[first], nodes[first].parent
        assert parent is not None
        # What it covers is an earlier end of the same path.
        known.unreachable += [Key(BLOCK, covered.hash) for covered in top.superseded]
        top.superseded = []
        known.drop(top)
        known.prune(parent)
    return Freed(len(nodes) - first, blocks - _evictable(known), n_bytes - known.nbytes, first)


def kept_hashes(known: KVIndex, path: NotedPath) -> set[bytes]:
    """The names of all records that what is known of a path may stand on."""
    return {key.hash for node in find(known.trie, path).path for key in records_of(node)}


def records_of(node: Node) -> Iterator[Key]:
    """The records of an edge and of its checkpoints, there or not."""
    for each in (node, *node.superseded):
        yield Key(BLOCK, each.hash)
    for kind, ends in ((WINDOW, node.window_records), (STATE, node.state_records)):
        yield from (Key(kind, node.hash_at(end)) for end in ends)


def _evictable(known: KVIndex) -> int:
    return sum(counts.evictable for counts in known.pool.settle())


# -- figures -----------------------------------------------------------------------------------------------------------


def measure(prefix: PrefixCache, path: NotedPath, own: int, sizes: dict[Node, tuple[int, int]] | None = None) -> Measure:
    """Figures of a path whose edges from `own` on are its own. `sizes` keeps those of edges for other paths."""
    match, stored = find(prefix.index.trie, path), prefix.stored
    nodes = match.path
    in_memory = takewhile(lambda node: node.resident, nodes)
    on_disk = takewhile(lambda node: node.stored, nodes)
    sizes = {} if sizes is None else sizes
    for node in nodes:
        if node not in sizes:
            sizes[node] = _memory_bytes(prefix, node), _disk_bytes(prefix, node)
    memory, disk = [sizes[node][0] for node in nodes], [sizes[node][1] for node in nodes]
    return Measure(
        tokens_in_memory=min(match.tokens, sum(node.end - node.start for node in in_memory)),
        tokens_on_disk=0 if stored is None else min(match.tokens, sum(node.end - node.start for node in on_disk)),
        resumes_from_memory=resumable(prefix.slabs, match.in_memory(), match.tokens)[0],
        resumes_from_disk=resumes_from_disk(prefix, match),
        own_bytes=sum(memory[own:]),
        shared_bytes=sum(memory[:own]),
        own_disk_bytes=sum(disk[own:]),
        shared_disk_bytes=sum(disk[:own]),
    )


def resumes_from_disk(prefix: PrefixCache, match: Match) -> int:
    """How many tokens of a match a restart would find, and could go on from."""
    stored = prefix.stored
    if stored is None:
        return 0
    whole = list(takewhile(lambda node: node.stored, match.path))
    tokens = min(match.tokens, sum(node.end - node.start for node in whole))
    if not prefix.slabs.spec.needs_checkpoints or not whole:
        return tokens
    found = stored.placed.find(whole, tokens)
    return 0 if found is None else found[1]


def _memory_bytes(prefix: PrefixCache, node: Node) -> int:
    spec = prefix.slabs.spec
    sizes = [spec.bytes_per_block(group) for group in spec.groups]
    return sum(sizes[group] for group, _ in set(prefix.index.blocks_of(node))) + sum(c.nbytes for c in node.checkpoints.values())


def _disk_bytes(prefix: PrefixCache, node: Node) -> int:
    return 0 if prefix.stored is None else sum(map(prefix.stored.store.size, records_of(node)))
