"""ReplyForm: which tokens may come next in one reply.

Knows token ids; no text and no arrays of mlx. Owned by the generation thread once its request runs.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from ..config import FormConfig
from ..errors import FormError
from .compiler import Compiled, reason
from .vocabulary import Vocabulary

State = Literal["thinking", "start", "free", "form", "call", "done"]
Words = NDArray[np.int32]
# Characters that end what is open, those that end most of it first; outside and inside of a string.
OUTSIDE, INSIDE = '}]"0ntf,:{[', '"x'


@dataclass(frozen=True)
class Marks:
    """The tokens by which a form's states follow each other; empty where the model has none, or
    where they may not come.

    think_start, think_end:  around the thinking.
    call_start:              before a tool call.
    space:                   space alone, which may come before the content, its thinking and its
                             calls.
    eos:                     those that end a reply.
    letters:                 those of single characters.
    """

    think_start: tuple[int, ...] = ()
    think_end: tuple[int, ...] = ()
    call_start: tuple[int, ...] = ()
    space: frozenset[int] = frozenset()
    eos: frozenset[int] = frozenset()
    letters: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def from_tokenizer(cls, tokenizer: Any, vocabulary: Vocabulary) -> Marks:
        """Of mlx-lm's tokenizer."""

        def mark(text: str | None, tokens: Sequence[int] | None) -> tuple[int, ...]:
            return mark_tokens(text, tokens, vocabulary.added)

        return cls(
            mark(tokenizer.think_start, tokenizer.think_start_tokens),
            mark(tokenizer.think_end, tokenizer.think_end_tokens),
            mark(tokenizer.tool_call_start, tokenizer.tool_call_start_tokens),
            vocabulary.space,
            vocabulary.eos,
            vocabulary.letters,
        )


def mark_tokens(
    text: str | None, tokens: Sequence[int] | None, added: Iterable[str]
) -> tuple[int, ...]:
    """The tokens of a marker. Empty if they are several ordinary ones: a token may reach beyond the
    marker's text then.

    added:  the texts that are tokens of their own.
    """
    return (
        tuple(tokens)
        if tokens and text and (len(tokens) == 1 or any(word in text for word in added))
        else ()
    )


