"""Replaces two objects of mlx-lm's sequential path: its LRUPromptCache, and the queue of a reply.

Requests take this path one by one: those with a draft model or with images. Used on the generation
thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import can_trim_prompt_cache, trim_prompt_cache

from ..engine.sampling import FormProcessor
from ..engine.stock import GuardedPromptCache
from ..errors import BlockpoolError
from ..forms.form import ReplyForm
from ..mlx_lm_compat import (
    GenerationContext,
    ResponseGenerator,
    Vision,
    make_logits_processors,
    rebind,
)
from ..prefix.cache import ORDINARY, Acquired
from ..prefix.lookup import Lookup
from ..prefix.retention import RetentionPolicy
from ..prefix.salts import SHARED
from ..tier.cache import TieredPrefixCache
from .prompts.job import PreparedImages, PreparedPrompt
from .replies import Reply


class SequentialCache:
    """Replaces mlx-lm's LRUPromptCache, over `prefix` if the model has a pool, and over `stock`
    otherwise.

    `max_tokens`: how many tokens the next fetch reserves after its prompt; `salt`: what that prompt
    is cached under; `lookup` explains the last fetch.
    """

    def __init__(
        self,
        stock: GuardedPromptCache,
        prefix: TieredPrefixCache | DraftedPrefix | None = None,
        max_tokens: int = 0,
    ) -> None:
        self.stock = stock
        self.max_tokens = max_tokens
        self.salt = SHARED
        self.lookup: Lookup | None = None
        self._prefix = prefix
        # What mlx-lm logs the figures of.
        pooled = prefix.prefix if isinstance(prefix, DraftedPrefix) else prefix
        self._counted: Any = stock if pooled is None else pooled

    def fetch_nearest_cache(self, model: Any, tokens: list[int]) -> tuple[Any, list[int]]:
        """Layer caches for a prompt, and the tokens left to compute: at least one.

        On a miss: empty pooled caches.
        """
        if self._prefix is None:
            return self.stock.fetch_nearest_cache(self._key_of(model), tokens)
        acquired = self._prefix.acquire(tokens, self.max_tokens, salt=self.salt)
        self.lookup = acquired.lookup
        return acquired.caches, acquired.rest

    def insert_cache(
        self,
        model: Any,
        tokens: list[int],
        prompt_cache: list[Any],
        *,
        cache_type: str = "assistant",
    ) -> None:
        """Cache a finished sequence.

        Its blocks return to the pool: the caches must not be used again.
        """
        if self._prefix is None:
            self.stock.insert_cache(
                self._key_of(model), tokens, prompt_cache, cache_type=cache_type
            )
        else:
            self._prefix.release(tokens, prompt_cache, cache_type, RetentionPolicy(salt=self.salt))

    def stats_by_type(self) -> dict[str, dict[str, int]]:
        return self._counted.stats_by_type()  # type: ignore[no-any-return]

    @property
    def nbytes(self) -> int:
        return int(self._counted.nbytes)

    def __len__(self) -> int:
        return len(self._counted)

    def close(self) -> None:
        """Release all caches: mlx-lm's generator refers to its prompt cache until the next model
        has started.
        """
        self.stock = self._counted = GuardedPromptCache()
        self._prefix = self.lookup = None

    def _key_of(self, model: Any) -> Any:
        """To mlx-lm's cache, prompts under a salt belong to another model."""
        return (model, self.salt) if self.salt else model


