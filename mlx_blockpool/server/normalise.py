"""The normalisers of prompts, and the replies that this server has generated lately.

Any thread may call this.
"""

from __future__ import annotations

import json
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import pluggy

from ..config import HistoryConfig
from ..errors import PluginError
from ..hooks import Message, Normaliser, Replayed, is_text, text_of

# Tokens of a prompt that are remembered before its reply: the template's opening of the reply is
# among them.
BEFORE = 64
LAST = "replay"


@dataclass(frozen=True)
class RememberedReply:
    """`tokens` as they were sampled for an agent, after a prompt of `start` tokens, the last of
    which are `before`.

    `source`: a digest of what that prompt was rendered from, without the replies in it. `agent`:
    None if the request names none.
    """

    tokens: array[int]
    start: int = 0
    before: tuple[int, ...] = ()
    source: bytes = b""
    agent: str | None = None


class RememberedReplies:
    """Replies as they were sampled, found by their scope and the conversation before them. The
    oldest are dropped.

    `scope`: what requests must have in common to share replies. No conversation of one scope is
    found in another.
    """

    def __init__(self) -> None:
        self._replies: OrderedDict[bytes, RememberedReply] = OrderedDict()
        self._tokens = 0
        self._changing = threading.Lock()

    def remember(
        self,
        messages: Sequence[Message],
        reply: Message,
        tokens: Sequence[int],
        scope: bytes = b"",
        prompt: Sequence[int] = (),
        context: Any = None,
        agent: str | None = None,
    ) -> None:
        """`messages`: what the model has seen, as `prompt`; `reply`: as it was sent; `tokens`: as
        they were sampled.

        `context`: what the prompt was rendered from in addition to the messages.
        """
        *_, key = _keys([*messages, reply], scope)
        *_, source = _sources([*messages, reply], context)
        remembered = RememberedReply(
            array("i", tokens), len(prompt), tuple(prompt[-BEFORE:]), source, agent
        )
        with self._changing:
            before = self._replies.pop(key, None)
            self._tokens += len(remembered.tokens) - (0 if before is None else len(before.tokens))
            self._replies[key] = remembered
            while (
                len(self._replies) > HistoryConfig.replies
                or self._tokens > HistoryConfig.reply_tokens
            ):
                self._tokens -= len(self._replies.popitem(last=False)[1].tokens)

    def sampled(self, messages: Sequence[Message], scope: bytes = b"") -> dict[int, Sequence[int]]:
        return {i: reply.tokens for i, reply in self._found(messages, scope).items()}

    def rendered_anew(
        self, messages: Sequence[Message], scope: bytes, context: Any
    ) -> list[RememberedReply]:
        """The replies in a chat all of whose other messages, up to each, are as they were when
        it was sampled.
        """
        found = self._found(messages, scope)
        if not found:
            return []
        return [
            found[i]
            for i, source in enumerate(_sources(messages, context))
            if i in found and found[i].source == source
        ]

    def _found(self, messages: Sequence[Message], scope: bytes) -> dict[int, RememberedReply]:
        keys = [
            (i, key)
            for i, key in enumerate(_keys(messages, scope))
            if messages[i].get("role") == "assistant"
        ]
        with self._changing:
            return {i: self._replies[key] for i, key in keys if key in self._replies}


@dataclass(frozen=True)
class RepliesInScope:
    """The remembered replies that a normaliser may read."""

    replies: RememberedReplies
    scope: bytes

    def sampled(self, messages: Sequence[Message]) -> dict[int, Sequence[int]]:
        return self.replies.sampled(messages, self.scope)


def scope_of(owner: str | None, salt: bytes, model: str | None) -> bytes:
    """The scope of requests of one owner under one salt.

    Tokens of another model would stand for other text.
    """
    return json.dumps([owner, salt.hex(), model]).encode()


