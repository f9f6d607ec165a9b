"""Where a prompt diverges from the longest cached one: the line of each, as text. Called on the generation thread.

The cached line may be another client's: then no result depends on it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from jinja2 import TemplateError

from ..errors import PluginError
from ..messages import Message
from ..prefix.lookup import SHOWN, Lookup
from ..prefix.trie import common_prefix
from .normalise import LAST, Normalisers, RememberedReply

# So many tokens before the first different one are decoded, to find where its line begins.
BEFORE = 128
# Of a long line so many characters on each side of the difference are shown.
AROUND = 100
# Bundled normalisers that can keep a line of the system prompt the same.
KEEPERS = ("vendor-header", "bookkeeping", "date")
SYSTEM = ("system", "developer")
# Characters of a system prompt in which normalisers are tried.
LOOKED_THROUGH = 200_000
# A line is found again in the messages by its beginning: what is shown of it may be cut.
BEGINNING = 40


@dataclass(frozen=True)
class Difference:
    """From token number `position` on a prompt is not the known one any more: the whole line of each, cut where it is long.

    `known_line`: None where it may be another client's. `normaliser` would have kept that line the same; None: none that is
    bundled, or it was on. `moves_tools`: the line is of the system prompt, and the tools stand behind it.
    """

    position: int
    line: str
    known_line: str | None
    normaliser: str | None = None
    moves_tools: bool = False


def difference(
    tokenizer: Any,
    prompt: Sequence[int],
    lookup: Lookup,
    messages: list[Message],
    off: Sequence[str],
    normalisers: Normalisers,
    is_own: bool = True,
    has_tools: bool = False,
) -> Difference | None:
    """None where the known tokens do not end in others. `off`: normalisers that the request was not put through.

    `is_own`: the known tokens are of the same client's.
    """
    if not lookup.expected:
        return None
    at = lookup.known
    before = list(prompt[max(0, at - BEFORE) : at])
    shown = (lookup.given, lookup.expected) if is_own else (lookup.given,)
    try:
        texts = [_text(tokenizer, [*before, *tokens]) for tokens in shown]
        split = common_prefix(*texts) if is_own else min(len(_text(tokenizer, before)), len(texts[0]))
    except (ArithmeticError, LookupError, TypeError, ValueError):
        # Ids that this tokenizer has no words for.
        return None
    whole = [_line(text, split) for text in texts]
    keeper = _keeper(whole, split - _start(texts[0], split), messages, off, normalisers)
    lines = [_shown(text, split, at <= BEFORE, len(ids) < SHOWN) for text, ids in zip(texts, shown, strict=True)]
    behind = texts[0][split : _end(texts[0], split)]
    moves_tools = has_tools and _is_in_system(whole[0], behind, messages) and tools_stand_behind(tokenizer)
    return Difference(at, lines[0], lines[1] if is_own else None, keeper, moves_tools)


def cut_reply(tokenizer: Any, prompt: Sequence[int], at: int, replies: Sequence[RememberedReply]) -> RememberedReply | None:
    """The reply that the prompt writes in other tokens than were sampled, the first of them token number `at`.

    `replies`: those of the chat; it opens them as it did, so that what differs from there on is a reply or its opening.
    """
    for reply in replies:
        first = reply.start - len(reply.before)
        if not first <= at < min(reply.start + len(reply.tokens), len(prompt)):
            continue
        path = _path(tokenizer, reply)
        if list(prompt[first:at]) == path[: at - first] and path[at - first : at - first + 1] not in ([], [prompt[at]]):
            return reply
    return None


def sampled_from(tokenizer: Any, lookup: Lookup, prompt: Sequence[int], reply: RememberedReply) -> Lookup:
    """The lookup of a prompt that parts from a reply where the known tokens end: they would have gone on with the reply's."""
    at, first = lookup.known, reply.start - len(reply.before)
    expected = _path(tokenizer, reply)[at - first :][:SHOWN]
    return replace(lookup, cause="differs", given=tuple(prompt[at : at + SHOWN]), expected=tuple(expected))


def names_replay(found: Difference | None, tokenizer: Any, off: Sequence[str]) -> Difference | None:
    """A difference in a reply, with the normaliser that would have put it back as it was sampled."""
    if found is None or LAST not in off or not getattr(tokenizer, "has_chat_template", False):
        return found
    return replace(found, normaliser=LAST)


