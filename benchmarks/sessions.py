"""Requests of recorded coding sessions as tokens: equal tokens where the recording had equal text.

Also the same requests as paths of blocks, and what caches of blocks reach that know nothing else:
the ideal, plain LRU and the offline optimum. Knows tokens and block numbers; no pool.
"""

from __future__ import annotations

import csv
import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from mlx_blockpool.spec import BLOCK_TOKENS

TABLE = Path(__file__).parent / "data/claude-code-sessions.csv"
VOCAB = 150_000
# The recording counts shared tokens in blocks of this many.
GRAIN = 64

Tokens = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Recorded:
    """A request.

    `head`: tokens of tools and system text. `known`: of its prompt, tokens that earlier requests
    had too.
    """

    session: int
    at: float
    prompt: Tokens
    output: Tokens
    head: int
    known: int


@dataclass(frozen=True)
class Row:
    """A row of the table.

    `index`: its number within its session; `shared`: tokens in common with request `parent`.
    """

    session: int
    index: int
    at: float
    parent: int
    shared: int
    prompt: int
    output: int
    tools: int
    system: int

    @property
    def key(self) -> tuple[int, int]:
        return self.session, self.index

    @property
    def parent_key(self) -> tuple[int, int]:
        return self.session, self.parent


def rows(divisor: int = 1, sessions: Iterable[int] | None = None) -> list[Row]:
    """The rows of some sessions (None: all) that begin together, by time.

    All lengths are divided by `divisor`.
    """
    chosen, found = None if sessions is None else set(sessions), []
    count: dict[int, int] = defaultdict(int)
    with TABLE.open() as file:
        for row in csv.DictReader(file):
            session = int(row["session"])
            sizes = {
                name: int(row[name]) // divisor
                for name in ("shared", "prompt", "output", "tools", "system")
            }
            sizes |= {name: max(1, sizes[name]) for name in ("prompt", "output")}
            if chosen is None or session in chosen:
                found.append(
                    Row(session, count[session], float(row["at_s"]), int(row["parent"]), **sizes)
                )
            count[session] += 1
    return sorted(found, key=lambda row: (row.at, row.session))


def recorded(
    sessions: Iterable[int] | None = None, divisor: int = 1, vocab: int = VOCAB
) -> Iterator[Recorded]:
    """The requests of rows(), as tokens.

    A request that continues its parent to the end continues its reply too.
    """
    chosen = rows(divisor, sessions)
    # The last one that needs its parent's tokens.
    children = {row.parent_key: row.index for row in sorted(chosen, key=lambda row: row.key)}
    heads: dict[tuple[int, int], Tokens] = {}
    parents: dict[tuple[int, int], Recorded] = {}
    for row in chosen:
        rng = np.random.default_rng(row.key)
        parent = parents.get(row.parent_key)
        if parent is None:
            head = (row.tools, row.system)
            known = heads.get(head)
            base = heads.setdefault(
                head, np.random.default_rng(head).integers(0, vocab, sum(head), np.int32)
            )
            length = 0 if known is None else min(len(known), row.prompt - 1)
        else:
            whole = row.shared + GRAIN // divisor >= len(parent.prompt)
            base = (
                np.concatenate([parent.prompt, parent.output])
                if whole
                else parent.prompt[: row.shared]
            )
            length = min(len(base), row.prompt - 1)
        base = base[: row.prompt]
        prompt = np.concatenate([base, rng.integers(0, vocab, row.prompt - len(base), np.int32)])
        output = rng.integers(0, vocab, row.output, np.int32)
        request = Recorded(row.session, row.at, prompt, output, row.tools + row.system, length)
        parents[row.key] = request
        if children.get(row.parent_key) == row.index:
            parents.pop(row.parent_key, None)
        yield request


