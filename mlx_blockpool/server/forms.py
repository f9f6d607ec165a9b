"""Forms of requests: what a model's tokenizer has to do with them, and the compiled form of each
request.

Compiled on the sockets' threads, one at a time; the generation thread only copies and follows what
was compiled.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from llguidance import LLMatcher

from ..config import FormConfig
from ..errors import FormError
from ..forms.calls import Extent, call_grammar, loosened
from ..forms.compiler import Compiled, Compiler
from ..forms.form import Marks, ReplyForm, State, check_cost
from ..forms.output_format import OutputFormat, ToolFormat
from ..forms.vocabulary import Vocabulary
from .prompts.job import TokenizerSource
from .prompts.worker import load_tokenizer_of, stamp_of
from .provider import ModelKey
from .request import ChatRequest, PromptRequest

log = logging.getLogger(__name__)

# Models that are not loaded, whose tokens are kept for the requests that wait for them.
MOST_WAITING = 2
# Markers of channels (gpt-oss), between which nothing says where thinking ends and the content
# begins.
CHANNELS = frozenset({"<|channel|>", "<|message|>"})
# The chat of a request without one.
NO_CHAT = ChatRequest("text", "", [], None, None)


@dataclass(frozen=True)
class FormTokens:
    """What forms need of a model's tokenizer.

    `parser`: the module of mlx_lm.tool_parsers that reads its calls; "": none does.
    """

    vocabulary: Vocabulary
    marks: Marks
    parser: str

    @classmethod
    def from_tokenizer(cls, tokenizer: Any) -> FormTokens:
        """Of mlx-lm's tokenizer. Raises FormError for one whose tokens have no bytes."""
        vocabulary = Vocabulary.from_tokenizer(tokenizer)
        return cls(vocabulary, Marks.from_tokenizer(tokenizer, vocabulary), parser_of(tokenizer))


def parser_of(tokenizer: Any) -> str:
    """The name of the tool parser that mlx-lm has loaded with a tokenizer; "": none."""
    if tokenizer.tool_parser is None:
        return ""
    named = getattr(tokenizer, "init_kwargs", {}).get("tool_parser_type")
    return str(named or tokenizer.tool_parser.__module__.rpartition(".")[2])


def tokens_of(tokenizer: Any, name: str) -> FormTokens | None:
    """FormTokens of a loaded model's tokenizer; None, which is logged, for one that cannot keep
    forms.
    """
    began = time.perf_counter()
    try:
        found = FormTokens.from_tokenizer(tokenizer)
    except FormError as error:
        log.warning("%s: replies keep no forms: %s", name, error)
        return None
    log.debug("%s: its vocabulary was read in %.2f s", name, time.perf_counter() - began)
    return found


