"""Life: a prefix cache for a subject, in memory or over a store in a folder, and conversations that use it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import mlx.core as mx

from ..config import StoreConfig
from ..prefix.trie import naming
from ..spec import BLOCK_TOKENS, WindowLayer
from ..store.fs import Disk
from ..store.prompt_store import PromptStore
from ..tier.cache import TieredPrefixCache
from .runs import content, cut, run
from .subject import Subject

ROOM = 16


class Unsynced(Disk):
    """A disk without syncs: its folder is deleted after the check, so it need not survive a power loss."""

    def sync(self, fd: int) -> None:
        """Does nothing: no record has to survive a crash of the machine."""


class Life:
    """What a server does with its prefix cache from start to stop, without the server."""

    def __init__(self, subject: Subject, folder: Path | None = None) -> None:
        self.subject = subject
        store = None
        if folder is not None:
            config = StoreConfig(folder=folder, min_free_bytes=0)
            store = PromptStore(config, "conformance", naming, {"model_id": subject.model_id}, Unsynced())
        self.prefix = TieredPrefixCache(subject.slabs(), store=store)

    def serve(self, tokens: Sequence[int], places: Iterable[int] = ()) -> tuple[int, list[mx.array]]:
        """Resume from the longest cached prefix, and insert the prompt at `places` and at its end.

        Returns the hit, and the logits behind the first token beyond it, each place and the prompt.
        """
        fetched = self.prefix.acquire(list(tokens), ROOM)
        hit = done = fetched.lookup.hit
        found = []
        for part in cut(fetched.rest, (place - hit for place in (hit + 1, *places))):
            found += run(self.subject.model, fetched.caches, [part])
            done += len(part)
            if done in places:
                self.prefix.insert(list(tokens[:done]), fetched.caches, "system")
        self.prefix.release(list(tokens), fetched.caches)
        self.prefix.check()
        return hit, found

    def find(self, tokens: Sequence[int], at_most: int | None = None) -> tuple[int, list[bytes]]:
        """Look a prompt up; its hit, and the content of the caches that it receives."""
        fetched = self.prefix.acquire(list(tokens), ROOM, at_most)
        found = fetched.lookup.hit, content(fetched.caches)
        self.prefix.discard(fetched.caches)
        return found


class Conversation:
    """A prompt whose beginning is kept by itself, at `system` tokens, and where one that has it in common can be resumed."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.system = max([BLOCK_TOKENS, *subject.short_sizes]) + 14
        self.tokens = subject.tokens(11, self.system + 30)
        self.forked = [*self.tokens[: self.system + 10], *subject.tokens(12, 7)]
        self.longer = [*self.tokens, *subject.tokens(13, 9)]

    def resumed_at(self, known: int, places: Sequence[int]) -> int:
        """The token at which a prompt with `known` common tokens is resumed by its spec: any, or one with a checkpoint."""
        spec = self.subject.spec
        windows = [leaf.max_size for leaf in spec.leaves if isinstance(leaf, WindowLayer)]
        later = [place for place in places if place >= known]
        unwrapped = not self.subject.has_states and bool(later) and min(later) < min(windows, default=0)
        if not spec.needs_checkpoints or unwrapped:
            return known
        return max((place for place in places if place <= known), default=0)