class Blocks:
    """The requests as paths of whole blocks, numbered in the order in which they first appear.

    usable:       of each path, how many blocks the prompt can take from a cache.
    uses:         of each block, the requests that have it.
    working_set:  the most blocks at any time that were used before and will be used again.
    known:        tokens of all prompts that earlier requests had too: the reuse of a cache that
                  forgets nothing.
    """

    def __init__(self, requests: Iterable[Recorded]) -> None:
        self.paths: list[list[int]] = []
        self.usable: list[int] = []
        self.parents: list[int] = []
        self.depths: list[int] = []
        self.uses: list[list[int]] = []
        self.known = self.prompt_tokens = 0
        numbers: dict[tuple[int, bytes], int] = {}
        for request in requests:
            self._add(np.concatenate([request.prompt, request.output]), numbers)
            self.usable.append((len(request.prompt) - 1) // BLOCK_TOKENS)
            self.known += request.known
            self.prompt_tokens += len(request.prompt)
        changes = [0] * (len(self.paths) + 1)
        for used in self.uses:
            changes[used[0]] += 1
            changes[used[-1]] -= 1
        self.working_set = max(accumulate(changes))

    @property
    def ideal(self) -> float:
        """The part of all prompt tokens that a cache that forgets nothing reuses."""
        return self.known / self.prompt_tokens

    def _add(self, tokens: Tokens, numbers: dict[tuple[int, bytes], int]) -> None:
        block, path = -1, []
        for depth in range(len(tokens) // BLOCK_TOKENS):
            key = block, tokens[depth * BLOCK_TOKENS : (depth + 1) * BLOCK_TOKENS].tobytes()
            parent, block = block, numbers.setdefault(key, len(numbers))
            if block == len(self.uses):
                self.parents.append(parent)
                self.depths.append(depth)
                self.uses.append([])
            self.uses[block].append(len(self.paths))
            path.append(block)
        self.paths.append(path)


class BlockCache:
    """A cache of `capacity` blocks.

    Requests with a longer path are refused, as a pool refuses them.
    """

    # Whether a block goes before those that need it, and in what order blocks go: the smallest
    # first.
    leaves_first = True

    def __init__(self, blocks: Blocks, capacity: int) -> None:
        self.blocks = blocks
        self.capacity = capacity
        self.last = [-1] * len(blocks.uses)
        self._have: set[int] = set()
        self._children = [0] * len(blocks.uses)
        self._order: list[tuple[int, int, int]] = []
        self._current: dict[int, tuple[int, int, int]] = {}

    def key(self, block: int, now: int) -> tuple[int, int]:
        raise NotImplementedError

    def reuse(self) -> int:
        """Tokens of all prompts that it has when they come."""
        reused = 0
        for now, (path, usable) in enumerate(
            zip(self.blocks.paths, self.blocks.usable, strict=True)
        ):
            if len(path) > self.capacity:
                continue
            reused += next(
                (at for at, block in enumerate(path[:usable]) if block not in self._have), usable
            )
            new = [block for block in path if block not in self._have]
            self._evict(len(self._have) + len(new) - self.capacity, set(path), now)
            self._take(path, new, now)
        return reused * BLOCK_TOKENS

    def _evict(self, count: int, held: set[int], now: int) -> None:
        while count > 0:
            entry = heapq.heappop(self._order)
            block = entry[-1]
            if (
                self._current.get(block) != entry
                or block in held
                or (self.leaves_first and self._children[block])
            ):
                continue
            self._have.discard(block)
            del self._current[block]
            count -= 1
            parent = self.blocks.parents[block]
            if parent >= 0:
                self._children[parent] -= 1
                if (
                    self.leaves_first
                    and parent in self._have
                    and not self._children[parent]
                    and parent not in held
                ):
                    self._queue(parent, now - 1)

    def _take(self, path: list[int], new: list[int], now: int) -> None:
        self._have.update(new)
        for block in new:
            if self.blocks.parents[block] >= 0:
                self._children[self.blocks.parents[block]] += 1
        for block in path:
            self.last[block] = now
            if not (self.leaves_first and self._children[block]):
                self._queue(block, now)

    def _queue(self, block: int, now: int) -> None:
        entry = (*self.key(block, now), block)
        self._current[block] = entry
        heapq.heappush(self._order, entry)


class PlainLRU(BlockCache):
    """Blocks used longest ago go first, of one request the first ones first, whatever needs
    them.
    """

    leaves_first = False

    def key(self, block: int, now: int) -> tuple[int, int]:
        return self.last[block], self.blocks.depths[block]


class Optimum(BlockCache):
    """Belady's: the blocks that are used again last go first, of one request the last ones
    first.
    """

    def __init__(self, blocks: Blocks, capacity: int) -> None:
        super().__init__(blocks, capacity)
        self._next = [0] * len(blocks.uses)

    def key(self, block: int, now: int) -> tuple[int, int]:
        uses, at = self.blocks.uses[block], self._next[block]
        while at < len(uses) and uses[at] <= now:
            at += 1
        self._next[block] = at
        return -(uses[at] if at < len(uses) else len(self.blocks.paths)), -self.blocks.depths[block]