@dataclass(eq=False)
class DraftedPrefix:
    """A prefix cache for the model and one for its draft, each in its own pool.

    Their caches go in one list, as in mlx-lm.
    """

    prefix: TieredPrefixCache
    draft: TieredPrefixCache

    def acquire(self, tokens: list[int], max_tokens: int, salt: bytes = SHARED) -> Acquired:
        """Caches of both that end at the same token.

        Raises what TieredPrefixCache.acquire raises, and then holds nothing.
        """
        max_tokens += 1  # the draft's last tokens are verified one token after the reply's end
        hit = min(self.prefix.look(tokens, salt).hit, self.draft.look(tokens, salt).hit)
        first = self.prefix.acquire(tokens, max_tokens, hit, salt)
        try:
            second = self.draft.acquire(tokens, max_tokens, first.lookup.hit, salt)
        except BlockpoolError:
            self.prefix.discard(first.caches)
            raise
        if second.lookup.hit != first.lookup.hit:
            # Its pool can hold the prompt, but not in addition to the cached part of it.
            self.discard([*first.caches, *second.caches])
            first = self.prefix.acquire(tokens, max_tokens, 0, salt)
            second = self.draft.acquire(tokens, max_tokens, 0, salt)
        # Neither has checkpoints: the draft's cached prefix was the shorter one.
        is_draft_shorter = first.lookup.cause == "no checkpoint"
        lookup = (
            replace(first.lookup, cause="draft", given=(), expected=())
            if is_draft_shorter
            else first.lookup
        )
        return Acquired([*first.caches, *second.caches], first.rest, lookup)

    def release(
        self, tokens: list[int], caches: list[Any], kind: str, policy: RetentionPolicy = ORDINARY
    ) -> None:
        """Cache what both hold of `tokens`. After a draft each of them may hold more."""
        for prefix, own in zip((self.prefix, self.draft), self._parts(caches), strict=True):
            ahead = own[0].offset - len(tokens)
            if ahead > 0 and can_trim_prompt_cache(own):
                trim_prompt_cache(own, ahead)
            prefix.release(tokens, own, kind, policy)

    def discard(self, caches: list[Any]) -> None:
        for prefix, own in zip((self.prefix, self.draft), self._parts(caches), strict=True):
            prefix.discard(own)

    def capacity(self) -> int:
        """The most tokens that one sequence can have in both pools."""
        return min(self.prefix.pool.sequence_capacity(), self.draft.pool.sequence_capacity()) - 1

    def _parts(self, caches: list[Any]) -> tuple[list[Any], list[Any]]:
        first = len(self.prefix.arena.spec.layers)
        return caches[:first], caches[first:]


@dataclass
class SequentialReply:
    """A reply's queue, as mlx-lm's sequential path writes to it.

    `mark` is called for every item, which is the only sign of progress that this path gives. The
    reply's context is held back until the next item: only then is its prompt looked up in the
    caches of the LoadedModel `served`. Once the client has hung up, a prefill ends with
    ConnectionAbortedError and a reply with the token computed last.
    """

    reply: Reply
    served: Any
    mark: Callable[[], None]

    def put(self, item: Any) -> None:
        reply = self.reply
        self.mark()
        if isinstance(item, GenerationContext):
            reply.context = item
            return
        if reply.is_hung_up and isinstance(item, tuple):
            raise ConnectionAbortedError("the client hung up")
        if reply.is_hung_up and reply.context is not None:
            reply.context.stop()
        if isinstance(item, Exception):
            reply.fail(item)
            return
        if not reply.is_begun and reply.context is not None:
            cached = reply.context.prompt_cache_count
            reply.started(self.served, cached, self.served.sequential.lookup)
        reply.put(item)
        if item is None:
            reply.leave()
        elif isinstance(item, tuple):
            reply.watch.progress(*item)
        else:
            reply.watch.token(item.finish_reason)


def serve_alone(generator: Any, served: Any, reply: Reply, stream: mx.Stream) -> None:
    """Serve one request of the LoadedModel `served` to its end.

    Reserves what a draft writes and rolls back, too.
    """
    cache = served.sequential
    cache.max_tokens = reply.args.max_tokens
    cache.lookup = None
    cache.salt = reply.request.options.salt
    queue = SequentialReply(reply, served, generator.health.mark)
    compiled = reply.request.compiled
    serve = (
        generator._serve_single if compiled is None else partial(serving_in(compiled), generator)
    )
    serve((queue, reply.request, reply.args), stream)


def serving_in(form: ReplyForm) -> Callable[..., None]:
    """A copy of mlx-lm's _serve_single() that holds the reply to a form, after what the
    request's own processors have done.
    """

    def processors(args: Any) -> list[Any]:
        return [*make_logits_processors(args), FormProcessor(form)]

    return rebind(ResponseGenerator._serve_single, _make_logits_processors=processors)


def tokenized(prepared: PreparedPrompt) -> Any:
    """Return a prompt as mlx-lm's _tokenize() does.

    Raises ConnectionAbortedError for images that were dropped.
    """
    segments, start = [], 0
    for number, length in enumerate(prepared.segments):
        if number == len(prepared.segments) - 1:
            start = len(prepared.tokens) - length
        segments.append(prepared.tokens[start : start + length])
        start += length
    vision = prepared.images and vision_of(prepared.images)
    return list(prepared.tokens), segments, list(prepared.types), prepared.initial_state, vision


def vision_of(images: PreparedImages) -> Vision:
    # A copy of the list: the socket's thread empties it when the client hangs up.
    pixels = list(images.pixels)
    if not pixels:
        raise ConnectionAbortedError("the request has ended before its images were read")
    return Vision([mx.array(each) for each in pixels], images.starts, list(images.cache_key))
