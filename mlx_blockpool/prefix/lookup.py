"""What a lookup found and why not more. Knows token ids, not their text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..spec import BLOCK_TOKENS
from ..store.hashing import encode
from .index import KVIndex
from .salts import SHARED
from .trie import PrefixRef, continuation

CAUSES = {
    "all": "every token but the last is known",
    "new": "nothing with this beginning was seen before",
    "differs": "a known prompt continues with other tokens",
    "longer": "the prompt continues where the known one ends",
    "evicted": "the next tokens were known and their blocks were evicted",
    "on disk": "the next tokens are on disk, but reading them takes longer than computing them, "
    "or is "
    "not possible now",
    "no checkpoint": "more tokens are known, but no checkpoint of the window layers lies between",
    "no room": "the tokens are known, but a sequence that continues from them does not fit in the "
    "pool",
    "draft": "more tokens are known to the model, but not to its draft",
}
# Enough to complete most lines of a text.
SHOWN = 64


@dataclass(frozen=True)
class Lookup:
    """`hit` of `tokens` prompt tokens need not be computed; `matched` are in the trie.

    `cause` is a key of CAUSES. Where the known tokens end in others, `given` and `expected` are up
    to SHOWN ids of the prompt and of the known one, both from token number `known` on. `restored`:
    how many of the hit were brought back from disk for it.
    """

    tokens: int
    matched: int
    hit: int
    cause: str
    given: tuple[int, ...] = ()
    expected: tuple[int, ...] = ()
    restored: int = 0

    def __str__(self) -> str:
        return f"{self.hit} of {self.tokens} tokens cached ({self.cause}: {CAUSES[self.cause]})"


def explain(
    index: KVIndex, tokens: Sequence[int], match: PrefixRef, hit: int, salt: bytes = SHARED
) -> Lookup:
    """The lookup of `tokens` under a salt whose match could be resumed at `hit`."""
    cause = _cause(index, tokens, match, hit, salt)
    expected = (
        continuation(match.path[-1], match.tokens, SHOWN)
        if match.path and cause in ("differs", "no checkpoint") and match.tokens < len(tokens) - 1
        else []
    )
    given = tokens[match.tokens : match.tokens + SHOWN] if expected else ()
    return Lookup(len(tokens), match.tokens, hit, cause, tuple(given), tuple(expected))


def compared_with(lookup: Lookup, tokens: Sequence[int], own: Sequence[int]) -> tuple[Lookup, bool]:
    """The lookup of `tokens` that expects what follows in `own`, and whether `own` begins like
    the match.
    """
    at = lookup.matched
    if len(own) <= at or list(own[:at]) != list(tokens[:at]):
        return lookup, False
    return replace(lookup, expected=tuple(own[at : at + SHOWN])), True


def _cause(index: KVIndex, tokens: Sequence[int], match: PrefixRef, hit: int, salt: bytes) -> str:
    most = len(tokens) - 1
    if hit >= most:
        return "all"
    if hit < min(match.tokens, most):
        return "no checkpoint"
    parent = match.full_nodes[-1] if match.full_nodes else index.trie.root_of(salt)
    if index.was_evicted(parent, encode(tokens[parent.end : parent.end + BLOCK_TOKENS])):
        return "evicted"
    is_elsewhere = match.partial is None and any(not child.in_memory for child in parent.children)
    if is_elsewhere and index.trie.match(tokens, salt).tokens > match.tokens:
        return "on disk"
    if match.path and (match.tokens < match.path[-1].end or match.path[-1].children):
        return "differs"
    return "longer" if match.tokens else "new"
