"""Known prefixes: a tree whose edges are blocks of 256 tokens. Knows tokens and hashes; no arrays, no pool, no disk.

The last edge of a sequence may be shorter than a block. Siblings may start alike: matching inside a block is by token.
A salt has a root of its own: prefixes under different salts never share a hash, an edge or a block.
Owned by the generation thread.
"""

from __future__ import annotations

import hashlib
import struct
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from typing import Any
from weakref import WeakValueDictionary

from ..spec import BLOCK_TOKENS
from .salts import SALT_BYTES, SHARED

# Token ids as 64-bit integers: image patches have negative ids of 60 bits.
TOKEN_BYTES = 8
EDGE_BYTES = BLOCK_TOKENS * TOKEN_BYTES
# Of many siblings, so many on each side are looked at.
MAX_SIBLINGS = 64
_FULL_EDGE = struct.Struct(f"{BLOCK_TOKENS}q")


@dataclass(eq=False)
class Checkpoint:
    """What layers that forget held at one token position.

    rings:   per window group the ring's block ids and its ring index.
    states:  per state leaf its arrays, copies; `nbytes` of all of them.
    kind:    what ends here: system, user or assistant.
    owner: whom it is charged to; None: nobody.
    noted:   whether whoever writes to disk was told of it.
    """

    position: int
    rings: dict[int, tuple[tuple[int, ...], int]]
    states: dict[int, list[Any]] = field(default_factory=dict, repr=False)
    kind: str = "assistant"
    owner: str | None = None
    noted: bool = False

    @cached_property
    def nbytes(self) -> int:
        return sum(a.nbytes for arrays in self.states.values() for a in arrays if a is not None)


@dataclass(eq=False)
class Pin:
    """What must stay in memory: the blocks of `nodes`, and of their checkpoints the one at `position`."""

    nodes: list[Node] = field(repr=False)
    position: int


