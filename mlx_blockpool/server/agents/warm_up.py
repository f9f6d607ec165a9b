"""Prompts that are computed when a server starts, so that the first real request finds them: what
--warm-up names.

Reads a file before the server listens. Then a background thread sends one prompt after the other,
as a socket's thread would.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from pathlib import Path
from typing import Any

from ...errors import BlockpoolError
from ..api.completions_request import parse
from ..bodies import Json
from ..conversation_id import conversation_id
from ..scope import RequestScope
from .service import AgentService

log = logging.getLogger(__name__)

# Failures that the report names.
SHOWN = 20


# In place of what a body says of its reply.
ONE_TOKEN: Json = {"max_tokens": 1, "max_completion_tokens": 1, "n": 1, "best_of": 1}


def read_prompts(file: Path) -> dict[str, Json]:
    """The bodies in a file, a JSON value on each line, by their places. Raises BlockpoolError for a
    bad one.

    A body is one of /v1/chat/completions or /v1/completions with an `agent` and a `pin`, or a text.
    """
    try:
        # Other ends of lines may stand in JSON's strings.
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as error:
        raise BlockpoolError(
            f"--warm-up: cannot read {file}: {error}. Write a chat's body as JSON on each line."
        ) from error
    places = {
        f"line {number} of {file}": line for number, line in enumerate(lines, 1) if line.strip()
    }
    return {place: _body(line, place) for place, line in places.items()}


def _body(line: str, place: str) -> Json:
    try:
        body = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BlockpoolError(
            f"--warm-up: cannot read {place}: {error}. Write a chat's body as JSON."
        ) from error
    if isinstance(body, str):
        return {"prompt": body}
    if not isinstance(body, dict):
        raise BlockpoolError(
            f"--warm-up: cannot read {place}: it is neither a chat's body nor a text."
        )
    return body


class WarmUp:
    """Computes `prompts`, by their places, with a server's generator. report() may be called
    from any thread.
    """

    def __init__(self, generator: Any, prompts: dict[str, Json]) -> None:
        self._generator = generator
        self._prompts = prompts
        self._done = self._tokens = self._cached = 0
        self._failures: list[str] = []
        self._began = time.monotonic()
        self._seconds: float | None = None
        # A daemon, because a server may stop before all prompts are computed.
        threading.Thread(target=self._run, name="warm-up", daemon=True).start()

    def report(self) -> Json:
        """The progress: prompts, their tokens, and how many of these were cached before, in
        memory or on disk.
        """
        return {
            "prompts": len(self._prompts),
            "done": self._done,
            "failed": len(self._failures),
            "failures": self._failures[:SHOWN],
            "tokens": self._tokens,
            "cached_tokens": self._cached,
            "seconds": round(
                time.monotonic() - self._began if self._seconds is None else self._seconds, 3
            ),
            "running": self._seconds is None,
        }

    def _run(self) -> None:
        for number, (place, prompt) in enumerate(self._prompts.items(), 1):
            try:
                tokens, cached = self._compute(place, prompt)
            except Exception as error:
                # The top of a prompt: whatever is wrong with it, the others continue.
                self._failures = [*self._failures, f"{place}: {error}"]
                log.warning(
                    "warm-up %d of %d failed: %s: %s", number, len(self._prompts), place, error
                )
                if not self._generator.generation_available():
                    break
                continue
            self._done += 1
            self._tokens += tokens
            self._cached += cached
            log.info(
                "warm-up %d of %d: %d tokens, %d of them cached",
                number,
                len(self._prompts),
                tokens,
                cached,
            )
        self._seconds = time.monotonic() - self._began

    def _compute(self, place: str, body: Json) -> tuple[int, int]:
        """Tokens of the prompt, and how many of them were cached.

        Raises what RequestScope.generate_choices() raises.
        """
        scope = RequestScope(self._generator)
        parsed = parse(body | ONE_TOKEN, self._generator.cli_args, "messages" in body)
        scope.parse_headers({}, body, ("agent",))
        scope.take_options({}, parsed.body)
        if scope.options.agent is None and "messages" not in body:
            # Chats get their names from what they say.
            text, known = [{"role": "user", "content": body["prompt"]}], self._generator.normalisers
            scope.options.conversation = conversation_id(
                [parsed.arguments.model.model], text, known, scope.options.cache_salt
            )
        try:
            context, *parts = [
                part for _, part in scope.generate_choices(parsed.request, parsed.arguments)
            ]
        finally:
            scope.pixels.release()
        for part in (context, *parts):
            if isinstance(part, Exception):
                raise part
        name = scope.options.name
        if (
            body.get("pin")
            and name is not None
            and not AgentService(scope).pin(name)["pinned_in_memory"]
        ):
            log.warning("warm-up: %s: no more can be pinned in memory", place)
        return len(context.prompt), context.prompt_cache_count
