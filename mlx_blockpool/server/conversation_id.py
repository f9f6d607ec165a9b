"""Names for conversations whose clients give none: a chat is recognised by how it begins.

A name ends with a digest of the model, the system messages and the first user message, without what
the normalisers of volatile.py remove. All turns of a conversation that one client sends have the
same name, on any server at any time; an edited conversation keeps its name unless its first message
was edited. Tools do not count, because clients add some later. Two chats of a client share a name
if they begin with the same messages. Before the digest come the client and the first words of the
user's message, for people: `claude-cli-fix-the-failing~3f2a9c0d41e7`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from contextlib import suppress
from itertools import takewhile
from typing import Any

from ..errors import PluginError
from ..hooks import SYSTEM, Message, is_text, map_text, parts_of, text_of
from .access import own_name
from .normalise import Normalisers

NAME = re.compile(r"[\w.-]*~[0-9a-f]{12}")
# Characters of the client, and of it with the words, in a name: the whole name is shown as it is.
CLIENT, READABLE = 14, 27
# Bundled normalisers that can keep a line of the system prompt the same.
VOLATILE = ("vendor-header", "bookkeeping", "date")
# Volatile lines are searched in this many characters of a message: what a client adds stands at the
# beginning.
SEARCHED_CHARACTERS = 1 << 16


def is_conversation_id(name: str) -> bool:
    """Return whether a name was made by conversation_id()."""
    return NAME.fullmatch(own_name(name)) is not None


def conversation_id(
    model: Sequence[str | None],
    messages: Sequence[Message],
    normalisers: Normalisers,
    cache_salt: str | None = None,
    user_agent: str = "",
) -> str:
    """The name of the conversation that a chat continues. `messages` as the client sent them; they
    stay as they are.

    Chats with different cache_salts have different names. user_agent: the header, for the readable
    part.
    """
    system = list(takewhile(lambda message: message.get("role") in SYSTEM, messages))
    first = next((message for message in messages if message.get("role") not in SYSTEM), {})
    # All as system messages, the only ones that normalisers change. Dates go to the last message, a
    # user's.
    shortened = [
        map_text({"role": "system", "content": m.get("content")}, _shortened)
        for m in (*system, first)
    ]
    names = [name for name in VOLATILE if name in normalisers.by_name]
    with suppress(PluginError):
        shortened = normalisers.apply(names, [*shortened, {"role": "user", "content": ""}])[:-1]
    parts = [list(model), [_content(message) for message in shortened], first.get("role")]
    parts += [] if cache_salt is None else [cache_salt]
    digest = hashlib.blake2b(json.dumps(parts).encode(), digest_size=6).hexdigest()
    return f"{_readable(user_agent, first)}~{digest}"


def _readable(user_agent: str, message: Message) -> str:
    """The client and the first words of a message, without parts such as <system-reminder>."""
    texts = (part["text"].strip() for part in parts_of(message.get("content")) if is_text(part))
    own = next((t for t in texts if not (t.startswith("<") and t.endswith(">"))), "")
    # Lower case may add marks, which are not parts of words.
    client = re.findall(r"[\w.-]+", user_agent.lower())[:1]
    words = re.findall(r"\w+", own[:READABLE].lower())
    return "-".join([*(name[:CLIENT] for name in client), *words])[:READABLE].strip("-")


def _shortened(text: str) -> str:
    """A long text as its beginning and a digest of the rest: other threads wait while a pattern
    is searched.
    """
    if len(text) <= SEARCHED_CHARACTERS:
        return text
    rest = text[SEARCHED_CHARACTERS:].strip().encode("utf-8", "surrogatepass")
    return f"{text[:SEARCHED_CHARACTERS]}\n{hashlib.blake2b(rest, digest_size=16).hexdigest()}"


def _content(message: Message) -> list[Any]:
    """A message's text, however it is split and marked, and its other parts."""
    others = [
        part
        for part in parts_of(message.get("content"))
        if isinstance(part, dict) and not is_text(part)
    ]
    plain = [
        {key: value for key, value in part.items() if key != "cache_control"} for part in others
    ]
    return [
        text_of(message).strip(),
        [json.dumps(part, sort_keys=True, default=str) for part in plain],
    ]
