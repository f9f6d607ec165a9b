"""What a lookup found and why not more. Knows token ids, not their text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..spec import BLOCK_TOKENS
from .known import KnownBlocks
from .trie import Match, decode, encode

CAUSES = {
    "all": "every token but the last was known",
    "new": "nothing with this beginning was seen before",
    "differs": "a known prompt goes on with other tokens",
    "longer": "the prompt goes on where the known one ends",
    "evicted": "the next tokens were known and their blocks were evicted",
    "no checkpoint": "more tokens are known, but no checkpoint of the window layers lies between",
    "no room": "the tokens are known, but the pool has no room to go on from them beside them",
}
SHOWN = 8


@dataclass(frozen=True)
class Lookup:
    """`hit` of `tokens` prompt tokens need not be computed; `known` of them are in the trie.

    `cause` is a key of CAUSES. Where tokens differ, `given` and `expected` are up to 8 ids from the first different one on.
    """

    tokens: int
    known: int
    hit: int
    cause: str
    given: tuple[int, ...] = ()
    expected: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.hit} of {self.tokens} tokens cached ({self.cause}: {CAUSES[self.cause]})"


def explain(known: KnownBlocks, tokens: Sequence[int], match: Match, hit: int) -> Lookup:
    """The lookup of `tokens` whose match could be taken over up to `hit`."""
    cause, expected = _cause(known, tokens, match, hit)
    given = tuple(tokens[match.tokens : match.tokens + SHOWN]) if expected else ()
    return Lookup(len(tokens), match.tokens, hit, cause, given, tuple(expected[:SHOWN]))


def path_of(known: KnownBlocks, tokens: Sequence[int]) -> tuple[list[bytes], int]:
    """The hashes of the blocks that a known beginning of `tokens` lies in, the last one maybe a partial one, and its length."""
    match = known.trie.match(tokens)
    hashes = [node.hash for node in match.nodes]
    return hashes + ([match.partial.hash_at(match.tokens)] if match.partial is not None else []), match.tokens


def _cause(known: KnownBlocks, tokens: Sequence[int], match: Match, hit: int) -> tuple[str, list[int]]:
    most = len(tokens) - 1
    if hit >= most:
        return "all", []
    if hit < min(match.tokens, most):
        return "no checkpoint", []
    parent = match.nodes[-1] if match.nodes else known.trie.root
    if known.was_evicted(parent, encode(tokens[parent.end : parent.end + BLOCK_TOKENS])):
        return "evicted", []
    rest = decode(match.partial.tokens)[match.count :] if match.partial else []
    if match.partial is None and match.nodes and parent.children:
        rest = decode(parent.children[0].tokens)
    if rest:
        return "differs", rest
    return ("longer" if match.tokens else "new"), []
