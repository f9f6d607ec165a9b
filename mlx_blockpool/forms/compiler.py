"""Compiler: grammars as matchers, compiled once, within limits of time and memory.

Used by the threads of sockets.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TypeVar

from llguidance import LLMatcher, LLParserLimits

from ..config import FormConfig
from ..errors import FormError
from .vocabulary import Vocabulary

T = TypeVar("T")

# Address space for the recursion that 64 KiB of a grammar can lead to; memory is only used as far
# as it goes.
STACK_BYTES = 256 << 20
# The most memory that a second of processor time was seen to add, by compiling and by replies
# (benchmarks/LOG.md, 2026-11-23). Ordinary schemas take 0.1 to 6 MB and add less than 12 MB a
# second. A faster processor may add more.
COMPILING_BYTES = 430_000_000
REPLY_BYTES = 260_000_000
# The size of stacks is that of all threads that start meanwhile.
_STARTING = threading.Lock()


# The key of a vocabulary, and the salt of the requests that share what is compiled.
Scope = tuple[Hashable, bytes]


@dataclass
class Compiled:
    """A compiled grammar: a matcher at its beginning, or why it was refused.

    text_bytes:     of the grammar in Lark.
    seconds:        of processor time, which compiling it took.
    replies:        how many have a copy of the matcher. reply_seconds: of processor time, which
                    they have spent in their forms: what a grammar holds grows with it.
    """

    found: LLMatcher | str
    text_bytes: int
    seconds: float = 0.0
    replies: int = 0
    reply_seconds: float = 0.0

    @property
    def nbytes(self) -> int:
        """An estimate of its memory, several times too high for most: llguidance does not say
        what a grammar holds.
        """
        if isinstance(self.found, str):
            return self.text_bytes
        return self.text_bytes + int(self.seconds * COMPILING_BYTES) + self.grown

    @property
    def grown(self) -> int:
        """The part of it that replies have added: all copies of a matcher share the states of
        its lexer.
        """
        return int(self.reply_seconds * REPLY_BYTES)


class Compiler:
    """Compiles one grammar at a time, and keeps what it has compiled. Thread-safe: only threads
    that compile wait for each other.

    compiled, refused:  how many grammars it has compiled, and refused.
    hits:               how often a grammar was requested that had been compiled or refused before.
    """

    def __init__(self, config: FormConfig) -> None:
        self.config = config
        self.compiled = self.refused = self.hits = 0
        self._compiling = threading.Lock()
        self._changing = threading.Lock()
        # By the scope and the grammar's text; the last one was used last.
        self._kept: OrderedDict[tuple[Scope, str], Compiled] = OrderedDict()
        self._limits = LLParserLimits(
            max_items_in_row=config.row_items,
            initial_lexer_fuel=config.initial_fuel,
            step_lexer_fuel=config.step_fuel,
            step_max_items=config.step_items,
            max_lexer_states=config.lexer_states,
            max_grammar_size=config.grammar_symbols,
            verbose_errors=False,
        )

    def __len__(self) -> int:
        """The number of grammars that are kept."""
        return len(self._kept)

    @property
    def nbytes(self) -> int:
        """An estimate of what these grammars hold, once those beyond the limits are dropped."""
        with self._changing:
            self._evict()
            return self._bytes

    def compile(
        self,
        key: Hashable,
        vocabulary: Vocabulary,
        grammar: str,
        place: str,
        followed: list[Compiled] | None = None,
        salt: bytes = b"",
    ) -> LLMatcher:
        """A copy of the matcher of a grammar in Lark. Raises FormError with `place`.

        key:    names the vocabulary.
        followed: gets what was compiled: the form of a reply that follows the copy charges its time
                to it.
        salt:   of the request: the time that compiling takes does not reveal what was compiled
                under another salt.
        """
        scope = (key, salt)
        kept = self._known(scope, grammar)
        if kept is None:
            with self._compiling:
                # Another thread may have compiled it meanwhile.
                kept = self._known(scope, grammar)
                if kept is None:
                    kept = on_deep_stack(lambda: self._compiled(vocabulary, grammar))
                    self._keep(scope, grammar, kept)
        kept.replies += 1
        if followed is not None:
            followed.append(kept)
        if isinstance(kept.found, str):
            raise FormError(kept.found, place)
        return kept.found.deep_copy()

    def drop(self, key: Hashable) -> None:
        """Forget what was compiled for a vocabulary, as after a reply that has met the limits
        which all in its form share.
        """
        with self._changing:
            for kept in [kept for kept in self._kept if kept[0][0] == key]:
                del self._kept[kept]

    def clear(self) -> None:
        """Drop all grammars.

        Replies that run have copies, which hold a grammar's states until they end.
        """
        with self._changing:
            self._kept.clear()

    def _known(self, scope: Scope, grammar: str) -> Compiled | None:
        with self._changing:
            self._evict()
            kept = self._kept.get((scope, grammar))
            if (
                kept is None
                or kept.replies > self.config.replies
                or kept.grown > self.config.compiled_bytes // 2
            ):
                return None
            self.hits += 1
            self._kept.move_to_end((scope, grammar))
            return kept

    def _compiled(self, vocabulary: Vocabulary, grammar: str) -> Compiled:
        started = time.thread_time()
        found = self._matcher(vocabulary, grammar)
        if isinstance(found, str):
            self.refused += 1
        else:
            self.compiled += 1
        return Compiled(found, len(grammar), time.thread_time() - started)

    def _matcher(self, vocabulary: Vocabulary, grammar: str) -> LLMatcher | str:
        started = time.thread_time()
        matcher = LLMatcher(
            vocabulary.ll, LLMatcher.grammar_from_lark(grammar), log_level=0, limits=self._limits
        )
        if not matcher.is_error():
            # What can never be written is only found here.
            matcher.compute_bitmask()
        if matcher.is_error():
            return reason(matcher)
        if matcher.is_stopped():
            return "it leaves nothing to write"
        if len(vocabulary.ll.decode_bytes(matcher.compute_ff_tokens())) > self.config.forced_bytes:
            return f"it begins with more than {self.config.forced_bytes} bytes that leave no choice"
        if (spent := time.thread_time() - started) > self.config.compile_seconds:
            return (
                f"it took {spent:.1f} s to compile; at most {self.config.compile_seconds:g} s are "
                "spent on one"
            )
        return matcher

    def _keep(self, scope: Scope, grammar: str, kept: Compiled) -> None:
        with self._changing:
            self._kept.pop((scope, grammar), None)
            self._kept[scope, grammar] = kept
            self._evict()

    def _evict(self) -> None:
        held = self._bytes
        while self._kept and (
            len(self._kept) > self.config.compiled or held > self.config.compiled_bytes
        ):
            held -= self._kept.popitem(last=False)[1].nbytes

    @property
    def _bytes(self) -> int:
        return sum(kept.nbytes for kept in self._kept.values())


def on_deep_stack(work: Callable[[], T]) -> T:
    """Run `work` on a thread with a deep stack: llguidance follows rules by recursion, and an
    overflow ends the process.
    """
    found: list[T | BaseException] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, name="compiler", daemon=True)
    with _STARTING:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


def reason(matcher: LLMatcher) -> str:
    """Why a matcher is in an error state."""
    text = matcher.get_error().strip()
    first = text.partition("\n")[0]
    if first.endswith("regex parse error:"):
        return f"invalid regex: {text.rpartition('error: ')[2].splitlines()[0]}"
    if "coerce_one_of" in first:
        return (
            "oneOf is not supported where two of its schemas may match: use anyOf, or make them "
            "differ in a const"
        )
    if "NoExtension" in first:
        return (
            "no text ever completes it: one of its rules leads to itself and has no alternative "
            "that ends"
        )
    if first.startswith("panic:"):
        return "it is too large"
    if "Unable to determine if regex is empty" in first:
        return (
            "a pattern or a bound of length is too large to be checked together with the others "
            "of its text"
        )
    return first.rpartition("failed to compile JSON schema: ")[2] or "its limits are met"
