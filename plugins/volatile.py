"""Normalisers for the parts of agents' prompts that change from one request to the next."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from itertools import islice, takewhile

from mlx_blockpool.hooks import (
    SYSTEM,
    Message,
    Normaliser,
    Replayed,
    Replies,
    hookimpl,
    map_text,
    text_of,
)

# Lines are searched by the end of the line before, which is many times faster than by `^`.
# A line for the servers of a client's vendor. Claude Code's changes from one conversation to the
# next.
VENDOR_HEADER = re.compile(r"\n[ \t]*x-anthropic-billing-header[ \t]*:", re.IGNORECASE)
# Lines of clients' own book-keeping.
BOOKKEEPING = re.compile(
    r"\n[ \t]*(?:x-anthropic-billing-header|x-request-id|(?:request|session|trace|conversation)[ "
    r"_-]?id|nonce)"
    r"[ \t]*[:=]",
    re.IGNORECASE,
)
LINE = re.compile(r"[^\n]*\n|[^\n]+")
# Characters of a text that are searched at a time; at least a line.
PIECE = 1 << 16
# A prompt states a few working directories.
MOST_DIRECTORIES = 16
# A chat whose system messages have more stays as it is, because other threads wait.
MOST_CHARACTERS, MOST_LINES = 1 << 17, 1 << 12


@hookimpl
def prompt_normalisers() -> list[Normaliser]:
    return [
        Normaliser(
            "vendor-header",
            "Lines of the system prompt that begin with x-anthropic-billing-header:, which a "
            "client addresses to its vendor's "
            "servers and not to the model, are left out.",
            drop_vendor_header,
            is_default=True,
        ),
        Normaliser(
            "environment",
            "What the system prompt says of the client's working directory, with its folders for "
            "it, the git status and today's date, is moved to the beginning of the first user "
            "message; a system message that follows that one and states the directory is moved "
            "before it.",
            move_environment,
            is_default=True,
        ),
        Normaliser(
            "bookkeeping",
            "Lines of the system prompt that begin with x-anthropic-billing-header:, nonce: or a "
            "request, session, trace or "
            "conversation id are left out.",
            drop_bookkeeping,
        ),
        Normaliser(
            "date",
            "Lines and sentences of the system prompt that state today's date or the time, and "
            "nothing else, are moved to the "
            "beginning of the first user message.",
            move_dates,
        ),
        Normaliser(
            "replay",
            "Assistant messages that this server has generated are put back as they were sampled, "
            "token for token, with their "
            "thinking and the tool calls as they were written.",
            replay,
        ),
    ]


def drop_vendor_header(messages: Sequence[Message], replies: Replies) -> list[Message]:
    return [map_text(m, _without_vendor_header) if m.get("role") in SYSTEM else m for m in messages]


def _without_vendor_header(text: str) -> str:
    # This is on for every request, and most texts have no such line.
    return _without(VENDOR_HEADER, text) if "x-anthropic-billing-header" in text.lower() else text


def drop_bookkeeping(messages: Sequence[Message], replies: Replies) -> list[Message]:
    return [
        map_text(m, lambda text: _without(BOOKKEEPING, text)) if m.get("role") in SYSTEM else m
        for m in messages
    ]


def _without(lines: re.Pattern[str], text: str) -> str:
    """A text without the lines that begin so."""
    if lines.search(f"\n{text}") is None:
        return text
    return "".join(line for line in LINE.findall(text) if lines.match(f"\n{line}") is None)


def _pieces(text: str) -> Iterator[str]:
    """A long text in pieces of whole lines, because other threads wait while a pattern is
    searched.
    """
    start = 0
    while start < len(text):
        end = text.find("\n", start + PIECE) + 1 or len(text)
        yield text[start:end]
        start = end


def move_dates(messages: Sequence[Message], replies: Replies) -> list[Message]:
    # Compiling the patterns of these modules takes as long as all other plugins.
    from .dates import statements

    moved: list[str] = []

    def take(text: str) -> str:
        left = []
        for piece in _pieces(text):
            at = 0
            for start, end in statements(piece):
                left.append(piece[at:start])
                moved.append(piece[start:end].strip())
                at = end
            left.append(piece[at:])
        return "".join(left)

    changed = [map_text(m, take) if m.get("role") in SYSTEM else m for m in messages]
    # The first user message stays at its place, and so does everything after it.
    first = _first_user(changed)
    if not moved or first is None:
        return list(messages)
    changed[first] = _put_before("\n".join(moved) + "\n\n", changed[first])
    return changed


def move_environment(messages: Sequence[Message], replies: Replies) -> list[Message]:
    first = _first_user(messages)
    if first is None:
        return list(messages)
    # Claude Code sends its environment after the first user message.
    later = takewhile(
        lambda message: message.get("role") in SYSTEM and any(_directories(message)),
        messages[first + 1 :],
    )
    seen = [*messages[:first], *islice(later, MOST_DIRECTORIES)]
    texts = [text_of(m, "\n") for m in seen if m.get("role") in SYSTEM]
    if (
        sum(map(len, texts)) > MOST_CHARACTERS
        or sum(text.count("\n") for text in texts) > MOST_LINES
    ):
        return list(messages)
    stating = (found for m in (*seen, messages[first]) for found in _directories(m))
    directories = set(islice(stating, MOST_DIRECTORIES))
    changed: list[Message] = []
    moved: list[str] = []
    for message in seen:
        left, paragraphs = _separated(message, directories)
        if len(changed) >= first and not paragraphs:
            break
        changed.append(left)
        moved += paragraphs
    if not moved:
        return list(messages)
    user = _put_before("\n\n".join(moved) + "\n\n", messages[first])
    return [*changed, user, *messages[len(changed) + 1 :]]


def _separated(message: Message, directories: Collection[str]) -> tuple[Message, list[str]]:
    """A message without what it says of the environment if it is the system's, and that."""
    # As in move_dates().
    from .environment import separate

    moved: list[str] = []
    if not directories or message.get("role") not in SYSTEM:
        return message, moved
    states_directory = any(_directories(message))

    def take(text: str) -> str:
        left, paragraphs = separate(text, directories, states_directory)
        moved.extend(paragraphs)
        return left

    return map_text(message, take), moved


def _first_user(messages: Sequence[Message]) -> int | None:
    """The place of the first user message; None if there is none or its content isn't text or
    parts, which the server refuses.
    """
    for place, message in enumerate(messages):
        if message.get("role") == "user":
            return place if isinstance(message.get("content"), str | list | None) else None
    return None


def _directories(message: Message) -> Iterator[str]:
    # As in move_dates().
    from .environment import working_directories

    # What a client states is at the beginning.
    return working_directories(text_of(message, "\n")[:PIECE])


def replay(messages: Sequence[Message], replies: Replies) -> list[Message]:
    sampled = replies.sampled(messages)
    return [
        Replayed(message, sampled[i]) if i in sampled else message
        for i, message in enumerate(messages)
    ]


def _put_before(text: str, message: Message) -> Message:
    content = message.get("content")
    if isinstance(content, list):
        return {**message, "content": [{"type": "text", "text": text}, *content]}
    return {**message, "content": text + (content or "")}
