"""Cached prefixes: a tree whose edges are blocks of 256 tokens.

    match(tokens)      the longest cached prefix of a prompt
    following(tokens)  what has followed a prompt before
    find(ref)          the same as match() for a prefix that is known by its hashes
    add(node, edge)    a new edge; shorter siblings that it contains are merged into it
    remove(node)       a node and all below it

The last edge of a sequence may be shorter than a block. Siblings may start alike: matching inside a
block is by token. Each salt has its own root: prefixes under different salts never share a hash, an
edge or a block. Knows tokens and hashes; an edge also says what is cached of it, which the trie
never reads. Owned by the generation thread.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from operator import attrgetter
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from ..spec import BLOCK_TOKENS, blocks_for
from ..store.hashing import EDGE_BYTES, TOKEN_BYTES, decode, edge_hash, encode
from ..store.record import BLOCK, Key
from .salts import SALT_BYTES, SHARED

# Of many siblings, this many on each side are checked.
MAX_SIBLINGS = 64

Owned = tuple[int, int]  # (layer group, block)


@dataclass(eq=False, repr=False, slots=True, weakref_slot=True)
class Node:
    """One edge: up to 256 tokens. `hash` names the whole prefix up to its end.

    salt:         that of its root.
    merged_into:  the longer edge that has taken its place.
    removed:      whether remove() has cut it off.
    number:       higher than those of the edges that were added before it.

    What is cached of it:

    blocks:       of each full layer group the block, while `in_memory`.
    on_disk:      whether its block record is on disk, or about to be.
    checkpoints:  those inside the edge, by absolute token position.
    records:      the records of checkpoints, by their kind and the position at which they end; a
                  window record with the position of the checkpoint it was cut from.
    shorter:      edges that were merged into this one; the records of those on disk serve until
                  this one is on disk.
    pins:         those that retain its blocks.
    kind:         what ends here: system, user or assistant.
    owner:        the agent whose bytes its blocks count as, if any.
    is_above:     whether something in memory belongs to an edge below; `is_end`: whether something
                  belongs to this edge alone.
    """

    parent: Node | None
    start: int
    tokens: bytes
    hash: bytes
    salt: bytes = SHARED
    children: list[Node] = field(default_factory=list)
    merged_into: Node | None = None
    removed: bool = False
    number: int = 0
    blocks: tuple[Owned, ...] = ()
    in_memory: bool = True
    on_disk: bool = False
    checkpoints: dict[int, Checkpoint] = field(default_factory=dict)
    records: dict[tuple[str, int], int] = field(default_factory=dict)
    shorter: list[Node] = field(default_factory=list)
    pins: set[PinnedPrefix] = field(default_factory=set)
    kind: str = "assistant"
    owner: str | None = None
    is_above: bool = False
    is_end: bool = False

    @property
    def end(self) -> int:
        return self.start + len(self.tokens) // TOKEN_BYTES

    @property
    def is_full(self) -> bool:
        return len(self.tokens) == EDGE_BYTES

    @property
    def is_in_trie(self) -> bool:
        return not self.removed and self.merged_into is None

    @property
    def latest(self) -> Node:
        """This node, or the longer one that it was merged into."""
        node = self
        while node.merged_into is not None:
            node = node.merged_into
        return node

    @property
    def with_merged(self) -> list[Node]:
        """This node, and the shorter edges whose records serve until it is on disk."""
        return [self, *self.shorter]

    def hash_at(self, end: int) -> bytes:
        """The hash of the prefix that ends before token number `end`, inside this edge."""
        if end == self.end or self.parent is None:
            return self.hash
        return edge_hash(self.parent.hash, self.tokens[: (end - self.start) * TOKEN_BYTES])

    def path(self) -> list[Node]:
        """From the first edge to this one."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def near_siblings(self) -> Iterator[tuple[Node, int]]:
        """This node and the siblings that start like it, each with the absolute position up to
        which they are alike.
        """
        yield self, self.end
        siblings = self.parent.children if self.parent is not None else []
        if len(siblings) > 1:
            at = bisect_left(siblings, self.tokens, key=_tokens)
            for nearby in (
                siblings[at + 1 : at + 1 + MAX_SIBLINGS],
                siblings[max(0, at - MAX_SIBLINGS) : at][::-1],
            ):
                alike = (
                    (node, common_prefix(node.tokens, self.tokens) // TOKEN_BYTES)
                    for node in nearby
                )
                yield from (
                    (node, self.start + count)
                    for node, count in takewhile(lambda found: found[1], alike)
                )

    def subtree(self) -> Iterator[Node]:
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack += node.children

    @property
    def is_held(self) -> bool:
        """Whether something of this edge is in memory."""
        return bool(self.blocks or self.checkpoints)

    @property
    def ring_blocks(self) -> list[Owned]:
        """Every ring block, once for each checkpoint."""
        return [
            owned for checkpoint in self.checkpoints.values() for owned in checkpoint.ring_blocks
        ]

    @property
    def owned(self) -> list[Owned]:
        """Every block of it in memory."""
        return [*self.blocks, *self.ring_blocks]

    def take_records(self, other: Node, end: int) -> None:
        """Take the records of checkpoints up to `end` from another edge.

        Where both have a record, that of this edge counts.
        """
        taken = {each: other.records.pop(each) for each in list(other.records) if each[1] <= end}
        self.records = taken | self.records

    def take_over(self, shorter: Node) -> None:
        """Take the pins and records of a shorter edge that this one contains."""
        # Where both have a record, that of this edge counts.
        self.records = shorter.records | self.records
        self.pins |= shorter.pins
        self.shorter += [*shorter.shorter, *([shorter] if shorter.on_disk else [])]
        shorter.pins, shorter.shorter = set(), []

    def forget(self) -> None:
        """Nothing of it is cached any more, and nothing follows it. References to it may remain."""
        self.blocks, self.in_memory, self.on_disk = (), False, False
        self.checkpoints, self.records, self.shorter = {}, {}, []
        self.pins, self.children = set(), []


@dataclass(frozen=True, eq=False)
class PrefixRef:
    """A prefix of `tokens` tokens under `salt`, named by the hash at the end of each block; the
    last may end inside its block.

    `path`: the edges that hold it, from the first on, of which the last may hold more tokens than
    these. Empty where the prefix is known by its hashes alone, `named`; `Trie.find()` looks for its
    edges.
    """

    named: tuple[bytes, ...] = ()
    tokens: int = 0
    salt: bytes = SHARED
    path: tuple[Node, ...] = field(default=(), repr=False)

    @staticmethod
    def from_path(path: Sequence[Node], tokens: int, salt: bytes = SHARED) -> PrefixRef:
        """The first `tokens` tokens of a path."""
        return PrefixRef((), tokens, salt, tuple(path[: blocks_for(tokens)]))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PrefixRef) and self._name == other._name

    def __hash__(self) -> int:
        return hash(self._name)

    @property
    def _name(self) -> tuple[tuple[bytes, ...], int, bytes]:
        return self.hashes, self.tokens, self.salt

    @cached_property
    def hashes(self) -> tuple[bytes, ...]:
        """The hash at the end of each block. Computed at its first use: most lookups need none."""
        if not self.path:
            return self.named
        return (
            *(node.hash for node in self.path[:-1]),
            self.path[-1].hash_at(min(self.tokens, self.path[-1].end)),
        )

    @property
    def full_nodes(self) -> tuple[Node, ...]:
        """The edges of which it has all 256 tokens."""
        return self.path[: self.tokens // BLOCK_TOKENS]

    @property
    def partial_tokens(self) -> int:
        """How many tokens of `partial` it ends with."""
        return self.tokens % BLOCK_TOKENS

    @property
    def partial(self) -> Node | None:
        """The edge that it ends inside of, or that is shorter than a block."""
        return self.path[-1] if self.path and self.partial_tokens else None

    def first(self, tokens: int) -> PrefixRef:
        """Its first `tokens` tokens, at most all."""
        return self if tokens >= self.tokens else PrefixRef.from_path(self.path, tokens, self.salt)

    def detached(self) -> PrefixRef:
        """The same prefix by its hashes alone, which do not hold edges in memory."""
        return PrefixRef(self.hashes, self.tokens, self.salt)

    def token_ids(self) -> list[int]:
        return [token for node in self.path for token in decode(node.tokens)][: self.tokens]

    def cached_nodes(self) -> tuple[Node, ...]:
        """Its whole edges that are still in the trie."""
        nodes = self.full_nodes
        while nodes and nodes[-1].removed:
            nodes = nodes[:-1]
        return nodes


@dataclass(eq=False)
class PinnedPrefix:
    """A prefix that stays in memory: the blocks of its edges and, of their checkpoints, the one at
    `position` of `node`.

    `until`: a time of the clock it is measured by, `seconds` after the last use; infinite if it
    stays until it is unpinned.
    """

    ref: PrefixRef
    node: Node | None = None
    position: int = 0
    seconds: float = 0.0
    until: float = math.inf

    @property
    def name(self) -> bytes:
        """The hash of its tokens."""
        return self.ref.hashes[-1]

    @property
    def nodes(self) -> set[Node]:
        """The edges that it retains, as they are in the trie now."""
        own = set() if self.node is None else {self.node.latest}
        return own.union(node.latest for node in self.ref.path)

    def is_in(self, nodes: set[Node], end: int) -> bool:
        """Return whether it is a beginning of `end` tokens in these nodes.

        Its last edge may be part of a longer one now.
        """
        return self.ref.tokens <= end and self.ref.path[-1].latest in nodes


@dataclass(eq=False)
class Checkpoint:
    """What window and state layers held at one token position.

    rings:       per window group the ring's block ids and its ring index.
    states:      per state leaf its arrays, copies; `nbytes`: their size.
    kind:        what ends here: system, user or assistant.
    owner:       the agent whose bytes it counts as, if any.
    node:        the edge that it lies in; the index sets it.
    is_queued:   whether it was handed to the tier to be written.
    superseded:  whether its conversation has a later one of the same kind and it was not resumed
                 since: evicted before others.
    """

    position: int
    rings: dict[int, tuple[tuple[int, ...], int]]
    states: dict[int, list[Any]] = field(default_factory=dict, repr=False)
    kind: str = "assistant"
    owner: str | None = None
    is_queued: bool = False
    superseded: bool = False
    node: Node = field(init=False, repr=False)

    @cached_property
    def nbytes(self) -> int:
        return sum(a.nbytes for arrays in self.states.values() for a in arrays if a is not None)

    @property
    def ring_blocks(self) -> list[Owned]:
        return [(group, block) for group, (ids, _) in self.rings.items() for block in ids]


def positions(
    path: Sequence[Node],
    at_most: int,
    ends_of: Callable[[Node], Iterable[int]],
    more_than: int = 0,
) -> Iterator[tuple[Node, int]]:
    """The positions in (more_than, at_most] on a path that `ends_of` gives for its edges, or for
    siblings that start alike, the last ones first, each with an edge that has it.
    """
    for on_path in reversed(path):
        if on_path.end <= more_than:
            return
        near = ((node, min(at_most, alike)) for node, alike in on_path.near_siblings())
        ends = [
            (node, end) for node, limit in near for end in ends_of(node) if more_than < end <= limit
        ]
        yield from sorted(ends, key=lambda found: -found[1])


def records_of(node: Node) -> Iterator[Key]:
    """The records of an edge, of the shorter ones that it contains, and of its checkpoints, on
    disk or not.
    """
    for each in node.with_merged:
        yield Key(BLOCK, each.hash)
    yield from (Key(kind, node.hash_at(end)) for kind, end in node.records)


class Trie:
    """`namespace` names what the blocks were computed with: weights, adapter, spec, KV dtype."""

    def __init__(self, namespace: str) -> None:
        seed = hashlib.blake2b(namespace.encode(), digest_size=32).digest()
        self.root = Node(None, 0, b"", seed)
        # A salted root stays for as long as it has an edge, or a caller refers to it.
        self._salted: WeakValueDictionary[bytes, Node] = WeakValueDictionary()
        # The roots that have edges, by salt: edges that are on disk alone are referred to by their
        # parents and children only.
        self._with_edges: dict[bytes, Node] = {}
        # Every edge by its hash, and some that are no longer part of the tree.
        self._by_hash: WeakValueDictionary[bytes, Node] = WeakValueDictionary()
        self._num_added = 0

    def __iter__(self) -> Iterator[Node]:
        for root in self.roots():
            nodes = root.subtree()
            next(nodes)
            yield from nodes

    def roots(self) -> list[Node]:
        """The shared root, then those of the salts that have edges."""
        return [self.root, *self._salted.values()]

    def root_of(self, salt: bytes = SHARED) -> Node:
        """The root of the prefixes under a salt."""
        if not salt:
            return self.root
        root = self._salted.get(salt)
        if root is None:
            assert len(salt) == SALT_BYTES, f"{len(salt)} bytes of salt != {SALT_BYTES}"
            root = Node(None, 0, b"", edge_hash(self.root.hash, salt), salt=salt)
            self._salted[salt] = root
        return root

    def root_named(self, digest: bytes, salt: str | None) -> Node | None:
        """The root whose hash is `digest`, under the salt that a record names in hexadecimal, or
        None.
        """
        try:
            salt_bytes = bytes.fromhex(salt or "")
        except ValueError:
            return None
        if len(salt_bytes) not in (0, SALT_BYTES):
            return None
        root = self.root_of(salt_bytes)
        return root if root.hash == digest else None

    def match(
        self, tokens: Sequence[int], salt: bytes = SHARED, start: PrefixRef | None = None
    ) -> PrefixRef:
        """The longest cached prefix of `tokens` under a salt. Changes nothing.

        `start`: a prefix of these tokens that was matched before; its whole edges are not compared
        again if still cached.
        """
        nodes = (
            []
            if start is None or start.salt != salt
            else list(start.cached_nodes()[: len(tokens) // BLOCK_TOKENS])
        )
        node = nodes[-1] if nodes else self.root_of(salt)
        for at in range(node.end, len(tokens), BLOCK_TOKENS):
            edge = encode(tokens[at : at + BLOCK_TOKENS])
            child, count = _longest_match(node, edge)
            if child is None:
                break
            nodes.append(child)
            if count < BLOCK_TOKENS:
                return PrefixRef.from_path(nodes, at + count, salt)
            node = child
        return PrefixRef.from_path(nodes, node.end, salt)

    def following(
        self,
        tokens: Sequence[int],
        at_most: int,
        salt: bytes = SHARED,
        start: PrefixRef | None = None,
    ) -> list[int]:
        """Up to `at_most` tokens that have followed all of `tokens` under a salt; of several
        continuations the one added last.

        `start`: as in match(). Empty where `tokens` are not cached as a whole, or nothing follows
        them.
        """
        match = self.match(tokens, salt, start)
        if not match.path or match.tokens < len(tokens):
            return []
        node = match.path[-1]
        if match.tokens < node.end:
            alike = (near for near, end in node.near_siblings() if end >= match.tokens)
            node = max(alike, key=_number)
        return continuation(node, match.tokens, at_most)

    def find(self, ref: PrefixRef, root: Node | None = None) -> PrefixRef:
        """As much of a prefix as is cached, found by its hashes.

        `root`: by default that of its salt.
        """
        nodes: list[Node] = []
        for index, digest in enumerate(ref.hashes):
            size = min(BLOCK_TOKENS, ref.tokens - index * BLOCK_TOKENS)
            parent = nodes[-1] if nodes else root or self.root_of(ref.salt)
            named = self._by_hash.get(digest)
            child = None if named is None else named.latest
            if child is not None and not (child.is_in_trie and child.parent is parent):
                child = None
            if child is None and size < BLOCK_TOKENS:
                child = next(
                    (child for child in parent.children if _starts_with(child, digest, size)), None
                )
            if child is None or child.end - child.start < size:
                break
            nodes.append(child)
        return PrefixRef.from_path(nodes, min(ref.tokens, len(nodes) * BLOCK_TOKENS), ref.salt)

    def node(self, digest: bytes) -> Node | None:
        """The edge with this hash, which may have been merged into a longer one or removed.

        Returns None if there is none.
        """
        return self._by_hash.get(digest)

    def child(self, node: Node, edge: bytes) -> Node | None:
        """The child that begins with all tokens of `edge`, if there is one."""
        child, count = _longest_match(node, edge)
        return child if child is not None and count * TOKEN_BYTES == len(edge) else None

    def children_with(self, node: Node, edge: bytes) -> Iterator[Node]:
        """The children that begin with all tokens of `edge`."""
        at = bisect_left(node.children, edge, key=_tokens)
        return takewhile(lambda child: child.tokens.startswith(edge), node.children[at:])

    def add(self, node: Node, edge: bytes) -> tuple[Node, list[Node]]:
        """A new child.

        Returns it and the shorter siblings that it contains: they are merged into it and out of the
        tree.
        """
        self._num_added += 1
        new = Node(
            node,
            node.end,
            edge,
            edge_hash(node.hash, edge),
            node.salt,
            number=self._num_added,
        )
        shorter = [
            c for c in node.children if len(c.tokens) < len(edge) and edge.startswith(c.tokens)
        ]
        for old in shorter:
            old.merged_into = new
            node.children.remove(old)
        self._insert(new)
        return new, shorter

    def put_back(self, node: Node) -> None:
        """Put back a node whose longer successor was removed."""
        node.merged_into, node.children, node.removed = None, [], False
        self._insert(node)

    def _insert(self, node: Node) -> None:
        assert node.parent is not None
        insort(node.parent.children, node, key=_tokens)
        self._by_hash[node.hash] = node
        if node.parent.parent is None:
            self._with_edges[node.salt] = node.parent

    def remove(self, node: Node) -> list[Node]:
        """Cut a node and all below it off. Returns them."""
        assert node.parent is not None, "the root cannot be removed"
        node.parent.children.remove(node)
        if node.parent.parent is None and not node.parent.children:
            del self._with_edges[node.salt]
        removed = list(node.subtree())
        for each in removed:
            each.removed = True
        return removed

    def check(self) -> None:
        """The invariant: order, hashes and positions. Raises AssertionError."""
        for node in self:
            parent = node.parent
            assert parent is not None
            assert parent.end == node.start, (
                f"node starts at {node.start}, its parent ends at {parent.end}"
            )
            assert parent.parent is None or parent.is_full, (
                f"the edge before token {node.start} is not full"
            )
            edges = [c.tokens for c in parent.children]
            assert edges == sorted(edges), f"children at token {node.start} are out of order"
            covered = [e for e in edges if len(e) > len(node.tokens) and e.startswith(node.tokens)]
            assert not covered, f"the edge at token {node.start} is part of a longer one"
            assert node.hash == edge_hash(parent.hash, node.tokens), f"hash at {node.start}"
            assert not node.removed, f"the edge at token {node.start} is marked as removed"


def continuation(node: Node, position: int, at_most: int) -> list[int]:
    """Up to `at_most` tokens from a position in a node on, or at its end; of several children the
    one added last.
    """
    found = decode(node.tokens[(position - node.start) * TOKEN_BYTES :])
    while len(found) < at_most and node.children:
        node = max(node.children, key=_number)
        found += decode(node.tokens)
    return found[:at_most]


def _starts_with(node: Node, digest: bytes, size: int) -> bool:
    """Return whether the first `size` tokens of an edge are those that end in the prefix
    `digest`.
    """
    return node.end - node.start >= size and node.hash_at(node.start + size) == digest


_tokens = attrgetter("tokens")
_number = attrgetter("number")


def _longest_match(node: Node, edge: bytes) -> tuple[Node | None, int]:
    """The child with the longest common beginning, and its length in tokens.

    In sorted order that child stands next to where `edge` would stand.
    """
    children = node.children
    if not children:
        return None, 0
    if len(children) == 1 and children[0].tokens == edge:
        return children[0], len(edge) // TOKEN_BYTES
    at = bisect_left(children, edge, key=_tokens)
    best, longest = None, 0
    for child in children[max(0, at - 1) : at + 1]:
        count = common_prefix(child.tokens, edge) // TOKEN_BYTES
        if count > longest:
            best, longest = child, count
    return best, longest


Alike = TypeVar("Alike", list[int], "array[int]", str, bytes)


def common_prefix(a: Alike, b: Alike) -> int:
    """How many elements two sequences have in common from the first on: tokens, characters or
    bytes.
    """
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low
