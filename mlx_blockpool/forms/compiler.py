"""Compiler: grammars as matchers, compiled once, within limits of time and memory. Used by the threads of sockets."""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TypeVar

from llguidance import LLMatcher, LLParserLimits

from ..config import FormConfig
from ..errors import FormError
from .places import Schema, place
from .vocabulary import Vocabulary
from .wanted import Wanted, json_grammar

T = TypeVar("T")

# Address space for the recursion that 64 KiB of a grammar can lead to; memory is only used as far as it goes.
STACK_BYTES = 256 << 20
# The size of stacks is that of all threads that start meanwhile.
_STARTING = threading.Lock()


@dataclass(frozen=True)
class Refusal:
    """Why a grammar was refused, and where in its schema the reason is, as ".properties.a.pattern"; None: not looked for yet."""

    why: str
    where: str | None = None


@dataclass
class Kept:
    """What became of a grammar: a matcher at its beginning, or why it was refused.

    seconds:  of processor time, which compiling it took.
    uses:     how often it was wanted.
    """

    found: LLMatcher | Refusal
    seconds: float = 0.0
    uses: int = 0


@dataclass
class Work:
    """The processor time that replies have spent in their forms: what grammars hold grows with it."""

    seconds: float = 0.0


class Compiler:
    """Compiles one grammar at a time, and keeps what it has compiled. Thread-safe: only threads that compile wait for each other.

    compiled, refused:  how many grammars it has compiled, and refused.
    hits:               how often a grammar was wanted that it had compiled or refused before.
    work:               where the forms of its grammars count their time.
    """

    def __init__(self, config: FormConfig) -> None:
        self.config = config
        self.compiled = self.refused = self.hits = 0
        self.work = Work()
        self._compiling = threading.Lock()
        self._changing = threading.Lock()
        # By the key of the vocabulary and the grammar's text; the last one was used last.
        self._kept: OrderedDict[tuple[Hashable, str], Kept] = OrderedDict()
        self._kept_bytes, self._kept_seconds = 0, 0.0
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

    def compile(self, key: Hashable, vocabulary: Vocabulary, grammar: str, place: str) -> LLMatcher:
        """A matcher of its own for a grammar in Lark. `key`: names the vocabulary. Raises FormError with `place`."""
        found = self._found(key, vocabulary, grammar)
        if isinstance(found, Refusal):
            raise FormError(found.why, place)
        return found.deep_copy()

    def content(self, key: Hashable, vocabulary: Vocabulary, wanted: Wanted) -> LLMatcher:
        """A matcher for the whole content of a reply. Raises FormError with the place of what cannot be kept."""
        grammar = wanted.grammar
        found = self._found(key, vocabulary, grammar)
        if not isinstance(found, Refusal):
            return found.deep_copy()
        if found.where is None:
            schema, tries = json.loads(wanted.text) if wanted.kind == "json" else True, self._tries(vocabulary)
            where = on_deep_stack(lambda: place(schema, tries))
            found = Refusal(found.why, where)
            self._keep(key, grammar, Kept(found))
        raise FormError(found.why, f"{wanted.place}{found.where}")

    def drop(self, key: Hashable) -> None:
        """Forget what was compiled for a vocabulary, as after a reply that has met the limits which all in its form share."""
        with self._changing:
            for kept in [kept for kept in self._kept if kept[0] == key]:
                self._forget(kept)

    def _tries(self, vocabulary: Vocabulary) -> Callable[[Schema], bool]:
        def compiles(schema: Schema) -> bool:
            with self._compiling:
                return not isinstance(self._matcher(vocabulary, json_grammar(schema)), Refusal)

        return compiles

    def _found(self, key: Hashable, vocabulary: Vocabulary, grammar: str) -> LLMatcher | Refusal:
        found = self._known(key, grammar)
        if found is None:
            with self._compiling:
                # Another thread may have compiled it meanwhile.
                found = self._known(key, grammar)
                if found is None:
                    kept = on_deep_stack(lambda: self._compiled(vocabulary, grammar))
                    self._keep(key, grammar, kept)
                    found = kept.found
        return found

    def _known(self, key: Hashable, grammar: str) -> LLMatcher | Refusal | None:
        with self._changing:
            if self.work.seconds > self.config.reply_seconds:
                self.work.seconds, self._kept_bytes, self._kept_seconds = 0.0, 0, 0.0
                self._kept.clear()
            kept = self._kept.get((key, grammar))
            if kept is None or kept.uses >= self.config.replies:
                return None
            kept.uses += 1
            self.hits += 1
            self._kept.move_to_end((key, grammar))
            return kept.found

    def _compiled(self, vocabulary: Vocabulary, grammar: str) -> Kept:
        started = time.thread_time()
        found = self._matcher(vocabulary, grammar)
        if isinstance(found, Refusal):
            self.refused += 1
        else:
            self.compiled += 1
        return Kept(found, time.thread_time() - started)

    def _matcher(self, vocabulary: Vocabulary, grammar: str) -> LLMatcher | Refusal:
        started = time.thread_time()
        matcher = LLMatcher(vocabulary.ll, LLMatcher.grammar_from_lark(grammar), log_level=0, limits=self._limits)
        if not matcher.is_error():
            # What can never be written is only found here.
            matcher.compute_bitmask()
        if matcher.is_error():
            return Refusal(reason(matcher))
        if matcher.is_stopped():
            return Refusal("it leaves nothing to write")
        if len(vocabulary.ll.decode_bytes(matcher.compute_ff_tokens())) > self.config.forced_bytes:
            return Refusal(f"it begins with more than {self.config.forced_bytes} bytes that leave no choice")
        if (spent := time.thread_time() - started) > self.config.compile_seconds:
            return Refusal(f"it took {spent:.1f} s to compile; at most {self.config.compile_seconds:g} s are spent on one")
        return matcher

    def _keep(self, key: Hashable, grammar: str, kept: Kept) -> None:
        with self._changing:
            if (key, grammar) in self._kept:
                self._forget((key, grammar))
            self._kept[key, grammar] = kept
            self._kept_bytes += len(grammar)
            self._kept_seconds += kept.seconds
            while len(self._kept) > 1 and self._is_full:
                self._forget(next(iter(self._kept)))

    @property
    def _is_full(self) -> bool:
        return (
            len(self._kept) > self.config.compiled
            or self._kept_bytes > self.config.compiled_bytes
            or self._kept_seconds > self.config.kept_seconds
        )

    def _forget(self, kept: tuple[Hashable, str]) -> None:
        self._kept_seconds -= self._kept.pop(kept).seconds
        self._kept_bytes -= len(kept[1])


def on_deep_stack(work: Callable[[], T]) -> T:
    """What `work` returns, on a thread of its own: llguidance follows rules by recursion, and an overflow ends the process."""
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
        return "oneOf is not supported where two of its schemas may match: use anyOf, or make them differ in a const"
    if first.startswith("panic:"):
        return "it is too large"
    if "Unable to determine if regex is empty" in first:
        return "a pattern or a bound of length is too large to be checked together with the others of its text"
    return first.rpartition("failed to compile JSON schema: ")[2] or "its limits are met"
