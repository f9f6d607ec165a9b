"""Prompts that are computed when a server starts, so that the first real request finds them: what --warm-up names.

Reads a file before the server listens; then asks for one prompt after the other, on a thread of its own, by the ordinary door.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import BlockpoolError
from ..arguments import generation_arguments
from ..request import PromptRequest
from ..scope import RequestScope
from . import by_content
from .service import AgentService, RefusedError, checked_name

log = logging.getLogger(__name__)

KINDS = {
    "messages": list,
    "tools": list,
    "prompt": str,
    "model": str,
    "agent": str,
    "pin": bool,
    "chat_template_kwargs": dict,
    "role_mapping": dict,
}
# Failures that are told one by one.
SHOWN = 20


@dataclass(frozen=True)
class Prompt:
    """One thing to compute: `place` says where in the file it stands. Without messages it is the text `prompt`."""

    place: str
    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[Any] | None = None
    prompt: str = ""
    model: str = "default_model"
    agent: str | None = None
    pin: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    role_mapping: dict[str, Any] | None = None


# -- the file ----------------------------------------------------------------------------------------------------------


def read_prompts(file: Path) -> list[Prompt]:
    """The prompts of a file: a JSON list, or one JSON value on each line. Raises BlockpoolError with the place of a bad one."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise BlockpoolError(f"--warm-up: cannot read {file}: {error}. Needed a text file.") from error
    if text.lstrip().startswith("["):
        return [_prompt(item, f"{file}, item {number}") for number, item in enumerate(_json(text, str(file)), 1)]
    lines = [(f"{file}, line {number}", line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    return [_prompt(_json(line, place), place) for place, line in lines]


def _json(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BlockpoolError(f"--warm-up {place}: found no JSON ({error}); needed a chat's body, or a text in quotes.") from error


def _prompt(item: Any, place: str) -> Prompt:
    if isinstance(item, str):
        item = {"prompt": item}
    if not isinstance(item, dict) or ("messages" in item) == ("prompt" in item):
        found = sorted(item) if isinstance(item, dict) else type(item).__name__
        raise BlockpoolError(f'--warm-up {place}: found {found}; needed an object with "messages" or with "prompt", or a text.')
    for name, kind in KINDS.items():
        if item.get(name) is not None and not isinstance(item[name], kind):
            raise BlockpoolError(f"--warm-up {place}: found {name} {str(item[name])[:40]!r}; needed a {kind.__name__}.")
    messages = item.get("messages") or []
    bad = [m for m in messages if not isinstance(m, dict) or not isinstance(m.get("role"), str)]
    if bad or not (messages or item.get("prompt")):
        raise BlockpoolError(
            f"--warm-up {place}: found {'a message without a role' if bad else 'nothing to compute'}; needed text."
        )
    try:
        if item.get("agent") is not None:
            checked_name(item["agent"])
    except RefusedError as error:
        raise BlockpoolError(f"--warm-up {place}, agent: {error}") from error
    return Prompt(place, **{name: item[name] for name in KINDS if item.get(name) is not None})


# -- the thread --------------------------------------------------------------------------------------------------------


class WarmUp:
    """Computes `prompts` with a server's generator. report() may be called from any thread."""

    def __init__(self, generator: Any, prompts: list[Prompt]) -> None:
        self._generator = generator
        self._prompts = prompts
        self._done = self._tokens = self._cached = 0
        self._failures: list[str] = []
        self._began = time.monotonic()
        self._seconds: float | None = None
        # Nobody waits for it: a server stops in the middle.
        self._thread = threading.Thread(target=self._run, name="warm-up", daemon=True)

    def start(self) -> None:
        """The first prompt waits for the model like any other request."""
        self._thread.start()

    def report(self) -> dict[str, Any]:
        """How far it is: prompts, tokens of them, and how many of these were known already, in memory or on disk."""
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
        for number, prompt in enumerate(self._prompts, 1):
            try:
                tokens, cached = self._compute(prompt)
            except Exception as error:
                # The top of a prompt: whatever is wrong with it, the others go on.
                self._failures = [*self._failures, f"{prompt.place}: {error}"]
                log.warning("warm-up %d of %d failed: %s: %s", number, len(self._prompts), prompt.place, error)
                if not self._generator.generation_available():
                    break
                continue
            self._done, self._tokens, self._cached = self._done + 1, self._tokens + tokens, self._cached + cached
            log.info("warm-up %d of %d: %d tokens, %d of them known", number, len(self._prompts), tokens, cached)
        self._seconds = time.monotonic() - self._began

    def _compute(self, prompt: Prompt) -> tuple[int, int]:
        """Tokens of the prompt, and how many of them were known. Raises whatever a request's client would be told."""
        scope = RequestScope(self._generator)
        scope.options.agent = prompt.agent
        scope.normalisers = scope.known_normalisers.default
        chat = bool(prompt.messages)
        request = PromptRequest("chat" if chat else "text", prompt.prompt, prompt.messages, prompt.tools, prompt.role_mapping)
        if prompt.agent is None and not chat:
            text = [{"role": "user", "content": prompt.prompt}]
            scope.options.conversation = by_content.name_of([prompt.model], text, scope.known_normalisers)
        options = self._generator.cli_args
        arguments = generation_arguments({}, options, prompt.model, 1, [], prompt.chat_template_kwargs or {})
        context, responses = scope.generate(request, arguments)
        for _ in responses:
            pass
        name = scope.options.agent or scope.options.conversation
        if prompt.pin and name is not None:
            report = AgentService(self._generator).pin(name)
            if not report["pinned_in_memory"]:
                log.warning("warm-up: %s: no more can be pinned in memory", prompt.place)
        return len(context.prompt), context.prompt_cache_count


def begin_warm_up(generator: Any, prompts: list[Prompt]) -> WarmUp | None:
    """None where there is nothing to compute."""
    if not prompts:
        return None
    warm_up = WarmUp(generator, prompts)
    warm_up.start()
    return warm_up
