"""Prompts that are computed when a server starts, so that the first real request finds them: what --warm-up names.

Reads a file before the server listens. Then a thread of its own sends one prompt after the other, as a socket's thread would.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from ...errors import BlockpoolError
from ..api.errors import StatusError
from ..bodies import InvalidRequestError
from ..request import PromptRequest
from ..scope import RequestScope
from ..validation import Body, Salt, Sampling, Text, dotted, generation_arguments, validated
from .conversation_id import conversation_id
from .service import AgentService, checked_name

log = logging.getLogger(__name__)

# Failures that the report names.
SHOWN = 20


class Prompt(Body):
    """A chat to compute or, without messages, the text `prompt`."""

    messages: list[dict[str, Any]] = Field(default_factory=list)
    tools: list[Any] | None = None
    prompt: Text = ""
    model: Text = "default_model"
    agent: Text | None = None
    pin: bool = False
    cache_salt: Salt | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    role_mapping: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check(self) -> Prompt:
        if bool(self.messages) == bool(self.prompt) or {"messages", "prompt"} <= self.model_fields_set:
            raise ValueError('give either "messages" or "prompt", and not empty')
        if not all(isinstance(message.get("role"), str) for message in self.messages):
            raise ValueError("a message has no role")
        return self


def read_prompts(file: Path) -> dict[str, Prompt]:
    """The prompts of a file, a JSON list or one JSON value on each line, by their places. Raises BlockpoolError for a bad one."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise BlockpoolError(f"--warm-up: cannot read {file}: {error}. Give a text file.") from error
    if text.lstrip().startswith("["):
        items = {f"{file}, item {number}": item for number, item in enumerate(_json(text, str(file)), 1)}
    else:
        lines = {f"{file}, line {number}": line for number, line in enumerate(text.splitlines(), 1) if line.strip()}
        items = {place: _json(line, place) for place, line in lines.items()}
    return {place: _prompt(item, place) for place, item in items.items()}


def _json(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BlockpoolError(f"--warm-up {place} is no JSON ({error}). Write a chat's body, or a text in quotes.") from error


def _prompt(item: Any, place: str) -> Prompt:
    try:
        prompt = validated(Prompt, {"prompt": item} if isinstance(item, str) else item, dotted)
        if prompt.agent is not None:
            checked_name(prompt.agent)
    except (InvalidRequestError, StatusError) as error:
        raise BlockpoolError(f"--warm-up {place}: {error}") from error
    return prompt


class WarmUp:
    """Computes `prompts`, by their places, with a server's generator. report() may be called from any thread."""

    def __init__(self, generator: Any, prompts: dict[str, Prompt]) -> None:
        self._generator = generator
        self._prompts = prompts
        self._done = self._tokens = self._cached = 0
        self._failures: list[str] = []
        self._began = time.monotonic()
        self._seconds: float | None = None
        # A daemon, because a server may stop before all prompts are computed.
        threading.Thread(target=self._run, name="warm-up", daemon=True).start()

    def report(self) -> dict[str, Any]:
        """The progress: prompts, their tokens, and how many of these were cached before, in memory or on disk."""
        return {
            "prompts": len(self._prompts),
            "done": self._done,
            "failed": len(self._failures),
            "failures": self._failures[:SHOWN],
            "tokens": self._tokens,
            "cached_tokens": self._cached,
            "seconds": round(time.monotonic() - self._began if self._seconds is None else self._seconds, 3),
            "running": self._seconds is None,
        }

    def _run(self) -> None:
        for number, (place, prompt) in enumerate(self._prompts.items(), 1):
            try:
                tokens, cached = self._compute(place, prompt)
            except Exception as error:
                # The top of a prompt: whatever is wrong with it, the others continue.
                self._failures = [*self._failures, f"{place}: {error}"]
                log.warning("warm-up %d of %d failed: %s: %s", number, len(self._prompts), place, error)
                if not self._generator.generation_available():
                    break
                continue
            self._done, self._tokens, self._cached = self._done + 1, self._tokens + tokens, self._cached + cached
            log.info("warm-up %d of %d: %d tokens, %d of them known", number, len(self._prompts), tokens, cached)
        self._seconds = time.monotonic() - self._began

    def _compute(self, place: str, prompt: Prompt) -> tuple[int, int]:
        """Tokens of the prompt, and how many of them were known. Raises what RequestScope.generate() raises."""
        scope = RequestScope(self._generator)
        scope.options.agent, scope.options.cache_salt = prompt.agent, prompt.cache_salt
        scope.normalisers = scope.generator.normalisers.default
        kind = "chat" if prompt.messages else "text"
        request = PromptRequest(kind, prompt.prompt, prompt.messages, prompt.tools, prompt.role_mapping)
        if prompt.agent is None and not prompt.messages:
            text = [{"role": "user", "content": prompt.prompt}]
            scope.options.conversation = conversation_id([prompt.model], text, scope.generator.normalisers, prompt.cache_salt)
        options = self._generator.cli_args
        arguments = generation_arguments(Sampling(model=prompt.model), options, 1, [], prompt.chat_template_kwargs)
        try:
            context, responses = scope.generate(request, arguments)
            for _ in responses:
                pass
        finally:
            scope.pixels.release()
        name = scope.options.name
        if prompt.pin and name is not None and not AgentService(scope).pin(name)["pinned_in_memory"]:
            log.warning("warm-up: %s: no more can be pinned in memory", place)
        return len(context.prompt), context.prompt_cache_count