class Forms:
    """Compiles the forms of requests. Any thread may call it."""

    def __init__(self, config: FormConfig) -> None:
        self._compiler = Compiler(config)
        self._loading = threading.Lock()
        # Tokens of models that are not loaded, with the stamp of the files that they were read
        # from.
        self._waiting: OrderedDict[ModelKey, tuple[Any, FormTokens]] = OrderedDict()
        # How many requests have needed a form; and at its last change, how many of them drop_idle()
        # found, and when.
        self._requests = 0
        self._seen = 0, 0.0

    @property
    def counts(self) -> dict[str, int]:
        """Forms that were compiled, those that had been compiled before, and those that the
        compiler has refused.
        """
        return {
            "compiled": self._compiler.compiled,
            "cached": self._compiler.hits,
            "refused": self._compiler.refused,
        }

    @property
    def report(self) -> dict[str, int]:
        """The figures for GET /v1/cache."""
        most = self._compiler.config.compiled_bytes
        held = self._compiler.nbytes
        return {**self.counts, "kept": len(self._compiler), "bytes": held, "max_bytes": most}

    def drop(self, key: ModelKey) -> None:
        """Drop what was compiled for a model that was loaded or unloaded: its files may have
        changed. Does not wait.
        """
        self._waiting.pop(key, None)
        self._compiler.drop(key)

    def drop_idle(self, now: float) -> None:
        """Drop what was compiled once no request has needed it for `FormConfig.idle_seconds`.

        `now`: of a steady clock.
        """
        if self._requests != self._seen[0]:
            self._seen = self._requests, now
        elif now - self._seen[1] >= self._compiler.config.idle_seconds:
            self._waiting.clear()
            self._compiler.clear()

    def tokens_before(self, key: ModelKey, source: TokenizerSource) -> FormTokens:
        """The tokens of a model that is not loaded.

        Raises FormError, and what mlx-lm and the files raise.
        """
        with self._loading:
            stamp = stamp_of(Path(source.folder))
            known = self._waiting.pop(key, None)
            found = (
                known[1]
                if known is not None and known[0] == stamp
                else FormTokens.from_tokenizer(load_tokenizer_of(source))
            )
            self._waiting[key] = stamp, found
            # Other threads drop entries without the lock.
            for old in list(self._waiting)[:-MOST_WAITING]:
                self._waiting.pop(old, None)
        return found

    def form_for(
        self, request: PromptRequest, key: ModelKey, tokens: FormTokens | None
    ) -> ReplyForm | None:
        """The form in which the reply to a prepared request begins. Raises FormError for one that
        cannot be kept.

        None for a reply that must call a tool which is not strict, where the model's calls have no
        grammar: they are as free as those that it may make.
        """
        self._requests += 1
        chat, wanted = request if isinstance(request, ChatRequest) else NO_CHAT, request.form
        if tokens is None:
            if wanted is None and not chat.is_strict:
                return None
            raise FormError(
                "this model's tokenizer cannot keep a form",
                "tools" if wanted is None else wanted.place,
            )
        grammars: list[Compiled] = []
        compiled = partial(
            self._compiler.compile,
            key,
            tokens.vocabulary,
            followed=grammars,
            salt=request.options.salt,
        )
        form = partial(ReplyForm, tokens.marks, tokens.vocabulary.num_words, grammars=grammars)
        thinks: State | None = "thinking" if request.prepared.initial_state == "reasoning" else None
        if chat.calls == "must" or wanted is None:
            # Where a call must be made, the marker before it is part of the prompt.
            extent: Extent = (
                "reply" if chat.calls == "must" else "block" if tokens.marks.call_start else "text"
            )
            calls = _calls(chat, tokens, extent, compiled)
            if calls is None:
                return None
            if extent == "block":
                return form(calls=calls, state=thinks or "free")
            return form(calls, state="form" if chat.calls == "must" else thinks or "start")
        if tokens.vocabulary.added.keys() >= CHANNELS:
            raise FormError(
                "this model writes in channels, and a form cannot tell its answer from its "
                "thinking",
                wanted.place,
            )
        content = compiled(wanted.grammar, wanted.place)
        may_call = chat.calls == "may" and bool(chat.held)
        calls = _calls(chat, tokens, "reply", compiled) if may_call else None
        if chat.begin:
            consume(content, tokens.vocabulary.ll.tokenize_str(chat.begin), wanted.place)
            return form(content, calls, "form")
        return form(content, calls, thinks or "start")


def _calls(
    request: ChatRequest,
    tokens: FormTokens,
    extent: Extent,
    compiled: Callable[[str, str], LLMatcher],
) -> LLMatcher | None:
    """A matcher of calls; None where they stay free.

    Raises FormError if a strict tool cannot be kept.
    """
    if not tokens.parser:
        # What this model writes is text: no call can break its schema.
        return None

    def grammar(tools: Sequence[ToolFormat]) -> str:
        spelling = request.prepared.call_spelling
        return call_grammar(tokens.parser, tools, tokens.vocabulary, spelling, extent)

    failed = FormError("it has no tools", "tools")
    for tools in dict.fromkeys((request.held, loosened(request.held))):
        try:
            return compiled(grammar(tools), "tools")
        except FormError as error:
            failed = error
    if not request.is_strict:
        log.debug("calls of tools that are not strict stay free: %s", failed)
        return None
    for tool in request.held:
        if tool.place is not None:
            # The tool that is refused by itself too is named, and the place in its schema where
            # that is known.
            compiled(OutputFormat("json", tool.schema, tool.place).grammar, tool.place)
            compiled(grammar([tool]), tool.place)
    raise failed


def consume(matcher: LLMatcher, tokens: list[int], place: str) -> None:
    """Follow the client's beginning of a reply with a matcher.

    Raises FormError where the form cannot begin so.
    """
    began = time.thread_time()
    # One by one, because each may take milliseconds and other threads run between two of them.
    for count, token in enumerate(tokens):
        check_cost(time.thread_time() - began, count)
        if not matcher.try_consume_tokens([token]):
            raise FormError(
                "the form does not allow the beginning of the reply that the request gives", place
            )
