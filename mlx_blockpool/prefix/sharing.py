"""Who needs an edge apart from one agent: other agents, running requests, and what follows it. In
memory and on disk alike.

Knows hashes, tokens and nodes; no blocks, no files. Owned by the thread that owns the trie.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import TypeAlias

from .trie import Node, PrefixRef, Trie

# Token ids, and the salt that they are looked up under.
Prompt: TypeAlias = tuple[Sequence[int], bytes]


class SharedPaths:
    """The paths of several agents, by their names, and which of them need an edge.

    `edges`: the hashes of edges that end as a path does, though another edge begins with their
    tokens. That path needs no other.
    """

    def __init__(self, paths: Mapping[str, PrefixRef], edges: Container[bytes] = ()) -> None:
        self._users: dict[bytes, list[str]] = {}
        # Ends within a block: by the hash before them, and by their tokens in that block.
        self._ends: dict[bytes, dict[int, set[bytes]]] = {}
        for name, path in paths.items():
            for digest in path.hashes:
                self._users.setdefault(digest, []).append(name)
            if path.partial_tokens and path.hashes[-1] not in edges:
                before = path.hashes[-2] if len(path.hashes) > 1 else b""
                self._ends.setdefault(before, {}).setdefault(path.partial_tokens, set()).add(
                    path.hashes[-1]
                )

    def users(self, node: Node) -> set[str]:
        """The agents that need an edge of the trie."""
        ends = self._ends.get(
            node.parent.hash if node.start and node.parent is not None else b"", {}
        )
        within = (node.hash_at(node.start + size) for size in ends if size <= node.end - node.start)
        return {name for digest in {node.hash, *within} for name in self._users.get(digest, ())}

    def is_of_one(self, digest: bytes) -> bool:
        """Return whether one path alone has the block with this hash."""
        return len(self._users.get(digest, ())) == 1

    def num_shared(self, nodes: Sequence[Node], path: PrefixRef) -> int:
        """How many of the first edges of one of these paths another one needs too; `nodes` are
        its cached edges.
        """
        # A hash names all tokens before it: those that others have too come first.
        count = bisect_left(
            path.hashes, True, key=lambda digest: len(self._users.get(digest, ())) < 2
        )
        if count >= len(nodes):
            return count
        return count + (len(self.users(nodes[count])) > 1)


def exclusive_from(
    trie: Trie,
    path: PrefixRef,
    nodes: Sequence[Node],
    shared: SharedPaths,
    in_use: Iterable[Prompt] = (),
) -> int:
    """From which of its `nodes` on no other path of `shared` needs a path, no prompt `in_use`,
    and nothing that follows it.
    """
    first = shared.num_shared(nodes, path)
    for tokens, salt in in_use:
        # Two paths that diverge never meet again.
        others = set(trie.match(tokens, salt).path)
        first = max(first, bisect_left(nodes, True, key=lambda node: node not in others))
    own = len(nodes)
    while (
        own > first
        and nodes[own - 1].end <= path.tokens
        and not set(nodes[own - 1].children) - set(nodes[own : own + 1])
    ):
        own -= 1
    return own
