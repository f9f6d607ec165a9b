"""Which normalisers a request's prompt goes through, and what this server has said lately. Any thread may call anything here."""

from __future__ import annotations

import json
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import Any

import pluggy

from ..errors import PluginError
from ..messages import Message, Normaliser, Replayed

# Replies that are remembered, and tokens of all of them together.
MAX_REPLIES = 10_000
MAX_TOKENS = 10_000_000
LAST = "replay"


class RememberedReplies:
    """The tokens of each reply as they were sampled, found by the conversation that it ends; the oldest are forgotten."""

    def __init__(self) -> None:
        self._replies: OrderedDict[bytes, array[int]] = OrderedDict()
        self._tokens = 0
        self._changing = threading.Lock()

    def remember(self, messages: Sequence[Message], reply: Message, tokens: Sequence[int]) -> None:
        """`messages`: what the model has seen, `reply`: what the client was told, `tokens`: what was sampled."""
        *_, key = _keys([*messages, reply])
        sampled = array("i", tokens)
        with self._changing:
            self._tokens += len(sampled) - len(self._replies.pop(key, ()))
            self._replies[key] = sampled
            while len(self._replies) > MAX_REPLIES or self._tokens > MAX_TOKENS:
                self._tokens -= len(self._replies.popitem(last=False)[1])

    def sampled(self, messages: Sequence[Message]) -> dict[int, Sequence[int]]:
        keys = [(i, key) for i, key in enumerate(_keys(messages)) if messages[i].get("role") == "assistant"]
        with self._changing:
            return {i: self._replies[key] for i, key in keys if key in self._replies}


class Normalisers:
    """All that plugins bring, by name. `default`: the names that hold where a request says nothing.

    `chosen`: what the server's user asks for beside those that are on by themselves; `none` among them turns these off.
    """

    def __init__(self, manager: pluggy.PluginManager, chosen: Sequence[str] = ()) -> None:
        self.replies = RememberedReplies()
        self.by_name = _named(normaliser for found in manager.hook.prompt_normalisers() for normaliser in found)
        self.default = self._with_defaults(chosen)

    def asked(self, header: str | None) -> tuple[str, ...]:
        """The names that hold for a request with an X-Normalise header, as for the server. Raises ValueError."""
        return self.default if header is None else self._with_defaults([name.strip() for name in header.split(",")])

    def _with_defaults(self, chosen: Sequence[str]) -> tuple[str, ...]:
        """Raises ValueError for a name that no plugin has."""
        names = [name for name in chosen if name not in ("", "none")]
        unknown = [name for name in names if name not in self.by_name]
        if unknown:
            raise ValueError(f"Found normaliser {', '.join(unknown)}; needed one of {', '.join(sorted(self.by_name))}, or none.")
        default = [] if "none" in chosen else [name for name, normaliser in self.by_name.items() if normaliser.is_default]
        # What was remembered was told after all others: replies are put back last.
        return tuple(sorted(dict.fromkeys([*default, *names]), key=lambda name: name == LAST))

    def apply(self, names: Sequence[str], messages: list[Message]) -> list[Message]:
        """What the model is to see instead. Raises PluginError that names the normaliser which failed."""
        return self.changes(names, messages)[0]

    def changes(self, names: Sequence[str], messages: list[Message]) -> tuple[list[Message], tuple[str, ...]]:
        """What the model is to see instead, and the names of those that have changed something."""
        changed = []
        for name in names:
            try:
                after = self.by_name[name].apply(messages, self.replies)
            except Exception as error:
                # Anybody's code.
                raise PluginError(f"Normaliser {name} raised {type(error).__name__}: {error}.") from error
            if after != messages or (name == LAST and any(isinstance(message, Replayed) for message in after)):
                changed.append(name)
            messages = after
        return messages, tuple(changed)

    def told(self) -> list[str]:
        """What is done to the prompts of requests that say nothing, a sentence for each."""
        return [f"{name}: {self.by_name[name].does}" for name in self.default]


def _named(found: Iterable[Any]) -> dict[str, Normaliser]:
    named: dict[str, Normaliser] = {}
    for normaliser in found:
        if not isinstance(normaliser, Normaliser):
            raise PluginError(f"Found {type(normaliser).__name__} from prompt_normalisers; needed a Normaliser.")
        # The last plugin registered is asked first, and overrides.
        named.setdefault(normaliser.name, normaliser)
    return named


def _keys(messages: Sequence[Message]) -> Iterator[bytes]:
    """A key of the conversation up to each message: nobody has another's replies who has not its whole beginning."""
    conversation = blake2b(digest_size=16)
    for message in messages:
        conversation.update(_shown(message).encode("utf-8", "surrogatepass"))
        yield conversation.digest()


def _shown(message: Message) -> str:
    """What of a message comes back the same, however its spaces, parts and tool calls are written by then."""
    content, others = message.get("content") or "", []
    if isinstance(content, list):
        others = [part for part in content if not (isinstance(part, dict) and isinstance(part.get("text"), str))]
        content = "".join(part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str))
    calls = [_call(call) for call in message.get("tool_calls") or ()]
    return json.dumps([message.get("role"), str(content).strip(), others, calls], sort_keys=True, default=str)


def _call(call: Any) -> Any:
    function = call.get("function", {}) if isinstance(call, dict) else {}
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with suppress(ValueError):
            arguments = json.loads(arguments)
    return [function.get("name"), arguments]