@dataclass(eq=False)
class Node:
    """One edge: up to 256 tokens, and the block of each full layer group that holds them.

    `hash` names the whole prefix up to here. `checkpoints` are by absolute token position. `resident`: its blocks are in the
    pool. `stored`: they are on disk, or about to be. `cuts`: up to which tokens what windows held of them is there too, and at
    which position it was cut; `saved`: behind which tokens the states are. `covers`: shorter edges whose records serve until this
    one is on disk itself. `account`: whom its blocks are charged to; None: nobody. `salt`: that of a root.
    """

    parent: Node | None = field(repr=False)
    start: int
    tokens: bytes = field(repr=False)
    hash: bytes
    blocks: tuple[int, ...] = ()
    kind: str = "assistant"
    resident: bool = True
    stored: bool = False
    owner: str | None = None
    pins: frozenset[Pin] = frozenset()
    merged_into: Node | None = field(default=None, repr=False)
    children: list[Node] = field(default_factory=list, repr=False)
    checkpoints: dict[int, Checkpoint] = field(default_factory=dict)
    window_records: dict[int, int] = field(default_factory=dict)
    state_records: set[int] = field(default_factory=set)
    superseded: list[Node] = field(default_factory=list, repr=False)
    salt: bytes = SHARED

    @property
    def end(self) -> int:
        return self.start + len(self.tokens) // TOKEN_BYTES

    @property
    def is_full(self) -> bool:
        return len(self.tokens) == EDGE_BYTES

    @property
    def latest(self) -> Node:
        """This node, or the longer one that has taken its place."""
        node = self
        while node.merged_into is not None:
            node = node.merged_into
        return node

    @staticmethod
    def name(parent: Node, edge: bytes) -> bytes:
        return name_of(parent.hash, edge)

    def hash_at(self, end: int) -> bytes:
        """The hash of the prefix that ends with the token before `end`, which is one of this edge."""
        if end == self.end or self.parent is None:
            return self.hash
        return name_of(self.parent.hash, self.tokens[: (end - self.start) * TOKEN_BYTES])

    def path(self) -> list[Node]:
        """From the first edge to this one."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def near_siblings(self) -> Iterator[tuple[Node, int]]:
        """This node and the siblings that start like it, each with the absolute position up to which they are alike."""
        yield self, self.end
        siblings = self.parent.children if self.parent is not None else []
        if len(siblings) > 1:
            at = bisect_left(siblings, self.tokens, key=_tokens)
            for nearby in (siblings[at + 1 : at + 1 + MAX_SIBLINGS], siblings[max(0, at - MAX_SIBLINGS) : at][::-1]):
                alike = ((node, _common_tokens(node.tokens, self.tokens)) for node in nearby)
                yield from ((node, self.start + count) for node, count in takewhile(lambda found: found[1], alike))

    def subtree(self) -> Iterator[Node]:
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack += node.children


@dataclass(frozen=True)
class Match:
    """The longest known prefix: whole edges `nodes`, then `count` tokens of `partial` (None: 0 tokens)."""

    nodes: list[Node]
    partial: Node | None
    count: int

    @property
    def tokens(self) -> int:
        return len(self.nodes) * BLOCK_TOKENS + self.count

    @property
    def path(self) -> list[Node]:
        return self.nodes if self.partial is None else [*self.nodes, self.partial]

    def last_checkpoint(self, at_most: int | None = None) -> tuple[Node | None, int]:
        """The position of the last checkpoint in a match, or in its first tokens, and the node that has it; (None, 0): none."""
        last = self.tokens if at_most is None else at_most
        kin = ((node, min(last, alike)) for on_path in self.path for node, alike in on_path.near_siblings())
        placed = ((node, position) for node, limit in kin for position in node.checkpoints if position <= limit)
        return max(placed, key=lambda found: found[1], default=(None, 0))

    def in_memory(self) -> Match:
        """The part of it whose blocks are in the pool."""
        nodes = list(takewhile(lambda node: node.resident, self.nodes))
        if len(nodes) == len(self.nodes) and self.partial is not None and self.partial.resident:
            return self
        return Match(nodes, None, 0)


class Trie:
    """`namespace` names what the blocks were computed with: weights, adapter, spec, KV dtype."""

    def __init__(self, namespace: str) -> None:
        seed = hashlib.blake2b(namespace.encode(), digest_size=32).digest()
        self.root = Node(None, 0, b"", seed)
        # A salted root stays for as long as an edge, or a caller, refers to it.
        self._salted: WeakValueDictionary[bytes, Node] = WeakValueDictionary()
        # Every edge by its hash, and some that are no longer part of the tree.
        self._named: WeakValueDictionary[bytes, Node] = WeakValueDictionary()

    def __iter__(self) -> Iterator[Node]:
        for root in self.roots():
            nodes = root.subtree()
            next(nodes)
            yield from nodes

    def roots(self) -> list[Node]:
        """The shared root, then those of the salts that have edges."""
        return [self.root, *self._salted.values()]

    def begin(self, salt: bytes = SHARED) -> Node:
        """The root of the prefixes under a salt."""
        if not salt:
            return self.root
        root = self._salted.get(salt)
        if root is None:
            assert len(salt) == SALT_BYTES, f"{len(salt)} bytes of salt; needed {SALT_BYTES}"
            root = Node(None, 0, b"", name_of(self.root.hash, salt), salt=salt)
            self._salted[salt] = root
        return root

    def begin_of(self, parent: bytes, salt: str | None) -> Node | None:
        """The root whose hash is `parent`, under the salt that a record names in hexadecimal; None: there is no such root."""
        if not salt:
            return self.root if parent == self.root.hash else None
        try:
            digest = bytes.fromhex(salt)
        except ValueError:
            return None
        root = self.begin(digest) if len(digest) == SALT_BYTES else None
        return root if root is not None and root.hash == parent else None

    def match(self, tokens: Sequence[int], salt: bytes = SHARED) -> Match:
        """The longest prefix of `tokens` that is known under a salt. Changes nothing."""
        node = self.begin(salt)
        nodes: list[Node] = []
        for start in range(0, len(tokens), BLOCK_TOKENS):
            edge = encode(tokens[start : start + BLOCK_TOKENS])
            child, count = _closest(node, edge)
            if child is None:
                break
            if count < BLOCK_TOKENS:
                return Match(nodes, child, count)
            nodes.append(child)
            node = child
        return Match(nodes, None, 0)

    def child(self, node: Node, edge: bytes) -> Node | None:
        """The child that has all of these tokens, if there is one."""
        child, count = _closest(node, edge)
        return child if child is not None and count * TOKEN_BYTES == len(edge) else None

    def named(self, parent: Node, digest: bytes) -> Node | None:
        """The child whose whole edge `digest` names, or the longer one that has taken its place; None: there is none."""
        found = self._named.get(digest)
        found = None if found is None else found.latest
        if found is None or found.parent is not parent:
            return None
        at = bisect_left(parent.children, found.tokens, key=_tokens)
        return found if at < len(parent.children) and parent.children[at] is found else None

    def add(self, node: Node, edge: bytes, blocks: tuple[int, ...], kind: str) -> tuple[Node, list[Node]]:
        """A new child. Returns it and the shorter siblings that it makes superfluous, already out of the tree.

        Their checkpoints and pins have moved to the new child; what they know of blocks is the caller's to forget.
        """
        new = Node(node, node.end, edge, Node.name(node, edge), blocks, kind)
        shorter = [c for c in node.children if len(c.tokens) < len(edge) and edge.startswith(c.tokens)]
        for old in shorter:
            new.checkpoints.update(old.checkpoints)
            new.window_records.update(old.window_records)
            new.state_records.update(old.state_records)
            new.pins, old.pins = new.pins | old.pins, frozenset()
            old.merged_into = new
            node.children.remove(old)
        insort(node.children, new, key=_tokens)
        self._named[new.hash] = new
        return new, shorter

    def put_back(self, node: Node) -> None:
        """A node that was merged into a longer one, which has gone."""
        assert node.parent is not None
        node.merged_into, node.children, node.checkpoints = None, [], {}
        insort(node.parent.children, node, key=_tokens)
        self._named[node.hash] = node

    def remove(self, node: Node) -> list[Node]:
        """Cut a node and all below it off. Returns them."""
        assert node.parent is not None, "the root cannot be removed"
        node.parent.children.remove(node)
        return list(node.subtree())

    def check(self) -> None:
        """The invariant: order, hashes and positions. Raises AssertionError."""
        for node in self:
            parent = node.parent
            assert parent is not None
            assert parent.end == node.start, f"node starts at {node.start}, its parent ends at {parent.end}"
            assert parent.parent is None or parent.is_full, f"the edge before token {node.start} is not full"
            edges = [c.tokens for c in parent.children]
            assert edges == sorted(edges), f"children at token {node.start} are out of order"
            covered = [e for e in edges if len(e) > len(node.tokens) and e.startswith(node.tokens)]
            assert not covered, f"the edge at token {node.start} is part of a longer one"
            assert node.hash == Node.name(parent, node.tokens), f"hash at {node.start}"
            outside = [p for p in node.checkpoints if not node.start < p <= node.end]
            assert not outside, f"checkpoints {outside} outside of ({node.start}, {node.end}]"


def name_of(parent: bytes, edge: bytes) -> bytes:
    """The hash of a prefix, from that of its parent and its last tokens."""
    return hashlib.blake2b(parent + edge, digest_size=32).digest()


def naming(parent: bytes, tokens: Sequence[int]) -> bytes:
    """name_of() for token ids: the rule by which the store checks the names of its records."""
    return name_of(parent, encode(tokens))


def encode(tokens: Sequence[int]) -> bytes:
    """Token ids as bytes: compared and hashed many times faster than a list, and struct packs faster than array or numpy."""
    return (_FULL_EDGE if len(tokens) == BLOCK_TOKENS else struct.Struct(f"{len(tokens)}q")).pack(*tokens)


def decode(edge: bytes) -> list[int]:
    return list(struct.unpack(f"{len(edge) // TOKEN_BYTES}q", edge))


def _tokens(node: Node) -> bytes:
    return node.tokens


def _closest(node: Node, edge: bytes) -> tuple[Node | None, int]:
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
        count = _common_tokens(child.tokens, edge)
        if count > longest:
            best, longest = child, count
    return best, longest


def _common_tokens(a: bytes, b: bytes) -> int:
    size = min(len(a), len(b))
    if a[:size] == b[:size]:
        return size // TOKEN_BYTES
    low, high = 0, size // TOKEN_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        if a[: middle * TOKEN_BYTES] == b[: middle * TOKEN_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low
