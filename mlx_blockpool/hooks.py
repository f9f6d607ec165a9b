"""The hooks that a plugin may implement, and the chat messages that normalisers receive.

Messages are in the shape of OpenAI's API. Does not know tokens, models or mlx.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import pluggy

from .spec import ModelCacheSpec

hookspec = pluggy.HookspecMarker("mlx_blockpool")
hookimpl = pluggy.HookimplMarker("mlx_blockpool")

Message: TypeAlias = dict[str, Any]
# The roles of instructions.
SYSTEM = ("system", "developer")


class Replayed(dict[str, Any]):
    """An assistant message that this server has generated, with the sampled `tokens` of its reply.

    A client cannot send one.
    """

    def __init__(self, message: Message, tokens: Sequence[int]) -> None:
        super().__init__(message)
        self.tokens = tokens


class Replies(Protocol):
    """The replies that this server has generated recently."""

    def sampled(self, messages: Sequence[Message]) -> dict[int, Sequence[int]]:
        """The sampled tokens of this conversation's replies, by the index of the message that
        repeats each.
        """


@dataclass(frozen=True)
class Normaliser:
    """A normaliser of chats.

    does:       one sentence that says exactly what the model sees instead.
    apply:      returns the changed chat.
    is_default: whether it is on unless a user chooses `none`.
    """

    name: str
    does: str
    apply: Callable[[Sequence[Message], Replies], list[Message]]
    is_default: bool = False


@dataclass(frozen=True)
class AttentionAdapter:
    """How attention modules of some classes compute from the caches of a pool.

    name:    what logs and `doctor` call it.
    applies: whether it is for modules of a class.
    attend:  attend(module, call, *args, **kwargs) returns what the module would; `call` is the
             __call__ of its class, and the other arguments are those of the module. Among them is a
             cache of one sequence, or of a batch of them.
    source:  the installed plugin that it is from, by name; plugins leave it empty.
    """

    name: str
    applies: Callable[[type], bool]
    attend: Callable[..., Any]
    source: str = field(default="", kw_only=True)


def _snapshot(cache: Any) -> Any:
    return cache.prefix_cache_snapshot()


def _restore(cache: Any, saved: Any) -> None:
    cache.prefix_cache_restore(saved)


@dataclass(frozen=True)
class CacheAdapter:
    """How the pool holds what the caches of another class than mlx-lm's hold: arrays with a row for
    each token, or a state, which is resumed where it was saved.

    cls:     the class, one of whose instances the model's `make_cache` returns for a layer.
    arrays:  the arrays of such a cache, [1, heads, tokens, dim]: keys, values, others; None: it is
             a state.
    write:   the method by which the model appends rows [1, heads, n, dim] of each array; it returns
             all rows of each.
    size:    the attribute that counts the tokens. A state has neither.
    save:    save(cache) returns all that a state holds: arrays, numbers and texts in lists, tuples
             and dicts.
    restore: restore(cache, saved) puts that into an empty cache, which is a copy of the one that
             `make_cache` returns.
    source:  the installed plugin that it is from, by name; plugins leave it empty.
    """

    cls: type
    arrays: Callable[[Any], Sequence[Any]] | None = None
    write: str = "update_and_fetch"
    size: str = "offset"
    save: Callable[[Any], Any] = field(default=_snapshot, kw_only=True)
    restore: Callable[[Any, Any], object] = field(default=_restore, kw_only=True)
    source: str = field(default="", kw_only=True)


def is_text(part: Any) -> bool:
    """Return whether a part of a message's content is text."""
    return isinstance(part, dict) and isinstance(part.get("text"), str)


def text_of(message: Message, between: str = "") -> str:
    """The text of a message, which is a string or parts."""
    content = message.get("content")
    if isinstance(content, list):
        return between.join(part["text"] for part in content if is_text(part))
    return content if isinstance(content, str) else ""


def map_text(message: Message, change: Callable[[str], str]) -> Message:
    """A message with its text changed, which is a string or parts."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": change(content)}
    if isinstance(content, list):
        return {
            **message,
            "content": [
                {**part, "text": change(part["text"])} if is_text(part) else part
                for part in content
            ],
        }
    return message


def parts_of(content: Any) -> list[dict[str, Any]]:
    """The content of a message as parts; an empty text has none."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return list(content or ())


# -- hooks -----------------------------------------------------------------------------------------


@hookspec(firstresult=True)
def model_cache_spec(model: Any, config: dict[str, Any], model_id: str) -> ModelCacheSpec | None:
    """Describe the caches of one model, or return None to leave it to another provider.

    `config` is the model's config.json, and `model` the loaded mlx-lm model, or None if only its
    config.json is available. The last registered plugin is called first: an installed plugin
    overrides a bundled one. What it says is proven when the model is loaded, with about 550 tokens
    or as many as pass its longest window or chunk; one of more than 1,100 tokens is only compared
    where the model's own cache, of mlx-lm's class, has the same.
    """


@hookspec(firstresult=True)
def model_classes(config: dict[str, Any]) -> tuple[type, type] | None:
    """Return the model class and its ModelArgs class for a config.json, or None to leave it to
    another plugin and to mlx-lm.

    They have the interface of those in mlx-lm's model files: `ModelArgs.from_dict(config)`,
    `Model(args)`, `model(tokens, cache=caches)` that returns logits, `layers` or `make_cache`, and
    `sanitize(weights)` where the files have other names. Raise UnknownModelTypeError for a model
    type that the plugin has but cannot serve.
    """


@hookspec
def prompt_normalisers() -> list[Normaliser]:  # type: ignore[empty-body]
    """Normalisers for volatile parts of prompts; each is off unless a user names it or it
    is_default.
    """


@hookspec
def attention_adapters() -> list[AttentionAdapter]:  # type: ignore[empty-body]
    """Adapters for attention that is not a plain call of mlx-lm's scaled_dot_product_attention.

    They are used only where a few tokens give the logits of the model's own caches.
    """


@hookspec
def cache_adapters() -> list[CacheAdapter]:  # type: ignore[empty-body]
    """Adapters for cache classes that no layer kind has, so that no spec has to be written.

    The model calls a pooled cache as it calls one of such a class. What an adapter says is proven
    like a plugin's spec when the model is loaded. A class with prefix_cache_snapshot() and
    prefix_cache_restore() is a state without an adapter.
    """