class ReplyForm:
    """The form of one sequence, and how far its reply has come in it.

    content:    a matcher of the whole content, or of the calls that a reply must consist of; None:
                text is free.
    calls:      a matcher of what follows `marks.call_start`; None: calls are free, or there are
                none. With `content` it matches all calls of the reply; without, it matches one, and
                free text follows.
    state:      where the reply begins: "thinking"; "start", of the content, before which thinking
                or a call may come; "free", text and calls; "form", the content.
    num_words:  of 32 tokens in the mask of one token.
    grammars:   those that it follows, which are charged the processor time that it costs.
    seen:       how many of the generated tokens it has followed.
    max_tokens: of the reply: the content, or the call that it is in, is closed before this limit
                cuts it, if an end can be found. None: no limit.
    jumps:      whether forced tokens may be appended without a draw; False where the reply needs
                their logprobs.
    """

    def __init__(
        self,
        marks: Marks,
        num_words: int,
        content: LLMatcher | None = None,
        calls: LLMatcher | None = None,
        state: State = "start",
        grammars: Sequence[Compiled] = (),
    ) -> None:
        assert content is not None or state in ("thinking", "free"), f"{state} has no content"
        self.num_words = num_words
        self.jumps = True
        self.max_tokens: int | None = None
        # The tokens that are left when an end is searched next, and whether the reply has come to
        # it.
        self._search_at = FormConfig.closing_tokens
        self._ends = False
        self._grammars = grammars
        self._marks = marks
        self._content = content
        self._calls = calls
        self.state = state
        # The call that is being written; the end of free text, or the beginning of a mark at the
        # start.
        self._call: LLMatcher | None = None
        self._tail: tuple[int, ...] = ()
        self._longest = max(1, len(marks.think_start), len(marks.think_end), len(marks.call_start))
        self.seen = 0
        self._spent = 0.0
        # Tokens that are forced from a position of the reply on, and how many of them have come;
        # None if not computed.
        self._forced: list[int] | None = None
        self._forced_at = 0

    @property
    def may_call(self) -> bool:
        """Return whether calls may come in the reply, alone or with its content."""
        return self._calls is not None

    def follow(self, generated: Sequence[int], start: int = 0) -> None:
        """Follow the tokens generated since the last call; they are given from the `start`-th on.

        Raises FormError for tokens that break the form, and where it has cost too much.
        """
        assert start <= self.seen, f"tokens from {start} on, of which {self.seen} were followed"
        with self._charged():
            for token in generated[self.seen - start :]:
                self._take(token)
                self.seen += 1

    def fill(self, words: Words) -> bool:
        """Write the mask [num_words] of the next token, which is one bit where a token is forced.
        False: any token may come.

        Raises FormError where the form's limits are met.
        """
        assert len(words) == self.num_words, f"{len(words)} words of {self.num_words}"
        if self.state == "free" or (self.state == "thinking" and self._content is None):
            return False
        with self._charged():
            self._write(words)
        return True

    def _write(self, words: Words) -> None:
        if forced := self.forced():
            words[:] = 0
            _open(words, forced[:1])
        elif self.state == "thinking":
            # The reply does not end before its content.
            words[:] = -1
            _close(words, self._marks.eos)
        elif self.state == "done" or (self._ends and self._matcher.is_accepting()):
            words[:] = 0
            _open(words, self._marks.eos)
        else:
            self._fill(words)

    @contextmanager
    def _charged(self) -> Iterator[None]:
        began = time.thread_time()
        yield
        spent = time.thread_time() - began
        self._spent += spent
        for grammar in self._grammars:
            grammar.reply_seconds += spent
        check_cost(self._spent, self.seen)

    def forced(self) -> list[int]:
        """The tokens that must come next, of which FormConfig.most_forced are returned; empty
        where there is a choice.
        """
        if self._forced is None:
            self._forced, self._forced_at = self._find_forced() or self._find_closing(), 0
        return self._forced[self._forced_at : self._forced_at + FormConfig.most_forced]

    def copy(self) -> ReplyForm:
        """A form in the same state, which follows another reply."""
        other = copy.copy(self)
        # The matcher of calls stays at its beginning: each call has a copy.
        other._content, other._call = (
            None if found is None else found.deep_copy() for found in (self._content, self._call)
        )
        return other

    def _take(self, token: int) -> None:
        # The rest of a run stays forced, and the state changes after it: the cost of finding a run
        # grows with its length.
        self._forced_at += 1
        if self._forced is not None and len(self._forced) <= self._forced_at:
            self._forced = None
        if self.state == "start":
            self._start(token)
        elif self.state == "form":
            self._consume(self._content, token)
        elif self.state == "call":
            self._consume(self._call, token)
            if self._call is not None and self._call.is_stopped() and self._content is None:
                self._enter("free")
        elif self.state in ("thinking", "free"):
            self._tail = (*self._tail, token)[-self._longest :]
            self._follow_marks()
        if token in self._marks.eos:
            self._enter("done")

    def _follow_marks(self) -> None:
        marks = self._marks
        if self._calls is not None and _ends(self._tail, marks.call_start):
            self._enter("call")
        elif self.state == "thinking" and _ends(self._tail, marks.think_end):
            self._enter("free" if self._content is None else "start")
        elif self.state == "free" and _ends(self._tail, marks.think_start):
            self._enter("thinking")

    def _start(self, token: int) -> None:
        content = self._content
        assert content is not None, "a form without content has started"
        if not self._tail and content.validate_tokens([token]) == 1:
            self._consume(content, token)
            if token not in self._marks.space:
                self._enter("form")
            return
        self._tail = (*self._tail, token)
        if self._tail == self._marks.think_start:
            self._enter("thinking")
        elif self._tail == self._marks.call_start and self._calls is not None:
            self._enter("call")
        elif not self._next_of_marks():
            raise FormError(f"token {token} cannot begin the reply in its form")

    def _enter(self, state: State) -> None:
        self.state, self._tail = state, ()
        self._call = (
            self._calls.deep_copy() if state == "call" and self._calls is not None else None
        )

    def _consume(self, matcher: LLMatcher | None, token: int) -> None:
        assert matcher is not None, f"the state {self.state} has no matcher"
        # A stopped matcher takes what ends a reply, and nothing else.
        if not matcher.consume_token(token):
            raise FormError(f"the reply has left its form: {reason(matcher)}")

    def _fill(self, words: Words) -> None:
        if self._tail:
            words[:] = 0
        else:
            matcher = self._matcher
            matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            self._check(matcher)
        if self.state == "start":
            _open(words, self._next_of_marks())

    def _find_forced(self) -> list[int]:
        following: set[int] = set()
        if (
            self.state == "start"
            and (following := self._next_of_marks())
            and (not self._tail or len(following) > 1)
        ):
            return []
        if following:
            return list(following)
        if self.state not in ("start", "form", "call") or self._matcher.is_stopped():
            return []
        forced = self._matcher.compute_ff_tokens()
        self._check(self._matcher)
        return forced

    def _find_closing(self) -> list[int]:
        """The tokens that end the content or the call, once there are hardly any others left."""
        if (
            self.max_tokens is None
            or (left := self.max_tokens - self.seen) > self._search_at
            or (self._content is None and self._call is None)
        ):
            return []
        before = self._marks.think_end if self.state == "thinking" else ()
        if (
            self.state == "done"
            or (self.state == "thinking" and not before)
            or (self.state == "start" and self._tail)
        ):
            return []
        if self._spent > FormConfig.closing_seconds + self.seen * FormConfig.token_seconds / 2:
            # Each step of a search would cost as much as a token of this grammar does.
            self._search_at = 0
            return []
        # One token ends the reply.
        most = left - len(before) - 1
        words = np.zeros(self.num_words, np.int32)
        began = time.thread_time()
        found = closing(self._matcher, self._marks.letters, most, words)
        spare = FormConfig.closing_spare
        if found is not None and most - len(found) > spare:
            self._search_at = left - max(1, (most - len(found) - spare) // 2)
            return []
        if found is None:
            # A grammar whose ends take long to find is not searched again.
            is_slow = time.thread_time() - began > FormConfig.closing_seconds
            self._search_at = 0 if is_slow else left // 2
        else:
            self._search_at = left
        self._ends = found == [] and not before
        return [] if found is None else [*before, *found]

    def _next_of_marks(self) -> set[int]:
        """The tokens with which a mark may begin at the start, or continue there."""
        marks = [self._marks.think_start, self._marks.call_start if self._calls is not None else ()]
        done = len(self._tail)
        return {mark[done] for mark in marks if len(mark) > done and mark[:done] == self._tail}

    @property
    def _matcher(self) -> LLMatcher:
        matcher = self._content if self._call is None else self._call
        assert matcher is not None, f"the state {self.state} has no matcher"
        return matcher

    def _check(self, matcher: LLMatcher) -> None:
        # In an error state a matcher only allows the end of the reply, which would look whole.
        if matcher.is_error():
            raise FormError(f"the reply cannot be held to its form any longer: {reason(matcher)}")


def closing(
    matcher: LLMatcher, letters: Mapping[str, int], most: int, words: Words
) -> list[int] | None:
    """Tokens after which the matcher accepts the end, at most this many; None if none are found.

    Found step by step, without a way back: what is forced, a character that closes, the first
    token that is allowed. letters: the tokens of single characters. words: a mask [vocabulary / 32]
    to write into.
    """
    found: list[int] = []
    ahead, until = matcher.deep_copy(), time.thread_time() + FormConfig.closing_seconds
    while not ahead.is_accepting():
        if time.thread_time() > until:
            return None
        step = ahead.compute_ff_tokens() or _next(ahead, letters, words)
        if not step or len(found) + len(step) > most or not ahead.consume_tokens(step):
            return None
        found += step
    return found


def _next(matcher: LLMatcher, letters: Mapping[str, int], words: Words) -> list[int]:
    def allows(letter: str) -> bool:
        return letter in letters and matcher.validate_tokens([letters[letter]]) == 1

    for letter in INSIDE if allows("x") else OUTSIDE:
        if allows(letter):
            return [letters[letter]]
    matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
    allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
    return [] if matcher.is_error() else allowed[:1].tolist()


def check_cost(seconds: float, tokens: int) -> None:
    """Raises FormError if following this many tokens has cost too much processor time."""
    if seconds > FormConfig.spare_seconds + FormConfig.token_seconds * tokens:
        raise FormError(
            f"the form has cost {seconds:.1f} s for {tokens} tokens: its grammar is too ambiguous"
        )


def _ends(tail: tuple[int, ...], mark: tuple[int, ...]) -> bool:
    return bool(mark) and tail[-len(mark) :] == mark


def _open(words: Words, tokens: Iterable[int]) -> None:
    bits = words.view(np.uint32)
    for token in tokens:
        bits[token // 32] |= np.uint32(1 << token % 32)


def _close(words: Words, tokens: Iterable[int]) -> None:
    bits = words.view(np.uint32)
    for token in tokens:
        bits[token // 32] &= ~np.uint32(1 << token % 32)
