"""Forms of requests: what a model's tokenizer has to do with them, and the compiled form of each request.

Compiled on the sockets' threads, one at a time; the generation thread only copies and follows what was compiled.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from llguidance import LLMatcher

from ..config import FormConfig
from ..errors import FormError
from ..forms.calls import Extent, call_grammar, loosened
from ..forms.compiler import Compiler
from ..forms.form import Form, Marks, State, check_cost
from ..forms.vocabulary import Vocabulary
from ..forms.wanted import Wanted
from .models.provider import ModelKey
from .prompts.job import TokenizerSource
from .prompts.worker import load_tokenizer_of, stamp_of
from .request import ChatRequest, PromptRequest

log = logging.getLogger(__name__)

# Models that are not loaded, whose tokens are kept for the requests that wait for them.
MOST_WAITING = 2
# Markers of channels (gpt-oss), between which nothing says where thinking ends and the content begins.
CHANNELS = frozenset({"<|channel|>", "<|message|>"})
# What a request without a chat has of one.
NO_CHAT = ChatRequest("text", "", [], None, None)


@dataclass(frozen=True)
class FormTokens:
    """What forms need of a model's tokenizer. `parser`: the module of mlx_lm.tool_parsers that reads its calls; "": none does."""

    vocabulary: Vocabulary
    marks: Marks
    parser: str

    @classmethod
    def of(cls, tokenizer: Any) -> FormTokens:
        """Of mlx-lm's tokenizer. Raises FormError for one whose tokens have no bytes."""
        vocabulary = Vocabulary.of(tokenizer)
        return cls(vocabulary, Marks.of(tokenizer, vocabulary), parser_of(tokenizer))


def parser_of(tokenizer: Any) -> str:
    """The name of the tool parser that mlx-lm has loaded with a tokenizer; "": none."""
    if tokenizer.tool_parser is None:
        return ""
    named = getattr(tokenizer, "init_kwargs", {}).get("tool_parser_type")
    return str(named or tokenizer.tool_parser.__module__.rpartition(".")[2])


def tokens_of(tokenizer: Any, name: str) -> FormTokens | None:
    """FormTokens of a loaded model's tokenizer; None, which is logged, for one that cannot keep forms."""
    began = time.perf_counter()
    try:
        found = FormTokens.of(tokenizer)
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
        # Tokens of models that are not loaded, with the stamp of the files that they were read from.
        self._waiting: OrderedDict[ModelKey, tuple[Any, FormTokens]] = OrderedDict()

    @property
    def counts(self) -> dict[str, int]:
        """Forms that were compiled, those that had been compiled before, and those that the compiler has refused."""
        return {"compiled": self._compiler.compiled, "cached": self._compiler.hits, "refused": self._compiler.refused}

    @property
    def report(self) -> dict[str, int]:
        """The figures for GET /v1/cache."""
        return {**self.counts, "kept": len(self._compiler)}

    def drop(self, key: ModelKey) -> None:
        """Forget what was compiled for a model that was loaded or unloaded: its files may be others now. Waits for nothing."""
        self._waiting.pop(key, None)
        self._compiler.drop(key)

    def tokens_before(self, key: ModelKey, source: TokenizerSource) -> FormTokens:
        """The tokens of a model that is not loaded. Raises FormError, and what mlx-lm and the files raise."""
        with self._loading:
            stamp = stamp_of(Path(source.folder))
            known = self._waiting.pop(key, None)
            found = known[1] if known is not None and known[0] == stamp else FormTokens.of(load_tokenizer_of(source))
            self._waiting[key] = stamp, found
            while len(self._waiting) > MOST_WAITING:
                self._waiting.popitem(last=False)
        return found

    def of(self, request: PromptRequest, key: ModelKey, tokens: FormTokens | None) -> Form | None:
        """The form in which the reply to a prepared request begins. Raises FormError for one that cannot be kept.

        None for a reply that must call a tool which is not strict, where the model's calls have no grammar: they are as free as
        those that it may make.
        """
        chat, wanted = request if isinstance(request, ChatRequest) else NO_CHAT, request.form
        if tokens is None:
            if wanted is None and not is_strict(chat):
                return None
            raise FormError("this model's tokenizer cannot keep a form", "tools" if wanted is None else wanted.place)
        may_call = chat.calls == "may" and bool(chat.held)
        form = partial(Form, tokens.marks, tokens.vocabulary.num_words, work=self._compiler.work)
        thinks: State | None = "thinking" if request.prepared.initial_state == "reasoning" else None
        if chat.calls == "must" or wanted is None:
            # Where a call must be made, the marker before it is part of the prompt.
            extent: Extent = "reply" if chat.calls == "must" else "block" if tokens.marks.call_start else "text"
            calls = self._calls(chat, key, tokens, extent)
            if calls is None:
                return None
            if extent == "block":
                return form(calls=calls, state=thinks or "free")
            return form(calls, state="form" if chat.calls == "must" else thinks or "start")
        content = self._content(wanted, key, tokens)
        calls = self._calls(chat, key, tokens, "reply") if may_call else None
        if chat.begin:
            consume(content, tokens.vocabulary.ll.tokenize_str(chat.begin), wanted.place)
            return form(content, calls, "form")
        return form(content, calls, thinks or "start")

    def _content(self, wanted: Wanted, key: ModelKey, tokens: FormTokens) -> LLMatcher:
        if tokens.vocabulary.added.keys() >= CHANNELS:
            raise FormError("this model writes in channels, and a form cannot tell its answer from its thinking", wanted.place)
        return self._compiler.content(key, tokens.vocabulary, wanted)

    def _calls(self, request: ChatRequest, key: ModelKey, tokens: FormTokens, extent: Extent) -> LLMatcher | None:
        """A matcher of calls; None where they stay free. Raises FormError if a strict tool cannot be kept."""
        if not tokens.parser:
            # What this model writes is text: no call can break its schema.
            return None
        spelling, failed = request.prepared.call_spelling, FormError("it has no tools", "tools")
        for tools in dict.fromkeys((request.held, loosened(request.held))):
            try:
                grammar = call_grammar(tokens.parser, tools, tokens.vocabulary, spelling, extent)
                return self._compiler.compile(key, tokens.vocabulary, grammar, "tools")
            except FormError as error:
                failed = error
        if not is_strict(request):
            log.debug("calls of tools that are not strict stay free: %s", failed)
            return None
        for tool in request.held:
            if tool.place is not None:
                # The tool that is refused by itself too is named, and the place in its schema where that is known.
                self._compiler.content(key, tokens.vocabulary, Wanted("json", tool.schema, tool.place))
                self._compiler.compile(key, tokens.vocabulary, call_grammar(tokens.parser, [tool], tokens.vocabulary), tool.place)
        raise failed


def has_form(request: PromptRequest) -> bool:
    """Return whether a reply is held to a form: that of its content, or that of its calls."""
    return request.form is not None or (isinstance(request, ChatRequest) and bool(request.held))


def is_strict(request: ChatRequest) -> bool:
    """Return whether the client wants the exact parameters of one of the tools."""
    return any(tool.place is not None for tool in request.held)


def consume(matcher: LLMatcher, tokens: list[int], place: str) -> None:
    """Have a matcher follow the client's beginning of a reply. Raises FormError where the form cannot begin so."""
    began = time.thread_time()
    # One by one: other threads run between two of them, of which each may take milliseconds.
    for count, token in enumerate(tokens):
        check_cost(time.thread_time() - began, count)
        if not matcher.try_consume_tokens([token]):
            raise FormError("the form does not allow the beginning of the reply that the request gives", place)