def _path(tokenizer: Any, reply: RememberedReply) -> list[int]:
    """The end of a prompt and its reply, without the token that has ended it: templates write that one."""
    tokens = list(reply.tokens)
    ends = bool(tokens) and tokens[-1] in getattr(tokenizer, "eos_token_ids", ())
    return [*reply.before, *(tokens[:-1] if ends else tokens)]


def tools_stand_behind(tokenizer: Any) -> bool:
    """Whether a template writes the tools behind the text of the system prompt; found out by rendering two words."""
    system, tool = "systemtextisthisone", "toolnameisthisone"
    messages = [{"role": "system", "content": system}, {"role": "user", "content": ""}]
    tools = [
        {"type": "function", "function": {"name": tool, "description": "", "parameters": {"type": "object", "properties": {}}}}
    ]
    try:
        text = str(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=False))
    except (TemplateError, ValueError, TypeError, KeyError, IndexError, AttributeError):
        return False
    return 0 <= text.find(system) < text.find(tool)


def _is_in_system(line: str, behind: str, messages: list[Message]) -> bool:
    """Whether a line is one of the system prompt's. `behind`: its end, where the template has written something before it."""
    # Templates get the parts of a message as one text.
    text = "\n".join(_text_of(message, "") for message in messages if message.get("role") in SYSTEM)
    shown = [part for part in (line, behind) if len(part.strip()) > 1]
    return any(part[:BEGINNING] in text for part in shown)


def _text(tokenizer: Any, ids: list[int]) -> str:
    """Token ids as text. Images have negative ids; characters that are cut at either end are left out."""
    parts = [
        "[image]" if is_image else str(tokenizer.decode(list(run))) for is_image, run in groupby(ids, key=lambda token: token < 0)
    ]
    return "".join(parts).strip("\ufffd")


def _start(text: str, at: int) -> int:
    return text.rfind("\n", 0, at) + 1


def _end(text: str, at: int) -> int:
    found = text.find("\n", at)
    return len(text) if found < 0 else found


def _line(text: str, at: int) -> str:
    return text[_start(text, at) : _end(text, at)]


def _shown(text: str, at: int, is_beginning: bool, is_end: bool) -> str:
    """The line around a place, with dots where something of it is missing."""
    start, end = _start(text, at), _end(text, at)
    first, last = max(start, at - AROUND), min(end, at + AROUND)
    cut_before = first > start or (start == 0 and not is_beginning)
    cut_behind = last < end or (end == len(text) and not is_end)
    return ("... " if cut_before else "") + text[first:last] + (" ..." if cut_behind else "")


def _keeper(lines: list[str], split: int, messages: list[Message], off: Sequence[str], normalisers: Normalisers) -> str | None:
    """The normaliser that takes this line out of the system prompt, in the known form of it as well; it is tried.

    `split`: where in the lines the difference is. Of long system prompts it is not looked for: others wait meanwhile.
    """
    if sum(len(_text_of(message)) for message in messages if message.get("role") in ("system", "developer")) > LOOKED_THROUGH:
        return None
    for name in off:
        if name not in KEEPERS or name not in normalisers.by_name:
            continue
        try:
            for taken in _taken(normalisers, name, messages):
                at = lines[0].find(taken[:BEGINNING])
                if 0 <= at <= split and not any(_system_after(normalisers, name, line[at:]).strip() for line in lines):
                    return name
        except PluginError:
            continue
    return None


def _taken(normalisers: Normalisers, name: str, messages: list[Message]) -> Iterator[str]:
    """The lines of the system prompt that a normaliser takes out."""
    for before, after in zip(messages, normalisers.apply((name,), messages), strict=False):
        if before.get("role") in SYSTEM:
            left = set(_text_of(after).splitlines())
            yield from (line for line in _text_of(before).splitlines() if line.strip() and line not in left)


def _system_after(normalisers: Normalisers, name: str, line: str) -> str:
    """What is left of a system prompt of one line."""
    messages: list[Message] = [{"role": "system", "content": f"{line}\n"}, {"role": "user", "content": "x"}]
    return _text_of(normalisers.apply((name,), messages)[0])


def _text_of(message: Message, between: str = "\n") -> str:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return between.join(str(part.get("text") or "") for part in content if isinstance(part, dict))
