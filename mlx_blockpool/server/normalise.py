"""Which normalisers a request's prompt goes through, and what this server has said lately. Any thread may call anything here."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import pluggy

from ..errors import PluginError
from ..messages import Message, Normaliser

# Replies that are remembered, and characters of all of them together.
MAX_REPLIES = 10_000
MAX_CHARACTERS = 50_000_000


class RememberedReplies:
    """The text of each reply as it was generated, found by what a client was told of it; the oldest are forgotten."""

    def __init__(self) -> None:
        self._texts: OrderedDict[str, str] = OrderedDict()
        self._characters = 0
        self._changing = threading.Lock()

    def remember(self, message: Message, text: str) -> None:
        """`message`: what the client was told, `text`: what was generated."""
        key = _key(message)
        with self._changing:
            self._characters += len(text) - len(self._texts.pop(key, ""))
            self._texts[key] = text
            while len(self._texts) > MAX_REPLIES or self._characters > MAX_CHARACTERS:
                self._characters -= len(self._texts.popitem(last=False)[1])

    def sampled(self, message: Message) -> str | None:
        with self._changing:
            return self._texts.get(_key(message))


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
        return tuple(dict.fromkeys([*default, *names]))

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
            if after != messages:
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


def _key(message: Message) -> str:
    """What of an assistant message comes back the same, however its spaces and tool calls are written by then."""
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(part.get("text", "") for part in content if isinstance(part, dict))
    return json.dumps([str(content).strip(), [_call(call) for call in message.get("tool_calls") or ()]], sort_keys=True)


def _call(call: Any) -> Any:
    function = call.get("function", {}) if isinstance(call, dict) else {}
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with suppress(ValueError):
            arguments = json.loads(arguments)
    return [function.get("name"), arguments]