class Normalisers:
    """The normalisers of all plugins, by name. `default`: the names for requests that choose none.

    `chosen`: names that the operator adds to those that are on by default; `none` among them turns
    these off.
    """

    def __init__(self, manager: pluggy.PluginManager, chosen: Sequence[str] = ()) -> None:
        self.replies = RememberedReplies()
        self.by_name = _named(
            normaliser for found in manager.hook.prompt_normalisers() for normaliser in found
        )
        self.default = self._with_defaults(chosen)

    def chosen(self, header: str | None) -> tuple[str, ...]:
        """The normalisers of a request with this X-Normalise header.

        Raises ValueError for an unknown name.
        """
        return (
            self.default
            if header is None
            else self._with_defaults([name.strip() for name in header.split(",")])
        )

    def _with_defaults(self, chosen: Sequence[str]) -> tuple[str, ...]:
        """Raises ValueError for a name that no plugin has."""
        names = [name for name in chosen if name not in ("", "none")]
        unknown = [name for name in names if name not in self.by_name]
        if unknown:
            choices = ", ".join(sorted(self.by_name))
            raise ValueError(
                f"Unknown normaliser {', '.join(unknown)}. Choose among {choices}, or none."
            )
        default = (
            []
            if "none" in chosen
            else [name for name, normaliser in self.by_name.items() if normaliser.is_default]
        )
        # Replies are remembered as the other normalisers left the chat, so they are put back last.
        return tuple(sorted(dict.fromkeys([*default, *names]), key=lambda name: name == LAST))

    def apply(self, names: Sequence[str], messages: list[Message]) -> list[Message]:
        """Return the normalised chat.

        Raises PluginError with the name of a normaliser that fails.
        """
        return self.changes(names, messages)[0]

    def changes(
        self, names: Sequence[str], messages: list[Message], scope: bytes = b""
    ) -> tuple[list[Message], tuple[str, ...]]:
        """Return the normalised chat, and the names of the normalisers that changed something.

        `scope`: whose replies may be put back.
        """
        changed = []
        replies = RepliesInScope(self.replies, scope)
        for name in names:
            try:
                after = self.by_name[name].apply(messages, replies)
            except Exception as error:
                # A plugin's code may raise anything.
                raise PluginError(
                    f"Normaliser {name} raised {type(error).__name__}: {error}."
                ) from error
            if after != messages or (
                name == LAST and any(isinstance(message, Replayed) for message in after)
            ):
                changed.append(name)
            messages = after
        return messages, tuple(changed)

    def descriptions(self) -> list[str]:
        """Describe each default normaliser in a sentence."""
        return [f"{name}: {self.by_name[name].does}" for name in self.default]


def _named(found: Iterable[Any]) -> dict[str, Normaliser]:
    named: dict[str, Normaliser] = {}
    for normaliser in found:
        if not isinstance(normaliser, Normaliser):
            raise PluginError(
                f"A plugin's prompt_normalisers returned a {type(normaliser).__name__} among its "
                "Normalisers."
            )
        # The hook calls the last registered plugin first, which overrides.
        named.setdefault(normaliser.name, normaliser)
    return named


def _keys(messages: Sequence[Message], scope: bytes) -> Iterator[bytes]:
    """A key of the conversation up to each message: a reply is found only under its scope and
    its whole conversation.
    """
    conversation = blake2b(blake2b(scope, digest_size=16).digest(), digest_size=16)
    for message in messages:
        conversation.update(_shown(message))
        yield conversation.digest()


def _sources(messages: Sequence[Message], context: Any) -> Iterator[bytes]:
    """Before each message, a digest of `context` and of the messages that are not replies, to
    the letter.
    """
    digest = blake2b(json.dumps(context, sort_keys=True, default=str).encode(), digest_size=16)
    for message in messages:
        yield digest.digest()
        if message.get("role") != "assistant":
            digest.update(_shown(message, ""))


def _shown(message: Message, blanks: str | None = None) -> bytes:
    """The part of a message that stays the same however clients write its spaces, parts and tool
    calls; its text is not written as JSON, which takes longer than the digest.

    `blanks`: the characters that are left out at both ends of its text. By default all blank ones.
    """
    content, others = message.get("content") or "", []
    if isinstance(content, list):
        others, content = [part for part in content if not is_text(part)], text_of(message)
    text = str(content).strip(blanks)
    calls = [_call(call) for call in message.get("tool_calls") or ()]
    head = json.dumps([message.get("role"), len(text), others, calls], sort_keys=True, default=str)
    return f"{head}{text}".encode("utf-8", "surrogatepass")


def _call(call: Any) -> Any:
    function = call.get("function", {}) if isinstance(call, dict) else {}
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with suppress(ValueError):
            arguments = json.loads(arguments)
    return [function.get("name"), arguments]
