"""Where a prompt diverges from the longest cached one: the line of each, as text. Runs on the
generation thread.

The cached line may be another client's: then no result depends on it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from ...errors import PluginError
from ...hooks import SYSTEM, Message, text_of
from ...prefix.lookup import SHOWN, Lookup
from ...prefix.trie import common_prefix
from ..conversation_id import VOLATILE
from ..normalise import LAST, Normalisers, RememberedReply
from ..prompts.templates import REFUSED, Template

# Tokens before the first different one that are decoded to find the beginning of its line.
BEFORE = 128
# Characters of a long line that are shown on each side of the difference.
AROUND = 100
# Normalisers are tried on a system prompt of at most this many characters: other requests wait
# meanwhile.
MOST_CHARACTERS = 200_000
# A line is found again in the messages by this many characters: it may be shown cut.
BEGINNING = 40


@dataclass(frozen=True)
class Difference:
    """From token number `position` on, a prompt differs from the cached one: the line of each, cut
    if it is long.

    known_line:  None if it may be another client's.
    normaliser:  the bundled one that would have kept the line the same, if there is one and it was
                 off.
    moves_tools: the line is in the system prompt, and the template writes the tools after it.
    """

    position: int
    line: str
    known_line: str | None
    normaliser: str | None = None
    moves_tools: bool = False


@dataclass(frozen=True)
class Chat:
    """The `messages` that a prompt was rendered from.

    off:     the normalisers that it did not go through.
    replies: the remembered replies that the chat repeats, unless they are replayed.
    """

    messages: list[Message]
    normalisers: Normalisers
    off: Sequence[str]
    has_tools: bool = False
    replies: Sequence[RememberedReply] = ()

    def compare(
        self,
        tokenizer: Any,
        prompt: Sequence[int],
        lookup: Lookup,
        noted_as: str | None,
        is_own: bool,
    ) -> tuple[Lookup, Difference | None, Difference | None]:
        """Compare a prompt with the cached text that its lookup found, and with earlier replies of
        the chat.

        Returns the lookup, the difference that the client may see, and that with the cached text of
        other clients.
        noted_as: the name that the request's agent is noted under. is_own: the cached text is the
        same client's.
        """
        reply = self._cut_reply(tokenizer, prompt, lookup.matched)
        if reply is not None and lookup.cause == "longer":
            # The cached tokens would have continued with the reply's.
            at = lookup.matched
            expected = _path(tokenizer, reply)[at - reply.start + len(reply.before) :][:SHOWN]
            lookup = replace(
                lookup,
                cause="differs",
                given=tuple(prompt[at : at + SHOWN]),
                expected=tuple(expected),
            )
            is_own = is_own or (reply.agent is not None and reply.agent == noted_as)
        whole = self.difference(tokenizer, prompt, lookup)
        shown = whole if is_own else self.difference(tokenizer, prompt, lookup, is_own=False)
        if (
            reply is not None
            and LAST in self.off
            and getattr(tokenizer, "has_chat_template", False)
        ):
            shown, whole = (found and replace(found, normaliser=LAST) for found in (shown, whole))
        return lookup, shown, whole

    def _cut_reply(self, tokenizer: Any, prompt: Sequence[int], at: int) -> RememberedReply | None:
        """The reply that the prompt repeats in other tokens than were sampled, first of all token
        number `at`.

        The prompt may also differ in the opening of the reply, which the chat's template has
        written.
        """
        for reply in self.replies:
            first = reply.start - len(reply.before)
            if not first <= at < min(reply.start + len(reply.tokens), len(prompt)):
                continue
            path = _path(tokenizer, reply)
            if list(prompt[first:at]) == path[: at - first] and path[
                at - first : at - first + 1
            ] not in ([], [prompt[at]]):
                return reply
        return None

    def difference(
        self, tokenizer: Any, prompt: Sequence[int], lookup: Lookup, is_own: bool = True
    ) -> Difference | None:
        """The difference, or None if the cached tokens do not continue with others."""
        if not lookup.expected:
            return None
        at = lookup.matched
        before = list(prompt[max(0, at - BEFORE) : at])
        shown = (lookup.given, lookup.expected) if is_own else (lookup.given,)
        try:
            texts = [_text(tokenizer, [*before, *tokens]) for tokens in shown]
            split = (
                common_prefix(*texts)
                if is_own
                else min(len(_text(tokenizer, before)), len(texts[0]))
            )
        except (ArithmeticError, LookupError, TypeError, ValueError):
            # Ids that this tokenizer has no words for.
            return None
        bounds = [_bounds(text, split) for text in texts]
        whole = [text[start:end] for text, (start, end) in zip(texts, bounds, strict=True)]
        start, end = bounds[0]
        normaliser = self._normaliser_of(whole, split - start)
        lines = [
            _shown(text, split, at <= BEFORE, len(ids) < SHOWN)
            for text, ids in zip(texts, shown, strict=True)
        ]
        rest = texts[0][split:end]
        moves_tools = (
            self.has_tools and self._is_in_system(whole[0], rest) and tools_follow_system(tokenizer)
        )
        return Difference(at, lines[0], lines[1] if is_own else None, normaliser, moves_tools)

    def _is_in_system(self, line: str, rest: str) -> bool:
        """Return whether a line is in the system prompt.

        `rest`: its end, for the template may write something before it.
        """
        parts = (part for part in (line, rest) if len(part.strip()) > 1)
        return any(part[:BEGINNING] in self._system for part in parts)

    @property
    def _system(self) -> str:
        """The system prompt, whose parts templates join."""
        return "\n".join(
            text_of(message) for message in self.messages if message.get("role") in SYSTEM
        )

    def _normaliser_of(self, lines: list[str], split: int) -> str | None:
        """The normaliser that removes this line from the system prompt, in both forms, or None;
        each is tried.

        `split`: where the lines differ.
        """
        if len(self._system) > MOST_CHARACTERS:
            return None
        for name in self.off:
            if name not in VOLATILE or name not in self.normalisers.by_name:
                continue
            try:
                for removed in self._removed_by(name):
                    at = lines[0].find(removed[:BEGINNING])
                    if 0 <= at <= split and not any(
                        self._normalised(name, line[at:]).strip() for line in lines
                    ):
                        return name
            except PluginError:
                continue
        return None

    def _removed_by(self, name: str) -> Iterator[str]:
        """The lines of the system prompt that a normaliser removes."""
        for before, after in zip(
            self.messages, self.normalisers.apply((name,), self.messages), strict=False
        ):
            if before.get("role") in SYSTEM:
                left = set(text_of(after, "\n").splitlines())
                yield from (
                    line
                    for line in text_of(before, "\n").splitlines()
                    if line.strip() and line not in left
                )

    def _normalised(self, name: str, line: str) -> str:
        """A system prompt of one line after a normaliser."""
        messages: list[Message] = [
            {"role": "system", "content": f"{line}\n"},
            {"role": "user", "content": "x"},
        ]
        return text_of(self.normalisers.apply((name,), messages)[0])


def _path(tokenizer: Any, reply: RememberedReply) -> list[int]:
    """The end of a reply's prompt and the reply, without the token that ended it, which
    templates write.
    """
    tokens = list(reply.tokens)
    ends = bool(tokens) and tokens[-1] in getattr(tokenizer, "eos_token_ids", ())
    return [*reply.before, *(tokens[:-1] if ends else tokens)]


def tools_follow_system(tokenizer: Any) -> bool:
    """Return whether a template writes the tools after the text of the system prompt, by
    rendering two words.
    """
    system, tool = "systemtextisthisone", "toolnameisthisone"
    messages: list[Message] = [
        {"role": "system", "content": system},
        {"role": "user", "content": ""},
    ]
    function = {"name": tool, "description": "", "parameters": {"type": "object", "properties": {}}}
    tools = [{"type": "function", "function": function}]
    try:
        text = Template(tokenizer, tools, {}).text(messages, add_generation_prompt=False)
    except (*REFUSED, AttributeError):
        return False
    return 0 <= text.find(system) < text.find(tool)


def _text(tokenizer: Any, ids: list[int]) -> str:
    """Token ids as text.

    Images have negative ids; incomplete characters at either end are left out.
    """
    parts = [
        "[image]" if is_image else str(tokenizer.decode(list(run)))
        for is_image, run in groupby(ids, key=lambda token: token < 0)
    ]
    return "".join(parts).strip("\ufffd")


def _bounds(text: str, at: int) -> tuple[int, int]:
    """The beginning and the end of the line around a place."""
    end = text.find("\n", at)
    return text.rfind("\n", 0, at) + 1, len(text) if end < 0 else end


def _shown(text: str, at: int, is_beginning: bool, is_end: bool) -> str:
    """The line around a place, with dots for its missing parts."""
    start, end = _bounds(text, at)
    first, last = max(start, at - AROUND), min(end, at + AROUND)
    cut_before = first > start or (start == 0 and not is_beginning)
    cut_after = last < end or (end == len(text) and not is_end)
    return ("... " if cut_before else "") + text[first:last] + (" ..." if cut_after else "")
