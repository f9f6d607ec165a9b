"""Prompts in which earlier replies have exactly the tokens that were sampled, even if the template
would write others.

Each reply is rendered as a word that stands for it. What the template writes before such words,
between them and after them is tokenized; the sampled tokens go where the words are. So a prompt
begins with the prompt and the reply of the turn before it.
"""

from __future__ import annotations

import hashlib
import logging
import marshal
import secrets
from array import array
from collections import OrderedDict
from collections.abc import Sequence

from jinja2 import TemplateError

from ...config import PromptConfig
from ...hooks import Message, Replayed
from ...prefix.trie import common_prefix
from .templates import Template

log = logging.getLogger(__name__)


class KnownPieces:
    """The tokens between the replies of earlier prompts, those used last up to `max_tokens`, by a
    digest of all that comes before their end.
    """

    def __init__(self, max_tokens: int = PromptConfig.earlier_size) -> None:
        self._max_tokens, self._num_tokens = max_tokens, 0
        self._pieces: OrderedDict[bytes, array[int]] = OrderedDict()

    def get(self, digest: bytes) -> array[int] | None:
        if digest in self._pieces:
            self._pieces.move_to_end(digest)
        return self._pieces.get(digest)

    def add(self, digest: bytes, piece: array[int]) -> None:
        self._pieces[digest] = piece
        self._num_tokens += len(piece)
        while self._num_tokens > self._max_tokens:
            self._num_tokens -= len(self._pieces.popitem(last=False)[1])


class Replay:
    """A chat with replies to put back.

    known:   pieces of earlier prompts, so that of a conversation only the last one is rendered.
    scope:   pieces of other scopes are not used.
    """

    def __init__(
        self,
        template: Template,
        messages: list[Message],
        known: KnownPieces | None = None,
        scope: bytes = b"",
    ) -> None:
        self._template, self._tokenizer = template, template.tokenizer
        self._messages = messages
        self._known = KnownPieces() if known is None else known
        self._digest = hashlib.blake2b(digest_size=16)
        self._digest.update(repr((scope, template.tools, template.options)).encode())
        self._word = f"replayed{secrets.token_hex(8)}"
        self._stops = {
            int(token): str(self._tokenizer.decode([token]))
            for token in self._tokenizer.eos_token_ids
        }

    def tokens(self, so_far: list[Message]) -> tuple[array[int], dict[int, str]] | None:
        """The prompt, and its checkpoints before the reply's opening: where the chat ends, and
        `so_far`, without reminders.

        None if the template's prompt has to be used.
        """
        if not (
            self._tokenizer.has_chat_template
            and any(isinstance(message, Replayed) for message in self._messages)
        ):
            return None
        try:
            return self._built(so_far)
        except (LookupError, TemplateError, ValueError, TypeError, AttributeError) as error:
            log.info(
                "replies are not put back as they were sampled: %s: %s", type(error).__name__, error
            )
            return None

    def _built(self, so_far: list[Message]) -> tuple[array[int], dict[int, str]]:
        shown: list[Message] = []
        pieces: list[array[int]] = []
        last: Message | None = None
        start = 0  # of the messages after the last reply
        for i, message in enumerate(self._messages, 1):
            if isinstance(message, Replayed):
                start = i
                pieces += self._piece(last, shown), self._without_stop(message.tokens)
                last = message = self._stand_in(message)
            shown.append(message)
            # Version 2 writes equal messages alike, and a text as it is.
            self._digest.update(marshal.dumps(message, 2).replace(self._word.encode(), b""))
        chats = [(shown, True), (shown, False)]
        if so_far[start:] != self._messages[start:]:
            chats.append(([*shown[:start], *so_far[start:]], False))
        opened, *closed = (
            self._encoded(self._after(last, self._template.text(chat, add_generation_prompt=opens)))
            for chat, opens in chats
        )
        tokens = array("i", b"".join(pieces))
        ends = [len(tokens) + common_prefix(opened, each) for each in closed]
        return tokens + opened, dict(zip(ends[::-1], ("user", "assistant"), strict=False))

    def _piece(self, last: Message | None, shown: Sequence[Message]) -> array[int]:
        """The tokens from the reply before to the next one.

        Those before the first reply are not looked up: templates write the day there.
        """
        digest = self._digest.digest()
        piece = None if last is None else self._known.get(digest)
        if piece is None:
            text = self._template.text(shown, add_generation_prompt=True)
            piece = self._encoded(self._after(last, text))
            if last is not None:
                self._known.add(digest, piece)
        return piece

    def _stand_in(self, message: Message) -> Message:
        """A message with the word where its reply is.

        Calls stay: templates look for them before the results of tools.
        """
        arguments = {"word": self._word}
        calls = [
            {**call, "function": {**call["function"], "arguments": arguments}}
            for call in message.get("tool_calls") or ()
        ]
        if calls:
            return {"role": "assistant", "content": "", "tool_calls": calls}
        return {"role": "assistant", "content": self._word}

    def _after(self, last: Message | None, text: str) -> str:
        """Cut `text` after the last reply that was put back.

        Raises LookupError if that reply is not found.
        """
        if last is None:
            return text
        at = text.rindex(self._word) + len(self._word) if self._word in text else -1
        if at < 0:
            raise LookupError("the template does not show a reply")
        if last.get("tool_calls"):
            # After the word the template ends the call, and so do the sampled tokens.
            ends = [
                end for stop in self._stops.values() if stop and (end := text.find(stop, at)) >= 0
            ]
            if not ends:
                raise LookupError("the template does not end a call with a token that ends replies")
            at = min(ends)
        return text[at:]

    def _without_stop(self, tokens: Sequence[int]) -> array[int]:
        """The template writes the token that has ended a reply, or another one in its place."""
        return array("i", tokens[:-1] if tokens and tokens[-1] in self._stops else tokens)

    def _encoded(self, text: str) -> array[int]:
        return array("i", self._tokenizer.encode(text, add_special_tokens=False))
